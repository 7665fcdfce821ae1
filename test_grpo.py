# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py: the second half of the tutorial.

    python -m pytest -q test_grpo.py

They run offline, on the CPU. First come the worked numbers of five documents about GRPO, then the
sections of grpo.py, with its numbers and in its order. (Only section 7, the loop, comes last. It
needs all the others.) The demo, the gallery of mistakes and the README end the file. A "slow"
function computes the same in a plain way. Change a line of grpo.py, and see what goes red!"""

import ast
import copy
import inspect
import itertools
import json
import math
from math import inf, isfinite, nan
import random
import re
import runpy
import shlex
import string
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from torch import arange, equal, ones, tensor, zeros
from tokenizers import models, pre_tokenizers, Tokenizer
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING,
                          PreTrainedTokenizerFast)

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import gallery  # noqa: E402
import grpo  # noqa: E402
import gsm8k_demo  # noqa: E402
from grpo import (average, clipped_surrogate, Completion, compute_logprobs, end_token_ids,
                  extract_boxed, group_advantages, grpo_loss, GRPOConfig, k3_kl, kl_estimate,
                  masked_mean, overlong_penalty, rule_reward, sample_groups, token_logprobs,
                  train)  # noqa: E402

torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up


def numbers(*rows):
    """A tensor in float64 of the numbers in a text, or of those in several, one for each row."""
    rows = [[float(word) for word in row.split()] for row in rows]
    return tensor(rows if len(rows) > 1 else rows[0], dtype=torch.float64)


def flat(values):
    """Numbers in any form, also as a text, in one row."""
    values = numbers(values) if isinstance(values, str) else values
    return torch.as_tensor(values, dtype=torch.float64).detach().flatten()


def agrees(actual, expected, within=1e-6, relatively=0):
    """Each number is the expected one, up to `within` + `relatively` * its size."""
    torch.testing.assert_close(flat(actual), flat(expected), atol=within, rtol=relatively)


def gradient(function, x):
    """The gradient of function(x), which is one number."""
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


def refused(said):
    """The block below must raise a ValueError that says this."""
    return pytest.raises(ValueError, match=said)


def each(names, table):
    """A test for each row of the table. If it is a dict, its keys are the names of the cases."""
    if isinstance(table, dict):
        return pytest.mark.parametrize(names, table.values(), ids=table)
    return pytest.mark.parametrize(names, table)


@pytest.fixture
def printed(capsys):
    """Gives what has been printed since it was last asked."""
    return lambda: capsys.readouterr().out


# ==== The worked numbers of the documents ==================================================
# The tests follow each document in its order, and name section and line. The documents are:
#
#   Scratch    "Group-Relative Policy Optimization (GRPO) — From Scratch", an article
#   Book       "Reinforcement Learning from Human Feedback" by Nathan Lambert, rlhfbook.com, in
#              the edition that has "Policy Gradient Algorithms" as chapter 11
#   Explained  "GRPO Objective Function Explained", a tutorial
#   Hands-on   "9.3 Hands-on: GRPO Training and Core Mechanisms", a section of a course
#   RLinf      "组相对策略优化 (GRPO)", of the documentation at rlinf.readthedocs.io
#
# `rounds_to` compares with a figure as it is printed. Memory, cards and models have no part in
# grpo.py. What the documents say about them:
#   Scratch 75: the critic "doubles" the memory. By line 89, it is 7 of 28 billion weights: 25 %.
#   Scratch 231: "G = 64" for R1. It had 16. DeepSeekMath had 64.
#   Hands-on 350: "8,500 problems" for GSM8K. It has 8,792.
#   Hands-on 514, 737, 803: "30-40%" is saved. By the table in 731 it is 42, 40, 40 and 40 %.

def rounds_to(values, figures):
    """Each value, rounded, is the figure that is printed, as "1.07"."""
    places = tensor([len(figure.partition(".")[2]) for figure in figures.split()])
    assert ((flat(values) - flat(figures)).abs() < 0.5 * 10.0**-places).all()


def one_token(*, pi, old, ref, advantage, beta):
    """Loss and metrics of a token with these probabilities under pi_theta, pi_old and pi_ref."""
    policies = tensor([pi, old, ref]).log().view(3, 1, 1)
    return grpo_loss(*policies, tensor([advantage]), ones(1, 1), beta=beta)


def slopes_at_ratio_1(advantages, mask):
    """The gradient of the loss for each log-prob, without KL, where pi_theta is still pi_old."""
    old = zeros(mask.shape)
    return gradient(lambda pi: grpo_loss(pi, old, None, advantages, mask, beta=0)[0], old)


# ---- What several documents have ----------------------------------------------------------
FIVE = numbers("2.0 3.5 1.0 4.0 2.5")  # Scratch's rewards
FIVE_ADVANTAGES = "-0.561951 0.842927 -1.498537 1.311220 -0.093659"
P, Q = numbers("0.1 0.2 0.4 0.3"), numbers("0.4 0.3 0.2 0.1")  # any two policies, of ours


@each("rewards, scale_rewards, right", {
    "Scratch, 128 to 134: its five": (FIVE, "group", FIVE_ADVANTAGES),
    "Scratch, 136: all rewards higher": (FIVE + 100, "group", FIVE_ADVANTAGES),
    "Scratch, 136: on another scale": (3 * FIVE, "group", FIVE_ADVANTAGES),
    "Book, 107: few are right": ("1 0 0 0 0 0 0 0", "group", "2.645751" + 7 * " -0.377964"),
    "Book, 107: half are right": ("1 1 1 1 0 0 0 0", "group", "1 1 1 1 -1 -1 -1 -1"),
    "Book, 109: with the std": ("1 1 0 0", "group", "1 1 -1 -1"),
    "Book, 109: without it, half as large": ("1 1 0 0", "none", "0.5 0.5 -0.5 -0.5"),
    "Hands-on, 33: less 0.625": ("1.5 1.0 0.0 0.0", "none", "+0.875 +0.375 -0.625 -0.625"),
    "Hands-on, 403: two right of three": ("1 1 0", "group", "0.707107 0.707107 -1.414214"),
    "Hands-on, 337, 589, 757; Scratch, 268: equal": ("1.5 1.5 1.5", "group", "0 0 0"),
    "Hands-on, 567: all wrong": ("0 0 0", "group", "0 0 0"),
    # A group of two says only who is better. Its statistics are poor.
    "Hands-on, 766, 789: two": ("1.5 0.5", "group", "1 -1"), "any two": ("7 3", "group", "1 -1")})
def test_advantages_in_the_documents(rewards, scale_rewards, right):
    agrees(group_advantages(flat(rewards), scale_rewards), right)


@each("pi, old, ratio", [(0.26, 0.2, 1.3), (0.5, 0.5, 1), (0.6, 0.5, 1.2), (0.4, 0.5, 0.8)])
def test_ratios_in_scratch_and_hands_on(pi, old, ratio):
    """Scratch, Quick Recap, line 48: 30 % more likely. Hands-on, 9.3.2, line 623: 0, +20, -20 %."""
    _, metrics = one_token(pi=pi, old=old, ref=old, advantage=1, beta=0)
    agrees(metrics["ratio_max"], ratio)


def test_k3_in_scratch_and_explained():
    """Scratch, The Full GRPO Objective, lines 180 to 188. Explained, line 143, is our k3, too."""
    policy, diff = numbers("0.2 0.2 0.2").log(), numbers("1 2 0.5").log()
    k3 = k3_kl(policy, policy + diff)
    agrees(diff, "0 0.693147 -0.693147")
    agrees(k3, "0 0.306853 0.193147")
    agrees(diff.exp() - diff - 1, k3)
    rounds_to([diff[1], k3[1]], "0.693 0.307")
    # Line 188: it pushes back. At the ratio 2 log pi_theta is too low, and descent raises it.
    agrees(gradient(lambda logprobs: k3_kl(logprobs, policy + diff).sum(), policy), "0 -1 0.5")


def test_k3_is_0_at_log_r_0_and_grows_on_either_side():
    """Explained, Derivation, lines 129 to 131. Hands-on, 9.3.2, lines 683 and 685."""
    log_r = arange(0, 5, 0.1)
    for k3 in (k3_kl(0 * log_r, log_r), k3_kl(0 * log_r, -log_r)):
        assert k3[0] == 0 and (k3.diff() > 0).all()


def test_the_sign_of_the_loss_in_three_documents():
    """Book 301 (there J = A - beta KL), Explained 259, Hands-on 689: -A + beta KL, where A is 1 and
    k3 is 0.306853. Hands-on 691: a larger beta makes it dearer to be away from the reference."""
    losses = [one_token(pi=0.2, old=0.2, ref=0.4, advantage=1, beta=beta)[0]
              for beta in (0, 0.04, 0.4)]
    agrees(losses, "-1 -0.987726 -0.877259")


def test_shapes_in_book_scratch_and_rlinf():
    """Book, 309 to 332. Scratch, 273 to 305. RLinf, 31: all tokens get their answer's advantage."""
    per_token = clipped_surrogate(ones(5, 3), group_advantages(FIVE))  # 3 tokens, at ratio 1
    for token in per_token.T:
        agrees(token, FIVE_ADVANTAGES)
    assert per_token.shape == k3_kl(per_token, per_token).shape == (5, 3)
    assert average(per_token, ones(5, 3)).shape == ()


def test_sums_in_the_documents_that_call_nothing_of_grpo():
    """They check the arithmetic of the documents alone."""
    agrees([0.99 * 5.5, 1 + 0.99 * 5.5 - 5.0], "5.445 1.445")  # Scratch 69: a TD residual
    agrees([16 - 3 - 4, 9 * 7, 15 - 3], "9 63 12")  # Hands-on 377, 502
    # Book 34: the expected gradient of log pi, which makes a baseline cost nothing; here pi is Q.
    agrees(gradient(lambda logits: Q @ logits.log_softmax(0), Q.log()), "0 0 0 0")
    # Book 361: two forms of GAE (PPO's), from TD residuals.
    agrees([0.3 + 0.95 * (0.3 + 0.95 * 0.2), 0.3 + 0.95 * 0.3 + 0.95**2 * 0.2], "0.7655 0.7655")
    # Explained 223: exp(88) is said to be too large. bfloat16 holds it, but not exp(89).
    agrees(math.exp(88) / 1e38, 1.651636)
    assert numbers("88 89").bfloat16().exp().isinf().tolist() == [False, True]


# ---- Scratch ------------------------------------------------------------------------------
def test_scratch_clip_at_ratio_1_3():
    """Scratch, Quick Recap, lines 50 to 55: ratio 1.3, advantage 2.0, epsilon 0.2."""
    ratio = numbers("1.3")[None]
    agrees(clipped_surrogate(ratio, numbers("2.0"), epsilon=99), 2.6)  # unclipped
    agrees(clipped_surrogate(ratio, numbers("1.0"), epsilon=0.2), 1.2)  # the clipped ratio
    agrees(clipped_surrogate(ratio, numbers("2.0"), epsilon=0.2), 2.4)


def test_scratch_mean_and_std_of_five():
    """Scratch, The Key Insight, lines 123 to 134: the std is divided by G."""
    squares = group_advantages(FIVE, "none").square()
    agrees([FIVE.sum(), FIVE.mean(), squares.sum(), squares.mean()], "13.0 2.6 5.7 1.14")
    agrees(squares, "0.36 0.81 2.56 1.96 0.01")
    rounds_to([squares.mean().sqrt(), *group_advantages(FIVE)],
              "1.07 -0.56 +0.84 -1.50 +1.31 -0.09")


def test_scratch_code_divides_by_one_less_than_its_text():
    """Scratch, line 258, by torch's std. No figure is that of the text. (Hands-on, 577, too.)"""
    advantages = (FIVE - FIVE.mean()) / FIVE.std()
    agrees(FIVE.std(), 1.193734)
    agrees(advantages, "-0.502625 0.753937 -1.340333 1.172791 -0.083771")
    agrees(group_advantages(FIVE) * (4 / 5) ** 0.5, advantages)


def test_scratch_logs_are_subtracted_because_small_probabilities_vanish():
    """Scratch, Practical Implementation, line 310: here e^-200 and e^-201, in float32."""
    pi, old = tensor([[-200.0]]), tensor([[-201.0]])
    _, metrics = grpo_loss(pi, old, None, ones(1), ones(1, 1), beta=0)
    agrees(metrics["ratio_max"], math.e)
    assert pi.exp() == old.exp() == 0


# ---- Book ---------------------------------------------------------------------------------
# The losses of two answers, of 5 and of 10 tokens; 0 is padding.
LOSSES = numbers("1 1 1 1 10 0 0 0 0 0", "1 1 1 1 1 1 1 1 1 10")
LOSS_MASK = LOSSES > 0
# The Book's script, 11.2.2: answers of 4 and 7 tokens, ratios of 1 there, and both advantages 2.
SCRIPT_MASK = numbers("1 1 1 1 0 0 0", "1 1 1 1 1 1 1")
SCRIPT_RATIOS = SCRIPT_MASK  # they are 1 where the mask is


