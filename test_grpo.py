# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py. They run offline, on the CPU: python -m pytest -q

First come the apples of grpo.py, then the worked numbers of five documents about GRPO, then each
section of grpo.py in its order, then the demo, the gallery of mistakes and the README. Change a
line of grpo.py, and see which test says what you broke."""

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
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from pytest import approx, raises
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import inf, nan, ones, tensor, zeros
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import grpo
from grpo import (Completion, GRPOConfig, average, clipped_surrogate, compute_logprobs,
                  end_token_ids, extract_boxed, group_advantages, grpo_loss, k3_kl, kl_estimate,
                  masked_mean, overlong_penalty, pad_rows, rule_reward, sample_groups,
                  scheduled_rate, take_examples, token_logprobs, train)

parametrize = pytest.mark.parametrize
torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up


def gradient(function, x):
    """The gradient of function(x), which must be one number, with respect to x."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def one_token(pi, old, ref=None, advantage=1.0, **settings):
    """Loss and metrics of one completion of one token, which has these probabilities."""
    logprobs, old_logprobs = tensor([[pi]]).log(), tensor([[old]]).log()
    ref_logprobs = None if ref is None else tensor([[ref]]).log()
    return grpo_loss(logprobs, old_logprobs, ref_logprobs, tensor([advantage]), ones(1, 1),
                     **settings)


# ==== The apples ===========================================================================
# The case that runs through grpo.py. The second and the third completion have one token; the
# other places are padding, NaN in LOGPROBS.
APPLES = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
LOGPROBS = tensor([[0.3, 0.2], [0.1, nan], [0.3, nan], [0.1, 0.2]]).log()
OLD_LOGPROBS = torch.full((4, 2), 0.2).log()  # of pi_ref as well
ADVANTAGES = tensor([1.0, 1.0, -1.0, -1.0])
MASK = tensor([[1, 1], [1, 0], [1, 0], [1, 1]]).bool()


def apples_loss(logprobs=LOGPROBS, **settings):
    return grpo_loss(logprobs, OLD_LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, **settings)[0]


def test_rewards_of_the_apples():
    assert [rule_reward(text, "5") for text in APPLES] == [1.5, 1.5, 0.5, 0.5]


def test_advantages_of_the_apples():
    assert_close(group_advantages(tensor([1.5, 1.5, 0.5, 0.5])), ADVANTAGES)


@parametrize("advantage, ratio, expected, slope", [
    (1.0, 1.5, 1.2, 0.0), (1.0, 0.5, 0.5, 0.5), (-1.0, 1.5, -1.5, -1.5), (-1.0, 0.5, -0.8, 0.0),
    (1.0, 1.0, 1.0, 1.0)])
def test_clip_table(advantage, ratio, expected, slope):
    """The table of section 2, row by row. The slope is the gradient with respect to log pi."""
    def surrogate(log_ratio):
        return clipped_surrogate(log_ratio.exp(), tensor([advantage])).sum()
    log_ratio = tensor([[ratio]]).log()
    assert_close(surrogate(log_ratio), tensor(expected))
    assert_close(gradient(surrogate, log_ratio), tensor([[slope]]))


def test_k3_of_the_apples():
    pi, ref = tensor([[0.1, 0.2, 0.3]]), tensor([[0.2, 0.2, 0.2]])
    assert_close(k3_kl(pi.log(), ref.log()), tensor([[0.306853, 0.0, 0.072132]]))


@parametrize("loss_type, expected", [
    ("grpo", (0.8 + 0.04 * 0.568486) / 4), ("dapo", (0.6 + 0.04 * 0.757970) / 6),
    ("dr_grpo", (0.6 + 0.04 * 0.757970) / 16)])
def test_loss_of_the_apples(loss_type, expected):
    """As section 5 works it out: 0.2057, 0.1051 and 0.0394."""
    loss = apples_loss(loss_type=loss_type, max_completion_length=4)
    assert_close(loss, tensor(expected))


def test_gradient_of_the_loss_of_the_apples():
    """Surrogate and KL, divided by the completion's tokens and by 4; at padding 0."""
    expected = tensor([[0.04 / 3 / 8, -1 / 8], [-(0.5 + 0.04) / 4, 0.0],
                       [(1.5 + 0.04 / 3) / 4, 0.0], [-0.04 / 8, 1 / 8]])
    assert_close(gradient(apples_loss, LOGPROBS), expected)


def test_metrics_of_the_apples():
    _, metrics = grpo_loss(LOGPROBS, OLD_LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK)
    expected = {"loss": 0.205685, "kl": 0.757970 / 6, "clip_fraction": 2 / 6, "ratio_max": 1.5}
    assert metrics == approx(expected, abs=1e-5)


def test_loss_starts_at_0():
    assert apples_loss(OLD_LOGPROBS) == 0


