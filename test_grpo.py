# SPDX-License-Identifier: MIT-0
r"""The tests of grpo.py and gsm8k_demo.py: the second half of the tutorial.

    python -m pytest -q test_grpo.py

They run offline, on the CPU. The documents' numbers come first. Most other tests are tables
of cases. "Slow" functions compute the same thing in a plain way. Change a line of grpo.py!"""

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
import textwrap
import time
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock, Mock

import datasets
import numpy as np
import pytest
import torch
from tokenizers import models, pre_tokenizers, Tokenizer
from torch.nn.utils import parameters_to_vector
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, CONFIG_MAPPING,
                          PreTrainedTokenizerFast)

sys.path.insert(0, str(Path(__file__).parent / ".ci"))
import gallery  # noqa: E402
import grpo  # noqa: E402
import gsm8k_demo  # noqa: E402
from grpo import (average, clipped_surrogate, compute_logprobs, end_token_ids,
                  extract_boxed, group_advantages, grpo_loss, GRPOConfig, k3_kl, kl_estimate,
                  masked_mean, overlong_penalty, rule_reward, sample_groups, token_logprobs,
                  train)  # noqa: E402

torch.set_num_threads(1)  # matrices this small are done before a second thread wakes up

def t64(values):
    return torch.tensor(values, dtype=torch.float64)

def numbers(text):
    return t64([float(word) for word in text.split()])

def gradient(function, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]

each = pytest.mark.parametrize  # a test for each row of a list

def cases(names, table):
    """A test for each row of a table: the key is its name, the value goes in."""
    return each(names, table.values(), ids=table)

def kwargs(text):  # "beta=0, seed=1" as a dict
    return eval(f"dict({text})")

