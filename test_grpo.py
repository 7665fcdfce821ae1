# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py, and the second half of the tutorial: what must be true.

    python -m pytest -q test_grpo.py

Offline, on the CPU, in under two minutes. Most of it is tables: a name, what goes in, what must
come out, and below them the short function that checks each row. Change a line of grpo.py, and see
which of them goes red. "Slow" is a second way to compute the same thing, written to be obvious.
"""

import copy
import inspect
import io
import itertools
import json
import math
import random
import re
import runpy
import string
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import datasets
import numpy as np
import pytest
import torch
from tokenizers import models, pre_tokenizers, Tokenizer
from torch.nn.utils import parameters_to_vector
from transformers import AutoConfig, AutoModelForCausalLM, CONFIG_MAPPING, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import gallery  # noqa: E402
import grpo  # noqa: E402
import gsm8k_demo  # noqa: E402
from grpo import (average, clipped_surrogate, draw_tokens, end_token_ids, extract_boxed,
                  group_advantages, grpo_loss, GRPOConfig, k3_kl, kl_estimate, masked_mean,
                  overlong_penalty, pad_rows, rule_reward, sample_groups, score, token_logprobs,
                  train, training_steps)  # noqa: E402

torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up


def t64(values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(text):
    return t64([float(word) for word in text.split()])


def gradient(function, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def cases(names, table):
    """A test for each row of a table: the key is the name of the case, the value goes in."""
    return pytest.mark.parametrize(names, table.values(), ids=table)


def near(actual, expected, tolerance=1e-12):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# --- The worked numbers of the documents ---
# Of an article, a chapter of a book on RLHF with a script, an explainer and a course; the README
# has their titles and errors. Where one is wrong, the last column is its figure, or its code's.
def advantages(rewards, scale_rewards="group"):
    return group_advantages(numbers(rewards), scale_rewards)


def statistics(rewards):
    centered = advantages(rewards, "none")[0]
    return [numbers(rewards)[0] - centered, centered / advantages(rewards)[0], *advantages(rewards)]


def clip(row):
    row = numbers(row)
    return clipped_surrogate(row[1:].unsqueeze(0), row[:1])


def script(loss_type):
    """Ratios 1, advantages 2, answers of 4 and 7 tokens: value, gradient of a token in each."""
    mask = numbers("1 1 1 1 0 0 0  1 1 1 1 1 1 1").view(2, 7)
    slope = gradient(lambda ratios: average(2 * ratios, mask, loss_type, 7), 0 * mask + 1)
    return [slope.sum(), *slope[:, 0]]


@cases("row", {  # document, quantity: what grpo.py computes, from what, what is right, misprinted
    "article: clip at ratio 1.3": (clip, "2 1.3", "2.4"),
    "article: mean, std and advantages of five; its code has rewards.std(), over G - 1":
        (statistics, "2 3.5 1 4 2.5", "2.6 1.067708 -0.561951 0.842927 -1.498537 1.31122 -0.093659",
                                      "2.6 1.068    -0.503    0.754    -1.34     1.173   -0.084"),
    "article: one right of DeepSeek-R1's 16, the root of 15; its 64 would give that of 63":
        (advantages, "1.5" + 15 * " 0.5", "3.872983" + 15 * " -0.258199",
                                          "7.937254" + 15 * " -0.125988"),
    "article, explainer: k3 at pi_ref/pi_theta = 2, as loss at A = 0; the book's sign is wrong":
        (lambda row: grpo_loss(*numbers(row).log().view(3, 1, 1), t64([0]), t64([[1]]), beta=1)[0],
         "0.2 0.2 0.4", "0.306853", "-0.306853"),
    "book: the means of two answers, the mean of those, and that of all tokens, 33/15":
        (lambda x: [*masked_mean(x, x, dim=1), average(x, x), average(x, x, "dapo")],
         numbers("1 1 1 1 10 0 0 0 0 0  1 1 1 1 1 1 1 1 1 10").view(2, 10),
         "2.8 1.9 2.35 2.2", "2.8 1.9 2.35 2.27"),
    "script: masked_mean": (script, "grpo", "2 0.25 0.142857"),
    "script: masked_sum": (script, "dr_grpo", "1.571429 0.142857 0.142857"),
    "script: mean over tokens; advantages were left out, and a gradient of 1/7 was not zeroed":
        (script, "dapo", "2 0.181818 0.181818", "1 0.2338 0.2338"),
    "DAPO's paper, equation 13: lengths for a cap of 20 and a buffer of 8":
        (lambda row: overlong_penalty(numbers(row), 20, 8), "1 12 13 20 23", "0 0 -0.125 -1 -1"),
    "course: rewards; its apple table pays 1.0 without a box, its pattern reads the first box":
        (lambda texts: [rule_reward(text, "63") for text in texts],
         [r"9 * 7 = \boxed{63} eggs.", r"\boxed{50}.", "It is 63.", r"\boxed{50}? No: \boxed{63}"],
         "1.5 0.5 0 1.5", "1.5 0.5 1 0.5"),
    "course: apples minus their mean":
        (lambda row: advantages(row, "none"), "1.5 1 0 0", "0.875 0.375 -0.625 -0.625"),
    "course: early": (advantages, "0.5 1.5 0.5 1.5 0.5 1.5 0.5 0.5",
        "-0.774597 1.290994 -0.774597 1.290994 -0.774597 1.290994 -0.774597 -0.774597",
        "-1.2      0.1       0.8      0.1       1.5      0.1      -0.3       0.6"),
    "course: middle": (advantages, "1.5 1.5 1.5 0.5 1.5 1.5 1.5 1.5",
        "0.377964 0.377964 0.377964 -2.645751 0.377964 0.377964 0.377964 0.377964",
        "0        0        0        -0.5      0        0        0        0"),
    "course: late": (advantages, 8 * "1.5 ", 8 * "0 "),
    "course: mean, std and advantages of eight": (statistics, "1.5 0 1.5 0 1 1.5 0.5 1.5",
        "0.9375 0.634306 0.886796 -1.477994 0.886796 -1.477994 0.098533 0.886796 -0.68973 0.886796",
        "0.875  0.637    0.82     -1.23     0.82     -1.23     0.12     0.82     -0.53    0.82"),
    "course: good": (clip, "1 0.5 0.8 1 1.2 1.5", "0.5 0.8 1 1.2 1.2"),
    "course: bad": (clip, "-1 0.5 0.8 1 1.2 1.5", "-0.8 -0.8 -1 -1.2 -1.5"),
})
def test_the_documents_numbers(row):
    compute, given, right, *misprint = row
    computed = torch.as_tensor(compute(given)).flatten()
    near(computed, numbers(right), 1e-6)
    for printed in misprint:
        assert (computed - numbers(printed)).abs().max() > 0.005, "the table: this may be rounding"


# --- The reward ---
@pytest.mark.parametrize("text, contents", {  # contents of the complete box that opens last
    r"$$\boxed{63}$$": "63", r"\boxed{{{a}}{b}}": "{{a}}{b}", r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{a \} b}": r"a \} b", r"\boxed{1} \boxed{2}": "2", r"\boxed{\boxed{5}}": "5",
    r"\boxed{1} \boxed{\frac{2}{3}": "1", r"\boxed{x = \boxed{2}": "2", r"{\boxed{5}": "5",
    r"\boxed{1 + \boxed{2} + 3}": "2", r"} } \boxed{5}": "5", "\\boxed{\ud800}": "\ud800",
    # These earn nothing: blank boxes, and none.
    r"\boxed{}": "", "\\boxed{ \n\t }": " \n\t ", r"\boxed{63} \boxed{}": "",
    r"\boxed{\boxed{}}": "", "": None, "boxed{63}": None, r"\boxed": None, r"\boxed{63": None,
    r"\boxed\{63\}": None, r"\boxed{63\}": None}.items())
def test_boxes(text, contents):
    assert extract_boxed(text) == contents
    if contents is None or not contents.strip():
        assert rule_reward(text, "") == 0.0  # nor does an empty box equal an empty answer


@cases("rows", {  # why: box and answer; box and answer
    "the same number": "63.0 is 63; -0 is 0; .5 is 0.5; 5e3 is 5000; 5e-1 is 0.5; 63.009 is 63",
    "padded": "007 is 7; +5 is 5;  63  is 63; 63 is  63\n;  x+1  is x+1; x+1 is  x+1\n",
    "another number": "50 is not 63; 630 is not 63; -63 is not 63; 5 is not -5; 62.98 is not 63",
    "0.01": "62.991 is 63; 5.01 is not 5; 4.99 is not 5; 3,000,000.01 is not 3000000",
    "thousands": "-1,000 is -1000; 1000 is 1,000; 1{,}234{,}567 is 1234567; 1,234.5 is 1234.5",
    "wrong commas": "8,000 is not 000; 8,000 is not 8; 12,34 is not 1234; 1234,567 is not 1234567",
    "units": r"\$18 is $18.00; $63$ is 63; -$5 is -5; $-5 is -5; 12.5\% is 12.5; 50 % is 50",
    "a sentence ends": "63. is 63; 1,000. is 1000;  $18.  is 18; 50%.  is 50",
    "equal as strings": r"\frac12 is \frac12; Monday is Monday; , is ,; nan is nan",
    "no number": ", is not 0; . is not 0; - is not 0; $ is not 0; e5 is not 0; 63 is not ; 63 is "
        "not ,; 6 3 is not 63; 63 eggs is not 63; 6.3.0 is not 6.3; --5 is not 5; 60+3 is not 63; "
        "63\x00 is not 63; \\frac12 is not 0.5; 1_000 is not 1000; 0x3f is not 63; nan is not NaN",
    "too large for a float": "1e999 is not 2e999; inf is not 1e999; -1e999 is not -inf; "
        f"1{'0' * 308} is not -1{'0' * 308}",
    "other digits": "\u0666\u0663 is not 63; 63 is not \uff16\uff13; 6\u00b3 is not 63",
})
def test_boxes_are_read_as_a_person_would(rows):
    for case in rows.split("; "):
        box, answer = re.split(" is not | is ", case)
        reward = rule_reward(f"The answer is \\boxed{{{box}}}.", answer)
        assert reward == (0.5 if " is not " in case else 1.5), case


@pytest.mark.parametrize(
    "piece", r"\boxed{ \boxed{} \boxed { } \ \{ 9 9, ,000 {,} $ - . 1e9".split() + [". ", *" \n"])
def test_hostile_text_takes_linear_time(piece):
    # A linear reader needs tenths of a second. Small sizes first: a quadratic one shall not hang.
    for size in (10_000, 30_000, 100_000, 300_000):
        body = piece * (size // len(piece))
        started = time.process_time()
        # A digit on either side keeps strip() away from the middle. An x at the end makes a
        # pattern that nearly matched try again from every place.
        for text in (f"1{body}1", f"1{body}x"):
            rule_reward(f"\\boxed{{{text}}}", "7")
            rule_reward(r"\boxed{7}", text)
        assert time.process_time() - started < 3.0


# --- Advantages ---
@pytest.mark.parametrize("scale, rewards, right", [
    ("group", "1.5 1.5 0.5 0.5", "1 1 -1 -1"), ("none", "0 1 1 2", "-1 0 0 1"),
    ("rloo", "0 1 1 2", "-1.33333333 0 0 1.33333333"),  # 2 - 2/3, the mean of the others
    ("batch", "0 1 1 2", "-1.41421356 0 0 1.41421356"),  # over the std of 0 1 1 2 and 2 2 2 2
    ("group", "0 1e-9", "-1 1"), ("group", "1 1.0000026", "-1 1"),  # not quite equal
    # Equal, or to within a millionth, which may be rounding: exactly 0.
    ("group", "1 1.0000004", "0 0"), ("group", "100000001 100000000 100000000", "0 0 0"),
    ("rloo", "0.30000000000000004 0.3 0.3", "0 0 0"),  # 0.1 + 0.2, and 0.3
    ("group", "0 0 0", "0 0 0"), ("batch", 7 * "-0.7 ", 7 * "0 "),
])
def test_advantages(scale, rewards, right):
    rewards, right = numbers(rewards), numbers(right)
    groups = torch.stack([rewards, rewards.max().expand_as(rewards)])  # the second is all equal
    wanted = torch.stack([right, 0 * right])
    near(group_advantages(groups, scale), wanted, 1e-6 * right.abs().max())  # zeros are exact


# --- k3 and the masked mean: values and gradients ---
def test_k3_far_apart_nearly_the_same_and_in_the_mean():
    x = numbers("1e-6 0.5 99 -30")  # log(pi_theta / pi_ref)
    near(k3_kl(x, 0 * x) / numbers("5e-13 0.10653066 98 1.0686475e13"), 0 * x + 1, 1e-6)
    slopes = gradient(lambda x: k3_kl(x, 0 * x).sum(), x)
    near(slopes / numbers("1e-6 0.39346934 1 -1.0686475e13"), 0 * x + 1, 1e-6)
    assert k3_kl(*torch.tensor([[3e38, -3e38], [-3e38, 3e38]])).isfinite().all()  # in float32
    near(POLICY @ k3_kl(POLICY.log(), REFERENCE.log()), exact_kl(POLICY, REFERENCE))  # unbiased


def test_masked_mean():
    values = numbers("1 3 nan inf nan 7 8 nan -inf").view(3, 3)
    mask = numbers("1 1 0 0 0 0 1 0 0").view(3, 3)
    near([masked_mean(values, mask), average(values, mask)], [4, 10 / 3])  # of 2, 0, 8
    near(masked_mean(mask, mask[0]), 1 / 2)  # one mask for all rows
    near(gradient(lambda x: masked_mean(x, mask), values), mask / 3)
    # Only what is masked may disappear: to hide more would hide a broken model.
    assert masked_mean(values, torch.ones(3, 3)).isnan()


# --- The loss, against one slow loss ---
def slow_loss(row, logprobs, old, ref, advantages, mask):  # row: a variant, and a loss_type
    config = GRPOConfig(**VARIANTS[row[0]])
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    losses = torch.zeros_like(old)
    for i, t in mask.nonzero().tolist():
        A = advantages[i]
        ratios = (logprobs - old)[i, mask[i]].exp()
        ratio = ratios[t]
        if config.importance_sampling_level == "sequence":
            ratio = ratios.prod() ** (1 / len(ratios))
        bound = 1 + high if A > 0 else 1 - config.epsilon
        x = logprobs[i, t] - ref[i, t]  # log(pi_theta / pi_ref)
        kl = {"low_var_kl": (-x).exp() + x - 1, "kl": x, "abs": x.abs(), "mse": x * x / 2}
        weight = config.beta * ratio if config.use_bias_correction_kl else config.beta
        losses[i, t] = weight * kl[config.kl_penalty_type] - min(A * ratio, A * bound)
    return {"grpo": (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean(),  # 0 if it is empty
            "dapo": losses.sum() / mask.sum(), "dr_grpo": losses.sum() / (len(mask) * 7)}[row[1]]


def batch():
    """Six answers of up to five tokens: log-probs of three policies, advantages, mask."""
    noise = (t64(range(120)) ** 2).sin().view(4, 6, 5)  # without a pattern, but no chance either
    logprobs, old, ref = 0.4 * noise[:3] - 2
    # One answer is empty, as happens; the article's code divides 0 by 0 there.
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [4], [2]])
    return logprobs, old, ref, noise[3, :, 0], mask


ROWS, *_, MASK = batch()
VARIANTS = {  # the settings that are not the defaults
    "the papers": {}, "no KL": {"beta": 0}, "clip-higher": {"epsilon_high": 0.28},
    "much k1": {"epsilon": 0.1, "epsilon_high": 0, "beta": 0.5, "kl_penalty_type": "kl"},
    "no lower bound": {"epsilon": 1.5, "epsilon_high": 0.1, "kl_penalty_type": "abs"},
    "TRL": {"beta": 0.3, "use_bias_correction_kl": True},
    "corrected k2": {"kl_penalty_type": "mse", "use_bias_correction_kl": True},
    "GSPO": {"beta": 0.3, "epsilon": 0.1, "importance_sampling_level": "sequence"},
    "corrected GSPO": {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}}


def run_loss(row, logprobs, old, ref, *others):
    ref = None if row[0] == "no KL" else ref  # which does not need it
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = grpo_loss(leaf, old, ref, *others, **VARIANTS[row[0]], loss_type=row[1],
                              max_completion_length=7)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@pytest.mark.parametrize(
    "row", list(itertools.product(VARIANTS, ["grpo", "dapo", "dr_grpo"])), ids=" ".join)
def test_the_loss_is_the_slow_one_and_dirt_stays_where_it_is(row):
    leaf, *others = batch()
    right = slow_loss(row, leaf.requires_grad_(), *others)
    right_slope = torch.autograd.grad(right, leaf)[0]
    # To mask the result would keep the loss clean, and leave NaN in the gradient.
    for dirt in (1.0, math.nan, math.inf):
        dirty = [x.masked_fill(~MASK, dirt) for x in batch()[:3]]
        dirty.append(others[2].masked_fill(~MASK.any(dim=1), dirt))
        loss, slope, metrics = run_loss(row, *dirty, MASK.float())
        near(loss, right.detach())
        near(slope, right_slope)
        assert t64(list(metrics.values())).isfinite().all()
    tensors = [tensor.float() for tensor in batch()]
    tensors[1][0, 1] -= 1000  # a wild token: e^1000 likelier than under pi_old
    before = str(tensors)
    loss, slope, metrics = run_loss(row, *tensors)
    assert str(tensors) == before  # arguments are left alone
    assert t64([loss, *metrics.values()]).isfinite().all() and slope.isfinite().all()
    near(slope[1:], right_slope[1:], 1e-6)  # no other answer is harmed
    assert set(run_loss(row, *tensors[:4], 0 * MASK)[2].values()) == {0.0}  # no token at all


@pytest.mark.parametrize("i, shape", list(enumerate([[5], [1, 5], [6, 1], [6, 1], [5]])))
def test_wrong_shapes_are_refused(i, shape):
    tensors = list(batch())
    tensors[i] = torch.zeros(shape)
    with pytest.raises(ValueError, match="advantages"):
        grpo_loss(*tensors)


@pytest.mark.parametrize("said, call", {  # what is said: a call
    "2 or more": lambda: advantages("1"), "nan": lambda: advantages("1 nan"),
    "inf": lambda: advantages("1 inf"), "'std'.*rloo": lambda: advantages("1 2", "std"),
    "'mean'.*dapo": lambda: average(ROWS, MASK, "mean"),
    "max_completion_length": lambda: average(ROWS, MASK, "dr_grpo"),
    "ref_logprobs are needed": lambda: grpo_loss(ROWS, ROWS, None, ROWS[:, 0], MASK)}.items())
def test_impossible_arguments_are_refused(said, call):
    with pytest.raises(ValueError, match=said):
        call()


# --- The apples that grpo.py prints ---
PRINTED = """
rewards       tensor([1.5000, 1.5000, 0.5000, 0.5000])
advantages    tensor([ 1.,  1., -1., -1.])
surrogate     tensor([ 1.2000,  1.0000,  0.5000, -1.5000, -0.8000, -1.0000])
k3            tensor([0.0721, 0.0000, 0.3069, 0.0721, 0.3069, 0.0000])
loss          tensor(0.2057)
its gradient  tensor([ 0.0017, -0.1250, -0.1350,  0.3783, -0.0050,  0.1250])
"""


def test_the_apples(capsys):
    apples = runpy.run_path(grpo.__file__, run_name="__main__")
    torch.set_printoptions(profile="default")
    assert capsys.readouterr().out == PRINTED.lstrip()
    given = [apples[name] for name in "logprobs old_logprobs old_logprobs advantages mask".split()]
    for loss_type, corrected, loss in [
            ("dapo", False, 0.1051), ("dr_grpo", False, 0.0394), ("dapo", True, 0.1035)]:
        _, metrics = grpo_loss(*given, loss_type=loss_type, max_completion_length=4,
                               use_bias_correction_kl=corrected)
        right = {"loss": loss, "kl": 0.7580 / 6, "clip_fraction": 2 / 6, "ratio_max": 1.5}
        assert metrics == pytest.approx(right, abs=5e-5)


# --- In expectation: exact sums over a vocabulary of five, without sampling ---
# The policies are far apart: close together the two directions of the KL are nearly the same.
POLICY, OLD, REFERENCE = numbers(
    "0.55 0.25 0.1 0.05 0.05  0.1 0.2 0.4 0.2 0.1  0.03 0.07 0.15 0.3 0.45").view(3, 5)


def exact_kl(p, q):
    return (p * (p / q).log()).sum()


@cases("drawn_from, settings, kl", {  # pi_old; what is descended, beside minus the mean reward
    "k1": (POLICY, {"kl_penalty_type": "kl"}, lambda p: 0),
    "k2": (POLICY, {"kl_penalty_type": "mse"}, lambda p: exact_kl(p, REFERENCE)),
    "k3": (POLICY, {}, lambda p: exact_kl(REFERENCE, p)),
    "k3 x ratio": (OLD, {"use_bias_correction_kl": True}, lambda p: exact_kl(p, REFERENCE))})
def test_what_the_loss_descends_in_the_mean(drawn_from, settings, kl):
    """20 answers of one word, each as often as it is drawn from pi_old. Nothing is clipped."""
    rewards = numbers("0 2 1 5 3")  # of the five words
    words = torch.arange(5).repeat_interleave((20 * drawn_from).round().long())
    def loss(logits):
        logprobs = logits.log_softmax(0)
        # pi_old and pi_ref are constants, even if the same graph made them.
        policies = [POLICY, drawn_from, REFERENCE]
        tensors = [(logprobs + (other / POLICY).log())[words].unsqueeze(1) for other in policies]
        advantages = (rewards - 7)[words]  # a baseline makes no difference; logprobs < 0: all
        return grpo_loss(*tensors, advantages, tensors[0] < 0, beta=1, epsilon=99, **settings)[0]
    right = gradient(lambda x: kl(x.softmax(0)) - x.softmax(0) @ rewards, POLICY.log())
    near(gradient(loss, POLICY.log()), right)


# --- Parity with TRL 1.16: its figures, and where it is installed its own code ---
def trl_loss(row, logprobs, old, ref, advantages, mask):
    """GRPOTrainer._compute_loss on a mock trainer: what is not set here is a mock, and true."""
    trl = pytest.importorskip("trl")  # without it its figures have to do
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the parity is with TRL 1.16, and this is {trl.__version__}")
    config = grpo.GRPOConfig(**VARIANTS[row[0]], loss_type=row[1], max_completion_length=7)
    config.delta = None
    trainer = MagicMock(  # the settings have TRL's names
        **vars(config), args=config, epsilon_low=config.epsilon, off_policy_mask_threshold=None,
        top_entropy_quantile=1.0, aux_loss_enabled=False, use_vllm=False,
        _entropy_bonus_enabled=False)
    trainer.epsilon_high = config.epsilon_high or config.epsilon
    trainer.model.training = False
    trainer.accelerator = MagicMock(num_processes=1, gather=torch.clone)
    trainer._get_per_token_logps_and_entropies.return_value = (logprobs, 0 * old, None)
    ids = mask.long()
    return trl.GRPOTrainer._compute_loss(trainer, None, dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=ids,
        advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref,
        num_items_in_batch=mask.sum()))


@pytest.mark.parametrize("row, figures", {  # the loss; sum and length of its gradient
    ("the papers", "grpo"): "0.2256250593892 0.115624951016 0.1918599797598",
    ("clip-higher", "dr_grpo"): "0.1038527163405 0.07242620397321 0.07435582204311",
    ("TRL", "dapo"): "0.3110928775499 0.1974924852299 0.2083251191769",
    ("GSPO", "grpo"): "0.2235127094673 -0.122518523693 0.1737799087193"}.items())
def test_loss_and_gradient_are_trls(row, figures):
    logprobs, *others = batch()
    loss, slope, _ = run_loss(row, logprobs, *others)
    near([loss, slope.sum(), slope.norm()], numbers(figures))
    theirs = trl_loss(row, logprobs.requires_grad_(), *others)
    near(loss, theirs.detach())
    near(slope, torch.autograd.grad(theirs, logprobs)[0])


# --- Pasted under its imports, this much of grpo.py works in another project ---
@pytest.mark.parametrize("imports, names, arguments", [  # the last of the functions is called
    ("re", "extract_boxed read_number rule_reward", [r"\boxed{63}", "63.0"]),
    ("torch", "group_advantages", [MASK.long()]),
    ("torch", "masked_mean average clipped_surrogate k3_kl kl_estimate grpo_loss", batch()),
    ("torch.nn.functional as F", "read log_probability token_logprobs",
     [lambda **_: SimpleNamespace(logits=torch.zeros(6, 3, 4)), MASK.long(), MASK.long(), 2])])
def test_pasted_into_another_project(imports, names, arguments):
    project = {}
    exec(f"import {imports}", project)
    for name in names.split():
        exec(inspect.getsource(getattr(grpo, name)), project)
    assert str(project[name](*arguments)) == str(getattr(grpo, name)(*arguments))


# --- One tiny world: a tokenizer, a model of any family, a handful of questions, a way to train ---
NAN = math.nan
PAD, END, EOS = 0, 1, 2  # as in Qwen there are two end tokens, and the config knows only one
VOCABULARY = 48  # more than the tokenizer's words, as in Qwen


def tiny_tokenizer(padding="<pad>"):
    special = "<pad> <end> <eos> <unk> user assistant".split()
    ids = {word: i for i, word in enumerate([*special, *string.ascii_lowercase, *string.digits])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = ("{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
                "{% if add_generation_prompt %}assistant {% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=padding, eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<end>", "<pad>"], chat_template=template)


TOKENIZER = tiny_tokenizer()
PLAIN = dict(  # settings of a family that has none of its own
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=EOS,
    bos_token_id=None, pad_token_id=PAD, tie_word_embeddings=False, initializer_range=0.4)


def tiny_model(family="qwen2", **settings):
    """Random, with large weights: with the usual small ones all tokens are about equally likely."""
    plain = {} if family == "gemma3" else PLAIN  # it has them in a config within its config
    config = AutoConfig.for_model(family, **plain | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


QUESTIONS = [{"prompt": text} for text in ("a", "b c", "c d e", "d", "e f", "f g a", "g")]
PROMPTS = ["a b c d e f g", "h", "i j k"]
TINY = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
            learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1)


def noisy_reward(prompts, completions, **columns):
    """Draws from two of the generators that a reward may draw from."""
    return [text.count("a") + random.gauss(0, 1) + torch.rand(()).item() for text in completions]


def steps_of(model=None, reward=noisy_reward, data=QUESTIONS, folder=None, resume=False, **more):
    config = GRPOConfig(**TINY | more)
    return training_steps(model or tiny_model(), TOKENIZER, data, reward, config, folder, resume)


def untimed(metrics):  # an absurd time stays, and no run is like another
    return {k: x for k, x in metrics.items() if "_second" not in k or not 0 <= x < 99}


def go(stop=None, **run):
    """The metrics of a tiny training, without its times; with `stop`, of that many steps."""
    return [untimed(metrics) for metrics, _ in itertools.islice(steps_of(**run), stop)]


def weights_of(model):
    return parameters_to_vector(model.parameters()).detach()


# --- The sampler: token by token ---
def sampled(model, prompts=PROMPTS, G=5, cap=8, temperature=1.0, tokenizer=TOKENIZER, seed=0):
    torch.manual_seed(seed)
    groups = sample_groups(
        model, tokenizer, prompts, G, max_completion_length=cap, temperature=temperature)
    assert [len(group) for group in groups] == [G] * len(prompts)
    return sum(groups, [])


def slow_distributions(model, answer, temperature=1.0):
    """log pi of all tokens at each place of one answer: read alone, without padding or cache."""
    ids = torch.tensor([answer.prompt_ids + answer.ids])
    logits = model(ids, use_cache=False).logits[0]  # place i says what comes at place i + 1
    logits = logits[len(answer.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(dim=-1)


def slow_logprobs(model, answer, temperature=1.0):
    return slow_distributions(model, answer, temperature)[range(len(answer.ids)), answer.ids]


# Padding of its own, none, or one of the end tokens. GPT-2 has learned positions.
@pytest.mark.parametrize("family, padding, temperature", [
    ("qwen2", "<pad>", 1.0), ("qwen2", None, 0.7), ("qwen2", "<end>", 1.3), ("gpt2", "<eos>", 1.0)])
def test_answers_and_their_logprobs(family, padding, temperature):
    """Wrong masks, positions and temperatures show here, and a cache in the wrong rows."""
    model = tiny_model(family, initializer_range=0.25)
    tokenizer = tiny_tokenizer(padding)
    answers = sampled(model, G=60, tokenizer=tokenizer, temperature=temperature)
    for i, answer in enumerate(answers):
        *others, last = answer.ids
        assert answer.prompt_ids == tokenizer(PROMPTS[i // 60])["input_ids"]
        assert END not in others and EOS not in others
        assert answer.truncated == (last not in (END, EOS))
        assert len(answer.ids) == 8 or not answer.truncated
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)
        near(answer.sampler_logprobs, slow_logprobs(model, answer, temperature), 2e-5)
    # Both end tokens were drawn, one of them as the last that was allowed, and some answers cut.
    assert {END, EOS} < {answer.ids[-1] for answer in answers}
    assert {True, False} == {answer.truncated for answer in answers if len(answer.ids) == 8}
    for answer in sampled(model, tokenizer=tokenizer, temperature=0):  # always the likeliest
        whole = slow_distributions(model, answer)
        assert answer.ids == whole.argmax(dim=1).tolist()
        near(answer.sampler_logprobs, whole.amax(dim=1), 2e-5)


def test_tokens_are_drawn_from_the_softmax_and_from_nothing_else():
    """And every end token is known: from two configs and the tokenizer."""
    model = tiny_model(initializer_range=0.2, eos_token_id=PAD)
    # What a checkpoint brings along, and `generate` obeys. Qwen2.5 says 20, 0.8 and 1.1.
    vars(model.generation_config).update(eos_token_id=END, top_k=5, top_p=.8, repetition_penalty=2)
    answers = sampled(model, ["a"], 20_000, cap=1, temperature=0.7)
    counts = torch.tensor([answer.ids[0] for answer in answers]).bincount(minlength=VOCABULARY)
    wanted = 20_000 * slow_distributions(model, answers[0], 0.7)[0].exp()
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()
    assert {PAD, END, EOS} == {answer.ids[0] for answer in answers if not answer.truncated}


def test_a_point_on_a_border_belongs_to_the_later_token(monkeypatch):
    """Probabilities 0, 1/4, 0, 1/4, 1/2, 0: a token of probability 0 is never drawn."""
    drawn = {0.0: 1, 0.24: 1, 0.25: 3, 0.5: 4, 1 - 2**-53: 4}
    points = t64([[point] for point in drawn])
    monkeypatch.setattr(torch, "rand_like", lambda _: points)
    logits = torch.tensor([0, 1, 0, 1, 2, 0]).log().expand(len(drawn), -1)
    assert draw_tokens(logits, 1.0).tolist() == list(drawn.values())
    assert draw_tokens(logits * NAN, 1.0).max() < 6  # still a token
    # One likely token and 149,999 rare ones, whose borders would be a few numbers in float32.
    points = t64([[1 - 1e-8 * k] for k in range(5)])  # the patch hands out these now
    assert len(draw_tokens(23 * torch.eye(1, 150_000).expand(5, -1), 1.0).unique()) == 5


def test_the_seed_decides_and_chats_go_through_the_template():
    first = [{"role": "user", "content": "a"}]
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, *first]
    written = ["user a <end> assistant", "user c <end> assistant d <end> user a <end> assistant"]
    said = []
    for prompts, seed in (([first, talk], 0), (written, 0), (written, 1)):
        answers = sampled(tiny_model(), prompts, seed=seed)
        said.append([answer.prompt_ids + answer.ids for answer in answers])
    assert said[0] == said[1] != said[2]


# --- The scorer: values and gradients of every family, against the slow way ---
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOW = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(query_pre_attn_scalar=8, **WINDOW)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
              linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
FAMILIES = {  # what each has beside the settings that all have
    "qwen2": {}, "qwen3": {}, "llama": {}, "phi3": {}, "mistral": {"sliding_window": 3},
    "gpt2": {}, "bloom": {"max_position_embeddings": None}, "mpt": {},  # two have no positions
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, window_size=3),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW), "qwen3_moe": EXPERTS,
    "gemma2": dict(final_logit_softcapping=2.0, **GEMMA), "gemma3_text": GEMMA,  # capped logits
    "gemma3": dict(text_config=PLAIN | GEMMA, vision_config=VISION, mm_tokens_per_image=4),
    "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.06},  # scaled logits
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # from here on, layers with a state
    "qwen3_next": dict(shared_expert_intermediate_size=16, **EXPERTS, **LINEAR),
    "jamba": dict(num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False,
                  attn_layer_period=2, attn_layer_offset=1), "qwen3_5_text": LINEAR}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_scored_as_the_slow_way_does(family):
    """And are sampled and trained: the first loss is 0, its gradient not, and all ratios are 1."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {family}")
    model = tiny_model(family, **FAMILIES[family])
    # Prompts and answers of many lengths, in no order; most share their prompt with others.
    prompts = ["a b c", "d e f g h i j", "k l m n o p q", "r", "s t u v w"]
    answers = sampled(tiny_model(initializer_range=0.2), prompts, 4)
    answers = [answers[i] for i in (18, 3, 0, 9, 16, 1, 2, 12, 7)]
    before, prompt_mask = pad_rows([answer.prompt_ids for answer in answers], "left", "cpu")
    after, mask = pad_rows([answer.ids for answer in answers], "right", "cpu")
    ids, both = torch.cat([before, after], dim=1), torch.cat([prompt_mask, mask], dim=1)
    def gradient_of(logprobs):
        value = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum()  # each has its own weight
        parts = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
        return parameters_to_vector(parts)
    slow = torch.cat([slow_logprobs(model, answer, 0.7) for answer in answers])
    slow_gradient = gradient_of(slow)
    scale = slow_gradient.abs().max()
    plain = token_logprobs(model, ids, both, 8, 0.7)
    for found, real in (score(model, answers, 0.7), (plain, mask)):
        logprobs = found[real.bool()]
        near(logprobs, slow, 3e-5)
        near(gradient_of(logprobs) / scale, slow_gradient / scale, 3e-5)
    metrics = go(model=model, steps=1, warmup_steps=0)[0]
    for figure in ("loss", "kl", "clip_fraction", "skipped_updates", "sampler_gap"):
        assert metrics[figure] == pytest.approx(0, abs=1e-5)
    assert metrics["ratio_max"] == 1 and metrics["grad_norm"] > 0.01