def test_running_grpo_prints_the_apples(capsys):
    runpy.run_path(grpo.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert r"\boxed{5}            1.5        1.0    0.5        0.5  0.3069   -0.1350" in lines
    assert lines[-1] == "loss 0.2057"


# ==== The worked numbers of the documents ==================================================
# Every number in them that a function of grpo.py gives, with document and section:
#
#   Scratch    "Group-Relative Policy Optimization (GRPO) — From Scratch", an article
#   Book       "Reinforcement Learning from Human Feedback" by Nathan Lambert, chapter 11
#   Explained  "GRPO Objective Function Explained", a tutorial
#   Hands-on   "9.3 Hands-on: GRPO Training and Core Mechanisms", a section of a course
#   RLinf      "组相对策略优化 (GRPO)", of RLinf's documentation
#
# Where a document prints something else, the test has what follows, and a comment what is printed.
# README.md mostly says why. `where` is the place in the document, and the name of the case.

# ---- Rewards ------------------------------------------------------------------------------
GOOD = ("First compute the eggs left each day: 16 - 3 - 4 = 9.\n"
        "There are 7 days in a week, so she can sell: 9 * 7 = 63.\n\\boxed{63}")


@parametrize("where, text, answer, expected", [
    ("Hands-on, 9.3.1, good", GOOD, "63", 1.5),
    ("Hands-on, bad", r"I think she can sell about 50 eggs. \boxed{50}", "63", 0.5),
    ("Hands-on, before training", r"I think there are 7 left. \boxed{7}", "7", 1.5),
    ("Hands-on, after training", "15 - 3 = 12, and 12 - 5 = 7.\n\\boxed{7}", "7", 1.5),
    # printed for four answers without a box, here the first: 1.5, 1.0, 0.0, 0.0
    ("Hands-on, 9.3, apples", "3 + 2 = 5, so the answer is 5.", "5", 0.0)])
def test_rewards_in_the_documents(where, text, answer, expected):
    assert rule_reward(text, answer) == expected


# ---- Advantages ---------------------------------------------------------------------------
FIVE = tensor([2.0, 3.5, 1.0, 4.0, 2.5])  # Scratch, The Key Insight
EIGHT = tensor([1.5, 0.0, 1.5, 0.0, 1.0, 1.5, 0.5, 1.5])  # Hands-on, 9.3.4


@parametrize("where, rewards, expected", [
    ("Scratch, five", FIVE, [-0.561951, 0.842927, -1.498537, 1.311220, -0.093659]),
    # printed: 0.82 (for 1.5), -1.23 (0), 0.12 (1), -0.53 (0.5)
    ("Hands-on, 9.3.4", EIGHT, [0.886796, -1.477994, 0.886796, -1.477994, 0.098533, 0.886796,
                                -0.689730, 0.886796]),
    ("Book, 11.1.4, one of eight", tensor(7 * [0.0] + [1.0]), 7 * [-0.377964] + [2.645751]),
    ("Hands-on, two of three", tensor([1.0, 1, 0]), [0.707107, 0.707107, -1.414214]),
    ("Hands-on, two", tensor([1.5, 0.5]), [1.0, -1.0])])
def test_advantages_in_the_documents(where, rewards, expected):
    assert_close(group_advantages(rewards), tensor(expected))


@parametrize("change", [lambda rewards: rewards + 100, lambda rewards: 3 * rewards])
def test_a_shift_and_a_scale_of_the_rewards_change_nothing(change):
    """Scratch, The Key Insight: all rewards are higher, or on another scale."""
    assert_close(group_advantages(change(FIVE)), group_advantages(FIVE))


@parametrize("where, rewards, mean, std", [
    ("Scratch", FIVE, 2.6, 1.067708),  # its code divides by G - 1: 1.193734
    ("Hands-on, 9.3.4", EIGHT, 0.9375, 0.634306),  # printed: 0.875, 0.637
    ("Hands-on, 9.3, apples", tensor([1.5, 1, 0, 0]), 0.625, 0.649519)])
def test_mean_and_std_in_the_documents(where, rewards, mean, std):
    """The mean is what is subtracted, and the std what the difference is divided by."""
    difference = group_advantages(rewards, "none")
    assert_close(difference, rewards - mean)
    assert_close(difference / group_advantages(rewards), torch.full_like(rewards, std))


def test_rloo_is_a_reward_less_the_mean_of_the_others():
    """Book, 11.1.2.1 and 11.2.4, here with Scratch's rewards."""
    expected = FIVE - tensor([11.0, 9.5, 12.0, 9.0, 10.5]) / 4
    assert_close(group_advantages(FIVE, "rloo"), expected)


@parametrize("when, answers, if_right, if_wrong", [
    # printed: -1.2, 0.1, 0.8, 0.1, 1.5, 0.1, -0.3, 0.6. The wrong 15 has the most
    ("early", "3 7 12 7 15 7 8 10", 1.290994, -0.774597),
    ("middle", "7 7 7 8 7 7 7 7", 0.377964, -2.645751),  # printed: 0, 0, 0, -0.5, 0, 0, 0, 0
    ("late", "7 7 7 7 7 7 7 7", 0.0, nan)])
def test_advantages_of_eight_answers_during_the_training(when, answers, if_right, if_wrong):
    """Hands-on, 9.3.3: the right answer is 7."""
    rewards = tensor([rule_reward("\\boxed{" + answer + "}", "7") for answer in answers.split()])
    expected = tensor([if_right if answer == "7" else if_wrong for answer in answers.split()])
    assert_close(group_advantages(rewards), expected)


@parametrize("reward", [0.0, 1.5, 0.7, -0.7])  # by Scratch's code, seven times 0.7 get 0.93
def test_equal_rewards_have_no_advantage(reward):
    """Scratch, Practical Implementation; Hands-on, 9.3.2 and 9.3.4."""
    assert group_advantages(tensor([reward] * 7)).tolist() == [0] * 7


def test_a_group_needs_two():
    """RLinf, section 4."""
    with raises(ValueError, match="two or more"):
        group_advantages(ones(1))


# ---- Ratio and clip -----------------------------------------------------------------------
@parametrize("where, ratio, advantage, epsilon, expected", [
    ("Scratch, Quick Recap, not clipped", 1.3, 2.0, 99, 2.6),
    ("Scratch, the clipped ratio", 1.3, 1.0, 0.2, 1.2), ("Scratch, the min", 1.3, 2.0, 0.2, 2.4),
    ("Hands-on, 9.3.2, upper limit", 9.0, 1.0, 0.2, 1.2),
    ("Hands-on, lower limit", 0.1, -1.0, 0.2, -0.8)])
def test_clip_in_the_documents(where, ratio, advantage, epsilon, expected):
    surrogate = clipped_surrogate(tensor([[ratio]]), tensor([advantage]), epsilon)
    assert_close(surrogate, tensor([[expected]]))


@parametrize("where, pi, old, ratio", [
    ("Scratch, 30 % likelier", 0.26, 0.2, 1.3), ("Hands-on, 9.3.2, the same", 0.5, 0.5, 1.0),
    ("Hands-on, 20 % likelier", 0.6, 0.5, 1.2), ("Hands-on, 20 % rarer", 0.4, 0.5, 0.8)])
def test_ratios_in_the_documents(where, pi, old, ratio):
    _, metrics = one_token(pi, old, beta=0)
    assert metrics["ratio_max"] == approx(ratio)


def test_the_ratio_of_a_whole_answer_explodes():
    """Hands-on, 9.3.2, sums the log-probs of an answer, as if it were one token. Here each of its
    300 tokens is 1 % likelier than under pi_old, which is pi_ref as well."""
    old = torch.full((1, 300), -2.0, dtype=torch.float64)
    pi = old + math.log(1.01)
    _, ours = grpo_loss(pi, old, old, ones(1), ones(1, 300))
    pi, old = pi.sum(dim=1, keepdim=True), old.sum(dim=1, keepdim=True)  # (1, 1)
    _, theirs = grpo_loss(pi, old, old, ones(1), ones(1, 1))
    assert (ours["ratio_max"], ours["kl"]) == approx((1.01, 4.934e-5), rel=1e-3)
    assert (theirs["ratio_max"], theirs["kl"]) == approx((19.788, 2.0356), rel=1e-3)


# ---- KL -----------------------------------------------------------------------------------
@parametrize("where, name, ref_ratio, expected", [
    ("Scratch, The Full GRPO Objective, 1 - log 1 - 1", "low_var_kl", 1.0, 0.0),
    ("Scratch, 2 - 0.693 - 1 = 0.307", "low_var_kl", 2.0, 0.306853),
    ("Explained, exp(x) - x - 1 at x = log(1/2)", "low_var_kl", 0.5, 0.193147),
    ("RLinf, section 3", "kl", 2.0, -0.693147), ("RLinf", "abs", 2.0, 0.693147),
    ("RLinf; Book, 11.2.3, approx_kl", "mse", 2.0, 0.240227)])
def test_kl_estimates_in_the_documents(where, name, ref_ratio, expected):
    """`ref_ratio` is pi_ref/pi_theta."""
    estimate = kl_estimate(tensor([[0.0]]), tensor([[math.log(ref_ratio)]]), name)
    assert_close(estimate, tensor([[expected]]))


# Explained, Derivation: tokens are drawn from q, which is pi_theta, and p is pi_ref.
PI_REF, PI_THETA = tensor([0.1, 0.2, 0.4, 0.3]), tensor([0.4, 0.3, 0.2, 0.1])


@parametrize("name", ["low_var_kl", "kl"])
def test_k3_and_k1_are_the_kl_on_average(name):
    """Explained: E[r - 1] = 1 - 1 = 0 for r = pi_ref/pi_theta. So k1 + r - 1 has the mean of k1."""
    estimates = kl_estimate(PI_THETA.log(), PI_REF.log(), name)
    assert_close((PI_THETA * estimates).sum(), tensor(0.427667))


@parametrize("log_ref_ratio, expected, slope", [
    (60.0, math.exp(50) - 51, 0.0),
    (-60.0, 59.0, 1.0)])  # printed: cut at -50, too. It would end the pull to the reference
def test_k3_is_cut_at_50_above_and_not_below(log_ref_ratio, expected, slope):
    """Explained, numerical stability."""
    def k3(logprobs):
        return k3_kl(logprobs, tensor([[log_ref_ratio]])).sum()
    assert_close(k3(zeros(1, 1)), tensor(expected))
    assert_close(gradient(k3, zeros(1, 1)), tensor([[slope]]))


@parametrize("where, beta, advantage, expected", [
    ("Scratch, the KL alone", 1.0, 0.0, 0.306853), ("Hands-on, 9.3.2, no KL", 0.0, 1.0, -1.0),
    ("Explained; Hands-on", 0.04, 1.0, -0.987726), ("Hands-on, more KL", 0.4, 1.0, -0.877259),
    # printed: minus beta * KL, so that leaving the reference would pay
    ("Book, 11.2.4", 0.04, 2.0, -1.987726)])
def test_loss_is_minus_advantage_plus_beta_kl(where, beta, advantage, expected):
    """At pi_theta = pi_old = 0.2 and pi_ref = 0.4, where k3 is 0.306853."""
    loss, _ = one_token(pi=0.2, old=0.2, ref=0.4, advantage=advantage, beta=beta)
    assert_close(loss, tensor(expected))


# ---- Means --------------------------------------------------------------------------------
# Book, 11.2.2: the losses of two answers, of 5 and 10 tokens. What stands at padding is not zero.
LOSSES = tensor([[1.0, 1, 1, 1, 10, 7, 7, 7, 7, 7], [1, 1, 1, 1, 1, 1, 1, 1, 1, 10]])
LOSS_MASK = torch.arange(10) < tensor([[5], [10]])
# The book's script: two answers, of 4 and 7 tokens. All ratios are 1, and both advantages 2.
RATIO = ones(2, 7)
SCRIPT_MASK = torch.arange(7) < tensor([[4], [7]])


def test_mean_of_each_answer():
    assert_close(masked_mean(LOSSES, LOSS_MASK, dim=1), tensor([2.8, 1.9]))


@parametrize("loss_type, expected", [("grpo", 2.35), ("dapo", 33 / 15)])  # printed: 2.27 = 34 / 15
def test_mean_over_answers_or_over_tokens(loss_type, expected):
    assert_close(average(LOSSES, LOSS_MASK, loss_type), tensor(expected))


@parametrize("loss_type, expected", [
    ("grpo", [2.0, 2.0]), ("dr_grpo", [8 / 7, 14 / 7])])  # printed, rounded: 1.1429, 2.0000
def test_losses_of_the_scripts_two_answers(loss_type, expected):
    found = [average(2 * RATIO[[i]], SCRIPT_MASK[[i]], loss_type, 7) for i in (0, 1)]
    assert_close(torch.stack(found), tensor(expected))


def test_mean_over_all_tokens_of_the_script():
    assert_close(average(2 * RATIO, SCRIPT_MASK, "dapo"), tensor(2.0))  # printed: 1, of the ratios


@parametrize("loss_type, short, long", [
    ("grpo", 1 / 4, 1 / 7),  # only this favours the short answer
    ("dr_grpo", 1 / 7, 1 / 7),
    # printed: 0.2338 = 1/7 + 1/11, two gradients added up, the second without the advantage
    ("dapo", 2 / 11, 2 / 11)])
def test_gradients_of_the_scripts_ratios(loss_type, short, long):
    def loss(ratio):
        return average(2 * ratio, SCRIPT_MASK, loss_type, max_completion_length=7)
    assert_close(gradient(loss, RATIO), tensor([[short] * 4 + [0.0] * 3, [long] * 7]))


# ==== Section by section ===================================================================
# ---- 1. Advantages ------------------------------------------------------------------------
def test_advantages_are_of_each_group_by_itself():
    rewards = tensor([[0.0, 1.0, 1.0, 2.0], [5.0, 5.0, 9.0, 9.0]])
    expected = tensor([[-math.sqrt(2), 0.0, 0.0, math.sqrt(2)], [-1.0, -1.0, 1.0, 1.0]])
    assert_close(group_advantages(rewards), expected)


def test_batch_divides_by_the_std_of_all_rewards():
    rewards = tensor([[0.0, 2.0], [5.0, 5.0]])  # the mean of all four is 3, the std sqrt(4.5)
    expected = tensor([[-1 / math.sqrt(4.5), 1 / math.sqrt(4.5)], [0.0, 0.0]])
    assert_close(group_advantages(rewards, "batch"), expected)


def test_rewards_may_be_integers():
    assert_close(group_advantages(tensor([1, 1, 0, 0])), tensor([1.0, 1.0, -1.0, -1.0]))


@parametrize("scale_rewards", ["group", "none", "batch", "rloo"])
def test_rewards_that_are_equal_but_for_rounding_give_exactly_0(scale_rewards):
    both = tensor([[0.1 + 0.2, 0.3, 0.3], [1.0, 2.0, 3.0]], dtype=torch.float64)
    assert group_advantages(both, scale_rewards)[0].tolist() == [0, 0, 0]


@parametrize("rewards, expected", [
    ([1, 1 + 1.9e-6], 0.0), ([1, 1 + 2.2e-6], 1.0), ([0, 1e-9], 1.0)])
def test_equal_means_a_std_of_at_most_a_millionth_of_the_largest_reward(rewards, expected):
    """The std of two rewards is half of their difference. Largest means |reward|."""
    advantages = group_advantages(tensor(rewards, dtype=torch.float64))
    assert_close(advantages, tensor([-expected, expected]))


@parametrize("bad", [nan, inf, -inf])
def test_a_reward_that_is_not_finite_shows(bad):
    assert not group_advantages(tensor([bad, 1.0, 1.0])).isfinite().any()


def test_an_unknown_scale_is_refused():
    with raises(ValueError, match="'std', not one of .*rloo"):
        group_advantages(tensor([1.0, 2.0]), "std")


# ---- 2. Ratio and clip --------------------------------------------------------------------
def test_the_gradient_on_average_is_that_of_the_expected_reward():
    """The derivation of the section, with four tokens, drawn from pi_old, here PI_REF. A baseline
    of 7 changes nothing. (Nothing is clipped.)"""
    rewards = tensor([0.0, 2.0, 1.0, 5.0])
    tokens = tensor([0, 1, 1, 2, 2, 2, 2, 3, 3, 3])  # each as often as pi_old draws it
    def loss(logits):
        logprobs = logits.log_softmax(dim=0)[tokens].unsqueeze(1)  # ten completions of one token
        old_logprobs = PI_REF.log()[tokens].unsqueeze(1)
        return grpo_loss(logprobs, old_logprobs, None, rewards[tokens] - 7, ones(10, 1), beta=0,
                         epsilon=99)[0]
    def minus_expected_reward(logits):
        return -(logits.softmax(dim=0) * rewards).sum()
    expected = gradient(minus_expected_reward, PI_THETA.log())
    assert_close(gradient(loss, PI_THETA.log()), expected, atol=1e-5, rtol=1e-5)


def test_epsilon_high_is_the_upper_limit_alone():
    ratio = tensor([[1.5], [0.5]])
    clipped = clipped_surrogate(ratio, tensor([1.0, -1.0]), epsilon=0.2, epsilon_high=0.28)
    assert_close(clipped, tensor([[1.28], [-0.8]]))


# ---- 3. The KL penalty --------------------------------------------------------------------
def test_k3_is_precise_near_0():
    near = tensor([1e-6], dtype=torch.float64)  # log(pi_theta/pi_ref)
    assert_close(k3_kl(near, torch.zeros_like(near)), near.square() / 2, rtol=1e-5, atol=0)


@parametrize("log_ratio", [1e30, -1e30])
def test_k3_and_its_gradient_are_finite_far_away(log_ratio):
    far = tensor([log_ratio])
    assert k3_kl(far, zeros(1)).isfinite()
    assert gradient(lambda x: k3_kl(x, zeros(1)).sum(), far).isfinite()


# ---- 4. The masked mean -------------------------------------------------------------------
@parametrize("dtype", [torch.bool, torch.int, torch.float])
def test_masked_mean_takes_what_is_set_and_nothing_else(dtype):
    values = tensor([[1.0, 3.0, nan], [inf, nan, 7.0], [8.0, nan, -inf]])
    mask = tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).to(dtype)
    assert_close(masked_mean(values, mask), tensor(4.0))
    assert_close(masked_mean(values, mask, dim=1), tensor([2.0, 0.0, 8.0]))  # 0: none is set
    assert_close(gradient(lambda values: masked_mean(values, mask), values), mask.float() / 3)


