# SPDX-License-Identifier: MIT-0
"""The tests of grpo.py and gsm8k_demo.py. They run offline, on the CPU: python -m pytest -q

First five tests that teach, then five documents on GRPO, grpo.py section by section, the demo."""

import copy
import doctest
import inspect
import json
import math
import random
import re
import runpy
import shlex
import shutil
import sys
from contextlib import redirect_stdout
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from pytest import approx, raises
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import inf, nan, ones, tensor, zeros
from torch.testing import assert_close
from transformers import (AutoConfig, AutoModelForCausalLM, GenerationConfig,
                          PreTrainedTokenizerFast)

import grpo
import gsm8k_demo
from grpo import *  # noqa: F403

parametrize = pytest.mark.parametrize
torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up

def numbers(text):  # as a tensor; "/" begins a new row
    return tensor([[float(x) for x in row.split()] for row in text.split("/")]).squeeze(0)
def gradient(function, x):  # of function(x), which is one number, with respect to x
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]

def slow_loss(logprobs, old_logprobs, ref_logprobs, advantages, *, epsilon=0.2, epsilon_high=None,
              beta=0.04, loss_type="grpo", max_completion_length=None, **others):  # -J, and metrics
    high = epsilon if epsilon_high is None else epsilon_high
    sums, lengths, seen = [], [len(pi) for pi in logprobs], []
    for pi, old, ref, A in zip(logprobs, old_logprobs, ref_logprobs, advantages):
        total = 0.0
        for t in range(len(pi)):
            ratio = (pi[t] - old[t]).exp()
            clipped = min(max(ratio, 1 - epsilon), 1 + high)
            kl = (ref[t] - pi[t]).exp() - (ref[t] - pi[t]) - 1
            total = total + min(ratio * A, clipped * A) - beta * kl
            if A or beta:  # else nothing can be learned from it
                seen.append([kl.item(), (clipped * A < ratio * A).item()])
        sums.append(total)
    loss = -sum(sums) / (sum(lengths) if loss_type == "dapo" else len(sums) * max_completion_length)
    if loss_type == "grpo":
        loss = -sum(s / max(1, length) for s, length in zip(sums, lengths)) / len(sums)
    kl, clip_fraction = np.mean(seen, axis=0)
    return loss, {"loss": loss.item(), "kl": kl, "clip_fraction": clip_fraction}

# ==== Five tests that teach =======================================================================
def test_the_apples_from_texts_to_loss_and_gradient():
    texts = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
    rewards = tensor([rule_reward(text, "5") for text in texts])
    advantages = group_advantages(rewards)
    assert rewards.tolist() == [1.5, 1.5, 0.5, 0.5] and advantages.tolist() == [1, 1, -1, -1]
    pi = numbers("0.3 0.2 / 0.1 nan / 0.3 nan / 0.1 0.2")  # 2 and 3 have one token, then padding
    old = zeros(4, 2) + math.log(0.2)  # pi_old gave each token 0.2, and pi_ref, too
    loss = lambda logprobs: grpo_loss(logprobs, old, old, advantages, ~pi.isnan())[0]
    surrogate = (1.2 + 1.0) / 2 + 0.5 - 1.5 - (0.8 + 1.0) / 2  # a mean for each completion
    k3 = 0.0721 / 2 + 0.3069 + 0.0721 + 0.3069 / 2
    assert loss(pi.log()).item() == approx(-(surrogate - 0.04 * k3) / 4, abs=1e-5)  # 0.2057
    assert_close(gradient(loss, pi.log()), tensor([
        [0.04 / 3 / 8, -1 / 8],  # good. Token 1 is clipped, so only the KL pulls it back
        [(-0.5 - 0.04) / 4, 0],  # good, but less likely than before: up, and the KL agrees
        [(1.5 + 0.04 / 3) / 4, 0],  # bad, and more likely than before: down
        [-0.04 / 8, 1 / 8]]))  # bad. Token 1 is clipped
    # In the first update pi_theta is pi_old: the loss is 0, but its gradient is -A / |o_i| / N.
    assert loss(old) == 0
    assert_close(gradient(loss, old), numbers("-1 -1 / -2 0 / 2 0 / 1 1") / 8)

def test_the_corners_of_the_clip():
    """With A = +1, then with A = -1. The slope is with respect to log pi, where r has slope r."""
    surrogate = lambda log_ratio: clipped_surrogate(log_ratio.exp(), tensor([1.0, -1.0]))
    x = numbers("0.5 0.9 1.0 1.1 1.5 / 0.5 0.9 1.0 1.1 1.5").log()
    assert_close(surrogate(x), numbers("0.5 0.9 1.0 1.1 1.2 / -0.8 -0.9 -1.0 -1.1 -1.5"))
    slopes = gradient(lambda x: surrogate(x).sum(), x)
    assert_close(slopes, numbers("0.5 0.9 1.0 1.1 0 / 0 -0.9 -1.0 -1.1 -1.5"))
def test_k3_and_its_gradient():
    """e^x - 1 - x, and 1 - e^x with respect to log pi_theta, where x is log(pi_ref/pi_theta)."""
    x = tensor([math.log(2), 0, math.log(2 / 3), 1e-4, -60, 60])  # from 50 on, e^x stays e^50
    k3 = tensor([0.306853, 0, 0.072132, 5e-9, 59, math.exp(50) - 51])  # x^2/2 near 0, -x far below
    slopes = gradient(lambda logprobs: k3_kl(logprobs, x).sum(), zeros(6))
    assert_close(k3_kl(zeros(6), x), k3, rtol=1e-3, atol=0)
    assert_close(slopes, tensor([-1, 0, 1 / 3, -1e-4, 1, 0]), rtol=1e-3, atol=0)

def test_the_loop_on_the_first_page_is_what_train_does(monkeypatch):
    """Without `train`'s seeds. It is stopped after two steps of a million: its rate is constant."""
    [loop] = [block for block in grpo.__doc__.split("\n\n") if "for step in range" in block]
    loop = "if True:\n" + loop.replace("1e-6", "0.001").replace("512", "6")
    monkeypatch.setattr(grpo, "set_seed", lambda seed: None)
    length = lambda completions, **columns: [len(text) for text in completions]  # the reward
    ours, theirs, start = tiny_model(), tiny_model(), weights_of(tiny_model())
    set_seed(1)
    exec(loop, vars(grpo) | dict(model=ours, tokenizer=tiny_tokenizer(), examples=PROMPTS,
                                 reward_fn=length, B=2, G=4, steps=2))
    set_seed(1)
    with raises(ZeroDivisionError):
        run_small(theirs, length, prompts_per_step=2, learning_rate=0.001, steps=1_000_000,
                  max_grad_norm=1e9, after_step=lambda metrics, _: 1 / (2 - metrics["step"]))
    moved = (weights_of(ours) - start).norm()
    assert (weights_of(ours) - weights_of(theirs)).norm() < 1e-3 * moved