def slopes_by_script(loss_type):
    """The gradient of the script's average with respect to each ratio."""
    def script(ratios):
        return average(2 * ratios, SCRIPT_MASK, loss_type, max_completion_length=7)
    return gradient(script, SCRIPT_RATIOS)


def test_book_three_forms_of_rloo():
    """Book, 11.1.2.1, 11.1.4, 11.2.4.1, lines 60, 113, 345: the rewards are Scratch's."""
    right = "-0.75 1.125 -2 1.75 -0.125"
    mean_of_the_others = (FIVE.sum() - FIVE) / (5 - 1)
    agrees(FIVE - mean_of_the_others, right)
    agrees(group_advantages(FIVE, "none") * 5 / (5 - 1), right)
    agrees(group_advantages(FIVE, "rloo"), right)


def test_book_cases_of_the_clip():
    """Book, 11.1.3, lines 78 to 93. (Hands-on, line 634, has the same interval, [0.8, 1.2].)"""
    ratios = numbers("1.5 0.9 0.5", "1.5 0.9 0.5")
    agrees(clipped_surrogate(ratios, numbers("1 -1")), "1.2 0.9 0.5 -1.5 -0.9 -0.8")


def test_book_cases_of_the_policy_gradient():
    """Book, 11.2.1, lines 129 to 131; 11.1.3, line 76: the ratios after a step of descent."""
    slopes = slopes_at_ratio_1(numbers("1 -1 0"), ones(3, 1))
    agrees(3 * slopes, "-1 1 0")  # the loss is a mean over three
    better, worse, neither = (-0.1 * slopes).exp()
    assert better > 1 and neither == 1 and worse < 1


def test_book_mean_of_all_tokens_is_33_and_not_34_over_15():
    """Book, 11.2.2, lines 150 to 155: answers of 5 and 10 tokens; 2.27 is a misprint."""
    agrees(masked_mean(LOSSES, LOSS_MASK, dim=1), "2.8 1.9")
    agrees(average(LOSSES, LOSS_MASK, "grpo"), 2.35)  # answers count equally
    tokens_alike = average(LOSSES, LOSS_MASK, "dapo")
    agrees([tokens_alike, (14 + 19) / 15], "2.2 2.2")


def test_book_script_results():
    """Book, 11.2.2, lines 235 to 237."""
    losses = 2 * SCRIPT_RATIOS  # both advantages are 2
    agrees(masked_mean(losses, SCRIPT_MASK, dim=1), "2 2")
    sums = [average(loss[None], mask[None], "dr_grpo", max_completion_length=7)
            for loss, mask in zip(losses, SCRIPT_MASK)]
    rounds_to(sums, "1.1429 2.0000")
    agrees(average(losses, SCRIPT_MASK, "dr_grpo", max_completion_length=7), sum(sums) / 2)
    agrees(masked_mean(SCRIPT_RATIOS, SCRIPT_MASK), 1)  # line 212 leaves out the advantages
    agrees(average(losses, SCRIPT_MASK, "dapo"), 2)


def test_book_script_gradients():
    """Book, lines 241, 246. 251 adds two gradients up, and the second lacks the advantage, 2."""
    of_mean, of_sum = slopes_by_script("grpo"), slopes_by_script("dr_grpo")
    agrees(of_mean, SCRIPT_MASK / tensor([[4], [7]]))
    rounds_to(of_mean, 4 * "0.2500 " + 3 * "0.0000 " + 7 * "0.1429 ")
    agrees(of_sum, SCRIPT_MASK / 7)
    rounds_to(of_sum, 4 * "0.1429 " + 3 * "0.0000 " + 7 * "0.1429 ")
    tokens_alike = gradient(lambda ratios: masked_mean(ratios, SCRIPT_MASK), SCRIPT_RATIOS)
    agrees(tokens_alike, SCRIPT_MASK / 11)
    rounds_to(of_sum + tokens_alike, 4 * "0.2338 " + 3 * "0.0000 " + 7 * "0.2338 ")  # line 251
    agrees(slopes_by_script("dapo"), SCRIPT_MASK * 2 / 11)  # right for 251


def test_book_only_the_mean_of_each_answer_favours_the_short_one():
    """Book, 11.2.2, line 254: a token's gradient, short answer over long answer. (It also warns of
    gradient accumulation. Ours does not depend on it: see "one by one" in section 7.)"""
    for loss_type, favour in (("grpo", 1.75), ("dr_grpo", 1), ("dapo", 1)):
        short, long = slopes_by_script(loss_type)[:, 0]
        agrees(short / long, favour)


def test_book_printed_sign_rewards_leaving_the_reference():
    """Book, 11.2.4, line 305, prints L - beta KL, which is our loss with -beta."""
    for beta, order in ((1, [0, 1, 2]), (-1, [2, 1, 0])):
        losses = [one_token(pi=pi, old=pi, ref=0.4, advantage=0, beta=beta)[0]
                  for pi in (0.4, 0.2, 0.1)]  # further and further away
        assert tensor(losses).argsort().tolist() == order


def test_book_two_orders_of_the_same_flat_rewards():
    """Book, lines 310 and 343: in the first listing, three answers in a row belong to one question.
    The second reads the same rewards in another order, and gets other groups."""
    rewards = numbers("1 1 1 0 0 0")
    assert not group_advantages(rewards.view(-1, 3)).any()
    columns = rewards.reshape(3, -1).T
    assert columns.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert group_advantages(columns).all()


# ---- Explained ----------------------------------------------------------------------------
# Here the tokens are drawn from q, which is pi_theta, and p is pi_ref.
def test_explained_k3_is_unbiased():
    """Explained, lines 111 to 125. E[k1 + lambda * (r - 1)] is the KL for any lambda."""
    r, exact = P / Q, Q @ (Q / P).log()
    agrees([P.sum(), Q.sum(), Q @ (r - 1), exact], "1 1 0 0.427667")
    agrees(Q @ k3_kl(Q.log(), P.log()), exact)
    k1 = kl_estimate(Q.log(), P.log(), "kl")
    for lam in (0, 0.5, 1):
        agrees(Q @ (k1 + lam * (r - 1)), exact)


def test_explained_k3_has_a_lower_variance_than_k1():
    """Explained, lines 112 and 326: with P and Q. (Far from the reference, it is not so.)"""
    variances = [Q @ kl_estimate(Q.log(), P.log(), name).square() - (Q @ (Q / P).log())**2
                 for name in ("kl", "low_var_kl")]
    agrees(variances, "0.851932 0.080692")


def test_explained_a_mask_by_pad_token_hides_the_end_token():
    """Explained, line 205. Where padding is the end token (7 here), the end gets no gradient."""
    ids = numbers("5 6 7 7")[None]  # two tokens, the end, and padding
    by_position = numbers("1 1 1 0")[None]
    agrees(slopes_at_ratio_1(ones(1), by_position), [-1 / 3, -1 / 3, -1 / 3, 0])
    agrees(slopes_at_ratio_1(ones(1), ids != 7), [-1 / 2, -1 / 2, 0, 0])


def test_explained_clip_at_50_is_wrong_below():
    """Explained, line 224: diff is log(pi_ref/pi_theta), clipped to [-50, 50]. Below, that stops
    the gradient: what has gone furthest is not pulled back. (Above, ours stops it, too.)"""
    def clipped_k3(diff):
        cut = diff.clamp(-50, 50)
        return (cut.exp() - cut - 1).sum()
    def ours(diff):
        return k3_kl(-diff, 0 * diff).sum()
    below, at_50, above = numbers("-60"), numbers("50"), numbers("60")
    agrees([clipped_k3(below), ours(below)], "49 59")
    agrees([gradient(clipped_k3, below), gradient(ours, below)], "0 -1")
    agrees([ours(at_50) / 1e21, ours(above) / 1e21], "5.184706 5.184706")  # e^50
    agrees([gradient(clipped_k3, above), gradient(ours, above)], "0 0")


# ---- Hands-on -----------------------------------------------------------------------------
def course_reward(text, answer):
    """The rule of the course, lines 387 to 397. Its pattern takes the first box."""
    box = re.search(r"\\boxed\{([^}]+)\}", text)
    if not box:
        return 0.0
    return 1.5 if box[1].strip() == answer else 0.5


def boxed_rewards(answers, right):
    """Our rewards for answers that are in boxes."""
    boxes = [rf"\boxed{{{answer}}}" for answer in answers.split()]
    return tensor([rule_reward(box, right) for box in boxes])


def test_hands_on_apple_scores_break_its_rule():
    """Hands-on, lines 25 to 29: printed are 1.5, 1.0, 0.0, 0.0. Even in a box, none earns 1.0."""
    apples = ["3 + 2 = 5, so the answer is 5.", "The answer is 5.", "It should be 6.",
              "I am not sure, perhaps it is 4."]
    graded = [rule_reward(text, "5") for text in apples]
    assert graded == [course_reward(text, "5") for text in apples] == [0, 0, 0, 0]
    agrees(boxed_rewards("5 5 6 4", "5"), "1.5 1.5 0.5 0.5")


@each("reward", [rule_reward, course_reward])
def test_hands_on_rule(reward):
    """Hands-on, 9.3.1, lines 352 to 381: +1.0 for the answer, +0.5 for the box."""
    agrees([reward(text, "7") for text in (r"\boxed{7}", r"\boxed{8}", "7")], "1.5 0.5 0")
    good = ("First compute the eggs left each day: 16 - 3 - 4 = 9.\n"
            "There are 7 days in a week, so she can sell: 9 * 7 = 63.\n\\boxed{63}")
    bad = "I think she can sell about 50 eggs. \\boxed{50}"
    agrees([reward(good, "63"), reward(bad, "63")], "1.5 0.5")


def test_hands_on_its_loop_grades_other_than_ours():
    """Line 365 takes the first box. Line 394 compares strings (and 369, before, numbers)."""
    text = r"\boxed{50}? No: \boxed{63}"
    agrees([rule_reward(text, "63"), course_reward(text, "63")], "1.5 0.5")
    agrees([rule_reward(r"\boxed{63.0}", "63"), course_reward(r"\boxed{63.0}", "63")], "1.5 0.5")


def test_hands_on_steps_alone_earn_nothing():
    """Hands-on, 9.3.1, lines 494 to 506: the answer is right before and after the training."""
    before = "I think there are 7 left. \\boxed{7}"
    after = "Let me calculate step by step:\n- John starts with 15 apples. [...]\n\\boxed{7}"
    rewards = tensor([rule_reward(before, "7"), rule_reward(after, "7")])
    agrees(rewards, "1.5 1.5")
    assert not group_advantages(rewards).any()


@each("answers, advantages, theirs, their_sum", {
    # The right answer is 15 - 3 - 5 = 7. In what is printed, the wrong 15 has the most.
    "line 747": ("3 7 12 7 15 7 8 10", "-0.774597 1.290994 -0.774597 1.290994 -0.774597 1.290994 "
                 "-0.774597 -0.774597", "-1.2 +0.1 +0.8 +0.1 +1.5 +0.1 -0.3 +0.6", 1.7),
    "line 752": ("7 7 7 8 7 7 7 7", 3 * "0.377964 " + "-2.645751" + 4 * " 0.377964",
                 "0 0 0 -0.5 0 0 0 0", -0.5)})
def test_hands_on_printed_advantages_do_not_sum_to_0(answers, advantages, theirs, their_sum):
    """Hands-on, 9.3.3, early and middle in the training."""
    agrees(group_advantages(boxed_rewards(answers, "7")), advantages)
    agrees([numbers(advantages).sum(), numbers(theirs).sum()], [0, their_sum], within=1e-5)


def test_hands_on_eight_rewards_have_another_mean_and_std_and_other_advantages():
    """Hands-on, lines 785, 786: the printed mean is 7/8, and the std the spread around it."""
    rewards = numbers("1.5 0.0 1.5 0.0 1.0 1.5 0.5 1.5")
    agrees([rewards.mean(), rewards.std(correction=0)], "0.9375 0.634306")
    rounds_to([7 / 8, (rewards - 7 / 8).square().mean().sqrt()], "0.875 0.637")  # printed
    advantages = group_advantages(rewards)
    agrees(advantages, "0.886796 -1.477994 0.886796 -1.477994 0.098533 0.886796 -0.689730 0.886796")
    agrees([advantages.sum(), advantages.square().sum()], "0 8")
    theirs = numbers("0.82 -1.23 0.82 -1.23 0.12 0.82 -0.53 0.82")
    agrees([theirs.sum(), theirs.square().sum()], "0.41 6.0107")


# ---- RLinf --------------------------------------------------------------------------------
def test_rlinf_token_mean_depends_on_the_micro_batches():
    """RLinf, lines 45, 78, 92, with the Book's losses. Its default is micro-batches of one answer
    that count alike. `use_valid_token_scale` weighs them by their tokens."""
    means = [average(LOSSES[i : i + 1], LOSS_MASK[i : i + 1], "dapo") for i in (0, 1)]
    agrees([sum(means) / 2, average(LOSSES, LOSS_MASK, "grpo")], "2.35 2.35")
    by_tokens = (5 * means[0] + 10 * means[1]) / 15
    agrees([by_tokens, average(LOSSES, LOSS_MASK, "dapo")], "2.2 2.2")


