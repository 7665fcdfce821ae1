# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how a language model learns to reason from nothing but grades.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) is a loop of five moves:

    1. sample     ask the model each question G times; it answers at random     section 9
    2. grade      let a rule, not a person, give every answer a number          sections 1, 10
    3. compare    advantage = how much better than the average of its group     section 2
    4. score      ask the models how likely each token of the answers is        section 8
    5. update     make the tokens of better answers likelier and those of       sections 3 to 6, 11
                  worse ones less likely, but only a little at a time

and again from the start, with fresh answers from the model as it is now.

A *policy*, written pi, is what reinforcement learning calls a thing that acts. Here it is a
language model: pi(token | text so far) is the probability that it gives to the next token. Three
policies appear, and it pays to keep them apart from the start:

    pi_theta  the model that is being trained; the only one that gets a gradient
    pi_old    the same model before it began to learn from the present answers: not a second model
              in memory, only the numbers that it gave to the answers' tokens
    pi_ref    a frozen copy of the model from before training, a leash; in memory only if beta > 0

The equation that this file computes. For a question q, draw answers o_1 ... o_G. Answer i has
|o_i| tokens; o_it is its token number t, and o_i,<t are the tokens before that. It has one reward
R_i, and one advantage A_i for all of its tokens. Maximise, averaged over questions,

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           grpo_loss
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token   k3_kl

eps (0.2) says how far the ratio r may go before the clip acts. beta (0.04) is the weight of k3, an
estimate of how far pi_theta is from pi_ref: the leash.

One small example runs through the comments, and `python grpo.py` prints it. The question is "John
has 3 apples and buys 2 more. How many apples does he have?", and the model gave four answers:

    answer 1    3+2 = \boxed{5}
    answer 2    \boxed{5}
    answer 3    \boxed{6}
    answer 4    3-2 = \boxed{1}

A real tokenizer cuts each of these into half a dozen tokens or more. So that a pencil is enough
to follow the sums, we shall say that answers 1 and 4 have two tokens, and answers 2 and 3 one.

Shapes: B questions with G answers each are N = B * G rows. T is the width of the answers
("completions"), P that of the prompts, V the vocabulary's size. A small n is some part of the N.

How to read: sections 1 to 6 are the whole algorithm, and 7 is one step of it. Sections 8 to 11 are
the parts of that step, 12 to 14 make it a run, and 15 has its relatives. Probabilities are kept as
natural logarithms (in nats). The mathematics can be pasted elsewhere: the loss with all of sections
3 to 6 and `kl_estimate` (15); `token_logprobs` with `read` and `log_probability` (8).

Differences from the papers: log-ratios are limited, so that e^x does not overflow, and answers may
be sampled and scored in bfloat16 while weights stay in float32. Left out: a learned reward model,
a second network that predicts rewards (PPO's critic), a new reference now and then, several GPUs.
"""

import copy
import json
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed

# cuDNN's attention, which newer PyTorch prefers on newer GPUs, has given NaN gradients with masks
# (pytorch#196678), and it plans anew for every length, that is, for every token sampled.
torch.backends.cuda.enable_cudnn_sdp(False)


# ---- 1. The reward: a rule, not a model --------------------------------------------------------
# For mathematics nobody needs to train a model to judge the answers: the right result is known, so
# a rule can grade. The model is asked to put its result into \boxed{...}. It earns 0.5 for doing
# so, and 1.0 more for being right (`rule_reward`; what stands before that only reads the text). A
# model under training writes anything at all, so the rule must never raise, never take long, and
# never run what it reads (no eval).

def extract_boxed(text):
    r"""Contents of the complete \boxed{...} that opens last in `text`, or None if there is none.

    The last one, because intermediate boxes come first and the result last. Braces nest:
    \boxed{\frac{1}{2}} holds \frac{1}{2}. Escaped braces, \{ and \}, do not count. One pass over
    the text, so the time is linear in its length."""
    opened = []  # for each brace still open: where its contents begin, -1 if it has no \boxed
    start = end = -1  # where the contents of the best box so far begin and end
    # Three patterns, tried in this order: \boxed{, an escaped brace, a brace. The second is there
    # so that the brace of \{ is taken together with its backslash, and not found by the third.
    for match in re.finditer(r"\\boxed\{|\\[{}]|[{}]", text):
        token = match.group()
        if token == "\\boxed{":
            opened.append(match.end())
        elif token == "{":
            opened.append(-1)
        elif token == "}" and opened:  # a closing brace too many is just text
            begin = opened.pop()
            if begin > start:  # never so for -1
                start = begin
                end = match.start()
    if start < 0:
        return None
    return text[start:end]


def read_number(text):
    r"""The number that a person would read in `text`, as a float, or None if it is not a number.

    "1,000", "1{,}000", "$1000", "\$1000", "1000%", "1000." and "1000.00" are all one thousand.
    "1_000", "nan", "12,34", "5 kg" and digits of other scripts are no numbers."""
    text = text.replace("{,}", ",")  # LaTeX writes 1{,}000 for 1,000
    text = re.sub(r"\\?[$%]", " ", text).strip()  # $18, \$18, 50%, 50\%
    text = text.removesuffix(".").strip()  # the full stop of a sentence
    # Written out instead of trusting float(), which also takes "nan", "1_000" and Arabic digits.
    whole = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"  # 1,234 or 1234
    number = rf"(?:{whole}(?:\.[0-9]*)?|\.[0-9]+)"  # 1234 or 1234.5 or .5
    exponent = r"(?:[eE][+-]?[0-9]+)?"
    if not re.fullmatch(rf"[+-]?\s*{number}{exponent}", text):
        return None
    return float(re.sub(r"[,\s]", "", text))


def rule_reward(completion, answer):
    r"""Reward of one completion: 0.0 without a box, 0.5 for a box, 1.5 for a box with the answer.

    `completion` is the model's text, `answer` the right answer, a string. A blank box counts as
    none. The box is right if it equals the answer as a string, or as a number to within less than
    0.01. Returns a float for every pair of strings, never raises, and takes linear time."""
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
# An answer that is right but not boxed earns 0. That is harsh on purpose: a number somewhere in the
# text is easy to produce by accident. A small model thus learns the format first. If it learns
# *only* the format, the reward is stuck at 0.5: the smallest case of what is called reward hacking,
# getting the grade without doing the work.


# ---- 2. Advantages: better or worse than the other answers to the same question ----------------
# An answer that earned 0.5 may be good (the question is hard) or bad (all others earned 1.5). What
# matters is the difference from the baseline, the reward that was to be expected. PPO, the method
# that GRPO simplifies, trains a second network to predict it, the critic. GRPO takes the mean of
# the group. Divided by the std, the differences have about the same size whatever the units of the
# reward and however hard the question. That is the advantage, the same for all tokens of an answer.

def group_advantages(rewards, scale_rewards="group"):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> (..., G).

    The std is the population's: divided by G. torch's default divides by G - 1, and most code keeps
    it, which makes advantages smaller by a factor of sqrt((G-1)/G), 6.5 % at G = 8. A group of
    equal rewards gets exact zeros: it has nothing to teach. `scale_rewards` is what to divide by:

        "group"  the std of each group
        "none"   1 (Dr. GRPO)
        "batch"  the std of all rewards, one scale for all questions
        "rloo"   (G - 1) / G, which gives R_i minus the mean of the *other* rewards (RLOO)

    ValueError for fewer than two rewards in a group, for NaN and inf, and for another name."""
    if rewards.dim() == 0 or rewards.shape[-1] < 2 or not rewards.isfinite().all():
        raise ValueError(f"wanted groups of 2 or more finite rewards, got {rewards}")
    G = rewards.shape[-1]
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # float32, or finer
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = centered.square().mean(dim=-1, keepdim=True).sqrt()  # (..., 1)
    scales = {"group": std, "none": 1, "batch": rewards.std(correction=0), "rloo": (G - 1) / G}
    if scale_rewards not in scales:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, and must be one of {list(scales)}")
    advantages = centered / scales[scale_rewards]  # NaN where the std is 0, which is mended below
    # The mean of 0.1, 0.1 and 0.1 is not quite 0.1 in float64. Divided by a std of the same 1e-17,
    # that rounding error would become advantages of size 1. Hence the tolerance. An epsilon
    # added to the std, which is the usual way out, would change the advantages of every group.
    equal = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    return advantages.masked_fill(equal, 0.0)


# The apples: R = [1.5, 1.5, 0.5, 0.5] has the mean 1 and the std 0.5, so
#
#     A = [+1, +1, -1, -1]
#
# A group of equal rewards, all right (too easy) or all wrong alike (too hard), is all zeros. The
# share of such groups is logged as zero_variance_fraction.


# ---- 3. Ratio and clip: learn from an answer, but not too much ---------------------------------
# How does an advantage become a direction for the weights? Take a single token first. The model
# draws it with probability pi, and its advantage is A. So on average the model gets sum(pi * A),
# over all tokens that it might draw, and that is to grow. Since grad log pi = (grad pi) / pi,
#
#     grad sum(pi * A) = sum(pi * A * grad log pi)
#
# which is the mean of A * grad log pi over tokens drawn from pi, and a mean over draws can be
# estimated by drawing. So: draw, and take A times the gradient of the log-probability. A whole
# answer is drawn with the product of its tokens' probabilities. The logarithm of a product is a
# sum, so every token of the answer gets the answer's A. (That sums over its tokens. The 1/|o_i| of
# the equation on top, which makes it a mean, is a choice: section 6.)
#
# A baseline b, the same number for all draws, does not bend the direction: it adds only
# b * sum(grad pi) = b * grad 1 = 0. (The group's mean has R_i itself in it, with weight 1/G, so
# the mean gradient is (G - 1) / G times as long.) The std bends it a bit, and reweighs questions.
#
# But the answers were drawn by pi_old, and after an update pi_theta is another policy. So the
# objective is r * A, with the ratio r = pi_theta / pi_old. The weight r turns a mean over tokens of
# pi_old into a mean over tokens of pi_theta: sum(pi_old * r * A) = sum(pi_theta * A). (It does not
# correct for the text before the token, which pi_old wrote as well.) pi_old is a constant in r, so
# the gradient of r is r times that of log pi_theta: at r = 1, the one above.
#
# Far from r = 1 a few tokens with huge ratios would outweigh all others. So the objective becomes
# min(r A, clip(r) A), where clip limits r to between 1 - eps and 1 + eps. As soon as r has gone far
# enough *in the direction that pays*, the min takes the clipped branch, which is constant: no
# gradient, no further push from this token. In the other direction nothing limits the push back.

def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """PPO's "surrogate" objective (arXiv:1707.06347, equation 7) per token, to be maximised:
    min(r A, clip(r, 1 - eps, 1 + eps_high) A). Ratios (N, T), advantages (N,) -> (N, T).

    `epsilon_high` defaults to `epsilon`; an `epsilon` of 1 or more removes the lower bound."""
    if epsilon_high is None:
        epsilon_high = epsilon
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon_high)  # (N, T)
    A = advantages.unsqueeze(1)  # (N, 1): the same for every token of a row
    return torch.min(ratio * A, clipped_ratio * A)