def test_running_grpo_prints_the_apples_and_the_smallest_policy_learns(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.splitlines()[:8] == [
        "completion        reward  advantage  ratio  surrogate      k3  gradient",
        r"3+2 = \boxed{5}      1.5        1.0    1.5        1.2  0.0721    0.0017",
        r"3+2 = \boxed{5}      1.5        1.0    1.0        1.0  0.0000   -0.1250",
        r"\boxed{5}            1.5        1.0    0.5        0.5  0.3069   -0.1350",
        r"\boxed{6}            0.5       -1.0    1.5       -1.5  0.0721    0.3783",
        r"3-2 = \boxed{1}      0.5       -1.0    0.5       -0.8  0.3069   -0.0050",
        r"3-2 = \boxed{1}      0.5       -1.0    1.0       -1.0  0.0000    0.1250",
        "loss 0.2057"]
    means = [0.5 + says.count("5") / 8 for says in re.findall(r"says (\d+)", printed)]
    assert re.findall("reward ([0-9.]+)", printed) == [f"{mean:.2f}" for mean in means]
    assert means[0] <= 0.9 and means[-1] >= 1.2  # 0.5 is for a box, and 1 more for a 5 in it
def test_what_stands_below_each_prompt_of_the_docstrings_is_true():
    failures, examples = doctest.testmod(grpo)
    assert failures == 0 and examples >= 10

# ==== Five documents about GRPO ===================================================================
#   Scratch    "Group-Relative Policy Optimization (GRPO) — From Scratch", an article
#   Book       "Reinforcement Learning from Human Feedback" by Nathan Lambert (rlhfbook.com), ch. 11
#   Explained  "GRPO Objective Function Explained", a tutorial, after joschu.net/blog/kl-approx.html
#   Hands-on   "9.3 Hands-on: GRPO Training and Core Mechanisms", a section of a course
#   RLinf      "组相对策略优化 (GRPO)", of RLinf's documentation. It prints no results
# The papers: arXiv:1707.06347 (PPO), 2402.03300 (GRPO), 2501.12948 (DeepSeek-R1), 2503.14476
# (DAPO), 2503.20783 (Dr. GRPO), 2507.18071 (GSPO). "Corrected" figures are ours.
def assert_printed(found, printed):  # rounded to as many digits; whole numbers are exact
    found, words = torch.as_tensor(found).flatten().tolist(), printed.split()
    rounded = [round(x, len(word.partition(".")[2]) or 6) for x, word in zip(found, words)]
    assert len(found) == len(words) and rounded == [float(word) for word in words]
def mean_and_std(rewards):
    centered = group_advantages(rewards, "none")
    return [(rewards - centered)[0], (centered / group_advantages(rewards))[0]]
# Book, 11.2.2: losses of two answers; then ratios of two others, of 4 and 7 tokens, also as a mask.
LOSSES, MASK = numbers("1 1 1 1 10 7 7 7 7 7 / 1 1 1 1 1 1 1 1 1 10"), tensor([[1, 0], [1, 1]])
MASK, RATIOS = MASK.repeat_interleave(5, dim=1), numbers("1 1 1 1 0 0 0 / 1 1 1 1 1 1 1")
def slopes(loss_type, advantage=2):
    return gradient(lambda ratios: average(advantage * ratios, RATIOS, loss_type, 7), RATIOS)

def test_scratch_as_printed():
    """Quick Recap, The Key Insight and The Full GRPO Objective."""
    clip = lambda A, epsilon=0.2: clipped_surrogate(tensor([[1.3]]), tensor([A]), epsilon)
    assert_printed([clip(2.0, epsilon=99), clip(1.0), clip(2.0)], "2.6 1.2 2.4")
    rewards = numbers("2.0 3.5 1.0 4.0 2.5")
    mean, std = mean_and_std(rewards)
    assert_printed([mean, std**2, std], "2.6 1.14 1.07")
    assert_printed(group_advantages(rewards, "none") ** 2, "0.36 0.81 2.56 1.96 0.01")
    assert_printed(group_advantages(rewards), "-0.56 0.84 -1.50 1.31 -0.09")
    assert_printed(k3_kl(zeros(2), numbers("2 1").log()), "0.307 0")  # 2 - 0.693 - 1, 1 - 0 - 1
def test_book_as_printed():
    """11.2.2: seq_1_loss and seq_2_loss, weighting sequences equally, the script, its gradients."""
    assert_printed(masked_mean(LOSSES, MASK, dim=1), "2.8 1.9")
    assert_printed(average(LOSSES, MASK), "2.35")
    assert_printed(masked_mean(2 * RATIOS, RATIOS, dim=1), "2. 2.")
    assert_printed([average(2 * x, x, "dr_grpo", 7) for x in RATIOS.split(1)], "1.1429 2.0000")
    assert_printed(masked_mean(RATIOS, RATIOS), "1.")
    assert_printed(slopes("grpo"), 4 * "0.2500 " + 3 * "0.0000 " + 7 * "0.1429 ")
    assert_printed(slopes("dr_grpo"), 4 * "0.1429 " + 3 * "0.0000 " + 7 * "0.1429 ")
def test_book_corrected():
    assert_printed(average(LOSSES, MASK, "dapo"), "2.2")  # 11.2.2 prints 2.27, which is 34/15
    # 11.2.2 prints 0.2338: the gradient of masked_sum, 0.1429, had not been set to zero.
    assert_printed(slopes("dapo", 1), 4 * "0.090909 " + 3 * "0 " + 7 * "0.090909 ")
    # 11.2.3.1, the first update. (11.2.4 prints minus beta * KL: leaving pi_ref would pay.)
    new, ref = zeros(1, 1), tensor([[2.0]]).log()
    assert_printed(grpo_loss(new, new, ref, ones(1), ones(1, 1))[0], "-0.987726")
def test_k3_is_the_kl_on_average_as_in_explained_10_and_6():
    """(10) prints that E[r] - 1 is 0. So in (6), E[k3] is the KL. pi_theta draws 0.2 and 0.8."""
    pi, ref = numbers("0.2 0.8"), numbers("0.5 0.5")
    k1, k3 = (pi / ref).log(), k3_kl(pi.log(), ref.log())
    assert_printed(pi @ (k3 - k1), "0")
    assert_printed(pi @ k3, "0.192745")  # 0.2 * log(0.2 / 0.5) + 0.8 * log(0.8 / 0.5), ours

GOOD = ("First compute the eggs left each day: 16 - 3 - 4 = 9.\nThere are 7 days in a week, so she "
        "can sell: 9 * 7 = 63.\n\\boxed{63}")  # Hands-on, 9.3.1
BAD = "I think she can sell about 50 eggs. \\boxed{50}"
def test_hands_on_as_printed():
    """9.3, its start; 9.3.1, good and bad; 9.3.2, exp(0) - 0 - 1; 9.3.3, late."""
    rewards = numbers("1.5 1.0 0.0 0.0")
    assert_printed(mean_and_std(rewards)[0], "0.625")
    assert_printed(group_advantages(rewards, "none"), "0.875 0.375 -0.625 -0.625")
    assert_printed([rule_reward(GOOD, "63"), rule_reward(BAD, "63")], "1.5 0.5")
    assert_printed(k3_kl(ones(1), ones(1)), "0")
    assert_printed(group_advantages(zeros(8) + 1.5), 8 * "0 ")

def test_hands_on_corrected():
    assert rule_reward("3 + 2 = 5, so the answer is 5.", "5") == 0  # 9.3 prints 1.5, without a box
    # 9.3.3, early, where 7 is right. Printed: -1.2 0.1 0.8 0.1 1.5 (for the 15) 0.1 -0.3 0.6
    advantages = group_advantages(numbers("0.5 1.5 0.5 1.5 0.5 1.5 0.5 0.5"))
    assert_printed(advantages, 3 * "-0.7746 1.2910 " + 2 * "-0.7746 ")
    # Middle. Printed: 0 0 0 -0.5 0 0 0 0
    advantages = group_advantages(numbers("1.5 1.5 1.5 0.5 1.5 1.5 1.5 1.5"))
    assert_printed(advantages, 3 * "0.3780 " + "-2.6458 " + 4 * "0.3780 ")
    # Choosing k. Printed: 0.875 0.637, and 0.82 -1.23 0.82 -1.23 0.12 0.82 -0.53 0.82
    rewards = numbers("1.5 0.0 1.5 0.0 1.0 1.5 0.5 1.5")
    assert_printed([*mean_and_std(rewards), *group_advantages(rewards)], "0.9375 0.6343 "
                   "0.8868 -1.4780 0.8868 -1.4780 0.0985 0.8868 -0.6897 0.8868")
@parametrize("eps, correction", [(0, 1), (1e-4, 1), (1e-8, 0), (1e-8, 1), (0, 0)])
def test_the_documents_advantages_are_ours(eps, correction):
    """Scratch 257, Book 310, Explained 281 (NumPy), Hands-on [C] and 775 (NumPy): one line, with
    another eps. torch's std divides by G - 1, and NumPy's by G."""
    rewards = numbers("1.5 0.0 1.5 0.0 1.0 1.5 0.5 1.5")
    theirs = (rewards - rewards.mean()) / (rewards.std(correction=correction) + eps)
    ours = group_advantages(rewards) * math.sqrt(1 - correction / 8)
    assert_close(theirs, ours, rtol=3e-4, atol=0)
def test_the_rules_of_the_course_are_ours():
    """Hands-on, 9.3.1, for texts with one box. (Of several, theirs take the first.)"""
    for text, answer in [(GOOD, "63"), (BAD, "63"), (GOOD, "x"), (r"\boxed{ 7 }", "7"),
                         ("It is 7.", "7"), (r"\boxed{}", "7"), (r"\boxed{x}", "x"),
                         (r"\boxed{63.004}", "63")]:
        boxed = re.search(r"\\boxed\{([^}]+)\}", text)
        right = boxed and boxed.group(1).strip() == answer  # line 388, and for numbers line 359:
        if boxed and answer != "x":
            right = abs(float(boxed.group(1)) - float(answer)) < 0.01
        assert rule_reward(text, answer) == (1.5 if right else 0.5 if boxed else 0.0), text
def their_losses(new, old, ref, A, mask):  # Scratch 286, Book 318, Explained 184, Hands-on 99
    ratio, A, diff = torch.exp(new - old), A.unsqueeze(1), ref - new
    surr2, kl_ratio = torch.clamp(ratio, 1 - 0.2, 1 + 0.2) * A, torch.exp(diff)
    scratch = torch.min(ratio * A, surr2) - 0.04 * (kl_ratio - torch.log(kl_ratio) - 1.0)
    book = torch.max(-A * ratio, -surr2) + 0.04 * (kl_ratio - diff - 1)
    diff = torch.clamp(diff, min=-50.0, max=50.0)
    explained = -(torch.min(ratio * A, surr2) - 0.04 * (torch.exp(diff) - diff - 1))
    hands_on = -torch.min(ratio * A, surr2).mean() + 0.04 * (kl_ratio - diff - 1.0).mean()
    means = [(x * mask).sum(dim=1) / mask.sum(dim=1) for x in (-scratch, book, explained)]
    return [*(mean.mean() for mean in means), hands_on]
@parametrize("longest, which", [(9, 0), (9, 1), (9, 2), (1, 3)])
def test_the_documents_losses_and_gradients_are_ours(longest, which):
    torch.manual_seed(0)
    logprobs, old, ref = torch.randn(3, 50, longest, dtype=torch.float64) / 3 - 2  # 50 answers
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (50, 1))
    rest = old, ref, torch.randn(50, dtype=torch.float64), mask
    assert_close(grpo_loss(logprobs, *rest)[0], their_losses(logprobs, *rest)[which])
    slopes = gradient(lambda x: their_losses(x, *rest)[which], logprobs)
    assert_close(gradient(lambda x: grpo_loss(x, *rest)[0], logprobs), slopes)

