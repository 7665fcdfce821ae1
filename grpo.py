# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how a language model learns to reason from rewards alone.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) repeats five moves. The loop, with the functions and the sections of this file:

    for step in range(steps):             the function `train`                     section 7
        groups = sample_and_grade(...)        moves 1, 2: sample completions, reward each  8, 9
        advantages = group_advantages(...)    move 3: compare each with its group          1
        write_logprobs(...)                   move 4: log-probs by pi_ref and pi_old       10
        for mini_batch in mini_batches(...):  move 5: update the weights                   11
            update(learner, mini_batch):
                logprobs = compute_logprobs(...)                                           10
                loss = grpo_loss(logprobs, ...)                                            5
                loss.backward(), then a step of the optimizer                              11

A *policy*, written pi, is a way to choose the next action. Here the action is a token:
pi(token | text so far) is the probability that the model gives to it. We need three policies:

    pi_theta  the model that is trained. Only this one gets a gradient
    pi_old    the model as it was when it sampled the completions
    pi_ref    a frozen copy of the model from before training. A penalty keeps pi_theta near
              it. Where the penalty's weight beta is 0, there is no such copy

The equation (sections 1 to 3 explain each part): for a prompt q, sample completions o_1 ...
o_G. Completion i has |o_i| tokens, one reward R_i, and one advantage A_i, which says how much
better than its group it is. Token number t of it is o_it, and o_i,<t are the tokens before
that. GRPO maximises J, averaged over the prompts:

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           grpo_loss
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token   k3_kl

clip keeps the ratio r between 1 - eps and 1 + eps (eps is 0.2). k3 estimates how far pi_theta
is from pi_ref, and beta (0.04) is the weight of this penalty.

One small case runs through the mathematics, the apples: "John has 3 apples and buys 2
more. How many apples does he have?" A rule pays 0.5 for a result in \boxed{...} (LaTeX's
frame around a result), and 1.0 more if it is right. The model wrote four completions:

    completion 1    3+2 = \boxed{5}      reward 1.5
    completion 2    \boxed{5}            reward 1.5
    completion 3    \boxed{6}            reward 0.5
    completion 4    3-2 = \boxed{1}      reward 0.5

To keep the sums small, pretend that 1 and 4 are two tokens long, and 2 and 3 one token.

Shapes: B prompts with G completions each make N = B * G rows. T and P are the lengths of the
longest completion and of the longest prompt, and V is the size of the vocabulary. One call of
the model gets n rows: all N, or fewer to save memory. Log-probs are log-probabilities.

Sections 1 to 5 are the mathematics, 6 the settings, 7 to 11 the loop and its moves, 12 what
is not GRPO (precision, files, checks), 13 GRPO's relatives. gsm8k_demo.py, beside this file,
is a whole run. TRL, verl and RLinf, named below, are libraries that train with GRPO."""

import copy
import json
import math
import re
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed


# ---- 1. Advantages: better or worse than the group (move 3) ------------------------------
# A reward of 0.5 may be good (the prompt is hard, and most completions earn 0) or bad (all
# others earned 1.5). What counts is the difference from a baseline: the reward that was to
# be expected. PPO, the method that GRPO simplifies, trains a second network, the critic, to
# predict it. GRPO samples a group of completions for the same prompt, and takes the mean of
# their rewards. It divides by their std, so that the unit of the reward does not matter.
def group_advantages(rewards, scale_rewards="group"):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> float32 (..., G).

    This std divides by G. torch's default divides by G - 1. That std is larger, and at G = 8
    the advantages would be 6.5 % smaller. `scale_rewards` names what R_i - mean(R) is divided by:

        "group"  the std of the group
        "none"   1 (Dr. GRPO, section 13)
        "batch"  the std of the rewards of all groups together
        "rloo"   (G - 1) / G (RLOO). Then A_i = R_i - mean of the *other* rewards (section 2)

    A group of equal rewards (to a millionth) gets exact zeros. NaN and inf stay visible in the
    result. ValueError for a group of one, and for an unknown `scale_rewards`."""
    G = rewards.shape[-1]
    if G < 2:
        raise ValueError(f"the rewards are {tuple(rewards.shape)}: a group needs two or more")
    rewards = rewards.double()
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = rewards.std(dim=-1, correction=0, keepdim=True)  # (..., 1); correction=0: by G
    scales = {"group": std, "none": 1, "batch": rewards.std(correction=0), "rloo": (G - 1) / G}
    if scale_rewards not in scales:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not one of {list(scales)}")
    # Equal rewards may differ by rounding: 0.1 + 0.2 is not exactly 0.3. The tiny difference,
    # divided by a std of 1e-17, would become an advantage of 1. So a std of at most a millionth
    # of the largest |reward| counts as 0.
    equal = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    return (centered / scales[scale_rewards]).masked_fill(equal, 0.0).float()


# The apples: R = [1.5, 1.5, 0.5, 0.5] has the mean 1 and the std 0.5, so A = [+1, +1, -1, -1].
#
# If all completions of a group earn the same, because the prompt is too easy or too hard,
# all advantages are 0. The share of such groups is logged as zero_variance_fraction.