# The apples after some updates. Say that pi_old gave every token the probability 0.2, and that
# pi_theta now gives
#
#     answer 1: 0.3 and 0.2     answer 2: 0.1     answer 3: 0.3     answer 4: 0.1 and 0.2
#
# Then the ratios are 1.5, 0.5 and 1, and all four cases of the clip (at eps 0.2) are there. For
# the last column remember that the gradient of r is r times that of log pi_theta:
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi_theta
#     +1   1.5 (ans. 1)  min( 1.5,  1.2) =  1.2  clipped      0    good, and already much likelier
#     +1   0.5 (ans. 2)  min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (ans. 3)  min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (ans. 4)  min(-0.5, -0.8) = -0.8  clipped      0    bad, and already rarer
#     any  1.0           A                       not clipped  A    every token, at the first update
#
# With one update per batch of answers, pi_theta still is pi_old when the gradient is taken (this
# is called on-policy): every ratio is 1 and the clip never acts. It wakes up when a batch is
# learned from in several updates. A common mistake is max in place of min where A is negative: it
# goes on pushing in the fourth line, and stops in the third, where the policy went the wrong way.


# ---- 4. The KL penalty: do not drift too far from where you started ----------------------------
# A policy that only chases the reward forgets how to write. How far it has gone is measured by
#
#     KL(pi_theta || pi_ref) = the mean of log(pi_theta / pi_ref), over tokens drawn from pi_theta
#
# which is never negative, and 0 only if the two policies agree. To compute it at every token would
# need all V probabilities of both policies. k3 estimates it from the one token that was drawn.

def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (N, T), (N, T) -> (N, T).

    Schulman's estimator (joschu.net/blog/kl-approx.html). Over tokens drawn from pi_theta its mean
    is exactly KL(pi_theta || pi_ref): the middle term alone has that mean, and the others cancel,
    since the mean of pi_ref/pi_theta is sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1. It is
    never negative, since e^x >= 1 + x. With the fraction upside down it estimates something else.
    Value and gradient are finite for any finite input (but not in float16)."""
    # 50 keeps e^x from overflowing; -1e30 is only for a difference that is itself -inf.
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
# that of log pi_theta, and the mean of that over tokens drawn from pi_theta is zero:
# sum(pi_theta * grad log pi_theta) = sum(grad pi_theta) = grad 1 = 0. As a loss, k1 on average
# holds nothing back. (Section 15 has k1 and others, and says what k3's own gradient is.)


# ---- 5. The masked mean: padding is not data ---------------------------------------------------
# Answers have different lengths and tensors do not, so short answers are filled up, and a mask
# says which places are real.

def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is set (bool, int or float); 0, not NaN, where none is.

    `mask` has the shape of `values`, or one that expands to it. With `dim`, over that dimension.
    What stands behind the mask reaches neither the value nor the gradient of `values`. Multiplying
    by the mask would let a NaN through, since 0 * NaN is NaN; `where` does not."""
    mask = mask.bool().expand_as(values)
    kept = torch.where(mask, values, 0.0)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ---- 6. The loss -------------------------------------------------------------------------------
# Everything above, put together, with a minus sign because optimizers minimise. How to average over
# the tokens of all answers looks like a detail, but it decides how much a long answer counts.