def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    """In bfloat16 the softmax of the same logits would be off by some hundredths."""
    model = tiny_model().bfloat16()
    for answer in sampled(model, ["a b c"], cap=1):
        near(score(model, [answer], 1.0)[0][0], slow_logprobs(model, answer), 1e-5)


def test_each_prompt_is_read_once_and_what_has_ended_no_more():
    model = tiny_model(initializer_range=0.2)
    rows = []
    model.lm_head.register_forward_hook(lambda _, __, out: rows.append(out[..., 0].numel()))
    answers = sampled(model, cap=40)
    lengths = [len(answer.ids) for answer in answers]
    assert rows[:2] == [3, 15] and sum(rows[1:]) <= sum(lengths) + 2 * 15
    rows.clear()
    score(model, answers, 1.0)
    assert rows == [3, 15 * (max(lengths) - 1)]


# --- The step, against one slow step ---
def uneven_reward(prompts, completion_ids, **columns):
    """Made of an answer's ids, to see rewards get mixed up. For a, d and g all earn the same."""
    return [0.3 if prompt in ("a", "d", "g") else (7 * sum(ids) % 11) / 10
            for prompt, ids in zip(prompts, completion_ids)]


def slow_step(model, reference, optimizer, groups, config):
    """One answer at a time (advantages and KL are tested above). Returns what the log must say."""
    answers = sum(groups, [])
    prompts = [answer.example["prompt"] for answer in answers]
    assert [answer.prompt_ids for answer in answers] == TOKENIZER(prompts)["input_ids"]
    rewards = t64(uneven_reward(prompts, [answer.ids for answer in answers])).view(len(groups), -1)
    advantages = group_advantages(rewards, config.scale_rewards)
    near([answer.advantage for answer in answers], advantages.flatten())
    answers.sort(key=lambda answer: -len(answer.ids))  # as update() has them: the same shuffle
    old = [slow_logprobs(model, answer, config.temperature).detach() for answer in answers]
    ref = [slow_logprobs(reference, answer, config.temperature).detach() for answer in answers]
    drawn = torch.cat([answer.sampler_logprobs for answer in answers])
    log = {
        "reward_mean": rewards.mean(), "reward_std": rewards.std(correction=0),
        "zero_variance_fraction": (rewards == rewards[:, :1]).all(dim=1).double().mean(),
        "entropy": -drawn.mean(), "completion_length": len(drawn) / len(answers),
        "truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
        "loss": 0, "grad_norm": 0, "ratio_max": 0, "kl": 0, "clip_fraction": 0, "sampler_gap": 0}
    updates, learned = config.num_iterations * config.num_mini_batches, 0  # learned: tokens
    for _ in range(config.num_iterations):
        for places in torch.randperm(len(answers)).tensor_split(config.num_mini_batches):
            kept = [i for i in places
                    if not (answers[i].truncated and config.mask_truncated_completions)]
            tokens = sum(len(answers[i].ids) for i in kept)
            loss = torch.zeros(())
            for i in kept:
                A = answers[i].advantage
                if A == 0 and config.beta == 0:
                    continue  # it counts in the divisors, but has no gradient
                now = slow_logprobs(model, answers[i], config.temperature)
                log_ratio = now - old[i]
                if config.importance_sampling_level == "sequence":
                    log_ratio = log_ratio.mean().expand_as(now)
                ratio = log_ratio.exp()
                bound = 1 + (config.epsilon_high or config.epsilon) if A > 0 else 1 - config.epsilon
                surrogate = (ratio * A).clamp(max=bound * A)
                kl = kl_estimate(now, ref[i], config.kl_penalty_type)
                penalty = kl * ratio if config.use_bias_correction_kl else kl
                divisor = {"grpo": len(places) * len(now), "dapo": tokens,
                           "dr_grpo": len(places) * config.max_completion_length}
                loss = loss + (config.beta * penalty - surrogate).sum() / divisor[config.loss_type]
                learned += len(now)
                log["ratio_max"] = max(log["ratio_max"], ratio.max().item())
                log["kl"] += kl.sum().item() * (config.beta > 0)  # at 0 there is no reference
                log["clip_fraction"] += (surrogate < ratio * A).sum().item()
                log["sampler_gap"] += (answers[i].sampler_logprobs - old[i]).abs().sum().item()
            optimizer.zero_grad()
            if loss.requires_grad:  # else nothing moves
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            log["loss"] += loss.item() / updates
            log["grad_norm"] += norm.item() / updates
    for name in ("kl", "clip_fraction", "sampler_gap"):
        log[name] /= max(learned, 1)
    return log


