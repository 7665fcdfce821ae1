# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how rewards alone teach a language model to reason.

GRPO, Group Relative Policy Optimization, is the method behind DeepSeek-R1 (arXiv:2501.12948). It
was introduced in DeepSeekMath (arXiv:2402.03300). A language model reads a text and assigns a
probability to each possible next token, which is a word or a piece of one. What it writes after a
prompt is a *completion*. GRPO lets the model write several completions of the same prompt, and a
rule gives each of them a reward. Say the prompt is "John has 3 apples and buys 2 more. How many
apples does he have?" The rule pays 0.5 for a result in a box, \boxed{...}, plus 1 if it is right:

    completion 1    3+2 = \boxed{5}      reward 1.5
    completion 2    \boxed{5}            reward 1.5
    completion 3    \boxed{6}            reward 0.5
    completion 4    3-2 = \boxed{1}      reward 0.5

The mean is 1. Completions 1 and 2 earned more, so their tokens should become more likely. 3 and 4
earned less, so theirs should become less likely. That is the whole idea. The rest is about how far
to push a token, and when to stop. This example, *the apples*, will stay with us throughout. To keep
the sums short, pretend that completions 1 and 4 have two tokens each, but 2 and 3 only one.

A language model is also called a *policy*, written pi. There are three of them:

    pi_theta  the model that we train. Only this one gets a gradient
    pi_old    the model as it was when it wrote the completions. With one update per step, which
              is the default here, this is still pi_theta
    pi_ref    a frozen copy of the model from before training. A penalty keeps pi_theta near it

One step of training, and the functions that do it:

    sample G completions for each of B prompts                       sample_groups     section 7
    give each completion a reward, by a rule                         grade             8
    compare each reward with the others of its group                 group_advantages  1
    compute the tokens' log-probabilities under pi_ref (and,
        if several updates follow, also under pi_old)                compute_logprobs  9
    for each micro-batch (as many completions as fit in memory):
        compute its tokens' log-probabilities under pi_theta         compute_logprobs  9
        turn them into one number, the loss                          grpo_loss         2 to 5
        loss.backward()
    let the optimizer move the weights: one update

`train` (section 6) is this loop, but let us do the mathematics first. GRPO does more than make good
tokens more likely and bad ones less likely. It does not push a token further once its probability
has changed enough: in the equation below, the min and the clip do this. And it keeps pi_theta near
pi_ref, which is the job of beta * k3. For a prompt q, completion i has |o_i| tokens and earns the
reward R_i. Its token number t is o_it, the tokens before that one are o_i,<t, and a bar means
"given". GRPO maximises J, averaged over the prompts:

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i   = (R_i - mean(R_1..R_G)) / std(R_1..R_G)       the advantage        group_advantages
    r_it  = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)   the ratio        grpo_loss
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1   how far from pi_ref             k3_kl

clip(r, 1 - eps, 1 + eps) is r, kept between 1 - eps and 1 + eps. eps is 0.2, and beta is 0.04.
Sections 1 to 3 explain one piece each: A, then the min and the clip, then k3.

Shapes. B prompts with G completions each make N = B * G completions. Where a tensor holds only some
of them, say a micro-batch, their number is n. The longest prompt of these has P tokens, and the
longest completion T. The vocabulary has V tokens. "Log-probs" are log-probabilities."""

import copy
import json
import math
import random
import re
import time
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import set_seed


# ---- 1. Advantages: better or worse than the group ---------------------------------------
# Is a reward of 0.5 good? On a hard prompt it is, but not if all the other completions earn 1.5.
# What counts is the difference from a *baseline*, the reward we can expect for this prompt. GRPO
# comes from PPO (Proximal Policy Optimization), which trains a second network to predict the
# baseline. It is called the *critic* and is usually as large as the policy. GRPO needs no critic:
# it samples a group of completions for the same prompt and takes the mean of their rewards. It also
# divides by the group's standard deviation (std), so that the unit of the reward does not matter.
def group_advantages(rewards, scale_rewards="group"):
    """A_i = (R_i - mean(R)) / std(R) in each group: (B, G) or (G,) -> the same shape, float32.

    `scale_rewards` is "group", or "none" to leave out the std (section 2 says why you might). If
    all rewards of a group are equal, up to rounding, its advantages are exactly 0. The std divides
    by G. With torch's default, G - 1, advantages would be 6.5 % smaller at G = 8."""
    if scale_rewards not in ("group", "none"):
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not 'group' or 'none'")
    if rewards.shape[-1] < 2:
        raise ValueError(f"rewards {tuple(rewards.shape)}: a group needs two or more")
    rewards = rewards.double()
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (B, G)
    std = rewards.std(dim=-1, correction=0, keepdim=True)  # (B, 1)
    # In Python, 0.1 + 0.2 is not quite 0.3. Divided by an equally small std, the difference would
    # become an advantage of 1. So a std below 2e-7 of the largest reward counts as 0.
    equal = std <= 2e-7 * rewards.abs().amax(dim=-1, keepdim=True)  # (B, 1)
    advantages = centered / std if scale_rewards == "group" else centered
    return advantages.masked_fill(equal, 0.0).float()


# The apples: R = [1.5, 1.5, 0.5, 0.5] has mean 1 and std 0.5, so A = [+1, +1, -1, -1].
#
# Some prompts are so easy or so hard that all completions of the group earn the same. Then all its
# advantages are 0 and its rewards teach nothing: only the KL penalty (section 3) acts on its
# tokens. The loss is still divided by the number of all completions, these included.


