# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how a language model learns to reason from rewards alone.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) is a loop of five moves. Here it is, with the functions of this file:

    for step in range(steps):                                           train
        prompts = the next B prompts of the data set                    example_stream
        completions = G of them for each prompt, sampled                1 sample_groups
        rewards = a number for each completion, given by a rule         2 grade, rule_reward
        advantages = (reward - mean of its group) / std of its group    3 group_advantages
        old, ref = log-probs of the sampled tokens, held constant       4 compute_logprobs
        for mini_batch in a random split of the completions:            5 update
            logprobs = the same log-probs now, with a gradient            compute_logprobs
            loss = grpo_loss(logprobs, old, ref, advantages, mask)        grpo_loss
            loss.backward(), then a step of the optimizer                 backward, update

A *policy*, written pi, is a way to choose the next action. Here the action is a token:
pi(token | text so far) is the probability that the model gives to it. We need three:

    pi_theta  the model that is trained. Only this one gets a gradient
    pi_old    the model as it was when it sampled these completions. We keep only the
              log-probabilities that it gave to their tokens
    pi_ref    a frozen copy of the model from before training. A penalty keeps pi_theta near
              it. Where the penalty's weight beta is 0, there is no such copy

The equation that this file computes. For a prompt q, sample completions o_1 ... o_G.
Completion i has |o_i| tokens. Its token number t is o_it, and o_i,<t are the tokens before
that. It has one reward R_i, and one advantage A_i for all of its tokens. GRPO maximises J,
averaged over the prompts:

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           grpo_loss
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token   k3_kl

eps (0.2) says how far the ratio r may move before the clip acts. k3 estimates how far
pi_theta is from pi_ref (section 3 explains the name). beta (0.04) is its weight.

One small case runs through the mathematics, the apples: "John has 3 apples and buys 2
more. How many apples does he have?" The rule pays 0.5 for a result in \boxed{...}, and 1.0
more if the result is right. The model wrote four completions:

    completion 1    3+2 = \boxed{5}      reward 1.5
    completion 2    \boxed{5}            reward 1.5
    completion 3    \boxed{6}            reward 0.5
    completion 4    3-2 = \boxed{1}      reward 0.5

To keep the sums small, pretend that completions 1 and 4 are two tokens long, and
completions 2 and 3 one.

Shapes: B prompts with G completions each are N = B * G rows, and n of them are computed at
once. T is the length of the longest completion in a tensor, P that of the longest prompt,
and V the size of the vocabulary. Log-probs are log-probabilities (natural logarithm).

Sections 1 to 5 are the mathematics, and section 1 is move 3. Section 6 has the settings, 7
one step, 8 to 11 the other four moves, 12 the run, and 13 GRPO's relatives."""

import copy
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, Optional, get_args, get_origin

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed


# ---- 1. Advantages: better or worse than the group ---------------------------------------
# A reward of 0.5 may be good (the prompt is hard, and most completions earn 0) or bad (all
# others earned 1.5). What counts is the difference from a baseline: the reward that was to
# be expected. PPO, the method that GRPO simplifies, trains a second network to predict it,
# the critic. GRPO samples a group of completions for the same prompt, and takes the mean of
# their rewards. It divides by their std, so that the unit of the reward does not matter.
def group_advantages(rewards, scale_rewards="group"):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> float32 (..., G).

    This std divides by G. torch's default divides by G - 1, and with its larger std the
    advantages are 6.5 % smaller at G = 8. `scale_rewards` is the divisor of R_i - mean(R):

        "group"  the std of the group
        "none"   1 (Dr. GRPO)
        "batch"  the std of all rewards that are given
        "rloo"   (G - 1) / G, which gives R_i minus the mean of the *other* rewards (RLOO)

    A group of equal rewards (to a millionth) gets exact zeros. NaN and inf give NaN or inf.
    ValueError for a group of one, and for any other name."""
    G = rewards.shape[-1]
    if G < 2:
        raise ValueError(f"the rewards are {tuple(rewards.shape)}: a group needs two or more")
    rewards = rewards.double()
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = centered.square().mean(dim=-1, keepdim=True).sqrt()  # (..., 1)
    scales = {"group": std, "none": 1, "batch": rewards.std(correction=0), "rloo": (G - 1) / G}
    if scale_rewards not in scales:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not one of {list(scales)}")
    # Equal rewards can differ by rounding: 0.1 + 0.2 is not quite 0.3. Divided by a std of
    # 1e-17, that error would become an advantage of size 1. So a std of at most a millionth
    # of the largest reward counts as 0. (Much code adds 1e-4 to every std instead.)
    equal = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    return (centered / scales[scale_rewards]).masked_fill(equal, 0.0).float()


# The apples: R = [1.5, 1.5, 0.5, 0.5] has the mean 1 and the std 0.5, so
#
#     A = [+1, +1, -1, -1]
#
# If all completions of a group earn the same, because the prompt is too easy or too hard,
# all advantages are 0. The share of such groups is logged as zero_variance_fraction.


# ---- 2. Ratio and clip: learn from a completion, but not too much ------------------------
# Why log pi. Look at a single position first. The model draws a token with probability pi.
# Each of the V tokens has its own advantage A, a plain number without a gradient. We want
# the expected advantage, sum(pi * A) over all V tokens, to grow. Let grad be the gradient
# with respect to the weights of the model. Since grad log pi = (grad pi) / pi,
#
#     grad sum(pi * A) = sum(pi * A * grad log pi)
#
# The right side is the expected value of A * grad log pi for tokens drawn from pi, and an
# average over samples estimates an expected value. So we sample, and average A * grad log
# pi. The probability of a whole completion is the product of its tokens' probabilities. Its
# log is a sum, so grad log pi is a sum over the tokens too, and each token gets the
# completion's A. (Section 5 asks whether to add up over the tokens or to average.)
#
# Why a baseline. Subtracting a number b, near the expected reward, makes the estimate less
# noisy and costs nothing. The probabilities sum to 1 whatever the weights are, so b changes
# the expected gradient by b * sum(pi * grad log pi) = b * sum(grad pi) = b * grad 1 = 0.
# (One detail: b must not depend on the draw, but the group's mean contains R_i. That is
# harmless: R_i - mean(R) = (G - 1)/G * (R_i - mean of the *other* rewards), so the expected
# gradient is only shorter. The std depends on the draw too, and can turn it a little.)
#
# Why a ratio. The tokens were drawn from pi_old, and after an update pi_theta is another
# policy. The weight r = pi_theta / pi_old corrects for that: sum(pi_old * r * A) =
# sum(pi_theta * A). pi_old is constant, so grad r = (grad pi_theta) / pi_old = r * grad log
# pi_theta. At r = 1 the gradient of r * A is A * grad log pi, as above. (The reward depends
# on all tokens, so the exact weight is the product of all ratios. PPO takes only one.)
#
# Why the clip. Samples from pi_old say little about a policy far from it. So a token stops
# pushing once its ratio has moved by eps in the direction that its advantage asks for. The
# objective is min(r A, clip(r) A), where clip keeps r between 1 - eps and 1 + eps. Past the
# limit the min takes the clipped branch, which is constant and has no gradient. This is
# one-sided on purpose: if r moves the wrong way, the min takes r A, which pulls it back.
def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token: r (N, T), A (N,) -> (N, T).

    This is PPO's "surrogate" objective (arXiv:1707.06347, equation 7), to be maximised. An
    `epsilon` of 1 or more means no lower limit. `epsilon_high` is `epsilon` by default."""
    if epsilon_high is None:
        epsilon_high = epsilon
    A = advantages.unsqueeze(1)  # (N, 1): the same for every token of a completion
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)  # (N, T)
    return torch.min(ratio * A, clipped_ratio * A)