def near(actual, expected, tolerance=1e-12):
    actual = torch.as_tensor(actual, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# --- The worked numbers of the documents ---
# The tests follow each document in its order, and name section and line. The documents are:
#   Scratch    "Group-Relative Policy Optimization (GRPO) — From Scratch", an article
#   Book       chapter 11, "Policy Gradient Algorithms", of a book on RLHF
#   Explained  "GRPO Objective Function Explained", a tutorial
#   Hands-on   "9.3 Hands-on: GRPO Training and Core Mechanisms", a section of a course
#   RLinf      "组相对策略优化 (GRPO)", a page of RLinf's documentation
# `equals` holds what is right, `rounds_to` what is printed, `differs_from` what is misprinted.
def equals(values, figures):
    near(torch.as_tensor(values).flatten(), numbers(figures), 1e-6)

def last_digits_off(values, figures):
    """How far each value is from its figure, in units of the figure's last digit."""
    values = torch.as_tensor(values, dtype=torch.float64).flatten()
    units = t64([10.0 ** -len(figure.partition(".")[2]) for figure in figures.split()])
    assert len(values) == len(units)
    return (values - numbers(figures)).abs() / units

def rounds_to(values, figures):
    assert (last_digits_off(values, figures) < 0.5).all()

def differs_from(values, figures):
    assert (last_digits_off(values, figures) > 0.5).all()

def mean_and_std(rewards):
    """Mean and std of one group, as group_advantages has them."""
    centered = group_advantages(rewards, "none")
    return [(rewards - centered)[0], (centered / group_advantages(rewards))[0]]

def one_token(probabilities, advantage, beta):
    """Loss and metrics of one token; its probabilities are pi_theta, pi_old and pi_ref."""
    policies = numbers(probabilities).log().view(3, 1, 1)
    return grpo_loss(*policies, t64([advantage]), torch.ones(1, 1), beta=beta)

def slopes_at_ratio_1(advantages):
    """Gradient of the loss, without KL, for answers of one token."""
    old = torch.zeros(len(advantages), 1)
    return gradient(lambda new: grpo_loss(new, old, None, advantages, old == 0, beta=0)[0], old)

def gae(residuals, decay):
    """PPO's advantage: a sum of TD residuals. The decay is gamma times lambda."""
    return sum(decay ** l * residual for l, residual in enumerate(residuals))

# Scratch
FIVE = numbers("2.0 3.5 1.0 4.0 2.5")  # its rewards
FIVE_ADVANTAGES = "-0.561951 0.842927 -1.498537 1.311220 -0.093659"

def test_scratch_clip_at_ratio_1_3():
    """Scratch, Quick Recap, line 48: ratio 1.3, advantage 2.0, epsilon 0.2."""
    ratio = numbers("1.3").view(1, 1)
    equals(clipped_surrogate(ratio, numbers("2.0"), epsilon=99), "2.6")  # unclipped
    equals(clipped_surrogate(ratio, numbers("1"), epsilon=0.2), "1.2")  # the clipped ratio
    equals(clipped_surrogate(ratio, numbers("2.0"), epsilon=0.2), "2.4")
    loss, metrics = one_token("0.26 0.2 0.2", advantage=2.0, beta=0)  # 30 % more likely
    equals([loss, metrics["ratio_max"], metrics["clip_fraction"]], "-2.4 1.3 1")

def test_scratch_td_residual():
    """Scratch, Quick Recap, line 67: reward 1, values 5.0, 5.5, gamma 0.99, lambda 0.95."""
    residual = 1 + 0.99 * 5.5 - 5.0
    equals([0.99 * 5.5, residual, gae([residual], 0.99 * 0.95)], "5.445 1.445 1.445")

def test_scratch_mean_std_and_advantages_of_five():
    """Scratch, The Key Insight, lines 123 to 134: the std is divided by G."""
    squares = group_advantages(FIVE, "none").square()
    equals(squares, "0.36 0.81 2.56 1.96 0.01")
    equals([FIVE.sum(), squares.sum(), squares.mean()], "13.0 5.7 1.14")
    equals(mean_and_std(FIVE), "2.6 1.067708")
    rounds_to(mean_and_std(FIVE), "2.6 1.07")
    advantages = group_advantages(FIVE)
    equals(advantages, FIVE_ADVANTAGES)
    rounds_to(advantages, "-0.56 +0.84 -1.50 +1.31 -0.09")
    assert [advantages.argmax() + 1, advantages.argmin() + 1] == [4, 3]  # the best, the worst

def test_scratch_kl_at_ratios_1_and_2():
    """Scratch, The Full GRPO Objective, lines 180, 186: pi_ref/pi_theta is 1, then 2."""
    same, twice = k3_kl(numbers("0.2 0.2").log(), numbers("0.2 0.4").log())
    equals([math.log(1), same, math.log(2), twice], "0 0 0.693147 0.306853")
    rounds_to([math.log(2), twice], "0.693 0.307")
    near(one_token("0.2 0.2 0.4", advantage=0, beta=1)[0], twice)  # KL raises the loss

def test_scratch_code_divides_by_one_less_than_its_text():
    """Scratch, Practical Implementation, line 258: torch's std divides by G - 1."""
    advantages = (FIVE - FIVE.mean()) / FIVE.std()
    equals(FIVE.std(), "1.193734")
    equals(advantages, "-0.502625 0.753937 -1.340333 1.172791 -0.083771")
    near(group_advantages(FIVE) * (4 / 5) ** 0.5, advantages, 1e-6)
    # So the code gives none of the figures in lines 125 to 132.
    differs_from([FIVE.std(), *advantages], "1.07 -0.56 +0.84 -1.50 +1.31 -0.09")

def test_scratch_equal_rewards_give_zero():
    """Scratch, Practical Implementation, line 261: "we return zero advantages"."""
    assert not group_advantages(numbers("2.6 2.6 2.6")).any()

# Book
P, Q = numbers("0.1 0.2 0.4 0.3"), numbers("0.4 0.3 0.2 0.1")  # any two policies
LOSSES = numbers("1 1 1 1 10 0 0 0 0 0  1 1 1 1 1 1 1 1 1 10").view(2, 10)  # 0 is padding
# In the script, the ratios are 1 for a token and 0 for padding, and so is the mask.
RATIOS = TOKENS = numbers("1 1 1 1 0 0 0  1 1 1 1 1 1 1").view(2, 7)

def slopes_by_script(loss_type):
    """The script's gradient for each ratio. Both advantages are 2."""
    return gradient(lambda ratios: average(2 * ratios, TOKENS, loss_type, 7), RATIOS)

def test_book_the_gradient_of_log_pi_has_the_mean_0():
    """Book, 11.1.1, line 34: the mean is over the actions of a policy."""
    near(gradient(lambda logits: Q @ logits.log_softmax(0), Q.log()), 0 * Q)

def test_book_three_forms_of_rloo():
    """Book, 11.1.2.1, 11.1.4, 11.2.4.1, lines 60, 113, 345: the rewards are Scratch's."""
    right = "-0.75 1.125 -2 1.75 -0.125"
    equals(FIVE - (FIVE.sum() - FIVE) / (5 - 1), right)  # minus the mean of the others
    equals(group_advantages(FIVE, "none") * 5 / (5 - 1), right)
    equals(group_advantages(FIVE, "rloo"), right)

def test_book_cases_of_the_clip():
    """Book, 11.1.3, lines 78 to 93: ratios above, between, below; advantages 1 and -1."""
    ratios = numbers("1.5 0.9 0.5  1.5 0.9 0.5").view(2, 3)
    equals(clipped_surrogate(ratios, numbers("1 -1")), "1.2 0.9 0.5  -1.5 -0.9 -0.8")

def test_book_cases_of_the_policy_gradient():
    """Book, 11.2.1, lines 129 to 131: advantages 1, -1 and 0."""
    slopes = 3 * slopes_at_ratio_1(numbers("1 -1 0"))
    equals(slopes, "-1 1 0")  # descent makes them more likely, less likely, and neither
    near(one_token("0.2 0.2 0.2", advantage=0, beta=0)[0], 0)

def test_book_mean_of_all_tokens_is_33_and_not_34_over_15():
    """Book, 11.2.2, lines 150 to 155: answers of 5 and 10 tokens; 2.27 is a misprint."""
    equals(masked_mean(LOSSES, LOSSES, dim=1), "2.8 1.9")
    equals(average(LOSSES, LOSSES), "2.35")  # answers count equally
    mean = average(LOSSES, LOSSES, "dapo")  # tokens count equally
    equals(LOSSES.sum(dim=1), "14 19")
    equals([mean, (14 + 19) / 15], "2.2 2.2")
    rounds_to(34 / 15, "2.27")
    differs_from(mean, "2.27")

def test_book_script_results():
    """Book, 11.2.2, lines 235 to 237."""
    equals(masked_mean(2 * RATIOS, TOKENS, dim=1), "2 2")
    sums = [average(2 * row, row, "dr_grpo", 7) for row in TOKENS.split(1)]  # answer by answer
    equals(sums, "1.142857 2")
    rounds_to(sums, "1.1429 2.0000")
    near(average(2 * RATIOS, TOKENS, "dr_grpo", 7), sum(sums) / 2)
    near(masked_mean(RATIOS, TOKENS), 1)  # line 212 leaves out the advantages
    near(average(2 * RATIOS, TOKENS, "dapo"), 2)

def test_book_script_gradients_of_masked_mean_and_masked_sum():
    """Book, 11.2.2, lines 241 and 246."""
    of_mean, of_sum = slopes_by_script("grpo"), slopes_by_script("dr_grpo")
    near(of_mean, TOKENS / t64([[4], [7]]))
    near(of_sum, TOKENS / 7)
    rounds_to(of_mean, "0.2500 0.2500 0.2500 0.2500 0.0000 0.0000 0.0000 "
                       "0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.1429")
    rounds_to(of_sum, "0.1429 0.1429 0.1429 0.1429 0.0000 0.0000 0.0000 "
                      "0.1429 0.1429 0.1429 0.1429 0.1429 0.1429 0.1429")

def test_book_script_adds_two_gradients():
    """Book, 11.2.2, line 251: ratio.grad.zero_() is missing after line 248."""
    table = gradient(lambda ratios: masked_mean(ratios, TOKENS), RATIOS)
    near(table, TOKENS / 11)
    differs_from(table[TOKENS > 0], 11 * "0.2338 ")
    both = slopes_by_script("dr_grpo") + table
    near(both, TOKENS * (1 / 7 + 1 / 11))
    rounds_to(both, "0.2338 0.2338 0.2338 0.2338 0.0000 0.0000 0.0000 "
                    "0.2338 0.2338 0.2338 0.2338 0.2338 0.2338 0.2338")
    near(slopes_by_script("dapo"), TOKENS * 2 / 11)  # with the advantages

def test_book_only_masked_mean_favours_the_short_answer():
    """Book, 11.2.2, line 254: a token's gradient, short answer over long answer."""
    tables = [slopes_by_script(loss_type) for loss_type in ("grpo", "dr_grpo", "dapo")]
    equals([table[0, 0] / table[1, 0] for table in tables], "1.75 1 1")

def test_book_approximate_kl_and_objective_of_a_single_gradient_step():
    """Book, 11.2.3, line 289: k2 at 0.3; line 301: A - beta KL, where A is 2."""
    equals(kl_estimate(numbers("0.3"), numbers("0"), "mse"), "0.045")
    near(-one_token("0.2 0.2 0.4", advantage=2, beta=0.04)[0], 2 - 0.04 * 0.306853, 1e-6)

def test_book_two_forms_of_gae():
    """Book, 11.3.1, line 361: our rewards are 0, 0, 1, our values 0.2, 0.5, 0.8."""
    residuals = [0.5 - 0.2, 0.8 - 0.5, 1 - 0.8]  # gamma is 1
    steps = [0.5 - 0.2, 0.8 - 0.2, 1 - 0.2]  # n-step estimates; three is the end
    near(0.05 * (steps[0] + 0.95 * steps[1]) + 0.95 ** 2 * steps[2], 0.7655)
    equals([gae(residuals, lam) for lam in (0, 0.95, 1)], "0.3 0.7655 0.8")

# Explained
def test_explained_k3_is_unbiased():
    """Explained, Derivation, lines 111 to 125: x is drawn from q, and r = p(x)/q(x)."""
    r = P / Q
    equals([P.sum(), Q.sum(), Q @ (r - 1)], "1 1 0")
    k3, k1 = k3_kl(Q.log(), P.log()), kl_estimate(Q.log(), P.log(), "kl")
    # lambda 1, 0 and 0.5: with 0.5 it is the mean of the two.
    equals([Q @ (Q / P).log(), Q @ k3, Q @ k1, Q @ (k3 + k1) / 2], 4 * "0.427667 ")

def test_explained_k3_is_0_only_where_the_policies_agree():
    """Explained, Derivation, lines 129 to 131: log r from -3 to 3."""
    log_r = torch.arange(-3, 3.5, 0.5)
    k3 = k3_kl(0 * log_r, log_r)
    assert k3.min() == 0 and torch.equal(k3 > 0, log_r != 0)
    equals(k3_kl(t64([0] * 3), numbers("2 1 0.5").log()), "0.306853 0 0.193147")  # line 143

def test_explained_exp_88_fits_into_bfloat16():
    """Explained, KL Divergence Computation, line 223: "exp(88) ≈ 1e38" is not too large."""
    largest = torch.finfo(torch.bfloat16).max
    equals([math.exp(88) / 1e38, largest / 1e38], "1.651636 3.389531")
    differs_from(math.exp(88) / 1e38, "1")
    equals(math.log(largest), "88.718925")  # above this, e^x is too large
    assert numbers("88 89").bfloat16().exp().isinf().tolist() == [False, True]

def test_explained_clip_is_needed_above_50_but_not_below():
    """Explained, KL Divergence Computation, line 224: diff is clipped to [-50, 50]."""
    diff = numbers("50 60 -50 -60")
    equals(k3_kl(0 * diff, diff) / numbers("1e21 1e21 1 1"), "5.184706 5.184706 49 59")
    clipped = diff.clamp(-50, 50)  # with its code, -60 costs no more than -50
    equals((clipped.exp() - clipped - 1)[2:], "49 49")

def test_explained_sign_of_the_loss():
    """Explained, Combining Terms, line 259: -policy_loss + beta KL, where A is 1."""
    near(one_token("0.2 0.2 0.4", advantage=1, beta=0.04)[0], -1 + 0.04 * 0.306853, 1e-6)

# Hands-on
APPLES = ["3 + 2 = 5, so the answer is 5.", "The answer is 5.", "It should be 6.",
          "I am not sure, perhaps it is 4."]
SCORES = numbers("1.5 1.0 0.0 0.0")  # of these four, as the course has them
GOOD = ("First compute the eggs left each day: 16 - 3 - 4 = 9.\n"
        "There are 7 days in a week, so she can sell: 9 * 7 = 63.\n\\boxed{63}")
BAD = "I think she can sell about 50 eggs. \\boxed{50}"
BEFORE = "I think there are 7 left. \\boxed{7}"
AFTER = ("Let me calculate step by step:\n- John starts with 15 apples.\n"
         "- He gives 3 to Mary: 15 - 3 = 12.\n- He gives 5 more to Kevin: 12 - 5 = 7.\n"
         "- Therefore 7 apples are left.\n\\boxed{7}")
EIGHT = numbers("1.5 0.0 1.5 0.0 1.0 1.5 0.5 1.5")  # rewards

def course_reward(text, answer):
    """The rule of the course, lines 387 to 397. Its pattern takes the first box."""
    box = re.search(r"\\boxed\{([^}]+)\}", text)
    return 0.5 + (box[1].strip() == answer) if box else 0.0

def boxed_rewards(answers, right):
    return t64([rule_reward(rf"\boxed{{{answer}}}", right) for answer in answers.split()])

def test_hands_on_apple_scores_break_its_rule():
    """Hands-on, line 25: without a box an answer earns nothing, and no answer earns 1.0."""
    graded = [rule_reward(text, "5") for text in APPLES]
    assert graded == [course_reward(text, "5") for text in APPLES] == [0, 0, 0, 0]
    differs_from(graded[:2], "1.5 1.0")
    boxed = boxed_rewards("5 5 6 4", "5")
    equals(boxed, "1.5 1.5 0.5 0.5")
    differs_from(boxed[1:], "1.0 0.0 0.0")
    # The scores as given, minus their mean: lines 33 to 41.
    equals(mean_and_std(SCORES)[0], "0.625")
    equals(group_advantages(SCORES, "none"), "+0.875 +0.375 -0.625 -0.625")

def test_hands_on_rule_and_its_two_examples():
    """Hands-on, 9.3.1, lines 352 to 381: +1.0 for the answer, +0.5 for the box."""
    for reward in (rule_reward, course_reward):
        equals([reward(text, "7") for text in (r"\boxed{7}", r"\boxed{8}", "7")], "1.5 0.5 0")
        equals([reward(GOOD, "63"), reward(BAD, "63")], "1.5 0.5")
    corrected = r"\boxed{50}? No: \boxed{63}"  # of two boxes, the last one counts
    equals([rule_reward(corrected, "63"), course_reward(corrected, "63")], "1.5 0.5")

def test_hands_on_steps_alone_earn_nothing():
    """Hands-on, 9.3.1, lines 494 to 506: before and after training, the answer is right."""
    rewards = t64([rule_reward(BEFORE, "7"), rule_reward(AFTER, "7")])
    equals(rewards, "1.5 1.5")
    assert not group_advantages(rewards).any()

def test_hands_on_a_group_is_a_row_and_equal_rewards_give_zero():
    """Hands-on, 9.3.1 and 9.3.2, lines 337, 403, 567 and 589: two prompts, G = 3."""
    for equal in ("1.5 1.5 1.5", "0 0 0"):
        rewards = numbers("1 1 0 " + equal).view(-1, 3)
        equals(group_advantages(rewards), "0.707107 0.707107 -1.414214  0 0 0")

def test_hands_on_ratio_and_clip():
    """Hands-on, 9.3.2, lines 623 and 634: 0, +20 and -20 %, and the interval [0.8, 1.2]."""
    for new, ratio in (("0.5", "1"), ("0.6", "1.2"), ("0.4", "0.8")):
        equals(one_token(new + " 0.5 0.5", advantage=1, beta=0)[1]["ratio_max"], ratio)
    equals(clipped_surrogate(numbers("9 0.1").view(2, 1), numbers("1 -1")), "1.2 -0.8")

def test_hands_on_kl_and_total_loss():
    """Hands-on, 9.3.2, lines 683 and 689: -J + beta KL, where A is 1."""
    near(k3_kl(numbers("-1"), numbers("-1")), [math.exp(0) - 0 - 1])
    losses = [one_token("0.2 0.2 0.4", advantage=1, beta=beta)[0] for beta in (0, 0.04)]
    equals(losses, "-1 -0.987726")

def test_hands_on_early_advantages_do_not_sum_to_0():
    """Hands-on, 9.3.3, line 747: the right answer is 7."""
    printed = "-1.2 +0.1 +0.8 +0.1 +1.5 +0.1 -0.3 +0.6"
    rewards = boxed_rewards("3 7 12 7 15 7 8 10", str(15 - 3 - 5))
    advantages = group_advantages(rewards)
    near(advantages, torch.where(rewards == 1.5, 1.290994, -0.774597), 1e-6)
    differs_from(advantages, printed)
    equals([numbers(printed).sum(), advantages.sum()], "1.7 0")
    assert numbers(printed).argmax() == 4  # and 15, which is wrong, has the most

def test_hands_on_middle_advantages_do_not_sum_to_0():
    """Hands-on, 9.3.3, line 752."""
    printed = "0 0 0 -0.5 0 0 0 0"
    rewards = boxed_rewards("7 7 7 8 7 7 7 7", "7")
    advantages = group_advantages(rewards)
    near(advantages, torch.where(rewards == 1.5, 0.377964, -2.645751), 1e-6)
    differs_from(advantages[3], "-0.5")
    equals([numbers(printed).sum(), advantages.sum()], "-0.5 0")

def test_hands_on_late_group_has_no_gradient():
    """Hands-on, 9.3.3, line 757."""
    advantages = group_advantages(boxed_rewards("7 7 7 7 7 7 7 7", "7"))
    assert not advantages.any() and not slopes_at_ratio_1(advantages).any()

def test_hands_on_advantages_of_eight_fit_no_mean_and_std():
    """Hands-on, 9.3.3, line 786: the rewards sum to 7.5, and the printed mean is 7/8."""
    equals([EIGHT.sum(), 7 / 8], "7.5 0.875")
    equals(mean_and_std(EIGHT), "0.9375 0.634306")
    differs_from(mean_and_std(EIGHT), "0.875 0.637")
    rounds_to((EIGHT - 0.875).square().mean().sqrt(), "0.637")  # around the wrong mean
    # Line 785: the advantages must sum to 0, and their squares to 8.
    printed = "0.82 -1.23 0.82 -1.23 0.12 0.82 -0.53 0.82"
    right = "0.886796 -1.477994 0.886796 -1.477994 0.098533 0.886796 -0.689730 0.886796"
    advantages = group_advantages(EIGHT)
    equals(advantages, right)
    differs_from(advantages, printed)
    equals([advantages.sum(), advantages.square().sum()], "0 8")
    equals([numbers(printed).sum(), numbers(printed).square().sum()], "0.41 6.0107")

def test_hands_on_code_divides_by_one_less_than_its_formula():
    """Hands-on, 9.3.2, line 577: torch's std divides by G - 1, and line 546 by G."""
    advantages = (EIGHT - EIGHT.mean()) / EIGHT.std()
    equals(EIGHT.std(), "0.678101")
    equals(advantages, "0.829522 -1.382537 0.829522 -1.382537 "
                       "0.092169 0.829522 -0.645184 0.829522")
    near(group_advantages(EIGHT) * (7 / 8) ** 0.5, advantages, 1e-6)

# RLinf
def test_rlinf_all_tokens_of_an_answer_have_its_advantage():
    """RLinf, section 2, line 31: Scratch's rewards; section 4, line 99: a group of one."""
    for token in clipped_surrogate(torch.ones(5, 3), group_advantages(FIVE)).T:
        equals(token, FIVE_ADVANTAGES)
    with pytest.raises(ValueError):
        group_advantages(numbers("1"))

def test_rlinf_formula_and_setting_average_differently():
    """RLinf, sections 2 and 3, lines 45 and 78: the losses are the Book's."""
    equals(average(LOSSES, LOSSES, "grpo"), "2.35")  # the formula
    equals(average(LOSSES, LOSSES, "dapo"), "2.2")  # "token-mean"

def test_rlinf_four_names_of_a_kl():
    """RLinf, section 3, line 84: here pi_theta is 0.2, and pi_ref is 0.4."""
    policies = numbers("0.2 0.4").log()
    kl = [kl_estimate(*policies, name) for name in "low_var_kl kl abs mse".split()]
    equals([*kl, kl_estimate(*policies)], "0.306853 -0.693147 0.693147 0.240227 0.306853")


# --- Advantages ---
@each("scale, rewards, right", [
    ("group", "1.5 1.5 0.5 0.5", "1 1 -1 -1"), ("none", "0 1 1 2", "-1 0 0 1"),
    ("rloo", "0 1 1 2", "-1.33333333 0 0 1.33333333"),  # 2 - 2/3, the mean of the others
    ("batch", "0 1 1 2", "-1.41421356 0 0 1.41421356"),  # over the std of 0 1 1 2 and 2 2 2 2
    # These are not quite equal, and float32 would be too coarse for the last.
    ("group", "0 1e-9", "-1 1"), ("group", "1 1.0000026", "-1 1"),
    ("group", "1 1.000002 1.000006", "-1.06904497 -0.26726124 1.33630621"),
    # These are equal, or as good as equal: exactly 0.
    ("group", "1 1.0000004", "0 0"), ("group", "100000001 100000000 100000000", "0 0 0"),
    ("rloo", "0.30000000000000004 0.3 0.3", "0 0 0"),  # 0.1 + 0.2, and 0.3
    ("group", "-7 -7.000001", "0 0"), ("batch", "0 0 0", "0 0 0"),
])
def test_advantages(scale, rewards, right):
    rewards, right = numbers(rewards), numbers(right)
    groups = torch.stack([rewards, rewards.max().expand_as(rewards)])  # the second is all equal
    found = group_advantages(groups, scale)
    near(found, torch.stack([right, 0 * right]), 1e-6 * right.abs().max())  # zeros are exact
    assert found.dtype == torch.float32
    for bad in (math.nan, math.inf):  # it shows, and does not become 0
        rewards[0] = bad
        assert not group_advantages(rewards, scale).isfinite().all()


# --- k3 and the masked mean: values and gradients ---
def test_k3_far_apart_and_nearly_the_same():
    x = numbers("1e-6 0.5 99 -30")  # log(pi_theta / pi_ref)
    near(k3_kl(x, 0 * x) / numbers("5e-13 0.10653066 98 1.0686475e13"), 0 * x + 1, 1e-6)
    slopes = gradient(lambda x: k3_kl(x, 0 * x).sum(), x)
    near(slopes / numbers("1e-6 0.39346934 1 -1.0686475e13"), 0 * x + 1, 1e-6)
    far = torch.tensor([1e30, -1e30])  # in float32
    for found in (k3_kl(far, -far), gradient(lambda x: k3_kl(x, -far).sum(), far)):
        assert found.isfinite().all()

def test_masked_mean():
    values = numbers("1 3 nan inf nan 7 8 nan -inf").view(3, 3)
    mask = numbers("1 1 0 0 0 0 1 0 0").view(3, 3)
    near([masked_mean(values, mask), average(values, mask)], [4, 10 / 3])  # of 2, 0, 8
    near(average(values, mask, "dr_grpo", 2), 12 / 6)
    near(masked_mean(mask, mask[0]), 1 / 2)  # one mask for all rows
    near(gradient(lambda x: masked_mean(x, mask), values), mask / 3)
    # Only what is masked may disappear. To hide more would hide a broken model.
    assert masked_mean(values, torch.ones(3, 3)).isnan()

def test_the_overlong_penalty():
    lengths = numbers("1 12 13 20 23")  # for a limit of 20 tokens and a buffer of 8
    near(overlong_penalty(lengths, 20, 8), numbers("0 0 -0.125 -1 -1"))


# --- The loss, against one slow loss ---
def slow_loss(row, logprobs, old, ref, advantages, mask):  # row: a variant, and a loss_type
    config = GRPOConfig(**kwargs(VARIANTS[row[0]]))
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
    """Six completions of up to five tokens: three log-probs, advantages, mask."""
    noise = (t64(range(120)) ** 2).sin().view(4, 6, 5)  # it has no pattern, and is always the same
    logprobs, old, ref = 0.4 * noise[:3] - 2
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [4], [2]])  # one is empty
    return logprobs, old, ref, noise[3, :, 0], mask