def test_a_nan_that_is_not_masked_shows():
    assert masked_mean(tensor([1.0, nan]), ones(2)).isnan()


# ---- 5. The loss --------------------------------------------------------------------------
MAX_LENGTH = 7  # for dr_grpo


def loss_inputs():
    """Six completions of up to five tokens, one of them empty. The sines have no pattern.
    .ci/trl_figures.py takes the same inputs."""
    noise = (torch.arange(120.0, dtype=torch.float64) ** 2).sin().view(4, 6, 5)
    mask = torch.arange(5) < tensor([[5], [1], [0], [3], [4], [2]])
    return dict(logprobs=0.4 * noise[0] - 2, old_logprobs=0.4 * noise[1] - 2,
                ref_logprobs=0.4 * noise[2] - 2, advantages=noise[3, :, 0], mask=mask)


@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@parametrize("settings", [
    dict(), dict(beta=0), dict(epsilon_high=0.28), dict(beta=0.3, use_bias_correction_kl=True),
    dict(epsilon=0.1, epsilon_high=0, beta=0.5, kl_penalty_type="kl"),
    dict(epsilon=1.5, epsilon_high=0.1, kl_penalty_type="abs"),
    dict(epsilon=0.1, kl_penalty_type="mse", importance_sampling_level="sequence")], ids=str)
def test_loss_and_gradient_are_the_slow_ones(settings, loss_type):
    """The slow loss goes token by token."""
    config, inputs = GRPOConfig(**settings), loss_inputs()
    old_logprobs, advantages, mask = inputs["old_logprobs"], inputs["advantages"], inputs["mask"]
    epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    def slow(logprobs):
        sums, lengths = [], []
        for i in range(6):
            tokens = [t for t in range(5) if mask[i, t]]
            total = 0 * logprobs.sum()  # 0, with a gradient even if there are no tokens
            for t in tokens:
                ratio = (logprobs[i, t] - old_logprobs[i, t]).exp()
                if config.importance_sampling_level == "sequence":
                    ratio = math.prod((logprobs[i, s] - old_logprobs[i, s]).exp() for s in tokens)
                    ratio = ratio ** (1 / len(tokens))
                clipped = min(max(ratio, 1 - config.epsilon), 1 + epsilon_high)
                d = logprobs[i, t] - inputs["ref_logprobs"][i, t]
                kl = {"low_var_kl": (-d).exp() + d - 1, "kl": d, "abs": d.abs(), "mse": d * d / 2}
                kl = kl[config.kl_penalty_type] * (ratio if config.use_bias_correction_kl else 1)
                surrogate = min(ratio * advantages[i], clipped * advantages[i])
                total = total - surrogate + config.beta * kl
            sums.append(total)
            lengths.append(len(tokens))
        if loss_type == "grpo":
            return sum(total / max(1, length) for total, length in zip(sums, lengths)) / 6
        return sum(sums) / (sum(lengths) if loss_type == "dapo" else 6 * MAX_LENGTH)
    def ours(logprobs):
        return grpo_loss(**{**inputs, "logprobs": logprobs}, loss_type=loss_type,
                         max_completion_length=MAX_LENGTH, **settings)[0]
    logprobs = inputs["logprobs"]
    assert_close(ours(logprobs), slow(logprobs))
    assert_close(gradient(ours, logprobs), gradient(slow, logprobs))


PARITY = {  # settings; the loss by TRL 1.16, and the sum and the norm of its gradient
    "default": (dict(), (0.2256250593892, 0.115624951016, 0.1918599797598)),
    "epsilon_high": (dict(epsilon_high=0.28, loss_type="dr_grpo"),
                     (0.1038527163405, 0.07242620397321, 0.07435582204311)),
    "corrected KL": (dict(beta=0.3, use_bias_correction_kl=True, loss_type="dapo"),
                     (0.3110928775499, 0.1974924852299, 0.2083251191769)),
    "GSPO": (dict(beta=0.3, epsilon=0.1, importance_sampling_level="sequence"),
             (0.2235127094673, -0.122518523693, 0.1737799087193))}


@parametrize("settings, figures", PARITY.values(), ids=list(PARITY))
def test_loss_and_gradient_have_the_figures_of_trl(settings, figures):
    """`python .ci/trl_figures.py` computes them with TRL 1.16. If this is red and the slow loss
    green, both of ours differ from TRL."""
    inputs = loss_inputs()
    def ours(logprobs):
        return grpo_loss(**{**inputs, "logprobs": logprobs}, max_completion_length=MAX_LENGTH,
                         **settings)[0]
    slope = gradient(ours, inputs["logprobs"])
    found = torch.stack([ours(inputs["logprobs"]), slope.sum(), slope.norm()])
    assert_close(found, tensor(figures, dtype=torch.float64), atol=1e-12, rtol=0)


@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@parametrize("settings", [{}, dict(kl_penalty_type="mse"), dict(
    importance_sampling_level="sequence", use_bias_correction_kl=True)], ids=str)
@parametrize("padding", [1.0, nan, inf])
def test_padding_changes_neither_loss_nor_gradient(padding, settings, loss_type):
    inputs = loss_inputs()
    def loss(logprobs):
        return grpo_loss(**{**inputs, "logprobs": logprobs}, loss_type=loss_type,
                         max_completion_length=MAX_LENGTH, **settings)[0]
    expected, slope = loss(inputs["logprobs"]), gradient(loss, inputs["logprobs"])
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        inputs[name] = inputs[name].masked_fill(~inputs["mask"], padding)
    assert_close(loss(inputs["logprobs"]), expected)
    assert_close(gradient(loss, inputs["logprobs"]), slope)