# ---- 2. Ratio and clip: learn from a completion, but not too much ------------------------
# Why log-probabilities? We want the gradient of the expected reward. But a reward is a plain number
# and drawing a token is random, so PyTorch can differentiate neither. What it can differentiate is
# the probability of the token that was drawn. And there are far too many completions to sum over
# them all. So we look for a gradient that is an average over samples and is made of probabilities.
#
# Let us first pretend that a completion is a single token, with probability pi and reward R. The
# expected reward is then the sum of pi * R over the V tokens, written sum(pi * R). Write grad for
# the gradient with respect to the weights. Since grad log pi = (grad pi) / pi,
#
#     grad sum(pi * R) = sum(R * grad pi) = sum(pi * R * grad log pi)
#
# The right side is an average: that of R * grad log pi over tokens drawn from pi. So we can sample
# some tokens and average R * grad log pi over them. This method is called REINFORCE. And a real
# completion? Its log-probability is the sum of its tokens' log-probabilities. So every token gets
# such a term, all with the same R, since nobody can say which token earned it.
#
# Why a baseline? Let us subtract a number b from every reward. On average, the gradient changes by
#
#     -b * sum(pi * grad log pi) = -b * sum(grad pi) = -b * grad(sum(pi)) = -b * grad(1) = 0
#
# so the expected gradient stays the same, as long as b does not depend on the completion. If b is
# near the expected reward, the factors R - b are small, and the average over samples is less noisy.
# One such b is the mean of the *other* rewards of the group. GRPO's mean also contains R_i itself,
# but this only shrinks the difference to (G - 1)/G of its size. (For completion 1, the others' mean
# is 2.5/3, and 1.5 - 1 is 3/4 of 1.5 - 2.5/3. Dividing by the std is less harmless: very easy and
# very hard prompts have a small std, so they get more weight. Dr. GRPO, section 11, leaves it out.)
#
# Why a ratio? Sampling is slow, so we may want several updates from the same completions. But after
# the first update, pi_theta is no longer pi_old, the policy that drew the tokens. With A in place
# of R, r = pi_theta / pi_old corrects for that: sum(pi_old * r * A) = sum(pi_theta * A). And since
#
#     grad r = (grad pi_theta) / pi_old = r * grad log pi_theta
#
# r * A has the gradient r * A * grad log pi. At r = 1 this is A * grad log pi, as before.
# (Strictly, a completion needs the product of all its ratios. But over 300 tokens this gets huge or
# tiny, 1.01^300 is 19.8, and a few completions would outweigh all others. So we give each token its
# own ratio alone. This is an approximation, which is good while pi_theta is near pi_old.)
#
# Why a clip? Once the model has changed a lot, what pi_old wrote says little about it. So when a
# ratio has moved 20 % in the direction its advantage asks for, the min picks the clipped term, a
# constant without a gradient. If it has moved the other way, the min picks r * A, to bring it back.
def clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token: r (n, T), A (n,) -> (n, T).

    This is PPO's "surrogate" (arXiv:1707.06347, equation 7). It stands in for the expected reward,
    so we maximise it. `epsilon_high` is `epsilon` by default."""
    A = advantages.unsqueeze(1)  # (n, 1): the same for every token of a completion
    high = epsilon if epsilon_high is None else epsilon_high
    return torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + high) * A)


# The apples after some updates. Say that pi_old gave each token 0.2, and that pi_theta now gives
#
#     completion   1            2      3      4
#     pi_theta     0.3, 0.2     0.1    0.3    0.1, 0.2
#     ratio        1.5, 1.0     0.5    1.5    0.5, 1.0
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi
#     +1   1.5 (no. 1)   min( 1.5,  1.2) =  1.2  clipped      0    good, and already more likely
#     +1   0.5 (no. 2)   min( 0.5,  0.8) =  0.5  not clipped  0.5  good: bring it back up
#     -1   1.5 (no. 3)   min(-1.5, -1.2) = -1.5  not clipped -1.5  bad: push it down
#     -1   0.5 (no. 4)   min(-0.5, -0.8) = -0.8  clipped      0    bad, and already less likely
#     any  1.0           A                       not clipped  A    every token in a first update
#
# In the first update after sampling, pi_theta is still pi_old. Every ratio is 1 (up to rounding)
# and the clip does nothing. With one update per step, our default, the clip never acts at all.
#
# A common mistake is to use max instead of min. Then row 1 is never clipped. Row 2 is
# max(0.5, 0.8) = 0.8, a constant, so nothing brings its token back up. Row 3 is -1.2, so nothing
# pushes its token down. Row 4 is max(-0.5, -0.8) = -0.5 = r * A: its token is pushed ever lower.


# ---- 3. The KL penalty: stay near the reference ------------------------------------------
# A policy trained on nothing but rewards can forget how to write. How far has it gone from pi_ref?
# The Kullback-Leibler divergence measures this. It is an average over tokens drawn from pi_theta:
#
#     KL(pi_theta || pi_ref) = average of log(pi_theta / pi_ref)
#
# It is 0 if the two policies agree and positive if they do not. To compute it exactly, we would
# need all V tokens at each position. The estimate k3 needs only the one that was drawn.
def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (n, T), (n, T) -> (n, T).

    It is the third estimate in joschu.net/blog/kl-approx.html, hence the name. If we write x for
    log(pi_ref/pi_theta), it is e^x - x - 1. This is 0 at x = 0 and positive everywhere else,
    because e^x lies above its tangent 1 + x."""
    # e^x overflows float32 at x = 89. So x stops at 50, well below. From there the gradient is 0.
    x = (ref_logprobs - logprobs).clamp(max=50)  # (n, T)
    return torch.expm1(x) - x  # expm1(x) is e^x - 1, but precise near 0


# Why is its average the KL? For tokens drawn from pi_theta,
#
#     average of -log(pi_ref/pi_theta) = average of log(pi_theta/pi_ref) = KL(pi_theta || pi_ref)
#     average of  pi_ref/pi_theta      = sum(pi_theta * pi_ref/pi_theta) = sum(pi_ref) = 1
#
# so on average the first and the last term of k3 cancel, and the middle term is the KL. (This is
# its value. Its gradient is nearly that of the KL, as long as the policies are close: section 11.)
#
# Why not use the middle term alone? Because it is noisier. Say that log(pi_ref/pi_theta) is +0.1
# for 47.5 % of the tokens and -0.1 for the others (so that pi_ref/pi_theta is 1 on average). The KL
# is 0.525 * 0.1 - 0.475 * 0.1 = 0.005. The middle term says -0.1 or +0.1, but k3 says 0.005 each
# time. (Take care not to turn the ratio upside down: the average of pi_theta/pi_ref is not 1.)
#
# The gradient of e^x - x - 1 with respect to x is e^x - 1, and x contains -log pi_theta. So with
# respect to log pi_theta it is 1 - e^x = 1 - pi_ref/pi_theta. The apples, if pi_ref is always 0.2:
#
#     pi_theta 0.1    pi_ref/pi_theta 2      k3 = 2 - log(2) - 1 = 0.3069       gradient -1
#     pi_theta 0.2    pi_ref/pi_theta 1      k3 = 0                             gradient  0
#     pi_theta 0.3    pi_ref/pi_theta 2/3    k3 = 2/3 - log(2/3) - 1 = 0.0721   gradient 1/3
#
# The optimizer makes beta * k3 smaller. So a token that has become less likely than under pi_ref
# (first row) is pulled back up, and one that has become more likely (last row) is pulled back down.