def test_rlinf_four_names_of_a_kl():
    """RLinf, section 3, line 84, and Book, 11.2.3, line 289 ("mse", which is k2)."""
    pi, ref = numbers("0.2").log(), numbers("0.4").log()
    estimates = [kl_estimate(pi, ref, name) for name in ("low_var_kl", "kl", "abs", "mse")]
    agrees([kl_estimate(pi, ref), *estimates], "0.306853 0.306853 -0.693147 0.693147 0.240227")


# ==== The sections of grpo.py ==============================================================
# ---- 1. Advantages ------------------------------------------------------------------------
@each("rewards, scale_rewards, right", {
    "std": ("0 1 1 2", "group", "-1.414214 0 0 1.414214"),
    "no std": ("0 1 1 2", "none", "-1 0 0 1"),
    "rloo: 2 - 2/3, the mean of the others": ("0 1 1 2", "rloo", "-1.333333 0 0 1.333333"),
    "tiny differences count, too": ("0 1e-9", "group", "-1 1"),
    "too fine for float32": ("1 1.000002 1.000006", "group", "-1.069045 -0.267261 1.336306")})
def test_advantages_by_hand(rewards, scale_rewards, right):
    advantages = group_advantages(numbers(rewards)[None], scale_rewards)
    agrees(advantages, right)
    assert advantages.dtype == torch.float32


def test_batch_divides_by_the_std_of_all_groups_together():
    rewards = numbers("0 2", "1 1")  # the std of all four is sqrt(1/2)
    agrees(group_advantages(rewards, "batch"), [-2**0.5, 2**0.5, 0, 0])


@each("scale_rewards", ["group", "none", "batch", "rloo"])
@each("rewards", ["0.30000000000000004 0.3 0.3", "1 1.0000004 1", "100000001 100000000 100000000",
                  "-7 -7.000001 -7", "0 0 0"])  # the first is 0.1 + 0.2
def test_rewards_that_are_equal_to_a_millionth_give_exactly_0(rewards, scale_rewards):
    """A second group, 1 2 3, gives the batch a std that is not tiny."""
    advantages = group_advantages(numbers(rewards, "1 2 3"), scale_rewards)
    assert advantages[0].tolist() == [0, 0, 0]


@each("said, rewards, scale_rewards", [
    ("two or more", "1", "group"), ("'std', not one of .*rloo", "1 2", "std")])
def test_a_group_of_one_and_an_unknown_scale_are_refused(said, rewards, scale_rewards):
    """A group needs two: RLinf, section 4, line 99."""
    with refused(said):
        group_advantages(numbers(rewards), scale_rewards)


@each("bad", ["nan", "inf", "-inf"])
def test_rewards_that_are_not_finite_show(bad):
    assert not group_advantages(numbers(f"{bad} 1 1")).isfinite().all()


# ---- 2. Ratio and clip: see the documents above, and section 5 below ----------------------
# ---- 3. The KL penalty --------------------------------------------------------------------
# Exact expected values, over a vocabulary of five tokens, without sampling. The policies are far
# apart. If they were close, both directions of the KL would be nearly equal.
POLICY = numbers("0.55 0.25 0.1 0.05 0.05")
OLD = numbers("0.1 0.2 0.4 0.2 0.1")
REFERENCE = numbers("0.03 0.07 0.15 0.3 0.45")
TOKEN_REWARDS = numbers("0 2 1 5 3")


@each("pi_old, settings, descended_kl", {
    "k1: none": (POLICY, dict(kl_penalty_type="kl"), lambda p: 0 * p.sum()),
    "k2: KL(pi_theta || pi_ref)": (POLICY, dict(kl_penalty_type="mse"),
                                   lambda p: p @ (p / REFERENCE).log()),
    # The average of k3's gradient, (1 - ref / p) * grad log p, is that of this KL.
    "k3: KL(pi_ref || pi_theta)": (POLICY, {}, lambda p: REFERENCE @ (REFERENCE / p).log()),
    "k3 x ratio: KL(pi_theta || pi_ref)": (OLD, dict(use_bias_correction_kl=True),
                                           lambda p: p @ (p / REFERENCE).log())})
def test_what_the_loss_descends_on_average(pi_old, settings, descended_kl):
    """The gradient of the loss is that of (this KL - the expected reward). 20 completions of one
    token have each token as often as pi_old draws it. Nothing is clipped."""
    tokens = arange(5).repeat_interleave((20 * pi_old).round().long())
    def loss(logits):
        loss, _ = grpo_loss(
            logprobs=logits.log_softmax(0)[tokens].unsqueeze(1),
            old_logprobs=pi_old.log()[tokens].unsqueeze(1),
            ref_logprobs=REFERENCE.log()[tokens].unsqueeze(1),
            advantages=(TOKEN_REWARDS - 7)[tokens],  # 7: any baseline will do
            mask=ones(20, 1), beta=1, epsilon=99, **settings)
        return loss
    def descended(logits):
        policy = logits.softmax(0)
        return descended_kl(policy) - policy @ TOKEN_REWARDS
    agrees(gradient(loss, POLICY.log()), gradient(descended, POLICY.log()), within=1e-12)


def test_k3_is_precise_near_0_and_finite_far_away():
    """Value and gradient, at some log(pi_theta / pi_ref)."""
    def slope(log_ratio):
        return gradient(lambda x: k3_kl(x, 0 * x).sum(), log_ratio)
    log_ratio, far = numbers("1e-6 0.5 99 -30"), tensor([1e30, -1e30])
    k3 = k3_kl(log_ratio, 0 * log_ratio)
    agrees(k3, "5e-13 0.10653066 98 1.0686475e13", within=0, relatively=1e-6)
    agrees(slope(log_ratio), "1e-6 0.39346934 1 -1.0686475e13", within=0, relatively=1e-6)
    assert k3_kl(far, 0 * far).isfinite().all() and slope(far).isfinite().all()


# ---- 4. The masked mean -------------------------------------------------------------------
VALUES = numbers("1 3 nan", "inf nan 7", "8 nan -inf")
VALUES_MASK = numbers("1 1 0", "0 0 0", "1 0 0").bool()


@each("mask", [VALUES_MASK, VALUES_MASK.int(), VALUES_MASK.double()])
def test_the_masked_mean_takes_what_is_set_and_nothing_else(mask):
    agrees(masked_mean(VALUES, mask), (1 + 3 + 8) / 3)
    agrees(masked_mean(VALUES, mask, dim=1), "2 0 8")  # 0, where none is set
    agrees(masked_mean(numbers("1 2", "3 4"), mask[2:, :2]), 2)  # [[1, 0]] is for all rows
    agrees(gradient(lambda values: masked_mean(values, mask), VALUES), VALUES_MASK / 3)


def test_a_nan_that_is_not_masked_shows():
    """To hide more than the padding would hide a broken model."""
    assert masked_mean(VALUES, ones(3, 3)).isnan()


# ---- 5. The loss --------------------------------------------------------------------------
def test_the_apples_are_printed(printed):
    runpy.run_path(grpo.__file__, run_name="__main__")
    assert printed() == r"""completion        reward  advantage  ratio  surrogate      k3  gradient
3+2 = \boxed{5}      1.5        1.0    1.5        1.2  0.0721    0.0017
3+2 = \boxed{5}      1.5        1.0    1.0        1.0  0.0000   -0.1250
\boxed{5}            1.5        1.0    0.5        0.5  0.3069   -0.1350
\boxed{6}            0.5       -1.0    1.5       -1.5  0.0721    0.3783
3-2 = \boxed{1}      0.5       -1.0    0.5       -0.8  0.3069   -0.0050
3-2 = \boxed{1}      0.5       -1.0    1.0       -1.0  0.0000    0.1250
loss 0.2057
"""


@each("settings, loss", {
    "grpo": (dict(loss_type="grpo"), 0.2057), "dapo": (dict(loss_type="dapo"), 0.1051),
    "dr_grpo": (dict(loss_type="dr_grpo", max_completion_length=4), 0.0394),
    # r * k3 sums to 2 * (1.5 * 0.0721 + 0.5 * 0.3069). The loss is (0.6 + 0.04 * 0.5232) / 6.
    "r * k3": (dict(loss_type="dapo", use_bias_correction_kl=True), 0.1035)})
def test_the_loss_of_the_apples(settings, loss):
    """As worked out in section 5. Two of six tokens are clipped. The sum of k3 is 0.7580."""
    pi = numbers("0.3 0.2", "0.1 1", "0.3 1", "0.1 0.2")  # 1: padding
    old = torch.full_like(pi, 0.2).log()
    found, metrics = grpo_loss(pi.log(), old, old, numbers("1 1 -1 -1"), pi < 1, **settings)
    agrees(found, loss, within=5e-5)
    agrees([metrics["loss"], metrics["kl"]], [loss, 0.7580 / 6], within=5e-5)
    agrees([metrics["clip_fraction"], metrics["ratio_max"]], [2 / 6, 1.5])


# Settings of the loss. slow_loss computes the same with each of them.
VARIANTS = {
    "the papers": {}, "no KL": dict(beta=0), "clip-higher": dict(epsilon_high=0.28),
    "much k1": dict(epsilon=0.1, epsilon_high=0, beta=0.5, kl_penalty_type="kl"),
    "no lower bound": dict(epsilon=1.5, epsilon_high=0.1, kl_penalty_type="abs"),
    "TRL": dict(beta=0.3, use_bias_correction_kl=True),
    "k2, GSPO": dict(kl_penalty_type="mse", epsilon=0.1, importance_sampling_level="sequence")}
MAX_LENGTH = 7  # for dr_grpo
PARITY = {  # settings; the loss by TRL 1.16's own code, and sum and norm of its gradient
    "the papers": ({}, "0.2256250593892 0.115624951016 0.1918599797598"),
    "clip-higher": (dict(epsilon_high=0.28, loss_type="dr_grpo"),
                    "0.1038527163405 0.07242620397321 0.07435582204311"),
    "TRL's default KL": (dict(beta=0.3, use_bias_correction_kl=True, loss_type="dapo"),
                         "0.3110928775499 0.1974924852299 0.2083251191769"),
    "GSPO": (dict(beta=0.3, epsilon=0.1, importance_sampling_level="sequence"),
             "0.2235127094673 -0.122518523693 0.1737799087193")}


def loss_inputs():
    """Six completions of up to five tokens, one of them empty. The numbers have no pattern."""
    noise = (arange(120.0, dtype=torch.float64) ** 2).sin().view(4, 6, 5)
    lengths = tensor([[5], [1], [0], [3], [4], [2]])
    return dict(logprobs=0.4 * noise[0] - 2, old_logprobs=0.4 * noise[1] - 2,
                ref_logprobs=0.4 * noise[2] - 2, advantages=noise[3, :, 0],
                mask=arange(5) < lengths)


def slow_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, loss_type="grpo", **settings):
    """The loss, token by token."""
    config = GRPOConfig(**settings)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    losses = torch.zeros_like(old_logprobs)
    for i, t in mask.nonzero().tolist():
        ratios = (logprobs - old_logprobs)[i, mask[i]].exp()  # of the whole completion
        ratio = ratios[t]
        if config.importance_sampling_level == "sequence":
            ratio = ratios.prod() ** (1 / len(ratios))
        clipped_ratio = min(max(ratio, 1 - config.epsilon), 1 + high)
        surrogate = min(ratio * advantages[i], clipped_ratio * advantages[i])
        d = logprobs[i, t] - ref_logprobs[i, t]
        kl = {"low_var_kl": (-d).exp() + d - 1, "kl": d, "abs": d.abs(), "mse": d * d / 2}
        penalty = kl[config.kl_penalty_type]
        if config.use_bias_correction_kl:
            penalty = ratio * penalty
        losses[i, t] = -surrogate + config.beta * penalty
    if loss_type == "grpo":
        return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    return losses.sum() / (mask.sum() if loss_type == "dapo" else len(mask) * MAX_LENGTH)


def loss_slope_metrics(inputs, **settings):
    """What grpo_loss gives: the loss, its gradient for the log-probs of pi_theta, the metrics."""
    leaf = inputs["logprobs"].clone().requires_grad_()
    loss, metrics = grpo_loss(**inputs | dict(logprobs=leaf), max_completion_length=MAX_LENGTH,
                              **settings)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@each("loss_type", ["grpo", "dapo", "dr_grpo"])
@each("settings", VARIANTS)
def test_loss_and_gradient_are_the_slow_ones_whatever_the_padding_holds(settings, loss_type):
    settings = settings | dict(loss_type=loss_type)
    inputs, mask = loss_inputs(), loss_inputs()["mask"]
    leaf = inputs["logprobs"].clone().requires_grad_()
    right = slow_loss(**inputs | dict(logprobs=leaf), **settings)
    right_slope = torch.autograd.grad(right, leaf)[0]
    for padding in (1.0, nan, inf):
        for name in ("logprobs", "old_logprobs", "ref_logprobs"):
            inputs[name] = inputs[name].masked_fill(~mask, padding)
        inputs["advantages"] = inputs["advantages"].masked_fill(~mask.any(dim=1), padding)
        loss, slope, metrics = loss_slope_metrics(inputs | dict(mask=mask.float()), **settings)
        agrees(loss, right.detach(), within=1e-12)
        agrees(slope, right_slope, within=1e-12)
        assert all(map(isfinite, metrics.values()))