# ==== Section by section: 1 to 6, from the reward to the loss =====================================
@parametrize("answer, right, wrong", [  # boxes that hold the answer, and boxes that do not
    ("63", "63/ 63.0 /$63/63 ./+63/063", "36/--63/63 apples/60+3/" + 400 * "9"), (None, "", "63"),
    ("1000", "1,000/1{,}000/1000\\%", "1e3/1_000/1,00/1 000/1$000/,/1,000,000"), (" x ", "x", "1"),
    ("-1234567.5", "-1,234,567.5./$- 1234567.5", "-1234,567.5/1234567.5"),
    (2**53, "9007199254740992", "9007199254740993"), (63, "63", "64"),
    ("$5.00", "\\$5/5. \\%/5.009", "5.01/4.99"), ("3", "3", "nan/\u0663"), ("\\pi", "\\pi", "3"),
    ("7", "8}? \\boxed{7", "7}? \\boxed{8"),  # the last. In quadratic time, these take minutes:
    *(("7", "7", "1" + 300_000 * x + "x") for x in ("\\boxed", "{}", "9", ",000", " "))])
def test_which_box_holds_which_answer(answer, right, wrong):
    for boxes, reward in (right, 1.5), (wrong, 0.5):
        for box in filter(None, boxes.split("/")):
            assert rule_reward("So it is \\boxed{" + box + "}.", answer) == reward, box[:99]

@parametrize("text", ["\\boxed{63}, \\boxed{6", "\\boxed{{63}", "\\boxed{ }", "63"])
def test_without_a_whole_last_box_nothing_is_paid(text):
    assert rule_reward(text, "63") == 0
def test_advantages_are_of_each_group_by_itself():
    assert group_advantages(tensor([[10**9, 0], [1, 0]])).tolist() == [[1, -1], [1, -1]]
@parametrize("rewards, signs", [  # in float64
    ("-0.7 -0.7 -0.7", "0 0 0"), ("0 0 0", "0 0 0"), ("1000000 1000001", "-1 1"),
    # The std of two rewards is half of their difference, and 2e-7 of the largest is the limit.
    ("1 1.00000039", "0 0"), ("1 1.00000041", "-1 1")])
def test_rewards_that_are_equal_but_for_rounding_give_exactly_0(rewards, signs):
    rewards = tensor([float(word) for word in rewards.split()], dtype=torch.float64)
    for scale in "group", "none":
        assert group_advantages(rewards, scale).sign().equal(numbers(signs))
def test_the_gradient_of_a_huge_ratio_is_finite():
    """Of e^49, bad and unclipped. Of e^1000, stopped at e^50; or clipped (it is 0, not NaN)."""
    A, mask = numbers("-1 -1 1"), ones(3, 1)
    loss = lambda x: 3 * grpo_loss(x, 0 * mask, None, A, mask, beta=0)[0]
    slopes = gradient(loss, numbers("49 / 1000 / 1000"))
    assert_close(slopes, tensor([[math.exp(49)], [0], [0]]), rtol=1e-4, atol=0)

MAX_LENGTH = 7  # for dr_grpo
def loss_inputs():
    """Six completions of up to five tokens, one of them empty, for .experiments/scripts/trl_figures.py, too."""
    noise = (torch.arange(120.0, dtype=torch.float64) ** 2).sin().view(4, 6, 5)
    mask = torch.arange(5) < tensor([[5], [1], [0], [3], [4], [2]])
    return dict(logprobs=0.4 * noise[0] - 2, old_logprobs=0.4 * noise[1] - 2,
                ref_logprobs=0.4 * noise[2] - 2, advantages=noise[3, :, 0], mask=mask)

@parametrize("padding", [1.0, nan, inf])
@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@parametrize("settings", [dict(), dict(beta=0), dict(epsilon_high=0.28),
                          dict(epsilon=0.1, epsilon_high=0, beta=1)], ids=str)
def test_loss_gradient_and_metrics_are_the_slow_ones(settings, loss_type, padding):
    settings = dict(loss_type=loss_type, max_completion_length=MAX_LENGTH) | settings
    *three, advantages, mask = loss_inputs().values()
    logprobs, old, ref = (x.masked_fill(~mask, padding) for x in three)
    ours = lambda logprobs: grpo_loss(logprobs, old, ref, advantages, mask, **settings)
    def slow(logprobs):
        lists = [[row[real] for row, real in zip(x, mask)] for x in (logprobs, old, ref)]
        return slow_loss(*lists, advantages, **settings)
    assert ours(logprobs)[1] == approx(slow(logprobs)[1])
    slopes = gradient(lambda x: slow(x)[0], logprobs)
    assert_close(gradient(lambda x: ours(x)[0], logprobs), slopes)
def test_pi_old_and_pi_ref_get_no_gradient():
    inputs = {name: x.requires_grad_("_logprobs" in name) for name, x in loss_inputs().items()}
    assert not grpo_loss(**inputs)[0].requires_grad

# ==== A tiny world, for all that needs a model ====================================================
# Three tokens end a completion: 36 (in generation_config), 37 (in config), 38 (in the tokenizer).
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CHAT = [{"role": "user", "content": "b"}]
PROMPTS = [{"prompt": "abcdefg"}, {"prompt": "h"}, {"prompt": "ijk"}]
def tiny_tokenizer():  # a user's "b" becomes "u", "b", 36; "a" opens the answer
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<36>", "<37>", "<38>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = ("{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<36>{% endfor %}"
                "{% if add_generation_prompt %}a{% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, eos_token="<38>", pad_token="<38>",
        additional_special_tokens=["<36>", "<37>"])

def tiny_model(family="qwen2", seed=0, end_logit=1.0, **settings):  # end_logit -100: it never ends
    torch.manual_seed(seed)
    shapes = dict(vocab_size=39, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  head_dim=8, num_attention_heads=4, num_key_value_heads=2, eos_token_id=37,
                  max_position_embeddings=64, bos_token_id=None, pad_token_id=None,
                  tie_word_embeddings=False, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shapes | settings))
    model.lm_head.bias = torch.nn.Parameter(end_logit * (torch.arange(39) > 35), False)
    model.generation_config.eos_token_id = [36]
    return model
def slow_logprobs(model, completion, temperature=1.0):  # of one text, without cache and padding
    ids, n = tensor([completion.prompt_ids + completion.ids]), len(completion.ids)
    logits = model(ids, use_cache=False).logits[0, -n - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)[range(n), completion.ids]
def run_small(model, reward=None, data=PROMPTS, after_step=None, output_dir=None, resume=False,
              **settings):  # 4 completions of 3 prompts. It gives the metrics, without seconds
    config = GRPOConfig(**dict(steps=2, prompts_per_step=3, num_generations=4, warmup_steps=0,
                               max_completion_length=6, learning_rate=0.01) | settings)
    def random_rewards(completions, **columns):
        return random.choices([0, 1, np.random.rand()], k=len(completions))
    history = train(model, tiny_tokenizer(), data, reward or random_rewards, config,
                    after_step=after_step, output_dir=output_dir, resume=resume)
    return [{x: metrics[x] for x in metrics if "seconds" not in x} for metrics in history]

def weights_of(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])
def steps_of(model, **settings):  # metrics, groups and weights after each step of a small run
    steps = []
    run_small(model, after_step=lambda *step: steps.append([*step, weights_of(model)]), **settings)
    return steps
def watch(model):  # lists kind and logits of each forward pass, also of pi_ref, a copy
    passes, kinds = [], {(True, False): "sample", (False, False): "read", (False, True): "learn"}
    def note(module, arguments, inputs, output):  # a sample with a gradient would be a KeyError
        kind = kinds[inputs["use_cache"], output.logits.requires_grad]
        passes.append((kind, output.logits.detach()))
    model.register_forward_hook(note, with_kwargs=True)
    return passes

# ---- 7 and 8. Log-probs, and sampling ------------------------------------------------------------
@parametrize("family, settings", [
    ("gpt2", {}), ("bloom", {}), ("mistral", dict(sliding_window=3)),
    ("gemma2", dict(final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=3)),
    ("lfm2", dict(layer_types=["conv", "full_attention"])), ("jamba", dict(attn_layer_period=2,
     attn_layer_offset=1, num_experts=2, mamba_d_state=4, use_mamba_kernels=False))])
