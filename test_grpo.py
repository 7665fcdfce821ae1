# SPDX-License-Identifier: MIT-0
"""The tests of grpo.py and gsm8k_demo.py: offline, on the CPU, in under two minutes.

    python -m pytest -q test_grpo.py

Part 1, the mathematics: the worked numbers of the documents, tables and fuzzing for the reward,
every tensor function against slow plain-Python loops, identities summed over a small vocabulary.
Part 2, the model: sampler, scorer, one step, the relatives, parity with TRL. Part 3, the night:
every fault injected, its outcome asserted. Part 4, the reader: the apples, pasting, the README;
the demo, and the rehearsal, which learns.
"""
import ast
import collections
import copy
import functools
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
import types
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma2Config,
                          Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, MistralConfig,
                          MistralForCausalLM, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen2ForCausalLM)

import grpo
import gsm8k_demo
from grpo import (GRPOConfig, Learner, Rollout, accumulate, answer_level, choose_tokens,
                  clipped_surrogate, extract_boxed, fit_memory, group_advantages, group_scale,
                  grpo_loss, join, k3_kl, kl_estimate, load_checkpoint, make_learner, masked_mean,
                  micro_batches, overlong_penalty, question_stream, rule_reward, sample_groups,
                  save_checkpoint, score_rewards, token_logprobs, train, train_step,
                  training_steps, update)

# Matrices this small are done before a second thread wakes up; two threads on two busy cores spin.
torch.set_num_threads(1)

# ================================================================================================
# Part 1: the mathematics
# ================================================================================================

F64 = torch.float64
LOSS_TYPES = ["grpo", "dapo", "dr_grpo"]


def t64(values):
    return torch.tensor(values, dtype=F64)


def gradient(function, *inputs):
    """The gradients of a scalar function, as new tensors; the inputs stay untouched."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    grads = torch.autograd.grad(function(*leaves), leaves)
    return grads[0] if len(grads) == 1 else grads


def assert_near(actual, expected, tol=1e-12):
    actual = torch.as_tensor(actual, dtype=F64)
    expected = torch.as_tensor(expected, dtype=F64)
    assert actual.shape == expected.shape
    assert torch.allclose(actual, expected, rtol=tol, atol=tol), f"{actual} != {expected}"


# --------------------------------------------------------------------------------------
# The documents' worked numbers, one test a row
# --------------------------------------------------------------------------------------

APPLES = [1.5, 1.0, 0.0, 0.0]            # the course's four answers about apples
FIVE = [2.0, 3.5, 1.0, 4.0, 2.5]         # the article's group of five


def test_article_clip_worked_example():
    ratio, advantage, epsilon = 1.3, 2.0, 0.2
    args = t64([[math.log(ratio)]]), t64([[0.0]]), t64([advantage])
    assert_near(clipped_surrogate(*args, epsilon), [[2.4]])
    # With the clip out of reach the same token is worth 2.6: the clip did the lowering.
    assert_near(clipped_surrogate(*args, 0.5), [[2.6]])
    # A bad answer (A < 0) that became likelier is NOT clipped: min picks the worse, -2.6.
    assert_near(clipped_surrogate(args[0], args[1], -args[2], epsilon), [[-2.6]])


def test_article_td_residual():
    gamma, reward, value, next_value = 0.99, 1.0, 5.0, 5.5
    delta = reward + gamma * next_value - value
    assert_near(delta, 1.445)

    def gae(deltas, lam):
        return sum((gamma * lam) ** l * d for l, d in enumerate(deltas))

    # Lambda only weighs LATER residuals, so it cannot matter for a single one...
    assert all(gae([delta], lam) == delta for lam in (0.0, 0.5, 0.95, 1.0))
    # ...and does as soon as there are two.
    assert_near(gae([delta, delta], 0.95), 1.445 * (1 + 0.99 * 0.95))
    # With lambda = 1 the sum telescopes to discounted return minus the first value.
    values = [5.0, 5.5, 4.0, 0.0]
    deltas = [1.0 + gamma * values[t + 1] - values[t] for t in range(3)]
    assert_near(gae(deltas, 1.0), 1 + gamma + gamma ** 2 - values[0])


def test_article_parameters_of_ppo_and_share_of_the_critic():
    policy = reference = reward = critic = 7e9
    in_memory = policy + reference + reward + critic
    assert in_memory == 28e9 and critic / in_memory == 0.25
    # The caption says that the critic "doubles the memory". It adds a third to what was
    # there; only the TRAINED parameters (gradients, optimizer state) double.
    assert in_memory / (in_memory - critic) == pytest.approx(4 / 3)
    assert (policy + critic) / policy == 2.0


def test_article_group_statistics_and_advantages():
    rewards = t64(FIVE)
    advantages = group_advantages(rewards)
    assert_near(advantages, [-0.561951, 0.842927, -1.498537, 1.311220, -0.093659], 1e-6)
    # The printed two digits too.
    assert [round(a, 2) for a in advantages.tolist()] == [-0.56, 0.84, -1.50, 1.31, -0.09]
    # Mean 2.6 and std 1.0677 are read back from the advantages: r = mean + std * A.
    std = (rewards[3] - rewards[2]) / (advantages[3] - advantages[2])
    assert_near(std, math.sqrt(1.14))
    assert_near(rewards[0] - std * advantages[0], 2.6)


def test_article_code_uses_another_std_than_its_numbers():
    rewards = t64(FIVE)
    # rewards.std() divides by G - 1 unless told otherwise: other numbers than printed.
    assert rewards.std().item() == pytest.approx(1.193734, abs=1e-6)
    from_code = (rewards - rewards.mean()) / rewards.std()
    assert_near(from_code, [-0.502625, 0.753937, -1.340333, 1.172791, -0.083771], 1e-6)
    ours = group_advantages(rewards)
    assert_near(ours / from_code, [math.sqrt(5 / 4)] * 5)
    assert [round(a, 2) for a in from_code.tolist()] != [-0.56, 0.84, -1.50, 1.31, -0.09]


def test_article_and_explainer_k3_at_one_and_two():
    # k3 takes log-probs; the ratio of the documents is reference over policy.
    got = k3_kl(t64([[-1.0, -1.0]]), t64([[-1.0, -1.0 + math.log(2)]]))
    assert_near(got, [[0.0, 1 - math.log(2)]])
    assert round(got[0, 1].item(), 3) == 0.307
    # The other way round (policy twice as likely) is another number: 0.193.
    assert_near(k3_kl(t64([[-1.0]]), t64([[-1.0 - math.log(2)]])), [[math.log(2) - 0.5]])


def test_article_group_size_64_is_not_the_one_of_r1():
    # 64 is DeepSeekMath's, 16 is R1's. It is no detail: one right answer among G earns
    # the advantage sqrt(G - 1), so the rare success weighs twice as much with 64.
    lone = {}
    for size in (16, 64):
        rewards = torch.full((size,), 0.5, dtype=F64)
        rewards[3] = 1.5
        lone[size] = group_advantages(rewards)[3].item()
    assert lone[16] == pytest.approx(math.sqrt(15), abs=1e-12)
    assert lone[64] == pytest.approx(math.sqrt(63), abs=1e-12)
    assert 2.0 < lone[64] / lone[16] < 2.1


def book_losses():
    """[1,1,1,1,10] and [1 x 9, 10] as a batch with its mask."""
    losses, mask = torch.ones(2, 10, dtype=F64), torch.ones(2, 10, dtype=torch.bool)
    losses[0, 4] = losses[1, 9] = 10.0
    mask[0, 5:] = False
    losses[0, 5:] = float("nan")          # whatever stands there must not count
    return losses, mask


def test_book_sequence_losses_and_their_mean():
    losses, mask = book_losses()
    assert_near(masked_mean(losses, mask, dim=1), [2.8, 1.9])
    assert_near(masked_mean(losses, mask, dim=1).mean(), 2.35)
    # The same through the loss: with A = -1 and ratio x >= 1 a token's loss is x.
    loss, _ = grpo_loss(losses.log(), torch.zeros_like(losses), None, t64([-1.0, -1.0]),
                        mask, beta=0.0, loss_type="grpo")
    assert_near(loss, 2.35)


def test_book_per_token_mean_is_misprinted():
    losses, mask = book_losses()
    assert_near(masked_mean(losses, mask), 2.2)
    loss, _ = grpo_loss(losses.log(), torch.zeros_like(losses), None, t64([-1.0, -1.0]),
                        mask, beta=0.0, loss_type="dapo")
    assert_near(loss, 2.2)
    # The printed 2.27 would need the 15 losses to add up to 34; they add up to 33.
    assert losses[mask].sum().item() == 33 and mask.sum().item() == 15
    assert round(34 / 15, 2) == 2.27 and round(33 / 15, 2) != 2.27


def book_script():
    """The aggregation script's batch: ratios 1, advantages 2, lengths 4 and 7."""
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    return torch.zeros(2, 7, dtype=F64), t64([2.0, 2.0]), mask


def test_book_aggregation_script():
    zeros, advantages, mask = book_script()
    surrogate = clipped_surrogate(zeros, zeros, advantages)
    assert_near(masked_mean(surrogate, mask, dim=1), [2.0, 2.0])
    # Divided by the longest length instead of each row's own: 8/7 = 1.1429 and 2.
    per_row = masked_mean(surrogate, mask, dim=1) * mask.sum(1) / 7
    assert_near(per_row, [8 / 7, 2.0])
    # The script's third line forgets the advantages: it prints 1 where 2 is meant.
    assert_near(masked_mean(torch.ones(2, 7, dtype=F64), mask), 1.0)
    assert_near(masked_mean(surrogate, mask), 2.0)
    # The three losses: minus 2, minus (8/7 + 2)/2, minus 2.
    expected = {"grpo": -2.0, "dr_grpo": -(8 / 7 + 2) / 2, "dapo": -2.0}
    for loss_type, value in expected.items():
        loss, _ = grpo_loss(zeros, zeros, None, advantages, mask, beta=0.0,
                            loss_type=loss_type, max_completion_length=7)
        assert_near(loss, value)


def script_gradient(loss_type):
    zeros, advantages, mask = book_script()
    return gradient(lambda lp: grpo_loss(lp, zeros, None, advantages, mask, beta=0.0,
                                         loss_type=loss_type, max_completion_length=7)[0], zeros)


def test_book_gradients_of_masked_mean_and_masked_sum():
    mask = book_script()[2].to(F64)
    # At ratio 1 the gradient to the log-prob is the one to the ratio; the loss is negated.
    assert_near(script_gradient("grpo"), -torch.diag(t64([1 / 4, 1 / 7])) @ mask)
    assert_near(script_gradient("dr_grpo"), -mask / 7)
    # Each row's own mean gives a token of the short answer 7/4 of the weight.
    assert round(1 / 7, 4) == 0.1429


def test_book_gradient_of_the_token_mean_is_misprinted():
    _, advantages, mask = book_script()
    maskf = mask.to(F64)
    ones = torch.ones(2, 7, dtype=F64)
    token_mean = gradient(lambda ratio: masked_mean(ratio, mask), ones)
    assert_near(token_mean, maskf / 11)
    assert_near(script_gradient("dapo"), -maskf * 2 / 11)
    # The printed 0.2338 appears when the previous backward's gradient is not zeroed.
    ratio = ones.clone().requires_grad_()
    (masked_mean(ratio * advantages[:, None] / 7, mask, dim=1) * mask.sum(1)).mean().backward()
    masked_mean(ratio, mask).backward()
    assert round(ratio.grad[0, 0].item(), 4) == 0.2338
    assert round(1 / 11, 4) == 0.0909


def test_book_rloo_is_dr_grpo_times_a_constant():
    generator = torch.Generator().manual_seed(14)
    for size in (2, 3, 8):
        rewards = torch.randn(5, size, dtype=F64, generator=generator)
        others = (rewards.sum(-1, keepdim=True) - rewards) / (size - 1)
        dr_grpo = group_advantages(rewards, scale_rewards=False)
        assert_near(rewards - others, dr_grpo * size / (size - 1))


def exact_kl(p, q):
    return (p * (p.log() - q.log())).sum()


def test_book_signs_of_the_kl_term_are_misprinted():
    # Eight sampled tokens in exactly the policy's proportions 4:2:1:1, advantages 0: the
    # loss is then beta * KL alone, and a step down must bring the policy CLOSER.
    tokens = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    policy = t64([4, 2, 1, 1]) / 8
    reference = t64([1, 1, 2, 4]) / 8
    beta = 0.5

    def loss(logits):
        lp = logits.log_softmax(-1)[tokens, None]
        return grpo_loss(lp, lp.detach(), reference.log()[tokens, None],
                         torch.zeros(8, dtype=F64), torch.ones(8, 1), beta=beta)[0]

    logits = policy.log()
    assert_near(loss(logits), beta * exact_kl(policy, reference))
    step = 0.1 * gradient(loss, logits)
    before = exact_kl(policy, reference)
    down = (logits - step).softmax(-1)
    misprint = (logits + step).softmax(-1)      # what L = L_pg - beta * KL would do
    assert exact_kl(down, reference) < before - 1e-3
    assert exact_kl(misprint, reference) > before + 1e-3

    # The same sign inside the reward: of two equally good answers the one that strayed
    # from the reference must lose, which takes r = r0 - beta * KL.
    strayed = torch.stack([k3_kl(t64([[-1.0]]), t64([[-1.0]])),
                           k3_kl(t64([[-1.0]]), t64([[-4.0]]))]).flatten()
    right = group_advantages(1.5 - beta * strayed)
    wrong = group_advantages(1.5 + beta * strayed)
    assert_near(right, [1.0, -1.0])
    assert_near(wrong, [-1.0, 1.0])


def far_policies():
    """Two policies over five tokens that disagree a lot: close together, a k3 turned the
    wrong way round can hardly be told from the right one."""
    policy = t64([0.55, 0.25, 0.12, 0.06, 0.02])
    reference = t64([0.03, 0.07, 0.15, 0.30, 0.45])
    return policy, reference


def test_explainer_k3_is_unbiased_and_never_negative():
    policy, reference = far_policies()
    lp, ref = policy.log()[:, None], reference.log()[:, None]
    kl = exact_kl(policy, reference)
    assert_near((policy[:, None] * k3_kl(lp, ref)).sum(), kl)
    # The control variate that turns k1 into k3 has mean 0 under the policy.
    assert_near((policy * (reference / policy - 1)).sum(), 0.0)
    # k3 turned round (policy over reference) fails the very same check, and by far.
    reversed_k3 = (policy[:, None] * k3_kl(ref, lp)).sum()
    assert abs(reversed_k3 - kl) > 0.5 * kl
    # Close together the two directions agree to leading order, which is why a test with
    # close policies would not notice the mistake.
    near = (lp.flatten() + 1e-3 * t64([1, -1, 1, -1, 1])).softmax(-1)
    close_kl = exact_kl(near, policy)
    turned = (near[:, None] * k3_kl(lp, near.log()[:, None])).sum()
    assert abs(turned - close_kl) < 0.01 * close_kl
    # Single tokens: k3 is never negative, k1 often is.
    gap = torch.linspace(-30, 30, 6001, dtype=F64)[:, None]
    k3 = k3_kl(torch.zeros_like(gap), gap)
    assert (k3 >= 0).all() and (k3[gap.abs() > 1e-6] > 0).all()
    assert (lp - ref).min() < -1


def test_explainer_exp_88_does_not_overflow():
    biggest = torch.finfo(torch.bfloat16).max
    assert biggest == pytest.approx(3.3895e38, rel=1e-4)
    assert math.exp(88) == pytest.approx(1.65e38, rel=1e-2) and math.exp(88) < biggest
    assert math.log(biggest) == pytest.approx(88.72, abs=0.005)
    assert torch.tensor(88.0).exp().bfloat16().isfinite()
    assert torch.tensor(89.0).exp().bfloat16().isinf()
    # So k3 at a gap of 30 needs no clamping, and must not be distorted by one.
    assert_near(k3_kl(t64([[0.0]]), t64([[30.0]])), [[math.exp(30) - 31]])


def test_course_apples():
    assert_near(group_advantages(t64(APPLES), scale_rewards=False),
                [0.875, 0.375, -0.625, -0.625])
    assert sum(APPLES) / 4 == 0.625


def test_course_rule_reward():
    good = ("First compute the eggs left each day: 16 - 3 - 4 = 9.\nThere are 7 days in a week, "
            "so she can sell: 9 * 7 = 63.\n\\boxed{63}")
    bad = "I think she can sell about 50 eggs. \\boxed{50}"
    assert rule_reward(good, "63") == 1.5 and rule_reward(bad, "63") == 0.5
    assert (16 - 3 - 4) * 7 == 63
    # The apple table's 1.0 (right, unboxed) is not in this rule's reach: it gives 0.
    assert rule_reward("The answer is 5.", "5") == 0.0


def course_rewards(answers, truth="7"):
    return t64([rule_reward(f"So there are \\boxed{{{a}}} left.", truth) for a in answers])


def test_course_early_advantages_are_misprinted():
    answers = [3, 7, 12, 7, 15, 7, 8, 10]
    advantages = group_advantages(course_rewards(answers))
    right, wrong = math.sqrt(5 / 3), -math.sqrt(3 / 5)
    assert_near(advantages, [right if a == 7 else wrong for a in answers])
    assert (round(right, 6), round(wrong, 6)) == (1.290994, -0.774597)
    printed = [-1.2, 0.1, 0.8, 0.1, 1.5, 0.1, -0.3, 0.6]
    # Anything minus its own mean sums to 0; the printed list sums to 1.7, far more than
    # eight roundings can hide (8 * 0.05).
    assert sum(printed) == pytest.approx(1.7) and sum(printed) > 8 * 0.05
    # It rewards the wrong 15 most of all, and follows the size of the answers.
    assert printed[answers.index(15)] == max(printed)
    assert torch.corrcoef(torch.stack([t64(answers), t64(printed)]))[0, 1] > 0.9


def test_course_middle_advantages_are_misprinted():
    answers = [7, 7, 7, 8, 7, 7, 7, 7]
    advantages = group_advantages(course_rewards(answers))
    assert_near(advantages, [-math.sqrt(7) if a == 8 else 1 / math.sqrt(7) for a in answers])
    assert (round(math.sqrt(7), 6), round(1 / math.sqrt(7), 6)) == (2.645751, 0.377964)
    printed = [0, 0, 0, -0.5, 0, 0, 0, 0]
    # Not centred (sum -0.5, roundings could hide 0.4 at most), and not of size 1 either.
    assert abs(sum(printed)) > 8 * 0.05
    assert_near((advantages ** 2).mean(), 1.0)
    assert sum(a * a for a in printed) / 8 < 0.04


def test_course_late_advantages_are_exactly_zero():
    advantages = group_advantages(course_rewards([7] * 8))
    assert advantages.tolist() == [0.0] * 8


def test_course_reward_statistics_are_misprinted():
    rewards = [1.5, 0, 1.5, 0, 1, 1.5, 0.5, 1.5]
    advantages = group_advantages(t64(rewards))
    assert_near(advantages, [0.886796, -1.477994, 0.886796, -1.477994, 0.098533, 0.886796,
                             -0.689730, 0.886796], 1e-6)
    # Mean and std, read back from two advantages.
    std = 1.5 / (advantages[0] - advantages[1]).item()
    assert std == pytest.approx(0.634306, abs=1e-6)
    assert -std * advantages[1].item() == pytest.approx(0.9375, abs=1e-12)
    # Printed mean 0.875 would need a sum of 7.0; the eight rewards add up to 7.5.
    assert sum(rewards) == 7.5 and 8 * 0.875 == 7.0
    # Printed std 0.637 is neither division, by G or by G - 1.
    sample_std = std * math.sqrt(8 / 7)
    assert abs(std - 0.637) > 0.0005 and abs(sample_std - 0.637) > 0.0005
    # Printed advantages sum to 0.41; eight roundings of half a cent hide 0.04.
    printed = [0.82, -1.23, 0.82, -1.23, 0.12, 0.82, -0.53, 0.82]
    assert sum(printed) == pytest.approx(0.41) and sum(printed) > 8 * 0.005
    # Nor do they follow from the printed mean and std: (1.5 - 0.875) / 0.637 = 0.98.
    assert abs((1.5 - 0.875) / 0.637 - 0.82) > 0.1


def test_course_memory_table_and_its_contradiction():
    table = [(24, 14), (80, 48), (160, 96), (640, 384)]
    savings = [100 * (ppo - ours) / ppo for ppo, ours in table]
    assert [round(s, 1) for s in savings] == [41.7, 40.0, 40.0, 40.0]
    # The text says 30-40 % for the critic alone; no row of the table is below 40 %. One of
    # four equal models is 25 %, so the table must leave the reward model out as well.
    assert min(savings) >= 40.0 and max(savings) > 40.0
    critic_only, critic_and_reward_model = 100 / 4, 100 * 2 / 4
    assert critic_only < min(savings) and max(savings) < critic_and_reward_model


def test_course_clip_interval():
    ratios = t64([[0.5, 0.8, 1.0, 1.2, 1.5]])
    zeros = torch.zeros_like(ratios)
    # Good answer: worth at most 1.2 a token. Bad answer: costs at least 0.8 a token.
    good = clipped_surrogate(ratios.log(), zeros, t64([1.0]), epsilon=0.2)
    bad = clipped_surrogate(ratios.log(), zeros, t64([-1.0]), epsilon=0.2)
    assert_near(good, [[0.5, 0.8, 1.0, 1.2, 1.2]])
    assert_near(bad, [[-0.8, -0.8, -1.0, -1.2, -1.5]])


def test_course_size_of_gsm8k_is_rounded():
    train, test = 7_473, 1_319
    assert train + test == 8_792 and round((train + test) / 1000, 1) != 8.5
    # Why all 1,319 are used: half the width of a 95 % interval at 50 % correct.
    assert 100 * 1.96 * math.sqrt(0.25 / test) == pytest.approx(2.7, abs=0.05)
    assert 100 * 1.96 * math.sqrt(0.25 / 100) == pytest.approx(9.8, abs=0.05)


# Where the documents' code departs from their own mathematics.

def test_course_one_ratio_per_answer_hides_what_a_token_did():
    # One token 1.5 times as likely, the other 1.5 times less: over the whole answer the
    # ratio is 1 and nothing is clipped; per token the first one must be.
    shift = math.log(1.5)
    old = t64([[-1.0, -1.0]])
    lp = t64([[-1.0 + shift, -1.0 - shift]])
    mask, advantages = torch.ones(1, 2), t64([1.0])
    grad = gradient(lambda x: grpo_loss(x, old, None, advantages, mask, beta=0.0)[0], lp)
    assert_near(grad, [[0.0, -0.5 / 1.5]])
    whole = (lp - old).sum().exp()
    assert 0.8 < whole < 1.2


def test_course_box_pattern_breaks_on_nested_braces_thousands_and_first_boxes():
    pattern = r"\\boxed\{([^}]+)\}"
    nested = "\\boxed{\\frac{1}{2}}"
    assert re.search(pattern, nested).group(1) == "\\frac{1"
    assert extract_boxed(nested) == "\\frac{1}{2}"
    assert rule_reward(nested, "\\frac{1}{2}") == 1.5
    with pytest.raises(ValueError):
        float("1,000")
    assert rule_reward("\\boxed{1,000}", "1000") == 1.5
    # A correction comes last: the first box is the one the model took back.
    second_thoughts = "\\boxed{50}? No: \\boxed{63}"
    assert re.search(pattern, second_thoughts).group(1) == "50"
    assert rule_reward(second_thoughts, "63") == 1.5
    assert rule_reward(second_thoughts, "50") == 0.5


def test_article_empty_completion_is_not_zero_by_zero():
    lp, mask = torch.zeros(2, 3, dtype=F64), torch.ones(2, 3)
    mask[0] = 0
    article = (lp * mask).sum(1) / mask.sum(1)
    assert article[0].isnan()
    for loss_type in LOSS_TYPES:
        loss, _ = grpo_loss(lp, lp, lp, t64([1.0, -1.0]), mask, loss_type=loss_type,
                            max_completion_length=3)
        # Only the second row speaks: mean over 2 rows, over 3 tokens, over 2 * 3 places.
        assert_near(loss, {"grpo": 0.5, "dapo": 1.0, "dr_grpo": 0.5}[loss_type])


def test_explainer_mask_by_pad_id_forgets_the_end_token():
    # Where pad = eos, `ids != pad` drops the end token: its gradient is then exactly 0
    # and nobody ever teaches the model to stop. The mask has to come from positions.
    eos = pad = 9
    ids = torch.tensor([[4, 5, eos, pad, pad]])
    zeros = torch.zeros(1, 5, dtype=F64)
    by_value = ids != pad
    by_position = torch.arange(5)[None] <= 2

    def grad(mask):
        return gradient(lambda x: grpo_loss(x, zeros, None, t64([1.0]), mask, beta=0.0)[0], zeros)

    assert grad(by_value)[0, 2] == 0.0
    assert_near(grad(by_position), [[-1 / 3, -1 / 3, -1 / 3, 0, 0]])


def test_course_sampling_and_scoring_temperatures_must_agree():
    # Sampled at 0.8 and scored at 1, the "ratio" is off 1 before anything was learnt, and
    # tokens look clipped that never moved.
    logits = t64([3.0, 1.0, 0.0, -1.0, -2.0])
    sampled = (logits / 0.8).log_softmax(-1)[None]
    scored = logits.log_softmax(-1)[None]
    advantages, mask = t64([-1.0]), torch.ones(1, 5)
    _, mixed = grpo_loss(sampled, scored, None, advantages, mask, beta=0.0)
    _, same = grpo_loss(sampled, sampled, None, advantages, mask, beta=0.0)
    assert mixed["clip_fraction"] > 0.5 and same["clip_fraction"] == 0.0


# --------------------------------------------------------------------------------------
# Reward: extract_boxed and rule_reward
# --------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, inside", [
    ("", None),
    ("63", None),
    ("boxed{63}", None),
    ("\\boxed", None),
    ("\\boxed{", None),
    ("\\boxed{63", None),
    ("\\boxed63}", None),
    ("\\boxed\\{63\\}", None),                       # escaped braces open nothing
    ("\\boxed{63\\}", None),                         # ... and close nothing
    ("\\boxed{}", ""),
    ("\\boxed{ }", " "),
    ("\\boxed{63}", "63"),
    ("so \\boxed{63} eggs", "63"),
    ("$$\\boxed{63}$$", "63"),
    ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
    ("\\boxed{{{a}}{b}}", "{{a}}{b}"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),           # a set: its braces are characters
    ("\\boxed{a \\} b}", "a \\} b"),
    ("\\boxed{a \\{ b}", "a \\{ b"),
    ("\\boxed{1} then \\boxed{2}", "2"),
    ("\\boxed{1} then \\boxed{2", "1"),              # cut off: the last COMPLETE one counts
    ("\\boxed{1} then \\boxed{", "1"),
    ("\\boxed{1} then \\boxed{\\frac{2}{3}", "1"),
    ("\\boxed{\\boxed{5}}", "5"),                    # opens last, though it closes first
    ("\\boxed{1 + \\boxed{2} + 3}", "2"),
    ("\\boxed{x = \\boxed{2}", "2"),                 # the outer one never closes
    ("{\\boxed{5}", "5"),
    ("} } \\boxed{5}", "5"),
    ("\\boxed{5}}}}", "5"),
    ("\\boxed{1}}} \\boxed{2}}", "2"),
    ("\\boxed{\n63\n}", "\n63\n"),
    ("\\boxed{\x00\x07}", "\x00\x07"),
    ("\\boxed{\ud800}", "\ud800"),
    ("\\boxed{6\\boxe{3}}", "6\\boxe{3}"),
])
def test_extract_boxed(text, inside):
    assert extract_boxed(text) == inside


@pytest.mark.parametrize("box, answer", [
    ("63", "63"), ("63.0", "63"), ("63.00", "63"), ("63.", "63"), ("63", "63.0"),
    (" 63 ", "63"), ("\t63\n", "63"), ("63", " 63\n"), ("0", "0.0"), ("007", "7"),
    ("1,000", "1000"), ("1000", "1,000"), ("1,000", "1,000"), ("1{,}000", "1000"),
    ("1{,}234{,}567", "1,234,567"), ("1,234,567.5", "1234567.5"), ("8,000", "8000"),
    ("-1,000", "-1000"), ("1,000.", "1000"), ("999,999", "999999"),
    ("$18", "18"), ("\\$18", "18"), ("$18", "$18.00"), ("$1,000.50", "1000.5"),
    ("\\$1{,}000", "1,000"), ("$63$", "63"), ("$ 18", "18"), (" $18. ", "18"),
    ("50%", "50"), ("50\\%", "50"), ("12.5%", "12.5"), ("50 %", "50"), ("50%.", "50"),
    ("-5", "-5"), ("-5.0", "-5"), ("-$5", "-5"), ("-\\$5", "-5"), ("$-5", "-5"),
    ("-0", "0"),
    ("63.009", "63"), ("62.991", "63"), ("0.333", "0.3333"), ("0.009", "0"),
    # Equal as strings, whatever they mean.
    ("\\frac{1}{2}", "\\frac{1}{2}"), ("x+1", "x+1"), ("Monday", "Monday"), (",", ","),
    ("1_000", "1_000"), ("\\{1,2\\}", "\\{1,2\\}"), ("12:30", "12:30"),
    (" x+1 ", "x+1"), ("x+1", " x+1\n"),
    ("\u0666\u0663", "\u0666\u0663"),
])
def test_rule_reward_right(box, answer):
    assert rule_reward(f"The answer is \\boxed{{{box}}}.", answer) == 1.5