def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """One number from (N, T) numbers and the mask (N, T) of real tokens.

        "grpo"     mean over answers of the mean over their tokens (DeepSeekMath, and the equation
                   on top). Each answer counts the same, so the longer a wrong answer is, the less
                   each of its tokens is punished: wrong answers tend to grow
        "dapo"     mean over all tokens of all answers (arXiv:2503.14476): each token counts the
                   same, so long answers count more
        "dr_grpo"  sum over all tokens, divided by N * max_completion_length (arXiv:2503.20783):
                   like "dapo", but the divisor does not depend on what was sampled

    ValueError for any other `loss_type`, and for "dr_grpo" without `max_completion_length`."""
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo" and max_completion_length:
        total = torch.where(mask.bool(), per_token, 0.0).sum()
        return total / (len(per_token) * max_completion_length)
    raise ValueError(f"loss_type {loss_type!r}: grpo, dapo, or dr_grpo and max_completion_length")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              kl_penalty_type="low_var_kl", importance_sampling_level="token",
              use_bias_correction_kl=False):
    """-J, the equation on top of this file (by default), over N answers. Returns (loss, metrics).

    Log-probs of pi_theta, pi_old and pi_ref, (N, T) each; pi_ref's may be None with beta=0.
    Advantages (N,). The mask (N, T) is set on the answers' real tokens; what stands behind it
    reaches neither value nor gradient. `loss_type` is explained in `average`, the last three
    settings in section 15. Metrics are plain floats: loss, kl, ratio_max, and clip_fraction, the
    share of tokens where the min took the clipped branch. ValueError for what does not fit."""
    if ref_logprobs is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed; None is for beta=0")
        ref_logprobs = logprobs  # the policy as its own reference: the KL is 0
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level {importance_sampling_level!r}: token/sequence")
    # Tensors that do not fit would often be broadcast, silently.
    given = [logprobs, old_logprobs, ref_logprobs, mask, advantages]
    shapes = [tuple(tensor.shape) for tensor in given]
    if logprobs.dim() != 2 or shapes != [shapes[0]] * 4 + [shapes[0][:1]]:
        raise ValueError(f"log-probs, mask and advantages are {shapes}, not four (N, T) and (N,)")
    # The inputs are masked, and not only the result. Else a NaN or inf behind the mask would not
    # show in the value, but the backward pass through exp would multiply it by 0: NaN.
    mask = mask.bool()
    logprobs = logprobs.masked_fill(~mask, 0.0)
    old_logprobs = old_logprobs.masked_fill(~mask, 0.0).detach()  # pi_old and pi_ref are constants
    ref_logprobs = ref_logprobs.masked_fill(~mask, 0.0).detach()

    # The ratio comes from logarithms, since tiny probabilities themselves would become 0, and 0/0.
    log_ratio = logprobs - old_logprobs  # (N, T)
    if importance_sampling_level == "sequence":  # one ratio for a whole answer: GSPO, section 15
        log_ratio = masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)
    # e^100 would overflow, and even where the min drops that branch its gradient, 0 * inf, would be
    # NaN. e^50 is far beyond anything that is still learning.
    ratio = log_ratio.clamp(-50, 50).exp()  # (N, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (N, T)
    kl = kl_estimate(logprobs, ref_logprobs, kl_penalty_type)  # (N, T) k3, unless asked otherwise
    penalty = ratio * kl if use_bias_correction_kl else kl  # TRL's way: section 15
    per_token = -(surrogate - beta * penalty)  # (N, T)
    loss = average(per_token, mask, loss_type, max_completion_length)

    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (N, T) the min took the other branch
    metrics = {
        "loss": loss.item(),
        "kl": masked_mean(kl, mask).item(),
        "clip_fraction": masked_mean(clipped, mask).item(),
        "ratio_max": torch.where(mask, ratio, 0.0).max().item(),
    }
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
# With one update a step, training starts at a loss of 0: every ratio is 1 and every k3 is 0, so the
# "grpo" loss is minus the mean of the advantages, and those sum to 0 in each group. Its gradient
# with respect to a token's log pi is not 0, but -A / |o_i| / N. ("dapo" and "dr_grpo" weigh answers
# by length.) Each step centres its advantages anew, so the loss says nothing of progress.
#
# That is GRPO, and you may stop here. What follows is where the five tensors of `grpo_loss` come
# from. From now on callers mostly stand above what they call.


# ---- 7. One step -------------------------------------------------------------------------------
#   step          one round of the five moves: B questions are drawn, N = B * G answers sampled
#   pass          once over all answers of a step, to learn from them; there are num_iterations
#   mini-batch    a pass has num_mini_batches of them; each is one update of the weights
#   micro-batch   the answers of a mini-batch that are computed at once, as memory allows. Their
#                 gradients are added up, so how they are cut makes no difference but for rounding

@dataclass
class Answer:
    """One answer, and all that is known of it. Its ids are those that were drawn: a text that is
    decoded and encoded again, as in much published code, need not give the same ones back."""

    prompt_ids: list  # the question's tokens
    ids: list  # the t tokens that the model chose, the end token included
    text: str  # those in words, without special tokens
    truncated: bool  # it was cut off, at max_completion_length tokens
    sampler_logprobs: torch.Tensor  # (t,) with which each was drawn; only for the log
    # What the later moves find out:
    example: Optional[dict] = None  # the row of the data set that was asked
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: Optional[torch.Tensor] = None  # (t,) of pi_old, by the scorer; None: not needed
    ref_logprobs: Optional[torch.Tensor] = None  # (t,) of pi_ref; None at beta = 0


@dataclass
class Learner:
    """What is kept from step to step. Section 13 makes it."""

    model: torch.nn.Module  # pi_theta: it samples, and it is scored
    reference: Optional[torch.nn.Module]  # pi_ref; None at beta = 0
    parameters: list  # the model's trained ones, in bfloat16 or float32
    masters: list  # those in float32, moved by the optimizer; without bfloat16 the same memory
    optimizer: torch.optim.Optimizer
    at_once: dict  # how many "questions" are sampled, and "answers" scored, at once
    history: list  # the metrics of all steps so far
    questions_seen: int = 0
    failed: int = 0  # steps in a row in which every update was skipped
    groups: Optional[list] = None  # the last step's B groups of G answers, for the caller


def train_step(learner, tokenizer, questions, reward_fn, config):
    """One round of the five moves. Returns its metrics, a dict of finite numbers.

    `questions` yields examples without end, dicts with a prompt. Section 10 says how `reward_fn` is
    called; `config` is a GRPOConfig, section 12."""
    started = time.perf_counter()
    # 1. Sample G answers to each of the next B questions: section 9.
    examples = [next(questions) for _ in range(config.prompts_per_step)]
    groups = sample(learner, tokenizer, examples, config)
    # 2. Grade every answer: section 10.
    grade(reward_fn, groups)
    for _ in range(config.dynamic_sampling):  # 0 times, unless you ask for it: section 15
        groups = replace_equal_groups(learner, tokenizer, questions, reward_fn, groups, config)
    sampled = time.perf_counter()

    # 3. Compare each answer with its group. (Truncated ones as well: they belong to the baseline.)
    rewards = rewards_of(groups)  # (B, G)
    advantages = group_advantages(rewards, config.scale_rewards)  # (B, G)
    answers = sum(groups, [])  # the groups joined: a list of N answers
    for answer, advantage in zip(answers, advantages.flatten().tolist()):
        answer.advantage = advantage
    # A short answer beside a long one is mostly padding, so answers of like length are computed
    # together. The longest come first: if memory is too small, it is too small at once.
    answers.sort(key=lambda answer: len(answer.ids), reverse=True)

    # 4. Score: how likely does the reference find these tokens? If there are several updates, ask
    #    the model as well, before the first one: section 8.
    if learner.reference is not None:
        write_logprobs(learner, learner.reference, answers, "ref_logprobs", config)
    if config.num_iterations * config.num_mini_batches > 1:
        write_logprobs(learner, learner.model, answers, "old_logprobs", config)
    scored = time.perf_counter()

    # 5. Update: section 11. Inside, the model scores the same tokens, with gradients.
    metrics = update(learner, answers, config)
    learner.groups = groups
    metrics["sample_seconds"] = sampled - started  # with grading
    metrics["score_seconds"] = scored - sampled
    metrics["update_seconds"] = time.perf_counter() - scored
    metrics["learning_rate"] = learner.optimizer.param_groups[0]["lr"]
    metrics["questions_seen"] = learner.questions_seen
    return metrics | answer_metrics(answers, rewards)


