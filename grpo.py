# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how rewards alone teach a language model to reason.

GRPO is Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948). A *policy*, written pi, is a way to choose the next action. Here the action
is a token: pi(token | text so far) is the probability that the model gives to it. The text
that the model writes after a prompt is a *completion*. There are three policies:

    pi_theta  the model that is trained. Only this one gets a gradient
    pi_old    the model as it was when it sampled the completions
    pi_ref    a frozen copy of the model from before training. A penalty keeps pi_theta near it

One step of the training, with the function that does each line, and its section, on the right:

    sample G completions of each of B prompts                        sample_groups     8
    give each completion a reward, by a rule                         grade             9
    compare each reward with the others of its group                 group_advantages  1
    compute the tokens' log-probabilities by pi_ref (and by pi_old,  store_logprobs    10
        if several updates follow)
    update the weights (once, by default):                           update            11
        for each micro-batch, which is what fits into memory:
            compute log-probabilities by pi_theta, with a gradient   compute_logprobs  10
            from all this, compute one number, the loss              grpo_loss         2 to 5
            loss.backward()
        make a step of the optimizer

`train` (section 7) is the loop around these steps. (It calls the first two lines together, as
`sample_and_grade`.) But the mathematics comes first, in sections 1 to 5. GRPO asks for three
things: the tokens of good completions should become likelier, and those of bad ones rarer; a token
whose probability has changed enough should not be pushed further; and pi_theta should stay near
pi_ref.

All this is in one equation. First its symbols. For a prompt q, we sample the completions
o_1 ... o_G. Completion i has |o_i| tokens, a reward R_i, and an advantage A_i, which says how much
better it is than its group. Its token number t is o_it, and the tokens before that are o_i,<t.
GRPO maximises J, averaged over the prompts:

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           grpo_loss
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token   k3_kl

clip(r, ...) is r, but at least 1 - eps and at most 1 + eps (eps is 0.2). k3 estimates how far
pi_theta is from pi_ref, and beta (0.04) is the factor of this penalty.

One small case runs through the mathematics, the apples: "John has 3 apples and buys 2
more. How many apples does he have?" A rule pays 0.5 for a result in \boxed{...} (LaTeX's
frame around a result), and 1.0 more if it is right. The model wrote four completions:

    completion 1    3+2 = \boxed{5}      reward 1.5
    completion 2    \boxed{5}            reward 1.5
    completion 3    \boxed{6}            reward 0.5
    completion 4    3-2 = \boxed{1}      reward 0.5

To keep the sums small, pretend that 1 and 4 are two tokens long, and 2 and 3 one token.

Shapes. A step has N = B * G completions: B = 3 prompts with G = 4 completions each give N = 12.
A function is often given only some of them, and n is their number. T is the length of the longest
of these n completions, and P that of the longest of their prompts, both in tokens. V is the size
of the vocabulary. E[...] is the expected value. Log-probs are log-probabilities.

Sections 1 to 5 are the mathematics, 6 the settings, 7 to 11 the loop and its parts, 12 what is
not GRPO (precision, rates, order, files). Section 13 has GRPO's relatives, methods that change a
detail: REINFORCE, RLOO, Dr. GRPO, DAPO and GSPO. You may skip what earlier sections say of them.
gsm8k_demo.py, beside this file, is a whole run. TRL, verl and RLinf are libraries for GRPO."""

import copy
import json
import math
import re
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed


# ---- 1. Advantages: better or worse than the group ---------------------------------------
# A reward of 0.5 may be good (the prompt is hard, and most completions earn 0) or bad (all
# others earned 1.5). What counts is the difference from a baseline: the reward that one expects
# for this prompt. GRPO simplifies another method, PPO (Proximal Policy Optimization). PPO trains a
# second network, the critic, to predict this reward. GRPO samples a group of completions for the
# same prompt, and takes the mean of their rewards. It divides the difference by the std (standard
# deviation) of the group, so that the unit of the reward does not matter.
def group_advantages(rewards, scale_rewards="group"):
    """A_i = (R_i - mean(R)) / std(R) in each group: (B, G) -> float32 (B, G).

    Any shape is allowed if the last dimension is the group. The std is sqrt(sum of the squared
    differences from the mean / G). torch's default divides by G - 1. With it, the advantages would
    be 6.5 % smaller at G = 8.

    `scale_rewards` names what R_i - mean(R) is divided by. All but "group" are for relatives:

        "group"  the std of the group
        "none"   1
        "batch"  the std of the rewards of all groups together
        "rloo"   (G - 1) / G. Then A_i is R_i minus the mean of the *other* rewards (section 2)

    A group of equal rewards (to a millionth) gets exact zeros. If a reward is NaN or inf, the
    advantages of its group (with "batch": of others, too) are not finite. ValueError for a group
    of one, and for an unknown `scale_rewards`."""
    G = rewards.shape[-1]
    if G < 2:
        raise ValueError(f"the rewards are {tuple(rewards.shape)}: a group needs two or more")
    rewards = rewards.double()
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (B, G)
    std = rewards.std(dim=-1, correction=0, keepdim=True)  # (B, 1); correction=0: by G
    scales = {"group": std, "none": 1, "batch": rewards.std(correction=0), "rloo": (G - 1) / G}
    if scale_rewards not in scales:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not one of {list(scales)}")
    # Equal rewards may differ by rounding: 0.1 + 0.2 is not exactly 0.3. The tiny difference,
    # divided by a std of 1e-17, would become an advantage of 1. So a std of at most a millionth
    # of the largest |reward| counts as 0.
    equal = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (B, 1)
    return (centered / scales[scale_rewards]).masked_fill(equal, 0.0).float()


# The apples: R = [1.5, 1.5, 0.5, 0.5] has the mean 1 and the std 0.5, so A = [+1, +1, -1, -1].
#
# All completions of a group may earn the same, because the prompt is too easy or too hard, or
# because the policy always writes the same text. Then all advantages are 0, and only the KL penalty
# of section 3 gives a gradient. The share of such groups is logged as zero_variance_fraction.


# ---- 2. Ratio and clip: learn from a completion, but not too much ------------------------
# Why the gradient of a log. The expected reward should grow, so we want its gradient. But a reward
# is a number: only the probability of a completion depends on the weights. And there are far too
# many completions to sum over all. So we look for a gradient that is an average over samples.
#
# Pretend first that a completion is a single token. Then each of the V tokens is a possible
# completion, with a probability pi and a fixed reward R. The expected reward is the sum of pi * R
# over all V tokens, here written sum(pi * R). Let grad be the gradient with respect to the model's
# weights. Since grad log pi = (grad pi) / pi, grad pi is pi * grad log pi, and
#
#     grad sum(pi * R) = sum(R * grad pi) = sum(pi * R * grad log pi)
#
# The right side is the expected value of R * grad log pi for tokens drawn from pi. An average
# over samples estimates an expected value. So we sample, and average R * grad log pi. This method
# is called REINFORCE.
#
# A whole completion's probability is the product of its tokens' probabilities. So its log pi is
# the sum of theirs, and the gradient is a sum, too: a term R * grad log pi for each token, with
# the same R. (Section 5 asks whether to take the sum over the tokens, or a mean.)
#
# Why a baseline. Subtract a number b from every reward. The expected gradient changes by
#
#     -b * sum(pi * grad log pi) = -b * sum(grad pi) = -b * grad(sum(pi)) = -b * grad(1) = 0
#
# (the probabilities sum to 1). So it stays the same, if b does not depend on the completion. And
# with a b near the expected reward, the factors R - b are small numbers around 0, so the average
# over samples is less noisy. Therefore R - b, the advantage A, takes the place of R.
#
# For completion i, b may be m, the mean of the *other* G - 1 rewards: these were drawn
# independently of it. GRPO's mean(R) contains R_i, but this only changes the scale:
#
#     mean(R) = (R_i + (G - 1) * m) / G            completion 1: 1 = (1.5 + 2.5) / 4
#     R_i - mean(R) = (G - 1)/G * (R_i - m)        completion 1: 0.5 = 3/4 * (1.5 - 2.5/3)
#
# Dividing by the std is different: the std differs from group to group, and R_i is a part of it. So
# the expected gradient changes by more than a constant factor. Dr. GRPO leaves the std out.
#
# Why a ratio. Sampling is slow. So one may want several updates from one sampling. After the
# first update, pi_theta has changed: the tokens were drawn from an older policy, pi_old. The
# factor r = pi_theta / pi_old corrects for that: sum(pi_old * r * A) = sum(pi_theta * A). This
# is called importance sampling. pi_old is constant, so
#
#     grad r = (grad pi_theta) / pi_old = r * grad log pi_theta
#
# and the gradient of r * A is r * A * grad log pi. At r = 1 it is A * grad log pi, as above.
#
# For a whole completion, the exact factor would be the product of the ratios of all tokens. Over
# hundreds of tokens this product explodes: 1.01^300 is 19.8. So PPO and GRPO take, at each token,
# only the token's own ratio. This is an approximation, good while pi_theta is near pi_old.
#
# Why the clip. Samples from pi_old say little about a policy far from it. So if a token's ratio has
# gone more than 20 % in the direction that its advantage asks for (up if A > 0, down if A < 0), the
# min takes clip(r) * A, a constant without a gradient. If it has gone in the other direction, the
# min takes r * A, whose gradient pulls it back. The table below has the four cases.
def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token: r (n, T), A (n,) -> (n, T).

    PPO's "surrogate", a replacement for the expected reward (arXiv:1707.06347, equation 7), to be
    maximised. `epsilon_high` is `epsilon` by default. With `epsilon` >= 1 there is no lower limit,
    as a ratio is never below 0."""
    if epsilon_high is None:
        epsilon_high = epsilon
    A = advantages.unsqueeze(1)  # (n, 1): the same for every token of a completion
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)  # (n, T)
    return torch.min(ratio * A, clipped_ratio * A)


