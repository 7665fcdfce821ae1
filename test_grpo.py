# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py, and the second half of the tutorial: what must be true.

    python -m pytest -q test_grpo.py

All of it runs offline, on the CPU, in under two minutes. Most of it is tables: a name, what goes
in, what must come out, and below them the short function that checks each row. Read a table like a
list of sentences; change a line of grpo.py, and see which of them goes red. "Slow" is a second way
to compute the same thing: loops, one token at a time, written to be obvious.
"""

import builtins
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import string
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import models, pre_tokenizers, Tokenizer
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector
from transformers import (AutoConfig, AutoModelForCausalLM, CONFIG_MAPPING,
                          PreTrainedTokenizerFast)

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import gallery  # noqa: E402
import grpo  # noqa: E402
import gsm8k_demo  # noqa: E402
from grpo import (answer_ratio_loss, average, choose_tokens, clipped_surrogate, corrected_kl_loss,
                  end_token_ids, extract_boxed, group_advantages, group_scale, grpo_loss,
                  GRPOConfig, gspo_loss, k3_kl, kl_estimate, masked_mean, overlong_penalty,
                  rule_reward, sample_groups, token_logprobs, train, training_steps)

torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up


def t64(values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(text):
    return t64([float(word) for word in text.split()])


def gradient(function, x):
    """The gradient of function(x), a single number, with respect to x."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def cases(names, table):
    """A test for each row of a table: the key is the name of the case, the value goes in."""
    return pytest.mark.parametrize(names, table.values(), ids=table)


def near(actual, expected, tolerance=1e-12):
    """The same shape, and the same numbers up to rounding."""
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# --- The worked numbers of the documents ---
# grpo.py was written after an article, a chapter of a book on RLHF with a script, an explainer and
# a course, whose titles and errors are in the README. Where one is wrong, the figures that it
# prints are the last column of a row. All numbers stand in strings, with blanks between them.
P_02 = t64([[0.2]]).log()
P_04 = t64([[0.4]]).log()
ONE = torch.ones(1, 1)  # a mask
EGGS = r"There are 9 * 7 = \boxed{63} eggs."
BOOK = torch.ones(2, 10, dtype=torch.float64)  # losses [1, 1, 1, 1, 10] and [1 nine times, 10]
BOOK[[0, 1], [4, 9]] = 10.0
BOOK_MASK = torch.arange(10) < torch.tensor([[5], [10]])


def clip(advantage, ratios):
    logprobs = numbers(ratios).log().unsqueeze(0)
    return clipped_surrogate(logprobs, 0 * logprobs, t64([advantage]))


def statistics(rewards):
    """Mean, std (both read back from the advantages) and advantages of a group."""
    advantages = group_advantages(numbers(rewards))
    centered = group_advantages(numbers(rewards), scale_rewards=False)
    return [numbers(rewards)[0] - centered[0], centered[0] / advantages[0], *advantages]


def script(loss_type):
    """Ratios 1, advantages 2, answers of 4 and 7 tokens: value, gradient of a token in each."""
    ones = torch.ones(2, 7, dtype=torch.float64)
    mask = (torch.arange(7) < torch.tensor([[4], [7]])).long()
    slope = gradient(lambda ratios: average(2 * ratios, mask, loss_type, 7), ones)
    return [average(2 * ones, mask, loss_type, 7), *slope[:, 0]]


@cases("row", {  # document, quantity: what grpo.py computes, what is right, what is misprinted
    "article: clip at ratio 1.3": (lambda: clip(2, "1.3"), "2.4"),
    "article: mean, std and advantages of five; its code has rewards.std(), over G - 1":
        (lambda: statistics("2 3.5 1 4 2.5"),
         "2.6 1.067708 -0.561951  0.842927 -1.498537  1.311220 -0.093659",
         "2.6 1.068    -0.503     0.754    -1.340     1.173    -0.084"),
    "article: one right answer in DeepSeek-R1's group of 16; it has the root of 63, as of 64":
        (lambda: group_advantages(numbers("1.5" + 15 * " 0.5"))[0], "3.872983", "7.937254"),
    "article, explainer: k3 at pi_ref/pi_theta = 2": (lambda: k3_kl(P_02, P_04), "0.306853"),
    "book: mean losses": (lambda: masked_mean(BOOK, BOOK_MASK, dim=1), "2.8 1.9"),
    "book: mean of the means": (lambda: average(BOOK, BOOK_MASK), "2.35"),
    "book: mean over tokens, 33/15": (lambda: average(BOOK, BOOK_MASK, "dapo"), "2.2", "2.27"),
    "book: sign of the KL in the loss":
        (lambda: grpo_loss(P_02, P_02, P_04, t64([0]), ONE, beta=1)[0], "0.306853", "-0.307"),
    "script: masked_mean": (lambda: script("grpo"), "2 0.25 0.142857"),
    "script: masked_sum": (lambda: script("dr_grpo"), "1.571429 0.142857 0.142857"),
    "script: mean over tokens; advantages were left out, and a gradient of 1/7 was not zeroed":
        (lambda: script("dapo"), "2 0.181818 0.181818", "1 0.2338 0.2338"),
    "DAPO's paper, equation 13: lengths for a cap of 20 and a buffer of 8":
        (lambda: overlong_penalty(numbers("1 12 13 16 20 23"), 20, 8), "0 0 -0.125 -0.5 -1 -1"),
    "course: a right box": (lambda: rule_reward(EGGS, "63"), "1.5"),
    "course: a wrong box": (lambda: rule_reward(r"About \boxed{50}.", "63"), "0.5"),
    "course: right but not boxed": (lambda: rule_reward("It is 5.", "5"), "0", "1"),
    "course: second thoughts, its pattern reads the first box":
        (lambda: rule_reward(r"\boxed{50}? No: \boxed{63}", "63"), "1.5", "0.5"),
    "course: apples minus their mean":
        (lambda: group_advantages(numbers("1.5 1 0 0"), False), "0.875 0.375 -0.625 -0.625"),
    "course: early": (lambda: group_advantages(numbers("0.5 1.5 0.5 1.5 0.5 1.5 0.5 0.5")),
        "-0.774597 1.290994 -0.774597 1.290994 -0.774597 1.290994 -0.774597 -0.774597",
        "-1.2      0.1       0.8      0.1       1.5      0.1      -0.3       0.6"),
    "course: middle": (lambda: group_advantages(numbers("1.5 1.5 1.5 0.5 1.5 1.5 1.5 1.5")),
        "0.377964 0.377964 0.377964 -2.645751 0.377964 0.377964 0.377964 0.377964",
        "0        0        0        -0.5      0        0        0        0"),
    "course: late": (lambda: group_advantages(numbers(8 * "1.5 ")), 8 * "0 "),
    "course: mean, std and advantages of eight": (lambda: statistics("1.5 0 1.5 0 1 1.5 0.5 1.5"),
        "0.9375 0.634306 0.886796 -1.477994 0.886796 -1.477994 0.098533 0.886796 -0.68973 0.886796",
        "0.875  0.637    0.82     -1.23     0.82     -1.23     0.12     0.82     -0.53    0.82"),
    "course: good": (lambda: clip(1, "0.5 0.8 1 1.2 1.5"), "0.5 0.8 1 1.2 1.2"),
    "course: bad": (lambda: clip(-1, "0.5 0.8 1 1.2 1.5"), "-0.8 -0.8 -1 -1.2 -1.5"),
})
def test_the_documents_numbers(row):
    compute, right, *misprint = row
    computed = torch.as_tensor(compute()).flatten()
    near(computed, numbers(right), 1e-6)
    for printed in misprint:
        assert (computed - numbers(printed)).abs().max() > 0.005, "it may be rounding"


# --- The reward ---
BOXES = {  # text: the contents of the complete box that opens last
    r"$$\boxed{63}$$": "63", r"\boxed{{{a}}{b}}": "{{a}}{b}", r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{a \} b}": r"a \} b", r"\boxed{1} \boxed{2}": "2", r"\boxed{\boxed{5}}": "5",
    r"\boxed{1} \boxed{\frac{2}{3}": "1", r"\boxed{x = \boxed{2}": "2", r"{\boxed{5}": "5",
    r"\boxed{1 + \boxed{2} + 3}": "2", r"} } \boxed{5}": "5", r"\boxed{1}}} \boxed{2}}": "2",
    "\\boxed{\ud800}": "\ud800",
}
NO_REWARD = {  # blank boxes, and none
    r"\boxed{}": "", "\\boxed{ \n\t }": " \n\t ", r"\boxed{63} \boxed{}": "",
    r"\boxed{\boxed{}}": "", "": None, "63": None, "boxed{63}": None, r"\boxed": None,
    r"\boxed{63": None, r"\boxed63}": None, r"\boxed\{63\}": None, r"\boxed{63\}": None,
}


@pytest.mark.parametrize("text", BOXES | NO_REWARD)
def test_boxes(text):
    assert extract_boxed(text) == (BOXES | NO_REWARD)[text]
    if text in NO_REWARD:
        assert rule_reward(text, "63") == 0.0
        assert rule_reward(text, "") == 0.0  # nor does an empty box equal an empty answer


@cases("rows", {  # why: box and answer
    "the same number": ["63.0 is 63", "007 is 7", "-0 is 0", "+5 is 5", ".5 is 0.5", "5e3 is 5000",
        "5e-1 is 0.5", "63 is 63.0", "63.009 is 63", "62.991 is 63"],
    "another number": ["50 is not 63", "630 is not 63", "-63 is not 63", "5 is not -5",
        "63.011 is not 63", "62.98 is not 63"],
    "0.01 is not below 0.01": ["63.01 is not 63", "5.01 is not 5", "4.99 is not 5",
        "3,000,000.01 is not 3000000"],
    "blanks around it": [" 63  is 63", "63 is  63\n", " x+1  is x+1", "x+1 is  x+1\n"],
    "thousands": ["1,000 is 1000", "1000 is 1,000", "-1,000 is -1000", "1{,}000 is 1000",
        "1{,}234{,}567 is 1,234,567", "1,234,567.5 is 1234567.5"],
    "a comma is no place to cut": ["8,000 is not 000", "8,000 is not 8", "1,2,3 is not 123",
        "12,34 is not 1234", "1234,567 is not 1234567"],
    "units": ["$18 is 18", r"\$18 is $18.00", "$63$ is 63", "-$5 is -5", "$-5 is -5",
        "50% is 50", r"12.5\% is 12.5", "50 % is 50"],
    "a sentence ends": ["63. is 63", "1,000. is 1000", " $18.  is 18", "50%.  is 50"],
    "equal as strings": [r"\frac12 is \frac12", "Monday is Monday", ", is ,", "nan is nan"],
    "no number": [", is not 0", ". is not 0", "- is not 0", "$ is not 0", "e5 is not 0",
        "63 is not ", "63 is not ,", "6 3 is not 63", "63 eggs is not 63", "6.3.0 is not 6.3",
        "--5 is not 5", "63\x00 is not 63", r"\frac12 is not 0.5", "60+3 is not 63",
        "1_000 is not 1000", "0x3f is not 63", "nan is not NaN"],
    "too large for a float": ["1e999 is not 2e999", "inf is not 1e999", "-1e999 is not -inf",
        f"1{'0' * 308} is not -1{'0' * 308}"],
    "other digits": ["\u0666\u0663 is not 63", "\uff16\uff13 is not 63", "6\u00b3 is not 63",
        "\u2465 is not 6", "63 is not \u0666\u0663"],
})
def test_boxes_are_read_as_a_person_would(rows):
    for case in rows:
        box, answer = re.split(" is not | is ", case)
        reward = rule_reward(f"The answer is \\boxed{{{box}}}.", answer)
        assert reward == (0.5 if " is not " in case else 1.5), case
        assert type(reward) is float


@pytest.mark.parametrize(
    "piece", r"\boxed{ \boxed{} \boxed { } \ \{ 9 9, ,000 {,} $ - . 1e9".split() + [". ", *" \n"])
