# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how a language model learns to reason from nothing but grades.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) is a loop of five moves:

    1. sample     ask the model each question G times; it answers at random     section 7
    2. grade      let a rule, not a person, give every answer a number          section 1
    3. compare    advantage = how much better than the average of its group     section 2
    4. score      ask the models how likely each token of the answers is        section 8
    5. update     make the tokens of better answers likelier and those of       sections 3 to 6
                  worse ones less likely, but only a little at a time

and again from the start, with fresh answers from the model as it is now (sections 10 and 11).

A *policy*, written pi, is what reinforcement learning calls a thing that acts. Here it is a
language model: pi(token | text so far) is the probability that it gives to the next token. Three
policies appear, and it pays to keep them apart from the start:

    pi_theta  the model that is being trained; the only one that gets a gradient
    pi_old    the same model before it began to learn from the present answers. It is not a second
              model in memory, only the numbers that it gave to the answers' tokens (computed by
              section 8, from the same weights that had sampled them)
    pi_ref    a frozen copy of the model from before training, a leash for the first one. It is in
              memory only when beta > 0

The equation that this file computes. For a question q, draw answers o_1 ... o_G. Answer i has
|o_i| tokens; o_it is its token number t, and o_i,<t are the tokens before that. It has one reward
R_i, and one advantage A_i for all of its tokens. Maximise

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           clipped_surrogate
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token   k3_kl

eps (0.2) says how far the ratio r may go before the clip acts, beta (0.04) how strong the leash is.

One small example runs through the comments, and `python grpo.py` prints it. The question is "John
has 3 apples and buys 2 more. How many apples does he have?", and the model gave four answers:

    answer 1    3+2 = \boxed{5}
    answer 2    \boxed{5}
    answer 3    \boxed{6}
    answer 4    3-2 = \boxed{1}

A real tokenizer cuts each of these into half a dozen tokens or more. So that a pencil is enough
to follow the sums, we shall say that answers 1 and 4 have two tokens, and answers 2 and 3 one.

Shapes: B questions with G answers each are N = B * G rows. The G answers to one question stand
next to each other: rows 0 to G-1 belong to question 0, rows G to 2G-1 to question 1, and so on. T
is the width of the answers ("completions"), P the width of the prompts, V the vocabulary's size.
Small letters (n rows, t columns, m tokens) are parts of those.

How to read: sections 1 to 6 are the whole algorithm. Sections 7 to 11 are where its numbers come
from, and make it run. Sections 12 and 13 can be left for another day. All probabilities are kept
as natural logarithms, so the unit of their differences is the nat (a factor of e). Every function
of the mathematics takes tensors and returns tensors: it can be pasted into another project.

What is changed against the papers, and why: log-ratios are limited, so that nothing overflows,
and answers may be sampled and scored in bfloat16 while the weights stay in float32. What is left
out: a learned reward model, a second network that predicts rewards (PPO's critic), reference
models that are renewed, several GPUs.
"""

import contextlib
import copy
import functools
import json
import math
import os
import re
import signal
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Optional

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import get_scheduler, set_seed


# ------------------------------------------------------------------------------------------------
# 1. The reward: a rule, not a model
#
# For mathematics nobody needs to train a model to judge the answers: the right result is known,
# so a rule can grade. The model is asked to put its result into \boxed{...}. It earns 0.5 for
# doing so, and 1.0 more for being right. The rule reads text that a model wrote, and a model under
# training writes anything at all. So the rule must never raise, never take long, and never run
# what it reads (no eval).
# ------------------------------------------------------------------------------------------------


def extract_boxed(text):
    r"""Contents of the complete \boxed{...} that opens last in `text`, or None if there is none.

    The last one, because people and models write intermediate boxes first and the result last.
    Braces nest: \boxed{\frac{1}{2}} holds \frac{1}{2}. Escaped braces, \{ and \}, do not count.
    It is one pass over the text, so the time is linear in its length.
    """
    opened = []  # for each brace still open: where its contents begin, None if it has no \boxed
    start = end = None  # where the contents of the best box so far begin and end
    # The pattern's middle part catches \{ and \}, so that its last part does not.
    for match in re.finditer(r"\\boxed\{|\\[{}]|[{}]", text):
        token = match.group()
        if token == "\\boxed{":
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:  # a closing brace too many is just text
            begin = opened.pop()
            if begin is not None and (start is None or begin > start):
                start = begin
                end = match.start()
    if start is None:
        return None
    return text[start:end]


def read_number(text):
    r"""The number that a person would read in `text`, as a float, or None if it is not a number.

    "1,000", "1{,}000", "$1000", "\$1000", "1000%", "1000." and "1000.00" are all one thousand
    (units are not compared). "1_000", "nan", "12,34" and digits of other scripts are no numbers.
    """
    text = text.replace("{,}", ",")  # LaTeX writes 1{,}000 for 1,000
    text = re.sub(r"\\?[$%]", " ", text).strip()  # $18, \$18, 50%, 50\%
    text = text.removesuffix(".").strip()  # the full stop of a sentence
    # Written out instead of trusting float(), which also takes "nan", "1_000" and Arabic digits.
    sign = r"([+-]?)\s*"
    whole = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"  # 1,234 or 1234, or nothing, as in .5
    fraction = r"(?:\.[0-9]*)?"
    exponent = r"(?:[eE][+-]?[0-9]+)?"
    a_digit_follows = r"(?=\.?[0-9])"  # all three parts above can be empty, but not all at once
    match = re.fullmatch(rf"{sign}{a_digit_follows}({whole}{fraction}{exponent})", text)
    if match is None:
        return None
    return float(match[1] + match[2].replace(",", ""))


def rule_reward(completion, answer):
    r"""Reward of one completion: 0.0 without a box, 0.5 for a box, 1.5 for a box with the answer.

    `completion` and `answer` are strings. A blank box counts as none. The box is right if it
    equals the answer as a string, or as a number to within less than 0.01. Returns a float for
    every pair of strings, never raises, and takes linear time.

        >>> rule_reward(r"There are 9 * 7 = \boxed{63} eggs.", "63")
        1.5
    """
    boxed = extract_boxed(completion)
    if boxed is None or not boxed.strip():
        return 0.0
    if boxed.strip() == answer.strip():
        return 1.5
    given = read_number(boxed)
    wanted = read_number(answer)
    if given is None or wanted is None:
        return 0.5
    # round: 5.01 - 5 is 0.00999... in floating point, and would pass for "below 0.01". What is too
    # large for a float is inf, and inf - inf is NaN: neither is below anything.
    if round(abs(given - wanted), 9) < 0.01:
        return 1.5
    return 0.5


# The apples: answers 1 and 2 are boxed and right, answers 3 and 4 boxed and wrong. So
#
#     R = [1.5, 1.5, 0.5, 0.5]
#
# An answer that is right but not boxed earns 0. That is harsh on purpose: a number somewhere in
# the text is easy to produce by accident. It is also why the format is the first thing that a
# small model learns. Watch for a model that learns *only* the format. A reward stuck at 0.5 is the
# smallest case of what is called reward hacking: the grade is had without the work.
#
# The training loop of section 11 grades a whole batch at once, and hands over the columns of the
# data set by name. For chats, and a column called `answer`, the reward function is
#
#     def boxed_reward(prompts, completions, answer, **other_columns):
#         rewards = []
#         for completion, right in zip(completions, answer):
#             text = completion[0]["content"]  # a completion is a chat of one message
#             rewards.append(rule_reward(text, right))
#         return rewards


# ------------------------------------------------------------------------------------------------
# 2. Advantages: better or worse than the other answers to the same question
#
# An answer that earned 0.5 may be good (the question is hard) or bad (all others earned 1.5). What
# matters is the difference from the baseline, the reward that was to be expected. PPO, the method
# that GRPO simplifies, trains a second network to predict it, the critic. GRPO asks the model G
# times and takes the mean of the group. Divided by the std, the differences have about the same
# size whatever the units of the reward and however hard the question. The result, the advantage,
# belongs to all tokens of the answer.
# ------------------------------------------------------------------------------------------------


def group_advantages(rewards, scale_rewards=True):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> (..., G).

    The std is the population's: divided by G. torch's default divides by G - 1, and most code
    follows it; its advantages are smaller by a factor of sqrt((G-1)/G), 6.5 % at G = 8. A group of
    equal rewards gets exact zeros: it has nothing to teach. `scale_rewards=False` leaves the std
    out, as Dr. GRPO does (section 12). ValueError for fewer than two rewards in a group, for NaN
    and for inf.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2 or not rewards.isfinite().all():
        raise ValueError(f"wanted groups of 2 or more finite rewards, got {rewards}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # float32, or finer
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = centered.square().mean(dim=-1, keepdim=True).sqrt()  # (..., 1)
    advantages = centered
    if scale_rewards:
        advantages = centered / std  # NaN where the std is 0, which is mended below
    # The mean of 0.1, 0.1 and 0.1 is not quite 0.1 in floating point. Divided by a std of the same
    # 1e-17, that rounding error would become advantages of size 1: a lesson made of nothing. So
    # "equal" has a tolerance. The usual way out, an epsilon added to the std, changes the
    # advantages of every group.
    equal = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    return advantages.masked_fill(equal, 0.0)


# The apples: R = [1.5, 1.5, 0.5, 0.5] has the mean 1 and the std 0.5, so
#
#     A = [+1, +1, -1, -1]
#
# A group in which all are right, or all wrong, is all zeros. Where questions are too hard for the
# model most groups are all wrong, where they are too easy all right. The share of such groups is
# logged as zero_variance_fraction.


# ------------------------------------------------------------------------------------------------
# 3. Ratio and clip: learn from an answer, but not too much
#
# How does an advantage become a direction for the weights? A times the gradient of log pi_theta
# makes the token likelier if A > 0 and less likely if A < 0, in proportion to A. Averaged over
# answers that pi_theta draws, this is the direction in which the expected reward grows, because
# grad sum(pi * R) = sum(pi * R * grad log pi). A baseline b does not bend it: it adds only
# b * sum(grad pi) = b * grad 1 = 0. The std changes how much a question counts.
#
# But the answers were drawn by pi_old, and after an update pi_theta is another policy. So the
# objective is r * A, with the ratio r = pi_theta / pi_old. Weighted by r, a mean over tokens drawn
# by pi_old becomes one over tokens drawn by pi_theta: sum(pi_old * r * A) = sum(pi_theta * A).
# (Exactly so for one token; the text before it is still pi_old's.) pi_old is a constant in r, and
# the gradient of r is r times that of log pi_theta: while r is 1, the same direction as before.
#
# Such a correction can be trusted only near r = 1. So the objective becomes min(r A, clip(r) A),
# where clip limits r to the interval from 1 - eps to 1 + eps. As soon as the ratio has gone far
# enough *in the direction that pays*, the min takes the clipped branch. That one is constant: no
# gradient, no further push from this token.
# ------------------------------------------------------------------------------------------------


def clipped_surrogate(logprobs, old_logprobs, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token (PPO, arXiv:1707.06347, equation 7).

    Log-probs of pi_theta (N, T) and of pi_old (N, T), advantages (N,) -> (N, T), to be maximised.
    `epsilon_high` defaults to `epsilon`; an `epsilon` of 1 or more is no lower bound. Value and
    gradient are finite for any finite log-probs and advantages up to 1e16.
    """
    if epsilon_high is None:
        epsilon_high = epsilon
    # From logarithms, since tiny probabilities themselves would become 0, and 0/0. A log-ratio of
    # 100 would overflow, and even where the min throws that branch away its gradient, 0 * inf,
    # would be NaN. e^50 is far beyond anything that is still learning.
    log_ratio = (logprobs - old_logprobs).clamp(-50, 50)  # (N, T)
    ratio = log_ratio.exp()  # (N, T)
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)  # (N, T)
    A = advantages.unsqueeze(1)  # (N, 1): the same for every token of a row
    return torch.min(ratio * A, clipped_ratio * A)