# The apples after some updates. Say that pi_old gave each token 0.2, and that pi_theta now gives
#
#     completion   1            2      3      4
#     pi_theta     0.3, 0.2     0.1    0.3    0.1, 0.2
#     ratio        1.5, 1.0     0.5    1.5    0.5, 1.0
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi
#     +1   1.5 (no. 1)   min( 1.5,  1.2) =  1.2  clipped      0    good, already likelier
#     +1   0.5 (no. 2)   min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (no. 3)   min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (no. 4)   min(-0.5, -0.8) = -0.8  clipped      0    bad, already rarer
#     any  1.0           A                       not clipped  A    in a first update: all tokens
#
# The gradient column: where the min takes r * A, the derivative of r * A with respect to log pi is
# r * A again, since r = exp(log pi - log pi_old), and e^x is its own derivative.
#
# In the first update after a sampling, pi_theta is pi_old. Every ratio is 1 (up to rounding), and
# the clip does not act. With one update after each sampling (strictly on-policy), which is the
# default here, it never acts.
#
# A common mistake is max instead of min. Then row 1 is never clipped. Row 3 is
# max(-1.5, -1.2) = -1.2, a constant: nothing pushes its token down. And row 4 is
# max(-0.5, -0.8) = -0.5 = r * A: its token is pushed further and further down.