# ---- 4. The masked mean: padding is not data ---------------------------------------------
# Completions differ in length, but the rows of a tensor may not. So we fill up the short ones with
# padding, and a mask says which positions are real. Padding can hold anything, even NaN (from -inf
# minus -inf, say). It does not help to multiply by the mask, because NaN * 0 is still NaN:
#
#     values [2, NaN], mask [True, False]    (values * mask).sum()              = NaN
#                                            torch.where(mask, values, 0).sum() = 2
def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is True (or 1), over `dim` or over all, or 0 if none is."""
    mask = mask.bool().expand_as(values)
    return torch.where(mask, values, 0.0).sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ---- 5. The loss -------------------------------------------------------------------------
# How we average looks like a detail, but it decides how much a long completion counts.
def average(per_token, mask, loss_type="grpo", max_completion_length=None):
    """One number for `per_token` (n, T), of which only the positions in `mask` (n, T) are real.

        "grpo"     the mean over completions of the mean over their tokens: equation J. Section 2
                   leads to a plain sum, so the division by |o_i| is GRPO's own. With it, a long
                   wrong answer costs less per token than a short one, so wrong answers may grow
        "dapo"     the mean over all tokens (of a group, in arXiv:2503.14476): all count the same
        "dr_grpo"  the sum over all tokens, divided by n * max_completion_length: a constant that
                   does not depend on the lengths (arXiv:2503.20783)"""
    if loss_type == "grpo":
        return masked_mean(per_token, mask, dim=1).mean()
    if loss_type == "dapo":
        return masked_mean(per_token, mask)
    if loss_type == "dr_grpo" and max_completion_length:
        return torch.where(mask.bool(), per_token, 0.0).sum() / (len(mask) * max_completion_length)
    raise ValueError(f"loss_type {loss_type!r}: grpo, dapo, or dr_grpo with max_completion_length")


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None):
    """-J over n completions, averaged as `loss_type` says. Returns the loss and a dict of metrics.

    Log-probs of pi_theta, pi_old and pi_ref: (n, T) each; pi_ref's may be None at beta=0.
    Advantages: (n,). Mask: (n, T), True (or 1) at the tokens of the completions."""
    if ref_logprobs is None:
        if beta > 0:
            raise ValueError(f"beta is {beta}, so ref_logprobs are needed")
        ref_logprobs = logprobs
    # torch would silently broadcast tensors of the wrong shape.
    shapes = [tuple(x.shape) for x in (logprobs, old_logprobs, ref_logprobs, mask)]
    if logprobs.dim() != 2 or len(set(shapes)) > 1 or advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"want (n, T), advantages (n,); got {shapes}, {tuple(advantages.shape)}")
    # detach: pi_old and pi_ref are constants. The clamp keeps the ratio finite. And where padding
    # is NaN, `backward` computes 0 * exp(NaN), which is NaN, and the clamp makes this gradient 0.
    ratio = (logprobs - old_logprobs.detach()).clamp(max=50).exp()  # (n, T) r
    surrogate = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)  # (n, T)
    kl = k3_kl(logprobs, ref_logprobs.detach())  # (n, T)
    # Optimizers minimise, so the loss is -J.
    loss = -average(surrogate - beta * kl, mask, loss_type, max_completion_length)
    clipped = surrogate < ratio * advantages.unsqueeze(1)  # (n, T) where the min took the clip
    return loss, {"loss": loss.item(), "kl": masked_mean(kl, mask).item(),
                  "clip_fraction": masked_mean(clipped.float(), mask).item()}


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
# Let us check the gradient of the "grpo" loss, with respect to log pi, at two tokens:
#   - The token of completion 2. The gradient of the surrogate is 0.5 (section 2), with a minus in
#     the loss. That of k3 is -1 (section 3), times beta. Both are divided by the 4 completions:
#     (-0.5 - 0.04) / 4 = -0.135. Descent makes the token more likely, as it should.
#   - The first token of completion 1. The clip leaves only the KL: beta * 1/3, divided by 2 tokens
#     and 4 completions, is 0.0017. Descent makes the token less likely.
#
# Why does the loss start at 0? At the first update of a run, every ratio is 1 (section 2) and every
# k3 is 0. The "grpo" loss over all N completions is then minus the mean of the advantages, and in
# each group these sum to 0. Its gradient is not 0, though: with respect to log pi of a token, it is
# -A / (|o_i| * N). With one update per step the ratios are 1 in every step, and all that is left of
# this loss is beta times the mean of k3. So watch the reward, not the loss.


# ---- 6. The loop -------------------------------------------------------------------------
@dataclass
class Completion:
    """What the model wrote after a prompt, and what it earned."""
    example: dict  # the row of the data set
    prompt_ids: list  # the tokens of the prompt
    # The loss is about exactly these ids. If we decoded them and encoded the text again, we might
    # get others, which were never sampled: a text can be cut into tokens in several ways.
    ids: list = field(default_factory=list)
    sampler_logprobs: list = field(default_factory=list)  # of the ids; for the metrics only
    text: str = ""
    truncated: bool = False  # cut off at max_completion_length: it has no end token
    reward: float = 0.0
    advantage: float = 0.0


def train(model, tokenizer, dataset, reward_fn, config, after_step=None, output_dir=None,
          resume=False):
    """Train `model` in place. Returns the metrics of all steps, a list of dicts.

        from transformers import AutoModelForCausalLM, AutoTokenizer
        from grpo import GRPOConfig, train
        name = "Qwen/Qwen2.5-0.5B-Instruct"
        model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").to("cuda")
        tokenizer = AutoTokenizer.from_pretrained(name)
        data = [{"prompt": [{"role": "user", "content": f"In one short line: what is {a} * 7?"}],
                 "right": str(a * 7)} for a in range(11, 99)]
        def reward(completions, right, **columns):  # 1 if the right digits are in the answer
            return [float(r in chat[-1]["content"]) for chat, r in zip(completions, right)]
        train(model, tokenizer, data, reward, GRPOConfig(steps=50), output_dir="runs/mine")
        model.save_pretrained("runs/mine")
        tokenizer.save_pretrained("runs/mine")

    `dataset` is a datasets.Dataset or a list of dicts. Each row has a `prompt` (a string or a chat,
    which is a list of messages) and what `reward_fn` needs. Section 8 shows how that is called.
    After each step, `after_step(metrics, groups)` is called; groups are B lists of G `Completion`.
    Use it to look at them, to add numbers to the metrics, or to test the model on other prompts.
    `output_dir` gets metrics.jsonl, with a line per step, and checkpoint.pt every `save_steps`
    steps and at the end. The same call with resume=True continues from the last checkpoint. The
    steps after it are repeated with the same draws: on a CPU, the weights end bit for bit equal."""
    check_data(dataset, config)
    model.float()  # weights in bfloat16 would round most of the small steps away: section 10
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta > 0 else None
    # AdamW's default weight_decay would shrink the weights. fused=True is its fast form for GPUs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0,
                                  fused=model.device.type == "cuda")
    optimizer.zero_grad()  # an earlier run, stopped in a notebook, may have left gradients
    history = open_run(output_dir, resume, config, model, reference, optimizer)
    bar = tqdm(range(len(history) + 1, config.steps + 1))
    for step in bar:
        # Each step has its own seed, so that a resumed run draws what it would have drawn anyway.
        set_seed((config.seed * 1_000_003 + step) % 2**32)  # far from the seeds of other runs
        rate = scheduled_rate(config, step)
        optimizer.param_groups[0]["lr"] = rate
        started = time.perf_counter()

        # Draw B prompts from all the data (there are no epochs), and sample G completions for each.
        examples = [dataset[i] for i in random.sample(range(len(dataset)), config.prompts_per_step)]
        prompts_at_once = max(1, config.sampling_batch_size // config.num_generations)
        groups = []
        with autocast(model, config.bf16):  # in bfloat16 where the GPU can: section 10
            for some in chunks(examples, prompts_at_once):
                groups += sample_groups(model, tokenizer, some, config.num_generations,
                                        config.max_completion_length, config.temperature)
        completions = sum(groups, [])  # the groups joined: a list of N
        sampled = time.perf_counter()

        # Reward them, and compare each with its group.
        rewards = grade(reward_fn, completions).view(len(groups), -1)  # (B, G)
        advantages = group_advantages(rewards, config.scale_rewards)  # (B, G)
        for completion, advantage in zip(completions, advantages.flatten().tolist()):
            completion.advantage = advantage
        graded = time.perf_counter()

        # Cut them into micro-batches of similar lengths, so that there is little padding. The
        # longest come first: if memory is too small, we mostly see it at once. Without a KL, an
        # advantage of 0 gives no gradient, so we leave those completions out.
        useful = [c for c in completions if c.advantage != 0 or config.beta > 0]
        useful.sort(key=lambda completion: len(completion.ids), reverse=True)
        batches = chunks(useful, config.micro_batch_size)

        # Log-probs of pi_ref and, if several updates follow, of pi_old: a tensor per micro-batch.
        ref_logprobs = [None] * len(batches)
        old_logprobs = [None] * len(batches)
        with torch.no_grad(), autocast(model, config.bf16):
            for i, batch in enumerate(batches):
                if config.beta > 0:
                    ref_logprobs[i], _ = compute_logprobs(reference, batch, config.temperature)
                if config.num_iterations > 1:
                    old_logprobs[i], _ = compute_logprobs(model, batch, config.temperature)

        # Update the weights.
        parts, norms = [], []  # the metrics of each micro-batch, the gradient's norm of each update
        for _ in range(config.num_iterations):
            for batch, old, ref in zip(batches, old_logprobs, ref_logprobs):
                with autocast(model, config.bf16):
                    logprobs, mask = compute_logprobs(model, batch, config.temperature)  # (n, T)
                if old is None:  # pi_old is pi_theta. r is 1, and has the gradient of log pi
                    old = logprobs.detach()
                loss, part = grpo_loss(
                    logprobs, old, ref, logprobs.new_tensor([c.advantage for c in batch]), mask,
                    epsilon=config.epsilon, epsilon_high=config.epsilon_high, beta=config.beta,
                    loss_type=config.loss_type, max_completion_length=config.max_completion_length)
                # The loss of a step is a mean over all N completions ("dapo": over all tokens), and
                # a micro-batch counts by its share of them. In the same way, the mean of 4 numbers
                # is 3/4 of the mean of the first three plus 1/4 of the last.
                size = count_tokens if config.loss_type == "dapo" else len
                share = size(batch) / size(completions)
                (loss * share).backward()  # adds to the gradients
                parts.append({**part, "loss": part["loss"] * share, "tokens": count_tokens(batch),
                              "sampler_gap": sampler_gap(batch, old, mask)})
            # This clip has nothing to do with section 2's. It shortens a gradient that is too long.
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
            norms.append(norm)
            if math.isfinite(norm):
                optimizer.step()
            else:
                tqdm.write(f"step {step}: no update, since the gradient's norm is {norm}")
            optimizer.zero_grad()

        tokens = count_tokens(completions)
        metrics = {
            "step": step, "reward_mean": rewards.mean().item(),
            "zero_variance_fraction": (advantages == 0).all(dim=1).float().mean().item(),
            "entropy": -sum(sum(c.sampler_logprobs) for c in completions) / tokens,
            "completion_length": tokens / len(completions),
            "truncated_fraction": sum(c.truncated for c in completions) / len(completions),
            **step_metrics(parts, norms), "learning_rate": rate,
            "sample_seconds": sampled - started, "reward_seconds": graded - sampled,
            "update_seconds": time.perf_counter() - graded}
        history.append(metrics)
        bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
        if after_step:
            after_step(metrics, groups)
        if output_dir:
            save_run(Path(output_dir), config, history, model, reference, optimizer)
    return history


# What to watch:
#     reward_mean             should rise
#     zero_variance_fraction  groups of equal rewards, which teach nothing. Near 1, change prompts
#     entropy                 minus the mean log-prob of the drawn tokens: how unsure the policy is
#     truncated_fraction      if many are cut off, raise max_completion_length
#     kl                      mean k3 per token (0 at beta=0). Above 1, lower the learning rate
#     clip_fraction           the share of tokens stopped by the clip, always 0 in a first update
#     sampler_gap             if it is above 1e-4 in float32, or 0.1 in bfloat16, see section 7
#     grad_norm               the gradient's norm. A skipped update counts as 0
#
# A policy can *collapse*: it writes nearly the same text again and again, often the easiest one
# that is paid. Then entropy is near 0, zero_variance_fraction near 1, and completion_length small
# or at its limit. reward_mean may have risen before, but now it stands still, high or low. If so,
# start again with a lower learning rate, a longer warm-up or a reward that does not pay this text.


def count_tokens(completions):
    """How many tokens the completions have together."""
    return sum(len(completion.ids) for completion in completions)


def sampler_gap(completions, logprobs, mask):
    """Mean absolute difference between these log-probs, (n, T), and those of sampling."""
    drawn, _ = pad_rows([c.sampler_logprobs for c in completions], "right", mask.device)  # (n, T)
    return masked_mean((drawn - logprobs).abs(), mask).item()


def step_metrics(parts, norms):
    """A step's metrics, from those of its micro-batches and the gradient's norm of each update."""
    tokens = sum(part["tokens"] for part in parts)
    means = {name: sum(part[name] * part["tokens"] for part in parts) / max(1, tokens)
             for name in ("kl", "clip_fraction", "sampler_gap")}
    return {"loss": sum(part["loss"] for part in parts) / len(norms), **means,
            "grad_norm": sum(norm for norm in norms if math.isfinite(norm)) / len(norms)}


# ---- 7. Sampling -------------------------------------------------------------------------
# The model reads the prompt and gives each possible next token a score, its logit. We draw a token.
# Now the model reads the prompt with this token at its end, we draw the next one, and so on:
#
#     ids = the tokens of the prompt
#     up to max_completion_length times, or until an end token is drawn:
#         logits = what the model says after the last of the ids           (V,)
#         draw a token from softmax(logits / temperature), and append it to the ids
#
# `sample_groups` does this for many completions at once, and computes nothing twice.
#
# The cache. A token looks only at earlier tokens, so what the layers compute for it stays the same.
# We keep it in tensors, a row per completion, so each forward pass reads one new token for each.
#
# `cache.reorder_cache(rows)` replaces each tensor x by x[rows]. It can copy rows: a group's prompt
# is read once, and its row copied G times. And it can drop rows: a completion that has ended leaves
# the batch. `live` lists those in the batch, and `going_on` the rows that go on. For two, a and b:
#
#     t    live    drawn tokens      going_on
#     0    a, b    "3",   "5"        0, 1    both go on
#     1    a, b    "+2",  END        0       b has ended: keep row 0
#     2    a       END               none    all have ended
#
# transformers' `model.generate` can do all this too, but it obeys settings that are stored with the
# model. Qwen2.5-0.5B-Instruct has temperature 0.7, top_p 0.8, top_k 20 and a repetition penalty of
# 1.1. If one of these stays on, we draw tokens from one distribution and compute the loss of
# another. To notice this, `train` compares the log-probs of sampling with those that section 9
# computes for the same tokens. It logs their mean absolute difference as sampler_gap: about 1e-6 in
# float32, up to a few hundredths in bfloat16. If yours is much larger, look at the temperature and
# at section 9. (It cannot see a top_k inside `draw_tokens`, which changes no logits.)
@torch.no_grad()
def sample_groups(model, tokenizer, examples, num_generations, max_completion_length,
                  temperature=1.0):
    """G = `num_generations` completions for each of B examples: B lists of G `Completion`.

    Examples are dicts with a "prompt", a string or a chat. Temperature 0 takes the likeliest token.
    Leaves the model in eval mode, also for the update: dropout would make it another policy."""
    model.eval()
    end_ids = end_token_ids(model, tokenizer)
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    # Padded on the left, every prompt ends in the last column. We need only the logits there.
    ids, mask = pad_rows(prompts, "left", model.device)  # (B, P)
    out = forward(model, ids, mask, use_cache=True, logits_to_keep=1)
    name = "cache" if "cache" in out else "past_key_values"  # its name before transformers 5.24
    if out.get(name) is None:
        raise ValueError(f"{type(model).__name__} has no attention cache, which sampling needs")
    cache, logits = out[name], out.logits[:, -1]  # logits (B, V)
    cache.get_seq_length()  # an error for a model without attention layers, such as Mamba
    # Copy each row G times. For B = 2 and G = 3, rows is [0, 0, 0, 1, 1, 1].
    rows = torch.arange(len(prompts), device=model.device).repeat_interleave(num_generations)
    cache.reorder_cache(rows)
    logits, mask = logits[rows], mask[rows]  # (B * G, V), (B * G, P)
    completions = [Completion(examples[i], prompts[i]) for i in rows.tolist()]
    live = completions  # row i of the tensors belongs to live[i]
    for t in range(max_completion_length):
        tokens = draw_tokens(logits, temperature)  # (n,)
        # One cannot divide by temperature 0, so there the log-probs are those at temperature 1.
        logprobs = selective_log_softmax(logits, tokens, temperature or 1.0)  # (n,)
        for completion, token, logprob in zip(live, tokens.tolist(), logprobs.tolist()):
            completion.ids.append(token)
            completion.sampler_logprobs.append(logprob)
        going_on = [i for i, completion in enumerate(live) if completion.ids[-1] not in end_ids]
        if not going_on or t + 1 == max_completion_length:
            break
        if len(going_on) < len(live):
            live = [live[i] for i in going_on]
            kept = torch.tensor(going_on, device=model.device)
            cache.reorder_cache(kept)
            tokens, mask = tokens[kept], mask[kept]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)  # (n, P + t + 1)
        out = forward(model, tokens.unsqueeze(1), mask, use_cache=True, **{name: cache})
        logits = out.logits[:, -1]  # (n, V); the new column is in the cache
    for completion in completions:
        completion.truncated = completion.ids[-1] not in end_ids
        completion.text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return chunks(completions, num_generations)


def draw_tokens(logits, temperature):
    """One token for each row, from softmax(logits / temperature): (n, V) -> (n,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1).squeeze(1)