# The apples after some updates. Say that pi_old gave every token the probability 0.2, and
# that pi_theta now gives
#
#     completion 1: 0.3 and 0.2    2: 0.1    3: 0.3    4: 0.1 and 0.2
#
# Then the ratios are 1.5, 0.5 and 1. With eps = 0.2, all four cases of the clip are there:
# A is +1 or -1, and r too high or too low. The gradient is r * A, or 0 where clipped:
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi
#     +1   1.5 (no. 1)   min( 1.5,  1.2) =  1.2  clipped      0    good, already likelier
#     +1   0.5 (no. 2)   min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (no. 3)   min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (no. 4)   min(-0.5, -0.8) = -0.8  clipped      0    bad, already rarer
#     any  1.0           A                       not clipped  A    every token, at first
#
# With one update after each sampling (called on-policy), pi_theta is pi_old when the
# gradient is taken. Every ratio is 1, and the clip never acts. It acts when the same
# completions are used for several updates. A common mistake is max instead of min where A
# is negative. Then the bad token of row 4 is pushed down for ever, and row 3 is left alone.


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
    e^x >= 1 + x. Value and gradient are finite for log-ratios of size below 1e30."""
    log_ref_ratio = (ref_logprobs - logprobs).clamp(max=50)  # (N, T); e^89 would overflow
    return torch.expm1(log_ref_ratio) - log_ref_ratio  # expm1(x) is e^x - 1, precise near 0


# Why its expected value is the KL. For tokens drawn from pi_theta,
#
#     E[-log(pi_ref/pi_theta)] = E[log(pi_theta/pi_ref)] = KL(pi_theta || pi_ref)
#     E[ pi_ref/pi_theta ]     = sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1
#
# so on average the first and the last term of k3 cancel. They keep k3 from being negative,
# and make it less noisy while the policies are close. (E[pi_theta/pi_ref] is not 1.)
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

    The names are verl's and RLinf's. Others give a ValueError. x is log(pi_theta/pi_ref).

        "low_var_kl"  k3, the default
        "kl"          k1 = x. Its expected value is the KL, but as a loss it is only noise
        "mse"         k2 = x^2 / 2. Its expected gradient is the KL's, its value is not
        "abs"         |x|"""
    x = logprobs - ref_logprobs  # (N, T)
    if kl_penalty_type == "low_var_kl":
        return k3_kl(logprobs, ref_logprobs)
    if kl_penalty_type == "kl":
        return x
    if kl_penalty_type == "mse":
        return x.square() / 2
    if kl_penalty_type == "abs":
        return x.abs()
    raise ValueError(f"kl_penalty_type is {kl_penalty_type!r}: low_var_kl, kl, mse or abs")


# Why k1 is only noise as a loss. The weights change x at each token, and also which tokens
# are drawn. Autograd sees only the change of x. So an estimate can be right on average, and
# its gradient wrong on average. With tokens drawn from pi_theta (r = 1), the average
# gradient is E[factor * grad log pi_theta], with the factor
#
#     the KL itself   x           sum(grad pi * x) + sum(pi * grad x), and that is 0: see k1
#     k1              1           wrong: sum(pi * grad log pi) = sum(grad pi) = grad 1 = 0
#     k2              x           right: grad(x^2 / 2) = x * grad x
#     k3              1 - e^-x    that of KL(pi_ref || pi_theta), and close to x for small x
#     r * k3          x           right, for any r: grad r adds k3, and k3 + (1 - e^-x) = x
# The setting `use_bias_correction_kl` takes r * k3, as TRL 1.16 does by default.