def test_sampling_and_training_compute_what_the_slow_way_computes(family, settings):
    """Texts are longer than windows. GPT-2 has dropout. The last two have more than attention."""
    model = tiny_model(family, **settings)
    completions = sum(sample_groups(model, tiny_tokenizer(), PROMPTS, 4, 8, temperature=0.7), [])
    padded, mask = compute_logprobs(model, completions, temperature=0.7)
    slow = torch.cat([slow_logprobs(model, c, temperature=0.7) for c in completions])
    for found in (padded[mask], tensor(sum([c.sampler_logprobs for c in completions], []))):
        assert_close(found, slow, atol=1e-4, rtol=0)

def test_tokens_are_drawn_from_the_softmax_or_at_temperature_0_are_the_likeliest():
    """Without top_k, top_p and penalty, which come with a checkpoint, and `generate` obeys."""
    model, data = tiny_model(), [{"prompt": "a"}]
    vars(model.generation_config).update(top_k=5, top_p=0.8, repetition_penalty=2.0)
    [group] = sample_groups(model, tiny_tokenizer(), data, 20_000, 1, temperature=0.7)
    [[likeliest]] = sample_groups(model, tiny_tokenizer(), data, 1, 1, temperature=0)
    counts = tensor([c.ids[0] for c in group]).bincount(minlength=39)
    wanted = 20_000 * (model(tensor([[0]])).logits[0, -1] / 0.7).softmax(dim=-1)
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()  # four standard deviations
    assert likeliest.ids == [wanted.argmax()]
def test_a_completion_ends_with_its_first_end_token_or_is_cut_off():
    completions = sum(sample_groups(tiny_model(), tiny_tokenizer(), PROMPTS, 500, 8), [])
    for c in completions:
        assert max(c.ids[:-1], default=0) < 36 and c.truncated == (c.ids[-1] < 36)
        assert len(c.ids) == 8 or not c.truncated
        assert c.text.split() == [LETTERS[i] for i in c.ids if i < 36]
    # All of this happens: completions of 8 tokens end with each of the three, or are cut off.
    assert {c.ids[-1] for c in completions if len(c.ids) == 8} > {36, 37, 38}
@parametrize("prompt, ids", [
    ("ab", [37, 0, 1]),  # the tokenizer puts 37 before a text, as some put their BOS
    (CHAT, [20, 1, 36, 0]),  # "a" opens the answer
    (CHAT + [{"role": "assistant", "content": "xy"}],
     [20, 1, 36, 0, 23, 24])])  # an answer that has begun: it is not closed with 36
def test_what_the_model_reads_of_a_prompt(prompt, ids):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<37> $A", special_tokens=[("<37>", 37)])
    assert encode_prompt(tokenizer, prompt) == ids
def test_the_softmax_is_in_float32_even_if_the_model_computes_in_bfloat16():
    with torch.autocast("cpu", torch.bfloat16):
        [[c]] = sample_groups(model := tiny_model(), tiny_tokenizer(), PROMPTS[:1], 1, 8)
        logprobs, _ = compute_logprobs(model, [c])
    for found in (tensor(c.sampler_logprobs), logprobs):
        assert not found.equal(found.bfloat16().float())
@parametrize("device, can, enabled", [("cpu", 1, 0), ("cuda", 0, 0), ("cuda", 1, 1)])
def test_matrices_are_multiplied_in_bfloat16_where_the_gpu_can(device, can, enabled, monkeypatch):
    monkeypatch.setattr(torch, "autocast", autocast := Mock())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: (
        can and not including_emulation))
    grpo.autocast(Mock(device=torch.device(device)))
    autocast.assert_called_once_with("cuda", torch.bfloat16, enabled=enabled)
def test_importing_grpo_turns_off_what_has_given_nan_on_gpus():
    assert not torch.backends.cuda.cudnn_sdp_enabled()

# ---- 9. The loop, its settings and files ---------------------------------------------------------
def two_completions():  # of a string and of a chat. The data has a column "numbers"
    return [Completion({"prompt": "a", "numbers": [1]}, prompt_ids=[0], ids=[7], text="x"),
            Completion({"prompt": [dict(*CHAT)], "numbers": [2]}, [0], ids=[8], text="y")]

@parametrize("returned", [[0.1, 0], tensor([1.0, 0.0]), np.ones(2), (True, False)])
def test_a_reward_function_is_called_as_trl_calls_one(returned):
    """It may return its numbers in a list, a tensor, an array, or as True and False."""
    reward, completions = Mock(return_value=returned), two_completions()
    assert grade(reward, completions).tolist() == [*returned]
    assert [completion.reward for completion in completions] == [*returned]
    reward.assert_called_once_with(prompts=["a", CHAT], numbers=[[1], [2]], completions=[
        "x", [{"role": "assistant", "content": "y"}]], completion_ids=[[7], [8]])
def test_a_reward_function_gets_copies():
    def meddle(prompts, completion_ids, numbers, **columns):
        [x.clear() for x in (prompts[1][0], prompts[1], completion_ids[0], numbers[0])]
        return [0, 0]
    grade(meddle, completions := two_completions())
    assert completions == two_completions()
def slow_step(model, reference, optimizer, groups, config):  # tokens are drawn at temperature 1
    def read(model, temperature=config.temperature):
        return [slow_logprobs(model, c, temperature) for c in completions]
    completions, found = sum(groups, []), []
    rewards = tensor([[c.reward for c in group] for group in groups])
    A = group_advantages(rewards, config.scale_rewards).flatten()
    with torch.no_grad():
        drawn, old, ref = read(model, 1), read(model), read(reference)
    for _ in range(config.num_iterations):
        loss, metrics = slow_loss(read(model), old, ref, A, **vars(config))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append([*metrics.values(), norm.item()])
    loss, kl, clip_fraction, norm = np.mean(found, axis=0)
    gaps = [(x - y).abs() for x, y, a in zip(drawn, old, A) if a or config.beta]
    return dict(
        loss=loss, kl=kl * (config.beta > 0), clip_fraction=clip_fraction, grad_norm=norm,
        reward_mean=rewards.mean().item(), entropy=-torch.cat(drawn).mean().item(),
        zero_variance_fraction=(rewards.std(dim=1) == 0).float().mean().item(),
        completion_length=np.mean([len(c.ids) for c in completions]),
        truncated_fraction=np.mean([c.ids[-1] < 36 for c in completions]),
        sampler_gap=torch.cat(gaps).mean().item())
TWICE = dict(num_iterations=2)
@parametrize("settings", [
    TWICE, dict(beta=0), TWICE | dict(beta=0, loss_type="dapo"), dict(max_grad_norm=1e9),
    TWICE | dict(beta=0.5, loss_type="dapo"), TWICE | dict(beta=0, loss_type="dr_grpo"),
    TWICE | dict(epsilon=0.01, epsilon_high=0.5, max_grad_norm=0.5),
    dict(scale_rewards="none", warmup_steps=2)], ids=str)
def test_the_metrics_of_three_steps_are_those_of_the_slow_loop(settings, monkeypatch):
    """The model comes in bfloat16 and with dropout. pi_ref is the model from before step 1. Of the
    rewards 0, 1, 2, 1, two advantages are 0. So that `sampler_gap` is not, tokens are drawn at
    temperature 1 instead of 0.8."""
    monkeypatch.setattr(grpo, "sample_groups", lambda *given: (
        sample_groups(*given[:5], temperature=given[5] / 0.8)))
    settings = dict(temperature=0.8, learning_rate=0.003, steps=3) | settings
    model, slow, reference = (tiny_model("gpt2").bfloat16() for _ in range(3))
    slow, reference = slow.float().eval(), reference.float().eval()
    optimizer = torch.optim.AdamW(slow.parameters(), weight_decay=0.0)
    for metrics, groups, _ in steps_of(
            model, reward=lambda **c: [0, 1, 2, 1, 0.1 + 0.2, *3 * [0.3], 1, 3, 0, 1], **settings):
        optimizer.param_groups[0]["lr"] = metrics["learning_rate"]
        config = GRPOConfig(max_completion_length=6, **settings)
        expected = slow_step(slow, reference, optimizer, groups, config)
        assert {x: metrics[x] for x in expected} == approx(expected, rel=1e-4, abs=1e-5)

def test_the_seconds_are_those_of_sampling_reward_and_update(monkeypatch):
    clock = Mock(side_effect=[0, 1, 10, 100])  # read before and after each of them
    def reward(completions, **columns):
        assert clock.call_count == 2
        return 12 * [1]
    monkeypatch.setattr(grpo, "time", Mock(perf_counter=clock))
    [(metrics, *_)] = steps_of(tiny_model(), reward=reward, steps=1)
    assert metrics == metrics | dict(sample_seconds=1, reward_seconds=9, update_seconds=90)
@parametrize("settings, expected", [  # pi_ref reads the completions, pi_theta learns
    (TWICE, "sample 3, sample 12, read 12, learn 12, learn 12"),
    (dict(beta=0), "sample 3, sample 12, learn 4"),  # four advantages are not 0
    (dict(micro_batch_size=9), "sample 3, sample 12, read 9, learn 9, read 3, learn 3"),
    (dict(sampling_batch_size=1, beta=0), 3 * "sample 1, sample 4, " + "learn 4"),
    (dict(sampling_batch_size=9, beta=0), "sample 2, sample 8, sample 1, sample 4, learn 4")])