@pytest.mark.parametrize("box, answer", [
    ("50", "63"), ("63.02", "63"), ("63.011", "63"), ("62.98", "63"), ("0.01", "0"),
    # Exactly 0.01 is not below 0.01, though 63.01 - 63 is in floating point.
    ("63.01", "63"), ("5.01", "5"), ("4.99", "5"),
    ("-63", "63"), ("5", "-5"), ("-$5", "5"), ("630", "63"), ("6", "63"),
    # A comma is no place to cut a number in two, and none may be invented.
    ("8,000", "000"), ("8,000", "8"), ("8,000", "0"), ("1,2,3", "123"), ("12,34", "1234"),
    (",", ""), (",", "0"), (".", "0"), ("-", "0"), ("$", "0"), ("%", "0"), ("{,}", "0"),
    ("63", ""), ("63", " "), ("63", ","),
    # What Python's float() would take and no person writes.
    ("1_000", "1000"), ("6_3", "63"), ("0x3f", "63"), ("nan", "NaN"), ("nan", "0"),
    ("inf", "infinity"), ("inf", "1e999"), ("1e999", "2e999"), ("-1e999", "-inf"),
    ("9" * 400, "9" * 401), ("1" + "0" * 400, "inf"),
    ("1" + "0" * 308, "-1" + "0" * 308),               # the difference overflows
    # ASCII digits only: Arabic-Indic, full-width, superscript, circled.
    ("\u0666\u0663", "63"), ("\uff16\uff13", "63"), ("6\u00b3", "63"), ("\u2465", "6"),
    ("63", "\u0666\u0663"), ("\uff16\uff13.0", "63"),
    ("6 3", "63"), ("63 eggs", "63"), ("63x", "63"), ("6.3.0", "6.3"), ("--5", "5"),
    ("63\x00", "63"), ("\ud800", "63"), ("63", "\ud800"), ("\\frac{1}{2}", "0.5"),
])
def test_rule_reward_boxed_but_wrong(box, answer):
    assert rule_reward(f"The answer is \\boxed{{{box}}}.", answer) == 0.5


@pytest.mark.parametrize("text", [
    "", "63", "The answer is 63.", "#### 63", "boxed{63}", "\\boxed{63", "\\boxed\\{63\\}",
    "\\boxed{}", "\\boxed{ }", "\\boxed{\n\t }", "\\boxed{63} \\boxed{}", "\ud800", "\x00",
    "\\boxed{\\boxed{}}",
])
def test_rule_reward_without_a_filled_box(text):
    assert rule_reward(text, "63") == 0.0
    assert rule_reward(text, "") == 0.0       # and nothing equals nothing earns nothing


def test_rule_reward_returns_plain_floats():
    for text in ("", "\\boxed{1}", "\\boxed{63}"):
        assert type(rule_reward(text, "63")) is float


def slow_extract_boxed(text):
    """Quadratic and obvious: try every opening from the last to the first."""
    opener = "\\boxed{"
    for start in range(len(text) - 1, -1, -1):
        if not text.startswith(opener, start):
            continue
        depth, i = 1, start + len(opener)
        while i < len(text):
            if text[i:i + 2] in ("\\{", "\\}"):
                i += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start + len(opener):i]
            i += 1
    return None


def test_extract_boxed_against_a_slow_reader_on_random_strings():
    # No piece ends in a backslash, so every "\{" here is an escaped brace beyond doubt.
    pieces = ["\\boxed{"] * 4 + ["}"] * 4 + ["{", "\\{", "\\}", "\\boxed", "boxed{",
              "6", "3", "63", ",", "{,}", ".", "-", "$", "\\$", "%", "\\%", " ", "\n",
              "\u0666", "\uff16", "\ud800", "\x00", "nan", "1e999", "_", "\\frac"]
    rng = random.Random(0)
    seen = []
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(25)))
        inside = slow_extract_boxed(text)
        assert extract_boxed(text) == inside, repr(text)
        answer = rng.choice(["63", "6", "-3", "", " ", "nan", "\ud800"] + [inside or "3"] * 7)
        reward = rule_reward(text, answer)
        assert reward in (0.0, 0.5, 1.5), repr(text)
        empty = inside is None or inside.strip(" \n") == ""
        # "\x00" is a character, not a blank; only " " and "\n" are blanks in this alphabet.
        assert (reward == 0.0) == empty, repr(text)
        if not empty and inside == answer:
            assert reward == 1.5, repr(text)
        seen.append(reward)
    # The alphabet is only worth something if all three rewards turn up often.
    assert all(seen.count(value) > 100 for value in (0.0, 0.5, 1.5))


def test_rule_reward_never_raises_on_random_characters():
    rng = random.Random(1)
    alphabet = ("0123456789.,-+eE_$%\\{} \t\n\x00\x0b\x1c\x85\xa0\u2028\u3000"
                "\u0663\uff13\u00b2\u00bd\u2212\ud800\udfff\U0001d7d9naif\u0130")
    for _ in range(3000):
        inside = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        answer = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        for text in (inside, "\\boxed{" + inside + "}", "\\boxed{" + inside):
            assert rule_reward(text, answer) in (0.0, 0.5, 1.5), repr((text, answer))
            assert rule_reward(text, inside) in (0.0, 0.5, 1.5), repr((text, inside))


@pytest.mark.parametrize("piece, boxed", [
    ("\\boxed{", False), ("{", False), ("}", False), ("\\boxed{}", False), ("\\boxed", False),
    ("\\boxed{1", False), ("\\", False), ("{", True), ("\\{", True), ("9", True), (" ", True),
    ("0", True), (",", True), ("{,}", True), ("9,", True), (",000", True), ("$", True),
    ("%", True), ("\\%", True), (".", True), ("-", True), (". ", True), ("\n", True),
])
def test_reward_takes_linear_time(piece, boxed):
    # A linear reader needs tenths of a second of CPU time, a quadratic one minutes to
    # hours. Growing sizes let the latter fail early instead of hanging the tests.
    for size in (10_000, 30_000, 100_000, 300_000 if boxed else 1_000_000):
        body = piece * (size // len(piece))
        # A digit on both sides keeps a strip() from making the middle disappear; an x at
        # the end makes a pattern that nearly matched try again from every place.
        bodies = [body, f"1{body}1", f"1{body}x"] if boxed else [body]
        start = time.process_time()
        for body in bodies:
            assert rule_reward(f"\\boxed{{{body}}}" if boxed else body, "7") in (0.0, 0.5)
            assert rule_reward("\\boxed{7}", body) == 0.5
        assert time.process_time() - start < 3.0, f"{size} characters of {piece!r}"


# --------------------------------------------------------------------------------------
# group_advantages
# --------------------------------------------------------------------------------------

def slow_advantages(rewards, scale=True):
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    if std <= 1e-6 * max(abs(r) for r in rewards):
        return [0.0] * len(rewards)
    return [(r - mean) / (std if scale else 1.0) for r in rewards]


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("shape", [(2,), (8,), (4, 5), (3, 2, 8), (1, 64)])
def test_group_advantages_against_a_loop(shape, scale, dtype, tol):
    generator = torch.Generator().manual_seed(sum(shape))
    rewards = torch.randn(shape, dtype=dtype, generator=generator) * 3 + 1
    got = group_advantages(rewards, scale_rewards=scale)
    rows = rewards.reshape(-1, shape[-1]).tolist()
    assert got.shape == rewards.shape
    assert_near(got.reshape(-1, shape[-1]), [slow_advantages(r, scale) for r in rows], tol)


def test_group_advantages_have_mean_zero_and_population_std_one():
    generator = torch.Generator().manual_seed(3)
    advantages = group_advantages(torch.rand(20, 8, dtype=F64, generator=generator))
    assert_near(advantages.mean(-1), torch.zeros(20))
    assert_near((advantages ** 2).mean(-1), torch.ones(20))
    # The sample std would give 7/8 here.
    assert abs(advantages.var(-1).mean() - 8 / 7) < 1e-12


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("group", [
    [0.0, 0.0, 0.0], [1.5] * 8, [0.1] * 3, [-0.7] * 7,
    [0.1 + 0.2, 0.3, 0.3], [0.3, 0.1 + 0.2], [-(0.1 + 0.2), -0.3, -0.3],
    [1e8 + 1, 1e8, 1e8], [0.1] * 1000,
])
def test_group_of_equal_rewards_is_exactly_zero(group, scale, dtype):
    # Their float mean need not be exactly equal to them: noise over noise would be +-1.
    advantages = group_advantages(torch.tensor(group, dtype=dtype), scale_rewards=scale)
    assert advantages.tolist() == [0.0] * len(group)


def test_small_rewards_are_not_taken_for_equal_ones():
    # What counts is the spread RELATIVE to the rewards; an absolute threshold, or a
    # constant added to the std, would drown rewards of this size.
    rewards = t64([0.0, 1.0, 2.0, 0.5])
    for factor in (1e-9, 1e-5, 1.0, 1e6):
        assert_near(group_advantages(rewards * factor), group_advantages(rewards))
    # A std of 2e-5 of the largest reward is above the threshold, one of 2e-7 below.
    assert group_advantages(t64([1.0, 1.0 + 4e-5])).tolist() == pytest.approx([-1, 1])
    assert group_advantages(t64([1.0, 1.0 + 4e-7])).tolist() == [0.0, 0.0]


def test_groups_do_not_see_each_other():
    generator = torch.Generator().manual_seed(5)
    rewards = torch.randn(3, 4, dtype=F64, generator=generator)
    rewards[1] = 0.25                         # a group without variance among the others
    whole = group_advantages(rewards)
    assert whole[1].tolist() == [0.0] * 4 and (whole[0] != 0).all()
    for row in range(3):
        assert_near(whole[row], group_advantages(rewards[row]))
        # The order inside a group does not matter either.
        assert_near(group_advantages(rewards[row].flip(0)).flip(0), whole[row])
    changed = rewards.clone()
    changed[0] *= 100
    assert_near(group_advantages(changed)[2], whole[2])
    # Nor does a neighbour with huge rewards make this group's look equal.
    assert_near(group_advantages(t64([[0.0, 1e9], [0.0, 1.0]])), [[-1.0, 1.0]] * 2)


def test_group_advantages_leave_their_input_alone():
    rewards = t64([FIVE, FIVE])
    group_advantages(rewards)
    assert rewards.tolist() == [FIVE, FIVE]


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("rewards, said", [
    ([1.0], "1"), ([[1.0], [0.5]], "1"), ([[], []], "0"),
    ([0.5, float("nan")], "nan"), ([[0.5, 1.0], [float("inf"), 1.0]], "inf"),
    ([0.5, float("-inf"), 1.0], "-inf"),
])
def test_group_advantages_refuse(rewards, said, scale):
    with pytest.raises(ValueError) as error:
        group_advantages(t64(rewards), scale_rewards=scale)
    assert said in str(error.value)


# --------------------------------------------------------------------------------------
# clipped_surrogate, k3_kl and masked_mean against loops
# --------------------------------------------------------------------------------------

def slow_surrogate(lp, old, advantage, epsilon, epsilon_high):
    """One token: the value of min(rA, clip(r)A) and its derivative by the log-prob."""
    ratio = math.exp(lp - old)
    clipped = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
    if ratio * advantage <= clipped * advantage:
        return ratio * advantage, ratio * advantage      # d exp(lp - old) / d lp = ratio
    return clipped * advantage, 0.0


def slow_k3(lp, ref):
    ratio = math.exp(ref - lp)
    return ratio - (ref - lp) - 1, 1 - ratio


def random_batch(seed, rows=6, width=7, spread=0.4):
    """Ragged masks (one row empty), ratios on both sides of the clip, both signs of A."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, dtype=F64, generator=generator)
    lp = old + spread * torch.randn(rows, width, dtype=F64, generator=generator)
    ref = lp + torch.randn(rows, width, dtype=F64, generator=generator)
    advantages = torch.randn(rows, dtype=F64, generator=generator)
    advantages[0], advantages[1] = 1.3, -0.9
    lengths = torch.tensor([width, width - 2, 0, 1, 3, 5, 2, 4][:rows])
    mask = torch.arange(width)[None] < lengths[:, None]
    return lp, old, ref, advantages, mask


@pytest.mark.parametrize("epsilon, epsilon_high", [(0.2, None), (0.2, 0.28), (0.1, 0.5),
                                                   (0.3, 0.0), (1.0, 0.2), (1.5, 0.2)])
def test_clipped_surrogate_against_a_loop(epsilon, epsilon_high):
    lp, old, _, advantages, _ = random_batch(seed=21, rows=8, width=50, spread=0.7)
    high = epsilon if epsilon_high is None else epsilon_high
    got = clipped_surrogate(lp, old, advantages, epsilon, epsilon_high)
    grad = gradient(lambda x: clipped_surrogate(x, old, advantages, epsilon, epsilon_high).sum(),
                    lp)
    expected = [[slow_surrogate(lp[i, t].item(), old[i, t].item(), advantages[i].item(),
                                epsilon, high) for t in range(50)] for i in range(8)]
    expected = t64(expected)
    assert_near(got, expected[..., 0])
    assert_near(grad, expected[..., 1])
    # Otherwise the case tests nothing: both outcomes of the clip must occur.
    assert (expected[..., 1] == 0).any() and (expected[..., 1] != 0).any()


def test_clip_takes_the_gradient_in_two_of_four_corners():
    # With max for min, or the advantage's sign forgotten, the other two corners die.
    for ratio in (0.3, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 3.0):
        for advantage in (1.5, -1.5, 0.0):
            grad = gradient(lambda x: clipped_surrogate(
                x, t64([[-2.0]]), t64([advantage]), 0.2, 0.28).sum(),
                t64([[-2.0 + math.log(ratio)]])).item()
            gone = ratio > 1.28 and advantage > 0 or ratio < 0.8 and advantage < 0
            expected = 0.0 if gone else ratio * advantage
            assert grad == pytest.approx(expected, rel=1e-12, abs=0.0), (ratio, advantage)


def test_epsilon_of_one_or_more_leaves_no_lower_bound():
    # 1 - epsilon is then 0 or negative; a ratio never is. Nothing to clip from below,
    # and no logarithm of a negative number either.
    lp, old = t64([[-9.0, -2.5]]), t64([[-1.0, -2.0]])
    for epsilon in (1.0, 1.5, 10.0):
        for dtype in (torch.float32, torch.float64):
            args = lp.to(dtype), old.to(dtype), torch.tensor([-2.0], dtype=dtype)
            got = clipped_surrogate(*args, epsilon, 0.2)
            grad = gradient(lambda x: clipped_surrogate(x, *args[1:], epsilon, 0.2).sum(),
                            args[0])
            assert_near(got, [[-2 * math.exp(-8), -2 * math.exp(-0.5)]], 1e-6)
            assert_near(grad, got.to(F64), 1e-6)


def test_advantages_go_by_row_in_a_square_batch():
    # With N = T an (N,) tensor also broadcasts along the wrong dimension, silently.
    zeros = torch.zeros(3, 3, dtype=F64)
    got = clipped_surrogate(zeros, zeros, t64([1.0, 2.0, -3.0]))
    assert_near(got, [[1.0] * 3, [2.0] * 3, [-3.0] * 3])


def test_on_policy_surrogate_is_the_policy_gradient():
    # Summed over the whole vocabulary, the gradient of the surrogate at ratio 1 is the
    # gradient of the expected reward: the reason for the ratio in the first place.
    logits, rewards = far_policies()[0].log(), t64([1.5, 0.0, 0.5, 1.5, 0.0])
    weights = logits.softmax(-1)

    def surrogate(x):
        lp = x.log_softmax(-1)[:, None]
        return (weights * clipped_surrogate(lp, lp.detach(), rewards)[:, 0]).sum()

    expected = gradient(lambda x: (x.softmax(-1) * rewards).sum(), logits)
    assert_near(gradient(surrogate, logits), expected)
    assert expected.abs().max() > 0.1


def test_k3_against_a_loop():
    lp, _, ref, _, _ = random_batch(seed=22, rows=8, width=20)
    expected = t64([[slow_k3(a, b) for a, b in zip(x, y)]
                    for x, y in zip(lp.tolist(), ref.tolist())])
    assert_near(k3_kl(lp, ref), expected[..., 0])
    assert_near(gradient(lambda x: k3_kl(x, ref).sum(), lp), expected[..., 1])
    # In float32 too; close policies are where e^d - d - 1 loses digits.
    assert_near(k3_kl(lp.float(), ref.float()), expected[..., 0], 1e-5)


@pytest.mark.parametrize("gap", [0.0, 1.0, 20.0, 89.0, 100.0, 1000.0, 1e30, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_surrogate_and_k3_stay_finite(gap, sign, dtype):
    # exp overflows to inf, and even where min() discards that branch the backward pass
    # multiplies inf by 0. At 3e38 the difference of the two overflows (in float32).
    lp = torch.full((2, 1), sign * gap / 2, dtype=dtype)
    other = torch.full((2, 1), -sign * gap / 2, dtype=dtype)
    if gap == 3e38:
        lp, other = 2 * lp, 2 * other
    advantages = torch.tensor([1.5, -1.5], dtype=dtype)
    for function in (lambda x: clipped_surrogate(x, other, advantages),
                     lambda x: k3_kl(x, other)):
        value = function(lp)
        assert value.isfinite().all()
        assert gradient(lambda x: function(x).sum(), lp).isfinite().all()


def test_saturated_tokens_keep_their_meaning():
    # Finite is not enough: at a log-ratio of 100 the clipped side is worth exactly what
    # the clip says, and the unclipped side stays enormous instead of turning harmless.
    old = torch.zeros(4, 1)
    lp = torch.tensor([[100.0], [100.0], [-100.0], [-100.0]])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    value = clipped_surrogate(lp, old, advantages, 0.2, 0.28)
    assert value[0].item() == pytest.approx(2.56) and value[3].item() == pytest.approx(-1.6)
    assert value[1].item() < -1e4 and 0 <= value[2].item() < 1e-15
    grad = gradient(lambda x: clipped_surrogate(x, old, advantages, 0.2, 0.28).sum(), lp)
    assert grad[0].item() == 0.0 and grad[3].item() == 0.0
    # k3 of a token that the reference finds e^100 times as likely is enormous too.
    assert k3_kl(torch.zeros(1, 1), torch.full((1, 1), 100.0)).item() > 1e4


@pytest.mark.parametrize("gap", [30.0, 60.0, 100.0, 1000.0])
def test_k3_where_the_policy_is_far_likelier_than_the_reference(gap):
    # e^-gap + gap - 1: nothing overflows on this side, so nothing may be cut off. With the
    # log-ratio clamped from below the token furthest from the reference feels no pull.
    ref = torch.full((1, 1), -gap)
    assert k3_kl(torch.zeros(1, 1), ref).item() == pytest.approx(gap - 1)
    grad = gradient(lambda x: k3_kl(x, ref).sum(), torch.zeros(1, 1))
    assert grad.item() == pytest.approx(1.0)


def mask_as(mask, kind):
    return mask.to({"bool": torch.bool, "int": torch.int64, "float": torch.float32}[kind])


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
@pytest.mark.parametrize("dim", [None, 0, 1, -1])
def test_masked_mean_against_a_loop(kind, dim):
    values, _, _, _, mask = random_batch(seed=23)
    dirty = torch.where(mask, values, torch.full_like(values, float("nan")))
    dirty[2, 0], dirty[2, 1] = float("inf"), float("-inf")      # row 2 is the empty one
    rows, width = mask.shape
    places = [(i, t) for i in range(rows) for t in range(width) if mask[i, t]]

    def group(i, t):
        return {None: 0, 0: t, 1: i, -1: i}[dim]

    size = {None: 1, 0: width, 1: rows, -1: rows}[dim]
    counts = [sum(group(*p) == g for p in places) for g in range(size)]
    sums = [math.fsum(values[p].item() for p in places if group(*p) == g) for g in range(size)]
    expected = t64([s / c if c else 0.0 for s, c in zip(sums, counts)])
    got = masked_mean(dirty, mask_as(mask, kind), dim)
    assert_near(got, expected[0] if dim is None else expected)

    # Weights that differ from group to group, or a gradient in the wrong group passes.
    weights = torch.arange(1, size + 1, dtype=F64)
    grad = gradient(lambda v: (masked_mean(v, mask_as(mask, kind), dim) * weights).sum(), dirty)
    slow = torch.zeros_like(values)
    for p in places:
        slow[p] = weights[group(*p)] / counts[group(*p)]
    assert_near(grad, slow)


@pytest.mark.parametrize("kind", ["bool", "int", "float"])
@pytest.mark.parametrize("fill", [1.0, float("nan"), float("inf"), float("-inf")])
def test_masked_mean_of_nothing_is_zero(fill, kind):
    values, mask = torch.full((2, 3), fill), mask_as(torch.zeros(2, 3), kind)
    assert masked_mean(values, mask).item() == 0.0
    assert masked_mean(values, mask, dim=1).tolist() == [0.0, 0.0]
    assert masked_mean(values, mask, dim=0).tolist() == [0.0, 0.0, 0.0]
    assert gradient(lambda v: masked_mean(v, mask), values).tolist() == [[0.0] * 3] * 2
    assert gradient(lambda v: masked_mean(v, mask, dim=1).sum(), values).abs().max() == 0


def test_masked_mean_does_not_hide_a_nan_in_front_of_the_mask():
    # Swallowing it would hide a broken model: only what is masked may disappear.
    values = torch.tensor([[1.0, float("nan"), 3.0]])
    assert masked_mean(values, torch.tensor([[1, 1, 0]])).isnan()
    assert masked_mean(values, torch.tensor([[1, 0, 1]])).item() == 2.0


# --------------------------------------------------------------------------------------
# grpo_loss against a loop
# --------------------------------------------------------------------------------------

def loop_loss(lp, old, ref, advantages, mask, *, epsilon=0.2, epsilon_high=None, beta=0.04,
              loss_type="grpo", max_completion_length=None):
    """Plain Python floats, token by token: the loss and its gradient by the log-probs."""
    rows, width = mask.shape
    high = epsilon if epsilon_high is None else epsilon_high
    total = int(mask.sum())
    loss, grad = 0.0, [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        length = int(mask[i].sum())
        for t in range(width):
            if not mask[i, t]:
                continue
            weight = {"grpo": 1 / (rows * length), "dapo": 1 / total,
                      "dr_grpo": 1 / (rows * (max_completion_length or 1))}[loss_type]
            x = lp[i, t].item()
            value, slope = slow_surrogate(x, old[i, t].item(), advantages[i].item(),
                                          epsilon, high)
            value, slope = -value, -slope
            if beta:
                kl, kl_slope = slow_k3(x, ref[i, t].item())
                value, slope = value + beta * kl, slope + beta * kl_slope
            loss += weight * value
            grad[i][t] = weight * slope
    return loss, t64(grad)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
@pytest.mark.parametrize("epsilon, epsilon_high", [(0.2, None), (0.2, 0.28), (0.4, 0.05)])
def test_grpo_loss_against_a_loop(loss_type, beta, epsilon, epsilon_high):
    for seed in range(4):
        lp, old, ref, advantages, mask = random_batch(seed)
        settings = dict(epsilon=epsilon, epsilon_high=epsilon_high, beta=beta,
                        loss_type=loss_type, max_completion_length=11)
        expected, expected_grad = loop_loss(lp, old, ref, advantages, mask, **settings)
        loss, _ = grpo_loss(lp, old, ref, advantages, mask, **settings)
        assert loss.shape == ()
        assert_near(loss, expected)
        grad = gradient(lambda x: grpo_loss(x, old, ref, advantages, mask, **settings)[0], lp)
        assert_near(grad, expected_grad)
        # float32, as in training.
        single = [x.float() for x in (lp, old, ref, advantages)]
        assert_near(grpo_loss(*single, mask, **settings)[0], expected, 2e-6)
        if beta == 0:
            # No reference is needed, and a given one must not matter.
            assert grpo_loss(lp, old, None, advantages, mask, **settings)[0] == loss


def test_grpo_loss_defaults_are_the_documents():
    lp, old, ref, advantages, mask = random_batch(31)
    assert_near(grpo_loss(lp, old, ref, advantages, mask)[0],
                loop_loss(lp, old, ref, advantages, mask, epsilon=0.2, epsilon_high=0.2,
                          beta=0.04, loss_type="grpo")[0])
    # The defaults must be visible in the value, or the line above shows nothing.
    for other in (dict(epsilon=0.3), dict(beta=0.05), dict(loss_type="dapo")):
        assert abs(loop_loss(lp, old, ref, advantages, mask, **other)[0]
                   - loop_loss(lp, old, ref, advantages, mask)[0]) > 1e-4


def test_gradcheck_where_the_functions_are_smooth():
    lp, old, ref, advantages, mask = random_batch(32, rows=4, width=3)
    ratio = (lp - old).exp()
    # Finite differences need distance from the kinks at the bounds of the clip.
    assert ((ratio - 0.8).abs() > 1e-3).all() and ((ratio - 1.28).abs() > 1e-3).all()
    lp.requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda x: clipped_surrogate(x, old, advantages, 0.2, 0.28), (lp,))
    assert check(lambda x: k3_kl(x, ref), (lp,))
    for dim in (None, 0, 1):
        assert check(lambda x: masked_mean(x, mask, dim), (lp,))
    for loss_type in LOSS_TYPES:
        assert check(lambda x: grpo_loss(
            x, old, ref, advantages, mask, epsilon_high=0.28, beta=0.3, loss_type=loss_type,
            max_completion_length=5)[0], (lp,))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("gap", [100.0, -100.0, 1000.0, -1000.0])
def test_grpo_loss_is_finite_at_huge_log_ratios_in_float32(gap, loss_type):
    # One wild token among ordinary ones: their gradient must come through unharmed.
    lp, old, ref, advantages, mask = (x.float() if x.is_floating_point() else x
                                      for x in random_batch(33))
    settings = dict(loss_type=loss_type, max_completion_length=7, beta=0.04)
    for row in (0, 1):                        # A > 0 in row 0, A < 0 in row 1
        for wild in ("old", "ref"):
            o, r = old.clone(), ref.clone()
            (o if wild == "old" else r)[row, 1] = lp[row, 1] - gap
            loss, metrics = grpo_loss(lp, o, r, advantages, mask, **settings)
            assert loss.isfinite() and all(map(math.isfinite, metrics.values()))
            grad = gradient(lambda x: grpo_loss(x, o, r, advantages, mask, **settings)[0], lp)
            assert grad.isfinite().all()
            calm = gradient(lambda x: grpo_loss(x, old, ref, advantages, mask, **settings)[0],
                            lp)
            elsewhere = torch.ones_like(mask)
            elsewhere[row, 1] = False
            assert torch.equal(grad[elsewhere], calm[elsewhere])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("dirt", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["logprobs", "old", "ref", "advantages", "all"])
def test_nothing_behind_the_mask_gets_out(where, dirt, loss_type):
    # Masking the result keeps the value clean and leaves a NaN in the gradient, which
    # comes back through exp: the inputs have to be masked.
    clean = random_batch(34)
    mask = clean[4]
    dirty = [x.clone() for x in clean]
    for index, name in enumerate(["logprobs", "old", "ref"]):
        if where in (name, "all"):
            dirty[index][~mask] = dirt
    if where in ("advantages", "all"):
        dirty[3][~mask.any(1)] = dirt         # the row that holds no token at all
    settings = dict(loss_type=loss_type, max_completion_length=7, beta=0.3)

    def run(batch):
        lp = batch[0].clone().requires_grad_()
        loss, metrics = grpo_loss(lp, *batch[1:], **settings)
        return loss.detach(), torch.autograd.grad(loss, lp)[0], metrics

    (loss, grad, metrics), (loss2, grad2, metrics2) = run(clean), run(dirty)
    assert loss2.isfinite() and torch.equal(loss, loss2)
    assert torch.equal(grad, grad2)
    assert (grad2[~mask] == 0).all() and (grad2[mask] != 0).any()
    assert metrics2 == metrics and all(map(math.isfinite, metrics2.values()))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_any_token_is_zero_and_teaches_nothing(loss_type):
    lp = torch.full((2, 3), float("nan"))
    mask = torch.zeros(2, 3, dtype=torch.bool)
    leaf = lp.clone().requires_grad_()
    loss, metrics = grpo_loss(leaf, lp, lp, torch.ones(2), mask, loss_type=loss_type,
                              max_completion_length=3)
    assert loss.item() == 0.0 and all(map(math.isfinite, metrics.values()))
    assert torch.autograd.grad(loss, leaf)[0].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_loss_takes_any_kind_of_mask(loss_type, kind):
    *batch, mask = random_batch(35)
    settings = dict(loss_type=loss_type, max_completion_length=7)
    loss, metrics = grpo_loss(*batch, mask, **settings)
    again, metrics2 = grpo_loss(*batch, mask_as(mask, kind), **settings)
    assert_near(again, loss)
    assert metrics == pytest.approx(metrics2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_loss_leaves_its_arguments_alone(loss_type):
    # A mask or log-probs changed in place through a view would poison the next step.
    batch = random_batch(36)
    copies = [x.clone() for x in batch]
    grpo_loss(*batch, loss_type=loss_type, max_completion_length=7)
    assert all(torch.equal(x, y) for x, y in zip(batch, copies))


@pytest.mark.parametrize("change, said", [
    (dict(old=(2, 6)), "2, 6"),
    (dict(old=(1, 5)), "1, 5"),                        # would broadcast silently
    (dict(ref=(3, 5)), "3, 5"),
    (dict(ref=(2, 1)), "2, 1"),                        # so would this
    (dict(mask=(4, 5)), "4, 5"),
    (dict(mask=(5,)), r"\(5,\)|\[5\]"),                # and this
    (dict(advantages=(7,)), r"\(7,\)|\[7\]"),
    (dict(advantages=(5,)), r"\(5,\)|\[5\]"),
    (dict(advantages=(2, 1)), "2, 1"),
    (dict(advantages=(2, 5)), "2, 5"),
])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_loss_refuses_wrong_shapes(change, said, loss_type):
    shapes = dict(lp=(2, 5), old=(2, 5), ref=(2, 5), advantages=(2,), mask=(2, 5)) | change
    arguments = [torch.zeros(shape) for shape in shapes.values()]
    with pytest.raises(ValueError, match=said):
        grpo_loss(*arguments, loss_type=loss_type, max_completion_length=5)


def test_grpo_loss_refuses_impossible_settings():
    lp, advantages, mask = torch.zeros(2, 3), torch.ones(2), torch.ones(2, 3)
    with pytest.raises(ValueError, match="bnpo") as error:
        grpo_loss(lp, lp, lp, advantages, mask, loss_type="bnpo")
    assert all(name in str(error.value) for name in LOSS_TYPES)     # what IS possible
    with pytest.raises(ValueError, match="0.07") as error:
        grpo_loss(lp, lp, None, advantages, mask, beta=0.07)
    assert "ref_logprobs" in str(error.value)
    with pytest.raises(ValueError, match="max_completion_length"):
        grpo_loss(lp, lp, lp, advantages, mask, loss_type="dr_grpo")
    # Each of the three is fine as soon as the missing piece is there.
    grpo_loss(lp, lp, None, advantages, mask, beta=0.0)
    grpo_loss(lp, lp, lp, advantages, mask, loss_type="dr_grpo", max_completion_length=3)
    grpo_loss(lp, lp, lp, advantages, mask, loss_type="dapo")


# --------------------------------------------------------------------------------------
# metrics of the loss
# --------------------------------------------------------------------------------------

def test_metrics_are_plain_finite_floats():
    lp, old, ref, advantages, mask = random_batch(41)
    for reference, beta in ((ref, 0.04), (None, 0.0)):
        _, metrics = grpo_loss(lp.requires_grad_(), old, reference, advantages, mask, beta=beta)
        assert metrics
        for name, value in metrics.items():
            assert type(value) is float and math.isfinite(value), name


def test_clip_fraction_counts_only_where_the_gradient_went():
    ratios = t64([[1.5, 0.5, 1.25, 1.0], [1.5, 0.5, 1.25, 1.0], [1.5, 0.5, 1.25, 1.0]])
    old, mask = torch.zeros_like(ratios), torch.ones(3, 4, dtype=torch.bool)
    advantages = t64([1.0, -1.0, 0.0])

    def fraction(mask, high=0.28):
        return grpo_loss(ratios.log(), old, None, advantages, mask, epsilon=0.2,
                         epsilon_high=high, beta=0.0)[1]["clip_fraction"]

    # Of the four corners two count: (1.5, A > 0) and (0.5, A < 0). Nothing where A = 0:
    # there was no gradient to take away.
    assert fraction(mask) == pytest.approx(2 / 12)
    assert fraction(mask, high=0.2) == pytest.approx(3 / 12)     # 1.25 > 1.2 as well
    for row, column, counts in [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]:
        alone = torch.zeros_like(mask)
        alone[row, column] = True
        assert fraction(alone) == counts


def test_clip_fraction_is_the_share_of_dead_gradients():
    lp, old, _, advantages, mask = random_batch(42, rows=8, width=40, spread=0.6)
    mask = torch.arange(40)[None] < torch.tensor([40, 31, 0, 7, 22, 40, 15, 9])[:, None]

    def loss(x):
        return grpo_loss(x, old, None, advantages, mask, epsilon_high=0.28, beta=0.0)

    dead = (gradient(lambda x: loss(x)[0], lp)[mask] == 0).double().mean().item()
    assert 0.05 < dead < 0.95
    assert loss(lp)[1]["clip_fraction"] == pytest.approx(dead)


def test_ratio_max_is_taken_over_the_tokens():
    lp, old, _, advantages, mask = random_batch(44)
    lp[~mask] = old[~mask] + 5                # a huge ratio where no token is
    _, metrics = grpo_loss(lp, old, None, advantages, mask, beta=0.0)
    assert metrics["ratio_max"] == pytest.approx((lp - old).exp()[mask].max().item())
    assert metrics["ratio_max"] < math.exp(5) / 10


def test_kl_metric_is_the_mean_over_tokens_before_beta():
    # All rows equally long, so that the mean over tokens is the mean over rows too.
    lp, old, ref, advantages, _ = random_batch(43)
    mask = (torch.arange(7) < 4).expand(6, 7)
    kl = sum(slow_k3(lp[i, t].item(), ref[i, t].item())[0] for i in range(6) for t in range(4))
    for beta in (0.04, 2.0):
        _, metrics = grpo_loss(lp, old, ref, advantages, mask, beta=beta)
        assert metrics["kl"] == pytest.approx(kl / 24, rel=1e-6)


# --------------------------------------------------------------------------------------
# Exact sums over a vocabulary of five
# --------------------------------------------------------------------------------------

def expected_gradient(logits, loss_of_token):
    """E over x ~ policy of the gradient of loss(x): what on-policy sampling averages to.
    The sampling weights are held fixed, as the sampler's are."""
    weights = logits.softmax(-1)
    return gradient(lambda x: (weights * loss_of_token(x.log_softmax(-1))).sum(), logits)


def test_k1_as_a_loss_regularises_nothing_and_k3_does():
    policy, reference = far_policies()
    logits, ref = policy.log(), reference.log()
    # E[grad(log pi - log ref)] = sum of grad pi = grad 1 = 0: no pull at all.
    k1 = expected_gradient(logits, lambda lp: lp - ref)
    assert k1.abs().max() < 1e-15
    # k3: E[(1 - ref/pi) grad log pi] = pi - ref in the logits, zero only at the reference.
    k3 = expected_gradient(logits, lambda lp: k3_kl(lp[:, None], ref[:, None])[:, 0])
    assert_near(k3, policy - reference)
    # Which is the gradient of KL(ref || pi). The VALUE of k3 estimates KL(pi || ref), its
    # gradient belongs to the other direction: both pull to the reference, at other speeds.
    other_way = gradient(lambda x: exact_kl(reference, x.softmax(-1)), logits)
    this_way = gradient(lambda x: exact_kl(x.softmax(-1), reference), logits)
    assert_near(k3, other_way)
    assert (k3 - this_way).abs().max() > 0.1
    # Close to the reference the two agree to leading order.
    near = ref + 1e-4 * t64([1, -1, 1, -1, 1])
    k3 = expected_gradient(near, lambda lp: k3_kl(lp[:, None], ref[:, None])[:, 0])
    this_way = gradient(lambda x: exact_kl(x.softmax(-1), reference), near)
    assert (k3 - this_way).abs().max() < 1e-3 * this_way.abs().max()


def test_k3_times_the_ratio_has_the_gradient_of_its_own_value():
    # The correction that TRL applies: with the ratio pi/sg(pi) in front, the sampling
    # weights take part in the derivative, and KL(pi || ref) comes out.
    policy, reference = far_policies()
    ref = reference.log()

    def corrected(lp):
        return (lp - lp.detach()).exp() * k3_kl(lp[:, None], ref[:, None])[:, 0]

    this_way = gradient(lambda x: exact_kl(x.softmax(-1), reference), policy.log())
    assert_near(expected_gradient(policy.log(), corrected), this_way)


def test_the_loss_pulls_back_to_the_reference_in_expectation():
    # The same through grpo_loss: advantages 0, tokens in exactly the policy's proportions.
    tokens = torch.tensor([0] * 10 + [1] * 6 + [2] * 2 + [3] + [4])
    policy, reference = t64([10, 6, 2, 1, 1]) / 20, far_policies()[1]

    def loss(logits):
        lp = logits.log_softmax(-1)[tokens, None]
        return grpo_loss(lp, lp.detach(), reference.log()[tokens, None],
                         torch.zeros(20, dtype=F64), torch.ones(20, 1), beta=0.5)[0]

    assert_near(gradient(loss, policy.log()), 0.5 * (policy - reference))


def test_entropy_bonus_of_the_sampled_token_does_nothing():
    # -log p of the sampled token is an unbiased estimate of the entropy, yet its expected
    # gradient is zero like k1's: a real bonus takes the whole distribution.
    logits = far_policies()[0].log()
    bonus = expected_gradient(logits, lambda lp: -lp)
    assert bonus.abs().max() < 1e-15
    entropy = gradient(lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(), logits)
    assert entropy.abs().max() > 0.1


# --------------------------------------------------------------------------------------
# Invariances of the loss, and the first step
# --------------------------------------------------------------------------------------

@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_row_order_does_not_matter(loss_type):
    batch = random_batch(51)
    settings = dict(loss_type=loss_type, max_completion_length=9, beta=0.3)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    moved = [x[order] for x in batch]
    loss, metrics = grpo_loss(*batch, **settings)
    loss2, metrics2 = grpo_loss(*moved, **settings)
    assert_near(loss2, loss)
    assert metrics2 == pytest.approx(metrics)
    grad = gradient(lambda x: grpo_loss(x, *batch[1:], **settings)[0], batch[0])
    grad2 = gradient(lambda x: grpo_loss(x, *moved[1:], **settings)[0], moved[0])
    assert_near(grad2, grad[order])
    # Moving the advantages alone is another batch altogether.
    swapped, _ = grpo_loss(*batch[:3], batch[3][order], batch[4], **settings)
    assert abs(swapped - loss) > 1e-3


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter(loss_type, side):
    # dr_grpo in particular divides by the setting, not by the width the batch happens
    # to have. The mask alone says what counts, wherever its places are.
    batch = random_batch(52)
    settings = dict(loss_type=loss_type, max_completion_length=9, beta=0.3)

    def pad(x, value):
        if x.dim() == 1:
            return x
        block = torch.full((x.shape[0], 3), value, dtype=x.dtype)
        return torch.cat([block, x] if side == "left" else [x, block], dim=1)

    padded = [pad(x, False if x.dtype == torch.bool else float("nan")) for x in batch]
    loss, metrics = grpo_loss(*batch, **settings)
    loss2, metrics2 = grpo_loss(*padded, **settings)
    assert_near(loss2, loss)
    assert metrics2 == pytest.approx(metrics)
    grad = gradient(lambda x: grpo_loss(x, *batch[1:], **settings)[0], batch[0])
    grad2 = gradient(lambda x: grpo_loss(x, *padded[1:], **settings)[0], padded[0])
    assert_near(grad2, pad(grad, 0.0))


def test_dr_grpo_divides_by_the_setting():
    batch = random_batch(53)
    at = {n: grpo_loss(*batch, loss_type="dr_grpo", max_completion_length=n)[0].item()
          for n in (7, 14, 70)}
    assert at[14] == pytest.approx(at[7] / 2) and at[70] == pytest.approx(at[7] / 10)


def test_micro_batches_that_average_their_own_means_are_another_loss():
    # The row means may be averaged over equal micro-batches; the token mean may not:
    # each part has to be weighted by its share of the whole step's tokens.
    batch = random_batch(54)
    parts = [[x[:3] for x in batch], [x[3:] for x in batch]]
    tokens = [part[4].sum() for part in parts]
    assert tokens[0] != tokens[1]
    for loss_type in LOSS_TYPES:
        settings = dict(loss_type=loss_type, max_completion_length=7)
        whole = grpo_loss(*batch, **settings)[0]
        losses = [grpo_loss(*part, **settings)[0] for part in parts]
        if loss_type == "dapo":
            assert abs((losses[0] + losses[1]) / 2 - whole) > 1e-3
            weighted = (losses[0] * tokens[0] + losses[1] * tokens[1]) / sum(tokens)
            assert_near(weighted, whole)
        else:
            assert_near((losses[0] + losses[1]) / 2, whole)


def first_step(beta, loss_type, lengths):
    """Old = current = reference; two groups of four with advantages that sum to 0."""
    generator = torch.Generator().manual_seed(61)
    rewards = t64([[1.5, 0.5, 0.0, 1.5], [0.0, 0.0, 1.5, 0.5]])
    advantages = group_advantages(rewards).flatten()
    mask = torch.arange(6)[None] < torch.tensor(lengths)[:, None]
    lp = -2 * torch.rand(8, 6, dtype=F64, generator=generator)
    leaf = lp.clone().requires_grad_()
    loss, metrics = grpo_loss(leaf, lp, lp if beta else None, advantages, mask, beta=beta,
                              loss_type=loss_type, max_completion_length=6)
    return loss, torch.autograd.grad(loss, leaf)[0], advantages, mask, metrics


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_first_step_has_loss_zero_and_a_gradient(beta):
    # Everybody asks: the loss is 0 because advantages sum to 0 at ratio 1, and the
    # gradient is not, because it is the advantages themselves (times -1/(N |o_i|)).
    lengths = [6, 2, 3, 1, 4, 4, 5, 6]
    loss, grad, advantages, mask, metrics = first_step(beta, "grpo", lengths)
    assert abs(loss.item()) < 1e-15
    assert_near(grad, -advantages[:, None] * mask / (8 * t64(lengths)[:, None]))
    assert grad.abs().max() > 0.05 and metrics["clip_fraction"] == 0.0


@pytest.mark.parametrize("loss_type, divisor", [("dapo", 31), ("dr_grpo", 8 * 6)])
def test_first_step_of_a_mean_over_tokens_is_not_zero(loss_type, divisor):
    lengths = [6, 2, 3, 1, 4, 4, 5, 6]
    loss, grad, advantages, mask, _ = first_step(0.0, loss_type, lengths)
    # Long answers count more, and nothing makes length-weighted advantages sum to 0.
    assert_near(loss, -(advantages * t64(lengths)).sum() / divisor)
    assert abs(loss.item()) > 0.01
    assert_near(grad, -advantages[:, None] * mask / divisor)
    # With equal lengths it is 0 again.
    assert abs(first_step(0.0, loss_type, [5] * 8)[0].item()) < 1e-15


def test_a_step_down_makes_good_answers_likelier():
    # The sign of it all: the loss is minimised, the objective maximised.
    loss, grad, advantages, mask, _ = first_step(0.0, "grpo", [6, 2, 3, 1, 4, 4, 5, 6])
    moved = -grad.sum(1)                      # change of each answer's log-probability
    assert ((moved > 0) == (advantages > 0)).all()


# ================================================================================================
# Part 2: the model
# ================================================================================================

LOSSES = ["grpo", "dapo", "dr_grpo"]
END, EOS, VOCABULARY = 1, 2, 60  # <end>, <eos>; ids 56..59 are the model's, not the tokenizer's


@functools.cache
def tiny_tokenizer(pad="<pad>"):
    """56 words, two of them end tokens; blanks between words."""
    special = ["<pad>", "<end>", "<eos>", "<unk>", "user", "assistant"]
    words = {word: i for i, word in enumerate(special + [f"w{i}" for i in range(50)])}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad, eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=["<end>", "<pad>"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}")
    return tokenizer


def tiny_model(family="qwen2", seed=0, **extra):
    """Random, and of strong opinions: with the usual small weights every distribution is flat."""
    torch.manual_seed(seed)
    settings = dict(vocab_size=VOCABULARY, eos_token_id=EOS, bos_token_id=None, pad_token_id=None)
    if family == "gpt2":  # learned positions
        model = GPT2LMHeadModel(GPT2Config(**{
            **settings, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
            "initializer_range": 0.4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            **extra}))
    else:
        settings |= dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                         max_position_embeddings=64, tie_word_embeddings=False,
                         initializer_range=0.4)
        config, kind = {"qwen2": (Qwen2Config, Qwen2ForCausalLM),
                        "mistral": (MistralConfig, MistralForCausalLM),
                        "gemma2": (Gemma2Config, Gemma2ForCausalLM)}[family]
        model = kind(config(**{**settings, **extra}))
    # As in Qwen: one end token in the config, the other one only in the generation settings.
    model.generation_config.eos_token_id = [END, EOS]
    return model.eval()