def rewards_of(groups):
    """The rewards of B groups of G answers, as a tensor (B, G)."""
    rewards = [[answer.reward for answer in group] for group in groups]
    return torch.tensor(rewards, dtype=torch.float64)


def answer_metrics(answers, rewards):
    """What the log shows of N answers and their rewards (B, G). The README says what is healthy."""
    equal = (group_advantages(rewards) == 0).all(dim=1)  # (B,)
    logprobs = torch.cat([answer.sampler_logprobs for answer in answers])  # of all tokens
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "zero_variance_fraction": equal.double().mean().item(),
        # The mean of -log pi over what pi draws. (A NaN would not be valid JSON.)
        "entropy": -logprobs.nan_to_num().mean().item(),
        "completion_length": len(logprobs) / len(answers),
        "truncated_fraction": sum(answer.truncated for answer in answers) / len(answers),
    }


# ---- 8. Log-probabilities: what a model thinks of each token now -------------------------------
# To make a token likelier we need its log-probability as a number with a gradient. For that the
# model reads prompt and answer once more, all tokens in parallel. This is called scoring.

def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0):
    """log pi of each completion token: ids and mask (N, P+T) -> (N, T), float32, differentiable.

    T is `completion_length`. Prompts are padded on the left and completions on the right, so that
    all completions begin in the same column. `temperature` must be the one that was sampled at:
    else these are the log-probs of a policy that the tokens were not drawn from."""
    T = completion_length
    out = read(model, input_ids, attention_mask, use_cache=False, logits_to_keep=T + 1)
    # Column j predicts the token in column j + 1, so the prompt's last column predicts the answer's
    # first token, and the answer's last column has nothing left to predict.
    return log_probability(out.logits[:, :-1], input_ids[:, -T:], temperature)


def read(model, ids, mask, **more):
    """Run the model on `ids` (n, t), which belong to the last t columns of `mask` (n, L). The
    columns before them, if any, are in its cache. Returns its output."""
    # Positions begin at 0 with the first real token of a row: padding before it must not count.
    # Models with rotary positions forgive a shift, those with learned ones go wrong by many nats.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)  # (n, L)
    positions = positions[:, -ids.shape[1] :]  # (n, t)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, **more)


def log_probability(logits, ids, temperature=1.0):
    """log softmax(logits / temperature) at the given tokens: (..., V), (...) -> (...)."""
    logits = logits.float()  # a softmax in bfloat16 is off by hundredths of a nat
    if temperature != 1:
        logits = logits / temperature
    # What the library calls cross-entropy is minus the log-probability of the token.
    loss = F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none")
    return -loss.view(ids.shape)


# `token_logprobs` would be enough. `score`, which the steps call, saves time: the answers to a
# question have the same prompt, which it reads once. What attention layers keep of the tokens that
# they have read (keys and values) is called the cache. To copy a prompt's cache to its answers is
# an operation like any other: their gradients flow back through it, and add up.

def score(model, answers, temperature):
    """Log-probs (n, T) of n answers in any order, and their mask (n, T): as by `token_logprobs`."""
    prompts = [answer.prompt_ids for answer in answers]
    ids, mask = pad_rows([answer.ids for answer in answers], "right", model.device)  # (n, T)
    T = ids.shape[1]
    if not has_only_attention(model):
        prompt_ids, prompt_mask = pad_rows(prompts, "left", model.device)  # (n, P)
        input_ids = torch.cat([prompt_ids, ids], dim=1)  # (n, P+T)
        attention_mask = torch.cat([prompt_mask, mask], dim=1)  # (n, P+T)
        return token_logprobs(model, input_ids, attention_mask, T, temperature), mask
    cache, logits, prompt_mask = read_prompts(model, prompts)
    # The prompt predicts the answer's first token; each token but the last predicts the next.
    logprobs = log_probability(logits, ids[:, 0], temperature).unsqueeze(1)  # (n, 1)
    if T > 1:
        attention_mask = torch.cat([prompt_mask, mask[:, :-1]], dim=1)  # (n, P+T-1)
        out = read(model, ids[:, :-1], attention_mask, past_key_values=cache, use_cache=True)
        others = log_probability(out.logits, ids[:, 1:], temperature)  # (n, T-1)
        logprobs = torch.cat([logprobs, others], dim=1)
    return logprobs, mask