UPDATE = dict(steps=2, prompts_per_step=3, max_completion_length=6, learning_rate=3e-3,
              warmup_steps=0, temperature=0.8, seed=1, micro_batch_size=5)
OPTIONS = {
    "grpo": {}, "dapo": {"loss_type": "dapo"}, "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"importance_sampling_level": "sequence"}, "k2": {"kl_penalty_type": "mse"},
    "r-times-kl": {"use_bias_correction_kl": True}, "batch-std": {"scale_rewards": "batch"},
    "in-three": {"num_mini_batches": 3}, "one-by-one": {"micro_batch_size": 1},
    "twice": dict(num_iterations=2, learning_rate=5e-3),
    "2x2": dict(num_iterations=2, num_mini_batches=2, learning_rate=5e-3),
    "tight-clip": dict(epsilon=0.02, epsilon_high=0.01), "short-step": {"max_grad_norm": 0.05},
    "no-cuts": dict(mask_truncated_completions=True, max_completion_length=12),
    "dynamic": dict(dynamic_sampling=20, num_generations=3),
    # Without KL flat groups are left out, and if there is no other nothing moves.
    "no-kl": {"beta": 0.0}, "one-group": dict(prompts_per_step=1, steps=7)}


@pytest.mark.parametrize("name", """grpo, grpo 2x2 one-by-one, dapo one-by-one, grpo in-three no-kl,
dr_grpo 2x2 one-by-one, dr_grpo no-kl, dapo 2x2 no-kl, grpo no-kl one-group, grpo no-cuts,
dapo in-three no-kl no-cuts, grpo 2x2 tight-clip, grpo 2x2 short-step, grpo twice k2, grpo dynamic,
grpo 2x2 batch-std, grpo 2x2 gspo, dapo 2x2 r-times-kl""".replace("\n", " ").split(", "))
def test_steps_are_those_of_the_slow_way(name):
    run = dict(UPDATE)
    for word in name.split():
        run |= OPTIONS[word]
    config = GRPOConfig(**TINY | run)
    model = tiny_model("llama", initializer_range=0.2)
    start = weights_of(model)
    slow_model, reference = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow_model.parameters(), weight_decay=0.0)
    states = []
    def reward(**columns):
        states.append(torch.get_rng_state())  # the next to be drawn is the order of the answers
        # Weights 1 % larger than those that sampled: without that, sampler_gap would be 0.
        for parameter in [*model.parameters(), *slow_model.parameters()]:
            parameter.data *= 1.01
        return uneven_reward(**columns)
    for metrics, learner in steps_of(model, reward, **run):
        torch.set_rng_state(states[-1])
        optimizer.param_groups[0]["lr"] = metrics["learning_rate"]
        wanted = slow_step(slow_model, reference, optimizer, learner.groups, config)
        for figure, value in wanted.items():
            assert metrics[figure] == pytest.approx(float(value), rel=5e-4, abs=2e-6), figure
        moved = (weights_of(model) - start).norm()
        assert (weights_of(model) - weights_of(slow_model)).norm() <= 1e-3 * moved
    assert (learner.reference is None) == (config.beta == 0)
    copy.deepcopy(learner.groups)  # bare numbers: of tensors with a graph there is no copy