# ---- 3. The KL penalty: stay near the reference ------------------------------------------
# A policy that only maximises rewards can forget how to write. How far it has gone from pi_ref
# is measured by the Kullback-Leibler divergence, the expected value
#
#     KL(pi_theta || pi_ref) = E[log(pi_theta / pi_ref)], over tokens drawn from pi_theta
#
# It is 0 if the two policies agree, and otherwise positive. The exact value is a sum over all V
# tokens at each position, for which the V log-probs of both models would be kept. The estimate k3
# needs only the two log-probs of the token that was drawn.
def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (n, T), (n, T) -> (n, T).

    It is the third of the estimates in joschu.net/blog/kl-approx.html, hence the name. With
    x = log(pi_ref/pi_theta) it is e^x - x - 1, which is at least 0 for any x. Value and gradient
    are finite for finite log-probs."""
    # e^89 overflows float32. So the log-ratio is cut at 50, well below. There the gradient is 0: a
    # token that is more than e^50 times rarer than under pi_ref is not pulled back.
    log_ref_ratio = (ref_logprobs - logprobs).clamp(max=50)  # (n, T) log(pi_ref/pi_theta)
    return torch.expm1(log_ref_ratio) - log_ref_ratio  # expm1(x) is e^x - 1, precise near 0


# Why its expected value is the KL. For tokens drawn from pi_theta,
#
#     E[-log(pi_ref/pi_theta)] = E[log(pi_theta/pi_ref)] = KL(pi_theta || pi_ref)
#     E[ pi_ref/pi_theta ]     = sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1
#
# so on average the first and the last term of k3 cancel, and the middle one is the KL.
#
# Why not the middle term alone? It is noisier, while the policies are close. Say that
# log(pi_ref/pi_theta) is +0.1 for 47.5 % of the tokens, and -0.1 for the others. The KL is
# 0.525 * 0.1 - 0.475 * 0.1 = 0.005. The middle term gives -0.1 or +0.1, k3 0.005 each time.
#
# A common mistake is the ratio upside down: the average of pi_theta/pi_ref is not 1.
#
# The apples, with pi_ref = 0.2 for every token:
#
#     pi_theta 0.1    pi_ref/pi_theta 2      k3 = 2 - log(2) - 1 = 0.3069       gradient -1
#     pi_theta 0.2    pi_ref/pi_theta 1      k3 = 0                             gradient  0
#     pi_theta 0.3    pi_ref/pi_theta 2/3    k3 = 2/3 - log(2/3) - 1 = 0.0721   gradient 1/3
#
# The gradient, with respect to log pi_theta, is 1 - pi_ref/pi_theta. The loss contains beta * k3,
# and the optimizer makes the loss smaller. So a token of the first row (0.1) is made likelier
# again, and one of the last row (0.3) rarer. Section 13 has other estimates, and asks which of
# them may be a loss.


# ---- 4. The masked mean: padding is not data ---------------------------------------------
# Completions have different lengths. In a tensor the short ones are filled up with padding.
# The mask of the loss is True at real tokens. Where it is False, a position is masked. A model may
# give NaN at padding. Multiplying by the mask does not remove it, since NaN * 0 is NaN:
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
    """The average of `per_token` (n, T) where the mask (n, T) is set, in one of three ways.

        "grpo"     mean over completions of the mean over their tokens (the equation J). The
                   longer a bad completion is, the less each of its tokens is pushed down, and
                   the shorter a good one is, the more each is pushed up
        "dapo"     mean over all tokens (arXiv:2503.14476). All tokens of an update count the
                   same, but each counts less in an update with long completions
        "dr_grpo"  sum over all tokens, divided by n * max_completion_length. The lengths do not
                   change this divisor, nor how much a token counts (arXiv:2503.20783)

    ValueError for other names, and for "dr_grpo" without `max_completion_length`."""
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
    """-J over n completions: by default, the equation at the top. Returns (loss, metrics).

    Log-probs of pi_theta, pi_old and pi_ref, (n, T) each; pi_ref's may be None at beta=0.
    Advantages (n,). The mask (n, T) is set on real tokens; masked positions affect neither
    value nor gradient. The last three settings are for relatives; "low_var_kl" is k3.

    The metrics are floats: `loss`, `kl` (0 without a reference), `ratio_max`, and
    `clip_fraction`, the share of tokens where the min took the clipped term. ValueError for
    wrong arguments."""
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed; None is for beta=0")
        ref_logprobs = logprobs  # the policy as its own reference: the KL is 0
    # Without this check, tensors of the wrong shape would be broadcast silently.
    same = logprobs.shape == old_logprobs.shape == ref_logprobs.shape == mask.shape
    if not same or logprobs.dim() != 2 or advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"log-probs {logprobs.shape}, {old_logprobs.shape}, {ref_logprobs.shape},"
                         f" mask {mask.shape}, advantages {advantages.shape}: not (n, T), (n,)")
    # Padding may hold NaN. In backward(), the masked mean passes the gradient 0 to it. But exp and
    # the other operations before it multiply this 0 by their own values, and 0 * NaN is NaN. So
    # masked_fill first makes the log-probs at padding 0 (and their gradient, too).
    padding = ~mask.bool()  # (n, T)
    logprobs = logprobs.masked_fill(padding, 0.0)  # (n, T)
    # pi_old and pi_ref are constants: detach leaves them no gradient.
    old_logprobs = old_logprobs.detach().masked_fill(padding, 0.0)
    ref_logprobs = ref_logprobs.detach().masked_fill(padding, 0.0)

    log_ratio = logprobs - old_logprobs  # (n, T). pi_theta / pi_old could be 0/0, NaN
    if importance_sampling_level == "sequence":  # GSPO
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level is {importance_sampling_level!r}")
    # Cut at e^50: e^100 is inf in float32, and an advantage of 0 times inf is NaN. Beyond the cut,
    # the surrogate has no gradient, even if the token is bad.
    ratio = log_ratio.clamp(-50, 50).exp()  # (n, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (n, T)
    # By default, this is k3_kl(logprobs, ref_logprobs). Section 13 has the other estimates, and
    # says what the factor of use_bias_correction_kl is good for.
    kl = kl_estimate(logprobs, ref_logprobs, kl_penalty_type)  # (n, T)
    penalty = ratio * kl if use_bias_correction_kl else kl  # (n, T)
    per_token = -(surrogate - beta * penalty)  # (n, T)
    loss = average(per_token, mask, loss_type, max_completion_length)
    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (n, T) the min took the clipped one
    return loss, {"loss": loss.item(), "kl": masked_mean(kl, mask).item(),
                  "clip_fraction": masked_mean(clipped, mask).item(),
                  "ratio_max": ratio.masked_fill(padding, 0.0).max().item()}


# The loss of the apples, with beta 0.04 (`python grpo.py` prints the "grpo" one):
#
#     completion                 1                  2        3        4
#     advantage                  +1                +1       -1       -1
#     surrogate, per token       1.2, 1.0           0.5     -1.5     -0.8, -1.0
#     k3, per token              0.0721, 0          0.3069   0.0721   0.3069, 0
#
#     "grpo"     surrogate, mean of each:  1.1,    0.5,    -1.5,    -0.9       sum -0.8
#                k3, mean of each:         0.0361, 0.3069,  0.0721,  0.1534    sum  0.5685
#                loss = -(-0.8 / 4) + 0.04 * 0.5685 / 4 = 0.2 + 0.0057 = 0.2057
#
#     "dapo"     sums over all 6 tokens: surrogate -0.6, k3 0.7580
#                loss = -(-0.6 / 6) + 0.04 * 0.7580 / 6 = 0.1 + 0.0051 = 0.1051
#
#     "dr_grpo"  the same sums, divided by 4 completions * max_completion_length, say 4
#                loss = (0.6 + 0.04 * 0.7580) / 16 = 0.0394
#
# The gradient of the "grpo" loss, with respect to log pi, at two tokens:
#
#   - The token of completion 2. The gradient of the surrogate is 0.5 (section 2), with a minus in
#     the loss. That of k3 is -1 (section 3), times beta. Both are divided by the 4 completions:
#     (-0.5 - 0.04) / 4 = -0.135. Descent makes the token likelier, as it should.
#   - The first token of completion 1. The clip leaves only the KL: beta * 1/3, divided by 2 tokens
#     and 4 completions, is 0.0017. Descent makes the token rarer.
#
# Why the loss starts at 0. At a run's first update every ratio is 1 (section 2), and every k3 is 0.
# Then the "grpo" loss over all N completions is minus the mean of the advantages, and in each group
# they sum to 0. But the gradient is not 0: with respect to log pi, it is -A / |o_i| / N at each
# token.
#
# With one update a step, the ratios are 1 in every step. So in the "grpo" loss the advantages
# always add 0, and what is left is beta times a mean of k3. Watch the reward, and not the loss.
#
# That is GRPO, and you may stop here. The rest makes the tensors that `grpo_loss` needs, updates
# the weights, and keeps the run.


# ---- 6. Settings -------------------------------------------------------------------------
#   step          one run through the list at the top: N = B * G completions
#   pass          every completion of the step is used once; a step has num_iterations passes
#   mini-batch    what one update uses; a pass has num_mini_batches of them
#   micro-batch   what is computed at once, to fit into memory: micro_batch_size completions
def setting(default, text):
    """A field with its default, and a text that the demo shows as the help of its flag."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every setting, mostly under TRL's names. ValueError for a number or a name that cannot be."""
    # What is sampled in a step: prompts_per_step * num_generations completions.
    num_generations: int = setting(8, "G, completions of each prompt; 4 is few, 16 is comfortable")
    prompts_per_step: int = setting(32, "B, prompts in a step")
    sampling_batch_size: int = setting(256, "completions sampled at once (at least a group)")
    max_completion_length: int = setting(512, "tokens at which a completion is cut off")
    temperature: float = setting(1.0, "divides the tokens' scores; lower: less varied")
    # The loss, sections 1 to 5.
    beta: float = setting(0.04, "factor of the KL penalty; 0: none, and no pi_ref in memory")
    epsilon: float = setting(0.2, "the clip's lower limit is 1 - epsilon")
    epsilon_high: float | None = setting(None, "the upper is 1 + epsilon_high; None: epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = setting("grpo", "how to average over tokens")
    scale_rewards: Literal["group", "none", "batch", "rloo"] = setting("group", "section 1")
    # The relatives, section 13.
    kl_penalty_type: Literal["low_var_kl", "kl", "mse", "abs"] = setting("low_var_kl", "section 13")
    use_bias_correction_kl: bool = setting(False, "multiply the KL by the ratio, as TRL 1.16 does")
    importance_sampling_level: Literal["token", "sequence"] = setting("token", "what has one ratio")
    dynamic_sampling: int = setting(0, "how often, at most, groups of equal rewards are replaced")
    # The update, section 11.
    steps: int = setting(300, "steps of sampling and learning")
    num_iterations: int = setting(1, "passes over the completions of a step")
    num_mini_batches: int = setting(1, "updates in each pass")
    micro_batch_size: int = setting(4, "completions in one forward pass, outside of sampling")
    learning_rate: float = setting(1e-6, "peak of AdamW's rate; around 1e-6 for a billion weights")
    warmup_steps: int = setting(10, "steps over which the rate rises to the peak; then it falls")
    max_grad_norm: float = setting(1.0, "a gradient with a larger norm is scaled to this norm")
    # The run, sections 7 and 12.
    seed: int = setting(0, "decides the order of the examples and all that is drawn at random")
    save_steps: int = setting(10, "steps between checkpoints; 0: never save one")
    bf16: bool | None = setting(None, "multiply in bfloat16 (section 12); None: where the GPU can")

    def __post_init__(self):
        least = dict(num_generations=2, prompts_per_step=1, max_completion_length=1, steps=1,
                     sampling_batch_size=1, micro_batch_size=1, num_iterations=1,
                     num_mini_batches=1, temperature=1e-6, max_grad_norm=1e-6)
        for entry in fields(self):  # one setting: its .name, .default and .type
            value = getattr(self, entry.name)
            if isinstance(entry.default, str):  # a choice; the type is Literal["a", "b"]
                allowed = get_args(entry.type)  # ("a", "b")
                if value not in allowed:
                    raise ValueError(f"{entry.name} is {value!r}, not one of {allowed}")
            elif entry.type is int and type(value) is not int:  # True is no whole number, either
                raise ValueError(f"{entry.name} is {value!r}, and must be a whole number")
            elif value is not entry.default and not isinstance(value, bool):  # a new number
                smallest = least.get(entry.name, 0)
                if not smallest <= value < math.inf:  # NaN is refused here, too
                    raise ValueError(f"{entry.name} is {value}, and must be at least {smallest}")
        if self.num_mini_batches > self.prompts_per_step * self.num_generations:
            raise ValueError(f"num_mini_batches is {self.num_mini_batches}, more than completions")


# ---- 7. The loop -------------------------------------------------------------------------
@dataclass
class Completion:
    """What the model wrote after a prompt: L tokens. Sampling fills in the fields up to
    `truncated`, `grade` fills in the reward, and `train` the rest."""
    example: dict  # the row of the data set: the prompt, and what the reward function needs
    prompt_ids: list  # the tokens of the prompt
    # The loss is about these ids. Do not encode the text again: it can give other ids, and the
    # loss would be about tokens that were never sampled.
    ids: list = field(default_factory=list)
    sampler_logprobs: list = field(default_factory=list)  # of the ids; logged, not learned from
    text: str = ""
    truncated: bool = False  # cut off at max_completion_length: it has no end token
    reward: float = 0.0
    advantage: float = 0.0
    ref_logprobs: torch.Tensor | None = None  # (L,) of pi_ref; None at beta = 0
    old_logprobs: torch.Tensor | None = None  # (L,) of pi_old; None with one update a step


@dataclass
class Learner:
    """What is kept from step to step. `make_learner` (section 12) makes it."""
    config: GRPOConfig
    model: torch.nn.Module  # pi_theta, which also samples
    tokenizer: object
    reference: torch.nn.Module | None  # pi_ref; None at beta = 0
    optimizer: torch.optim.Optimizer
    examples_seen: int = 0
    history: list = field(default_factory=list)  # the metrics of all steps so far
    groups: list = field(default_factory=list)  # the last step's B groups of G completions


def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False,
          after_step=None):
    r"""Train `model` in place. Returns the metrics of all steps, a list of dicts.

    `dataset` is a datasets.Dataset or a list of dicts, with the same columns in all rows: a
    `prompt`, and what the reward function needs (section 9 says how `grade` calls it). A prompt is
    a string, or a chat: a list of messages with a role and a content.

    An example; README.md has the whole script, and its results. Asked for a short answer to "what
    is 38 times 3 plus 38?", Qwen mostly writes one number, a wrong one. Now and then it writes down
    the product first ("114 + 38 = 152"), and is right more often. A reward for right answers makes
    this its habit:

        name = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
        # `train` makes the weights float32. Load them so, to compare before and after.
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # .to("cuda")
        tokenizer = AutoTokenizer.from_pretrained(name)
        ask = "Answer in one short line: what is {} times {} plus {}?"
        data = [{"prompt": [{"role": "user", "content": ask.format(a, b, c)}], "answer": a * b + c}
                for a in range(11, 40) for b in range(2, 10) for c in range(2, 41)]

        def is_right(text, answer):  # whether the last number in the text is the answer
            numbers = re.findall(r"[0-9]+(?:\.[0-9]+)?", text)
            return bool(numbers) and float(numbers[-1]) == answer

        def reward(completions, answer, **columns):  # a completion is a chat of one message
            return [float(is_right(chat[0]["content"], a)) for chat, a in zip(completions, answer)]

        config = GRPOConfig(steps=20, prompts_per_step=6, max_completion_length=32, beta=0,
                            learning_rate=2e-6, warmup_steps=8, micro_batch_size=8, save_steps=5)
        train(model, tokenizer, data, reward, config, "runs/sums")
        model.save_pretrained("runs/sums")  # and tokenizer.save_pretrained("runs/sums")

    To keep a run, name an `output_dir`. It gets metrics.jsonl, with a line for each step, and
    checkpoint.pt every `save_steps` steps and at the end (0: never). To go on after an
    interruption, make the same call with resume=True. Only the settings `steps` (which the
    learning rate depends on), `save_steps`, `micro_batch_size` and `sampling_batch_size` may
    differ. Without resume=True, a folder that holds a run is refused.

    `after_step(learner)` is called after each step, before the step is saved. learner.groups has
    the completions, and learner.history[-1] the step's metrics, to which it may add numbers. To
    sample in it, write `with autocast(learner.model, config.bf16):`, as training does.

    What fills the memory of a GPU:

        Each weight needs 22 bytes: 4 for itself, 4 for its gradient, 8 for AdamW, 4 for pi_ref
            (none at beta=0), and 2 for a copy in bfloat16 (none with bf16=False, section 12).
        Sampling keeps a cache of n * (P + T) tokens; n is `sampling_batch_size`.
        An update keeps what all layers computed for n * (P + T) tokens, and n * T * V logits (the
            scores of the V tokens) several times; n is `micro_batch_size`.

    By arithmetic, the defaults and a model of half a billion weights fit into 24 GB. If memory runs
    out, there is a torch.OutOfMemoryError. Then lower the n of the place where it happened, or
    `max_completion_length` in a new run. A run with an `output_dir` can go on with a lower n."""
    if resume and not output_dir:
        raise ValueError("resume=True needs the output_dir of the run that is to go on")
    check_data(dataset, reward_fn)
    learner = make_learner(model, tokenizer, config)
    if output_dir:
        open_folder(Path(output_dir), learner, resume)
    bar = tqdm(range(len(learner.history) + 1, config.steps + 1))
    for step in bar:
        learner.optimizer.param_groups[0]["lr"] = scheduled_rate(config, step)
        # Seeds Python, NumPy and PyTorch. So a resumed run draws what an unbroken one would draw.
        set_seed((config.seed * 1_000_003 + step) % 2**32)
        started = time.perf_counter()

        # Sample completions, and reward each (sections 8 and 9).
        groups = sample_and_grade(learner, dataset, reward_fn, config.prompts_per_step)
        groups = replace_useless(learner, dataset, reward_fn, groups)  # does nothing by default
        sampled = time.perf_counter()
        completions = sum(groups, [])  # the groups joined: a list of N

        # Compare each with its group (section 1). Those that are truncated count, too: the
        # policy wrote them, so they belong in the mean of their group.
        advantages = group_advantages(rewards_of(groups), config.scale_rewards)  # (B, G)
        for completion, advantage in zip(completions, advantages.flatten().tolist()):
            completion.advantage = advantage

        # Compute the log-probs of pi_ref and pi_old (section 10). Neighbours of similar length
        # need little padding. The longest come first: if memory runs out, it shows early.
        completions.sort(key=lambda completion: len(completion.ids), reverse=True)
        if config.beta > 0:
            store_logprobs(learner, learner.reference, completions, "ref_logprobs")
        # With one update a step, pi_old is still pi_theta, and the update computes it. With more,
        # it must be stored. (The log-probs of sampling are no pi_old: computed token by token, they
        # are rounded in another way, and the ratio would not start at 1.)
        if config.num_iterations * config.num_mini_batches > 1:
            store_logprobs(learner, learner.model, completions, "old_logprobs")

        # Update the weights (section 11).
        updates = []
        for _ in range(config.num_iterations):  # passes
            # Every num_mini_batches-th completion, so that each mini-batch has long and short ones.
            for i in range(config.num_mini_batches):
                updates.append(update(learner, completions[i :: config.num_mini_batches]))

        learner.groups = groups
        seconds = {"sample_seconds": sampled - started,
                   "update_seconds": time.perf_counter() - sampled}
        learner.history.append({"step": step} | metrics_of(learner, updates) | seconds)
        bar.set_postfix_str(f"reward {learner.history[-1]['reward_mean']:.2f}")
        if after_step:
            after_step(learner)
        if output_dir:
            save_run(Path(output_dir), learner)
    return learner.history