def test_hostile_text_takes_linear_time(piece):
    # A linear reader needs tenths of a second. A quadratic one fails at one of the small sizes.
    for size in (10_000, 30_000, 100_000, 300_000):
        body = piece * (size // len(piece))
        started = time.process_time()
        # A digit on either side keeps strip() away from the middle. An x at the end makes a
        # pattern that nearly matched try again from every place.
        for text in (body, f"1{body}1", f"1{body}x"):
            assert rule_reward(text, "7") in (0.0, 0.5)
            assert rule_reward(f"\\boxed{{{text}}}", "7") in (0.0, 0.5)
            assert rule_reward(r"\boxed{7}", text) == 0.5
        assert time.process_time() - started < 3.0


# --- Advantages ---
@cases("rewards, right", {  # rewards, advantages
    "the apples": ("1.5 1.5 0.5 0.5", "1 1 -1 -1"), "small is not equal": ("0 1e-9", "-1 1"),
    "just not equal": ("1 1.0000026", "-1 1"),
    # Equal rewards, though their mean may differ in the last digit: exactly 0.
    "just equal": ("1 1.0000004", "0 0"), "zeros": ("0 0 0", "0 0 0"),
    "0.1": ("0.1 0.1 0.1", "0 0 0"), "negative": (7 * "-0.7 ", 7 * "0 "),
    "large": ("100000001 100000000 100000000", "0 0 0"),
})
def test_advantages(rewards, right):
    rewards, right = numbers(rewards), numbers(right)
    tolerance = 1e-6 * right.abs().max()  # so zeros are exact
    centered = rewards - rewards.mean()
    size = rewards.abs().max().clamp(min=1e-9)  # so that 1e-9 counts as much as 1
    centered = centered / size if right.any() else right
    near(group_advantages(rewards, False) / size, centered, tolerance)
    near(group_advantages(rewards.float()), right, 2e4 * tolerance)
    # Beside other groups and in any shape it is the same, and the rewards are left alone.
    block = torch.stack([rewards, 0 * rewards, 1000 * rewards]).view(3, 1, -1)
    before = block.clone()
    near(group_advantages(block)[[0, 2], 0], torch.stack([right, right]), tolerance)
    assert torch.equal(block, before)


@pytest.mark.parametrize("scale, best", [
    ("group", 2**0.5), ("none", 1), ("rloo", 4 / 3), ("batch", 0.8**0.5)])
def test_scales_of_advantages(scale, best):
    rewards = t64([[0, 1, 1, 2], [3, 3, 3, 3]])  # others' mean of the 2: 2/3; std of all: 1.25**0.5
    near(group_scale(rewards, scale), [[-best, 0, 0, best], [0, 0, 0, 0]])
    assert (group_scale(torch.full((3, 4), 0.5), scale) == 0).all()


# --- Ratio and clip, the KL estimators, the masked mean: values and gradients ---
# An advantage (clipped 0.2 below, 0.28 above) or the name of a KL; the log of pi_theta/pi_old, or
# pi_theta/pi_ref; the value; its gradient.
@cases("row", {
    "good, much likelier": "1 0.3 1.28 0", "good, likelier": "1 0.2 1.221403 1.221403",
    "good, rarer": "1 -0.5 0.606531 0.606531", "bad, likelier": "-1 0.5 -1.648721 -1.648721",
    "bad, rarer, clipped": "-1 -0.3 -0.8 0", "e^20, not clipped": "-2 20 -970330391 -970330391",
    "e^100, clipped": "2 100 2.56 0", "k3, likelier": "low_var_kl 0.5 0.10653066 0.39346934",
    "k3, nearly equal": "low_var_kl 1e-6 5e-13 1e-6", "k3, e^99 likelier": "low_var_kl 99 98 1",
    "k3, e^30 rarer": "low_var_kl -30 1.0686475e13 -1.0686475e13",
    "k1": "kl -3 -3 1", "|k1|": "abs -3 3 -1", "k2": "mse -3 4.5 -3",
})
def test_one_token(row):
    kind, *row = row.split()
    log_ratio, value, slope = map(float, row)
    other = torch.zeros(3, 3, dtype=torch.float64)

    def compute(x):
        if kind in SLOW_KL:
            return kl_estimate(x, other, kind)[0, 0]
        advantages = t64([float(kind), 5, 7])  # for rows; taken for columns, 7 would count
        return clipped_surrogate(x, other, advantages, 0.2, 0.28)[0, 2]

    near(compute(other + log_ratio), value, 1e-6 * abs(value))
    near(gradient(compute, other + log_ratio).sum(), slope, 1e-6)


@pytest.mark.parametrize("dirt", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_masked_mean(dirt, dtype):
    values = t64([[1, 3, dirt], [dirt, dirt, dirt], [8, dirt, dirt]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).to(dtype)
    near(masked_mean(values, mask), 4)
    near(masked_mean(values, mask, dim=0), [4.5, 3, 0])
    near(masked_mean(values, mask, dim=1), [2, 0, 8])
    near(gradient(lambda x: masked_mean(x, mask), values), mask.double() / 3)
    near(masked_mean(values[:1], mask[0], dim=1), [2])  # a mask that expands
    # Only what is masked may disappear: to hide more would hide a broken model.
    assert masked_mean(t64([math.nan, 1]), torch.ones(2)).isnan()


# --- The loss and its relatives, against one slow loss ---
SLOW_KL = {  # of x = log(pi_theta / pi_ref)
    "low_var_kl": lambda x: (-x).exp() + x - 1, "kl": lambda x: x,
    "abs": lambda x: x.abs(), "mse": lambda x: x * x / 2,
}


def slow_loss(loss_name, logprobs, old, ref, advantages, mask, *, epsilon=0.2, epsilon_high=None,
              beta=0.04, kl="low_var_kl", loss_type="grpo", max_completion_length=7):
    """One token at a time. Returns the loss and its metrics."""
    high = epsilon if epsilon_high is None else epsilon_high
    losses = torch.zeros_like(old)
    ratios, clips, kls = torch.zeros(3, *mask.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        A = advantages[i]
        whole = (logprobs - old)[i, mask[i]]
        log_ratio = {"gspo_loss": whole.mean(), "answer_ratio_loss": whole.sum()}.get(
            loss_name, logprobs[i, t] - old[i, t])
        ratio = log_ratio.exp()
        bound = 1 + high if A > 0 else 1 - epsilon
        clipped = A * ratio > A * bound
        penalty = SLOW_KL[kl](logprobs[i, t] - ref[i, t]) * (beta > 0)  # at 0 no ref is given
        weight = ratio if loss_name == "corrected_kl_loss" else 1.0
        losses[i, t] = beta * weight * penalty - A * (bound if clipped else ratio)
        ratios[i, t] = ratio.item()
        clips[i, t] = clipped
        kls[i, t] = penalty.item()
    loss = {  # the mean of an answer without tokens is 0
        "grpo": (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean(),
        "dapo": losses.sum() / mask.sum(),
        "dr_grpo": losses.sum() / (len(mask) * max_completion_length)}[loss_type]
    return loss, {"loss": loss.item(), "ratio_max": ratios.max().item(),
                  "kl": kls[mask].mean().item(), "clip_fraction": clips[mask].mean().item()}


def batch(seed=0):
    """Six answers of up to five tokens: log-probs of three policies, advantages, mask."""
    draw = random.Random(seed)  # unlike torch's generator it is the same in every version
    noise = t64([draw.gauss(0, 1) for _ in range(4 * 6 * 5)]).view(4, 6, 5)
    logprobs = -2 * noise[0].abs()
    old = logprobs + 0.3 * noise[1]
    ref = logprobs + noise[2]
    advantages = noise[3, :, 0]
    advantages[4] = 0.0  # an average answer: no gradient, so nothing to clip
    # One answer is empty, as happens; the article's code divides 0 by 0 there.
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [4], [2]])
    return logprobs, old, ref, advantages, mask


LOSSES = {  # function, settings other than its defaults
    "the papers": ("grpo_loss", {}), "no KL": ("grpo_loss", {"beta": 0}),
    "clip-higher": ("grpo_loss", {"epsilon_high": 0.28, "kl": "low_var_kl"}),
    "much KL": ("grpo_loss", {"epsilon": 0.1, "epsilon_high": 0.05, "beta": 0.5, "kl": "kl"}),
    "GSPO without KL": ("gspo_loss", {"beta": 0}), "answer ratio": ("answer_ratio_loss", {}),
    "answer ratio without KL": ("answer_ratio_loss", {"beta": 0}),
    "corrected without KL": ("corrected_kl_loss", {"beta": 0}),
    "GSPO as it comes": ("gspo_loss", {}), "GSPO": ("gspo_loss", {"beta": 0.3, "epsilon": 0.1}),
    "no lower bound": ("answer_ratio_loss", {"epsilon": 1.5, "epsilon_high": 0.5, "kl": "abs"}),
    "corrected": ("corrected_kl_loss", {}), "corrected KL": ("corrected_kl_loss", {"beta": 0.3}),
    "corrected k2": ("corrected_kl_loss", {"epsilon": 0.1, "epsilon_high": 0.3, "kl": "mse"}),
}
LOSS_NAMES = ["grpo_loss", "gspo_loss", "answer_ratio_loss", "corrected_kl_loss"]
LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]
every_loss = pytest.mark.parametrize("name, loss_type", list(itertools.product(LOSSES, LOSS_TYPES)))
every_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def run_loss(name, loss_type, logprobs, old, ref, *others, cap=7):
    """Loss, gradient and metrics of a row of LOSSES."""
    loss_name, settings = LOSSES[name]
    settings = dict(settings)
    if "kl" in settings:
        settings["kl_fn"] = functools.partial(kl_estimate, kl_penalty_type=settings.pop("kl"))
    if loss_type != "grpo":  # that is the default
        settings |= {"loss_type": loss_type, "max_completion_length": cap}
    if settings.get("beta") == 0:
        ref = None  # it is not needed
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = getattr(grpo, loss_name)(leaf, old, ref, *others, **settings)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@every_loss
def test_the_loss_is_the_slow_one(name, loss_type):
    loss_name, settings = LOSSES[name]
    for seed in range(3):
        tensors = batch(seed)
        loss, slope, metrics = run_loss(name, loss_type, *tensors)
        assert all(map(torch.equal, tensors, batch(seed)))  # arguments are left alone
        leaf, *others = tensors
        right, right_metrics = slow_loss(loss_name, leaf.requires_grad_(), *others,
                                         loss_type=loss_type, **settings)
        near(loss, right.detach())
        near(slope, torch.autograd.grad(right, leaf)[0])
        assert metrics == pytest.approx(right_metrics, rel=1e-6)
        assert {type(value) for value in metrics.values()} == {float}
        # float32, as in a training, and a mask of numbers.
        near(run_loss(name, loss_type, *[x.float() for x in batch(seed)])[0], loss, 1e-5)


@every_loss
def test_nothing_behind_the_mask_gets_out_and_parts_add_up(name, loss_type):
    *clean, advantages, mask = batch()
    right, right_slope, right_metrics = run_loss(name, loss_type, *batch())
    # To mask the result would keep the loss clean, and leave NaN in the gradient.
    for dirt in (math.nan, math.inf, -math.inf):
        dirty = [torch.where(mask, x, dirt) for x in clean]
        dirty.append(torch.where(mask.any(dim=1), advantages, dirt))
        loss, slope, metrics = run_loss(name, loss_type, *dirty, mask)
        assert torch.equal(loss, right) and torch.equal(slope, right_slope)
        assert metrics == right_metrics
        loss, slope, metrics = run_loss(name, loss_type, *dirty, mask & False)
        assert loss == 0 and not slope.any() and set(metrics.values()) == {0.0}
    # Each part counts by its share: of the tokens for "dapo", of the answers otherwise.
    total = 0.0
    for rows in ([5, 0], [2], [1, 4, 3]):
        loss, slope, _ = run_loss(name, loss_type, *[x[rows] for x in batch()])
        share = mask[rows].double().sum() / mask.sum() if loss_type == "dapo" else len(rows) / 6
        total += share * loss
        near(share * slope, right_slope[rows])
    near(total, right)


@pytest.mark.parametrize("name", LOSSES)
def test_a_wild_token_harms_no_other_answer(name):
    tensors = [x.float() for x in batch()]
    calm_slope = run_loss(name, "dapo", *tensors)[1]
    tensors[1][0, 1] -= 1000  # pi_old: the ratio is e^1000
    tensors[2][0, 2] += 3e38  # pi_ref
    tensors[3][0] = -1e16  # the advantage
    loss, slope, metrics = run_loss(name, "dapo", *tensors)
    assert t64([loss, *metrics.values()]).isfinite().all() and slope.isfinite().all()
    assert torch.equal(slope[1:], calm_slope[1:])


SHAPES = {  # instead of (2, 5), or (2,) for the advantages; some would broadcast, silently
    "logprobs": [(5,), (2, 5, 1)], "old_logprobs": [(2, 4), (1, 5)], "mask": [(4, 5), (5,)],
    "ref_logprobs": [(3, 5), (2, 1)], "advantages": [(5,), (2, 1), (2, 5)],
}


@pytest.mark.parametrize("argument", SHAPES)
@pytest.mark.parametrize("loss_name", LOSS_NAMES)
def test_wrong_shapes_are_refused(argument, loss_name):
    for shape in SHAPES[argument]:
        tensors = {name: torch.zeros(2, 5) for name in SHAPES}
        tensors["advantages"] = torch.zeros(2)
        tensors[argument] = torch.zeros(shape)
        with pytest.raises(ValueError, match=rf"\b{argument} are {re.escape(str(shape))}"):
            getattr(grpo, loss_name)(**tensors)


# --- The apples that grpo.py and the README print ---
APPLES = [  # pi_theta, pi_old, pi_ref, advantages and mask
    t64([[0.3, 0.2], [0.1, 1], [0.3, 1], [0.1, 0.2]]).log(), t64([[0.2, 0.2]] * 4).log(),
    t64([[0.2, 0.2]] * 4).log(), t64([1, 1, -1, -1]), t64([[1, 1], [1, 0], [1, 0], [1, 1]])]
PRINTED = """
rewards       tensor([1.5000, 1.5000, 0.5000, 0.5000])
advantages    tensor([ 1.,  1., -1., -1.])
surrogate     tensor([ 1.2000,  1.0000,  0.5000, -1.5000, -0.8000, -1.0000])
k3            tensor([0.0721, 0.0000, 0.3069, 0.0721, 0.3069, 0.0000])
loss          tensor(0.2057)
its gradient  tensor([ 0.0017, -0.1250, -0.1350,  0.3783, -0.0050,  0.1250])
"""


def test_the_apples_that_grpo_py_and_the_readme_print(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    torch.set_printoptions(profile="default")
    exec(readme_block("rule_reward(answer"), {})
    assert capsys.readouterr().out == PRINTED.lstrip() + "0.2057\n"
    by_loss_type = [run_loss("the papers", name, *APPLES, cap=4)[0] for name in LOSS_TYPES]
    near(by_loss_type, [0.205685, 0.105053, 0.039395], 1e-6)


# --- In expectation: exact sums over a vocabulary of five, without sampling ---
# The policies are far apart: close together the two directions of the KL are nearly the same.
POLICY = t64([0.55, 0.25, 0.12, 0.06, 0.02])
REFERENCE = t64([0.03, 0.07, 0.15, 0.30, 0.45])


def exact_kl(p, q):
    return (p * (p / q).log()).sum()


def test_k3_is_unbiased():
    near((POLICY * k3_kl(POLICY.log(), REFERENCE.log())).sum(), exact_kl(POLICY, REFERENCE))


DIRECTIONS = {
    "nothing": lambda x: 0 * x.sum(),
    "KL(policy || ref)": lambda x: exact_kl(x.softmax(0), REFERENCE),
    "KL(ref || policy)": lambda x: exact_kl(REFERENCE, x.softmax(0)),
}


@pytest.mark.parametrize("name, direction", {  # loss and estimator: what it descends
    "grpo_loss kl": "nothing", "corrected_kl_loss kl": "KL(policy || ref)",
    "grpo_loss mse": "KL(policy || ref)", "grpo_loss low_var_kl": "KL(ref || policy)",
    "corrected_kl_loss low_var_kl": "KL(policy || ref)",
}.items())
def test_what_a_kl_penalty_descends(name, direction):
    """On-policy, advantages 0, and one answer of one token for each word of the vocabulary."""
    loss_name, estimator = name.split()
    logits = POLICY.log()
    gap = (REFERENCE / POLICY).log().unsqueeze(1)

    def loss(logprobs):  # pi_old and pi_ref are constants, even if the same graph made them
        return getattr(grpo, loss_name)(
            logprobs, logprobs, logprobs + gap, torch.zeros(5), torch.ones(5, 1), beta=1,
            kl_fn=lambda policy, ref: kl_estimate(policy, ref, estimator))[0]

    of_each_token = 5 * gradient(loss, logits.unsqueeze(1)).squeeze(1)  # the loss is a mean of five
    mean = gradient(lambda x: (POLICY * of_each_token * x.log_softmax(0)).sum(), logits)
    near(mean, gradient(DIRECTIONS[direction], logits))


# --- Parity with TRL 1.16: some of its figures, and where it is installed its own code ---
@pytest.mark.parametrize("row, figures", {  # the loss; sum and length of its gradient
    ("the papers", "grpo"): "-0.1301117861212 -0.1458677566844 0.1037278751082",
    ("the papers", "dr_grpo"): "-0.1283911960226 -0.118062121841 0.05977848483069",
    ("GSPO", "grpo"): "-0.03918783117086 -0.301053356673 0.1352687100367",
    ("corrected KL", "dapo"): "-0.2199715977601 -0.2524655203721 0.1764500272339",
}.items())
def test_loss_and_gradient_are_those_that_trl_gave(row, figures):
    loss, slope, _ = run_loss(*row, *batch())
    near([loss, slope.sum(), slope.norm()], numbers(figures))


def trl_loss(trl, name, loss_type, logprobs, old, ref, advantages, mask):
    """TRL's GRPOTrainer._compute_loss, on a trainer that has just what that method looks at."""
    loss_name, settings = LOSSES[name]
    epsilon = settings.get("epsilon", 0.2)
    trainer = SimpleNamespace(
        beta=settings.get("beta", 0.04), loss_type=loss_type, epsilon_low=epsilon,
        epsilon_high=epsilon, max_completion_length=7, model=SimpleNamespace(training=True),
        importance_sampling_level="sequence" if loss_name == "gspo_loss" else "token",
        args=SimpleNamespace(use_bias_correction_kl=loss_name == "corrected_kl_loss", delta=None,
                             steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        current_gradient_accumulation_steps=1, off_policy_mask_threshold=None, entropy_coef=0.0,
        use_adaptive_entropy=False, top_entropy_quantile=1.0, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, use_vllm=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, 0 * old, None))
    ids = mask.long()
    return trl.GRPOTrainer._compute_loss(trainer, None, dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=ids,
        advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref,
        num_items_in_batch=mask.sum()))


@pytest.mark.parametrize("name", ["no KL", "the papers", "GSPO", "corrected KL"])
@every_type
def test_loss_and_gradient_are_trls(name, loss_type):
    trl = pytest.importorskip("trl", reason="TRL is not installed: the figures above had to do")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the parity is with TRL 1.16, and this is {trl.__version__}")
    for seed in range(3):
        loss, slope, _ = run_loss(name, loss_type, *batch(seed))
        logprobs, *others = batch(seed)
        near(loss, trl_loss(trl, name, loss_type, logprobs, *others))
        near(slope, gradient(lambda x: trl_loss(trl, name, loss_type, x, *others), logprobs))


# --- One tiny world: a tokenizer, a model of any family, a handful of questions, a way to train ---
# transformers 5.0 knows only this older name for switching checkpointing on.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
NAN = math.nan
INF = math.inf
IDS = torch.tensor([[6, 7, 8, 9]])
PAD, END, EOS = 0, 1, 2  # as in Qwen there are two end tokens, and the config knows only one
VOCABULARY = 48  # more than the tokenizer's words, as in Qwen


def tiny_tokenizer(padding="<pad>"):
    """Letters and digits, with blanks between them."""
    special = "<pad> <end> <eos> <unk> user assistant".split()
    ids = {word: i for i, word in enumerate([*special, *string.ascii_lowercase, *string.digits])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=padding, eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<end>", "<pad>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}")
    return tokenizer


TOKENIZER = tiny_tokenizer()

PLAIN = {  # settings of a family that has none of its own
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.4,
    "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": PAD,
}


def tiny_model(family="qwen2", seed=0, **settings):
    """Random, with large weights: with the usual small ones all tokens are about equally likely."""
    plain = {} if family == "gemma3" else PLAIN  # it has them in a config within its config
    config = AutoConfig.for_model(family, **plain | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


QUESTIONS = [{"prompt": text} for text in ("a", "b c", "c d e", "d", "e f", "f g a", "g")]


def noisy_reward(prompts, completions, **columns):
    """Draws from each generator that a reward may draw from, so a resumed run must restore all."""
    return [text.count("a") + random.gauss(0, 1) + np.random.randn() + torch.rand(()).item()
            for text in completions]


TINY = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
            learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1)


def steps_of(model=None, reward=noisy_reward, data=QUESTIONS, folder=None, resume=False,
             loss_fn=grpo_loss, **settings):
    """The steps of a tiny training: the metrics and the learner after each."""
    config = GRPOConfig(**TINY | settings)
    return training_steps(model or tiny_model(), TOKENIZER, data, reward, config, folder, resume,
                          loss_fn)


EVERY = range(1, 9999)


def preceded(function, by, in_calls=EVERY):
    """`function`, but in these calls (from 1 on) `by` runs first. What it returns, if anything, is
    the result, and `function` is not called."""
    calls = []

    @functools.wraps(function)
    def changed(*args, **kwargs):
        calls.append(1)
        result = by(*args, **kwargs) if len(calls) in in_calls else None
        return function(*args, **kwargs) if result is None else result

    return changed


def untimed(metrics):
    return {name: value for name, value in metrics.items() if "_second" not in name}


def go(folder=None, stop=None, between=lambda metrics: None, **run):
    """Train, with `stop` only that many steps, and call `between` after each; untimed metrics."""
    history = []
    with contextlib.closing(steps_of(folder=folder, **run)) as steps:
        for metrics, _ in itertools.islice(steps, stop):
            history.append(untimed(metrics))
            between(metrics)
    return history


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# --- The sampler: token by token ---
PROMPTS = ["a b c d e f g", "h", "i j k"]


def sampled(model, prompts=PROMPTS, G=5, tokenizer=TOKENIZER, **settings):
    torch.manual_seed(0)
    return sample_groups(model, tokenizer, prompts, G, **{"max_completion_length": 8} | settings)


def same_rollout(one, other, tolerance=2e-5):
    for name in ("input_ids", "attention_mask", "completion_mask", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.texts == other.texts
    near(one.logprobs, other.logprobs, tolerance)


def slow_logprobs(model, input_ids, attention_mask, T, temperature=1.0):
    """Row by row, without padding, cache or chunks. Returns log-probs and entropies, (N, T)."""
    P = input_ids.shape[1] - T
    logprobs = []
    entropies = []
    for ids, real in zip(input_ids, attention_mask.bool()):
        n = int(real[P:].sum())
        logits = model(ids[real].unsqueeze(0), use_cache=False).logits[0, -n - 1 : -1]
        whole = (logits.double() / temperature).log_softmax(dim=-1)
        chosen = whole.gather(1, ids[P : P + n].unsqueeze(1)).squeeze(1)
        logprobs.append(pad(chosen, (0, T - n)))
        entropies.append(pad(-(whole.exp() * whole).sum(dim=-1), (0, T - n)))
    return torch.stack(logprobs), torch.stack(entropies)


def check_rollout(rollout, prompts, G, cap, tokenizer=TOKENIZER):
    """What holds of any rollout, read off the ids. Returns the lengths of the answers."""
    T = rollout.completion_mask.shape[1]
    P = rollout.input_ids.shape[1] - T
    assert len(rollout.input_ids) == len(rollout.texts) == len(prompts) * G
    lengths = []
    for row, ids in enumerate(rollout.input_ids.tolist()):
        prompt = tokenizer(prompts[row // G])["input_ids"]
        left = P - len(prompt)
        answer = ids[P:]
        n = 1
        while n < T and answer[n - 1] not in (END, EOS):
            n += 1  # the first end token is in, and nothing after it
        real = [1] * n + [0] * (T - n)
        assert ids[left:P] == prompt
        assert len(set(ids[:left] + answer[n:])) <= 1  # all padding is the same
        assert rollout.completion_mask[row].tolist() == real
        assert rollout.attention_mask[row].tolist() == [0] * left + [1] * len(prompt) + real
        assert rollout.truncated[row] == (answer[n - 1] not in (END, EOS))
        assert n == cap or not rollout.truncated[row]
        assert (rollout.logprobs[row, :n] < 0).all() and (rollout.logprobs[row, n:] == 0).all()
        assert rollout.texts[row] == tokenizer.decode(answer[:n], skip_special_tokens=True)
        lengths.append(n)
    return lengths


# Padding of its own, an end token, the other one, a word, none; and learned positions.
@pytest.mark.parametrize("family, padding, temperature", [
    ("qwen2", "<pad>", 1.0), ("qwen2", "<eos>", 0.7), ("qwen2", "<end>", 1.0), ("qwen2", "a", 0.7),
    ("qwen2", None, 1.0), ("gpt2", "<eos>", 1.3)])
def test_sampler_scorer_and_the_slow_way_agree(family, padding, temperature):
    """Wrong masks, positions and temperatures show here, and settings that nobody asked for."""
    model = tiny_model(family, initializer_range=0.25)
    # What a checkpoint brings along, and `generate` obeys. Qwen2.5 says 20, 0.8 and 1.1.
    vars(model.generation_config).update(top_k=1, top_p=0.1, repetition_penalty=2.0)
    tokenizer = tiny_tokenizer(padding)
    rollout = sampled(model, G=60, tokenizer=tokenizer, temperature=temperature)
    lengths = check_rollout(rollout, PROMPTS, 60, 8, tokenizer)
    ids = rollout.input_ids
    assert min(lengths) < 4 and rollout.truncated.any()  # else little has been shown
    assert {END, EOS} <= set(ids[:, -8:][rollout.completion_mask].tolist())
    # An end token at the cap is an end.
    assert (rollout.completion_mask[:, -1] & ~rollout.truncated).any()
    slow = slow_logprobs(model, ids, rollout.attention_mask, 8, temperature)[0]
    near(rollout.logprobs, slow, 2e-5)
    near(token_logprobs(model, ids, rollout.attention_mask, 8, temperature), slow, 2e-5)


@pytest.mark.parametrize("generation, config, token, found", [
    ([7, END], 9, "<eos>", [END, EOS, 7, 9]), (None, None, "<eos>", [EOS]), (None, 0, None, [0])])
def test_end_tokens_are_collected_from_three_places(generation, config, token, found):
    model = tiny_model()
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = token
    assert end_token_ids(model, tokenizer) == found
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id"):
        sampled(model, tokenizer=tokenizer)


# Of probabilities 0, 1/2, 0, 1/4, 1/4, 0. What falls on a border belongs to the later stretch, and
# 1, to which a number may be rounded, to the last stretch that is not empty.
DRAWN = {0.0: 1, 0.49: 1, 0.5: 3, 0.76: 4, 1 - 2**-53: 4, 1.0: 4}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # Apple's GPUs have no float64
def test_a_uniform_number_chooses_a_token(dtype):
    logits = torch.tensor([0, 0.5, 0, 0.25, 0.25, 0]).log()
    uniforms = torch.tensor(list(DRAWN), dtype=dtype)
    tokens, logprobs = choose_tokens(logits.expand(len(DRAWN), -1), 1.0, uniforms)
    assert tokens.tolist() == list(DRAWN.values())
    near(logprobs, logits[tokens], 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uniform_numbers_on_a_grid_draw_the_softmax(dtype, temperature):
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)).to(dtype) * 2
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs = choose_tokens(logits.expand(20_000, 30), temperature, uniforms)
    exact = (logits.double() / temperature).log_softmax(dim=0)
    counts = torch.bincount(tokens, minlength=30)
    assert (counts - 20_000 * exact.exp()).abs().max() <= 1.01
    near(logprobs, exact[tokens], 2e-6)  # so bfloat16 was widened before the softmax


def test_rare_tokens_of_a_large_vocabulary_are_told_apart():
    """Summed in float32, let alone bfloat16, they would vanish beside the likely one."""
    logits = pad(torch.tensor([23.0]), (0, 149_999)).bfloat16()  # 1.5e-5 for all others together
    uniforms = 1 - torch.linspace(1e-9, 1.5e-5, 60, dtype=torch.float64)
    tokens, _ = choose_tokens(logits.expand(60, -1), 1.0, uniforms)
    assert len(tokens.unique()) > 58 and tokens.max() > 149_900


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_temperature_zero_takes_the_likeliest(family):
    model = tiny_model(family)
    rollout = sampled(model, temperature=0)
    cold = sampled(model, temperature=1e-6)  # so cold that the likeliest is certain
    assert torch.equal(rollout.input_ids, cold.input_ids)
    near(rollout.logprobs, slow_logprobs(model, cold.input_ids, cold.attention_mask, 8)[0], 2e-5)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_rows_that_have_ended_leave_and_nothing_changes(family):
    model = tiny_model(family, initializer_range=0.2)  # answers of many lengths
    plain = sampled(model, drop_every=1000)
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: rows.append(len(out)))
    same_rollout(sampled(model, drop_every=1), plain)
    lengths = plain.completion_mask.sum(dim=1)
    live = [int((lengths > t).sum()) for t in range(1, lengths.max())]
    assert rows == [3] + live and live[-1] < 15  # each prompt is read once, not once an answer


def test_chats_go_through_the_template():
    first = [{"role": "user", "content": "a b"}]
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, *first]
    written = ["user a b <end> assistant",
               "user c <end> assistant d <end> user a b <end> assistant"]
    rollout = sampled(tiny_model(), prompts=[first, talk])
    check_rollout(rollout, written, 5, 8)
    same_rollout(rollout, sampled(tiny_model(), prompts=written), tolerance=0)


# --- The scorer: values and gradients of every family, against the slow way ---
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"query_pre_attn_scalar": 8, **WINDOW}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
FAMILIES = {  # what each has beside the settings that all have
    "qwen2": {}, "qwen3": {}, "llama": {}, "phi3": {},
    "gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},  # learned positions
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 3},
    "bloom": {}, "mpt": {},  # no positions, but a bias for distance
    "mistral": {"sliding_window": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW}, "qwen3_moe": EXPERTS,
    "gemma2": {"final_logit_softcapping": 2.0, **GEMMA},  # capped logits
    "gemma3_text": GEMMA,
    "gemma3": {"text_config": PLAIN | GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    "granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.06},  # scaled logits
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # from here on, layers with a state
    "qwen3_5_text": LINEAR,
    "qwen3_next": {"shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR},
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False,
              "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
}
every_family = pytest.mark.parametrize("name", FAMILIES)


def family_model(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {name}")
    return tiny_model(name, **FAMILIES[name])


def ragged():
    """Ids and mask of four answers, of up to 9 tokens, to each of five prompts of 1 to 7 tokens."""
    prompts = ["a b c", "d e f g h i j", "k l m n o p q", "r", "s t u v w"]
    model = tiny_model(initializer_range=0.2)
    rollout = sampled(model, prompts=prompts, G=4, max_completion_length=9)
    return rollout.input_ids, rollout.attention_mask


def gradient_of(value, model):
    return parameters_to_vector(torch.autograd.grad(
        value, list(model.parameters()), allow_unused=True, materialize_grads=True))


@every_family
def test_families_are_scored_as_the_slow_way_does(name):
    """Rows in any order, most with a prompt that others share, and with more padding or less."""
    model = family_model(name)
    rows = [18, 3, 0, 9, 16, 1, 2, 12, 7]  # 12, 9 and 7 are alone with their prompts
    ids, mask = [x[rows] for x in ragged()]
    pull = torch.randn(2, len(rows), 9, generator=torch.Generator().manual_seed(0))
    slow = torch.stack(slow_logprobs(model, ids, mask, 9, 0.7))
    slow_gradient = gradient_of((slow * pull).sum(), model)
    scale = slow_gradient.abs().max()
    for checkpointing, left, right in ((False, 0, 0), (False, 5, 3), (True, 2, 0)):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        scores = torch.stack(token_logprobs(
            model, pad(ids, (left, right), value=17), pad(mask, (left, right)), 9 + right, 0.7,
            return_entropy=True))
        assert scores.dtype == torch.float32 and (scores[:, :, 9:] == 0).all()
        near(scores[:, :, :9], slow, 1e-5)
        found = gradient_of((scores[:, :, :9] * pull).sum(), model)
        near(found / scale, slow_gradient / scale, 1e-5)


@every_family
def test_families_are_sampled_and_trained(name):
    """And the first loss is 0, its gradient not: all ratios are 1."""
    model = family_model(name)
    before = weights_of(model)
    metrics = go(model=model, steps=1, warmup_steps=0)[0]
    for figure in ("loss", "kl", "clip_fraction", "skipped_updates", "sampler_gap"):
        assert metrics[figure] == pytest.approx(0, abs=1e-5)
    assert metrics["ratio_max"] == 1 and metrics["grad_norm"] > 0.01
    assert (weights_of(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("never", [[], [46, 47]])  # tokens that the model rules out
@pytest.mark.parametrize("dtype, wide, tolerance", [
    (torch.bfloat16, torch.float32, 1e-4), (torch.float64, torch.float64, 1e-12)])
def test_the_softmax_is_wide_and_all_numbers_are_finite(dtype, wide, tolerance, never):
    """In bfloat16 the softmax of the same logits would be off by some hundredths."""
    model = tiny_model().to(dtype)
    never = torch.tensor(never, dtype=torch.long)
    model.lm_head.register_forward_hook(lambda _, __, out: out.index_fill(-1, never, -INF))
    ids = torch.randint(6, 42, (100, 6), generator=torch.Generator().manual_seed(0))
    logprobs, entropies = token_logprobs(model, ids, ids > 0, 1, return_entropy=True)
    assert logprobs.dtype == entropies.dtype == wide
    exact = model(ids[:, :-1]).logits[:, -1].to(wide).log_softmax(dim=-1)
    near(logprobs, exact.gather(1, ids[:, -1:]), tolerance)
    near(entropies, torch.special.entr(exact.exp()).sum(dim=-1, keepdim=True), tolerance)
    assert gradient_of((logprobs + entropies).sum(), model).isfinite().all()


def test_scoring_holds_few_logits_and_reads_each_prompt_once():
    model = tiny_model()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    ids, mask = [pad(x, (7, 7))[order] for x in ragged()]  # no row uses the columns at both ends
    token_logprobs(model, ids, mask, 16)  # tries once whether the head gives the logits
    read = []
    headed = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, out: read.append(out[..., 0].numel()))
    model.lm_head.register_forward_hook(lambda _, __, out: headed.append(len(out)))
    scores = token_logprobs(model, ids, mask, 16, return_entropy=True, tokens_per_chunk=10)
    assert sum(read) <= 5 * 7 + 20 * 9  # five prompts and twenty answers
    answers = mask[:, 14:].sum()
    assert max(headed) == 10 and sum(headed) == answers  # padding has no logits at all
    torch.stack(scores).sum().backward()
    assert max(headed) == 10 and sum(headed) == 2 * answers  # they are made once more


# --- Pasted under two imports, this much of grpo.py works in another project ---
LOSS_PARTS = "loss_metrics masked_mean average clipped_surrogate check_and_blank k3_kl"
SCORER_PARTS = ("trunk_and_head position_ids can_share_prompts states_of_rows "
                "states_with_shared_prompts")


@pytest.mark.parametrize("names, arguments", {  # the last of them is called
    "extract_boxed": [EGGS], "read_number": [r"\$1{,}000"],
    "extract_boxed read_number rule_reward": [EGGS, "63.0"], "group_advantages": [BOOK],
    "clipped_surrogate": [BOOK, BOOK, BOOK[:, 0]], "k3_kl": [BOOK, BOOK],
    "masked_mean": [BOOK, BOOK_MASK], "masked_mean average": [BOOK, BOOK_MASK],
    "group_advantages group_scale": [BOOK, "batch"], "overlong_penalty": [BOOK, 3, 2],
    "k3_kl kl_estimate": [BOOK, BOOK, "low_var_kl"],
    f"{LOSS_PARTS} grpo_loss": batch(), f"{LOSS_PARTS} gspo_loss": batch(),
    f"{LOSS_PARTS} answer_ratio_loss": batch(), f"{LOSS_PARTS} corrected_kl_loss": batch(),
    f"{SCORER_PARTS} token_logprobs": [tiny_model(), IDS, IDS > 0, 2],
}.items())
def test_pasted_into_another_project(names, arguments):
    project = {"re": re, "torch": torch}
    for name in names.split():
        exec(inspect.getsource(getattr(grpo, name)), project)
    assert str(project[name](*arguments)) == str(getattr(grpo, name)(*arguments))


# --- The step, against one slow step ---
FLAT = ("a", "d", "g")  # whatever is answered to these questions earns the same


def uneven_reward(prompts, completion_ids, **columns):
    """Made of an answer's ids, so that it is seen if rewards and answers get mixed up."""
    return [0.3 if prompt in FLAT else (7 * sum(ids) % 11) / 10
            for prompt, ids in zip(prompts, completion_ids)]


UPDATE = {
    "steps": 2, "prompts_per_step": 3, "max_completion_length": 6, "learning_rate": 3e-3,
    "warmup_steps": 0, "lr_scheduler_type": "constant_with_warmup", "temperature": 0.8, "seed": 1,
    "tokens_per_micro_batch": 25,
}


def slow_step(model, reference, optimizer, rollout, rewards, config, loss_fn):
    """Whole mini-batches, one answer at a time. Returns what the log must say of the step."""
    G = config.num_generations
    ids, real, mask = rollout.input_ids, rollout.attention_mask, rollout.completion_mask
    T = mask.shape[1]
    drawn = rollout.logprobs[mask]
    log = {
        "reward_mean": rewards.mean(), "reward_std": rewards.var(correction=0).sqrt(),
        "zero_variance_fraction": (rewards == rewards[:, :1]).all(dim=1).float().mean(),
        "entropy": -drawn.mean(), "completion_length": len(drawn) / len(ids),
        "truncated_fraction": sum(rollout.truncated.tolist()) / len(ids), "skipped_updates": 0,
        "loss": 0, "grad_norm": 0, "ratio_max": 0, "kl": 0, "clip_fraction": 0, "sampler_gap": 0,
    }
    # All answers count in the statistics of their group, cut ones too.
    advantages = group_scale(rewards, config.scale_rewards).flatten()
    if config.mask_truncated_completions:
        mask = mask & ~rollout.truncated.unsqueeze(1)
    names = ("epsilon", "epsilon_high", "beta", "loss_type", "max_completion_length")
    settings = {name: getattr(config, name) for name in names}
    settings["kl_fn"] = lambda policy, ref: kl_estimate(policy, ref, config.kl_penalty_type)
    with torch.no_grad():  # rounded to float32 as in the training: Adam magnifies differences
        old = slow_logprobs(model, ids, real, T, config.temperature)[0].float()
        ref = slow_logprobs(reference, ids, real, T, config.temperature)[0].float()
    updates = config.num_iterations * config.num_mini_batches
    tokens = 0
    for _ in range(config.num_iterations):
        order = torch.randperm(config.prompts_per_step)
        for groups in order.tensor_split(config.num_mini_batches):
            rows = torch.cat([torch.arange(group * G, group * G + G) for group in groups])
            now, entropies = slow_logprobs(model, ids[rows], real[rows], T, config.temperature)
            loss, _ = loss_fn(now, old[rows], ref[rows], advantages[rows], mask[rows], **settings)
            bonus = average(entropies, mask[rows], config.loss_type, config.max_completion_length)
            loss = loss - config.entropy_bonus * bonus
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            log["loss"] += loss.item() / updates
            log["grad_norm"] += norm.item() / updates
            # The other figures leave out answers without a gradient, as the training does.
            teaches = (advantages[rows] != 0) | (config.beta + config.entropy_bonus > 0)
            taught = mask[rows] & teaches.unsqueeze(1)
            _, found = loss_fn(now, old[rows], ref[rows], advantages[rows], taught, **settings)
            n = int(taught.sum())
            tokens += n
            log["kl"] += n * found["kl"] * (config.beta > 0)  # at 0 there is no reference
            log["clip_fraction"] += n * found["clip_fraction"]
            log["ratio_max"] = max(log["ratio_max"], found["ratio_max"])
            log["sampler_gap"] += (rollout.logprobs - old)[rows][taught].abs().sum().item()
    for name in ("kl", "clip_fraction", "sampler_gap"):
        log[name] /= max(tokens, 1)
    return log


SETTINGS = {
    "grpo": {}, "dapo": {"loss_type": "dapo"}, "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_fn": gspo_loss}, "answer-ratio": {"loss_fn": answer_ratio_loss},
    "corrected-kl": {"loss_fn": corrected_kl_loss}, "k2": {"kl_penalty_type": "mse"},
    "2x2": {"num_iterations": 2, "num_mini_batches": 2, "learning_rate": 0.01},
    "in-three": {"num_mini_batches": 3}, "checkpointing": {"gradient_checkpointing": True},
    "rows-alone": {"tokens_per_micro_batch": 1}, "all-at-once": {"tokens_per_micro_batch": 10_000},
    # Without KL and entropy flat groups are left out, and of a single one only momentum is left.
    "without-kl": {"beta": 0.0}, "entropy": {"entropy_bonus": 0.3},
    "one-group": {"prompts_per_step": 1, "steps": 7},
    "no-cut-answers": {"mask_truncated_completions": True, "max_completion_length": 12},
    "tight-clip": {"epsilon": 0.02, "epsilon_high": 0.01}, "unscaled": {"scale_rewards": "none"},
    "over-std-of-all": {"scale_rewards": "batch"}, "leave-one-out": {"scale_rewards": "rloo"},
    "short-gradients": {"max_grad_norm": 0.05}, "whole-gradients": {"max_grad_norm": 1e9},
}


@pytest.mark.parametrize("name", """
grpo, grpo 2x2, grpo 2x2 rows-alone, dapo rows-alone checkpointing, dr_grpo 2x2 rows-alone,
dapo 2x2 all-at-once, grpo without-kl, dr_grpo without-kl, dapo 2x2 without-kl,
grpo without-kl one-group, grpo without-kl no-cut-answers, dapo in-three without-kl no-cut-answers,
grpo without-kl entropy, dapo entropy, dr_grpo 2x2 entropy, grpo 2x2 tight-clip,
grpo 2x2 short-gradients, grpo in-three without-kl whole-gradients, grpo 2x2 k2 checkpointing,
grpo unscaled, grpo 2x2 over-std-of-all, dr_grpo without-kl leave-one-out, grpo 2x2 gspo,
grpo 2x2 answer-ratio, dapo 2x2 corrected-kl""".strip().replace("\n", " ").split(", "))
def test_steps_are_those_of_the_slow_way(name):
    """In float64, where two right ways agree to the last digits: weights and metrics."""
    run = dict(UPDATE)
    for word in name.split():
        run |= SETTINGS[word]
    loss_fn = run.pop("loss_fn", grpo_loss)
    config = GRPOConfig(**TINY | run)
    model = tiny_model("gpt2", initializer_range=0.2, tie_word_embeddings=True).double()
    start = weights_of(model)
    slow_model = copy.deepcopy(model)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow_model.parameters(), config.learning_rate, weight_decay=0.0)
    states = []

    def reward(**columns):
        states.append(torch.get_rng_state())  # the next to be drawn is the order of the groups
        # Weights 1 % larger than those that sampled: without that, sampler_gap would be 0.
        for parameter in [*model.parameters(), *slow_model.parameters()]:
            parameter.data *= 1.01
        return uneven_reward(**columns)

    for metrics, learner in steps_of(model, reward, loss_fn=loss_fn, **run):
        rollout = learner.rollout
        torch.set_rng_state(states[-1])
        wanted = slow_step(slow_model, reference, optimizer, rollout, learner.rewards, config,
                           loss_fn)
        seconds = sum(metrics[f"{part}_seconds"] for part in ("sample", "score", "update"))
        wanted["tokens_per_second"] = rollout.completion_mask.sum() / seconds
        wanted["questions_seen"] = config.prompts_per_step * metrics["step"]
        for figure, value in wanted.items():
            assert metrics[figure] == pytest.approx(float(value), rel=1e-4, abs=2e-6), figure
        moved = (weights_of(model) - start).norm()
        assert (weights_of(model) - weights_of(slow_model)).norm() <= 2e-4 * moved
    assert (learner.reference is None) == (config.beta == 0)
    if learner.reference is not None:
        assert torch.equal(weights_of(learner.reference), start)


@pytest.mark.parametrize("budget", [1, 20, 45, 100, 10_000])
def test_micro_batches_keep_to_their_budget(budget):
    """Answers of like length together, the longest first, each of them once."""
    batches = []
    loss_fn = preceded(grpo_loss, lambda new, old, ref, advantages, mask, **settings:
                       batches.append(mask.sum(dim=1).tolist()))
    data = [{"prompt": "a b c"}, {"prompt": "b c d"}, {"prompt": "c d e"}]  # 3 tokens each
    _, learner = next(steps_of(
        tiny_model(initializer_range=0.15), uneven_reward, data, loss_fn=loss_fn, **UPDATE | {
            "num_generations": 8, "tokens_per_micro_batch": budget, "max_completion_length": 12}))
    lengths = learner.rollout.completion_mask.sum(dim=1).tolist()
    assert sum(batches, []) == sorted(lengths, reverse=True)
    assert min(lengths) < 4 and max(lengths) == 12
    for some, following in zip(batches, batches[1:] + [[0]]):
        assert len(some) == 1 or len(some) * (3 + some[0]) <= budget
        assert some[-1] >= some[0] / 2
        # It ends only where it has to.
        assert (len(some) + 1) * (3 + some[0]) > budget or following[0] < some[0] / 2


@cases("settings, by_hand", {
    "plainly": ({}, False), "two passes": ({"num_iterations": 2}, False),
    "checkpointing": ({"gradient_checkpointing": True}, False), "the user's own": ({}, True)})
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_train_mode_disturbs_neither_sampling_nor_training(family, settings, by_hand):
    """Also where gradient checkpointing, which needs train mode, was switched on by the user."""
    plain = tiny_model(family)
    dropout = dict.fromkeys(["attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.5)
    other = tiny_model(family, **dropout).train()
    if by_hand:
        other.gradient_checkpointing_enable()
    same_rollout(sampled(other), sampled(plain))
    assert all(module.training for module in other.modules()) and not plain.training
    for model in (plain, other):
        go(model=model, steps=2, reward=uneven_reward, learning_rate=1e-3, **settings)
    assert (weights_of(plain) - weights_of(other)).norm() < 1e-3 * weights_of(plain).norm()
    other.train().lm_head = None
    with pytest.raises(TypeError):
        sampled(other)
    assert other.training  # even then


def test_gradient_checkpointing_computes_layers_in_the_backward_pass_once_more():
    events = []
    loss_fn = preceded(grpo_loss, lambda *_, **__: events.append("loss"))
    model = tiny_model()
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: events.append("layer"))
    go(model=model, steps=1, loss_fn=loss_fn, gradient_checkpointing=True)
    assert events[-1] == "layer"


# The last three of six steps, as parts of learning_rate.
@pytest.mark.parametrize("schedule, falling", [
    ("linear", [0.75, 0.5, 0.25]), ("constant_with_warmup", [1, 1, 1]),
    ("cosine", [0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])])
def test_learning_rates(schedule, falling):
    """No step is made at rate 0, neither the first nor the last."""
    history = go(learning_rate=3e-3, warmup_steps=3, lr_scheduler_type=schedule)
    rates = [metrics["learning_rate"] for metrics in history]
    assert rates == pytest.approx([3e-3 * part for part in [1 / 3, 2 / 3, 1] + falling])


def test_dynamic_sampling_replaces_flat_groups():
    """What comes in their place stands with its own question, reward, log-probs and advantage."""
    model = tiny_model(initializer_range=0.2)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    model.lm_head.bias.data[END] = 2.0  # so that the longest answers differ, and some pad others
    run = dict(dynamic_sampling=20, num_generations=3, prompts_per_step=4, max_completion_length=40)
    for metrics, learner in steps_of(model, uneven_reward, **UPDATE | run):
        rollout = learner.rollout
        prompts = [example["prompt"] for example in learner.examples]
        assert len(prompts) == 4 and not set(prompts) & set(FLAT)
        check_rollout(rollout, prompts, 3, 40)
        T = rollout.completion_mask.shape[1]
        answers = [ids[real].tolist() for ids, real in zip(rollout.input_ids[:, -T:],
                                                           rollout.completion_mask)]
        of_each_row = [prompt for prompt in prompts for _ in range(3)]
        near(learner.rewards.flatten(), uneven_reward(of_each_row, answers))
        near(learner.advantages, group_advantages(learner.rewards))
        assert metrics["zero_variance_fraction"] == 0 and metrics["sampler_gap"] < 1e-5
    for letters, drawn in {"ad": 8, "eb": 2}.items():  # 2 + 3 tries of 2, all flat; none is
        data = [{"prompt": letter} for letter in letters]
        step = go(reward=uneven_reward, data=data, steps=1, dynamic_sampling=3)[0]
        assert step["questions_seen"] == drawn


# --- Precision: bfloat16 over float32 masters, here on the CPU ---
def test_masters_take_steps_and_add_up_gradients_that_bfloat16_cannot():
    model = tiny_model()
    frozen = model.model.norm.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = parameters_to_vector(trained).detach()
    added = []  # this hook is called before the training's own, which frees the gradient
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: added.append(p.grad))
    *_, (metrics, learner) = steps_of(model, bf16=True, steps=3, warmup_steps=0, max_grad_norm=1e9,
                                      learning_rate=1e-6, tokens_per_micro_batch=1)
    assert metrics["sampler_gap"] < 0.1
    assert frozen.dtype == torch.bfloat16 and (frozen == 1).all()
    after = parameters_to_vector(learner.weights)
    assert after.dtype == torch.float32
    assert torch.equal(parameters_to_vector(trained), after.bfloat16())
    learns = parameters_to_vector([weight.grad for weight in learner.weights]) != 0
    moved = (after - before).abs() > 3e-7
    seen = after.bfloat16() != before.bfloat16()
    assert moved[learns].double().mean() > 0.8  # most of the masters have moved
    assert seen[learns].double().mean() < 0.1  # and in bfloat16 hardly any
    # The gradients of the last step's 8 answers are in bfloat16, and add up in float32.
    assert {gradient.dtype for gradient in added} == {torch.bfloat16}
    near(learner.weights[-1].grad, torch.stack(added[-8:]).float().sum(dim=0), 1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())
    # Positions are angles, kept in a buffer that bfloat16 would spoil.
    angles = tiny_model().model.rotary_emb.inv_freq
    for network in (model, learner.reference):
        assert torch.equal(network.model.rotary_emb.inv_freq, angles)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


# --- What is refused, and what the error says ---
FITS = "a " * 56  # 56 tokens: with a cap of 8 they just fill the context of 64
NOT_WHOLE = [-1, 1.5, "2", None, NAN]
NOT_REAL = [-0.1, NAN, INF, "0.1"]


@pytest.mark.parametrize("names, values", {  # settings, and values that none of them may have
    "num_generations": [1, 0, *NOT_WHOLE],
    "prompts_per_step max_completion_length steps num_iterations": [0, *NOT_WHOLE],
    "num_mini_batches tokens_per_micro_batch": [0, *NOT_WHOLE],
    "warmup_steps dynamic_sampling seed save_steps": NOT_WHOLE,
    "temperature max_grad_norm": [0, None, *NOT_REAL],
    "learning_rate beta epsilon entropy_bonus": [None, *NOT_REAL],
    "epsilon_high": NOT_REAL,
    "loss_type scale_rewards lr_scheduler_type kl_penalty_type": ["bnpo", None],
}.items())
def test_impossible_settings_are_refused_at_once(names, values):
    for name in names.split():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} is {value!r}"):
                GRPOConfig(**{name: value})


def test_what_stands_at_the_edge_is_taken():
    for family in ("qwen2", "gemma3"):  # gemma3 has its context in a config within its config
        sampled(family_model(family), prompts=[FITS], G=1)
    sampled(tiny_model(vocab_size=42), tokenizer=tiny_tokenizer("<new>"))  # as padding, token 42
    GRPOConfig(epsilon=1.5, epsilon_high=0, prompts_per_step=4, num_mini_batches=4)
    GRPOConfig(num_generations=2, prompts_per_step=1, max_completion_length=1, steps=1,
               warmup_steps=0, learning_rate=0, beta=0, epsilon=0, save_steps=0)
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"


def train_quantized():
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(48, 32).char(), requires_grad=False)
    go(model=model)