@parametrize("advantage", [1.0, 0.0, -1.0])
@parametrize("logprob, old", [(0.0, -1000.0), (-1000.0, 0.0)])
def test_a_wild_token_has_a_finite_loss_and_gradient(logprob, old, advantage):
    """Its ratio is e^1000 or e^-1000, which float32 does not hold."""
    def loss(logprobs):
        return grpo_loss(logprobs, tensor([[old]]), tensor([[old]]), tensor([advantage]),
                         ones(1, 1))[0]
    assert loss(tensor([[logprob]])).isfinite() and gradient(loss, tensor([[logprob]])).isfinite()


def test_pi_old_and_pi_ref_get_no_gradient():
    inputs = loss_inputs()
    inputs["old_logprobs"].requires_grad_()
    inputs["ref_logprobs"].requires_grad_()
    assert not grpo_loss(**inputs)[0].requires_grad


def test_the_logged_kl_is_not_multiplied_by_the_ratio():
    _, metrics = one_token(pi=0.4, old=0.2, ref=0.8, use_bias_correction_kl=True)
    assert metrics["kl"] == approx(0.306853, abs=1e-6)


def test_all_is_0_where_no_token_is_real():
    inputs = {**loss_inputs(), "mask": zeros(6, 5)}
    assert grpo_loss(**inputs)[1] == dict(loss=0, kl=0, clip_fraction=0, ratio_max=0)


@parametrize("said, inputs", [  # all are (6, 5) but for these
    (r"\[5\]", dict(logprobs=zeros(5))), (r"\[1, 5\]", dict(old_logprobs=zeros(1, 5))),
    (r"\[6, 1\]", dict(ref_logprobs=zeros(6, 1))), (r"\[6, 1\]", dict(mask=zeros(6, 1))),
    (r"\[5\]", dict(advantages=zeros(5))), ("ref_logprobs are needed", dict(ref_logprobs=None)),
    (r"\[6\]", dict.fromkeys(["logprobs", "old_logprobs", "ref_logprobs", "mask"], zeros(6))),
    ("'k3'", dict(kl_penalty_type="k3")), ("'mean'", dict(loss_type="mean")),
    ("'dr_grpo'", dict(loss_type="dr_grpo")),
    ("'tokens'", dict(importance_sampling_level="tokens"))])
def test_wrong_arguments_of_the_loss_are_refused(said, inputs):
    with raises(ValueError, match=said):
        grpo_loss(**{**loss_inputs(), **inputs})


def test_grpo_loss_runs_where_it_is_pasted():
    """With the five functions that it calls, in a file that has only `import torch`."""
    pasted = {"torch": torch}
    for function in (masked_mean, average, clipped_surrogate, k3_kl, kl_estimate, grpo_loss):
        exec(inspect.getsource(function), pasted)
    assert_close(pasted["grpo_loss"](**loss_inputs())[0], grpo_loss(**loss_inputs())[0])


def test_the_mean_over_answers_is_the_default():
    assert_close(average(LOSSES, LOSS_MASK), tensor(2.35))


# ---- 6. Settings --------------------------------------------------------------------------
@parametrize("name, value", [
    ("num_generations", 1), ("prompts_per_step", 0), ("steps", 2.0),
    ("num_mini_batches", 257),  # a step has 32 * 8 = 256 completions
    ("micro_batch_size", True), ("warmup_steps", None), ("seed", -1), ("temperature", 0),
    ("beta", -0.1), ("learning_rate", nan), ("epsilon", inf), ("epsilon_high", -0.1),
    ("loss_type", "mean"), ("scale_rewards", None)])
def test_a_setting_that_cannot_be_is_refused(name, value):
    with raises(ValueError, match=f"{name} is {value!r}"):
        GRPOConfig(**{name: value})


# ==== A tiny world, for all that needs a model =============================================
# The tokens are letters, 0 to 25, and three more. There are two end tokens, as in Qwen.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END, EOS, PAD = 26, 27, 28
PROMPTS = [{"prompt": "abcdefg"}, {"prompt": "h"}, {"prompt": "ijk"}]
# A step of `run_small` has three prompts, with four completions each, of up to six tokens.
SMALL = dict(steps=2, prompts_per_step=3, num_generations=4, max_completion_length=6,
             learning_rate=0.01, warmup_steps=0)
SHAPES = dict(  # of all families of models
    vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=EOS,
    bos_token_id=None, pad_token_id=PAD, tie_word_embeddings=False, initializer_range=0.3)


def tiny_tokenizer(padding="<pad>"):
    """A token for each letter. Its chat template turns a user's "b" into "ub<end>"."""
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "<end>", "<eos>", "<pad>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = ("{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<end>{% endfor %}"
                "{% if add_generation_prompt %}a{% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token=padding, chat_template=template,
        additional_special_tokens=["<end>", "<pad>"])


def tiny_model(family="qwen2", seed=0, end_logit=1.0, **settings):
    """A random model. Its weights are large, so some tokens are much likelier than others.
    `end_logit` is added to the logits of the end tokens: at -100, no completion ends."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SHAPES | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.lm_head.bias = torch.nn.Parameter(zeros(30), requires_grad=False)
    model.lm_head.bias[[END, EOS]] = end_logit
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


def slow_logprobs(model, completion, temperature=1.0):
    """log pi of each token, (L,). The model reads one completion at a time, with no cache."""
    ids = tensor([completion.prompt_ids + completion.ids])
    logits = model(ids, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1].float()
    return (logits / temperature).log_softmax(dim=-1)[range(len(completion.ids)), completion.ids]


def fixed_rewards(completions, **columns):
    """Each of the first four completions earns 1. The next four earn 0, 1, 2, 1, and so on."""
    return ([1, 1, 1, 1] + [0, 1, 2, 1] * 9)[: len(completions)]


def run_small(model, reward=fixed_rewards, data=PROMPTS, folder=None, resume=False,
              after_step=None, **settings):
    """`train`, with the settings SMALL and others. Returns the metrics of all steps, without the
    seconds, which differ from run to run."""
    history = train(model, tiny_tokenizer(), data, reward, GRPOConfig(**SMALL | settings), folder,
                    resume, after_step)
    return [{name: value for name, value in metrics.items() if not name.endswith("_seconds")}
            for metrics in history]


def weights_of(model):
    """All weights, in one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def log_of(folder):
    """The lines of metrics.jsonl. NaN and inf, which JSON does not have, make the test fail."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def fails_from_call(number, function, error):
    """`function`, but from its call of this number on it tears its file and raises the error."""
    calls = iter(range(1, number))
    def failing(*arguments, **more):
        if next(calls, None):
            return function(*arguments, **more)
        for path in [argument for argument in arguments if isinstance(argument, Path)][:1]:
            path.write_bytes(b"torn")
        raise error
    return failing


# ---- 7. The loop --------------------------------------------------------------------------
@parametrize("settings", [
    dict(), dict(beta=0), dict(loss_type="dapo", beta=0.5), dict(loss_type="dr_grpo"),
    dict(num_iterations=2, max_grad_norm=0.05), dict(num_mini_batches=3, loss_type="dapo"),
    dict(num_iterations=2, num_mini_batches=2, epsilon=0.01)], ids=str)
def test_a_step_is_the_slow_step(settings, monkeypatch):
    """One completion at a time, and nothing of grpo.py's mathematics. The reference has other
    weights, so that the KL is not 0."""
    model, slow, reference = (tiny_model("llama") for _ in range(3))
    before, learners = weights_of(model), []
    for weight in reference.parameters():
        weight.data *= 1.1
    # `train` makes the reference by deepcopy(model). All others get no copy.
    monkeypatch.setattr(grpo.copy, "deepcopy", lambda x, memo=None: reference if x is model else x)
    [metrics] = run_small(model, after_step=learners.append, steps=1, learning_rate=0.003,
                          warmup_steps=1, temperature=0.8, **settings)
    config = learners[0].config
    optimizer = torch.optim.AdamW(slow.parameters(), lr=0.003, weight_decay=0.0)
    rows, norms = [], []
    for group in learners[0].groups:
        rewards = [c.reward for c in group]
        mean, std = statistics.mean(rewards), statistics.pstdev(rewards)
        for c in group:
            old, ref = (slow_logprobs(policy, c, 0.8).detach() for policy in (slow, reference))
            rows.append((c, (c.reward - mean) / (std or 1), old, ref))
    rows.sort(key=lambda row: len(row[0].ids), reverse=True)  # as `train`, for the mini-batches
    for i in [*range(config.num_mini_batches)] * config.num_iterations:
        losses = []
        for c, advantage, old, ref in rows[i :: config.num_mini_batches]:
            logprobs = slow_logprobs(slow, c, 0.8)
            ratio = (logprobs - old).exp()
            clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
            k3 = (ref - logprobs).exp() - (ref - logprobs) - 1
            losses.append(config.beta * k3 - torch.min(ratio * advantage, clipped * advantage))
        optimizer.zero_grad()
        {"grpo": sum(x.mean() for x in losses) / len(losses), "dapo": torch.cat(losses).mean(),
         "dr_grpo": torch.cat(losses).sum() / (6 * len(losses))}[config.loss_type].backward()
        norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), config.max_grad_norm)
        norms.append(norm.item())
        optimizer.step()
    assert metrics["grad_norm"] == approx(statistics.mean(norms), rel=1e-3)
    moved = (weights_of(slow) - before).norm()
    assert (weights_of(model) - weights_of(slow)).norm() < 0.01 * moved
    still = weights_of(slow) == before  # weights without a gradient: only a decay would move them
    assert still.any() and weights_of(model)[still].equal(before[still])


@parametrize("shuffled, least, most", [(False, 3.5, 6), (True, 0, 2.5)])
def test_a_model_learns_from_rewards_and_not_from_shuffled_ones(shuffled, least, most):
    """The reward is the number of vowels."""
    def reward(completions, **columns):
        vowels = [len(re.findall("[aeiou]", text)) for text in completions]
        return random.sample(vowels, k=len(vowels)) if shuffled else vowels
    history = run_small(tiny_model(), reward, steps=30, num_generations=16, beta=0)
    assert history[0]["reward_mean"] < 2
    assert least < statistics.mean(metrics["reward_mean"] for metrics in history[-5:]) < most


def test_every_step_of_every_seed_draws_other_tokens():
    """From the same model and prompt: the learning rate is 0."""
    entropies = [metrics["entropy"] for seed in (0, 1) for metrics in run_small(
        tiny_model(), data=PROMPTS[:1], seed=seed, steps=3, learning_rate=0.0)]
    assert len(set(entropies)) == 6


@parametrize("said, wrong", [
    ("data set is empty", dict(data=[])), (r"columns \['text'\]", dict(data=[{"text": "a"}])),
    (r"\['prompt', 'completions'\]", dict(data=[{"prompt": "a", "completions": "b"}])),
    (r"\['prompt', 'answer'\]", dict(data=[{"prompt": "a"}, {"prompt": "b", "answer": "5"}])),
    ("must be one function", dict(reward=[fixed_rewards])), ("output_dir", dict(resume=True))])
def test_what_cannot_be_trained_is_refused(said, wrong):
    with raises(ValueError, match=said):
        run_small(tiny_model(), **wrong)


# ---- 8. Sampling --------------------------------------------------------------------------
@parametrize("family, padding, temperature", [
    ("qwen2", "<pad>", 1.0), ("qwen2", None, 0.7), ("qwen2", "<end>", 1.3), ("gpt2", "<eos>", 1.0)])
def test_a_completion_ends_with_its_first_end_token_or_is_cut_off(family, padding, temperature):
    """Whatever the tokenizer's padding token is. Here are groups of 60, of up to 8 tokens."""
    torch.manual_seed(0)
    groups = sample_groups(tiny_model(family), tiny_tokenizer(padding), PROMPTS, 60, 8, temperature)
    completions = sum(groups, [])
    for completion in completions:
        *others, last = completion.ids
        assert END not in others and EOS not in others
        assert completion.truncated == (last not in (END, EOS))
        assert len(completion.ids) == 8 or not completion.truncated
        assert completion.text.split() == [LETTERS[i] for i in completion.ids if i < 26]
    # All of this happens: both ends, and a completion of 8 tokens that ended, or was cut off.
    assert {completion.ids[-1] for completion in completions} >= {END, EOS}
    assert {c.truncated for c in completions if len(c.ids) == 8} == {True, False}


