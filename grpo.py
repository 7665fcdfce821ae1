# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how rewards alone teach a language model.

A language model reads and writes *tokens*, which are words or parts of words. It gives every
possible next token a probability. What it writes after a prompt is a *completion*. Suppose we ask
it four times: "John has 3 apples and buys 2 more. How many apples does he have? Put the result in
\boxed{}." A rule pays 0.5 for a box, and 1 more if its content is right:

    completion 1    3+2 = \boxed{5}      reward 1.5      advantage +1
    completion 2    \boxed{5}            reward 1.5      advantage +1
    completion 3    \boxed{6}            reward 0.5      advantage -1
    completion 4    3-2 = \boxed{1}      reward 0.5      advantage -1

The *advantage* compares a reward with its group. It is (reward - mean) / standard deviation. Here
the mean is 1, and the deviation 0.5. Completions 1 and 2 did better, so we make their tokens more
likely. The others did worse, so we make theirs less likely. This is the idea of Group Relative
Policy Optimization, GRPO (arXiv:2402.03300), the method behind DeepSeek-R1 (arXiv:2501.12948).

The loop below is all of it. A step takes B prompts and samples G completions of each, N = B * G in
all. Set B, G and steps, and bring a model, its tokenizer, a reward function and examples, a list of
dicts with a "prompt". After `from grpo import *` it runs as it stands, if all N fit in memory:

    model.float()                                                      # section 7 says why
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0)
    reference = copy.deepcopy(model).eval()                            # from before training
    for step in range(steps):
        groups = sample_groups(model, tokenizer, random.sample(examples, B), G, 512)
        completions = sum(groups, [])                                  # the N of them in one list
        rewards = grade(reward_fn, completions)                        # (N,)
        A = group_advantages(rewards.view(B, G)).flatten()             # (N,) the advantages
        logprobs, mask = compute_logprobs(model, completions)          # (N, T): T tokens at most
        with torch.no_grad():
            ref_logprobs, _ = compute_logprobs(reference, completions)
        loss, _ = grpo_loss(logprobs, logprobs.detach(), ref_logprobs, A.to(model.device), mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The file takes this loop apart. Sections 1 to 6 are the mathematics, from the reward to the loss.
Sections 7 and 8 show where the tensors come from. `train`, in section 9, is the same loop made
robust: it uses small batches, varies the learning rate, limits the gradient's norm, can repeat the
update, and keeps metrics and checkpoints. Section 10 has GRPO's relatives. In a hurry, read 2 to 6.

To start a run that keeps checkpoints (to continue it, make the same call with resume=True):

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from grpo import GRPOConfig, train
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    model = AutoModelForCausalLM.from_pretrained(name).to("cuda")
    tokenizer = AutoTokenizer.from_pretrained(name)
    data = [{"prompt": [{"role": "user", "content": f"In one short line: what is {a} * 7?"}],
             "right": str(a * 7)} for a in range(11, 99)]
    def reward_fn(completions, right, **columns):  # 1 if the right digits are there; see `grade`
        return [float(r in chat[-1]["content"]) for chat, r in zip(completions, right)]
    train(model, tokenizer, data, reward_fn, GRPOConfig(steps=50), output_dir="runs/mine")

A language model is also called a *policy*, written pi. Three policies matter here:

    pi_theta  the model that we train. theta stands for its weights
    pi_old    the model as it was when it wrote the completions. In the first update that follows,
              this is still pi_theta. They differ only if a step makes several updates
    pi_ref    the reference: a frozen copy from before training. A penalty keeps pi_theta near it

A micro-batch holds n of the N completions. The longest prompt of these has P tokens, and the
longest completion T. The vocabulary has V tokens. "Log-probs" are log-probabilities.

The apples will stay with us. To keep the sums short, pretend that completions 1 and 4 have two
tokens each, but 2 and 3 only one. `python grpo.py` prints their rewards, loss and gradient, and
then trains a tiny policy. `python -m doctest grpo.py` checks every line after >>> against the
output below it."""

import copy
import json
import math
import random
import re
import time
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed


# ---- 1. The reward: a rule -------------------------------------------------------------------
# Where we know the right answer, a rule can give the reward, and we need no network to judge texts.
# The rule must never crash, because a model in training can write anything. A right number without
# a box earns 0, as it may be there by accident. So the prompt must ask for a box: if none is ever
# written, all rewards are 0 and nothing is learned. A model that is paid for boxes may also learn
# to box just anything. This is "reward hacking": more reward without more skill.
def rule_reward(completion, answer):
    r"""1.5 if the last \boxed{...} holds the answer, 0.5 for other content, 0.0 for none.

    The box holds the answer if both are the same text, or numbers that differ by less than 0.01.

    >>> [rule_reward(text, "5") for text in (r"3+2 = \boxed{5}", r"\boxed{5.0}", r"\boxed{6}", "5")]
    [1.5, 1.5, 0.5, 0.0]
    """
    boxed, answer = extract_boxed(completion), str(answer).strip()
    if not boxed:
        return 0.0
    found, wanted = read_number(boxed), read_number(answer)
    # 5.01 - 5 is 0.00999..., so round. From 2**53 on, floats skip numbers: only equal text counts.
    near = found is not None and wanted is not None and round(abs(found - wanted), 9) < 0.01
    return 1.5 if boxed == answer or near and abs(wanted) < 2**53 else 0.5


def extract_boxed(text):
    r"""What is in the last \boxed{...}, up to the matching brace, or None if it has none.

    >>> extract_boxed(r"\boxed{7}? No, it is \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for i, character in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:i].strip()
    return None


def read_number(text):
    r"""The number in `text` as a float, or None.

    >>> [read_number(text) for text in ("1,000", "1{,}000", "$1000", r"1000\%", "1000.", "1000.0")]
    [1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1000.0]
    >>> [read_number(text) for text in ("12,34", "3 4", "1e3", "nan", "72 apples")]
    [None, None, None, None, None]
    """
    text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip()
    # [sign] 1,234,567 or digits [.digits] [full stop], so not .5. float() would accept "nan", too.
    pattern = r"[+-]?\s*([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?\s*\.?"
    if re.fullmatch(pattern, text):
        return float(re.sub(r"[,\s]", "", text).rstrip("."))
    return None


# ---- 2. Advantages: better or worse than the group ---------------------------------------
# Is a reward of 0.5 good? On a hard prompt, yes, but not if all the other completions earn 1.5.
# What counts is the difference from a *baseline*, the reward we can expect for this prompt. The
# older method PPO trains a second network, the *critic*, to predict it. The critic is usually as
# large as the policy. GRPO needs none: the baseline is the mean reward of the group. It also
# divides by the group's standard deviation (std), so that the unit of the reward does not matter.
def group_advantages(rewards, scale_rewards="group"):
    """(R - mean) / std in each group, or with "none" without the std: (B, G) -> (B, G) float32.

    >>> group_advantages(torch.tensor([[1.5, 1.5, 0.5, 0.5],    # the apples: mean 1, std 0.5
    ...                                [0.0, 0.0, 0.0, 1.0],    # one right answer stands out
    ...                                [0.7, 0.7, 0.7, 0.7]]))  # nobody is better
    tensor([[ 1.0000,  1.0000, -1.0000, -1.0000],
            [-0.5774, -0.5774, -0.5774,  1.7321],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    if scale_rewards not in ("group", "none"):
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not 'group' or 'none'")
    if rewards.shape[-1] < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)}: a group needs two or more")
    rewards = rewards.double()
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (B, G)
    std = rewards.std(dim=-1, correction=0, keepdim=True)  # (B, 1), dividing by G and not by G - 1
    # Rewards that differ only by rounding, as 0.1 + 0.2 and 0.3 do, should count as equal. But
    # divided by an equally small std, their difference would become an advantage of about 1. So a
    # std of up to 2e-7 of the largest reward, a little more than float32's rounding, counts as 0.
    equal = std <= 2e-7 * rewards.abs().amax(dim=-1, keepdim=True)  # (B, 1)
    advantages = centered / std if scale_rewards == "group" else centered
    return advantages.masked_fill(equal, 0.0).float()

# If all completions of a group earn the same, because the prompt is too easy or too hard, their
# rewards teach nothing. The completions still count in the mean that is the loss (section 6).


# ---- 3. One update: from a reward to a gradient ------------------------------------------
# We want to raise the expected reward. But a reward is a plain number and drawing a token is
# random, so PyTorch can differentiate neither. What it can differentiate is the probability of the
# token that was drawn. And there are too many completions to sum over all of them. So we need a
# gradient that is made of probabilities, and that is also an average over samples.
#
# Let us first pretend that a completion is a single token, with probability pi(token) and reward R.
# The expected reward is then sum(pi * R) over the V tokens. Write grad for the gradient with
# respect to the weights. Since grad log pi = (grad pi) / pi,
#
#     grad sum(pi * R) = sum(R * grad pi) = sum(pi * R * grad log pi)
#
# and the right side is an average: that of R * grad log pi over tokens drawn from pi. So draw some
# tokens, and average. This method is called REINFORCE. And a real completion? Its log-probability
# is the sum of those of its tokens, each given the tokens before it, so
#
#     R * grad log pi(completion) = sum over t of R * grad log pi(token t)
#
# Every token gets such a term, all with the R of the whole completion.
#
# Why a baseline? Let us subtract a number b from every reward. On average, the gradient changes by
#
#     -b * sum(pi * grad log pi) = -b * sum(grad pi) = -b * grad(sum(pi)) = -b * grad(1) = 0
#
# It does not change at all, as long as b does not depend on the completion. But if b is near the
# expected reward, the factors R - b are small, and the average over samples is less noisy. The mean
# of the *other* rewards of the group is such a b. GRPO's mean also contains the completion's own
# reward: R - mean is (G - 1)/G times this R - b. Dividing by the std is less harmless: very easy
# and very hard prompts have a small std, so they count more.
#
# So each drawn token adds A * grad log pi to the gradient of the first update. (Section 6 says how
# the tokens are averaged.) With one update per step, which is the default of `train`, this is all
# that the rewards do. Section 4 is about further updates with the same completions.


# ---- 4. Several updates: ratio and clip --------------------------------------------------
# Why a ratio? Sampling is slow, so we may want several updates from the same completions. But after
# the first one, pi_theta is no longer pi_old, which drew the tokens. The ratio
# r = pi_theta / pi_old corrects for that: sum(pi_old * r * A) = sum(pi_theta * A). And since
#
#     grad r = (grad pi_theta) / pi_old = r * grad log pi_theta
#
# the gradient of r * A is r * A * grad log pi. In the first update r is 1, which gives section 3.
# (Strictly, a completion needs the product of all its ratios. Over 300 tokens this gets huge or
# tiny: 1.01^300 is 19.8. So each token gets its own ratio alone, which is nearly right while
# pi_theta is near pi_old.)
#
# Why a clip? Once pi_theta has changed a lot, what pi_old wrote says little about it. So we
# maximise min(r * A, clip(r) * A), where clip(r) is r kept between 0.8 and 1.2. When r has moved by
# more than 0.2 in the direction that A asks for, the second term is smaller. It is a constant, and
# has no gradient. In all other cases the min is r * A, and its gradient can bring the token back:
#
#   min, A = +1                                min, A = -1
#      1.2 |             ________ enough         -0.8 |______  enough
#          |           /                              |       \
#      1.0 |         /                           -1.0 |         \
#          |       /                                  |           \
#      0.8 |     /                               -1.2 |             \
#          +-----+---+---+------ r                    +-----+---+---+------ r
#               0.8  1  1.2                                0.8  1  1.2
def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token: r (n, T), A (n,) -> (n, T).

    It is equation 7 of PPO (arXiv:1707.06347). We maximise it in place of the expected reward.

    >>> r = torch.tensor([[1.5, 1.0, 0.5]])
    >>> clipped_surrogate(r, torch.tensor([1.0])), clipped_surrogate(r, torch.tensor([-1.0]))
    (tensor([[1.2000, 1.0000, 0.5000]]), tensor([[-1.5000, -1.0000, -0.8000]]))
    """
    A = advantages.unsqueeze(1)  # (n, 1): the same for every token of a completion
    high = epsilon if epsilon_high is None else epsilon_high
    return torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + high) * A)