def test_the_forward_passes_of_a_step(settings, expected):
    """Sampling has one for the prompts, and one for each further token but the last."""
    passes = watch(model := tiny_model(end_logit=-100.0))
    run_small(model, lambda **columns: [1, 1, 1, 1] + 2 * [0, 1, 2, 1], **dict(
        steps=1, max_completion_length=2, micro_batch_size=12) | settings)
    assert ", ".join(f"{kind} {len(logits)}" for kind, logits in passes) == expected
def test_the_longest_completions_are_learned_first():
    passes = watch(model := tiny_model())
    run_small(model, data=3 * PROMPTS[:1], steps=1, micro_batch_size=1, beta=0)
    lengths = [logits.shape[1] for kind, logits in passes if kind == "learn"]
    assert lengths == sorted(lengths, reverse=True) and 7 >= lengths[0] > lengths[-1]
def test_the_bar_shows_the_accuracy_that_after_step_has_added(capsys):
    """And it goes on to show the last one."""
    run_small(tiny_model(), after_step=lambda metrics, _: (
        metrics["step"] == 1 and metrics.update(accuracy=0.625)))
    assert re.search("2/2.*reward_mean=.*accuracy=0.625", capsys.readouterr().err)
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_said(capsys):
    model, factors = tiny_model(), iter([1, nan, inf, 1])  # of the gradients of four steps
    model.lm_head.weight.register_hook(lambda slope: slope * next(factors))
    steps = steps_of(model, steps=4, micro_batch_size=12, beta=0)
    first, second, third, fourth = [weights for *_, weights in steps]
    assert first.equal(second) and first.equal(third) and not first.equal(fourth)
    assert steps[1][0]["grad_norm"] == 0
    assert "step 2: no update" in capsys.readouterr().out

def test_no_two_steps_draw_the_same():
    """Two steps each of two seeds. A step has all five examples, in an order of its own."""
    data, orders, texts = Dataset.from_list([{"prompt": x} for x in "abcde"]), [], []
    for seed in (0, 1):
        for _, groups, _ in steps_of(
                tiny_model(end_logit=-100.0), seed=seed, prompts_per_step=5, num_generations=2,
                sampling_batch_size=4, max_completion_length=5, data=data, learning_rate=0):
            orders.append("".join(group[0].example["prompt"] for group in groups))
            texts += [c.text for c in sum(groups, [])]
    assert len({*orders}) == 4 and len({*texts}) == len(texts) == 40
    assert {"".join(sorted(order)) for order in orders} == {"abcde"}  # none twice
@parametrize("warmup_steps, rates", [(1, "0.06 0.045 0.03 0.015"), (2, "0.03 0.06 0.04 0.02"),
                                          (8, "0.0075 0.015 0.0225 0.03")])
def test_the_rate_rises_and_falls(warmup_steps, rates):
    history = run_small(tiny_model(), learning_rate=0.06, warmup_steps=warmup_steps, steps=4)
    assert_close(tensor([metrics["learning_rate"] for metrics in history]), numbers(rates))
def test_in_the_callers_autocast_each_update_uses_the_weights_as_they_are():
    passes = watch(model := tiny_model().requires_grad_(False))
    model.lm_head.weight.requires_grad_()  # only this moves, but not autocast's copy of it
    with torch.autocast("cpu", torch.bfloat16):
        metrics = run_small(model, num_iterations=2, micro_batch_size=12)
    assert {logits.dtype for _, logits in passes} == {torch.bfloat16}
    first, second, *_ = [logits for kind, logits in passes if kind == "learn"]
    assert not first.equal(second) and metrics[1]["sampler_gap"] < 0.01  # with old copies, 0.05
def test_the_defaults_and_the_settings_of_the_tasks():
    tasks = [(task.quick, task.settings) for task in gsm8k_demo.TASKS.values()][:2]
    assert f"{GRPOConfig()} {gsm8k_demo.DemoConfig()} {tasks}" == (
        "GRPOConfig(num_generations=8, prompts_per_step=32, sampling_batch_size=256, max_completion"
        "_length=512, temperature=1.0, scale_rewards='group', beta=0.04, epsilon=0.2, epsilon_high="
        "None, loss_type='grpo', num_iterations=1, micro_batch_size=4, learning_rate=1e-06, warmup_"
        "steps=10, max_grad_norm=1.0, steps=300, save_steps=20, seed=0) DemoConfig(task='', model='"
        "', data='', output='', resume=False, eval_questions=1319, eval_steps=50, cpu_bf16=False) ["
        "(200, {}), (100, {'steps': 20, 'prompts_per_step': 6, 'max_completion_length': 32, 'num_it"
        "erations': 2, 'warmup_steps': 8, 'learning_rate': 2e-06, 'micro_batch_size': 8, 'save_step"
        "s': 4, 'eval_questions': 100, 'eval_steps': 2})]")

def test_checkpoints_come_after_step_1_every_save_steps_and_at_the_end(tmp_path):
    """NumPy's numbers become plain ones. The four settings of the second run may change."""
    def look(metrics, groups):  # before the step's own checkpoint
        metrics["mine"] = np.float32(0.5)
        found.append(len(torch.load(path, weights_only=True)["history"]) if path.exists() else 0)
    found, path = [], tmp_path / "new/run/checkpoint.pt"
    run = dict(output_dir=str(path.parent), beta=0, after_step=look, learning_rate=np.float32(0.25))
    run_small(tiny_model(), steps=np.int64(6), save_steps=3, **run)
    run_small(tiny_model(), steps=8, save_steps=5, micro_batch_size=5, sampling_batch_size=8,
              resume=True, **run)
    assert found == [0, 1, 1, 3, 3, 3, 6, 6] and len(torch.load(path)["history"]) == 8
    assert path.with_name("metrics.jsonl").read_text().count('"mine": 0.5') == 8
    assert "reference" not in torch.load(path)  # at beta=0, there is no pi_ref
def test_a_run_cannot_be_resumed_with_any_other_setting_changed(tmp_path):
    run, model = dict(output_dir=tmp_path, steps=1, data=3 * PROMPTS), tiny_model()
    run_small(tiny_model(), **run)
    for name in {*vars(GRPOConfig())} - {
            "steps", "save_steps", "micro_batch_size", "sampling_batch_size"}:
        here = dict(loss_type="dapo", scale_rewards="none").get(name, 7)
        with raises(ValueError, match=f"another run: {name} is .* there, {here}.* here"):
            run_small(model, resume=True, **run | {name: here})
    assert weights_of(model).equal(weights_of(tiny_model()))  # and nothing is touched
@parametrize("name, value, wanted", [
    ("num_generations", 1, "a whole number of at least 2"), ("steps", 2.5, "a whole number"),
    ("save_steps", 0, "a whole number of at least 1"),
    ("seed", -1, "a whole"), ("temperature", 0, "a number of at least 1e-06"),
    ("learning_rate", nan, "a number"), ("learning_rate", "1e-6", "a number"), ("beta", None, "a"),
    ("learning_rate", -0.1, "a number"), ("learning_rate", inf, "a number"),
    ("scale_rewards", None, "one of .'group', 'none'")])
def test_a_setting_that_cannot_be_is_refused(name, value, wanted):
    with raises(ValueError, match=f"{name} is {value!r}, not {wanted}"):
        GRPOConfig(**{name: value})
@parametrize("said, wrong", [
    (r"\(1, 5\)", dict(old_logprobs=zeros(1, 5))), (r"\(5,\)", dict(advantages=zeros(5))),
    (r"\(5,\)", dict(mask=ones(5))), ("want", {x: zeros(6) for x in loss_inputs()}),
    ("are needed", dict(ref_logprobs=None)), ("'dr_grpo'", dict(loss_type="dr_grpo"))])
def test_wrong_arguments_of_the_loss_are_refused(said, wrong):
    with raises(ValueError, match=said):
        grpo_loss(**loss_inputs() | wrong)
@parametrize("said, rewards", [("1 rewards for 2", [1]), ("3 rewards for 2", [1, 1, 1]),
    ("'x' is nan", [nan, 1]), ("'y' is None", [1, None])])
def test_rewards_other_than_n_finite_numbers_are_refused(said, rewards):
    with raises(ValueError, match=said):
        grade(lambda **columns: rewards, two_completions())

@parametrize("said, call", [
    ("two or more", lambda: group_advantages(ones(3, 1))),  # RLinf, 4: always at least two answers
    ("'std', not 'group'", lambda: group_advantages(ones(3, 2), "std")),
    ("needs the output_dir", lambda: run_small(tiny_model(), resume=True)),
    ("prompts_per_step is 4", lambda: run_small(tiny_model(), prompts_per_step=4)),
    ("'' has no tokens", lambda: run_small(tiny_model(), data=3 * [{"prompt": ""}])),
    ("has no cache", lambda: run_small(tiny_model("openai-gpt"))),
    ("has no cache|only contain LinearAttention", lambda: run_small(tiny_model("mamba"))),
    ("no eos_token_id", lambda: end_token_ids(Mock(generation_config=None, config=None), None))])