@each("settings", VARIANTS)
def test_a_wild_token_spoils_no_other_completion(settings):
    """In float32. It is e^1000 times as likely as under pi_old."""
    inputs = {name: tensor.float() for name, tensor in loss_inputs().items()}
    _, right_slope, _ = loss_slope_metrics(inputs, **settings)
    inputs["old_logprobs"][0, 1] -= 1000
    loss, slope, metrics = loss_slope_metrics(inputs, **settings)
    assert loss.isfinite() and slope.isfinite().all()
    assert all(map(isfinite, metrics.values()))
    agrees(slope[1:], right_slope[1:])


def test_pi_old_and_pi_ref_get_no_gradient_and_nothing_is_changed():
    inputs = loss_inputs()
    for name in ("logprobs", "old_logprobs", "ref_logprobs"):
        inputs[name].requires_grad_()
    grpo_loss(**inputs)[0].backward()
    assert inputs["logprobs"].grad.any()
    assert inputs["old_logprobs"].grad is inputs["ref_logprobs"].grad is None
    assert all(equal(inputs[name], tensor) for name, tensor in loss_inputs().items())


@each("metric, inputs", {"no reference": ("kl", dict(ref_logprobs=None)),
                         "no token": ("ratio_max", dict(mask=zeros(6, 5)))})
def test_a_metric_is_0_where_there_is_nothing(metric, inputs):
    assert grpo_loss(**loss_inputs() | inputs, beta=0)[1][metric] == 0


@each("said, arguments", [
    ("[5]", dict(logprobs=zeros(5))), ("[1, 5]", dict(old_logprobs=zeros(1, 5))),  # broadcast
    ("[6, 1]", dict(ref_logprobs=zeros(6, 1))), ("[6, 1]", dict(mask=zeros(6, 1))),
    ("[5]", dict(advantages=zeros(5))), ("[6, 1]", dict(advantages=zeros(6, 1))),
    ("ref_logprobs are needed", dict(ref_logprobs=None)), ("'k3'", dict(kl_penalty_type="k3")),
    ("'mean'", dict(loss_type="mean")), ("'dr_grpo'", dict(loss_type="dr_grpo")),
    ("'tokens'", dict(importance_sampling_level="tokens"))])
def test_what_has_no_loss_is_refused(said, arguments):
    with refused(re.escape(said)):
        grpo_loss(**loss_inputs() | arguments)


@each("settings, figures", PARITY)
def test_loss_and_gradient_have_the_figures_of_trl(settings, figures):
    """`python .ci/trl_figures.py` computes them, where TRL is installed."""
    loss, slope, _ = loss_slope_metrics(loss_inputs(), **settings)
    agrees([loss, slope.sum(), slope.norm()], figures, within=1e-12)


@each("imports, functions, arguments", {
    "rule_reward": ("re", [extract_boxed, grpo.read_number, rule_reward], [r"\boxed{63}", "63.0"]),
    "group_advantages": ("torch", [group_advantages], [LOSSES]),
    "grpo_loss": ("torch", [masked_mean, average, clipped_surrogate, k3_kl, kl_estimate, grpo_loss],
                  loss_inputs().values()),
    "token_logprobs": ("torch", [grpo.forward, grpo.selective_log_softmax, token_logprobs],
                       [lambda **_: SimpleNamespace(logits=zeros(2, 6, 4)),  # of a model
                        ones(2, 9).long(), ones(2, 9).long(), 5])})
def test_functions_stand_alone_when_they_are_pasted(imports, functions, arguments):
    """In a project with only these imports, the last one gives the same as here."""
    project = {}
    exec(f"import {imports}", project)
    for function in functions:
        exec(inspect.getsource(function), project)
    pasted = project[functions[-1].__name__]
    assert str(pasted(*arguments)) == str(functions[-1](*arguments))


# ---- 6. Settings --------------------------------------------------------------------------
IMPOSSIBLE = {  # settings: values that they cannot have. A step has 32 x 8 completions
    ("num_generations",): [1], ("num_mini_batches",): [257],
    ("prompts_per_step", "max_completion_length", "steps", "num_iterations", "num_mini_batches",
     "micro_batch_size", "sampling_batch_size"): [0, 2.0, True, None, "1"],
    ("temperature", "max_grad_norm"): [0], ("epsilon_high",): [-0.1, nan],
    ("dynamic_sampling", "warmup_steps", "seed", "save_steps"): [-1, 0.5, None],
    ("beta", "epsilon", "learning_rate"): [-0.1, nan, inf],
    ("loss_type", "scale_rewards", "kl_penalty_type", "importance_sampling_level"): ["x", None]}


@each("name, value", [(name, value) for names, values in IMPOSSIBLE.items()
                      for name in names for value in values])
def test_impossible_settings_are_refused(name, value):
    with refused(f"{name} is {value!r}"):
        GRPOConfig(**{name: value})


# ---- A tiny world for the sections about models -------------------------------------------
PAD, END, EOS = 0, 1, 2  # as in Qwen there are two end tokens, and the config knows only one
VOCABULARY = 48  # more than the tokenizer's words, as in Qwen
EXAMPLES = [{"prompt": prompt} for prompt in ("a", "b c", "c d e", "d", "e f", "f g a", "g")]
USER_A = [{"role": "user", "content": "a"}]  # a chat


def tiny_tokenizer(padding="<pad>"):
    """A tokenizer whose words are letters and digits, with a chat template."""
    special = ["<pad>", "<end>", "<eos>", "<unk>", "user", "assistant"]
    words = [*special, *string.ascii_lowercase, *string.digits]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = ("{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
                "{% if add_generation_prompt %}assistant {% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=padding, eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<end>", "<pad>"], chat_template=template)


TOKENIZER = tiny_tokenizer()
PLAIN = dict(  # settings that all families share, but for gemma3
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=EOS,
    bos_token_id=None, pad_token_id=PAD, tie_word_embeddings=False, initializer_range=0.4)