# ---- 4. The masked mean: padding is not data ---------------------------------------------
# Completions have different lengths. In a tensor the short ones are filled up with padding.
# The mask is True at real tokens. Where it is False, a position is masked. Multiplying by
# the mask does not remove a NaN that stands there:
#
#     values [2, NaN], mask [True, False]    (values * mask).sum()              = NaN
#                                            torch.where(mask, values, 0).sum() = 2
def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is set (bool, int or float); 0, not NaN, where none is.

    Over all positions, or over `dim`. The mask has the shape of `values`, or expands to it.
    Masked positions, NaN and inf included, affect neither the result nor its gradient."""
    mask = mask.bool().expand_as(values)
    kept = torch.where(mask, values, 0.0)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ---- 5. The loss -------------------------------------------------------------------------
# The loss is -J, since optimizers minimise. How to average over tokens and completions
# looks like a detail, but it decides how much a long completion counts.
def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """One number from values and mask, (N, T) each, in one of three ways, else ValueError.

        "grpo"     mean over completions of the mean over their tokens (the equation J). The
                   longer a wrong completion is, the less each of its tokens is pushed down.
                   So wrong completions tend to grow
        "dapo"     mean over all tokens (arXiv:2503.14476). Each token counts the same
        "dr_grpo"  sum over all tokens, divided by N * max_completion_length, which does not
                   depend on what was sampled (arXiv:2503.20783)"""
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo" and max_completion_length:
        total = torch.where(mask.bool(), per_token, 0.0).sum()
        return total / (len(per_token) * max_completion_length)
    raise ValueError(f"loss_type {loss_type!r}: grpo, dapo, or dr_grpo with max_completion_length")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              kl_penalty_type="low_var_kl", importance_sampling_level="token",
              use_bias_correction_kl=False):
    """-J over N completions, as in the equation at the top. Returns (loss, metrics).

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
    shapes = [tuple(x.shape) for x in (logprobs, old_logprobs, ref_logprobs, mask, advantages)]
    if len(shapes[0]) != 2 or shapes != 4 * [shapes[0]] + [shapes[0][:1]]:
        raise ValueError(f"log-probs, mask, advantages are {shapes}; wanted four (N, T), one (N,)")
    # The inputs are masked before exp. With only the result masked, a NaN in the padding
    # would not be in the loss. But backward would multiply it by 0, and 0 * NaN is NaN.
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old_logprobs = old_logprobs.masked_fill(~mask, 0.0).detach()  # pi_old, pi_ref: constants
    ref_logprobs = ref_logprobs.masked_fill(~mask, 0.0).detach()

    # Logs are subtracted, because a small probability, say e^-200, would be 0 in float32.
    log_ratio = logprobs - old_logprobs  # (N, T)
    if importance_sampling_level == "sequence":  # GSPO: one ratio for a whole completion
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: token/sequence")
    # e^100 overflows to inf. The min may drop it, but its gradient, 0 * inf, is NaN.
    ratio = log_ratio.clamp(-50, 50).exp()  # (N, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (N, T)
    kl = kl_estimate(logprobs, ref_logprobs, kl_penalty_type)  # (N, T) k3 by default
    penalty = ratio * kl if use_bias_correction_kl else kl  # (N, T)
    per_token = -(surrogate - beta * penalty)  # (N, T)
    loss = average(per_token, mask, loss_type, max_completion_length)

    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (N, T) the min took the clipped one
    metrics = {"loss": loss.item(), "kl": masked_mean(kl, mask).item(),
               "clip_fraction": masked_mean(clipped, mask).item(),
               "ratio_max": torch.where(mask, ratio, 0.0).max().item()}
    return loss, metrics


# The apples to the end, with beta 0.04 (`python grpo.py` prints them token by token):
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
#     "dr_grpo"  the same sums, over 4 completions * max_completion_length, say 4
#                loss = (0.6 + 0.04 * 0.7580) / 16 = 0.0394
#
# The gradient of the "grpo" loss at the token of completion 2: the surrogate gives 0.5 and
# the KL 1 - 2 = -1, so it is -(0.5 - 0.04 * (-1)) / 4 = -0.135. Descent makes the token
# likelier, as it should. At the first token of completion 1 the clip leaves only the
# KL: 0.04 * (1 - 2/3) / 2 tokens / 4 completions = 0.0017. It makes the token rarer.
#
# Why the loss starts at 0. At the first update every ratio is 1 and every k3 is 0. Over
# whole groups, the "grpo" loss is then minus the mean of advantages that sum to 0. But its
# gradient with respect to log pi is -A / |o_i| / N at each token. Each step has new
# advantages around 0, so watch the reward, and not the loss.
#
# That is GRPO, and you may stop here. The rest of the file makes the five tensors that
# `grpo_loss` needs. From here on, a function mostly stands above those that it calls.