def encode_prompt(tokenizer, prompt):
    """The token ids of a prompt: a string, or a chat, ended so that the answer comes next."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
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
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise ValueError("model and tokenizer have no eos_token_id, so no completion could end")
    return found


def pad_rows(rows, side, device):
    """n lists of numbers as a tensor, filled up with 0, and its bool mask: (n, longest) each."""
    # The mask comes from the lengths. It is tempting to use ids != pad_token_id instead. But if the
    # padding token is the end token, this hides the end tokens, and the model never learns to end.
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    rows = [torch.tensor(row) for row in rows]
    return (pad_sequence(rows, batch_first=True, padding_side=side).to(device),
            pad_sequence(masks, batch_first=True, padding_side=side).to(device))


def chunks(items, size):
    """A list cut into lists of `size` items. The last one may be shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]


# ---- 8. The reward -----------------------------------------------------------------------
# Where we know the right answer, a rule can give the reward, and no network has to guess it.
# The rule must accept every text, since a model in training writes anything. A right number without
# a box earns 0, as it may be there by accident. So the prompt must ask for a box: if none is ever
# written, all rewards are 0 and nothing is learned. A model that is paid for boxes may box just
# anything, and most rewards are then 0.5. This is "reward hacking": more reward without more skill.
def rule_reward(completion, answer):
    r"""1.5 if the last \boxed{...} holds the answer, 0.5 for anything else in it, 0.0 for nothing.

    Box and answer are compared as strings, and as numbers, which may differ by less than 0.01. "72
    apples" is not 72, so let the prompt ask for the number only."""
    boxed = extract_boxed(completion)
    if not boxed:
        return 0.0
    answer = str(answer).strip()
    found, wanted = read_number(boxed), read_number(answer)
    # In floating point, 5.01 - 5 is 0.00999..., which must not count as below 0.01. So we round it.
    # From 2**53 on, floats skip whole numbers, so different numbers could look equal.
    near = (found is not None and wanted is not None and abs(wanted) < 2**53
            and round(abs(found - wanted), 9) < 0.01)
    return 1.5 if near or boxed == answer else 0.5