# The apples after some updates. Say that pi_old gave every token the probability 0.2, and that
# pi_theta now gives
#
#     answer 1: 0.3 and 0.2     answer 2: 0.1     answer 3: 0.3     answer 4: 0.1 and 0.2
#
# Then the ratios are 1.5, 0.5 and 1, and all four corners of the clip (at eps 0.2) are there. For
# the last column remember that the gradient of r is r times that of log pi_theta:
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi_theta
#     +1   1.5 (ans. 1)  min( 1.5,  1.2) =  1.2  clipped      0    good, and already much likelier
#     +1   0.5 (ans. 2)  min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (ans. 3)  min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (ans. 4)  min(-0.5, -0.8) = -0.8  clipped      0    bad, and already rarer
#     any  1.0           A                       not clipped  A    every token, at the first update
#
# With one update per batch of answers, pi_theta has the same weights as pi_old when the gradient is
# taken. (This is called on-policy.) Every ratio is then 1 and the clip never acts. It wakes up when
# the same answers are learned from several times. A common mistake is max in place of min for
# negative advantages: it goes on pushing in the fourth line, and stops in the third, where the
# policy went the wrong way.


# ------------------------------------------------------------------------------------------------
# 4. The KL penalty: do not drift too far from where you started
#
# A policy that only chases the reward forgets how to write. How far it has gone is measured by
#
#     KL(pi_theta || pi_ref) = the mean of log(pi_theta / pi_ref), over tokens drawn from pi_theta
#
# which is never negative, and 0 only if the two policies agree. To compute it at every place would
# need all V probabilities of both policies. k3 estimates it from the one token that was drawn.
# ------------------------------------------------------------------------------------------------


def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (N, T), (N, T) -> (N, T).

    Schulman's estimator (joschu.net/blog/kl-approx.html). Over tokens drawn from pi_theta its mean
    is exactly KL(pi_theta || pi_ref). The mean of the middle term is the KL itself. The other two
    cancel, since the mean of pi_ref/pi_theta is sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1.
    It is never negative, since e^x >= 1 + x. Mind which policy is on top: with the fraction upside
    down it estimates something else. Value and gradient are finite for any finite input.
    """
    # Above 50, e^x would soon overflow. Below, e^x is harmless, and the bound is there only because
    # the difference of two huge numbers may itself be -inf.
    log_ratio = (ref_logprobs - logprobs).clamp(-1e30, 50)  # (N, T) log(pi_ref / pi_theta)
    return torch.expm1(log_ratio) - log_ratio  # expm1(x) is e^x - 1, without losing small x


# The apples, with pi_ref = 0.2 for every token:
#
#     pi_theta 0.1    pi_ref/pi_theta 2      k3 = 2 - log(2) - 1 = 0.3069        gradient -1
#     pi_theta 0.2    pi_ref/pi_theta 1      k3 = 0                              gradient  0
#     pi_theta 0.3    pi_ref/pi_theta 2/3    k3 = 2/3 - log(2/3) - 1 = 0.0721    gradient +0.3333
#
# The gradient, with respect to log pi_theta, is 1 - pi_ref/pi_theta. The loss adds beta * k3 and
# goes downhill, so the first token is pulled back up and the last one back down.
#
# Why not simply log(pi_theta / pi_ref), known as k1? Its mean is right as well. But its gradient is
# that of log pi_theta, and the mean of that over tokens drawn from pi_theta is zero: sum(pi_theta *
# grad log pi_theta) = sum(grad pi_theta) = grad 1 = 0. As a loss, k1 holds nothing back at all.
#
# The same caution is due for k3. Which tokens are drawn depends on pi_theta as well, and autograd
# does not see that, so the mean of k3's gradient is not the gradient of its mean. It is that of the
# KL the other way round, KL(pi_ref || pi_theta), which also holds the policy back. (All of this is
# exact at the first update. Later the tokens are still pi_old's, and it holds approximately, unless
# k3 is multiplied by r as well. Section 12 has that, and other estimates.)


# ------------------------------------------------------------------------------------------------
# 5. The masked mean: padding is not data
#
# Answers have different lengths and tensors do not, so short answers are filled up, and a mask
# says which places are real.
# ------------------------------------------------------------------------------------------------


def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is set (bool, int or float); 0, not NaN, where none is.

    `mask` has the shape of `values`, or one that expands to it. With `dim`, over that dimension.
    What stands behind the mask reaches neither the value nor the gradient with respect to `values`.
    Multiplying by the mask would let a NaN through, since 0 * NaN is NaN; `where` does not.
    """
    mask = mask.bool().expand_as(values)
    kept = torch.where(mask, values, 0.0)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ------------------------------------------------------------------------------------------------
# 6. The loss
#
# Everything above, put together, with a minus sign because optimizers minimise. What is left to
# decide is how to average over the tokens of all answers. It looks like a detail, and it is not:
# it decides how much a long answer counts.
# ------------------------------------------------------------------------------------------------


def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """One number from (N, T) numbers and the mask (N, T) of real tokens.

        "grpo"     mean over answers of the mean over their tokens (DeepSeekMath, and the equation
                   on top). Every answer counts the same, so each token of a long one counts less.
                   Long wrong answers are punished too little per token, and answers tend to grow
        "dapo"     mean over all tokens of all answers (arXiv:2503.14476): each token counts the
                   same, so long answers count more
        "dr_grpo"  sum over all tokens, divided by N * max_completion_length (arXiv:2503.20783):
                   like "dapo", but the divisor does not depend on what was sampled

    ValueError for any other `loss_type`, and for "dr_grpo" without `max_completion_length`.
    """
    mask = mask.bool()
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type != "dr_grpo":
        raise ValueError(f"loss_type is {loss_type!r}, and must be 'grpo', 'dapo' or 'dr_grpo'")
    if not max_completion_length:
        raise ValueError(f"loss_type 'dr_grpo' needs max_completion_length, which is "
                         f"{max_completion_length}")
    total = torch.where(mask, per_token, 0.0).sum()
    return total / (len(per_token) * max_completion_length)


def check_and_blank(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta):
    """Refuse what does not fit together, and put zeros behind the mask.

    Returns the log-probs of pi_theta, those of pi_old and pi_ref as constants, and the mask as
    bools, all (N, T). ValueError says what was given and what is wanted. (Shapes are compared
    strictly, because tensors that do not fit are often stretched until they do, silently.)
    """
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs are {tuple(logprobs.shape)}, wanted (N, T)")
    N, T = logprobs.shape
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed; None is for beta=0")
        ref_logprobs = logprobs  # the policy as its own reference: the KL is 0
    wanted = [("old_logprobs", old_logprobs, (N, T)), ("ref_logprobs", ref_logprobs, (N, T)),
              ("mask", mask, (N, T)), ("advantages", advantages, (N,))]
    for name, tensor, shape in wanted:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} are {tuple(tensor.shape)}, wanted {shape}, "
                             f"because logprobs are {(N, T)}")
    # The inputs are masked, not only the result. A NaN or inf behind the mask would be gone from
    # the value then, but the backward pass through exp would still multiply it by 0: NaN.
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old_logprobs = old_logprobs.masked_fill(~mask, 0.0)
    ref_logprobs = ref_logprobs.masked_fill(~mask, 0.0)
    return logprobs, old_logprobs.detach(), ref_logprobs.detach(), mask  # the others are constants


@torch.no_grad()
def loss_metrics(loss, logprobs, old_logprobs, advantages, surrogate, kl, mask):
    """What the log shows of a loss, as plain floats: loss, kl, clip_fraction, ratio_max.

    clip_fraction is the share of tokens where the min took the clipped branch, whose gradient is 0.
    """
    ratio = (logprobs - old_logprobs).clamp(-50, 50).exp()  # (N, T)
    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (N, T) so the min was the other branch
    return {
        "loss": loss.item(),
        "kl": masked_mean(kl, mask).item(),
        "clip_fraction": masked_mean(clipped.float(), mask).item(),
        "ratio_max": torch.where(mask, ratio, 0.0).max().item(),
    }


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              kl_fn=k3_kl):
    """-J, the equation on top of this file (by default), over N answers. Returns (loss, metrics).

    Log-probs of pi_theta, pi_old and pi_ref, (N, T) each; pi_ref's may be None with beta=0.
    Advantages (N,). The mask (N, T) is set on the answers' real tokens; what stands behind it
    reaches neither value nor gradient. `loss_type` is explained in `average`. `kl_fn` estimates
    the KL per token from two (N, T) of log-probs (section 12 has others). The metrics are plain
    floats, those of `loss_metrics`. ValueError for shapes and settings that do not fit together.
    """
    logprobs, old_logprobs, ref_logprobs, mask = check_and_blank(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, beta)
    surrogate = clipped_surrogate(
        logprobs, old_logprobs, advantages, epsilon, epsilon_high)  # (N, T)
    kl = kl_fn(logprobs, ref_logprobs)  # (N, T)
    per_token = -(surrogate - beta * kl)  # (N, T)
    loss = average(per_token, mask, loss_type, max_completion_length)
    metrics = loss_metrics(loss, logprobs, old_logprobs, advantages, surrogate, kl, mask)
    return loss, metrics


# The apples to the end, with beta 0.04:
#
#     answer                     1                  2        3        4
#     advantage                  +1                +1       -1       -1
#     surrogate, per token       1.2, 1.0           0.5     -1.5     -0.8, -1.0
#     k3, per token              0.0721, 0          0.3069   0.0721   0.3069, 0
#
#     "grpo"     surrogate, mean of each answer:  1.1,    0.5,    -1.5,    -0.9     sum -0.8
#                k3, mean of each answer:         0.0361, 0.3069,  0.0721,  0.1534  sum  0.5685
#                loss = 0.8 / 4 + 0.04 * 0.5685 / 4 = 0.2 + 0.0057 = 0.2057
#     "dapo"     surrogate, sum over the tokens -0.6; k3, sum 0.7580; there are 6 tokens
#                loss = 0.6 / 6 + 0.04 * 0.7580 / 6 = 0.1 + 0.0051 = 0.1051
#     "dr_grpo"  the same sums, over 4 answers * max_completion_length, say 4
#                loss = (0.6 + 0.04 * 0.7580) / 16 = 0.0394
#
# The gradient of the "grpo" loss with respect to log pi_theta of answer 2's token: the surrogate
# gives 0.5 and the KL 1 - 2 = -1, so it is -(0.5 - 0.04 * (-1)) / 4 = -0.135. A step against it
# makes the token likelier, as it should. For the first token of answer 1 the clip leaves only the
# KL: 0.04 * (1 - 2/3) / 2 tokens / 4 answers = 0.0017. That makes it a little less likely.
#
# Why does training start at a loss of 0? At the first update every ratio is 1 and every k3 is 0.
# So the "grpo" loss is minus the mean of the advantages, and those sum to 0 in each group. But its
# gradient is not 0: it is -A / |o_i| / N for each token. ("dapo" and "dr_grpo" weigh answers by
# their length, so theirs is 0 if all are equally long, and otherwise it is not.) And because
# advantages are centred anew in every step, the loss says nothing about progress. Watch the reward.
#
# ================================================================================================
# That is GRPO, and you may stop here. What follows is where the five tensors of `grpo_loss` come
# from: sampling (7), log-probabilities (8), settings (9), one step (10) and the loop (11).
# ================================================================================================