@pytest.mark.parametrize("said, call", {  # what is said: a call
    "finite rewards, got .*nan": lambda: group_advantages(numbers("0.5 nan")),
    r"2 or more finite rewards, got tensor.\[1": lambda: group_advantages(t64([1])),
    "size=.2, 0": lambda: group_advantages(t64([[], []])),
    "(?s)finite rewards, got .* inf": lambda: group_advantages(t64([[0.5, 1], [INF, 1]])),
    "'bnpo', and must be": lambda: grpo_loss(*batch(), loss_type="bnpo"),
    "'dr_grpo' needs max_completion_length": lambda: grpo_loss(*batch(), loss_type="dr_grpo"),
    "beta is 0.07": lambda: grpo_loss(P_02, P_02, None, t64([1]), ONE, beta=0.07),
    "'k4'; it is": lambda: kl_estimate(P_02, P_04, "k4"),
    "'column', and must be": lambda: group_scale(BOOK, "column"),
    "num_generations 0": lambda: sampled(tiny_model(), G=0),
    "completion_length 0 must": lambda: sampled(tiny_model(), max_completion_length=0),
    "temperature -0.1 at": lambda: sampled(tiny_model(), temperature=-0.1),
    "temperature nan at": lambda: sampled(tiny_model(), temperature=NAN),
    "one or more prompts, got .]": lambda: sampled(tiny_model(), prompts=[]),
    "one or more prompts, got 'a b'": lambda: sampled(tiny_model(), prompts="a b"),
    "prompt 1 has no tokens": lambda: sampled(tiny_model(), prompts=["a", ""]),
    "57 .* 8 .* context of 64": lambda: sampled(tiny_model(), prompts=["a", FITS + "a"]),
    "58 .* 8 .* context of 64": lambda: sampled(family_model("gemma3"), prompts=[FITS + "a a"]),
    "temperature nan, compl": lambda: token_logprobs(tiny_model(), IDS, IDS > 0, 2, NAN),
    "temperature 0, compl": lambda: token_logprobs(tiny_model(), IDS, IDS > 0, 2, 0),
    "completion_length 0 and": lambda: token_logprobs(tiny_model(), IDS, IDS > 0, 0),
    "leaves for the prompt, 0, must": lambda: token_logprobs(tiny_model(), IDS, IDS > 0, 4),
    "lm_head.weight is torch.int8.*quantized": train_quantized,
    "num_mini_batches is 5": lambda: GRPOConfig(prompts_per_step=4, num_mini_batches=5),
    "kl_penalty_type 'mse'": lambda: GRPOConfig(beta=0, kl_penalty_type="mse"),
    "output_dir": lambda: go(resume=True),
}.items())
def test_what_cannot_be_is_refused(said, call):
    with pytest.raises(ValueError, match=said):
        call()


