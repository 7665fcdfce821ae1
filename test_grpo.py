# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py, and the second half of the tutorial: what must be true.

    python -m pytest -q test_grpo.py

All of it runs offline, on the CPU, in under two minutes. Most of it is tables: a name, what goes
in, what must come out. Below each table stands the short function that checks its rows. Read a
table like a list of sentences; change a line of grpo.py, and see which of them goes red. "Slow" is
a second way to compute the same thing: loops, one token at a time, written to be obvious.
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
import subprocess
import sys
import threading
import time
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tokenizers import models, pre_tokenizers, Tokenizer
from torch.nn.functional import pad
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING,
                          PreTrainedTokenizerFast)

import grpo
import gsm8k_demo
from grpo import (answer_ratio_loss, average, choose_tokens, clipped_surrogate, corrected_kl_loss,
                  end_token_ids, extract_boxed, group_advantages, group_scale, grpo_loss,
                  GRPOConfig, gspo_loss, k3_kl, kl_estimate, masked_mean, overlong_penalty,
                  rule_reward, sample_groups, token_logprobs, train, training_steps)

# Matrices this small are done before a second thread wakes up.
torch.set_num_threads(1)


def t64(values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(function, x):
    """The gradient of function(x), a single number, with respect to x."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def near(actual, expected, tolerance=1e-12):
    """The same shape, and the same numbers up to rounding."""
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# ================================================================================================
# The mathematics
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# 1. The worked numbers of the documents
#
# grpo.py was written after five texts: an article that builds GRPO from scratch, a chapter of a
# book on RLHF, an explainer of the objective, a hands-on course, and the page of a framework. Four
# of them work examples, and not every figure is right. Each row has what grpo.py computes and what
# is right; a misprint has a third column, what is printed instead.
# ------------------------------------------------------------------------------------------------

ARTICLE = t64([2.0, 3.5, 1.0, 4.0, 2.5])
APPLE_SCORES = t64([1.5, 1.0, 0.0, 0.0])
STATISTICS = t64([1.5, 0.0, 1.5, 0.0, 1.0, 1.5, 0.5, 1.5])
EGGS = r"There are 9 * 7 = \boxed{63} eggs."
P_02 = t64([[0.2]]).log()
P_04 = t64([[0.4]]).log()

# The book: losses [1, 1, 1, 1, 10] and [1 nine times, 10].
BOOK = torch.ones(2, 10, dtype=torch.float64)
BOOK[0, 4] = 10.0
BOOK[1, 9] = 10.0
BOOK_MASK = torch.arange(10) < torch.tensor([[5], [10]])

# The book's script: two answers of 4 and 7 tokens, all ratios 1, all advantages 2.
ONES = torch.ones(2, 7, dtype=torch.float64)
SCRIPT_MASK = (torch.arange(7) < torch.tensor([[4], [7]])).long()


def script(ratios, loss_type):
    return average(2.0 * ratios, SCRIPT_MASK, loss_type, 7)


def script_gradient(loss_type):
    """Of a ratio in the answer of 4, and of a ratio in the answer of 7."""
    return gradient(lambda ratios: script(ratios, loss_type), ONES)[:, 0]


def mean_and_std(rewards):
    """Read back from the advantages."""
    centered = group_advantages(rewards, scale_rewards=False)
    return [rewards[0] - centered[0], centered[0] / group_advantages(rewards)[0]]


def graded(answers):
    rewards = [rule_reward(f"There are \\boxed{{{answer}}} left.", "7") for answer in answers]
    return group_advantages(t64(rewards))


def clip(ratios, advantage):
    logprobs = t64([ratios]).log()
    return clipped_surrogate(logprobs, torch.zeros_like(logprobs), t64([advantage]))[0]


FIVE = [-0.561951, 0.842927, -1.498537, 1.311220, -0.093659]
EARLY = [-0.774597, 1.290994, -0.774597, 1.290994, -0.774597, 1.290994, -0.774597, -0.774597]
MIDDLE = [0.377964, 0.377964, 0.377964, -2.645751, 0.377964, 0.377964, 0.377964, 0.377964]
EIGHT = [0.886796, -1.477994, 0.886796, -1.477994, 0.098533, 0.886796, -0.689730, 0.886796]
WORKED = {  # document and quantity: what grpo.py computes, what is right, what is misprinted
    "article: clip at ratio 1.3, advantage 2": (lambda: clip([1.3], 2.0), [2.4]),
    "article: mean and std of five": (lambda: mean_and_std(ARTICLE), [2.6, 1.067708]),
    "article: advantages of the five; its code has rewards.std(), which divides by G - 1":
        (lambda: group_advantages(ARTICLE), FIVE, [-0.503, 0.754, -1.340, 1.173, -0.084]),
    "article: one right answer in R1's group of 16, printed as 64":
        (lambda: group_advantages(t64([1.5] + [0.5] * 15))[0], 15**0.5, 63**0.5),
    "article, explainer: k3 at pi_ref/pi_theta = 2": (lambda: k3_kl(P_02, P_04), [[0.306853]]),
    "book: mean losses": (lambda: masked_mean(BOOK, BOOK_MASK, dim=1), [2.8, 1.9]),
    "book: mean of the means": (lambda: average(BOOK, BOOK_MASK), 2.35),
    "book: mean over tokens, 33/15": (lambda: average(BOOK, BOOK_MASK, "dapo"), 2.2, 2.27),
    "script: masked_mean": (lambda: script(ONES, "grpo"), 2.0),
    "script: masked_sum, mean of 8/7 and 2": (lambda: script(ONES, "dr_grpo"), 11 / 7),
    "script: mean over tokens, left without advantages": (lambda: script(ONES, "dapo"), 2.0, 1.0),
    "script: gradients of masked_mean": (lambda: script_gradient("grpo"), [1 / 4, 1 / 7]),
    "script: gradients of masked_sum": (lambda: script_gradient("dr_grpo"), [1 / 7, 1 / 7]),
    "script: gradients of the mean over tokens; 1/7 was not zeroed, 1/7 + 1/11 is printed":
        (lambda: script_gradient("dapo") / 2, [1 / 11, 1 / 11], [0.2338, 0.2338]),
    "book: sign of the KL in the loss":
        (lambda: grpo_loss(P_02, P_02, P_04, t64([0.0]), P_02 < 0, beta=1.0)[0],
         0.306853, -0.306853),
    "course: apples minus their mean":
        (lambda: group_advantages(APPLE_SCORES, scale_rewards=False),
         [0.875, 0.375, -0.625, -0.625]),
    "course: a right box": (lambda: rule_reward(EGGS, "63"), 1.5),
    "course: a wrong box": (lambda: rule_reward(r"About \boxed{50}.", "63"), 0.5),
    "course: right but not boxed": (lambda: rule_reward("It is 5.", "5"), 0.0, 1.0),
    "course: second thoughts, its pattern reads the first box":
        (lambda: rule_reward(r"\boxed{50}? No: \boxed{63}", "63"), 1.5, 0.5),
    "course: advantages, early":
        (lambda: graded([3, 7, 12, 7, 15, 7, 8, 10]), EARLY,
         [-1.2, 0.1, 0.8, 0.1, 1.5, 0.1, -0.3, 0.6]),
    "course: advantages, middle":
        (lambda: graded([7, 7, 7, 8, 7, 7, 7, 7]), MIDDLE, [0, 0, 0, -0.5, 0, 0, 0, 0]),
    "course: advantages, late": (lambda: graded([7] * 8), [0.0] * 8),
    "course: mean and std of eight":
        (lambda: mean_and_std(STATISTICS), [0.9375, 0.634306], [0.875, 0.637]),
    "course: advantages of the eight":
        (lambda: group_advantages(STATISTICS), EIGHT,
         [0.82, -1.23, 0.82, -1.23, 0.12, 0.82, -0.53, 0.82]),
    "course: the clip of a good answer":
        (lambda: clip([0.5, 0.8, 1.0, 1.2, 1.5], 1.0), [0.5, 0.8, 1.0, 1.2, 1.2]),
    "course: the clip of a bad answer":
        (lambda: clip([0.5, 0.8, 1.0, 1.2, 1.5], -1.0), [-0.8, -0.8, -1.0, -1.2, -1.5]),
}


@pytest.mark.parametrize("name", WORKED)
def test_the_documents_numbers(name):
    compute, right, *misprint = WORKED[name]
    near(compute(), right, 1e-6)
    for printed in misprint:
        assert (t64(right) - t64(printed)).abs().max() > 0.005, "rounding could explain it"


# ------------------------------------------------------------------------------------------------
# 2. The reward
# ------------------------------------------------------------------------------------------------

BOXES = {  # text: the contents of the complete box that opens last
    r"$$\boxed{63}$$": "63",
    r"\boxed{}": "",
    r"\boxed{{{a}}{b}}": "{{a}}{b}",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{a \} b}": r"a \} b",
    r"\boxed{1} \boxed{2}": "2",
    r"\boxed{1} \boxed{\frac{2}{3}": "1",
    r"\boxed{\boxed{5}}": "5",
    r"\boxed{x = \boxed{2}": "2",
    r"\boxed{1 + \boxed{2} + 3}": "2",
    r"{\boxed{5}": "5",
    r"} } \boxed{5}": "5",
    r"\boxed{1}}} \boxed{2}}": "2",
    "\\boxed{\ud800}": "\ud800",
}
NO_BOX = ["", "63", "boxed{63}", r"\boxed", r"\boxed{63", r"\boxed63}", r"\boxed\{63\}",
          r"\boxed{63\}"]
BLANK_BOX = [r"\boxed{}", "\\boxed{ \n\t }", r"\boxed{63} \boxed{}", r"\boxed{\boxed{}}"]
READ = {  # why: box and answer
    "the same number": ["63 is 63", "63.0 is 63", "007 is 7", "-0 is 0", "+5 is 5", ".5 is 0.5",
                        "5e3 is 5000", "5e-1 is 0.5", "63 is 63.00"],
    "another number": ["50 is not 63", "630 is not 63", "-63 is not 63", "5 is not -5"],
    "nearly": ["63.009 is 63", "62.991 is 63", "0.009 is 0"],
    "just too far": ["63.011 is not 63", "62.98 is not 63"],
    "0.01 is not below 0.01": ["63.01 is not 63", "5.01 is not 5", "4.99 is not 5",
                               "3,000,000.01 is not 3000000"],
    "blanks around it": [" 63  is 63", "63 is  63\n", " x+1  is x+1", "x+1 is  x+1\n"],
    "thousands": ["1,000 is 1000", "1000 is 1,000", "-1,000 is -1000", "1{,}000 is 1000",
                  "1{,}234{,}567 is 1,234,567", "1,234,567.5 is 1234567.5"],
    "a comma is no place to cut": ["8,000 is not 000", "8,000 is not 8", "1,2,3 is not 123",
                                   "12,34 is not 1234", "1234,567 is not 1234567"],
    "money": ["$18 is 18", r"\$18 is $18.00", "$63$ is 63", "-$5 is -5", "$-5 is -5"],
    "per cent": ["50% is 50", r"12.5\% is 12.5", "50 % is 50"],
    "a sentence ends": ["63. is 63", "1,000. is 1000", " $18.  is 18", "50%.  is 50"],
    "equal as strings": [r"\frac{1}{2} is \frac{1}{2}", "Monday is Monday", ", is ,",
                         "1_000 is 1_000", "nan is nan"],
    "no number": [", is not 0", ". is not 0", "- is not 0", "$ is not 0", "e5 is not 0",
                  "63 is not ", "63 is not ,", "6 3 is not 63", "63 eggs is not 63",
                  "6.3.0 is not 6.3", "--5 is not 5", "63\x00 is not 63"],
    "nothing is computed": [r"\frac{1}{2} is not 0.5", "60+3 is not 63"],
    "numbers for Python only": ["1_000 is not 1000", "0x3f is not 63", "nan is not NaN",
                                "inf is not 1e999"],
    "too large for a float": ["1e999 is not 2e999", "-1e999 is not -inf",
                              f"1{'0' * 308} is not -1{'0' * 308}"],
    "other digits": ["\u0666\u0663 is not 63", "\uff16\uff13 is not 63", "6\u00b3 is not 63",
                     "\u2465 is not 6", "63 is not \u0666\u0663"],
}


@pytest.mark.parametrize("text", BOXES)
def test_boxes(text):
    assert extract_boxed(text) == BOXES[text]


@pytest.mark.parametrize("text", NO_BOX + BLANK_BOX)
def test_no_box_no_reward(text):
    assert text in BLANK_BOX or extract_boxed(text) is None
    assert rule_reward(text, "63") == 0.0
    assert rule_reward(text, "") == 0.0  # that nothing equals nothing earns nothing


@pytest.mark.parametrize("why", READ)
def test_boxes_are_read_as_a_person_would(why):
    for case in READ[why]:
        box, answer = re.split(" is not | is ", case)
        reward = rule_reward(f"The answer is \\boxed{{{box}}}.", answer)
        assert reward == (0.5 if " is not " in case else 1.5), case
        assert type(reward) is float


def slow_extract_boxed(text):
    """Quadratic and obvious: try every opening, from the last to the first."""
    for start in reversed(range(len(text))):
        if not text.startswith("\\boxed{", start):
            continue
        begin = start + len("\\boxed{")
        depth = 1
        i = begin
        while i < len(text):
            if text[i : i + 2] in ("\\{", "\\}"):
                i += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[begin:i]
            i += 1
    return None


def test_reward_on_random_text():
    """Against the slow reader; and whatever is written, a reward comes out."""
    braces = ["\\boxed{", "}"] * 4 + ["{", "\\{", "\\}", "\\boxed"]
    numbers = ["6", "63", ",", "{,}", ".", "-", "$", "\\$", "%", "e", "_", "nan", "1e999"]
    others = [" ", "\n", "\x00", "\x1c", "\u3000", "\u0663", "\uff11", "\u00bd", "\ud800"]
    draw = random.Random(0)
    seen = {0.0: 0, 0.5: 0, 1.5: 0}
    for _ in range(3000):
        text = "".join(draw.choices(braces + numbers + others, k=draw.randrange(25)))
        inside = slow_extract_boxed(text)
        assert extract_boxed(text) == inside
        reward = rule_reward(text, draw.choice(["63", "", "nan", inside or "3", text]))
        blank = inside is None or inside.strip() == ""
        assert (reward == 0.0) == blank
        seen[reward] += 1
    assert min(seen.values()) > 100  # else the texts show nothing


@pytest.mark.parametrize("piece", ["\\boxed{", "\\boxed{}", "\\boxed", "{", "}", "\\", "\\{",
                                   "9", "9,", ",000", "{,}", "$", "-", ".", ". ", " ", "\n", "1e9"])
def test_hostile_text_takes_linear_time(piece):
    # A linear reader needs tenths of a second. For a quadratic one each size takes ten times as
    # long as the one before, so it fails soon, and the tests do not hang.
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


# ------------------------------------------------------------------------------------------------
# 3. Advantages
# ------------------------------------------------------------------------------------------------

GROUPS = {  # rewards, advantages
    "the apples": ([1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, -1.0]),
    "small is not equal": ([0.0, 1e-9], [-1.0, 1.0]),
    "just not equal": ([1.0, 1.0 + 2.6e-6], [-1.0, 1.0]),
    # Equal rewards, though their mean may differ in the last digit: exactly 0.
    "0.1 three times": ([0.1] * 3, [0.0] * 3),
    "0.3, one of them a sum": ([0.1 + 0.2, 0.3, 0.3], [0.0] * 3),
    "negative and equal": ([-0.7] * 7, [0.0] * 7),
    "zeros": ([0.0] * 3, [0.0] * 3),
    "large and equal": ([1e8 + 1, 1e8, 1e8], [0.0] * 3),
    "just equal": ([1.0, 1.0 + 4e-7], [0.0] * 2),
}
NO_GROUPS = {  # rewards, what the message must show
    "one answer": ([1.0], "1"),
    "groups of one": ([[1.0], [0.5]], "0.5"),
    "empty groups": ([[], []], "2"),
    "one number": (2.0, "2"),
    "NaN": ([0.5, math.nan], "nan"),
    "inf": ([[0.5, 1.0], [math.inf, 1.0]], "inf"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_advantages(name):
    rewards, right = GROUPS[name]
    rewards = t64(rewards)
    near(group_advantages(rewards), right, 1e-6)
    near(group_advantages(rewards.float()), right, 2e-2)
    centered = group_advantages(rewards, scale_rewards=False)
    if any(right):
        near(centered, rewards - rewards.mean())
    else:
        assert (centered == 0).all() and (group_advantages(rewards) == 0).all()
    # Beside other groups and in any shape it is the same, and the rewards are left alone.
    block = torch.stack([rewards, torch.arange(len(rewards)), 1000 * rewards]).view(3, 1, -1)
    before = block.clone()
    near(group_advantages(block)[0, 0], right, 1e-6)
    assert torch.equal(block, before)


@pytest.mark.parametrize("name", NO_GROUPS)
def test_advantages_refuse(name):
    rewards, said = NO_GROUPS[name]
    with pytest.raises(ValueError, match=said):
        group_advantages(t64(rewards))


REWARDS = t64([[1.5, 0.5, 0.0, 0.5], [0.3, 0.3, 0.3, 0.1 + 0.2], [2.0, -1.0, 0.25, 1.0]])
CENTERED = REWARDS - REWARDS.mean(dim=1, keepdim=True)
OTHERS = (REWARDS.sum(dim=1, keepdim=True) - REWARDS) / 3  # the mean of the other three
SCALES = {
    "group": CENTERED / REWARDS.std(dim=1, correction=0, keepdim=True),
    "none": CENTERED,
    "rloo": REWARDS - OTHERS,
    "batch": CENTERED / REWARDS.std(correction=0),
}


@pytest.mark.parametrize("scale", SCALES)
def test_scales_of_advantages(scale):
    advantages = group_scale(REWARDS, scale)
    near(advantages[[0, 2]], SCALES[scale][[0, 2]])
    assert (advantages[1] == 0).all()  # the group of equal rewards
    assert (group_scale(torch.full((3, 4), 0.5), scale) == 0).all()
    near(SCALES["rloo"], SCALES["none"] * 4 / 3)  # RLOO is Dr. GRPO times a constant


def test_overlong_penalty():
    """DAPO's equation 13 with a cap of 20 tokens and a buffer of 8."""
    lengths = torch.tensor([1, 12, 13, 16, 19, 20, 23])
    near(overlong_penalty(lengths, 20, 8), [0.0, 0.0, -1 / 8, -4 / 8, -7 / 8, -1.0, -1.0])


# ------------------------------------------------------------------------------------------------
# 4. Ratio and clip, the KL estimators, the masked mean: values and gradients
# ------------------------------------------------------------------------------------------------

CLIP = {  # ratio, advantage, epsilon, epsilon_high; value, gradient by the log-probability
    "article, clip out of reach": (1.3, 2.0, 0.5, None, 2.6, 2.6),
    "good, much likelier": (1.5, 1.0, 0.2, None, 1.2, 0.0),
    "good, rarer": (0.5, 1.0, 0.2, None, 0.5, 0.5),
    "bad, much likelier": (1.5, -1.0, 0.2, None, -1.5, -1.5),
    "bad, rarer": (0.5, -1.0, 0.2, None, -0.8, 0.0),
    "average answer": (1.5, 0.0, 0.2, None, 0.0, 0.0),
    "within the higher bound": (1.25, 1.0, 0.2, 0.28, 1.25, 1.25),
    "above the higher bound": (1.35, 1.0, 0.2, 0.28, 1.28, 0.0),
    "below the lower bound": (0.7, -1.0, 0.2, 0.28, -0.8, 0.0),
    "epsilon 1.5 is no lower bound": (0.01, -2.0, 1.5, 0.2, -0.02, -0.02),
    "e^20, not clipped": (math.exp(20), -2.0, 0.2, 0.28, -2 * math.exp(20), -2 * math.exp(20)),
    "e^100, clipped": (math.exp(100), 2.0, 0.2, 0.28, 2.56, 0.0),
    "e^-100, clipped": (math.exp(-100), -2.0, 0.2, 0.28, -1.6, 0.0),
}
KL = {  # estimator, log(pi_theta / pi_ref); value, gradient by log pi_theta
    "k3, half as likely": ("low_var_kl", -math.log(2), 1 - math.log(2), -1.0),
    "k3, twice as likely": ("low_var_kl", math.log(2), math.log(2) - 0.5, 0.5),
    "k3, nearly equal": ("low_var_kl", 1e-6, 5e-13, 1e-6),
    "k3 is not cut off at 30": ("low_var_kl", -30.0, math.exp(30) - 31, 1 - math.exp(30)),
    "k3 is not cut off at 1000": ("low_var_kl", 1000.0, 999.0, 1.0),
    "k1": ("kl", -3.0, -3.0, 1.0),
    "|k1|": ("abs", -3.0, 3.0, -1.0),
    "k2": ("mse", -3.0, 4.5, -3.0),
}


@pytest.mark.parametrize("name", CLIP)
def test_clip(name):
    ratio, advantage, epsilon, epsilon_high, value, slope = CLIP[name]
    old = torch.full((3, 3), -2.0, dtype=torch.float64)
    new = old + math.log(ratio)
    advantages = t64([advantage, 5.0, 7.0])  # one for each row: along the columns it would show

    def surrogate(logprobs):
        return clipped_surrogate(logprobs, old, advantages, epsilon, epsilon_high)[0]

    near(surrogate(new), [value] * 3)
    near(gradient(lambda x: surrogate(x).sum(), new)[0], [slope] * 3)


@pytest.mark.parametrize("name", KL)
def test_kl_of_one_token(name):
    estimator, log_ratio, value, slope = KL[name]
    ref = t64([[-1.0]])
    policy = ref + log_ratio
    near(kl_estimate(policy, ref, estimator), [[value]], 1e-9)
    near(gradient(lambda x: kl_estimate(x, ref, estimator).sum(), policy), [[slope]], 1e-9)


ZEROS = torch.zeros(2, 1)
BOUNDLESS = {
    "clipped_surrogate": lambda x: clipped_surrogate(x, ZEROS, torch.tensor([1.5, -1.5])),
    "huge advantages": lambda x: clipped_surrogate(x, ZEROS, torch.tensor([1e16, -1e16])),
    "k3_kl": lambda x: k3_kl(x, ZEROS),
    "k1": lambda x: kl_estimate(x, ZEROS, "kl"),
    "|k1|": lambda x: kl_estimate(x, ZEROS, "abs"),
    "k2": lambda x: kl_estimate(x, ZEROS, "mse"),
}


@pytest.mark.parametrize("name", BOUNDLESS)
def test_no_log_ratio_is_too_large(name):
    """exp overflows; and where the min drops that branch its gradient would be inf * 0, a NaN."""
    for gap in (50.0, 89.0, 1000.0, 1e30, 3e38):
        for x in (ZEROS + gap, ZEROS - gap):
            assert BOUNDLESS[name](x).isfinite().all()
            assert gradient(lambda x: BOUNDLESS[name](x).sum(), x).isfinite().all()


@pytest.mark.parametrize("dirt", [1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_masked_mean(dirt, dtype):
    values = t64([[1.0, 3.0, dirt], [dirt, dirt, dirt], [8.0, dirt, dirt]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).to(dtype)
    near(masked_mean(values, mask), 4.0)
    near(masked_mean(values, mask, dim=0), [4.5, 3.0, 0.0])
    near(masked_mean(values, mask, dim=1), [2.0, 0.0, 8.0])
    near(gradient(lambda x: masked_mean(x, mask), values), mask.double() / 3)
    near(masked_mean(values[:1], mask[0], dim=1), [2.0])  # a mask that expands
    # Only what is masked may disappear: to hide more would hide a broken model.
    assert masked_mean(t64([math.nan, 1.0]), torch.ones(2)).isnan()


# ------------------------------------------------------------------------------------------------
# 5. The loss and its relatives, against one slow loss
# ------------------------------------------------------------------------------------------------

SLOW_KL = {  # of x = log(pi_theta / pi_ref)
    "low_var_kl": lambda x: (-x).exp() + x - 1,
    "kl": lambda x: x,
    "abs": lambda x: x.abs(),
    "mse": lambda x: x * x / 2,
}


def slow_loss(loss_name, logprobs, old, ref, advantages, mask, *, epsilon=0.2, epsilon_high=None,
              beta=0.04, loss_type="grpo", max_completion_length=7, estimator="low_var_kl"):
    """One answer and one token at a time. Returns the loss and its metrics."""
    if epsilon_high is None:
        epsilon_high = epsilon
    answers = []  # for each answer the losses of its tokens
    ratios = []
    clips = []
    kls = []
    for i, A in enumerate(advantages):
        places = [t for t in range(mask.shape[1]) if mask[i, t]]
        whole = sum(logprobs[i, t] - old[i, t] for t in places)
        losses = []
        for t in places:
            log_ratio = logprobs[i, t] - old[i, t]
            if loss_name == "gspo_loss":
                log_ratio = whole / len(places)
            if loss_name == "answer_ratio_loss":
                log_ratio = whole
            ratio = log_ratio.exp()
            gain = ratio * A
            clipped = (A > 0 and ratio > 1 + epsilon_high) or (A < 0 and ratio < 1 - epsilon)
            if clipped:
                gain = A * (1 + epsilon_high if A > 0 else 1 - epsilon)
            kl = SLOW_KL[estimator](logprobs[i, t] - ref[i, t])
            weight = ratio if loss_name == "corrected_kl_loss" else 1.0
            losses.append(beta * weight * kl - gain)
            ratios.append(ratio.item())
            clips.append(float(clipped))
            kls.append(kl.item())
        answers.append(losses)
    sums = [sum(losses) for losses in answers]
    if loss_type == "grpo":  # an answer without any token counts as one
        loss = sum(total / max(len(losses), 1) for total, losses in zip(sums, answers)) / len(sums)
    elif loss_type == "dapo":
        loss = sum(sums) / len(kls)
    else:
        loss = sum(sums) / (len(sums) * max_completion_length)
    return loss, {"loss": loss.item(), "ratio_max": max(ratios), "kl": sum(kls) / len(kls),
                  "clip_fraction": sum(clips) / len(clips)}


def batch(seed=0):
    """Six answers of up to five tokens: log-probs of three policies, advantages, mask."""
    draw = random.Random(seed)  # unlike torch's generator it is the same in every version

    def table(spread):
        return t64([[draw.gauss(0, spread) for _ in range(5)] for _ in range(6)])

    logprobs = -table(2.0).abs()
    old = logprobs + table(0.3)
    ref = logprobs + table(1.0)
    advantages = table(1.0)[:, 0]
    advantages[4] = 0.0  # an average answer: no gradient, so nothing to clip
    # One answer is empty, as happens; the article's code divides 0 by 0 there.
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [4], [2]])
    return logprobs, old, ref, advantages, mask


LOSSES = {  # function, estimator of the KL, settings
    "the papers": ("grpo_loss", "low_var_kl", {}),
    "no KL": ("grpo_loss", "low_var_kl", {"beta": 0.0}),
    "clip-higher": ("grpo_loss", "low_var_kl", {"epsilon_high": 0.28}),
    "much KL": ("grpo_loss", "kl", {"epsilon": 0.1, "epsilon_high": 0.05, "beta": 0.5}),
    "GSPO": ("gspo_loss", "low_var_kl", {"beta": 0.3, "epsilon": 0.1}),
    "GSPO, no KL": ("gspo_loss", "low_var_kl", {"beta": 0.0, "epsilon": 0.01}),
    "answer ratio": ("answer_ratio_loss", "low_var_kl", {}),
    "answer ratio, |k1|": ("answer_ratio_loss", "abs", {"epsilon_high": 0.5}),
    "corrected KL": ("corrected_kl_loss", "low_var_kl", {"beta": 0.3}),
    "corrected k2": ("corrected_kl_loss", "mse", {"epsilon": 0.1, "epsilon_high": 0.3}),
}
LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]
every_loss = pytest.mark.parametrize("name, loss_type", list(itertools.product(LOSSES, LOSS_TYPES)))
every_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
every_function = pytest.mark.parametrize(
    "loss_name", ["grpo_loss", "gspo_loss", "answer_ratio_loss", "corrected_kl_loss"])


def run_loss(name, loss_type, tensors):
    """Loss, gradient and metrics of a row of LOSSES."""
    loss_name, estimator, settings = LOSSES[name]
    logprobs, *others = tensors
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = getattr(grpo, loss_name)(
        leaf, *others, loss_type=loss_type, max_completion_length=7,
        kl_fn=lambda policy, ref: kl_estimate(policy, ref, estimator), **settings)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@every_loss
def test_the_loss_is_the_slow_one(name, loss_type):
    loss_name, estimator, settings = LOSSES[name]
    slow = functools.partial(slow_loss, loss_name, loss_type=loss_type, estimator=estimator,
                             **settings)
    for seed in range(3):
        logprobs, *others = batch(seed)
        right, right_metrics = slow(logprobs, *others)
        loss, slope, metrics = run_loss(name, loss_type, batch(seed))
        near(loss, right)
        near(slope, gradient(lambda x: slow(x, *others)[0], logprobs))
        assert metrics == pytest.approx(right_metrics, rel=1e-6)
        assert {type(value) for value in metrics.values()} == {float}
        # float32, as in a training, and a mask of numbers.
        near(run_loss(name, loss_type, [x.float() for x in batch(seed)])[0], right, 1e-5)


@every_loss
def test_nothing_behind_the_mask_gets_out(name, loss_type):
    """To mask the result would keep the loss clean, and leave NaN in the gradient."""
    *clean, advantages, mask = batch()
    right, right_slope, right_metrics = run_loss(name, loss_type, batch())
    for dirt in (math.nan, math.inf, -math.inf):
        dirty = [torch.where(mask, x, dirt) for x in clean]
        dirty.append(torch.where(mask.any(dim=1), advantages, dirt))
        before = torch.cat([x.flatten() for x in dirty])
        loss, slope, metrics = run_loss(name, loss_type, (*dirty, mask))
        assert torch.equal(loss, right) and torch.equal(slope, right_slope)
        assert metrics == right_metrics
        after = torch.cat([x.flatten() for x in dirty])
        assert torch.equal(before.nan_to_num(), after.nan_to_num())  # arguments are left alone


@every_loss
def test_parts_of_a_batch_add_up_to_the_whole(name, loss_type):
    """Each part weighted by its share: of the tokens for "dapo", of the answers otherwise."""
    whole, whole_slope, _ = run_loss(name, loss_type, batch())
    mask = batch()[4]
    parts = [[5, 0], [2], [1, 4, 3]]
    if LOSSES[name][2].get("beta") == 0.0:
        parts = [[5, 0], [2], [1, 3]]  # without KL the average answer, 4, may be left out
    total = 0.0
    for rows in parts:
        loss, slope, _ = run_loss(name, loss_type, [x[rows] for x in batch()])
        share = t64(len(rows) / 6)
        if loss_type == "dapo":
            share = mask[rows].double().sum() / mask.sum()
        total += share * loss
        near(share * slope, whole_slope[rows])
    near(total, whole)


@every_loss
def test_a_wild_token_harms_no_other_answer(name, loss_type):
    tensors = [x.float() for x in batch()]
    calm_slope = run_loss(name, loss_type, tensors)[1]
    for place, gap in itertools.product((1, 2), (1000.0, -1000.0)):  # of pi_old, of pi_ref
        wild = [x.clone() for x in tensors]
        wild[place][0, 1] = wild[0][0, 1] + gap
        loss, slope, metrics = run_loss(name, loss_type, wild)
        assert t64([loss, *metrics.values()]).isfinite().all() and slope.isfinite().all()
        assert torch.equal(slope[1:], calm_slope[1:])


@every_function
def test_the_defaults_are_the_documents(loss_name):
    loss_fn = getattr(grpo, loss_name)
    for seed in range(5):
        right, _ = slow_loss(loss_name, *batch(seed), epsilon=0.2, beta=0.04, loss_type="grpo")
        near(loss_fn(*batch(seed))[0], right)
    # Without KL no reference is needed.
    logprobs, old, ref, advantages, mask = batch()
    loss, metrics = loss_fn(logprobs, old, None, advantages, mask, beta=0.0)
    assert loss == loss_fn(*batch(), beta=0.0)[0]
    assert metrics["kl"] == 0.0


@every_function
@every_type
def test_nothing_to_average_over(loss_name, loss_type):
    nan = torch.full((2, 3), math.nan)
    loss, metrics = getattr(grpo, loss_name)(
        nan, nan, nan, torch.ones(2), torch.zeros(2, 3), loss_type=loss_type,
        max_completion_length=3)
    assert loss == 0.0 and set(metrics.values()) == {0.0}


SHAPES = {  # instead of (2, 5), or (2,) for the advantages; some would broadcast, silently
    "logprobs": [(5,), (2, 5, 1)],
    "old_logprobs": [(2, 4), (1, 5)],
    "ref_logprobs": [(3, 5), (2, 1)],
    "advantages": [(5,), (2, 1), (2, 5)],
    "mask": [(4, 5), (5,)],
}


@pytest.mark.parametrize("argument", SHAPES)
@every_function
def test_wrong_shapes_are_refused(argument, loss_name):
    for shape in SHAPES[argument]:
        tensors = {name: torch.zeros(2, 5) for name in SHAPES}
        tensors["advantages"] = torch.zeros(2)
        tensors[argument] = torch.zeros(shape)
        said = re.escape(f"{argument} are {shape}")
        with pytest.raises(ValueError, match=rf"\b{said}"):
            getattr(grpo, loss_name)(**tensors)


TENSORS = batch()
WITHOUT_REF = (TENSORS[0], TENSORS[1], None, TENSORS[3], TENSORS[4])
REFUSED = {  # what the message must show: a call
    "bnpo": lambda: grpo_loss(*TENSORS, loss_type="bnpo"),
    "0.07": lambda: grpo_loss(*WITHOUT_REF, beta=0.07),
    "max_completion_length": lambda: grpo_loss(*TENSORS, loss_type="dr_grpo"),
    "k4": lambda: kl_estimate(TENSORS[0], TENSORS[1], "k4"),
    "column": lambda: group_scale(REWARDS, "column"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_wrong_settings_are_refused(said):
    with pytest.raises(ValueError, match=said):
        REFUSED[said]()


# ------------------------------------------------------------------------------------------------
# 6. Worked losses: the apples of grpo.py's comments, and the first step of a training
# ------------------------------------------------------------------------------------------------

APPLES = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
APPLES_NEW = t64([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]]).log()
APPLES_OLD = t64([[0.2, 0.2], [0.2, 1.0], [0.2, 1.0], [0.2, 0.2]]).log()
APPLES_MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]])
PRINTED = """
rewards       tensor([1.5000, 1.5000, 0.5000, 0.5000])
advantages    tensor([ 1.,  1., -1., -1.])
surrogate     tensor([ 1.2000,  1.0000,  0.5000, -1.5000, -0.8000, -1.0000])
k3            tensor([0.0721, 0.0000, 0.3069, 0.0721, 0.3069, 0.0000])
loss          tensor(0.2057)
its gradient  tensor([ 0.0017, -0.1250, -0.1350,  0.3783, -0.0050,  0.1250])
"""


