# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py. They run offline, on the CPU: python -m pytest -q

First the apples, then numbers and losses of documents on GRPO, then grpo.py, demo and README."""

import copy
import importlib
import inspect
import json
import math
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from pytest import approx, raises
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import inf, nan, ones, tensor, zeros
from torch.testing import assert_close
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig,
                          PreTrainedTokenizerFast)

import grpo
import gsm8k_demo
from grpo import (Completion, GRPOConfig, average, clipped_surrogate, compute_logprobs,
                  extract_boxed, group_advantages, grpo_loss, k3_kl, masked_mean, rule_reward,
                  sample_groups, selective_log_softmax, train)

parametrize = pytest.mark.parametrize
torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up

def gradient(function, x):
    """The gradient of function(x), which must be one number, with respect to x."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]

def slow_loss(logprobs, old_logprobs, ref_logprobs, advantages, *, epsilon=0.2, epsilon_high=None,
              beta=0.04, loss_type="grpo", max_completion_length=None, relative=None):
    """-J, one token at a time. Each of the first four is a list with an entry per completion: the
    log-probs of its tokens (without padding), or its advantage. `relative` is a name in section 11
    of grpo.py, "GSPO" or "TRL's KL"."""
    high = epsilon if epsilon_high is None else epsilon_high
    sums, lengths = [], []
    for pi, old, ref, A in zip(logprobs, old_logprobs, ref_logprobs, advantages):
        total = 0.0
        for t in range(len(pi)):
            ratio = (pi[t] - old[t]).exp()
            if relative == "GSPO":  # the geometric mean of the completion's ratios
                ratio = math.prod((p - o).exp() for p, o in zip(pi, old)) ** (1 / len(pi))
            clipped = min(max(ratio, 1 - epsilon), 1 + high)
            kl = (ref[t] - pi[t]).exp() - (ref[t] - pi[t]) - 1
            if relative == "TRL's KL":
                kl = ratio * kl
            total = total + min(ratio * A, clipped * A) - beta * kl
        sums.append(total)
        lengths.append(len(pi))
    if loss_type == "grpo":
        return -sum(s / max(1, length) for s, length in zip(sums, lengths)) / len(sums)
    return -sum(sums) / (sum(lengths) if loss_type == "dapo" else len(sums) * max_completion_length)

# ==== The apples ===========================================================================
# The case that runs through grpo.py. Completions 2 and 3 have one token; NaN is their padding.
TEXTS = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
LOGPROBS = tensor([[0.3, 0.2], [0.1, nan], [0.3, nan], [0.1, 0.2]]).log()
OLD = torch.full((4, 2), 0.2).log()  # the log-probs of pi_old, and of pi_ref as well
REST = OLD, OLD, tensor([1.0, 1.0, -1.0, -1.0]), ~LOGPROBS.isnan()  # with advantages and mask

def apples_loss(logprobs, loss_type="grpo"):
    return grpo_loss(logprobs, *REST, loss_type=loss_type, max_completion_length=4)[0]

APPLES = {  # what, the call, and its result
    "rewards": (lambda: [rule_reward(text, "5") for text in TEXTS], [1.5, 1.5, 0.5, 0.5]),
    "advantages": (lambda: group_advantages(tensor([1.5, 1.5, 0.5, 0.5])), [1.0, 1.0, -1.0, -1.0]),
    "grpo loss": (lambda: apples_loss(LOGPROBS), 0.205685),
    "dapo loss": (lambda: apples_loss(LOGPROBS, "dapo"), 0.105053),
    "dr_grpo loss": (lambda: apples_loss(LOGPROBS, "dr_grpo"), 0.039395),
    "gradient": (lambda: gradient(apples_loss, LOGPROBS),  # 0 at padding
                 [[0.04 / 3 / 8, -1 / 8], [(-0.5 - 0.04) / 4, 0],
                  [(1.5 + 0.04 / 3) / 4, 0], [-0.04 / 8, 1 / 8]]),
    # Six tokens; k3 sums to 0.757970, and the clip has stopped two of them.
    "metrics": (lambda: list(grpo_loss(LOGPROBS, *REST)[1].values()), [0.205685, 0.126328, 1 / 3]),
    "first loss": (lambda: apples_loss(OLD), 0.0),  # while pi_theta is still pi_old
    "first gradient": (lambda: gradient(apples_loss, OLD),  # -A / |o_i| / N, not 0
                       [[-1 / 8, -1 / 8], [-1 / 4, 0], [1 / 4, 0], [1 / 8, 1 / 8]]),
    # The example of section 3: the KL is 0.005, and k3 is near it at each token.
    "k3 of +0.1 and -0.1": (lambda: k3_kl(zeros(2), tensor([0.1, -0.1])), [0.005171, 0.004837])}

def test_clip_table():
    """The table of section 2, with A = +1 and with A = -1: ratios above the limit and below the
    limit, 1, and a ratio between the limits (Hands-on, 9.3.2: 0.8 and 1.2; Book, 11.1.3)."""
    def surrogate(log_ratio):
        return clipped_surrogate(log_ratio.exp(), tensor([1.0, -1.0]))
    log_ratio = tensor([[1.5, 0.5, 1.0, 1.1], [1.5, 0.5, 1.0, 0.9]]).log()
    assert_close(surrogate(log_ratio), tensor([[1.2, 0.5, 1.0, 1.1], [-1.5, -0.8, -1.0, -0.9]]))
    slopes = gradient(lambda log_ratio: surrogate(log_ratio).sum(), log_ratio)
    assert_close(slopes, tensor([[0.0, 0.5, 1.0, 1.1], [-1.5, 0.0, -1.0, -0.9]]))

@parametrize("x, expected, slope", [  # x is log(pi_ref/pi_theta); first the table of section 3
    (math.log(2), 0.306853, -1.0), (0.0, 0.0, 0.0), (math.log(2 / 3), 0.072132, 1 / 3),
    (1e-4, 5e-9, -1e-4),  # x^2/2 and -x. In float32, e^x - 1 - x would be off by 1e-8
    (60.0, math.exp(50) - 51, 0.0),
    (-60.0, 59.0, 1.0)])  # Explained, Clipping KL Differences, cuts here, too: no gradient is left
def test_k3_and_its_gradient(x, expected, slope):
    """Scratch, The Full GRPO Objective: 0.307 and 0. Explained, (12): 0 only where x is 0. They are
    precise near 0, and finite far away. The slope is the gradient with respect to log pi."""
    def k3(logprobs):
        return k3_kl(logprobs, tensor(x))
    assert k3(tensor(0.0)).item() == approx(expected, rel=1e-3, abs=1e-12)
    assert gradient(k3, tensor(0.0)).item() == approx(slope, rel=1e-3, abs=1e-12)

def test_running_grpo_prints_the_apples(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"d\{5} +1.5 +1.0 +0.5 +0.5 +0.3069 +-0.1350\n.*loss 0.2057", printed, re.S)