def rewards_of(groups):
    """The rewards of B groups of G completions, as a tensor (B, G)."""
    return torch.tensor([[c.reward for c in group] for group in groups], dtype=torch.float64)


def rewards_differ(group):
    """Whether the rewards of a group differ, so that its advantages are not all 0."""
    return bool(group_advantages(rewards_of([group])).any())


# ---- 8. Sampling -------------------------------------------------------------------------
# The model reads the prompt, and gives a score, called logit, to each possible next token. One
# token is drawn. Then the model reads the prompt and this token, and so on:
#
#     ids = the tokens of the prompt
#     up to max_completion_length times, or until an end token is drawn:
#         logits = those that the model gives after the last of the ids        (V,)
#         draw a token from softmax(logits / temperature), and append it to the ids
#
# `sample_groups` does this for many completions at once, and computes nothing twice:
#
#   - What the model has computed for the tokens before is kept in the *cache*. So each forward
#     pass reads only one new token for each completion.
#   - Each prompt is read once. Then its part of the cache is copied G times.
#   - A completion that has ended leaves the batch. Say that two are written, a and b. `live` are
#     the completions in the batch, and `going_on` the rows of those that have not ended:
#
#         t    live    drawn tokens      going_on
#         0    a, b    "3",   "5"        0, 1    both go on
#         1    a, b    "+2",  END        0       b has ended: keep row 0 of cache and mask
#         2    a       END               none    all have ended
#
# `model.generate` of transformers does all this, too, but with settings that are stored with the
# model. Qwen2.5-0.5B-Instruct has temperature 0.7, top_p 0.8, top_k 20 and repetition_penalty 1.1,
# and the default of transformers is top_k 50. top_k and top_p allow only the likeliest tokens, and
# the repetition_penalty makes repeated ones rarer. If one of these stays on, the tokens are drawn
# from one distribution, and the loss takes the log-probs of another.
#
# The loop below draws from softmax(logits / temperature), and keeps the log-prob of each draw.
# Section 10 computes these log-probs again, for all tokens at once. The mean absolute difference
# is logged as sampler_gap: about 1e-6 in float32, and up to a few hundredths in bfloat16.
# If it is larger, sampling and section 10 probably differ in temperature, attention mask or
# positions. (The ratio cannot show this, because both of its parts come from section 10.)
def sample_and_grade(learner, dataset, reward_fn, count):
    """Groups of G completions with rewards, for the next `count` examples."""
    config = learner.config
    examples = take_examples(dataset, config.seed, learner.examples_seen, count)
    learner.examples_seen += count
    groups = []
    # Within one `with autocast`, the weights are copied to bfloat16 once (section 12), for all
    # tokens.
    with autocast(learner.model, config.bf16):
        for part in chunks(examples, max(1, config.sampling_batch_size // config.num_generations)):
            groups += sample_groups(learner.model, learner.tokenizer, part, config.num_generations,
                                    config.max_completion_length, config.temperature)
    grade(reward_fn, sum(groups, []))
    return groups


@torch.no_grad()
def sample_groups(model, tokenizer, examples, num_generations, max_completion_length,
                  temperature=1.0):
    """G = `num_generations` completions for each of B examples: B lists of G `Completion`.

    Examples are dicts with a "prompt", which is a string or a chat (a list of messages with role
    and content). A completion ends with the first end token, or is cut off at the limit.
    Temperature 0, for evaluation, takes the likeliest token, with its log-prob at temperature 1.
    Reproducible under torch.manual_seed. Leaves the model in eval mode, also for the update:
    dropout would change pi. ValueError for a prompt that is empty or too long."""
    model.eval()
    G = num_generations
    end_ids = end_token_ids(model, tokenizer)
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    # Pad on the left, so that the last column is the last token of each prompt. `mask` is the
    # attention mask here: the model does not look at tokens where it is 0.
    ids, mask = pad_rows(prompts, "left", model.device)  # (B, P)
    # The model's context, the longest text that it can read, in tokens.
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and ids.shape[1] + max_completion_length > context:
        raise ValueError(f"a prompt of {ids.shape[1]} tokens and {max_completion_length} more are "
                         f"above {context}: {tokenizer.decode(max(prompts, key=len))!r:.300}")
    # Read each prompt once, and keep what was computed: the cache, here past_key_values. Of the
    # logits only those of the last column are needed: they predict the first new token.
    out = forward(model, ids, mask, use_cache=True, logits_to_keep=1)
    cache, logits = out.past_key_values, out.logits[:, -1]  # logits (B, V)
    # Copy each prompt's row G times. For B = 2 and G = 3, rows is [0, 0, 0, 1, 1, 1], and x[rows]
    # has these rows of x. The cache has a function for this, reorder_cache.
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(G)  # (n,), n = B * G
    logits, mask = logits[rows], mask[rows]  # (n, V), (n, P)
    cache.reorder_cache(rows)
    # Again and again: draw a token for each row, drop the rows that have ended, read the tokens.
    completions = [Completion(example, prompt_ids)
                   for example, prompt_ids in zip(examples, prompts) for _ in range(G)]
    live = completions  # those without an end token: row i of tensors and cache is for live[i]
    for t in range(max_completion_length):
        tokens = draw_tokens(logits, temperature)  # (n,)
        logprobs = selective_log_softmax(logits, tokens, temperature or 1.0)  # (n,)
        for completion, token, logprob in zip(live, tokens.tolist(), logprobs.tolist()):
            completion.ids.append(token)
            completion.sampler_logprobs.append(logprob)
        going_on = [i for i, completion in enumerate(live) if completion.ids[-1] not in end_ids]
        if not going_on or t + 1 == max_completion_length:
            break
        if len(going_on) < len(live):  # the rows that have ended leave the batch
            live = [live[i] for i in going_on]
            kept = torch.tensor(going_on, device=model.device)
            cache.reorder_cache(kept)
            tokens, mask = tokens[kept], mask[kept]
        # A column for the tokens just drawn: (n, P+t+1).
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        out = forward(model, tokens.unsqueeze(1), mask, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]  # logits (n, V)
    for completion in completions:
        completion.truncated = completion.ids[-1] not in end_ids
        completion.text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return chunks(completions, G)


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
    """All token ids that end a completion. ValueError if there are none."""
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


def pad_rows(rows, side, device):
    """n rows of numbers, filled up with 0 (n, longest), and a mask (n, longest), 0 at padding."""
    # The mask comes from the lengths. A mask by ids, 0 at every pad_token_id, would also hide the
    # real end tokens of models whose padding is the end token. They would never learn to end.
    rows = [torch.as_tensor(row) for row in rows]
    ones = [torch.ones_like(row, dtype=torch.long) for row in rows]
    return (pad_sequence(rows, batch_first=True, padding_side=side).to(device),
            pad_sequence(ones, batch_first=True, padding_side=side).to(device))


def chunks(items, size):
    """A list cut into lists of `size` items. The last one may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def forward(model, ids, mask, **more):
    """Run the model on `ids`. The attention mask has all columns, also those in the cache."""
    # cuDNN is one of the libraries that PyTorch can use for attention. With padding masks on an
    # H100 it has given NaN gradients (pytorch#196678). So it is off, for the whole process.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Count the real tokens from 0: padding must not shift the positions.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # the shape of the mask
    return model(input_ids=ids, attention_mask=mask, position_ids=positions[:, -ids.shape[1] :],
                 **more)


def selective_log_softmax(logits, ids, temperature=1.0):
    """log softmax(logits / temperature) at the given tokens: (..., V), (...) -> (...)."""
    # In float32, because log_softmax in bfloat16 is off by hundredths.
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # (..., V)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)  # the entry of each id


# ---- 9. The reward -----------------------------------------------------------------------
# Where the right answer is known, a rule gives the reward. We need no "reward model", a second
# network that guesses the reward. `rule_reward` is a rule for one completion. `train` takes a
# *reward function* for many, which `grade` calls. A model in training can write any text. So the
# rule must accept every text, take little time, and never run what it reads. A right answer
# without a box earns 0, since the number may be there by accident. For data with a column
# `answer`, and prompts that are strings, the reward function is one line:
#
#     def reward(completions, answer, **columns):
#         return [rule_reward(text, right) for text, right in zip(completions, answer)]
#
# A small model soon learns to write a box, because that pays. If it learns nothing else, nearly
# all rewards become 0.5. This is a small case of "reward hacking": a higher reward, the same skill.
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
    for brace in re.finditer("[{}]", rest):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return rest[: brace.start()].strip()
    return None


def read_number(text):
    r"""The number in `text` as a float, or None. "1,000", "1{,}000", "$1000", "1000\%",
    "1000." and "1000.0" give 1000.0. "12,34", "3 4", ".5", "1e3" and "nan" give None."""
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

    Each argument is a list with a value for each completion. The lists are copies. `columns` are
    the other columns of the data. For a string prompt, the completion is a string. For a chat, it
    is a chat of one message. TRL calls a reward function in this way too, with more arguments, so
    a function with **columns works with both. ValueError for another number of rewards than N, and
    for a reward that is None, NaN or inf."""
    rows = [copy.deepcopy(completion.example) for completion in completions]
    given = {name: [row[name] for row in rows] for name in rows[0]}
    given["prompts"] = given.pop("prompt")
    given["completion_ids"] = [list(completion.ids) for completion in completions]
    given["completions"] = [c.text if isinstance(c.example["prompt"], str)
                            else [{"role": "assistant", "content": c.text}] for c in completions]
    rewards = list(reward_fn(**given))
    if len(rewards) != len(completions):
        raise ValueError(f"the reward function returned {len(rewards)}, not {len(rows)} numbers")
    for completion, reward in zip(completions, rewards):
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"the reward function returned {reward} for {completion.text!r:.200}")
        completion.reward = float(reward)


# ---- 10. Log-probs -----------------------------------------------------------------------
# The model reads prompts and completions again, now all tokens in parallel: for pi_ref and
# pi_old here, without a gradient, and for pi_theta in section 11, with one. Prompts are padded on
# the left and completions on the right, so that all completions begin in the same column:
#
#     column             0  1  2    3  4  5
#     row 0  ids         a  b  c    x  y  END   prompt a b c, completion x y END
#     row 1  ids         .  .  d    z END  .    prompt d, completion z END; dots are padding
#     row 1  mask        0  0  1    1  1  0     1 at real tokens
#     row 1  positions   0  0  0    1  2  2     counted over real tokens; at dots, no matter
#
# The logits of a column predict the token of the next. So those of columns 2 to 4 give the
# log-probs of the tokens in columns 3 to 5.
@torch.no_grad()
def store_logprobs(learner, model, completions, name):
    """Compute the completions' log-probs by `model`, and keep them in their field `name`."""
    config = learner.config
    for micro_batch in chunks(completions, config.micro_batch_size):
        with autocast(model, config.bf16):
            logprobs, _ = compute_logprobs(model, micro_batch, config.temperature)
        for completion, row in zip(micro_batch, logprobs.cpu()):
            setattr(completion, name, row[: len(completion.ids)])  # (L,)


def compute_logprobs(model, completions, temperature):
    """Log-probs (n, T) of n completions' tokens, and the mask (n, T) of real tokens."""
    prompt_ids, prompt_mask = pad_rows([c.prompt_ids for c in completions], "left", model.device)
    ids, mask = pad_rows([c.ids for c in completions], "right", model.device)  # (n, T)
    input_ids = torch.cat([prompt_ids, ids], dim=1)  # (n, P+T)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)  # (n, P+T)
    return token_logprobs(model, input_ids, attention_mask, ids.shape[1], temperature), mask


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0):
    """log pi of each completion token: ids and mask (n, P+T) -> (n, T), float32.

    Differentiable. T is `completion_length`. Prompts are padded on the left, completions on
    the right. With another `temperature` than that of sampling, pi is another policy."""
    out = forward(model, input_ids, attention_mask, use_cache=False,
                  logits_to_keep=completion_length + 1)  # + 1: the column before predicts
    return selective_log_softmax(out.logits[:, :-1], input_ids[:, -completion_length:], temperature)