ROWS, *_, MASK = batch()
VARIANTS = {  # the settings that are not the defaults
    "the papers": "", "no KL": "beta=0", "clip-higher": "epsilon_high=0.28",
    "much k1": "epsilon=0.1, epsilon_high=0, beta=0.5, kl_penalty_type='kl'",
    "no lower bound": "epsilon=1.5, epsilon_high=0.1, kl_penalty_type='abs'",
    "TRL": "beta=0.3, use_bias_correction_kl=True",
    "corrected k2": "kl_penalty_type='mse', use_bias_correction_kl=True",
    "GSPO": "beta=0.3, epsilon=0.1, importance_sampling_level='sequence'",
    "corrected GSPO": "importance_sampling_level='sequence', use_bias_correction_kl=True"}

def run_loss(row, logprobs, old, ref, *others):
    ref = None if row[0] == "no KL" else ref  # it needs none
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = grpo_loss(leaf, old, ref, *others, **kwargs(VARIANTS[row[0]]), loss_type=row[1],
                              max_completion_length=7)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics

@each("row", [*itertools.product(VARIANTS, ["grpo", "dapo", "dr_grpo"])], ids=" ".join)
def test_the_loss_is_the_slow_one_and_padding_has_no_part_in_it(row):
    leaf, *others = batch()
    right = slow_loss(row, leaf.requires_grad_(), *others)
    right_slope = torch.autograd.grad(right, leaf)[0]
    # To mask only the result would leave NaN in the gradient.
    for padding in (1.0, math.nan, math.inf):
        padded = [x.masked_fill(~MASK, padding) for x in batch()[:3]]
        padded.append(others[2].masked_fill(~MASK.any(dim=1), padding))
        loss, slope, metrics = run_loss(row, *padded, MASK.float())
        near(loss, right.detach())
        near(slope, right_slope)
        assert t64(list(metrics.values())).isfinite().all()
    tensors = [tensor.float() for tensor in batch()]
    tensors[1][0, 1] -= 1000  # a wild token: e^1000 times as likely as under pi_old
    before = str(tensors)
    loss, slope, metrics = run_loss(row, *tensors)
    assert str(tensors) == before  # the arguments are not changed
    assert t64([loss, *metrics.values()]).isfinite().all() and slope.isfinite().all()
    near(slope[1:], right_slope[1:], 1e-6)  # no other completion is harmed
    assert set(run_loss(row, *tensors[:4], 0 * MASK)[2].values()) == {0.0}  # no token at all

def test_wrong_shapes_are_refused():
    wrong = [5 * [ROWS[0]]]
    for i, shape in enumerate([[5], [1, 5], [6, 1], [6, 1], [5]]):
        wrong.append(list(batch()))
        wrong[-1][i] = torch.zeros(shape)
    for tensors in wrong:
        with pytest.raises(ValueError, match="advantages"):
            grpo_loss(*tensors)

@each("said, function, arguments", [
    ("two or more", group_advantages, [ROWS[:, :1]]),
    ("'std'.*rloo", group_advantages, [ROWS, "std"]),
    ("'k3'.*abs", kl_estimate, [ROWS, ROWS, "k3"]),
    ("length", average, [ROWS, MASK, "dr_grpo"]),
    ("'mean'.*dapo", average, [ROWS, MASK, "mean", 7]),
    ("ref_logprobs are needed", grpo_loss, [ROWS, ROWS, None, ROWS[:, 0], MASK]),
    ("'tokens'", lambda level: grpo_loss(*batch(), importance_sampling_level=level),
     ["tokens"])])
def test_impossible_arguments_are_refused(said, function, arguments):
    with pytest.raises(ValueError, match=said):
        function(*arguments)