# ==== Five documents about GRPO ============================================================
#   Scratch    "Group-Relative Policy Optimization (GRPO) — From Scratch", an article
#   Book       "Reinforcement Learning from Human Feedback" by Nathan Lambert, chapter 11
#   Explained  "GRPO Objective Function Explained", a tutorial
#   Hands-on   "9.3 Hands-on: GRPO Training and Core Mechanisms", a section of a course
#   RLinf      "组相对策略优化 (GRPO)", of RLinf's documentation. It prints no results
# Where a document prints a wrong number, here is the right one, and a comment says what it prints.
FOUR = tensor([1.5, 1.0, 0.0, 0.0])  # Hands-on, 9.3, at the start
FIVE = tensor([2.0, 3.5, 1.0, 4.0, 2.5])  # Scratch, The Key Insight
EIGHT = tensor([1.5, 0.0, 1.5, 0.0, 1.0, 1.5, 0.5, 1.5])  # Hands-on, 9.3.3, Choosing k
# Book, 11.2.2: the losses of two answers, of 5 and 10 tokens. (At padding, the book has nothing.)
LOSSES = tensor([[1.0, 1, 1, 1, 10, 7, 7, 7, 7, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1, 10]])
MASK = torch.arange(10) < tensor([[5], [10]])
# Its script: ratios of two answers, of 4 and 7 tokens, which are also the mask. Advantages are 2.
RATIOS = tensor([[1.0, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])

def clip(ratio, A, epsilon=0.2):
    return clipped_surrogate(tensor([[ratio]]), tensor([A]), epsilon)[0, 0]

PRINTED = {  # where, the call, and the number
    "Scratch, The Key Insight: squares": (lambda: group_advantages(FIVE, "none").square(),
                                          [0.36, 0.81, 2.56, 1.96, 0.01]),
    "Scratch: mean": (lambda: FIVE - group_advantages(FIVE, "none"), [2.6] * 5),
    "Scratch: std": (lambda: (FIVE - 2.6)[0] / group_advantages(FIVE)[0], 1.067708),
    "Scratch: advantages": (lambda: group_advantages(FIVE),
                            [-0.561951, 0.842927, -1.498537, 1.311220, -0.093659]),
    "Scratch, Quick Recap: no clip, the clipped ratio, the min": (
        lambda: [clip(1.3, 2.0, epsilon=99), clip(1.3, 1.0), clip(1.3, 2.0)], [2.6, 1.2, 2.4]),
    "Book, 11.2.2: seq_1_loss, seq_2_loss": (lambda: masked_mean(LOSSES, MASK, dim=1), [2.8, 1.9]),
    "Book, 11.2.2: equal sequences": (lambda: average(LOSSES, MASK), 2.35),
    "Book, 11.2.2: equal tokens": (lambda: average(LOSSES, MASK, "dapo"), 2.2),  # printed: 2.27
    "Book, 11.2.2: masked_mean": (lambda: masked_mean(2 * RATIOS, RATIOS, dim=1), [2.0, 2.0]),
    "Book, 11.2.2: masked_sum": (lambda: [average(2 * one, one, "dr_grpo", 7)
                                          for one in (RATIOS[:1], RATIOS[1:])], [1.142857, 2.0]),
    "Book, 11.2.2: masked_mean_token_level": (lambda: masked_mean(RATIOS, RATIOS), 1.0),
    # The rule pays nothing without a box. Printed for these four: 1.5, 1.0, 0, 0
    "Hands-on, 9.3: scores": (lambda: [rule_reward(answer, "5") for answer in (
        "3 + 2 = 5, so the answer is 5.", "The answer is 5.", "It should be 6.",
        "I am not sure, perhaps it is 4.")], [0.0] * 4),
    "Hands-on, 9.3: differences": (lambda: group_advantages(FOUR, "none"),
                                   [0.875, 0.375, -0.625, -0.625]),
    "Hands-on, 9.3.1: good, bad, before training, after training": (lambda: [
        rule_reward("First compute the eggs left each day: 16 - 3 - 4 = 9.\nThere are 7 days in a "
                    "week, so she can sell: 9 * 7 = 63.\n\\boxed{63}", "63"),
        rule_reward("I think she can sell about 50 eggs. \\boxed{50}", "63"),
        rule_reward("I think there are 7 left. \\boxed{7}", "7"),
        rule_reward("Let me calculate step by step:\n- John starts with 15 apples.\n- He gives 3 "
                    "to Mary: 15 - 3 = 12.\n- He gives 5 more to Kevin: 12 - 5 = 7.\n- Therefore 7 "
                    "apples are left.\n\\boxed{7}", "7")], [1.5, 0.5, 1.5, 1.5]),
    # 7 is right, and earns 1.5. Printed: -1.2, 0.1, 0.8, 0.1, 1.5 (for the 15), 0.1, -0.3, 0.6
    "Hands-on, 9.3.3: 3 7 12 7 15 7 8 10": (
        lambda: group_advantages(tensor([0.5, 1.5, 0.5, 1.5, 0.5, 1.5, 0.5, 0.5])),
        [-0.774597, 1.290994] * 3 + [-0.774597] * 2),
    # printed: 0, 0, 0, -0.5, 0, 0, 0, 0
    "Hands-on, 9.3.3: 7 7 7 8 7 7 7 7": (
        lambda: group_advantages(tensor([1.5] * 3 + [0.5] + [1.5] * 4)),
        [0.377964] * 3 + [-2.645751] + [0.377964] * 4),
    # printed: mean 0.875, std 0.637, and 0.82, -1.23, 0.82, -1.23, 0.12, 0.82, -0.53, 0.82
    "Hands-on, 9.3.3: mean": (lambda: EIGHT - group_advantages(EIGHT, "none"), [0.9375] * 8),
    "Hands-on, 9.3.3: std": (lambda: (group_advantages(EIGHT, "none") / group_advantages(EIGHT))[0],
                             0.634306),
    "Hands-on, 9.3.3: advantages": (lambda: group_advantages(EIGHT), [
        0.886796, -1.477994, 0.886796, -1.477994, 0.098533, 0.886796, -0.689730, 0.886796])}
FORMULAS = {  # their formulas, with numbers of ours
    # Book, 11.1.4: times G / (G - 1), Dr. GRPO's advantage is the reward less the others' mean
    "Book, 11.1.4: RLOO": (lambda: 4 / 3 * group_advantages(FOUR, "none"),
                           [1.5 - 1.0 / 3, 1.0 - 1.5 / 3, -2.5 / 3, -2.5 / 3]),
    # Explained, Combining Terms. (Book, 11.2.4, prints minus beta * KL: leaving pi_ref would pay.)
    "Book, 11.2.3.1: first update": (lambda: grpo_loss(
        zeros(1, 1), zeros(1, 1), tensor([[2.0]]).log(), ones(1), ones(1, 1))[0],
        -1 + 0.04 * 0.306853),
    "Book, 11.2.4: clip_frac of the ratios 1.1 and 1.3": (lambda: grpo_loss(
        tensor([[1.1, 1.3]]).log(), zeros(1, 2), None, tensor([9.0]), ones(1, 2),
        beta=0)[1]["clip_fraction"], 0.5),
    # 0.8 * log(0.8 / 0.5) + 0.2 * log(0.2 / 0.5), where pi_theta draws 0.8 and 0.2
    "Explained, (6): k3 on average": (lambda: tensor([0.8, 0.2]) @ k3_kl(
        tensor([0.8, 0.2]).log(), tensor([0.5, 0.5]).log()), 0.192745)}

@parametrize("name", [*APPLES, *PRINTED, *FORMULAS])
def test_numbers_of_the_apples_and_of_the_documents(name):
    call, expected = {**APPLES, **PRINTED, **FORMULAS}[name]
    assert_close(torch.as_tensor(call()), tensor(expected), atol=2e-6, rtol=0)

@parametrize("loss_type, advantage, short, long", [
    ("grpo", 2, 0.25, 0.1429), ("dr_grpo", 2, 0.1429, 0.1429),
    ("dapo", 1, 0.0909, 0.0909)])  # without advantages. Printed: 0.2338, as if 1/7 had been left
def test_gradients_of_the_ratios(loss_type, advantage, short, long):
    """Book, 11.2.2. With the "grpo" mean, a token of the short answer counts more."""
    found = gradient(lambda ratios: average(advantage * ratios, RATIOS, loss_type, 7), RATIOS)
    assert_close(found, tensor([[short] * 4 + [0] * 3, [long] * 7]), atol=5e-5, rtol=0)

# ---- Their loss functions: what computes, with 0.2 and 0.04 put in. (Lines of the documents.) ----
def scratch(log_probs, old_log_probs, ref_log_probs, advantages, mask):  # lines 286 to 305
    ratio, adv = torch.exp(log_probs - old_log_probs), advantages.unsqueeze(1)
    policy_loss = torch.min(ratio * adv, torch.clamp(ratio, 1 - 0.2, 1 + 0.2) * adv)
    kl_ratio = torch.exp(ref_log_probs - log_probs)
    per_token_loss = policy_loss - 0.04 * (kl_ratio - torch.log(kl_ratio) - 1.0)
    return -((per_token_loss * mask).sum(dim=1) / mask.sum(dim=1)).mean()

def book(new_logps, per_token_logps, ref_logps, advantages, completion_mask):  # lines 318 to 331
    per_token_kl = torch.exp(ref_logps - new_logps) - (ref_logps - new_logps) - 1  # not in the book
    ratio, advantages = torch.exp(new_logps - per_token_logps), advantages.unsqueeze(1)
    pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - 0.2, 1.0 + 0.2)
    per_token_loss = torch.max(-advantages * ratio, pg_losses2) + 0.04 * per_token_kl
    return ((per_token_loss * completion_mask).sum(dim=1) / completion_mask.sum(dim=1)).mean()