# The apples after some updates: let us say that pi_old gave each token 0.2, and that pi_theta gives
# the probabilities below. (All tokens share weights, so some can also move the wrong way.)
#
#     completion   1            2      3      4
#     pi_theta     0.3, 0.2     0.1    0.3    0.1, 0.2
#     ratio        1.5, 1.0     0.5    1.5    0.5, 1.0
#
#     A    r             min(r A, clip(r) A)        gradient with respect to log pi
#     +1   1.5 (no. 1)   min( 1.5,  1.2) =  1.2      0    good, and already more likely
#     +1   0.5 (no. 2)   min( 0.5,  0.8) =  0.5      0.5  good: bring it back up
#     -1   1.5 (no. 3)   min(-1.5, -1.2) = -1.5     -1.5  bad: push it down
#     -1   0.5 (no. 4)   min(-0.5, -0.8) = -0.8      0    bad, and already less likely
#     any  1.0           A                           A    every token in a first update
#
# A common mistake is to use max instead of min. Then row 1 is never clipped, rows 2 and 3 are
# constants that bring nothing back, and row 4 is -0.5 = r * A: its token is pushed ever lower.


# ---- 5. The KL penalty: stay near the reference ------------------------------------------
# A policy trained on nothing but rewards can forget how to write. How far has it gone from pi_ref?
# The Kullback-Leibler divergence measures this, as an average over tokens drawn from pi_theta:
#
#     KL(pi_theta || pi_ref) = average of log(pi_theta / pi_ref)
#
# It is 0 if the two policies agree and positive if they do not. To compute it exactly, we would
# have to keep the probabilities of all V tokens at each position. The estimate
#
#     k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1
#
# needs only the token that was drawn. Let us average its parts:
#
#     average of -log(pi_ref/pi_theta) = average of log(pi_theta/pi_ref) = KL(pi_theta || pi_ref)
#     average of  pi_ref/pi_theta - 1  = sum(pi_theta * pi_ref/pi_theta) - 1 = sum(pi_ref) - 1 = 0
#
# So k3 is, on average, the KL.
def k3_kl(logprobs, ref_logprobs):
    """pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (n, T), (n, T) -> (n, T).

    It is the third estimate in joschu.net/blog/kl-approx.html, hence the name. With x for
    log(pi_ref/pi_theta), it is e^x - 1 - x. It is never negative, since e^x is at least 1 + x.

    >>> k3_kl(torch.tensor([0.1, 0.2, 0.3]).log(), torch.tensor(0.2).log())  # the apples
    tensor([0.3069, 0.0000, 0.0721])
    """
    # e^x overflows float32 at x = 89. So x stops at 50, well below. From there the gradient is 0.
    x = (ref_logprobs - logprobs).clamp(max=50)  # (n, T)
    return torch.expm1(x) - x  # expm1(x) is e^x - 1, but precise near 0