@pytest.mark.parametrize("letters, drawn", [("ad", 8), ("eb", 2), ("deb", 3)])
def test_dynamic_sampling_asks_no_more_than_it_has_to(letters, drawn):
    data = [{"prompt": letter} for letter in letters]
    step = go(reward=uneven_reward, data=data, steps=1, dynamic_sampling=3)[0]
    assert (step["questions_seen"], step["zero_variance_fraction"]) == (drawn, letters == "ad")


@pytest.mark.parametrize("warmup, parts", [(1, [1, 0.8, 0.6, 0.4, 0.2]), (4, [0.25, 0.5])])
def test_learning_rates(warmup, parts):
    """No step is made at rate 0, neither the first nor the last."""
    history = go(steps=len(parts), warmup_steps=warmup)
    assert [metrics["learning_rate"] / 0.01 for metrics in history] == pytest.approx(parts)


def test_there_is_no_dropout():
    """Nor in the first samples or the reference. The model comes in train mode, and in float64."""
    plain = tiny_model("gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    assert go(model=tiny_model("gpt2").double().train(), stop=3) == go(model=plain, stop=3)


# --- Precision: bfloat16 over float32 masters, here on the CPU ---
def test_masters_take_steps_and_add_up_gradients_that_bfloat16_cannot():
    model = tiny_model().requires_grad_(False)
    head = model.lm_head.weight.requires_grad_()  # all others are frozen, to look at this one
    angles = model.model.rotary_emb.inv_freq.clone()  # a buffer, which bfloat16 would spoil
    before = head.detach().clone()
    steps = steps_of(model, bf16=True, learning_rate=1e-6, max_grad_norm=1e9, micro_batch_size=1)
    next(steps)
    added = []
    head.register_hook(added.append)
    *_, (metrics, learner) = steps
    [after] = learner.masters
    assert torch.equal(head, after.bfloat16())
    assert 10 * (head != before.bfloat16()).sum() < (after != before).sum()  # bfloat16 sees few
    total = torch.stack(added[-8:]).float().sum(dim=0)  # of the last step's 8 answers
    assert metrics["grad_norm"] == pytest.approx(total.norm().item(), rel=1e-6)
    for network in (model, learner.reference):
        assert torch.equal(network.model.rotary_emb.inv_freq, angles)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert metrics["sampler_gap"] < 0.1


# --- What is refused, and what the error says ---
FITS = "a " * 59  # with a cap of 5 tokens it just fills the context of 64


@pytest.mark.parametrize("value, names", {  # a value, and settings that it is impossible for
    1: "num_generations",
    0: "prompts_per_step max_completion_length temperature steps num_iterations num_mini_batches "
       "max_grad_norm micro_batch_size",
    -0.1: "beta epsilon epsilon_high dynamic_sampling learning_rate warmup_steps seed save_steps",
    "none of these": "loss_type scale_rewards kl_penalty_type importance_sampling_level"}.items())
def test_impossible_settings_are_refused(value, names):
    for name in names.split():
        for impossible in (value, NAN, math.inf):
            with pytest.raises(ValueError, match=f"{name} .*{impossible!r}"):
                GRPOConfig(**{name: impossible})


def rewarded(rewards):
    go(reward=lambda **_: rewards)


def asked_after_one_that_fits(prompt, family="qwen2"):
    model = tiny_model(family, **FAMILIES[family])
    go(model=model, data=[{"prompt": FITS}, {"prompt": prompt}])


@pytest.mark.parametrize("words, call", {  # words of the error: a call
    "0, 8, 1": lambda: sampled(tiny_model(), G=0), "5, 0, 1": lambda: sampled(tiny_model(), cap=0),
    "5, 8, nan": lambda: sampled(tiny_model(), temperature=NAN),
    "5, 8, inf": lambda: sampled(tiny_model(), temperature=math.inf),
    "got .]": lambda: sampled(tiny_model(), []), "got 'a b'": lambda: sampled(tiny_model(), "a b"),
    "'' has no tokens": lambda: sampled(tiny_model(), ["a", ""]),
    "prompt 1 has 60 .* room for 59": lambda: asked_after_one_that_fits(FITS + "a"),
    "prompt 1 has 61 .* room for 59": lambda: asked_after_one_that_fits(FITS + "a a", "gemma3"),
    "no answer could end": lambda: end_token_ids(Mock(generation_config=None, config=None), None),
    "batches is 9": lambda: go(num_mini_batches=9), "data set is empty": lambda: go(data=[]),
    "row 1 has the columns": lambda: go(data=[{"prompt": "a", "answer": "b"}, {"prompt": "a"}]),
    "needs the output_dir": lambda: go(resume=True),
    "int32.*quantiz": lambda: go(model=tiny_model().requires_grad_(False).type(torch.int32)),
    "float8.*quantiz": lambda: go(model=tiny_model().type(torch.float8_e4m3fn)),
    "returned 7 ": lambda: rewarded([1] * 7), "returned 9 ": lambda: rewarded([1] * 9),
    "returned nan": lambda: rewarded([NAN] * 8), "returned inf": lambda: rewarded([math.inf] * 8),
}.items())
def test_impossible_models_prompts_and_rewards_are_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()


# --- The night: whatever ends a run, resumed it ends as if nothing had happened ---
RUNS = {
    "plain": {"seed": np.int64(5000)},  # a number that a checkpoint may not hold
    "dynamic, several updates, in bfloat16": {  # many groups are equal, and are replaced
        "reward": lambda **given: [float(reward > 1) for reward in noisy_reward(**given)],
        "dynamic_sampling": 2, "num_iterations": 2, "num_mini_batches": 2, "beta": 0, "bf16": True},
}


def log_of(folder):
    """The lines of metrics.jsonl. Each must be whole, without NaN or inf, which JSON has not."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def night(folder, reward=noisy_reward, **settings):
    """A run to its end, from the checkpoint in the folder if there is one: history and weights."""
    model = tiny_model()
    config = GRPOConfig(**TINY | {"steps": 5, "save_steps": 2} | settings)
    history = train(model, TOKENIZER, QUESTIONS, reward, config, folder, resume=True)
    assert history == log_of(folder)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["history"] == history
    return [untimed(metrics) for metrics in history], weights_of(model).tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {name: night(tmp_path_factory.mktemp("whole"), **run) for name, run in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
# Where the process is killed; in which call of it, from 1; which argument is the file left torn.
@cases("place, fatal, torn", {
    "after step 1": ((grpo, "set_seed"), 2, None), "after step 3": ((grpo, "set_seed"), 4, None),
    "in the reward of a later step": ((random, "gauss"), 28, None),
    "while writing metrics 4": ((Path, "write_text"), 4, 0),
    "while writing the second checkpoint": ((torch, "save"), 2, 1),
    "before the last checkpoint is renamed": ((Path, "replace"), 8, None),
})
def test_a_killed_run_goes_on(name, place, fatal, torn, whole, tmp_path, monkeypatch):
    function = getattr(*place)
    calls = itertools.count(1)

    def killed(*args, **kwargs):
        if next(calls) < fatal:
            return function(*args, **kwargs)
        if torn is not None:
            args[torn].write_bytes(b'{"step": 4, "lo')
        raise SystemExit  # as with a SIGKILL, no `except Exception` sees it
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(*place, killed)
        night(tmp_path, **RUNS[name])
    logged = [untimed(metrics) for metrics in log_of(tmp_path)]
    assert logged == whole[name][0][: len(logged)]
    assert night(tmp_path, **RUNS[name]) == whole[name]


@pytest.mark.parametrize("save_steps, steps", [(2, [2, 4, 5]), (0, [])])
def test_what_a_step_leaves_is_there_before_it_yields(save_steps, steps, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    saved = []
    for metrics, _ in steps_of(folder=tmp_path, steps=5, save_steps=save_steps):
        assert log_of(tmp_path)[-1] == metrics
        if checkpoint.exists():
            saved.append(metrics["step"])
            checkpoint.unlink()
    assert saved == steps
    with pytest.raises(ValueError, match="holds a run: resume it"):  # its log is enough
        go(folder=tmp_path)


def test_the_same_run_goes_on_or_none(tmp_path):
    go(stop=3, folder=tmp_path, steps=5, save_steps=2)
    for name, value in [("steps", 6), ("seed", 4), ("beta", 0.2)]:
        with pytest.raises(ValueError, match=f"another run: there {name} is .*, here {value}"):
            night(tmp_path, **{name: value})
    finished = night(tmp_path, save_steps=1, micro_batch_size=3)  # these may change
    assert night(tmp_path) == finished  # it is finished, and says again what it was


# --- Too little memory: half as much at once ---
def ending_model(logit):
    """The end tokens' logits are raised by `logit`: at -100 no answer ends."""
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)
    model.lm_head.bias[[END, EOS]] = logit
    return model