def explained(per_token_logps, gen_logps, ref_logps, advantages, mask):  # lines 184 to 207
    diff = torch.clamp(ref_logps - per_token_logps, min=-50.0, max=50.0)
    ratio, advantages = torch.exp(per_token_logps - gen_logps), advantages.unsqueeze(1)
    clipped_ratio = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    per_token_loss = torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_loss = -(per_token_loss - 0.04 * (torch.exp(diff) - diff - 1))
    return ((per_token_loss * mask).sum(dim=1) / (mask.sum(dim=1) + 1e-8)).mean()

def hands_on(new_logprobs, old_logprobs, ref_logprobs, advantages, mask):  # its lines 99 to 108
    ratio = torch.exp(new_logprobs - old_logprobs)[:, 0]  # one log-prob for each whole answer
    surr2 = torch.clamp(ratio, 1.0 - 0.2, 1.0 + 0.2) * advantages
    log_ratio_ref = ref_logprobs - new_logprobs
    approx_kl = (torch.exp(log_ratio_ref) - log_ratio_ref - 1.0).mean()
    return -torch.min(ratio * advantages, surr2).mean() + 0.04 * approx_kl

@parametrize("theirs, longest", [(scratch, 9), (book, 9), (explained, 9), (hands_on, 1)])
def test_the_documents_losses_and_gradients_are_ours(theirs, longest):
    """On fifty random completions of up to `longest` tokens."""
    torch.manual_seed(0)
    logprobs, old, ref = torch.randn(3, 50, longest, dtype=torch.float64) / 3 - 2
    mask = torch.arange(longest) < torch.randint(1, longest + 1, (50, 1))
    rest = old, ref, torch.randn(50, dtype=torch.float64), mask
    def ours(logprobs):
        return grpo_loss(logprobs, *rest)[0]
    assert_close(ours(logprobs), theirs(logprobs, *rest))
    assert_close(gradient(ours, logprobs), gradient(lambda x: theirs(x, *rest), logprobs))

# ==== Section by section ==========================================================================
# ---- 1 to 4. Advantages, ratio and clip, the masked mean -----------------------------------------
def test_advantages_are_of_each_group_by_itself():
    """And rewards may be whole numbers."""
    rewards = tensor([[0, 0, 1, 1], [5 * 10**9, 5 * 10**9, 9 * 10**9, 9 * 10**9], [3, 3, 3, 3]])
    assert group_advantages(rewards).tolist() == [[-1, -1, 1, 1], [-1, -1, 1, 1], [0, 0, 0, 0]]

@parametrize("scale_rewards", ["group", "none"])
@parametrize("rewards, signs", [
    ([1.5] * 8, [0] * 8), ([0.0] * 8, [0] * 8),  # Hands-on: all right (9.3.3, late), all wrong
    ([-0.7] * 7, [0] * 7), ([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]), ([1e6, 1e6 + 1], [-1, 1]),
    # The std of two rewards is half of their difference, and 2e-7 of the largest is the limit.
    ([1, 1 + 3.9e-7], [0, 0]), ([1, 1 + 4.1e-7], [-1, 1]), ([0, 1e-9], [-1, 1])])
def test_rewards_that_are_equal_but_for_rounding_give_exactly_0(rewards, signs, scale_rewards):
    advantages = group_advantages(tensor(rewards, dtype=torch.float64), scale_rewards)
    assert advantages.isfinite().all() and advantages.sign().tolist() == signs

def test_a_group_of_one_and_an_unknown_scale_are_refused():
    with raises(ValueError, match="two or more"):  # RLinf, 4: always at least two answers
        group_advantages(ones(3, 1))
    with raises(ValueError, match="'std', not 'group'"):
        group_advantages(ones(3, 2), "std")

@parametrize("b", [0.0, 7.0, -2.0])
def test_the_gradient_on_average_is_that_of_the_expected_reward(b):
    """As section 2 derives it: with ratios that are not 1, and with any baseline b."""
    pi_old, logits = tensor([0.1, 0.2, 0.4, 0.3]), tensor([1.0, 0.5, 0.0, -0.5])
    rewards = tensor([0.0, 2.0, 1.0, 5.0])  # of the four tokens
    drawn = tensor([0, 1, 1, 2, 2, 2, 2, 3, 3, 3])  # ten tokens, as often as pi_old draws them
    def loss(logits):  # of ten completions of one token
        logprobs, old_logprobs = logits.log_softmax(dim=0)[drawn, None], pi_old.log()[drawn, None]
        return grpo_loss(logprobs, old_logprobs, None, rewards[drawn] - b, ones(10, 1), beta=0,
                         epsilon=99)[0]  # so large that nothing is clipped
    def expected_reward(logits):
        return (logits.softmax(dim=0) * rewards).sum()
    assert_close(gradient(loss, logits), -gradient(expected_reward, logits))

def test_masked_mean_takes_what_is_set_and_nothing_else():
    values = tensor([[1.0, 3.0, nan], [inf, nan, 7.0], [8.0, nan, -inf]])
    mask = tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert masked_mean(values, mask) == 4
    assert masked_mean(values, mask, dim=1).tolist() == [2, 0, 8]  # 0, where none is set
    assert_close(gradient(lambda values: masked_mean(values, mask), values), mask.float() / 3)
    assert masked_mean(values, ones(3, 3)).isnan()  # a NaN at a real position shows

# ---- 5. The loss ---------------------------------------------------------------------------------
MAX_LENGTH = 7  # for dr_grpo
def loss_inputs():
    """Six completions of up to five tokens, one of them empty, for .ci/trl_figures.py, too."""
    noise = (torch.arange(120.0, dtype=torch.float64) ** 2).sin().view(4, 6, 5)
    mask = torch.arange(5) < tensor([[5], [1], [0], [3], [4], [2]])
    return dict(logprobs=0.4 * noise[0] - 2, old_logprobs=0.4 * noise[1] - 2,
                ref_logprobs=0.4 * noise[2] - 2, advantages=noise[3, :, 0], mask=mask)