def extract_boxed(text):
    r"""What is in the last \boxed{...}, with matched braces: \boxed{\frac{1}{2}} holds \frac{1}{2}.
    None if there is none, or its end is missing."""
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
    r"""The number in `text` as a float, or None. "1,000", "1{,}000", "$1000", "1000\%", "1000." and
    "1000.0" give 1000.0. "12,34", "3 4", ".5", "1e3" and "nan" give None."""
    text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip()
    # A sign; 1,234,567 or digits; .digits; a full stop. float() alone would also accept "nan".
    pattern = r"[+-]?\s*([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]+)?\s*\.?"
    if not re.fullmatch(pattern, text):
        return None
    return float(re.sub(r"[,\s]", "", text).removesuffix("."))


def grade(reward_fn, completions):
    """Call the reward function, and store the rewards in the completions. Returns them, (N,).

        reward_fn(prompts=..., completions=..., completion_ids=..., **columns) -> N numbers

    Each argument is a list with a value per completion; `columns` are the other columns of the
    data. A completion is a string or, if its prompt is a chat, a chat of one message. TRL, Hugging
    Face's library for such training, calls reward functions in the same way. If the data has a
    column `answer` and its prompts are strings, you can write:

        def reward(completions, answer, **columns):
            return [rule_reward(text, right) for text, right in zip(completions, answer)]

    If they are chats, a completion's text is completion[-1]["content"]."""
    # We pass copies, since a reward function may change what it is given.
    given = {name: [copy.deepcopy(c.example[name]) for c in completions]
             for name in completions[0].example}
    given["prompts"] = given.pop("prompt")
    given["completion_ids"] = [list(c.ids) for c in completions]
    given["completions"] = [c.text if isinstance(c.example["prompt"], str)
                            else [{"role": "assistant", "content": c.text}] for c in completions]
    rewards = list(reward_fn(**given))
    if len(rewards) != len(completions):
        raise ValueError(f"{len(rewards)} rewards for {len(completions)} completions")
    for completion, reward in zip(completions, rewards):
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"the reward of {completion.text!r:.200} is {reward}")
        completion.reward = float(reward)
    return torch.tensor([c.reward for c in completions], dtype=torch.float64)