def tiny_model(family="qwen2", **settings):
    """A random model. Its weights are large, so some tokens are likelier than others."""
    plain = {} if family == "gemma3" else PLAIN  # it has them in a config within its config
    config = AutoConfig.for_model(family, **plain | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


def ending_model(logit, family="qwen2", **settings):
    """`logit` is added to the logits of the end tokens. At -100 no completion ends."""
    model = tiny_model(family, **settings)
    model.lm_head.bias = torch.nn.Parameter(zeros(VOCABULARY), requires_grad=False)
    model.lm_head.bias[[END, EOS]] = logit
    return model


def sample_tiny(model=None, prompts=("a b c d e f g", "h", "i j k"), G=5, cap=8, temperature=1.0,
                tokenizer=TOKENIZER, seed=0):
    """G completions of each prompt, in one list."""
    torch.manual_seed(seed)
    examples = [{"prompt": prompt} for prompt in prompts]
    groups = sample_groups(model or tiny_model(), tokenizer, examples, G, cap, temperature)
    assert [len(group) for group in groups] == [G] * len(prompts)
    return sum(groups, [])


def slow_distributions(model, completion, temperature=1.0):
    """log pi of all tokens at each place. The model reads one completion, with no cache."""
    ids = tensor([completion.prompt_ids + completion.ids])
    logits = model(ids, use_cache=False).logits[0]  # place i says what comes at place i + 1
    logits = logits[len(completion.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(dim=-1)


def slow_logprobs(model, completion, temperature=1.0):
    """log pi of each token of the completion."""
    distributions = slow_distributions(model, completion, temperature)
    return distributions[range(len(completion.ids)), completion.ids]


def noisy_reward(completions, **columns):
    """A reward that draws from the generators of Python and PyTorch."""
    return [text.count("a") + random.gauss(0, 1) + torch.rand(()).item() for text in completions]


def coarse_reward(**columns):
    """0 or 1, so in some groups all rewards are equal."""
    return [float(reward > 1) for reward in noisy_reward(**columns)]


def train_tiny(model=None, reward=noisy_reward, data=EXAMPLES, folder=None, resume=False,
               after=None, **settings):
    """A run, by default of 6 steps of 2 prompts x 4 completions of up to 5 tokens. Returns the
    metrics of all steps, but for the times."""
    defaults = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
                    learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1, micro_batch_size=8)
    config = GRPOConfig(**defaults | settings)
    history = train(model or tiny_model(), TOKENIZER, data, reward, config, folder, resume, after)
    return [without_times(metrics) for metrics in history]


def without_times(metrics):
    """The metrics that two equal runs share. (A time below 0, or of 99 s, stays.)"""
    return {name: value for name, value in metrics.items()
            if not name.endswith("_seconds") or not 0 <= value < 99}


def log_of(folder):
    """The lines of metrics.jsonl. Each must be whole. JSON has neither NaN nor inf."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def weights_of(model):
    """All weights, as one tensor."""
    return parameters_to_vector(model.parameters()).detach()


# ---- 8. Sampling --------------------------------------------------------------------------
# The padding is a token of its own, or none, or an end token. GPT-2 has learned positions.
SAMPLERS = {"qwen2": ("qwen2", "<pad>", 1.0), "no padding token": ("qwen2", None, 0.7),
            "padded with the end": ("qwen2", "<end>", 1.3), "gpt2": ("gpt2", "<eos>", 1.0)}
FITS = "a " * 59  # with a cap of 5 tokens it just fills the context of 64
WITH_PICTURES = dict(  # of a model that also reads pictures, which has a config for each part
    text_config=PLAIN, mm_tokens_per_image=4, vision_config=dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2))


@each("family, padding, temperature", SAMPLERS)
def test_a_completion_ends_with_its_first_end_token_or_is_cut_off(family, padding, temperature):
    tokenizer = tiny_tokenizer(padding)
    completions = sample_tiny(tiny_model(family, initializer_range=0.25), G=60, cap=8,
                              tokenizer=tokenizer, temperature=temperature)
    for completion in completions:
        *others, last = completion.ids
        assert END not in others and EOS not in others
        assert completion.truncated == (last not in (END, EOS))
        assert len(completion.ids) == 8 or not completion.truncated
        assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
    # All of this happens: both ends, and a completion of 8 tokens that ended, or was cut off.
    assert {completion.ids[-1] for completion in completions} >= {END, EOS}
    assert {c.truncated for c in completions if len(c.ids) == 8} == {True, False}


@each("family, padding, temperature", SAMPLERS)
def test_the_samplers_logprobs_are_those_of_the_slow_way(family, padding, temperature):
    """Wrong masks, positions and temperatures show here, and wrong rows of the cache."""
    model = tiny_model(family, initializer_range=0.25)
    for completion in sample_tiny(model, tokenizer=tiny_tokenizer(padding),
                                  temperature=temperature):
        right = slow_logprobs(model, completion, temperature)
        agrees(completion.sampler_logprobs, right, within=2e-5)


def test_at_temperature_0_it_is_always_the_likeliest_token():
    """Its log-probs are those at temperature 1."""
    model = tiny_model()
    for completion in sample_tiny(model, temperature=0):
        likeliest = slow_distributions(model, completion).max(dim=1)
        assert completion.ids == likeliest.indices.tolist()
        agrees(completion.sampler_logprobs, likeliest.values, within=2e-5)


def test_tokens_are_drawn_from_the_softmax_and_from_nothing_else():
    """Not from what a checkpoint brings along, as Qwen2.5's does. `generate` would obey that."""
    model = tiny_model(initializer_range=0.2)
    vars(model.generation_config).update(top_k=5, top_p=0.8, repetition_penalty=2.0)
    completions = sample_tiny(model, ["a"], G=20_000, cap=1, temperature=0.7)
    counts = tensor([c.ids[0] for c in completions]).bincount(minlength=VOCABULARY)
    wanted = 20_000 * slow_distributions(model, completions[0], 0.7)[0].exp()
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()


def test_end_tokens_come_from_both_configs_and_the_tokenizer():
    model = tiny_model(eos_token_id=PAD)
    model.generation_config.eos_token_id = END
    assert end_token_ids(model, TOKENIZER) == [PAD, END, EOS]  # the tokenizer's is EOS
    nowhere = SimpleNamespace(generation_config=None, config=None)
    with refused("no completion could end"):
        end_token_ids(nowhere, tokenizer=None)


def test_a_chat_is_read_through_the_template():
    """Also where only some of the prompts are chats. With the same seed, the draws are the same."""
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, *USER_A]
    written = ["user a <end> assistant", "user c <end> assistant d <end> user a <end> assistant"]
    as_chats, as_text = [[(c.prompt_ids, c.ids) for c in sample_tiny(prompts=prompts, seed=5)]
                         for prompts in ([USER_A, talk, "a b"], [*written, "a b"])]
    assert as_chats == as_text


def test_a_prompt_that_just_fits_is_sampled():
    assert sample_tiny(prompts=[FITS], cap=5)


@each("said, sampling", [
    ("'' has no tokens", dict(prompts=["a", ""])),
    ("60 tokens and 5 .* 64: 'a a", dict(prompts=["b", FITS + "a"], cap=5)),
    ("60 tokens and 5 .* 64", dict(model=tiny_model("gemma3", **WITH_PICTURES),
                                   prompts=[FITS + "a"], cap=5))])
def test_what_cannot_be_sampled_is_refused(said, sampling):
    with refused(said):
        sample_tiny(**sampling)


# ---- 9. The reward ------------------------------------------------------------------------
@each("text, contents", [
    (r"$$\boxed{63}$$", "63"), (r"\boxed{{{a}}{b}}", "{{a}}{b}"), (r"\boxed{\{1\}}", r"\{1\}"),
    (r"\boxed{1} \boxed{2}", "2"), (r"\boxed{\boxed{5}}", "5"), (r"\boxed{x = \boxed{2}", "2"),
    (r"\boxed{1 + \boxed{2} + 3}", "2"), (r"{\boxed{5}", "5"), (r"} } \boxed{5}", "5"),
    ("\\boxed{ 5\n}", "5"), ("\\boxed{\ud800}", "\ud800")])
def test_the_last_box_counts_and_its_braces_are_matched(text, contents):
    assert extract_boxed(text) == contents


@each("text", [r"\boxed{}", "\\boxed{ \n\t }", r"\boxed{63} \boxed{}", r"\boxed{\boxed{}}", "",
               "boxed{63}", r"\boxed", r"\boxed{63", r"\boxed\{63\}", r"\boxed{1} \boxed{\{2}"])
def test_a_box_that_is_blank_or_incomplete_earns_nothing(text):
    """Not even where the answer is blank."""
    assert rule_reward(text, "") == rule_reward(text, "63") == 0.0


@each("rows", {  # box and answer; box and answer
    "the same number": "63.0 is 63; -0 is 0; 5. is 5; 63.009 is 63; 007 is 7; +5 is 5",
    "another number": "50 is not 63; 630 is not 63; -63 is not 63; 5 is not -5; 62.98 is not 63",
    "0.01": "62.991 is 63; 5.01 is not 5; 4.99 is not 5; 3,000,000.01 is not 3000000",
    "thousands": "-1,000 is -1000; 1000 is 1,000; 1{,}234{,}567 is 1234567; 1,234.5 is 1234.5",
    "wrong commas": "8,000 is not 000; 8,000 is not 8; 12,34 is not 1234; 1234,567 is not 1234567",
    "signs inside": r"1$2 is not 12; 1\%2 is not 12",
    "no digit before the point": ".5 is .5; .5 is not 0.5; -.5 is not -0.50",
    "units": r"\$18 is $18.00; $63$ is 63; -$5 is -5; $-5 is -5; 12.5\% is 12.5; 50 % is 50",
    "a sentence ends": "63. is 63; 1,000. is 1000; 50%. is 50; $63.$ is 63",
    "equal as strings": r"\frac12 is \frac12; Monday is Monday; , is ,; nan is nan; 1e3 is 1e3",
    "no number": ", is not 0; . is not 0; - is not 0; $ is not 0; e5 is not 0; 63 is not ,; "
        "63 eggs is not 63; 6.3.0 is not 6.3; --5 is not 5; 60+3 is not 63; 1_000 is not 1000; "
        "0x3f is not 63; nan is not NaN; 5e3 is not 5000; 1e999 is not 2e999; inf is not 1e999",
    "too large": f"1{'0' * 308} is not -1{'0' * 308}; 1{'0' * 309} is not 2{'0' * 309}",
    "other digits": "\u0666\u0663 is not 63; 63 is not \uff16\uff13; 6\u00b3 is not 63"})
def test_which_box_holds_which_answer(rows):
    for row in rows.split("; "):
        box, answer = re.split(" is not | is ", row)
        reward = rule_reward(f"The answer is \\boxed{{{box}}}.", answer)
        assert reward == (0.5 if " is not " in row else 1.5), row


@each("box, answer, reward", [
    (" 63 ", "63", 1.5), ("63", " 63\n", 1.5), (" x+1 ", " x+1\n", 1.5), (" $18. ", "18", 1.5),
    ("3 4", "34", 0.5), ("3 4", "3", 0.5), ("1, 000", "1000", 0.5), ("3. 5", "3.5", 0.5),
    ("63", "", 0.5), ("63\x00", "63", 0.5), (r"\frac12", "0.5", 0.5),
    ("63", 63, 1.5), ("63", 63.0, 1.5), ("63", 64, 0.5), ("63", None, 0.5)])  # not only strings
def test_blanks_and_answers_of_other_kinds(box, answer, reward):
    assert rule_reward(rf"\boxed{{{box}}}", answer) == reward


@each("piece", [r"\boxed{", r"\boxed{}", r"\boxed", "{", "}", "\\", r"\{", "9", "9,", ",000", "{,}",
                "$", "-", ".", "1e9", ". ", " \n"])
def test_hostile_text_takes_linear_time(piece):
    # Linear time is tenths of a second. Small sizes come first: quadratic time fails soon.
    for size in (10_000, 30_000, 100_000, 300_000):
        body = piece * (size // len(piece))
        started = time.process_time()
        # The 1s keep strip() from eating the body. At the x the pattern of a number fails. A bad
        # pattern would then try again from every place.
        for text in (f"1{body}1", f"1{body}x"):
            rule_reward(f"\\boxed{{{text}}}", "7")
            rule_reward(r"\boxed{7}", text)
        assert time.process_time() - started < 3.0


def three_completions():
    """Two completions of a string, one of a chat. The data has a column "numbers"."""
    string, chat = {"prompt": "a", "numbers": [1]}, {"prompt": [*USER_A], "numbers": [2]}
    return [Completion(row, [], ids=[i], text=text)
            for row, i, text in ((string, 7, "x"), (string, 8, "y"), (chat, 9, "z"))]


@each("as_what", [list, tuple, tensor, np.array])
def test_a_reward_function_is_called_as_trl_calls_one(as_what):
    """It may return any sequence of numbers."""
    reward, completions = Mock(return_value=as_what([1.0, 2.0, 3.0])), three_completions()
    grpo.grade(reward, completions)
    reward.assert_called_once_with(
        prompts=["a", "a", USER_A], numbers=[[1], [1], [2]], completion_ids=[[7], [8], [9]],
        completions=["x", "y", [{"role": "assistant", "content": "z"}]])
    assert [completion.reward for completion in completions] == [1, 2, 3]


@each("said, rewards", [
    ("returned 2, not 3", [1, 1]), ("returned 4, not 3", [1, 1, 1, 1]), ("not iterable", None),
    ("nan for 'x'", [nan, 1, 1]), ("inf for 'z'", [1, 1, inf]), ("None for 'y'", [1, None, 1])])
def test_impossible_rewards_are_refused(said, rewards):
    with pytest.raises((ValueError, TypeError), match=said):
        grpo.grade(lambda **_: rewards, three_completions())


def test_a_reward_function_gets_copies():
    """What it changes is neither learned nor in the data."""
    def meddle(prompts, completion_ids, numbers, **columns):
        prompts[2].append("more")
        completion_ids[0].clear()
        numbers[0].append("more")
        return [1, 2, 3]
    completions = three_completions()
    grpo.grade(meddle, completions)
    for completion, own in zip(completions, three_completions()):
        assert (completion.ids, completion.example) == (own.ids, own.example)


# ---- 10. Log-probs ------------------------------------------------------------------------
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOW = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(query_pre_attn_scalar=8, **WINDOW)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
              linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
FAMILIES = {  # what each has beside the settings that all have
    "qwen2": {}, "qwen3": {}, "llama": {}, "phi3": {}, "mistral": dict(sliding_window=3),
    "gpt2": {}, "bloom": dict(max_position_embeddings=None), "mpt": {},  # bloom, mpt: no positions
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, window_size=3),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW), "qwen3_moe": EXPERTS,
    "gemma2": dict(final_logit_softcapping=2.0, **GEMMA), "gemma3_text": GEMMA,  # capped logits
    "gemma3": WITH_PICTURES | dict(text_config=PLAIN | GEMMA),
    "granite": dict(logits_scaling=8.0), "cohere": dict(logit_scale=0.06),  # scaled logits
    "lfm2": dict(layer_types=["conv", "full_attention"]),  # from here on, layers with a state
    "qwen3_next": dict(shared_expert_intermediate_size=16, **EXPERTS, **LINEAR),
    "jamba": dict(num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False,
                  attn_layer_period=2, attn_layer_offset=1),
    "qwen3_5_text": LINEAR}