def small_card(function, place, most):
    """`function`, where more than `most` items in this place of its arguments are too many."""
    def tried(*args, **kwargs):
        if len(args[place]) > most:
            raise torch.OutOfMemoryError
        return function(*args, **kwargs)
    return tried


@pytest.mark.parametrize("place, settings", {
    "pi_ref": {}, "pi_old": {"beta": 0, "num_iterations": 2}, "the update": {"beta": 0},
    "its backward pass": {"beta": 0}}.items())
def test_out_of_memory_does_the_same_in_smaller_parts(place, settings, monkeypatch, capsys):
    run = {"prompts_per_step": 3, "steps": 2} | settings
    enough, model = tiny_model(), tiny_model()
    wanted = go(model=enough, micro_batch_size=3, **run)
    calls = itertools.count(1)

    def last(gradient):
        """The embedding's gradient comes last. The second time one micro-batch is done already."""
        if next(calls) in (1, 3):
            raise torch.OutOfMemoryError
    if place == "its backward pass":
        model.get_input_embeddings().weight.register_post_accumulate_grad_hook(last)
    else:
        monkeypatch.setattr(grpo, "score", small_card(score, 1, 3))
    assert go(model=model, micro_batch_size=12, **run) == wanted
    said = re.findall("from here on (.*) at once", capsys.readouterr().out)
    assert said == ["6 answers", "3 answers"]  # not in every step: it is remembered
    assert torch.equal(weights_of(model), weights_of(enough))