# ---- 9. Log-probs ------------------------------------------------------------------------
# Now the model reads prompts and completions again, all tokens at once and with a gradient. Prompts
# are padded on the left, completions on the right, so all completions begin in the same column:
#
#     column             0  1  2    3  4  5
#     row 0  ids         a  b  c    x  y  END   prompt a b c, completion x y END
#     row 1  ids         .  .  d    z END  .    prompt d, completion z END; dots are padding
#     row 1  mask        0  0  1    1  1  0     1 at real tokens
#     row 1  positions   0  0  0    1  2  2     counted over real tokens; unused at dots
#
# The logits in one column predict the token in the next: columns 2 to 4 predict those in 3 to 5.
def compute_logprobs(model, completions, temperature=1.0):
    """Log-probs (n, T) of the tokens of n completions, and the bool mask (n, T) of real tokens."""
    prompt_ids, prompt_mask = pad_rows([c.prompt_ids for c in completions], "left", model.device)
    ids, mask = pad_rows([c.ids for c in completions], "right", model.device)  # (n, T)
    logprobs = token_logprobs(model, torch.cat([prompt_ids, ids], dim=1),  # (n, P + T)
                              torch.cat([prompt_mask, mask], dim=1), ids.shape[1], temperature)
    return logprobs, mask


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0):
    """log pi of the last T = `completion_length` tokens: ids and mask (n, P + T) -> (n, T).

    Use the temperature of sampling: at any other one, pi is a different policy."""
    out = forward(model, input_ids, attention_mask, use_cache=False,
                  logits_to_keep=completion_length + 1)  # + 1: the column before predicts
    # Some models ignore logits_to_keep and give all logits. So count from the end.
    logits = out.logits[:, -completion_length - 1 : -1]  # (n, T, V)
    return selective_log_softmax(logits, input_ids[:, -completion_length:], temperature)