def both(loss, padding=0.0, relative=None, **settings):
    """`loss` and the slow loss, as functions of the log-probs. The slow one never sees padding."""
    *three, advantages, mask = loss_inputs().values()
    logprobs, old, ref = (x.masked_fill(~mask, padding) for x in three)
    def ours(logprobs):
        return loss(logprobs, old, ref, advantages, mask, **settings)[0]
    def slow(logprobs):
        lists = [[row[real] for row, real in zip(x, mask)] for x in (logprobs, old, ref)]
        return slow_loss(*lists, advantages, relative=relative, **settings)
    return logprobs, ours, slow

@parametrize("padding", [1.0, nan, inf])
@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@parametrize("settings", [dict(), dict(beta=0), dict(epsilon_high=0.28),
                          dict(epsilon=0.1, epsilon_high=0, beta=1)], ids=str)
def test_loss_and_gradient_are_the_slow_ones(settings, loss_type, padding):
    logprobs, ours, slow = both(grpo_loss, padding, loss_type=loss_type,
                                max_completion_length=MAX_LENGTH, **settings)
    assert_close(ours(logprobs), slow(logprobs))
    assert_close(gradient(ours, logprobs), gradient(slow, logprobs))

def test_pi_old_and_pi_ref_get_no_gradient():
    inputs = loss_inputs()
    inputs["old_logprobs"].requires_grad_()
    inputs["ref_logprobs"].requires_grad_()
    assert not grpo_loss(**inputs)[0].requires_grad

@parametrize("said, wrong", [  # log-probs and mask should be (6, 5), and advantages (6,)
    (r"\(5,\)", dict(logprobs=zeros(5))), (r"\(1, 5\)", dict(old_logprobs=zeros(1, 5))),
    (r"\(6, 1\)", dict(ref_logprobs=zeros(6, 1))), (r"\(6, 1\)", dict(mask=zeros(6, 1))),
    (r"\(5,\)", dict(advantages=zeros(5))), ("ref_logprobs are needed", dict(ref_logprobs=None)),
    ("'mean'", dict(loss_type="mean")), ("'dr_grpo'", dict(loss_type="dr_grpo"))])
def test_wrong_arguments_of_the_loss_are_refused(said, wrong):
    with raises(ValueError, match=said):
        grpo_loss(**{**loss_inputs(), **wrong})

def test_grpo_loss_runs_where_it_is_pasted():
    """With the four functions that it calls, in a file that has only `import torch`."""
    pasted = {"torch": torch}
    for function in (clipped_surrogate, k3_kl, masked_mean, average, grpo_loss):
        exec(inspect.getsource(function), pasted)
    assert pasted["grpo_loss"](**loss_inputs())[0] == grpo_loss(**loss_inputs())[0]

# ==== A tiny world, for all that needs a model ====================================================
# Three tokens end a completion: one in the model's generation_config, one in its config, and one in
# the tokenizer, which is also its padding. All others are letters and digits.
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"

PROMPTS = [{"prompt": "abcdefg"}, {"prompt": "h"}, {"prompt": "ijk"}]