# Why not use -log(pi_ref/pi_theta) alone? Because it is noisier. Say that log(pi_ref/pi_theta) is
# +0.1 for 47.5 % of the tokens and -0.1 for the others (so that pi_ref/pi_theta is 1 on average).
# The KL is 0.475 * -0.1 + 0.525 * 0.1 = 0.005. -log alone says -0.1 or +0.1, but k3 says about
# 0.005 each time. (Do not turn the ratio upside down: the average of pi_theta/pi_ref is not 1.)
#
# The gradient of k3 with respect to log pi_theta is 1 - e^x = 1 - pi_ref/pi_theta. For the apples,
# where pi_theta is 0.1, 0.2 or 0.3 and pi_ref always 0.2, this is -1, 0 and 1/3. The loss contains
# k3 times a small factor, beta. To lower k3 is to pull a token back up if it is less likely than
# under pi_ref, and to pull it back down if it is more likely.


# ---- 6. The loss: one number, and padding is not in it -----------------------------------
# Now we can put it all together. Let o_1 to o_G be the completions of a prompt q. Completion o_i
# has |o_i| tokens. Its token number t is o_it, and the tokens before that one are o_i,<t. A bar
# between two things means "given". On average over the prompts, GRPO maximises
#
#     J = mean over i of  1/|o_i| * sum over t of
#             [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]
#
#     A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                                  section 2
#     r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)                   section 4
#     k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, of the same token           section 5
#
# with eps = 0.2 and beta = 0.04. Now the means. Completions differ in length, but the rows of a
# tensor may not. So the short ones get padding, and a mask marks the real positions. Padding can
# hold anything, even NaN. As NaN * 0 is still NaN, we do not multiply by the mask, but use `where`.
def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is True (or 1), over `dim` or over all, or 0 if none is.

    >>> masked_mean(torch.tensor([2.0, 4.0, torch.nan]), torch.tensor([True, True, False]))
    tensor(3.)
    """
    mask = mask.bool().expand_as(values)
    return torch.where(mask, values, 0.0).sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)

# How we average decides how much a long completion counts.
def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """One number for `per_token` (n, T), of which only the positions in `mask` (n, T) are real.

        "grpo"     the mean over completions of the mean over their tokens: equation J. Section 3
                   leads to a plain sum, so the division by |o_i| is GRPO's own. With it, a long
                   wrong answer costs less per token than a short one, so wrong answers may grow
        "dapo"     the mean over all tokens: each counts the same (arXiv:2503.14476: in each group)
        "dr_grpo"  the sum over all tokens, divided by n * max_completion_length: a constant that
                   does not depend on the lengths (arXiv:2503.20783)"""
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo" and max_completion_length:
        total = torch.where(mask.bool(), per_token, 0.0).sum()
        return total / (len(mask) * max_completion_length)
    raise ValueError(f"loss_type {loss_type!r}: grpo, dapo, or dr_grpo with max_completion_length")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None):
    """-J over n completions. Returns the loss, and a dict of metrics.

    Log-probs of pi_theta, pi_old and pi_ref, and the mask: (n, T) each. Advantages: (n,). At
    beta=0, `ref_logprobs` may be None.

    >>> pi = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])  # 1.0: padding
    >>> old = torch.full((4, 2), 0.2).log()
    >>> loss, metrics = grpo_loss(pi.log(), old, old, torch.tensor([1.0, 1, -1, -1]), pi < 1)
    >>> round(loss.item(), 4)
    0.2057
    """
    if ref_logprobs is None:
        if beta > 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed")
        ref_logprobs = logprobs  # so k3 is 0
    # torch would silently broadcast tensors of the wrong shape.
    shapes = [tuple(x.shape) for x in (logprobs, old_logprobs, ref_logprobs, mask)]
    if logprobs.dim() != 2 or len(set(shapes)) > 1 or advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"want (n, T), advantages (n,); got {shapes}, {tuple(advantages.shape)}")
    # detach: pi_old and pi_ref are constants. The clamp keeps the ratio finite. It also keeps NaN
    # in padding out of the gradient: where its input is NaN, the gradient of a clamp is 0.
    ratio = (logprobs - old_logprobs.detach()).clamp(max=50).exp()  # (n, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (n, T)
    kl = k3_kl(logprobs, ref_logprobs.detach())  # (n, T)
    loss = -average(surrogate - beta * kl, mask, loss_type, max_completion_length)
    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (n, T) where the min took the clip
    return loss, {"loss": loss.item(), "kl": masked_mean(kl, mask).item(),
                  "clip_fraction": masked_mean(clipped.float(), mask).item()}

# The loss of the apples, which is -J, with beta 0.04:
#
#     completion                 1            2        3        4              sum
#     advantage                  +1          +1       -1       -1
#     surrogate, per token       1.2, 1.0     0.5     -1.5     -0.8, -1.0     -0.6
#                mean of each    1.1          0.5     -1.5     -0.9           -0.8
#     k3, per token              0.0721, 0    0.3069   0.0721   0.3069, 0      0.7580
#                mean of each    0.0361       0.3069   0.0721   0.1534         0.5685
#
#     "grpo"     (0.8 + 0.04 * 0.5685) / 4 completions                       = 0.2057
#     "dapo"     (0.6 + 0.04 * 0.7580) / 6 tokens                            = 0.1051
#     "dr_grpo"  (0.6 + 0.04 * 0.7580) / (4 * a max_completion_length of 4)  = 0.0394
#
# Two gradients of the "grpo" loss, with respect to log pi:
#   - The token of completion 2. The surrogate has 0.5 (section 4) and k3 has -1 (section 5). The
#     loss takes the first negated, and the second times beta. Both are divided by the 4
#     completions: (-0.5 - 0.04) / 4 = -0.135. Descent makes the token more likely, as it should.
#   - The first token of completion 1. The clip leaves only the KL: beta * 1/3, divided by 2 tokens
#     and 4 completions, is 0.0017. Descent makes the token less likely.
#
# Why does the loss start at 0? At the first update of a run, every ratio is 1 and every k3 is 0, so
# the "grpo" loss is minus the mean of the advantages, and in each group these sum to 0. Its
# gradient is not 0: with respect to log pi of a token, it is -A / (|o_i| * N). With one update per
# step, the ratios stay 1, so the *value* of this loss is just the KL penalty, though its gradient
# still carries the rewards. So do not watch the loss. Watch the reward.


# ---- 7. Log-probs: where the tensors come from -------------------------------------------
@dataclass
class Completion:
    """What the model wrote after a prompt, and what it earned."""
    example: dict  # the row of the data set
    prompt_ids: list  # the tokens of the prompt
    # The loss is about exactly these ids. If we decoded them and encoded the text again, we might
    # get others, which were never sampled: a text can be cut into tokens in several ways.
    ids: list = field(default_factory=list)  # with the end token, if it was drawn
    # Their log-probs when they were drawn, for metrics only. Those computed below differ a bit.
    sampler_logprobs: list = field(default_factory=list)
    text: str = ""
    truncated: bool = False  # cut off at max_completion_length: it has no end token
    reward: float = 0.0
    advantage: float = 0.0


def compute_logprobs(model, completions, temperature=1.0):
    """Log-probs (n, T) of the tokens of n completions, and the bool mask (n, T) of real tokens."""
    prompt_ids, prompt_mask = pad_rows([c.prompt_ids for c in completions], "left", model.device)
    ids, mask = pad_rows([c.ids for c in completions], "right", model.device)  # (n, T)
    with autocast(model):
        logprobs = token_logprobs(model, torch.cat([prompt_ids, ids], dim=1),  # (n, P + T)
                                  torch.cat([prompt_mask, mask], dim=1), ids.shape[1], temperature)
    return logprobs, mask


def pad_rows(rows, side, device):
    """n lists of numbers as a tensor, padded with 0, and its bool mask: (n, longest) each."""
    # The mask comes from the lengths. It is tempting to use ids != pad_token_id instead. But if the
    # padding token is the end token, this hides the end tokens, and the model never learns to end.
    rows = [torch.tensor(row) for row in rows]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    return [pad_sequence(x, batch_first=True, padding_side=side).to(device) for x in (rows, masks)]

# The model reads prompts and completions, all tokens at once. Prompts are padded on the left and
# completions on the right, so that all completions begin in the same column:
#
#     column             0  1  2    3  4  5
#     row 0  ids         a  b  c    x  y  END   prompt a b c, completion x y END
#     row 1  ids         .  .  d    z END  .    prompt d, completion z END; dots are padding
#     row 1  mask        0  0  1    1  1  0     1 at real tokens
#     row 1  positions   0  0  0    1  2  2     counted over real tokens; unused at dots
#
# The logits, which are the model's scores of all V tokens, predict the token in the *next* column:
# those in columns 2 to 4 predict the tokens in 3 to 5.
def token_logprobs(model, ids, mask, T, temperature=1.0):
    """log pi of the last T tokens: ids and mask (n, P + T) -> (n, T), float32.

    Use the temperature of sampling: at any other one, pi is a different policy."""
    out = forward(model, ids, mask, use_cache=False, logits_to_keep=T + 1)
    # Some models give all logits, and not only the last T + 1, so we count from the end. A
    # log_softmax in bfloat16 would add errors of hundredths, so we make the logits float32 first.
    logits = out.logits[:, -T - 1 : -1]  # (n, T, V)
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # (n, T, V)
    return logprobs.gather(-1, ids[:, -T:].unsqueeze(-1)).squeeze(-1)  # at each id


def forward(model, ids, mask, **more):
    """Run the model. `ids` has all columns of `mask`, or only the last ones (section 8)."""
    # The positions 0, 1, 2 and so on skip the padding.
    mask = mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, **more)

# Copy this with `forward`: with masks, cuDNN's attention has given NaN gradients (pytorch#196678).
torch.backends.cuda.enable_cudnn_sdp(False)


def autocast(model):
    """In `with autocast(model):`, the model multiplies matrices in bfloat16, if CUDA can."""
    # GPUs multiply bfloat16, a number format of 16 bits, several times as fast as float32. But the
    # weights must stay in float32: an optimizer step moves a weight by about 0.000001. Near 0.02,
    # bfloat16 numbers are 0.00012 apart, so the step would be rounded away. The `with` works
    # on bfloat16 copies of the weights. (On a CPU with bfloat16 units, call `train` inside
    # `with torch.autocast("cpu", torch.bfloat16):`. The next line drops its outdated copies.)
    torch.clear_autocast_cache()
    gpu = model.device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16,
                          enabled=gpu and torch.cuda.is_bf16_supported(including_emulation=False))


# ---- 8. Sampling: exactly from the policy ------------------------------------------------
# The model reads the prompt, and we draw a token from the softmax of its logits. The model reads
# this token, too, and we draw the next one, and so on, up to an end token.
#
# In each layer, a token leaves two vectors, a key and a value. They are all that later tokens see
# of it, and they never change. So the *cache* keeps them, in tensors with a row per completion, and
# after the prompts each forward pass reads only one new token per row.
# `cache.reorder_cache(rows)` replaces each of these tensors x with x[rows]. This can copy rows: a
# prompt is read once, and its row copied G times. And it can drop rows: a completion that has ended
# leaves the batch. For one prompt, and G = 3 completions a, b and c of up to three tokens:
#
#     the model reads    then keeps   live       drawn tokens
#     the prompt         0, 0, 0      a, b, c    "3",   "5",  "3"
#     3 tokens           all          a, b, c    "+2",  END,  "-2"
#     3 tokens           0, 2         a, c       END,         END     (reads b's END, then drops b)
#
# transformers' `model.generate` does all this too, but it obeys settings that are stored with the
# model. Qwen2.5-0.5B-Instruct has temperature 0.7, top_k 20 (draw only from the 20 most likely
# tokens), top_p 0.8 (only from the most likely that make up 80 %) and a repetition penalty of 1.1.
# If one of these stays on, we draw tokens from one distribution and compute the loss of another.
# `sample_groups` reads none of them. What can still differ between sampling and section 7 is the
# temperature, the mask, the positions or the cache. So `train` compares both log-probs of the same
# tokens, and logs the mean absolute difference as `sampler_gap`: about 1e-6 in float32, and less
# than 0.02 in bfloat16. (If you add a top_k to the line that draws, this cannot show it.)
def sample_groups(model, tokenizer, examples, num_generations, max_completion_length,
                  temperature=1.0):
    """G = `num_generations` completions for each of B examples: B lists of G `Completion`.

    Examples are dicts with a "prompt", a string or a chat. Temperature 0 takes the likeliest token.
    Leaves the model in eval mode, for the update, too: dropout would make it another policy. (This
    also turns off gradient checkpointing.)"""
    model.eval()
    end_ids = end_token_ids(model, tokenizer)
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    ids, mask = pad_rows(prompts, "left", model.device)  # (B, P); all end in the last column
    keep = [i for i in range(len(prompts)) for _ in range(num_generations)]  # 0, 0, 0, 1, 1, 1
    completions = live = [Completion(examples[i], prompts[i]) for i in keep]
    cache = {}
    with torch.no_grad(), autocast(model):
        for _ in range(max_completion_length):
            out = forward(model, ids, mask, use_cache=True, logits_to_keep=1, **cache)
            name = "cache" if "cache" in out else "past_key_values"  # before transformers 5.24
            if out.get(name) is None:
                raise ValueError(f"{type(model).__name__} has no cache, which sampling needs")
            cache = {name: out[name]}
            cache[name].get_seq_length()  # raises for pure Mamba, whose state takes in padding
            logits = out.logits[:, -1]  # (n, V)
            if len(keep) != len(logits):  # after the prompts, and when completions have ended
                index = torch.tensor(keep, device=model.device)
                cache[name].reorder_cache(index)
                logits, mask = logits[index], mask[index]
            # We cannot divide by 0, so at temperature 0 the log-probs are those at temperature 1.
            logprobs = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)  # (n, V)
            ids = logprobs.exp().multinomial(1) if temperature else logprobs.argmax(1, keepdim=True)
            drawn = logprobs.gather(1, ids)  # (n, 1), as the ids are
            for completion, [token], [logprob] in zip(live, ids.tolist(), drawn.tolist()):
                completion.ids.append(token)
                completion.sampler_logprobs.append(logprob)
            # The rows to keep, once the model has read the tokens that were just drawn:
            keep = [i for i, completion in enumerate(live) if completion.ids[-1] not in end_ids]
            live = [live[i] for i in keep]
            if not live:
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)  # one more column
    for completion in completions:
        completion.truncated = completion.ids[-1] not in end_ids
        completion.text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return chunks(completions, num_generations)


def encode_prompt(tokenizer, prompt):
    """The token ids of a prompt: a plain string, or a chat, which gets the model's template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        begun = prompt[-1]["role"] == "assistant"  # then the completion continues this message
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=not begun,
                                            continue_final_message=begun, return_dict=False)
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens, so nothing can follow it")
    return ids