# ---- 11. The update ----------------------------------------------------------------------
# An update is a step of the optimizer, with the gradient of the loss over a mini-batch. A
# mini-batch rarely fits into memory. So the gradients of its micro-batches are added up. The
# loss is a mean, so each micro-batch counts by its share: a mean over 4 completions is 3/4 of
# the mean over the first three, plus 1/4 of the last. Without these shares, the gradient would
# depend on micro_batch_size.
def count_tokens(completions):
    """How many tokens the completions have together."""
    return sum(len(completion.ids) for completion in completions)


def update(learner, mini_batch):
    """Make an update, and return its metrics. If the gradient is not finite, the weights stay as
    they are, `skipped_updates` is 1, and the other metrics are 0."""
    config = learner.config
    learner.optimizer.zero_grad()  # a run stopped in a notebook may have left gradients
    # Without KL, an advantage of 0 gives no gradient. Such a completion is not computed, but it
    # still counts in the divisor of the mean: in `share`, below. If no completion is left, the
    # gradients stay None, and the optimizer moves nothing.
    useful = [c for c in mini_batch if c.advantage != 0 or config.beta > 0]
    # What the loss is a mean over: tokens for "dapo", else completions.
    size = count_tokens if config.loss_type == "dapo" else len
    metrics = dict.fromkeys(("loss", "kl", "clip_fraction", "sampler_gap", "ratio_max"), 0.0)
    for micro_batch in chunks(useful, config.micro_batch_size):
        with autocast(learner.model, config.bf16):
            logprobs, mask = compute_logprobs(learner.model, micro_batch, config.temperature)
        # With one update a step, pi_theta is still pi_old. Then the ratio exp(logprobs -
        # logprobs.detach()) is 1, but its gradient is that of logprobs (section 2).
        old_logprobs = logprobs.detach()  # (n, T)
        if micro_batch[0].old_logprobs is not None:
            old_logprobs, _ = pad_rows([c.old_logprobs for c in micro_batch], "right", mask.device)
        ref_logprobs = None
        if config.beta > 0:
            ref_logprobs, _ = pad_rows([c.ref_logprobs for c in micro_batch], "right", mask.device)
        advantages = logprobs.new_tensor([c.advantage for c in micro_batch])  # (n,)
        loss, part = grpo_loss(
            logprobs, old_logprobs, ref_logprobs, advantages, mask, epsilon=config.epsilon,
            epsilon_high=config.epsilon_high, beta=config.beta, loss_type=config.loss_type,
            max_completion_length=config.max_completion_length,
            kl_penalty_type=config.kl_penalty_type,
            importance_sampling_level=config.importance_sampling_level,
            use_bias_correction_kl=config.use_bias_correction_kl)
        share = size(micro_batch) / size(mini_batch)
        (loss * share).backward()  # adds to the gradients

        drawn, _ = pad_rows([c.sampler_logprobs for c in micro_batch], "right", mask.device)
        part["sampler_gap"] = masked_mean((drawn - old_logprobs).abs(), mask).item()
        metrics["loss"] += part["loss"] * share
        metrics["ratio_max"] = max(metrics["ratio_max"], part["ratio_max"])
        for name in ("kl", "clip_fraction", "sampler_gap"):  # means over the tokens
            metrics[name] += part[name] * count_tokens(micro_batch) / count_tokens(useful)
    norm = torch.nn.utils.clip_grad_norm_(learner.model.parameters(), config.max_grad_norm).item()
    metrics |= {"grad_norm": norm, "skipped_updates": 0}
    if math.isfinite(norm):
        learner.optimizer.step()
    else:
        tqdm.write(f"update skipped: the norm of the gradient is {norm}")
        metrics = dict.fromkeys(metrics, 0.0) | {"skipped_updates": 1}
    learner.optimizer.zero_grad()  # sampling needs the memory
    return metrics