def tiny_tokenizer():
    """Its chat template turns a user's "b" into "u", "b", 36, and opens the answer with "a"."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<36>", "<37>", "<38>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = ("{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<36>{% endfor %}"
                "{% if add_generation_prompt %}a{% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, eos_token="<38>", pad_token="<38>",
        additional_special_tokens=["<36>", "<37>"])

def tiny_model(family="qwen2", seed=0, end_logit=1.0, **settings):
    """A random model with large weights. No completion ends if `end_logit` is -100."""
    torch.manual_seed(seed)
    shapes = dict(vocab_size=39, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  head_dim=8, num_attention_heads=4, num_key_value_heads=2, eos_token_id=37,
                  max_position_embeddings=64, bos_token_id=None, pad_token_id=None,
                  tie_word_embeddings=False, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shapes | settings))
    model.lm_head.bias = torch.nn.Parameter(end_logit * (torch.arange(39) > 35), False)
    model.generation_config.eos_token_id = [36]
    return model

def slow_logprobs(model, completion, temperature=1.0):
    """log pi of each token. The model reads one completion, without cache and padding."""
    ids = tensor([completion.prompt_ids + completion.ids])
    logits = model(ids, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(dim=-1)[range(len(completion.ids)), completion.ids]

def run_small(model, reward=None, data=PROMPTS, after_step=None, output_dir=None, resume=False,
              **settings):
    """`train` with four completions of three prompts. Returns the metrics without the seconds."""
    def random_rewards(completions, **columns):
        return random.choices([0, 1, 2], k=len(completions))
    small = dict(steps=2, prompts_per_step=3, num_generations=4, max_completion_length=6,
                 learning_rate=0.01, warmup_steps=0)
    history = train(model, tiny_tokenizer(), data, reward or random_rewards,
                    GRPOConfig(**small | settings), after_step, output_dir, resume)
    return [{x: metrics[x] for x in metrics if "seconds" not in x} for metrics in history]

def weights_of(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])

def steps_of(model, **settings):
    """A small run. Returns the metrics, the groups, and the weights after each step."""
    steps = []
    run_small(model, after_step=lambda *step: steps.append([*step, weights_of(model)]), **settings)
    return steps

def watch(model):
    """A list that gets kind, rows and logits of each forward pass (also of pi_ref, a deep copy)."""
    passes = []
    def note(module, arguments, inputs, output):
        kind = "update" if torch.is_grad_enabled() else "sample" if inputs["use_cache"] else "score"
        passes.append((kind, len(output.logits), output.logits.detach()))
    model.register_forward_hook(note, with_kwargs=True)
    return passes

# ---- 6. The loop ---------------------------------------------------------------------------------
@parametrize("settings", [
    dict(), dict(beta=0), dict(beta=0.5, loss_type="dapo"), dict(loss_type="dr_grpo"),
    dict(num_iterations=2, epsilon=0.01), dict(num_iterations=2, epsilon=0.01, epsilon_high=0.5),
    dict(scale_rewards="none"), dict(max_grad_norm=1e9)], ids=str)
def test_two_steps_are_the_slow_steps(settings):
    """The model comes in bfloat16, with dropout. In step 2, pi_ref is that from before step 1."""
    model, slow, reference = (tiny_model("gpt2").bfloat16() for _ in range(3))
    slow, reference, start = slow.float().eval(), reference.float().eval(), weights_of(slow)
    config = GRPOConfig(max_completion_length=6, **settings)
    of_loss = {name: getattr(config, name) for name in (
        "epsilon", "epsilon_high", "beta", "loss_type", "max_completion_length")}
    optimizer = torch.optim.AdamW(slow.parameters(), weight_decay=0.0)
    steps = steps_of(model, learning_rate=0.003, temperature=0.8, **settings)
    for metrics, groups, weights in steps:
        rewards = tensor([[c.reward for c in group] for group in groups])
        advantages = rewards - rewards.mean(dim=1, keepdim=True)
        if config.scale_rewards == "group":
            advantages /= rewards.std(dim=1, correction=0, keepdim=True).clamp(min=1e-9)
        old, ref = ([slow_logprobs(policy, c, 0.8).detach() for c in sum(groups, [])]
                    for policy in (slow, reference))
        optimizer.param_groups[0]["lr"], found = metrics["learning_rate"], []
        for _ in range(config.num_iterations):
            logprobs = [slow_logprobs(slow, c, 0.8) for c in sum(groups, [])]
            loss = slow_loss(logprobs, old, ref, advantages.flatten(), **of_loss)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), config.max_grad_norm)
            found.append([loss.item(), norm.item()])
            optimizer.step()
            optimizer.zero_grad()
        means = approx(tensor(found).mean(dim=0).tolist(), rel=1e-3, abs=1e-4)
        assert [metrics["loss"], metrics["grad_norm"]] == means
        still = weights_of(slow) == start  # end tokens' embeddings: only a decay would move them
        assert still.any() and weights[still].equal(start[still])
        assert (weights - weights_of(slow)).norm() < 0.02 * (weights_of(slow) - start).norm()

@parametrize("beta", [0.0, 0.5])
@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_split_into_micro_batches_changes_nothing(loss_type, beta):
    """Neither the metrics nor, as step 2 shows, the weights."""
    whole, split = (run_small(tiny_model("llama"), learning_rate=0.001, loss_type=loss_type,
                              beta=beta, micro_batch_size=size, num_iterations=2, epsilon=0.01)
                    for size in (12, 1))
    assert split == [approx(metrics, rel=1e-3, abs=1e-5) for metrics in whole]

@parametrize("settings, expected", [  # the first score is pi_ref's, the second pi_old's
    (dict(num_iterations=2), "sample 3, sample 12, score 12, score 12, update 12, update 12"),
    (dict(beta=0), "sample 3, sample 12, update 4"),  # four advantages are not 0
    (dict(micro_batch_size=7), "sample 3, sample 12, score 7, score 5, update 7, update 5"),
    (dict(sampling_batch_size=8), "sample 2, sample 8, sample 1, sample 4, score 12, update 12"),
    (dict(sampling_batch_size=1, beta=0), 3 * "sample 1, sample 4, " + "update 4")], ids=str)
def test_the_forward_passes_of_a_step(settings, expected):
    """Sampling reads the prompts, then one token of each. Only what teaches is computed."""
    passes = watch(model := tiny_model(end_logit=-100.0))
    run_small(model, lambda **columns: [1, 1, 1, 1] + 2 * [0, 1, 2, 1], **dict(
        steps=1, max_completion_length=2, micro_batch_size=12) | settings)
    assert ", ".join(f"{kind} {rows}" for kind, rows, _ in passes) == expected

def test_a_gradient_that_is_not_finite_moves_nothing_and_is_said(capsys):
    """It is NaN in the second of three steps."""
    model, factors = tiny_model(), iter([1, nan, 1])
    model.lm_head.weight.register_hook(lambda slope: slope * next(factors))
    steps = steps_of(model, steps=3, micro_batch_size=12, beta=0)
    first, second, third = [weights for *_, weights in steps]
    assert first.equal(second) and not second.equal(third) and steps[1][0]["grad_norm"] == 0
    assert "step 2: no update" in capsys.readouterr().out

def test_each_step_of_each_seed_draws_its_own_examples_and_tokens():
    """A step has two groups of three completions, of five tokens each. The data is a Dataset."""
    data = Dataset.from_list([{"prompt": "a", "number": i} for i in range(99)])
    examples, tokens = set(), set()
    for seed in (0, 1):
        for _, groups, _ in steps_of(tiny_model(end_logit=-100.0), seed=seed, prompts_per_step=2,
                                     num_generations=3, max_completion_length=5, data=data,
                                     learning_rate=0):
            assert [[len(c.ids) for c in group] for group in groups] == [[5, 5, 5], [5, 5, 5]]
            examples.add(tuple(group[0].example["number"] for group in groups))
            tokens.update(tuple(c.ids) for c in sum(groups, []))
    assert len(examples) == 4 and len(tokens) == 24

@parametrize("steps, rates", [(1, [0.06, 0.045, 0.03, 0.015]), (2, [0.03, 0.06, 0.04, 0.02])])
def test_the_rate_rises_and_falls(steps, rates):
    history = run_small(tiny_model(), learning_rate=0.06, warmup_steps=steps, steps=4)
    assert [metrics["learning_rate"] for metrics in history] == approx(rates)

def test_six_metrics_of_a_step_by_hand():
    """Logits are doubled in sampling, as at temperature 0.5, so there is a sampler_gap."""
    def double(module, arguments, inputs, output):
        output.logits.mul_(2 if inputs["use_cache"] else 1)
    model = tiny_model()
    model.register_forward_hook(double, with_kwargs=True)
    [(metrics, groups, _)] = steps_of(model, steps=1, reward=lambda **columns: 4 * [1] + 4 * [0, 1])
    completions = sum(groups, [])
    drawn, trained = (torch.cat([slow_logprobs(tiny_model(), c, temperature) for c in completions])
                      for temperature in (0.5, 1))
    gap, cut = (drawn - trained).abs().mean(), [c for c in completions if c.ids[-1] < 36]
    assert [metrics[name] for name in (
        "reward_mean", "entropy", "completion_length", "truncated_fraction", "sampler_gap",
        "zero_variance_fraction")
    ] == approx([sum(c.reward for c in completions) / 12, -drawn.mean().item(), len(drawn) / 12,
                 len(cut) / 12, gap.item(), 1 / 3], rel=1e-4)
    assert all(0 < metrics[f"{part}_seconds"] < 60 for part in ("sample", "reward", "update"))

# ---- 7 and 9. Sampling, and log-probs ------------------------------------------------------------
def test_a_completion_ends_with_its_first_end_token_or_is_cut_off():
    chat = {"prompt": [{"role": "user", "content": "b"}]}  # becomes u b 36 a, by the template
    completions = sum(sample_groups(tiny_model(), tiny_tokenizer(), [*PROMPTS, chat], 400, 8), [])
    assert completions[-1].prompt_ids == [20, 1, 36, 0]
    for c in completions:
        assert max(c.ids[:-1], default=0) < 36 and c.truncated == (c.ids[-1] < 36)
        assert len(c.ids) == 8 or not c.truncated
        assert c.text.split() == [LETTERS[i] for i in c.ids if i < 36]
    # All of this happens: completions of 8 tokens end with each of the three, or are cut off.
    assert {c.ids[-1] for c in completions if len(c.ids) == 8} > {36, 37, 38}

def test_tokens_are_drawn_from_the_softmax_and_nothing_else():
    """Without top_k, top_p and penalty, which come with a checkpoint, and `generate` obeys."""
    model = tiny_model()
    vars(model.generation_config).update(top_k=5, top_p=0.8, repetition_penalty=2.0)
    [(_, [group], _)] = steps_of(
        model, steps=1, prompts_per_step=1, num_generations=20_000, max_completion_length=1,
        data=[{"prompt": "a"}], reward=lambda **columns: 20_000 * [1], beta=0, temperature=0.7)
    counts = tensor([c.ids[0] for c in group]).bincount(minlength=39)
    wanted = 20_000 * (model(tensor([[0]])).logits[0, -1] / 0.7).softmax(dim=-1)
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()  # four standard deviations

@parametrize("family, settings", [
    ("llama", {}), ("gpt2", {}), ("bloom", {}), ("phi3", {}), ("mistral", dict(sliding_window=3)),
    ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    ("gemma2", dict(final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=3)),
    ("lfm2", dict(layer_types=["conv", "full_attention"])),  # a convolution, which has a state
    ("jamba", dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4,
                   use_mamba_kernels=False))])  # a recurrent layer, and one with attention
def test_sampling_and_training_compute_what_the_slow_way_computes(family, settings):
    """Texts are longer than windows. Models come in train mode, in which GPT-2 has dropout."""
    model = tiny_model(family, **settings)
    completions = sum(sample_groups(model, tiny_tokenizer(), PROMPTS, 4, 8), [])
    padded, mask = compute_logprobs(model, completions)
    slow = torch.cat([slow_logprobs(model, c) for c in completions])
    for found in (tensor(sum([c.sampler_logprobs for c in completions], [])), padded[mask]):
        assert_close(found, slow, atol=3e-5, rtol=0)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # it has given NaN gradients on a GPU

def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    """In bfloat16, the softmax of the same logits would be off by some hundredths."""
    logits = torch.linspace(-3, 3, 39).bfloat16()
    assert_close(selective_log_softmax(logits, tensor(5)), logits.float().log_softmax(dim=0)[5])

def test_a_model_without_cache_or_end_token_is_refused():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    for family in ("openai-gpt", "mamba"):
        with raises(ValueError, match="no attention cache|only contain LinearAttention"):
            sample_groups(tiny_model(family), tokenizer, PROMPTS, 1, 5)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    with raises(ValueError, match="eos_token_id"):
        sample_groups(model, tokenizer, PROMPTS, 1, 5)

# ---- 8. The reward -------------------------------------------------------------------------------
@parametrize("answer, right, wrong", [  # boxes that hold the answer, and boxes that do not
    ("63", ["63", " 63.0 ", "$63", "63.", "+63", "063"], ["36", "--63", "63 apples", "60+3"]),
    ("1000", ["1,000", "1{,}000", "1000\\%"], ["1e3", "1_000", "1,00", "1 000", "1$000", ","]),
    ("-1234567.5", ["-1,234,567.5.", "$- 1234567.5"], ["-1234,567.5", "1234567.5"]),
    ("$5.00", ["\\$5", "5. \\%", "5.009"], ["5.01", "4.99"]), ("8", [], ["8,000"]),
    (" x ", ["x"], ["1"]), (".5", [".5"], ["0.5"]), ("3", [], ["nan", "\u0663"]), (63, ["63"], []),
    (None, [], ["63"]), ("", [], ["63"]), ("\\frac{1}2", ["\\frac{1}2"], []),
    # In quadratic time, these texts would take many minutes.
    ("7", [], ["1" + 300_000 * piece + "x" for piece in ("\\boxed", "{}", "9", ",000", "$", " ")]),
    (2**53 - 1, ["9007199254740991.0"], ["9007199254740990"]), (3000000, [], ["3,000,000.01"]),
    (2**53, ["9007199254740992"], ["9007199254740992.0", "9007199254740993"])])
def test_which_box_holds_which_answer(answer, right, wrong):
    for box in right + wrong:
        expected = 1.5 if box in right else 0.5
        assert rule_reward("So it is \\boxed{" + box + "}.", answer) == expected, box

@parametrize("text, box, reward", [
    ("\\boxed{50}? No: \\boxed{63}", "63", 1.5), ("\\boxed{63}? No: \\boxed{50}", "50", 0.5),
    ("\\boxed{63}. So \\boxed{6", None, 0), ("\\boxed 63", None, 0),
    ("\\boxed{}", "", 0), ("\\boxed{ }", "", 0), ("\\boxed{a{b}c} d}", "a{b}c", 0.5),
    ("\\boxed{{63}", None, 0)])
def test_only_the_last_box_counts_and_it_must_be_complete(text, box, reward):
    assert (extract_boxed(text), rule_reward(text, "63")) == (box, reward)

CHAT = [{"role": "user", "content": "b"}]
def two_completions():
    """Of a string and of a chat. The data has a column "numbers"."""
    return [Completion({"prompt": "a", "numbers": [1]}, prompt_ids=[0], ids=[7], text="x"),
            Completion({"prompt": [dict(*CHAT)], "numbers": [2]}, [0], ids=[8], text="y")]

@parametrize("returned", [[0.1, 0], tensor([1.0, 0.0]), tensor([1.0, 0.0]).numpy(), (True, False)])
def test_a_reward_function_is_called_as_trl_calls_one(returned):
    """It may return its numbers in a list, a tensor, an array, or as True and False."""
    reward, completions = Mock(return_value=returned), two_completions()
    assert grpo.grade(reward, completions).tolist() == [*returned]
    assert [completion.reward for completion in completions] == [*returned]
    reward.assert_called_once_with(prompts=["a", CHAT], numbers=[[1], [2]], completions=[
        "x", [{"role": "assistant", "content": "y"}]], completion_ids=[[7], [8]])

@parametrize("said, rewards", [
    ("1 rewards for 2", [1]), ("3 rewards for 2", [1, 1, 1]), ("'x' is nan", [nan, 1]),
    ("'y' is inf", [1, inf]), ("'y' is None", [1, None])])
def test_rewards_other_than_n_finite_numbers_are_refused(said, rewards):
    with raises(ValueError, match=said):
        grpo.grade(Mock(return_value=rewards), two_completions())

def test_a_reward_function_gets_copies():
    """What it changes is neither learned nor in the data."""
    def meddle(prompts, completion_ids, numbers, **columns):
        for column in (prompts[1][0], prompts[1], completion_ids[0], numbers[0]):
            column.clear()
        return [0, 0]
    grpo.grade(meddle, completions := two_completions())
    assert completions == two_completions()

# ---- 10. Settings, precision, files --------------------------------------------------------------
@parametrize("name, value", [
    ("num_generations", 1), ("steps", 2.0), ("seed", None), ("temperature", 0), ("beta", -0.1),
    ("learning_rate", nan), ("learning_rate", "1e-6"), ("epsilon", inf), ("epsilon_high", -0.1),
    ("max_grad_norm", 0), ("loss_type", "mean"), ("scale_rewards", None), ("warmup_steps", -1)])
def test_a_setting_that_cannot_be_is_refused(name, value):
    with raises(ValueError, match=f"{name} is {value!r}"):
        GRPOConfig(**{name: value})

@parametrize("bf16", [True, False, None])  # None: where the GPU can
def test_every_forward_pass_has_the_same_precision(bf16):
    """And the second update sees the weights that the first has moved, not autocast's copies."""
    passes = watch(model := tiny_model())
    run_small(model, steps=1, num_iterations=2, micro_batch_size=12, bf16=bf16)
    assert {x.dtype for _, _, x in passes} == {torch.bfloat16 if bf16 else torch.float32}
    first, second = [logits for kind, _, logits in passes if kind == "update"]
    assert (first - second).abs().max() > 0.1