def end_token_ids(model, tokenizer):
    """All token ids that end a completion."""
    # Qwen's chat models have two, and each source below may list only one. A sampler that misses an
    # end token keeps writing past it, and the model is then trained on what follows.
    found = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)  # an id, a list of ids, or None
        found.update([ids] if isinstance(ids, int) else (ids or []))
    if not found:
        raise ValueError("model and tokenizer have no eos_token_id, so no completion could end")
    return found


def chunks(items, size):
    """A list cut into lists of `size` items. The last one may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]


# ---- 9. The loop, made robust ------------------------------------------------------------
def grade(reward_fn, completions):
    """Call the reward function, store the rewards in the completions, and return them, (N,).

    As in TRL, Hugging Face's library, it gets `prompts`, `completions`, `completion_ids` and the
    other columns of your data, each a list with a value per completion. A completion is a string
    or, if its prompt is a chat, a chat of one message. With string prompts and a column `answer`:

        def reward_fn(completions, answer, **columns):
            return [rule_reward(text, right) for text, right in zip(completions, answer)]

    With chats, the text is completion[-1]["content"]."""
    # Copies, since a reward function may change what it is given.
    columns = {name: [copy.deepcopy(c.example[name]) for c in completions]
               for name in completions[0].example}
    texts = [c.text if isinstance(c.example["prompt"], str) else
             [{"role": "assistant", "content": c.text}] for c in completions]
    prompts = columns.pop("prompt")
    rewards = list(reward_fn(prompts=prompts, completions=texts,
                             completion_ids=[list(c.ids) for c in completions], **columns))
    if len(rewards) != len(completions):
        raise ValueError(f"{len(rewards)} rewards for {len(completions)} completions")
    for completion, reward in zip(completions, rewards):
        completion.reward = math.nan if reward is None else float(reward)
        if not math.isfinite(completion.reward):
            raise ValueError(f"the reward of {completion.text!r} is {reward}")
    return torch.tensor([c.reward for c in completions], dtype=torch.float64)


@dataclass
class GRPOConfig:
    """The settings of `train`: mostly TRL's names, but not its defaults."""
    num_generations: int = 8  # G, completions per prompt; 4 is few, 16 is comfortable
    prompts_per_step: int = 32  # B, prompts per step
    sampling_batch_size: int = 256  # completions sampled at once, in whole groups
    max_completion_length: int = 512  # tokens at which a completion is cut off
    temperature: float = 1.0  # divides the logits; lower: less varied
    scale_rewards: str = "group"  # group, or none: do not divide by the std
    beta: float = 0.04  # factor of the KL penalty; 0: none, and no pi_ref in memory
    epsilon: float = 0.2  # the clip's lower limit is 1 - epsilon
    epsilon_high: float | None = None  # the upper is 1 + epsilon_high, or if None, 1 + epsilon
    loss_type: str = "grpo"  # how to average over tokens: grpo, dapo or dr_grpo
    num_iterations: int = 1  # updates per step, each with all completions of the step
    micro_batch_size: int = 4  # completions in one forward and backward pass
    learning_rate: float = 1e-6  # the peak; 1e-5 was too large for half a billion weights
    warmup_steps: int = 10  # steps in which the rate rises to the peak; then it falls towards 0
    max_grad_norm: float = 1.0  # a gradient with a larger norm is scaled to this norm
    steps: int = 300  # steps of sampling and learning
    save_steps: int = 20  # steps between checkpoints
    seed: int = 0  # decides which prompts and tokens are drawn

    def __post_init__(self):  # every field is a choice or a number: refuse what it cannot be
        choices = {"loss_type": ("grpo", "dapo", "dr_grpo"), "scale_rewards": ("group", "none")}
        least = {"num_generations": 2, "warmup_steps": 0, "seed": 0, "learning_rate": 0, "beta": 0,
                 "epsilon": 0, "epsilon_high": 0, "temperature": 1e-6, "max_grad_norm": 1e-6}
        for name, value in vars(self).items():
            default, low = getattr(type(self), name), least.get(name, 1)
            if name in choices:
                if value not in choices[name]:
                    raise ValueError(f"{name} is {value!r}, not one of {choices[name]}")
            elif value is not None or default is not None:  # None only where it is the default
                kind = int if isinstance(default, int) else float
                real = isinstance(value, Real) and low <= value < math.inf
                if not real or kind(value) != value:
                    whole = "whole " if kind is int else ""
                    raise ValueError(f"{name} is {value!r}, not a {whole}number of at least {low}")
                setattr(self, name, kind(value))  # a plain one: torch.load refuses NumPy's