# What to watch:
#
#     reward_mean             should rise
#     zero_variance_fraction  groups of equal rewards. Near 1, almost nothing is learned
#     entropy                 minus the mean log-prob of the drawn tokens: how unsure the policy is
#     truncated_fraction      if many are cut off, raise max_completion_length
#     kl                      if it stays above 1, lower the learning rate, or raise beta
#     sampler_gap             larger than section 8 says: sampling and training disagree
#
# A policy that has *collapsed* writes the same text again and again: often the cheapest one that
# pays a little, or one that is always wrong. Then the rewards of a group are equal, and they give
# no gradient. It shows in several metrics at once: zero_variance_fraction is near 1, entropy is
# near 0, and reward_mean and completion_length stand still, high or low. To repair it, start again
# with a lower learning rate, a longer warm-up, or a reward that pays this text nothing.
def metrics_of(learner, updates):
    """The metrics of a step: a dict of finite numbers. With dynamic sampling, they are of the
    groups that are learned from (only `examples_seen` counts all that were sampled)."""
    rewards = rewards_of(learner.groups)  # (B, G)
    completions = sum(learner.groups, [])
    tokens = count_tokens(completions)
    metrics = {
        "learning_rate": learner.optimizer.param_groups[0]["lr"],
        "examples_seen": learner.examples_seen,
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(dim=1, correction=0).mean().item(),  # the mean std
        "zero_variance_fraction": 1 - sum(map(rewards_differ, learner.groups)) / len(rewards),
        "entropy": -sum(sum(c.sampler_logprobs) for c in completions) / tokens,
        "completion_length": tokens / len(completions),
        "truncated_fraction": sum(c.truncated for c in completions) / len(completions),
        "skipped_updates": sum(each["skipped_updates"] for each in updates),
        "ratio_max": max(each["ratio_max"] for each in updates)}
    # Means over the updates. Within an update, kl, clip_fraction and sampler_gap are means over
    # the tokens. (At beta = 0, completions with advantage 0 are left out.)
    for name in ("loss", "kl", "grad_norm", "clip_fraction", "sampler_gap"):
        metrics[name] = sum(each[name] for each in updates) / len(updates)
    return metrics