def test_at_temperature_0_each_token_is_the_likeliest():
    """Its log-prob is that at temperature 1."""
    model = tiny_model()
    for [completion] in sample_groups(model, tiny_tokenizer(), PROMPTS, 1, 8, temperature=0):
        ids = tensor([completion.prompt_ids + completion.ids])
        likeliest = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1].argmax(dim=-1)
        assert completion.ids == likeliest.tolist()
        found = tensor(completion.sampler_logprobs)
        assert_close(found, slow_logprobs(model, completion), atol=2e-5, rtol=0)


def test_tokens_are_drawn_from_the_softmax_and_from_nothing_else():
    """Not from what a checkpoint brings along, as Qwen2.5's does. `generate` would obey that."""
    model = tiny_model()
    vars(model.generation_config).update(top_k=5, top_p=0.8, repetition_penalty=2.0)
    torch.manual_seed(0)
    [completions] = sample_groups(model, tiny_tokenizer(), [{"prompt": "a"}], 20_000, 1, 0.7)
    counts = tensor([completion.ids[0] for completion in completions]).bincount(minlength=30)
    wanted = 20_000 * (model(tensor([[0]])).logits[0, -1] / 0.7).softmax(dim=-1)
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()  # four standard deviations


def test_end_tokens_come_from_both_configs_and_the_tokenizer():
    model = tiny_model()
    model.generation_config.eos_token_id = [END]
    model.config.eos_token_id = PAD
    assert end_token_ids(model, tiny_tokenizer()) == [END, EOS, PAD]  # the tokenizer's is EOS


def test_without_an_end_token_nothing_is_sampled():
    with raises(ValueError, match="no completion could end"):
        end_token_ids(SimpleNamespace(generation_config=None, config=None), tokenizer=None)


def test_a_chat_is_read_through_the_template():
    chat = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
            {"role": "user", "content": "b"}]
    [[completion]] = sample_groups(tiny_model(), tiny_tokenizer(), [{"prompt": chat}], 1, 1)
    assert completion.prompt_ids == [20, 2, END, 0, 3, END, 20, 1, END, 0]  # uc, ad, ub, a


def test_a_prompt_that_just_fits_into_the_context_is_sampled():
    [[completion]] = sample_groups(tiny_model(end_logit=-100), tiny_tokenizer(),
                                   [{"prompt": 59 * "a"}], 1, 5)
    assert len(completion.ids) == 5


@parametrize("said, prompt", [
    ("'' has no tokens", ""), ("60 tokens and 5 more are above 64: 'a a", 60 * "a")])
def test_a_prompt_that_is_empty_or_too_long_is_refused(said, prompt):
    with raises(ValueError, match=said):
        sample_groups(tiny_model(), tiny_tokenizer(), [{"prompt": "b"}, {"prompt": prompt}], 1, 5)


@parametrize("sampling_batch_size, prompts", [(8, [2, 1]), (1, [1, 1, 1])])
def test_as_many_groups_are_sampled_at_once_as_fit(sampling_batch_size, prompts, monkeypatch):
    """But at least one. A group has four completions."""
    monkeypatch.setattr(grpo, "sample_groups", counted := Mock(wraps=sample_groups))
    run_small(tiny_model(), steps=1, sampling_batch_size=sampling_batch_size)
    assert [len(call.args[2]) for call in counted.call_args_list] == prompts


def test_there_is_no_dropout():
    """Neither in sampling nor in the update. The first model comes in train mode."""
    plain = tiny_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    assert run_small(tiny_model("gpt2").train()) == run_small(plain)


def test_a_token_that_equals_the_filler_is_not_masked():
    ids, mask = pad_rows([[5, 0], [7]], "left", "cpu")
    assert ids.tolist() == [[5, 0], [0, 7]] and mask.tolist() == [[1, 1], [0, 1]]


# ---- 9. The reward ------------------------------------------------------------------------
@parametrize("row", [  # box and answer
    "63 is 63", " 63.0  is 63", "$63 is 63", "1,000 is 1000", "1{,}000 is 1000", "50\\% is 50",
    "63.5. is 63.5", "50 \\%. is 50", "\\$18 is $18.00", "63. is  63 ", "-4 is -4", "- 4 is -4",
    "+5 is 5", "3.009 is 3", "-1,000.5 is -1000.5", "x is  x ", "007 is 7", ".5 is .5",
    "\\frac{1}{2} is \\frac{1}{2}",
    "36 is not 63", "63 apples is not 63", "12,34 is not 1234", "8,000 is not 8",
    "8,000 is not 000", "1234,567 is not 1234567", "3 4 is not 34", ".5 is not 0.5",
    "1e3 is not 1000", "nan is not 1", "1_000 is not 1000", "5.01 is not 5", "\u0663 is not 3",
    "5 is not -5", "--5 is not 5", ", is not 0", "60+3 is not 63", "1$2 is not 12", "1 is not x",
    "3,000,000.01 is not 3000000", "63 is not ", "\\frac{1}{2} is not \\frac{1"])
def test_which_box_holds_which_answer(row):
    box, answer = re.split(" is not | is ", row)
    expected = 0.5 if " is not " in row else 1.5
    assert rule_reward("So it is \\boxed{" + box + "}.", answer) == expected


@parametrize("text, answer, expected", [
    ("\\boxed{50}? No: \\boxed{63}", "63", 1.5), ("\\boxed{63}? No: \\boxed{50}", "63", 0.5),
    ("\\boxed{63}", 63, 1.5), ("\\boxed{63}", None, 0.5), ("63", "63", 0), ("\\boxed{}", "", 0),
    ("\\boxed{ }", " ", 0), ("\\boxed 63", "63", 0), ("\\boxed{63}. So \\boxed{6", "63", 0)])
def test_only_the_last_box_counts_and_it_must_be_complete(text, answer, expected):
    assert rule_reward(text, answer) == expected


@parametrize("text, box", [
    ("\\boxed{a{b}c} d}", "a{b}c"), ("\\boxed{1}\\boxed{ 2 }", "2"), ("\\boxed{{}", None)])
def test_the_box_that_is_read(text, box):
    assert extract_boxed(text) == box