def asked(**run):
    return [answers[0].example["prompt"] for _, step in steps_of(**run) for answers in step.groups]


def test_out_of_memory_in_sampling_asks_fewer_questions_at_once(monkeypatch, capsys):
    run = {"prompts_per_step": 7, "steps": 2}
    wanted = asked(**run)
    monkeypatch.setattr(grpo, "sample_groups", small_card(sample_groups, 2, 1))
    assert asked(**run) == wanted
    assert capsys.readouterr().out.count("at once") == 2  # 3 questions, then 1
    monkeypatch.setattr(grpo, "sample_groups", small_card(sample_groups, 2, 0))
    with pytest.raises(torch.OutOfMemoryError):
        go()


# --- Gradients that are not finite, and none at all ---
def test_only_three_failed_steps_in_a_row_end_a_run(tmp_path, monkeypatch, capsys):
    # By what each update's gradient is multiplied. Of 1e25 the square, and so the length, is inf.
    factors = iter([1, 1, NAN, 1e25, 1e25, NAN, 1, NAN, NAN, NAN, 1e25, 1e25, NAN, NAN])

    def broken_loss(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        return loss * next(factors), metrics
    model = tiny_model()
    weights = [weights_of(model)]
    steps = steps_of(model, folder=tmp_path, num_iterations=2, steps=8)
    monkeypatch.setattr(grpo, "grpo_loss", broken_loss)
    with pytest.raises(FloatingPointError, match="three steps in a row"):
        for _ in steps:
            weights.append(weights_of(model))
    skipped = [metrics["skipped_updates"] for metrics in log_of(tmp_path)]
    assert skipped == [0, 2, 2, 1, 2, 2]
    for count, before, after in zip(skipped, weights, weights[1:]):
        assert torch.equal(before, after) == (count == 2)
    assert torch.equal(weights_of(model), weights[-1])
    assert capsys.readouterr().out.count("update skipped") == 11


@cases("settings", {
    "equal": {"beta": 0, "reward": lambda completion_ids, **_: list(map(len, completion_ids))},
    "left out": {"mask_truncated_completions": True}})
def test_nothing_moves_where_no_answer_teaches(settings, tmp_path):
    """Not even by Adam's momentum. After the first step all answers are cut, and equally long."""
    model = ending_model(2.0)
    before = weights_of(model.model)
    moved = []
    for _ in steps_of(model, folder=tmp_path, steps=3, **settings):
        after = weights_of(model.model)
        moved.append(not torch.equal(before, after))
        before = after
        model.lm_head.bias[[END, EOS]] = -100.0
    assert moved == [True, False, False]
    nothing = dict.fromkeys(["loss", "grad_norm", "kl", "sampler_gap", "skipped_updates"], 0)
    for metrics in log_of(tmp_path)[1:]:
        assert metrics == metrics | nothing  # these figures are 0


# --- The reward's contract, data, seeds, edges ---
@pytest.mark.parametrize("chats", [False, True])
def test_a_reward_function_is_called_as_trl_calls_one(chats):
    def say(role, text):
        return [{"role": role, "content": text}] if chats else text
    data = [{"prompt": say("user", "a b c"[:end]), "end": end} for end in (1, 3, 5)]
    reward = Mock(return_value=list(range(12)))
    [(_, learner)] = steps_of(ending_model(1.0), reward, data, steps=1, prompts_per_step=3)
    given = reward.call_args.kwargs
    asked = given["end"]
    assert asked == sorted([1, 3, 5] * 4, key=asked.index)  # each question 4 times in a row
    answers = sum(learner.groups, [])
    assert given == {"prompts": [say("user", "a b c"[:end]) for end in asked], "end": asked,
                     "completions": [say("assistant", answer.text) for answer in answers],
                     "completion_ids": [answer.ids for answer in answers]}
    assert [answer.reward for answer in answers] == list(range(12))


def test_every_question_once_an_epoch_in_an_order_that_is_the_seeds():
    order = asked(prompts_per_step=7, steps=3)
    epochs = [order[:7], order[7:14], order[14:]]
    for epoch in epochs:
        assert sorted(epoch) == [question["prompt"] for question in QUESTIONS]
    assert epochs[0] != epochs[1] != epochs[2]
    assert asked(prompts_per_step=9, steps=2) == order[:18]  # more than there are
    assert asked(prompts_per_step=7, steps=1, seed=4) not in epochs


def test_every_step_of_every_seed_draws_afresh_and_nothing_else_decides():
    drawn, one = set(), QUESTIONS[:1]
    for seed, data in ((0, one), (1, one), (1, datasets.Dataset.from_list(one))):
        for metrics in go(data=data, steps=3, seed=seed, learning_rate=0):
            drawn.add((metrics["reward_mean"], metrics["entropy"]))
        random.random()  # the caller draws as well
    assert len(drawn) == 6  # two seeds, three steps


@pytest.mark.parametrize("order, least, most", [
    (list, 3, 5), (lambda rewards: random.sample(rewards, len(rewards)), 0, 1)])
def test_a_model_learns_what_is_rewarded_and_else_nothing(order, least, most):
    def reward(completions, **columns):
        return order([text.split().count("a") for text in completions])
    for bf16 in (False, True):
        history = go(reward=reward, beta=0, num_generations=16, steps=25, bf16=bf16)
        assert least <= history[-1]["reward_mean"] <= most


@cases("logit, run, wanted", {  # the end tokens' logits are raised by this; run; metrics
    "a broken model": (NAN, {"steps": 2}, {"entropy": 0, "skipped_updates": 1}),
    "logits of minus infinity": (-math.inf, {}, {"truncated_fraction": 1}),
    "the smallest": (0.0, dict(num_generations=2, prompts_per_step=1, max_completion_length=1,
                               num_mini_batches=2, data=QUESTIONS[:1]), {"completion_length": 1})})
def test_steps_at_the_edge(logit, run, wanted, tmp_path):
    figures = """step loss reward_mean reward_std kl clip_fraction ratio_max entropy grad_norm
        learning_rate completion_length truncated_fraction zero_variance_fraction sampler_gap
        sample_seconds score_seconds update_seconds skipped_updates questions_seen""".split()
    go(model=ending_model(logit), folder=tmp_path, **run)
    for metrics in log_of(tmp_path):
        assert metrics == metrics | {"skipped_updates": 0} | wanted
        assert set(metrics) >= set(figures)


# --- The demo: evaluation and data ---
def echo(model, tokenizer, prompts, *rest, **options):
    """Each question is its own answer, on a card that has room for three."""
    if len(prompts) > 3:
        raise torch.OutOfMemoryError
    return [[SimpleNamespace(text=prompt)] for prompt in prompts]


def test_an_evaluation_counts_the_last_box_and_leniently_the_last_number(monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "sample_groups", echo)
    texts = [r"\boxed{7}, so \boxed{1,000}",  # right
             "it is 1,000.", "7 dollars, or $1000.", "5-1000",  # right, but not in a box
             r"\boxed{7}, or 1000", "-1000", "1000 of 7", "no idea", "", r"\boxed{}"]
    data = [{"prompt": text, "answer": "1000"} for text in texts]
    found = gsm8k_demo.evaluate(None, None, data, sampled=True)
    shares = [found[f"{name}accuracy"] for name in ("", "sampled_", "lenient_")]
    near(shares + found["interval"], [0.1, 0.1, 0.4, 0.0179, 0.4042], 1e-4)


GOOD_LINE = r'{"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"}'


def write_gsm8k(folder, *lines):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(lines))
    return folder