# ---- 12. What is not GRPO: precision, rates, order, files --------------------------------
def autocast(model, bf16=None):
    """In `with autocast(model):`, the model multiplies its matrices in bfloat16.

    `bf16` is the setting of this name: True, False, or None, which is True where the GPU can."""
    # bfloat16 is a number format of 16 bits, which GPUs multiply several times as fast as float32.
    # But the weights themselves must be float32. Near 0.02, the numbers of bfloat16 lie 0.00012
    # apart. AdamW moves a weight by about the learning rate, say 0.000001, and the sum would be
    # rounded back to the old weight.
    #
    # So the weights stay in float32, and the model multiplies with copies in bfloat16. A copy is
    # kept until the `with` ends, and would be wrong after an update. So sampling and each
    # micro-batch have a `with` of their own.
    device = model.device.type
    if bf16 is None:
        bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device, torch.bfloat16, enabled=bf16)


def make_learner(model, tokenizer, config):
    """Reference and optimizer. Casts the model to float32, in place."""
    model.float()
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta > 0 else None
    # AdamW's default weight_decay would shrink the weights. `fused`, AdamW as one function of the
    # GPU, needs less memory.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0,
                                  fused=model.device.type == "cuda")
    return Learner(config, model, tokenizer, reference, optimizer)


def scheduled_rate(config, step):
    """Up linearly to the peak at step `warmup_steps`, then down, to 0 one step after the last."""
    # Both are 1 at step `warmup_steps` (if it is 1 or more).
    up = step / max(1, config.warmup_steps)
    down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)
    return float(config.learning_rate * min(up, down))  # a NumPy number would not load


def take_examples(dataset, seed, start, count):
    """Examples number `start` to start + count - 1. Each epoch has an order of its own."""
    taken = []
    while len(taken) < count:
        epoch, place = divmod(start + len(taken), len(dataset))
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(dataset), generator=shuffle, device="cpu").tolist()
        taken += [dataset[i] for i in order[place : place + count - len(taken)]]
    return taken


def check_data(dataset, reward_fn):
    """ValueError for data, or a reward function, that cannot work."""
    if not callable(reward_fn):
        raise ValueError(f"reward_fn is {reward_fn!r:.200}, and must be one function")
    if not len(dataset):
        raise ValueError("the data set is empty")
    taken = {"prompts", "completions", "completion_ids"}  # names that `grade` gives
    for row in (dataset if isinstance(dataset, list) else [dataset[0]]):  # in a Dataset, all alike
        if row.keys() != dataset[0].keys() or "prompt" not in row or taken & row.keys():
            raise ValueError(f"a row has the columns {list(row)}. All rows need the same ones, a "
                             f"prompt among them, and none of {sorted(taken)}")