@parametrize("piece", ["\\boxed{", "\\boxed", "{", "}", "9", ",000", "{,}", "$", " \n"])
def test_hostile_texts_take_linear_time(piece):
    """In quadratic time, 300,000 characters would take minutes."""
    text = "1" + piece * (300_000 // len(piece)) + "x"  # the pattern of a number fails at the x
    started = time.process_time()
    rule_reward("\\boxed{" + text + "}", "7")
    rule_reward("\\boxed{7}", text)
    assert time.process_time() - started < 3


def three_completions():
    """Two completions of a string, and one of a chat. The data has a column "numbers"."""
    string = {"prompt": "a", "numbers": [1]}
    chat = {"prompt": [{"role": "user", "content": "b"}], "numbers": [2]}
    return [Completion(string, prompt_ids=[0], ids=[7], text="x"),
            Completion(string, prompt_ids=[0], ids=[8], text="y"),
            Completion(chat, prompt_ids=[20, 1, END, 0], ids=[9], text="z")]


def test_a_reward_function_is_called_as_trl_calls_one():
    """It may return its numbers in a tensor, too."""
    reward, completions = Mock(return_value=tensor([1.0, 2.0, 3.0])), three_completions()
    grpo.grade(reward, completions)
    reward.assert_called_once_with(
        prompts=["a", "a", [{"role": "user", "content": "b"}]], numbers=[[1], [1], [2]],
        completion_ids=[[7], [8], [9]],
        completions=["x", "y", [{"role": "assistant", "content": "z"}]])
    assert [completion.reward for completion in completions] == [1, 2, 3]


@parametrize("said, rewards", [
    ("returned 2, not 3", [1, 1]), ("returned 4, not 3", [1, 1, 1, 1]),
    ("nan for 'x'", [nan, 1, 1]), ("inf for 'z'", [1, 1, inf]), ("None for 'y'", [1, None, 1])])
def test_rewards_other_than_n_finite_numbers_are_refused(said, rewards):
    with raises(ValueError, match=said):
        grpo.grade(lambda **columns: rewards, three_completions())


def test_a_reward_function_gets_copies():
    """What it changes is neither learned nor in the data."""
    def meddle(prompts, completion_ids, numbers, **columns):
        prompts[2].append("more")
        completion_ids[0].clear()
        numbers[0].append("more")
        return [0, 0, 0]
    completions = three_completions()
    grpo.grade(meddle, completions)
    assert completions == three_completions()


# ---- 10. Log-probs ------------------------------------------------------------------------
# The picture of section 10: prompts a b c and d, completions x y END and z END.
A, B, C, D, X, Y, Z = range(7)
PICTURE = [Completion({}, prompt_ids=[A, B, C], ids=[X, Y, END]),
           Completion({}, prompt_ids=[D], ids=[Z, END])]


class Recorder:
    """A model that keeps what it reads, and is certain that token i is followed by i + 1."""
    device = torch.device("cpu")

    def __call__(self, input_ids, attention_mask, position_ids, logits_to_keep, use_cache):
        self.ids, self.mask, self.positions = input_ids, attention_mask, position_ids
        logits = -1000 * (torch.arange(30) != input_ids.unsqueeze(-1) + 1).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_the_columns_are_those_of_the_picture():
    model = Recorder()
    _, mask = compute_logprobs(model, PICTURE, temperature=1.0)
    assert model.mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]
    assert model.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 2]]
    assert model.ids[0].tolist() == [A, B, C, X, Y, END]
    assert model.ids[1, 2:5].tolist() == [D, Z, END]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_the_logits_of_a_column_predict_the_next():
    """Here a token is certain after the one before it in the alphabet: y after x, say."""
    logprobs, _ = compute_logprobs(Recorder(), PICTURE, temperature=1.0)
    assert_close(logprobs[0], tensor([-1000.0, 0.0, -1000.0]))  # x after c, y after x, END after y


FAMILIES = {  # what a family's models have beside SHAPES
    "qwen2": {}, "gpt2": {}, "mistral": dict(sliding_window=3),
    "gemma2": dict(final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=3,
                   layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "lfm2": dict(layer_types=["conv", "full_attention"])}  # a convolution, which has a state


@parametrize("family", list(FAMILIES))
def test_sampling_and_training_compute_what_the_slow_way_computes(family):
    model = tiny_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    completions = sum(sample_groups(model, tiny_tokenizer(), PROMPTS, 4, 8, 0.7), [])
    slow = torch.cat([slow_logprobs(model, completion, 0.7) for completion in completions])
    drawn = tensor(sum([completion.sampler_logprobs for completion in completions], []))
    assert_close(drawn, slow, atol=3e-5, rtol=0)
    padded, mask = compute_logprobs(model, completions, temperature=0.7)
    assert_close(padded[mask.bool()], slow, atol=3e-5, rtol=0)


def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    """In bfloat16, the softmax of the same logits would be off by some hundredths."""
    model = tiny_model().bfloat16()
    ids = tensor([[A, B, C, X]])
    found = token_logprobs(model, ids, torch.ones_like(ids), completion_length=1)
    expected = slow_logprobs(model, Completion({}, prompt_ids=[A, B, C], ids=[X]))
    assert_close(found, expected.unsqueeze(0), atol=1e-5, rtol=0)


def test_cudnns_attention_is_off_in_a_forward_pass():
    """It has given NaN gradients."""
    def model(**inputs):
        return torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert grpo.forward(model, ones(1, 2).long(), ones(1, 2).long()) is False


# ---- 11. The update -----------------------------------------------------------------------
@parametrize("beta", [0.0, 0.5])
@parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_split_into_micro_batches_changes_nothing(loss_type, beta):
    """Neither the metrics, grad_norm among them, nor what the second step starts from."""
    whole, split = (run_small(tiny_model("llama"), learning_rate=0.001, loss_type=loss_type,
                              beta=beta, micro_batch_size=size, num_iterations=2, epsilon=0.01)
                    for size in (12, 1))
    for of_whole, of_split in zip(whole, split):
        assert of_split == approx(of_whole, rel=1e-3, abs=1e-5)


@parametrize("settings, calls, completions", [
    (dict(), 2, 24),  # for pi_ref, and for the update
    (dict(num_iterations=2), 4, 48),  # for pi_ref, pi_old and two updates
    (dict(beta=0), 1, 4)])  # 4 advantages are not 0: two in each of the last two groups
def test_log_probs_are_computed_only_where_needed(settings, calls, completions, monkeypatch):
    monkeypatch.setattr(grpo, "compute_logprobs", counted := Mock(wraps=compute_logprobs))
    run_small(tiny_model(), steps=1, micro_batch_size=12, **settings)
    assert counted.call_count == calls
    assert sum(len(call.args[1]) for call in counted.call_args_list) == completions


def test_each_pass_has_the_same_mini_batches(monkeypatch):
    """Each completion is in one of them."""
    monkeypatch.setattr(grpo, "update", counted := Mock(wraps=grpo.update))
    run_small(tiny_model(), steps=1, num_iterations=2, num_mini_batches=5)
    batches = [[id(c) for c in call.args[1]] for call in counted.call_args_list]
    assert [len(batch) for batch in batches] == 2 * [3, 3, 2, 2, 2]
    assert batches[:5] == batches[5:] and len(set(sum(batches, []))) == 12


def test_nothing_moves_where_no_completion_teaches():
    """Not even by AdamW's momentum. Only in step 1 the rewards differ."""
    model, weights = tiny_model(), []
    rewards = Mock(side_effect=[[0, 1, 2, 3] * 3, [1] * 12, [1] * 12])
    _, _, metrics = run_small(model, rewards, steps=3, beta=0,
                              after_step=lambda learner: weights.append(weights_of(model)))
    assert not weights[0].equal(weights_of(tiny_model())) and weights[0].equal(weights[2])
    assert (metrics["loss"], metrics["grad_norm"], metrics["skipped_updates"]) == (0, 0, 0)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch, capsys):
    """Here the second of three. No metric is NaN. After the run, no gradient is left."""
    def broken_loss(*inputs, **settings):
        loss, metrics = grpo_loss(*inputs, **settings)
        return loss * next(factors), metrics
    factors, weights, model = iter([1, nan, 1]), [], tiny_model()
    monkeypatch.setattr(grpo, "grpo_loss", broken_loss)
    run_small(model, folder=tmp_path, steps=3, micro_batch_size=12,
              after_step=lambda learner: weights.append(weights_of(model)))
    assert [metrics["skipped_updates"] for metrics in log_of(tmp_path)] == [0, 1, 0]
    assert weights[0].equal(weights[1]) and not weights[1].equal(weights[2])
    assert all(weight.grad is None for weight in model.parameters())
    assert "update skipped" in capsys.readouterr().out


def test_the_metrics_of_a_step():
    """Two groups. In the second, the rewards are equal. Two updates, with the figures 1 and 3."""
    def completion(reward, length):
        return Completion({}, [0], ids=[5] * length, sampler_logprobs=[-length] * length,
                          reward=reward, truncated=length == 4)
    groups = [[completion(2.0, 2), completion(0.0, 4)], [completion(1.0, 1), completion(1.0, 1)]]
    learner = SimpleNamespace(groups=groups, examples_seen=7,
                              optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}]))
    means = ("loss", "kl", "grad_norm", "clip_fraction", "sampler_gap")
    updates = [dict.fromkeys([*means, "ratio_max", "skipped_updates"], x) for x in (1, 3)]
    assert grpo.metrics_of(learner, updates) == approx(dict.fromkeys(means, 2) | dict(
        learning_rate=0.5, examples_seen=7, reward_mean=1, reward_std=0.5, entropy=22 / 8,
        zero_variance_fraction=0.5, completion_length=2, truncated_fraction=0.25, ratio_max=3,
        skipped_updates=4))


# ---- 12. What is not GRPO -----------------------------------------------------------------
def test_weights_move_where_bfloat16_weights_would_not():
    """`train` makes them float32. In bfloat16, a weight of 0.3 moves by 0.002 or not at all."""
    model, before = tiny_model().bfloat16(), weights_of(tiny_model().bfloat16()).float()
    run_small(model, steps=1, learning_rate=1e-5, bf16=True)
    assert (weights_of(model) != before).float().mean() > 0.9
    assert (weights_of(model).bfloat16() != before.bfloat16()).float().mean() < 0.1


@parametrize("bf16, precision, gap", [  # None: on a CPU, as False
    (True, torch.bfloat16, 0.1), (False, torch.float32, 1e-5), (None, torch.float32, 1e-5)])
def test_sampling_and_training_multiply_in_one_precision(bf16, precision, gap, monkeypatch):
    seen = Mock(wraps=grpo.selective_log_softmax)
    monkeypatch.setattr(grpo, "selective_log_softmax", seen)
    [metrics] = run_small(tiny_model(end_logit=-100), steps=1, micro_batch_size=12, bf16=bf16)
    # Six tokens are drawn. Then come pi_ref and the update.
    assert [call.args[0].dtype for call in seen.call_args_list] == 8 * [precision]
    assert metrics["sampler_gap"] < gap