# ------------------------------------------------------------------------------------------------
# 7. Sampling: G answers to every question
#
# A language model gives a distribution over the next token. Sampling draws one token from it,
# appends that, and asks again. `model.generate` does so too, but with the checkpoint's own settings
# mixed in: the generation_config.json of Qwen2.5-0.5B-Instruct says top_p 0.8, top_k 20 and
# repetition_penalty 1.1, and without those the library's default is top_k 50. The tokens then come
# from another distribution than the one whose probabilities go into the ratio, and the loss does
# not show it. Each can be switched off, if one knows them all. The loop below has none. It draws
# from softmax(logits / temperature), all of it, and keeps the log-probabilities that it drew with,
# as a check on section 8.
#
# Two things make it fast. Each prompt is read once, and what the model has computed for it (the
# keys and values of its attention layers, the "KV cache") is copied to the G rows that continue it.
# And rows that have ended leave the batch.
# ------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """What was sampled: N = B * G rows, of prompts (width P) and completions (width T)."""

    # Prompts are padded on the left and completions on the right, so that all completions begin in
    # the same column.
    input_ids: torch.Tensor  # (N, P+T) prompt and completion
    attention_mask: torch.Tensor  # (N, P+T) 1 on every real token, the end token included
    completion_mask: torch.Tensor  # (N, T) bool: the tokens that the model chose
    logprobs: torch.Tensor  # (N, T) float32: the log-probability with which each was drawn
    texts: list  # N strings, special tokens stripped
    truncated: torch.Tensor  # (N,) bool: max_completion_length came before an end token


def end_token_ids(model, tokenizer):
    """All ids that end an answer, a sorted list. Qwen has two.

    To miss one would train the model on what it babbles after its answer. They are written down in
    three different places, so all three are asked. ValueError if none of them knows one.
    """
    found = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif ids is not None:
            found.update(ids)
    if not found:
        raise ValueError("neither model nor tokenizer has an eos_token_id: no answer could end")
    return sorted(found)


def encode_prompts(tokenizer, prompts):
    """Prompts, all strings or all chats, as a list of lists of token ids.

    Strings are encoded as they are, chats (lists of messages with role and content) through the
    tokenizer's chat template. ValueError if `prompts` is no list or a prompt comes out empty.
    """
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError(f"wanted a list of one or more prompts, got {prompts!r:.99}")
    strings = sum(isinstance(prompt, str) for prompt in prompts)
    if 0 < strings < len(prompts):
        raise ValueError(f"{strings} of {len(prompts)} prompts are strings, and the others are not")
    if strings:
        encoded = tokenizer(list(prompts))["input_ids"]
    else:
        # add_generation_prompt is the template's "now the assistant speaks". Without it the model
        # would go on with the question.
        chats = [list(prompt) for prompt in prompts]
        encoded = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=False)
    for place, ids in enumerate(encoded):
        if len(ids) == 0:
            raise ValueError(f"prompt {place} has no tokens, so there is nothing to go on from")
    return encoded


def context_length(model):
    """How many tokens a text may have for this model, or infinity if its config does not say."""
    # Models that see pictures as well keep what is about text in a config of its own.
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or math.inf


def position_ids(attention_mask):
    """The position of each token, (N, L) -> (N, L): 0 for the first real one of its row.

    Padding before it must not count. Models with rotary positions forgive a shift, those with
    learned positions go wrong by tens of nats.
    """
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def choose_tokens(logits, temperature, uniforms):
    """Logits (n, V) and uniform numbers (n,) -> a token each (n,), and its log-probability (n,).

    Draws from softmax(logits / temperature) by inverting the cumulative distribution: lay the V
    probabilities end to end on a line, and see on whose stretch the uniform number falls. Unlike
    with torch.multinomial, a row draws the same whichever other rows are there, so that to drop
    rows, or to sample in parts, changes no answer. Temperature 0 takes the likeliest token; its
    log-probability is that at temperature 1.
    """
    # bfloat16 has two to three digits, too few to tell 150,000 probabilities apart: up-cast first.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        logprobs = logits.log_softmax(dim=-1)  # (n, V)
        tokens = logits.argmax(dim=-1)  # (n,)
    else:
        logprobs = (logits / temperature).log_softmax(dim=-1)  # (n, V)
        ends = logprobs.exp().cumsum(dim=-1, dtype=uniforms.dtype)  # (n, V) where stretches end
        total = ends[:, -1:].contiguous()  # (n, 1) the line's length: 1, but for rounding
        points = uniforms.unsqueeze(1) * total  # (n, 1)
        # right=True: a point between two stretches belongs to the later one. So a token of
        # probability 0, whose stretch is empty, is never hit.
        tokens = torch.searchsorted(ends, points, right=True)  # (n, 1)
        # A point that rounding has put on the very end goes to the last stretch that is not empty.
        last = torch.searchsorted(ends, total)  # (n, 1)
        tokens = torch.minimum(tokens, last).squeeze(1)  # (n,)
        tokens = tokens.clamp(max=logits.shape[1] - 1)  # if the logits are NaN, it is beyond all
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # (n,)
    return tokens, chosen