# --- The night: whatever breaks a run, resumed it ends as if nothing had happened ---
# Each run below has a checkpoint of step 2 and was left after step 3. It is resumed, breaks in
# step 3 or 4, and is resumed again. Then its folder has to be that of a run left in peace.
class Killed(BaseException):
    """Like a SIGKILL: nothing in the program may catch it."""


def save_half(error):
    def fault(tensors, path, metadata):
        Path(path).write_bytes(b"half a checkpoint")
        raise error

    return fault


def kill_at_the_log(path, *mode, **settings):
    if "metrics.jsonl" in str(path) and mode == ("w",):
        Path(path).write_bytes(b"")
        raise Killed


no_memory = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
fail = Mock(side_effect=RuntimeError("the device is lost"))
kill = Mock(side_effect=Killed)
ctrl_c = Mock(side_effect=lambda *_, **__: signal.raise_signal(signal.SIGINT))
# What the reward has drawn before it gave NaN has to be undone.
give_nan = Mock(side_effect=lambda **given: [NAN for _ in noisy_reward(**given)])
LOST = "^the device is lost$"
HOPELESS = "1 prompts at once.*gradient_checkpointing.*smaller"
FULL = "step 4 could not be saved.*No space left on device.*intact"
EMBED = (torch.nn.Embedding, "forward")
GRADIENT = (torch.nn.utils, "clip_grad_norm_")
WRITE = (safetensors.torch, "serialize_file")
RENAME = (os, "replace")
OPEN = (builtins, "open")