def test_gsm8k_is_read_and_graded(tmp_path):
    train_data, test_data = gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, GOOD_LINE))
    assert train_data["answer"] == test_data["answer"] == ["1,018"] * 2
    chat = [{"role": "assistant", "content": r"18, so \boxed{\$1018}"}]
    rewards = gsm8k_demo.boxed_reward(None, [chat, "1018", r"\boxed{1}"], ["1,018"] * 3)
    assert rewards == [1.5, 0.0, 0.5]


@pytest.mark.parametrize("line", [  # cut off, no ####, a blank answer
    '{"question": "x", "answ', '{"question": "x", "answer": "18"}',
    r'{"question": "x", "answer": "1\n#### "}'])
def test_a_broken_line_of_data_is_named(line, tmp_path):
    with pytest.raises(ValueError, match="train.jsonl, line 2"):
        gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, line))


# --- The rehearsal: one pre-trained model serves all of these ---
@pytest.fixture(scope="module")
def base():
    return gsm8k_demo.rehearsal(0)


def train_with(mistake, base, **settings):
    model, tokenizer, train_data, _ = copy.deepcopy(base)
    history = gallery.train(mistake, model, tokenizer, train_data, **settings)
    return model, history[-1]


@pytest.mark.parametrize("mistake, steps, least, most", [
    ("healthy", 1, 0.15, 0.35), ("healthy", 10, 0.8, 1.0), ("other order", 10, 0.0, 0.15)])