def test_checkpoints_come_every_save_steps(tmp_path):
    """The files may hold NumPy's numbers, in the settings and, by after_step, in the metrics."""
    def look(metrics, groups):
        metrics["mine"] = rate
        found.append(len(torch.load(path, weights_only=True)["history"]) if path.exists() else 0)
    found, rate, path = [], ones(1).numpy()[0] / 64, tmp_path / "new/run/checkpoint.pt"
    run = dict(output_dir=str(path.parent), save_steps=2, learning_rate=rate, beta=0)
    run_small(tiny_model(), after_step=look, steps=5, **run)
    run.update(steps=6, resume=True, micro_batch_size=5, save_steps=3)
    run_small(tiny_model(), after_step=look, **run)
    assert found == [0, 0, 2, 2, 4, 5]  # after_step comes before the files
    logged = path.with_name("metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["mine"] for line in logged] == 6 * [1 / 64]
    assert torch.load(path)["reference"] is None  # at beta=0, there is no pi_ref

@parametrize("said, settings", [
    ("holds a run: resume it", dict()), ("another run: seed is 0 there", dict(resume=True, seed=4)),
    ("output_dir", dict(resume=True, output_dir=None)), (r"\['text'\]", dict(data=[{"text": ""}])),
    ("prompts_per_step is 1", dict(data=[])), *((name, dict(data=[{"prompt": "a", name: 1}]))
                                                for name in ("prompts", "completion_ids")),
    ("'' has no tokens", dict(data=[{"prompt": ""}], output_dir=None))], ids=str)
def test_what_cannot_be_trained_is_refused(said, settings, tmp_path):
    run = dict(output_dir=tmp_path, steps=1, prompts_per_step=1, beta=0)
    run_small(tiny_model(), **run)  # from now on, the folder holds a run
    with raises(ValueError, match=said):
        run_small(tiny_model(), **run | settings)

@parametrize("settings", [dict(), dict(num_iterations=2, loss_type="dr_grpo", seed=5000),
    dict(beta=0, num_iterations=2, loss_type="dapo", bf16=True)], ids=str)
@parametrize("when, step, module, function, error", [
    ("between two steps", 3, grpo, "set_seed", SystemExit),
    ("in the reward", 3, random, "choices", ValueError),
    ("metrics.jsonl is written", 3, Path, "write_text", SystemExit),
    ("a checkpoint is written", 4, torch, "save", SystemExit),
    ("the disk is full", 4, torch, "save", OSError),
    ("a checkpoint is renamed", 4, Path, "replace", SystemExit)])
def test_a_run_that_failed_ends_as_if_nothing_had_happened(
        when, step, module, function, error, settings, tmp_path, monkeypatch):
    """To the bit, by the same call, with any model. `function` fails after the update of `step`."""
    def fail(*arguments, **more):
        for path in arguments[:2]:
            if isinstance(path, Path) and path.name != "checkpoint.pt":  # only ever renamed to
                path.write_bytes(b"half of what should be there")
        raise error  # SystemExit is as if the process were killed
    def break_it(metrics, groups):
        if metrics["step"] == step:
            patch.setattr(module, function, fail)
    run, calm, model = dict(steps=5, save_steps=2) | settings, tiny_model(), tiny_model(seed=1)
    model.lm_head.weight.grad = ones(39, 32)  # left over by an earlier try
    with monkeypatch.context() as patch, raises(error):
        run_small(tiny_model(), after_step=break_it, output_dir=tmp_path, **run)
    assert run_small(model, output_dir=tmp_path, resume=True, **run) == run_small(calm, **run)
    assert weights_of(model).equal(weights_of(calm))

@parametrize("sampling, setting", [(True, "sampling_batch_size"), (False, "micro_batch_size")])
def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_batches(sampling, setting, tmp_path):
    def check(module, arguments, inputs):  # there is memory for 5 completions
        if len(inputs["input_ids"]) > 5 and inputs["use_cache"] == sampling:
            raise torch.OutOfMemoryError
    model, run = tiny_model(), dict(output_dir=tmp_path, resume=True, steps=3)
    run_small(model, **run | dict(steps=2))
    model.register_forward_pre_hook(check, with_kwargs=True)
    with raises(torch.OutOfMemoryError):
        run_small(model, **run, **{setting: 12})
    assert len(run_small(model, **run, **{setting: 5})) == 3

def test_every_setting_is_changed_in_a_test_that_is_named_here():
    shown = {test_two_steps_are_the_slow_steps: "beta epsilon epsilon_high loss_type "
             "num_iterations scale_rewards max_grad_norm",
             test_the_forward_passes_of_a_step: "micro_batch_size sampling_batch_size",
             test_each_step_of_each_seed_draws_its_own_examples_and_tokens:
             "seed prompts_per_step num_generations max_completion_length",
             test_the_rate_rises_and_falls: "learning_rate warmup_steps steps",
             test_tokens_are_drawn_from_the_softmax_and_nothing_else: "temperature",
             test_every_forward_pass_has_the_same_precision: "bf16",
             test_checkpoints_come_every_save_steps: "save_steps"}
    for test, names in shown.items():
        assert all(re.search(rf"\b{name}=", inspect.getsource(test)) for name in names.split())
    assert set(" ".join(shown.values()).split()) == set(vars(GRPOConfig()))

# ---- 11. The relatives ---------------------------------------------------------------------------
def with_printed_change(relative, line, new="{}"):
    """grpo.py with `new` for the line that begins so: {} is section 11's code, {old} that line."""
    if relative is None:
        return vars(grpo)
    source, module = inspect.getsource(grpo), {"__name__": "grpo"}  # dataclass looks this name up
    [text] = re.findall(rf"^# {relative}  .*?^#$", source, re.M | re.S)
    code = textwrap.dedent("".join(re.findall(r"^# {14}( .*\n)", text, re.M)))  # lines set in
    [old] = re.findall(rf"^ *{line}.*\n", source, re.M)
    exec(source.replace(old, new.format(textwrap.indent(code, "    "), old=old)), module)
    return module

PARITY = {  # TRL's settings in .ci/trl_figures.py; its loss, and sum and norm of its gradient
    "grpo, beta 0.04": (dict(), (0.2256250593892, 0.115624951016, 0.1918599797598)),
    "epsilon_high": (dict(epsilon_high=0.28, loss_type="dr_grpo"),
                     (0.1038527163405, 0.07242620397321, 0.07435582204311)),
    "corrected KL": (dict(beta=0.3, use_bias_correction_kl=True, loss_type="dapo"),
                     (0.3110928775499, 0.1974924852299, 0.2083251191769)),
    "GSPO": (dict(beta=0.3, epsilon=0.1, importance_sampling_level="sequence"),
             (0.2235127094673, -0.122518523693, 0.1737799087193))}

@parametrize("relative, line, settings, figures", [
    (None, "", dict(), PARITY["grpo, beta 0.04"][1]),
    (None, "", dict(epsilon_high=0.28, loss_type="dr_grpo"), PARITY["epsilon_high"][1]),
    ("GSPO", r"ratio = \(l", dict(beta=0.3, epsilon=0.1), PARITY["GSPO"][1]),
    ("TRL's KL", "loss = -", dict(beta=0.3, loss_type="dapo"), PARITY["corrected KL"][1])])
def test_the_loss_and_the_printed_changes_are_those_of_trl(relative, line, settings, figures):
    """Loss, and sum and norm of its gradient, are TRL 1.16's, and the gradient is the slow one."""
    logprobs, ours, slow = both(with_printed_change(relative, line)["grpo_loss"], relative=relative,
                                max_completion_length=MAX_LENGTH, **settings)
    slope = gradient(ours, logprobs)
    assert_close(slope, gradient(slow, logprobs))
    assert [ours(logprobs), slope.sum(), slope.norm()] == approx(figures, abs=1e-12)

def test_the_printed_baseline_of_rloo_is_the_mean_of_the_others():
    advantages = with_printed_change("RLOO", "centered = ", "{old}{}")["group_advantages"]
    assert_close(advantages(tensor([[4.0, 0, 2, 6]]), "none"), tensor([[4 / 3, -4, -4 / 3, 4]]))

def test_the_printed_penalty_of_dapo_falls_to_minus_1_in_the_last_64_tokens():
    penalty = with_printed_change("DAPO", "def average", "if True:\n{}{old}")["overlong_penalty"]
    assert [penalty(n * [5], 512) for n in (448, 480, 512, 600)] == [0, -0.5, -1, -1]

# ==== gsm8k_demo.py ===============================================================================
RUN = "--rehearsal --steps 3 --prompts_per_step 2 --eval_questions 8 --save_steps 2 "

def read(name):
    return json.loads(Path(name).read_text())

@pytest.fixture(scope="module")
def pretrained():
    return gsm8k_demo.rehearsal(0)

@pytest.fixture
def call_demo(pretrained, monkeypatch, tmp_path):
    """Runs the demo without a GPU, in an empty folder."""
    def call(flags):
        monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *shlex.split(flags)])
        gsm8k_demo.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: copy.deepcopy(pretrained))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return call