# ---- 6. Settings -------------------------------------------------------------------------
def knob(default, text):
    """A setting: its default, and the help text of its flag in gsm8k_demo.py."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every setting, mostly under TRL's names. ValueError for numbers out of range."""

    # What is sampled in a step: prompts_per_step * num_generations completions.
    num_generations: int = knob(8, "G, completions of each prompt; 4 is few, 16 is comfortable")
    prompts_per_step: int = knob(32, "B, prompts in a step")
    max_completion_length: int = knob(512, "tokens at which a completion is cut off")
    temperature: float = knob(1.0, "of sampling and of the log-probs; a lower one explores less")
    # The loss, sections 1 to 5.
    beta: float = knob(0.04, "weight of the KL penalty; 0: none, and no reference in memory")
    epsilon: float = knob(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: Optional[float] = knob(None, "how far it may rise above 1; None: epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = knob("grpo", "how to average over tokens")
    scale_rewards: Literal["group", "none", "batch", "rloo"] = knob("group", "advantages' divisor")
    # The relatives, sections 3 and 13.
    kl_penalty_type: Literal["low_var_kl", "kl", "mse", "abs"] = knob("low_var_kl", "KL estimate")
    use_bias_correction_kl: bool = knob(False, "multiply the KL by the ratio, as TRL does")
    importance_sampling_level: Literal["token", "sequence"] = knob("token", "sequence: GSPO")
    dynamic_sampling: int = knob(0, "rounds of replacing groups of equal rewards by fresh ones")
    # The update, section 11.
    steps: int = knob(300, "steps of sampling and learning")
    num_iterations: int = knob(1, "passes over the completions of a step")
    num_mini_batches: int = knob(1, "updates in each pass")
    learning_rate: float = knob(1e-6, "of AdamW; 1e-6 to 1e-5 for models of a billion weights")
    warmup_steps: int = knob(10, "steps over which the learning rate rises")
    max_grad_norm: float = knob(1.0, "a gradient with a larger norm is scaled down to this norm")
    # The run, section 12.
    seed: int = knob(0, "decides the order of the examples and all that is drawn at random")
    save_steps: int = knob(25, "steps between checkpoints; 0: never save one")
    bf16: Optional[bool] = knob(None, "compute in bfloat16; None: where the GPU can")
    micro_batch_size: int = knob(8, "completions computed at once; halved if memory runs out")

    def __post_init__(self):
        least = {"num_generations": 2, "prompts_per_step": 1, "max_completion_length": 1,
                 "steps": 1, "num_iterations": 1, "num_mini_batches": 1, "micro_batch_size": 1,
                 "temperature": 1e-6, "max_grad_norm": 1e-6}  # and 0 for all other numbers
        for setting in fields(self):
            name = setting.name
            value = getattr(self, name)
            if hasattr(value, "item"):  # one of numpy's numbers: a checkpoint cannot hold it
                value = value.item()
                setattr(self, name, value)
            if get_origin(setting.type) is Literal:
                if value not in get_args(setting.type):
                    raise ValueError(f"{name} is {value!r}, not one of {get_args(setting.type)}")
            # `<=` and `<` are False for NaN, so this form refuses NaN too.
            elif value is not None and not least.get(name, 0) <= value < math.inf:
                raise ValueError(f"{name} is {value!r}, below {least.get(name, 0)} or not finite")


# ---- 7. One step -------------------------------------------------------------------------
#   step          the five moves once: B prompts, and N = B * G completions to learn from
#   pass          every completion of the step is used once; there are num_iterations passes
#   mini-batch    what one update uses: a pass is cut into num_mini_batches of them
#   micro-batch   what is computed at once, so that it fits into memory. The gradients are
#                 added up, so how a mini-batch is cut changes only the rounding

@dataclass
class Completion:
    """L tokens that the model wrote after a prompt, and all that is known about them."""

    example: dict  # the row of the data set: the prompt, and what the reward function needs
    prompt_ids: list  # the tokens of the prompt
    ids: list  # the L sampled tokens, with the end token. To encode `text` may give others
    text: str  # the same in words, without special tokens
    truncated: bool  # cut off at max_completion_length, before an end token
    sampler_logprobs: torch.Tensor  # (L,) log-probs at the draw, for sampler_gap and entropy
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: Optional[torch.Tensor] = None  # (L,) of pi_old; None with one update a step
    ref_logprobs: Optional[torch.Tensor] = None  # (L,) of pi_ref; None at beta = 0


@dataclass
class Learner:
    """What is kept from step to step. Section 12 makes it."""

    config: GRPOConfig
    model: torch.nn.Module  # pi_theta, which also samples
    tokenizer: object
    reference: Optional[torch.nn.Module]  # pi_ref; None at beta = 0
    parameters: list  # of the model, mostly in bfloat16 on a GPU
    masters: list  # their float32 copies, which the optimizer updates: see make_learner
    optimizer: torch.optim.Optimizer
    at_once: dict  # how many "prompts" to sample and "completions" to compute at once
    examples_seen: int = 0
    history: list = field(default_factory=list)  # the metrics of all steps so far
    groups: list = field(default_factory=list)  # the last step's B groups of G completions


def train_step(learner, stream, reward_fn):
    """The five moves, once. Returns the metrics of the step, a dict of finite numbers. The
    stream yields examples without end. `grade` (section 9) calls the reward function."""
    config = learner.config
    started = time.perf_counter()
    # 1 and 2. Sample G completions for each prompt, and reward each: sections 8 and 9.
    groups = sample_and_grade(learner, stream, reward_fn, config.prompts_per_step)
    for _ in range(config.dynamic_sampling):  # 0 times by default: section 13
        # Keep the groups whose rewards differ, and sample others for the rest.
        kept = [group for group in groups if group_advantages(rewards_of([group])).any()]
        if len(kept) == len(groups):
            break
        groups = kept + sample_and_grade(learner, stream, reward_fn, len(groups) - len(kept))
    sampled = time.perf_counter()

    # 3. Compare each completion with its group: section 1. Truncated ones count too: the
    #    policy wrote them, so they belong to its mean reward.
    rewards = rewards_of(groups)  # (B, G)
    advantages = group_advantages(rewards, config.scale_rewards)  # (B, G)
    completions = sum(groups, [])  # the groups joined: a list of N
    for completion, advantage in zip(completions, advantages.flatten().tolist()):
        completion.advantage = advantage
    # Completions of similar length are computed together, because padding costs time. The
    # longest come first: if they do not fit into memory, that shows at once.
    completions.sort(key=lambda completion: len(completion.ids), reverse=True)

    # 4. Compute the log-probs that stay constant: section 10.
    if learner.reference is not None:
        write_logprobs(learner, learner.reference, completions, "ref_logprobs")
    if config.num_iterations * config.num_mini_batches > 1:  # else pi_old is pi_theta
        write_logprobs(learner, learner.model, completions, "old_logprobs")

    # 5. Update the weights: section 11.
    metrics = update(learner, completions)
    learner.groups = groups
    logprobs = torch.cat([completion.sampler_logprobs for completion in completions])
    return metrics | {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "zero_variance_fraction": (advantages == 0).all(dim=1).float().mean().item(),
        "entropy": -logprobs.mean().item(),  # an estimate: the mean of -log pi
        "completion_length": len(logprobs) / len(completions),
        "truncated_fraction": sum(c.truncated for c in completions) / len(completions),
        "examples_seen": learner.examples_seen,
        "sample_seconds": sampled - started,
        "update_seconds": time.perf_counter() - sampled,
    }


def rewards_of(groups):
    """The rewards of B groups of G completions, as a tensor (B, G)."""
    rewards = [[completion.reward for completion in group] for group in groups]
    return torch.tensor(rewards, dtype=torch.float64)


# ---- 8. Sampling: move 1 -----------------------------------------------------------------
# The model reads the prompt and gives a probability to each possible next token. One is
# drawn, the model reads it, and so on. `model.generate` does this too, but with the
# checkpoint's own settings: Qwen2.5-0.5B-Instruct has top_p 0.8, top_k 20 and
# repetition_penalty 1.1, and the library's default is top_k 50. So `generate` draws from
# another distribution than the one whose log-probs go into the ratio. The loop below draws
# from exactly softmax(logits / temperature).
#
# It also keeps the log-prob of each draw. Section 10 computes the same log-probs again. The
# mean absolute difference is logged as sampler_gap: about 1e-6 in float32, and a few
# hundredths at most in bfloat16, where sampling and section 10 round differently. If it is
# larger, their temperature, mask or positions differ. (The ratio cannot show this: both of
# its parts come from section 10.)

# On newer GPUs PyTorch prefers cuDNN's attention. With masks it has given NaN gradients
# (pytorch#196678), and it is set up again for each new length: here, for each token.
torch.backends.cuda.enable_cudnn_sdp(False)


def sample_and_grade(learner, stream, reward_fn, count):
    """`count` groups of G completions with rewards, for the next examples of the stream."""
    config = learner.config
    examples = [next(stream) for _ in range(count)]

    def sample(part):
        return sample_groups(learner.model, learner.tokenizer, part, config.num_generations,
                             config.max_completion_length, config.temperature)

    # All at once, if memory allows: for a GPU, many rows take hardly longer than few.
    groups = sum(in_parts(sample, examples, learner.at_once, "prompts"), [])
    grade(reward_fn, sum(groups, []))
    return groups


@torch.no_grad()
def sample_groups(model, tokenizer, examples, num_generations, max_completion_length,
                  temperature=1.0):
    """G = `num_generations` completions for each of B examples: B lists of G `Completion`.

    Examples are dicts with a "prompt": a string, or a chat (a list of messages with role
    and content). A completion ends with the first end token, or is cut off at the limit.
    Temperature 0 takes the likeliest token each time, with its log-prob at temperature 1.
    Reproducible under torch.manual_seed. Leaves the model in eval mode. ValueError for
    numbers out of range, and for a prompt that is empty or too long."""
    G = num_generations
    if min(G, max_completion_length) < 1 or not 0 <= temperature < math.inf:
        raise ValueError(f"{G} completions of {max_completion_length} tokens at temperature "
                         f"{temperature}: wanted at least 1, 1 and 0")
    model.eval()
    end_ids = end_token_ids(model, tokenizer)
    ends = torch.tensor(end_ids, device=model.device)
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    ids, mask = pad_rows(prompts, "left", model.device)  # (B, P)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if ids.shape[1] + max_completion_length > context:
        raise ValueError(f"a prompt of {ids.shape[1]} tokens and a completion of "
                         f"{max_completion_length} do not fit into the model's {context}")
    # Each prompt is read once. What the model keeps of the tokens it has read is the cache.
    out = forward(model, ids, mask, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(G)  # (N,)
    cache.reorder_cache(rows)  # row i becomes a copy of row rows[i], so each prompt has G rows
    logits = out.logits[rows, -1]  # (N, V)
    mask = mask[rows]  # (N, P)

    drawn = torch.full((len(rows), max_completion_length), -1, device=model.device)
    logprobs = torch.zeros(drawn.shape, device=model.device)
    live = torch.arange(len(rows), device=model.device)  # (n,) the rows that have not ended
    for t in range(max_completion_length):
        tokens = draw_tokens(logits, temperature)  # (n,)
        drawn[live, t] = tokens
        logprobs[live, t] = log_probability(logits, tokens, temperature or 1.0)
        going_on = (~torch.isin(tokens, ends)).nonzero().squeeze(1)  # which of the n go on
        if len(going_on) < len(live):  # rows that have ended leave the batch
            live, tokens, mask = live[going_on], tokens[going_on], mask[going_on]
            cache.reorder_cache(going_on)
        if len(live) == 0 or t + 1 == max_completion_length:
            break
        mask = F.pad(mask, (0, 1), value=1)  # (n, P+t+1): the token just drawn is read next
        out = forward(model, tokens.unsqueeze(1), mask, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]  # (n, V)

    groups = [[] for _ in examples]
    for i, (row, row_logprobs) in enumerate(zip(drawn.tolist(), logprobs.cpu())):
        own = [token for token in row if token >= 0]
        groups[i // G].append(Completion(
            example=examples[i // G], prompt_ids=prompts[i // G], ids=own,
            text=tokenizer.decode(own, skip_special_tokens=True),
            truncated=own[-1] not in end_ids, sampler_logprobs=row_logprobs[: len(own)]))
    return groups


def draw_tokens(logits, temperature):
    """One token for each row, from softmax(logits / temperature): (n, V) -> (n,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = (logits.float() / temperature).softmax(dim=-1)  # (n, V)
    return torch.multinomial(probabilities, num_samples=1).squeeze(1)


def encode_prompt(tokenizer, prompt):
    """A prompt, a string or a chat, as a list of token ids. ValueError if it has none."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:  # add_generation_prompt opens the assistant's turn, which the model then writes
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens, so nothing can follow it")
    return ids


def end_token_ids(model, tokenizer):
    """All token ids that end a completion, sorted. ValueError if there are none."""
    # Qwen's chat models have two, and each source below may list only one. A sampler that
    # misses one goes on after the end, and the model is trained on what follows.
    found = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ValueError("model and tokenizer have no eos_token_id, so no completion could end")
    return sorted(found)


def pad_rows(rows, side, device):
    """n lists of token ids -> ids (n, longest), and the mask (n, longest) of real ones."""
    # The padding is -1 until the mask is made. Some models pad with the end token. There,
    # `ids != pad_token_id` would also mask the real end, and they would not learn to stop.
    rows = [torch.tensor(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side).to(device)
    return ids.clamp(min=0), (ids >= 0).long()


def forward(model, ids, mask, **more):
    """Run the model on `ids`, the newest columns. `mask` also covers those in the cache."""
    # Positions count the real tokens of a row from 0. Counting the padding too is harmless
    # with rotary positions. With learned positions, it makes the log-probs wrong.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # the shape of the mask
    return model(input_ids=ids, attention_mask=mask, position_ids=positions[:, -ids.shape[1] :],
                 **more)


def log_probability(logits, ids, temperature=1.0):
    """log softmax(logits / temperature) at the given tokens: (..., V), (...) -> (...)."""
    logits = logits.float() / temperature  # log_softmax in bfloat16 is off by hundredths
    # PyTorch's cross-entropy is minus the log-probability of the token.
    loss = F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none")
    return -loss.view(ids.shape)


# ---- 9. The reward: move 2 ---------------------------------------------------------------
# Where the right answer is known, a rule can give the reward. No second model that guesses
# rewards, a "reward model", is needed. A model in training can write any text. So the rule
# must accept every text, take little time, and never run what it reads. A right answer
# without a box earns 0, since the number may be there by accident. A small model soon
# learns to write a box, because that pays. If nearly all rewards stay at 0.5, it has
# learned nothing else. This is a small case of "reward hacking": rewards go up, not skill.
def rule_reward(completion, answer):
    r"""0.0 without a \boxed{...}, 0.5 with one, 1.5 if the last one holds the answer.

    Both arguments are strings. A blank or incomplete last box counts as none. Box and
    answer are compared as strings, and as numbers that may differ by less than 0.01. Never
    raises, and takes linear time. Section 12 shows it in a reward function."""
    boxed = extract_boxed(completion)
    if not boxed:
        return 0.0
    if boxed == answer.strip():
        return 1.5
    given = read_number(boxed)
    wanted = read_number(answer)
    # round: 5.01 - 5 is 0.00999... in floating point, and would count as below 0.01.
    if given is not None and wanted is not None and round(abs(given - wanted), 9) < 0.01:
        return 1.5
    return 0.5


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
    "1000." and "1000.0" are all one thousand. "12,34", "3 4", "1_000", "1e3", "nan" and the
    digits of other scripts are no numbers."""
    text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip()
    text = text.removesuffix(".").strip()  # the full stop of a sentence
    # float() alone would also take "nan", "1_000" and Arabic digits.
    pattern = r"[+-]?\s*([0-9]{1,3}(,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(\.[0-9]*)?"
    if not re.fullmatch(pattern, text):
        return None
    return float(re.sub(r"[,\s]", "", text))


def grade(reward_fn, completions):
    """Call the reward function, and keep the rewards in the completions.

        reward_fn(prompts=, completions=, completion_ids=, **columns) -> N finite numbers

    TRL calls it in this way too (with more arguments), so a function with **columns fits
    both. Each argument is a list of N values. A string prompt has a string as its
    completion, and a chat has a chat of one message. ValueError for a wrong number of
    rewards, and for NaN or inf."""
    columns = {}
    for name in completions[0].example:
        columns[name] = [completion.example[name] for completion in completions]
    prompts = columns.pop("prompt")
    texts = []
    for completion, prompt in zip(completions, prompts):
        message = {"role": "assistant", "content": completion.text}
        texts.append(completion.text if isinstance(prompt, str) else [message])
    rewards = reward_fn(prompts=prompts, completions=texts,
                        completion_ids=[completion.ids for completion in completions], **columns)
    if len(rewards) != len(completions):
        raise ValueError(f"the reward function returned {len(rewards)} numbers "
                         f"for {len(completions)} completions")
    for completion, reward in zip(completions, rewards):
        completion.reward = float(reward)
        if not math.isfinite(completion.reward):
            raise ValueError(f"the reward function returned {reward} for {completion.text!r:.200}")


# ---- 10. Log-probs: move 4 ---------------------------------------------------------------
# The model reads prompt and completion again, now all tokens in parallel. Here it does so
# for pi_ref and pi_old, without a gradient. Section 11 does so for pi_theta, with one.
@torch.no_grad()
def write_logprobs(learner, model, completions, name):
    """Compute the completions' log-probs by `model`, and keep them in the field `name`."""

    def write(part):
        logprobs, _ = compute_logprobs(model, part, learner.config.temperature)  # (n, T)
        for completion, row in zip(part, logprobs.cpu()):
            setattr(completion, name, row[: len(completion.ids)])

    in_parts(write, completions, learner.at_once, "completions")


def compute_logprobs(model, completions, temperature):
    """Log-probs (n, T) of n completions' tokens, and the mask (n, T) of real tokens."""
    prompts = [completion.prompt_ids for completion in completions]
    prompt_ids, prompt_mask = pad_rows(prompts, "left", model.device)  # (n, P)
    ids, mask = pad_rows([completion.ids for completion in completions], "right", model.device)
    input_ids = torch.cat([prompt_ids, ids], dim=1)  # (n, P+T)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)  # (n, P+T)
    return token_logprobs(model, input_ids, attention_mask, ids.shape[1], temperature), mask


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0):
    """log pi of each completion token: ids and mask (N, P+T) -> (N, T), float32.

    Differentiable. T is `completion_length`. Prompts are padded on the left and completions
    on the right, so all completions begin in the same column. `temperature` must be that of
    sampling, since another temperature is another policy."""
    T = completion_length
    out = forward(model, input_ids, attention_mask, use_cache=False, logits_to_keep=T + 1)
    # Column j predicts the token of column j + 1, so the logits begin one column earlier.
    return log_probability(out.logits[:, :-1], input_ids[:, -T:], temperature)


def in_parts(work, items, at_once, unit):
    """[work(part), ...], with at_once[unit] items in each part. Where memory runs out, that
    number is halved for the rest of the run, and only the failed part is done again."""
    results = []
    while items:
        part = items[: at_once[unit]]
        try:
            results.append(work(part))
            items = items[len(part) :]
            continue
        except torch.OutOfMemoryError:
            if at_once[unit] == 1:
                raise
        # Not inside of `except`: there the error still keeps the tensors of the part alive.
        torch.cuda.empty_cache()
        at_once[unit] //= 2
        tqdm.write(f"out of memory: from here on {at_once[unit]} {unit} at once")
    return results


# ---- 11. The update: move 5 --------------------------------------------------------------
def update(learner, completions):
    """num_iterations passes over the completions, of num_mini_batches updates each. Returns
    metrics. The model stays in eval mode, since dropout would change pi_theta."""
    config = learner.config
    results = []  # the metrics of all micro-batches
    norms = []  # the norms of the gradients of all updates
    for _ in range(config.num_iterations):
        order = torch.randperm(len(completions))  # every pass has all of them, in a new order
        for places in order.tensor_split(config.num_mini_batches):
            mini_batch = [completions[i] for i in sorted(places.tolist())]  # the longest first
            # Without KL, a completion whose advantage is 0 has no gradient. It is not
            # computed, but it counts where the loss is averaged.
            useful = [c for c in mini_batch if c.advantage != 0 or config.beta > 0]
            if not useful:
                norms.append(0.0)
                continue
            for master in learner.masters:
                master.grad = torch.zeros_like(master)
            found = in_parts(lambda micro_batch: backward(learner, micro_batch, mini_batch),
                             useful, learner.at_once, "completions")
            norm = torch.nn.utils.clip_grad_norm_(learner.masters, config.max_grad_norm).item()
            if math.isfinite(norm):
                learner.optimizer.step()
                for parameter, master in zip(learner.parameters, learner.masters):
                    parameter.data.copy_(master)  # rounds, if the parameter is in bfloat16
                results += found
                norms.append(norm)
            else:
                tqdm.write(f"update skipped: the norm of the gradient is {norm}")
            learner.optimizer.zero_grad()  # sampling needs the memory

    tokens = max(1, sum(result["tokens"] for result in results))
    updates = max(1, len(norms))
    metrics = {"loss": sum(result["loss"] for result in results) / updates,
               "ratio_max": max((result["ratio_max"] for result in results), default=0.0),
               "grad_norm": sum(norms) / updates,
               "skipped_updates": config.num_iterations * config.num_mini_batches - len(norms),
               "learning_rate": learner.optimizer.param_groups[0]["lr"]}
    for name in ("kl", "clip_fraction", "sampler_gap"):
        metrics[name] = sum(result[name] * result["tokens"] for result in results) / tokens
    return metrics


def backward(learner, micro_batch, mini_batch):
    """Add the gradient of a micro-batch, a part of the mini-batch, to that of the masters.
    Returns its metrics. If memory runs out, those gradients are unchanged, so the same can
    be done again in smaller parts."""
    config = learner.config
    learner.model.zero_grad()  # gradients left by a part that ran out of memory
    logprobs, mask = compute_logprobs(learner.model, micro_batch, config.temperature)  # (n, T)

    def padded(name):  # (n, T) the log-probs that the completions keep under this name
        rows = [getattr(completion, name) for completion in micro_batch]
        if rows[0] is None:
            return None
        return pad_sequence(rows, batch_first=True).to(mask.device)

    # With one update a step, pi_theta is still pi_old. `detach` makes a constant of it: the
    # ratio is 1, and its gradient is that of log pi_theta. With several updates, pi_old's
    # log-probs were computed before the first. (The sampler's are rounded differently in
    # bfloat16. In the ratio, that would look like a changed policy.)
    old_logprobs = padded("old_logprobs")
    if old_logprobs is None:
        old_logprobs = logprobs.detach()
    advantages = torch.tensor([c.advantage for c in micro_batch], device=mask.device)  # (n,)
    loss, metrics = grpo_loss(
        logprobs, old_logprobs, padded("ref_logprobs"), advantages, mask,
        epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta,
        loss_type=config.loss_type, max_completion_length=config.max_completion_length,
        kl_penalty_type=config.kl_penalty_type,
        importance_sampling_level=config.importance_sampling_level,
        use_bias_correction_kl=config.use_bias_correction_kl)
    gap = (padded("sampler_logprobs") - old_logprobs).abs()  # (n, T)
    metrics["sampler_gap"] = masked_mean(gap, mask).item()
    metrics["tokens"] = int(mask.sum())
    # "dapo" averages over tokens, the others over completions. So a micro-batch counts by
    # its share of the mini-batch's tokens or completions. Then the cut makes no difference.
    share = len(micro_batch) / len(mini_batch)
    if config.loss_type == "dapo":
        share = metrics["tokens"] / sum(len(completion.ids) for completion in mini_batch)
    metrics["loss"] *= share
    (loss * share).backward()
    for parameter, master in zip(learner.parameters, learner.masters):
        if parameter.grad is not None:
            master.grad += parameter.grad  # in float32
            parameter.grad = None
    return metrics


# ---- 12. The run -------------------------------------------------------------------------
def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False,
          after_step=None):
    r"""Train `model` in place. Returns the metrics of all steps, a list of dicts.

    `dataset` is a datasets.Dataset or a list of dicts. Each row has a `prompt`, a string or
    a chat, and what the reward function needs. A real call (with imports of transformers):

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B").to("cuda")
        tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
        sums = [{"prompt": f"{n}+{n} = \\boxed", "answer": str(n + n)} for n in range(99)]
        def reward(completions, answer, **columns):
            return [rule_reward("\\boxed" + x, a) for x, a in zip(completions, answer)]
        train(model, tokenizer, sums, reward, GRPOConfig(steps=20, learning_rate=1e-5))

    With `output_dir`, each step adds a line to metrics.jsonl, and a checkpoint is saved
    every `save_steps` steps. To continue, call again with `resume=True`, the same data, and
    the model from before training (pi_ref is a copy of it). `after_step(learner)` is called
    after each step, when its files are written. learner.history[-1] has the metrics of the
    step, and learner.groups its completions."""
    if resume and not output_dir:
        raise ValueError("resume=True needs the output_dir of the run that is to go on")
    if len(dataset) == 0:
        raise ValueError("the data set is empty")
    N = config.prompts_per_step * config.num_generations
    if config.num_mini_batches > N:
        raise ValueError(f"num_mini_batches is {config.num_mini_batches}, completions {N}")
    learner = make_learner(model, tokenizer, config)
    if output_dir:
        open_folder(Path(output_dir), learner, resume)
    stream = example_stream(dataset, learner)
    done = len(learner.history)
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, unit="step")
    for step in bar:
        # The rate rises, then falls, both linearly. It would be 0 at step `steps` + 1.
        up = step / max(1, config.warmup_steps)
        down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)
        learner.optimizer.param_groups[0]["lr"] = config.learning_rate * min(up, down)
        # All random numbers of a step come from the seed and the step's number. So a
        # resumed run draws the same numbers (unless memory runs out).
        set_seed((config.seed * 1_000_003 + step) % 2**32)
        metrics = {"step": step} | train_step(learner, stream, reward_fn)
        learner.history.append(metrics)
        bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
        if output_dir:
            save_run(Path(output_dir), learner)
        if after_step:
            after_step(learner)
    return learner.history