def write_answers(model, prompt_ids, prompt_mask, uniforms, end_ids, temperature, drop_every):
    """The sampling loop. Prompts (B, P), their mask, and a uniform number (N, T) for every token
    -> completions (N, T), the mask (N, T) of their real tokens, and log-probs (N, T)."""
    B, P = prompt_ids.shape
    N, T = uniforms.shape
    device = prompt_ids.device
    completions = torch.zeros(N, T, dtype=torch.long, device=device)
    completion_mask = torch.zeros(N, T, dtype=torch.bool, device=device)
    logprobs = torch.zeros(N, T, dtype=torch.float32, device=device)

    # Read each prompt once. Only the last column's logits are kept: they say what comes next.
    positions = position_ids(prompt_mask)  # (B, P)
    out = model(input_ids=prompt_ids, attention_mask=prompt_mask, position_ids=positions,
                use_cache=True, logits_to_keep=1)
    rows = torch.arange(B, device=device).repeat_interleave(N // B)  # (N,) 0 0 0 1 1 1 ...
    cache = getattr(out, "past_key_values", None)
    if cache is None:
        raise ValueError(f"{type(model).__name__} returns no cache of keys and values, and cannot "
                         f"be sampled from here")
    cache.reorder_cache(rows)  # B rows of keys and values become N
    logits = out.logits[rows, -1]  # (N, V)
    last_position = positions[rows, -1:]  # (N, 1) of the token written last
    # Ones for the columns still to come, for rows that have ended as well: nobody reads theirs.
    mask = torch.nn.functional.pad(prompt_mask[rows], (0, T), value=1)  # (N, P+T)

    live = torch.arange(N, device=device)  # (n,) the rows that are still in the batch
    ended = torch.zeros(N, dtype=torch.bool, device=device)  # (n,) those that are at their end
    for t in range(T):
        tokens, chosen = choose_tokens(logits, temperature, uniforms[live, t])  # (n,), (n,)
        completions[live, t] = tokens
        logprobs[live, t] = chosen.float()
        completion_mask[live, t] = ~ended  # the first end token is in; what follows it is not
        ended = ended | torch.isin(tokens, end_ids)
        if t + 1 == T:
            break
        # To ask a GPU which rows have ended is to wait for it, so it is asked every few tokens.
        if (t + 1) % drop_every == 0:
            going_on = (~ended).nonzero().squeeze(1)  # places among the n
            if len(going_on) == 0:
                break
            if len(going_on) < len(live):
                cache.reorder_cache(going_on)
                live = live[going_on]
                ended = ended[going_on]
                tokens = tokens[going_on]
                last_position = last_position[going_on]
                mask = mask[going_on]
        last_position = last_position + 1
        out = model(input_ids=tokens.unsqueeze(1), attention_mask=mask[:, : P + t + 1],
                    position_ids=last_position, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]  # (n, V)
    return completions, completion_mask, logprobs


def pad_left(encoded, pad):
    """B lists of token ids -> ids and mask (B, P), so that all prompts end in the same column."""
    P = max(len(ids) for ids in encoded)
    prompt_ids = torch.full((len(encoded), P), pad)
    prompt_mask = torch.zeros(len(encoded), P, dtype=torch.long)
    for row, ids in enumerate(encoded):
        prompt_ids[row, P - len(ids) :] = torch.tensor(ids)
        prompt_mask[row, P - len(ids) :] = 1
    return prompt_ids, prompt_mask


@torch.no_grad()
def sample_groups(model, tokenizer, prompts, num_generations, *, max_completion_length,
                  temperature=1.0, drop_every=4):
    """Sample `num_generations` answers to each of B prompts. Returns a `Rollout` of N = B * G rows.

    `prompts` are strings, or chats. Tokens are drawn from exactly softmax(logits / temperature), 0
    meaning greedy, up to the first of the model's end tokens, or `max_completion_length` tokens.
    Their ids are kept as they were drawn: to decode a text and encode it again, as much published
    code does, need not give the same tokens back. Reproducible under torch.manual_seed. Every
    `drop_every` tokens the rows that have ended leave the batch, which changes no sample, but for
    rounding.
    ValueError for settings out of range, and for a prompt too long for the model's context.
    """
    G = num_generations
    cap = max_completion_length
    if not (G >= 1 and cap >= 1 and temperature >= 0):
        raise ValueError(f"num_generations {G} and max_completion_length {cap} must be at least 1, "
                         f"temperature {temperature} at least 0")
    # Any id will do as padding, even an end token, because the masks do not ask for it: real is
    # all that was written, up to the first end token. A mask made by `!= pad_token_id` loses the
    # end token wherever that is the padding too, and then the model is never taught to stop.
    device = model.device
    end_ids = torch.tensor(end_token_ids(model, tokenizer), device=device)
    pad = tokenizer.pad_token_id
    rows_of_embedding = len(model.get_input_embeddings().weight)
    if pad is None or pad >= rows_of_embedding:  # a token that somebody added has no row there
        pad = int(end_ids[0])
    prompt_ids, prompt_mask = pad_left(encode_prompts(tokenizer, prompts), pad)
    B, P = prompt_ids.shape
    if P + cap > context_length(model):
        raise ValueError(f"a prompt of {P} tokens and max_completion_length {cap} do not fit into "
                         f"the model's context of {context_length(model)}")
    # All random numbers are drawn beforehand, one for each place of each row, so that a row's
    # sample does not depend on which other rows are still being written. In 64 bits, since a sum
    # of 150,000 float32 terms loses the small ones; Apple's GPUs have only 32.
    uniforms = torch.rand(B * G, cap, dtype=torch.float64, device="cpu")
    if device.type == "mps":
        uniforms = uniforms.float()

    # In train mode dropout would change the answers, and gradient checkpointing switch the cache
    # off.
    was_training = model.training
    model.eval()
    try:
        completions, completion_mask, logprobs = write_answers(
            model, prompt_ids.to(device), prompt_mask.to(device), uniforms.to(device), end_ids,
            temperature, drop_every)
    finally:
        model.train(was_training)

    # Cut off the columns that nobody reached, and blank what was drawn after an end token.
    T = int(completion_mask.sum(dim=1).max())
    completion_mask = completion_mask[:, :T]
    completions = completions[:, :T].masked_fill(~completion_mask, pad)
    has_ended = torch.isin(completions, end_ids) & completion_mask  # (N, T)
    texts = []
    for ids, real in zip(completions.cpu(), completion_mask.cpu()):
        texts.append(tokenizer.decode(ids[real].tolist(), skip_special_tokens=True))
    prompt_ids = prompt_ids.to(device).repeat_interleave(G, dim=0)  # (N, P)
    prompt_mask = prompt_mask.to(device).repeat_interleave(G, dim=0)  # (N, P)
    return Rollout(
        input_ids=torch.cat([prompt_ids, completions], dim=1),
        attention_mask=torch.cat([prompt_mask, completion_mask.long()], dim=1),
        completion_mask=completion_mask,
        logprobs=logprobs[:, :T].masked_fill(~completion_mask, 0.0),
        texts=texts,
        truncated=~has_ended.any(dim=1),
    )


def join_rollouts(parts):
    """Several rollouts as one, with the rows of all of them, padded to the widest."""
    P = max(part.input_ids.shape[1] - part.completion_mask.shape[1] for part in parts)
    T = max(part.completion_mask.shape[1] for part in parts)
    fill = torch.nn.functional.pad
    ids = []
    attention_masks = []
    completion_masks = []
    logprobs = []
    texts = []
    for part in parts:
        part_T = part.completion_mask.shape[1]
        part_P = part.input_ids.shape[1] - part_T
        both = (P - part_P, T - part_T)  # columns to add on the left and on the right
        ids.append(fill(part.input_ids, both))
        attention_masks.append(fill(part.attention_mask, both))
        completion_masks.append(fill(part.completion_mask, (0, T - part_T)))
        logprobs.append(fill(part.logprobs, (0, T - part_T)))
        texts += part.texts
    return Rollout(
        input_ids=torch.cat(ids),
        attention_mask=torch.cat(attention_masks),
        completion_mask=torch.cat(completion_masks),
        logprobs=torch.cat(logprobs),
        texts=texts,
        truncated=torch.cat([part.truncated for part in parts]),
    )


# ------------------------------------------------------------------------------------------------
# 8. Log-probabilities: what a model thinks of each token now
#
# To make a token likelier we need its log-probability as a number with a gradient. For that the
# model reads prompt and answer once more, all T tokens in parallel. This is called scoring. The
# whole idea is six lines:
#
#     positions = position_ids(attention_mask)               # (N, P+T)
#     out = model(input_ids, attention_mask=attention_mask, position_ids=positions)
#     logits = out.logits[:, P - 1 : -1]                     # (N, T, V)
#     logprobs = (logits.float() / temperature).log_softmax(dim=-1)
#     targets = input_ids[:, P:].unsqueeze(2)                # (N, T, 1)
#     logprobs = logprobs.gather(2, targets).squeeze(2)      # (N, T)
#
# P - 1 and -1 are off by one on purpose: column j predicts the token in column j + 1. So the
# prompt's last column predicts the answer's first token, and the answer's last has nothing left to
# predict. float() comes before the softmax, since in bfloat16 a log-probability is off by 0.025 on
# average. And the temperature is the one that was sampled at: at another one, the ratio would
# compare two different distributions.
#
# If that is clear, you can go on at section 9. `token_logprobs`, the end of this section, returns
# the same numbers with the same gradients for less memory and time. A model is a trunk, which makes
# a vector for each token (its hidden state), and a head, which makes V logits of each. For less
# memory, the head sees a few hundred tokens at a time. For less time, each distinct prompt is read
# once, however many answers continue it, as in the sampler.
# ------------------------------------------------------------------------------------------------


def trunk_and_head(model):
    """The part of a model that makes hidden states, and the part that makes logits of those.

    Some models scale or cap their logits after the head (Gemma 2, Granite, Cohere), and head(trunk)
    would be wrong by nats. That is tried out once. For those, the "trunk" returned is the model
    itself and the "head" does nothing, so that all logits are in memory at once.
    """
    trunk = model.get_decoder()
    head = model.get_output_embeddings()
    if not hasattr(model, "head_gives_logits"):
        ids = torch.arange(8, device=model.device).unsqueeze(0)  # (1, 8) any text
        with torch.no_grad():
            right = model(ids, use_cache=False).logits  # (1, 8, V)
            apart = (head(trunk(ids, use_cache=False)[0]) - right).abs().max()
        model.head_gives_logits = bool(apart <= 1e-3 * right.abs().max())
        if not model.head_gives_logits:
            tqdm.write("this model changes its logits after the head, so scoring holds all of them "
                       "in memory: if that is short, take a smaller tokens_per_micro_batch")
    if not model.head_gives_logits:
        return model, torch.nn.Identity()
    return trunk, head


def can_share_prompts(model):
    """Whether answers can be scored on top of a KV cache that was filled with gradients.

    Not under gradient checkpointing, where transformers switches the cache off, and not for models
    with recurrent layers, which overwrite their state in place.
    """
    for module in model.modules():
        if module.training and getattr(module, "gradient_checkpointing", False):
            return False
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = getattr(config, "layers_block_type", [])  # an older name of the same
    return set(layer_types) <= {"full_attention", "sliding_attention", "chunked_attention"}


def states_of_rows(trunk, input_ids, attention_mask, P):
    """The hidden states that predict the answers' tokens: ids and mask (n, P+t) -> (n, t, H)."""
    states = trunk(input_ids, attention_mask=attention_mask,
                   position_ids=position_ids(attention_mask), use_cache=False)[0]  # (n, P+t, H)
    return states[:, P - 1 : -1]


def states_with_shared_prompts(trunk, input_ids, attention_mask, P):
    """The same as `states_of_rows`, with each distinct prompt read only once."""
    # Which prompts are there, and which of them has each row? Two prompts are the same if ids and
    # mask are. (On the CPU, because Apple's GPUs cannot do it.)
    both = torch.cat([attention_mask[:, :P], input_ids[:, :P]], dim=1).cpu()  # (n, 2P)
    distinct, which = torch.unique(both, dim=0, return_inverse=True)
    which = which.to(input_ids.device)  # (n,)
    prompt_mask, prompt_ids = distinct.to(input_ids.device).chunk(2, dim=1)
    out = trunk(prompt_ids, attention_mask=prompt_mask, position_ids=position_ids(prompt_mask),
                use_cache=True)
    first = out[0][which, -1:]  # (n, 1, H) the prompt's last state predicts the first token
    if input_ids.shape[1] == P + 1:
        return first
    # To copy keys and values to the rows is an operation like any other: the gradients of all
    # answers to a prompt flow back through it, and add up.
    cache = out.past_key_values
    cache.reorder_cache(which)
    rest = trunk(input_ids[:, P:-1], attention_mask=attention_mask[:, :-1],
                 position_ids=position_ids(attention_mask)[:, P:-1], past_key_values=cache,
                 use_cache=True)[0]  # (n, t-1, H)
    return torch.cat([first, rest], dim=1)


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0, *,
                   return_entropy=False, tokens_per_chunk=512):
    """log pi of each completion token: ids and mask (N, P+T) -> (N, T), differentiable.

    T is `completion_length`, `temperature` the one that was sampled at. Rows may come in any order
    and share prompts or not. float32 whatever the model computes in (float64 for a float64 model);
    0 in the places that `attention_mask` leaves out. With `return_entropy`, returns (log-probs,
    entropies): the entropy (N, T), in nats, of the whole distribution at each place. ValueError
    for a temperature that is not above 0, and for a completion_length that leaves no prompt.
    """
    T = completion_length
    P = input_ids.shape[1] - T
    if not (temperature > 0 and T >= 1 and P >= 1):
        raise ValueError(f"temperature {temperature}, completion_length {T} and the width that it "
                         f"leaves for the prompt, {P}, must be above 0")
    real = attention_mask[:, P:].bool()  # (N, T), M of them are
    targets = input_ids[:, P:][real]  # (M,)

    # Leave out the columns that no row uses, left and right.
    widest = max(1, int(attention_mask[:, :P].sum(dim=1).max()))  # of the prompts
    longest = max(1, int(attention_mask[:, P:].sum(dim=1).max()))  # of the answers
    used = slice(P - widest, P + longest)
    trunk, head = trunk_and_head(model)
    read = states_with_shared_prompts if can_share_prompts(model) else states_of_rows
    states = read(trunk, input_ids[:, used], attention_mask[:, used], widest)  # (N, longest, H)
    states = states[real[:, :longest]]  # (M, H) and padding is left out as well

    def score_chunk(states, targets):  # (m, H), (m,) -> (m,), and (m,) or None
        logits = head(states)  # (m, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            logits = logits / temperature
        log_normaliser = logits.logsumexp(dim=-1)  # (m,)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - log_normaliser
        if not return_entropy:
            return logprobs, None
        # -sum p log p. (Where p is 0 the logit may be -inf, and 0 * -inf would be NaN.)
        p = logits.softmax(dim=-1)  # (m, V)
        entropies = log_normaliser - (p * logits.masked_fill(p == 0, 0.0)).sum(dim=-1)
        return logprobs, entropies

    # The logits of 16 answers of 512 tokens over Qwen's vocabulary are 4.6 GiB in float32, and the
    # backward pass would keep three such tensors. So the head sees a chunk of tokens at a time, and
    # `checkpoint` forgets each chunk's logits, and makes them again in the backward pass.
    logprobs = []
    entropies = []
    for start in range(0, max(1, len(targets)), tokens_per_chunk):
        chunk = slice(start, start + tokens_per_chunk)
        chunk_logprobs, chunk_entropies = torch.utils.checkpoint.checkpoint(
            score_chunk, states[chunk], targets[chunk], use_reentrant=False)
        logprobs.append(chunk_logprobs)
        entropies.append(chunk_entropies)

    zeros = torch.zeros(real.shape, dtype=logprobs[0].dtype, device=real.device)  # (N, T)
    logprobs = zeros.masked_scatter(real, torch.cat(logprobs))
    if return_entropy:
        return logprobs, zeros.masked_scatter(real, torch.cat(entropies))
    return logprobs


# How do we know that sampler and scorer agree? Not by a ratio of 1 at the first update: that holds
# whatever the sampler did, since both of its sides, pi_theta and pi_old, come from the scorer. But
# the sampler has kept the log-probabilities that it drew with. Their mean distance from the
# scorer's is logged as sampler_gap: about 1e-6 in float32, a few hundredths at most in bfloat16,
# which rounds differently in the two. More means that one of them uses another temperature, another
# mask, or other positions.


# ------------------------------------------------------------------------------------------------
# 9. Settings
#
# The words, from large to small:
#
#   step          one round of the five moves. B questions are drawn, and N = B * G answers sampled
#   pass          once over all answers of a step, to learn from them; there are num_iterations
#   mini-batch    each pass is divided into num_mini_batches parts, of whole groups. Each is one
#                 update: one gradient, one movement of the weights
#   micro-batch   the rows of a mini-batch that are computed at once, as memory allows. Their
#                 gradients are added up, so how they are cut makes no difference to the result
# ------------------------------------------------------------------------------------------------