def test_the_figures_of_an_evaluation(monkeypatch, pretrained):
    """One of ten is right, three leniently. Wilson's interval by hand: 1.79 % to 40.42 %."""
    def answer(model, tokenizer, part, *settings):
        assert len(part) <= 4  # batch_size
        return [[Completion(row, [], text=row["prompt"])] for row in part]
    monkeypatch.setattr(gsm8k_demo, "sample_groups", answer)
    texts = [r"\boxed{7}, so \boxed{1,000}", "it is 1,000.", "5-1000", r"\boxed{7}, or 1000",
             "-1000", "1000 of 7", "none", "", r"\boxed{}", "7.1000"]
    data = [{"prompt": given, "answer": "1000"} for given in texts]
    found = gsm8k_demo.evaluate(pretrained[0], None, data, 9, batch_size=4)
    assert (found["questions"], found["accuracy"], found["lenient_accuracy"]) == (10, 0.1, 0.3)
    assert found["interval"] == approx([0.0179, 0.4042], abs=1e-4)

def test_without_a_gpu_the_rehearsal_starts_low_and_learns(call_demo):
    call_demo("--steps 9 --eval_questions 64 --output run")
    before, after = read("run/results.json").values()
    assert before["accuracy"] <= 0.2 and before["sampled_accuracy"] <= 0.4
    assert after["accuracy"] >= 0.7 and after["sampled_accuracy"] >= 0.6