def save_run(folder, learner):
    """Write metrics.jsonl and, when it is due, checkpoint.pt: 16 bytes a weight, 12 at beta=0. It
    needs twice that while it is written, since the old one stays until the new one is whole."""
    steps = len(learner.history)
    # `default=float`: after_step may have added NumPy numbers, which JSON does not know.
    lines = [json.dumps(metrics, default=float) for metrics in learner.history]
    (folder / "metrics.new").write_text("\n".join(lines) + "\n")
    (folder / "metrics.new").replace(folder / "metrics.jsonl")  # renamed, so never half a file
    every = learner.config.save_steps
    if every and (steps % every == 0 or steps == learner.config.steps):
        saved = {"settings": json.dumps(vars(learner.config), default=float), "history": lines,
                 "examples_seen": learner.examples_seen, "model": learner.model.state_dict(),
                 "reference": learner.reference.state_dict() if learner.reference else None,
                 "optimizer": learner.optimizer.state_dict()}
        try:
            torch.save(saved, folder / "checkpoint.new")
        except RuntimeError:
            (folder / "checkpoint.new").unlink(missing_ok=True)
            raise OSError(f"no checkpoint can be written in {folder}: is the disk full?")
        (folder / "checkpoint.new").replace(folder / "checkpoint.pt")


MAY_CHANGE = ("steps", "save_steps", "micro_batch_size", "sampling_batch_size")  # on resume


def open_folder(folder, learner, resume):
    """Make the folder. With `resume`, load its checkpoint into the learner. ValueError if it
    holds a run and `resume` is False, if the run has other settings, or if it cannot be read."""
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
        settings = json.loads(saved["settings"])
        weights = saved["model"]
    except Exception as error:  # of many kinds
        raise ValueError(f"{path} cannot be read: {error!r:.200}")
    for name, there in settings.items():
        here = getattr(learner.config, name, "nothing")
        if here != there and name not in MAY_CHANGE:
            raise ValueError(f"{folder} holds another run: {name} is {there} there, {here} here")
    learner.model.load_state_dict(weights)
    if learner.reference:
        learner.reference.load_state_dict(saved["reference"])
    learner.optimizer.load_state_dict(saved["optimizer"])
    learner.history = [json.loads(line) for line in saved["history"]]
    learner.examples_seen = saved["examples_seen"]
    tqdm.write(f"going on after step {len(learner.history)}")


# ---- 13. The relatives, and the apples ---------------------------------------------------
# GRPO's relatives, as settings. With one update a step, the clip never acts (section 2). So a
# method with a clip makes several updates a step: num_mini_batches=4, for example.
#
#   REINFORCE  the gradient of section 2, a sum of A * grad log pi over the tokens (which
#              "dr_grpo" divides by a constant). With the group's mean as baseline:
#              scale_rewards="none", loss_type="dr_grpo", beta=0
#   RLOO       REINFORCE Leave One Out: the baseline is the mean of the *other* rewards.
#              scale_rewards="rloo", loss_type="dr_grpo", beta=0
#   Dr. GRPO   REINFORCE with the clip: the same settings, and several updates a step. Dividing
#              by the std would make very easy and very hard prompts, whose std is small, count
#              more
#   DAPO       loss_type="dapo", beta=0, `overlong_penalty` added to the reward, and two more:
#              epsilon_high=0.28 (before the clip acts, a good token of probability 0.010 can reach
#              0.0128 instead of 0.0120), and dynamic_sampling=3 (groups of equal rewards are
#              replaced up to three times; in the paper, until none is left)
#   GSPO       importance_sampling_level="sequence" (arXiv:2507.18071), epsilon=3e-4,
#              epsilon_high=4e-4. A completion has one ratio, the geometric mean of its tokens'
#              ratios
#
# Differences from the papers. R1's report has one ratio for a completion; here, as in
# DeepSeekMath, each token has its own. "dapo" averages over a mini-batch, as libraries do; the
# paper averages over a prompt's group.
#
# Left out: a learned reward model, rewards for the steps of a solution, a reference that is
# renewed, gradient checkpointing (layers are computed twice, to save memory), several GPUs.
def replace_useless(learner, dataset, reward_fn, groups):
    """DAPO's dynamic sampling: replace groups of equal rewards, up to `dynamic_sampling` times
    (by default 0). After the last round, some may remain."""
    for _ in range(learner.config.dynamic_sampling):
        useful = [group for group in groups if rewards_differ(group)]
        if len(useful) < len(groups):
            new = sample_and_grade(learner, dataset, reward_fn, len(groups) - len(useful))
            groups = useful + new
    return groups


def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty (arXiv:2503.14476, equation 13): lengths in tokens (N,) -> (N,).

    It is 0 up to `buffer` tokens below the limit, then falls linearly to -1 at the limit. Add
    it in a reward function; lengths = torch.tensor([len(ids) for ids in completion_ids])."""
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def kl_estimate(logprobs, ref_logprobs, kl_penalty_type="low_var_kl"):
    """KL(pi_theta || pi_ref), estimated per token in four ways: (n, T), (n, T) -> (n, T).

    "low_var_kl" is k3. With d = log(pi_theta/pi_ref), which is -x of `k3_kl`, "kl" is k1 = d,
    "mse" is k2 = d^2 / 2, and "abs" is |d|. The names are verl's and RLinf's. ValueError for
    others."""
    d = logprobs - ref_logprobs  # (n, T)
    estimates = {"low_var_kl": k3_kl(logprobs, ref_logprobs), "kl": d, "mse": d.square() / 2,
                 "abs": d.abs()}
    if kl_penalty_type not in estimates:
        raise ValueError(f"kl_penalty_type is {kl_penalty_type!r}, not one of {list(estimates)}")
    return estimates[kl_penalty_type]


# Which estimate may be a loss? If the weights change, the KL changes for two reasons: the estimate
# at each token changes, and other tokens are drawn. backward() sees only the first, since the drawn
# tokens are fixed ids. So an estimate whose mean is right can have a gradient whose mean is wrong.
#
# Write pi for pi_theta, d for log(pi/pi_ref), and r for pi/pi_old, as in section 2. We want the
# gradient of KL = sum(pi * d), the sum over the V tokens of one position. It is
#
#     sum(d * grad pi) + sum(pi * grad d)
#
# The second sum is 0: pi_ref is constant, so grad d = grad log pi, and sum(pi * grad log pi) = 0
# (section 2). The first is sum(pi * d * grad log pi). So, for a token that was drawn from pi, the
# gradient should be d * grad log pi. What it is (1 - e^-d is section 3's 1 - pi_ref/pi_theta):
#
#     estimate             right value?  gradient / grad log pi
#     k1 = d               yes           1            wrong: 0 on average, no pull to pi_ref
#     k2 = d^2 / 2         no            d            right
#     |d|                  no            1 or -1      wrong: the same pull, near or far
#     k3 = e^-d - 1 + d    yes           1 - e^-d     nearly right: about d, if d is small
#     r * k3               yes           r * (k3 + 1 - e^-d) = r * d    right
#
# The last is the setting `use_bias_correction_kl`. Its gradient comes from the product rule, with
# grad r = r * grad log pi from section 2. It is right even at r = 1, where its value is that of k3.
# And it is right for tokens drawn from pi_old: sum(pi_old * r * d * grad log pi) is
# sum(pi * d * grad log pi).


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