def knob(default, text):
    """A field of a settings record; `text` is what a program's --help prints."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every setting. The names are those of TRL's GRPOConfig, where they are there: TRL is Hugging
    Face's library for such training, and where many readers will go next.

    ValueError for values that are impossible.
    """

    # What is sampled in a step: prompts_per_step * num_generations answers.
    num_generations: int = knob(8, "G, answers to each question; 4 is few, 16 is comfortable")
    prompts_per_step: int = knob(32, "B, questions in a step")
    max_completion_length: int = knob(512, "the cap: tokens at which an answer is cut off")
    temperature: float = knob(1.0, "of sampling and of scoring; a lower one explores less")
    # The loss.
    beta: float = knob(0.04, "weight of the KL penalty; 0: none, and no reference in memory")
    epsilon: float = knob(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: Optional[float] = knob(None, "how far it may rise above 1; default: epsilon")
    loss_type: str = knob("grpo", "average over the tokens: grpo, dapo or dr_grpo")
    scale_rewards: str = knob("group", "scale of the advantages: group, none, batch or rloo")
    # The update.
    steps: int = knob(300, "rounds of sampling and learning")
    num_iterations: int = knob(1, "passes over the answers of a step")
    num_mini_batches: int = knob(1, "updates in each pass")
    learning_rate: float = knob(1e-6, "of AdamW; 1e-6 to 1e-5 for models of a billion weights")
    warmup_steps: int = knob(10, "steps over which learning_rate is reached")
    lr_scheduler_type: str = knob(
        "linear", "how the rate falls after the warmup: linear, cosine or constant_with_warmup")
    max_grad_norm: float = knob(1.0, "length to which a longer gradient is cut")
    # The relatives, section 12.
    kl_penalty_type: str = knob("low_var_kl", "low_var_kl (that is k3), kl, abs or mse")
    entropy_bonus: float = knob(0.0, "weight of a reward for an undecided policy")
    mask_truncated_completions: bool = knob(False, "leave cut answers out of the loss")
    dynamic_sampling: int = knob(0, "times that groups of equal rewards are sampled anew")
    # The run.
    seed: int = knob(0, "decides the order of the questions and all that is drawn at random")
    save_steps: int = knob(25, "steps between checkpoints; 0: never save one")
    bf16: Optional[bool] = knob(
        None, "compute in bfloat16, over float32 master weights; default: where the GPU can")
    gradient_checkpointing: bool = knob(False, "less memory in the update, for a third more time")
    tokens_per_micro_batch: int = knob(8192, "halved by itself where memory is too small")

    def __post_init__(self):
        if self.scale_rewards is True:  # TRL takes these too
            self.scale_rewards = "group"
        if self.scale_rewards is False:
            self.scale_rewards = "none"
        least = {  # and where it is a whole number, the setting must be one
            "num_generations": 2, "prompts_per_step": 1, "max_completion_length": 1, "steps": 1,
            "num_iterations": 1, "num_mini_batches": 1, "tokens_per_micro_batch": 1,
            "warmup_steps": 0, "dynamic_sampling": 0, "seed": 0, "save_steps": 0,
            "temperature": 1e-6, "max_grad_norm": 1e-6, "learning_rate": 0.0, "beta": 0.0,
            "epsilon": 0.0, "entropy_bonus": 0.0,
        }
        if self.epsilon_high is not None:
            least["epsilon_high"] = 0.0
        for name, low in least.items():
            value = getattr(self, name)
            kind = int if isinstance(low, int) else Real
            # Written so that NaN is refused as well: it is not in any interval.
            if not isinstance(value, kind) or not low <= value < math.inf:
                raise ValueError(f"{name} is {value!r}, and must be a finite number from {low} on")
        choices = {
            "loss_type": ("grpo", "dapo", "dr_grpo"),
            "scale_rewards": ("group", "none", "batch", "rloo"),
            "lr_scheduler_type": ("linear", "cosine", "constant_with_warmup"),
            "kl_penalty_type": ("low_var_kl", "kl", "abs", "mse"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, and must be one of {allowed}")
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(f"num_mini_batches is {self.num_mini_batches}, and must be at most "
                             f"prompts_per_step, {self.prompts_per_step}: groups stay together")
        if self.beta == 0 and self.kl_penalty_type != "low_var_kl":
            raise ValueError(f"beta is 0, so there is no KL for kl_penalty_type "
                             f"{self.kl_penalty_type!r} to estimate")


# ------------------------------------------------------------------------------------------------
# 10. One step
#
# `train_step`, further down, is the five moves, a line or two each. Before it stand its parts.
# ------------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """What is kept from step to step."""

    model: torch.nn.Module  # pi_theta: it samples, and it is scored
    reference: Optional[torch.nn.Module]  # pi_ref; None at beta = 0
    parameters: list  # the model's trained parameters, in the precision that it computes in
    weights: list  # float32 masters of those, which the optimizer moves: see make_learner
    optimizer: torch.optim.Optimizer
    hooks: list  # what has to be removed from the model when the run is over
    at_once: dict  # how many "prompts" are sampled, and "tokens" scored, at once
    questions_seen: int = 0
    failed: int = 0  # steps in a row without an update, because numbers were not finite
    # The last step, for whoever watches the run: its B examples (rows of the data set) and answers.
    examples: Optional[list] = None
    rollout: Optional[Rollout] = None
    rewards: Optional[torch.Tensor] = None  # (B, G)
    advantages: Optional[torch.Tensor] = None  # (B, G)


def computes_in_bf16(model):
    """Whether the model is on a GPU that computes in bfloat16."""
    if model.device.type != "cuda":
        return False
    return torch.cuda.is_bf16_supported(including_emulation=False)


def add_gradients_to_master(parameter, weight):
    """Whenever a backward pass has made the gradient of a bfloat16 parameter, add it to that of its
    float32 master, and free it. Returns a handle whose `remove` ends that."""

    def add(_):
        weight.grad += parameter.grad  # weight.grad begins as zeros: clear_gradients
        parameter.grad = None

    return parameter.register_post_accumulate_grad_hook(add)


def make_learner(model, config):
    """Set up precisions, reference and optimizer. Casts the model's parameters in place.

    On a GPU with bfloat16 the model computes in it, which is about twice as fast. But an update at
    learning rate 1e-6 is far smaller than the gap between neighbouring bfloat16 numbers: some 98 %
    of the weights would not move at all. So the optimizer moves float32 copies, the master weights,
    and the model gets them, rounded, after each update. Everywhere else (CPU, Apple's GPUs, older
    cards) the model computes in float32, and its parameters are the master weights themselves.

    It is done for speed, not for memory: in bfloat16 a weight takes 2 bytes and its master 4, its
    gradient 4, Adam's two averages 8, the reference 2, together 20. In float32 it is 4 + 4 + 8 + 4,
    the same. ValueError for quantized weights.
    """
    in_bf16 = config.bf16
    if in_bf16 is None:
        in_bf16 = computes_in_bf16(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}, so this model is quantized, and cannot "
                             f"be trained: load it without quantization")
    parameters = []
    weights = []
    for parameter in model.parameters():
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        # Only parameters are cast. `model.to(torch.bfloat16)` would round a buffer as well, the
        # frequencies of the rotary positions, and get the angles of all late positions wrong.
        parameter.data = wide.to(torch.bfloat16) if in_bf16 else wide
        if parameter.requires_grad:
            parameters.append(parameter)
            weights.append(wide if in_bf16 else parameter)
    reference = None
    if config.beta > 0:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
    if config.gradient_checkpointing:
        if hasattr(model, "activation_checkpointing_enable"):  # its name in newer transformers
            model.activation_checkpointing_enable()
        else:
            model.gradient_checkpointing_enable()
    # AdamW shrinks all weights by 0.01 * learning_rate in each step unless told otherwise. On a GPU
    # "fused" is the same arithmetic, without a temporary copy of everything.
    fused = None
    if model.device.type == "cuda":
        fused = True
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0, fused=fused)
    hooks = []  # at the end: had the memory run out above, they would have stayed on the model
    if in_bf16:
        for parameter, weight in zip(parameters, weights):
            hooks.append(add_gradients_to_master(parameter, weight))
    at_once = {"prompts": config.prompts_per_step, "tokens": config.tokens_per_micro_batch}
    return Learner(model, reference, parameters, weights, optimizer, hooks, at_once)


def sample(learner, tokenizer, examples, config):
    """Sample G answers to each of the examples' prompts. Returns a `Rollout`.

    All prompts are sampled at once if the memory is large enough: on a GPU each token waits for the
    launch of hundreds of small programs, so many rows take hardly longer than few. Otherwise
    within_memory (section 13) calls `work` again, with half as many at once.
    """
    prompts = [example["prompt"] for example in examples]

    def work(count):
        parts = []
        for start in range(0, len(prompts), count):
            parts.append(sample_groups(
                learner.model, tokenizer, prompts[start : start + count], config.num_generations,
                max_completion_length=config.max_completion_length,
                temperature=config.temperature))
        return join_rollouts(parts)

    return within_memory(work, learner.at_once, "prompts")


def grade(reward_fn, examples, rollout, num_generations):
    """Rewards (B, G) in float64 of a rollout for B examples. Calls the function as TRL does:

        reward_fn(prompts=, completions=, completion_ids=, **other columns) -> list of N floats

    with N values in each. Completions are strings where prompts are, else chats of one message.
    ValueError for anything but one finite number for each completion, saying which and where.
    """
    G = num_generations
    name = f"reward function {getattr(reward_fn, '__name__', reward_fn)}"
    columns = {}
    for key in examples[0]:
        # Each example G times in a row, in the order of the rollout's rows. Copies: a reward that
        # writes into what it is given must not change the data set.
        columns[key] = [copy.deepcopy(example[key]) for example in examples for _ in range(G)]
    prompts = columns.pop("prompt")
    completions = list(rollout.texts)
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    T = rollout.completion_mask.shape[1]
    completion_ids = []
    for ids, real in zip(rollout.input_ids[:, -T:].cpu(), rollout.completion_mask.cpu()):
        completion_ids.append(ids[real].tolist())
    try:
        rewards = reward_fn(prompts=prompts, completions=completions,
                            completion_ids=completion_ids, **columns)
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(completions):
        raise ValueError(f"{name} returned {rewards!r:.99}, wanted a list of {len(completions)} "
                         f"numbers")
    for place, reward in enumerate(rewards):
        # Beyond 1e15, subtracting the mean would lose all digits. NaN fails this test as well.
        if not isinstance(reward, Real) or not abs(reward) < 1e15:
            raise ValueError(f"{name} returned {reward!r} at place {place}, wanted a finite number")
    return torch.tensor(rewards, dtype=torch.float64).view(len(examples), G)


def micro_batches(rollout, rows, budget):
    """Cut `rows` of a rollout into lists of rows of like length, of at most `budget` tokens each.

    Short answers beside a long one would be mostly padding, so none is less than half as long as
    the longest beside it. The longest come first: if memory is too small, it is too small at once
    and not after an hour. A single row may be above the budget.
    """
    T = rollout.completion_mask.shape[1]
    prompt_lengths = rollout.attention_mask[:, :-T].sum(dim=1).tolist()  # N
    answer_lengths = rollout.attention_mask[:, -T:].sum(dim=1).tolist()  # N
    rows = sorted(rows, key=lambda row: answer_lengths[row], reverse=True)
    while rows:
        longest = answer_lengths[rows[0]]
        widest = 0  # of the prompts
        batch = []
        for row in rows:
            widest = max(widest, prompt_lengths[row])
            too_short = answer_lengths[row] < longest / 2
            too_many = (len(batch) + 1) * (widest + longest) > budget
            if batch and (too_short or too_many):
                break
            batch.append(row)
        yield batch
        rows = rows[len(batch) :]


@torch.no_grad()
def score(learner, model, rollout, rows, config):
    """Log-probs (N, T) of a rollout under `model`, without gradients, for pi_ref and pi_old.

    Only `rows` are computed; the others are 0.
    """
    T = rollout.completion_mask.shape[1]

    def work(budget):
        turn_off_dropout(model)  # as in the update: with dropout it would be another policy
        logprobs = torch.zeros_like(rollout.logprobs)  # (N, T)
        for some in micro_batches(rollout, rows, budget):
            logprobs[some] = token_logprobs(
                model, rollout.input_ids[some], rollout.attention_mask[some], T,
                config.temperature).float()
        return logprobs

    return within_memory(work, learner.at_once, "tokens", least=64)


def clear_gradients(learner):
    """Set all gradients to zero. Not to None: so there is always something to add to, and an update
    in which no answer teaches is one like any other. (Adam moves the weights in it, too, by the
    momentum of earlier updates.)"""
    for parameter, weight in zip(learner.parameters, learner.weights):
        parameter.grad = None  # what an attempt that ran out of memory may have left
        weight.grad = torch.zeros_like(weight)


def turn_off_dropout(model):
    """With dropout, the ratio would compare two different networks. But gradient checkpointing
    works in train mode only, so the modules that do it stay in that."""
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


@dataclass
class Batch:
    """What the loss needs of the N answers of a step. Only log pi_theta is missing, since that
    changes with every update."""

    rollout: Rollout
    mask: torch.Tensor  # (N, T) bool: the tokens that are in the loss
    advantages: torch.Tensor  # (N,)
    ref_logprobs: Optional[torch.Tensor]  # (N, T); None at beta = 0
    old_logprobs: Optional[torch.Tensor] = None  # (N, T); None if a step has one update only


def micro_batch_loss(learner, batch, rows, config, loss_fn):
    """The loss over some rows of a batch, with its gradient, and a record of metrics."""
    rollout = batch.rollout
    mask = batch.mask[rows]  # (n, T)
    wants_entropy = config.entropy_bonus > 0
    scored = token_logprobs(
        learner.model, rollout.input_ids[rows], rollout.attention_mask[rows], mask.shape[1],
        config.temperature, return_entropy=wants_entropy)
    logprobs, entropies = scored if wants_entropy else (scored, None)  # (n, T)

    # With one update per step, pi_old is pi_theta itself, held constant. The ratio is then 1, but
    # its gradient is not 0: d(ratio) = d(log pi_theta).
    old_logprobs = logprobs.detach()
    if batch.old_logprobs is not None:
        old_logprobs = batch.old_logprobs[rows]
    ref_logprobs = None
    if batch.ref_logprobs is not None:
        ref_logprobs = batch.ref_logprobs[rows]

    loss, metrics = loss_fn(
        logprobs, old_logprobs, ref_logprobs, batch.advantages[rows], mask,
        epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta,
        loss_type=config.loss_type, max_completion_length=config.max_completion_length,
        kl_fn=functools.partial(kl_estimate, kl_penalty_type=config.kl_penalty_type))  # k3, say
    if wants_entropy:
        bonus = average(entropies, mask, config.loss_type, config.max_completion_length)
        loss = loss - config.entropy_bonus * bonus
    if not loss.isfinite():
        raise FloatingPointError(f"the loss is {loss.item()}, {culprit(learner, rows, logprobs)}")

    gap = (rollout.logprobs[rows] - old_logprobs).abs()  # (n, T)
    metrics["sampler_gap"] = masked_mean(gap, mask).item()
    metrics["tokens"] = int(mask.sum())
    return loss, metrics


def compute_gradient(learner, batch, mini_batch, rows, config, loss_fn):
    """Leave the gradient of the loss over a mini-batch in the .grad of the master weights.

    `mini_batch` are its rows, `rows` those of them that have a gradient at all. Returns a list with
    the metrics of each micro-batch. FloatingPointError if the loss is not finite.
    """
    tokens_in_all = max(1, int(batch.mask[mini_batch].sum()))

    def work(budget):
        clear_gradients(learner)
        turn_off_dropout(learner.model)
        results = []
        for some in micro_batches(batch.rollout, rows, budget):
            loss, metrics = micro_batch_loss(learner, batch, some, config, loss_fn)
            # This loss is an average over a micro-batch. It counts by its share of the mini-batch:
            # of the tokens if it is an average over tokens, else of the rows. If all micro-batches
            # counted the same, the way they are cut would decide what a token weighs.
            share = len(some) / len(mini_batch)
            if config.loss_type == "dapo":
                share = metrics["tokens"] / tokens_in_all
            (loss * share).backward()
            metrics["loss"] = loss.item() * share
            results.append(metrics)
        return results

    return within_memory(work, learner.at_once, "tokens", least=64)


def move_weights(learner, max_grad_norm):
    """One step of the optimizer. Returns the length of the gradient.

    All gradients together are one long vector. If it is longer than max_grad_norm, it is cut to
    that: a strange batch then does no more harm than any other. FloatingPointError if it is not
    finite; nothing moves then.
    """
    norm = torch.nn.utils.clip_grad_norm_(learner.weights, max_grad_norm).item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"gradient of length {norm}")
    learner.optimizer.step()
    for parameter, weight in zip(learner.parameters, learner.weights):
        if parameter is not weight:
            parameter.data.copy_(weight)  # rounded to bfloat16
    return norm