def forward(model, ids, mask, **more):
    """Run the model on `ids`. `mask` also has the columns that are in the cache."""
    # cuDNN's attention, which PyTorch may choose on a GPU, has given NaN gradients with padding
    # masks on an H100 (pytorch#196678). This switches it off, for the whole process.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Each token is told its place in the text, 0, 1, 2 and so on, and padding must not count. While
    # sampling, `ids` is the newest column alone, but `mask` has all: so keep the last positions.
    mask = mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask,
                 position_ids=positions[:, -ids.shape[1] :], **more)


def selective_log_softmax(logits, ids, temperature=1.0):
    """log softmax(logits / temperature) at the given tokens: (..., V), (...) -> (...)."""
    # We do this in float32, because log_softmax in bfloat16 is off by hundredths.
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)  # (..., V)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


# ---- 10. Settings, precision, files: what is not GRPO ------------------------------------
def setting(default, text):
    """A field with its default, and the help of its flag in gsm8k_demo.py, beside this file."""
    return field(default=default, metadata={"help": text})


# Memory. Each weight needs 22 bytes: 4 for itself, 4 for its gradient, 8 for AdamW's averages of
# the gradient and its square, 2 for a bfloat16 copy (on a GPU) and 4 for pi_ref (none at beta=0). A
# micro-batch adds what the layers keep for the gradient, and three float32 tensors of n * T * V
# numbers: the log-softmax and, in `backward`, two gradients. With 4 completions of 512 tokens and
# Qwen's V = 151,936, these take 3.7 GB. If the update runs out of memory, lower micro_batch_size
# (the gradient stays the same) or set beta=0. If sampling does, lower sampling_batch_size: the
# float32 cache of Qwen2.5-0.5B has 25 kB per token. (In eval mode, gradient checkpointing is off.)
@dataclass
class GRPOConfig:
    """Every setting of `train`, mostly under TRL's names."""
    num_generations: int = setting(8, "G, completions per prompt; 4 is few, 16 is comfortable")
    prompts_per_step: int = setting(32, "B, prompts per step")
    sampling_batch_size: int = setting(256, "completions sampled at once; never less than a group")
    max_completion_length: int = setting(512, "tokens at which a completion is cut off")
    temperature: float = setting(1.0, "divides the logits; lower: less varied")
    scale_rewards: str = setting("group", "group, or none: do not divide by the std")
    beta: float = setting(0.04, "factor of the KL penalty; 0: none, and no pi_ref in memory")
    epsilon: float = setting(0.2, "the clip's lower limit is 1 - epsilon")
    epsilon_high: float | None = setting(None, "the upper is 1 + epsilon_high; None: epsilon")
    loss_type: str = setting("grpo", "how to average over tokens: grpo, dapo or dr_grpo")
    num_iterations: int = setting(1, "updates per step, each with all completions of the step")
    micro_batch_size: int = setting(4, "completions in one forward and backward pass")
    learning_rate: float = setting(1e-6, "its peak; 1e-5 was too large for half a billion weights")
    warmup_steps: int = setting(10, "steps in which it rises to the peak; then it falls towards 0")
    max_grad_norm: float = setting(1.0, "a gradient with a larger norm is scaled to this norm")
    steps: int = setting(300, "steps of sampling and learning")
    save_steps: int = setting(50, "steps between checkpoints")
    seed: int = setting(0, "decides which prompts and tokens are drawn")
    bf16: bool | None = setting(None, "multiply in bfloat16; None: where the GPU can")

    def __post_init__(self):
        if self.loss_type not in ("grpo", "dapo", "dr_grpo"):
            raise ValueError(f"loss_type is {self.loss_type!r}, not grpo, dapo or dr_grpo")
        if self.scale_rewards not in ("group", "none"):
            raise ValueError(f"scale_rewards is {self.scale_rewards!r}, not group or none")
        if self.bf16 not in (None, True, False):
            raise ValueError(f"bf16 is {self.bf16!r}, not True, False or None")
        least = {"num_generations": 2, "warmup_steps": 0, "seed": 0, "learning_rate": 0, "beta": 0,
                 "epsilon": 0, "epsilon_high": 0, "temperature": 1e-6, "max_grad_norm": 1e-6}
        for name, value in vars(self).items():
            default = getattr(type(self), name)
            if name in ("loss_type", "scale_rewards", "bf16") or value is default:
                continue
            whole = isinstance(default, int)  # where 8 is the default, 8.5 cannot be
            low = least.get(name, 1)
            if not (isinstance(value, Integral if whole else Real) and low <= value < math.inf):
                raise ValueError(f"{name} is {value!r}, and must be {'a whole' if whole else 'a'} "
                                 f"number, at least {low}")
            # NumPy's numbers become Python's, which a checkpoint can hold.
            setattr(self, name, int(value) if whole else float(value))


def check_data(dataset, config):
    """Raise ValueError if `train` cannot use the data, as far as its first row shows."""
    if len(dataset) < config.prompts_per_step:
        raise ValueError(f"prompts_per_step is {config.prompts_per_step}, rows {len(dataset)}")
    columns = set(dataset[0])
    if "prompt" not in columns or columns & {"prompts", "completions", "completion_ids"}:
        raise ValueError(f"the data has the columns {sorted(columns)}: it needs a `prompt`, "
                         "and not prompts, completions or completion_ids, which `grade` adds")