def pad_rows(rows, side, device):
    """n lists of token ids -> ids (n, widest), and the mask (n, widest) of what is real.

    The padding is -1, which is no token, until the mask is made. A mask made by `!= pad_token_id`
    loses the end token wherever that is the padding, and the model is never taught to stop."""
    rows = [torch.tensor(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side=side).to(device)
    return ids.clamp(min=0), (ids >= 0).long()


def has_only_attention(model):
    """False if a layer is recurrent. Such layers have a state instead of keys and values, and
    overwrite it in place, which gradients do not survive."""
    config = model.config.get_text_config()  # of a model that sees pictures, the part about text
    # The layers' kinds, by newer or older name. A model with neither is taken for attention only.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", [])
    return set(kinds) <= {"full_attention", "sliding_attention", "chunked_attention"}


def read_prompts(model, prompts):
    """Let the model read n prompts (lists of ids), each distinct one only once. Returns the cache
    of n rows, the logits (n, V) of what comes next, and the mask (n, P)."""
    prompts = [tuple(prompt) for prompt in prompts]
    distinct = list(dict.fromkeys(prompts))  # each once, in the same order
    places = [distinct.index(prompt) for prompt in prompts]
    which = torch.tensor(places, device=model.device)  # (n,)
    ids, mask = pad_rows(distinct, "left", model.device)
    out = read(model, ids, mask, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.reorder_cache(which)  # row i becomes a copy of row which[i], so rows are repeated too
    return cache, out.logits[which, -1], mask[which]


@torch.no_grad()
def write_logprobs(learner, model, answers, name, config):
    """Score the answers with `model`, and keep the log-probs in their field `name`."""

    def work(parts):
        for part in parts:
            logprobs, _ = score(model, part, config.temperature)  # (n, T)
            for answer, row in zip(part, logprobs.cpu()):
                setattr(answer, name, row[: len(answer.ids)])

    in_parts(work, answers, learner.at_once, "answers")


def in_parts(work, items, at_once, unit):
    """Call work(parts), where `parts` are the items, cut into lists of at_once[unit]. Where memory
    is too small, halve that number for good, and start over."""
    while True:
        count = max(1, min(at_once[unit], len(items)))
        try:
            return work([items[i : i + count] for i in range(0, len(items), count)])
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        # Outside of `except`, because the error keeps its tensors in memory.
        torch.cuda.empty_cache()
        at_once[unit] = count // 2
        tqdm.write(f"out of memory: from here on {count // 2} {unit} at once")


# ---- 9. Sampling: G answers to every question --------------------------------------------------
# Sampling is scoring with the tokens not yet there: the model reads the prompt, a token is drawn
# from what it says comes next, the model reads that token, and so on. `model.generate` does so too,
# but with the checkpoint's own settings mixed in: those of Qwen2.5-0.5B-Instruct are top_p 0.8,
# top_k 20 and repetition_penalty 1.1, and without them the library's default is top_k 50. The
# tokens then come from another distribution than the one whose probabilities go into the ratio. The
# loop below draws from all of softmax(logits / temperature), and keeps the log-probs it drew with.
#
# These let us check that sampler and scorer agree. A ratio of 1 at the first update proves nothing:
# both its sides, pi_theta and pi_old, come from the scorer. But the mean distance between the
# sampler's log-probs and the scorer's is logged as sampler_gap: 1e-6 in float32, a few hundredths
# at most in bfloat16, which rounds differently in the two. More means that one of them uses another
# temperature, another mask, or other positions.

def sample(learner, tokenizer, examples, config):
    """A group of G answers to each of the examples' prompts, all at once if memory allows: on a GPU
    each token waits for the launch of hundreds of kernels, so many rows take as long as few."""

    def work(parts):
        groups = []
        for part in parts:
            prompts = [example["prompt"] for example in part]
            groups += sample_groups(
                learner.model, tokenizer, prompts, config.num_generations,
                max_completion_length=config.max_completion_length,
                temperature=config.temperature)
        return groups

    groups = in_parts(work, examples, learner.at_once, "questions")
    for example, group in zip(examples, groups):
        for answer in group:
            answer.example = example
    return groups


@torch.no_grad()
def sample_groups(model, tokenizer, prompts, num_generations, *, max_completion_length,
                  temperature=1.0):
    """Sample G = `num_generations` answers to each of B prompts: a list of B lists of G `Answer`.

    `prompts` are strings, or chats: lists of messages with role and content. Tokens are drawn from
    exactly softmax(logits / temperature), up to the first of the model's end tokens, or
    `max_completion_length` tokens. Temperature 0 takes the likeliest token each time, and its
    log-probs are those at temperature 1. Reproducible under torch.manual_seed. Leaves the model in
    eval mode. ValueError for numbers out of range, no prompts, an empty one, or no end token."""
    G = num_generations
    cap = max_completion_length
    in_range = G >= 1 and cap >= 1 and 0 <= temperature < math.inf
    if isinstance(prompts, str) or not prompts or not in_range:
        raise ValueError(f"wanted prompts, G, cap >= 1, temperature >= 0, "
                         f"got {prompts!r:.99}, {G}, {cap}, {temperature}")
    model.eval()
    end_ids = end_token_ids(model, tokenizer)
    asked = []  # N = B * G prompts
    for prompt in prompts:
        asked += [encode_prompt(tokenizer, prompt)] * G
    cache, logits, mask = read_prompts(model, asked)
    ids = torch.full((len(asked), cap), -1, device=model.device)  # (N, cap) to be filled
    logprobs = torch.zeros(ids.shape, device=model.device)
    # Rows that have ended leave the batch. `live` (n,) are those of the N that are still in it;
    # cache, logits and mask have n rows.
    live = torch.arange(len(asked), device=model.device)
    for t in range(cap):
        if t > 0:  # read the token that was drawn last
            mask = F.pad(mask, (0, 1), value=1)  # (n, P+t)
            out = read(model, ids[live, t - 1 : t], mask, past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]  # (n, V)
        tokens = draw_tokens(logits, temperature)  # (n,)
        ids[live, t] = tokens
        logprobs[live, t] = log_probability(logits, tokens, temperature or 1.0)
        # Not at every token, because to ask a GPU which rows have ended is to wait for it. What an
        # ended row still draws is cut off below.
        if t % 4 == 3:
            ended = torch.isin(ids[live], torch.tensor(end_ids, device=ids.device)).any(dim=1)
            going_on = (~ended).nonzero().squeeze(1)  # places among the n
            if len(going_on) == 0:
                break
            if len(going_on) < len(live):
                cache.reorder_cache(going_on)
                live = live[going_on]
                mask = mask[going_on]

    answers = []
    logprobs = logprobs.cpu()
    for row, drawn in enumerate(ids.tolist()):
        ends = [t for t in range(cap) if drawn[t] in end_ids]
        length = min(ends, default=cap - 1) + 1  # up to the first end token, and with it
        own = drawn[:length]
        text = tokenizer.decode(own, skip_special_tokens=True)
        answers.append(Answer(asked[row], own, text, not ends, logprobs[row, :length]))
    return [answers[start : start + G] for start in range(0, len(answers), G)]


def draw_tokens(logits, temperature):
    """A token for each row, from softmax(logits / temperature): (n, V) -> (n,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # Lay the V probabilities end to end on a line, and see on whose stretch a random point falls.
    # (torch.multinomial does the same, much slower on a CPU, and makes the CPU wait for a GPU.)
    probabilities = (logits.float() / temperature).softmax(dim=-1)  # (n, V)
    wide = torch.float64  # a float32 sum of 150,000 terms loses the small ones
    if logits.device.type == "mps":
        wide = torch.float32  # Apple's GPUs have no other
    ends = probabilities.cumsum(dim=-1, dtype=wide)  # (n, V) where the stretches end
    total = ends[:, -1:]  # (n, 1) the line's length: 1, but for rounding
    points = torch.rand_like(total) * total  # (n, 1)
    # right=True: a point between two stretches belongs to the later one. So a token of probability
    # 0, whose stretch is empty, is not hit. If the logits are NaN, the point is beyond all.
    tokens = torch.searchsorted(ends, points, right=True).squeeze(1)  # (n,)
    return tokens.clamp(max=logits.shape[1] - 1)


def encode_prompt(tokenizer, prompt):
    """A prompt, a string or a chat, as a list of token ids. ValueError if it has none."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:  # add_generation_prompt: what follows is the assistant's turn, and no longer the user's
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens, so there is nothing to go on from")
    return ids


def end_token_ids(model, tokenizer):
    """All ids that end an answer, sorted. Qwen has two, and to miss one would train the model on
    what it babbles after its answer. ValueError if there is none."""
    found = set()
    for source in (model.generation_config, model.config, tokenizer):  # any of them may know some
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            ids = [ids]
        found.update(ids or [])
    if not found:
        raise ValueError("neither model nor tokenizer has an eos_token_id: no answer could end")
    return sorted(found)


# ---- 10. Grading -------------------------------------------------------------------------------
# A reward function has the signature that TRL expects (Hugging Face's library for such training,
# where many readers will go next), so one written here runs there. For a data set of chats with a
# column `answer`, the rule of section 1 is
#
#     def boxed_reward(prompts, completions, answer, **other_columns):
#         texts = [completion[0]["content"] for completion in completions]
#         return [rule_reward(text, right) for text, right in zip(texts, answer)]

def grade(reward_fn, groups):
    """Call the reward function for groups of answers, N in all, and keep the rewards in them.

        reward_fn(prompts=, completions=, completion_ids=, **other columns) -> N finite numbers

    Each argument is a list of N values, which the function must not change. Completions are strings
    where prompts are, else chats of one message. ValueError for too few numbers, NaN, inf."""
    answers = sum(groups, [])
    columns = {}
    for name in answers[0].example:
        columns[name] = [answer.example[name] for answer in answers]
    prompts = columns.pop("prompt")
    completions = [answer.text for answer in answers]
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    rewards = reward_fn(prompts=prompts, completions=completions,
                        completion_ids=[answer.ids for answer in answers], **columns)
    if len(rewards) != len(answers):
        raise ValueError(f"the reward function returned {len(rewards)} of {len(answers)} numbers")
    for answer, reward in zip(answers, rewards):
        answer.reward = float(reward)
        if not math.isfinite(answer.reward):
            raise ValueError(f"the reward function returned {reward} for {answer.text!r:.200}")


# ---- 11. The update ----------------------------------------------------------------------------
# The loss, its gradient, and a step of the optimizer, for each mini-batch.

def update(learner, answers, config):
    """Learn from answers: num_iterations passes of num_mini_batches updates each.

    Returns metrics, mostly averaged over the tokens learned from or over the updates. An update
    whose gradient is not finite is skipped; FloatingPointError after three steps of nothing else.
    The model stays in eval mode: with dropout, pi_theta and pi_old would be different networks."""
    results = []  # the metrics of micro-batches
    norms = []  # the lengths of the updates' gradients
    for _ in range(config.num_iterations):
        order = torch.randperm(len(answers))  # every pass has all answers, shuffled anew
        for places in order.tensor_split(config.num_mini_batches):
            mini_batch = [answers[i] for i in sorted(places.tolist())]  # the longest first
            found = compute_gradient(learner, mini_batch, config)
            # A gradient that is too long is cut: a strange batch does no more harm than others.
            norm = torch.nn.utils.clip_grad_norm_(learner.masters, config.max_grad_norm).item()
            if not math.isfinite(norm):
                tqdm.write(f"update skipped: the gradient's length is {norm}")
                continue
            learner.optimizer.step()
            for parameter, master in zip(learner.parameters, learner.masters):
                parameter.data.copy_(master)  # rounds in bfloat16; otherwise changes nothing
            results += found
            norms.append(norm)
    learner.optimizer.zero_grad()  # sampling needs the memory
    learner.failed = 0 if norms else learner.failed + 1
    if learner.failed == 3:
        raise FloatingPointError("three steps in a row without an update")

    tokens = max(1, sum(result["tokens"] for result in results))
    updates = max(1, len(norms))
    metrics = {
        "loss": sum(result["loss"] for result in results) / updates,
        "grad_norm": sum(norms) / updates,
        "ratio_max": max((result["ratio_max"] for result in results), default=0.0),
        "skipped_updates": config.num_iterations * config.num_mini_batches - len(norms),
    }
    for name in ("kl", "clip_fraction", "sampler_gap"):
        metrics[name] = sum(result[name] * result["tokens"] for result in results) / tokens
    return metrics


def compute_gradient(learner, mini_batch, config):
    """Leave the loss's gradient in the masters' .grad. Returns the micro-batches' metrics."""
    answers = mini_batch
    if config.mask_truncated_completions:
        answers = [answer for answer in answers if not answer.truncated]
    tokens_in_all = sum(len(answer.ids) for answer in answers)
    if config.beta == 0:
        # Without KL, an answer whose advantage is 0 has no gradient, and need not be computed. It
        # still counts in the divisors. (If there is no other, the weights do not move at all.)
        answers = [answer for answer in answers if answer.advantage != 0]

    def work(parts):
        learner.optimizer.zero_grad()  # the masters': of the last update
        learner.model.zero_grad()  # the parameters': left over if memory ran out
        results = []
        for part in parts:
            loss, metrics = micro_batch_loss(learner, part, config)
            # An average over a micro-batch counts by its share of the mini-batch: of the tokens if
            # it is over tokens, else of the answers. If all counted the same, the cut would matter.
            share = len(part) / len(mini_batch)
            if config.loss_type == "dapo":
                share = metrics["tokens"] / tokens_in_all
            (loss * share).backward()
            add_to_masters(learner)
            metrics["loss"] *= share
            results.append(metrics)
        return results

    return in_parts(work, answers, learner.at_once, "answers")


def micro_batch_loss(learner, answers, config):
    """The loss over n answers, differentiable, and a dict of metrics."""
    logprobs, mask = score(learner.model, answers, config.temperature)  # (n, T)
    # With one update per step, pi_old is pi_theta itself, held constant. The ratio is then 1, but
    # its gradient is not 0: it is that of log pi_theta.
    old_logprobs = logprobs.detach()
    if answers[0].old_logprobs is not None:
        # Several updates: what the scorer said before the first. (Not what the sampler said: in
        # bfloat16 the two round differently, which would look like a policy that has moved.)
        old_logprobs = pad_logprobs(answers, "old_logprobs").to(mask.device)
    ref_logprobs = None
    if learner.reference is not None:
        ref_logprobs = pad_logprobs(answers, "ref_logprobs").to(mask.device)
    advantages = torch.tensor([answer.advantage for answer in answers], device=mask.device)  # (n,)
    loss, metrics = grpo_loss(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, epsilon=config.epsilon,
        epsilon_high=config.epsilon_high, beta=config.beta, loss_type=config.loss_type,
        max_completion_length=config.max_completion_length,
        kl_penalty_type=config.kl_penalty_type,
        importance_sampling_level=config.importance_sampling_level,
        use_bias_correction_kl=config.use_bias_correction_kl)
    sampler_logprobs = pad_logprobs(answers, "sampler_logprobs").to(mask.device)
    metrics["sampler_gap"] = masked_mean((sampler_logprobs - old_logprobs).abs(), mask).item()
    metrics["tokens"] = int(mask.sum())
    return loss, metrics


def pad_logprobs(answers, name):
    """The log-probs that n answers have under this name: (n, T), 0 where there is no token."""
    return pad_sequence([getattr(answer, name) for answer in answers], batch_first=True)


def add_to_masters(learner):
    """Add the gradients of the parameters to those of the masters, in float32, and free them."""
    for parameter, master in zip(learner.parameters, learner.masters):
        if parameter.grad is not None:
            so_far = 0 if master.grad is None else master.grad
            master.grad = so_far + parameter.grad.float()
            parameter.grad = None


# ---- 12. Settings ------------------------------------------------------------------------------

def knob(default, text):
    """A setting; `text` is what a program's --help prints."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every setting, mostly under TRL's names. ValueError for impossible values."""

    # What is sampled in a step: prompts_per_step * num_generations answers.
    num_generations: int = knob(8, "G, answers to each question; 4 is few, 16 is comfortable")
    prompts_per_step: int = knob(32, "B, questions in a step")
    max_completion_length: int = knob(512, "the cap: tokens at which an answer is cut off")
    temperature: float = knob(1.0, "of sampling and of scoring; a lower one explores less")
    # The loss, sections 2 to 6.
    beta: float = knob(0.04, "weight of the KL penalty; 0: none, and no reference in memory")
    epsilon: float = knob(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: Optional[float] = knob(None, "how far it may rise above 1; default: epsilon")
    loss_type: str = knob("grpo", "average over the tokens: grpo, dapo or dr_grpo")
    scale_rewards: str = knob("group", "scale of the advantages: group, none, batch or rloo")
    # The relatives, section 15.
    kl_penalty_type: str = knob("low_var_kl", "low_var_kl (that is k3), kl, abs or mse")
    use_bias_correction_kl: bool = knob(False, "multiply the KL by the ratio, as TRL does")
    importance_sampling_level: str = knob("token", "one ratio for each token, or sequence: GSPO")
    mask_truncated_completions: bool = knob(False, "leave cut answers out of the loss")
    dynamic_sampling: int = knob(0, "rounds of replacing groups of equal rewards by fresh ones")
    # The update, section 11.
    steps: int = knob(300, "rounds of sampling and learning")
    num_iterations: int = knob(1, "passes over the answers of a step")
    num_mini_batches: int = knob(1, "updates in each pass")
    learning_rate: float = knob(1e-6, "of AdamW; 1e-6 to 1e-5 for models of a billion weights")
    warmup_steps: int = knob(10, "steps over which the learning rate is reached")
    max_grad_norm: float = knob(1.0, "length to which a longer gradient is cut")
    # The run.
    seed: int = knob(0, "decides the order of the questions and all that is drawn at random")
    save_steps: int = knob(25, "steps between checkpoints; 0: never save one")
    bf16: Optional[bool] = knob(None, "bfloat16 over float32 masters; default: where the GPU can")
    micro_batch_size: int = knob(8, "answers scored at once; halved where memory is too small")

    def __post_init__(self):
        least = {"num_generations": 2, "prompts_per_step": 1, "max_completion_length": 1,
                 "steps": 1, "num_iterations": 1, "num_mini_batches": 1, "micro_batch_size": 1,
                 "temperature": 1e-6, "max_grad_norm": 1e-6}  # and 0 for all others
        for name, value in vars(self).items():
            if hasattr(value, "item"):  # one of numpy's numbers, which a checkpoint may not hold
                value = value.item()
                setattr(self, name, value)
            low = least.get(name, 0)
            # Written so that NaN is refused as well: it is not in any interval.
            if isinstance(value, (int, float)) and not low <= value < math.inf:
                raise ValueError(f"{name} is {value}, and must be a finite number from {low} on")
        if self.num_mini_batches > self.prompts_per_step * self.num_generations:
            raise ValueError(f"num_mini_batches is {self.num_mini_batches}: more than answers")
        # Names are checked by the functions that use them.
        zeros = torch.zeros(1, 2)
        group_advantages(zeros, self.scale_rewards)
        grpo_loss(zeros, zeros, zeros, zeros[:, 0], zeros, loss_type=self.loss_type,
                  max_completion_length=1, kl_penalty_type=self.kl_penalty_type,
                  importance_sampling_level=self.importance_sampling_level)


# ---- 13. The loop ------------------------------------------------------------------------------

def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """Train `model` in place with GRPO. Returns the steps' metrics, a list, resumed ones included.

    `dataset`: a datasets.Dataset or a list of dicts, with a column `prompt` (strings, or chats) and
    any others, which go to the reward function: section 10. Without an `output_dir` nothing is
    saved. With one there is metrics.jsonl, a line a step, and every `save_steps` steps and at the
    end a checkpoint, from which `resume` goes on, given the same data and the untrained model. To
    export the trained one, call model.save_pretrained(folder)."""
    steps = training_steps(model, tokenizer, dataset, reward_fn, config, output_dir, resume)
    history = [metrics for metrics, _ in steps]
    if output_dir:  # the file has the steps from before a resume as well
        lines = Path(output_dir, "metrics.jsonl").read_text().splitlines()
        history = [json.loads(line) for line in lines]
    return history


def training_steps(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """The loop, as a generator that yields (metrics, learner) after each step, so that the caller
    can evaluate in between. What a step leaves on the disk is there before it yields."""
    if resume and not output_dir:
        raise ValueError("resume=True needs the output_dir of the run that is to go on")
    check_prompts(model, tokenizer, dataset, config)
    learner = make_learner(model, config)
    if output_dir:
        open_folder(Path(output_dir), learner, config, resume)
    questions = question_stream(dataset, learner, config.seed)
    done = len(learner.history)
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, unit="step")
    for step in bar:
        # The learning rate goes up linearly over warmup_steps, then down, to 0 after the last step.
        up = step / max(1, config.warmup_steps)
        down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)
        learner.optimizer.param_groups[0]["lr"] = config.learning_rate * min(up, down)
        # All random numbers of a step, a reward function's included, come from the seed and the
        # step's number. So a resumed run draws the same ones (unless memory ran out).
        set_seed((config.seed * 1_000_003 + step) % 2**32)
        metrics = {"step": step}
        metrics |= train_step(learner, tokenizer, questions, reward_fn, config)
        learner.history.append(metrics)
        bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
        if output_dir:
            save_run(Path(output_dir), learner, config)
        yield metrics, learner


def check_prompts(model, tokenizer, dataset, config):
    """Refuse data that do not fit, before the first step and not at the 812th."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    room = context - config.max_completion_length
    if not len(dataset):
        raise ValueError("the data set is empty")
    columns = list(dataset[0])
    for place, example in enumerate(dataset):
        if set(example) != set(columns):
            raise ValueError(f"row {place} has the columns {list(example)}, not {columns}")
        length = len(encode_prompt(tokenizer, example["prompt"]))
        if length > room:
            raise ValueError(f"prompt {place} has {length} tokens, and there is room for {room}: "
                             f"leave it out, or take a smaller max_completion_length")


def make_learner(model, config):
    """Set up precisions, reference and optimizer. Casts the model's parameters in place.

    On a GPU with bfloat16 the model computes in it, which is about twice as fast. But an update at
    learning rate 1e-6 is far smaller than the gap between neighbouring bfloat16 numbers: some 98 %
    of the weights would not move at all. So the optimizer moves float32 copies, the masters, and
    the model gets them, rounded, after each update. Elsewhere (CPU, Apple's GPUs, older cards) it
    computes in float32 by default, and masters and parameters are the same memory."""
    on_gpu = model.device.type == "cuda"
    in_bf16 = config.bf16
    if in_bf16 is None:
        in_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    parameters = []
    masters = []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(f"{name} is {parameter.dtype}: load the model without quantization")
        wide = parameter.detach().float()
        # Only parameters are cast. `model.to(torch.bfloat16)` would round a buffer as well, the
        # frequencies of the rotary positions, and get the angles of all late positions wrong.
        parameter.data = wide.bfloat16() if in_bf16 else wide
        if parameter.requires_grad:
            parameters.append(parameter)
            masters.append(wide)
    reference = None
    if config.beta > 0:
        reference = copy.deepcopy(model).eval().requires_grad_(False)
    # AdamW shrinks all weights by 0.01 * learning_rate in each step unless told otherwise. On a GPU
    # "fused" is the same arithmetic, without a temporary copy of everything.
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.0, fused=on_gpu)
    at_once = {"questions": config.prompts_per_step, "answers": config.micro_batch_size}
    return Learner(model, reference, parameters, masters, optimizer, at_once, history=[])


def question_stream(dataset, learner, seed):
    """Examples for ever, shuffled anew each epoch, none twice before all were seen.

    It begins where learner.questions_seen stands, and the order depends on nothing but the seed."""
    while True:
        epoch, place = divmod(learner.questions_seen, len(dataset))
        # A large prime, so that the epochs of one seed are not those of the next.
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        for i in torch.randperm(len(dataset), generator=shuffle).tolist()[place:]:
            learner.questions_seen += 1
            yield dataset[i]


# ---- 14. A run folder --------------------------------------------------------------------------
# metrics.jsonl, and checkpoint.pt with what a run needs to go on. Each is written beside the old
# one and then renamed, so whatever kills the process, there is one whole file.

MAY_CHANGE = ("save_steps", "micro_batch_size")  # the settings that a resumed run may change


def save_run(folder, learner, config):
    """Write the metrics of all steps and, if it is due, the checkpoint: 12 bytes a weight."""
    lines = [json.dumps(metrics) + "\n" for metrics in learner.history]
    (folder / "metrics.new").write_text("".join(lines))
    (folder / "metrics.new").replace(folder / "metrics.jsonl")
    step = len(learner.history)
    if config.save_steps and (step % config.save_steps == 0 or step == config.steps):
        saved = {"settings": asdict(config), "history": learner.history,
                 "questions_seen": learner.questions_seen, "masters": learner.masters,
                 "optimizer": learner.optimizer.state_dict()}
        torch.save(saved, folder / "checkpoint.new")
        (folder / "checkpoint.new").replace(folder / "checkpoint.pt")


def open_folder(folder, learner, config, resume):
    """Make the folder, or put its checkpoint into `learner`. Where there is no checkpoint yet, the
    run begins again. ValueError for a run that is not to be resumed, or has other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    has_checkpoint = (folder / "checkpoint.pt").exists()
    if not resume and (has_checkpoint or (folder / "metrics.jsonl").exists()):
        raise ValueError(f"{folder} holds a run: resume it, or name another folder")
    if not has_checkpoint:
        return
    saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    for name, value in asdict(config).items():
        if saved["settings"][name] != value and name not in MAY_CHANGE:
            raise ValueError(f"{folder} holds another run: there {name} is "
                             f"{saved['settings'][name]}, here {value}")
    for parameter, master, value in zip(learner.parameters, learner.masters, saved["masters"]):
        master.copy_(value)
        parameter.data.copy_(value)
    learner.optimizer.load_state_dict(saved["optimizer"])
    learner.history = saved["history"]
    learner.questions_seen = saved["questions_seen"]


# ---- 15. The relatives -------------------------------------------------------------------------
# GRPO's relatives share everything above but a line or two. As settings:
#
#   Dr. GRPO   scale_rewards="none", loss_type="dr_grpo", beta=0. A std is small where a question is
#              almost solved, or almost hopeless; to divide by it makes those questions count more
#   RLOO       scale_rewards="rloo", loss_type="dr_grpo", beta=0, one update per step. The log-prob
#              of an answer is the sum of its tokens', and only dr_grpo sums
#   REINFORCE  the same with scale_rewards="none". With one update r = 1, and the gradient of r * A
#              is A times that of log pi: REINFORCE, with the group's mean as its baseline
#   DAPO       epsilon_high=0.28 (a rare token that was good may grow faster), loss_type="dapo",
#              dynamic_sampling > 0, beta=0, and `overlong_penalty` added to the reward
#   GSPO       importance_sampling_level="sequence" (arXiv:2507.18071): all tokens of an answer have
#              the same ratio, the geometric mean of theirs. It stays much closer to 1, so the paper
#              takes epsilon=3e-4, epsilon_high=4e-4. With one update a step it is GRPO. (Some code
#              takes the product: 1 % a token is a factor of 20 after 300 tokens, beyond any clip)
#   TRL        use_bias_correction_kl=True, its default as of 1.16. The answers were drawn from
#              pi_old; multiplying by r makes the mean of the KL a mean over pi_theta's tokens
#
# mask_truncated_completions leaves truncated answers out of the loss, but not out of their group's
# mean nor, except with "dapo", out of the divisor.
#
# Autograd does not see that pi_theta also decides which tokens are drawn, so the mean of an
# estimate's gradient need not be the KL's. Over tokens drawn from pi_theta, k2 (below) has the
# right one: the mean of log(pi_theta/pi_ref) * grad log pi_theta. k3 has another, the mean of
# (1 - pi_ref/pi_theta) * grad log pi_theta: that of KL(pi_ref || pi_theta), which also holds the
# policy back. r * k3 adds k3 * grad log pi_theta to that: at r = 1, k2's gradient again.

def kl_estimate(logprobs, ref_logprobs, kl_penalty_type="low_var_kl"):
    """Estimates of KL(pi_theta || pi_ref) per token: (N, T), (N, T) -> (N, T).

    The names are those of RLinf, a library for such training. With x = log(pi_theta / pi_ref):

        "low_var_kl"  k3, the default: no bias and little variance
        "kl"          k1 = x. No bias, but useless as a loss, as section 4 says
        "abs"         |x|, biased
        "mse"         k2 = x^2 / 2. Its value is biased, its gradient is the right one

    ValueError for any other name."""
    x = logprobs - ref_logprobs  # (N, T)
    if kl_penalty_type == "low_var_kl":
        return k3_kl(logprobs, ref_logprobs)
    if kl_penalty_type == "kl":
        return x
    if kl_penalty_type == "abs":
        return x.abs()
    if kl_penalty_type == "mse":
        return x.square() / 2
    raise ValueError(f"kl_penalty_type is {kl_penalty_type!r}; it is low_var_kl, kl, abs or mse")


def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty (arXiv:2503.14476, equation 13): lengths in tokens (N,) -> (N,).

    It is 0 up to `buffer` tokens before the cap, and from there falls in a line to -1 at the cap.
    (A cliff at the cap would punish one token too many as hard as nonsense.) A reward function adds
    it to its rewards, with torch.tensor([len(ids) for ids in completion_ids]) for the lengths."""
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def replace_equal_groups(learner, tokenizer, questions, reward_fn, groups, config):
    """DAPO's dynamic sampling, once: groups of equal rewards make room for fresh questions."""
    kept = [group for group in groups if group_advantages(rewards_of([group])).any()]
    if len(kept) == len(groups):
        return groups
    examples = [next(questions) for _ in range(len(groups) - len(kept))]
    fresh = sample(learner, tokenizer, examples, config)
    grade(reward_fn, fresh)
    return kept + fresh


if __name__ == "__main__":
    answers = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]
    rewards = torch.tensor([rule_reward(answer, "5") for answer in answers])
    advantages = group_advantages(rewards)
    probabilities = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])  # 1.0: padding
    logprobs = probabilities.log().requires_grad_()
    old_logprobs = torch.full((4, 2), 0.2).log()  # of pi_ref as well
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]]).bool()
    surrogate = clipped_surrogate((logprobs - old_logprobs).exp(), advantages)
    k3 = k3_kl(logprobs, old_logprobs)
    loss, _ = grpo_loss(logprobs, old_logprobs, old_logprobs, advantages, mask, beta=0.04)
    loss.backward()
    torch.set_printoptions(precision=4, sci_mode=False)
    results = {"rewards": rewards, "advantages": advantages, "surrogate": surrogate[mask],
               "k3": k3[mask], "loss": loss, "its gradient": logprobs.grad[mask]}
    for name, tensor in results.items():
        print(f"{name:13}", tensor.detach())