# --- The apples that grpo.py prints ---
PRINTED = r"""
completion        reward  advantage  ratio  surrogate      k3  gradient
3+2 = \boxed{5}      1.5        1.0    1.5        1.2  0.0721    0.0017
3+2 = \boxed{5}      1.5        1.0    1.0        1.0  0.0000   -0.1250
\boxed{5}            1.5        1.0    0.5        0.5  0.3069   -0.1350
\boxed{6}            0.5       -1.0    1.5       -1.5  0.0721    0.3783
3-2 = \boxed{1}      0.5       -1.0    0.5       -0.8  0.3069   -0.0050
3-2 = \boxed{1}      0.5       -1.0    1.0       -1.0  0.0000    0.1250
loss 0.2057
"""

def test_the_apples(capsys):
    apples = runpy.run_path(grpo.__file__, run_name="__main__")
    assert capsys.readouterr().out == PRINTED.lstrip()
    given = [apples[name] for name in "logprobs old_logprobs old_logprobs advantages mask".split()]
    for loss_type, corrected, loss in [
            ("dapo", False, 0.1051), ("dr_grpo", False, 0.0394), ("dapo", True, 0.1035)]:
        _, metrics = grpo_loss(*given, loss_type=loss_type, max_completion_length=4,
                               use_bias_correction_kl=corrected)
        right = {"loss": loss, "kl": 0.7580 / 6, "clip_fraction": 2 / 6, "ratio_max": 1.5}
        assert metrics == pytest.approx(right, abs=5e-5)


# --- Expected values: exact sums over a vocabulary of five, without sampling ---
# The policies are far apart. If they are close, both directions of the KL are nearly equal.
POLICY, OLD, REFERENCE = numbers(
    "0.55 0.25 0.1 0.05 0.05  0.1 0.2 0.4 0.2 0.1  0.03 0.07 0.15 0.3 0.45").view(3, 5)

def exact_kl(p, q):
    return (p * (p / q).log()).sum()

@cases("drawn_from, settings, kl", {  # pi_old; what is descended, beside minus the mean reward
    "k1": (POLICY, "kl_penalty_type='kl'", lambda p: 0),
    "k2": (POLICY, "kl_penalty_type='mse'", lambda p: exact_kl(p, REFERENCE)),
    "k3": (POLICY, "", lambda p: exact_kl(REFERENCE, p)),
    "k3 x ratio": (OLD, "use_bias_correction_kl=True", lambda p: exact_kl(p, REFERENCE))})
def test_what_the_loss_descends_on_average(drawn_from, settings, kl):
    """20 completions of one token, each as often as pi_old draws it. Nothing is clipped."""
    rewards = numbers("0 2 1 5 3")  # of the five tokens
    tokens = torch.arange(5).repeat_interleave((20 * drawn_from).round().long())
    def loss(logits):
        logprobs = logits.log_softmax(0)
        # pi_old and pi_ref are constants, even if the same graph made them.
        policies = [POLICY, drawn_from, REFERENCE]
        tensors = [(logprobs + (other / POLICY).log())[tokens].unsqueeze(1) for other in policies]
        advantages = (rewards - 7)[tokens]  # a baseline makes no difference
        mask = torch.ones(20, 1)
        return grpo_loss(*tensors, advantages, mask, beta=1, epsilon=99, **kwargs(settings))[0]
    right = gradient(lambda x: kl(x.softmax(0)) - x.softmax(0) @ rewards, POLICY.log())
    near(gradient(loss, POLICY.log()), right)


# --- Parity with TRL 1.16: its figures, and where it is installed its own code ---
def trl_loss(row, logprobs, old, ref, advantages, mask):
    """GRPOTrainer._compute_loss on a mock trainer. What is not set here is a mock: true."""
    trl = pytest.importorskip("trl")  # without it, its figures have to do
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the parity is with TRL 1.16, and this is {trl.__version__}")
    config = grpo.GRPOConfig(**kwargs(VARIANTS[row[0]]), loss_type=row[1], max_completion_length=7)
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

@each("row, figures", {  # the loss; sum and length of its gradient
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
@each("imports, names, arguments", [  # the last of the functions is called
    ("re", "extract_boxed read_number rule_reward", [r"\boxed{63}", "63.0"]),
    ("torch", "group_advantages", [MASK.long()]), ("torch", "masked_mean", [ROWS, MASK]),
    ("torch", "clipped_surrogate", [ROWS, ROWS[:, 0]]), ("torch", "k3_kl", [ROWS, ROWS]),
    ("torch", "masked_mean average clipped_surrogate k3_kl kl_estimate grpo_loss", batch()),
    ("torch", "forward log_probability token_logprobs",
     [lambda **_: Mock(logits=torch.zeros(6, 3, 4)), MASK.long(), MASK.long(), 2])])
def test_pasted_into_another_project(imports, names, arguments):
    project = {}
    exec(f"import {imports}", project)
    for name in names.split():
        exec(inspect.getsource(getattr(grpo, name)), project)
    assert str(project[name](*arguments)) == str(getattr(grpo, name)(*arguments))


# --- One tiny world: a tokenizer, a model of any family, a few examples, a way to train ---
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
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY), requires_grad=False)
    model.lm_head.bias[[END, EOS]] = logit
    return model

def examples_of(*prompts):
    return [{"prompt": prompt} for prompt in prompts]

EXAMPLES = examples_of("a", "b c", "c d e", "d", "e f", "f g a", "g")
PROMPTS = ["a b c d e f g", "h", "i j k"]
TINY = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
            learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1)

def noisy_reward(prompts, completions, **columns):
    """A reward that draws from two of the generators that a reward may draw from."""
    return [text.count("a") + random.gauss(0, 1) + torch.rand(()).item() for text in completions]

def untimed(metrics):  # an absurd time stays, and no run is like another
    return {k: x for k, x in metrics.items() if "_second" not in k or not 0 <= x < 99}

def go(model=None, reward=noisy_reward, data=EXAMPLES, folder=None, resume=False, after=None,
       **settings):
    """Train a tiny model. Returns the metrics of all steps, without the times."""
    config = GRPOConfig(**TINY | settings)
    history = train(model or tiny_model(), TOKENIZER, data, reward, config, folder, resume, after)
    return [untimed(metrics) for metrics in history]

def weights_of(model):
    return parameters_to_vector(model.parameters()).detach()


# --- The sampler: token by token ---
def sampled(model, prompts=PROMPTS, G=5, cap=8, temperature=1.0, tokenizer=TOKENIZER, seed=0):
    """G completions of each prompt, in one list."""
    torch.manual_seed(seed)
    groups = sample_groups(model, tokenizer, examples_of(*prompts), G,
                           max_completion_length=cap, temperature=temperature)
    assert [len(group) for group in groups] == [G] * len(prompts)
    return sum(groups, [])