def autocast(model, bf16=None):
    """In `with autocast(model):`, the model multiplies its matrices in bfloat16, if the GPU can."""
    # GPUs multiply bfloat16, a number format of 16 bits, several times as fast as float32. But the
    # weights themselves must stay in float32: an optimizer step moves a weight by about 0.000001,
    # and near 0.02, where bfloat16 numbers are 0.00012 apart, it would be rounded away.
    # Inside the `with`, trained weights are copied to bfloat16 once, and the copies stay until its
    # end. So the `with` must end before the weights change, as it does in `train`.
    device = model.device.type
    if bf16 is None:
        bf16 = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device, torch.bfloat16, enabled=bf16)


def scheduled_rate(config, step):
    """The learning rate. It rises linearly to its peak at step `warmup_steps` (a shorter run never
    gets there), then falls linearly. It would reach 0 one step after the last."""
    up = step / max(1, config.warmup_steps)
    down = (config.steps + 1 - step) / max(1, config.steps + 1 - config.warmup_steps)
    return config.learning_rate * min(up, down)


def save_run(folder, config, history, model, reference, optimizer):
    """Write metrics.jsonl and, when it is due, checkpoint.pt: 16 bytes per weight, 12 at beta=0."""
    step = len(history)
    # default=float: `after_step` may add a NumPy number or a tensor, which JSON does not know.
    lines = [json.dumps(metrics, default=float) + "\n" for metrics in history]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if step % config.save_steps == 0 or step == config.steps:
        torch.save({"config": vars(config), "history": lines, "model": model.state_dict(),
                    "reference": reference.state_dict() if reference else None,
                    "optimizer": optimizer.state_dict()}, folder / "checkpoint.new")
        (folder / "checkpoint.new").replace(folder / "checkpoint.pt")  # so it is always whole


def open_run(folder, resume, config, model, reference, optimizer):
    """Make the folder or, to resume, load its checkpoint. Returns the metrics of the steps done."""
    if not folder:
        if resume:
            raise ValueError("resume=True needs the output_dir of the run to continue")
        return []
    path = Path(folder, "checkpoint.pt")
    if not resume and (path.exists() or Path(folder, "metrics.jsonl").exists()):
        raise ValueError(f"{folder} holds a run: resume it, or name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        if resume:  # in a notebook, the model may be half trained by now: load it again first
            tqdm.write(f"no checkpoint in {folder}: starting at step 1 with the model as it is")
        return []
    saved = torch.load(path, map_location="cpu")
    may_change = ("steps", "save_steps", "micro_batch_size", "sampling_batch_size")
    for name, there in saved["config"].items():
        here = getattr(config, name, None)
        if here != there and name not in may_change:
            raise ValueError(f"{folder} holds another run: {name} is {there} there, {here} here")
    model.load_state_dict(saved["model"])
    if reference:
        reference.load_state_dict(saved["reference"])
    optimizer.load_state_dict(saved["optimizer"])
    tqdm.write(f"going on after step {len(saved['history'])}")
    return [json.loads(line) for line in saved["history"]]


# ---- 11. The relatives, as settings and as lines to paste --------------------------------
# REINFORCE  Section 2's gradient, with the group's mean as baseline: scale_rewards="none",
#            loss_type="dr_grpo", beta=0.
#
# RLOO       REINFORCE Leave One Out: the baseline is the mean of the *other* rewards. R_i minus it
#            is G / (G - 1) times R_i - mean(R). AdamW hardly notices a constant factor, so the
#            settings of REINFORCE will do. To have it exactly, add below `centered = ...`:
#                centered = centered * rewards.shape[-1] / (rewards.shape[-1] - 1)
#
# Dr. GRPO   REINFORCE with the clip: scale_rewards="none", loss_type="dr_grpo", beta=0, and
#            num_iterations=2 or more, since the clip does nothing in a first update.
#
# DAPO       loss_type="dapo", beta=0, num_iterations=2 (for the clip, again), epsilon_high=0.28: an
#            unlikely token of 0.01 may now rise to 0.0128. (At 0.9 the limit, 1.152, does nothing.)
#            Completions that end in the last 64 tokens before the limit lose up to 1 (equation 13
#            of arXiv:2503.14476): a reward function adds this, with ids from completion_ids and
#            limit = max_completion_length (above 64). (Left out: new prompts for equal rewards.)
#                def overlong_penalty(ids, limit):
#                    return max(-1.0, min(0.0, (limit - 64 - len(ids)) / 64))
#
# GSPO       One ratio per completion, the geometric mean of its tokens' ratios (arXiv:2507.18071).
#            It moves much less than a single ratio, hence epsilon=3e-4 and epsilon_high=4e-4, with
#            num_iterations=2. All else stays. In `grpo_loss`, the line `ratio = ...` becomes
#                log_ratio = masked_mean(logprobs - old_logprobs.detach(), mask, dim=1)  # (n,)
#                ratio = log_ratio.clamp(max=50).exp().unsqueeze(1).expand_as(logprobs)  # (n, T)
#
# TRL's KL   Section 3 assumes that pi_theta drew the tokens. After a first update, this is not
#            so: pi_old did. So TRL 1.16 multiplies k3 by the ratio. The line `loss = ...` becomes
#                loss = -average(surrogate - beta * ratio * kl, mask, loss_type,
#                                max_completion_length)
#            At ratio 1 the value is the same, but not the gradient. (Not with GSPO's ratio.) With
#            d = log(pi_theta/pi_ref), the KL is sum(pi * d). Its gradient is sum(pi * d * grad log
#            pi), since the other half of the product rule, sum(pi * grad log pi), is 0 (section 2).
#            A penalty's gradient is a factor times grad log pi, and the right factor is d:
#
#                penalty             factor       is the average gradient that of the KL?
#                k1 = d              1            no: it is 0 on average, and penalises nothing
#                |d|                 1 or -1      no: the same pull near and far
#                k2 = d^2 / 2        d            yes, though k2 is not the KL
#                k3 = e^-d - 1 + d   1 - e^-d     nearly, if d is small
#                ratio * k3          d            yes: k3 (from the ratio) + 1 - e^-d (from k3) = d
#
# Left out: LoRA, gradient checkpointing, several GPUs and a faster sampler (vLLM), which TRL, verl
# and RLinf have; a learned reward model, rewards for single steps, and a renewed reference.


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