def make_learner(model, tokenizer, config):
    """Set up precision, reference and optimizer. Casts the model's parameters in place.

    On a GPU the model computes in bfloat16, which is faster. But bfloat16 has only two or
    three digits: at a learning rate of 1e-6, about 98 % of the weights would not change. So
    the optimizer updates float32 copies, the masters, and the model gets them back,
    rounded. In float32, masters and parameters are the same memory."""
    on_gpu = model.device.type == "cuda"
    in_bf16 = config.bf16
    if in_bf16 is None:
        in_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    parameters, masters = [], []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(f"{name} is {parameter.dtype}: load the model without quantization")
        master = parameter.detach().float()
        # Only parameters are cast. `model.bfloat16()` would round the frequencies of the
        # rotary positions too, and get late positions wrong.
        parameter.data = master.bfloat16() if in_bf16 else master
        if parameter.requires_grad:
            parameters.append(parameter)
            masters.append(master)
    reference = None
    if config.beta > 0:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
    # AdamW's default weight_decay would shrink the weights. `fused` needs less memory.
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.0, fused=on_gpu)
    at_once = {"prompts": config.prompts_per_step, "completions": config.micro_batch_size}
    return Learner(config, model, tokenizer, reference, parameters, masters, optimizer, at_once)


def example_stream(dataset, learner):
    """Examples without end, from number learner.examples_seen on; shuffled each epoch."""
    while True:
        epoch, place = divmod(learner.examples_seen, len(dataset))
        shuffle = torch.Generator().manual_seed(learner.config.seed + 1_000_003 * epoch)
        order = torch.randperm(len(dataset), generator=shuffle, device="cpu").tolist()
        for i in order[place:]:
            learner.examples_seen += 1
            yield dataset[i]