# ---- 2. Ratio and clip: learn from a completion, but not too much ------------------------
# Why log pi. Pretend first that a completion is a single token. Then each of the V tokens is a
# possible completion. It has a probability pi, and a fixed advantage A. We want the expected
# advantage, sum(pi * A) over all V tokens, to grow. Let grad be the gradient with respect to the
# model's weights. Since grad log pi = (grad pi) / pi, grad pi is pi * grad log pi, and
#
#     grad sum(pi * A) = sum(A * grad pi) = sum(pi * A * grad log pi)
#
# The right side is the expected value of A * grad log pi for tokens drawn from pi, and an
# average over samples estimates an expected value. So we sample, and average A * grad log
# pi. The probability of a whole completion is the product of its tokens' probabilities, and so
# log pi is a sum over its tokens. Then A * grad log pi is a sum, too: a term for each token, all
# with the completion's A. (Section 5 asks whether to take this sum or a mean.)
#
# Why a baseline. Subtracting a number b from every reward does not change the expected
# gradient. The probabilities always sum to 1, so the change is -b * sum(pi * grad log pi) =
# -b * sum(grad pi) = -b * grad(1) = 0. But the estimate is less noisy if b is near the
# expected reward. A valid b does not depend on which completion is drawn: m, the mean of the
# *other* G - 1 rewards. GRPO's mean(R) contains R_i, too. It is (R_i + (G - 1) * m) / G. So
# R_i - mean(R) = (G - 1)/G * (R_i - m), which is the advantage with m, on another scale.
#
# Why a ratio. The tokens were drawn from pi_old, and after an update pi_theta is another
# policy. The factor r = pi_theta / pi_old corrects for that: sum(pi_old * r * A) =
# sum(pi_theta * A). This is importance sampling. pi_old is constant, so grad r =
# (grad pi_theta) / pi_old = r * grad log pi_theta. So the gradient of r * A is r * A * grad log
# pi, and at r = 1 it is A * grad log pi, as above. (A whole completion has the product of its
# tokens' ratios. PPO gives each token its own ratio only, a good approximation near 1.)
#
# Why the clip. Samples from pi_old say little about a policy far from it. If A > 0 and r is above
# 1 + eps, or A < 0 and r below 1 - eps, the token has moved far enough in the right direction: the
# min is the constant clip(r) A, without a gradient. In the wrong direction the min is r A, without
# a limit, and its gradient brings r back. A table below shows the cases.
def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token: r (N, T), A (N,) -> (N, T).

    PPO's "surrogate", a stand-in for the expected reward (arXiv:1707.06347, equation 7), to be
    maximised. `epsilon` >= 1 means no lower limit. `epsilon_high` is `epsilon` by default."""
    if epsilon_high is None:
        epsilon_high = epsilon
    A = advantages.unsqueeze(1)  # (N, 1): the same for every token of a completion
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)  # (N, T)
    return torch.min(ratio * A, clipped_ratio * A)


# The apples after some updates. Say that pi_old gave each token 0.2, and that pi_theta now gives
#
#     completion 1: 0.3 and 0.2    2: 0.1    3: 0.3    4: 0.1 and 0.2
#     ratios     1: 1.5 and 1.0    2: 0.5    3: 1.5    4: 0.5 and 1.0
#
# With eps = 0.2, the first four rows are the four cases of the clip. r = exp(log pi - log pi_old),
# and e^x is its own derivative, so the gradient of r * A with respect to log pi is r * A:
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi
#     +1   1.5 (no. 1)   min( 1.5,  1.2) =  1.2  clipped      0    good, already likelier
#     +1   0.5 (no. 2)   min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (no. 3)   min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (no. 4)   min(-0.5, -0.8) = -0.8  clipped      0    bad, already rarer
#     any  1.0           A                       not clipped  A    all tokens, first update
#
# In the first update after a sampling, pi_theta is pi_old. Every ratio is 1 (up to rounding), and
# the clip does not act. With one update after each sampling (strictly on-policy), it never acts. A
# common mistake is max instead of min where A is negative. Then row 3 is max(-1.5, -1.2) = -1.2, a
# constant: its token is left alone. Row 4 is max(-0.5, -0.8) = r * A: it is pushed down for ever.


# ---- 3. The KL penalty: stay near the reference ------------------------------------------
# A policy that only chases rewards can forget how to write. How far it has gone from pi_ref
# is measured by the Kullback-Leibler divergence, the expected value
#
#     KL(pi_theta || pi_ref) = E[log(pi_theta / pi_ref)], over tokens drawn from pi_theta
#
# It is 0 if the two policies agree, and else positive. The exact value is a sum over all V
# tokens at each position, which takes much memory. k3 needs only the token that was drawn.
def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (N, T), (N, T) -> (N, T).

    The third of the estimates in joschu.net/blog/kl-approx.html. It is at least 0, since
    e^x >= 1 + x for any x. Value and gradient are finite for log-ratios of size below 1e30."""
    # e^89 overflows float32. So the log-ratio is cut at 50. Beyond 50 the gradient is 0: a
    # token that has become e^50 times rarer than under pi_ref is not pulled back.
    log_ref_ratio = (ref_logprobs - logprobs).clamp(max=50)  # (N, T) log(pi_ref/pi_theta)
    return torch.expm1(log_ref_ratio) - log_ref_ratio  # expm1(x) is e^x - 1, precise near 0


# Why its expected value is the KL. For tokens drawn from pi_theta,
#
#     E[-log(pi_ref/pi_theta)] = E[log(pi_theta/pi_ref)] = KL(pi_theta || pi_ref)
#     E[ pi_ref/pi_theta ]     = sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1
#
# so on average the first and the last term of k3 cancel. In each sample they keep k3 >= 0, and
# they make it less noisy while the policies are close: e^x - 1 - x is about x^2 / 2 for small
# x. (The ratio must be pi_ref/pi_theta: the average of pi_theta/pi_ref is not 1.)
#
# The apples, with pi_ref = 0.2 for every token:
#
#     pi_theta 0.1    pi_ref/pi_theta 2      k3 = 2 - log(2) - 1 = 0.3069       gradient -1
#     pi_theta 0.2    pi_ref/pi_theta 1      k3 = 0                             gradient  0
#     pi_theta 0.3    pi_ref/pi_theta 2/3    k3 = 2/3 - log(2/3) - 1 = 0.0721   gradient 1/3
#
# The gradient, with respect to log pi_theta, is 1 - pi_ref/pi_theta. The loss adds beta *
# k3 and goes downhill, so the first token is pulled back up and the last one back down.

def kl_estimate(logprobs, ref_logprobs, kl_penalty_type="low_var_kl"):
    """KL(pi_theta || pi_ref), estimated per token in four ways: (N, T), (N, T) -> (N, T).

    "low_var_kl" is k3, and GRPO needs no other. With d = log(pi_theta/pi_ref), "kl" is k1 =
    d, "mse" is k2 = d^2 / 2, and "abs" is |d|: verl's and RLinf's names. ValueError for others."""
    d = logprobs - ref_logprobs  # (N, T)
    estimates = {"low_var_kl": k3_kl(logprobs, ref_logprobs), "kl": d, "mse": d.square() / 2,
                 "abs": d.abs()}
    if kl_penalty_type not in estimates:
        raise ValueError(f"kl_penalty_type is {kl_penalty_type!r}, not one of {list(estimates)}")
    return estimates[kl_penalty_type]


# Which estimate may be a loss? (Skip this unless you change the setting.) Write pi for pi_theta,
# and d for log(pi/pi_ref). The KL is sum(pi * d). The weights change it through d, and through pi,
# which decides what tokens are drawn. backward() sees only d, so an estimate can have a right
# value and a wrong gradient. By the product rule, the gradient of the KL is the sum of two parts:
#
#     sum(grad pi * d)    which is sum(pi * d * grad log pi), the average of d * grad log pi
#     sum(pi * grad d)    which is 0, since grad d = grad log pi, and sum(pi * grad log pi) = 0
#
#     estimate             right value?  its gradient. On average it should be d * grad log pi
#     k1 = d               yes           grad log pi: wrong, on average 0, as in the second part
#     k2 = d^2 / 2         no            d * grad log pi: right
#     k3 = e^-d - 1 + d    yes           (1 - e^-d) * grad log pi: nearly, 1 - e^-d is about d
#     r * k3               yes           k3 * grad r + r * grad k3. As grad r = r * grad log pi, it
#                                        is r * (k3 + 1 - e^-d) * grad log pi = r * d * grad log pi
#
# The last is the setting `use_bias_correction_kl`. Its r also corrects for draws from pi_old.