def mini_batches(config):
    """The rows of each update of a step. Every pass has all groups, shuffled anew."""
    G = config.num_generations
    for _ in range(config.num_iterations):
        order = torch.randperm(config.prompts_per_step, device="cpu")
        for groups in order.tensor_split(config.num_mini_batches):
            yield [group * G + i for group in groups.tolist() for i in range(G)]


def update(learner, rollout, advantages, ref_logprobs, config, loss_fn=grpo_loss):
    """Learn from a rollout: num_iterations passes of num_mini_batches updates each.

    Advantages (N,), log-probs of the reference (N, T) or None. Returns metrics: means over the
    tokens that were learned from (0 if there were none), or over the updates. An update whose
    numbers are not finite is skipped; the third step in a row without any other raises
    FloatingPointError.
    """
    batch = Batch(rollout, rollout.completion_mask, advantages, ref_logprobs)
    if config.mask_truncated_completions:
        batch.mask = batch.mask & ~rollout.truncated.unsqueeze(1)
    # Without KL, an answer whose advantage is 0 has no gradient. It need not be computed, but it
    # still counts wherever rows or tokens are counted, so that nothing else changes.
    teaches = (advantages != 0).tolist()  # N
    if config.beta > 0 or config.entropy_bonus > 0:
        teaches = [True] * len(teaches)
    if config.num_iterations * config.num_mini_batches > 1:
        # pi_old has to be written down before the first update moves pi_theta. It is the scorer's
        # word and not the sampler's: in bfloat16 the two round differently, and that would look
        # like a policy that has moved.
        rows = [row for row, yes in enumerate(teaches) if yes]
        batch.old_logprobs = score(learner, learner.model, rollout, rows, config)

    results = []  # of the micro-batches
    norms = []  # of the updates
    skipped = 0
    for mini_batch in mini_batches(config):
        rows = [row for row in mini_batch if teaches[row]]
        try:
            found = compute_gradient(learner, batch, mini_batch, rows, config, loss_fn)
            norms.append(move_weights(learner, config.max_grad_norm))
        except FloatingPointError as error:
            skipped += 1
            tqdm.write(f"update skipped: {error}")
            reason = str(error)  # the error itself would hold on to tensors
            continue
        results += found
    # One bad question spoils all updates of its step, so it is steps that are counted.
    learner.failed += 1
    if norms:
        learner.failed = 0
    if learner.failed == 3:
        raise FloatingPointError(f"three steps in a row without an update; the last: {reason}")

    tokens = sum(result["tokens"] for result in results)
    metrics = {}
    for name in ("kl", "clip_fraction", "sampler_gap"):
        metrics[name] = sum(result[name] * result["tokens"] for result in results) / max(tokens, 1)
    metrics["loss"] = sum(result["loss"] for result in results) / max(len(norms), 1)
    metrics["grad_norm"] = sum(norms) / max(len(norms), 1)
    metrics["ratio_max"] = max((result["ratio_max"] for result in results), default=0.0)
    metrics["skipped_updates"] = skipped
    return metrics