def test_the_rehearsal_learns_from_its_rewards(mistake, steps, least, most, base):
    learned, tested = [{chat[0]["content"] for chat in data["prompt"]} for data in base[2:]]
    assert not learned & tested and len(tested) >= 256  # held out
    model, _ = train_with(mistake, base, steps=steps)
    end = gsm8k_demo.evaluate(model, base[1], base[3], 28, sampled=True)
    assert least <= end["sampled_accuracy"] <= most


# --- The demo from the command line ---
@pytest.fixture
def demo(base, monkeypatch, tmp_path):
    def run(flags):
        monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *flags.split()])
        gsm8k_demo.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: copy.deepcopy(base))
    return run


@pytest.mark.parametrize("flags, said", [
    ("--rehearsal --num_generations 1", "num_generations"),
    ("--resume --output no/such", "no run to go on with in no/such"),
    ("--data nowhere --model x", "cannot load nowhere"),
    ("--rehearsal --model x", "leave out --model")])
def test_wrong_flags_end_in_one_line_and_write_nothing(flags, said, demo, tmp_path):
    with pytest.raises(SystemExit, match=f"^stopped: .*{said}.*$"):
        demo(flags)
    assert not any(tmp_path.iterdir())


KNOBS = set(vars(GRPOConfig()) | vars(gsm8k_demo.DemoConfig()))


def test_every_setting_is_a_flag(demo, capsys):
    with pytest.raises(SystemExit):
        demo("--help")
    assert KNOBS <= set(re.findall(r"--(\w+)", capsys.readouterr().out))


def read(path):
    return json.loads(Path(path).read_text())


FEW = ("--rehearsal --steps 4 --prompts_per_step 4 --eval_questions 16 --eval_every 2 "
       "--show_steps 3 --save_steps 2 --output ")


def test_the_demo_from_flags_to_files(demo, capsys):
    demo(FEW + "whole")
    printed = capsys.readouterr().out
    for words in ("reward 1.5", "step 2:", "after:", "arithmetic"):
        assert words in printed
    assert "warning" not in printed
    settings = read("whole/settings.json")
    assert settings["steps"] == 4 and settings["beta"] == 0.02  # typed, and the rehearsal's own
    assert len(Path("whole/samples.jsonl").read_text().splitlines()) == 2
    assert read("whole/results.json")["after"]["questions"] == 16
    for flags, said in ((FEW + "whole", "holds a run"),
                        ("--resume --steps 5 --output whole", "there steps is 4, here 5")):
        with pytest.raises(SystemExit, match=said):
            demo(flags)
    model, _ = gsm8k_demo.load_model("whole")
    assert model.generation_config.eos_token_id == [2, 0]
    Path("whole/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat template"):
        gsm8k_demo.load_model("whole")


@pytest.mark.parametrize("function, calls, missing", [  # killed before step 1; before a checkpoint;
    ("evaluate", 0, False), ("boxed_reward", 1, False),  # in the middle evaluation; in the last
    ("evaluate", 1, True), ("evaluate", 2, False)])
def test_the_demo_killed_and_resumed(function, calls, missing, demo, monkeypatch, capsys):
    demo(FEW + "whole")
    wanted = read("whole/results.json")
    works = getattr(gsm8k_demo, function)
    with monkeypatch.context() as patch, pytest.raises(IndexError):
        left = [works] * calls
        patch.setattr(gsm8k_demo, function, lambda *a, **options: left.pop()(*a, **options))
        demo(FEW + "killed")
    demo("--resume --output killed")  # its settings are remembered
    if missing:
        del wanted["step 2"]
    assert read("killed/results.json") == wanted
    assert ("step 2: missing" in capsys.readouterr().out) is missing


@pytest.mark.parametrize("gap", [0.2, math.nan])
def test_a_sampler_that_disagrees_is_warned_of(gap, demo, monkeypatch, capsys):
    def steps(*arguments):
        for metrics, learner in grpo.training_steps(*arguments):
            yield metrics | {"sampler_gap": gap}, learner
    monkeypatch.setattr(gsm8k_demo, "training_steps", steps)
    demo("--rehearsal --steps 1 --prompts_per_step 1 --eval_questions 1")
    assert "warning: sampler and scorer" in capsys.readouterr().out


def test_any_text_prints_in_ascii(monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", "--nonsense"])
    with pytest.raises(SystemExit):
        runpy.run_path(gsm8k_demo.__file__, run_name="__main__")
    print("\u2588 \u4e2d", flush=True)  # the curves, and models, print such
    assert screen.buffer.getvalue() == b"? ?\n"


# --- The gallery of mistakes: every one can be made, and the loud ones are still loud ---
def test_every_mistake_can_be_made(base):
    for mistake, changes in gallery.GALLERY.items():
        if "code" in changes:
            train_with(mistake, base, steps=1, prompts_per_step=2)


@pytest.mark.parametrize("mistake, steps, figure, least, most", [
    ("sign of loss", 5, "reward_mean", 0, 0.55), ("sampled at 0.6", 1, "sampler_gap", 0.005, 0.05),
    ("box alone", 5, "zero_variance_fraction", 0.7, 1),
    ("one end token known", 1, "truncated_fraction", 1, 1),
    ("targets not shifted", 1, "sampler_gap", 5, 20)])
def test_loud_mistakes_still_show(mistake, steps, figure, least, most, base):
    _, last = train_with(mistake, base, steps=steps, warmup_steps=2)
    assert least <= last[figure] <= most


# --- The README ---
README = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_what_the_readme_names_exists(base):
    assert set(re.findall(r"--(\w+)", README)) <= KNOBS | {"help", "nproc_per_node"}
    _, figures = train_with("healthy", base, steps=1)
    for cell in re.findall(r"^\| (`[^|]*)", README, re.M):  # of tables of figures and settings
        assert set(re.findall(r"`(\w+)`", cell)) <= KNOBS | set(figures), cell


@cases("block", dict(enumerate(BLOCKS)))
def test_the_readmes_python_does_what_it_says(block, demo, capsys):
    if "trl" in block:  # too large to run: but its settings are ours
        compile(block, "several.py", "exec")
        written = dict(re.findall(r"\b(\w+)=([^\s,)]+)", block))
        for name in {"beta", "loss_type", "use_bias_correction_kl"} | written.keys() & KNOBS:
            assert eval(written[name]) == getattr(GRPOConfig(), name), name
        return
    exec(block, {})
    [promised] = re.findall(r"^print.*  # ([^;\n]*)", block, re.M)
    printed = capsys.readouterr().out.replace("->", "")
    near(numbers(printed), numbers(promised.replace("->", "")), 0.15)