def save_run(folder, learner):
    """Write metrics.jsonl and, when it is due, checkpoint.pt (12 bytes for each weight)."""
    config = learner.config
    step = len(learner.history)
    lines = [json.dumps(metrics) + "\n" for metrics in learner.history]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if config.save_steps and (step % config.save_steps == 0 or step == config.steps):
        saved = {"settings": json.dumps(asdict(config)),
                 "history": learner.history, "examples_seen": learner.examples_seen,
                 "masters": learner.masters, "optimizer": learner.optimizer.state_dict()}
        torch.save(saved, folder / "checkpoint.new")
        (folder / "checkpoint.new").replace(folder / "checkpoint.pt")  # never half a file


def open_folder(folder, learner, resume):
    """Make the folder. If it has a checkpoint, load it into the learner. ValueError if it
    holds a run and `resume` is False, or a run with other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    if not resume and (path.exists() or (folder / "metrics.jsonl").exists()):
        raise ValueError(f"{folder} holds a run: resume it, or name another folder")
    if not path.exists():
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, there in json.loads(saved["settings"]).items():
        here = getattr(learner.config, name)
        if here != there and name not in ("steps", "save_steps", "micro_batch_size"):
            raise ValueError(f"{folder} holds another run: {name} is {there} there, {here} here")
    for parameter, master, value in zip(learner.parameters, learner.masters, saved["masters"]):
        master.copy_(value)
        parameter.data.copy_(value)
    learner.optimizer.load_state_dict(saved["optimizer"])
    learner.history = saved["history"]
    learner.examples_seen = saved["examples_seen"]
    tqdm.write(f"going on after step {len(learner.history)}")


# ---- 13. The relatives, and the apples ---------------------------------------------------
# GRPO's relatives differ from it in a line or two. As settings:
#
#   Dr. GRPO   scale_rewards="none", loss_type="dr_grpo", beta=0. Dividing by the std makes
#              very easy and very hard prompts count more
#   RLOO       as Dr. GRPO, but scale_rewards="rloo": its advantages times G/(G - 1)
#   REINFORCE  with a baseline: Dr. GRPO with one update a step, so that every ratio is 1
#   DAPO       loss_type="dapo", beta=0, epsilon_high=0.28 (rare tokens may grow more),
#              dynamic_sampling=3 (groups of equal rewards are replaced, up to three times,
#              by groups for other prompts), and `overlong_penalty` added to the reward
#   GSPO       importance_sampling_level="sequence" (arXiv:2507.18071), epsilon=3e-4,
#              epsilon_high=4e-4, several updates a step. A completion has one ratio, the
#              geometric mean of its tokens' ratios. (Their product explodes: 1.01^300 = 20)
#
# Differences from the papers. DeepSeekMath has one ratio for each token, as here; R1's
# report has one for a completion. Log-ratios are cut at 50, so that e^x stays finite.
# "dapo" averages over a mini-batch, as libraries do; the paper averages over a prompt's
# group. Left out: a learned reward model, a reference that is renewed, several GPUs.
#
# Pasting. `grpo_loss` needs sections 2 to 5 and `import torch`. `rule_reward` needs its two
# helpers and `import re`. `token_logprobs` needs `forward`, `log_probability` and `import
# torch.nn.functional as F`. To start a run, see the docstring of `train`.

def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty (arXiv:2503.14476, equation 13): lengths in tokens (N,) -> (N,).

    It is 0 up to `buffer` tokens below the limit, then falls linearly to -1 at the limit.
    Add it to the rewards, with torch.tensor([len(ids) for ids in completion_ids])."""
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


if __name__ == "__main__":
    texts = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
    rewards = torch.tensor([rule_reward(text, "5") for text in texts])  # (4,)
    advantages = group_advantages(rewards)  # (4,)
    probabilities = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])  # 1.0: padding
    logprobs = probabilities.log().requires_grad_()  # (4, 2)
    old_logprobs = torch.full((4, 2), 0.2).log()  # (4, 2), of pi_ref as well
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]])  # (4, 2)
    loss, _ = grpo_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, beta=0.04)
    loss.backward()
    ratio = probabilities / 0.2  # (4, 2)
    surrogate = clipped_surrogate(ratio, advantages)  # (4, 2)
    k3 = k3_kl(logprobs, old_logprobs).detach()  # (4, 2)
    print("completion        reward  advantage  ratio  surrogate      k3  gradient")
    for i, t in mask.nonzero().tolist():
        print(f"{texts[i]:16}  {rewards[i]:6.1f}  {advantages[i]:9.1f}  {ratio[i, t]:5.1f}  "
              f"{surrogate[i, t]:9.1f}  {k3[i, t]:6.4f}  {logprobs.grad[i, t]:8.4f}")
    print(f"loss {loss.item():.4f}")