PROMPTS = ["w1 w2 w3 w4 w5 w6 w7", "w8", "w9 w10 w11"]


def slow_logprobs(model, ids, attention_mask, T, temperature=1.0):
    """Row by row, without padding, cache or chunks. Gives log-probs and entropies (N, T)."""
    rows, P = [], ids.shape[1] - T
    for row, real in zip(ids, attention_mask.bool()):
        n = int(real[P:].sum())
        logits = model(row[real].unsqueeze(0), use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)[-n - 1 : -1]
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        chosen = logprobs.gather(1, row[P : P + n].unsqueeze(1)).squeeze(1)
        rows.append([torch.nn.functional.pad(x, (0, T - n)) for x in (chosen, entropy)])
    return tuple(torch.stack(part) for part in zip(*rows))


def ragged(model, widths=(3, 7, 1, 5), G=4, lengths=None, seed=0, longest=9):
    """A rollout that nobody sampled: prompts of these widths, random answers of random lengths."""
    chance = random.Random(seed)
    N = len(widths) * G
    lengths = lengths or [chance.randint(1, longest) for _ in range(N - 1)] + [longest]
    P, T = max(widths), max(lengths)
    ids, mask = torch.zeros(N, P + T, dtype=torch.long), torch.zeros(N, P + T, dtype=torch.long)
    for i in range(N):
        if i % G == 0:
            prompt = [chance.randrange(6, 56) for _ in range(widths[i // G])]
        answer = [chance.randrange(6, 56) for _ in range(lengths[i])]
        ids[i, P - len(prompt) : P + lengths[i]] = torch.tensor(prompt + answer)
        mask[i, P - len(prompt) : P + lengths[i]] = 1
    with torch.no_grad():
        logprobs = slow_logprobs(model, ids, mask, T)[0]
    return Rollout(ids, mask, mask[:, P:].bool(), logprobs.float(), [f"row {i}" for i in range(N)],
                   torch.tensor([n == longest for n in lengths]))


def grads_of(model):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
                      for p in model.parameters()])


def weights_of(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def close(a, b, tol):
    """Largest difference, measured against the largest number."""
    return (a - b).abs().max().item() <= tol * max(1.0, b.abs().max().item())


# ------------------------------------------------------------------------------------------------
# Sampling
# ------------------------------------------------------------------------------------------------


def check_rollout(rollout, tokenizer, prompts, G, cap, pad=None):
    """Everything that must hold of any rollout, token by token."""
    N, T = rollout.completion_mask.shape
    P = rollout.input_ids.shape[1] - T
    assert N == len(prompts) * G and T <= cap
    assert rollout.attention_mask.shape == rollout.input_ids.shape
    assert rollout.logprobs.shape == (N, T) and len(rollout.texts) == N
    assert rollout.completion_mask.dtype == rollout.truncated.dtype == torch.bool
    encoded = [tokenizer(p)["input_ids"] if isinstance(p, str) else
               tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"]
               for p in prompts]
    assert P == max(map(len, encoded))
    lengths = []
    for i in range(N):
        prompt = encoded[i // G]  # group-major
        hidden = P - len(prompt)
        answer = rollout.input_ids[i, P:].tolist()
        ends = [t for t in range(T) if answer[t] in (END, EOS)
                and all(a not in (END, EOS) for a in answer[:t])]
        n = ends[0] + 1 if ends else T
        lengths.append(n)
        assert rollout.input_ids[i, hidden:P].tolist() == prompt
        chosen = [True] * n + [False] * (T - n)
        assert rollout.attention_mask[i].tolist() == [0] * hidden + [1] * len(prompt) + chosen
        assert rollout.completion_mask[i].tolist() == chosen
        assert rollout.truncated[i] == (not ends)
        assert (rollout.logprobs[i, n:] == 0).all() and (rollout.logprobs[i, :n] < 0).all()
        words = [tokenizer.convert_ids_to_tokens(a) for a in answer[:n]
                 if a < 56 and a not in tokenizer.all_special_ids]
        assert rollout.texts[i].split() == words  # end tokens and what follows are not in the text
        if pad is not None:
            assert set(answer[n:]) | set(rollout.input_ids[i, :hidden].tolist()) <= {pad}
    assert max(lengths) == T  # no column that nobody reached
    assert not rollout.truncated.any() or T == cap
    return lengths


@pytest.mark.parametrize("family, temperature, pad", [
    ("qwen2", 1.0, "<pad>"), ("qwen2", 0.7, "<eos>"), ("qwen2", 1.0, "<end>"),
    ("qwen2", 0.7, "w3"), ("qwen2", 1.0, None), ("gpt2", 1.0, "<eos>"), ("gpt2", 0.7, "<pad>")])
def test_sampler_agrees_with_scorer(family, temperature, pad):
    """The test that catches wrong temperatures, masks, positions and hidden settings alike."""
    model, tokenizer = tiny_model(family, initializer_range=0.25), tiny_tokenizer(pad)
    torch.manual_seed(1)
    rollout = sample_groups(model, tokenizer, PROMPTS, 8, max_completion_length=12,
                            temperature=temperature)
    pad_id = END if pad is None else tokenizer.pad_token_id
    lengths = check_rollout(rollout, tokenizer, PROMPTS, 8, 12, pad_id)
    assert min(lengths) < 6 and rollout.truncated.any()  # ragged, or nothing was shown
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    ends = set(ids[:, -T:][rollout.completion_mask].tolist()) & {END, EOS}
    assert ends == {END, EOS}  # both of them were met
    slow = slow_logprobs(model, ids, mask, T, temperature)[0].float()
    torch.testing.assert_close(rollout.logprobs, slow, atol=2e-5, rtol=0)
    for G in (1, 8):
        fast = token_logprobs(model, ids, mask, T, temperature, num_generations=G)
        torch.testing.assert_close(fast, rollout.logprobs, atol=2e-5, rtol=0)


def expected_counts(probabilities, tokens):
    """Chi-square of what was drawn, in standard deviations above its mean; rare bins together."""
    n = len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    rare = probabilities * n < 8
    seen, wanted = (torch.cat([x[~rare], x[rare].sum().view(1)])
                    for x in (counts, probabilities * n))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return ((((seen - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom)).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_choose_tokens_draws_the_softmax(temperature):
    torch.manual_seed(0)
    row = torch.randn(30) * 2
    uniforms = torch.rand(20_000, dtype=torch.float64)
    tokens, logprobs = choose_tokens(row.expand(20_000, -1), temperature, uniforms)
    exact = torch.log_softmax(row.double() / temperature, dim=0)
    assert expected_counts(exact.exp(), tokens) < 4
    assert expected_counts(torch.softmax(row.double() / 1.3, dim=0), tokens) > 10  # it has power
    torch.testing.assert_close(logprobs, exact[tokens].float(), atol=1e-6, rtol=0)


def test_choose_tokens_never_takes_what_is_impossible():
    """-inf at both ends and inside, and uniform numbers at the very ends of their range."""
    row = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
    row[[0, 1, 7, 20, 21, 22, 48, 49]] = -math.inf
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniforms[0], uniforms[1] = 0.0, 1 - 1e-12
    tokens, logprobs = choose_tokens(row.expand(20_000, -1), 1.0, uniforms)
    assert torch.isfinite(row[tokens]).all() and torch.isfinite(logprobs).all()
    # Both ends of the line are reached: the first and the last that are possible.
    assert tokens[0] == 2 and tokens[1] == 47


def test_choose_tokens_inverts_the_cumulative_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.8, 0.0]]).log()

    def draw(*uniforms):
        uniforms = torch.tensor(uniforms, dtype=torch.float64)
        return choose_tokens(logits, 1.0, uniforms)[0].tolist()

    assert draw(0.0, 0.0) == [0, 0] and draw(0.49, 0.19) == [0, 0]
    assert draw(0.51, 0.21) == [1, 1] and draw(0.79, 0.999) == [1, 1] and draw(0.81, 0.5) == [2, 1]


def test_choose_tokens_in_bfloat16_still_reaches_rare_tokens():
    """A vocabulary as large as Qwen's: in bfloat16, or summed in float32, rare tokens vanish."""
    logits = torch.zeros(1, 150_000, dtype=torch.bfloat16)
    logits[0, 0] = 12.0  # e^12 / 150,000 is about 1: half of it all
    uniforms = torch.linspace(0, 1 - 1e-9, 64, dtype=torch.float64)
    tokens, logprobs = choose_tokens(logits.expand(64, -1), 1.0, uniforms)
    exact = torch.log_softmax(logits[0].double(), dim=0)
    wanted = torch.searchsorted(exact.exp().cumsum(0), uniforms, right=True)
    assert (tokens - wanted).abs().max() <= 2 and tokens.max() > 149_990
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact[tokens], atol=2e-3, rtol=0)


def test_choose_tokens_tells_tokens_apart_that_float32_cannot():
    """8,000 tokens share a millionth of the line, at its end: float32 has 14 numbers there."""
    logits = torch.zeros(1, 8000)
    logits[0, 0] = 23.0
    tail = 1 - logits[0].double().softmax(0)[0]
    uniforms = torch.linspace(1 - 0.99 * tail, 1 - 1e-9, 300, dtype=torch.float64)
    tokens, _ = choose_tokens(logits.expand(300, -1), 1.0, uniforms)
    assert len(tokens.unique()) > 250


def test_a_uniform_number_that_was_rounded_to_one():
    """As may happen on Apple's GPUs, which have no float64: it is the last token, and no error."""
    tokens, logprobs = choose_tokens(torch.zeros(2, 9), 1.0, torch.tensor([1.0, 0.0]))
    assert tokens.tolist() == [8, 0] and logprobs.exp().tolist() == pytest.approx([1 / 9] * 2)


def test_temperature_zero_is_argmax_with_log_prob_at_one():
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = choose_tokens(logits, 0, torch.zeros(7))
    assert tokens.tolist() == logits.argmax(dim=1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(1).max(dim=1).values)

    model, tokenizer = tiny_model(), tiny_tokenizer()
    rollout = sample_groups(model, tokenizer, PROMPTS, 2, max_completion_length=10, temperature=0)
    check_rollout(rollout, tokenizer, PROMPTS, 2, 10)
    for row, real in zip(rollout.input_ids, rollout.attention_mask.bool()):
        n = int(real[7:].sum())  # the longest prompt has 7
        best = model(row[real].unsqueeze(0)).logits[0].argmax(dim=1)
        assert best[-n - 1 : -1].tolist() == row[7 : 7 + n].tolist()
    T = rollout.completion_mask.shape[1]
    slow = slow_logprobs(model, rollout.input_ids, rollout.attention_mask, T)[0].float()
    torch.testing.assert_close(rollout.logprobs, slow, atol=2e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_distribution_of_the_model(temperature):
    """First tokens against the exact softmax, and second ones given the likeliest first one."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    torch.manual_seed(3)
    rollout = sample_groups(model, tokenizer, ["w1 w2 w3"], 6000, max_completion_length=2,
                            temperature=temperature)
    prompt, answers = rollout.input_ids[:1, :-2], rollout.input_ids[:, -2:]

    def exact(ids):
        return torch.softmax(model(ids).logits[0, -1].double() / temperature, dim=0)

    with torch.no_grad():
        first = exact(prompt)
        assert expected_counts(first, answers[:, 0]) < 4
        first[[END, EOS]] = 0
        common = first.argmax()
        second = exact(torch.cat([prompt, common.view(1, 1)], dim=1))
    after = answers[answers[:, 0] == common, 1]
    assert len(after) > 300 and expected_counts(second, after) < 4


def same_rollout(a, b, tol=1e-5):
    for name in ("input_ids", "attention_mask", "completion_mask", "truncated"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert a.texts == b.texts
    torch.testing.assert_close(a.logprobs, b.logprobs, atol=tol, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_dropping_finished_rows_changes_nothing(family):
    model, tokenizer = tiny_model(family), tiny_tokenizer()

    def sample(drop_every):
        torch.manual_seed(5)
        return sample_groups(model, tokenizer, PROMPTS, 6, max_completion_length=14,
                             drop_every=drop_every)

    plain, rows = sample(1000), []
    seen = model.base_model.register_forward_hook(
        lambda module, args, out: rows.append(len(out.last_hidden_state)))
    fast = sample(1)
    seen.remove()
    same_rollout(fast, plain)
    same_rollout(sample(3), plain)
    # The prompts were read once each, not once per answer; and rows did leave.
    lengths = plain.completion_mask.sum(dim=1)
    assert rows[0] == 3
    assert rows[1:] == [int((lengths > t).sum()) for t in range(1, len(rows))] and rows[-1] < 18


def test_sampling_ends_when_all_have_ended():
    """All rows out after one token: no further pass through the model."""
    model, tokenizer, calls = tiny_model(), tiny_tokenizer(), []
    model.generation_config.eos_token_id = list(range(VOCABULARY))
    model.register_forward_hook(lambda *_: calls.append(1))
    rollout = sample_groups(model, tokenizer, PROMPTS, 2, max_completion_length=20, drop_every=1)
    assert len(calls) == 1 and rollout.completion_mask.shape == (6, 1)
    assert rollout.completion_mask.all() and not rollout.truncated.any()


def test_an_end_token_at_the_cap_is_an_end():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    torch.manual_seed(0)
    rollout = sample_groups(model, tokenizer, ["w1"], 300, max_completion_length=3)
    full = rollout.completion_mask.all(dim=1)
    ended = torch.isin(rollout.input_ids[:, -1], torch.tensor([END, EOS])) & full
    assert ended.any() and (full & ~ended).any()
    assert torch.equal(rollout.truncated, full & ~ended)


def test_sampling_is_reproducible_and_random():
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def sample(seed):
        torch.manual_seed(seed)
        return sample_groups(model, tokenizer, PROMPTS, 4, max_completion_length=6)

    same_rollout(sample(0), sample(0), tol=0)
    assert sample(0).texts != sample(1).texts
    assert len(set(sample(0).texts)) > 6  # rows do not repeat each other


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_prompt_alone_and_beside_a_longer_one(family, temperature, monkeypatch):
    """Left padding must not be felt (trap 7): the same random numbers give the same answer."""
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    table = torch.rand(12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "rand", lambda N, T, **_: table[:N, :T])
    short, long = "w8 w4", " ".join(f"w{i}" for i in range(25))
    kind = dict(max_completion_length=10, temperature=temperature)
    alone = sample_groups(model, tokenizer, [short], 6, **kind)
    beside = sample_groups(model, tokenizer, [short, long], 6, **kind)
    assert beside.texts[:6] == alone.texts and len(set(alone.texts)) > (temperature > 0)
    T = alone.completion_mask.shape[1]
    torch.testing.assert_close(beside.logprobs[:6, :T], alone.logprobs, atol=2e-5, rtol=0)


def test_the_checkpoints_generation_settings_have_no_influence():
    """Trap 1: Qwen2.5's generation_config says top_k 20, top_p 0.8, repetition_penalty 1.1."""
    tokenizer = tiny_tokenizer()
    rollouts = []
    for hidden in ({}, dict(top_k=1, top_p=0.1, repetition_penalty=2.0, temperature=0.1, min_p=0.9,
                            do_sample=False, max_new_tokens=2, no_repeat_ngram_size=1)):
        model = tiny_model()
        for name, value in hidden.items():
            setattr(model.generation_config, name, value)
        torch.manual_seed(0)
        rollouts.append(sample_groups(model, tokenizer, PROMPTS, 5, max_completion_length=8))
    same_rollout(*rollouts, tol=0)


@pytest.mark.parametrize("family, dropout", [("qwen2", dict(attention_dropout=0.5)),
                                             ("gpt2", dict(resid_pdrop=0.5, embd_pdrop=0.5))])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_train_mode_does_not_disturb_sampling(family, dropout, checkpointing):
    """Trap 14: dropout, and gradient checkpointing, which turns the cache off without a word."""
    model, tokenizer = tiny_model(family, **dropout), tiny_tokenizer()

    def sample():
        torch.manual_seed(0)
        return sample_groups(model, tokenizer, PROMPTS, 4, max_completion_length=8)

    plain = sample()
    assert not model.training
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    same_rollout(sample(), plain)
    assert model.training and all(module.training for module in model.modules())


def test_chats_go_through_the_template():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    chats = [[{"role": "user", "content": "w1 w2"}],
             [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"},
              {"role": "user", "content": "w5"}]]
    written = ["user w1 w2 <end> assistant",
               "user w3 <end> assistant w4 <end> user w5 <end> assistant"]
    rollouts = []
    for prompts in (chats, written, [tuple(chats[0]), written[1]]):  # and both kinds side by side
        torch.manual_seed(0)
        rollouts.append(sample_groups(model, tokenizer, prompts, 3, max_completion_length=5))
    check_rollout(rollouts[0], tokenizer, chats, 3, 5)
    same_rollout(rollouts[0], rollouts[1], tol=0)
    same_rollout(rollouts[0], rollouts[2], tol=0)


def test_ids_beyond_the_tokenizer_are_no_error():
    """Qwen's embedding has 151,936 rows, its tokenizer 151,665 words."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    model.lm_head.bias.data[58] = 100.0
    rollout = sample_groups(model, tokenizer, ["w1"], 2, max_completion_length=3)
    assert (rollout.input_ids[:, -3:] == 58).all() and rollout.texts == ["", ""]
    assert rollout.truncated.all()


def test_end_tokens_are_collected_from_all_three_places():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id, model.config.eos_token_id = [7, END], 9
    assert grpo.end_token_ids(model, tokenizer) == [END, EOS, 7, 9]
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert grpo.end_token_ids(model, tokenizer) == [EOS]
    model.generation_config = None
    assert grpo.end_token_ids(model, tokenizer) == [EOS]
    model.config.eos_token_id = 0  # an id like any other
    assert grpo.end_token_ids(model, tokenizer) == [0, EOS]


def test_sampling_refuses_what_cannot_be():
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def refused(said, prompts=("w1",), G=2, max_completion_length=4, temperature=1.0):
        with pytest.raises(ValueError, match=said):
            sample_groups(model, tokenizer, list(prompts), G, temperature=temperature,
                          max_completion_length=max_completion_length)

    refused("0", G=0)  # each says what it was given
    refused("-3", max_completion_length=-3)
    refused("-0.1", temperature=-0.1)
    refused("nan", temperature=math.nan)
    refused("0 prompts", prompts=[])
    refused("prompt 1 has no tokens", prompts=["w1", ""])
    refused("context 64: .w2", prompts=["w1", "w2 " * 61])
    fits = sample_groups(model, tokenizer, ["w2 " * 60], 1, max_completion_length=4)  # just so
    assert fits.completion_mask.shape[1] <= 4
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    nameless = copy.deepcopy(tokenizer)
    nameless.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id"):
        sample_groups(model, nameless, ["w1"], 2, max_completion_length=4)


# ------------------------------------------------------------------------------------------------
# Scoring
# ------------------------------------------------------------------------------------------------


@functools.cache
def slow_scores(family, temperature):
    """The slow way, once for all that are held against it: values, and a gradient of both."""
    model = tiny_model(family)
    rollout = ragged(model, (3, 7, 1))
    T = rollout.completion_mask.shape[1]
    pull = torch.randn(2, 12, T, generator=torch.Generator().manual_seed(1))
    slow = slow_logprobs(model, rollout.input_ids, rollout.attention_mask, T, temperature)
    (torch.stack(slow) * pull).sum().backward()
    return rollout, pull, [x.detach() for x in slow], grads_of(model)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature, G, chunk, checkpointing", [
    (1.0, 1, 512, False), (0.7, 1, 7, False), (0.7, 4, 512, False), (1.0, 4, 5, False),
    (0.7, 2, 20, False), (0.7, 1, 512, True)])
def test_token_logprobs_against_the_whole_softmax(family, temperature, G, chunk, checkpointing):
    """Values, entropies, and the gradients of both; Gemma 2 caps its logits (trap 13)."""
    rollout, pull, slow, wanted = slow_scores(family, temperature)
    model = tiny_model(family)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    fast = token_logprobs(model, ids, mask, T, temperature, num_generations=G, return_entropy=True,
                          tokens_per_chunk=chunk)
    (torch.stack(fast) * pull).sum().backward()
    for a, b in zip(fast, slow):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), atol=3e-5, rtol=0)
    assert close(grads_of(model), wanted, 1e-4)
    alone = token_logprobs(model, ids, mask, T, temperature, num_generations=G)
    torch.testing.assert_close(alone, fast[0], atol=1e-5, rtol=0)


def test_gemma2_logits_are_capped_in_the_tiny_model_too():
    """Else the test above would show nothing."""
    model = tiny_model("gemma2", final_logit_softcapping=2.0)
    ids = torch.tensor([[6, 7, 8, 9]])
    states = model.base_model(ids).last_hidden_state
    assert (model.lm_head(states) - model(ids).logits).abs().max() > 0.1
    fast = token_logprobs(model, ids, torch.ones_like(ids), 3)
    slow = slow_logprobs(model, ids, torch.ones_like(ids), 3)[0].float()
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)


@pytest.mark.parametrize("G", [1, 4])
def test_float64_models_are_scored_in_float64(G):
    """GPT-2 computes all of it in float64, so here the two ways agree to the last digits."""
    model = tiny_model("gpt2").double()
    rollout = ragged(model)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    fast = token_logprobs(model, ids, mask, T, 0.7, num_generations=G, tokens_per_chunk=11)
    assert fast.dtype == torch.float64
    slow = slow_logprobs(model, ids, mask, T, 0.7)[0]
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)


@pytest.mark.parametrize("G", [1, 4])
def test_bfloat16_logits_are_widened_before_the_softmax(G):
    """Trap 9: the softmax of the same logits in bfloat16 is off by some hundredths."""
    model = tiny_model().bfloat16()
    rollout = ragged(model)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -T - 1 : -1]
    fast, entropy = token_logprobs(model, ids, mask, T, num_generations=G, return_entropy=True)
    assert fast.dtype == entropy.dtype == torch.float32
    real = rollout.completion_mask
    if G == 1:  # the very same logits, so only the softmax is in question
        wanted = logits.float().log_softmax(-1).gather(2, ids[:, -T:, None]).squeeze(2)
        narrow = logits.log_softmax(-1).gather(2, ids[:, -T:, None]).squeeze(2).float()
        ours, theirs = ((x - wanted)[real].abs().mean() for x in (fast, narrow))
        assert ours < 1e-4 and theirs > 1e-3


def test_scoring_never_holds_the_whole_vocabulary_of_a_batch():
    model = tiny_model()
    rollout = ragged(model)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    token_logprobs(model, ids, mask, T)  # the comparison of head and model is made once
    rows, saved = [], []
    hook = model.lm_head.register_forward_hook(
        lambda module, args, out: rows.append(out.shape[:-1].numel()))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x,
                                                  lambda x: x):
        logprobs = token_logprobs(model, ids, mask, T, tokens_per_chunk=10, return_entropy=True)[0]
        saved = [shape for shape in saved if VOCABULARY in shape and 32 not in shape]  # no weights
    real = int(rollout.completion_mask.sum())
    assert max(rows) == 10 and sum(rows) == real < logprobs.numel()  # padding sees no head at all
    assert saved == []  # nothing of that size waits for the backward pass
    logprobs.sum().backward()
    assert max(rows) == 10 and sum(rows) == 2 * real  # made once more, chunk by chunk
    hook.remove()


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("G", [1, 4])
def test_more_padding_changes_no_log_prob(family, G):
    model = tiny_model(family)
    rollout = ragged(model)
    T = rollout.completion_mask.shape[1]
    plain = token_logprobs(model, rollout.input_ids, rollout.attention_mask, T, num_generations=G)
    pad = torch.nn.functional.pad
    wide = token_logprobs(model, pad(rollout.input_ids, (5, 3), value=17),
                          pad(rollout.attention_mask, (5, 3)), T + 3, num_generations=G)
    torch.testing.assert_close(wide[:, :T], plain, atol=2e-5, rtol=0)
    assert (wide[:, T:] == 0).all() and (plain[~rollout.completion_mask] == 0).all()


def test_rows_in_another_order_get_the_same_log_probs():
    model = tiny_model()
    rollout = ragged(model)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    plain = token_logprobs(model, ids, mask, T, num_generations=4)
    rows = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(token_logprobs(model, ids[rows], mask[rows], T), plain[rows],
                               atol=2e-5, rtol=0)
    groups = torch.tensor([8, 9, 10, 11, 3, 2, 1, 0])  # two groups, the second turned round
    turned = token_logprobs(model, ids[groups], mask[groups], T, num_generations=4)
    torch.testing.assert_close(turned, plain[groups], atol=2e-5, rtol=0)


def test_scoring_refuses_what_cannot_be():
    model, ids = tiny_model(), torch.tensor([[6, 7, 8, 9]])
    for temperature, T in ((0, 2), (-1.0, 2), (1.0, 0), (1.0, 4)):
        with pytest.raises(ValueError, match="temperature"):
            token_logprobs(model, ids, torch.ones_like(ids), T, temperature)


# ------------------------------------------------------------------------------------------------
# The loss once more, with every relative, as slow loops
# ------------------------------------------------------------------------------------------------


def slow_loss(logprobs, old, ref, advantages, mask, entropies, *, epsilon, epsilon_high, beta,
              loss_type, max_completion_length, importance_sampling_level, kl_penalty_type,
              use_bias_correction_kl, entropy_bonus):
    """One answer and one token at a time. Gives the loss and the tokens' (ratio, clipped, kl)."""
    high = epsilon if epsilon_high is None else epsilon_high
    sums, seen, zero = [], [], torch.tensor(0.0, dtype=torch.float64)
    for i in range(len(advantages)):
        A, places = advantages[i], [t for t in range(mask.shape[1]) if mask[i, t]]
        whole = sum((logprobs[i, t] - old[i, t] for t in places), zero)
        tokens = []
        for t in places:
            ratio = {"token": logprobs[i, t] - old[i, t], "sequence_sum": whole,
                     "sequence": whole / len(places)}[importance_sampling_level].exp()
            low, top = (torch.tensor(x, dtype=torch.float64) for x in (1 - epsilon, 1 + high))
            bounded = min(max(ratio, low), top)
            gain = min(ratio * A, bounded * A)
            clipped = bool(A > 0 and ratio > 1 + high or A < 0 and ratio < 1 - epsilon)
            kl = zero
            if ref is not None:
                x = logprobs[i, t] - ref[i, t]
                kl = {"kl": x, "abs": abs(x), "mse": x**2 / 2,
                      "low_var_kl": (-x).exp() + x - 1}[kl_penalty_type]
            tokens.append(-gain + beta * kl * (ratio if use_bias_correction_kl else 1)
                          - (entropy_bonus * entropies[i, t] if entropy_bonus else 0))
            seen.append((ratio.item(), clipped, kl.item()))
        sums.append((sum(tokens, zero), len(places)))
    if loss_type == "grpo":
        loss = sum(s / max(n, 1) for s, n in sums) / len(sums)
    elif loss_type == "dapo":
        loss = sum(s for s, _ in sums) / max(sum(n for _, n in sums), 1)
    else:
        loss = sum(s for s, _ in sums) / (len(sums) * max_completion_length)
    return loss, seen


PLAIN = dict(epsilon=0.2, epsilon_high=None, beta=0.04, max_completion_length=7,
             importance_sampling_level="token", kl_penalty_type="low_var_kl",
             use_bias_correction_kl=False, entropy_bonus=0.0)
RELATIVES = [
    {}, {"beta": 0.0}, {"epsilon_high": 0.28}, {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence_sum"}, {"use_bias_correction_kl": True},
    {"importance_sampling_level": "sequence", "use_bias_correction_kl": True, "beta": 0.3},
    {"kl_penalty_type": "kl"}, {"kl_penalty_type": "abs"}, {"kl_penalty_type": "mse"},
    {"kl_penalty_type": "mse", "use_bias_correction_kl": True}, {"entropy_bonus": 0.1},
    {"epsilon": 1.5, "beta": 0.5, "epsilon_high": 0.05}]


def random_tokens(N=6, T=5, spread=0.3, seed=0):
    """Log-probs of three policies, advantages, a ragged mask, entropies; all float64."""
    chance = random.Random(seed)  # torch's generator may change, this one will not

    def table(make):
        return torch.tensor([[make() for _ in range(T)] for _ in range(N)], dtype=torch.float64)

    logprobs = table(lambda: -chance.uniform(0.1, 4))
    old = logprobs + table(lambda: chance.gauss(0, spread))
    ref = logprobs + table(lambda: chance.gauss(0, 1))
    advantages = torch.tensor([chance.gauss(0, 1) for _ in range(N)], dtype=torch.float64)
    lengths = torch.tensor([T, 1] + [chance.randint(1, T) for _ in range(N - 2)])
    mask = torch.arange(T) < lengths.unsqueeze(1)
    return logprobs, old, ref, advantages, mask, table(lambda: chance.uniform(0.5, 3))


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("relative", RELATIVES)
def test_every_relative_against_a_slow_loop(loss_type, relative):
    settings = {**PLAIN, **relative, "loss_type": loss_type}
    for seed in range(2):
        logprobs, old, ref, advantages, mask, entropies = random_tokens(seed=seed)
        mask[3] = seed == 1  # an answer without any token: it still counts as an answer
        ref = ref if settings["beta"] else None
        fast, slow = (logprobs.clone().requires_grad_() for _ in range(2))
        ents = [entropies.clone().requires_grad_() for _ in range(2)]
        loss, metrics = grpo_loss(fast, old, ref, advantages, mask, entropies=ents[0], **settings)
        wanted, seen = slow_loss(slow, old, ref, advantages, mask, ents[1], **settings)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted, atol=1e-12, rtol=0)
        torch.testing.assert_close(fast.grad, slow.grad, atol=1e-12, rtol=0)
        if settings["entropy_bonus"]:
            torch.testing.assert_close(ents[0].grad, ents[1].grad, atol=1e-12, rtol=0)
        ratios, clipped, kls = zip(*seen)
        assert metrics["loss"] == pytest.approx(loss.item())
        assert metrics["ratio_max"] == pytest.approx(max(ratios))
        assert metrics["clip_fraction"] == pytest.approx(sum(clipped) / len(clipped))
        assert metrics["kl"] == pytest.approx(sum(kls) / len(kls))


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("relative", RELATIVES)
def test_parts_of_a_batch_add_up_to_the_whole(loss_type, relative):
    """Trap 18, for every relative: a common divisor, and not each part's own."""
    settings = {**PLAIN, **relative, "loss_type": loss_type}
    logprobs, old, ref, advantages, mask, entropies = random_tokens()
    whole = logprobs.clone().requires_grad_()
    parts = logprobs.clone().requires_grad_()
    loss, _ = grpo_loss(whole, old, ref, advantages, mask, entropies=entropies, **settings)
    loss.backward()
    divisor = {"grpo": 6, "dapo": int(mask.sum()), "dr_grpo": 6 * 7}[loss_type]
    total = 0.0
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part, _ = grpo_loss(parts[rows], old[rows], ref[rows], advantages[rows], mask[rows],
                            entropies=entropies[rows], divisor=divisor, **settings)
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dirt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("relative", RELATIVES)
def test_nothing_behind_the_mask_reaches_a_relative(relative, dirt):
    settings = {**PLAIN, **relative, "loss_type": "dapo"}
    logprobs, old, ref, advantages, mask, entropies = random_tokens()
    results = []
    for fill in (0.5, dirt):
        policy, *others = (torch.where(mask, x, fill) for x in (logprobs, old, ref, entropies))
        policy.requires_grad_()
        loss, metrics = grpo_loss(policy, others[0], others[1], advantages, mask,
                                  entropies=others[2], **settings)
        loss.backward()
        assert (policy.grad[~mask] == 0).all()
        results.append((loss.item(), metrics, policy.grad.tolist()))
    assert results[0] == results[1]


# ------------------------------------------------------------------------------------------------
# The update
# ------------------------------------------------------------------------------------------------


def settings_of(config):
    return {name: getattr(config, name) for name in [*PLAIN, "loss_type"]}


def slow_update(model, rollout, advantages, ref, config):
    """What `update` must do to the weights: whole mini-batches, one answer at a time, no cache."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    ids, real, mask = rollout.input_ids, rollout.attention_mask, rollout.completion_mask
    G, T = config.num_generations, mask.shape[1]
    B = len(ids) // G
    if config.mask_truncated_completions:
        mask = mask & ~rollout.truncated.unsqueeze(1)
    before = slow_logprobs(model, ids, real, T, config.temperature)[0].detach()
    if config.num_iterations * config.num_mini_batches > 1:
        before = before.float().double()  # pi_old is kept in float32
    losses, norms, seen, gaps, entropies = [], [], [], [], []
    for _ in range(config.num_iterations):
        order = torch.randperm(B) if config.num_mini_batches > 1 else torch.arange(B)
        for part in order.tensor_split(config.num_mini_batches):
            rows = [g * G + i for g in part.tolist() for i in range(G)]
            now, entropy = slow_logprobs(model, ids[rows], real[rows], T, config.temperature)
            loss, tokens = slow_loss(now, before[rows], None if ref is None else ref[rows],
                                     advantages[rows], mask[rows], entropy, **settings_of(config))
            optimizer.zero_grad()
            loss.backward()
            norms.append(grads_of(model).norm().item())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, config.max_grad_norm / norms[-1])
            optimizer.step()
            losses.append(loss.item())
            seen += tokens
            gaps += (rollout.logprobs - before)[rows][mask[rows]].abs().tolist()
            entropies += entropy[mask[rows]].tolist()
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    ratios, clipped, kls = zip(*seen)
    return {"loss": mean(losses), "grad_norm": mean(norms), "ratio_max": max(ratios),
            "kl": mean(kls), "clip_fraction": mean(clipped), "sampler_gap": mean(gaps),
            "entropy": mean(entropies)}


def world(config, family="gpt2", widths=(3, 7, 1, 5), **extra):
    """A learner, a rollout with rather different lengths, advantages, the reference's log-probs.
    GPT-2 in float64 by default: then two right ways agree to the last digits."""
    model = tiny_model(family, **extra)
    learner = make_learner(model.double() if family == "gpt2" else model, config)
    rollout = ragged(model, widths, config.num_generations)
    chance = torch.Generator().manual_seed(2)
    N = len(rollout.input_ids)
    advantages = torch.randn(N, generator=chance, dtype=model.dtype)
    noise = torch.randn(rollout.logprobs.shape, generator=chance, dtype=model.dtype)
    rollout.logprobs += 1e-3 * noise * rollout.completion_mask  # a sampler that is slightly off
    ref = rollout.logprobs + 0.5 * noise.flip(0)
    return learner, rollout, advantages, ref if config.beta else None


def small(**settings):
    return GRPOConfig(**{"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 9,
                         "learning_rate": 3e-3, "warmup_steps": 0, "temperature": 0.8, **settings})


@pytest.mark.parametrize("loss_type, extra", [
    *[(loss_type, extra) for loss_type in LOSSES for extra in (
        {"num_iterations": 2, "num_mini_batches": 2, "learning_rate": 0.01},
        {"mask_truncated_completions": True, "num_mini_batches": 3, "entropy_bonus": 0.3})],
    ("grpo", {}), ("dapo", {"beta": 0.0}), ("dr_grpo", {"entropy_bonus": 0.3, "beta": 0.0}),
    ("dapo", {"num_iterations": 3, "max_grad_norm": 0.1, "epsilon": 0.05, "epsilon_high": 0.01}),
    ("grpo", {"importance_sampling_level": "sequence", "num_iterations": 2,
              "use_bias_correction_kl": True}),
    ("dr_grpo", {"kl_penalty_type": "mse", "num_iterations": 2})])
def test_update_against_the_slow_way(loss_type, extra):
    """Weights and metrics after whole updates, whatever the micro-batches (trap 18)."""
    config = small(loss_type=loss_type, num_generations=2, **extra)
    learner, rollout, advantages, ref = world(config)
    start = copy.deepcopy(learner.model)
    torch.manual_seed(11)
    wanted = slow_update(learner.model, rollout, advantages, ref, config)
    target = weights_of(learner.model)
    moved = (target - weights_of(start)).abs().max().item()
    assert moved > 1e-3
    for budget in (1, 12, 10**6):
        config.tokens_per_micro_batch = budget
        learner = make_learner(copy.deepcopy(start), config)
        torch.manual_seed(11)
        metrics = update(learner, rollout, advantages, ref, config)
        assert (weights_of(learner.model) - target).abs().max().item() < 1e-6 * moved
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert metrics["skipped_updates"] == 0


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulated_gradient_is_that_of_the_whole_batch(loss_type, checkpointing):
    """In float64, with ratios away from 1, from one token a micro-batch to all at once."""
    config = small(loss_type=loss_type, num_generations=2, gradient_checkpointing=checkpointing)
    learner, rollout, advantages, ref = world(config)
    old = rollout.logprobs + 0.2 * torch.randn(rollout.logprobs.shape, dtype=torch.float64,
                                               generator=torch.Generator().manual_seed(0))
    mask, T = rollout.completion_mask, rollout.completion_mask.shape[1]
    now = slow_logprobs(learner.model, rollout.input_ids, rollout.attention_mask, T, 0.8)[0]
    learner.model.zero_grad()
    loss, _ = grpo_loss(now, old, ref, advantages, mask, **settings_of(config))
    loss.backward()
    wanted = grads_of(learner.model)
    divisor = {"grpo": 8, "dapo": int(mask.sum()), "dr_grpo": 8 * 9}[loss_type]
    for budget in (1, 12, 25, 10**6):
        learner.budget = budget
        accumulate(learner, rollout, range(4), advantages, old, ref,
                   {**settings_of(config), "divisor": divisor}, config)
        assert close(grads_of(learner.model), wanted, 1e-10)


@pytest.mark.parametrize("budget", [1, 8, 17, 30, 64, 120, 500])
@pytest.mark.parametrize("longest", [1, 9, 30])
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget(budget, longest):
    model, G = tiny_model(), 6
    rollout = ragged(model, (3, 12, 1, 5, 5), G, longest=longest)
    groups, lengths = [0, 1, 3, 4], rollout.completion_mask.sum(dim=1)  # group 2 is not asked for
    P = rollout.input_ids.shape[1] - rollout.completion_mask.shape[1]
    widths = rollout.attention_mask[:, :P].sum(dim=1)
    rows_seen, largest_first = [], []
    for rows, k in micro_batches(rollout, groups, G, budget):
        rows_seen += rows
        assert G % k == 0 and len(rows) % k == 0
        assert all(row // G == rows[j - j % k] // G for j, row in enumerate(rows))  # one prompt
        # k rows share one prompt, and all such pieces are padded to the largest of them.
        sizes = [int(widths[rows[i]] + lengths[rows[i : i + k]].sum())
                 for i in range(0, len(rows), k)]
        assert len(sizes) * max(sizes) <= budget or len(sizes) == 1
        assert min(sizes) >= 0.8 * max(sizes)  # so at most a fifth is padding
        assert k == G or any(k < more <= G and G % more == 0 and more * lengths.max() > budget
                             for more in range(G + 1))
        largest_first.append(max(sizes))
    assert sorted(rows_seen) == [g * G + i for g in groups for i in range(G)]
    assert largest_first == sorted(largest_first, reverse=True)


def shapes_through(model):
    """The shapes of the ids that go through the trunk from here on."""
    shapes = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(
            tuple((args[0] if args else kwargs["input_ids"]).shape)), with_kwargs=True)
    model.head_gives_logits = True  # that comparison would be in the list too
    return shapes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prompts_go_through_the_model_once_and_padding_not_at_all(checkpointing):
    """Four groups of 4: so many tokens as there are, each group's prompt counted once."""
    config = small(gradient_checkpointing=checkpointing)
    learner, _, advantages, _ = world(config)
    rollout = ragged(learner.model, (5, 5, 5, 5), lengths=[3, 1, 9, 2] * 4)
    shapes = shapes_through(learner.model)
    update(learner, rollout, advantages, None, config)
    assert shapes == [(4, 5 + 3 + 1 + 9 + 2)]


def test_like_sizes_go_together():
    """Six short groups beside six long ones: no padding, in whatever order they come."""
    model, G = tiny_model(), 2
    lengths = [n for _ in range(6) for n in (2, 2, 20, 20)]
    rollout = ragged(model, (4,) * 12, G, lengths=lengths)
    parts = [rows for rows, _ in micro_batches(rollout, range(12), G, 10**6)]
    assert [len(rows) for rows in parts] == [12, 12]
    assert all(lengths[row] == 20 for row in parts[0])


@pytest.mark.parametrize("family, extra", [
    ("qwen2", dict(use_sliding_window=True, max_window_layers=0)), ("mistral", {})])
def test_models_with_windows_are_scored_row_by_row(family, extra):
    """The tree's mask knows of no window: where a layer has one, the plain pass is taken."""
    model = tiny_model(family, sliding_window=4, **extra)
    assert model.config.sliding_window == 4
    rollout = ragged(model, (9, 6))
    shapes, T = shapes_through(model), rollout.completion_mask.shape[1]
    fast = token_logprobs(model, rollout.input_ids, rollout.attention_mask, T, num_generations=4)
    assert shapes == [(8, 9 + T)]
    slow = slow_logprobs(model, rollout.input_ids, rollout.attention_mask, T)[0]
    torch.testing.assert_close(fast, slow.float(), atol=3e-5, rtol=0)
    model.config.sliding_window, model.config.layer_types = None, ["full_attention"] * 2
    wrong = token_logprobs(model, rollout.input_ids, rollout.attention_mask, T, num_generations=4)
    assert (wrong - fast).abs().max() > 0.01  # the window matters here


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_answers_of_a_tree_do_not_see_each_other(attention):
    """Whatever one answer says, and however many there are, the others' scores stay."""
    model = tiny_model(attn_implementation=attention)
    rollout = ragged(model, (5, 3), G=4)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    before = token_logprobs(model, ids, mask, T, num_generations=4)
    changed = ids.clone()
    changed[2, -T:] = 7 + torch.arange(T)
    after = token_logprobs(model, changed, mask, T, num_generations=4)
    others = [0, 1, 3, 4, 5, 6, 7]
    torch.testing.assert_close(after[others], before[others], atol=2e-5, rtol=0)
    assert (after[2] - before[2]).abs().max() > 0.1


def test_entropies_for_the_log_alone_cost_no_gradient():
    model = tiny_model()
    rollout = ragged(model)
    ids, mask, T = rollout.input_ids, rollout.attention_mask, rollout.completion_mask.shape[1]
    both = [token_logprobs(model, ids, mask, T, return_entropy=True, entropy_gradient=wanted)
            for wanted in (True, False)]
    assert torch.equal(both[0][1], both[1][1]) and not both[1][1].requires_grad
    assert both[0][1].requires_grad and both[1][0].requires_grad


@pytest.mark.parametrize("mini_batches", [1, 4])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_rows_left_out_at_beta_zero_change_nothing(loss_type, mini_batches):
    """Groups without variance are not computed; a beta of 1e-30 makes them computed. Two steps,
    so that Adam's averages count: an update in which nothing is left moves the weights too."""
    outcomes = []
    for beta in (0.0, 1e-30):
        config = small(loss_type=loss_type, beta=beta, num_mini_batches=mini_batches)
        learner, rollout, advantages, ref = world(config)
        advantages[4:8] = 0  # groups 1 and 3 are flat
        advantages[12:] = 0
        advantages[0] = 0  # a single row is not a group
        rows = []
        learner.model.lm_head.register_forward_hook(lambda m, a, out: rows.append(len(out)))
        learner.model.head_gives_logits = True
        torch.manual_seed(0)
        for _ in range(2):
            metrics = update(learner, rollout, advantages, ref, config)
        adam = torch.cat([x.double().flatten() for weight in learner.weights
                          for x in learner.optimizer.state[weight].values()])
        outcomes.append((weights_of(learner.model), adam, sum(rows)))
        assert metrics["grad_norm"] > 0
    for a, b in zip(outcomes[0][:2], outcomes[1][:2]):
        assert close(a, b, 1e-9)
    assert outcomes[0][2] < 0.7 * outcomes[1][2]  # and it was worth it


@pytest.mark.parametrize("extra", [{}, {"num_iterations": 2, "num_mini_batches": 2},
                                   {"loss_type": "dapo"}, {"mask_truncated_completions": True}])
def test_a_batch_of_flat_groups_moves_no_weight(extra):
    """Also: AdamW must not decay the weights, for decay would move them without any gradient."""
    config = small(beta=0.0, **extra)
    learner, rollout, advantages, _ = world(config, "qwen2")
    before = weights_of(learner.model)
    metrics = update(learner, rollout, advantages * 0, None, config)
    assert torch.equal(weights_of(learner.model), before)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["loss"] == metrics["entropy"] == metrics["grad_norm"] == metrics["kl"] == 0


def test_all_answers_cut_off_and_masked_teach_nothing():
    config = small(beta=0.0, mask_truncated_completions=True, loss_type="dapo")
    learner, rollout, advantages, _ = world(config, "qwen2")
    rollout.truncated[:] = True
    before = weights_of(learner.model)
    metrics = update(learner, rollout, advantages, None, config)
    assert torch.equal(weights_of(learner.model), before)
    assert all(math.isfinite(value) for value in metrics.values())


def watch_updates(monkeypatch):
    """Metrics of every single update, and not only their means over the step."""
    seen, real = [], grpo.grpo_loss

    @functools.wraps(real)
    def spy(*args, **kwargs):
        loss, metrics = real(*args, **kwargs)
        seen.append({**metrics, "logprobs": args[0].detach(), "old": args[1], "mask": args[4]})
        return loss, metrics

    spy.__kwdefaults__ = real.__kwdefaults__
    monkeypatch.setattr(grpo, "grpo_loss", spy)
    return seen


@pytest.mark.parametrize("extra", [{"num_iterations": 3}, {"num_mini_batches": 4},
                                   {"num_iterations": 3, "gradient_checkpointing": True}])
def test_old_log_probs_stay_those_of_the_sampling_policy(extra, monkeypatch):
    """First update: ratio exactly 1. Later ones: not 1, and at a large step the clip acts."""
    config = small(learning_rate=0.02, **extra)
    learner, rollout, advantages, ref = world(config, "qwen2")
    seen = watch_updates(monkeypatch)
    metrics = update(learner, rollout, advantages, ref, config)
    exactly = 0 if extra == {"num_iterations": 3} else 1e-5  # otherwise another shape, so rounding
    assert seen[0]["ratio_max"] == pytest.approx(1, abs=exactly) and seen[0]["clip_fraction"] == 0
    if "num_iterations" in extra:
        parts = len(seen) // 3  # micro-batches in each of three passes
        for i in range(parts):
            old = [x["old"] for x in seen[i::parts]]
            assert len(old) == 3 and all(torch.equal(x, old[0]) for x in old)
            mask = seen[i]["mask"]
            torch.testing.assert_close(old[0][mask], seen[i]["logprobs"][mask])
        seen = seen[parts - 1 :]
    assert all(x["ratio_max"] > 1.05 and x["clip_fraction"] > 0 for x in seen[1:])
    assert metrics["clip_fraction"] > 0
    assert metrics["ratio_max"] == max(x["ratio_max"] for x in seen)


@pytest.mark.parametrize("family, extra", [("qwen2", {"attention_dropout": 0.4}),
                                           ("gpt2", {"resid_pdrop": 0.4, "attn_pdrop": 0.4})])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("iterations", [1, 2])
def test_dropout_does_not_disturb_a_step(family, extra, checkpointing, iterations, monkeypatch):
    """A model in train mode, as from_config gives one: no dropout in either side of the ratio."""
    config = small(num_iterations=iterations, learning_rate=0.0, prompts_per_step=2,
                   gradient_checkpointing=checkpointing)
    model = tiny_model(family, **extra).train()
    learner, seen = make_learner(model, config), watch_updates(monkeypatch)
    questions = question_stream([{"prompt": prompt} for prompt in PROMPTS], 0)
    for _ in range(2):
        metrics = train_step(learner, tiny_tokenizer(), questions, count_words, config)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["sampler_gap"] < 1e-5
    assert all(x["ratio_max"] == pytest.approx(1.0, abs=1e-5) for x in seen)


def test_checkpointing_that_the_user_switched_on(monkeypatch):
    """On the model and not in the config: the update must notice, for it turns the cache off."""
    config = small(prompts_per_step=2, num_iterations=2, learning_rate=0.0)
    model = tiny_model()
    model.gradient_checkpointing_enable()
    learner = make_learner(model.train(), config)
    questions = question_stream([{"prompt": prompt} for prompt in PROMPTS], 0)
    metrics = train_step(learner, tiny_tokenizer(), questions, count_words, config)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5) and metrics["sampler_gap"] < 1e-5


def count_words(prompts, completions, **columns):
    """A reward that differs from answer to answer."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(len, text.split()))) / 10 for text in texts]


def test_only_the_policy_changes_and_beta_zero_makes_no_reference(monkeypatch):
    config = small(prompts_per_step=2, learning_rate=1e-2)
    learner = make_learner(tiny_model().train(), config)
    before, ref_before = weights_of(learner.model), weights_of(learner.reference)
    assert torch.equal(before, ref_before)
    questions = question_stream([{"prompt": prompt} for prompt in PROMPTS], 0)
    first = train_step(learner, tiny_tokenizer(), questions, count_words, config)
    second = train_step(learner, tiny_tokenizer(), questions, count_words, config)
    assert torch.equal(weights_of(learner.reference), ref_before)
    assert not torch.equal(weights_of(learner.model), before)
    assert not learner.reference.training  # no dropout in it
    assert not any(p.requires_grad for p in learner.reference.parameters())
    assert first["kl"] == pytest.approx(0, abs=1e-9) and second["kl"] > 1e-4

    model, config = tiny_model(), small(beta=0.0, prompts_per_step=2)
    monkeypatch.setattr(copy, "deepcopy", lambda *_: pytest.fail("a copy at beta = 0"))
    learner = make_learner(model, config)
    assert learner.reference is None
    metrics = train_step(learner, tiny_tokenizer(), questions, count_words, config)
    assert metrics["kl"] == 0 and metrics["grad_norm"] > 0


def test_the_kl_of_a_step_is_that_to_the_reference():
    """At the sampling temperature, over all tokens, between the policy as it is and as it was."""
    config = small(prompts_per_step=3, learning_rate=0.0, temperature=0.7,
                   tokens_per_micro_batch=20)
    learner = make_learner(tiny_model(), config)
    for weight in learner.weights:
        weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    captured, real = [], grpo.update
    grpo.update = lambda *args: captured.append(args) or real(*args)
    try:
        questions = question_stream([{"prompt": prompt} for prompt in PROMPTS], 0)
        metrics = train_step(learner, tiny_tokenizer(), questions, count_words, config)
    finally:
        grpo.update = real
    rollout, ref = captured[0][1], captured[0][3]
    ids, T = rollout.input_ids, rollout.completion_mask.shape[1]
    wanted = slow_logprobs(learner.reference, ids, rollout.attention_mask, T, 0.7)[0].float()
    real_tokens = rollout.completion_mask
    torch.testing.assert_close(ref[real_tokens], wanted[real_tokens], atol=2e-5, rtol=0)
    mean = k3_kl(rollout.logprobs, wanted)[real_tokens].mean().item()
    assert metrics["kl"] == pytest.approx(mean, rel=1e-3) and mean > 1e-3


@pytest.mark.parametrize("limit", [0.01, 1e9])
def test_gradients_are_clipped_to_the_limit(limit):
    config = small(max_grad_norm=limit)
    learner, rollout, advantages, ref = world(config, "qwen2")
    metrics = update(learner, rollout, advantages, ref, config)
    left = grads_of(learner.model).norm().item()
    assert metrics["grad_norm"] > 0.1  # logged before it is cut
    assert left == pytest.approx(min(limit, metrics["grad_norm"]), rel=1e-3)


def test_an_update_that_is_not_finite_is_skipped_and_the_third_in_a_row_is_an_error():
    config = small()
    learner, rollout, advantages, ref = world(config, "qwen2")
    before = weights_of(learner.model)
    broken = ref.clone()
    broken[5, 0] = math.nan
    for count in (1, 2):
        metrics = update(learner, rollout, advantages, broken, config)
        assert torch.equal(weights_of(learner.model), before) and learner.failed == count
        assert metrics["skipped_updates"] == 1 and all(map(math.isfinite, metrics.values()))
    update(learner, rollout, advantages, ref, config)  # one that succeeds begins the count anew
    assert learner.failed == 0 and not torch.equal(weights_of(learner.model), before)
    for _ in range(2):
        update(learner, rollout, advantages, broken, config)
    with pytest.raises(FloatingPointError, match="nan"):
        update(learner, rollout, advantages, broken, config)


def test_too_little_memory_halves_the_micro_batches():
    learner, asked = types.SimpleNamespace(budget=1000), []

    def work(learner, room):
        asked.append(learner.budget)
        if learner.budget > room:
            raise torch.OutOfMemoryError("too much")
        return "done"

    assert fit_memory(work, learner, 300) == "done" and asked == [1000, 500, 250]
    assert fit_memory(work, learner, 300) == "done" and learner.budget == 250  # it stays
    with pytest.raises(RuntimeError, match="memory"):
        fit_memory(work, learner, 0)
    with pytest.raises(KeyError):  # other errors are not its business
        fit_memory(lambda learner: {}["x"], learner)


# ------------------------------------------------------------------------------------------------
# Precision
# ------------------------------------------------------------------------------------------------


def test_bfloat16_weights_become_float32_masters():
    """Traps 8, 11 and 12: transformers loads in bfloat16; buffers are none of our business."""
    model = tiny_model().bfloat16()
    inv_freq = model.model.rotary_emb.inv_freq = torch.linspace(0, 1, 4)
    model.register_buffer("table", torch.ones(3, dtype=torch.bfloat16))
    rounded = weights_of(model)
    for parameter in itertools.islice(model.parameters(), 1):
        parameter.requires_grad_(False)  # and what is frozen stays frozen
    learner = make_learner(model, small())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(weights_of(model), rounded)
    assert model.model.rotary_emb.inv_freq is inv_freq and model.table.dtype == torch.bfloat16
    wanted = [p for p in model.parameters() if p.requires_grad]
    assert len(wanted) == len(list(model.parameters())) - 1
    for got in (learner.weights, learner.parameters, learner.optimizer.param_groups[0]["params"]):
        assert len(got) == len(wanted) and all(a is b for a, b in zip(got, wanted))
    assert learner.optimizer.param_groups[0]["weight_decay"] == 0
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="empty parameter list"):
        make_learner(model, small())


def gpu_learner(config, monkeypatch):
    """The learner that a GPU with bfloat16 gets, on the CPU."""
    model = tiny_model()
    with monkeypatch.context() as pretend:
        pretend.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
        pretend.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        return make_learner(model, config)


def test_master_weights_take_steps_that_bfloat16_cannot(monkeypatch):
    config = small(learning_rate=1e-6, tokens_per_micro_batch=30)
    learner = gpu_learner(config, monkeypatch)
    rotary = learner.model.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32
    assert torch.equal(rotary, tiny_model().model.rotary_emb.inv_freq)
    assert all(p.dtype == torch.bfloat16 for p in learner.model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in learner.reference.parameters())
    assert all(w.dtype == torch.float32 for w in learner.weights)
    before = [w.clone() for w in learner.weights]
    exact, rollout, advantages, ref = world(config, "qwen2")
    for _ in range(3):
        update(learner, rollout, advantages, ref, config)
    moved = torch.cat([(w - b).abs().flatten() for w, b in zip(learner.weights, before)])
    assert (moved > 1e-6).double().mean() > 0.9  # three steps of 1e-6, nearly everywhere
    for parameter, weight in zip(learner.parameters, learner.weights):
        assert torch.equal(parameter, weight.bfloat16()) and parameter.grad is None
    # In bfloat16 itself, hardly any of that would have been seen.
    changed = torch.cat([(w.bfloat16() != b.bfloat16()).flatten()
                         for w, b in zip(learner.weights, before)])
    assert changed.double().mean() < 0.2


def test_gradients_in_bfloat16_add_up_in_the_masters(monkeypatch):
    """Of all micro-batches, each once; also when one of them ran out of memory half-way."""
    exact, rollout, advantages, ref = world(small(max_grad_norm=1e9), "qwen2")
    update(exact, rollout, advantages, ref, small(max_grad_norm=1e9))
    wanted, got = grads_of(exact.model), []
    for budget in (32, 64):
        config = small(max_grad_norm=1e9, tokens_per_micro_batch=budget)
        learner = gpu_learner(config, monkeypatch)
        if budget == 64:  # fails, and goes on with 32
            passes = []

            def out_of_memory(grad):
                passes.append(1)
                if len(passes) == 3:  # others have their gradient already
                    raise torch.OutOfMemoryError("in the middle of a backward pass")

            learner.model.model.layers[0].mlp.down_proj.weight.register_hook(out_of_memory)
        update(learner, rollout, advantages, ref, config)
        got.append(torch.cat([w.grad.flatten().double() for w in learner.weights]))
        assert learner.budget == 32 and (got[-1] - wanted).norm() < 0.4 * wanted.norm()
    assert torch.equal(got[0], got[1])


# ------------------------------------------------------------------------------------------------
# The step and the loop
# ------------------------------------------------------------------------------------------------

NAMES = {"step", "loss", "reward_mean", "reward_std", "kl", "clip_fraction", "ratio_max",
         "entropy", "grad_norm", "learning_rate", "completion_length", "truncated_fraction",
         "sampler_gap", "zero_variance_fraction", "sample_seconds", "update_seconds",
         "tokens_per_second"}


@pytest.mark.parametrize("extra", [
    {}, {"beta": 0.0}, {"num_iterations": 2, "num_mini_batches": 2},
    {"gradient_checkpointing": True},
    {"loss_type": "dr_grpo", "scale_rewards": False, "beta": 0.0}, {"dynamic_sampling": 2}])
def test_metrics_are_complete_and_finite(extra):
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    config = small(steps=2, prompts_per_step=3, **extra)
    for metrics in train(tiny_model(), tiny_tokenizer(), rows, count_words, config):
        assert NAMES <= set(metrics)
        assert all(isinstance(x, (int, float)) and math.isfinite(x) for x in metrics.values())
        assert metrics["sampler_gap"] < 1e-5 and 0 < metrics["entropy"] < math.log(VOCABULARY)
        assert metrics["tokens_per_second"] > 0 and metrics["sample_seconds"] > 0


def test_metrics_of_a_batch_without_variance():
    """At beta = 0 nothing is left to learn from: zeros, not NaN, and no weight moves."""
    model, rows = tiny_model(), [{"prompt": prompt} for prompt in PROMPTS]
    before = weights_of(model)

    def always_the_same(completions, **_):
        return [0.1 + 0.2] * len(completions)

    config = small(steps=1, beta=0.0, prompts_per_step=3)
    flat = train(model, tiny_tokenizer(), rows, always_the_same, config)[0]
    assert torch.equal(weights_of(model), before)
    assert all(math.isfinite(x) for x in flat.values()) and NAMES <= set(flat)
    assert flat["zero_variance_fraction"] == 1 and flat["reward_std"] == pytest.approx(0)
    assert flat["entropy"] == flat["sampler_gap"] == flat["ratio_max"] == flat["grad_norm"] == 0
    assert flat["completion_length"] > 0 and flat["reward_mean"] == pytest.approx(0.3)


def step_with_rewards(rewards, **extra):
    """One step on questions of one group each, with these rewards (B, G)."""
    B, G = len(rewards), len(rewards[0])
    config = small(prompts_per_step=B, num_generations=G, **extra)
    learner = make_learner(tiny_model(), config)
    questions = question_stream([{"prompt": f"w{i}"} for i in range(B)], 0)
    flat = [r for group in rewards for r in group]
    torch.manual_seed(2)
    metrics = train_step(learner, tiny_tokenizer(), questions, lambda **_: flat, config)
    return learner, metrics


def test_metrics_say_what_they_say():
    rewards = [[1.5, 1.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.5]]
    learner, metrics = step_with_rewards(rewards, max_completion_length=3)
    flat = torch.tensor(rewards, dtype=torch.float64)
    assert metrics["reward_mean"] == pytest.approx(flat.mean().item())
    assert metrics["reward_std"] == pytest.approx(flat.std(correction=0).item())
    assert metrics["zero_variance_fraction"] == pytest.approx(1 / 3)
    assert metrics["questions_seen"] == learner.questions_seen == 3
    rows, sampled, scores, advantages = learner.last
    texts = sampled.texts
    assert [row["prompt"] for row in rows] != [] and len(texts) == 12
    assert scores.tolist() == rewards
    root3 = 3**0.5
    wanted = [[1, 1, -1, -1], [0] * 4, [-1 / root3, -1 / root3, -1 / root3, root3]]
    torch.testing.assert_close(advantages.double(), torch.tensor(wanted).double())
    assert 1 <= metrics["completion_length"] <= 3 and 0 < metrics["truncated_fraction"] < 1


@pytest.mark.parametrize("mask_them", [False, True])
def test_cut_off_answers_stay_in_the_statistics_of_their_group(mask_them, monkeypatch):
    """Trap 20. Out of the loss, but their reward still counts in mean and std, and they in N."""
    seen = watch_updates(monkeypatch)
    rewards = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 3.0]]
    learner, metrics = step_with_rewards(rewards, max_completion_length=4,
                                         mask_truncated_completions=mask_them, beta=0.0)
    assert 0 < metrics["truncated_fraction"] < 1
    wanted = group_advantages(torch.tensor(rewards))
    torch.testing.assert_close(learner.last[3].float(), wanted)
    rows = sum(int(x["mask"].any(dim=1).sum()) for x in seen)
    assert rows == (round(8 * (1 - metrics["truncated_fraction"])) if mask_them else 8)


@pytest.mark.parametrize("schedule, wanted", [
    ("linear", [1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4]),
    ("constant_with_warmup", [1 / 3, 2 / 3, 1, 1, 1, 1]),
    ("cosine", [1 / 3, 2 / 3, 1] + [0.5 + 0.5 * math.cos(math.pi * i / 4) for i in (1, 2, 3)])])
def test_learning_rate_warms_up_and_decays(schedule, wanted):
    """The first step is not made at rate 0, nor the last."""
    config = small(steps=6, warmup_steps=3, learning_rate=1e-3, prompts_per_step=1, beta=0.0,
                   max_completion_length=1, lr_scheduler_type=schedule)
    metrics = train(tiny_model(), tiny_tokenizer(), [{"prompt": "w1"}], count_words, config)
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-3 * x for x in wanted])


def test_the_rate_of_the_schedule_is_the_one_that_moves_the_weights():
    """Adam's first step is as long as the rate: so the weights tell which one it was."""
    config = small(steps=1, warmup_steps=4, learning_rate=4e-3, prompts_per_step=2)
    model = tiny_model()
    before = weights_of(model)
    train(model, tiny_tokenizer(), [{"prompt": "w1"}], count_words, config)
    assert (weights_of(model) - before).abs().max().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("rows", [1, 3, 10])
def test_questions_come_once_per_epoch_in_a_new_order(rows):
    stream = question_stream(list(range(rows)), seed=7)
    epochs = [list(itertools.islice(stream, rows)) for _ in range(6)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows == 10:
        assert len({tuple(epoch) for epoch in epochs}) == 6 and list(range(10)) not in epochs
        other = question_stream(list(range(rows)), seed=8)
        assert list(itertools.islice(other, rows)) != epochs[0]
    flat = sum(epochs, [])
    for seen in range(2 * rows + 2):  # `seen` goes on exactly where a run stopped
        rest = question_stream(list(range(rows)), seed=7, seen=seen)
        assert list(itertools.islice(rest, 2 * rows)) == flat[seen : seen + 2 * rows]


def test_a_data_set_smaller_than_a_step():
    config = small(prompts_per_step=5, steps=3)
    seen = []

    def reward(prompts, completions, **_):
        seen.append(prompts[::4])
        return [0.0] * len(completions)

    rows = [{"prompt": "w1"}, {"prompt": "w2"}]
    metrics = train(tiny_model(), tiny_tokenizer(), rows, reward, config)
    assert [m["questions_seen"] for m in metrics] == [5, 10, 15]
    flat = sum(seen, [])
    assert all(set(flat[i : i + 2]) == {"w1", "w2"} for i in range(0, 14, 2))


@pytest.mark.parametrize("chats", [False, True])
def test_reward_functions_are_called_as_trl_calls_them(chats):
    tokenizer, calls = tiny_tokenizer("<eos>"), []
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS] if chats else PROMPTS
    dataset = [{"prompt": p, "answer": f"a{i}", "level": i} for i, p in enumerate(prompts)]
    config = small(prompts_per_step=3, max_completion_length=5, num_generations=4)

    def reward(prompts, completions, completion_ids, answer, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return list(range(12))

    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    model.lm_head.bias.data[EOS] = 5.0  # ends often
    learner = make_learner(model, config)
    train_step(learner, tokenizer, question_stream(dataset, 0), reward, config)
    rows, sampled, rewards, _ = learner.last
    texts = sampled.texts
    asked, completions, completion_ids, answers, columns = calls[0]
    # Group-major: each row of the data set G times, one after the other.
    assert asked == [row["prompt"] for row in rows for _ in range(4)]
    assert answers == [row["answer"] for row in rows for _ in range(4)]
    assert columns == {"level": [row["level"] for row in rows for _ in range(4)]}
    assert sorted(row["level"] for row in rows) == [0, 1, 2]
    assert completions == ([[{"role": "assistant", "content": text}] for text in texts] if chats
                           else texts)
    assert rewards.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    # The ids as they were drawn, the end token included, although it is the padding too.
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids] == texts
    for ids in completion_ids:
        assert 1 <= len(ids) <= 5 and all(i not in (END, EOS) for i in ids[:-1])
        assert len(ids) == 5 or ids[-1] in (END, EOS)
    assert any(ids[-1] == EOS for ids in completion_ids)


@pytest.mark.parametrize("gives, said", [
    (lambda n: [0.0] * (n - 1), "4"), (lambda n: [0.0] * (n + 1), "4"), (lambda n: None, "None"),
    (lambda n: torch.zeros(n), "tensor"), (lambda n: 1.0, "1.0"), (lambda n: "0000", "0000"),
    (lambda n: [0.0, math.nan, 0.0, 0.0], "nan at place 1"),
    (lambda n: [0.0, 0.0, 0.0, -math.inf], "-inf at place 3"),
    (lambda n: [0.0, 0.0, None, 0.0], "None at place 2"),
    (lambda n: ["1.0", 0.0, 0.0, 0.0], "'1.0' at place 0"),
    (lambda n: [0.0, 0.0, [1.0], 0.0], "at place 2"), (lambda n: 1 / 0, "ZeroDivisionError")])
def test_bad_rewards_are_refused_with_the_place_and_the_name(gives, said):
    rollout = ragged(tiny_model(), (2, 3), 2)

    def my_reward(completions, **_):
        return gives(len(completions))

    with pytest.raises(ValueError, match="my_reward") as error:
        score_rewards(my_reward, [{"prompt": "w1"}, {"prompt": "w2"}], rollout, 2)
    assert said in str(error.value)


def test_good_rewards_of_every_kind_are_taken():
    rollout = ragged(tiny_model(), (2, 3), 2)
    rows = [{"prompt": "w1"}, {"prompt": "w2"}]
    for rewards in ([1, 0, True, False], (1.0, 0.0, 1.0, 0.0)):
        got = score_rewards(lambda **_: rewards, rows, rollout, 2)
        assert got.tolist() == [[1, 0], [1, 0]] and got.dtype == torch.float64


@pytest.mark.parametrize("extra", [
    {"loss_type": "grpo"}, {"loss_type": "dapo", "epsilon_high": 0.28}, {"num_iterations": 3},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 1},
    {"scale_rewards": "rloo", "beta": 0.0}, {"scale_rewards": "batch", "num_mini_batches": 2},
    {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}])