def slow_distributions(model, completion, temperature=1.0):
    """log pi of all tokens at each place. The model reads one completion, with no cache."""
    ids = torch.tensor([completion.prompt_ids + completion.ids])
    logits = model(ids, use_cache=False).logits[0]  # place i says what comes at place i + 1
    logits = logits[len(completion.prompt_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(dim=-1)

def slow_logprobs(model, completion, temperature=1.0):
    whole = slow_distributions(model, completion, temperature)
    return whole[range(len(completion.ids)), completion.ids]

# The padding is a token of its own, or none, or an end token. GPT-2 has learned positions.
@each("family, padding, temperature", [
    ("qwen2", "<pad>", 1.0), ("qwen2", None, 0.7), ("qwen2", "<end>", 1.3), ("gpt2", "<eos>", 1.0)])
def test_completions_and_their_logprobs(family, padding, temperature):
    """Wrong masks, positions and temperatures show here, and wrong rows of the cache."""
    model = tiny_model(family, initializer_range=0.25)
    tokenizer = tiny_tokenizer(padding)
    completions = sampled(model, G=60, tokenizer=tokenizer, temperature=temperature)
    for i, completion in enumerate(completions):
        *others, last = completion.ids
        assert completion.example == {"prompt": PROMPTS[i // 60]}
        assert completion.prompt_ids == tokenizer(PROMPTS[i // 60])["input_ids"]
        assert END not in others and EOS not in others
        assert completion.truncated == (last not in (END, EOS))
        assert len(completion.ids) == 8 or not completion.truncated
        assert completion.text == tokenizer.decode(completion.ids, skip_special_tokens=True)
        near(completion.sampler_logprobs, slow_logprobs(model, completion, temperature), 2e-5)
    # Both end tokens were drawn. Some of the longest completions ended, and some were cut.
    assert {END, EOS} < {completion.ids[-1] for completion in completions}
    assert {True, False} == {c.truncated for c in completions if len(c.ids) == 8}
    # At temperature 0 it is always the likeliest token.
    for completion in sampled(model, tokenizer=tokenizer, temperature=0):
        whole = slow_distributions(model, completion)
        assert completion.ids == whole.argmax(dim=1).tolist()
        near(completion.sampler_logprobs, whole.amax(dim=1), 2e-5)

def test_tokens_are_drawn_from_the_softmax_and_from_nothing_else():
    """Every end token is known: one from each config, and one from the tokenizer."""
    model = tiny_model(initializer_range=0.2, eos_token_id=PAD)
    # `generate` obeys what a checkpoint brings along. Qwen2.5 says 20, 0.8 and 1.1.
    vars(model.generation_config).update(eos_token_id=END, top_k=5, top_p=.8, repetition_penalty=2)
    completions = sampled(model, ["a"], 20_000, cap=1, temperature=0.7)
    counts = torch.tensor([c.ids[0] for c in completions]).bincount(minlength=VOCABULARY)
    wanted = 20_000 * slow_distributions(model, completions[0], 0.7)[0].exp()
    assert ((counts - wanted).abs() < 4 * wanted.sqrt() + 1).all()
    assert {PAD, END, EOS} == {c.ids[0] for c in completions if not c.truncated}

def test_the_seed_decides_and_chats_go_through_the_template():
    first = [{"role": "user", "content": "a"}]
    talk = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, *first]
    written = ["user a <end> assistant", "user c <end> assistant d <end> user a <end> assistant"]
    said = []
    for prompts, seed in [
            ([first, talk], 0), (written, 0), ([first, written[1]], 0), (written, 1)]:
        completions = sampled(tiny_model(), prompts, seed=seed)
        said.append([completion.prompt_ids + completion.ids for completion in completions])
    assert said[0] == said[1] == said[2] != said[3]

def test_each_prompt_is_read_once_and_what_has_ended_no_more():
    model = tiny_model(initializer_range=0.2)
    rows = []  # of each call of the model, the logits that it computed
    model.lm_head.register_forward_hook(lambda _, __, out: rows.append(out[..., 0].numel()))
    completions = sampled(model, cap=40)
    lengths = [len(completion.ids) for completion in completions]
    # Three prompts, and then, for each later token, the completions that have one.
    assert rows == [3] + [sum(n > t for n in lengths) for t in range(1, max(lengths))]
    rows.clear()
    compute_logprobs(model, completions, 1.0)
    assert rows == [15 * (max(lengths) + 1)]  # none for the tokens of the prompts

def test_cudnns_attention_is_off_in_the_models_call_and_as_before_afterwards():
    model, seen = tiny_model(), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    compute_logprobs(model, sampled(model), 1.0)
    assert before and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled() == before


# --- The reward ---
@each("contents, texts", {  # the contents of the last box: texts
    "63": r"$$\boxed{63}$$", "{{a}}{b}": r"\boxed{{{a}}{b}}", r"\{1, 2\}": r"\boxed{\{1, 2\}}",
    "2": r"\boxed{1} \boxed{2} & \boxed{x = \boxed{2} & \boxed{1 + \boxed{2} + 3}",
    "5": "\\boxed{\\boxed{5}} & {\\boxed{5} & } } \\boxed{5} & \\boxed{ 5\n}",
    "\ud800": "\\boxed{\ud800}",
    # These earn nothing: blank boxes, and none.
    "": "\\boxed{} & \\boxed{ \n\t } & \\boxed{63} \\boxed{} & \\boxed{\\boxed{}}",
    None: r" & boxed{63} & \boxed & \boxed{63 & \boxed\{63\} & \boxed{1} \boxed{\frac{2}{3}",
}.items())
def test_boxes(contents, texts):
    for text in texts.split(" & "):
        assert extract_boxed(text) == contents
        if not contents:
            assert rule_reward(text, "") == 0.0  # an empty box does not equal an empty answer

@cases("rows", {  # why: box and answer; box and answer
    "the same number": "63.0 is 63; -0 is 0; .5 is not 0.5; 5. is 5; 63.009 is 63; -.5 is not -0.50",
    "padded": "007 is 7; +5 is 5;  63  is 63; 63 is  63\n;  x+1  is x+1; x+1 is  x+1\n",
    "another number": "50 is not 63; 630 is not 63; -63 is not 63; 5 is not -5; 62.98 is not 63",
    "0.01": "62.991 is 63; 5.01 is not 5; 4.99 is not 5; 3,000,000.01 is not 3000000",
    "thousands": "-1,000 is -1000; 1000 is 1,000; 1{,}234{,}567 is 1234567; 1,234.5 is 1234.5",
    "wrong commas": "8,000 is not 000; 8,000 is not 8; 12,34 is not 1234; 1234,567 is not 1234567",
    "blanks and signs inside": r"3 4 is not 34; 1$2 is not 12; 1\%2 is not 12; 3 4 is not 3; "
        "1, 000 is not 1000; 3. 5 is not 3.5; 6 3 is not 63",
    "units": r"\$18 is $18.00; $63$ is 63; -$5 is -5; $-5 is -5; 12.5\% is 12.5; 50 % is 50",
    "a sentence ends": "63. is 63; 1,000. is 1000;  $18.  is 18; 50%.  is 50; $63.$ is 63",
    "equal as strings": r"\frac12 is \frac12; Monday is Monday; , is ,; nan is nan; 1e3 is 1e3",
    "no number": ", is not 0; . is not 0; - is not 0; $ is not 0; e5 is not 0; 63 is not ; 63 is "
        "not ,; 63 eggs is not 63; 6.3.0 is not 6.3; --5 is not 5; 60+3 is not 63; 1_000 is not "
        "1000; 63\x00 is not 63; \\frac12 is not 0.5; 0x3f is not 63; nan is not NaN; 5e3 is not "
        "5000; 1e999 is not 2e999; inf is not 1e999",
    "too large for a float": f"1{'0' * 308} is not -1{'0' * 308}; 1{'0' * 309} is not 2{'0' * 309}",
    "other digits": "\u0666\u0663 is not 63; 63 is not \uff16\uff13; 6\u00b3 is not 63",
})
def test_boxes_are_read_as_a_person_would(rows):
    for case in rows.split("; "):
        box, answer = re.split(" is not | is ", case)
        reward = rule_reward(f"The answer is \\boxed{{{box}}}.", answer)
        assert reward == (0.5 if " is not " in case else 1.5), case

@each(
    "piece", r"\boxed{ \boxed{} \boxed { } \ \{ 9 9, ,000 {,} $ - . 1e9".split() + [". ", *" \n"])
def test_hostile_text_takes_linear_time(piece):
    # Linear time is tenths of a second. Small sizes come first: quadratic time fails soon.
    for size in (10_000, 30_000, 100_000, 300_000):
        body = piece * (size // len(piece))
        started = time.process_time()
        # A digit on either side keeps strip() away from the middle. With an x at the end, a
        # pattern that nearly matches could try again from every place.
        for text in (f"1{body}1", f"1{body}x"):
            rule_reward(f"\\boxed{{{text}}}", "7")
            rule_reward(r"\boxed{7}", text)
        assert time.process_time() - started < 3.0


# --- Log-probs: values and gradients of every family, against the slow way ---
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
WINDOW = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
GEMMA = dict(query_pre_attn_scalar=8, **WINDOW)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
              linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
FAMILIES = {  # what each has beside the settings that all have
    "qwen2": "", "qwen3": "", "llama": "", "phi3": "", "mistral": "sliding_window=3",
    "gpt2": "", "bloom": "max_position_embeddings=None", "mpt": "",  # two have no positions
    "gpt_neo": "attention_types=[[['global', 'local'], 1]], num_layers=2, window_size=3",
    "gpt_oss": "num_local_experts=4, num_experts_per_tok=2, **WINDOW", "qwen3_moe": "**EXPERTS",
    "gemma2": "final_logit_softcapping=2.0, **GEMMA", "gemma3_text": "**GEMMA",  # capped logits
    "gemma3": "text_config=PLAIN | GEMMA, vision_config=VISION, mm_tokens_per_image=4",
    "granite": "logits_scaling=8.0", "cohere": "logit_scale=0.06",  # scaled logits
    "lfm2": "layer_types=['conv', 'full_attention']",  # from here on, layers with a state
    "qwen3_next": "shared_expert_intermediate_size=16, **EXPERTS, **LINEAR",
    "jamba": "num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, attn_layer_period=2, "
             "attn_layer_offset=1", "qwen3_5_text": "**LINEAR"}

@each("family", FAMILIES)
def test_the_logprobs_of_every_family_are_those_of_the_slow_way(family):
    """It is also sampled and trained. The first loss is 0, its gradient is not."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {family}")
    model = tiny_model(family, **kwargs(FAMILIES[family]))
    # Prompts and completions of many lengths, in no order.
    prompts = ["a b c", "d e f g h i j", "k l m n o p q", "r", "s t u v w"]
    completions = sampled(ending_model(1.5, initializer_range=0.2), prompts, 4)
    completions = [completions[i] for i in (18, 3, 0, 9, 16, 1, 2, 12, 7)]
    def gradient_of(logprobs):
        value = (logprobs * torch.linspace(-1, 2, len(logprobs))).sum()  # each has its own weight
        parts = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
        return parameters_to_vector(parts)
    slow = torch.cat([slow_logprobs(model, completion, 0.7) for completion in completions])
    slow_gradient = gradient_of(slow)
    scale = slow_gradient.abs().max()
    found, mask = compute_logprobs(model, completions, 0.7)
    near(found[mask.bool()], slow, 3e-5)
    near(gradient_of(found[mask.bool()]) / scale, slow_gradient / scale, 3e-5)
    metrics = go(model, steps=1, warmup_steps=0, temperature=0.7)[0]
    for figure in ("loss", "kl", "clip_fraction", "skipped_updates", "sampler_gap"):
        assert metrics[figure] == pytest.approx(0, abs=1e-5)
    assert metrics["ratio_max"] == 1 and metrics["grad_norm"] > 0.01

def test_the_softmax_is_in_float32_whatever_the_model_computes_in():
    """In bfloat16 the softmax of the same logits would be off by some hundredths."""
    model = tiny_model().bfloat16()
    for completion in sampled(model, ["a b c"], cap=1):
        ids = torch.tensor([completion.prompt_ids + completion.ids])
        found = token_logprobs(model, ids, torch.ones_like(ids), 1)
        near(found[0], slow_logprobs(model, completion), 1e-5)


# --- The step, against one slow step ---
def uneven_reward(prompts, completion_ids, **columns):
    """Rewards that depend on the ids. For the prompts a, d and g only rounding differs."""
    rewards = []
    for prompt, ids in zip(prompts, completion_ids):
        same = 0.1 + 0.2 if sum(ids) % 2 else 0.3
        rewards.append(same if prompt in ("a", "d", "g") else (7 * sum(ids) % 11) / 10)
    return rewards

def slow_step(model, reference, optimizer, groups, config):
    """Reads one completion at a time, without padding. Returns what the log must say."""
    completions = sum(groups, [])
    prompts, ids = zip(*[(c.example["prompt"], c.ids) for c in completions])
    rewards = t64(uneven_reward(prompts, ids)).view(len(groups), -1)
    advantages = group_advantages(rewards, config.scale_rewards)
    near([c.advantage for c in completions], advantages.flatten())
    completions.sort(key=lambda c: -len(c.ids))  # as update() has them, to draw the same order
    drawn = torch.cat([c.sampler_logprobs for c in completions])
    log = Counter(
        reward_mean=rewards.mean(), reward_std=rewards.std(dim=1, correction=0).mean(),
        zero_variance_fraction=(rewards.std(dim=1) < 1e-9).double().mean(),
        entropy=-drawn.mean(), completion_length=len(drawn) / len(completions),
        truncated_fraction=sum(c.truncated for c in completions) / len(completions))
    settings = {name: vars(config)[name] for name in grpo_loss.__kwdefaults__}
    def logprobs_of(network):
        return [slow_logprobs(network, c, config.temperature)[None] for c in completions]
    with torch.no_grad():
        old, ref = logprobs_of(model), logprobs_of(reference)
    updates = config.num_iterations * config.num_mini_batches
    taught = 0  # tokens
    for _ in range(config.num_iterations):
        for places in torch.randperm(len(completions)).tensor_split(config.num_mini_batches):
            tokens = sum(len(completions[i].ids) for i in places)
            loss = torch.zeros(())
            for i in places:
                c = completions[i]
                if c.advantage == 0 and config.beta == 0:
                    continue  # it counts in the means, but has no gradient
                now = slow_logprobs(model, c, config.temperature)[None]
                own, metrics = grpo_loss(now, old[i], ref[i] if config.beta else None,
                                         t64([c.advantage]), now < 1, **settings)
                share = len(c.ids) / tokens if config.loss_type == "dapo" else 1 / len(places)
                loss = loss + share * own
                taught += len(c.ids)
                log["ratio_max"] = max(log["ratio_max"], metrics["ratio_max"])
                log["sampler_gap"] += (c.sampler_logprobs - old[i]).abs().sum()
                for name in ("kl", "clip_fraction"):
                    log[name] += metrics[name] * len(c.ids)
            optimizer.zero_grad()
            if loss.requires_grad:  # else nothing moves
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            log["loss"] += loss.item() / updates
            log["grad_norm"] += norm / updates
    for name in ("kl", "clip_fraction", "sampler_gap"):
        log[name] /= max(taught, 1)
    return log

UPDATE = dict(steps=2, prompts_per_step=3, max_completion_length=6, learning_rate=3e-3,
              warmup_steps=0, temperature=0.8, seed=1, micro_batch_size=5)
OPTIONS = {
    "grpo": "", "dapo": "loss_type='dapo'", "dr_grpo": "loss_type='dr_grpo'",
    "gspo": "importance_sampling_level='sequence'", "k2": "kl_penalty_type='mse'",
    "r-times-kl": "use_bias_correction_kl=True", "batch-std": "scale_rewards='batch'",
    "in-three": "num_mini_batches=3", "one-by-one": "micro_batch_size=1",
    "twice": "num_iterations=2, learning_rate=5e-3",
    "2x2": "num_iterations=2, num_mini_batches=2, learning_rate=5e-3",
    "tight-clip": "epsilon=0.02, epsilon_high=0.01", "short-step": "max_grad_norm=0.05",
    "dynamic": "dynamic_sampling=20, num_generations=3",
    # Without KL, groups of equal rewards are left out. If there is no other, nothing moves.
    "no-kl": "beta=0.0", "one-group": "prompts_per_step=1, steps=7"}

@each("name", """grpo, grpo 2x2 one-by-one, dapo one-by-one, grpo in-three no-kl,
dr_grpo 2x2 one-by-one, dr_grpo no-kl, dapo 2x2 no-kl, dapo in-three no-kl, grpo no-kl one-group,
grpo 2x2 tight-clip, grpo 2x2 short-step, grpo twice k2, grpo dynamic, grpo 2x2 batch-std,
grpo 2x2 gspo, dapo 2x2 r-times-kl""".replace("\n", " ").split(", "))
def test_steps_are_those_of_the_slow_way(name):
    run = dict(UPDATE)
    for word in name.split():
        run |= kwargs(OPTIONS[word])
    config = GRPOConfig(**TINY | run)
    model = ending_model(2.0, "llama", initializer_range=0.2)  # lengths differ
    start = weights_of(model)
    slow_model, reference = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.AdamW(slow_model.parameters(), weight_decay=0.0)
    states = []
    def reward(**columns):
        states.append(torch.get_rng_state())  # the next to be drawn is the order of completions
        # Weights 1 % larger than those that sampled. Without that, sampler_gap would be 0.
        for parameter in [*model.parameters(), *slow_model.parameters()]:
            parameter.data *= 1.01
        return uneven_reward(**columns)
    def compare(learner):
        metrics = learner.history[-1]
        torch.set_rng_state(states[-1])
        optimizer.param_groups[0]["lr"] = metrics["learning_rate"]
        wanted = slow_step(slow_model, reference, optimizer, learner.groups, config)
        for figure, value in wanted.items():
            assert metrics[figure] == pytest.approx(float(value), rel=5e-4, abs=2e-6), figure
        moved = (weights_of(model) - start).norm()
        assert (weights_of(model) - weights_of(slow_model)).norm() <= 1e-3 * moved
        assert (learner.reference is None) == (config.beta == 0)
        copy.deepcopy(learner.groups)  # bare numbers: a tensor with a graph cannot be copied
    assert len(go(model, reward, after=compare, **run)) == config.steps

def nearly_equal_reward(**columns):
    return [1 + reward / 1e4 for reward in uneven_reward(**columns)]

@each("letters, drawn, reward", [  # what is equal, as for the advantages
    ("ad", 8, uneven_reward), ("eb", 2, nearly_equal_reward), ("deb", 3, nearly_equal_reward)])
def test_dynamic_sampling_asks_no_more_than_it_has_to(letters, drawn, reward):
    step = go(reward=reward, data=examples_of(*letters), steps=1, dynamic_sampling=3)[0]
    assert (step["examples_seen"], step["zero_variance_fraction"]) == (drawn, letters == "ad")

@each("warmup, parts", [(1, [1, 0.8, 0.6, 0.4, 0.2]), (4, [0.25, 0.5])])
def test_learning_rates(warmup, parts):
    """No step has the rate 0, neither the first nor the last."""
    history = go(steps=len(parts), warmup_steps=warmup)
    assert [metrics["learning_rate"] / 0.01 for metrics in history] == pytest.approx(parts)

def test_there_is_no_dropout():
    """Nor in the samples or the reference. The model comes in train mode, in float64."""
    plain = tiny_model("gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = tiny_model("gpt2").double().train()
    assert go(model, steps=3) == go(plain, steps=3)
    assert not model.training


# --- Precision: bfloat16 over float32 masters, here on the CPU ---
def test_masters_take_steps_and_add_up_gradients_that_bfloat16_cannot():
    model = tiny_model().requires_grad_(False)
    head = model.lm_head.weight.requires_grad_()  # all others are frozen, to look at this one
    angles = model.model.rotary_emb.inv_freq.clone()  # a buffer, which bfloat16 would spoil
    before = head.detach().clone()
    learners, added = [], []
    def watch(learner):
        learners.append(learner)
        if len(learners) == 1:  # now it is in bfloat16
            head.register_hook(added.append)
    metrics = go(model, after=watch, bf16=True, learning_rate=1e-6, max_grad_norm=1e9,
                 micro_batch_size=1)[-1]
    [after] = learners[-1].masters
    assert torch.equal(head, after.bfloat16())
    assert 10 * (head != before.bfloat16()).sum() < (after != before).sum()  # bfloat16 sees few
    total = torch.stack(added[-8:]).float().sum(dim=0)  # of the last step's 8 completions
    assert metrics["grad_norm"] == pytest.approx(total.norm().item(), rel=1e-6)
    for network in (model, learners[-1].reference):
        assert torch.equal(network.model.rotary_emb.inv_freq, angles)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert metrics["sampler_gap"] < 0.1


# --- What is refused, and what the error says ---
FITS = "a " * 59  # with a cap of 5 tokens it just fills the context of 64

@each("value, names", {  # a value, and settings that it is impossible for
    1: "num_generations",
    0: "prompts_per_step max_completion_length temperature steps num_iterations num_mini_batches "
       "max_grad_norm micro_batch_size",
    -0.1: "beta epsilon epsilon_high dynamic_sampling learning_rate warmup_steps seed save_steps",
    "none of these": "loss_type scale_rewards kl_penalty_type importance_sampling_level"}.items())
def test_impossible_settings_are_refused(value, names):
    for name in names.split():
        for impossible in (value, -1, NAN, math.inf):
            with pytest.raises(ValueError, match=f"{name} .*{impossible!r}"):
                GRPOConfig(**{name: impossible})

@each("words, call, arguments", [  # words of the error
    ("temperature", sampled, "G=0"), ("temperature", sampled, "cap=0"),
    ("temperature", sampled, "temperature=-1"), ("temperature", sampled, "temperature=NAN"),
    ("temperature", sampled, "temperature=math.inf"),
    ("'' has no tokens", sampled, "prompts=['a', '']"),
    ("prompt of 60 .* 5 .* 64", sampled, "prompts=['a', FITS + 'a'], cap=5"),
    ("prompt of 61 .* 5 .* 64", sampled,
     "prompts=[FITS + 'a a'], cap=5, model=tiny_model('gemma3', **kwargs(FAMILIES['gemma3']))"),
    ("completion could end", end_token_ids, "model=Mock(generation_config=None, config=None), "
                                            "tokenizer=None"),
    ("num_mini_batches is 9", go, "num_mini_batches=9"), ("data set is empty", go, "data=[]"),
    ("needs the output_dir", go, "resume=True"),
    ("float8.*quantiz", go, "model=tiny_model().type(torch.float8_e4m3fn)"),
    ("int32.*quantiz", go, "model=tiny_model().requires_grad_(False).type(torch.int32)"),
    ("returned 7 ", go, "reward=Mock(return_value=[1] * 7)"),
    ("returned 9 ", go, "reward=Mock(return_value=[1] * 9)"),
    ("returned nan ", go, "reward=Mock(return_value=[NAN] * 8)"),
    ("returned inf ", go, "reward=Mock(return_value=[math.inf] * 8)")])
def test_impossible_models_prompts_and_rewards_are_refused(words, call, arguments):
    with pytest.raises(ValueError, match=words):
        call(**{"model": tiny_model()} | kwargs(arguments))

def test_what_just_fits_is_not_refused():
    assert len(sampled(tiny_model(), [FITS], cap=5)) == 5
    go(ending_model(2.0), num_mini_batches=8, steps=1)  # as many as completions


# --- Interruptions: a run that was resumed ends as if nothing had happened ---
RUNS = {
    "plain": {"seed": 5000},
    "dynamic, several updates, in bfloat16": {  # many groups are equal, and are replaced
        "reward": lambda **given: [float(reward > 1) for reward in noisy_reward(**given)],
        "dynamic_sampling": 2, "num_iterations": 2, "num_mini_batches": 2, "beta": 0, "bf16": True},
}

def log_of(folder):
    """The lines of metrics.jsonl. Each must be whole. JSON has neither NaN nor inf."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]

def finish(folder, **run):
    """A run to its end, resumed if there is a checkpoint: its history and its weights."""
    model = tiny_model()
    history = go(model, folder=folder, resume=True, **{"steps": 5, "save_steps": 2} | run)
    assert history == [untimed(metrics) for metrics in log_of(folder)]
    return history, weights_of(model).tolist()

def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}

def saved_steps(folder):
    """The number of steps in the checkpoint; 0 without one."""
    path = folder / "checkpoint.pt"
    return len(torch.load(path, weights_only=True)["history"]) if path.exists() else 0

def fails_at(fatal, function, failure):
    """`function`, but its call number `fatal` and all later ones are calls of `failure`."""
    calls = itertools.count(1)
    return lambda *args, **more: (function if next(calls) < fatal else failure)(*args, **more)

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {name: finish(tmp_path_factory.mktemp("whole"), **run) for name, run in RUNS.items()}

@each("name", RUNS)
# Where the process is killed, in which call, and which argument is the file left torn.
@cases("place, fatal, torn", {
    "after step 1": ((grpo, "set_seed"), 2, None), "after step 3": ((grpo, "set_seed"), 4, None),
    "in the reward of a later step": ((random, "gauss"), 28, None),
    "while writing metrics 4": ((Path, "write_text"), 4, 0),
    "while writing the second checkpoint": ((torch, "save"), 2, 1),
    "before the last checkpoint is renamed": ((Path, "replace"), 3, None)})
def test_a_killed_run_goes_on(name, place, fatal, torn, whole, tmp_path, monkeypatch, capsys):
    def leave_it_torn(*args):
        if torn is not None:
            args[torn].write_bytes(b'{"step": 4, "lo')
        raise SystemExit  # as with a SIGKILL, no `except Exception` sees it
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(*place, fails_at(fatal, getattr(*place), leave_it_torn))
        finish(tmp_path, **RUNS[name])
    saved = saved_steps(tmp_path)
    assert finish(tmp_path, **RUNS[name]) == whole[name]
    assert re.findall("going on after step (.*)", capsys.readouterr().out) == [str(saved)][:saved]
    assert saved_steps(tmp_path) == 5

@each("save_steps, steps", [(2, [2, 4, 5]), (0, [])])
def test_what_a_step_leaves_is_there_when_after_step_is_called(save_steps, steps, tmp_path):
    saved = []
    def look(learner):  # before the files of the step are written
        if len(learner.history) > 1:
            assert log_of(tmp_path) == learner.history[:-1]
        learner.history[-1]["mine"] = np.float32(0.5)
        saved.append(saved_steps(tmp_path))
    history = go(folder=tmp_path, steps=5, save_steps=save_steps, after=look)
    assert [metrics["mine"] for metrics in log_of(tmp_path)] == [0.5] * 5
    assert [metrics["step"] for metrics in history] == [1, 2, 3, 4, 5]
    assert sorted({*saved, saved_steps(tmp_path)} - {0}) == steps
    with pytest.raises(ValueError, match="holds a run: resume it"):  # its log is enough
        go(folder=tmp_path)

def test_a_run_may_get_more_steps_but_no_other_settings(tmp_path):
    finished = finish(tmp_path)
    files = contents(tmp_path)
    for name, value in {"seed": 4, "epsilon_high": 0.3, "loss_type": "dapo"}.items():
        model = tiny_model()
        with pytest.raises(ValueError, match=f"another run: {name} is .* there, {value} here"):
            go(model, folder=tmp_path, resume=True, **{name: value})
        # Nothing was written or loaded.
        assert contents(tmp_path) == files
        assert torch.equal(weights_of(model), weights_of(tiny_model()))
    # These three may change. The run has no step to go, and returns what it was.
    assert finish(tmp_path, steps=4, save_steps=1, micro_batch_size=3) == finished
    longer, _ = finish(tmp_path, steps=8)
    assert longer[:5] == finished[0]
    rates = [metrics["learning_rate"] / 0.01 for metrics in longer[5:]]
    assert rates == pytest.approx([3 / 7, 2 / 7, 1 / 7])  # those of a run of 8 steps
    assert saved_steps(tmp_path) == 8

def test_numbers_of_numpy_are_settings_like_any_other(tmp_path):
    """They are no Python numbers, so a file that holds them could not be read again."""
    numpys = {name: np.array(value)[()] for name, value in TINY.items()}
    first = finish(tmp_path, **numpys)
    assert finish(tmp_path, **TINY) == first
    assert finish(tmp_path / "other", **TINY) == first


# --- Too little memory: half as much at once ---
def small_memory(function, place, most):
    """`function`, but memory runs out if its argument has more than `most` items."""
    def tried(*args, **kwargs):
        if len(args[place]) > most:
            raise torch.OutOfMemoryError
        return function(*args, **kwargs)
    return tried

@cases("settings, most, fatal, said, passes", {
    # Memory runs out where more than three log-probs are computed, twelve at first.
    "pi_ref": ("", 3, (), "6 3", 8), "the update": ("beta=0", 3, (), "6 3", 8),
    "pi_old": ("beta=0, num_iterations=2", 3, (), "6 3", 16),
    # It runs out at the end of a backward pass. Only that part is done again.
    "the second part": ("", 99, (1, 3), "6 3", 5 + 4),
    "a short last part": ("micro_batch_size=5", 99, (3,), "2", 4 + 6)})
def test_out_of_memory_does_the_same_in_smaller_parts(settings, most, fatal, said, passes,
                                                      monkeypatch, capsys):
    run = kwargs("prompts_per_step=3, steps=2, micro_batch_size=12") | kwargs(settings)
    enough, model = ending_model(2.0, "llama"), ending_model(2.0, "llama")
    wanted = go(enough, **run)
    calls = itertools.count(1)
    def last(gradient):  # that of the embedding is the last
        if next(calls) in fatal:
            raise torch.OutOfMemoryError
    model.get_input_embeddings().weight.register_post_accumulate_grad_hook(last)
    monkeypatch.setattr(grpo, "compute_logprobs", small_memory(compute_logprobs, 1, most))
    for step, right in zip(go(model, **run), wanted, strict=True):
        assert step == pytest.approx(right, rel=1e-4, abs=1e-5)
    near(weights_of(model), weights_of(enough), 1e-4)
    assert next(calls) == passes + 1
    # It is said once and remembered, not found out in every step.
    assert re.findall("from here on (.*) completions", capsys.readouterr().out) == said.split()

def sampled_prompts(**run):
    """The prompts of all groups of a run, in their order."""
    prompts = []
    go(after=lambda learner: prompts.extend(g[0].example["prompt"] for g in learner.groups), **run)
    return prompts

def test_out_of_memory_in_sampling_takes_fewer_prompts_at_once(monkeypatch, capsys):
    run = {"prompts_per_step": 7, "steps": 2}
    wanted = sampled_prompts(**run)
    monkeypatch.setattr(grpo, "sample_groups", small_memory(sample_groups, 2, 1))
    assert sampled_prompts(**run) == wanted
    assert re.findall("from here on (.*) prompts", capsys.readouterr().out) == ["3", "1"]
    monkeypatch.setattr(grpo, "sample_groups", small_memory(sample_groups, 2, 0))
    with pytest.raises(torch.OutOfMemoryError):
        go()


# --- Gradients that are not finite, and none at all ---
def test_updates_that_are_not_finite_are_skipped(tmp_path, monkeypatch, capsys):
    # Factors for the gradients of the updates. The square of 1e25, and so the norm, is inf.
    factors = iter([1, 1, NAN, 1e25, 1e25, NAN, NAN, 1, 1, NAN, 1, 1])
    def broken_loss(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        factor = next(factors)
        return loss * factor, {name: value * factor for name, value in metrics.items()}
    model = tiny_model()
    weights = [weights_of(model)]
    monkeypatch.setattr(grpo, "grpo_loss", broken_loss)
    go(model, folder=tmp_path, num_iterations=2, after=lambda _: weights.append(weights_of(model)))
    log = log_of(tmp_path)  # without NaN
    assert [metrics["skipped_updates"] for metrics in log] == [0, 2, 2, 1, 1, 0]
    for metrics, before, after in zip(log, weights, weights[1:]):
        assert torch.equal(before, after) == (metrics["skipped_updates"] == 2)
    assert capsys.readouterr().out.count("update skipped") == 6

def test_a_broken_model_ends_the_run_in_the_sampler():
    with pytest.raises(RuntimeError, match="nan"):
        go(ending_model(NAN))

def test_nothing_moves_where_no_completion_teaches(tmp_path):
    """Adam's momentum moves nothing either. The reward is the length. After step 1 no
    completion ends, so all rewards are equal."""
    model = ending_model(2.0)
    weights = [weights_of(model.model)]
    def look(learner):
        weights.append(weights_of(model.model))
        model.lm_head.bias[[END, EOS]] = -100.0
    go(model, lambda completion_ids, **_: list(map(len, completion_ids)), folder=tmp_path,
       after=look, steps=3, beta=0)
    assert [torch.equal(*pair) for pair in zip(weights, weights[1:])] == [False, True, True]
    nothing = dict.fromkeys(["loss", "grad_norm", "kl", "sampler_gap", "skipped_updates"], 0)
    for metrics in log_of(tmp_path)[1:]:
        assert metrics == metrics | nothing  # these figures are 0


# --- The reward's contract, data, seeds, edges ---
@each("chats", [(), (0, 1, 2), (1,)])
def test_a_reward_function_is_called_as_trl_calls_one(chats):
    """The prompts are strings, or chats, or some of each."""
    def say(role, text, row):
        return [{"role": role, "content": text}] if row in chats else text
    data = [{"prompt": say("user", "a b c"[:2 * i + 1], i), "row": i} for i in range(3)]
    reward = Mock(return_value=list(range(12)))
    learners = []
    go(ending_model(1.0), reward, data, after=learners.append, steps=1, prompts_per_step=3)
    given = reward.call_args.kwargs
    rows = given["row"]
    assert rows == sorted(4 * [0, 1, 2], key=rows.index)  # each prompt 4 times in a row
    completions = sum(learners[0].groups, [])
    texts = [say("assistant", c.text, i) for c, i in zip(completions, rows)]
    assert given == {"prompts": [data[i]["prompt"] for i in rows], "row": rows,
                     "completions": texts, "completion_ids": [c.ids for c in completions]}
    assert [c.reward for c in completions] == list(range(12))

def test_every_example_once_an_epoch_in_an_order_that_is_the_seeds():
    order = sampled_prompts(prompts_per_step=7, steps=3)
    epochs = [order[:7], order[7:14], order[14:]]
    for epoch in epochs:
        assert sorted(epoch) == [example["prompt"] for example in EXAMPLES]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampled_prompts(prompts_per_step=9, steps=2) == order[:18]  # more than there are
    assert sampled_prompts(prompts_per_step=7, steps=1, seed=4) not in epochs

def test_every_step_of_every_seed_draws_afresh_and_nothing_else_decides():
    drawn, one = set(), EXAMPLES[:1]
    for seed, data in ((0, one), (1, one), (1, datasets.Dataset.from_list(one))):
        for metrics in go(data=data, steps=3, seed=seed, learning_rate=0):
            drawn.add((metrics["reward_mean"], metrics["entropy"]))
        random.random()  # the caller draws as well
    assert len(drawn) == 6  # two seeds, three steps

@each("shuffled", [False, True])
def test_a_model_learns_what_is_rewarded_and_else_nothing(shuffled):
    def reward(completions, **columns):
        rewards = [text.split().count("a") for text in completions]
        return random.sample(rewards, len(rewards)) if shuffled else rewards
    for bf16 in (False, True):
        history = go(reward=reward, beta=0, num_generations=16, steps=25, bf16=bf16)
        mean = sum(metrics["reward_mean"] for metrics in history[-5:]) / 5
        assert mean < 1 if shuffled else mean > 2.5  # at first it is 0.1

@cases("logit, run, wanted", {  # it is added to the end tokens' logits; run; metrics
    "logits of minus infinity": (-math.inf, {}, {"truncated_fraction": 1}),
    "the smallest": (0.0, dict(num_generations=2, prompts_per_step=1, max_completion_length=1,
                               num_mini_batches=2, data=EXAMPLES[:1]), {"completion_length": 1})})
def test_steps_at_the_edge(logit, run, wanted, tmp_path):
    figures = """step loss reward_mean reward_std kl clip_fraction ratio_max entropy grad_norm
        learning_rate completion_length truncated_fraction zero_variance_fraction sampler_gap
        sample_seconds update_seconds skipped_updates examples_seen""".split()
    go(ending_model(logit), folder=tmp_path, **run)
    for metrics in log_of(tmp_path):
        assert metrics == metrics | {"skipped_updates": 0} | wanted
        assert set(metrics) >= set(figures)

def test_the_real_call_in_the_docstring_of_train_runs(monkeypatch, tmp_path):
    """Here with a small model, a small tokenizer, and fewer steps."""
    [code] = re.findall(r"\n((?: {4}.*\n)+)", inspect.cleandoc(train.__doc__))
    card = Mock(to=lambda device: tiny_model())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: card)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: TOKENIZER)
    monkeypatch.chdir(tmp_path)
    written = globals() | {"train": Mock(wraps=train), "GRPOConfig": lambda **_: GRPOConfig(**TINY)}
    exec(textwrap.dedent(code), written)
    _, _, data, reward, _, _ = written["train"].call_args.args
    right = [data[3]["answer"]] * 3
    chats = [[{"content": text}] for text in (r"\boxed{6}", r"\boxed{7}", "6")]
    assert reward(completions=chats, answer=right) == [1.5, 0.5, 0.0]
    assert AutoConfig.from_pretrained("sums").model_type == "qwen2"


# --- The demo: evaluation and data ---
def echo(model, tokenizer, examples, *rest, **options):
    """Each prompt is its own completion."""
    return [[Mock(text=example["prompt"])] for example in examples]

def test_an_evaluation_counts_the_last_box_and_leniently_the_last_number(monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "sample_groups", small_memory(echo, 2, 3))
    texts = [r"\boxed{7}, so \boxed{1,000}",  # right
             "it is 1,000.", "7 dollars, or $1000.", "5-1000",  # right, but not in a box
             r"\boxed{7}, or 1000", "-1000", "1000 of 7", "no idea", "", r"\boxed{}"]
    data = [{"prompt": text, "answer": "1000"} for text in texts]
    found = gsm8k_demo.evaluate(None, None, data, 9)
    figures = [found[name] for name in ("questions", "accuracy", "lenient_accuracy")]
    near(figures + found["interval"], [10, 0.1, 0.4, 0.0179, 0.4042], 1e-4)

GOOD_LINE = r'{"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"}'

def write_gsm8k(folder, *lines):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(lines))
    return folder

def test_gsm8k_is_read_and_graded(tmp_path):
    for data in gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, GOOD_LINE)):
        assert [example["answer"] for example in data] == ["1,018"] * 2
        assert data[0]["prompt"][-1] == {"role": "user", "content": "How many?"}
    completions = [[{"content": r"18, so \boxed{\$1018}"}], r"\boxed{1}", "1018"]
    rewards = gsm8k_demo.boxed_reward(None, completions, ["1,018"] * 3, completion_ids=None)
    assert rewards == [1.5, 0.5, 0.0]

@each("line", [  # cut off; no ####; a blank answer; no question; no example
    '{"question": "x", "answ', '{"question": "x", "answer": "18"}',
    r'{"question": "x", "answer": "1\n#### "}', '{"answer": "#### 18"}', "18"])
def test_a_broken_row_of_data_is_named(line, tmp_path):
    with pytest.raises(ValueError, match="train.*index 1"):
        gsm8k_demo.load_gsm8k(write_gsm8k(tmp_path, GOOD_LINE, line))


# --- The rehearsal: one pre-trained model serves all of these ---
@pytest.fixture(scope="module")
def base():
    return gsm8k_demo.rehearsal(0)

def train_with(mistake, base, **settings):
    model, tokenizer, train_data, _ = copy.deepcopy(base)
    history = gallery.train(mistake, model, tokenizer, train_data, **settings)
    return model, history[-1]

def test_the_rehearsal_learns_nothing_from_rewards_in_the_wrong_order(base):
    learned, tested = [{row["prompt"][0]["content"] for row in data} for data in base[2:]]
    assert not learned & tested and len(tested) >= 256  # held out
    model, _ = train_with("other order", base, steps=10)
    end = gsm8k_demo.evaluate(model, base[1], base[3], 28, temperature=1)
    assert end["accuracy"] < 0.15


# --- The demo from the command line ---
@pytest.fixture
def demo(base, monkeypatch, tmp_path):
    def run(flags):
        monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *flags.split()])
        gsm8k_demo.main()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: copy.deepcopy(base))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return run