@parametrize("warmup_steps, rates", [
    (0, [0.75, 0.5, 0.25]), (1, [1, 0.8, 0.6, 0.4, 0.2]), (4, [0.25, 0.5])])
def test_the_rate_rises_and_falls_and_is_never_0(warmup_steps, rates):
    config = GRPOConfig(steps=len(rates), warmup_steps=warmup_steps, learning_rate=1.0)
    assert [scheduled_rate(config, i + 1) for i in range(len(rates))] == approx(rates)


def test_each_epoch_has_every_example_once_in_an_order_of_its_own():
    """The same ones, however many are taken at once."""
    taken = take_examples(range(10), seed=0, start=0, count=20)
    first, second = taken[:10], taken[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != take_examples(range(10), 1, 0, 10) != first
    assert [take_examples(range(10), 0, start, 1)[0] for start in range(20)] == taken
    assert take_examples(range(10), 0, 3, 16) == taken[3:19]


# Interrupted runs.
RUNS = {"plain": dict(seed=5000, beta=0.1),  # seed * 1_000_003 is above 2**32
        "much": dict(dynamic_sampling=2, num_iterations=2, num_mini_batches=2, beta=0, bf16=True)}


def finish(folder, model=None, **settings):
    """A run of 5 steps, resumed if there is a checkpoint: its metrics, and the weights after it."""
    def drawn_rewards(completions, **columns):  # a resumed run must draw the same ones again
        return [random.randrange(2) for _ in completions]
    model = model or tiny_model()
    history = run_small(model, drawn_rewards, folder=folder, resume=True,
                        **dict(steps=5, save_steps=2) | settings)
    assert [metrics["step"] for metrics in log_of(folder)] == list(range(1, len(history) + 1))
    return history, weights_of(model).tolist()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {name: finish(tmp_path_factory.mktemp("run"), **RUNS[name]) for name in RUNS}


@parametrize("name", list(RUNS))
@parametrize("when, module, function, call", [  # checkpoints come after steps 2, 4 and 5
    ("after step 1", grpo, "set_seed", 2), ("after step 3", grpo, "set_seed", 4),
    ("in a reward", random, "randrange", 50),  # 12 draws a step, or more
    ("while metrics.jsonl is written", Path, "write_text", 4),
    ("while a checkpoint is written", torch, "save", 2),
    ("before the last checkpoint is renamed", Path, "replace", 8)])
def test_an_interrupted_run_ends_as_if_nothing_had_happened(
        when, module, function, call, name, undisturbed, tmp_path, monkeypatch, capsys):
    """To the bit. If there is a checkpoint, it goes on with any model of the same shapes."""
    with monkeypatch.context() as patch, raises(SystemExit):
        failing = fails_from_call(call, getattr(module, function), SystemExit)
        patch.setattr(module, function, failing)
        finish(tmp_path, **RUNS[name])
    path, said, model = tmp_path / "checkpoint.pt", "starting at step 1", tiny_model()
    if path.exists():
        said = f"going on after step {len(torch.load(path)['history'])}"
        model = tiny_model(seed=1)
    assert finish(tmp_path, model, **RUNS[name]) == undisturbed[name]
    assert capsys.readouterr().out.endswith(said + "\n")


def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_micro_batches(tmp_path, monkeypatch):
    """It runs out in the second step, when a first micro-batch has left gradients."""
    enough, model = tiny_model("llama"), tiny_model("llama")
    before, run = weights_of(model), dict(folder=tmp_path, save_steps=1)
    run_small(enough, micro_batch_size=6)
    with monkeypatch.context() as patch, raises(torch.OutOfMemoryError):
        patch.setattr(grpo, "grpo_loss", fails_from_call(4, grpo_loss, torch.OutOfMemoryError))
        run_small(model, micro_batch_size=6, **run)
    run_small(model, micro_batch_size=5, resume=True, **run)
    moved = (weights_of(enough) - before).norm()
    assert (weights_of(model) - weights_of(enough)).norm() < 0.01 * moved


@parametrize("save_steps, steps", [(2, [2, 4, 5]), (0, [])])
def test_checkpoints_come_every_few_steps_and_at_the_end(save_steps, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", counted := Mock(wraps=torch.save))
    finish(tmp_path, save_steps=save_steps)
    assert [len(call.args[0]["history"]) for call in counted.call_args_list] == steps


def test_after_step_comes_before_the_files_and_may_add_figures(tmp_path):
    def after_step(learner):
        assert (folder / "metrics.jsonl").exists() == (len(learner.history) > 1)
        learner.history[-1]["mine"] = tensor(0.5)  # JSON knows neither tensors nor NumPy's numbers
    folder = tmp_path / "new" / "run"
    run_small(tiny_model(), folder=str(folder), after_step=after_step)
    assert [metrics["mine"] for metrics in log_of(folder)] == [0.5, 0.5]


def test_a_folder_that_holds_a_run_is_refused_without_resume(tmp_path):
    run_small(tiny_model(), folder=tmp_path, steps=1, save_steps=0)  # metrics.jsonl is enough
    with raises(ValueError, match="holds a run: resume it"):
        run_small(tiny_model(), folder=tmp_path)


@parametrize("name, value", [("seed", 4), ("loss_type", "dapo")])
def test_a_run_with_other_settings_is_refused(name, value, tmp_path):
    finish(tmp_path, steps=1)
    with raises(ValueError, match=f"another run: {name} is .* there, {value} here"):
        finish(tmp_path, **{name: value})


def test_a_run_may_get_more_steps_and_other_batch_sizes(tmp_path):
    short, _ = finish(tmp_path, steps=3)
    long, _ = finish(tmp_path, steps=5, save_steps=1, micro_batch_size=5, sampling_batch_size=4)
    assert long[:3] == short
    assert [metrics["learning_rate"] for metrics in long[3:]] == approx([0.02 / 6, 0.01 / 6])


def test_a_run_with_a_number_of_numpy_goes_on(tmp_path):
    rate = tensor([0.01]).numpy()[0]
    run_small(tiny_model(), folder=tmp_path, steps=1, learning_rate=rate)
    assert len(run_small(tiny_model(), folder=tmp_path, resume=True, learning_rate=rate)) == 2


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path):
    torch.save({"step": 3}, tmp_path / "checkpoint.pt")
    with raises(ValueError, match="checkpoint.pt cannot be read"):
        finish(tmp_path)


def test_a_full_disk_is_said_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    finish(tmp_path, steps=2)
    # torch raises a RuntimeError.
    monkeypatch.setattr(torch, "save", fails_from_call(1, torch.save, RuntimeError))
    with raises(OSError, match="is the disk full"):
        finish(tmp_path, steps=4)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt", "metrics.jsonl"}
    assert len(torch.load(tmp_path / "checkpoint.pt")["history"]) == 2


# ---- 13. The relatives --------------------------------------------------------------------
def test_dynamic_sampling_replaces_the_groups_of_equal_rewards():
    """Two of three, and one of the two new ones. A group in which one advantage is 0 teaches."""
    rewards = Mock(side_effect=[[1] * 8 + [0, 1, 2, 1], [1] * 4 + [0, 1, 2, 1], [0, 1, 2, 1]])
    [metrics] = run_small(tiny_model(), rewards, steps=1, dynamic_sampling=3)
    assert (metrics["examples_seen"], metrics["zero_variance_fraction"]) == (3 + 2 + 1, 0)


def test_dynamic_sampling_gives_up_in_the_end():
    """The first group that `fixed_rewards` is asked about has equal rewards."""
    [metrics] = run_small(tiny_model(), steps=1, dynamic_sampling=4)
    assert (metrics["examples_seen"], metrics["zero_variance_fraction"]) == approx((3 + 4, 1 / 3))


def test_overlong_penalty():
    """A limit of 10 tokens and a buffer of 4: 0 up to 6 tokens, then down to -1."""
    lengths = tensor([0, 6, 8, 10, 12])
    assert_close(overlong_penalty(lengths, 10, 4), tensor([0.0, 0.0, -0.5, -1.0, -1.0]))


@parametrize("name", ["kl", "mse", "abs", "low_var_kl"])
def test_gradients_of_the_estimates(name):
    """The table of section 13: the gradient is grad log pi times this."""
    d = (PI_THETA / PI_REF).log()
    expected = {"kl": ones(4), "mse": d, "abs": d.sign(), "low_var_kl": 1 - (-d).exp()}
    slope = gradient(lambda x: kl_estimate(x, PI_REF.log(), name).sum(), PI_THETA.log())
    assert_close(slope, expected[name])


def test_the_estimate_is_k3_by_default():
    assert_close(kl_estimate(tensor([[0.0]]), tensor([[1.0]])), tensor([[math.e - 2]]))


def test_the_ratio_makes_the_gradient_of_k3_right():
    """The last row: r * k3 has the gradient r * d."""
    d, r = math.log(0.4 / 0.8), 0.4 / 0.2
    def loss(logprobs):
        return grpo_loss(logprobs, tensor([[0.2]]).log(), tensor([[0.8]]).log(), zeros(1),
                         ones(1, 1), beta=1, use_bias_correction_kl=True)[0]
    assert_close(gradient(loss, tensor([[0.4]]).log()), tensor([[r * d]]))


# ==== gsm8k_demo.py ========================================================================
@pytest.fixture(scope="module")
def demo():
    """Imported here, so that the tests of grpo.py run without it, too."""
    return importlib.import_module("gsm8k_demo")


@pytest.fixture(scope="module")
def pretrained(demo):
    """The rehearsal's model and tokenizer, and its data to train on and to test on."""
    return demo.rehearsal(0)


@pytest.fixture
def call_demo(demo, pretrained, monkeypatch, tmp_path):
    """Runs the demo with flags, in an empty folder, without a GPU, and with a copy of the
    rehearsal."""
    def call(flags):
        monkeypatch.setattr(sys, "argv", ["my code/gsm8k_demo.py", *shlex.split(flags)])
        demo.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "rehearsal", lambda seed: copy.deepcopy(pretrained))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return call