def test_a_rewarded_token_is_learned(extra):
    """The smallest real run: five of the 60 tokens are worth 1, all the others nothing."""
    model, tokenizer = tiny_model(initializer_range=0.1), tiny_tokenizer()
    config = small(steps=14, learning_rate=3e-2, num_generations=16, prompts_per_step=2,
                   temperature=1.0, **{"max_completion_length": 1, "beta": 0.001, **extra})

    def reward(completions, **_):
        return [float(text.endswith("0")) for text in completions]

    rows = [{"prompt": prompt} for prompt in PROMPTS]
    scores = [m["reward_mean"] for m in train(model, tokenizer, rows, reward, config)]
    assert scores[0] < 0.4 and sum(scores[-3:]) / 3 > 0.9


# ------------------------------------------------------------------------------------------------
# The relatives
# ------------------------------------------------------------------------------------------------


def test_rloo_is_dr_grpo_times_a_constant():
    """Leave-one-out baseline, written out; flat groups are exactly zero in each of the scales."""
    rewards = torch.tensor([[1.5, 0.5, 0.0, 0.5], [0.1 + 0.2, 0.3, 0.3, 0.3],
                            [2.0, -1.0, 0.25, 1.0]], dtype=torch.float64)
    slow = [[r - sum(group[:i] + group[i + 1 :]) / 3 for i, r in enumerate(group)]
            for group in rewards.tolist()]
    slow[1] = [0.0] * 4
    rloo, none = group_scale(rewards, "rloo"), group_scale(rewards, "none")
    torch.testing.assert_close(rloo, torch.tensor(slow, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(rloo, none * 4 / 3, atol=1e-12, rtol=0)
    torch.testing.assert_close(none, group_advantages(rewards, scale_rewards=False))
    assert torch.equal(group_scale(rewards, "group"), group_advantages(rewards))
    flat = rewards.flatten().tolist()
    mean = sum(flat) / 12
    std = (sum((r - mean) ** 2 for r in flat) / 12) ** 0.5
    torch.testing.assert_close(group_scale(rewards, "batch"), none / std, atol=1e-12, rtol=0)
    for scale in ("group", "none", "batch", "rloo"):
        assert (group_scale(rewards, scale)[1] == 0).all()
        assert (group_scale(torch.full((3, 4), 0.3), scale) == 0).all()
        with pytest.raises(ValueError):
            group_scale(torch.tensor([[1.0], [2.0]]), scale)


@pytest.mark.parametrize("scale, wanted", [
    ("group", [1.0, -1.0, 1.0, -1.0]), (True, [1.0, -1.0, 1.0, -1.0]),
    ("none", [0.5, -0.5, 2.0, -2.0]), (False, [0.5, -0.5, 2.0, -2.0]),
    ("rloo", [1.0, -1.0, 4.0, -4.0]),
    ("batch", [x / 2.6875**0.5 for x in (0.5, -0.5, 2.0, -2.0)])])
def test_each_scale_reaches_the_step(scale, wanted):
    """Rewards 1, 0 and 4, 0: means 0.5 and 2, stds 0.5 and 2, and 2.6875 the variance of all."""
    learner, _ = step_with_rewards([[1.0, 0.0], [4.0, 0.0]], scale_rewards=scale)
    assert sum((r - 1.25) ** 2 for r in (1, 0, 4, 0)) / 4 == 2.6875
    assert learner.last[3].flatten().tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_on_policy_without_kl_the_gradient_is_reinforce(loss_type):
    """With weights that say how the tokens are averaged: -sum w A log pi."""
    logprobs, _, _, advantages, mask, _ = random_tokens()
    lengths = mask.sum(dim=1, keepdim=True)
    weight = mask.double() / {"grpo": lengths * 6, "dapo": lengths.sum(), "dr_grpo": 42}[loss_type]
    fast, plain = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    grpo_loss(fast, logprobs, None, advantages, mask, beta=0.0, loss_type=loss_type,
              max_completion_length=7)[0].backward()
    (-weight * advantages.unsqueeze(1) * plain).sum().backward()
    torch.testing.assert_close(fast.grad, plain.grad, atol=1e-14, rtol=0)


@pytest.mark.parametrize("level", ["sequence", "sequence_sum"])
def test_one_ratio_for_a_whole_answer(level):
    """All tokens of an answer share it: for "sequence" the geometric mean, or else the product."""
    logprobs, old, _, _, mask, _ = random_tokens()
    policy = answer_level(logprobs, old, mask, level)
    for i in range(len(mask)):
        ratios = (logprobs[i] - old[i]).exp()[mask[i]].tolist()
        whole = math.prod(ratios) ** (1 / len(ratios) if level == "sequence" else 1)
        shared = [whole] * mask.shape[1]
        assert (policy - old).exp()[i].tolist() == pytest.approx(shared, rel=1e-12)
    # The clip then takes the gradient of all tokens of an answer at once, or of none.
    logprobs.requires_grad_()
    policy = answer_level(logprobs, old, mask, level)
    surrogate = clipped_surrogate(policy, old, torch.tensor([1, -1] * 3), 0.01)
    surrogate[mask].sum().backward()
    taken = logprobs.grad == 0
    assert all(len(set(row[real].tolist())) == 1 for row, real in zip(taken, mask))
    assert taken[mask].any() and not taken[mask].all()


def two_policies(apart=1.0):
    """Logits of two policies over seven tokens; the first can be differentiated."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(7, generator=generator, dtype=torch.float64)
    ref = theta + apart * torch.randn(7, generator=generator, dtype=torch.float64)
    return theta.requires_grad_(), ref.log_softmax(0)


def test_kl_estimators_bias_and_variance_by_exact_summation():
    """Sum over all tokens with their probabilities: no sampling, so exact."""
    for apart in (0.1, 1.0, 2.0):
        theta, ref = two_policies(apart)
        logprobs = theta.detach().log_softmax(0)
        p = logprobs.exp()
        kl = (p * (logprobs - ref)).sum().item()
        mean, variance = {}, {}
        for name in ("kl", "abs", "mse", "low_var_kl"):
            values = kl_estimate(logprobs.view(1, -1), ref.view(1, -1), name).squeeze(0)
            mean[name] = (p * values).sum().item()
            variance[name] = (p * (values - mean[name]) ** 2).sum().item()
        assert mean["kl"] == pytest.approx(kl, abs=1e-12)  # without bias, both of them
        assert mean["low_var_kl"] == pytest.approx(kl, abs=1e-12)
        assert mean["abs"] > 1.2 * kl and abs(mean["mse"] - kl) > 0.01 * kl  # with bias
        assert variance["low_var_kl"] < variance["kl"]
        if apart == 0.1:  # k2's is small where the policies are close
            assert mean["mse"] == pytest.approx(kl, rel=0.1)
            assert variance["low_var_kl"] < 0.02 * variance["kl"]


@pytest.mark.parametrize("name, correct, wanted", [
    ("kl", False, "nothing"), ("kl", True, "reverse"), ("mse", False, "reverse"),
    ("low_var_kl", False, "forward"), ("low_var_kl", True, "reverse")])
def test_expected_gradients_of_the_kl_penalty(name, correct, wanted):
    """On-policy, through grpo_loss, one token of a vocabulary of seven: k1 pulls at nothing (trap
    17), k3 pulls along KL(ref || pi), k2 and TRL's corrected k3 along KL(pi || ref)."""
    theta, ref = two_policies()
    logprobs = theta.log_softmax(0)
    tokens = logprobs.detach().view(-1, 1).requires_grad_()
    loss, _ = grpo_loss(tokens, tokens.detach(), ref.view(-1, 1), torch.zeros(7), torch.ones(7, 1),
                        beta=1.0, kl_penalty_type=name, use_bias_correction_kl=correct)
    loss.backward()
    pull = tokens.grad.squeeze(1) * 7  # of each token, were it drawn
    (expected,) = torch.autograd.grad((logprobs.exp().detach() * pull * logprobs).sum(), theta,
                                      retain_graph=True)
    kl = {"reverse": (logprobs.exp() * (logprobs - ref)).sum(), "nothing": 0 * logprobs.sum(),
          "forward": (ref.exp() * (ref - logprobs)).sum()}[wanted]
    torch.testing.assert_close(expected, torch.autograd.grad(kl, theta)[0], atol=1e-12, rtol=0)


def test_kl_estimates_stay_finite():
    for name in ("kl", "abs", "mse", "low_var_kl"):
        for gap in (0.0, 50.0, -1000.0, 1e30, -3e38):
            logprobs = torch.full((1, 1), gap, requires_grad=True)
            value = kl_estimate(logprobs, torch.zeros(1, 1), name)
            value.sum().backward()
            assert value.isfinite().all() and logprobs.grad.isfinite().all(), (name, gap)


def test_overlong_penalty_is_the_papers():
    """DAPO, equation 13: 0 up to L_max - L_cache, -1 beyond L_max, a line in between."""
    cap, buffer = 20, 8
    lengths = torch.arange(1, 24)
    slow = [0.0 if n <= cap - buffer else -1.0 if n > cap else (cap - buffer - n) / buffer
            for n in lengths.tolist()]
    assert overlong_penalty(lengths, cap, buffer).tolist() == pytest.approx(slow)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_entropy_bonus_pulls_along_the_entropy(loss_type):
    """With advantages of 0 nothing else is left."""
    config = small(loss_type=loss_type, beta=0.0, entropy_bonus=0.25, num_generations=2,
                   max_grad_norm=1e9, learning_rate=0.0)
    learner, rollout, advantages, _ = world(config)
    mask = rollout.completion_mask
    entropy = slow_logprobs(learner.model, rollout.input_ids, rollout.attention_mask,
                            mask.shape[1], 0.8)[1]
    learner.model.zero_grad()
    mean = {"grpo": ((entropy * mask).sum(1) / mask.sum(1)).mean(), "dapo": entropy[mask].mean(),
            "dr_grpo": (entropy * mask).sum() / 8 / 9}[loss_type]
    (-0.25 * mean).backward()
    wanted = grads_of(learner.model)
    update(learner, rollout, advantages * 0, None, config)
    assert close(grads_of(learner.model), wanted, 1e-10) and wanted.norm() > 1e-3


def reward_by_ids(flat_for=()):
    """A reward that can be recomputed from the ids, and is flat for some of the questions."""

    def reward(prompts, completions, completion_ids, **columns):
        return [0.0 if prompt in flat_for else (7 * sum(ids) % 11) / 10
                for prompt, ids in zip(prompts, completion_ids)]

    return reward


def test_dynamic_sampling_replaces_flat_groups_and_keeps_rows_aligned(monkeypatch):
    config = small(dynamic_sampling=20, num_generations=3, max_completion_length=6)
    tokenizer, learner = tiny_tokenizer(), make_learner(tiny_model(), config)
    prompts = "w1, w2 w3 w4 w5 w6, w7 w8, w9, w10 w11 w12, w13, w14 w15 w16 w17, w18".split(", ")
    dataset = [{"prompt": p, "flat": i % 2} for i, p in enumerate(prompts)]
    reward = reward_by_ids([row["prompt"] for row in dataset if row["flat"]])
    captured, real = [], grpo.update
    monkeypatch.setattr(grpo, "update", lambda *args: captured.append(args) or real(*args))
    torch.manual_seed(4)
    stream = question_stream(dataset, 1)
    metrics = train_step(learner, tokenizer, stream, reward, config)
    rows, sampled, rewards, advantages = learner.last
    texts = sampled.texts
    rollout = captured[0][1]
    T = rollout.completion_mask.shape[1]
    assert metrics["zero_variance_fraction"] == 0 and not any(row["flat"] for row in rows)
    assert metrics["questions_seen"] == learner.questions_seen > 4
    # The stream stands exactly where the count says.
    following = next(question_stream(dataset, 1, learner.questions_seen))
    assert next(stream) == following
    assert len(rows) == 4 and rewards.shape == advantages.shape == (4, 3)
    assert len(texts) == len(rollout.input_ids) == 12 and rollout.texts == texts
    for i, (ids, real_mask, mask) in enumerate(
            zip(rollout.input_ids, rollout.attention_mask.bool(), rollout.completion_mask)):
        prompt, answer = ids[:-T][real_mask[:-T]].tolist(), ids[-T:][mask]
        assert torch.equal(real_mask[-T:], mask)
        assert prompt == tokenizer(rows[i // 3]["prompt"])["input_ids"]
        assert tokenizer.decode(answer, skip_special_tokens=True) == texts[i]
        wanted = reward([rows[i // 3]["prompt"]], [texts[i]], [answer.tolist()])
        assert rewards[i // 3, i % 3].item() == pytest.approx(wanted[0])
        assert rollout.truncated[i] == (answer[-1].item() not in (END, EOS))
    torch.testing.assert_close(advantages, group_advantages(rewards))
    torch.testing.assert_close(captured[0][2].double(), advantages.flatten(), atol=1e-6, rtol=0)
    assert metrics["sampler_gap"] < 1e-5 and metrics["ratio_max"] == pytest.approx(1)


def test_dynamic_sampling_is_bounded_and_off_by_default():
    for tries, asked in ((0, 4), (3, 16)):
        config = small(dynamic_sampling=tries, max_completion_length=2)
        learner = make_learner(tiny_model(), config)
        questions = question_stream([{"prompt": "w1"}, {"prompt": "w2"}], 0)
        flat = reward_by_ids(["w1", "w2"])
        metrics = train_step(learner, tiny_tokenizer(), questions, flat, config)
        assert metrics["questions_seen"] == asked and metrics["zero_variance_fraction"] == 1
    assert GRPOConfig().dynamic_sampling == 0


def test_dynamic_sampling_leaves_good_batches_alone():
    config = small(dynamic_sampling=5, prompts_per_step=1, num_generations=6)
    learner = make_learner(tiny_model(), config)
    questions = question_stream([{"prompt": "w1"}], 0)
    train_step(learner, tiny_tokenizer(), questions, reward_by_ids(), config)
    assert learner.questions_seen == 1


def test_join_pads_prompts_on_the_left_and_answers_on_the_right():
    model = tiny_model()
    a, b = ragged(model, (3, 5), 2, longest=4), ragged(model, (8, 1), 2, seed=1, longest=9)
    b.truncated = ~b.truncated
    for first, second in ((a, b), (b, a)):
        keep = [6, 7, 0, 1, 4, 5]
        both = join(first, second, keep)
        assert both.completion_mask.shape == (6, 9) and both.input_ids.shape == (6, 17)
        for i, row in enumerate(keep):
            source, j = (first, row) if row < 4 else (second, row - 4)
            mask, old = both.completion_mask[i], source.completion_mask[j]
            assert torch.equal(both.input_ids[i][both.attention_mask[i].bool()],
                               source.input_ids[j][source.attention_mask[j].bool()])
            assert torch.equal(both.logprobs[i][mask], source.logprobs[j][old])
            assert mask.tolist() == sorted(mask.tolist(), reverse=True) and mask.sum() == old.sum()
            assert torch.equal(both.attention_mask[i, -9:].bool(), mask)
            assert both.texts[i] == source.texts[j] and both.truncated[i] == source.truncated[j]
        T = both.completion_mask.shape[1]
        scored = token_logprobs(model, both.input_ids, both.attention_mask, T, num_generations=2)
        torch.testing.assert_close(scored, both.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("settings", [
    *[{name: value} for value in (0, -1) for name in (
        "num_generations", "prompts_per_step", "max_completion_length", "steps", "num_iterations",
        "num_mini_batches")],
    *[{name: value} for value in (-0.1, math.nan, math.inf) for name in (
        "temperature", "learning_rate", "beta", "epsilon", "epsilon_high", "max_grad_norm",
        "entropy_bonus")],
    *[{name: -1} for name in ("warmup_steps", "dynamic_sampling", "save_steps")],
    {"num_generations": 1}, {"temperature": 0}, {"loss_type": "bnpo"}, {"scale_rewards": "std"},
    {"scale_rewards": None}, {"importance_sampling_level": "token_sum"}, {"kl_penalty_type": "k3"},
    {"lr_scheduler_type": "polynomial"}, {"num_mini_batches": 33},
    {"beta": 0.0, "use_bias_correction_kl": True}])
def test_config_refuses_the_impossible(settings):
    with pytest.raises(ValueError, match=list(settings)[0]):
        GRPOConfig(**settings)


def test_config_has_the_documents_values_and_trls_names():
    config = GRPOConfig()
    assert (config.epsilon, config.beta, config.num_generations) == (0.2, 0.04, 8)
    assert (config.loss_type, config.scale_rewards, config.num_iterations) == ("grpo", "group", 1)
    assert (config.epsilon_high, config.importance_sampling_level) == (None, "token")
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"
    assert GRPOConfig(epsilon=1.5, epsilon_high=0.0, beta=0, learning_rate=0, num_mini_batches=32)


def test_ppo_for_contrast_in_slow_arithmetic():
    """The TD residual; and GAE, R - V with gamma = lambda = 1 and one reward, at the end."""
    assert 1 + 0.99 * 5.5 - 5 == pytest.approx(1.445)

    def gae(rewards, values, gamma, lam):
        advantages, following = [], 0.0
        for t in reversed(range(len(rewards))):
            after = values[t + 1] if t + 1 < len(values) else 0.0
            following = rewards[t] + gamma * after - values[t] + gamma * lam * following
            advantages.insert(0, following)
        return advantages

    values = [0.3, 0.9, 0.1, 0.6]
    assert gae([0, 0, 0, 1.5], values, 1, 1) == pytest.approx([1.5 - v for v in values])
    # With the group's mean as every V_t that is GRPO's advantage without the std.
    rewards = [1.5, 0.5, 0.0, 0.5]
    mean = sum(rewards) / 4
    ours = group_advantages(torch.tensor(rewards), scale_rewards=False).tolist()
    assert [gae([0, 0, r], [mean] * 3, 1, 1)[1] for r in rewards] == pytest.approx(ours)
    assert gae([0, 0, 1.5], [mean] * 3, 0.99, 0.95)[0] != pytest.approx(1.5 - mean)


# ------------------------------------------------------------------------------------------------
# Parity with TRL 1.16
# ------------------------------------------------------------------------------------------------

PARITY = [{"loss_type": loss_type, **extra} for loss_type in LOSSES for extra in (
    {"beta": 0.0}, {"beta": 0.0, "epsilon_high": 0.28}, {"beta": 0.04},
    {"beta": 0.3, "use_bias_correction_kl": True},
    {"beta": 0.0, "importance_sampling_level": "sequence"},
    {"beta": 0.3, "importance_sampling_level": "sequence", "use_bias_correction_kl": True},
    {"beta": 0.04, "truncated": [1, 4]})]
# TRL's entropy bonus is a mean over tokens whatever the loss_type is; so only "dapo" can agree.
PARITY += [{"loss_type": "dapo", "beta": 0.0, "entropy_bonus": 0.1}]


def our_loss_and_gradient(case, seed=0):
    logprobs, old, ref, advantages, mask, entropies = random_tokens(seed=seed)
    settings = {name: value for name, value in case.items() if name != "truncated"}
    mask[case.get("truncated", [])] = False
    logprobs.requires_grad_()
    loss, _ = grpo_loss(logprobs, old, ref if case["beta"] else None, advantages, mask,
                        entropies=entropies, max_completion_length=7, **settings)
    return loss.item(), torch.autograd.grad(loss, logprobs)[0]


def trl_loss_and_gradient(case, seed=0):
    """TRL's own GRPOTrainer._compute_loss, on a trainer that has just what the method looks at."""
    from trl import GRPOTrainer
    logprobs, old, ref, advantages, mask, entropies = random_tokens(seed=seed)
    mask[case.get("truncated", [])] = False  # done before the loss, by zeroing the mask
    logprobs.requires_grad_()
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, sync_gradients=True,
                                          reduce=lambda x, reduction: x),
        args=types.SimpleNamespace(
            use_bias_correction_kl=case.get("use_bias_correction_kl", False), delta=None,
            steps_per_generation=1),
        importance_sampling_level=case.get("importance_sampling_level", "token"),
        beta=case["beta"], loss_type=case["loss_type"], epsilon_low=0.2,
        epsilon_high=case.get("epsilon_high", 0.2), max_completion_length=7,
        entropy_coef=case.get("entropy_bonus", 0.0),
        _entropy_bonus_enabled="entropy_bonus" in case, use_adaptive_entropy=False,
        aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)))
    ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = dict(prompt_ids=ids[:, :1], prompt_mask=ids[:, :1] + 1, completion_ids=ids,
                  completion_mask=mask.long(), advantages=advantages, old_per_token_logps=old,
                  ref_per_token_logps=ref, num_items_in_batch=mask.sum())
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.item(), torch.autograd.grad(loss, logprobs)[0]


def test_loss_and_gradient_are_trls_live():
    trl = pytest.importorskip("trl", reason="TRL 1.16 is not installed: see its figures below")
    version = getattr(trl, "__version__", "none")
    if not version.startswith("1.16."):
        pytest.skip(f"the parity is with TRL 1.16, and this is {version}")
    for case, seed in itertools.product(PARITY, range(5)):
        (ours, our_gradient), (theirs, their_gradient) = (
            f(case, seed) for f in (our_loss_and_gradient, trl_loss_and_gradient))
        assert ours == pytest.approx(theirs, abs=1e-12)
        torch.testing.assert_close(our_gradient, their_gradient, atol=1e-12, rtol=0)


# What TRL 1.16.0 gave (torch 2.13, float64) for random_tokens(seed=0): the loss, and the gradient
# summed over the tokens of each of the six answers.
TRL_1_16 = [
    [-0.31684538323329, -0.14955864314469, 0.069162277932329, 0.1443563231434,
     -0.043616688057947, -0.20968509121771, 0.0062610278811846],
    [-0.33009485345654, -0.14955864314469, 0.069162277932329, 0.1443563231434,
     -0.043616688057947, -0.20968509121771, 0.0062610278811846],
    [-0.29814860818534, -0.15202018856399, 0.072049964852397, 0.14343214984829,
     -0.044055496135732, -0.21811455194546, 0.0048930604750778],
    [-0.18048468155907, -0.15019437179561, 0.097980235434067, 0.14753559096399,
     -0.04547392295528, -0.1934319533532, 0.023030670729002],
    [-0.34748190745479, -0.21071888783901, 0.069162277932329, 0.19714594464997,
     -0.043616688057947, -0.36813644473724, 0.0086818905971041],
    [-0.20959270771194, -0.20505248482398, 0.097980235434067, 0.20101239249806,
     -0.04547392295528, -0.35989217746014, 0.024589610338499],
    [-0.019383802799715, -0.15202018856399, 0, 0.14343214984829,
     -0.044055496135732, 0, 0.0048930604750778],
    [-0.46091872918811, -0.24926440524115, 0.02305409264411, 0.1443563231434,
     -0.014538896019316, -0.20968509121771, 0.010435046468641],
    [-0.47639326546385, -0.24926440524115, 0.02305409264411, 0.1443563231434,
     -0.014538896019316, -0.20968509121771, 0.010435046468641],
    [-0.43835371688571, -0.25336698093998, 0.024016654950799, 0.14343214984829,
     -0.014685165378577, -0.21811455194546, 0.0081551007917964],
    [-0.29530644026468, -0.25032395299268, 0.032660078478022, 0.14753559096399,
     -0.015157974318427, -0.1934319533532, 0.038384451215003],
    [-0.49920363219898, -0.35119814639835, 0.02305409264411, 0.19714594464997,
     -0.014538896019316, -0.36813644473724, 0.01446981766184],
    [-0.33229822167903, -0.34175414137331, 0.032660078478022, 0.20101239249806,
     -0.015157974318427, -0.35989217746014, 0.040982683897498],
    [-0.14513514580392, -0.32575754692283, 0, 0.18441276409066,
     -0.018880926915314, 0, 0.010485129589453],
    [-0.19753659822348, -0.10682760224621, 0.0098803254189041, 0.061866995632884,
     -0.0062309554368495, -0.089865039093305, 0.0044721627722747],
    [-0.20416854234165, -0.10682760224621, 0.0098803254189041, 0.061866995632884,
     -0.0062309554368495, -0.089865039093305, 0.0044721627722747],
    [-0.18786587866531, -0.10858584897428, 0.010292852121771, 0.061470921363553,
     -0.0062936423051046, -0.093477665119482, 0.0034950431964842],
    [-0.12655990297058, -0.10728169413972, 0.013997176490581, 0.063229538984569,
     -0.0064962747078972, -0.082899408579941, 0.016450479092144],
    [-0.21394441379956, -0.15051349131358, 0.0098803254189041, 0.084491119135702,
     -0.0062309554368495, -0.15777276203024, 0.006201350426503],
    [-0.14241352357673, -0.14646606058856, 0.013997176490581, 0.086148168213455,
     -0.0064962747078972, -0.15423950462578, 0.017564007384642],
    [-0.048378381934642, -0.10858584897428, 0, 0.061470921363553,
     -0.0062936423051046, 0, 0.0034950431964842],
    [-0.61638274980888, -0.24926440524115, 0.02305409264411, 0.1443563231434,
     -0.014538896019316, -0.20968509121771, 0.010435046468641],
]


@pytest.mark.parametrize("case, figures", list(zip(PARITY, TRL_1_16)))
def test_loss_and_gradient_are_trls_figures(case, figures):
    loss, gradient = our_loss_and_gradient(case)
    assert [loss, *gradient.sum(dim=1).tolist()] == pytest.approx(figures, abs=1e-12, rel=0)


def test_there_is_a_figure_for_every_case():
    assert len(TRL_1_16) == len(PARITY) == 22


# ================================================================================================
# Part 3: the night
# ================================================================================================

torch.set_num_threads(1)  # sums in one order, in every process: bit for bit needs that

# --------------------------------------------------------------------------------------
# A tiny world: 39 words, one layer, a step in a few hundredths of a second
# --------------------------------------------------------------------------------------

END = 1
CLOCK = {"sample_seconds", "score_seconds", "update_seconds", "tokens_per_second"}
DATA = [{"prompt": " ".join("abcdefg"[i : i + 1 + i % 3]), "answer": "abc"[i % 3]}
        for i in range(7)]


def small_tokenizer():
    words = ["<pad>", "<end>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789"]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>",
                                   unk_token="<unk>", chat_template=template)


TOKENIZER = small_tokenizer()


def small_model(seed=0, end=None, dtype=torch.float32):
    """Random weights; `end` raises the end token's logit: 100 for empty answers, -100 for none
    that ends. Its vocabulary is larger than the tokenizer's, as Qwen's is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            initializer_range=0.3, tie_word_embeddings=False, eos_token_id=END, pad_token_id=0))
    if end is not None:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(48), requires_grad=False)
        model.lm_head.bias.data[END] = end
    return model.to(dtype)


def noisy_reward(prompts, completions, **columns):
    """Draws from each generator that a reward may draw from: a resumed run has to restore all. An
    odd number of normal ones, since these are made in pairs, and the other waits in the state."""
    noise = [random.gauss(0, 1) + np.random.randn() + torch.rand(()).item() for _ in [0, *prompts]]
    return [text.count("a") + x for text, x in zip(completions, noise)]


def coarse_reward(prompts, completions, **columns):
    """Many groups are flat under this one: dynamic sampling takes questions by ones and twos."""
    return [float("a" in text or "b" in text) for text in completions]


def tiny_config(**settings):
    plain = dict(steps=6, num_generations=4, prompts_per_step=2, max_completion_length=5,
                 learning_rate=0.01, warmup_steps=2, seed=3, beta=0.1)
    return GRPOConfig(**{**plain, **settings})


def go(folder=None, reward=noisy_reward, model=None, data=DATA, resume=False, stop=None, seeds=5,
       **settings):
    """A run; with `stop`, left alone after so many steps and before the last one's checkpoint, as
    a kill would. Gives (model, metrics)."""
    model = model or small_model()
    random.seed(seeds)
    np.random.seed(seeds)
    steps = training_steps(model, TOKENIZER, data, reward, tiny_config(**settings), folder, resume)
    metrics = [untimed(step_metrics) for step_metrics, _ in itertools.islice(steps, stop)]
    steps.close()
    return model, metrics


def untimed(metrics):
    return {name: x for name, x in metrics.items() if name not in CLOCK}


def logged(folder):
    """metrics.jsonl, which must be JSON in the strict sense: no NaN, no Infinity."""
    def refuse(name):
        raise AssertionError(f"{name} in metrics.jsonl")
    return [untimed(json.loads(line, parse_constant=refuse))
            for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def result(folder):
    """Everything that a run leaves: weights, Adam's averages, place in the data, generators and
    settings are all in the checkpoint's bytes."""
    return (Path(folder) / "checkpoint.safetensors").read_bytes(), logged(folder)


def saved_step(folder):
    data = (Path(folder) / "checkpoint.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return json.loads(header["__metadata__"]["json"])[0]


def bits(model):
    """The weights' bits: NaN equals NaN, and 0 is not -0."""
    return [p.detach().clone().view(torch.int32).tolist() for p in model.parameters()]


# --------------------------------------------------------------------------------------
# Checkpoint and resume
# --------------------------------------------------------------------------------------

SEVERAL = dict(num_iterations=2, num_mini_batches=2, steps=8)


@pytest.mark.parametrize("settings", [
    dict(save_steps=2, **SEVERAL),
    dict(save_steps=3, steps=8, beta=0, reward=coarse_reward, dynamic_sampling=2,
         num_generations=2, lr_scheduler_type="cosine"),
])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, settings):
    model, metrics = go(tmp_path / "whole", **settings)
    go(tmp_path / "cut", stop=5, **settings)  # the checkpoint is of step 4 or 3
    with open(tmp_path / "cut" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "los')  # killed in the middle of a line
    # Other seeds: what the reward draws must come from the checkpoint.
    resumed, rest = go(tmp_path / "cut", resume=True, seeds=99, **settings)
    assert [m["step"] for m in rest] == list(range(9 - len(rest), 9)) and len(rest) in (4, 5)
    assert bits(resumed) == bits(model)
    assert logged(tmp_path / "cut") == metrics  # each step once
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    # One checkpoint is kept: the old ones are gone, and so is what they were written to.
    assert {"checkpoint.safetensors", "metrics.jsonl"} == set(os.listdir(tmp_path / "cut"))


def test_what_is_saved_is_the_model_and_where_it_stands(tmp_path):
    model, metrics = go(tmp_path, save_steps=4)  # and at the end, after step 6
    assert saved_step(tmp_path) == 6 and metrics[-1]["questions_seen"] == 12
    tensors = grpo.load_file(tmp_path / "checkpoint.safetensors").values()
    assert all(any(torch.equal(x, p) for x in tensors) for p in model.parameters())
    assert len(tensors) == 4 * len(list(model.parameters()))  # and Adam's count and two averages
    # A finished run has nothing left to do, and its metrics are still there.
    assert train(small_model(), TOKENIZER, DATA, noisy_reward, tiny_config(save_steps=4), tmp_path,
                 resume=True)[-1]["step"] == 6
    assert [m["step"] for m in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_save_steps_says_when(tmp_path):
    for save_steps, steps in ((0, None), (2, 4)):
        go(tmp_path / f"{save_steps}", stop=5, save_steps=save_steps)
        there = os.path.exists(tmp_path / f"{save_steps}" / "checkpoint.safetensors")
        assert steps == (saved_step(tmp_path / f"{save_steps}") if there else None)
    go(tmp_path / "none", save_steps=0)
    assert not os.path.exists(tmp_path / "none" / "checkpoint.safetensors")


def test_the_learning_rate_warms_up_and_falls_and_a_resume_goes_on_with_it(tmp_path):
    rates = [0.005, 0.01, 0.008, 0.006, 0.004, 0.002]  # never 0: each step is to teach something
    first = go(tmp_path, stop=4, save_steps=3)[1]
    assert [m["learning_rate"] for m in first] == pytest.approx(rates[:4])
    rest = go(tmp_path, resume=True, save_steps=3)[1]
    assert [m["learning_rate"] for m in rest] == pytest.approx(rates[3:])


def test_after_a_resume_the_reference_is_the_initial_model_not_the_saved_one(tmp_path):
    go(tmp_path, stop=4, save_steps=1)
    model = small_model()
    steps = training_steps(model, TOKENIZER, DATA, noisy_reward, tiny_config(save_steps=1),
                           tmp_path, resume=True)
    _, learner = next(steps)
    assert bits(learner.reference) == bits(small_model()) != bits(model)


def bf16_learner():
    """On a GPU the model computes in bfloat16, and Adam moves float32 copies. Here, on the CPU."""
    model = small_model(dtype=torch.bfloat16)
    parameters = list(model.parameters())
    weights = [p.detach().float() for p in parameters]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return Learner(model, None, parameters, weights, torch.optim.AdamW(weights, lr=0.01), 64)


def one_update(learner, config):
    torch.manual_seed(0)
    rollout = sample_groups(learner.model, TOKENIZER, ["a", "b", "c", "d e"], 4,
                            max_completion_length=5)
    return update(learner, rollout, torch.tensor([1.0, -1, 1, -1] * 4), None, config)


def test_float32_master_weights_survive_the_checkpoint(tmp_path):
    first, second, path = bf16_learner(), bf16_learner(), str(tmp_path / "x.safetensors")
    one_update(first, tiny_config(beta=0))
    save_checkpoint(path, 7, first, 12, {"seed": 1})
    assert load_checkpoint(path, second, {"seed": 1}) == 7
    assert second.questions_seen == 12
    for parameter, weight, old in zip(second.parameters, second.weights, first.weights):
        assert torch.equal(weight, old) and weight.dtype == torch.float32
        assert torch.equal(parameter, weight.bfloat16())
        assert not torch.equal(parameter.float(), weight)
        ours, theirs = second.optimizer.state[weight], first.optimizer.state[old]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def campaign(folder, kills, seed):
    """SIGKILL a run again and again, each time further on and at a random moment, and then let it
    finish. In a process of its own that forks, so that the imports are paid for once only."""
    chance, log = random.Random(int(seed)), Path(folder, "metrics.jsonl")

    def reached():
        return log.read_text().count("\n") if log.exists() else 0

    for kill in range(1, int(kills) + 2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                go(folder, resume=True, save_steps=1, **SEVERAL)
                code = 0
            finally:
                os._exit(code)
        if kill <= int(kills):
            while reached() < 2 * kill:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
        print("ended with", os.waitpid(pid, 0)[1], "after step", reached(), flush=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_sigkill_at_random_moments(tmp_path):
    go(tmp_path / "whole", save_steps=1, **SEVERAL)
    folder = str(tmp_path / "killed")
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(grpo.__file__))}
    done = subprocess.run([sys.executable, __file__, "campaign", folder, "2", "1"], env=env,
                          text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    # Not one was too late, and the last run came to its end.
    assert re.findall("with ([0-9]+)", done.stdout) == ["9", "9", "0"], done.stdout
    assert result(folder) == result(tmp_path / "whole")


class Killed(BaseException):
    """Nothing in the code under test may catch this, as nothing can catch a SIGKILL."""


@pytest.mark.parametrize("moment", ["half written", "written, not renamed"])
def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path, monkeypatch, moment):
    go(tmp_path / "whole", save_steps=2)
    go(tmp_path / "cut", stop=3, save_steps=2)
    before, replace = (tmp_path / "cut" / "checkpoint.safetensors").read_bytes(), os.replace

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half a checkpoint")
        raise Killed

    def not_renamed(source, target):
        if str(target).endswith("checkpoint.safetensors"):
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(*((grpo, "save_file", half) if moment == "half written" else
                        (os, "replace", not_renamed)))
        with pytest.raises(Killed):
            go(tmp_path / "cut", resume=True, save_steps=2)
    assert "checkpoint.safetensors.new" in os.listdir(tmp_path / "cut")
    assert (tmp_path / "cut" / "checkpoint.safetensors").read_bytes() == before
    go(tmp_path / "cut", resume=True, save_steps=2)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")
    assert "checkpoint.safetensors.new" not in os.listdir(tmp_path / "cut")


def test_a_kill_while_resuming_loses_no_metrics(tmp_path, monkeypatch):
    go(tmp_path / "whole", save_steps=2)
    go(tmp_path / "cut", stop=5, save_steps=2)

    def killed_open(file, mode="r", *args, **kwargs):
        opened = open(file, mode, *args, **kwargs)
        if "metrics.jsonl" in str(file) and mode != "r":  # opened, perhaps emptied, not written
            opened.close()
            raise Killed
        return opened

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "open", killed_open, raising=False)
        with pytest.raises(Killed):
            go(tmp_path / "cut", resume=True, save_steps=2)
    go(tmp_path / "cut", resume=True, save_steps=2)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_a_full_disk_is_said_and_the_checkpoint_before_is_whole(tmp_path, monkeypatch):
    go(tmp_path / "whole", save_steps=2)
    go(tmp_path / "cut", stop=3, save_steps=2)
    before = (tmp_path / "cut" / "checkpoint.safetensors").read_bytes()

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half a checkpoint")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "save_file", full)
        with pytest.raises(OSError, match="step 4.*No space left on device") as error:
            go(tmp_path / "cut", resume=True, save_steps=2)
    assert "checkpoint.safetensors" in str(error.value)
    assert not [name for name in os.listdir(tmp_path / "cut") if name.endswith(".new")]
    assert (tmp_path / "cut" / "checkpoint.safetensors").read_bytes() == before
    go(tmp_path / "cut", resume=True, save_steps=2)  # room was made
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def interrupt_in(step, times):
    """noisy_reward, in whose call number `step` Ctrl-C is pressed."""
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(prompts)
        if len(calls) == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return noisy_reward(prompts, completions)
    return reward


@pytest.fixture
def own_handler():
    """A handler of the caller's; gives a function that says whether it is still in place."""
    def handler(*_):
        raise AssertionError("the caller's handler was called")
    old = signal.signal(signal.SIGINT, handler)
    yield lambda: signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, old)


def test_ctrl_c_finishes_the_step_saves_and_ends(tmp_path, own_handler, capsys):
    go(tmp_path / "whole")
    _, metrics = go(tmp_path / "cut", reward=interrupt_in(3, times=1))
    assert [m["step"] for m in metrics] == [1, 2, 3] and saved_step(tmp_path / "cut") == 3
    assert own_handler() and "interrupted" in capsys.readouterr().out
    go(tmp_path / "cut", resume=True, seeds=99)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_ctrl_c_twice_stops_at_once(tmp_path, own_handler):
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, reward=interrupt_in(3, times=2), save_steps=1)
    assert own_handler() and [m["step"] for m in logged(tmp_path)] == [1, 2]
    assert saved_step(tmp_path) == 2


def test_the_signal_handler_comes_back_however_a_run_ends(own_handler):
    go(stop=1)  # left alone
    assert own_handler()
    with pytest.raises(ValueError):
        go(reward=lambda **columns: None)
    assert own_handler()
    go(steps=1)
    assert own_handler()


def test_a_run_in_another_thread(own_handler):
    """Only the main thread may set signal handlers; elsewhere there is no Ctrl-C to catch."""
    runs = []
    thread = threading.Thread(target=lambda: runs.append(go(steps=2)))
    thread.start()
    thread.join()
    assert runs[0][1] == go(steps=2)[1] and own_handler()


@pytest.mark.parametrize("named, change", [
    ("learning_rate 0.01.* 0.02", dict(learning_rate=0.02)), ("seed 3.* 4", dict(seed=4)),
    ("num_iterations 1.* 2", dict(num_iterations=2)), ("steps 6.* 7", dict(steps=7)),
    ("epsilon_high None.* 0.3", dict(epsilon_high=0.3)),
    ("model", dict(model=1)), ("rows 7.* 5|data", dict(data=DATA[:5])),
    ("rows|data", dict(data=[{"prompt": "x", "answer": row["answer"]} for row in DATA])),
])
def test_a_checkpoint_of_another_run_is_refused_with_the_difference_named(tmp_path, named, change):
    go(tmp_path, stop=3, save_steps=1)
    before = result(tmp_path)
    if "model" in change:
        change = dict(model=small_model(seed=1))
    with pytest.raises(ValueError) as error:
        go(tmp_path, resume=True, **{"save_steps": 1, **change})
    # The folder is taken out: pytest puts the test's name, settings included, into it.
    assert re.search(named, str(error.value).replace(str(tmp_path), "")), str(error.value)
    assert result(tmp_path) == before


def test_a_run_is_not_overwritten(tmp_path):
    go(tmp_path, stop=3, save_steps=1)
    before = result(tmp_path)
    with pytest.raises(ValueError, match="resume"):
        go(tmp_path, save_steps=1)
    assert result(tmp_path) == before
    os.remove(tmp_path / "metrics.jsonl")  # a checkpoint alone is a run too
    with pytest.raises(ValueError, match="resume"):
        go(tmp_path, save_steps=1)


def test_resume_without_a_folder_is_refused_before_anything_is_trained():
    model = small_model()
    with pytest.raises(ValueError, match="output_dir"):
        train(model, TOKENIZER, DATA, noisy_reward, tiny_config(), resume=True)
    assert bits(model) == bits(small_model())


def test_the_order_of_the_questions_is_the_seeds_and_can_be_entered_anywhere():
    data = list("abcdefg")
    first = list(itertools.islice(question_stream(data, 3), 21))
    for epoch in (first[:7], first[7:14], first[14:]):
        assert sorted(epoch) == data  # none twice before all have been seen
    assert len({tuple(first[i : i + 7]) for i in (0, 7, 14)}) == 3  # shuffled anew
    for seen in range(15):
        assert list(itertools.islice(question_stream(data, 3, seen), 6)) == first[seen : seen + 6]
    assert list(itertools.islice(question_stream(data, 4), 7)) != first[:7]


# --------------------------------------------------------------------------------------
# Numbers that go wrong
# --------------------------------------------------------------------------------------


def test_nan_in_a_weight_takes_no_step_and_stops_the_run(tmp_path, capsys):
    def broken_model():
        model = small_model()
        model.lm_head.weight.data[5, 0] = math.nan
        return model

    model = broken_model()
    with pytest.raises(FloatingPointError, match="loss nan"):
        go(tmp_path, model=model, save_steps=1)
    assert capsys.readouterr().out.count("update skipped") == 3
    assert bits(model) == bits(broken_model())
    metrics = logged(tmp_path)
    assert [m["skipped_updates"] for m in metrics] == [1, 1] and saved_step(tmp_path) == 2
    # The checkpoint can be loaded, though Adam has nothing to remember yet; a hopeless run stops
    # again as it did.
    with pytest.raises(FloatingPointError):
        go(tmp_path, model=broken_model(), resume=True, save_steps=1)
    assert capsys.readouterr().out.count("update skipped") == 3


def test_nan_from_one_prompt_is_named(capsys):
    data = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "x"}, {"prompt": "d"}]
    model, x = small_model(end=0.0), TOKENIZER("x")["input_ids"][0]
    model.model.embed_tokens.weight.data[x] = math.nan
    model.lm_head.bias.data[x] = -100.0  # and no answer to another question has an x in it
    before = bits(model)
    _, (metrics,) = go(model=model, data=data, prompts_per_step=4, steps=1)
    said = capsys.readouterr().out
    assert re.search("loss nan.*'x'", said)
    assert bits(model) == before and metrics["skipped_updates"] == 1
    assert all(math.isfinite(x) for x in metrics.values())


def faulty(monkeypatch, fault, bad):
    """Inject `fault` into the updates whose numbers are in `bad`, counted from 1."""
    calls, clip, logprobs = [], torch.nn.utils.clip_grad_norm_, grpo.token_logprobs

    def clip_wrongly(weights, most):
        calls.append(1)
        norm = clip(weights, most)
        return torch.tensor(float(fault)) if len(calls) in bad else norm

    def score_wrongly(*args, **kwargs):
        found = logprobs(*args, **kwargs)
        if not torch.is_grad_enabled():  # the reference
            return found
        calls.append(1)
        return (found[0] * math.nan, found[1]) if len(calls) in bad else found

    if fault == "logprobs":
        monkeypatch.setattr(grpo, "token_logprobs", score_wrongly)
    else:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_wrongly)