def clock(model):
    """Seconds, after waiting for the GPU, which still works on what Python told it long ago."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train_step(learner, tokenizer, questions, reward_fn, config, loss_fn=grpo_loss):
    """One round of the five moves. `questions` yields examples without end. Returns its metrics."""
    model = learner.model
    started = clock(model)

    # 1. Sample G answers to each of the next B questions.
    examples = [next(questions) for _ in range(config.prompts_per_step)]
    rollout = sample(learner, tokenizer, examples, config)
    # 2. Grade every answer by the rule.
    rewards = grade(reward_fn, examples, rollout, config.num_generations)  # (B, G)
    for _ in range(config.dynamic_sampling):  # 0 times, unless you ask for it: section 12
        examples, rollout, rewards = replace_equal_groups(
            learner, tokenizer, questions, reward_fn, examples, rollout, rewards, config)
    sampled = clock(model)
    # 3. Compare each answer with its group. Truncated answers count in the group's mean too: to
    #    leave them out first would move the baseline of all the others. (group_scale is section
    #    2's group_advantages, unless a relative of section 12 is asked for.)
    advantages = group_scale(rewards, config.scale_rewards)  # (B, G)
    learner.examples = examples
    learner.rollout = rollout
    learner.rewards = rewards
    learner.advantages = advantages
    # 4. Score: what does the reference think of these tokens?
    ref_logprobs = None
    if learner.reference is not None:
        all_rows = range(len(rollout.texts))
        ref_logprobs = score(learner, learner.reference, rollout, all_rows, config)  # (N, T)
    scored = clock(model)
    # 5. Update. Inside, the model scores the same tokens, with gradients.
    flat = advantages.flatten().to(rollout.logprobs)  # (N,), on the model's device
    metrics = update(learner, rollout, flat, ref_logprobs, config, loss_fn)
    updated = clock(model)

    metrics["sample_seconds"] = sampled - started
    metrics["score_seconds"] = scored - sampled
    metrics["update_seconds"] = updated - scored
    return add_step_metrics(metrics, learner)


def add_step_metrics(metrics, learner):
    """Returns the metrics of the update with those of the answers and their rewards."""
    rollout = learner.rollout
    lengths = rollout.completion_mask.cpu().sum(dim=1).double()  # (N,)
    equal = (learner.advantages == 0).all(dim=1)  # (B,)
    seconds = sum(metrics[f"{part}_seconds"] for part in ("sample", "score", "update"))
    metrics["reward_mean"] = learner.rewards.mean().item()
    metrics["reward_std"] = learner.rewards.std(correction=0).item()
    metrics["zero_variance_fraction"] = equal.double().mean().item()
    # Entropy is the mean of -log pi over what pi draws, and those numbers are at hand already.
    # (NaN, if the model's weights are, would be no JSON.)
    logprobs = rollout.logprobs.nan_to_num()
    metrics["entropy"] = -masked_mean(logprobs, rollout.completion_mask).item()
    metrics["completion_length"] = lengths.mean().item()
    metrics["truncated_fraction"] = rollout.truncated.cpu().double().mean().item()
    metrics["learning_rate"] = learner.optimizer.param_groups[0]["lr"]
    metrics["questions_seen"] = learner.questions_seen
    metrics["tokens_per_second"] = lengths.sum().item() / seconds
    return metrics


# What to watch in these figures:
#
#   figure                  healthy                       sick
#   reward_mean             rises                         flat, or stuck at 0.5 (section 1)
#   zero_variance_fraction  well below 1                  near 1: the answers to a question all earn
#                                                         the same, and teach nothing. Are they too
#                                                         hard, too easy, too much alike (G, the
#                                                         temperature)?
#   completion_length       changes slowly                collapses, or grows up to the cap
#   truncated_fraction      small                         large: few cut answers earn anything
#   entropy                 falls slowly                  near 0 early on: it always says the same,
#                                                         and finds nothing new
#   kl                      grows slowly                  jumps, or grows while the reward falls
#   ratio_max               1 with one update a step      large: the updates are too large
#   clip_fraction           0 with one update a step      above a fifth: likewise
#   grad_norm               around 1 and below            large for many steps
#   sampler_gap             1e-6; in bfloat16 up to 0.05  more: section 8
#   loss                    anything                      it says nothing: section 6
#
# (clip_fraction, kl, sampler_gap and ratio_max are 0 in a step where there was nothing to learn.
# kl is 0 whenever beta is.)
# The README shows how these figures look under common mistakes.


# ------------------------------------------------------------------------------------------------
# 11. The loop
# ------------------------------------------------------------------------------------------------


def question_stream(examples, learner, seed):
    """Examples for ever, shuffled anew each epoch, none twice before all were seen.

    It counts in learner.questions_seen, and begins where that stands: the order depends on nothing
    but the seed, so that a resumed run goes on where it was.
    """
    while True:
        epoch, place = divmod(learner.questions_seen, len(examples))
        # A large prime, so that the epochs of one seed are not those of the next.
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(examples), generator=shuffle, device="cpu").tolist()
        for i in order[place:]:
            learner.questions_seen += 1
            yield examples[i]


def training_steps(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False,
                   loss_fn=grpo_loss):
    """The loop, as a generator: it yields (metrics, learner) after each step, and the caller can do
    what it likes in between, `for metrics, learner in training_steps(...): evaluate(...)`.

    Arguments are those of `train`. With an `output_dir` it writes metrics.jsonl, a line a step, and
    every `save_steps` steps and at the end a checkpoint, before it yields. Whatever ends a run, at
    most `save_steps` steps are lost (if it is 0, all). Ctrl-C finishes the step, saves and ends;
    twice stops at once.
    """
    examples = list(dataset)
    check_examples(examples, model, tokenizer, config)
    if resume and not output_dir:
        raise ValueError("resume=True needs the output_dir of the run that is to go on")
    run = describe_run(model, examples, config, loss_fn)
    learner = make_learner(model, config)
    try:
        done = 0
        if output_dir:
            done = open_folder(output_dir, learner, run, resume)
        questions = question_stream(examples, learner, config.seed)
        # The library's formula for the schedule. It can begin and end with a rate of 0, so we ask
        # for one step more than there are, and use neither its first nor its last.
        schedule = get_scheduler(config.lr_scheduler_type, learner.optimizer, config.warmup_steps,
                                 config.steps + 1)
        rate = schedule.lr_lambdas[0]
        steps = range(done + 1, config.steps + 1)
        bar = tqdm(steps, initial=done, total=config.steps, unit="step")
        with finish_step_on_ctrl_c() as interrupted:
            for step in bar:
                learner.optimizer.param_groups[0]["lr"] = config.learning_rate * rate(step)
                # All random numbers of a step, a reward function's included, come from the seed and
                # the step's number: a run that goes on draws what it would have drawn.
                set_seed((config.seed * 1_000_003 + step) % 2**32)
                metrics = {"step": step}
                metrics |= train_step(learner, tokenizer, questions, reward_fn, config, loss_fn)
                bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
                saves = output_dir and config.save_steps > 0
                if output_dir:
                    write_metrics(output_dir, metrics)
                is_last = bool(interrupted) or step == config.steps
                if saves and (is_last or step % config.save_steps == 0):
                    save_checkpoint(output_dir, step, learner, run)
                yield metrics, learner
                if interrupted:
                    if saves and not is_last:  # Ctrl-C came while the caller was busy
                        save_checkpoint(output_dir, step, learner, run)
                    break
    finally:
        let_go(learner)


def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False,
          loss_fn=grpo_loss):
    """Train `model` in place with GRPO. Returns the steps' metrics, a list, resumed ones included.

    `dataset`: a datasets.Dataset or a list of dicts, with a column `prompt` (strings, or chats) and
    any others, which go to `reward_fn(prompts=, completions=, completion_ids=, **columns)`, which
    returns a list of floats. `config` is a GRPOConfig, `loss_fn` any function with the signature
    of `grpo_loss`: it averages as `loss_type` says, returns the same metrics, and has no gradient
    where the advantage and beta are 0. Without an `output_dir` nothing is saved. With one, `resume`
    goes on from the last checkpoint there, if `model` is the one that the run began with. For the
    trained model itself there is model.save_pretrained(folder).
    """
    history = []
    for metrics, _ in training_steps(model, tokenizer, dataset, reward_fn, config, output_dir,
                                     resume, loss_fn):
        history.append(metrics)
    if output_dir:
        history = read_metrics(output_dir)
    return history


# To train a model with all this:
#
#     from datasets import load_dataset
#     from transformers import AutoModelForCausalLM, AutoTokenizer
#     from grpo import GRPOConfig, rule_reward, train
#
#     name = "Qwen/Qwen2.5-0.5B-Instruct"
#     model = AutoModelForCausalLM.from_pretrained(name).to("cuda")
#     tokenizer = AutoTokenizer.from_pretrained(name)
#     question = r"What is 9 * 7? Put the final number into \boxed{}."
#     dataset = [{"prompt": [{"role": "user", "content": question}], "answer": "63"}]
#     train(model, tokenizer, dataset, boxed_reward, GRPOConfig(prompts_per_step=1))
#     model.save_pretrained("my-model")
#
# with `boxed_reward` as in section 1. gsm8k_demo.py does this with a real data set.


# ================================================================================================
# From here on nothing is needed to understand GRPO. Section 12 is for those who meet another name
# in a paper or a settings file, section 13 for those who leave a run alone overnight.
# ================================================================================================


# ------------------------------------------------------------------------------------------------
# 12. The relatives
#
# GRPO's relatives share everything above but a line or two. Some are a setting:
#
#   Dr. GRPO    scale_rewards="none", loss_type="dr_grpo": no std, and a constant divisor. A std is
#               small where a question is almost solved, or almost hopeless, so that dividing by it
#               makes those questions count more than they otherwise would.
#   RLOO        scale_rewards="rloo", loss_type="dr_grpo" (it sums over tokens, and only dr_grpo
#               does), beta=0, one update per batch.
#   REINFORCE   scale_rewards="none", loss_type="dr_grpo", beta=0, one update per batch. Then r = 1,
#               and the gradient of r * A is A times that of log pi. That is REINFORCE, with the
#               group's mean as its baseline.
#   DAPO        epsilon_high=0.28 (a rare token that was good may grow faster, so that exploration
#               does not die out), loss_type="dapo", dynamic_sampling > 0, beta=0, and
#               `overlong_penalty` added to the reward.
#
# Others are another formula, so they are functions, to be given to `train` as `loss_fn`:
#
#   GSPO        gspo_loss: one ratio for a whole answer, a mean; answer_ratio_loss takes the product
#   TRL         corrected_kl_loss: the KL is multiplied by the ratio
#
# PPO itself stays out. Its advantage is R_i minus what a trained critic expects, if the only reward
# comes at the end and nothing is discounted. With the group's mean in the critic's place that is
# GRPO's advantage, but for the std.
# ------------------------------------------------------------------------------------------------


def group_scale(rewards, scale_rewards):
    """Advantages (B, G) from rewards (B, G) under each of the settings of `scale_rewards`.

    "group"  section 2's group_advantages
    "none"   R_i - mean (Dr. GRPO, arXiv:2503.20783)
    "batch"  the same, over the std of all B * G rewards: every question keeps its weight
    "rloo"   R_i minus the mean of the *other* G - 1 rewards (arXiv:2402.14740). The mean of all
             contains R_i itself, so "none" is the same times (G - 1) / G

    Groups of equal rewards are exact zeros in each. ValueError for any other setting.
    """
    if scale_rewards == "group":
        return group_advantages(rewards)
    centered = group_advantages(rewards, scale_rewards=False)  # (B, G)
    if scale_rewards == "none":
        return centered
    if scale_rewards == "batch":
        std = rewards.std(correction=0)
        return centered / std.masked_fill(std == 0, 1.0)
    if scale_rewards == "rloo":
        G = rewards.shape[-1]
        return centered * G / (G - 1)
    raise ValueError(f"scale_rewards is {scale_rewards!r}, and must be group, none, batch or rloo")


def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty (arXiv:2503.14476, equation 13): lengths in tokens (N,) -> (N,).

    For a reward function to add; the lengths are those of its `completion_ids`. It is 0 up to
    `buffer` tokens before the cap, and from there falls in a line to -1 at the cap. (A cliff at the
    cap would punish one token too many as hard as nonsense.)
    """
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def kl_estimate(logprobs, ref_logprobs, kl_penalty_type):
    """Estimates of KL(pi_theta || pi_ref) per token: (N, T), (N, T) -> (N, T).

    The names are those of RLinf, a library for such training. With x = log(pi_theta / pi_ref):

    "low_var_kl"  k3, the default: no bias and little variance. The mean of its gradient, though,
                  is that of KL(pi_ref || pi_theta), the other way round
    "kl"          k1 = x. No bias, but useless as a loss, as section 4 says
    "abs"         |x|
    "mse"         k2 = x^2 / 2. Its value is biased, its gradient is the right one

    ValueError for any other name.
    """
    x = (logprobs - ref_logprobs).clamp(-1e18, 1e18)  # (N, T)
    if kl_penalty_type == "low_var_kl":
        return k3_kl(logprobs, ref_logprobs)
    if kl_penalty_type == "kl":
        return x
    if kl_penalty_type == "abs":
        return x.abs()
    if kl_penalty_type == "mse":
        return x.square() / 2
    raise ValueError(f"kl_penalty_type is {kl_penalty_type!r}; it is low_var_kl, kl, abs or mse")


def gspo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              kl_fn=k3_kl):
    """GSPO (arXiv:2507.18071): every token of an answer has the same ratio, the geometric mean of
    its tokens' ratios. Arguments and what it returns are `grpo_loss`'s.

    Such a mean stays much closer to 1 than single ratios do, so that a clip at 0.2 would never act:
    the paper takes epsilon 3e-4 and epsilon_high 4e-4.
    """
    logprobs, old_logprobs, ref_logprobs, mask = check_and_blank(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, beta)
    log_ratio = masked_mean(logprobs - old_logprobs, mask, dim=1).unsqueeze(1)  # (N, 1)
    policy = old_logprobs + log_ratio  # (N, T) log-probs that give every token that ratio
    surrogate = clipped_surrogate(policy, old_logprobs, advantages, epsilon, epsilon_high)
    kl = kl_fn(logprobs, ref_logprobs)  # (N, T)
    loss = average(-(surrogate - beta * kl), mask, loss_type, max_completion_length)
    metrics = loss_metrics(loss, policy, old_logprobs, advantages, surrogate, kl, mask)
    return loss, metrics


def answer_ratio_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
                      epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
                      kl_fn=k3_kl):
    """One ratio for a whole answer, the product of its tokens' ratios.

    It says how much likelier the answer has become. Some teaching code does this. For long answers
    the product is soon outside of every clip's bounds: a change of 1 % a token is a factor of 20
    after 300 tokens. Arguments and what it returns are `grpo_loss`'s.
    """
    logprobs, old_logprobs, ref_logprobs, mask = check_and_blank(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, beta)
    log_ratio = (logprobs - old_logprobs).sum(dim=1, keepdim=True)  # (N, 1), 0 behind the mask
    policy = old_logprobs + log_ratio  # (N, T) log-probs that give every token that ratio
    surrogate = clipped_surrogate(policy, old_logprobs, advantages, epsilon, epsilon_high)
    kl = kl_fn(logprobs, ref_logprobs)  # (N, T)
    loss = average(-(surrogate - beta * kl), mask, loss_type, max_completion_length)
    metrics = loss_metrics(loss, policy, old_logprobs, advantages, surrogate, kl, mask)
    return loss, metrics


def corrected_kl_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
                      epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
                      kl_fn=k3_kl):
    """The KL times the ratio (`use_bias_correction_kl` in TRL, where it is the default as of 1.16).

    The answers were drawn from pi_old, so a mean over them is a mean under pi_old; the ratio makes
    it one under pi_theta. On-policy the value is the same, but the gradient is then that of
    KL(pi_theta || pi_ref). Arguments and what it returns are `grpo_loss`'s.
    """
    logprobs, old_logprobs, ref_logprobs, mask = check_and_blank(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, beta)
    surrogate = clipped_surrogate(logprobs, old_logprobs, advantages, epsilon, epsilon_high)
    kl = kl_fn(logprobs, ref_logprobs)  # (N, T)
    ratio = (logprobs - old_logprobs).clamp(-50, 50).exp()  # (N, T)
    loss = average(-(surrogate - beta * ratio * kl), mask, loss_type, max_completion_length)
    metrics = loss_metrics(loss, logprobs, old_logprobs, advantages, surrogate, kl, mask)
    return loss, metrics