def apples_loss(logprobs, loss_type="grpo"):
    advantages = group_advantages(t64([rule_reward(text, "5") for text in APPLES]))
    return grpo_loss(logprobs, APPLES_OLD, APPLES_OLD, advantages, APPLES_MASK,
                     loss_type=loss_type, max_completion_length=4)[0]


def test_the_apples_in_the_comments():
    """The figures, not the words around them: change one, and this asks for the other."""
    rewards = [rule_reward(text, "5") for text in APPLES]
    advantages = group_advantages(t64(rewards))
    surrogate = clipped_surrogate(APPLES_NEW, APPLES_OLD, advantages)
    gains = [f"{gain:.1f}" for gain in masked_mean(surrogate, APPLES_MASK, dim=1)]
    kl = k3_kl(APPLES_NEW, APPLES_OLD)
    slope = gradient(apples_loss, APPLES_NEW)
    comments = re.sub(r"\s+", " ", inspect.getsource(grpo))
    assert f"R = {rewards}" in comments
    assert "A = [" + ", ".join(f"{A:+.0f}" for A in advantages) + "]" in comments
    assert ", ".join(gains) + " sum -0.8" in comments
    assert f"= {kl[1, 0]:.4f}" in comments and f"= {kl[0, 0]:.4f}" in comments
    assert f"sum {masked_mean(kl, APPLES_MASK, dim=1).sum():.4f}" in comments
    assert f"sum {kl[APPLES_MASK.bool()].sum():.4f}" in comments
    assert f"= {slope[1, 0]:.3f}" in comments and f"= {slope[0, 0]:.4f}" in comments
    for loss_type in LOSS_TYPES:
        assert f"= {apples_loss(APPLES_NEW, loss_type):.4f}" in comments