SHORT = "--rehearsal --steps 1 --prompts_per_step 1 --eval_questions 1 --output run "
LONGER = ("--rehearsal --steps 4 --prompts_per_step 4 --eval_questions 16 --eval_every 2 "
          "--show_steps 9 --save_steps 2 --output ")


# ---- Data, reward, evaluation -------------------------------------------------------------
@parametrize("row", ['{"question": "x", "answer": "18"}', '{"answer": "#### 1"}', "18"])
def test_a_broken_row_of_data_is_named(row, demo, tmp_path):
    good = '{"question": "x", "answer": "6*3=18\\n#### 1,018"}'
    (tmp_path / "train.jsonl").write_text(good + "\n" + row)
    with raises(ValueError, match="train data, row with index 1"):
        demo.load_gsm8k(tmp_path)


def test_the_demos_reward_takes_strings_and_chats(demo):
    completions = [[{"content": r"18, so \boxed{\$1018}"}], r"\boxed{1}", "1018"]
    assert demo.boxed_reward(None, completions, 3 * ["1,018"], other=None) == [1.5, 0.5, 0.0]


@parametrize("strictly, leniently, texts", [
    (1, 1, [r"\boxed{7}, so \boxed{1,000}", r"$\boxed{1000}$"]),
    (0, 1, ["it is 1,000.", "7 dollars, or $1000.", "5-1000"]),  # no sign after a digit
    (0, 0, [r"\boxed{7}, or 1000", "-1000", "1000 of 7", "no idea", "", r"\boxed{}"])])
def test_the_last_box_counts_and_leniently_the_last_number_where_no_box_is(
        strictly, leniently, texts, demo, monkeypatch):
    monkeypatch.setattr(demo, "sample_groups", lambda model, tokenizer, part, *settings: [
        [SimpleNamespace(text=example["prompt"])] for example in part])
    data = [{"prompt": text, "answer": "1000"} for text in texts]
    found = demo.evaluate(tiny_model(), None, data, 9, sampling_batch_size=2)
    assert (found["accuracy"], found["lenient_accuracy"]) == (strictly, leniently)


def test_the_interval_of_an_evaluation_is_wilsons(demo):
    assert demo.wilson(0.1, 10) == approx([0.0179, 0.4042], abs=1e-4)


# ---- Runs ---------------------------------------------------------------------------------
def test_without_a_gpu_it_is_the_rehearsal_and_learns(call_demo, demo, capsys):
    call_demo("--steps 10 --show_steps 0 --output run")
    assert demo.HABIT_FOUND in capsys.readouterr().out
    before, after = json.loads(Path("run/results.json").read_text()).values()
    assert before["sampled_accuracy"] < 0.35 and before["accuracy"] < 0.15
    assert min(after["accuracy"], after["sampled_accuracy"]) > 0.8


def test_what_a_run_shows_and_writes(call_demo, capsys):
    call_demo(LONGER + "run")
    text = capsys.readouterr().out
    end = r"  all groups.*?sampling \d\.\d\d s, update \d\.\d\d s$"
    groups = re.findall(r"^step (\d+): (.*?)" + end, text, re.M | re.S)
    assert [step for step, _ in groups] == ["1", "2", "4"]  # at first 1, 2, 4, 8, 16, 32
    for _, group in groups:  # equal completions are in one line
        assert sum(map(int, re.findall(r"(\d) x  reward", group))) == 8
    assert list(json.loads(Path("run/results.json").read_text())) == ["before", "step 2", "after"]
    exec(textwrap.dedent(text.split("To ask the model:\n")[1]), {})  # it loads the model


def test_model_and_data_may_be_folders(call_demo, demo, pretrained, tmp_path, capsys):
    """The run on GSM8K, but for the size."""
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"question": "How many?", "answer": "#### 7"}')
    for part in pretrained[:2]:  # model and tokenizer
        part.save_pretrained("tiny")
    call_demo("--data . --model tiny --steps 1 --prompts_per_step 1 --max_completion_length 9 "
              "--output run")
    assert demo.NOT_LEARNED in capsys.readouterr().out


def test_training_and_evaluation_multiply_in_one_precision(call_demo, monkeypatch):
    seen = Mock(wraps=grpo.selective_log_softmax)
    monkeypatch.setattr(grpo, "selective_log_softmax", seen)
    call_demo(SHORT + "--bf16 True")
    assert {call.args[0].dtype for call in seen.call_args_list} == {torch.bfloat16}


@parametrize("flags, said", [
    ("--rehearsal --num_generations 1", "num_generations is 1"), ("--rehersal", "--rehersal"),
    ("--rehearsal --max_completion_length 99999", "max_completion_length is 99999"),
    ("--rehearsal --eval_questions 0", "eval_questions 0"),
    ("--rehearsal --model x", "leave out --model"), ("--data no --model x", "cannot load no"),
    ("--resume --output no", "no run to go on with in no")])
def test_wrong_flags_end_in_one_line_and_write_nothing(flags, said, call_demo, tmp_path):
    with raises(SystemExit, match=f"^stopped: .*{said}.*$"):
        call_demo(flags)
    assert not [*tmp_path.iterdir()]


@parametrize("flags, said", [
    (SHORT, "run holds a run"), ("--resume --output run --seed 5", "seed is 0 there, 5 here"),
    ("--resume --output run --eval_questions 8", "eval_questions is 1 there, 8 here")])
def test_a_folder_of_another_run_is_refused(flags, said, call_demo):
    call_demo(SHORT)
    with raises(SystemExit, match=said):
        call_demo(flags)


@parametrize("function, call", [  # `evaluate`: before 1, 2; after step 2: 3, 4; after: 5, 6
    ("evaluate", 1), ("boxed_reward", 2), ("evaluate", 5)])  # boxed_reward: in step 2
def test_after_ctrl_c_the_printed_command_goes_on(function, call, call_demo, demo, monkeypatch,
                                                  capsys):
    call_demo(LONGER + "undisturbed")
    with monkeypatch.context() as patch, raises(SystemExit):
        works = getattr(demo, function)
        patch.setattr(demo, function, fails_from_call(call, works, KeyboardInterrupt))
        call_demo(LONGER + "'a folder'")
    _, command = capsys.readouterr().err.split("To go on: python 'my code/gsm8k_demo.py' ")
    call_demo(command)
    found, expected = (Path(name, "results.json") for name in ("a folder", "undisturbed"))
    assert found.read_text() == expected.read_text()


@parametrize("function, flag", [("draw_tokens", "sampling_batch_size 128"),
                                ("grpo_loss", "micro_batch_size 32")])
def test_out_of_memory_names_the_flag_and_the_command(function, flag, call_demo, monkeypatch):
    with monkeypatch.context() as patch, raises(SystemExit, match="out of memory") as stopped:
        patch.setattr(grpo, function, Mock(side_effect=torch.OutOfMemoryError))
        call_demo(SHORT)
    _, command = str(stopped.value).split("To go on: python 'my code/gsm8k_demo.py' ")
    assert command.endswith("--" + flag)
    call_demo(command)


# ---- The gallery of mistakes --------------------------------------------------------------
@pytest.fixture
def gallery(demo, monkeypatch):
    """.ci/gallery.py trains with one mistake at a time: it replaces code of grpo.py."""
    monkeypatch.syspath_prepend(Path(grpo.__file__).parent / ".ci")
    return importlib.import_module("gallery")


def test_every_mistake_of_the_gallery_can_still_be_made(gallery):
    """`with_other_code` raises an error if grpo.py has other code. Then mend the gallery."""
    codes = [changes["code"] for changes in gallery.GALLERY.values() if "code" in changes]
    assert len([gallery.with_other_code(*code) for code in codes]) > 9


@parametrize("mistake, figure, least, most", [
    ("targets not shifted", "sampler_gap", 5, 20), ("sampled at 0.6", "sampler_gap", 0.005, 0.05),
    ("one end token known", "truncated_fraction", 1, 1)])
def test_a_loud_mistake_shows_in_the_first_step(mistake, figure, least, most, gallery, pretrained):
    model, tokenizer, train_data, _ = copy.deepcopy(pretrained)
    [metrics] = gallery.train(mistake, model, tokenizer, train_data, steps=1)
    assert least <= metrics[figure] <= most


# ==== The README ===========================================================================
@pytest.fixture
def readme():
    return Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")


def test_the_flags_of_the_readme_exist(readme, demo):
    flags = vars(GRPOConfig()) | vars(demo.DemoConfig())
    found = set(re.findall(r"--(\w+)", readme))
    assert "beta" in found and found <= {*flags, "help", "nproc_per_node", "seeds"}


def test_the_script_of_the_readme_runs(readme, pretrained, tmp_path):
    """In a process of its own, and with the rehearsal's model."""
    [script] = [s for s in re.findall(r"```python\n(.*?)```", readme, re.S) if "sums.py" in s]
    (tmp_path / "sums.py").write_text(script, encoding="utf-8")
    for part in pretrained[:2]:  # model and tokenizer
        part.save_pretrained(tmp_path / "tiny")
    found = subprocess.run(
        [sys.executable, "sums.py", "tiny", "5"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(grpo.__file__).parent), "OMP_NUM_THREADS": "1"})
    assert re.findall(r"^(\w+, \w+): \d+ of 100 right$", found.stdout, re.M) == [
        "before, greedy", "before, sampled", "after, greedy", "after, sampled"], found.stderr
    assert len(log_of(tmp_path / "runs/sums-5")) == 20
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs/sums-5")