@pytest.mark.parametrize("fault", ["inf", "nan", "logprobs"])
def test_two_failures_in_a_row_are_forgiven(monkeypatch, fault, capsys):
    faulty(monkeypatch, fault, {2, 3, 5, 6})
    model, taken = small_model(), [bits(small_model())]
    for metrics, learner in training_steps(model, TOKENIZER, DATA, noisy_reward, tiny_config()):
        taken.append(bits(model))
        assert all(math.isfinite(x) for x in metrics.values())
        skipped = metrics["step"] in (2, 3, 5, 6)
        assert metrics["skipped_updates"] == skipped and (taken[-1] == taken[-2]) == skipped
    assert learner.failed == 2 and capsys.readouterr().out.count("update skipped") == 4


@pytest.mark.parametrize("fault", ["inf", "nan", "logprobs"])
def test_three_failures_in_a_row_stop_the_run_at_a_checkpoint(tmp_path, monkeypatch, fault):
    with monkeypatch.context() as patch:
        faulty(patch, fault, {3, 4, 5})
        model = small_model()
        with pytest.raises(FloatingPointError):
            go(tmp_path, model=model)
    assert saved_step(tmp_path) == 4 and len(logged(tmp_path)) == 4
    assert bits(model) == bits(go(stop=2)[0])  # as it was before the first failure
    _, rest = go(tmp_path, resume=True)
    assert [m["step"] for m in logged(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [m["skipped_updates"] for m in rest] == [0, 0]


def test_logits_of_minus_infinity_are_allowed(tmp_path):
    """A way to forbid ids that the tokenizer does not know. No metric becomes NaN by it."""
    model = small_model(end=0)
    model.lm_head.bias.data[39:] = -math.inf
    go(tmp_path, model=model, steps=2)
    assert [m["skipped_updates"] for m in logged(tmp_path)] == [0, 0]


# --------------------------------------------------------------------------------------
# A reward that breaks its contract, and one that does not
# --------------------------------------------------------------------------------------


def with_place(value, place=3):
    return lambda n: [0.5] * place + [value] + [0.5] * (n - place - 1)


@pytest.mark.parametrize("give, words", [
    (lambda n: 1 / 0, ["ZeroDivisionError", "division by zero"]),
    (lambda n: {}["answr"], ["KeyError", "answr"]),
    (lambda n: None, ["None"]), (lambda n: 1.0, ["1.0", "8"]),
    (lambda n: [], ["[]", "8"]), (lambda n: [0.5] * 7, ["0.5, 0.5", "8"]),
    (lambda n: [0.5] * 9, ["0.5, 0.5", "8"]),
    (lambda n: "12345678", ["'12345678'", "8"]), (lambda n: torch.zeros(8), ["tensor", "8"]),
    (lambda n: np.zeros(8), ["array(", "8"]),
    (lambda n: dict.fromkeys(range(8), 1.0), ["{0: 1.0"]),
    (lambda n: (0.5 for _ in range(8)), ["generator"]), (lambda n: set(range(8)), ["{0, 1"]),
    (with_place(None), ["None", "place 3"]), (with_place(math.nan), ["nan", "place 3"]),
    (with_place(math.inf, 7), ["inf", "place 7"]), (with_place(-math.inf, 0), ["-inf", "place 0"]),
    (with_place("1.0"), ["'1.0'", "place 3"]), (with_place(1j), ["1j", "place 3"]),
    (with_place(torch.tensor(1.0)), ["tensor(1.)", "place 3"]),
    (with_place([1.0]), ["[1.0]", "place 3"]), (with_place(np.float32("nan")), ["nan", "place 3"]),
    (with_place(10**400), ["0000", "place 3"]), (with_place(1e300), ["1e+300", "place 3"]),
])
def test_a_broken_reward_is_named_with_place_and_value(give, words):
    def my_own_reward(prompts, completions, **columns):
        return give(len(completions))

    model = small_model()
    with pytest.raises(ValueError) as error:
        go(model=model, reward=my_own_reward, steps=2)
    for word in ["my_own_reward", *words]:
        assert word in str(error.value)
    assert bits(model) == bits(small_model())


def test_rewards_that_are_numbers_are_taken_whatever_their_type():
    rollout = sample_groups(small_model(), TOKENIZER, ["a", "b"], 4, max_completion_length=3)
    given = [True, False, 3, -2.5, np.float32(0.5), np.float64(0.25), np.int64(7), 0]
    wanted = [[1.0, 0.0, 3.0, -2.5], [0.5, 0.25, 7.0, 0.0]]
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    for kind in (list, tuple):
        seen = {}

        def reward(**columns):
            seen.update(columns)
            return kind(given)

        rewards = score_rewards(reward, rows, rollout, 4)
        assert rewards.dtype == torch.float64 and rewards.tolist() == wanted
        assert seen["prompts"] == ["a"] * 4 + ["b"] * 4 and seen["n"] == [1] * 4 + [2] * 4
        assert seen["completions"] == rollout.texts and len(seen["completion_ids"]) == 8
    # A function without a name of its own is named as Python would.
    with pytest.raises(ValueError, match=r"functools.partial\(.*wanted"):
        score_rewards(partial(lambda given, **columns: given, [1, 2]), rows, rollout, 4)


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_reward_that_breaks_stops_the_run_at_once_and_mended_goes_on_exactly(tmp_path, how):
    calls, settings = [], dict(save_steps=50, **SEVERAL)

    def breaks_in_step_5(prompts, completions, **columns):
        rewards = noisy_reward(prompts, completions)  # draws first: that has to be undone
        calls.append(1)
        if len(calls) == 5:
            rewards[2] = 1 / 0 if how == "raises" else math.nan
        return rewards

    go(tmp_path / "whole", **settings)
    with pytest.raises(ValueError, match="breaks_in_step_5"):
        go(tmp_path / "cut", reward=breaks_in_step_5, **settings)
    assert len(calls) == 5 and saved_step(tmp_path / "cut") == 4
    _, rest = go(tmp_path / "cut", resume=True, seeds=99, **settings)
    assert [m["step"] for m in rest] == [5, 6, 7, 8]
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


def test_a_reward_that_breaks_in_the_first_step_leaves_nothing_in_the_way(tmp_path):
    with pytest.raises(ValueError, match="TypeError"):
        go(tmp_path, reward=lambda completions: completions)
    assert not os.path.exists(tmp_path / "checkpoint.safetensors")  # nothing was learned
    go(tmp_path, resume=True)
    assert len(logged(tmp_path)) == 6


# --------------------------------------------------------------------------------------
# Degenerate steps: defined, and counted in the metrics
# --------------------------------------------------------------------------------------


def flat_reward(prompts, completions, **columns):
    return [0.1] * len(completions)


@pytest.mark.parametrize("beta", [0, 0.1])
def test_all_groups_flat(beta):
    model, metrics = go(reward=flat_reward, beta=beta, steps=3, num_iterations=2)
    for m in metrics:
        assert m["zero_variance_fraction"] == 1.0 and m["reward_std"] == 0.0
        assert m["loss"] == 0.0 and m["skipped_updates"] == 0
        assert all(math.isfinite(x) for x in m.values())
        assert (m["sampler_gap"] > 0) == (beta > 0)  # without a KL nothing had to be scored
    assert bits(model) == bits(small_model())  # no lesson, and no weight decay either


def test_flat_groups_are_pulled_back_by_the_kl():
    """A model that has moved away from its reference, and groups that teach nothing."""
    torch.manual_seed(0)
    config = tiny_config(beta=1.0, learning_rate=0.03)
    learner, noise = make_learner(small_model(), config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in learner.weights:
            weight.add_(0.3 * torch.randn(weight.shape, generator=noise))
    kls = [grpo.train_step(learner, TOKENIZER, question_stream(DATA, 0), flat_reward, config)["kl"]
           for _ in range(30)]
    assert sum(kls[-5:]) < sum(kls[:5]) / 2


@pytest.mark.parametrize("settings", [dict(), dict(beta=0), dict(loss_type="dapo"),
                                      dict(loss_type="dr_grpo", num_iterations=2)])
def test_every_answer_empty_or_cut_off_or_of_one_token(tmp_path, settings):
    cases = {"empty": (dict(model=small_model(end=100.0)), 1.0, 0.0),
             "cut": (dict(model=small_model(end=-100.0)), 5.0, 1.0),
             "one": (dict(model=small_model(end=-100.0), max_completion_length=1), 1.0, 1.0)}
    for name, (case, length, truncated) in cases.items():
        texts = []

        def reward(prompts, completions, **columns):
            texts.extend(completions)
            return noisy_reward(prompts, completions)

        go(tmp_path / name, reward=reward, steps=2, **case, **settings)
        for m in logged(tmp_path / name):
            assert (m["completion_length"], m["truncated_fraction"]) == (length, truncated)
            assert m["skipped_updates"] == 0 and all(math.isfinite(x) for x in m.values())
        assert name != "empty" or set(texts) == {""}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_every_answer_left_out_of_the_loss(loss_type):
    model, metrics = go(model=small_model(end=-100.0), mask_truncated_completions=True, steps=2,
                        loss_type=loss_type)
    assert [m["loss"] for m in metrics] == [m["grad_norm"] for m in metrics] == [0.0, 0.0]
    assert all(math.isfinite(x) for m in metrics for x in m.values())
    assert bits(model) == bits(small_model(end=-100.0))


@pytest.mark.parametrize("settings", [
    dict(num_generations=2), dict(data=DATA[:1]), dict(prompts_per_step=9),  # more than there are
    dict(num_generations=2, prompts_per_step=1, max_completion_length=1, data=DATA[:1]),
])
def test_the_smallest_sizes(tmp_path, settings):
    _, metrics = go(tmp_path, steps=3, **settings)
    assert len(metrics) == 3 and logged(tmp_path) == metrics
    assert all(math.isfinite(x) for m in metrics for x in m.values())


def test_a_prompt_longer_than_the_context_is_named_and_the_run_is_kept(tmp_path):
    data = [{"prompt": "a b"}] * 6 + [{"prompt": "q " * 60}]
    place = list(itertools.islice(question_stream(data, 3), 7)).index(data[-1])
    with pytest.raises(ValueError, match=r"60.*context.*64"):
        go(tmp_path, data=data, prompts_per_step=1, steps=7)
    assert len(logged(tmp_path)) == place
    assert place == 0 or saved_step(tmp_path) == place


# --------------------------------------------------------------------------------------
# Out of memory
# --------------------------------------------------------------------------------------

ROOMY = dict(prompts_per_step=4, max_completion_length=12, tokens_per_micro_batch=256, steps=3,
             num_iterations=2)


@pytest.mark.parametrize("limit, halvings", [(110, 2), (40, 3)])  # one group; half a group
def test_out_of_memory_repeats_with_halves(monkeypatch, capsys, limit, halvings):
    def run():  # in float64 the order of a sum hardly shows; a wrong gradient would, by 0.01
        return go(model=small_model(end=-100.0, dtype=torch.float64), **ROOMY)

    whole, metrics = run()
    capsys.readouterr()
    logprobs = grpo.token_logprobs

    def small_card(model, ids, *args, **kwargs):
        if ids.numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logprobs(model, ids, *args, **kwargs)

    monkeypatch.setattr(grpo, "token_logprobs", small_card)
    halved, same = run()
    said = capsys.readouterr().out
    assert said.count("out of memory") == halvings  # not once a step: it is remembered
    assert [f"{256 >> i} tokens" in said for i in (2, 3)] == [True, halvings == 3]
    for ours, theirs in zip(halved.parameters(), whole.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for ours, theirs in zip(same, metrics):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


def test_out_of_memory_in_the_backward_pass_leaves_no_half_gradient():
    """Where the model has bfloat16 parameters, their gradients are not the optimizer's to zero."""
    config, norms = tiny_config(beta=0), []
    for fault in (0, 2):  # never, and in the second micro-batch
        learner, calls = bf16_learner(), []

        def hook(gradient):
            calls.append(1)
            if len(calls) == fault:
                raise torch.OutOfMemoryError("CUDA out of memory")

        learner.model.model.embed_tokens.weight.register_hook(hook)  # the last to get its gradient
        norms.append(one_update(learner, config)["grad_norm"])
        assert learner.budget == (32 if fault else 64) and len(calls) > 1
    assert norms[0] == pytest.approx(norms[1], rel=0.02)  # bfloat16, and added up otherwise


def test_hopelessly_out_of_memory_says_what_helps_and_keeps_the_run(tmp_path, monkeypatch):
    go(tmp_path / "whole", **ROOMY)
    calls, logprobs = [], grpo.token_logprobs

    def reward(prompts, completions, **columns):
        calls.append(1)
        return noisy_reward(prompts, completions)

    def no_card(*args, **kwargs):
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logprobs(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(grpo, "token_logprobs", no_card)
        with pytest.raises(RuntimeError, match="gradient_checkpointing"):
            go(tmp_path / "cut", reward=reward, **ROOMY)
    assert saved_step(tmp_path / "cut") == 2
    go(tmp_path / "cut", resume=True, **ROOMY)
    assert result(tmp_path / "cut") == result(tmp_path / "whole")


# --------------------------------------------------------------------------------------
# Data sets
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data, words", [
    ([], "0 rows"), ([{"answer": "c"}] * 2, r"2 rows.*\[0, 1\].*prompt"),
    ([{"prompt": "a", "n": 1}, {"prompt": "b"}], r"\[1\].*column"),
    ([{"prompt": "a"}, {"prompt": "b", "n": 1}], r"\[1\].*column"),
    ([{"prompt": "a"}, {"prompt": "b"}, {"prompt": ""}], r"\[2\].*prompt"),
    ([{"prompt": "a"}, {"prompt": None}], r"\[1\].*prompt"),
    ([{"prompt": []}, {"prompt": [{"role": "user", "content": "a"}]}], r"\[0\].*prompt"),
    ([{"prompt": "  "}], "prompt 0 has no tokens"),
])
def test_a_data_set_that_cannot_be_used_is_refused_in_words(tmp_path, data, words):
    with pytest.raises(ValueError, match=words):
        go(tmp_path / "x", data=data)
    assert not os.path.exists(tmp_path / "x" / "checkpoint.safetensors")


def test_a_dataset_of_the_library_does_as_well_as_a_list():
    datasets = pytest.importorskip("datasets")
    chats = [{"prompt": [{"role": "user", "content": row["prompt"]}], "n": 1} for row in DATA]
    for rows, reward in ((DATA, noisy_reward),
                         (chats, lambda prompts, completions, completion_ids, n:
                          noisy_reward(prompts, [c[0]["content"] for c in completions]))):
        runs = [go(data=data, reward=reward, steps=3)
                for data in (rows, datasets.Dataset.from_list(rows))]
        assert runs[0][1] == runs[1][1] and bits(runs[0][0]) == bits(runs[1][0])


# --------------------------------------------------------------------------------------
# Determinism
# --------------------------------------------------------------------------------------


def test_the_seed_decides_everything():
    def run(state, **settings):
        torch.manual_seed(state)  # what the caller's generator stood at is of no account
        model, metrics = go(**{"steps": 3, **settings})
        return bits(model), metrics

    first = run(1)
    assert run(2) == first
    other = run(1, seed=4)
    assert other[0] != first[0] and other[1] != first[1]


def test_every_step_of_every_seed_draws_afresh():
    """One question, a model that stands still: else each step would sample the same answers."""
    drawn = []
    for seed in (0, 1):
        config = tiny_config(steps=3, seed=seed, learning_rate=0.0, prompts_per_step=1)
        steps = training_steps(small_model(), small_tokenizer(), DATA[:1], noisy_reward, config)
        drawn += [tuple(learner.last[1].texts) for _, learner in steps]
    assert len(set(drawn)) == 6


def test_an_evaluation_between_the_steps_changes_nothing():
    """The generator hands over between steps; what is drawn there under fork_rng stays there."""
    quiet, metrics = go()
    model, disturbed = small_model(), []
    random.seed(5)
    np.random.seed(5)
    for step_metrics, _ in training_steps(model, TOKENIZER, DATA, noisy_reward, tiny_config()):
        disturbed.append(untimed(step_metrics))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            sample_groups(model, TOKENIZER, ["a", "b c"], 3, max_completion_length=4)
        model.train()  # some evaluations leave it like that; the step sets what it needs
    assert disturbed == metrics and bits(model) == bits(quiet)


# --------------------------------------------------------------------------------------
# Security
# --------------------------------------------------------------------------------------


def test_a_checkpoint_holds_numbers_and_text_and_nothing_else(tmp_path):
    go(tmp_path, steps=2)
    data = (tmp_path / "checkpoint.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])  # the whole header is JSON
    assert header.pop("__metadata__").keys() == {"json"}
    assert {entry["dtype"] for entry in header.values()} == {"F32"}
    # And the numbers fill the rest of the file, to its last byte.
    rest = len(data) - 8 - length
    assert max(entry["data_offsets"][1] for entry in header.values()) == rest
    assert sum(math.prod(entry["shape"]) * 4 for entry in header.values()) == rest


def test_nothing_in_the_sources_runs_what_a_stranger_wrote():
    banned = {"pickle", "marshal", "shelve", "subprocess", "joblib", "dill", "requests"}
    for name in ("grpo.py", "gsm8k_demo.py"):
        path = Path(grpo.__file__).parent / name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.name}, line {getattr(node, 'lineno', 0)}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "")]
                assert not banned & {str(name).split(".")[0] for name in names}, where
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__", "os.system"), where
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code", "False") == "False", where
                if called == "torch.load":
                    assert given.get("weights_only") == "True", where
                if "ForCausalLM.from_pretrained" in called:
                    assert given.get("use_safetensors") == "True", where


# --------------------------------------------------------------------------------------
# Hostile text
# --------------------------------------------------------------------------------------

MILLION = 1_000_000
HOSTILE = {
    "open": "\\boxed{" * (MILLION // 7),
    "nested": "\\boxed{" * (MILLION // 8) + "1" + "}" * (MILLION // 8),
    "braces": "\\boxed{" + "{" * (MILLION // 2) + "}" * (MILLION // 2),
    "closed": "}" * MILLION,
    "escapes": "\\boxed{" + "\\{" * (MILLION // 2) + "}",
    "backslashes": "\\" * MILLION,
    "digits": "\\boxed{" + "1" * MILLION + "}",
    "commas": "\\boxed{" + "1,234" * (MILLION // 5) + "}",
    "latex commas": "\\boxed{" + "{,}" * (MILLION // 3) + "}",
    "blanks": "\\boxed{" + " " * MILLION + "x}",
    "signs": "\\boxed{" + "$%" * (MILLION // 2) + "1}",
    "dots": "\\boxed{" + "1" * (MILLION // 2) + "." * (MILLION // 2) + "}",
    "exponent": "\\boxed{1e" + "9" * MILLION + "}",
    "newlines": "\\boxed{" + "\n" * MILLION + "+}",
    "surrogates": "\\boxed{" + "\ud800\udfff" * (MILLION // 2) + "}",
    "nulls": "\0" * MILLION,
    "arabic": "\\boxed{" + "\u0663" * MILLION + "}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_million_hostile_characters(kind):
    text = HOSTILE[kind]
    started = time.process_time()
    assert rule_reward(text, "1") in (0.0, 0.5, 1.5)
    assert rule_reward("\\boxed{1}", text) == 0.5
    # Linear takes tenths of a second; quadratic, in a million characters, would take hours.
    assert time.process_time() - started < 10


def test_a_thousand_short_hostile_texts():
    draw = random.Random(0)
    parts = ["\\boxed{", "{", "}", "\\{", "\\}", "\\", "{,}", "{{}}", "1", "1_0", "0x1", ",", ".",
             "$", "\\$", "%", "-", "+", "e", "nan", "inf", " ", "\n", "\t", "\0", "\x1b[31m", "%s",
             "{0}", "\u202e", "\ud83d", "\udc00", "\u0663", "\uff11", "\xbd", "\u2212", "exit()"]
    for _ in range(1000):
        text = "".join(draw.choices(parts, k=draw.randrange(20)))
        answer = "".join(draw.choices(parts, k=draw.randrange(5)))
        assert rule_reward(text, answer) in (0.0, 0.5, 1.5)
        assert rule_reward("\\boxed{" + text, answer) in (0.0, 0.5, 1.5)
        inside = extract_boxed(text)
        assert inside is None or "\\boxed{" + inside + "}" in text
    # Three and one in Arabic and full-width digits, and other things that Python or the eye reads.
    for text in ("\u0663", "\uff11", "\uff11e\uff10", "0x1", "1_0", "0_3", "3\u066b0", "\u22121"):
        for answer in ("3", "1", "10", "-1"):
            assert rule_reward(f"\\boxed{{{text}}}", answer) == 0.5


# ================================================================================================
# Part 4: the reader
# ================================================================================================

# The apples of grpo.py's comments: pi_old gave every token 0.4, and so does pi_ref.
LOG_OLD = torch.log(torch.tensor([[0.4, 0.4], [0.4, 1.0], [0.4, 1.0], [0.4, 0.4]], dtype=F64))
LOG_NEW = torch.log(torch.tensor([[0.6, 0.4], [0.2, 1.0], [0.6, 1.0], [0.2, 0.4]], dtype=F64))
APPLE_MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]])
APPLE_ANSWERS = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]


def test_the_apples_from_reward_to_gradient():
    rewards = torch.tensor([rule_reward(text, "5") for text in APPLE_ANSWERS], dtype=F64)
    assert rewards.tolist() == [1.5, 1.5, 0.5, 0.5]
    A = group_advantages(rewards)
    assert_near(A, [1, 1, -1, -1])
    surrogate = clipped_surrogate(LOG_NEW, LOG_OLD, A)
    assert_near(surrogate[APPLE_MASK.bool()], [1.2, 1.0, 0.5, -1.5, -0.8, -1.0])
    kl = k3_kl(LOG_NEW, LOG_OLD)
    assert_near(kl[APPLE_MASK.bool()], [0.0721, 0, 0.3069, 0.0721, 0.3069, 0], tol=1e-4)
    assert_near(masked_mean(surrogate, APPLE_MASK, dim=1), [1.1, 0.5, -1.5, -0.9])
    assert_near(masked_mean(kl, APPLE_MASK, dim=1), [0.0361, 0.3069, 0.0721, 0.1534], tol=1e-3)
    for loss_type, wanted in (("grpo", 0.2057), ("dapo", 0.1051), ("dr_grpo", 0.0394)):
        loss, _ = grpo_loss(LOG_NEW, LOG_OLD, LOG_OLD, A, APPLE_MASK, loss_type=loss_type,
                            max_completion_length=4)
        assert loss.item() == pytest.approx(wanted, abs=5e-5)
    slope = gradient(lambda x: grpo_loss(x, LOG_OLD, LOG_OLD, A, APPLE_MASK)[0], LOG_NEW)
    assert slope[1, 0].item() == pytest.approx(-0.135, abs=5e-5)
    assert slope[0, 0].item() == pytest.approx(0.0017, abs=5e-5)
    # The four corners, as the table in section 5 has them.
    corners = gradient(lambda x: clipped_surrogate(x, LOG_OLD, A).sum(), LOG_NEW)
    assert_near(corners[:, 0], [0, 0.5, -1.5, 0])


def test_the_apples_in_the_comments_are_these():
    # The prose says what the test above asserts; change one, and this asks for the other.
    source = Path(grpo.__file__).read_text()
    for figure in ("R = [1.5, 1.5, 0.5, 0.5]", "A = [+1, +1, -1, -1]", "= 0.2057", "= 0.1051",
                   "= 0.0394", "= -0.135", "= 0.0017", "= 0.3069", "0.5685", "0.7580"):
        assert figure in source, figure


@pytest.mark.parametrize("names, imports, check", [
    (["extract_boxed"], "import re", lambda ns: ns["extract_boxed"](r"\boxed{{7}}") == "{7}"),
    (["extract_boxed", "rule_reward"], "import re",
     lambda ns: ns["rule_reward"](r"so \boxed{1{,}000}", "1000") == 1.5),
    (["group_advantages"], "import torch",
     lambda ns: ns["group_advantages"](torch.tensor([1.5, 0.5])).tolist() == [1, -1]),
    (["clipped_surrogate"], "import torch", lambda ns: ns["clipped_surrogate"](
        torch.tensor([[math.log(1.3)]]), torch.zeros(1, 1), torch.tensor([2.0])).item()
        == pytest.approx(2.4)),
    (["k3_kl"], "import torch", lambda ns: ns["k3_kl"](
        torch.zeros(1, 1), torch.full((1, 1), math.log(2.0))).item() == pytest.approx(0.306853)),
    (["masked_mean"], "import torch", lambda ns: ns["masked_mean"](
        torch.tensor([1.0, float("nan")]), torch.tensor([1, 0])).item() == 1.0),
    (["clipped_surrogate", "k3_kl", "masked_mean", "grpo_loss"], "import torch",
     lambda ns: ns["grpo_loss"](LOG_NEW, LOG_OLD, LOG_OLD, torch.tensor([1.0, 1, -1, -1]),
                                APPLE_MASK)[0].item() == pytest.approx(0.2057, abs=5e-5)),
    (["token_logprobs"], "import torch", lambda ns: ns["token_logprobs"](
        tiny_model(), torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.long), 2
        ).shape == (1, 2)),
    (["group_advantages", "group_scale"], "import torch", lambda ns: ns["group_scale"](
        torch.tensor([[1.0, 0.0]]), "rloo").tolist() == [[1, -1]]),
])  # fmt: skip
def test_functions_stand_alone_when_pasted(names, imports, check):
    namespace = {}
    exec(imports, namespace)
    for name in names:
        exec(inspect.getsource(getattr(grpo, name)), namespace)
    assert check(namespace)


def readme():
    return Path(grpo.__file__).with_name("README.md").read_text()


def test_the_readmes_table_from_equation_to_code_is_true():
    rows = re.findall(r"^\| .*? \| `(\w+)` \| `(.+)` \|$", readme(), re.M)
    assert len(rows) >= 11
    for function, line in rows:
        assert line in inspect.getsource(getattr(grpo, function)), (function, line)


def test_the_readmes_flags_exist():
    known = {f for kind in (GRPOConfig, gsm8k_demo.DemoConfig) for f in kind.__dataclass_fields__}
    for flag in re.findall(r"--(\w+)", readme()):
        assert flag in known, flag


def test_every_source_may_be_pasted_and_lines_are_short():
    for name in ("grpo.py", "gsm8k_demo.py", "test_grpo.py"):
        source = Path(grpo.__file__).with_name(name).read_text()
        assert source.startswith("# SPDX-License-Identifier: MIT-0\n")
        assert max(map(len, source.splitlines())) < 100, name


# The demo ---------------------------------------------------------------------------------------


def test_wilson_interval():
    # Wilson (1927), worked elsewhere: 5 of 10 gives 23.7 % to 76.3 %, 0 of 10 gives 0 to 27.8 %.
    assert_near(gsm8k_demo.wilson(5, 10), [0.2366, 0.7634], tol=2e-4)
    assert_near(gsm8k_demo.wilson(0, 10), [0.0, 0.2775], tol=2e-4)
    low, high = gsm8k_demo.wilson(660, 1319)
    assert (high - low) / 2 == pytest.approx(0.027, abs=5e-4)


@pytest.mark.parametrize("text, answer, strict, lenient", [
    (r"so \boxed{1,000}", "1000", True, True), ("so it is 1,000.", "1000", False, True),
    ("18 dollars, that is $18.", "18", False, True), ("from 5 to -3", "-3", False, True),
    (r"the number is 7, so \boxed{8}", "7", False, False), ("no idea", "7", False, False),
    ("", "7", False, False),
])  # fmt: skip
def test_strict_and_lenient(text, answer, strict, lenient):
    assert gsm8k_demo.is_right(text, answer) is strict
    assert gsm8k_demo.is_right(text, answer, lenient=True) is lenient


def write_gsm8k(folder, lines):
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


GOOD_LINE = json.dumps({"question": "How many?", "answer": "6*3=<<6*3=18>>18\n#### 1,018"})


def test_gsm8k_is_read_with_its_answers(tmp_path):
    write_gsm8k(tmp_path, [GOOD_LINE] * 3)
    train_data, test_data = gsm8k_demo.load_gsm8k(str(tmp_path))
    assert train_data["answer"] == ["1,018"] * 3 and len(test_data) == 3
    assert [m["role"] for m in train_data[0]["prompt"]] == ["system", "user"]


@pytest.mark.parametrize("line, said", [
    ('{"question": "x", "answ', "line 2"), ('{"question": "x"}', "line 2"), ("[1]", "line 2"),
    ('{"question": "x", "answer": "no mark"}', "####"),
    ('{"question": " ", "answer": "#### 1"}', "question"),
    ('{"question": "x", "answer": "#### "}', "####"),
])  # fmt: skip
def test_a_broken_line_of_data_is_named(tmp_path, line, said):
    write_gsm8k(tmp_path, [GOOD_LINE, line])
    with pytest.raises(ValueError, match=said):
        gsm8k_demo.load_gsm8k(str(tmp_path))


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        gsm8k_demo.load_model(str(tmp_path))


def test_an_unknown_model_says_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="--rehearsal"):
        gsm8k_demo.load_model(str(tmp_path / "nothing"))


def test_a_model_is_saved_in_its_own_dtype_with_its_end_tokens(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [1, 2]
    gsm8k_demo.save_model(model, tokenizer, tmp_path, torch.bfloat16)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and again.generation_config.eos_token_id == [1, 2]
    for (name, a), (_, b) in zip(again.named_parameters(), model.named_parameters()):
        assert torch.equal(a, b.to(torch.bfloat16)), name
    assert model.dtype == torch.float32  # the one in training is left alone
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template


def run_demo(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["gsm8k_demo.py", *flags])
    gsm8k_demo.main()


@pytest.mark.parametrize("flags, said", [
    (["--rehearsal", "--num_generations", "1"], "num_generations"), (["--nonsense"], "nonsense"),
    (["--rehearsal", "--resume"], "--output"), (["--data", "nowhere", "--model", "x"], "nowhere"),
])  # fmt: skip
def test_flags_that_cannot_be_are_refused_in_words(monkeypatch, flags, said):
    with pytest.raises(SystemExit) as stopped:
        run_demo(monkeypatch, *flags)
    assert said in str(stopped.value)


def test_random_weights_end_their_answers_at_realistic_lengths(tmp_path):
    tiny_model(initializer_range=0.02).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, tokenizer, dtype = gsm8k_demo.load_model(str(tmp_path), True, max_completion_length=50)
    chats = [[{"role": "user", "content": "w1"}]] * 4
    rollout = sample_groups(model, tokenizer, chats, 64, max_completion_length=50)
    # A mean of 280 under a cap of 512 is 27 under 50; both end tokens count, one of them is
    # raised.
    assert 18 < rollout.completion_mask.sum(dim=1).float().mean() < 34


def test_what_costs_memory_may_change_on_resume(tmp_path):
    # The advice when memory runs out is gradient_checkpointing; it has to be possible to take it.
    reward = functools.partial(lambda completions, **columns: [len(c) % 3 for c in completions])
    data = [{"prompt": f"w{i}"} for i in range(6)]
    config = dict(num_generations=2, prompts_per_step=2, max_completion_length=4, steps=3)
    steps = training_steps(tiny_model(), tiny_tokenizer(), data, reward,
                           GRPOConfig(**config, save_steps=1), str(tmp_path))
    next(steps), next(steps), steps.close()
    changed = GRPOConfig(**config, tokens_per_micro_batch=20, gradient_checkpointing=True)
    metrics = train(tiny_model(), tiny_tokenizer(), data, reward, changed, str(tmp_path), True)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    with pytest.raises(ValueError, match="beta"):
        train(tiny_model(), tiny_tokenizer(), data, reward, GRPOConfig(**config, beta=0.5),
              str(tmp_path), True)


# The rehearsal: one pre-trained base serves all of these ----------------------------------------


@pytest.fixture(scope="module")
def base():
    before = torch.get_rng_state()
    world = gsm8k_demo.rehearsal(0)
    assert torch.equal(before, torch.get_rng_state())  # it draws from generators of its own
    return world


def test_the_rehearsals_test_problems_are_held_out(base):
    _, _, train_data, test_data = base

    def numbers(row):  # the kind of problem and its numbers, whoever has whatever
        text = row["prompt"][-1]["content"]
        for word in (*gsm8k_demo.NAMES, *gsm8k_demo.THINGS):
            text = text.replace(word, "_")
        return text

    learned, tested = ({numbers(row) for row in data} for data in (train_data, test_data))
    assert not learned & tested and len(tested) >= 256


def test_habits_are_told_apart():
    problem = ("*+", 3, 4, 5)
    for name in set(gsm8k_demo.HABITS):
        assert gsm8k_demo.habit(gsm8k_demo.answer_in_habit(problem, name)) == name
    assert gsm8k_demo.answer_in_habit(problem, "worked through") == "3*4=12\n12+5=17\n\\boxed{17}"
    assert gsm8k_demo.habit("") == gsm8k_demo.habit("4+4=8 8+8=16 16+1=17") == "other"


def learn(base, reward, steps):
    model, tokenizer, train_data, test_data = base
    model, few = copy.deepcopy(model), test_data.select(range(128))
    settings = {k: v for k, v in gsm8k_demo.REHEARSAL.items() if k != "eval_questions"}
    config = GRPOConfig(**{**settings, "steps": steps})

    def accuracy():
        return gsm8k_demo.evaluate(model, tokenizer, few, 28, sampled=True)["sampled_accuracy"]

    before = accuracy()
    metrics = train(model, tokenizer, train_data, reward, config)
    return before, accuracy(), metrics


def test_the_rehearsal_learns(base):
    before, after, metrics = learn(base, gsm8k_demo.boxed_reward, steps=20)
    assert before < 0.35 and after > 0.70, (before, after)
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 0.4
    # At each first update pi_theta is pi_old: the loss is the KL's alone, and the clip sleeps.
    assert all(m["clip_fraction"] == 0 and m["sampler_gap"] < 1e-5 for m in metrics)
    assert metrics[0]["loss"] == pytest.approx(0, abs=1e-6)


def test_with_shuffled_rewards_it_does_not(base):
    # The same rewards, given to the wrong answers: what is learned comes from the reward.
    shuffle = random.Random(0)

    def shuffled(prompts, completions, answer, **columns):
        rewards = gsm8k_demo.boxed_reward(prompts, completions, answer)
        shuffle.shuffle(rewards)
        return rewards

    before, after, _ = learn(base, shuffled, steps=20)
    assert after < 0.40, (before, after)


def test_evaluation_leaves_the_random_stream_alone(base):
    model, tokenizer, _, test_data = base
    torch.manual_seed(3)
    state = torch.get_rng_state()
    result = gsm8k_demo.evaluate(model, tokenizer, test_data.select(range(8)), 28, sampled=True)
    assert torch.equal(state, torch.get_rng_state())
    assert set(result) >= {"questions", "accuracy", "lenient_accuracy", "interval",
                           "sampled_accuracy"} and result["questions"] == 8


def test_the_demo_from_flags_to_files(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gsm8k_demo, "rehearsal", lambda seed: (copy.deepcopy(base[0]), *base[1:]))
    flags = ["--rehearsal", "--steps", "4", "--prompts_per_step", "4", "--output", str(tmp_path),
             "--eval_questions", "16", "--eval_every", "2", "--show_steps", "2", "--save_steps",
             "2"]
    run_demo(monkeypatch, *flags)
    printed = capsys.readouterr().out
    assert "before:" in printed and "after:" in printed and "arithmetic" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["before"]["questions"] == results["after"]["questions"] == 16
    assert len(results["after"]["interval"]) == 2 and results["seconds"] > 0
    assert [json.loads(line)["step"] for line in open(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    steps = [json.loads(line)["step"] for line in open(tmp_path / "samples.jsonl")]
    assert min(steps) == 0 and max(steps) == 4 and 2 in steps
    assert json.loads((tmp_path / "settings.json").read_text())["steps"] == 4  # typed, so it won
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        base[3][0]["prompt"], add_generation_prompt=True, tokenize=False)
    assert text.endswith("assistant\n") and again.generation_config.eos_token_id == [2, 0]
    run_demo(monkeypatch, *flags, "--resume")  # complete already: nothing is trained again
    assert [json.loads(line)["step"] for line in open(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_evaluation_by_its_defaults(base):
    # No cap given: the tiny model's context has room for the default of 512.
    model, tokenizer, _, test_data = base
    result = gsm8k_demo.evaluate(model, tokenizer, list(test_data.select(range(4))))
    assert result["questions"] == 4 and 0 <= result["interval"][0] <= result["interval"][1] <= 1


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that live, each storage once: .now, and the .peak."""

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen and size:
                    self.seen.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.gone, key, size)
        return result

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("settings", [
    dict(), dict(beta=0.0), dict(tokens_per_micro_batch=256), dict(gradient_checkpointing=True),
    dict(num_generations=32, tokens_per_micro_batch=256, beta=0.0, max_completion_length=48)])
def test_the_predicted_memory_is_what_tensors_take(settings):
    """Two steps on a Qwen2 whose layers, or cache, or logits are what fills the memory."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=2000, hidden_size=64, intermediate_size=192, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS, pad_token_id=0))
    config = GRPOConfig(**{**dict(steps=2, num_generations=4, prompts_per_step=4,
                                  max_completion_length=64), **settings})
    rows = [{"prompt": " ".join(["w1"] * 40)}] * 4
    with LiveTensors() as live:
        for _ in training_steps(model, tiny_tokenizer(), rows, gsm8k_demo.random_reward, config):
            pass
    expected = gsm8k_demo.predict_memory(model, config, 40)
    assert sum(expected.values()) * 1e9 == pytest.approx(live.peak, rel=0.2)


QWEN = {"0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                     num_attention_heads=14, num_key_value_heads=2),
        "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28,
                     num_attention_heads=12, num_key_value_heads=2)}


def weightless(name):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, tie_word_embeddings=True,
                                             **QWEN[name]))
    model.tie_weights()
    return model


def test_the_readmes_memory_table_is_true(monkeypatch):
    monkeypatch.setattr(gsm8k_demo, "computes_in_bf16", lambda model: True)
    for column, name, card in ((1, "0.5B", 16), (2, "1.5B", 40)):
        for flags, row in ((dict(tokens_per_micro_batch=1024), "micro-batches of 1,024 tokens**"),
                           (dict(gradient_checkpointing=True), "micro-batches of 8,192 tokens**")):
            parts = gsm8k_demo.predict_memory(weightless(name), GRPOConfig(**flags), 150)
            line = next(line for line in readme().splitlines()
                        if line.startswith("|") and row in line)
            printed = float(line.split("|")[column + 1].strip(" *"))
            assert printed == round(sum(parts.values()), 1) < card


@pytest.mark.parametrize("card, tokens", [(80, 8192), (24, 4096), (17.2, 1024), (12, 512)])
def test_micro_batches_are_cut_to_fit_the_card(card, tokens, monkeypatch, capsys):
    tokenizer = types.SimpleNamespace(
        apply_chat_template=lambda chats, **_: [[0] * (141 - len(chat)) for chat in chats])
    monkeypatch.setattr(gsm8k_demo, "computes_in_bf16", lambda model: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, card * 1e9))
    config, data = GRPOConfig(), Dataset.from_list([{"prompt": ["one"]}, {"prompt": ["two"]}])
    parts = gsm8k_demo.plan_memory(weightless("0.5B"), tokenizer, data, config)
    assert config.tokens_per_micro_batch == tokens
    assert f"{sum(parts.values()):.2f} GB expected" in capsys.readouterr().out


# ================================================================================================
# Not tests: the figures of the README
#
#   python test_grpo.py rehearsal    seconds a step, side by side: this code, the same step with
#   python test_grpo.py lengths      `model.generate`, and TRL, where it is installed
#   python test_grpo.py cost         seconds and memory against G, answer length and model size
#   python test_grpo.py memory DIR   a micro-batch's memory at true shapes; DIR has Qwen2.5-0.5B's
#                                    config.json; ten minutes, 10 GB
# ================================================================================================


def random_world(hidden=256, layers=6, mean=60):
    """Random weights that end an answer after `mean` tokens, and prompts of about 120 tokens."""
    chance = random.Random(0)
    base, tokenizer, data, _ = gsm8k_demo.rehearsal(0)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id)).eval()
    with torch.no_grad():
        level = model(torch.arange(3, 300)[None]).logits.logsumexp(dim=-1).mean()
    bias = torch.zeros(len(tokenizer))
    bias[end] = level - math.log(mean)
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    texts = [" ".join(row["prompt"][0]["content"] for row in chance.sample(list(data), 7))
             for _ in range(64)]
    prompts = [tokenizer.decode(tokenizer(text)["input_ids"][: chance.randint(110, 130)])
               for text in texts]
    return model, tokenizer, [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def with_ours(model, tokenizer, rows, reward, config):
    started = time.perf_counter()
    metrics = train(model, tokenizer, rows, reward, config)
    seconds = (time.perf_counter() - started) / config.steps
    return seconds, sum(m["completion_length"] for m in metrics) / config.steps


def with_generate(model, tokenizer, rows, reward, config):
    """One step of GRPO as it is mostly written: generate, one forward pass over everything."""
    reference = copy.deepcopy(model) if config.beta else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    ends, G = torch.tensor(grpo.end_token_ids(model, tokenizer)), config.num_generations
    questions, tokens, tokenizer.padding_side = question_stream(rows, 0), 0, "left"
    torch.manual_seed(0)
    started = time.perf_counter()
    for _ in range(config.steps):
        batch = [next(questions) for _ in range(config.prompts_per_step)]
        texts = [row["prompt"] if isinstance(row["prompt"], str) else
                 tokenizer.apply_chat_template(row["prompt"], tokenize=False,
                                               add_generation_prompt=True) for row in batch]
        encoded = tokenizer(texts, return_tensors="pt", padding=True)
        ids = model.generate(**{k: encoded[k] for k in ("input_ids", "attention_mask")},
                             do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
                             repetition_penalty=1.0, num_return_sequences=G,
                             max_new_tokens=config.max_completion_length)
        answers = ids[:, encoded["input_ids"].shape[1] :]
        ended = torch.isin(answers, ends)
        real = ended.cumsum(dim=1) - ended.long() == 0
        mask = encoded["attention_mask"].repeat_interleave(G, dim=0)
        mask = torch.cat([mask, real.long()], dim=1)
        said = [tokenizer.decode(row[seen], skip_special_tokens=True)
                for row, seen in zip(answers, real)]
        rewards = torch.tensor(reward(prompts=None, completions=said, answer=[
            row["answer"] for row in batch for _ in range(G)])).view(-1, G)
        advantages = group_advantages(rewards).flatten().float()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        def scores(network):
            logits = network(ids, attention_mask=mask, position_ids=positions,
                             logits_to_keep=answers.shape[1] + 1).logits[:, :-1]
            return logits.log_softmax(dim=-1).gather(2, answers.unsqueeze(2)).squeeze(2)

        with torch.no_grad():
            ref = scores(reference) if reference else None
        now = scores(model)
        loss, _ = grpo_loss(now, now.detach(), ref, advantages, real, beta=config.beta)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += real.sum().item() / len(real)
    return (time.perf_counter() - started) / config.steps, tokens / config.steps


def with_trl(model, tokenizer, rows, reward, config, folder):
    """TRL's trainer, everything in one micro-batch, no logging, no saving, no checkpointing."""
    import trl
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_train_end(self, *_, **__):
            self.seconds = time.perf_counter() - self.started

    def counted(completion_ids, **columns):
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return reward(**columns)

    lengths, clock = [], Clock()
    model.save_pretrained(folder)  # TRL reads its reference from there
    model.config._name_or_path = model.name_or_path = folder
    G, B = config.num_generations, config.prompts_per_step
    settings = trl.GRPOConfig(
        folder, max_steps=config.steps, per_device_train_batch_size=B * G, num_generations=G,
        max_completion_length=config.max_completion_length, learning_rate=config.learning_rate,
        beta=config.beta, loss_type="grpo", use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True)
    trl.GRPOTrainer(model=model, processing_class=tokenizer, args=settings, reward_funcs=counted,
                    train_dataset=Dataset.from_list(rows), callbacks=[clock]).train()
    return clock.seconds / config.steps, sum(lengths) / len(lengths)


def side_by_side(which, rounds):
    """Interleaved, in one process, one thread; prints each run, and the medians."""
    import tempfile
    if which == "rehearsal":
        model, tokenizer, data, _ = gsm8k_demo.rehearsal(0)
        rows, reward, settings = list(data), gsm8k_demo.boxed_reward, dict(gsm8k_demo.REHEARSAL)
        del settings["eval_questions"]
    else:
        (model, tokenizer, rows), reward = random_world(), gsm8k_demo.random_reward
        settings = dict(steps=2, prompts_per_step=16, max_completion_length=256,
                        learning_rate=1e-12)
    ways = [with_ours, with_generate] + [with_trl] * bool(importlib.util.find_spec("trl"))
    for beta in (0.02, 0.0):
        config, seconds = GRPOConfig(**{**settings, "beta": beta}), {}
        for _ in range(rounds):
            for way in ways:
                extra = (tempfile.mkdtemp(),) if way is with_trl else ()
                took, length = way(copy.deepcopy(model), tokenizer, rows, reward, config, *extra)
                seconds.setdefault(way.__name__, []).append(took)
                print(f"{which}, beta {beta}, {way.__name__}: {took:.3f} s a step, answers of "
                      f"{length:.1f} tokens", flush=True)
        medians = {name: statistics.median(took) for name, took in seconds.items()}
        for name, took in medians.items():
            print(f"    {name}: median {took:.3f} s, {took / medians['with_ours']:.2f} x ours")


def cost_point(G, cap, hidden, layers):
    """One step at one size, in a process of its own: the peak is that of the whole process."""
    import resource
    model, tokenizer, rows = random_world(hidden, layers, mean=cap / 4)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0  # equal lengths at every size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = GRPOConfig(steps=2, prompts_per_step=8, num_generations=G, learning_rate=1e-12,
                        max_completion_length=cap, beta=0.0)
    m = train(model, tokenizer, rows, gsm8k_demo.random_reward, config)[-1]
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    print(f"| {G} | {cap} | {model.num_parameters() / 1e6:.1f} M | {m['completion_length']:.0f} | "
          f"{m['sample_seconds']:.2f} | {m['update_seconds']:.2f} | {more:.2f} |", flush=True)


def cost():
    print("| G | cap | weights | mean length | sampling, s | update, s | memory, GB more |")
    print("|---|---|---|---|---|---|---|")
    for point in ([(G, 128, 256, 6) for G in (2, 4, 8, 16)] + [
            (8, cap, 256, 6) for cap in (32, 64, 128, 256)] + [
            (8, 128, *size) for size in ((128, 4), (256, 6), (384, 8), (512, 10))]):
        subprocess.run([sys.executable, __file__, "point", *map(str, point)], check=True)


def memory(folder):
    """Activations and logits of one micro-batch in bfloat16, counted, against the prediction."""
    for large, k, checkpointing in ((0, 2, 0), (0, 4, 0), (0, 8, 1), (1, 4, 0), (1, 8, 1)):
        shape = AutoConfig.from_pretrained(folder)
        if large:  # Qwen2.5-1.5B's
            shape.hidden_size, shape.intermediate_size, shape.num_attention_heads = 1536, 8960, 12
            shape.num_hidden_layers, shape.layer_types = 28, ["full_attention"] * 28
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
            parameter.grad = torch.zeros_like(parameter)
        model.head_gives_logits = True
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
        ids = torch.randint(0, 150_000, (k, 150 + 512))
        kept = [x for parameter in model.parameters() for x in (parameter, parameter.grad)]
        with LiveTensors(*kept) as live:
            token_logprobs(model, ids, torch.ones_like(ids), 512, num_generations=k,
                           return_entropy=True, entropy_gradient=False)[0].sum().backward()
        print(f"{model.num_parameters() / 1e6:.0f} M, {150 + k * 512} tokens, {checkpointing=}: "
              f"{live.peak / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what in ("rehearsal", "lengths"):
        side_by_side(what, rounds=3 if what == "rehearsal" else 1)
    elif what == "cost":
        cost()
    elif what == "memory":
        memory(*sys.argv[2:])
    elif what == "point":
        cost_point(*map(int, sys.argv[2:]))
    elif what == "campaign":  # test_sigkill_at_random_moments starts this file as a program
        campaign(*sys.argv[2:])
    else:
        sys.exit(__doc__)