def read(path):
    return json.loads(Path(path).read_text())

@each("flags, said", [
    ("--rehearsal --num_generations 1", "num_generations"),
    ("--rehearsal --eval_questions -1", "eval_questions"),
    (f"--rehearsal --output {grpo.__file__}", "Not a directory"),
    ("--resume --output no/such", "no run to go on with in no/such"),
    ("--data nowhere --model x", "cannot load nowhere"),
    ("--rehearsal --model x", "leave out --model")])
def test_wrong_flags_end_in_one_line_and_write_nothing(flags, said, demo, tmp_path):
    with pytest.raises(SystemExit, match=f"^stopped: .*{said}.*$"):
        demo(flags)
    assert not contents(tmp_path)

KNOBS = vars(GRPOConfig()) | vars(gsm8k_demo.DemoConfig())

def test_every_setting_is_a_flag_and_help_shows_defaults_and_choices(demo, capsys):
    with pytest.raises(SystemExit):
        demo("--help")
    flags = " ".join(capsys.readouterr().out.partition("\noptions:")[2].split())
    for name, default in KNOBS.items():
        assert re.search(rf"--{name}\b.*?\(default: (.*?)\)", flags)[1] == str(default)
    assert "{group,none,batch,rloo}" in flags

FEW = ("--rehearsal --steps 4 --prompts_per_step 4 --eval_questions 64 --eval_every 2 "
       "--show_steps 9 --save_steps 2 --output ")