@each("family", list(FAMILIES))
def test_every_family_is_read_and_sampled_as_in_the_slow_way(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    model = tiny_model(family, **FAMILIES[family])
    # Prompts and completions of many lengths, in no order. Any model may have written them.
    prompts = ["a b c", "d e f g h i j", "k l m n o p q", "r", "s t u v w"]
    completions = sample_tiny(ending_model(1.5, initializer_range=0.2), prompts, G=4)
    completions = [completions[i] for i in (18, 3, 0, 9, 16, 1, 2, 12, 7)]
    def gradient_of(logprobs):
        value = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum()  # each its own weight
        parts = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
        return parameters_to_vector(parts)
    found, mask = compute_logprobs(model, completions, 0.7)
    slow = torch.cat([slow_logprobs(model, completion, 0.7) for completion in completions])
    agrees(found[mask.bool()], slow, within=3e-5)
    right = gradient_of(slow)
    agrees(gradient_of(found[mask.bool()]), right, within=3e-5 * right.abs().max().item())
    # In a first step the loss, KL and clip are 0. sampler_gap is 0 if the sampler agrees.
    metrics = train_tiny(model, steps=1, temperature=0.7)[0]
    for figure in ("sampler_gap", "loss", "kl", "clip_fraction", "skipped_updates"):
        agrees(metrics[figure], 0, within=1e-5)
    assert metrics["ratio_max"] == 1 and metrics["grad_norm"] > 0.01


def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    """In bfloat16 the softmax of the same logits would be off by some hundredths."""
    model = tiny_model().bfloat16()
    for completion in sample_tiny(model, ["a b c"], cap=1):
        ids = tensor([completion.prompt_ids + completion.ids])
        found = token_logprobs(model, ids, torch.ones_like(ids), 1)
        agrees(found, slow_logprobs(model, completion), within=1e-5)


def test_cudnns_attention_is_off_within_the_models_call():
    """This attention has given NaN gradients."""
    def model(**_):
        return torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert not grpo.forward(model, ones(1, 2).long(), ones(1, 2).long())


# ---- 11. The update -----------------------------------------------------------------------
TWELVE = dict(prompts_per_step=3, num_generations=4, steps=2)  # completions


@pytest.fixture(scope="module")
def bf16_run():
    """A run in bfloat16 with a low learning rate: the weights before it, and its learner."""
    model, learners = tiny_model(tie_word_embeddings=True), []
    before = weights_of(model)
    train_tiny(model, bf16=True, learning_rate=1e-6, after=learners.append)
    return before, learners[-1]


def test_weights_move_where_bfloat16_would_not(bf16_run):
    before, learner = bf16_run
    weights = weights_of(learner.model)
    assert (weights != before).float().mean() > 0.9
    assert (weights.bfloat16() != before.bfloat16()).float().mean() < 0.1


def test_bfloat16_is_for_no_weights_and_spoils_no_rotary_position(bf16_run):
    _, learner = bf16_run
    frequencies = tiny_model().model.rotary_emb.inv_freq
    for model in (learner.model, learner.reference):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert equal(model.model.rotary_emb.inv_freq, frequencies)
    assert learner.history[-1]["sampler_gap"] < 0.1


@each("bf16, precision", [(True, torch.bfloat16), (False, torch.float32), (None, torch.float32)])
def test_the_model_multiplies_in_bfloat16_where_it_should(bf16, precision, monkeypatch):
    """In sampling, for pi_ref and in the update. By default, it is only where a GPU can."""
    found = []
    def look(model, ids, mask, **more):
        found.append((out := forward(model, ids, mask, **more)).logits.dtype)
        return out
    forward = grpo.forward
    monkeypatch.setattr(grpo, "forward", look)
    train_tiny(ending_model(-100), steps=1, bf16=bf16)
    assert found == (5 + 1 + 1) * [precision]


def test_tied_embeddings_stay_tied_in_bfloat16(bf16_run):
    _, learner = bf16_run
    tied = learner.model.lm_head.weight
    assert tied is learner.model.get_input_embeddings().weight
    assert sum(weight is tied for weight in learner.optimizer.param_groups[0]["params"]) == 1


def test_gradients_are_added_up_in_float32():
    model = tiny_model().requires_grad_(False)
    head = model.lm_head.weight.requires_grad_()  # the only one, to look at it
    parts = []
    head.register_hook(parts.append)
    metrics = train_tiny(model, bf16=True, steps=1, prompts_per_step=2, num_generations=4,
                         micro_batch_size=1)[0]
    assert [part.dtype for part in parts] == 8 * [torch.float32]
    agrees(metrics["grad_norm"], torch.stack(parts).float().sum(dim=0).norm(), relatively=1e-6)


def out_of_memory_above(most, function, argument):
    """`function`, but memory runs out if argument number `argument` has more than `most` items."""
    def limited(*arguments, **more):
        if len(arguments[argument]) > most:
            raise torch.OutOfMemoryError
        return function(*arguments, **more)
    return limited


@each("settings", {"pi_ref": {}, "pi_old": dict(beta=0, num_iterations=2), "update": dict(beta=0)})
def test_a_run_out_of_memory_goes_on_with_smaller_micro_batches(settings, monkeypatch, tmp_path):
    run = TWELVE | dict(micro_batch_size=12) | settings
    enough, model = ending_model(2.0, "llama"), ending_model(2.0, "llama")
    wanted = train_tiny(enough, **run)
    limited = out_of_memory_above(3, compute_logprobs, argument=1)  # its completions
    monkeypatch.setattr(grpo, "compute_logprobs", limited)
    with pytest.raises(torch.OutOfMemoryError):
        train_tiny(model, folder=tmp_path, **run)
    resumed = train_tiny(model, folder=tmp_path, resume=True, **run | dict(micro_batch_size=3))
    for step, right in zip(resumed, wanted, strict=True):
        assert step == pytest.approx(right, rel=1e-4, abs=1e-5)
    agrees(weights_of(model), weights_of(enough), within=1e-4)


def test_out_of_memory_at_the_end_of_backward_adds_nothing_twice(tmp_path):
    enough, model = ending_model(2.0, "llama"), ending_model(2.0, "llama")
    train_tiny(enough, **TWELVE)
    backward_passes = []
    def fail(parameter):
        backward_passes.append(parameter)
        if len(backward_passes) == 3:  # in step 2. Each step has two
            raise torch.OutOfMemoryError
    # The gradient of the embedding comes last. The others are there when it fails.
    model.get_input_embeddings().weight.register_post_accumulate_grad_hook(fail)
    run = dict(folder=tmp_path, save_steps=1, **TWELVE)
    with pytest.raises(torch.OutOfMemoryError):
        train_tiny(model, micro_batch_size=6, **run)
    train_tiny(model, micro_batch_size=5, resume=True, **run)
    agrees(weights_of(model), weights_of(enough), within=1e-4)
    assert len(backward_passes) == 3 + 3


def sampled_prompts(**run):
    """The prompts of all groups of a run, in their order."""
    prompts = []
    train_tiny(after=lambda learner: prompts.extend(
        group[0].example["prompt"] for group in learner.groups), **run)
    return prompts


@each("sampling_batch_size, sizes", [(256, [7]), (8, [2, 2, 2, 1]), (3, 7 * [1])])
def test_so_many_completions_are_sampled_at_once(sampling_batch_size, sizes, monkeypatch):
    """As whole groups, and at least one."""
    run = dict(prompts_per_step=7, steps=1)
    wanted = sampled_prompts(**run)
    monkeypatch.setattr(grpo, "sample_groups", counted := Mock(wraps=sample_groups))
    assert sampled_prompts(sampling_batch_size=sampling_batch_size, **run) == wanted
    assert [len(call.args[2]) for call in counted.call_args_list] == sizes  # of its examples


def test_updates_that_are_not_finite_are_skipped(tmp_path, monkeypatch, printed):
    # Factors for the two updates of steps 1 to 4, of one micro-batch each. 1e25 squared is inf.
    factors = iter([1, 1] + [nan, 1e25] + [1e25, 1] + [1, 1])
    def broken_loss(*arguments, **settings):
        loss, metrics = grpo_loss(*arguments, **settings)
        factor = next(factors)
        return loss * factor, {name: value * factor for name, value in metrics.items()}
    monkeypatch.setattr(grpo, "grpo_loss", broken_loss)
    model, weights = tiny_model(), []
    train_tiny(model, folder=tmp_path, steps=4, num_iterations=2,
               after=lambda _: weights.append(weights_of(model)))
    log = log_of(tmp_path)  # which fails if there is a NaN
    assert [metrics["skipped_updates"] for metrics in log] == [0, 2, 1, 0]
    moved = [not equal(*pair) for pair in itertools.pairwise(weights)]
    assert moved == [False, True, True]  # in steps 2, 3, 4
    assert printed().count("update skipped") == 3


def test_nothing_moves_where_no_completion_teaches(tmp_path):
    """Not even by AdamW's momentum. Only in step 1 the rewards differ."""
    rewards = iter([[0, 1, 2, 3] * 2, [1] * 8, [1] * 8])
    model, weights = tiny_model(), []
    train_tiny(model, lambda **_: next(rewards), folder=tmp_path, steps=3, beta=0,
               after=lambda _: weights.append(weights_of(model)))
    assert equal(weights[0], weights[1]) and equal(weights[0], weights[2])
    for metrics in log_of(tmp_path)[1:]:
        for figure in ("loss", "grad_norm", "kl", "sampler_gap", "skipped_updates"):
            assert metrics[figure] == 0


@each("settings, calls", {"one update": ({}, 2), "two": (dict(num_iterations=2), 4)})
def test_pi_old_is_computed_only_for_several_updates(settings, calls, monkeypatch):
    """Calls are for pi_ref and the update, or for pi_ref, pi_old and two updates."""
    counted = Mock(wraps=compute_logprobs)
    monkeypatch.setattr(grpo, "compute_logprobs", counted)
    train_tiny(steps=1, **settings)
    assert counted.call_count == calls


# ---- 12. What is not GRPO -----------------------------------------------------------------
@each("warmup, parts", [(0, [0.75, 0.5, 0.25]), (1, [1, 0.8, 0.6, 0.4, 0.2]), (4, [0.25, 0.5])])
def test_learning_rates(warmup, parts):
    """No step has the rate 0, neither the first nor the last."""
    history = train_tiny(learning_rate=0.01, warmup_steps=warmup, steps=len(parts))
    agrees([metrics["learning_rate"] / 0.01 for metrics in history], parts)


def test_each_epoch_has_every_example_once_in_an_order_of_its_own():
    order = sampled_prompts(data=datasets.Dataset.from_list(EXAMPLES), prompts_per_step=7, steps=2)
    first, second = order[:7], order[7:]
    assert sorted(first) == sorted(second) == sorted(example["prompt"] for example in EXAMPLES)
    assert first != second
    assert sampled_prompts(prompts_per_step=9, steps=1) == order[:9]  # more than there are
    assert sampled_prompts(prompts_per_step=7, steps=1, seed=4) not in (first, second)


def test_every_step_of_every_seed_draws_afresh():
    steps = [step for seed in (0, 1)
             for step in train_tiny(data=EXAMPLES[:1], seed=seed, learning_rate=0)]
    assert len({step["entropy"] for step in steps}) == len(steps)


@each("said, run", [
    ("data set is empty", dict(data=[])),
    ("columns .'text'.. ", dict(data=datasets.Dataset.from_list([{"text": "a"}]))),
    ("columns .'prompt', 'completions'.", dict(data=[{"prompt": "a", "completions": "b"}])),
    ("columns .'prompt', 'answer'.", dict(data=[{"prompt": "a"}, {"prompt": "b", "answer": "5"}])),
    ("one function", dict(reward=[noisy_reward, noisy_reward])),
    ("needs the output_dir", dict(resume=True))])
def test_what_cannot_be_trained_is_refused(said, run):
    with refused(said):
        train_tiny(**run)


# Interrupted runs. A run that was resumed ends as if nothing had happened.
RUNS = {
    "plain": dict(seed=5000),  # seed * 1_000_003 is above 2**32
    "dynamic, several updates, bfloat16": dict(
        reward=coarse_reward, dynamic_sampling=2, num_iterations=2, num_mini_batches=2, beta=0,
        bf16=True)}


def run_or_resume(folder, **run):
    """A run to its end, resumed if there is a checkpoint: its history and its weights."""
    run = dict(model=tiny_model(), steps=5, save_steps=2) | run
    history = train_tiny(folder=str(folder), resume=True, **run)
    assert history == [without_times(metrics) for metrics in log_of(folder)]
    return history, weights_of(run["model"]).tolist()


def files_in(folder):
    """All files, with their contents."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved_steps(folder):
    """The number of steps in the checkpoint; 0 without one."""
    path = folder / "checkpoint.pt"
    return len(torch.load(path)["history"]) if path.exists() else 0


def fails_from_call(number, function, failure):
    """`function`, but its call number `number` and all later ones are calls of `failure`."""
    calls = itertools.count(1)
    return lambda *given, **more: (function if next(calls) < number else failure)(*given, **more)


def be_killed(*given):
    """As by a SIGKILL, which no `except Exception` sees. A file that is being written is torn."""
    paths = [argument for argument in given if isinstance(argument, Path)]
    if paths:
        paths[0].write_bytes(b'{"step": 4, "lo')
    raise SystemExit


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What each of the runs gives if nothing happens."""
    return {name: run_or_resume(tmp_path_factory.mktemp("run"), **RUNS[name]) for name in RUNS}


@each("name", list(RUNS))
@each("module, function, call", {  # of 5 steps, with checkpoints after 2, 4, 5
    "after step 1": (grpo, "set_seed", 2), "after step 3": (grpo, "set_seed", 4),
    "in the reward of a later step": (random, "gauss", 28),  # 8 draws a step or more
    "while writing metrics 4": (Path, "write_text", 4),
    "while writing the second checkpoint": (torch, "save", 2),
    "before the last checkpoint is renamed": (Path, "replace", 8)})
def test_a_killed_run_ends_as_if_nothing_had_happened(name, module, function, call, uninterrupted,
                                                      tmp_path, monkeypatch, printed):
    works = getattr(module, function)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(module, function, fails_from_call(call, works, be_killed))
        run_or_resume(tmp_path, **RUNS[name])
    saved = saved_steps(tmp_path)
    assert run_or_resume(tmp_path, **RUNS[name]) == uninterrupted[name]
    said = f"going on after step {saved}\n" if saved else "starting at step 1\n"
    assert printed().endswith(said)


@each("save_steps, steps", [(2, [2, 4, 5]), (0, [])])
def test_checkpoints_are_saved_every_few_steps_and_at_the_end(save_steps, steps, tmp_path):
    saved = []  # after_step comes before its step is saved
    train_tiny(folder=tmp_path, steps=5, save_steps=save_steps,
               after=lambda _: saved.append(saved_steps(tmp_path)))
    assert sorted({*saved, saved_steps(tmp_path)} - {0}) == steps


def test_after_step_comes_before_the_files_and_may_add_figures(tmp_path):
    def after_step(learner):
        before, metrics = learner.history[:-1], learner.history[-1]
        assert not before or log_of(tmp_path) == before
        metrics["mine"] = np.float32(metrics["step"] / 2)
    train_tiny(folder=tmp_path, steps=3, save_steps=1, after=after_step)
    assert [metrics["mine"] for metrics in log_of(tmp_path)] == [0.5, 1, 1.5]
    assert saved_steps(tmp_path) == 3  # the checkpoint can be read, too


def test_a_step_whose_after_step_fails_is_made_again(tmp_path, uninterrupted):
    fail_in_step_2 = Mock(side_effect=[None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        run_or_resume(tmp_path, save_steps=1, after=fail_in_step_2, **RUNS["plain"])
    assert len(log_of(tmp_path)) == saved_steps(tmp_path) == 1
    assert run_or_resume(tmp_path, save_steps=1, **RUNS["plain"]) == uninterrupted["plain"]


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path):
    train_tiny(folder=f"{tmp_path}/new/run", steps=1, save_steps=0)  # its log is enough
    with refused("holds a run: resume it"):
        train_tiny(folder=tmp_path / "new" / "run")


@each("name, value", [("seed", 4), ("epsilon_high", 0.3), ("loss_type", "dapo")])
def test_a_run_is_not_resumed_with_other_settings(name, value, tmp_path):
    run_or_resume(tmp_path)
    files, model = files_in(tmp_path), tiny_model()
    with refused(f"another run: {name} is .* there, {value} here"):
        run_or_resume(tmp_path, model=model, **{name: value})
    assert files_in(tmp_path) == files
    assert equal(weights_of(model), weights_of(tiny_model()))  # nothing was loaded


def test_a_run_may_get_more_steps(tmp_path):
    finished = run_or_resume(tmp_path, steps=5)
    # These four settings may change. There is nothing left to do.
    assert run_or_resume(tmp_path, steps=4, save_steps=1, micro_batch_size=3,
                         sampling_batch_size=4) == finished
    longer, _ = run_or_resume(tmp_path, steps=8, learning_rate=0.01, warmup_steps=2)
    assert longer[:5] == finished[0] and saved_steps(tmp_path) == 8
    rates = [metrics["learning_rate"] / 0.01 for metrics in longer[5:]]
    agrees(rates, [3 / 7, 2 / 7, 1 / 7])  # those of a run of 8 steps


def test_a_run_goes_on_with_any_model_of_the_same_shapes(uninterrupted, tmp_path):
    """The checkpoint has the weights of the model, and those of the reference."""
    fail_in_step_3 = Mock(side_effect=[None, None, KeyboardInterrupt])
    with pytest.raises(KeyboardInterrupt):
        run_or_resume(tmp_path, after=fail_in_step_3, **RUNS["plain"])
    other = tiny_model(initializer_range=0.3).train()
    assert run_or_resume(tmp_path, model=other, **RUNS["plain"]) == uninterrupted["plain"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        run_or_resume(tmp_path, model=tiny_model(intermediate_size=24), **RUNS["plain"])


def test_a_full_disk_is_said_and_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def save(saved, path):
        path.write_bytes(b"PK half")
        raise RuntimeError("enforce fail at inline_container.cc")  # as torch says it
    run_or_resume(tmp_path, steps=2)
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="no checkpoint can be written in .*: is the disk full"):
        run_or_resume(tmp_path, steps=4)
    assert files_in(tmp_path).keys() == {"checkpoint.pt", "metrics.jsonl"}
    assert saved_steps(tmp_path) == 2


# ---- 13. The relatives --------------------------------------------------------------------
def test_the_overlong_penalty_falls_from_0_to_minus_1():
    agrees(overlong_penalty(numbers("0 80 85 95 100 120"), max_completion_length=100, buffer=20),
           "0 0 -0.25 -0.75 -1 -1")


# ---- 7. The loop: steps against slow steps ------------------------------------------------
LOSS_SETTINGS = ("epsilon", "epsilon_high", "beta", "loss_type", "max_completion_length",
                 "kl_penalty_type", "importance_sampling_level", "use_bias_correction_kl")
TWO_BY_TWO = dict(num_iterations=2, num_mini_batches=2, learning_rate=5e-3)


def slow_step(model, reference, optimizer, groups, config):
    """What follows the rewards, with a whole mini-batch at once. Trains the model, and returns the
    metrics."""
    completions = sum(groups, [])
    rewards = tensor([c.reward for c in completions], dtype=torch.float64)
    rewards = rewards.view(len(groups), -1)
    agrees([c.advantage for c in completions], group_advantages(rewards, config.scale_rewards))
    completions.sort(key=lambda c: -len(c.ids))  # as `train` does, so the mini-batches are the same
    advantages = tensor([c.advantage for c in completions])
    def logprobs_of(network, rows):  # (n, T), padded with 0. Real log-probs are below 0
        logprobs = [slow_logprobs(network, completions[i], config.temperature) for i in rows]
        return pad_sequence(logprobs, batch_first=True)
    every = arange(len(completions))
    with torch.no_grad():
        old, ref = logprobs_of(model, every), logprobs_of(reference, every)
    def loss_and_metrics(rows):
        now = logprobs_of(model, rows)
        old_rows, ref_rows = old[rows, : now.shape[1]], ref[rows, : now.shape[1]]
        return grpo_loss(now, old_rows, ref_rows if config.beta else None, advantages[rows],
                         now < 0, **{name: getattr(config, name) for name in LOSS_SETTINGS})
    sampled = pad_sequence([tensor(c.sampler_logprobs) for c in completions], batch_first=True)
    mask = old < 0
    figures = Counter(  # what is not there yet counts as 0
        reward_mean=rewards.mean(), reward_std=rewards.std(dim=1, correction=0).mean(),
        zero_variance_fraction=(rewards.std(dim=1) < 1e-9).double().mean(),
        entropy=-masked_mean(sampled, mask), completion_length=mask.sum() / len(mask),
        truncated_fraction=sum(c.truncated for c in completions) / len(completions))
    updates = config.num_iterations * config.num_mini_batches
    for _ in range(config.num_iterations):
        for rows in [every[i :: config.num_mini_batches] for i in range(config.num_mini_batches)]:
            if config.beta == 0 and not advantages[rows].any():
                continue  # no step
            loss, metrics = loss_and_metrics(rows)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            figures["loss"] += loss.item() / updates
            figures["grad_norm"] += norm / updates
            if config.beta > 0:  # else these are not of all completions
                gap = masked_mean((sampled - old)[rows].abs(), mask[rows])
                figures["sampler_gap"] += gap / updates
                figures["kl"] += metrics["kl"] / updates
                figures["clip_fraction"] += metrics["clip_fraction"] / updates
                figures["ratio_max"] = max(figures["ratio_max"], metrics["ratio_max"])
    return figures


@each("settings", {
    "grpo": {}, "grpo, no KL, in three": dict(beta=0, num_mini_batches=3),
    "grpo, one by one": TWO_BY_TWO | dict(micro_batch_size=1),
    "dapo, one by one": dict(loss_type="dapo", micro_batch_size=1),
    "dapo, no KL": TWO_BY_TWO | dict(loss_type="dapo", beta=0),
    "dr_grpo, one by one": TWO_BY_TWO | dict(loss_type="dr_grpo", micro_batch_size=1),
    "dr_grpo, no KL": dict(loss_type="dr_grpo", beta=0),
    "one group, no KL": dict(beta=0, prompts_per_step=1, steps=7),  # some steps teach nothing
    "a tight clip": TWO_BY_TWO | dict(epsilon=0.02, epsilon_high=0.01),
    "clipped gradients": TWO_BY_TWO | dict(max_grad_norm=0.05),
    "two passes, k2": dict(num_iterations=2, learning_rate=5e-3, kl_penalty_type="mse"),
    "dynamic sampling": dict(dynamic_sampling=20, num_generations=3),
    "std of the batch": TWO_BY_TWO | dict(scale_rewards="batch"),
    "GSPO": TWO_BY_TWO | dict(importance_sampling_level="sequence"),
    "dapo, ratio * KL": TWO_BY_TWO | dict(loss_type="dapo", use_bias_correction_kl=True)})
def test_steps_are_those_of_the_slow_way(settings):
    run = dict(steps=2, prompts_per_step=3, num_generations=4, max_completion_length=6, seed=1,
               learning_rate=3e-3, warmup_steps=0, temperature=0.8, micro_batch_size=5) | settings
    model = ending_model(2.0, "llama", initializer_range=0.2)  # lengths differ
    start, slow_model, reference = weights_of(model), copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow_model.parameters(), weight_decay=0.0)
    def reward(**columns):
        # It is called between sampling and the update. Both models change, so that sampler_gap is
        # not 0.
        for parameter in [*model.parameters(), *slow_model.parameters()]:
            parameter.data *= 1.01
        return coarse_reward(**columns)
    def compare(learner):
        metrics = learner.history[-1]
        optimizer.param_groups[0]["lr"] = metrics["learning_rate"]
        wanted = slow_step(slow_model, reference, optimizer, learner.groups, learner.config)
        for figure, value in wanted.items():
            assert metrics[figure] == pytest.approx(float(value), rel=5e-4, abs=2e-6), figure
        moved = (weights_of(model) - start).norm()
        assert (weights_of(model) - weights_of(slow_model)).norm() <= 5e-3 * moved
    assert len(train_tiny(model, reward, after=compare, **run)) == run["steps"]


def test_dynamic_sampling_replaces_only_groups_of_equal_rewards_and_gives_up_in_the_end():
    """In each round the first group's rewards are equal, so it asks for 3 + 1 + 1 + 1 groups."""
    rounds = []
    def reward(prompts, **columns):
        rounds.append(len(prompts) // 4)
        return [1, 1, 1, 1] + [0, 1, 2, 3] * (rounds[-1] - 1)
    metrics = train_tiny(reward=reward, dynamic_sampling=3, prompts_per_step=3, num_generations=4,
                         steps=1)[0]
    assert rounds == [3, 1, 1, 1] and metrics["examples_seen"] == 6
    assert metrics["zero_variance_fraction"] == pytest.approx(1 / 3)


def test_a_group_with_one_advantage_of_0_teaches():
    """The one in the middle. So no group is replaced."""
    metrics = train_tiny(reward=lambda **_: [0, 1, 2] * 2, num_generations=3, prompts_per_step=2,
                         steps=1, dynamic_sampling=3)[0]
    assert (metrics["examples_seen"], metrics["zero_variance_fraction"]) == (2, 0)


def test_there_is_no_dropout():
    """Nor in the samples or the reference. The model comes in train mode, in float64."""
    plain = tiny_model("gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = tiny_model("gpt2").double().train()
    assert train_tiny(model, steps=3) == train_tiny(plain, steps=3)


def reward_per_a(completions, **columns):
    """How often each completion says "a"."""
    return [text.split().count("a") for text in completions]


def shuffled_reward(**columns):
    """The same rewards, for other completions."""
    return random.sample(reward_per_a(**columns), k=len(columns["completions"]))


@each("bf16", [False, True])
@each("reward, least, most", {"what is rewarded": (reward_per_a, 2.5, 5),
                              "shuffled: nothing": (shuffled_reward, 0, 1)})
def test_a_model_learns(reward, least, most, bf16):
    """At first, a completion of up to 5 tokens has 0.1 "a" on average."""
    history = train_tiny(reward=reward, beta=0, num_generations=16, steps=25, bf16=bf16)
    assert least < sum(metrics["reward_mean"] for metrics in history[-5:]) / 5 < most


def test_the_real_call_in_the_docstring_of_train_runs(monkeypatch, tmp_path):
    """With a tiny model and tokenizer."""
    [code] = re.findall(r" {4}name = (?s:.*?)\n(?=\S)", inspect.cleandoc(train.__doc__))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, dtype: tiny_model())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: TOKENIZER)
    monkeypatch.chdir(tmp_path)
    names = vars(grpo) | dict(
        AutoModelForCausalLM=AutoModelForCausalLM, AutoTokenizer=AutoTokenizer,
        GRPOConfig=lambda **given: GRPOConfig(**given | dict(
            num_generations=2, prompts_per_step=1, max_completion_length=5)))
    exec(textwrap.dedent(code), names)
    assert len(log_of(tmp_path / "runs/sums")) == 20
    assert AutoConfig.from_pretrained("runs/sums").model_type == "qwen2"
    answer = names["data"][0]["answer"]  # 11 times 2 plus 2
    texts = ["22 + 2 = 24.", "24 - 2", "no number"]
    assert names["reward"]([[{"content": text}] for text in texts], 3 * [answer]) == [1, 0, 0]


# ==== gsm8k_demo.py ========================================================================
# ---- Data, model, evaluation --------------------------------------------------------------
GOOD_ROW = {"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"}


def write_gsm8k(folder, *rows):
    """GSM8K's two files, with these rows in each."""
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))