NIGHT = {"steps": 5, "save_steps": 2}
MANY = {"num_iterations": 2, "num_mini_batches": 2, "beta": 0}
DYNAMIC = {"dynamic_sampling": 2, "num_generations": 2, "bf16": True}
# So coarse that many groups are flat, and one or two questions more are drawn.
DYNAMIC["reward"] = lambda **given: [float(reward > 1) for reward in noisy_reward(**given)]
RUNS = {"plain": NIGHT, "several updates": NIGHT | MANY, "dynamic, in bfloat16": NIGHT | DYNAMIC}


def result(folder):
    """All that a run leaves: the checkpoint's bytes, and the log, which is JSON without NaN."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    log = [untimed(json.loads(line, parse_constant=pytest.fail)) for line in lines]
    return (folder / "checkpoint.safetensors").read_bytes(), log


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each of RUNS the folder of a whole run, and that of one which was left after step 3."""
    found = {}
    for name, run in RUNS.items():
        found[name] = (tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("left"))
        go(found[name][0], **run)
        go(found[name][1], stop=3, **run)
    return found


@pytest.fixture
def own_handler():
    """What the caller wants of Ctrl-C, which must hold again when a run is over."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("run", RUNS)
# What breaks, in which calls, how; the error that ends the run, its words; the step saved by then.
@cases("place, in_calls, happens, error, says, saved", {
    "the reward raises": ("reward", [1], fail, ValueError, "raised RuntimeError: the device", 2),
    "the reward is nan": ("reward", [1], give_nan, ValueError, "returned nan at place 0", 2),
    "ctrl-c": ("reward", [1], ctrl_c, None, None, 3),
    "ctrl-c, and again": (EMBED, EVERY, ctrl_c, KeyboardInterrupt, None, 2),
    "ctrl-c while the caller is busy": ("between", [1], ctrl_c, None, None, 3),
    "the caller's evaluation fails": ("between", [2], fail, RuntimeError, LOST, 4),
    "the second update fails": (GRADIENT, [2], fail, RuntimeError, LOST, 2),
    "another error than lack of memory": (EMBED, EVERY, fail, RuntimeError, LOST, 2),
    "hopelessly out of memory": (EMBED, EVERY, no_memory, torch.OutOfMemoryError, HOPELESS, 2),
    "disk full": (WRITE, [1], save_half(OSError(28, "No space left on device")), OSError, FULL, 2),
    "killed while writing": (WRITE, [1], save_half(Killed), Killed, None, 2),
    "killed before the log is renamed": (RENAME, [1], kill, Killed, None, 2),
    "killed before the checkpoint is renamed": (RENAME, [2], kill, Killed, None, 2),
    "killed while resuming": (OPEN, EVERY, kill_at_the_log, Killed, None, 2),
})
def test_a_broken_run_goes_on_as_if_nothing_had_happened(
        place, in_calls, happens, error, says, saved, run, folders, tmp_path, monkeypatch,
        own_handler, capsys):
    whole, begun = folders[run]
    folder = tmp_path / "run"
    shutil.copytree(begun, folder)
    run = {"resume": True, "reward": noisy_reward, "between": lambda metrics: None} | RUNS[run]
    broken = run | {"model": tiny_model()}
    ends = pytest.raises(error, match=says) if error else contextlib.nullcontext()
    with monkeypatch.context() as patch, ends:
        if place in run:
            broken[place] = preceded(run[place], happens, in_calls)
        else:
            patch.setattr(*place, preceded(getattr(*place), happens, in_calls))
        go(folder, **broken)
    assert signal.getsignal(signal.SIGINT) is own_handler
    assert ("interrupted" in capsys.readouterr().out) == (happens is ctrl_c)
    model = broken["model"]
    assert not model.training
    # A hook that was left on the model would take these gradients away.
    assert all(parameter.grad is None for parameter in model.parameters())
    model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    if error is Killed:  # in the middle of a line, for example
        with open(folder / "metrics.jsonl", "a") as log:
            log.write('{"step": 4, "los')
    else:
        assert not list(folder.glob("*.new"))
    assert go(folder, **run)[0]["step"] == saved + 1
    assert result(folder) == result(whole)
    assert set(os.listdir(folder)) == {"checkpoint.safetensors", "metrics.jsonl"}


@pytest.mark.parametrize("save_steps, steps", [
    (1, [1, 2, 3, 4, 5]), (3, [3, 5]), (9, [5]), (0, [])])
def test_each_step_is_logged_and_save_steps_says_when_all_is_saved(save_steps, steps, tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    saved = []
    for metrics, _ in steps_of(folder=tmp_path, steps=5, save_steps=save_steps):
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == metrics
        if checkpoint.exists():
            saved.append(metrics["step"])
            checkpoint.unlink()
    assert saved == steps


# --- Resume: the same run, or none ---
OTHER_SETTINGS = dict(
    num_generations=2, prompts_per_step=3, max_completion_length=6, temperature=0.9, beta=0.2,
    epsilon=0.3, epsilon_high=0.3, loss_type="dapo", scale_rewards="none", steps=7,
    num_iterations=2, num_mini_batches=2, learning_rate=0.02, warmup_steps=3,
    lr_scheduler_type="cosine", max_grad_norm=2.0, kl_penalty_type="mse", entropy_bonus=0.1,
    mask_truncated_completions=True, dynamic_sampling=1, seed=4, bf16=True)
MAY_CHANGE = dict(save_steps=5, gradient_checkpointing=True, tokens_per_micro_batch=64)


@pytest.mark.parametrize("says, other", {
    "holds a run: resume it": {"resume": False},
    "there examples is 7, here 5": {"data": QUESTIONS[:5]},
    "there loss_fn is grpo_loss, here gspo_loss": {"loss_fn": gspo_loss},
    "checksum of the prompts": {"data": QUESTIONS[::-1]},
    "initial weights is .*, here": {"model": tiny_model(seed=1)},
    **{f"there {name} is .*, here {value}$": {name: value}
       for name, value in OTHER_SETTINGS.items()},
}.items())
def test_another_run_is_refused_with_the_difference_named(says, other, folders):
    begun = folders["plain"][1]
    before = result(begun)
    with pytest.raises(ValueError, match=says):
        go(begun, **{"resume": True} | NIGHT | other)
    assert result(begun) == before


def test_a_resumed_run_may_be_in_other_parts_and_holds_on_to_no_file(folders, tmp_path):
    settings = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert settings == set(OTHER_SETTINGS) | set(MAY_CHANGE)  # a new one belongs into one of them
    shutil.copytree(folders["plain"][1], tmp_path / "run")
    maps = Path("/proc/self/maps")
    rest = steps_of(folder=tmp_path / "run", resume=True, **NIGHT | MAY_CHANGE)
    for step, (metrics, _) in zip((3, 4, 5), rest, strict=True):
        assert metrics["step"] == step
        # Mapped into memory, the old checkpoint would keep its room on the disk.
        assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_a_log_alone_is_a_run_too_but_resumed_it_starts_anew(folders, tmp_path):
    go(tmp_path, stop=1, **NIGHT)  # nothing is saved yet
    with pytest.raises(ValueError, match="resume"):
        go(tmp_path, **NIGHT)
    assert len(go(tmp_path, resume=True, **NIGHT)) == 5
    assert result(tmp_path) == result(folders["plain"][0])


def test_a_finished_run_returns_what_it_had_logged(folders):
    whole = folders["plain"][0]
    model = tiny_model()
    history = train(model, TOKENIZER, QUESTIONS, noisy_reward, GRPOConfig(**TINY | NIGHT), whole,
                    resume=True)
    trained = tiny_model()
    assert go(model=trained, steps=5) == [untimed(metrics) for metrics in history]
    assert torch.equal(weights_of(model), weights_of(trained))
    loaded = tiny_model()
    assert grpo.load_weights(whole, loaded) == 5
    assert torch.equal(weights_of(loaded), weights_of(trained))


def test_in_another_thread_ctrl_c_is_not_touched(own_handler):
    """Only the main thread may; a run elsewhere has to do without, and say nothing."""
    handlers = set()
    run = ThreadPoolExecutor().submit(
        go, between=lambda _: handlers.add(signal.getsignal(signal.SIGINT)))
    assert run.result() == go()
    assert handlers == {own_handler}


# --- Too little memory: half as much at once, and the same result ---
# A hook plays the small card: more than four rows at once are too much for it. There are 12 rows of
# answers to 3 questions, and 4 of up to 15 tokens each fit into a budget of 64.

def ending_model(logit):
    """The end tokens' logits are raised by `logit`: 100 for empty answers, -100 for none to end."""
    model = tiny_model()
    bias = torch.zeros(VOCABULARY)
    bias[[END, EOS]] = logit
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model