def test_the_demo_from_flags_to_files(demo, capsys):
    demo(FEW + "whole")
    printed = capsys.readouterr().out
    for words in ("--output whole", "reward 1.5", "before:", "step 2:", "after:"):
        assert words in printed
    assert "warning" not in printed
    assert re.findall(r"^step (\d+)", printed, re.M) == ["1", "2", "4"]  # groups
    settings = read("whole/settings.json")
    assert settings["steps"] == 4 and settings["beta"] == 0.02  # typed, and the rehearsal's own
    figures = {"questions", "accuracy", "lenient_accuracy", "interval", "sampled_accuracy"}
    for result in read("whole/results.json").values():
        assert figures <= result.keys() and result["questions"] == 64
    model = AutoModelForCausalLM.from_pretrained("whole")
    assert model.generation_config.eos_token_id == [2, 0]
    assert AutoTokenizer.from_pretrained("whole").chat_template
    files = contents("whole")
    for flags, said in [(FEW + "whole", "holds a run"),
                        ("--resume --output whole --seed 5", "seed is 0 there, 5 here"),
                        ("--resume --output whole --data x", "data is None there, x here"),
                        ("--resume --output whole --eval_questions 8", "is 64 there, 8 here")]:
        with pytest.raises(SystemExit, match=f"^stopped: .*{said}.*$"):
            demo(flags)
        assert contents("whole") == files
    # A finished run can be trained further, and some flags may be typed anew.
    demo("--resume --output whole --steps 7 --show_steps 3")
    printed = capsys.readouterr().out
    assert "going on after step 4" in printed
    assert re.findall(r"^step (\d+)", printed, re.M) == ["6"]
    assert [metrics["step"] for metrics in log_of(Path("whole"))] == [1, 2, 3, 4, 5, 6, 7]
    assert list(read("whole/results.json")) == ["before", "step 2", "step 6", "after"]