@each("from_hub", [False, True])
def test_gsm8k_is_read_from_a_folder_or_from_the_hub(from_hub, tmp_path, monkeypatch):
    write_gsm8k(tmp_path, GOOD_ROW, GOOD_ROW)
    monkeypatch.setattr(gsm8k_demo, "load_dataset", hub := Mock(return_value=[GOOD_ROW, GOOD_ROW]))
    for data in gsm8k_demo.load_gsm8k(None if from_hub else tmp_path):
        assert [example["answer"] for example in data] == ["1,018", "1,018"]
        assert data[0]["prompt"][-1] == {"role": "user", "content": "How many?"}
    assert hub.called == from_hub


@each("row", {
    "no ####": {"question": "x", "answer": "18"}, "a number": 18,
    "no question": {"answer": "#### 1"}, "a blank answer": {"question": "x", "answer": "1\n#### "}})
def test_a_broken_row_of_data_is_named(row, tmp_path):
    write_gsm8k(tmp_path, GOOD_ROW, row)
    with refused("train data, row with index 1"):
        gsm8k_demo.load_gsm8k(tmp_path)


def test_the_reward_takes_strings_and_chats():
    completions = [[{"content": r"18, so \boxed{\$1018}"}], r"\boxed{1}", "1018"]
    rewards = gsm8k_demo.boxed_reward(None, completions, ["1,018"] * 3, completion_ids=None)
    assert rewards == [1.5, 0.5, 0.0]


@each("name, said, tokenizer", [  # tokenizer: an error to raise, or a list of what to return
    ("no/folder/here", "no folder with a model", None),
    ("owner/model", "cannot load owner/model: offline Is the network there", OSError("offline")),
    ("owner/model", "owner/model has no chat template", [Mock(chat_template=None)])])
def test_a_model_that_cannot_be_taken_is_named(name, said, tokenizer, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=tokenizer))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", Mock())
    with pytest.raises((OSError, ValueError), match=said):
        gsm8k_demo.load_model(name)


def echo(model, tokenizer, examples, *settings):
    """As `sample_groups`, but each prompt is its own completion."""
    return [[Mock(text=example["prompt"])] for example in examples]


@each("strictly, leniently, texts", [
    (1, 1, [r"\boxed{7}, so \boxed{1,000}", r"$\boxed{1000}$"]),
    (0, 1, ["it is 1,000.", "7 dollars, or $1000.", "5-1000"]),  # no sign after a digit
    (0, 0, [r"\boxed{7}, or 1000", "-1000", "1000 of 7", "no idea", "", r"\boxed{}"])])