def select_rows(rollout, rows):
    """Some rows of a rollout, as a rollout."""
    return Rollout(
        input_ids=rollout.input_ids[rows],
        attention_mask=rollout.attention_mask[rows],
        completion_mask=rollout.completion_mask[rows],
        logprobs=rollout.logprobs[rows],
        texts=[rollout.texts[row] for row in rows],
        truncated=rollout.truncated[rows],
    )


def replace_equal_groups(learner, tokenizer, questions, reward_fn, examples, rollout, rewards,
                         config):
    """DAPO's dynamic sampling, once: groups of equal rewards, which teach nothing, make room for
    fresh questions. Returns examples, rollout and rewards, as many as before."""
    G = config.num_generations
    keep = []
    for group, advantages in enumerate(group_advantages(rewards)):
        if advantages.any():
            keep.append(group)
    missing = len(examples) - len(keep)
    if missing == 0:
        return examples, rollout, rewards
    fresh = [next(questions) for _ in range(missing)]
    fresh_rollout = sample(learner, tokenizer, fresh, config)
    fresh_rewards = grade(reward_fn, fresh, fresh_rollout, G)
    rows = [group * G + i for group in keep for i in range(G)]
    examples = [examples[group] for group in keep] + fresh
    rollout = join_rollouts([select_rows(rollout, rows), fresh_rollout])
    rewards = torch.cat([rewards[keep], fresh_rewards])
    return examples, rollout, rewards


# ------------------------------------------------------------------------------------------------
# 13. What makes a long run safe
#
# Memory that is too small, Ctrl-C, a killed process, a full disk, a number that is not finite: none
# of them may cost a night's work, and none may change a result without a word.
# ------------------------------------------------------------------------------------------------


def within_memory(work, at_once, unit, least=1):
    """work(at_once[unit]), and again with half as much at once as often as memory is too small.

    What was found to fit is kept in `at_once` for the next time. Random numbers are drawn again as
    they were drawn before. When `least` does not fit either, torch.OutOfMemoryError says so.
    """
    while True:
        random_state = torch.get_rng_state()
        try:
            return work(at_once[unit])
        except torch.OutOfMemoryError as error:
            if at_once[unit] <= least:
                raise torch.OutOfMemoryError(
                    f"no memory left, with {at_once[unit]} {unit} at once. What helps: "
                    f"gradient_checkpointing in the update, a smaller max_completion_length, a "
                    f"smaller model") from error
        # Not inside of `except`: as long as the error is there, all that the failed attempt held in
        # memory is there too.
        torch.set_rng_state(random_state)
        torch.cuda.empty_cache()
        at_once[unit] = max(least, math.ceil(at_once[unit] / 2))
        tqdm.write(f"out of memory: from here on {at_once[unit]} {unit} at once")


def culprit(learner, rows, logprobs):
    """Says in words where a loss that is not finite comes from; `logprobs` (n, T) of `rows`."""
    for row, answer in zip(rows, logprobs):
        if not answer.isfinite().all():
            num_generations = learner.advantages.shape[1]
            prompt = learner.examples[row // num_generations]["prompt"]
            # Escaped (!a), because a terminal that cannot show it must not end the run.
            return f"because of an answer to {prompt!a:.200}"
    return "although all log-probs are finite; is it the loss_fn?"


@contextlib.contextmanager
def finish_step_on_ctrl_c():
    """Within it, Ctrl-C only puts True into the list that it yields. A second one stops at once."""
    interrupted = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # other threads are not told of Ctrl-C, and may not ask to be
        return

    def on_interrupt(*_):
        interrupted.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm.write("interrupted: this step is finished first (Ctrl-C again: stop at once)")

    handler = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, handler)


def check_examples(examples, model, tokenizer, config):
    """Refuse a data set that would break the run sooner or later. ValueError says what helps."""
    if not examples:
        raise ValueError("the data set is empty")
    if not hasattr(examples[0], "keys"):
        raise ValueError(f"an example must be a dict, and the first is {examples[0]!r:.99}. Of a "
                         f"DatasetDict take one part, like dataset['train']")
    columns = examples[0].keys()
    broken = []
    for place, example in enumerate(examples):
        if not example.get("prompt") or example.keys() != columns:
            broken.append(place)
    if broken:
        raise ValueError(f"{len(broken)} of {len(examples)} examples lack a prompt, or have other "
                         f"columns than {list(columns)}; the first of them are {broken[:9]}")
    for name in ("prompts", "completions", "completion_ids"):
        if name in columns:
            raise ValueError(f"the data set has a column {name!r}, which is the name of something "
                             f"else that reward functions are given: rename it")
    room = context_length(model) - config.max_completion_length
    encoded = encode_prompts(tokenizer, [example["prompt"] for example in examples])
    too_long = [place for place, ids in enumerate(encoded) if len(ids) > room]
    if too_long:
        raise ValueError(f"{len(too_long)} of {len(examples)} prompts are above {room} tokens: "
                         f"the model's context is {context_length(model)}, max_completion_length "
                         f"{config.max_completion_length}. The first of them are {too_long[:9]}. "
                         f"Leave them out, or take a smaller cap")


# Settings that change time and memory only, so that a run may go on with others.
MAY_CHANGE = ("save_steps", "gradient_checkpointing", "tokens_per_micro_batch")


def describe_run(model, examples, config, loss_fn):
    """What a checkpoint has to have in common with the run that goes on from it: the settings, but
    for those that may change, the loss, the data, and the initial model."""
    run = asdict(config)
    for name in MAY_CHANGE:
        run.pop(name)
    if config.bf16 is None:
        run["bf16"] = computes_in_bf16(model)
    run["loss_fn"] = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    run["examples"] = len(examples)
    prompts = repr([example["prompt"] for example in examples])
    run["checksum of the prompts"] = zlib.crc32(prompts.encode("utf-8", "surrogatepass"))
    trained = 0
    total = 0.0
    for parameter in model.parameters():
        trained += parameter.requires_grad
        # In 64 bits and on the CPU, so that it is the same number on every machine.
        total += parameter.detach().cpu().double().abs().sum().item()
    run["trained tensors"] = trained
    # The reference is copied from the initial weights, so these have to be the same.
    run["sum of the initial weights"] = f"{total:.6e}"
    return run


def open_folder(output_dir, learner, run, resume):
    """Make the folder, or put its checkpoint into `learner`. Returns the number of steps done.

    Where there is no checkpoint, the run begins anew. ValueError if there is a run and `resume` is
    not set.
    """
    os.makedirs(output_dir, exist_ok=True)
    path = os.path.join(output_dir, "checkpoint.safetensors")
    metrics_path = os.path.join(output_dir, "metrics.jsonl")
    has_metrics = os.path.exists(metrics_path) and os.path.getsize(metrics_path) > 0
    if not resume and (os.path.exists(path) or has_metrics):
        raise ValueError(f"{output_dir} holds a run: resume it, or name another folder")
    done = 0
    if os.path.exists(path):
        done = load_checkpoint(path, learner, run)
    # A killed run may have logged more steps than it saved, the last of them in part.
    lines = []
    if done > 0:
        with open(metrics_path, encoding="utf-8") as file:
            lines = file.readlines()[:done]
    with open(metrics_path + ".new", "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(metrics_path + ".new", metrics_path)
    return done


def write_metrics(output_dir, metrics):
    """One more line of metrics.jsonl."""
    with open(os.path.join(output_dir, "metrics.jsonl"), "a", encoding="utf-8") as file:
        file.write(json.dumps(metrics, default=float) + "\n")


def read_metrics(output_dir):
    """All lines of metrics.jsonl, as a list of dicts."""
    with open(os.path.join(output_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def save_checkpoint(output_dir, step, learner, run):
    """Everything that a run needs to go on, in one file that holds numbers and text only.

    It is written beside the old one and then renamed, so whatever kills the process, and whenever,
    there is one whole checkpoint: this one, or the one before. It takes 12 bytes a weight (5.9 GB
    for 0.5B), and twice that while it is written. OSError where that fails, as on a full disk.
    """
    path = os.path.join(output_dir, "checkpoint.safetensors")
    tensors = {}
    for i, weight in enumerate(learner.weights):
        tensors[f"{i} weight"] = weight.detach().contiguous()
        for key, value in learner.optimizer.state[weight].items():  # Adam's averages, and its count
            tensors[f"{i} {key}"] = value.contiguous()
    saved = {"step": step, "questions_seen": learner.questions_seen, "run": run}
    text = json.dumps(saved, default=float)  # a setting may be one of numpy's numbers
    try:
        save_file(tensors, path + ".new", metadata={"json": text})
        with open(path + ".new", "r+b") as file:
            os.fsync(file.fileno())  # on the disk itself, before the old one is given up
        os.replace(path + ".new", path)
    except Exception as error:  # a full disk, in the words of whichever library met it
        if os.path.exists(path + ".new"):
            os.remove(path + ".new")
        raise OSError(f"step {step} could not be saved ({error}). Make room, and resume; what was "
                      f"saved before is intact") from error


def load_checkpoint(path, learner, run):
    """Put a checkpoint into `learner`. Returns its step. ValueError if it is of another run."""
    with safe_open(path, framework="pt") as file:
        saved = json.loads(file.metadata()["json"])
        for name in run:
            if saved["run"].get(name) != run[name]:
                raise ValueError(f"{path} belongs to another run: there {name} is "
                                 f"{saved['run'].get(name)}, here {run[name]}")
        for i, (weight, parameter) in enumerate(zip(learner.weights, learner.parameters)):
            weight.data.copy_(file.get_tensor(f"{i} weight"))
            parameter.data.copy_(weight)
        # load_state_dict knows on which device the optimizer wants each number. clone, because what
        # safetensors returns is the file itself, mapped: it would stay on the disk as long as this
        # process lives, deleted or not.
        state = {}
        for name in file.keys():
            i, key = name.split()
            if key != "weight":
                state.setdefault(int(i), {})[key] = file.get_tensor(name).clone()
        groups = learner.optimizer.state_dict()["param_groups"]
        learner.optimizer.load_state_dict({"state": state, "param_groups": groups})
    learner.questions_seen = saved["questions_seen"]
    return saved["step"]


def load_weights(output_dir, model):
    """Put the weights of a run's checkpoint into the model that the run began with, for use without
    going on. Returns the checkpoint's step."""
    path = os.path.join(output_dir, "checkpoint.safetensors")
    with safe_open(path, framework="pt") as file:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for i, parameter in enumerate(trained):
            parameter.data.copy_(file.get_tensor(f"{i} weight"))
        return json.loads(file.metadata()["json"])["step"]


def let_go(learner):
    """Leave the model to its owner as an ordinary one: no hooks, no gradients, no module in train
    mode. (Gradient checkpointing, which acts in train mode only, stays switched on.)"""
    for hook in learner.hooks:
        hook.remove()
    for parameter in learner.parameters:
        parameter.grad = None
    learner.model.eval()


if __name__ == "__main__":
    answers = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
    rewards = torch.tensor([rule_reward(answer, "5") for answer in answers])
    advantages = group_advantages(rewards)
    # The 1.0 are padding: answers 2 and 3 have no second token.
    probabilities = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])
    logprobs = probabilities.log().requires_grad_()
    old_logprobs = torch.full((4, 2), 0.2).log()
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]])
    surrogate = clipped_surrogate(logprobs, old_logprobs, advantages)
    k3 = k3_kl(logprobs, old_logprobs)
    loss, _ = grpo_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, beta=0.04)
    loss.backward()
    torch.set_printoptions(precision=4, sci_mode=False)
    print("rewards      ", rewards)
    print("advantages   ", advantages)
    print("surrogate    ", surrogate[mask.bool()].detach())
    print("k3           ", k3[mask.bool()].detach())
    print("loss         ", loss.detach())
    print("its gradient ", logprobs.grad[mask.bool()])