# ---- 4. The masked mean: padding is not data ---------------------------------------------
# Completions have different lengths. In a tensor the short ones are filled up with padding.
# The mask is True at real tokens. Where it is False, a position is masked. Multiplying by
# the mask does not remove a NaN, which a model may give at padding:
#
#     values [2, NaN], mask [True, False]    (values * mask).sum()              = NaN
#                                            torch.where(mask, values, 0).sum() = 2
def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` (bool, int or float) is set, or 0 if it is nowhere set.

    It averages over all positions, or over `dim`. The mask expands to the shape of `values`.
    Masked values, even NaN, change neither the result nor the gradient for `values`."""
    mask = mask.bool().expand_as(values)
    return torch.where(mask, values, 0.0).sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ---- 5. The loss -------------------------------------------------------------------------
# The loss is -J, since optimizers minimise. How to average over tokens and completions
# looks like a detail, but it decides how much a long completion counts.
def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """The average of `per_token` (N, T) where the mask (N, T) is set, in one of three ways.

        "grpo"     mean over completions of the mean over their tokens (the equation J). The
                   longer a wrong completion is, the less each of its tokens is pushed down.
                   So wrong completions tend to grow
        "dapo"     mean over all tokens (arXiv:2503.14476). Each token counts the same
        "dr_grpo"  sum over all tokens, divided by N * max_completion_length. This divisor is
                   the same for all samples (arXiv:2503.20783). ValueError for other names"""
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo" and max_completion_length:
        return torch.where(mask.bool(), per_token, 0.0).sum() / (len(mask) * max_completion_length)
    raise ValueError(f"loss_type {loss_type!r}: grpo, dapo, or dr_grpo with max_completion_length")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              kl_penalty_type="low_var_kl", importance_sampling_level="token",
              use_bias_correction_kl=False):
    """-J over N completions: by default, the equation at the top. Returns (loss, metrics).

    Log-probs of pi_theta, pi_old and pi_ref, (N, T) each; pi_ref's may be None at beta=0.
    Advantages (N,). The mask (N, T) is set on real tokens; masked positions affect neither
    value nor gradient. Sections 3 and 13 explain the last three settings. The metrics are
    floats: `loss`, `kl` (0 without a reference), `ratio_max`, and `clip_fraction`, the
    share of tokens where the min took the clipped term. ValueError for wrong arguments."""
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed; None is for beta=0")
        ref_logprobs = logprobs  # the policy as its own reference: the KL is 0
    # Without this check, tensors of the wrong shape would be broadcast silently.
    same = logprobs.shape == old_logprobs.shape == ref_logprobs.shape == mask.shape
    if not same or logprobs.dim() != 2 or advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"log-probs {logprobs.shape}, {old_logprobs.shape}, {ref_logprobs.shape}, "
                         f"mask {mask.shape}, advantages {advantages.shape}: not (N, T) and (N,)")
    # The inputs are masked before exp. To mask the result is too late: backward through exp
    # multiplies the gradient, 0 in the padding, by exp's value. If that is NaN, 0 * NaN is NaN.
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old_logprobs = old_logprobs.masked_fill(~mask, 0.0).detach()  # pi_old, pi_ref: constants
    ref_logprobs = ref_logprobs.masked_fill(~mask, 0.0).detach()
    # Logs are subtracted, because a small probability, say e^-200, would be 0 in float32.
    log_ratio = logprobs - old_logprobs  # (N, T)
    if importance_sampling_level == "sequence":
        # GSPO (section 13): a completion has one ratio, exp of its mean log-ratio.
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: token/sequence")
    # e^100 is inf. Even if the min does not take it, backward computes 0 * inf, which is NaN.
    ratio = log_ratio.clamp(-50, 50).exp()  # (N, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (N, T)
    kl = kl_estimate(logprobs, ref_logprobs, kl_penalty_type)  # (N, T) k3 by default
    penalty = ratio * kl if use_bias_correction_kl else kl  # (N, T)
    per_token = -(surrogate - beta * penalty)  # (N, T)
    loss = average(per_token, mask, loss_type, max_completion_length)
    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (N, T) the min took the clipped one
    return loss, {"loss": loss.item(), "kl": masked_mean(kl, mask).item(),
                  "clip_fraction": masked_mean(clipped, mask).item(),
                  "ratio_max": torch.where(mask, ratio, 0.0).max().item()}


# The loss of the apples, with beta 0.04 (`python grpo.py` prints it token by token):
#
#     completion                 1                  2        3        4
#     advantage                  +1                +1       -1       -1
#     surrogate, per token       1.2, 1.0           0.5     -1.5     -0.8, -1.0
#     k3, per token              0.0721, 0          0.3069   0.0721   0.3069, 0
#
#     "grpo"     surrogate, mean of each:  1.1,    0.5,    -1.5,    -0.9       sum -0.8
#                k3, mean of each:         0.0361, 0.3069,  0.0721,  0.1534    sum  0.5685
#                loss = 0.8 / 4 + 0.04 * 0.5685 / 4 = 0.2 + 0.0057 = 0.2057
#     "dapo"     sums over all 6 tokens: surrogate -0.6, k3 0.7580
#                loss = 0.6 / 6 + 0.04 * 0.7580 / 6 = 0.1 + 0.0051 = 0.1051
#     "dr_grpo"  sums -0.6 and 0.7580, over 4 completions * max_completion_length, say 4
#                loss = (0.6 + 0.04 * 0.7580) / 16 = 0.0394
#
# The gradient of the "grpo" loss at the token of completion 2: the surrogate gives 0.5 and
# the KL 1 - pi_ref/pi_theta = 1 - 2 = -1, so it is (-0.5 + 0.04 * (-1)) / 4 = -0.135. Descent
# makes the token likelier, as it should. At the first token of completion 1 the clip leaves
# only the KL: 0.04 * (1 - 2/3) / 2 tokens / 4 completions = 0.0017. It makes the token rarer.
#
# Why the loss starts at 0. At a run's first update every ratio is 1 and every k3 is 0. Then the
# "grpo" loss over all N is minus the mean of the advantages, and in each group they sum to 0.
# But its gradient with respect to log pi is -A / |o_i| / N at each token. Each step has new
# advantages around 0, so watch the reward, and not the loss.
#
# That is GRPO, and you may stop here. The rest makes the five tensors that `grpo_loss` needs.


# ---- 6. Settings -------------------------------------------------------------------------
def knob(default, text):
    """A setting: its default, and the help text that gsm8k_demo.py shows."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every setting, mostly under TRL's names. ValueError for a value that makes no sense."""
    # What is sampled in a step: prompts_per_step * num_generations completions.
    num_generations: int = knob(8, "G, completions of each prompt; 4 is few, 16 is comfortable")
    prompts_per_step: int = knob(32, "B, prompts in a step")
    max_completion_length: int = knob(512, "tokens at which a completion is cut off")
    temperature: float = knob(1.0, "divides the logits; a lower one explores less")
    # The loss, sections 1 to 5.
    beta: float = knob(0.04, "weight of the KL penalty; 0: none, and no reference in memory")
    epsilon: float = knob(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: float | None = knob(None, "how far it may rise above 1; None: epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = knob("grpo", "how to average over tokens")
    scale_rewards: Literal["group", "none", "batch", "rloo"] = knob("group", "advantages' divisor")
    # The relatives, sections 3 and 13.
    kl_penalty_type: Literal["low_var_kl", "kl", "mse", "abs"] = knob("low_var_kl", "KL estimate")
    use_bias_correction_kl: bool = knob(False, "multiply the KL by the ratio, as TRL 1.16 does")
    importance_sampling_level: Literal["token", "sequence"] = knob("token", "sequence: GSPO")
    dynamic_sampling: int = knob(0, "rounds, at most, that replace groups of equal rewards")
    # The update, section 11.
    steps: int = knob(300, "steps of sampling and learning")
    num_iterations: int = knob(1, "passes over the completions of a step")
    num_mini_batches: int = knob(1, "updates in each pass")
    learning_rate: float = knob(1e-6, "peak of AdamW's rate; 1e-6 to 1e-5 for a billion weights")
    warmup_steps: int = knob(10, "steps over which the rate rises to the peak; then it falls")
    max_grad_norm: float = knob(1.0, "a gradient with a larger norm is scaled to this norm")
    # The run, sections 7 and 12.
    seed: int = knob(0, "decides the order of the examples and all that is drawn at random")
    save_steps: int = knob(25, "steps between checkpoints; 0: never save one")
    bf16: bool | None = knob(None, "compute in bfloat16; None: where the GPU can")
    micro_batch_size: int = knob(8, "completions computed at once, except in sampling")

    def __post_init__(self):
        check_settings(self)  # section 12


# ---- 7. The loop -------------------------------------------------------------------------
#   step          the five moves once: B prompts, and N = B * G completions to learn from
#   pass          every completion of the step is used once; there are num_iterations passes
#   mini-batch    what one update uses: a pass is cut into num_mini_batches of them
#   micro-batch   what is computed at once: n completions of a mini-batch (section 11)
@dataclass
class Completion:
    """L tokens that the model wrote after a prompt, and all that is known about them."""
    example: dict  # the row of the data set: the prompt, and what the reward function needs
    prompt_ids: list  # the tokens of the prompt
    ids: list = field(default_factory=list)  # the L sampled tokens. The loss is about these
    text: str = ""  # the ids as text. Encoding this text again can give different ids
    truncated: bool = True  # cut off at max_completion_length, before an end token came
    sampler_logprobs: torch.Tensor | list = field(default_factory=list)  # (L,), only logged
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None  # (L,) of pi_old, or None if it is pi_theta
    ref_logprobs: torch.Tensor | None = None  # (L,) of pi_ref, or None at beta = 0


@dataclass
class Learner:
    """What is kept from step to step. `make_learner` (section 12) makes it."""
    config: GRPOConfig
    model: torch.nn.Module  # pi_theta, which also samples
    tokenizer: object
    reference: torch.nn.Module | None  # pi_ref; None at beta = 0
    parameters: list  # the model's trained weights, on most GPUs in bfloat16
    masters: list  # their float32 copies, for the optimizer (section 12 says why)
    start: list  # a few weights from before training, to recognise the model on resume
    optimizer: torch.optim.Optimizer
    at_once: dict  # how many "prompts", or "completions", fit at once (in_parts, section 8)
    examples_seen: int = 0
    history: list = field(default_factory=list)  # the metrics of all steps so far
    groups: list = field(default_factory=list)  # the last step's B groups of G completions


def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False,
          after_step=None):
    r"""Train `model` in place. Returns the metrics of all steps, a list of dicts.

    `dataset` is a datasets.Dataset or a list of dicts, with the same columns in all rows: a
    `prompt` (a string or a chat), and what the reward function needs (`grade`, section 9, says
    how it is called). A real call, after imports from transformers and from this file:

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct").to("cuda")
        tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
        asks = [{"role": "user", "content": "Put %d+%d in \\boxed{}." % (n, n)} for n in range(99)]
        data = [{"prompt": [ask], "answer": str(2 * n)} for n, ask in enumerate(asks)]
        def reward(completions, answer, **columns):  # each completion is a chat of one message
            return [rule_reward(chat[0]["content"], a) for chat, a in zip(completions, answer)]
        train(model, tokenizer, data, reward, GRPOConfig(steps=20, learning_rate=1e-5), "sums")
        model.save_pretrained("sums")  # and tokenizer.save_pretrained("sums")

    `output_dir`, here "sums", gets metrics.jsonl, with a line for each step, and checkpoint.pt
    every `save_steps` steps and at the end. To go on from the last checkpoint, load the model
    from before training (pi_ref is a copy of it), and add resume=True to the same call. Only
    `steps`, `save_steps` and `micro_batch_size` may differ.

    `after_step(learner)` is called after each step, before the step is saved. It may add
    figures to learner.history[-1], the step's metrics; learner.groups has the completions. A
    prompt that is too long for the model is an error when it is drawn. Remove such prompts."""
    if resume and not output_dir:
        raise ValueError("resume=True needs the output_dir of the run that is to go on")
    check_data(dataset, reward_fn)
    check_settings(config)  # again, since they may have been changed
    learner = make_learner(model, tokenizer, config)
    if output_dir:
        open_folder(Path(output_dir), learner, resume)
    stream = example_stream(dataset, config.seed, learner.examples_seen)
    bar = tqdm(range(len(learner.history) + 1, config.steps + 1))
    for step in bar:
        rate = scheduled_rate(config, step)
        learner.optimizer.param_groups[0]["lr"] = rate
        # Seeds Python, NumPy and PyTorch. A resumed run draws the same, unless memory ran out.
        set_seed((config.seed * 1_000_003 + step) % 2**32)
        started = time.perf_counter()

        # Moves 1 and 2: sample completions, and reward each (sections 8 and 9).
        groups = sample_and_grade(learner, stream, reward_fn)
        completions = sum(groups, [])  # the groups joined: a list of N
        sampled = time.perf_counter()

        # Move 3: compare each with its group (section 1). Truncated completions count, too: the
        # policy wrote them, so they belong to the group's mean.
        advantages = group_advantages(rewards_of(groups), config.scale_rewards)  # (B, G)
        for completion, advantage in zip(completions, advantages.flatten().tolist()):
            completion.advantage = advantage

        # Move 4: log-probs by pi_ref and pi_old (section 10). Sorted by length, neighbours need
        # little padding. The longest come first: if they do not fit into memory, it shows early.
        completions.sort(key=lambda completion: -len(completion.ids))
        if config.beta > 0:
            write_logprobs(learner, learner.reference, completions, "ref_logprobs")
        if config.num_iterations * config.num_mini_batches > 1:  # else pi_old is pi_theta
            write_logprobs(learner, learner.model, completions, "old_logprobs")

        # Move 5: update the weights (section 11).
        updates = []
        for mini_batch in mini_batches(completions, config):
            updates.append(update(learner, mini_batch))

        metrics = {"step": step, "learning_rate": rate, "examples_seen": learner.examples_seen,
                   "sample_seconds": sampled - started,
                   "update_seconds": time.perf_counter() - sampled, **metrics_of(groups, updates)}
        bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
        learner.history.append(metrics)
        learner.groups = groups
        if after_step:
            after_step(learner)
        if output_dir:
            save_run(Path(output_dir), learner)
    return learner.history


def rewards_of(groups):
    """The rewards of B groups of G completions, as a tensor (B, G)."""
    return torch.tensor([[c.reward for c in group] for group in groups], dtype=torch.float64)


def rewards_differ(group):
    """Whether the rewards of a group differ. If not, its advantages are 0, and teach nothing."""
    return group_advantages(rewards_of([group])).any()  # differ by more than a millionth


# ---- 8. Sampling: move 1 -----------------------------------------------------------------
# The model reads the prompt and gives a probability to each possible next token. One is drawn,
# the model reads it, and so on. `model.generate` does this too, but with settings that are stored
# with the model. Qwen2.5-0.5B-Instruct has temperature 0.7, top_p 0.8, top_k 20 and
# repetition_penalty 1.1, and the library's default is top_k 50. All of them change the
# probabilities. If one stays on, `generate` draws from one distribution, and the ratio has the
# log-probs of another. The loop below draws from softmax(logits / temperature). It also
# keeps the log-prob of each draw. Section 10 computes these log-probs again. The mean absolute
# difference is logged as sampler_gap: about 1e-6 in float32, and a few hundredths at most in
# bfloat16, where sampling and section 10 round differently. If it is larger, sampling and section
# 10 differ in temperature, mask or positions. (The ratio cannot show this, because both of its
# parts come from section 10.)
def sample_and_grade(learner, stream, reward_fn):
    """B groups of G completions with rewards, for the next examples of the stream."""
    config = learner.config

    def sample(examples):
        return sample_groups(learner.model, learner.tokenizer, examples, config.num_generations,
                             config.max_completion_length, config.temperature)

    groups = []
    for _ in range(1 + config.dynamic_sampling):  # one round by default
        # Replace groups that teach nothing. (Round 1 has none. What the last round brings is kept.)
        groups = [group for group in groups if rewards_differ(group)]
        examples = [next(stream) for _ in range(config.prompts_per_step - len(groups))]
        if not examples:
            break
        learner.examples_seen += len(examples)
        # All at once, if they fit into memory: for a GPU, many rows take hardly longer than few.
        fresh = in_parts(sample, examples, learner.at_once, "prompts")
        grade(reward_fn, sum(fresh, []))
        groups += fresh
    return groups


@torch.no_grad()
def sample_groups(model, tokenizer, examples, num_generations, max_completion_length,
                  temperature=1.0):
    """G = `num_generations` completions for each of B examples: B lists of G `Completion`.

    Examples are dicts with a "prompt", which is a string or a chat (a list of messages with role
    and content). A completion ends with the first end token, or is cut off at the limit.
    Temperature 0 takes the likeliest token each time, with its log-prob at temperature 1.
    Reproducible under torch.manual_seed. Leaves the model in eval mode, also for the update:
    dropout would change pi. ValueError for numbers out of range, empty or too long prompts."""
    G = num_generations
    if min(G, max_completion_length) < 1 or not 0 <= temperature < math.inf:
        raise ValueError(f"{G} completions of {max_completion_length} tokens at temperature "
                         f"{temperature}: wanted at least 1, 1 and 0")
    model.eval()
    end_ids = end_token_ids(model, tokenizer)
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    ids, mask = pad_rows(prompts, "left", model.device)  # (B, P)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # in tokens
    if context and ids.shape[1] + max_completion_length > context:
        raise ValueError(f"a prompt of {ids.shape[1]} tokens and {max_completion_length} more are "
                         f"above {context}: {tokenizer.decode(max(prompts, key=len))!r:.300}")
    # Each prompt is read once. The cache is what the model keeps of the tokens it has read.
    out = forward(model, ids, mask, use_cache=True, logits_to_keep=1)  # logits of the last only
    cache = out.past_key_values
    # Copy each row G times. reorder_cache(rows) is cache[rows], as logits[rows] below.
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(G)  # 0, 0, ... 1, 1
    cache.reorder_cache(rows)
    logits, mask = out.logits[:, -1][rows], mask[rows]  # (N, V), (N, P)

    # N completions without a token yet. They count as truncated until their end token comes.
    completions = [Completion(example, prompt_ids)
                   for example, prompt_ids in zip(examples, prompts) for _ in range(G)]
    live = completions  # the n that have not ended: row i of logits, mask, cache is for live[i]
    for t in range(max_completion_length):
        tokens = draw_tokens(logits, temperature)  # (n,)
        logprobs = log_probability(logits, tokens, temperature if temperature > 0 else 1.0)  # (n,)
        for completion, token, logprob in zip(live, tokens.tolist(), logprobs.tolist()):
            completion.ids.append(token)
            completion.sampler_logprobs.append(logprob)
            completion.truncated = token not in end_ids
        going_on = [i for i, completion in enumerate(live) if completion.truncated]  # no end yet
        if not going_on or t + 1 == max_completion_length:
            break
        if len(going_on) < len(live):  # rows that have ended leave the batch
            live = [live[i] for i in going_on]
            rows = torch.tensor(going_on, device=model.device)
            tokens, mask = tokens[rows], mask[rows]  # the logits will be new ones
            cache.reorder_cache(rows)
        mask = F.pad(mask, (0, 1), value=1)  # (n, P+t+1): a column for `tokens`, read next
        out = forward(model, tokens.unsqueeze(1), mask, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]  # (n, V)
    for completion in completions:
        completion.text = tokenizer.decode(completion.ids, skip_special_tokens=True)
        completion.sampler_logprobs = torch.tensor(completion.sampler_logprobs, dtype=torch.float32)
    return [completions[i : i + G] for i in range(0, len(completions), G)]


def draw_tokens(logits, temperature):
    """One token for each row, from softmax(logits / temperature): (n, V) -> (n,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = (logits.float() / temperature).softmax(dim=-1)  # (n, V)
    return torch.multinomial(probabilities, 1).squeeze(1)


def encode_prompt(tokenizer, prompt):
    """A prompt, a string or a chat, as a list of token ids. ValueError if it has none."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:  # add_generation_prompt opens the assistant's turn, which the model then writes
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens, so nothing can follow it")
    return ids


def end_token_ids(model, tokenizer):
    """All token ids that end a completion, sorted. ValueError if there are none."""
    # Qwen's chat models have two, and each source below may list only one. A sampler that
    # misses one goes on after the end, and the model is trained on what follows.
    found = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)  # an id, a list of ids, or None
        if isinstance(ids, int):
            ids = [ids]
        found.update(ids or [])
    if not found:
        raise ValueError("model and tokenizer have no eos_token_id, so no completion could end")
    return sorted(found)


# `pad_rows` pads prompts on the left, and completions on the right. Section 10 joins them:
#
#     column             0  1  2    3  4  5
#     row 0  ids         a  b  c    x  y  END   prompt a b c, completion x y END
#     row 1  ids         .  .  d    z END  .    prompt d, completion z END; dots are padding
#     row 1  mask        0  0  1    1  1  0     1 at real tokens
#     row 1  positions   0  0  0    1  2  2     of real tokens, counted from 0
#
# The logits of a column predict the token of the next: columns 2 to 4 give the log-probs.
def pad_rows(rows, side, device):
    """n lists of token ids -> ids (n, longest), and the mask (n, longest) of real ones."""
    # The padding is -1, and becomes 0 when the mask has been made. Why not pad_token_id? In some
    # models it is the end token. The mask would hide the real end: they would not learn to stop.
    rows = [torch.tensor(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side).to(device)
    return ids.clamp(min=0), (ids >= 0).long()


def forward(model, ids, mask, **more):
    """Run the model on `ids`. The cache holds earlier columns. `mask` is for all columns."""
    # Count the real tokens from 0. Padding must not shift the positions.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # the shape of the mask
    # One of PyTorch's ways to compute attention, cuDNN's, is switched off: with masks it has
    # given NaN gradients on an H100 (pytorch#196678), and it starts slowly for each new length.
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return model(input_ids=ids, attention_mask=mask,
                     position_ids=positions[:, -ids.shape[1] :], **more)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def log_probability(logits, ids, temperature=1.0):
    """log softmax(logits / temperature) at the given tokens: (..., V), (...) -> (...)."""
    # In float32, because log_softmax in bfloat16 is off by hundredths.
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # (..., V)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)  # picks the entry of each id


def in_parts(work, items, at_once, unit):
    """Call work(part) on parts of at_once[unit] items, and join the lists that it returns.

    If CUDA's memory runs out, at_once[unit] is halved for the rest of the run, and work goes on
    from the part that failed. On a GPU, a weight needs about 20 bytes: 2 for the model, 2 for
    pi_ref, 4 for the master, 4 for its gradient, 8 for AdamW. Sampling also needs memory for the
    cache (rows * columns * layers), and the update for the values of all layers and the logits
    (n * T * V). If 1 prompt is too much, lower num_generations. If 1 completion is, the limit."""
    results = []
    while items:
        part = items[: at_once[unit]]
        try:
            results += work(part)
            items = items[len(part) :]
        except torch.OutOfMemoryError:  # the error keeps the part's tensors until this block ends
            if at_once[unit] == 1:
                raise
            at_once[unit] //= 2
            tqdm.write(f"out of memory: from here on {at_once[unit]} {unit} at once")
    return results


# ---- 9. The reward: move 2 ---------------------------------------------------------------
# Where the right answer is known, a rule gives the reward. We need no "reward model", a second
# network that guesses it. `rule_reward` is a rule for one completion. `train` takes a *reward
# function* for many, which `grade` calls. A model in training can write any text. So the rule
# must accept every text, take little time, and never run what it reads. A right answer
# without a box earns 0, since the number may be there by accident. A small model soon learns
# to write a box, because that pays. If nearly all rewards stay at 0.5, it has learned nothing
# else. This is a small case of "reward hacking": rewards go up, not skill.
def rule_reward(completion, answer):
    r"""0.0 without a \boxed{...}, 0.5 with one, 1.5 if the last one holds the answer.

    `answer` is a string or a number. A blank or incomplete last box counts as none. Box and
    answer are compared as strings, and as numbers that may differ by less than 0.01. "72
    apples" is not 72, so let the prompt ask for the number only. Never raises, linear time."""
    boxed = extract_boxed(completion)
    if not boxed:
        return 0.0
    answer = str(answer).strip()
    found = read_number(boxed)
    wanted = read_number(answer)
    # round: 5.01 - 5 is 0.00999... in floating point, and would count as below 0.01.
    near = found is not None and wanted is not None and round(abs(found - wanted), 9) < 0.01
    return 1.5 if near or boxed == answer else 0.5


def extract_boxed(text):
    r"""The contents of the last \boxed{...}, without blanks around them. Braces in it are
    matched: \boxed{\frac{1}{2}} holds \frac{1}{2}. None if it is missing or incomplete."""
    _, mark, rest = text.rpartition(r"\boxed{")
    if not mark:
        return None
    depth = 1
    for end, character in enumerate(rest):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return rest[:end].strip()
    return None


def read_number(text):
    r"""The number in `text` as a float, or None. "1,000", "1{,}000", "$1000", "1000\%",
    "1000." and "1000.0" are one thousand. "12,34", "3 4", ".5", "1e3" and "nan" are none."""
    text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip()
    text = text.removesuffix(".").strip()  # the full stop of a sentence
    # A sign, then 1,234,567 or digits, then .digits. float() would also take "nan", "1_000".
    pattern = r"[+-]?\s*([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?"
    if not re.fullmatch(pattern, text):
        return None
    return float(re.sub(r"[,\s]", "", text))


def grade(reward_fn, completions):
    """Call the reward function, and keep the rewards in the completions.

        reward_fn(prompts=..., completions=..., completion_ids=..., **columns) -> N numbers

    TRL calls it in this way too (with more arguments), so a function with **columns fits
    both. Each argument is a list with a value for each completion, a copy. `columns` are the
    other columns of the data. For a string prompt, the completion is a string. For a chat, it
    is a chat of one message. A ValueError or TypeError for other than N finite numbers."""
    rows = [completion.example for completion in completions]
    given = {name: [row[name] for row in rows] for name in rows[0]}
    given["prompts"] = given.pop("prompt")
    given["completion_ids"] = [completion.ids for completion in completions]
    given["completions"] = [c.text if isinstance(c.example["prompt"], str)
                            else [{"role": "assistant", "content": c.text}] for c in completions]
    rewards = reward_fn(**copy.deepcopy(given))
    count = len(rewards) if hasattr(rewards, "__len__") else repr(rewards)  # for the error
    if count != len(rows):
        raise ValueError(f"the reward function returned {count} and not {len(rows)} numbers")
    for completion, reward in zip(completions, rewards):
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"the reward function returned {reward} for {completion.text!r:.200}")
        completion.reward = float(reward)


# ---- 10. Log-probs: move 4 ---------------------------------------------------------------
# The model reads prompt and completion again, now all tokens in parallel: here for pi_ref
# and pi_old, without a gradient, and in section 11 for pi_theta, with one.
@torch.no_grad()
def write_logprobs(learner, model, completions, name):
    """Compute the completions' log-probs by `model`, and keep them in their field `name`."""

    def write(part):
        logprobs, _ = compute_logprobs(model, part, learner.config.temperature)  # (n, T)
        for completion, row in zip(part, logprobs.cpu()):
            setattr(completion, name, row[: len(completion.ids)])  # (L,)
        return part  # in_parts joins lists

    in_parts(write, completions, learner.at_once, "completions")


def compute_logprobs(model, completions, temperature):
    """Log-probs (n, T) of n completions' tokens, and the mask (n, T) of real tokens."""
    prompt_ids, prompt_mask = pad_rows([c.prompt_ids for c in completions], "left", model.device)
    ids, mask = pad_rows([c.ids for c in completions], "right", model.device)  # (n, T)
    input_ids = torch.cat([prompt_ids, ids], dim=1)  # (n, P+T): see the picture in section 8
    attention_mask = torch.cat([prompt_mask, mask], dim=1)  # (n, P+T)
    return token_logprobs(model, input_ids, attention_mask, ids.shape[1], temperature), mask


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0):
    """log pi of each completion token: ids and mask (n, P+T) -> (n, T), float32.

    Differentiable. T is `completion_length`. Prompts are padded on the left, completions on
    the right. With another `temperature` than that of sampling, pi is another policy."""
    # Column j predicts the token of column j + 1, so the logits begin one column earlier.
    out = forward(model, input_ids, attention_mask, use_cache=False,
                  logits_to_keep=completion_length + 1)
    return log_probability(out.logits[:, :-1], input_ids[:, -completion_length:], temperature)


# ---- 11. The update: move 5 --------------------------------------------------------------
# An update is a step of the optimizer, with the gradient of the loss over a mini-batch. A
# mini-batch rarely fits into memory. So the gradients of its micro-batches are added up. The
# loss is a mean, so each micro-batch counts by its share: a mean over 4 completions is 3/4 of
# the mean over the first three, plus 1/4 of the last.
def mini_batches(completions, config):
    """In each pass, every completion is in one of the mini-batches, at random."""
    for _ in range(config.num_iterations):
        order = torch.randperm(len(completions))
        for places in order.tensor_split(config.num_mini_batches):  # into nearly equal parts
            # `completions` goes from long to short. Sorted places keep this order.
            yield [completions[i] for i in sorted(places.tolist())]


def update(learner, mini_batch):
    """Make an update. Returns the metrics of its micro-batches, and the norm of the gradient. It
    returns ([], 0.0) if no completion is useful, ([], None) if the norm is not finite: no step."""
    config = learner.config
    # Without KL, a completion with advantage 0 has no gradient. It counts only in `share`, below.
    useful = [c for c in mini_batch if c.advantage != 0 or config.beta > 0]
    if not useful:
        return [], 0.0  # no step: AdamW's momentum would move the weights without a gradient
    for master in learner.masters:
        master.grad = torch.zeros_like(master)

    def add(micro_batch):
        return [add_gradients(learner, micro_batch, mini_batch)]

    results = in_parts(add, useful, learner.at_once, "completions")
    norm = torch.nn.utils.clip_grad_norm_(learner.masters, config.max_grad_norm).item()
    if math.isfinite(norm):
        learner.optimizer.step()
        for parameter, master in zip(learner.parameters, learner.masters):
            parameter.data.copy_(master)  # rounds, if the parameter is in bfloat16
    else:
        tqdm.write(f"update skipped: the norm of the gradient is {norm}")
        results, norm = [], None
    learner.optimizer.zero_grad()  # sampling needs the memory
    return results, norm


def add_gradients(learner, micro_batch, mini_batch):
    """Add the gradient of a micro-batch, a part of the mini-batch, to the masters' gradients.
    Returns its metrics. If memory runs out, the masters' gradients are still unchanged."""
    config = learner.config
    learner.model.zero_grad()  # gradients left by a part that ran out of memory
    logprobs, mask = compute_logprobs(learner.model, micro_batch, config.temperature)  # (n, T)

    def padded(rows):  # n tensors (L,) -> (n, T)
        return pad_sequence(rows, batch_first=True).to(mask.device)
    # With one update a step, pi_theta is still pi_old. The ratio exp(logprobs - logprobs.detach())
    # is 1, but has a gradient, that of logprobs (section 2). With several, move 4 stored pi_old's
    # (not the sampler's: they are rounded differently in bfloat16, the ratio would not start at 1).
    old_logprobs = logprobs.detach()  # (n, T)
    if micro_batch[0].old_logprobs is not None:
        old_logprobs = padded([c.old_logprobs for c in micro_batch])
    ref_logprobs = None
    if config.beta > 0:
        ref_logprobs = padded([c.ref_logprobs for c in micro_batch])  # (n, T)
    advantages = logprobs.new_tensor([c.advantage for c in micro_batch])  # (n,), float32
    loss, metrics = grpo_loss(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, epsilon=config.epsilon,
        epsilon_high=config.epsilon_high, beta=config.beta, loss_type=config.loss_type,
        max_completion_length=config.max_completion_length, kl_penalty_type=config.kl_penalty_type,
        importance_sampling_level=config.importance_sampling_level,
        use_bias_correction_kl=config.use_bias_correction_kl)
    gap = (padded([c.sampler_logprobs for c in micro_batch]) - old_logprobs).abs()  # (n, T)
    metrics["sampler_gap"] = masked_mean(gap, mask).item()
    metrics["tokens"] = int(mask.sum())
    share = len(micro_batch) / len(mini_batch)
    if config.loss_type == "dapo":  # the loss is a mean over tokens: the share of its tokens
        share = metrics["tokens"] / sum(len(completion.ids) for completion in mini_batch)
    metrics["loss"] *= share
    (loss * share).backward()
    for parameter, master in zip(learner.parameters, learner.masters):
        if parameter.grad is not None:
            master.grad += parameter.grad  # in float32
            parameter.grad = None
    return metrics


def metrics_of(groups, updates):
    """The metrics of a step: a dict of finite numbers. With dynamic sampling, they are of the
    groups that are learned from, not of all that were sampled."""
    rewards = rewards_of(groups)  # (B, G)
    completions = sum(groups, [])
    tokens = sum(len(c.ids) for c in completions)
    # Each of `updates` is what `update` returned: its micro-batches' metrics, and the norm of its
    # gradient (None: it was skipped). The losses are multiplied by the micro-batch's share
    # of the mini-batch, so they add up to the loss of an update. "loss" is the mean over updates.
    norms = [norm for _, norm in updates if norm is not None]
    parts = [part for micro_batches, _ in updates for part in micro_batches]
    not_skipped = max(1, len(norms))
    metrics = {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(dim=1, correction=0).mean().item(),  # of the groups' stds
        "zero_variance_fraction": sum(not rewards_differ(group) for group in groups) / len(groups),
        # The mean of -log pi. Near 0 the policy always writes the same, and finds nothing new.
        "entropy": -sum(c.sampler_logprobs.sum().item() for c in completions) / tokens,
        # If the length shrinks and the reward stays low, the policy may only write boxes.
        "completion_length": tokens / len(completions),
        "truncated_fraction": sum(c.truncated for c in completions) / len(completions),
        "loss": sum(part["loss"] for part in parts) / not_skipped,
        "grad_norm": sum(norms) / not_skipped,
        "skipped_updates": len(updates) - len(norms),
        "ratio_max": max((part["ratio_max"] for part in parts), default=0.0)}
    # Means over the tokens of the updates. At beta = 0, these leave out advantages of 0.
    # A kl that stays above 1 says that the policy runs away. (sampler_gap: section 8.)
    computed = max(1, sum(part["tokens"] for part in parts))
    for name in ("kl", "clip_fraction", "sampler_gap"):
        metrics[name] = sum(part[name] * part["tokens"] for part in parts) / computed
    return metrics


# ---- 12. What is not GRPO: precision, rates, order, files, checks ------------------------
# Why masters. On a GPU that can, the model computes in bfloat16, which is fast but coarse:
# near 0.02, its numbers lie 0.00012 apart. AdamW moves a weight by about the learning rate,
# say 0.000001, and the sum rounds back to the old weight. So the optimizer updates float32
# copies, the masters, and the model gets them back, rounded.
def make_learner(model, tokenizer, config):
    """Set up precision, reference and optimizer. Casts the model's parameters in place."""
    on_gpu = model.device.type == "cuda"
    in_bf16 = config.bf16
    if in_bf16 is None:
        in_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    parameters, masters = [], []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(f"{name} is {parameter.dtype}: load the model without quantization")
        master = parameter.detach().float()
        # Not model.bfloat16(): it would also round the constants that encode positions.
        parameter.data = master.bfloat16() if in_bf16 else master  # float32: they share the memory
        if parameter.requires_grad:
            parameters.append(parameter)
            masters.append(master)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta > 0 else None
    start = [master.flatten()[:9].tolist() for master in masters]  # to recognise the model
    # AdamW's default weight_decay would shrink the weights. `fused` needs less memory.
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.0, fused=on_gpu)
    return Learner(config, model, tokenizer, reference, parameters, masters, start, optimizer,
                   {"prompts": config.prompts_per_step, "completions": config.micro_batch_size})


def scheduled_rate(config, step):
    """Up linearly to the peak at step `warmup_steps`, then down; 0 only after the last step."""
    up = step / max(1, config.warmup_steps)  # 1 at step `warmup_steps`
    down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)  # also 1
    return config.learning_rate * min(up, down)


def example_stream(dataset, seed, start):
    """Examples without end, from number `start` on. Each epoch has an order of its own."""
    epoch, place = divmod(start, len(dataset))
    while True:
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(dataset), generator=shuffle, device="cpu").tolist()
        for i in order[place:]:
            yield dataset[i]
        epoch, place = epoch + 1, 0


def save_run(folder, learner):
    """Write metrics.jsonl and, when it is due, checkpoint.pt (12 bytes for each weight)."""
    config = learner.config
    # `default=float`: after_step may have added numbers of NumPy's, which JSON does not know.
    lines = [json.dumps(metrics, default=float) for metrics in learner.history]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if config.save_steps and (len(lines) % config.save_steps == 0 or len(lines) == config.steps):
        saved = {"settings": vars(config), "start": learner.start, "history": lines,
                 "examples_seen": learner.examples_seen, "masters": learner.masters,
                 "optimizer": learner.optimizer.state_dict()}
        new = folder / "checkpoint.new"
        try:
            torch.save(saved, new)
            new.replace(folder / "checkpoint.pt")  # never half a file
        except RuntimeError:
            new.unlink()
            raise OSError(f"{new} cannot be written: is the disk full?")


def open_folder(folder, learner, resume):
    """Make the folder. If it has a checkpoint, load it into the learner. ValueError if it
    holds a run and `resume` is False, or a run with other settings or another model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    if not resume and (path.exists() or (folder / "metrics.jsonl").exists()):
        raise ValueError(f"{folder} holds a run: resume it, or name another folder")
    if not path.exists():
        if resume:
            tqdm.write(f"no checkpoint in {folder}: starting at step 1")
        return
    try:
        saved = torch.load(path, map_location="cpu")
        settings = saved["settings"]
    except Exception:
        raise ValueError(f"{path} is damaged. Delete it to start at step 1")
    for name, there in settings.items():
        here = getattr(learner.config, name)
        if here != there and name not in ("steps", "save_steps", "micro_batch_size"):
            raise ValueError(f"{folder} holds another run: {name} is {there} there, {here} here")
    # If the trained model were passed, the reference would be a copy of it.
    if saved["start"] != learner.start:
        raise ValueError(f"{folder} began with another model: pass the one from before training")
    for parameter, master, value in zip(learner.parameters, learner.masters, saved["masters"]):
        master.copy_(value)
        parameter.data.copy_(value)
    learner.optimizer.load_state_dict(saved["optimizer"])
    learner.history = [json.loads(line) for line in saved["history"]]
    learner.examples_seen = saved["examples_seen"]
    tqdm.write(f"going on after step {len(learner.history)}")


def check_data(dataset, reward_fn):
    """ValueError for data or a reward function that cannot work."""
    if not callable(reward_fn):
        raise ValueError(f"reward_fn is {reward_fn!r:.200}, and must be one function")
    if not len(dataset):
        raise ValueError("the data set is empty")
    taken = {"prompts", "completions", "completion_ids"}
    for row in (dataset if isinstance(dataset, list) else [dataset[0]]):  # Dataset: all alike
        if row.keys() != dataset[0].keys() or "prompt" not in row or taken & row.keys():
            raise ValueError(f"a row has the columns {list(row)}. All rows need the same ones, a "
                             f"prompt among them, and none of {sorted(taken)}")


def check_settings(config):
    """ValueError for a setting that makes no sense."""
    least = dict(num_generations=2, prompts_per_step=1, max_completion_length=1, steps=1,
                 num_iterations=1, num_mini_batches=1, micro_batch_size=1, temperature=1e-6,
                 max_grad_norm=1e-6)  # 0 for all other numbers
    for setting in fields(config):
        name = setting.name
        value = getattr(config, name)
        if hasattr(value, "item"):  # one of NumPy's numbers: a checkpoint cannot hold it
            value = value.item()
            setattr(config, name, value)
        if value is setting.default:  # the default is valid, None included
            continue
        if isinstance(setting.default, str):  # a choice
            wanted = f"one of {get_args(setting.type)}"
            valid = value in get_args(setting.type)
        elif name in ("bf16", "use_bias_correction_kl"):
            wanted = "True or False"
            valid = isinstance(value, bool)
        else:
            lowest = least.get(name, 0)
            kinds = [int] if setting.type is int else [int, float]  # 1 will do for a float
            wanted = f"a finite {kinds[-1].__name__}, at least {lowest}"
            valid = type(value) in kinds and lowest <= value < math.inf  # not so for NaN
        if not valid:
            raise ValueError(f"{name} is {value!r}, and must be {wanted}")
    if config.num_mini_batches > config.prompts_per_step * config.num_generations:
        raise ValueError(f"num_mini_batches is {config.num_mini_batches}, above the completions")


# ---- 13. The relatives, and the apples ---------------------------------------------------
# GRPO's relatives, as settings:
#
#   Dr. GRPO   scale_rewards="none", loss_type="dr_grpo", beta=0. The std would make very easy
#              and very hard prompts count more, so it is left out
#   RLOO       REINFORCE Leave One Out: as Dr. GRPO, but scale_rewards="rloo" (advantages times
#              G/(G - 1)), with one update a step, since RLOO has no clip
#   REINFORCE  with a baseline: Dr. GRPO with one update a step, so that every ratio is 1
#   DAPO       loss_type="dapo", beta=0, epsilon_high=0.28 (rare tokens may grow more),
#              `overlong_penalty` added to the reward, and dynamic_sampling=3 (groups of equal
#              rewards are replaced up to three times; in the paper, until none is left)
#   GSPO       importance_sampling_level="sequence" (arXiv:2507.18071), epsilon=3e-4,
#              epsilon_high=4e-4, several updates a step. A completion has one ratio, the
#              geometric mean of its tokens' ratios. (Their product explodes: 1.01^300 = 20)
#
# Differences from the papers. R1's report has one ratio for a completion; here, as in
# DeepSeekMath, each token has its own. "dapo" averages over a mini-batch, as libraries do;
# the paper averages over a prompt's group. Left out: a learned reward model, rewards for the
# steps of a solution, a reference that is renewed, gradient checkpointing, several GPUs.
def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty (arXiv:2503.14476, equation 13): lengths in tokens (N,) -> (N,).

    It is 0 up to `buffer` tokens below the limit, then falls linearly to -1 at the limit. Add
    it in a reward function; lengths = torch.tensor([len(ids) for ids in completion_ids])."""
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


if __name__ == "__main__":
    texts = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
    rewards = torch.tensor([rule_reward(text, "5") for text in texts])  # (4,)
    advantages = group_advantages(rewards)  # (4,)
    probabilities = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])  # 1.0: padding
    logprobs = probabilities.log().requires_grad_()  # (4, 2)
    old_logprobs = torch.full_like(probabilities, 0.2).log()  # (4, 2), of pi_ref as well
    mask = probabilities < 1  # (4, 2)
    loss, _ = grpo_loss(logprobs, old_logprobs, old_logprobs, advantages, mask)
    loss.backward()
    ratio = probabilities / 0.2  # (4, 2)
    surrogate = clipped_surrogate(ratio, advantages)  # (4, 2)
    k3 = k3_kl(logprobs, old_logprobs)  # (4, 2)
    print("completion        reward  advantage  ratio  surrogate      k3  gradient")
    for i, t in mask.nonzero().tolist():
        print(f"{texts[i]:16}  {rewards[i]:6.1f}  {advantages[i]:9.1f}  {ratio[i, t]:5.1f}  "
              f"{surrogate[i, t]:9.1f}  {k3[i, t]:6.4f}  {logprobs.grad[i, t]:8.4f}")
    print(f"loss {loss.item():.4f}")