def test_an_evaluation_takes_the_last_box_and_leniently_the_last_number_where_no_box_is(
        strictly, leniently, texts, monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "sample_groups", echo)
    data = [{"prompt": text, "answer": "1000"} for text in texts]
    found = gsm8k_demo.evaluate(tiny_model(), None, data, 9)
    assert (found["accuracy"], found["lenient_accuracy"]) == (strictly, leniently)


def test_an_evaluation_samples_so_many_at_once_and_has_an_interval(monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "sample_groups", counted := Mock(wraps=echo))
    data = [{"prompt": rf"\boxed{{{i}}}", "answer": "5"} for i in range(10)]
    found = gsm8k_demo.evaluate(tiny_model(), None, data, 9, sampling_batch_size=3)
    assert [len(call.args[2]) for call in counted.call_args_list] == [3, 3, 3, 1]
    assert (found["questions"], found["accuracy"]) == (10, 0.1)
    agrees(found["interval"], "0.0179 0.4042", within=1e-4)  # Wilson's


# ---- The rehearsal ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pretrained():
    """(model, tokenizer, train_data, test_data), for all tests below."""
    return gsm8k_demo.rehearsal(0)


def train_with(mistake, pretrained, **settings):
    """Trains a copy with a mistake of the gallery. Gives the copy, and the last metrics."""
    model, tokenizer, train_data, _ = copy.deepcopy(pretrained)
    return model, gallery.train(mistake, model, tokenizer, train_data, **settings)[-1]


def test_no_problem_is_in_two_of_the_three_parts(monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "pretrain", pretrain := Mock())
    _, _, to_learn, to_test = gsm8k_demo.rehearsal(0)
    _, _, known, _ = pretrain.call_args.args
    questions = [row["prompt"][0]["content"] for row in [*known, *to_learn, *to_test]]
    assert len(set(questions)) == len(questions) and len(to_test) >= 256  # as the evaluation takes


# ---- From the command line ----------------------------------------------------------------
@pytest.fixture
def demo(pretrained, monkeypatch, tmp_path):
    """Runs the demo with the flags of a command line, in an empty folder, without a GPU, and with
    a rehearsal that has been made."""
    def run(command_line):
        monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *shlex.split(command_line)])
        gsm8k_demo.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: copy.deepcopy(pretrained))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return run


def read_json(path):
    return json.loads(Path(path).read_text())


def stopped(said):
    """The block must end the program with one line, which says this."""
    return pytest.raises(SystemExit, match=f"^stopped: .*{said}.*$")


SMALL = "--rehearsal --steps 1 --prompts_per_step 1 --eval_questions 1 --output run "
FEW = ("--rehearsal --steps 4 --prompts_per_step 4 --eval_questions 64 --eval_every 2 "
       "--show_steps 9 --save_steps 2 --output ")
FLAGS = vars(GRPOConfig()) | vars(gsm8k_demo.DemoConfig())


@each("flags, said", [
    ("--rehearsal --num_generations 1", "num_generations is 1"),
    ("--rehearsal --num_mini_batches 999", "num_mini_batches is 999"),
    ("--rehearsal --max_completion_length 99999", "max_completion_length is 99999"),
    ("--rehearsal --eval_questions 0", "eval_questions 0"), ("--rehersal", "--rehersal"),
    ("--rehearsal --eval_every -1", "eval_every is -1"), ("--rehear", "unrecognized.*--rehear"),
    (f"--rehearsal --output {grpo.__file__}", "Not a directory"),
    ("--resume --output no/such", "no run to go on with in no/such"),
    ("--data nowhere --model x", "cannot load nowhere"),
    ("--rehearsal --model x", "leave out --model")])
def test_wrong_flags_end_in_one_line_and_write_nothing(flags, said, demo, tmp_path):
    with stopped(said):
        demo(flags)
    assert not files_in(tmp_path)


@each("flags, said", [
    (SMALL, "run holds a run"), ("--resume --output run --seed 5", "seed is 0 there, 5 here"),
    ("--resume --output run --data x", "data is None there, x here"),
    ("--resume --output run --eval_questions 8", "eval_questions is 1 there, 8 here")])
def test_the_demo_takes_no_folder_of_another_run(flags, said, demo):
    demo(SMALL)
    files = files_in("run")
    with stopped(said):
        demo(flags)
    assert files_in("run") == files


@each("name", ["settings.json", "results.json", "checkpoint.pt"])
def test_a_damaged_file_is_named(name, demo):
    demo(SMALL)
    Path("run", name).write_text("[]")
    with stopped(f"run/{name} (is damaged|cannot be read)"):
        demo("--resume --output run")


def test_every_setting_is_a_flag_and_help_shows_defaults_and_choices(demo, printed):
    with pytest.raises(SystemExit):
        demo("--help")
    flags = " ".join(printed().partition("\noptions:")[2].split())
    for name, default in FLAGS.items():
        assert re.search(rf"--{name}\b.*?\(default: (.*?)\)", flags)[1] == str(default)
    assert "{group,none,batch,rloo}" in flags


def test_what_is_shown_in_a_run(demo, printed):
    demo(FEW + "run")
    text = printed()
    assert "--output run --resume" in text and "warning" not in text
    for name in ("before", "step 2", "after"):
        assert text.count(f"{name}: sampled") == 2  # at once, and again in the end
    groups = re.findall(r"^step (\d+): (.*?)  all groups", text, re.M | re.S)
    assert [step for step, _ in groups] == ["1", "2", "4"]  # at first 1, 2, 4, 8, 16, 32
    for _, group in groups:
        rows = re.findall(r"(\d) x  (reward (\S+) .*)", group)
        counts, lines, rewards = zip(*rows)
        assert sum(map(int, counts)) == 8 and len({*lines}) == len(lines)  # equal ones are merged
        assert len({*rewards}) > 1  # a group that teaches


def test_the_files_and_the_last_lines_of_a_run(demo, printed):
    demo(FEW + "run")
    settings, results = read_json("run/settings.json"), read_json("run/results.json")
    assert (settings["steps"], settings["beta"]) == (4, 0.02)  # typed, and the rehearsal's own
    assert list(results) == ["before", "step 2", "after"]
    for result in results.values():
        assert result["questions"] == 64 and result.keys() >= {
            "accuracy", "lenient_accuracy", "interval", "sampled_accuracy"}
    _, lines = printed().split("To ask the model:\n")
    exec(textwrap.dedent(lines), {})  # they load the model


def test_a_finished_run_can_be_trained_further(demo, printed):
    """--steps and --show_steps may be typed anew. Fewer steps than there are train nothing."""
    demo(FEW + "run")
    demo("--resume --output run --steps 7 --show_steps 3")
    _, text = printed().split("going on after step 4")
    assert re.findall(r"^step (\d+): ", text, re.M) == ["6"]  # every third
    assert [metrics["step"] for metrics in log_of("run")] == [1, 2, 3, 4, 5, 6, 7]
    assert list(read_json("run/results.json")) == ["before", "step 2", "step 6", "after"]
    demo("--resume --output run --steps 5")
    assert "nothing was left to train: the run has 7 steps" in printed()


def test_without_a_gpu_it_is_the_rehearsal_which_learns(demo, printed):
    demo("--steps 10 --show_steps 0 --output run")
    text = printed()
    assert "no CUDA GPU" in text and gsm8k_demo.HABIT_FOUND in text
    assert "\nstep 1: " not in text  # no group
    before, after = read_json("run/results.json").values()
    assert before["accuracy"] < 0.15 < before["sampled_accuracy"] < 0.35
    assert min(after["accuracy"], after["sampled_accuracy"]) > 0.8


def test_a_model_and_data_in_folders(demo, pretrained, tmp_path, printed):
    """The real run, but for the size."""
    write_gsm8k(tmp_path, GOOD_ROW, GOOD_ROW)
    model, tokenizer, _, _ = pretrained
    model.save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    demo("--data . --model tiny --steps 1 --prompts_per_step 1 --max_completion_length 9 "
         "--output run")
    assert gsm8k_demo.NOT_LEARNED in printed()
    assert "sampled_accuracy" not in read_json("run/results.json")["after"]


@each("before, after, words", [([0.1, 0.2], [0.3, 0.4], gsm8k_demo.LEARNED),
                               ([0.3, 0.4], [0.1, 0.2], gsm8k_demo.FELL)])
def test_the_last_words_follow_the_intervals(before, after, words, printed):
    """The other two endings are those of the runs above."""
    results = {name: dict(interval=interval, accuracy=0.5, lenient_accuracy=0.5)
               for name, interval in (("before", before), ("after", after))}
    gsm8k_demo.show_end(Path("run"), [], results, [{"reward_mean": 1.5}], is_rehearsal=False)
    assert words in printed()


@each("function, call", [  # calls of `evaluate`: before 1, 2; after step 2: 3, 4; after: 5, 6
    ("evaluate", 1), ("boxed_reward", 2), ("evaluate", 4), ("evaluate", 5)])  # boxed: in step 2
def test_after_ctrl_c_the_printed_command_goes_on(function, call, demo, monkeypatch, capsys):
    demo(FEW + "uninterrupted")
    works, interrupt = getattr(gsm8k_demo, function), Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exited:
        patch.setattr(gsm8k_demo, function, fails_from_call(call, works, interrupt))
        demo(FEW + "'a folder'")
    assert exited.value.code == 130
    _, command = capsys.readouterr().err.split("interrupted. To go on: python gsm8k_demo.py ")
    demo(command)
    assert read_json("a folder/results.json") == read_json("uninterrupted/results.json")


def test_ctrl_c_before_anything_is_written(demo, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gsm8k_demo, "rehearsal", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        demo("--rehearsal")
    assert capsys.readouterr().err == "interrupted before anything was written\n"
    assert not files_in(tmp_path)


@each("function, flag, half", [("sample_groups", "sampling_batch_size", 128),
                               ("compute_logprobs", "micro_batch_size", 32)])
def test_out_of_memory_is_told_in_one_line_whose_command_goes_on(function, flag, half, demo,
                                                                 monkeypatch):
    with monkeypatch.context() as patch, stopped(f"out of memory.*--{flag}") as error:
        patch.setattr(grpo, function, Mock(side_effect=torch.OutOfMemoryError))
        demo(SMALL)
    _, command = str(error.value).split("To go on: python gsm8k_demo.py ")
    demo(command)
    assert read_json("run/settings.json")[flag] == half


@each("gaps", [[0.02, 0.2, 0.3], [nan]])
def test_a_sampler_that_disagrees_is_warned_of_once(gaps, demo, monkeypatch, printed):
    left = iter(gaps)
    def sample(*arguments):
        [group] = sample_groups(*arguments)
        gap = next(left)
        for completion in group:
            completion.sampler_logprobs = [there + gap for there in completion.sampler_logprobs]
        return [group]
    monkeypatch.setattr(grpo, "sample_groups", sample)
    demo(f"--rehearsal --steps {len(gaps)} --prompts_per_step 1 --eval_questions 1")
    assert printed().count("warning: the log-probs of sampling") == 1


# ==== The gallery of mistakes ==============================================================
@each("mistake", [name for name, changes in gallery.GALLERY.items() if "code" in changes])
def test_every_mistake_in_code_can_be_made(mistake, pretrained):
    """gallery.train raises an error if the code to be replaced is not in grpo.py."""
    train_with(mistake, pretrained, steps=1, prompts_per_step=2)


@each("mistake, steps, figure, least, most", gallery.LOUD)
def test_loud_mistakes_still_show(mistake, steps, figure, least, most, pretrained):
    """Within these steps, in the figure by which the README recognises them."""
    _, metrics = train_with(mistake, pretrained, steps=steps, warmup_steps=2)
    assert least <= metrics[figure] <= most


# ==== The README ===========================================================================
README = Path(grpo.__file__).with_name("README.md").read_text(encoding="utf-8")


def test_flags_of_the_readme_exist_and_its_tables_have_every_figure():
    assert set(re.findall(r"--(\w+)", README)) <= FLAGS.keys() | {"help", "nproc_per_node", "seeds"}
    first_cells = " ".join(re.findall(r"^\| (`[^|]*)", README, re.M))  # those with code
    names = set(re.findall(r"`(\w+)`", first_cells))
    figures = train_tiny(steps=1)[0].keys() | {"sample_seconds", "update_seconds"}
    assert figures <= names <= figures | FLAGS.keys()


@each("block", re.findall(r"```python\n(.*?)```", README, re.S))
def test_the_readmes_python_is_right(block, demo, printed):
    """It prints what it says. Machines differ by less than 0.15. (TRL must get our defaults.)"""
    if "trl" in block:
        written = dict(re.findall(r"\b(\w+)=([^\s,)]+)", block))
        shared = written.keys() & FLAGS.keys()
        assert len(shared) > 9
        assert [ast.literal_eval(written[n]) for n in shared] == [FLAGS[n] for n in shared]
        return
    exec(block, {})
    [promised] = re.findall(r"^print.*  # ([^;\n]*)", block, re.M)  # "print(...)  # 1 -> 2; why"
    agrees(printed().replace("->", ""), promised.replace("->", ""), within=0.15)