def test_what_cannot_be_done_is_refused_with_an_error_that_says_it(said, call):
    with raises(ValueError, match=said):
        call()
def test_a_run_without_a_checkpoint_is_not_overwritten(tmp_path, capsys):
    """Unless one asks for it. Then it starts again, and says so."""
    (tmp_path / "metrics.jsonl").write_text("mine")
    with raises(ValueError, match="holds a run: resume it"):
        run_small(tiny_model(), output_dir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"
    run_small(tiny_model(), output_dir=tmp_path, resume=True)
    assert f"no checkpoint in {tmp_path}: starting at step 1" in capsys.readouterr().out

@parametrize("step, module, function, error", [  # SystemExit is as if the process were killed
    (3, Path, "write_text", SystemExit),  # while metrics.jsonl is written
    (4, torch, "save", OSError), (4, Path, "replace", SystemExit)])  # the disk is full; renaming
def test_a_run_that_failed_ends_as_if_nothing_had_happened(
        step, module, function, error, tmp_path, monkeypatch):
    """To the bit, by the same call, with any model. `function` fails after the update of `step`."""
    def fail(*arguments, **more):
        arguments[function == "save"].write_bytes(b"half")  # the path: of the file, or the new one
        raise error
    def break_it(metrics, groups):
        if metrics["step"] == step:
            monkeypatch.setattr(module, function, fail)
    run = dict(steps=5, save_steps=2, num_iterations=2, seed=5000)
    calm, model = tiny_model(), tiny_model(seed=1)
    model.lm_head.weight.grad = ones(39, 32)  # left over by an earlier try
    with raises(error):
        run_small(tiny_model(), after_step=break_it, output_dir=tmp_path, **run)
    monkeypatch.undo()
    assert run_small(model, output_dir=tmp_path, resume=True, **run) == run_small(calm, **run)
    assert weights_of(model).equal(weights_of(calm))

# ---- 10. The relatives ---------------------------------------------------------------------------
def with_printed_change(relative, line, new="{}"):  # {old}: that line; {}: the printed code
    source, module = inspect.getsource(grpo), {"__name__": "grpo"}  # dataclass looks this name up
    if relative:
        pairs = re.findall(r"^# (\S.*)\n(?:# \S.*\n)*#\n((?:#     .*\n)+)", source, re.M)
        [code] = [code.replace("#     ", "    ") for first, code in pairs if relative in first]
        [old] = re.findall(rf"^ *{line}.*\n", source, re.M)
        source = source.replace(old, new.format(code, old=old))
    exec(source, module)
    return module

PARITY = {  # TRL's settings in .experiments/scripts/trl_figures.py; its loss, and sum and norm of its gradient
    "grpo, beta 0.04": (dict(), (0.2256250593892, 0.115624951016, 0.1918599797598)),
    "corrected KL": (dict(beta=0.3, use_bias_correction_kl=True, loss_type="dapo"),
                     (0.3110928775499, 0.1974924852299, 0.2083251191769)),
    "GSPO": (dict(beta=0.3, epsilon=0.1, importance_sampling_level="sequence"),
             (0.2235127094673, -0.122518523693, 0.1737799087193))}

@parametrize("name, relative, line", [
    ("grpo, beta 0.04", None, ""), ("GSPO", "GSPO", r"ratio = \(l"),
    ("corrected KL", "TRL's KL", "loss = -")])
def test_the_loss_and_the_printed_changes_are_those_of_trl(name, relative, line):
    """Loss, and sum and norm of its gradient, are TRL 1.16's."""
    loss_of, (settings, figures) = with_printed_change(relative, line)["grpo_loss"], PARITY[name]
    settings = {x: settings[x] for x in settings if x in inspect.signature(grpo_loss).parameters}
    settings |= loss_inputs() | dict(max_completion_length=MAX_LENGTH)
    loss = lambda logprobs: loss_of(**settings | dict(logprobs=logprobs))[0]
    slope = gradient(loss, logprobs := settings["logprobs"])
    assert [loss(logprobs), slope.sum(), slope.norm()] == approx(figures, abs=1e-12)
def test_the_printed_baseline_of_rloo_is_that_of_the_book():
    advantages = with_printed_change("RLOO", "centered = ", "{old}{}")["group_advantages"]
    rewards = tensor([[4.0, 0, 2, 6], [1, 0, 0, 1]])
    rlhf_reward = rewards.T  # Book, from line 345: a column for each prompt
    baseline = (rlhf_reward.sum(0) - rlhf_reward) / (4 - 1)  # the mean of the others
    assert_close(advantages(rewards, "none"), (rlhf_reward - baseline).T)
@parametrize("ratio, loss", [(4.9, 4.9), (5.1, 0)])
def test_the_printed_early_stop_ignores_a_micro_batch_with_a_mean_ratio_above_5(ratio, loss):
    early_stop = with_printed_change("RLinf", "loss = -", "{old}{}")["grpo_loss"]
    logprobs, one = tensor([[ratio + 4, ratio - 4]]).log(), ones(1, 2)
    assert early_stop(logprobs, 0 * one, None, -ones(1), one, beta=0)[0].item() == approx(loss)
def test_the_printed_penalty_of_dapo_falls_to_minus_1_in_the_last_64_tokens():
    penalty = with_printed_change("DAPO", "def average", "if True:\n{}{old}")["overlong_penalty"]
    assert [penalty(n * [5], 512) for n in (100, 480, 512, 600)] == [0, -0.5, -1, -1]

# ==== gsm8k_demo.py ===============================================================================
SHORT = "--steps 1 --prompts_per_step 1 --num_generations 2 --eval_questions 2 --output run "
SMALL = "--steps 5 --prompts_per_step 2 --eval_questions 8 --save_steps 2 "
GSM8K = "--task gsm8k --data data --prompts_per_step 2 "
FIELDS = [*vars(GRPOConfig()), *vars(gsm8k_demo.DemoConfig())]

def read(path):  # a .json's contents, or a list with those of a .jsonl's lines
    text = Path(path).read_text()
    return [*map(json.loads, text.splitlines())] if ".jsonl" in str(path) else json.loads(text)
def call_demo(flags, rehearsal=None, gpu=False):  # returns what it prints
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(sys, "argv", ["gsm8k_demo.py", *shlex.split(flags)])
        patch.setattr(gsm8k_demo, "rehearsal", rehearsal)
        patch.setattr(torch.cuda, "is_available", lambda: gpu)
        gsm8k_demo.main()
    return printed.getvalue()
@pytest.fixture(scope="module")
def rehearsal():  # gives copies of that of seed 0, made only once
    made = gsm8k_demo.rehearsal(0)
    return lambda seed: copy.deepcopy(made)
@pytest.fixture(scope="module")
def nine(rehearsal, tmp_path_factory):  # folder and print of nine steps
    folder = tmp_path_factory.mktemp("nine")
    return folder, call_demo(
        f"--steps 9 --eval_questions 80 --eval_steps 3 --output {folder}", rehearsal)
@pytest.fixture(scope="module")
def five(rehearsal, tmp_path_factory):  # results of five steps
    folder = tmp_path_factory.mktemp("five")
    call_demo(f"{SMALL} --eval_steps 1 --output {folder}", rehearsal)
    return read(folder / "results.json")
@pytest.fixture
def data(tmp_path, monkeypatch):  # a new folder, with GSM8K's two files in data/
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for part in ("train", "test"):
        Path(f"data/{part}.jsonl").write_text("\n".join(json.dumps(
            {"question": f"{part} {i}?", "answer": f"70+{i}.\n#### 1,00{i}"}) for i in range(3)))
def test_gsm8k_comes_from_the_hub_without_the_questions_of_a_dialogue(monkeypatch):
    load = Mock(return_value=dict(train=[], test=[]))
    monkeypatch.setattr(gsm8k_demo, "load_dataset", load)
    assert gsm8k_demo.load_gsm8k() == [[], []]
    load.assert_called_once_with("openai/gsm8k", "main")  # and not "socratic"
def test_rows_of_gsm8k_keep_only_the_last_number_of_the_solution(data):
    """Only the question is in the prompt, after a system prompt that asks for a box."""
    for part, rows in zip(("train", "test"), gsm8k_demo.load_gsm8k("data")):
        system, user = rows[2].pop("prompt")
        assert rows[2] == {"question": f"{part} 2?", "answer": "1,002"}
        assert user == {"role": "user", "content": f"{part} 2?"}
        assert system["role"] == "system" and "into \\boxed{}" in system["content"]
def test_the_100_sums_of_the_test_are_always_the_same_and_never_trained_on():
    train, test = gsm8k_demo.TASKS["sums"].load(folder="", seed=7)
    for row in test:
        a, b, c = map(int, re.findall("[0-9]+", row["question"]))
        assert row["answer"] == str(a * b + c)
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
    assert test[0]["question"] == "Answer in one short line: what is 16 times 2 plus 23?"
    assert len(train) == 8948 and len(test) == 100 and not [row for row in train if row in test]
@parametrize("seed", [0, 5])
def test_the_rehearsal_is_decided_by_its_seed_and_tested_on_new_problems(seed, monkeypatch):
    """Neither in pre-training nor in training. (Anna's eggs are the same as Ben's.)"""
    known = []
    monkeypatch.setattr(gsm8k_demo, "PRETRAIN_STEPS", 1)
    monkeypatch.setattr(gsm8k_demo, "Completion", lambda example, *ids: (
        known.append(example) or Completion(example, *ids)))  # those it may draw
    model, _, train, test = gsm8k_demo.rehearsal(seed)
    assert weights_of(model).equal(weights_of(gsm8k_demo.rehearsal(seed)[0]))
    learned, tested = ({row["question"].split(" ", 1)[1] for row in rows}
                       for rows in (known + train, test))
    assert known and len(tested) == 338 and not learned & tested
@parametrize("task, earned", [  # a sum is right if its last number is, else the box counts
    ("sums", {"12 * 9 = 108, 108 + 892 = 1000": 1, "1000 of 7": 0, "1,000.": 1, "5-1000": 1,
              "it is -1000": 0, "1,0,00": 0, "7.1000": 0, "none": 0}),
    ("gsm8k", BOXES := {r"\boxed{1000}": 1.5, r"\boxed{8}": 0.5, "1000": 0}), ("rehearsal", BOXES)])
def test_what_each_task_pays_for(task, earned):
    chats = [[{"role": "assistant", "content": text}] for text in earned]
    found = gsm8k_demo.TASKS[task].reward(completions=chats, answer=["1000"] * len(earned))
    assert dict(zip(earned, found)) == earned
def test_the_figures_of_an_evaluation(monkeypatch):
    """One of ten is right, three leniently. Wilson's interval by hand: 1.79 % to 40.42 %."""
    monkeypatch.setattr(gsm8k_demo, "sample_groups", lambda model, tokenizer, rows, *more: [
        [Completion(row, [], text=row["prompt"])] for row in rows])
    rows = [{"prompt": text, "answer": "12"} for text in (
        r"\boxed{7}, so \boxed{12}", "it is 12.", "5-12", r"\boxed{7}, or 12", "-12", "12 of 7",
        "none", "", r"\boxed{}", "1,2")]
    found = gsm8k_demo.evaluate(None, None, rows, 9)
    assert found == found | {"questions": 10, "accuracy": 0.1, "lenient_accuracy": 0.3}
    assert found["interval"] == approx([0.0179, 0.4042], abs=1e-4)
    assert [row["right"] for row in found["texts"]] == [True] + 9 * [False]
    by_sum = gsm8k_demo.evaluate(None, None, rows, 9, reward=gsm8k_demo.sum_reward)
    assert by_sum["accuracy"] == 0.4  # rewards of 1 are right, too
@parametrize("gpu, flags, seen", [  # the name and the device, or the seed of the rehearsal
    (True, "--data data", ["Qwen/Qwen2.5-0.5B-Instruct", "cuda"]),
    (True, "--task sums", ["Qwen/Qwen2.5-Coder-0.5B-Instruct", "cuda"]),
    (False, GSM8K + "--model x", ["x", "cpu"]),
    (False, "--seed 3", [3])])
def test_which_model_is_loaded_and_where_it_goes(gpu, flags, seen, data, monkeypatch):
    found = []
    def load(name, **settings):
        found.append(name)
        return Mock(to=lambda device: found.append(device) or 1 / 0)  # an error stops the demo
    monkeypatch.setattr(gsm8k_demo.AutoModelForCausalLM, "from_pretrained", load)
    with raises(SystemExit):
        call_demo(f"--prompts_per_step 2 {flags}", lambda seed: found.append(seed) or 1 / 0, gpu)
    assert found == seen
def test_pickled_weights_are_refused(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    torch.save(tiny_model().state_dict(), tmp_path / "pytorch_model.bin")
    with raises(OSError, match="safetensors"):
        gsm8k_demo.load_model(tmp_path)
def test_gsm8k_is_trained_on_train_and_tested_on_test(data, rehearsal):
    """The printed lines ask the saved model: as in the test, though it came with a penalty."""
    model, tokenizer, *_ = rehearsal(0)
    model.generation_config.repetition_penalty = 3.0
    model.bfloat16().save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    printed = call_demo(GSM8K + "--model tiny " + SHORT + "--max_completion_length 20")
    assert re.findall(r"step 1: (\w+) \d", printed) == ["train"]
    answers = read("run/after.jsonl")
    assert [row["question"] for row in answers] == ["test 0?", "test 1?"]
    exec(printed[printed.index("from transf"):].replace("print", "said = "), names := {})
    assert names["said"][0]["generated_text"][-1]["content"] == answers[0]["text"]
    assert GenerationConfig.from_pretrained("run").eos_token_id == [0, 1]  # both end tokens
    assert gsm8k_demo.load_model("tiny")[0].dtype == torch.float32
def test_flags_and_reward_reach_training_and_tests(data, rehearsal, monkeypatch):
    monkeypatch.setattr(gsm8k_demo.TASKS["rehearsal"], "reward", lambda completions, **columns: (
        [1] * len(completions)))
    passes = watch((made := rehearsal(0))[0])
    flags = "--cpu_bf16 true --eval_questions 5 --sampling_batch_size 3 --max_completion_length 4"
    call_demo(SHORT + flags, lambda seed: made)
    assert {logits.dtype for _, logits in passes} == {torch.bfloat16}
    assert max(len(logits) for _, logits in passes) == 3
    [metrics] = read("run/metrics.jsonl")
    assert metrics == metrics | dict(completion_length=4, reward_mean=1)
    answers = read("run/after.jsonl")
    assert all(row["right"] and "boxed" not in row["text"] for row in answers)  # cut off before
def test_without_a_gpu_the_rehearsal_starts_low_and_learns(nine):
    """If tokens are drawn, as in training, and with the likeliest ones."""
    before, after = read(nine[0] / "results.json").values()
    assert before["accuracy"] <= 0.2 < before["sampled_accuracy"] <= 0.4
    assert after["accuracy"] >= 0.7 and 0.6 <= after["sampled_accuracy"] < 1
def test_every_eval_steps_th_step_has_an_accuracy_and_the_curve_is_of_it(nine):
    metrics = read(nine[0] / "metrics.jsonl")
    accuracy = {row["step"]: row["accuracy"] for row in metrics if "accuracy" in row}
    [curve] = re.findall("during training: (.*)", nine[1])
    assert [*accuracy] == [3, 6, 9] and accuracy[3] < 0.5 < accuracy[9]
    assert not any(64 * x % 1 for x in accuracy.values())  # of the first 64 problems
    assert [*map("▁▂▃▄▅▆▇█".index, curve)] == approx([7 * x for x in accuracy.values()], abs=1)
def test_the_first_and_every_fourth_step_show_a_whole_group_best_first(nine):
    shown = re.findall(r"step (\d): .* \(answer (.*)\)\n((?:  reward .*\n)+)", nine[1])
    assert [step for step, *_ in shown] == ["1", "4", "8"]
    for _, answer, group in shown:
        rewards, advantages, texts = zip(*re.findall("reward (.*)  advantage (.*?)  (.*)", group))
        rewards, advantages = [*map(float, rewards)], [*map(float, advantages)]
        assert len(rewards) == 8 and rewards[0] > rewards[7]
        assert rewards == sorted([rule_reward(text, answer) for text in texts], reverse=True)
        assert advantages == approx(group_advantages(tensor(rewards)).tolist(), abs=0.006)
def test_after_step_1_it_is_said_how_long_all_steps_take(capsys):
    metrics = dict(step=1, sample_seconds=60, update_seconds=600, reward_mean=0)
    group = [Completion(dict(question="", answer=""), [], text="x" + 60 * "y")]
    gsm8k_demo.show_step(metrics | dict(truncated_fraction=0), [group], 9)
    printed = capsys.readouterr().out
    assert "9 steps like this one take 99.0 minutes" in printed and "xy" not in printed
def test_the_figures_stand_at_the_end(capsys):
    figures = dict(questions=10, accuracy=0.1, lenient_accuracy=0.3, sampled_accuracy=0.2)
    figures |= dict(interval=[0.02, 0.4], examples=[])
    gsm8k_demo.show_results({"before": figures, "after": figures}, [{"accuracy": 1.0}])
    printed = capsys.readouterr().out
    assert re.findall("█|[0-9.]+%", printed) == ["█"] + 2 * "10.0% 2.0% 40.0% 30.0% 20.0%".split()
@parametrize("flags, said", [
    ("--eval_steps 0", "no GPU: --task rehearsal"),
    ("--beta 0", "1000.0 M weights on cpu. Two checkpoints take 24.00 GB"),
    ("", "take 32.00 GB; 5 GB are free"), (GSM8K + "--model tiny", "no GPU: with its default")])
def test_what_a_run_says_about_itself(flags, said, data, rehearsal, monkeypatch):
    for part in rehearsal(0)[:2]:
        part.save_pretrained("tiny")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Mock(free=5e9))
    monkeypatch.setattr(gsm8k_demo.Qwen2ForCausalLM, "num_parameters", lambda self: 10**9)
    printed = call_demo(f"{flags} {SHORT} --max_completion_length 4", rehearsal)
    assert said in printed and ("days" in printed) == ("gsm8k" in flags)
def test_three_problems_are_shown_before_and_after(nine):
    folder, printed = nine
    for before, after in [*zip(*(read(folder / f"{x}.jsonl") for x in ("before", "after")))][:3]:
        assert (f"{before['question']} (answer {before['answer']})\n- before:\n{before['text']}\n"
                f"- after:\n{after['text']}\n") in printed
    assert printed.count("- before:\n") == 3
@parametrize("module, function, call, lost, flags", [
    (gsm8k_demo, "encode_prompt", 1, "0 steps", ""),
    (gsm8k_demo, "evaluate", 2, r"\b0 steps.*\b0\b", ""),
    (grpo, "grade", 1, r"\b0 steps.*\b0\b", ""),
    (grpo, "grade", 4, r"\b1 steps.*\b2\b", "--output 'my run'")])
def test_after_ctrl_c_a_run_ends_as_if_it_had_not_come(
        module, function, call, lost, flags, five, data, rehearsal, monkeypatch):
    """It comes in the test before training, in step 1 or 4. Then we type what the demo says."""
    works, stop = getattr(module, function), Mock(side_effect=KeyboardInterrupt)
    calls = iter([*(call - 1) * [works], stop, *99 * [works]])
    monkeypatch.setattr(module, function, lambda *given, **more: next(calls)(*given, **more))
    with raises(SystemExit, match=lost) as stopped:
        call_demo(SMALL + "--eval_steps 1 " + flags, rehearsal)
    call_demo(stopped.value.code.split("gsm8k_demo.py")[1], rehearsal)
    [results] = Path().glob("*/**/results.json")
    assert read(results) == five
@parametrize("error, raised, said", [
    (OSError(28, "No space left on device"), SystemExit, "disk is full.* To go on:\n.*--resume"),
    (OSError(122, "Disk quota exceeded"), SystemExit, "disk is full.* To go on:\n.*--resume"),
    (RuntimeError("[enforce fail at inline_container.cc:67] ."), SystemExit, "disk is full"),
    (torch.OutOfMemoryError(), SystemExit, "lower --micro_batch_size, --sampling_batch_size"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), SystemExit, "lower --micro"),
    (MemoryError(), SystemExit, "lower --m"), (RuntimeError("ALLOC_FAILED"), SystemExit, "lower"),
    (KeyError("something else"), KeyError, "something else")], ids=str)