# Out of memory? For half a billion weights, training needs 11 GB, 22 bytes for each weight:
#
#     the weight                                            4
#     its gradient                                          4
#     AdamW's averages of the gradient and of its square    8
#     a bfloat16 copy, on a GPU                             2
#     pi_ref                                                4    none with beta=0
#
# A micro-batch adds what the layers keep for the gradient, and three float32 tensors of n * T * V
# numbers: 3.7 GB with 4 completions of 512 tokens and Qwen's V = 151,936. A lower micro_batch_size
# needs less, for the same gradient. If sampling needs too much, lower sampling_batch_size.
def train(model, tokenizer, dataset, reward_fn, config, *, after_step=None, output_dir=None,
          resume=False):
    """Train `model` in place. Returns the metrics of all steps.

    `dataset` is a datasets.Dataset or a list of dicts. Each row has a `prompt` (a string or a chat,
    which is a list of messages) and what `reward_fn` needs: see `grade`. `after_step(metrics,
    groups)` may look at the completions, add to the metrics, or test the model on other prompts.
    `output_dir` gets metrics.jsonl, with a line per step, and checkpoint.pt after step 1, every
    `save_steps` steps and at the end. The same call with resume=True continues from it, with the
    same seeds and prompts. On a CPU, the weights end bit for bit the same.

    Side effects: the weights become float32, the model is left in eval mode, each step sets the
    seeds of Python, NumPy and torch. (Importing grpo has switched off cuDNN's attention.)"""
    if len(dataset) < config.prompts_per_step:
        raise ValueError(f"prompts_per_step is {config.prompts_per_step}, rows {len(dataset)}")
    model.float()  # section 7 says why
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta > 0 else None
    # AdamW's default weight_decay would shrink the weights. fused=True is its fast form for GPUs.
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0,
                                  fused=model.device.type == "cuda")
    optimizer.zero_grad()  # an earlier run, stopped in a notebook, may have left gradients
    state = {"model": model, "optimizer": optimizer}
    if reference is not None:  # so that a resumed run has the same pi_ref, whatever its model
        state["reference"] = reference
    history = open_run(output_dir, resume, config, state)
    bar, shown = tqdm(range(len(history) + 1, config.steps + 1)), {}
    for step in bar:
        # Each step has its own seed, so that a resumed run draws what it would have drawn anyway.
        set_seed((config.seed * 1_000_003 + step) % 2**32)  # far from the seeds of other runs
        # The learning rate rises to its peak at step `warmup_steps`. Then it falls towards 0.
        up = step / max(1, config.warmup_steps)
        down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)
        optimizer.param_groups[0]["lr"] = rate = config.learning_rate * min(up, down)
        started = time.perf_counter()

        # Draw B prompts from all the data (there are no epochs), and sample G completions for each.
        examples = [dataset[i] for i in random.sample(range(len(dataset)), config.prompts_per_step)]
        groups = []
        for some in chunks(examples, max(1, config.sampling_batch_size // config.num_generations)):
            groups += sample_groups(model, tokenizer, some, config.num_generations,
                                    config.max_completion_length, config.temperature)
        completions = sum(groups, [])  # the groups joined: a list of N
        all_tokens = sum(len(c.ids) for c in completions)
        sampled = time.perf_counter()

        # Reward them, and compare each with its group.
        rewards = grade(reward_fn, completions).view(len(groups), -1)  # (B, G)
        advantages = group_advantages(rewards, config.scale_rewards)  # (B, G)
        for completion, advantage in zip(completions, advantages.flatten().tolist()):
            completion.advantage = advantage
        graded = time.perf_counter()

        # Cut them into micro-batches of similar lengths, for little padding. The longest come first
        # so that a lack of memory mostly shows at once. Without a KL, an advantage of 0 gives no
        # gradient, so we leave those completions out.
        useful = [c for c in completions if c.advantage != 0 or config.beta > 0]
        useful.sort(key=lambda completion: len(completion.ids), reverse=True)
        batches = chunks(useful, config.micro_batch_size)

        # Update the weights. In the first update pi_theta is still pi_old, so keep its log-probs.
        old_logprobs, ref_logprobs = [None] * len(batches), [None] * len(batches)
        sums = dict.fromkeys(("tokens", "loss", "kl", "clip_fraction", "sampler_gap", "norm"), 0.0)
        for update in range(config.num_iterations):
            for i, batch in enumerate(batches):
                if update == 0 and config.beta > 0:
                    with torch.no_grad():
                        ref_logprobs[i], _ = compute_logprobs(reference, batch, config.temperature)
                logprobs, mask = compute_logprobs(model, batch, config.temperature)  # (n, T)
                if update == 0:
                    old_logprobs[i] = logprobs.detach()
                loss, part = grpo_loss(
                    logprobs, old_logprobs[i], ref_logprobs[i],
                    logprobs.new_tensor([c.advantage for c in batch]), mask,
                    epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta,
                    loss_type=config.loss_type, max_completion_length=config.max_completion_length)
                # The loss of a step is a mean over all N completions ("dapo": over all tokens), and
                # a micro-batch counts by its share of them. In the same way, the mean of 4 numbers
                # is 3/4 of the mean of the first three plus 1/4 of the last.
                batch_tokens = mask.sum().item()
                share = len(batch) / len(completions)
                if config.loss_type == "dapo":
                    share = batch_tokens / all_tokens
                (loss * share).backward()  # adds to the gradients
                drawn = torch.tensor([x for c in batch for x in c.sampler_logprobs])  # row by row
                sums["tokens"] += batch_tokens
                sums["loss"] += part["loss"] * share
                sums["kl"] += part["kl"] * batch_tokens
                sums["clip_fraction"] += part["clip_fraction"] * batch_tokens
                sums["sampler_gap"] += (drawn - old_logprobs[i][mask].cpu()).abs().sum().item()
            # This clip has nothing to do with section 4's. It shortens a gradient that is too long.
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
            if math.isfinite(norm):
                optimizer.step()
                sums["norm"] += norm
            else:
                tqdm.write(f"step {step}: no update, since the gradient's norm is {norm}")
            optimizer.zero_grad()

        trained = max(1, sums["tokens"])  # tokens, in all updates
        metrics = {
            "step": step,
            "reward_mean": rewards.mean().item(),  # should rise
            # Groups of equal rewards, which teach nothing. Near 1? Change the prompts.
            "zero_variance_fraction": (advantages == 0).all(dim=1).float().mean().item(),
            # Minus the mean log-prob of the drawn tokens: how unsure the policy is. Near 0 at a low
            # reward? It has *collapsed*, to one text again and again: lower the learning rate.
            "entropy": -sum(sum(c.sampler_logprobs) for c in completions) / all_tokens,
            "completion_length": all_tokens / len(completions),
            # Many are cut off? Raise max_completion_length.
            "truncated_fraction": sum(c.truncated for c in completions) / len(completions),
            "loss": sums["loss"] / config.num_iterations,  # do not watch it: section 6
            # Mean k3 per token (0, not measured, if beta=0). Above 1? Lower the learning rate.
            "kl": sums["kl"] / trained,
            "clip_fraction": sums["clip_fraction"] / trained,  # tokens that the clip has stopped
            # Above 1e-4 in float32, or 0.02 in bfloat16? Section 8 says where to look.
            "sampler_gap": sums["sampler_gap"] / trained,
            "grad_norm": sums["norm"] / config.num_iterations,
            "learning_rate": rate,
            "sample_seconds": sampled - started, "reward_seconds": graded - sampled,
            "update_seconds": time.perf_counter() - graded}
        history.append(metrics)
        if after_step:
            after_step(metrics, groups)
        # `after_step` may have tested the model, and added `accuracy`.
        shown |= {x: metrics[x] for x in ("reward_mean", "accuracy") if x in metrics}
        bar.set_postfix(shown)
        if output_dir:
            due = step % config.save_steps == 0 or step in (1, config.steps)
            save_run(output_dir, config, history, state if due else None)
    return history


def save_run(folder, config, history, state):
    """Write metrics.jsonl and, given a state, checkpoint.pt: 16 bytes a weight, 12 with beta=0."""
    # default=float: `after_step` may add a scalar of NumPy or torch, which JSON does not know.
    lines = [json.dumps(metrics, default=float) + "\n" for metrics in history]
    Path(folder, "metrics.jsonl").write_text("".join(lines))
    if state:
        new = Path(folder, "checkpoint.new")
        torch.save({"config": vars(config), "history": lines,
                    **{name: x.state_dict() for name, x in state.items()}}, new)
        new.replace(Path(folder, "checkpoint.pt"))  # so it is always whole


# Settings that may differ on resume. (With more steps, the learning rate rises again.)
MAY_CHANGE = ("steps", "save_steps", "micro_batch_size", "sampling_batch_size")


def open_run(folder, resume, config, state):
    """Make the folder or, to resume, load its checkpoint. Returns the metrics of the steps done."""
    if not folder:
        if resume:
            raise ValueError("resume=True needs the output_dir of the run to continue")
        return []
    path = Path(folder, "checkpoint.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not resume and (path.exists() or path.with_name("metrics.jsonl").exists()):
        raise ValueError(f"{folder} holds a run: resume it, or name another folder")
    if not path.exists():
        if resume:
            tqdm.write(f"no checkpoint in {folder}: starting at step 1 with the model as it is")
        return []
    saved = torch.load(path, map_location="cpu")
    for name, there in saved["config"].items():
        here = getattr(config, name, None)
        if here != there and name not in MAY_CHANGE:
            raise ValueError(f"{folder} holds another run: {name} is {there} there, {here} here")
    for name, x in state.items():
        x.load_state_dict(saved[name])
    return [json.loads(line) for line in saved["history"]]


# ---- 10. The relatives, as settings and as lines to paste --------------------------------
#                       scale_rewards  loss_type  beta   num_iterations  epsilon, epsilon_high
#     GRPO              group          grpo       0.04   1               0.2
#     REINFORCE, RLOO   none           dr_grpo    0      1               any: nothing is clipped
#     Dr. GRPO          none           dr_grpo    0      1 or more       0.2
#     DAPO              group          dapo       0      2 or more *     0.2, 0.28
#     GSPO, see below   group          grpo       0      2 or more *     3e-4, 4e-4
#
# * Their papers cut the N completions into mini-batches, 16 and 4, and make one update with each.
#   Here, each update is made with all N again.
#
# RLOO (REINFORCE Leave One Out) takes the mean of the *other* rewards as baseline, so advantages
# are G / (G - 1) times as large. Below `centered = ...`, add
#
#     centered = centered * rewards.shape[-1] / (rewards.shape[-1] - 1)
#
# DAPO's higher limit lets an unlikely token of 0.01 rise to 0.0128, instead of 0.012. It also
# draws new prompts in place of groups of equal rewards, which is left out here, and pays up to
# 1 less for completions that end near the limit, say within 64 tokens of it. Add to the reward
#
#     def overlong_penalty(ids, limit):  # one of completion_ids; max_completion_length
#         return max(-1.0, min(0.0, (limit - 64 - len(ids)) / 64))
#
# GSPO has one ratio per completion, the geometric mean of its tokens' ratios (arXiv:2507.18071). In
# `grpo_loss`, the line `ratio = ...` becomes
#
#     log_ratio = masked_mean(logprobs - old_logprobs.detach(), mask, dim=1)  # (n,)
#     ratio = log_ratio.clamp(max=50).exp().unsqueeze(1).expand_as(logprobs)  # (n, T)
#
# TRL's KL. k3 has the right value on average, but its gradient is only nearly the KL's, and section
# 5 assumes that pi_theta drew the tokens. To mend both, TRL 1.16 multiplies k3 by the ratio of each
# token (so this does not go with GSPO). The line `loss = ...` becomes
#
#     loss = -average(surrogate - beta * ratio * kl, mask, loss_type, max_completion_length)
#
# Why is this right? With d = log(pi_theta/pi_ref), the KL is sum(pi * d). Its gradient is
# sum(pi * d * grad log pi), since the other half of the product rule, sum(pi * grad d) =
# sum(pi * grad log pi), is 0 (section 3). So the right factor of grad log pi is d:
#
#     penalty             factor       is factor * grad log pi the KL's gradient, on average?
#     k1 = d              1            no: this is 0 on average, and penalises nothing
#     |d|                 1 or -1      no: the same pull near and far
#     k2 = d^2 / 2        d            yes, though k2 is not the KL
#     k3 = e^-d - 1 + d   1 - e^-d     nearly, if d is small
#     ratio * k3          ratio * d    yes: the ratio corrects for pi_old's tokens (section 4)
#
# (The last row: grad ratio is ratio * grad log pi. So by the product rule, the gradient of
# ratio * k3 is ratio * (k3 + 1 - e^-d) * grad log pi, and k3 + 1 - e^-d = d.)
#
# The library RLinf has other names. Its kl_penalty_type low_var_kl is k3, kl is k1, abs is |d|, mse
# is k2. Its loss_agg_func token-mean is "dapo", and normalize_advantages is `scale_rewards`. Its
# early_stop_imp_ratio ignores a micro-batch whose mean ratio is above 5. Below `loss = ...`, add
#
#     loss = loss * (masked_mean(ratio, mask) <= 5)
#
# Left out: RLinf's entropy_bonus and use_valid_token_scale; several GPUs and fast samplers (TRL,
# verl and RLinf have them); a learned reward model, rewards for single steps, reference updates.


if __name__ == "__main__":
    texts = [r"3+2 = \boxed{5}", r"\boxed{5}", r"\boxed{6}", r"3-2 = \boxed{1}"]  # the apples
    rewards = torch.tensor([rule_reward(text, "5") for text in texts])  # (4,)
    advantages = group_advantages(rewards)  # (4,)
    pi = torch.tensor([[0.3, 0.2], [0.1, 1.0], [0.3, 1.0], [0.1, 0.2]])  # (4, 2); 1.0: padding
    logprobs, old = pi.log().requires_grad_(), torch.full((4, 2), 0.2).log()  # old is ref, too
    loss, _ = grpo_loss(logprobs, old, old, advantages, pi < 1)
    loss.backward()
    surrogate, k3 = clipped_surrogate(pi / 0.2, advantages), k3_kl(logprobs, old)  # (4, 2)
    print("completion        reward  advantage  ratio  surrogate      k3  gradient")
    for i, t in (pi < 1).nonzero().tolist():
        print(f"{texts[i]:16}  {rewards[i]:6.1f}  {advantages[i]:9.1f}  {pi[i, t] / 0.2:5.1f}  "
              f"{surrogate[i, t]:9.1f}  {k3[i, t]:6.4f}  {logprobs.grad[i, t]:8.4f}")
    print(f"loss {loss.item():.4f}\n")

    # A tiny policy: ten numbers, the logits of the tokens 0 to 9. From the rule alone, it learns to
    # say 5. Play with it: what does a group of 2 do, or a rate of 10, or another rule?
    torch.manual_seed(0)
    G = 8
    logits = torch.zeros(10, requires_grad=True)  # (V,)
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for step in range(21):
        ids = logits.softmax(dim=0).multinomial(G, replacement=True)  # (G,), one token each
        rewards = torch.tensor([rule_reward(rf"\boxed{{{i}}}", "5") for i in ids.tolist()])  # (G,)
        logprobs = logits.log_softmax(dim=0)[ids].unsqueeze(1)  # (G, 1)
        loss, _ = grpo_loss(logprobs, logprobs.detach(), None, group_advantages(rewards),
                            torch.ones(G, 1), beta=0)
        if step % 4 == 0:
            says = "".join(map(str, ids.tolist()))
            print(f"step {step:2}  says {says}  mean reward {rewards.mean():.2f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