PARTS = ["2 prompts", "1 prompts", "128 tokens", "64 tokens"]


def small_card(_, args):
    if len(args[0]) > 4:
        no_memory()


@cases("place, tries, settings", {  # where it runs out; what is tried then; settings
    "sampling and reference": ("forward", PARTS, {}),
    "pi_old": ("forward", PARTS, {"beta": 0, "num_iterations": 2}),
    "the update": ("forward", PARTS, {"beta": 0}),
    "the backward pass": ("backward", PARTS[2:], {"beta": 0}),
    "in bfloat16": ("backward", PARTS[2:], {"beta": 0, "bf16": True}),
})
def test_out_of_memory_does_the_same_in_smaller_parts(place, tries, settings, capsys):
    small = ending_model(-100.0)
    embedding = small.get_input_embeddings()
    if place == "forward":
        embedding.register_forward_pre_hook(small_card)
    else:  # the gradient of the embedding comes last, and knows no rows
        last = []
        embedding.register_forward_pre_hook(lambda _, args: last.append(args))
        embedding.weight.register_post_accumulate_grad_hook(lambda _: small_card(_, last[-1]))
    run = {"prompts_per_step": 3, "max_completion_length": 12, "steps": 2} | settings
    found = go(model=small, tokens_per_micro_batch=256, **run)
    said = re.findall("from here on (.*) at once", capsys.readouterr().out)
    assert said == tries  # once each, not in every step: it is remembered
    model = ending_model(-100.0)
    wanted = go(model=model, tokens_per_micro_batch=64, **run)
    assert found == [pytest.approx(metrics, rel=1e-4, abs=1e-4) for metrics in wanted]
    assert torch.equal(weights_of(small), weights_of(model))