def test_flags_reach_training_evaluation_and_the_settings_file(call_demo, monkeypatch):
    for name in ("train", "evaluate"):
        monkeypatch.setattr(gsm8k_demo, name, Mock(wraps=getattr(gsm8k_demo, name)))
    call_demo(RUN + "--sampling_batch_size 8 --max_completion_length 9 --bf16 true --output run")
    assert gsm8k_demo.train.call_args.args[4].max_completion_length == 9
    assert read("run/settings.json")["max_completion_length"] == 9
    for call in gsm8k_demo.evaluate.call_args_list:
        assert call.args[3] == 9 and (call.kwargs["bf16"], call.kwargs["batch_size"]) == (True, 8)

def test_the_saved_model_answers_as_in_the_evaluation(call_demo, pretrained):
    """Even if it came with sampling settings of its own. Model and data are from folders."""
    model, tokenizer = copy.deepcopy(pretrained[:2])
    model.generation_config = GenerationConfig(eos_token_id=[1, 0], repetition_penalty=3.0)
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text('{"question": "Anna has 8 eggs.", "answer": "8.\\n#### 1,008"}')
    call_demo("--model tiny --data . --steps 1 --prompts_per_step 1 --max_completion_length 9 "
              "--output run")
    model = AutoModelForCausalLM.from_pretrained("run")
    [example] = gsm8k_demo.load_gsm8k(".")[1]
    prompt = grpo.encode_prompt(AutoTokenizer.from_pretrained("run"), example["prompt"])
    written = model.generate(torch.tensor([prompt]), max_new_tokens=9)[0, len(prompt):]
    text = tokenizer.decode(written, skip_special_tokens=True)
    assert read("run/after.jsonl")["text"] == text

@parametrize("function, call", [("evaluate", 2), ("boxed_reward", 1), ("boxed_reward", 3)])
def test_after_ctrl_c_the_printed_command_leads_to_the_same(function, call, call_demo, monkeypatch):
    """It comes in the sampled evaluation before training, in step 1, and after a checkpoint."""
    call_demo(RUN + "--output undisturbed")
    works, calls = getattr(gsm8k_demo, function), iter(range(1, 99))
    def interrupted(*arguments, **more):
        if next(calls) == call:
            raise KeyboardInterrupt
        return works(*arguments, **more)
    monkeypatch.setattr(gsm8k_demo, function, interrupted)
    with raises(SystemExit) as stopped:
        call_demo(RUN)
    call_demo(str(stopped.value).split(" gsm8k_demo.py ")[1])
    assert read(*Path("runs").glob("*/results.json")) == read("undisturbed/results.json")

@parametrize("flags, said", [
    ("--resume --output no", "holds none"), ("--rehearsal --output .", "already"), ("--x", "--x"),
    ("--num_generations 1", "num_generations"), ("--eval_questions 0", "eval_questions"),
    ("--rehearsal --model x", "--model"), ("--prompts_per_step 9999", "--prompts_per_step")])
def test_what_cannot_be_is_refused_before_anything_is_written(flags, said, call_demo, capsys):
    with raises(SystemExit) as stopped:
        call_demo(flags)
    assert said in f"{capsys.readouterr().err}{stopped.value}" and not Path("runs").exists()

def test_a_run_goes_on_with_more_steps_but_not_with_other_questions(call_demo):
    call_demo(RUN + "--output run")
    with raises(SystemExit, match="eval_questions"):
        call_demo(RUN + "--output run --resume --eval_questions 4")
    Path("run/before.jsonl").unlink()
    call_demo(RUN + "--output run --resume --steps 4")
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 4
    assert not Path("run/before.jsonl").exists()  # the untrained model is not tested again

# ==== The README, and the gallery of mistakes =====================================================
@parametrize("begins, changes", [
    ('"""GRPO', {"range(11, 40)": "range(1, 3)", "range(2, 10)": "range(1, 3)", "(2, 41)": "(0, 6)",
                 "range(1, 21)": "range(1, 4)", ":100]": ":4]", "100:]": "4:]"}),
    ("from", {"Qwen/Qwen2.5-0.5B-Instruct": "tiny", '.to("cuda")': "",
              "steps=50": "steps=2, max_completion_length=8"})], ids=["sums.py", "train"])
def test_the_scripts_of_the_readme_run(begins, changes, tmp_path):
    """On a tiny model, and with smaller numbers, so that it is quick, and now and then right."""
    readme = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")
    [script] = re.findall(rf"```python\n({begins}.*?)```", readme, re.S)
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    for part in (tiny_model(), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "tiny")
    subprocess.run([sys.executable, "-c", script, "tiny"], cwd=tmp_path, check=True, env={
        **os.environ, "PYTHONPATH": str(Path(grpo.__file__).parent)})

def test_what_the_readme_names_exists():
    readme = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"(?:`|`--)([a-z]+_[a-z_]+)`", readme))
    assert names and names <= {*vars(grpo), *vars(GRPOConfig()), *run_small(tiny_model())[0]}

def test_every_mistake_of_the_gallery_can_still_be_made(monkeypatch):
    """.ci/gallery.py replaces code of grpo.py, and raises an error if it is not there any more."""
    monkeypatch.syspath_prepend(Path(grpo.__file__).parent / ".ci")
    gallery = importlib.import_module("gallery")
    codes = [changes["code"] for changes in gallery.GALLERY.values() if "code" in changes]
    assert codes and all(gallery.with_other_code(*code) for code in codes)