def test_a_full_disk_or_memory_gives_advice(error, raised, said, data, rehearsal, monkeypatch):
    """And leaves no half file. Any other error keeps its traceback."""
    def save(contents, path):
        Path(path).write_bytes(b"half")
        raise error
    monkeypatch.setattr(torch, "save", save)
    with raises(raised, match=said):
        call_demo(SHORT, rehearsal)
    assert raised is KeyError or not [*Path("run").glob("checkpoint*")]
@parametrize("flags, said", [  # by argparse, or after "stopped"
    ("--task word", "--task"), ("--model tiny", "give --task"),
    ("--task sums --data data", "--data has no use"), ("--rehearsal", "--rehearsal"),
    ("--model tiny --task rehearsal", "--model has no use"),
    ("--eval_questions 0", "--eval_questions"), ("--num_generations 1", "num_generations is 1"),
    ("--resume --output no", "no/settings.json"),
    ("--output .", "not empty"), ("--prompts_per_step 999", "stopped.*prompts_per_step.* 509"),
    (GSM8K + "--data no/such/data", "stopped.*no/such/data"),
    (GSM8K + "--model no/such/model", "stopped.*no/such/model")])
def test_what_cannot_be_is_refused_in_a_line_and_leaves_no_file(flags, said, data, capsys):
    with raises(SystemExit) as stopped:
        call_demo(flags)
    code, printed = stopped.value.code, capsys.readouterr().err
    assert re.fullmatch(f".*{said}.*", printed.splitlines()[-1] if code == 2 else code)
    assert ("stopped" in said) == (code != 2)
    assert not [*Path().glob("**/*.json")]  # but perhaps an empty folder