def test_the_apples_that_grpo_py_prints(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    torch.set_printoptions(profile="default")
    assert capsys.readouterr().out == PRINTED.lstrip()


FIRST_REWARDS = t64([[1.5, 0.5, 0.0, 1.5], [0.0, 0.0, 1.5, 0.5]])
LENGTHS = t64([6, 2, 3, 1, 4, 4, 5, 6])
DIVISORS = {"grpo": 8 * LENGTHS, "dapo": LENGTHS.sum(), "dr_grpo": 8 * 6}


@every_type
def test_the_first_step(loss_type):
    """Everybody asks: the loss is 0 because advantages sum to 0, and the gradient is not."""
    advantages = group_advantages(FIRST_REWARDS).flatten()
    mask = torch.arange(6) < LENGTHS.unsqueeze(1)
    logprobs = -mask.double()

    def loss(policy):
        return grpo_loss(policy, logprobs, logprobs, advantages, mask, loss_type=loss_type,
                         max_completion_length=6)[0]

    # REINFORCE: the advantage times the gradient of the log-probability.
    weights = advantages / DIVISORS[loss_type]
    near(gradient(loss, logprobs), -weights.unsqueeze(1) * mask)
    near(loss(logprobs), -(weights * LENGTHS).sum())
    assert (loss(logprobs).abs() < 1e-9) == (loss_type == "grpo")


# ------------------------------------------------------------------------------------------------
# 7. In expectation: sums over a vocabulary of five
#
# No sampling, so these are exact. The policies are far apart, because close together the two
# directions of the KL are the same to leading order, and a mistake would not show.
# ------------------------------------------------------------------------------------------------

POLICY = t64([0.55, 0.25, 0.12, 0.06, 0.02])
REFERENCE = t64([0.03, 0.07, 0.15, 0.30, 0.45])


def exact_kl(p, q):
    return (p * (p / q).log()).sum()


def test_k3_is_unbiased_and_never_negative():
    right = exact_kl(POLICY, REFERENCE)
    k1 = kl_estimate(POLICY.log(), REFERENCE.log(), "kl")
    k3 = k3_kl(POLICY.log(), REFERENCE.log())
    upside_down = k3_kl(REFERENCE.log(), POLICY.log())
    near((POLICY * k1).sum(), right)
    near((POLICY * k3).sum(), right)
    assert ((POLICY * upside_down).sum() - right).abs() > 1
    assert (k3 > 0).all() and (k1 < -1).any()


DIRECTIONS = {
    "nothing": lambda x: 0 * x.sum(),
    "KL(policy || ref)": lambda x: exact_kl(x.softmax(0), REFERENCE),
    "KL(ref || policy)": lambda x: exact_kl(REFERENCE, x.softmax(0)),
}
PULLS = {  # loss, estimator, what its gradient pulls along
    "k1 as a loss holds nothing back": ("grpo_loss", "kl", "nothing"),
    "k1 times the ratio": ("corrected_kl_loss", "kl", "KL(policy || ref)"),
    "k2": ("grpo_loss", "mse", "KL(policy || ref)"),
    "k3": ("grpo_loss", "low_var_kl", "KL(ref || policy)"),
    "k3 times the ratio": ("corrected_kl_loss", "low_var_kl", "KL(policy || ref)"),
}


@pytest.mark.parametrize("name", PULLS)
def test_what_a_kl_penalty_pulls_along(name):
    """On-policy, advantages 0, and one answer of one token for each word of the vocabulary."""
    loss_name, estimator, direction = PULLS[name]
    logits = POLICY.log()
    ref = REFERENCE.log().unsqueeze(1)

    def loss(logprobs):
        return getattr(grpo, loss_name)(
            logprobs, logprobs.detach(), ref, torch.zeros(5), torch.ones(5, 1), beta=1.0,
            kl_fn=lambda policy, ref: kl_estimate(policy, ref, estimator))[0]

    of_each_token = 5 * gradient(loss, logits.unsqueeze(1)).squeeze(1)
    expected = gradient(lambda x: (POLICY * of_each_token * x.log_softmax(0)).sum(), logits)
    near(expected, gradient(DIRECTIONS[direction], logits))


def test_the_surrogate_is_the_policy_gradient():
    """What the ratio is for: its gradient is that of the expected reward."""
    rewards = t64([1.5, 0.0, 0.5, 1.5, 0.0])

    def surrogate(logits):
        logprobs = logits.log_softmax(0).unsqueeze(1)
        return (POLICY * clipped_surrogate(logprobs, logprobs.detach(), rewards)[:, 0]).sum()

    right = gradient(lambda x: (x.softmax(0) * rewards).sum(), POLICY.log())
    near(gradient(surrogate, POLICY.log()), right)


# ------------------------------------------------------------------------------------------------
# 8. Parity with TRL 1.16: its figures, and where it is installed its own code
# ------------------------------------------------------------------------------------------------

TRL_1_16 = {  # row of LOSSES, loss_type: the loss, and sum and length of its gradient
    ("no KL", "grpo"): [-0.1459918046034, -0.1400771803423, 0.1013770898339],
    ("no KL", "dapo"): [-0.3825037806375, -0.3176952978114, 0.1644257358587],
    ("no KL", "dr_grpo"): [-0.1366084930848, -0.1134626063612, 0.05872347709239],
    ("the papers", "grpo"): [-0.1301117861212, -0.1458677566844, 0.1037278751082],
    ("the papers", "dapo"): [-0.3594953488633, -0.3305739411549, 0.1673797575259],
    ("the papers", "dr_grpo"): [-0.1283911960226, -0.118062121841, 0.05977848483069],
    ("GSPO", "grpo"): [-0.03918783117086, -0.301053356673, 0.1352687100367],
    ("GSPO", "dapo"): [-0.232791882077, -0.5814137969154, 0.2413364961132],
    ("GSPO", "dr_grpo"): [-0.08313995788464, -0.2076477846126, 0.08619160575472],
    ("corrected KL", "grpo"): [-0.0359082817044, -0.06897524932874, 0.1234310555467],
    ("corrected KL", "dapo"): [-0.2199715977601, -0.2524655203721, 0.1764500272339],
    ("corrected KL", "dr_grpo"): [-0.07856128491431, -0.09016625727575, 0.06301786686926],
}


def trl_loss(name, loss_type, seed):
    """TRL's GRPOTrainer._compute_loss, on a trainer that has just what that method looks at."""
    from trl import GRPOTrainer

    loss_name, _, settings = LOSSES[name]
    epsilon = settings.get("epsilon", 0.2)
    level = "sequence" if loss_name == "gspo_loss" else "token"
    args = types.SimpleNamespace(use_bias_correction_kl=loss_name == "corrected_kl_loss",
                                 delta=None, steps_per_generation=1)
    one_process = types.SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x,
                                        reduce=lambda x, reduction: x)
    trainer = types.SimpleNamespace(
        beta=settings.get("beta", 0.04), loss_type=loss_type, epsilon_low=epsilon,
        epsilon_high=settings.get("epsilon_high", epsilon), max_completion_length=7, args=args,
        importance_sampling_level=level, accelerator=one_process, entropy_coef=0.0,
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        off_policy_mask_threshold=None, use_adaptive_entropy=False, top_entropy_quantile=1.0,
        _entropy_bonus_enabled=False, aux_loss_enabled=False, use_vllm=False,
        _metrics=defaultdict(lambda: defaultdict(list)))
    logprobs, old, ref, advantages, mask = batch(seed)
    ids = torch.zeros(6, 5, dtype=torch.long)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask.long(),
                  advantages=advantages, old_per_token_logps=old, ref_per_token_logps=ref,
                  num_items_in_batch=mask.sum())

    def loss(logprobs):
        scores = (logprobs, torch.zeros_like(logprobs), None)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: scores
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return loss(logprobs), gradient(loss, logprobs)


@pytest.mark.parametrize("name, loss_type", TRL_1_16)
def test_loss_and_gradient_are_trls_figures(name, loss_type):
    loss, slope, _ = run_loss(name, loss_type, batch())
    near([loss, slope.sum(), slope.norm()], TRL_1_16[name, loss_type])


@pytest.mark.parametrize("name, loss_type", TRL_1_16)
def test_loss_and_gradient_are_trls_live(name, loss_type):
    trl = pytest.importorskip("trl", reason="TRL is not installed: see its figures above")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the parity is with TRL 1.16, and this is {trl.__version__}")
    for seed in range(3):
        loss, slope, _ = run_loss(name, loss_type, batch(seed))
        their_loss, their_slope = trl_loss(name, loss_type, seed)
        near(loss, their_loss)
        near(slope, their_slope)


# ------------------------------------------------------------------------------------------------
# 9. Each function of the mathematics works in another project, pasted under `import torch`
# ------------------------------------------------------------------------------------------------

PASTED = {  # what is pasted, under which import, arguments for a call
    "extract_boxed": ("alone", "import re", [EGGS]),
    "read_number": ("alone", "import re", [r"\$1{,}000"]),
    "rule_reward": ("with what it calls", "import re", [EGGS, "63.0"]),
    "group_advantages": ("alone", "import torch", [STATISTICS]),
    "clipped_surrogate": ("alone", "import torch", [APPLES_NEW, APPLES_OLD, APPLE_SCORES]),
    "k3_kl": ("alone", "import torch", [APPLES_NEW, APPLES_OLD]),
    "masked_mean": ("alone", "import torch", [APPLES_NEW, APPLES_MASK]),
    "average": ("with what it calls", "import torch", [APPLES_NEW, APPLES_MASK]),
    "grpo_loss": ("with what it calls", "import torch", TENSORS),
    "group_scale": ("with what it calls", "import torch", [REWARDS, "batch"]),
    "overlong_penalty": ("alone", "import torch", [STATISTICS, 3, 2]),
    "kl_estimate": ("with what it calls", "import torch", [P_02, P_04, "low_var_kl"]),
    "gspo_loss": ("with what it calls", "import torch", TENSORS),
    "answer_ratio_loss": ("with what it calls", "import torch", TENSORS),
    "corrected_kl_loss": ("with what it calls", "import torch", TENSORS),
}


def paste(name, project, alone=False):
    """Adds to the project, a dict, the source of a function, after those of what it calls."""
    source = inspect.getsource(getattr(grpo, name))
    called = re.findall(r"(\w+)\(", source) + re.findall(r"_fn=(\w+)", source)
    for other in called:
        if not alone and other not in project and inspect.isfunction(vars(grpo).get(other)):
            project[other] = "on its way"
            paste(other, project)
    exec(source, project)


@pytest.mark.parametrize("name", PASTED)
def test_pasted_into_another_project(name):
    extent, imports, arguments = PASTED[name]
    project = {}
    exec(imports, project)
    paste(name, project, alone=extent == "alone")
    assert str(project[name](*arguments)) == str(getattr(grpo, name)(*arguments))


# ------------------------------------------------------------------------------------------------
# One tiny world: a tokenizer, a model of any family, a handful of questions, a way to train
# ------------------------------------------------------------------------------------------------

NAN = math.nan
INF = math.inf
PAD, END, EOS = 0, 1, 2  # as in Qwen there are two end tokens, and the config knows only one
VOCABULARY = 48  # more than the tokenizer's words, as in Qwen
TIMES = {"sample_seconds", "score_seconds", "update_seconds", "tokens_per_second"}


def tiny_tokenizer(pad="<pad>"):
    """Letters and digits, with blanks between them."""
    special = ["<pad>", "<end>", "<eos>", "<unk>", "user", "assistant"]
    words = special + list("abcdefghijklmnopqrstuvwxyz0123456789")
    ids = {word: i for i, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=pad, eos_token="<eos>", unk_token="<unk>",
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
GPT2 = {  # learned positions, and names of its own
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "initializer_range": 0.4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None,
}


def tiny_model(family="qwen2", seed=0, **settings):
    """Random, and of strong opinions: with the usual small weights every distribution is flat."""
    plain = {"gpt2": GPT2, "gemma3": {}}.get(family, PLAIN)
    config = AutoConfig.for_model(family, **(plain | settings))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


QUESTIONS = [
    {"prompt": "a", "answer": "a"},
    {"prompt": "b c", "answer": "b"},
    {"prompt": "c d e", "answer": "c"},
    {"prompt": "d", "answer": "a"},
    {"prompt": "e f", "answer": "b"},
    {"prompt": "f g a", "answer": "c"},
    {"prompt": "g", "answer": "a"},
]


def noisy_reward(prompts, completions, **columns):
    """Draws from each generator that a reward may draw from, so a resumed run must restore all."""
    rewards = []
    for text in completions:
        noise = random.gauss(0, 1) + np.random.randn() + torch.rand(()).item()
        rewards.append(text.count("a") + noise)
    return rewards


def tiny_config(**settings):
    plain = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
                 learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1)
    return GRPOConfig(**(plain | settings))