# --- Numbers that are not finite: two updates in a row are skipped, the third ends the run ---
@cases("spoil", {
    "the loss is nan": lambda loss: loss * NAN, "the loss is inf": lambda loss: loss + INF,
    "the gradient is nan": lambda loss: loss + (loss - loss.detach()).sqrt(),  # the root at 0
})
@pytest.mark.parametrize("passes", [1, 2])
def test_two_failed_steps_in_a_row_are_forgiven_and_a_third_is_not(spoil, passes, tmp_path, capsys):
    model = ending_model(-100.0)
    weights = [weights_of(model)]

    def broken_loss(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        return spoil(loss), metrics

    calls = [call for call in range(1, 99) if 1 + (call - 1) // passes in (2, 3, 5, 6, 7)]
    run = {"num_iterations": passes, "save_steps": 2, "steps": 8}
    with pytest.raises(FloatingPointError, match="three steps in a row"):
        go(tmp_path, model=model, loss_fn=preceded(grpo_loss, broken_loss, calls),
           between=lambda _: weights.append(weights_of(model)), **run)
    assert capsys.readouterr().out.count("update skipped") == 5 * passes
    for metrics in result(tmp_path)[1]:
        step = metrics["step"]
        stands_still = torch.equal(weights[step], weights[step - 1])
        assert stands_still == bool(metrics["skipped_updates"]) == (step in (2, 3, 5, 6))
    assert torch.equal(weights_of(model), weights[4])
    # Mended, it goes on from the last checkpoint, that of step 6.
    rest = go(tmp_path, model=ending_model(-100.0), resume=True, **run)
    assert [metrics["skipped_updates"] for metrics in rest] == [0, 0]


def test_the_question_that_broke_an_update_is_named(tmp_path, capsys):
    model = ending_model(0.0)
    word = TOKENIZER("x")["input_ids"][0]
    model.get_decoder().embed_tokens.weight.data[word] = NAN
    model.lm_head.bias.data[word] = -100.0  # no answer to another question has an x in it
    for letters in ("abxd", "dxba"):  # in one at least, x is not asked first
        data = [{"prompt": letter} for letter in letters]
        run = dict(folder=tmp_path / letters, data=data, prompts_per_step=4, steps=1, model=model)
        go(**run)
        assert "the loss is nan, because of an answer to 'x'" in capsys.readouterr().out
        assert result(tmp_path / letters)[1][0]["skipped_updates"] == 1
        go(**run, resume=True)  # a checkpoint from before the first update is one, too


# --- The reward's contract, both ways ---
NO_LISTS = [None, 1.0, "1" * 8, [0.5] * 7, [0.5] * 9, torch.zeros(8), np.zeros(8)]
NO_NUMBERS = [None, NAN, INF, -INF, "1", 1j, torch.tensor(1.0), np.float32("nan"), 1e300, 10**400]


@pytest.mark.parametrize("says, given", [
    *[(f"returned {given!r:.99}, wanted a list of 8", given) for given in NO_LISTS],
    *[(f"returned {given!r} at place 7, wanted a finite number", [0.5] * 7 + [given])
      for given in NO_NUMBERS]])
def test_a_broken_reward_is_named_with_place_and_value(says, given):
    reward = Mock(return_value=given, __name__="my_own")
    with pytest.raises(ValueError, match=re.escape(f"reward function my_own {says}")):
        go(reward=reward)


def test_rewards_of_every_numeric_type_are_taken():
    given = (True, False, 3, -2.5, np.float32(0.5), np.float64(0.25), np.int64(7), 0)
    assert go(reward=lambda **_: given, steps=1)[0]["reward_mean"] == 9.25 / 8


@pytest.mark.parametrize("chats", [False, True])
def test_a_reward_function_is_called_as_trl_calls_one(chats):
    def say(role, text):
        return [{"role": role, "content": text}] if chats else text

    data = [{"prompt": say("user", "a b c"[:end]), "end": end} for end in (1, 3, 5)]
    reward = Mock(return_value=list(range(12)), __name__="reward")
    go(reward=reward, model=ending_model(3.0), data=data, steps=1, prompts_per_step=3)
    received = reward.call_args.kwargs
    assert set(received) == {"prompts", "completions", "completion_ids", "end"}
    # Each row of the data set G times, one after the other, in every column.
    assert sorted(received["end"][::4]) == [1, 3, 5]
    assert received["end"] == np.repeat(received["end"][::4], 4).tolist()
    assert received["prompts"] == [say("user", "a b c"[:end]) for end in received["end"]]
    if chats:
        received["prompts"][0].clear()
        assert all(row["prompt"] for row in data)  # what it is given are copies
    # The ids with the end token, if it came before the cap of 5, and the texts without.
    assert any(ids[-1] in (END, EOS) for ids in received["completion_ids"])
    for ids, completion in zip(received["completion_ids"], received["completions"]):
        words = [token for token in ids if token not in (END, EOS)]
        assert words == ids[:-1] or words == ids and len(ids) == 5
        assert completion == say("assistant", TOKENIZER.decode(words, skip_special_tokens=True))


# --- Data sets, seeds ---
ROW = {"prompt": "a"}
CHAT = {"prompt": [{"role": "user", "content": "a"}]}
LONG_ROWS = [{"prompt": "a " * 59}, {"prompt": "a " * 60}] * 2  # 59 + 5 tokens fill the context


@cases("data, says", {
    "nothing": ([], "data set is empty"), "split": ({"train": []}, "take one part"),
    "no prompt": ([{"answer": "c"}] * 2, r"2 of 2 examples lack a prompt.*\[0, 1\]"),
    "empty": ([ROW, {"prompt": ""}, {"prompt": None}, {"prompt": []}], r"3 of 4 .*\[1, 2, 3\]"),
    "a string among chats": ([CHAT, ROW, CHAT], "1 of 3 prompts are strings, and the others"),
    "a column too few": ([ROW | {"n": 1}, ROW], r"other columns.*\[1\]"),
    "a column too many": ([ROW, ROW | {"n": 1}], r"other columns.*\[1\]"),
    "blanks": ([ROW] * 1000 + [{"prompt": "  "}], "prompt 1000 has no tokens"),
    "too long": ([ROW] * 1000 + LONG_ROWS,
                 r"2 of 1004 prompts are above 59 tokens.*context is 64.*\[1001, 1003\]"),
    **{column: ([ROW | {column: 1}], f"a column '{column}'.*rename")
       for column in ("prompts", "completions", "completion_ids")},
})
def test_a_data_set_that_cannot_be_used_is_refused_before_the_first_step(data, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        go(tmp_path / "new", data=data)
    assert not os.path.exists(tmp_path / "new")


def test_every_question_once_an_epoch_in_an_order_that_is_the_seeds():
    def asked(**settings):
        reward = Mock(side_effect=lambda prompts, **_: [0.0] * len(prompts), __name__="reward")
        go(reward=reward, num_generations=2, beta=0, max_completion_length=1, **settings)
        return [prompt for call in reward.mock_calls for prompt in call.kwargs["prompts"][::2]]

    order = asked(prompts_per_step=7, steps=3)
    epochs = [order[:7], order[7:14], order[14:]]
    for epoch in epochs:
        assert sorted(epoch) == sorted(question["prompt"] for question in QUESTIONS)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert asked(steps=10) == order[:20]
    assert asked(prompts_per_step=9, steps=2) == order[:18]  # more than there are
    assert asked(prompts_per_step=7, steps=1, seed=4) != epochs[0]


def test_every_step_of_every_seed_draws_afresh_and_nothing_else_decides():
    """One question, and a model that stands still."""
    answers = set()
    rewards = set()

    def reward(prompts, completions, **columns):
        given = noisy_reward(prompts, completions)
        answers.add(tuple(completions))
        rewards.add(tuple(given))
        return given

    for seed in (0, 1, 1):
        go(reward=reward, data=QUESTIONS[:1], steps=3, seed=seed, learning_rate=0.0)
        noisy_reward([], ["a"])  # the caller draws as well
    assert len(answers) == len(rewards) == 6  # two seeds, three steps


# --- Steps at the edge ---
STILL = {"loss": 0, "grad_norm": 0}
FLAT_RUN = {"reward": lambda **_: [0.1] * 8, "num_iterations": 2}
FLAT_STEP = STILL | {"reward_std": 0, "zero_variance_fraction": 1}
MASKED = {"mask_truncated_completions": True}
SMALLEST = {"num_generations": 2, "prompts_per_step": 1, "data": [ROW], "max_completion_length": 1}


@cases("logit, run, wanted", {  # the end tokens' logits are raised by this; run; metrics
    "all flat": (0.0, FLAT_RUN | {"beta": 0}, FLAT_STEP | {"sampler_gap": 0}),
    "all flat, and the model at its reference": (0.0, FLAT_RUN, FLAT_STEP | {"kl": 0}),
    "all cut and left out": (-100.0, MASKED, STILL | {"truncated_fraction": 1, "kl": 0}),
    "all cut": (-100.0, {}, {"completion_length": 5, "truncated_fraction": 1}),
    "all empty": (100.0, {}, {"completion_length": 1, "truncated_fraction": 0}),
    "logits of minus infinity": (-INF, {}, {"truncated_fraction": 1}),
    "the smallest sizes": (0.0, SMALLEST, {"completion_length": 1}),
})
@every_type
def test_steps_at_the_edge(logit, run, wanted, loss_type, tmp_path):
    model = ending_model(logit)
    before = weights_of(model)
    go(tmp_path, model=model, steps=2, loss_type=loss_type, **run)
    for metrics in result(tmp_path)[1]:
        assert metrics == metrics | wanted | {"skipped_updates": 0}  # all of wanted is in it
    if "grad_norm" in wanted:  # no lesson, and no weight decay either
        assert torch.equal(weights_of(model), before)


# --- The demo: grading, data, models ---
GOOD_LINE = json.dumps({"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"})


@pytest.mark.parametrize("text, answer, strict, lenient", [  # lenient: the last number, unboxed
    (r"so \boxed{1,000}", "1000", True, True), ("so it is 1,000.", "1000", False, True),
    ("18 dollars, that is $18.", "18", False, True), ("from 5 to -3", "-3", False, True),
    ("5-3", "3", False, True),
    (r"so \boxed{8}, or 7", "7", False, False), ("no idea", "7", False, False),
    ("", "7", False, False),
])
def test_strict_and_lenient(text, answer, strict, lenient):
    assert gsm8k_demo.is_right(text, answer) is strict
    assert gsm8k_demo.is_right(text, answer, lenient=True) is lenient


@pytest.mark.parametrize("right, total, low, high", [  # worked elsewhere
    (5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (660, 1319, 0.4734, 0.5273), (0, 0, 0.0, 1.0)])
def test_wilsons_interval(right, total, low, high):
    near(gsm8k_demo.wilson(right, total), [low, high], 3e-4)


def write_gsm8k(folder, *lines):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def test_gsm8k_is_read_and_its_solutions_earn_everything(tmp_path):
    train_data, test_data = gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, *[GOOD_LINE] * 3))
    assert train_data["answer"] == ["1,018"] * 3 and len(test_data) == 3
    assert [message["role"] for message in train_data[0]["prompt"]] == ["system", "user"]
    chat = [{"role": "assistant", "content": r"18, so \boxed{1018}"}]
    # TRL calls a reward with more than we do.
    of_trl = {"completion_ids": [[1], [2]], "trainer_state": None, "log_metric": print}
    rewards = gsm8k_demo.boxed_reward(None, [chat, "1018", r"\boxed{1}"], ["1,018"] * 3, **of_trl)
    assert rewards == [1.5, 0.0, 0.5]


@pytest.mark.parametrize("line, said", {  # line: what the error names
    '{"question": "x", "answ': "line 2", '{"question": "x"}': "line 2", "[1]": "line 2",
    '{"question": "x", "answer": "18"}': "####", '{"question": "x", "answer": "1\\n#### "}': "####",
    '{"question": " ", "answer": "1\\n#### 1"}': "question",
}.items())
def test_a_broken_line_of_data_is_named(line, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, line))


def save_tiny(folder, template=TOKENIZER.chat_template, **settings):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tiny_model(**settings).save_pretrained(folder)
    return str(folder)


def test_models_that_cannot_be_used_are_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="--rehearsal"):
        gsm8k_demo.load_model(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="chat template"):
        gsm8k_demo.load_model(save_tiny(tmp_path, template=None))