@parametrize("row", [{"question": "5?", "answer": "5"}, {"answer": "5? #### 5"},
                     {"question": "5?", "answer": "#### five"}], ids=str)
def test_a_row_without_question_or_number_is_named(row):
    with raises(ValueError, match=r"\{.*5\?"):
        gsm8k_demo.gsm8k_row(row)
def test_a_damaged_checkpoint_is_named_in_one_line(nine, data, rehearsal):
    shutil.copytree(nine[0], "run")
    Path("run/checkpoint.pt").write_bytes(b"half")
    with raises(SystemExit, match="^stopped: run/checkpoint.pt is damaged.*$"):
        call_demo("--resume --output run", rehearsal)
def test_a_run_goes_on_with_more_steps(nine, data, rehearsal, monkeypatch):
    """While it does, results.json has no old "after". What is done is not done again."""
    shutil.copytree(nine[0], "run")
    settings, grade, seen = read("run/settings.json"), grpo.grade, []
    Path("run/before.jsonl").unlink()
    monkeypatch.setattr(grpo, "grade", lambda *given: (
        seen.extend(read("run/results.json")) or grade(*given)))
    assert "rises again" in call_demo("--resume --output run --steps 10", rehearsal)
    results = read("run/results.json").items()
    assert [(when, x["step"], x["questions"]) for when, x in results] == [
        ("before", 0, 80), ("after", 10, 80)]
    assert seen == ["before"] and not Path("run/before.jsonl").exists()
    assert read("run/settings.json") == settings
    assert "rises again" not in call_demo("--resume --output run --steps 9", rehearsal)
def test_other_settings_are_refused_all_at_once(nine, capsys):
    with raises(SystemExit):
        call_demo("--seed 1 --beta 0.5 --eval_questions 9 --task sums --save_steps 7 --resume "
                  f"--output {nine[0]}")
    said = re.findall("--([a-z_]+) cannot change", capsys.readouterr().err)
    assert {*said} == {"beta", "seed", "task", "eval_questions"}
@parametrize("stdout", [StringIO, lambda: TextIOWrapper(BytesIO())], ids=["notebook", "terminal"])
def test_help_explains_every_setting(stdout, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", "--help"])
    with raises(SystemExit), redirect_stdout(stdout()) as printed:
        runpy.run_path(gsm8k_demo.__file__, run_name="__main__")
    printed.seek(0)
    said = " ".join(printed.read().split())
    assert said.count("(default: ") == len(FIELDS)
    for text in ("completions in one forward and backward pass (default: 4)", "made-up problems",
                 "steps between tests during training; 0: none (default: 50)",
                 "--task sums sets {'steps': 20, ", "--task rehearsal sets {'steps': 40, "):
        assert text in said

# ==== The README, and the gallery of mistakes =====================================================
README = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")
gallery = runpy.run_path(Path(grpo.__file__).with_name(".experiments") / "scripts" / "gallery.py")
@parametrize("text, end", [(README, "```"), (grpo.__doc__, "A lang")], ids=["README", "grpo.py"])
def test_the_scripts_of_readme_and_docstring_run(text, end, data):
    """On a tiny model, and with smaller numbers, so that it is quick."""
    script = inspect.cleandoc(re.search(rf"\n( *from transf.*?){end}", text, re.S)[1])
    for old, new in {'"Qwen/[^"]+"': '"tiny"', r'\.to\("cuda"\)': "", r"GRPOConfig\(.*?\)":
                     "GRPOConfig(steps=2, prompts_per_step=2, max_completion_length=8)",
                     "% 4": "% 2"}.items():
        script = re.sub(old, new, script)
    for part in (tiny_model(), tiny_tokenizer()):
        part.save_pretrained("tiny")
    exec(script, {})
    assert ["accuracy" in x for x in read("runs/mine/metrics.jsonl")] == [False, end == "```"]
def test_names_epsilon_and_beta_of_the_readme_are_those_of_the_code():
    names = {*re.findall(r"(?:`|`--)([a-z]+_[a-z_]+)`", README)}
    sources = inspect.getsource(grpo) + inspect.getsource(gsm8k_demo)
    assert names and all(name in sources for name in names)
    assert f"ε = {GRPOConfig().epsilon} and β = {GRPOConfig().beta}" in README
@parametrize("mistake, figure, limit", [("targets not shifted", "sampler_gap", 1),
                                        ("one end token known", "truncated_fraction", 0.95)])
def test_two_mistakes_show_in_step_1(mistake, figure, limit, rehearsal):
    [metrics] = gallery["train"](mistake, *rehearsal(0)[:3], steps=1)
    assert metrics[figure] > limit