def test_the_rehearsal_learns_and_says_so(demo, capsys):
    demo("--steps 10 --show_steps 0 --output learned")  # without a GPU it is the rehearsal
    printed = capsys.readouterr().out
    assert "no CUDA GPU" in printed and "did not rise" not in printed and "\nstep 1:" not in printed
    before, after = read("learned/results.json").values()
    assert before["accuracy"] < 0.15 < before["sampled_accuracy"] < 0.35
    assert min(after["accuracy"], after["sampled_accuracy"]) > 0.8

def test_a_model_and_data_in_folders(demo, base, capsys, tmp_path):
    """The real run, but for the size."""
    write_gsm8k(tmp_path, GOOD_LINE, GOOD_LINE)
    for part in base[:2]:
        part.save_pretrained("tiny")
    run = "--data . --model tiny --steps 1 --prompts_per_step 2 --max_completion_length 9 --output "
    demo(run + "real")
    assert "neither rose nor fell" in capsys.readouterr().out
    assert "sampled_accuracy" not in read("real/results.json")["after"]
    Path("tiny/chat_template.jinja").unlink()
    with pytest.raises(SystemExit, match="^stopped: .*chat template.*$"):
        demo(run + "another")
    assert not Path("another").exists()

@each("function, fatal", [  # Ctrl-C before step 1; before the first checkpoint;
    ("evaluate", 1), ("boxed_reward", 2),
    ("evaluate", 4), ("evaluate", 5)])  # in the middle evaluation; in the last
def test_the_demo_interrupted_and_resumed(function, fatal, demo, monkeypatch, capsys):
    demo(FEW + "whole")
    wanted = read("whole/results.json")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        works, fails = getattr(gsm8k_demo, function), Mock(side_effect=KeyboardInterrupt)
        patch.setattr(gsm8k_demo, function, fails_at(fatal, works, fails))
        demo(FEW + "killed")
    said = capsys.readouterr().err
    assert "Traceback" not in said
    [(line, command)] = re.findall(r"(interrupted.*) python gsm8k_demo.py (.*)", said)
    demo(command)
    assert read("killed/results.json") == wanted

@each("gap", [0.2, NAN])
def test_a_sampler_that_disagrees_is_warned_of(gap, demo, monkeypatch, capsys):
    def widened(*arguments):
        groups = sample_groups(*arguments)
        groups[0][0].sampler_logprobs += 99 * gap  # of 16 completions
        return groups
    monkeypatch.setattr(grpo, "sample_groups", widened)
    demo("--rehearsal --steps 1 --prompts_per_step 2 --eval_questions 1")
    assert "warning: the log-probs of sampling" in capsys.readouterr().out

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

@each("mistake, steps, figure, least, most", [
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
    assert set(re.findall(r"--(\w+)", README)) <= KNOBS.keys() | {"help", "nproc_per_node", "seeds"}
    _, figures = train_with("healthy", base, steps=1)
    for cell in re.findall(r"^\| (`[^|]*)", README, re.M):  # of tables of figures and settings
        assert set(re.findall(r"`(\w+)`", cell)) <= KNOBS.keys() | set(figures), cell

@cases("block", dict(enumerate(BLOCKS)))
def test_the_readmes_python_does_what_it_says(block, demo, capsys):
    if "trl" in block:  # too large to run: but its settings are ours
        compile(block, "several.py", "exec")
        written = dict(re.findall(r"\b(\w+)=([^\s,)]+)", block))
        for name in {"beta", "loss_type", "use_bias_correction_kl"} | written.keys() & KNOBS.keys():
            assert eval(written[name]) == getattr(GRPOConfig(), name), name
        return
    exec(block, {})
    [promised] = re.findall(r"^print.*  # ([^;\n]*)", block, re.M)
    printed = capsys.readouterr().out.replace("->", "")
    near(numbers(printed), numbers(promised.replace("->", "")), 0.15)