# --- The demo from the command line ---
def run_demo(monkeypatch, flags, *more):
    monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *flags.split(), *map(str, more)])
    gsm8k_demo.main()


@pytest.mark.parametrize("flags, said", {  # flags: what is said
    "--rehearsal --num_generations 1": "num_generations", "--nonsense": "nonsense",
    "--rehearsal --resume": "--output", "--rehearsal --resume --output no/such": "such",
    "--data nowhere --model x": "nowhere", "--eval_every -1": "at least 0",
    "--rehearsal --model x": "leave out --model",
}.items())
def test_wrong_flags_end_in_a_clear_message(flags, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=said):
        run_demo(monkeypatch, flags)
    assert not any(tmp_path.iterdir())


def test_errors_that_are_not_ours_keep_their_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(gsm8k_demo, "rehearsal", Mock(side_effect=ValueError("of a library")))
    with pytest.raises(ValueError, match="of a library"):
        run_demo(monkeypatch, "--rehearsal --output", tmp_path / "run")


def test_random_weights_measure_a_few_steps(monkeypatch, tmp_path, capsys):
    """Answers of realistic length, and a line of seconds for each step."""
    model = save_tiny(tmp_path, initializer_range=0.02, max_position_embeddings=256)
    data = write_gsm8k(tmp_path, *['{"question": "a b c", "answer": "d\\n#### 1"}'] * 4)
    sizes = "--prompts_per_step 4 --num_generations 16 --max_completion_length 50"
    run_demo(monkeypatch, f"--random_weights {sizes} --model", model, "--data", data, "--output",
             tmp_path / "run")
    lengths = [metrics["completion_length"] for metrics in grpo.read_metrics(tmp_path / "run")]
    assert len(lengths) == 5 and 15 < sum(lengths) / 5 < 26  # of at most 50: as real ones are
    printed = capsys.readouterr().out
    for words in ("sampling", "scoring", "update", "tokens a second", "GB", "Nothing was learned"):
        assert words in printed
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_any_text_prints_under_any_code_page():
    program = """if True:
        import atexit, runpy
        atexit.register(print, chr(0x2588), chr(0x4E2D))  # the curves, and models, print such
        runpy.run_path("gsm8k_demo.py", run_name="__main__")"""
    done = subprocess.run(
        [sys.executable, "-c", program, "--nonsense"], cwd=Path(grpo.__file__).parent,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"}, capture_output=True)
    assert done.stdout.strip() == b"? ?", done.stderr


# --- The rehearsal: one pre-trained model serves all of these ---
@pytest.fixture(scope="module")
def base():
    before = torch.get_rng_state()
    world = gsm8k_demo.rehearsal(0)
    assert torch.equal(before, torch.get_rng_state())  # it draws from generators of its own
    return world


def test_test_problems_are_held_out(base):
    words = "|".join([*gsm8k_demo.NAMES, *gsm8k_demo.THINGS])
    # Whoever has whatever: the kind of problem and its numbers are left.
    learned, tested = [
        {re.sub(words, "_", example["prompt"][-1]["content"]) for example in data}
        for data in base[2:]]
    assert not learned & tested and len(tested) >= 256


def rewards_of_another_question(prompts, completions, answer, **columns):
    """The same rewards, given to the wrong answers: those of the group before."""
    rewards = gsm8k_demo.boxed_reward(prompts, completions, answer)
    return rewards[-8:] + rewards[:-8]  # there are 8 answers in a group


@pytest.mark.parametrize("reward, least, most", [
    (gsm8k_demo.boxed_reward, 0.8, 1.0), (rewards_of_another_question, 0.0, 0.6)])
def test_the_rehearsal_learns_from_its_rewards_and_from_nothing_else(reward, least, most, base):
    model, tokenizer, train_data, test_data = copy.deepcopy(base)
    settings = gsm8k_demo.REHEARSAL | {"steps": 20}
    settings.pop("eval_questions")
    few = test_data.select(range(128))
    before = gsm8k_demo.evaluate(model, tokenizer, few, 28, sampled=True)["sampled_accuracy"]
    train(model, tokenizer, train_data, reward, GRPOConfig(**settings))
    after = gsm8k_demo.evaluate(model, tokenizer, few, 28, sampled=True)["sampled_accuracy"]
    assert before < 0.35 and least <= after <= most, (before, after)


def test_evaluation_leaves_the_random_stream_alone_and_halves_its_batch(base):
    model, tokenizer, _, test_data = copy.deepcopy(base)
    some = list(test_data.select(range(8)))
    state = torch.get_rng_state()
    whole = gsm8k_demo.evaluate(model, tokenizer, some, 28, sampled=True)
    assert torch.equal(state, torch.get_rng_state())
    assert whole["questions"] == 8
    model.get_input_embeddings().register_forward_pre_hook(small_card)
    assert gsm8k_demo.evaluate(model, tokenizer, some, 28, sampled=True) == whole


def test_the_demo_from_flags_to_files(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: (copy.deepcopy(base[0]), *base[1:]))
    flags = ("--rehearsal --steps 4 --prompts_per_step 4 --eval_questions 16 --eval_every 2 "
             "--show_steps 2 --save_steps 2 --output")
    folder = tmp_path / "whole"
    run_demo(monkeypatch, flags, folder)
    printed = capsys.readouterr().out
    for words in ("before:", "after:", "arithmetic", "to go", "chosen on these questions"):
        assert words in printed
    whole = json.loads((folder / "results.json").read_text())
    assert whole["before"]["questions"] == whole["after"]["questions"] == 16
    assert json.loads((folder / "settings.json").read_text())["steps"] == 4
    samples = (folder / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in samples} == {0, 1, 2, 4}
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.generation_config.eos_token_id == [2, 0]
    # The same, with an evaluation that fails after step 2, and a resume.
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=LOST):
        patch.setattr(gsm8k_demo, "evaluate", preceded(gsm8k_demo.evaluate, fail, [2]))
        run_demo(monkeypatch, flags, folder)
    with pytest.raises(SystemExit, match="there steps is 4, here 5"):
        run_demo(monkeypatch, "--resume --steps 5 --output", folder)
    run_demo(monkeypatch, "--resume --output", folder)  # its settings are remembered
    with pytest.raises(SystemExit, match="holds a run"):
        run_demo(monkeypatch, flags, folder)
    cut = json.loads((folder / "results.json").read_text())
    for name in ("before", "step 2", "after", "best"):
        assert cut[name] == whole[name]


# --- The gallery of mistakes: every patch still applies, and the loud ones are still loud ---
# Settings at which KL, clip and micro-batches matter within a step.
ROUGH = dict(steps=1, prompts_per_step=8, warmup_steps=0, num_iterations=3, learning_rate=1e-3,
             beta=0.5)
# Rotary positions do not mind a shift; and nearly all answers have one box.
SILENT = {"healthy", "no positions", "first box"}


def train_with(mistake, base, **settings):
    model, tokenizer, train_data, _ = base
    return gallery.train(mistake, copy.deepcopy(model), tokenizer, train_data, **settings)


@pytest.fixture(scope="module")
def healthy(base):
    return train_with("healthy", base, **ROUGH)


@pytest.mark.parametrize("mistake", gallery.GALLERY)
def test_every_mistake_can_be_made_and_is_gone_afterwards(mistake, base, healthy):
    functions = dict(vars(grpo))
    wrong = train_with(mistake, base, **ROUGH)
    assert vars(grpo) == functions
    figures = [step[name] for step in wrong for name in gallery.FIGURES]
    right = [step[name] for step in healthy for name in gallery.FIGURES]
    if mistake not in SILENT:
        assert figures != pytest.approx(right, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mistake, steps, figure, least, most", [
    ("sign of loss", 8, "reward_mean", 0.0, 0.6),
    ("box alone", 8, "zero_variance_fraction", 0.8, 1.0),
    ("targets not shifted", 1, "sampler_gap", 5.0, 20.0),
])
def test_loud_mistakes_still_show(mistake, steps, figure, least, most, base):
    last = train_with(mistake, base, steps=steps, warmup_steps=2)[-1]
    assert least <= last[figure] <= most


# --- The README ---
README = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")


def readme_block(sign):
    """The README's one block of Python that has `sign` in it."""
    [found] = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if sign in block]
    return found


def test_the_readmes_flags_exist():
    known = {"help", "nproc_per_node"}  # argparse's, and torchrun's
    for record in (GRPOConfig, gsm8k_demo.DemoConfig):
        known |= {field.name for field in dataclasses.fields(record)}
    flags = set(re.findall(r"--(\w+)", re.sub(r".*\.ci/gallery.*", "", README)))
    assert len(flags) > 20 and flags <= known, flags - known


def test_the_readmes_own_reward_trains(monkeypatch, tmp_path, capsys):
    world = tiny_model(), tiny_tokenizer(), None, None
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: world)
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(readme_block("right_and_short"), values)
    assert len(values["history"]) == 20
    assert " -> " in capsys.readouterr().out
    assert (tmp_path / "runs/mine/model.safetensors").exists()


def test_the_readmes_script_for_several_gpus_is_python_and_has_our_settings():
    block = readme_block("GRPOTrainer")
    compile(block, "several.py", "exec")
    config = GRPOConfig()
    for name in ("learning_rate", "warmup_steps", "num_generations", "max_completion_length",
                 "temperature", "beta", "epsilon", "save_steps"):
        assert float(re.search(rf"\b{name}=([\w.-]+)", block)[1]) == getattr(config, name), name
    assert f"max_steps={config.steps}," in block
    assert "8, gradient_accumulation_steps=32 // gpus" in block
    assert config.prompts_per_step * config.num_generations == 8 * 32