def go(folder=None, reward=noisy_reward, model=None, data=QUESTIONS, resume=False, stop=None,
       loss_fn=grpo_loss, between=None, **settings):
    """Train a tiny model, and with `stop` only that many steps. Returns the metrics, untimed.

    `between` is what the caller does after each step; it gets the step's metrics.
    """
    model = model or tiny_model()
    steps = training_steps(model, TOKENIZER, data, reward, tiny_config(**settings), folder,
                           resume, loss_fn)
    history = []
    with contextlib.closing(steps):
        for metrics, _ in itertools.islice(steps, stop):
            history.append(untimed(metrics))
            if between is not None:
                between(metrics)
    return history


def untimed(metrics):
    return {name: value for name, value in metrics.items() if name not in TIMES}


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# ================================================================================================
# The model
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# 1. The sampler: token by token, and against the exact distribution
# ------------------------------------------------------------------------------------------------

PROMPTS = ["a b c d e f g", "h", "i j k"]


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
    assert rollout.completion_mask.dtype == rollout.truncated.dtype == torch.bool
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
        words = tokenizer.convert_ids_to_tokens(answer[:n])
        words = [word for word in words if word and word not in tokenizer.all_special_tokens]
        assert rollout.texts[row].split() == words
        lengths.append(n)
    return lengths


SAMPLED = {  # family, padding, temperature
    "a padding of its own": ("qwen2", "<pad>", 1.0),
    "padding is an end token": ("qwen2", "<eos>", 0.7),
    "padding is the other end token": ("qwen2", "<end>", 1.0),
    "padding is a word": ("qwen2", "a", 0.7),
    "no padding at all": ("qwen2", None, 1.0),
    "learned positions": ("gpt2", "<eos>", 1.3),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampler_scorer_and_the_slow_way_agree(name):
    """Wrong masks, positions and temperatures show here, and settings that nobody asked for."""
    family, padding, temperature = SAMPLED[name]
    model = tiny_model(family, initializer_range=0.3)
    tokenizer = tiny_tokenizer(padding)
    torch.manual_seed(0)
    rollout = sample_groups(model, tokenizer, PROMPTS, 30, max_completion_length=9,
                            temperature=temperature)
    lengths = check_rollout(rollout, PROMPTS, 30, 9, tokenizer)
    ids = rollout.input_ids
    answers = ids[:, -9:][rollout.completion_mask]
    assert min(lengths) < 4 and rollout.truncated.any()  # else little has been shown
    assert {END, EOS} <= set(answers.tolist())
    assert answers.max() > len(tokenizer)  # ids are kept even where no word stands for them
    slow = slow_logprobs(model, ids, rollout.attention_mask, 9, temperature)[0]
    near(rollout.logprobs, slow, 2e-5)
    near(token_logprobs(model, ids, rollout.attention_mask, 9, temperature), slow, 2e-5)


END_TOKENS = {  # generation_config, config, tokenizer; found
    "all three differ": ([7, END], 9, "<eos>", [END, EOS, 7, 9]),
    "only the tokenizer": (None, None, "<eos>", [EOS]),
    "only the config": (None, [9, 7], None, [7, 9]),
    "only the generation config": (7, None, None, [7]),
    "0 is an id like any other": (None, 0, None, [0]),
    "none at all": (None, None, None, None),
}


@pytest.mark.parametrize("name", END_TOKENS)
def test_end_tokens_are_collected_from_three_places(name):
    generation, config, token, found = END_TOKENS[name]
    model = tiny_model()
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = token
    if found:
        assert end_token_ids(model, tokenizer) == found
    else:
        with pytest.raises(ValueError, match="eos_token_id"):
            sample_groups(model, tokenizer, PROMPTS, 2, max_completion_length=4)


HALF = [0.0, 0.5, 0.0, 0.3, 0.2, 0.0]
DRAWN = {  # probabilities, uniform number; token
    "the very beginning": (HALF, 0.0, 1),
    "first stretch": (HALF, 0.49, 1),
    "second stretch": (HALF, 0.51, 3),
    "last stretch": (HALF, 0.81, 4),
    "the last number below 1": (HALF, 1 - 2**-53, 4),
    "rounded up to 1": (HALF, 1.0, 4),
    "a border belongs to the later one": ([0.5, 0.0, 0.5], 0.5, 2),
    "certainty": ([0.0, 1.0, 0.0], 0.999, 1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # Apple's GPUs have no float64
@pytest.mark.parametrize("name", DRAWN)
def test_a_uniform_number_chooses_a_token(name, dtype):
    probabilities, uniform, token = DRAWN[name]
    logits = torch.tensor([probabilities, [0.1, 0.9] + probabilities[:-2]]).log()
    tokens, logprobs = choose_tokens(logits, 1.0, torch.tensor([uniform, 0.01], dtype=dtype))
    assert tokens.tolist() == [token, 0]
    near(logprobs[0].exp(), probabilities[token], 1e-6)


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
    """In a sum in float32, let alone bfloat16, they would vanish beside the likely one."""
    logits = torch.zeros(150_000, dtype=torch.bfloat16)
    logits[0] = 23.0
    others = 1 - logits.double().softmax(dim=0)[0].item()  # a hundred-thousandth
    uniforms = torch.linspace(1 - 0.99 * others, 1 - 1e-9, 60, dtype=torch.float64)
    tokens, _ = choose_tokens(logits.expand(60, -1), 1.0, uniforms)
    assert len(tokens.unique()) > 58 and tokens.max() > 149_900


def surprise(probabilities, tokens):
    """How far the counts are from what was to be expected: chi-square, in standard deviations."""
    wanted = probabilities * len(tokens)
    often = wanted > 5
    counts = torch.bincount(tokens, minlength=len(wanted))
    chi_square = ((counts - wanted).square() / wanted)[often].sum().item()
    freedom = int(often.sum()) - 1
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_distribution_of_the_model(temperature):
    """First tokens, and second ones after the most frequent first one. The seed is fixed."""
    model = tiny_model(initializer_range=0.25)
    rollout = sampled(model, prompts=["a b c"], G=6000, max_completion_length=2,
                      temperature=temperature)
    answers = rollout.input_ids[:, 3:]
    common = answers[rollout.completion_mask[:, 1], 0].mode().values
    after = answers[answers[:, 0] == common, 1]
    text = torch.cat([rollout.input_ids[0, :3], common.view(1)])
    logits = model(text.unsqueeze(0)).logits[0, -2:].detach().double() / temperature
    for exact, tokens in zip(logits, (answers[:, 0], after)):
        assert surprise(exact.softmax(dim=0), tokens) < 4
        assert surprise((exact / 1.3).softmax(dim=0), tokens) > 6  # the measure would notice


def same_rollout(one, other, tolerance=2e-5):
    for name in ("input_ids", "attention_mask", "completion_mask", "truncated"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.texts == other.texts
    near(one.logprobs, other.logprobs, tolerance)


def sampled(model, seed=0, prompts=PROMPTS, G=5, **settings):
    torch.manual_seed(seed)
    return sample_groups(model, TOKENIZER, prompts, G, **({"max_completion_length": 8} | settings))


def test_an_end_token_at_the_cap_is_an_end():
    rollout = sampled(tiny_model(initializer_range=0.2), G=200, max_completion_length=3)
    check_rollout(rollout, PROMPTS, 200, 3)
    at_the_cap = rollout.completion_mask[:, -1]
    assert (at_the_cap & rollout.truncated).any() and (at_the_cap & ~rollout.truncated).any()


def test_samples_depend_on_the_seed_and_on_no_hidden_setting():
    """Qwen2.5's generation settings say top_k 20, top_p 0.8, repetition_penalty 1.1."""
    model = tiny_model()
    plain = sampled(model)
    assert len(set(plain.texts)) > 9 and sampled(model, seed=1).texts != plain.texts
    hidden = dict(top_k=1, top_p=0.1, repetition_penalty=2.0, temperature=0.1, min_p=0.9,
                  do_sample=False, max_new_tokens=2, no_repeat_ngram_size=1)
    for name, value in hidden.items():
        setattr(model.generation_config, name, value)
    same_rollout(sampled(model), plain, tolerance=0)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_temperature_zero_takes_the_likeliest_whatever_stands_beside(family):
    model = tiny_model(family)
    together = sampled(model, temperature=0)
    for i, prompt in enumerate(PROMPTS):
        alone = sampled(model, prompts=[prompt], G=1, temperature=0)
        T = alone.completion_mask.shape[1]
        best = model(alone.input_ids).logits.log_softmax(dim=-1).max(dim=-1)
        assert torch.equal(best.indices[:, -T - 1 : -1], alone.input_ids[:, -T:])
        near(best.values[:, -T - 1 : -1].detach(), alone.logprobs, 2e-5)
        for row in range(5 * i, 5 * i + 5):
            assert together.texts[row] == alone.texts[0]
            near(together.logprobs[row, :T], alone.logprobs[0], 2e-5)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_rows_that_have_ended_leave_and_nothing_changes(family):
    model = tiny_model(family)
    plain = sampled(model, drop_every=1000)
    for drop_every in (2, 3, 4):
        same_rollout(sampled(model, drop_every=drop_every), plain)
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, out: rows.append(len(out)))
    same_rollout(sampled(model, drop_every=1), plain)
    lengths = plain.completion_mask.sum(dim=1)
    live = [int((lengths > t).sum()) for t in range(1, lengths.max())]
    assert rows == [3] + live and live[-1] < 15  # each prompt is read once, not once an answer
    rows.clear()
    model.generation_config.eos_token_id = list(range(VOCABULARY))
    assert sampled(model, drop_every=1).completion_mask.shape == (15, 1)
    assert rows == [3]  # when all have ended, that is all


DROPOUT = {  # family and settings
    "rotary": ("qwen2", {"attention_dropout": 0.5}),
    "learned positions": ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
}
every_dropout = pytest.mark.parametrize("name", DROPOUT)


@pytest.mark.parametrize("checkpointing", [False, True])
@every_dropout
def test_train_mode_does_not_disturb_sampling_and_comes_back(name, checkpointing):
    family, dropout = DROPOUT[name]
    model = tiny_model(family, **dropout)
    plain = sampled(model)
    assert not model.training
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    same_rollout(sampled(model), plain)
    assert all(module.training for module in model.modules())
    model.get_output_embeddings().register_forward_hook(fails)
    with pytest.raises(OSError, match="out of order"):
        sampled(model)
    assert all(module.training for module in model.modules())


def fails(*_, **__):
    raise OSError("out of order")


def test_chats_go_through_the_template():
    first = [{"role": "user", "content": "a b"}]
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, *first]
    written = ["user a b <end> assistant",
               "user c <end> assistant d <end> user a b <end> assistant"]
    rollout = sampled(tiny_model(), prompts=[first, talk])
    check_rollout(rollout, written, 5, 8)
    same_rollout(rollout, sampled(tiny_model(), prompts=written), tolerance=0)


TOO_LONG = "a " * 57  # 57 tokens and a cap of 8 do not fit into 64
NOT_SAMPLED = {  # family, settings; what the message must show
    "no answers": ("qwen2", {"G": 0}, "num_generations 0"),
    "no tokens": ("qwen2", {"max_completion_length": 0}, "max_completion_length 0"),
    "a negative temperature": ("qwen2", {"temperature": -0.1}, "-0.1"),
    "no temperature": ("qwen2", {"temperature": math.nan}, "nan"),
    "no prompts": ("qwen2", {"prompts": []}, "list of one or more prompts"),
    "no list": ("qwen2", {"prompts": "a b"}, "list of one or more prompts"),
    "an empty prompt": ("qwen2", {"prompts": ["a", ""]}, "prompt 1 has no tokens"),
    "too long": ("qwen2", {"prompts": ["a", TOO_LONG]}, "57 tokens .* 8 .* context of 64"),
    "too long, nested config": ("gemma3", {"prompts": [TOO_LONG]}, "57 tokens .* context of 64"),
}


@pytest.mark.parametrize("name", NOT_SAMPLED)
def test_what_cannot_be_sampled_is_refused(name):
    family, settings, said = NOT_SAMPLED[name]
    model = family_model(family)
    with pytest.raises(ValueError, match=said):
        sampled(model, **settings)
    sampled(model, prompts=[TOO_LONG[2:]], G=1)  # and this just fits


# ------------------------------------------------------------------------------------------------
# 2. The scorer: values and gradients of every family, against the slow way
# ------------------------------------------------------------------------------------------------

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"query_pre_attn_scalar": 8, **WINDOW}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}
JAMBA = {
    "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 4,
    "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
FAMILIES = {  # what each has beside the settings that all have
    "qwen2": {},
    "qwen3": {},
    "llama": {},
    "phi3": {},
    "gpt2": {},  # learned positions
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 3},
    "bloom": {},  # no positions, but a bias for distance; likewise MPT
    "mpt": {},
    "mistral": {"sliding_window": 3},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    "qwen3_moe": EXPERTS,
    "gemma2": {"final_logit_softcapping": 2.0, **GEMMA},  # capped logits
    "gemma3_text": GEMMA,
    "gemma3": {"text_config": PLAIN | GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
    "granite": {"logits_scaling": 8.0},  # scaled logits; likewise Cohere
    "cohere": {"logit_scale": 0.06},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # from here on, layers with a state
    "qwen3_5_text": LINEAR,
    "qwen3_next": {"shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR},
    "jamba": JAMBA,
}
BITES = {  # without what sets a family apart, the numbers are others
    "mistral": {"sliding_window": None}, "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {"sliding_window": 64}, "gpt_neo": {"window_size": 64},
    "granite": {"logits_scaling": 1.0},
}
every_family = pytest.mark.parametrize("name", FAMILIES)


def family_model(name, **settings):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {name}")
    return tiny_model(name, **(FAMILIES[name] | settings))


def ragged(widths=(3, 7, 7, 1, 5), G=4, longest=9):
    """Ids and mask that nobody sampled: prompts of these widths, answers of random lengths."""
    draw = random.Random(0)
    P = max(widths)
    ids = torch.zeros(len(widths) * G, P + longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for group, width in enumerate(widths):
        prompt = draw.choices(range(6, 42), k=width)
        for row in range(group * G, group * G + G):
            n = draw.randint(1, longest)
            answer = draw.choices(range(6, 42), k=n)
            ids[row, P - width : P + n] = torch.tensor(prompt + answer)
            mask[row, P - width : P + n] = 1
    return ids, mask


def gradients_of(model):
    """All gradients as one long vector, zeros where there is none; and forgets them."""
    parts = []
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parts.append(parameter.grad.flatten())
        parameter.grad = None
    return torch.cat(parts)


@every_family
def test_families_are_scored_as_the_slow_way_does(name):
    """Rows in any order, most with a prompt that others share, and with more padding or less."""
    model = family_model(name)
    rows = [18, 3, 0, 9, 16, 1, 2, 12, 7]  # 12 and 9 are the only ones of their prompts
    ids, mask = [x[rows] for x in ragged()]
    pull = torch.randn(2, len(rows), 9, generator=torch.Generator().manual_seed(0))
    slow = torch.stack(slow_logprobs(model, ids, mask, 9, 0.7))
    (slow * pull).sum().backward()
    slow_gradients = gradients_of(model)
    scale = slow_gradients.abs().max()
    for checkpointing, left, right in ((False, 0, 0), (False, 5, 3), (True, 2, 0)):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        scores = torch.stack(token_logprobs(
            model, pad(ids, (left, right), value=17), pad(mask, (left, right)), 9 + right, 0.7,
            return_entropy=True))
        assert scores.dtype == torch.float32 and (scores[:, :, 9:] == 0).all()
        near(scores[:, :, :9], slow, 1e-5)
        (scores[:, :, :9] * pull).sum().backward()
        near(gradients_of(model) / scale, slow_gradients / scale, 1e-5)
    if name in BITES:
        other = family_model(name, **BITES[name])
        assert (slow_logprobs(other, ids, mask, 9, 0.7)[0] - slow[0]).abs().max() > 0.1


@every_family
def test_families_are_sampled_and_trained(name):
    """And the first loss is 0, its gradient not: all ratios are 1."""
    model = family_model(name)
    before = weights_of(model)
    metrics = go(model=model, steps=1, warmup_steps=0)[0]
    assert metrics["sampler_gap"] < 1e-5
    for figure in ("loss", "kl", "clip_fraction", "skipped_updates"):
        assert metrics[figure] == pytest.approx(0, abs=1e-5)
    assert metrics["ratio_max"] == 1 and metrics["grad_norm"] > 0.01
    assert (weights_of(model) - before).abs().max() > 1e-3


def test_float64_models_are_scored_in_float64():
    model = tiny_model("gpt2").double()
    ids, mask = ragged()
    scores = token_logprobs(model, ids, mask, 9, 0.7)
    assert scores.dtype == torch.float64
    near(scores, slow_logprobs(model, ids, mask, 9, 0.7)[0])


def test_bfloat16_logits_are_widened_before_the_softmax():
    """The softmax of the same logits in bfloat16 is off by some hundredths."""
    model = tiny_model().bfloat16()
    ids = torch.randint(6, 42, (100, 6), generator=torch.Generator().manual_seed(0))
    scores, entropies = token_logprobs(model, ids, torch.ones_like(ids), 1, return_entropy=True)
    assert scores.dtype == entropies.dtype == torch.float32
    logits = model(ids[:, :-1]).logits[:, -1]
    wide = logits.float().log_softmax(dim=-1).gather(1, ids[:, -1:])
    narrow = logits.log_softmax(dim=-1).gather(1, ids[:, -1:])
    assert (scores - wide).abs().mean() < 1e-4 < 1e-3 < (narrow - wide).abs().mean()


def test_impossible_tokens_leave_all_numbers_finite():
    model = tiny_model()
    never = torch.tensor([3, 5])
    model.lm_head.register_forward_hook(lambda _, __, out: out.index_fill(-1, never, -math.inf))
    scores = torch.stack(token_logprobs(model, *ragged(), 9, return_entropy=True))
    scores.sum().backward()
    assert scores.isfinite().all() and gradients_of(model).isfinite().all()


def test_scoring_holds_few_logits_and_reads_each_prompt_once():
    model = tiny_model(vocab_size=50)  # a width that nothing else has
    ids, mask = ragged(widths=(6,) * 5)  # 5 prompts, 20 answers
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    ids = pad(ids, (7, 7))[order]  # no row uses these columns
    mask = pad(mask, (7, 7))[order]
    token_logprobs(model, ids, mask, 16)  # tries once whether the head gives the logits
    read = []
    headed = []
    saved = []

    def keep(tensor):
        saved.append(tensor.shape[-1])
        return tensor

    model.get_input_embeddings().register_forward_hook(lambda _, __, out: read.append(out[..., 0]))
    model.lm_head.register_forward_hook(lambda _, __, out: headed.append(len(out)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = token_logprobs(model, ids, mask, 16, return_entropy=True, tokens_per_chunk=10)
    assert sum(x.numel() for x in read) <= 5 * 6 + 20 * 9
    assert 50 not in saved  # no logits wait for the backward pass
    answers = mask[:, 13:].sum()
    assert max(headed) == 10 and sum(headed) == answers  # padding has no logits at all
    torch.stack(scores).sum().backward()
    assert max(headed) == 10 and sum(headed) == 2 * answers  # they are made once more


# Temperature, and completion_length of 4 tokens in all.
@pytest.mark.parametrize("temperature, T", [(0, 2), (-1.0, 2), (math.nan, 2), (1.0, 0), (1.0, 4)])
def test_what_cannot_be_scored_is_refused(temperature, T):
    ids = torch.tensor([[6, 7, 8, 9]])
    with pytest.raises(ValueError, match="must be above 0"):
        token_logprobs(tiny_model(), ids, torch.ones_like(ids), T, temperature)


# ------------------------------------------------------------------------------------------------
# 3. The step, against one slow step
# ------------------------------------------------------------------------------------------------

FLAT = ("a", "d", "g")  # whatever is answered to these questions earns the same
UPDATE = {
    "steps": 2, "num_generations": 4, "prompts_per_step": 3, "max_completion_length": 6,
    "learning_rate": 3e-3, "warmup_steps": 0, "lr_scheduler_type": "constant_with_warmup",
    "temperature": 0.8, "beta": 0.1, "seed": 1, "tokens_per_micro_batch": 25,
}
METRICS = {
    "step", "loss", "reward_mean", "reward_std", "kl", "clip_fraction", "ratio_max", "entropy",
    "grad_norm", "learning_rate", "completion_length", "truncated_fraction",
    "zero_variance_fraction", "sampler_gap", "sample_seconds", "score_seconds", "update_seconds",
    "tokens_per_second", "skipped_updates", "questions_seen",
}


def uneven_reward(prompts, completion_ids, **columns):
    """Made of an answer's ids, so that it is seen if rewards and answers get mixed up."""
    rewards = []
    for prompt, ids in zip(prompts, completion_ids):
        reward = (7 * sum(ids) % 11) / 10
        if prompt in FLAT:
            reward = 0.3
        rewards.append(reward)
    return rewards


def steps_of(model, reward=uneven_reward, loss_fn=grpo_loss, data=QUESTIONS, **settings):
    config = GRPOConfig(**(UPDATE | settings))
    return training_steps(model, TOKENIZER, data, reward, config, loss_fn=loss_fn)


def slow_answers(rollout, rewards):
    """What the log must say of the answers of a step."""
    tokens = rollout.logprobs[rollout.completion_mask]
    flat = [group for group in rewards.tolist() if len(set(group)) == 1]
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": (rewards - rewards.mean()).square().mean().sqrt().item(),
        "zero_variance_fraction": len(flat) / len(rewards),
        "entropy": -tokens.mean().item(),
        "completion_length": len(tokens) / len(rollout.texts),
        "truncated_fraction": sum(rollout.truncated.tolist()) / len(rollout.texts),
        "skipped_updates": 0,
    }


def slow_updates(model, reference, optimizer, rollout, rewards, config, loss_fn):
    """Whole mini-batches, one answer at a time. Returns what the log must say of them."""
    G = config.num_generations
    ids = rollout.input_ids
    real = rollout.attention_mask
    mask = rollout.completion_mask
    T = mask.shape[1]
    names = ("epsilon", "epsilon_high", "beta", "loss_type", "max_completion_length")
    settings = {name: getattr(config, name) for name in names}
    settings["kl_fn"] = lambda policy, ref: kl_estimate(policy, ref, config.kl_penalty_type)
    # All answers count in the statistics of their group, cut ones too.
    advantages = group_scale(rewards, config.scale_rewards).flatten()
    if config.mask_truncated_completions:
        mask = mask & ~rollout.truncated.unsqueeze(1)
    with torch.no_grad():
        old = slow_logprobs(model, ids, real, T, config.temperature)[0]
        ref = slow_logprobs(reference, ids, real, T, config.temperature)[0]
    gap = (rollout.logprobs - old).abs()
    totals = {"loss": 0.0, "grad_norm": 0.0, "kl": 0.0, "clip_fraction": 0.0, "sampler_gap": 0.0}
    ratio_max = 0.0
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
            norm = torch.cat([x.grad.flatten() for x in model.parameters()]).norm().item()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, config.max_grad_norm / max(norm, 1e-9))
            optimizer.step()
            totals["loss"] += loss.item()
            totals["grad_norm"] += norm
            # In the other figures, answers that cannot teach are left out.
            taught = torch.ones(len(rows), dtype=torch.bool)
            if config.beta == 0 and config.entropy_bonus == 0:
                taught = advantages[rows] != 0
            now = now[taught]
            rows = rows[taught]
            if mask[rows].any():
                n = int(mask[rows].sum())
                found = loss_fn(now, old[rows], ref[rows], advantages[rows], mask[rows],
                                **settings)[1]
                totals["clip_fraction"] += n * found["clip_fraction"]
                totals["sampler_gap"] += gap[rows][mask[rows]].sum().item()
                if config.beta > 0:  # else there is no reference
                    totals["kl"] += n * found["kl"]
                ratio_max = max(ratio_max, found["ratio_max"])
                tokens += n
    wanted = {"ratio_max": ratio_max}
    for name in ("loss", "grad_norm"):
        wanted[name] = totals[name] / (config.num_iterations * config.num_mini_batches)
    for name in ("kl", "clip_fraction", "sampler_gap"):
        wanted[name] = totals[name] / max(tokens, 1)
    return wanted


ONE = {"tokens_per_micro_batch": 1}
UNCUT = {"mask_truncated_completions": True, "max_completion_length": 12, "beta": 0.0}
TWICE = {"num_iterations": 2, "num_mini_batches": 2, "learning_rate": 0.01}
UPDATES = {  # settings, and the loss where it is another one
    "one update a step": ({},),
    "grpo, several updates": (TWICE,),
    "dapo, several updates": ({"loss_type": "dapo", **TWICE},),
    "dr_grpo, several updates": ({"loss_type": "dr_grpo", **TWICE},),
    "grpo, each answer alone": (ONE | TWICE,),
    "dapo, each answer alone": (ONE | {"loss_type": "dapo", "gradient_checkpointing": True},),
    "dr_grpo, each answer alone": (ONE | {"loss_type": "dr_grpo"},),
    "dapo, all at once": ({"loss_type": "dapo", "tokens_per_micro_batch": 10_000, **TWICE},),
    "grpo, flat groups left out": ({"beta": 0.0},),
    "dapo, flat groups left out": ({"beta": 0.0, "loss_type": "dapo"},),
    "dr_grpo, flat groups left out": ({"beta": 0.0, "loss_type": "dr_grpo"},),
    "flat groups left out of several updates": ({"beta": 0.0, "loss_type": "dapo", **TWICE},),
    # Adam's momentum moves the weights in a step that teaches nothing.
    "a flat group and no other": ({"beta": 0.0, "prompts_per_step": 1, "steps": 7},),
    "grpo, no cut answers": (UNCUT,),
    "dapo, no cut answers": (UNCUT | {"loss_type": "dapo", "num_mini_batches": 2},),
    "grpo, entropy bonus": ({"entropy_bonus": 0.3, "beta": 0.0},),
    "dapo, entropy bonus": ({"entropy_bonus": 0.3, "loss_type": "dapo"},),
    "dr_grpo, entropy bonus": ({"entropy_bonus": 0.3, "loss_type": "dr_grpo", **TWICE},),
    "a tight clip": ({"epsilon": 0.02, "epsilon_high": 0.01, **TWICE},),
    "short gradients": ({"max_grad_norm": 0.05, **TWICE},),
    "whole gradients": ({"max_grad_norm": 1e9, "num_mini_batches": 3, "beta": 0.0},),
    "k2": ({"kl_penalty_type": "mse", **TWICE},),
    "advantages without std": ({"scale_rewards": "none"},),
    "advantages over the std of all": ({"scale_rewards": "batch", **TWICE},),
    "leave one out": ({"scale_rewards": "rloo", "loss_type": "dr_grpo", "beta": 0.0},),
    "GSPO": (TWICE, gspo_loss),
    "one ratio an answer": ({"num_iterations": 2}, answer_ratio_loss),
    "corrected KL": ({"loss_type": "dapo", **TWICE}, corrected_kl_loss),
    "gradient checkpointing": ({"gradient_checkpointing": True, **TWICE},),
}


@pytest.mark.parametrize("name", UPDATES)
def test_steps_are_those_of_the_slow_way(name):
    """In float64, where two right ways agree to the last digits: weights and metrics."""
    settings, loss_fn, *_ = UPDATES[name] + (grpo_loss,)
    config = GRPOConfig(**(UPDATE | settings))
    model = tiny_model("gpt2", initializer_range=0.2).double()
    start = weights_of(model)
    slow_model = copy.deepcopy(model)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow_model.parameters(), config.learning_rate, weight_decay=0.0)
    generators = []

    def reward(**columns):
        generators.append(torch.get_rng_state())  # the next to draw is the order of the groups
        return uneven_reward(**columns)

    for metrics, learner in steps_of(model, reward, loss_fn, **settings):
        rollout = learner.rollout
        rewards = learner.rewards
        torch.set_rng_state(generators[-1])
        wanted = slow_answers(rollout, rewards)
        wanted |= slow_updates(slow_model, reference, optimizer, rollout, rewards, config, loss_fn)
        moved = (weights_of(model) - start).norm()
        assert (weights_of(model) - weights_of(slow_model)).norm() <= 1e-4 * moved
        assert METRICS <= metrics.keys()
        for value in metrics.values():
            assert type(value) in (int, float) and math.isfinite(value)
        for figure, value in wanted.items():
            assert metrics[figure] == pytest.approx(value, rel=1e-4, abs=2e-6), figure
        seconds = sum(metrics[f"{part}_seconds"] for part in ("sample", "score", "update"))
        answers = rollout.completion_mask.sum().item()
        assert metrics["tokens_per_second"] == pytest.approx(answers / seconds)
        assert metrics["questions_seen"] == config.prompts_per_step * metrics["step"]
    assert moved > 1e-3
    assert (learner.reference is None) == (config.beta == 0)
    if learner.reference is not None:
        assert torch.equal(weights_of(learner.reference), start)


@pytest.mark.parametrize("budget", [1, 20, 45, 100, 10_000])
def test_micro_batches_keep_to_their_budget(budget):
    """Answers of like length together, the longest first, each of them once."""
    batches = []

    def watching_loss(logprobs, old, ref, advantages, mask, **settings):
        batches.append(mask.sum(dim=1).tolist())
        return grpo_loss(logprobs, old, ref, advantages, mask, **settings)

    data = [{"prompt": "a b c"}, {"prompt": "b c d"}, {"prompt": "c d e"}]
    _, learner = next(steps_of(
        tiny_model(initializer_range=0.15), loss_fn=watching_loss, data=data, num_generations=8,
        tokens_per_micro_batch=budget, max_completion_length=12))
    lengths = learner.rollout.completion_mask.sum(dim=1).tolist()
    assert sum(batches, []) == sorted(lengths, reverse=True)
    assert min(lengths) < 4 and max(lengths) == 12
    for batch, following in zip(batches, batches[1:] + [[0]]):
        assert len(batch) == 1 or len(batch) * (3 + batch[0]) <= budget
        assert batch[-1] >= batch[0] / 2
        # It ends only where it has to.
        assert (len(batch) + 1) * (3 + batch[0]) > budget or following[0] < batch[0] / 2


@pytest.mark.parametrize("settings", [
    {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"scale_rewards": "rloo", "beta": 0.0},
    {"loss_type": "dapo", "num_iterations": 3, "learning_rate": 0.01}, {"bf16": True}])
def test_a_rewarded_token_is_learned(settings):
    """The smallest real run: four of the 48 tokens are worth 1, all others nothing."""

    def reward(completions, **columns):
        return [float(text in ("a", "b", "c", "d")) for text in completions]

    run = {"num_generations": 16, "prompts_per_step": 2, "max_completion_length": 1, "steps": 14,
           "learning_rate": 0.03, "temperature": 1.0, "beta": 0.001}
    steps = steps_of(tiny_model(initializer_range=0.1), reward, **(run | settings))
    means = [metrics["reward_mean"] for metrics, _ in steps]
    assert means[0] < 0.4 and sum(means[-3:]) / 3 > 0.9


@pytest.mark.parametrize("how", ["plainly", "two passes", "checkpointing", "the user's own"])
@every_dropout
def test_models_in_train_mode_are_trained_without_dropout(name, how):
    """Also where gradient checkpointing, which needs train mode, was switched on by the user."""
    family, dropout = DROPOUT[name]
    settings = {"two passes": {"num_iterations": 2}, "checkpointing": {
        "gradient_checkpointing": True}}.get(how, {})
    plain = tiny_model(family)
    other = tiny_model(family, **dropout).train()
    if how == "the user's own":
        other.gradient_checkpointing_enable()
    for model in (plain, other):
        history = go(model=model, steps=2, reward=uneven_reward, learning_rate=1e-3, **settings)
        assert history[0]["sampler_gap"] < 1e-5
    assert (weights_of(plain) - weights_of(other)).norm() < 1e-3 * weights_of(plain).norm()


def test_gradient_checkpointing_computes_in_the_backward_pass_once_more():
    tokens = []
    for checkpointing in (False, True):
        model = tiny_model()
        seen = []
        model.model.layers[0].self_attn.q_proj.register_forward_hook(
            lambda _, __, out: seen.append(torch.is_grad_enabled() * out[..., 0].numel()))
        next(steps_of(model, gradient_checkpointing=checkpointing))
        tokens.append(sum(seen))
    assert tokens[1] > 1.9 * tokens[0] > 0


THIRDS = [1 / 3, 2 / 3, 1]
SCHEDULES = {
    "linear": THIRDS + [3 / 4, 2 / 4, 1 / 4],
    "constant_with_warmup": THIRDS + [1, 1, 1],
    "cosine": THIRDS + [0.5 + 0.5 * math.cos(math.pi * i / 4) for i in (1, 2, 3)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates(schedule):
    """No step is made at rate 0, neither the first nor the last."""
    model = tiny_model()
    before = weights_of(model)
    rates = []
    for metrics, _ in steps_of(model, steps=6, warmup_steps=3, learning_rate=3e-3, beta=0.0,
                               lr_scheduler_type=schedule, max_completion_length=2):
        if not rates:  # Adam's first step is as long as the rate
            assert (weights_of(model) - before).abs().max() == pytest.approx(1e-3, rel=1e-2)
        rates.append(metrics["learning_rate"])
    assert rates == pytest.approx([3e-3 * part for part in SCHEDULES[schedule]])


def test_a_sampler_that_is_another_policy_shows_in_the_gap():
    model = tiny_model()

    def meddling_reward(**columns):
        for parameter in model.parameters():
            parameter.data *= 1.1
        return uneven_reward(**columns)

    assert next(steps_of(model, meddling_reward))[0]["sampler_gap"] > 0.01


def test_dynamic_sampling_replaces_flat_groups():
    """What comes in their place stands with its own question, reward, log-probs and advantage."""
    model = tiny_model(initializer_range=0.2)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    model.lm_head.bias.data[END] = 2.0  # so that the longest answers differ, and some pad others
    for metrics, learner in steps_of(model, dynamic_sampling=20, num_generations=3,
                                     prompts_per_step=4, max_completion_length=40):
        rollout = learner.rollout
        prompts = [example["prompt"] for example in learner.examples]
        assert len(prompts) == 4 and not set(prompts) & set(FLAT)
        check_rollout(rollout, prompts, 3, 40)
        T = rollout.completion_mask.shape[1]
        answers = []
        for ids, real in zip(rollout.input_ids[:, -T:], rollout.completion_mask):
            answers.append(ids[real].tolist())
        of_each_row = [prompt for prompt in prompts for _ in range(3)]
        near(learner.rewards.flatten(), uneven_reward(of_each_row, answers))
        near(learner.advantages, group_advantages(learner.rewards))
        assert metrics["zero_variance_fraction"] == 0 and metrics["sampler_gap"] < 1e-5
    assert metrics["questions_seen"] > 8


# Tries, two questions, and how many are drawn for a step of two.
@pytest.mark.parametrize("tries, letters, drawn", [(0, "ad", 2), (3, "ad", 8), (3, "eb", 2)])
def test_dynamic_sampling_draws_as_few_questions_as_it_can(tries, letters, drawn):
    data = [{"prompt": letter} for letter in letters]
    metrics, _ = next(steps_of(tiny_model(), data=data, prompts_per_step=2,
                                dynamic_sampling=tries))
    assert metrics["questions_seen"] == drawn


# ------------------------------------------------------------------------------------------------
# 4. Precision: bfloat16 over float32 masters, here on the CPU
# ------------------------------------------------------------------------------------------------


def test_master_weights_take_steps_that_bfloat16_cannot():
    model = tiny_model()
    frozen = model.model.norm.weight.requires_grad_(False)
    start = [parameter.clone() for parameter in model.parameters() if parameter.requires_grad]
    *_, (metrics, learner) = steps_of(model, bf16=True, steps=3, learning_rate=1e-6)
    assert metrics["sampler_gap"] < 0.1
    assert frozen.dtype == torch.bfloat16 and (frozen == 1).all()
    assert len(learner.parameters) == len(learner.weights) == len(start)
    moved = []
    seen = []
    for parameter, weight, before in zip(learner.parameters, learner.weights, start):
        assert parameter.dtype == torch.bfloat16 and weight.dtype == torch.float32
        assert torch.equal(parameter, weight.bfloat16())
        learns = weight.grad != 0
        moved.append((weight - before).abs()[learns] > 3e-7)
        seen.append((weight.bfloat16() != before.bfloat16())[learns])
    assert torch.cat(moved).double().mean() > 0.8  # most of the masters have moved
    assert torch.cat(seen).double().mean() < 0.1  # and in bfloat16 hardly any
    # Positions are angles, kept in a buffer that bfloat16 would spoil.
    angles = tiny_model().model.rotary_emb.inv_freq
    for network in (model, learner.reference):
        assert torch.equal(network.model.rotary_emb.inv_freq, angles)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


def test_gradients_in_bfloat16_add_up_in_float32():
    model = tiny_model()
    added = []
    # This hook is called before the training's own, which frees the gradient.
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: added.append(p.grad))
    _, learner = next(steps_of(model, bf16=True, max_grad_norm=1e9, tokens_per_micro_batch=1))
    assert len(added) == 12 and added[0].dtype == torch.bfloat16
    total = torch.zeros(added[0].shape)
    for one in added:
        total += one
    assert torch.equal(learner.weights[-1].grad, total)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_models_that_come_in_bfloat16_are_trained_in_float32_where_there_is_no_gpu():
    model = tiny_model().bfloat16()
    _, learner = next(steps_of(model))
    for parameter, weight in zip(model.parameters(), learner.weights, strict=True):
        assert weight is parameter and weight.dtype == torch.float32


@pytest.mark.parametrize("bf16", [False, True])
def test_a_second_run_finds_an_ordinary_model(bf16):
    model = tiny_model()
    list(steps_of(model.train(), bf16=bf16))
    assert not model.training
    twin = tiny_model()
    for parameter, other in zip(twin.parameters(), model.parameters()):
        parameter.data = other.data.clone()
    for network in (model, twin):  # so does the user's own backward pass
        network(torch.tensor([[6, 7, 8, 9]])).logits.float().logsumexp(dim=-1).sum().backward()
    near(gradients_of(model), gradients_of(twin), 0)
    histories = [go(model=network, steps=2, bf16=bf16) for network in (model, twin)]
    assert histories[0] == histories[1]


def test_quantized_models_are_refused():
    model = tiny_model()
    packed = torch.zeros(VOCABULARY, 32, dtype=torch.int8)
    model.lm_head.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ValueError, match="lm_head.weight is torch.int8.*quantized"):
        next(steps_of(model))


# ------------------------------------------------------------------------------------------------
# 5. Settings
# ------------------------------------------------------------------------------------------------

WHOLE = [-1, 1.5, "2", None, math.nan]
REAL = [-0.1, math.nan, math.inf, "0.1"]
IMPOSSIBLE = {  # settings, and values that none of them may have
    "num_generations": [1, 0, *WHOLE],
    "prompts_per_step max_completion_length steps num_iterations": [0, *WHOLE],
    "num_mini_batches tokens_per_micro_batch": [0, *WHOLE],
    "warmup_steps dynamic_sampling seed save_steps": WHOLE,
    "temperature max_grad_norm": [0, None, *REAL],
    "learning_rate beta epsilon entropy_bonus": [None, *REAL],
    "epsilon_high": REAL,
    "loss_type scale_rewards lr_scheduler_type kl_penalty_type": ["bnpo", None],
}


@pytest.mark.parametrize("names", IMPOSSIBLE)
def test_impossible_settings_are_refused_at_once(names):
    for name in names.split():
        for value in IMPOSSIBLE[names]:
            with pytest.raises(ValueError, match=f"{name} is {value!r}"):
                GRPOConfig(**{name: value})


def test_settings_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="num_mini_batches is 5"):
        GRPOConfig(prompts_per_step=4, num_mini_batches=5)
    with pytest.raises(ValueError, match="kl_penalty_type 'mse'"):
        GRPOConfig(beta=0, kl_penalty_type="mse")


def test_settings_at_the_edge_are_taken():
    GRPOConfig(epsilon=1.5, epsilon_high=0, prompts_per_step=4, num_mini_batches=4)
    GRPOConfig(num_generations=2, prompts_per_step=1, max_completion_length=1, steps=1,
               warmup_steps=0, learning_rate=0, beta=0, epsilon=0, save_steps=0)
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"


def test_settings_have_the_documents_values_and_trls_names():
    documents = {
        "num_generations": 8, "epsilon": 0.2, "epsilon_high": None, "beta": 0.04,
        "temperature": 1.0, "loss_type": "grpo", "scale_rewards": "group", "num_iterations": 1,
        "dynamic_sampling": 0, "max_completion_length": 512,
    }
    for name, value in documents.items():
        assert getattr(GRPOConfig(), name) == value


# ================================================================================================
# The night
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# 1. Whatever breaks a run: resumed, it ends as if nothing had happened, to the last bit
#
# Each run below has a checkpoint of step 2 and was left after step 3. It is resumed, breaks in
# step 3 or 4, and is resumed again. Then its folder has to be that of a run left in peace.
# ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Like a SIGKILL: nothing in the program may catch it."""


def breaks(function, call, instead):
    """`function`, but in this call of it (0: in every one) `instead` is called, and given it."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        if call in (0, len(calls)):
            return instead(function, *args, **kwargs)
        return function(*args, **kwargs)
    return broken


def press_ctrl_c(function, *args, **kwargs):
    signal.raise_signal(signal.SIGINT)
    return function(*args, **kwargs)


def press_it_twice(function, *args, **kwargs):
    signal.raise_signal(signal.SIGINT)
    return press_ctrl_c(function, *args, **kwargs)


def nothing_but_nan(reward, **given):
    return [NAN for _ in reward(**given)]  # the reward draws: that has to be undone


def fail(*_, **__):
    raise RuntimeError("the device is lost")


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory")


def kill(*_, **__):
    raise Killed


def kill_while_writing(serialize_file, tensors, path, metadata):
    Path(path).write_bytes(b"half a checkpoint")
    raise Killed


def fill_the_disk(serialize_file, tensors, path, metadata):
    Path(path).write_bytes(b"half a checkpoint")
    raise OSError(28, "No space left on device")


def kill_as_the_log_is_opened(open_file, path, *mode, **settings):
    file = open_file(path, *mode, **settings)
    if "metrics.jsonl" in str(path) and mode == ("w",):
        raise Killed
    return file


SAVING = (safetensors.torch, "serialize_file")
CLIPPING = (torch.nn.utils, "clip_grad_norm_")
FAULTS = {  # the error that ends the run; the step saved then, if not 2; what breaks in which call
    "the reward raises": dict(
        error=ValueError, says="raised RuntimeError: the device", reward=(1, fail)),
    "the reward is nan": dict(
        error=ValueError, says="returned nan at place 0", reward=(1, nothing_but_nan)),
    "ctrl-c": dict(error=None, saved=3, reward=(1, press_ctrl_c)),
    "ctrl-c twice": dict(error=KeyboardInterrupt, reward=(1, press_it_twice)),
    "ctrl-c while the caller is busy": dict(error=None, saved=3, caller=(1, press_ctrl_c)),
    "the caller's evaluation fails": dict(error=RuntimeError, saved=4, caller=(2, fail)),
    "the second update fails": dict(
        error=RuntimeError, says="^the device is lost$", patch=(*CLIPPING, 2, fail)),
    "hopelessly out of memory": dict(
        error=torch.OutOfMemoryError, says="1 prompts at once.*gradient_checkpointing.*smaller",
        patch=(torch.nn.Embedding, "forward", 0, no_memory)),
    "disk full": dict(
        error=OSError, says="step 4 could not be saved.*No space left on device.*intact",
        patch=(*SAVING, 1, fill_the_disk)),
    "killed while writing": dict(error=Killed, patch=(*SAVING, 1, kill_while_writing)),
    "killed before the log is renamed": dict(error=Killed, patch=(os, "replace", 1, kill)),
    "killed before the checkpoint is renamed": dict(error=Killed, patch=(os, "replace", 2, kill)),
    "killed while resuming": dict(
        error=Killed, patch=(builtins, "open", 0, kill_as_the_log_is_opened)),
}


def coarse_reward(prompts, completions, **columns):
    """So coarse that many groups are flat, and dynamic sampling draws one or two questions more."""
    return [float(reward > 1) for reward in noisy_reward(prompts, completions)]


RUNS = {
    "plain": dict(),
    "several updates": dict(num_iterations=2, num_mini_batches=2, beta=0),
    "dynamic sampling in bfloat16": dict(
        dynamic_sampling=2, num_generations=2, bf16=True, reward=coarse_reward),
}
for run in RUNS.values():
    run |= dict(steps=5, save_steps=2)


def result(folder):
    """All that a run leaves: the checkpoint's bytes, and the log, which is JSON without NaN."""
    checkpoint = (Path(folder) / "checkpoint.safetensors").read_bytes()
    log = []
    for line in (Path(folder) / "metrics.jsonl").read_text().splitlines():
        log.append(untimed(json.loads(line, parse_constant=pytest.fail)))
    return checkpoint, log


def ends_with(error, says=None):
    if error is None:
        return contextlib.nullcontext()
    return pytest.raises(error, match=says)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each of RUNS the folder of a whole run, and that of one which was left after step 3."""
    found = {}
    for name, run in RUNS.items():
        whole = tmp_path_factory.mktemp("whole")
        left = tmp_path_factory.mktemp("left")
        go(whole, **run)
        go(left, stop=3, **run)
        found[name] = (whole, left)
    return found


@pytest.fixture
def own_handler():
    """A handler of the caller's for Ctrl-C, which must be there again when a run is over."""
    def handler(*_):
        pytest.fail("the caller's handler was called")
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def assert_given_back(model, handler):
    """However a run ends, it leaves the caller's Ctrl-C and an ordinary model."""
    assert signal.getsignal(signal.SIGINT) is handler
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    # A hook that was left on the model would take these gradients away.
    model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_run_goes_on_as_if_nothing_had_happened(fault, run, folders, tmp_path,
                                                         monkeypatch, own_handler, capsys):
    whole, left = folders[run]
    folder = tmp_path / "run"
    shutil.copytree(left, folder)
    fault = dict(saved=2, says=None) | FAULTS[fault]
    run = dict(folder=folder, resume=True) | RUNS[run]
    broken = run | dict(model=tiny_model())
    if "reward" in fault:
        broken["reward"] = breaks(run.get("reward", noisy_reward), *fault["reward"])
    if "caller" in fault:
        broken["between"] = breaks(lambda _: None, *fault["caller"])
    with monkeypatch.context() as patch:
        if "patch" in fault:
            module, name, *rest = fault["patch"]
            patch.setattr(module, name, breaks(getattr(module, name), *rest))
        with ends_with(fault["error"], fault["says"]):
            go(**broken)
    assert_given_back(broken["model"], own_handler)
    assert ("interrupted" in capsys.readouterr().out) == ("press" in str(fault))
    if fault["error"] is Killed:  # in the middle of a line, for example
        with open(folder / "metrics.jsonl", "a") as log:
            log.write('{"step": 4, "los')
    else:
        assert not list(folder.glob("*.new"))
    rest = go(**run)
    assert rest[0]["step"] == fault["saved"] + 1
    assert result(folder) == result(whole)
    assert set(os.listdir(folder)) == {"checkpoint.safetensors", "metrics.jsonl"}


SAVES = {1: [1, 2, 3, 4, 5], 3: [3, 5], 9: [5], 0: []}


@pytest.mark.parametrize("save_steps", SAVES)
def test_save_steps_says_when(save_steps, tmp_path):
    """And with it how many steps can be lost at most. The last step is always saved, unless 0."""
    path = tmp_path / "checkpoint.safetensors"
    found = [b""]
    changes = []

    def look(metrics):
        bytes_now = path.read_bytes() if path.exists() else b""
        if bytes_now != found[-1]:
            changes.append(metrics["step"])
        found.append(bytes_now)

    go(tmp_path, steps=5, save_steps=save_steps, between=look)
    assert changes == SAVES[save_steps]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


LONG = dict(steps=10, save_steps=1, num_iterations=2, num_mini_batches=2)


def campaign(folder, kills):
    """SIGKILL a run again and again, further on each time, at random moments; then let it finish.

    It is called in a process of its own, which imports once and forks for every run.
    """
    chance = random.Random(1)
    log = Path(folder) / "metrics.jsonl"

    def steps_done():
        if not log.exists():
            return 0
        return log.read_text().count("\n")

    for kill in range(kills + 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                go(folder, resume=True, **LONG)
                code = 0
            finally:
                os._exit(code)
        if kill < kills:
            for _ in range(2000):  # ten seconds at most, if it does not come to that
                if steps_done() >= 2 * (kill + 1):
                    break
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
        print("ended with", os.waitpid(child, 0)[1], flush=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_sigkill_at_random_moments(tmp_path):
    go(tmp_path / "whole", **LONG)
    killed = str(tmp_path / "killed")
    here = Path(__file__)
    code = f"import {here.stem} as tests; tests.campaign({killed!r}, 2)"
    path = os.pathsep.join([str(here.parent), str(Path(grpo.__file__).parent)])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
                          text=True, capture_output=True, timeout=300)
    ends = re.findall("ended with ([0-9]+)", done.stdout)
    assert ends[-1] == "0" and str(int(signal.SIGKILL)) in ends, done.stderr[-2000:]
    assert result(killed) == result(tmp_path / "whole")


# ------------------------------------------------------------------------------------------------
# 2. Resume: the same run, or none
# ------------------------------------------------------------------------------------------------

OTHER_SETTINGS = dict(
    num_generations=2, prompts_per_step=3, max_completion_length=6, temperature=0.9, beta=0.2,
    epsilon=0.3, epsilon_high=0.3, loss_type="dapo", scale_rewards="none", steps=7,
    num_iterations=2, num_mini_batches=2, learning_rate=0.02, warmup_steps=3,
    lr_scheduler_type="cosine", max_grad_norm=2.0, kl_penalty_type="mse", entropy_bonus=0.1,
    mask_truncated_completions=True, dynamic_sampling=1, seed=4, bf16=True)
MAY_CHANGE = dict(save_steps=5, gradient_checkpointing=True, tokens_per_micro_batch=64)
OTHER_RUNS = {
    "examples is 7, here 5": dict(data=QUESTIONS[:5]),
    "loss_fn is grpo_loss, here gspo_loss": dict(loss_fn=gspo_loss),
    "initial weights is .*, here": dict(model=tiny_model(seed=1)),
}
for setting, value in OTHER_SETTINGS.items():
    OTHER_RUNS[f"{setting} is .*, here {value}$"] = {setting: value}


@pytest.mark.parametrize("says", OTHER_RUNS)
def test_another_run_is_refused_with_the_difference_named(says, folders):
    left = folders["plain"][1]
    before = result(left)
    with pytest.raises(ValueError, match=f"there .*{says}"):
        go(left, resume=True, **RUNS["plain"] | OTHER_RUNS[says])
    assert result(left) == before


def test_what_changes_only_time_and_memory_may_change(folders, tmp_path):
    settings = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert settings == set(OTHER_SETTINGS) | set(MAY_CHANGE)  # a new one belongs into one of them
    shutil.copytree(folders["plain"][1], tmp_path / "run")
    rest = go(tmp_path / "run", resume=True, **RUNS["plain"] | MAY_CHANGE)
    assert [metrics["step"] for metrics in rest] == [3, 4, 5]


def test_a_run_is_not_overwritten(folders):
    left = folders["plain"][1]
    before = result(left)
    with pytest.raises(ValueError, match="resume"):
        go(left, **RUNS["plain"])
    assert result(left) == before


def test_a_log_alone_is_a_run_too(tmp_path):
    go(tmp_path, stop=1)
    with pytest.raises(ValueError, match="resume"):
        go(tmp_path)


def test_resume_without_a_folder_is_refused_before_anything_is_trained():
    model = tiny_model()
    with pytest.raises(ValueError, match="output_dir"):
        go(model=model, resume=True)
    assert torch.equal(weights_of(model), weights_of(tiny_model()))


def test_resume_without_a_checkpoint_starts_anew(folders, tmp_path):
    go(tmp_path, stop=1, **RUNS["plain"])  # there is a log, and nothing is saved yet
    assert len(go(tmp_path, resume=True, **RUNS["plain"])) == 5
    assert result(tmp_path) == result(folders["plain"][0])


def test_a_finished_run_returns_what_it_had_logged(folders):
    whole = folders["plain"][0]
    model = tiny_model()
    config = tiny_config(**RUNS["plain"])
    history = train(model, TOKENIZER, QUESTIONS, noisy_reward, config, whole, resume=True)
    assert [untimed(metrics) for metrics in history] == result(whole)[1]
    assert len(history) == 5
    trained = tiny_model()
    go(model=trained, steps=5)
    assert torch.equal(weights_of(model), weights_of(trained))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux tells")
def test_a_resumed_run_does_not_hold_on_to_the_file_that_it_came_from(folders, tmp_path):
    """Mapped into memory, the old checkpoint would keep its room on the disk once replaced."""
    shutil.copytree(folders["plain"][1], tmp_path / "run")
    maps = []
    go(tmp_path / "run", resume=True, **RUNS["plain"],
       between=lambda _: maps.append(Path("/proc/self/maps").read_text()))
    assert len(maps) == 3 and str(tmp_path) not in "".join(maps)


def test_a_checkpoint_holds_numbers_and_text_and_nothing_else(folders):
    checkpoint = result(folders["dynamic sampling in bfloat16"][0])[0]
    length = int.from_bytes(checkpoint[:8], "little")
    header = json.loads(checkpoint[8 : 8 + length])
    for text in header.pop("__metadata__").values():
        json.loads(text)
    numbers = 0
    for entry in header.values():
        assert entry["dtype"] == "F32"  # the masters, although the model computes in bfloat16
        numbers += math.prod(entry["shape"])
    assert 8 + length + 4 * numbers == len(checkpoint)


@pytest.mark.parametrize("name", ["grpo.py", "gsm8k_demo.py"])
def test_nothing_in_the_sources_runs_what_a_stranger_wrote(name):
    source = (Path(grpo.__file__).parent / name).read_text(encoding="utf-8")
    runs_code = (r"(?<![.\w])(?:eval|exec|compile|__import__)\(|torch\.load|os\.system|"
                 r"import (?:pickle|marshal|shelve|subprocess)|trust_remote_code=True")
    assert re.findall(runs_code, source) == []


# ------------------------------------------------------------------------------------------------
# 3. Ctrl-C in another thread
# ------------------------------------------------------------------------------------------------

def test_in_another_thread_no_handler_is_touched(own_handler):
    """Only the main thread may set one; a run elsewhere has to do without, and say nothing."""
    histories = []
    handlers = []

    def work():
        histories.append(go(between=lambda _: handlers.append(signal.getsignal(signal.SIGINT))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert histories == [go()]
    assert set(handlers) == {own_handler}


# ------------------------------------------------------------------------------------------------
# 4. Too little memory: half as much at once, and the same result
#
# A hook plays the small card: at one place, more than four rows at once are too much for it. There
# are 12 rows of answers to 3 questions, and 4 of up to 15 tokens each fit into a budget of 64.
# ------------------------------------------------------------------------------------------------

HALVES = ["128 tokens", "64 tokens"]
PLACES = {  # where memory runs out; the halves that are tried; how the same run is had in peace
    "sampling": (["2 prompts", "1 prompts"], dict()),
    "reference": (HALVES, dict(tokens_per_micro_batch=64)),
    "pi_old": (HALVES, dict(tokens_per_micro_batch=64, beta=0, num_iterations=2)),
    "forward": (HALVES, dict(tokens_per_micro_batch=64, beta=0)),
    "backward": (HALVES, dict(tokens_per_micro_batch=64, beta=0)),
    "backward, in bfloat16": (HALVES, dict(tokens_per_micro_batch=64, beta=0, bf16=True)),
}


def ending_model(logit, **settings):
    """The end tokens' logits are raised by `logit`: 100 for empty answers, -100 for none to end."""
    model = tiny_model(**settings)
    bias = torch.zeros(VOCABULARY)
    bias[[END, EOS]] = logit
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model


def small_card(place):
    """A model that runs out of memory at `place`, and a reward that tells it how far a step is."""
    model = ending_model(-100.0)
    now = {"scoring": False, "rows": 0}

    def reward(prompts, completions, **columns):
        now["scoring"] = True  # sampling is over
        return noisy_reward(prompts, completions)

    def before_forward(trunk, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        now["rows"] = len(ids)
        here = "sampling"
        if now["scoring"]:
            here = "pi_old"
        if not trunk.embed_tokens.weight.requires_grad:
            here = "reference"
        if torch.is_grad_enabled():
            here = "forward"
            now["scoring"] = False  # sampling comes next
        if here == place and now["rows"] > 4:
            no_memory()

    def with_the_last_gradient(parameter):
        if place.startswith("backward") and now["rows"] > 4:
            no_memory()

    trunk = model.get_decoder()
    trunk.register_forward_pre_hook(before_forward, with_kwargs=True)
    trunk.embed_tokens.weight.register_post_accumulate_grad_hook(with_the_last_gradient)
    return model, reward


@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_does_the_same_in_smaller_parts(place, capsys):
    halves, in_peace = PLACES[place]
    run = dict(prompts_per_step=3, max_completion_length=12, steps=2) | in_peace
    model = ending_model(-100.0)
    wanted = go(model=model, **run)
    small, reward = small_card(place)
    capsys.readouterr()
    found = go(model=small, reward=reward, **run | dict(tokens_per_micro_batch=256))
    said = re.findall("from here on (.*) at once", capsys.readouterr().out)
    assert said == halves  # once each, not in every step: it is remembered
    for ours, theirs in zip(found, wanted):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert torch.equal(weights_of(small), weights_of(model))


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.Embedding, "forward", fail)
    with pytest.raises(RuntimeError, match="^the device is lost$"):
        go()
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------
# 5. Numbers that are not finite: an update is skipped, two are forgiven, the third ends the run
# ------------------------------------------------------------------------------------------------

NOT_FINITE = {
    "the loss is nan": lambda loss: loss * NAN,
    "the loss is inf": lambda loss: loss + INF,
    "the gradient is not": lambda loss: loss + (loss - loss.detach()).sqrt(),  # the root at 0
}


def loss_that_fails(name, updates):
    """grpo_loss, but not in these updates. One call is one update where all rows fit at once."""
    calls = []

    def loss_fn(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        calls.append(1)
        if len(calls) in updates:
            loss = NOT_FINITE[name](loss)
        return loss, metrics
    return loss_fn


@pytest.mark.parametrize("name", NOT_FINITE)
def test_two_failures_in_a_row_are_forgiven(name, capsys):
    model = ending_model(-100.0)
    weights = [weights_of(model)]
    history = go(model=model, loss_fn=loss_that_fails(name, {2, 3, 5, 6}),
                 between=lambda _: weights.append(weights_of(model)))
    for metrics in history:
        step = metrics["step"]
        stands_still = torch.equal(weights[step], weights[step - 1])
        assert stands_still == bool(metrics["skipped_updates"]) == (step in (2, 3, 5, 6))
        assert all(math.isfinite(value) for value in metrics.values())
    said = capsys.readouterr().out
    assert re.findall("update skipped, (.) in a row", said) == ["1", "2", "1", "2"]


@pytest.mark.parametrize("name", NOT_FINITE)
def test_the_third_failure_in_a_row_ends_the_run(name, tmp_path):
    model = ending_model(-100.0)
    run = dict(folder=tmp_path, save_steps=2)
    with pytest.raises(FloatingPointError):
        go(model=model, loss_fn=loss_that_fails(name, {3, 4, 5}), **run)
    before = ending_model(-100.0)
    go(model=before, stop=2)
    assert torch.equal(weights_of(model), weights_of(before))
    # Mended, it goes on from the last checkpoint.
    rest = go(model=ending_model(-100.0), loss_fn=loss_that_fails(name, set()), resume=True, **run)
    assert [metrics["step"] for metrics in rest] == [5, 6]
    assert [metrics["skipped_updates"] for metrics in rest] == [0, 0]


def test_the_question_that_broke_an_update_is_named(tmp_path, capsys):
    model = ending_model(0.0)
    word = TOKENIZER("x")["input_ids"][0]
    model.get_decoder().embed_tokens.weight.data[word] = NAN
    model.lm_head.bias.data[word] = -100.0  # no answer to another question has an x in it
    before = weights_of(model)
    data = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "x"}, {"prompt": "d"}]
    for order, questions in enumerate([data, data[::-1]]):  # in one at least, x is not the first
        run = dict(folder=tmp_path / str(order), data=questions, prompts_per_step=4, steps=1)
        go(model=model, **run)
        assert "the loss is nan, because of an answer to 'x'" in capsys.readouterr().out
        assert result(run["folder"])[1][0]["skipped_updates"] == 1
        torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0, equal_nan=True)
        go(model=model, resume=True, **run)  # Adam has nothing to remember yet, and that is fine
    with pytest.raises(FloatingPointError):
        go(model=model, data=[{"prompt": "x"}])


# ------------------------------------------------------------------------------------------------
# 6. The reward's contract, both ways
# ------------------------------------------------------------------------------------------------

BAD_REWARDS = {  # what it returns for n answers; what is said of it, for n = 8
    "raises": (lambda n: {}["answr"], "raised KeyError: 'answr'"),
    "nothing": (lambda n: None, "returned None, wanted a list of 8 numbers"),
    "one number": (lambda n: 1.0, "returned 1.0, wanted a list of 8 numbers"),
    "too few": (lambda n: [0.5] * (n - 1), "returned [0.5, 0.5"),
    "too many": (lambda n: [0.5] * (n + 1), "returned [0.5, 0.5"),
    "a string": (lambda n: "1" * n, "returned '11111111', wanted a list of 8 numbers"),
    "a tensor": (lambda n: torch.zeros(n), "returned tensor([0., 0., "),
    "an array": (lambda n: np.zeros(n), "returned array([0., 0., "),
    "a generator": (lambda n: (0.5 for _ in range(n)), "returned <generator"),
    "a dict": (lambda n: dict.fromkeys(range(n), 0.5), "returned {0: 0.5, "),
}
BAD_VALUES = [None, NAN, INF, -INF, "1.0", 1j, torch.tensor(1.0), [1.0], np.float32("nan"), 1e300,
              10**400]
for value in BAD_VALUES:
    BAD_REWARDS[f"{value!r:.20}"] = (lambda n, value=value: [0.5] * (n - 1) + [value],
                                     f"returned {value!r} at place 7, wanted a finite number")


@pytest.mark.parametrize("name", BAD_REWARDS)
def test_a_broken_reward_is_named_with_place_and_value(name):
    gives, says = BAD_REWARDS[name]

    def my_own_reward(prompts, completions, **columns):
        return gives(len(completions))

    with pytest.raises(ValueError, match=re.escape(f"reward function my_own_reward {says}")):
        go(reward=my_own_reward)


@pytest.mark.parametrize("kind", [list, tuple])
def test_rewards_of_every_numeric_type_are_taken(kind):
    given = kind([True, False, 3, -2.5, np.float32(0.5), np.float64(0.25), np.int64(7), 0])
    metrics = go(reward=lambda **columns: given, steps=1)[0]
    assert metrics["reward_mean"] == 9.25 / 8
    assert metrics["reward_std"] == pytest.approx(np.std(np.array(given, dtype=float)))


@pytest.mark.parametrize("chats", [False, True])
def test_a_reward_function_is_called_as_trl_calls_one(chats):
    data = []
    for level, question in enumerate(QUESTIONS[:3]):
        prompt = question["prompt"]
        if chats:
            prompt = [{"role": "user", "content": prompt}]
        data.append({"prompt": prompt, "level": level})
    received = []

    def reward(**given):
        received.append(given)
        return list(range(12))

    go(reward=reward, model=ending_model(3.0), data=data, steps=1, prompts_per_step=3)
    given = received[0]
    assert set(given) == {"prompts", "completions", "completion_ids", "level"}
    # Each row of the data set G times, one after the other, in every column.
    assert sorted(given["level"][::4]) == [0, 1, 2]
    assert given["level"] == np.repeat(given["level"][::4], 4).tolist()
    assert given["prompts"] == [data[level]["prompt"] for level in given["level"]]
    # The ids with the end token, if it came before the cap of 5, and the texts without.
    texts = []
    ends = []
    for ids in given["completion_ids"]:
        words = [token for token in ids if token not in (END, EOS)]
        assert words == ids[:-1] or words == ids and len(ids) == 5
        texts.append(TOKENIZER.decode(words, skip_special_tokens=True))
        ends.append(ids[-1])
    if chats:
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    assert given["completions"] == texts
    assert {END, EOS} & set(ends)


def test_trls_own_reward_functions_run_here():
    """TRL's penalty for long answers against the one of grpo.py: runs with them are the same."""
    rewards = pytest.importorskip("trl.rewards", reason="TRL 1.16 is not installed")

    def ours(completion_ids, **columns):
        lengths = torch.tensor([len(ids) for ids in completion_ids], dtype=torch.float64)
        return overlong_penalty(lengths, 5, 3).tolist()

    wanted = go(reward=ours)
    assert min(metrics["reward_mean"] for metrics in wanted) < 0
    assert go(reward=rewards.get_soft_overlong_punishment(5, 3)) == wanted


# ------------------------------------------------------------------------------------------------
# 7. Data sets, seeds
# ------------------------------------------------------------------------------------------------

LETTERS = "a " * 59  # with five tokens for the answer, the context of 64 is full
BAD_DATA = {
    "empty": ([], "data set is empty"),
    "no prompt": ([{"answer": "c"}] * 2, r"2 of 2 examples lack a prompt.*\[0, 1\]"),
    "an empty prompt": ([{"prompt": "a"}, {"prompt": ""}], r"1 of 2 .*lack a prompt.*\[1\]"),
    "None": ([{"prompt": "a"}, {"prompt": None}], r"1 of 2 .*lack a prompt.*\[1\]"),
    "an empty chat": ([{"prompt": []}, {"prompt": "a"}], r"1 of 2 .*lack a prompt.*\[0\]"),
    "a column too few": ([{"prompt": "a", "n": 1}, {"prompt": "b"}], r"other columns.*\[1\]"),
    "a column too many": ([{"prompt": "a"}, {"prompt": "b", "n": 1}], r"other columns.*\[1\]"),
    "blanks": ([{"prompt": "  "}], "prompt 0 has no tokens"),
    "too long": (
        [{"prompt": "a"}] * 1000 + [{"prompt": LETTERS}, {"prompt": LETTERS + "b"}] * 2,
        r"2 of 1004 prompts are above 59 tokens.*context is 64.*\[1001, 1003\]"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_a_data_set_that_cannot_be_used_is_refused_before_the_first_step(name, tmp_path):
    data, says = BAD_DATA[name]
    with pytest.raises(ValueError, match=says):
        go(tmp_path / "new", data=data)
    assert not os.path.exists(tmp_path / "new")


def test_the_context_may_just_be_full_and_may_stand_in_a_nested_config():
    model = tiny_model()
    assert len(go(model=model, data=[{"prompt": LETTERS}], steps=1)) == 1
    # As in models that see pictures, too.
    model.config.text_config = AutoConfig.for_model("qwen2", max_position_embeddings=63)
    with pytest.raises(ValueError, match="1 of 1 prompts are above 58 tokens.*context is 63"):
        go(model=model, data=[{"prompt": LETTERS}], steps=1)


def test_a_dataset_of_the_library_does_as_well_as_a_list():
    datasets = pytest.importorskip("datasets")
    assert go(data=datasets.Dataset.from_list(QUESTIONS), steps=2) == go(steps=2)


def asked(folder=None, prompts_per_step=2, **settings):
    """The questions of a run, in their order."""
    found = []

    def reward(prompts, completions, **columns):
        found.extend(prompts[::2])
        return [0.0] * len(prompts)

    go(folder, reward, prompts_per_step=prompts_per_step, num_generations=2, beta=0,
       max_completion_length=1, save_steps=1, **settings)
    return found


def test_every_question_once_an_epoch_in_an_order_that_is_the_seeds(tmp_path):
    everything = sorted(question["prompt"] for question in QUESTIONS)
    order = asked(prompts_per_step=7, steps=3)
    epochs = [order[:7], order[7:14], order[14:]]
    for epoch in epochs:
        assert sorted(epoch) == everything
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert asked(steps=10) == order[:20]
    assert asked(prompts_per_step=9, steps=2) == order[:18]  # more than there are
    assert asked(prompts_per_step=7, steps=1, seed=4) != epochs[0]
    for stop in range(1, 6):  # and a run that is resumed goes on where it was
        first = asked(tmp_path / str(stop), stop=stop)
        assert first + asked(tmp_path / str(stop), resume=True) == order[:12]


def test_the_seed_decides_everything():
    torch.manual_seed(1)
    first = go(steps=2)
    torch.manual_seed(2)
    assert go(steps=2) == first
    assert go(steps=2, seed=4) != first


def test_every_step_of_every_seed_draws_afresh():
    """One question, and a model that stands still."""
    drawn = set()

    def reward(prompts, completions, **columns):
        drawn.add(tuple(completions))
        return noisy_reward(prompts, completions)

    for seed in (0, 1):
        go(reward=reward, data=QUESTIONS[:1], steps=3, seed=seed, learning_rate=0.0)
    assert len(drawn) == 6


def test_what_the_caller_does_between_the_steps_changes_nothing():
    """Neither numbers that are drawn, nor a model that is left in train mode, with dropout."""
    dropout = dict(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    model = tiny_model("gpt2", **dropout)

    def evaluate(metrics):
        sample_groups(model, TOKENIZER, ["a", "b c"], 3, max_completion_length=4)
        noisy_reward([], ["a", "b"])
        model.train()

    wanted = go(model=tiny_model("gpt2", **dropout), num_iterations=2)
    assert go(model=model, between=evaluate, num_iterations=2) == wanted


# ------------------------------------------------------------------------------------------------
# 8. Steps at the edge
# ------------------------------------------------------------------------------------------------


def flat_reward(prompts, completions, **columns):
    return [0.1] * len(completions)


EDGES = {  # the run, and what its metrics are
    "all groups flat": (
        dict(reward=flat_reward, beta=0, num_iterations=2),
        dict(loss=0, grad_norm=0, reward_std=0, zero_variance_fraction=1, sampler_gap=0)),
    "all groups flat, and the model at its reference": (
        dict(reward=flat_reward, num_iterations=2),
        dict(loss=0, grad_norm=0, reward_std=0, zero_variance_fraction=1, kl=0)),
    "all cut, and left out of the loss": (
        dict(model=-100.0, mask_truncated_completions=True),
        dict(loss=0, grad_norm=0, truncated_fraction=1, completion_length=5, kl=0)),
    "all cut": (dict(model=-100.0), dict(completion_length=5, truncated_fraction=1)),
    "all empty": (dict(model=100.0), dict(completion_length=1, truncated_fraction=0)),
    "all of one token": (dict(model=-100.0, max_completion_length=1),
                         dict(completion_length=1, truncated_fraction=1)),
    "logits of minus infinity": (dict(model=-INF), dict(truncated_fraction=1)),
    "the smallest sizes": (
        dict(num_generations=2, prompts_per_step=1, max_completion_length=1, data=QUESTIONS[:1]),
        dict(completion_length=1)),
}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("name", EDGES)
def test_steps_at_the_edge(name, loss_type, tmp_path):
    run, wanted = EDGES[name]
    model = ending_model(run.get("model", 0.0))
    before = weights_of(model)
    go(tmp_path, **run | dict(model=model, steps=2, loss_type=loss_type))
    for metrics in result(tmp_path)[1]:
        assert metrics["skipped_updates"] == 0
        for figure, value in wanted.items():
            assert metrics[figure] == value
    if "grad_norm" in wanted:  # no lesson, and no weight decay either
        assert torch.equal(weights_of(model), before)


@pytest.mark.parametrize("push", [-2.0, 2.0])
def test_flat_groups_are_pulled_back_to_the_reference(push):
    """A model of two tokens, with probabilities p and 1 - p, that does not look at the text.

    The gradient of k3 with respect to the first one's logit is (p - q)(1 - p)/p if that token was
    drawn, and (p - q)p/(1 - p) if the other was: both have the sign of p - q. So whatever is drawn,
    a small step leads towards the reference's q.
    """
    model = ending_model(0.0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.weight.zero_()
    a = TOKENIZER("a")["input_ids"][0]
    bias = torch.full((VOCABULARY,), -1e9)
    bias[[a, END]] = 0.0  # so q = 1/2
    model.lm_head.bias = torch.nn.Parameter(bias)
    kls = []

    def exact_kl(metrics):
        if metrics["step"] == 1:
            model.lm_head.bias.data[a] += push
        p = model.lm_head.bias.detach()[[a, END]].softmax(dim=0)
        kls.append((p * (2 * p).log()).sum().item())

    go(model=model, reward=flat_reward, between=exact_kl, steps=6, beta=1.0)
    assert len(kls) == 6
    for earlier, later in zip(kls, kls[1:]):
        assert later < earlier


# ================================================================================================
# The demo
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# Data, evaluation, models
# ------------------------------------------------------------------------------------------------

INTERVALS = {  # right, of how many -> Wilson's interval, worked elsewhere
    "half": (5, 10, [0.2366, 0.7634]),
    "none": (0, 10, [0.0, 0.2775]),
    "GSM8K's test": (660, 1319, [0.4734, 0.5273]),
    "no questions": (0, 0, [0.0, 1.0]),
}
ANSWERS = {  # text, answer -> strict, lenient
    "boxed": (r"so \boxed{1,000}", "1000", True, True),
    "a number at the end": ("so it is 1,000.", "1000", False, True),
    "dollars": ("18 dollars, that is $18.", "18", False, True),
    "negative": ("from 5 to -3", "-3", False, True),
    "the box counts": (r"the number is 7, so \boxed{8}", "7", False, False),
    "no number": ("no idea", "7", False, False),
    "nothing": ("", "7", False, False),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_wilsons_interval(name):
    right, total, interval = INTERVALS[name]
    near(gsm8k_demo.wilson(right, total), interval, 3e-4)


@pytest.mark.parametrize("name", ANSWERS)
def test_strict_and_lenient(name):
    text, answer, strict, lenient = ANSWERS[name]
    assert gsm8k_demo.is_right(text, answer) is strict
    assert gsm8k_demo.is_right(text, answer, lenient=True) is lenient


GOOD_LINE = json.dumps({"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"})
BROKEN_LINES = {  # line, what the error names
    "half a line": ('{"question": "x", "answ', "line 2"),
    "no answer": ('{"question": "x"}', "line 2"),
    "another type": ("[1]", "line 2"),
    "no mark": ('{"question": "x", "answer": "18"}', "####"),
    "no question": ('{"question": " ", "answer": "1\\n#### 1"}', "question"),
    "nothing after the mark": ('{"question": "x", "answer": "1\\n#### "}', "####"),
}


def write_gsm8k(folder, *lines):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def test_gsm8k_is_read_and_its_solutions_earn_everything(tmp_path):
    train_data, test_data = gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, *[GOOD_LINE] * 3))
    assert train_data["answer"] == ["1,018"] * 3 and len(test_data) == 3
    assert [message["role"] for message in train_data[0]["prompt"]] == ["system", "user"]
    chat = [{"role": "assistant", "content": r"18, so \boxed{1018}"}]
    assert gsm8k_demo.boxed_reward(None, [chat, "1018"], ["1,018", "1,018"]) == [1.5, 0.0]


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_of_data_is_named(name, tmp_path):
    line, said = BROKEN_LINES[name]
    with pytest.raises(ValueError, match=said):
        gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, line))


def test_models_that_cannot_be_used_are_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="--rehearsal"):
        gsm8k_demo.load_model(str(tmp_path / "nothing"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        gsm8k_demo.load_model(str(tmp_path))


def save_tiny(folder, **settings):
    tiny_model(**settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------
# From the command line
# ------------------------------------------------------------------------------------------------

FLAGS = {  # flags, what is said
    "impossible value": (["--rehearsal", "--num_generations", "1"], "num_generations"),
    "unknown flag": (["--nonsense"], "nonsense"),
    "resume what?": (["--rehearsal", "--resume"], "--output"),
    "nothing to resume": (["--rehearsal", "--resume", "--output", "no/such"], "such"),
    "no data": (["--data", "nowhere", "--model", "x"], "nowhere"),
}


def run_demo(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *map(str, flags)])
    gsm8k_demo.main()


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_flags_end_in_one_clear_line(name, monkeypatch, tmp_path):
    flags, said = FLAGS[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_demo(monkeypatch, *flags)
    assert said in str(stopped.value)
    assert not Path("no").exists()


def test_errors_that_are_not_ours_keep_their_traceback(monkeypatch, tmp_path):
    def broken(seed):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(gsm8k_demo, "rehearsal", broken)
    with pytest.raises(RuntimeError, match="device-side"):
        run_demo(monkeypatch, "--rehearsal", "--output", tmp_path / "run")


def test_random_weights_measure_a_few_steps(monkeypatch, tmp_path, capsys):
    """Answers of realistic length, and a line of seconds for each step."""
    model = save_tiny(tmp_path, initializer_range=0.02, max_position_embeddings=256)
    line = json.dumps({"question": "a b c", "answer": "d\n#### 1"})
    data = write_gsm8k(tmp_path, *[line] * 4)
    run_demo(monkeypatch, "--random_weights", "--model", model, "--data", data, "--output",
             tmp_path / "run", "--prompts_per_step", 4, "--num_generations", 16,
             "--max_completion_length", 50)
    history = grpo.read_metrics(tmp_path / "run")
    assert len(history) == 5
    lengths = [metrics["completion_length"] for metrics in history]
    assert 15 < sum(lengths) / 5 < 26  # both end tokens count, and one of them is raised
    printed = capsys.readouterr().out
    for words in ("sampling", "scoring", "update", "tokens a second", "GB", "Nothing was learned"):
        assert words in printed
    assert not (tmp_path / "run" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------
# The rehearsal: one pre-trained model serves all of these
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base():
    before = torch.get_rng_state()
    world = gsm8k_demo.rehearsal(0)
    assert torch.equal(before, torch.get_rng_state())  # it draws from generators of its own
    return world


def test_test_problems_are_held_out(base):
    def numbers(example):  # the kind of problem and its numbers, whoever has whatever
        text = example["prompt"][-1]["content"]
        for word in (*gsm8k_demo.NAMES, *gsm8k_demo.THINGS):
            text = text.replace(word, "_")
        return text

    learned = {numbers(example) for example in base[2]}
    tested = {numbers(example) for example in base[3]}
    assert not learned & tested and len(tested) >= 256


def learn(base, reward, steps):
    """Sampled accuracy before and after, and the metrics."""
    model, tokenizer, train_data, test_data = base
    model = copy.deepcopy(model)
    few = test_data.select(range(128))
    settings = dict(gsm8k_demo.REHEARSAL)
    settings.pop("eval_questions")
    config = GRPOConfig(**(settings | {"steps": steps}))
    before = gsm8k_demo.evaluate(model, tokenizer, few, 28, sampled=True)
    history = train(model, tokenizer, train_data, reward, config)
    after = gsm8k_demo.evaluate(model, tokenizer, few, 28, sampled=True)
    return before["sampled_accuracy"], after["sampled_accuracy"], history


def rewards_of_another_question(prompts, completions, answer, **columns):
    """The same rewards, given to the wrong answers: those of the group before."""
    rewards = gsm8k_demo.boxed_reward(prompts, completions, answer)
    return rewards[-8:] + rewards[:-8]


def test_the_rehearsal_learns_from_its_rewards_and_from_nothing_else(base):
    before, after, history = learn(base, gsm8k_demo.boxed_reward, steps=20)
    assert before < 0.35 and after > 0.8, (before, after)
    assert history[-1]["reward_mean"] > history[0]["reward_mean"] + 0.4
    # At each first update pi_theta is pi_old: the loss is the KL's alone, and the clip sleeps.
    assert history[0]["loss"] == pytest.approx(0, abs=1e-6)
    for metrics in history:
        assert metrics["clip_fraction"] == 0 and metrics["sampler_gap"] < 1e-5
    _, after, _ = learn(base, rewards_of_another_question, steps=20)
    assert after < 0.6, after


def test_evaluation_leaves_the_random_stream_alone_and_halves_its_batch(base, monkeypatch):
    model, tokenizer, _, test_data = base
    some = list(test_data.select(range(8)))
    state = torch.get_rng_state()
    whole = gsm8k_demo.evaluate(model, tokenizer, some, 28, sampled=True)
    assert torch.equal(state, torch.get_rng_state())
    assert whole["questions"] == 8

    def small_memory(*args, whole_rand=torch.rand, **kwargs):
        if len(args) == 2 and args[0] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole_rand(*args, **kwargs)

    monkeypatch.setattr(torch, "rand", small_memory)
    assert gsm8k_demo.evaluate(model, tokenizer, some, 28, sampled=True) == whole


def test_the_demo_from_flags_to_files(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: (copy.deepcopy(base[0]), *base[1:]))
    flags = ["--rehearsal", "--steps", 4, "--prompts_per_step", 4, "--eval_questions", 16,
             "--eval_every", 2, "--show_steps", 2, "--save_steps", 2]
    run_demo(monkeypatch, *flags, "--output", tmp_path / "whole")
    printed = capsys.readouterr().out
    for words in ("before:", "after:", "arithmetic", "to go:", "chosen on these questions"):
        assert words in printed
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert whole["before"]["questions"] == whole["after"]["questions"] == 16
    assert len(whole["after"]["interval"]) == 2 and whole["seconds"] > 0
    assert json.loads((tmp_path / "whole" / "settings.json").read_text())["steps"] == 4
    samples = (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in samples} == {0, 1, 2, 4}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert again.generation_config.eos_token_id == [2, 0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert tokenizer.chat_template == base[1].chat_template
    # The same, with an evaluation that fails between the steps, and a resume.
    evaluate = gsm8k_demo.evaluate
    calls = []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("in the evaluation of step 2")
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(gsm8k_demo, "evaluate", fails_once)
    with pytest.raises(RuntimeError, match="step 2"):
        run_demo(monkeypatch, *flags, "--output", tmp_path / "cut")
    run_demo(monkeypatch, *flags, "--output", tmp_path / "cut", "--resume")
    cut = json.loads((tmp_path / "cut" / "results.json").read_text())
    for name in ("before", "step 2", "after", "best"):
        assert cut[name] == whole[name]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_any_text_prints_under_any_code_page(encoding):
    program = """
import runpy, sys
sys.argv = ["gsm8k_demo.py", "--nonsense"]
try:
    runpy.run_path("gsm8k_demo.py", run_name="__main__")
except SystemExit:
    print(chr(0x2588), chr(0x4E2D))  # as a curve, or a model, may
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(grpo.__file__).parent, capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and done.stdout.strip() == b"? ?", done.stderr
