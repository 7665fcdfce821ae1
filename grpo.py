# SPDX-License-Identifier: MIT-0
"""GRPO in one file: how a language model learns to reason from nothing but a score.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) is a loop of five moves:

    1. sample     ask the model each question G times, at random              (section 2)
    2. score      let a rule, not a person, give every answer a number        (section 1)
    3. compare    advantage = how much better than the other G - 1 answers    (section 3)
    4. update     make the tokens of better answers likelier, of worse ones
                  less likely, but only a little at a time                    (sections 4 to 8)
    5. repeat     with fresh answers from the model as it is now              (sections 9 to 11)

The equation that this file computes. For a question q, draw answers o_1 ... o_G; answer i has
|o_i| tokens o_i,1 ... o_i,|o_i|, a reward R_i and one advantage A_i for all its tokens. Maximise

    J = mean over i of  1/|o_i| * sum over t of
            [ min( r_it * A_i,  clip(r_it, 1 - eps, 1 + eps) * A_i )  -  beta * k3_it ]

    A_i  = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                          group_advantages
    r_it = pi_theta(o_it | q, o_i,<t) / pi_old(o_it | q, o_i,<t)           clipped_surrogate
    k3_it = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1, at the same token  k3_kl

Three policies appear, and it pays to keep them apart from the start:

    pi_theta  the model that is being trained; the only one that gets a gradient
    pi_old    the same model at the moment when it wrote the answers: not a second model in
              memory, only the numbers that it gave its own tokens
    pi_ref    a frozen copy of the model from before training, a leash for the first one
              (in memory only when beta > 0)

One small example runs through the comments, and the tests check every number of it. The question
is "John has 3 apples and buys 2 more. How many apples does he have?" and the four answers are

    answer            1: "3+2 = \\boxed{5}"    2: "\\boxed{5}"   3: "\\boxed{6}"   4: "3-2 = \\boxed{1}"
    tokens            2                       1                1                2

(Two tokens and one token, so that a pencil is enough. In truth it is a dozen.)

Shapes: B questions, G answers to each, N = B * G rows; the G answers to one question stand next to
each other ("group-major": rows 0..G-1 belong to question 0). P is the width of the prompts,
padded on the left; T the width of the answers ("completions"), padded on the right; V the
vocabulary. Every function up to section 8 takes tensors and gives tensors, and stands alone:
paste it under `import torch` (`rule_reward` with `extract_boxed`, under `import re`).

What is changed against the papers, and why: the mean over tokens is over the answers of a whole
step, however it is cut into micro-batches; a log-ratio is limited to +-50 so that nothing
overflows; answers may be sampled and scored in bfloat16 while the weights stay in float32. What
is left out: a learned reward model, a critic, iterated reference models, several GPUs.
"""

import copy
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Optional

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import get_scheduler


# ------------------------------------------------------------------------------------------------
# 1. The reward: a rule, not a model
#
# For mathematics nobody needs to train a reward model: the right answer is known, so a rule is the
# judge. The model is asked to put its result into \boxed{...}; 0.5 for doing so, 1.0 more for being
# right. The rule reads text that a model wrote, and a model under training writes anything at all:
# it must never raise, never take long, and never run what it reads (no eval).
# ------------------------------------------------------------------------------------------------


def extract_boxed(text):
    r"""Contents of the complete \boxed{...} that opens last in `text`, or None where there is none.

    The last one, because people and models write intermediate boxes first and the result last.
    Braces nest (\boxed{\frac{1}{2}} holds \frac{1}{2}); \{ and \} are printed braces and do not
    count. One pass over the text: time linear in its length.
    """
    open_braces = []  # where the contents of each still open brace begin; -1 for one without \boxed
    best = (-1, None)  # (where the contents begin, contents) of the best box so far
    for brace in re.finditer(r"\\boxed\{|\\[{}]|[{}]", text):
        if brace.group() == "\\boxed{":
            open_braces.append(brace.end())
        elif brace.group() == "{":
            open_braces.append(-1)
        elif brace.group() == "}" and open_braces:  # a closing brace too many is just text
            begin = open_braces.pop()
            if begin > best[0]:  # closes later and opened later: keeps "opens last" true when nested
                best = (begin, brace.start())
    return None if best[1] is None else text[best[0] : best[1]]


def rule_reward(completion, answer):
    r"""Reward of one completion: 0.0 without a box, 0.5 for a box, 1.5 for a box with the answer.

    `completion` and `answer` are strings. The box counts as right if it equals the answer as a
    string or as a number (difference below 0.01), with numbers read as a person reads them: "1,000",
    "1{,}000", "$1000", "\$1000", "1000%", "1000." and "1000.00" are all the same number; "1_000",
    "nan" and digits of other scripts are none. Total: gives a float for every string, in linear time.

        >>> rule_reward(r"There are 9 * 7 = \boxed{63} eggs.", "63")
        1.5
    """

    def number(text):
        text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip().removesuffix(".").strip()
        # Written out instead of trusting float(), which also takes "nan", "1_000" and "٣".
        digits = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
        read = re.fullmatch(rf"([+-]?)\s*({digits})", text)
        try:
            value = float(read[1] + read[2].replace(",", ""))
        except (TypeError, ValueError):  # no match at all, or no digit in it
            return None
        return value if abs(value) < float("inf") else None  # 1e999 is not a number either

    boxed = extract_boxed(completion)
    if boxed is None or not boxed.strip():
        return 0.0
    if boxed.strip() == answer.strip():
        return 1.5
    given, wanted = number(boxed), number(answer)
    # round: 5.01 - 5 is 0.00999... in floating point, and would pass for "below 0.01".
    right = given is not None and wanted is not None and round(abs(given - wanted), 9) < 0.01
    return 1.5 if right else 0.5


# The apples: answers 1 and 2 are boxed and right, 3 and 4 boxed and wrong, so the rewards are
#
#     R = [1.5, 1.5, 0.5, 0.5]
#
# An answer that is right but not boxed gets 0. That is harsh on purpose (a number somewhere in the
# text is easy to produce by accident), and it is why the first thing that a small model learns is
# the format. Watch for a model that learns *only* the format: reward stuck at 0.5 is the smallest
# case of reward hacking.


# ------------------------------------------------------------------------------------------------
# 2. Sampling: G answers to every question
#
# A language model gives a distribution over the next token; sampling draws from it, appends the
# token, and asks again. `model.generate` does that too, but with the checkpoint's own settings
# mixed in: Qwen2.5's generation_config.json says top_p 0.8, top_k 20, repetition_penalty 1.1, and
# without those the library's default is top_k 50. Then the tokens come from another distribution
# than the one whose probabilities go into the ratio, and nothing in the loss betrays it. The loop
# below has no such settings: it draws from softmax(logits / temperature), all of it, and says with
# which probability. Those log-probabilities are kept, to be held against the scorer's (section 4).
#
# Two things make it fast. The prompt is read once and its keys and values (the "KV cache") are
# copied to the G rows that continue it. And rows that have ended are taken out of the batch.
# ------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """What was sampled. N = B * G rows, group-major; prompts of width P, completions of width T."""

    input_ids: torch.Tensor  # (N, P+T) left-padded prompt, then right-padded completion
    attention_mask: torch.Tensor  # (N, P+T) 1 on every real token, the end token included
    completion_mask: torch.Tensor  # (N, T) bool: the tokens that the model chose
    logprobs: torch.Tensor  # (N, T) float32: the sampler's own log pi_old of each of them
    texts: list  # N strings, special tokens stripped
    truncated: torch.Tensor  # (N,) bool: the cap came before an end token


def end_token_ids(model, tokenizer):
    """The set of token ids that end an answer: Qwen has two, and missing one of them trains the model
    on whatever it babbles after its answer. They stand in different places, so all are asked."""
    generation = getattr(model, "generation_config", None)
    ids = set()
    for source in (generation, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        ids.update(found if isinstance(found, (list, tuple)) else [found])
    ids.discard(None)
    if not ids:
        raise ValueError(
            "neither the model nor the tokenizer names an end token, so no answer could ever end: "
            "set model.generation_config.eos_token_id"
        )
    return sorted(ids)


def encode_prompts(tokenizer, prompts):
    """Token ids of each prompt (a list of lists): strings as they are, chats through the template."""
    if all(isinstance(prompt, str) for prompt in prompts):
        encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    elif all(isinstance(prompt, (list, tuple)) for prompt in prompts):
        # add_generation_prompt: the template's "now the assistant speaks", or the model would
        # begin by writing a role name, or by continuing the question.
        encoded = [
            tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
            for prompt in prompts
        ]
    else:
        raise ValueError("prompts are all strings or all chats (lists of role/content messages)")
    for prompt, ids in zip(prompts, encoded):
        if len(ids) == 0:
            raise ValueError(f"this prompt has no tokens to continue: {prompt!r}")
    return encoded


def choose_tokens(logits, temperature, uniforms):
    """One token per row. (n, V) logits, (n,) uniform numbers -> (n,) tokens, (n,) log-probabilities.

    Draws from softmax(logits / temperature) by inverting the cumulative distribution: lay the V
    probabilities end to end on a line of length 1 and see in whose stretch the uniform number
    falls. Temperature 0 takes the likeliest token instead (its log-probability is at temperature 1).
    """
    # bfloat16 holds three digits, too few to tell 150,000 probabilities apart: up-cast first.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (n, V)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)  # (n,)
    else:
        ends = logprobs.exp().cumsum(dim=-1, dtype=uniforms.dtype)  # (n, V) where stretches end
        points = uniforms.unsqueeze(1) * ends[:, -1:]  # (n, 1) on a line as long as it came out
        # right=True: a token of probability 0 has an empty stretch, and is never hit.
        tokens = torch.searchsorted(ends, points, right=True).squeeze(1)  # (n,)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)  # if rounding put the point at the very end
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


@torch.no_grad()
def sample_groups(
    model, tokenizer, prompts, num_generations, *, max_completion_length, temperature=1.0, drop_every=4
):
    """Sample `num_generations` answers to each of B prompts; gives a `Rollout` of N = B * G rows.

    `prompts` are B strings or B chats. Tokens are drawn from exactly softmax(logits / temperature),
    0 meaning greedy, until any of the model's end tokens or `max_completion_length` tokens. The ids
    are kept as they were drawn: to decode and encode again, as much published code does, need not
    give the same tokens back. Reproducible under torch.manual_seed. Every `drop_every` tokens the
    rows that have ended leave the batch; the samples do not depend on it. ValueError for settings
    out of range, and for a prompt that leaves no room in the model's context.
    """
    for name, value, least in (
        ("num_generations", num_generations, 1),
        ("max_completion_length", max_completion_length, 1),
        ("temperature", temperature, 0),
        ("the number of prompts", len(prompts), 1),
    ):
        if not value >= least:
            raise ValueError(f"{name} is {value}, and must be at least {least}")
    G, T = num_generations, max_completion_length
    device = model.device
    end_ids = torch.tensor(end_token_ids(model, tokenizer), device=device)
    encoded = encode_prompts(tokenizer, prompts)
    B, P, N = len(encoded), max(map(len, encoded)), len(encoded) * G
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and P + T > context:
        longest = max(range(B), key=lambda b: len(encoded[b]))
        raise ValueError(
            f"prompt {longest} has {P} tokens; with {T} for the answer that is more than the model's "
            f"context of {context}: {str(prompts[longest])[:80]!r}"
        )

    # Pad the prompts on the left, so that all of them end, and all answers begin, in one column.
    # Any id will do as padding, an end token too: what counts as real is said by masks that are made
    # from positions. A mask made from values (`!= pad_token_id`) loses the end token wherever pad
    # and end are the same id, and then the model is never taught to stop.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else int(end_ids[0])
    input_ids = torch.full((B, P), pad)
    attention_mask = torch.zeros(B, P + T, dtype=torch.long)
    for b, ids in enumerate(encoded):
        input_ids[b, P - len(ids) :] = torch.tensor(ids)
        attention_mask[b, P - len(ids) :] = 1  # and 1 for all T places of the answer, for now
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    # The first real token is at position 0, however much padding stands before it. Models with
    # rotary positions would forgive a shift; those with learned positions go wrong by tens of nats.
    position_ids = (attention_mask[:, :P].cumsum(dim=1) - 1).clamp(min=0)  # (B, P)

    # No dropout while sampling; and with gradient checkpointing, train() would turn the cache off.
    was_training = model.training
    model.eval()
    try:
        # Read each prompt once ("prefill"); only the last column's logits say what comes next.
        out = model(
            input_ids=input_ids,
            attention_mask=attention_mask[:, :P],
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1]  # (B, V)
        rows = torch.arange(B, device=device).repeat_interleave(G)  # (N,) 0 0 0 1 1 1 ...
        cache.reorder_cache(rows)  # B rows of keys and values become N
        logits, mask = logits[rows], attention_mask[rows]  # (N, V), (N, P+T)
        position = position_ids[rows, -1:] + 1  # (N, 1) of the token that is drawn next

        # All random numbers are drawn beforehand, one for each place of each row, so that a row's
        # sample does not depend on which other rows are still being written.
        uniforms = torch.rand(N, T, dtype=torch.float64) if temperature > 0 else torch.zeros(N, T)
        # 64 bits, since a sum of 150,000 float32 terms loses the small ones; Apple's GPUs have 32.
        uniforms = uniforms.to(torch.float32 if device.type == "mps" else torch.float64).to(device)
        completions = torch.full((N, T), pad, device=device)
        completion_mask = torch.zeros(N, T, dtype=torch.bool, device=device)
        logprobs = torch.zeros(N, T, device=device)
        live = torch.arange(N, device=device)  # (n,) the rows still in the batch
        ended = torch.zeros(N, dtype=torch.bool, device=device)  # (n,) among them, those at their end
        for t in range(T):
            tokens, logps = choose_tokens(logits, temperature, uniforms[live, t])
            completions[live, t], logprobs[live, t] = tokens, logps.float()
            completion_mask[live, t] = ~ended  # the first end token is in; what follows it is not
            ended = ended | torch.isin(tokens, end_ids)
            if t + 1 == T:
                break
            # To ask a GPU "who has ended?" is to wait for it, so it is asked every few tokens only.
            if (t + 1) % drop_every == 0:
                keep = (~ended).nonzero().squeeze(1)
                if len(keep) == 0:
                    break
                if len(keep) < len(live):
                    cache.reorder_cache(keep)
                    live, ended, tokens = live[keep], ended[keep], tokens[keep]
                    mask, position = mask[keep], position[keep]
            out = model(
                input_ids=tokens.unsqueeze(1),
                attention_mask=mask[:, : P + t + 1],
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            logits, position = out.logits[:, -1], position + 1
    finally:
        model.train(was_training)

    # Cut the columns that nobody reached, and blank what was drawn after an end token.
    T = int(completion_mask.any(dim=0).sum())
    completion_mask, completions = completion_mask[:, :T], completions[:, :T]
    completions = completions.masked_fill(~completion_mask, pad)
    logprobs = logprobs[:, :T].masked_fill(~completion_mask, 0.0)
    ends = torch.isin(completions, end_ids) & completion_mask  # (N, T)
    texts = [
        tokenizer.decode(ids[real].tolist(), skip_special_tokens=True)
        for ids, real in zip(completions.cpu(), completion_mask.cpu())
    ]
    return Rollout(
        input_ids=torch.cat([input_ids[rows], completions], dim=1),
        attention_mask=torch.cat([attention_mask[rows, :P], completion_mask.long()], dim=1),
        completion_mask=completion_mask,
        logprobs=logprobs,
        texts=texts,
        truncated=~ends.any(dim=1),
    )


# ------------------------------------------------------------------------------------------------
# 3. Advantages: better or worse than the other answers to the same question
#
# PPO trains a second network, the critic, to predict the reward that was to be expected. GRPO asks
# the model G times and takes the mean of the group as that expectation. What remains is the sign and
# the size of the surprise; all tokens of an answer share it.
# ------------------------------------------------------------------------------------------------


def group_advantages(rewards, scale_rewards=True):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> (..., G).

    The std is the population's (divided by G), as in the papers' formula and their worked numbers;
    torch's default divides by G - 1, and most code, TRL's included, follows it: advantages smaller
    by sqrt((G-1)/G), 6 % at G = 8. A group of equal rewards gets exact zeros: it has nothing to
    teach. `scale_rewards=False` leaves the std out (Dr. GRPO, section 12). ValueError for fewer than
    two rewards and for NaN or inf.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2:
        raise ValueError(f"a group needs at least 2 rewards to compare, got shape {tuple(rewards.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite numbers, got {rewards.tolist()}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = centered.square().mean(dim=-1, keepdim=True).sqrt()  # (..., 1)
    # The mean of three times 0.1 is not quite 0.1. Divided by a std of the same 1e-17, that rounding
    # error would become advantages of size 1: a lesson made of nothing. So "equal" has a tolerance,
    # and, unlike an epsilon in the divisor, it leaves every real group's value alone.
    flat = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    advantages = centered / std.masked_fill(flat, 1.0) if scale_rewards else centered
    return advantages.masked_fill(flat, 0.0)


# The apples: R = [1.5, 1.5, 0.5, 0.5], mean 1, std 0.5, so A = [+1, +1, -1, -1].
# A group in which all are right, or all wrong, is all zeros. Early on, most groups are all wrong; late
# in training, most are all right. The share of such groups is logged as zero_variance_fraction:
# near 1, the questions are too hard or too easy for this model, and no setting will make it learn.


# ------------------------------------------------------------------------------------------------
# 4. Log-probabilities: what the model thinks of each token now
#
# To move a token's probability, we need it as a differentiable number. One forward pass over prompt
# and answer gives it for all tokens at once: the hidden state in column j predicts the token in
# column j + 1. This is "scoring", and unlike sampling it is parallel over the T tokens.
# ------------------------------------------------------------------------------------------------


def token_logprobs(
    model,
    input_ids,
    attention_mask,
    completion_length,
    temperature=1.0,
    *,
    num_generations=1,
    return_entropy=False,
    tokens_per_chunk=512,
):
    """log pi_theta of each completion token: ids and mask (N, P+T) -> (N, T), differentiable.

    T is `completion_length`. `temperature` is the one that was sampled at: scoring at another one
    compares two different distributions. float32 whatever the model computes in (float64 for a
    float64 model); 0 where `attention_mask` is 0. With `num_generations` = G > 1, the rows are groups
    of G that share a prompt, which is then computed once for all G, gradients included (not together
    with gradient checkpointing, which does without a cache). With `return_entropy`, gives
    (log-probs, entropies): the entropy, in nats, of the whole distribution at each token.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: greedy choices have no log-probability to score")
    T, P = completion_length, input_ids.shape[1] - completion_length
    if T < 1 or P < 1:
        raise ValueError(f"completion_length {T} must leave a prompt in {input_ids.shape[1]} columns")
    head, trunk = model.get_output_embeddings(), model.base_model
    real = attention_mask[:, P:].bool()  # (N, T)

    # The trunk gives hidden states, the head turns them into V logits each. Some models then scale
    # or cap these (Gemma 2, Granite, Cohere), and head(trunk(x)) is wrong by nats: compare once.
    if not hasattr(model, "head_gives_logits"):
        with torch.no_grad():
            few = input_ids[:1, :8]
            apart = head(trunk(few, use_cache=False).last_hidden_state) - model(few).logits
        model.head_gives_logits = apart.abs().max().item() < 1e-3
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)  # (N, P+T), as in the sampler
    if not model.head_gives_logits:  # the long way: all logits at once, from the model itself
        states = model(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
        states, head = states[:, P - 1 : -1], torch.nn.Identity()  # (N, T, V)
    elif num_generations == 1:
        out = trunk(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        # Off by one, on purpose: the last state has nothing to predict, and the last state of the
        # *prompt* predicts the first token of the answer.
        states = out.last_hidden_state[:, P - 1 : -1]  # (N, T, H)
    else:
        # As in the sampler: each prompt once (B rows), its keys and values to all G answers. To
        # repeat is differentiable, so the prompt gets the sum of the gradients of its G answers.
        G = num_generations
        out = trunk(
            input_ids[::G, :P],
            attention_mask=attention_mask[::G, :P],
            position_ids=position_ids[::G, :P],
            use_cache=True,
        )
        rows = torch.arange(len(input_ids), device=input_ids.device) // G  # (N,) 0 0 0 1 1 1 ...
        first, cache = out.last_hidden_state[rows, -1:], out.past_key_values  # (N, 1, H)
        cache.reorder_cache(rows)
        out = trunk(
            input_ids[:, P:],
            attention_mask=attention_mask,
            position_ids=position_ids[:, P:],
            past_key_values=cache,
            use_cache=True,
        )
        states = torch.cat([first, out.last_hidden_state[:, :-1]], dim=1)  # (N, T, H)

    def score(states, targets):  # (n, H), (n,) -> (n,), (n,)
        logits = head(states)  # (n, V)
        # float32 before the softmax: in bfloat16 a log-probability is off by 0.025 on average.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        log_normaliser = logits.logsumexp(dim=-1)  # (n,)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - log_normaliser
        if not return_entropy:
            return logprobs, logprobs
        # -sum p log p over the whole vocabulary. (-log p of the drawn token has the same mean, but
        # as a bonus in a loss its expected gradient is zero: it has to be the whole distribution.)
        return logprobs, log_normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)

    # The logits of 16 answers of 512 tokens over Qwen's vocabulary are 4.6 GiB in float32, and the
    # softmax's backward keeps three such tensors. So the head runs over a few hundred tokens at a
    # time, and `checkpoint` forgets each chunk's logits and computes them again in the backward pass.
    # Padding is left out altogether.
    states, targets = states[real], input_ids[:, P:][real]  # (M, H), (M,) for M real tokens
    chunks = [
        torch.utils.checkpoint.checkpoint(score, some, ids, use_reentrant=False)
        for some, ids in zip(states.split(tokens_per_chunk), targets.split(tokens_per_chunk))
    ]
    kind = torch.promote_types(states.dtype, torch.float32)
    nothing = torch.zeros(real.shape, dtype=kind, device=real.device)  # (N, T)
    if not chunks:
        return (nothing, nothing) if return_entropy else nothing
    logprobs, entropies = (nothing.masked_scatter(real, torch.cat(part)) for part in zip(*chunks))
    return (logprobs, entropies) if return_entropy else logprobs


# What tells that all of this is right is not that "the ratio is 1 at the first step": that holds
# whatever the sampler does, since both sides of the ratio come from the scorer. It is that the
# scorer agrees with what the *sampler* said of the same tokens. Their mean distance is logged as
# sampler_gap: about 1e-6 in float32, a few hundredths at most in bfloat16 (which rounds differently in
# the two). More means that one of them uses another temperature, another mask, other positions.


# ------------------------------------------------------------------------------------------------
# 5. Ratio and clip: learn from an answer, but not too much
#
# The answers were written by pi_old. After some updates pi_theta is another policy, and the ratio of
# the two says how much more often it would choose this token. The objective is ratio * advantage;
# but as soon as the ratio has gone far enough *in the direction that pays*, the min takes the clipped
# branch, which is constant: no gradient, no further push from this token.
# ------------------------------------------------------------------------------------------------


def clipped_surrogate(logprobs, old_logprobs, advantages, epsilon=0.2, epsilon_high=None):
    """min(r A, clip(r, 1 - eps, 1 + eps_high) A) per token (PPO, arXiv:1707.06347, equation 7).

    (N, T), (N, T), (N,) -> (N, T), to be maximised. r = pi_theta / pi_old, from the difference of
    log-probabilities: the quotient of two tiny numbers would be noise. `epsilon_high` defaults to
    `epsilon`; an `epsilon` of 1 or more is no lower bound. Finite for any finite input.
    """
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    # A log-ratio of 100 would be inf, and even where the min throws it away its gradient, 0 * inf,
    # would be NaN. e^50 is far beyond anything that is still learning.
    ratio = (logprobs - old_logprobs).clamp(-50, 50).exp()  # (N, T)
    A = advantages.unsqueeze(1)  # (N, 1): the same for every token of a row
    return torch.min(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon_high) * A)


# The four corners, at eps 0.2, with the apples after some updates. Say that pi_old gave every token
# the probability 0.4, and pi_theta now gives
#
#     answer 1: 0.6, 0.4     answer 2: 0.2     answer 3: 0.6     answer 4: 0.2, 0.4
#
#     A     r            min(r A, clip(r) A)                    gradient with respect to log pi_theta
#     +1    1.5 (ans. 1)  min( 1.5,  1.2) =  1.2   clipped      0      liked, and already much likelier
#     +1    0.5 (ans. 2)  min( 0.5,  0.8) =  0.5   not clipped  r A =  0.5   liked: bring it back up
#     -1    1.5 (ans. 3)  min(-1.5, -1.2) = -1.5   not clipped  r A = -1.5   disliked: push it down
#     -1    0.5 (ans. 4)  min(-0.5, -0.8) = -0.8   clipped      0      disliked, and already rare
#      1    1.0           A                        not clipped  A      (every token, at the first update)
#
# With one update per batch of answers, pi_theta *is* pi_old when the gradient is taken: every ratio is
# 1 and the clip never acts. It starts to work with num_iterations > 1 or several mini-batches.
# A common mistake is max in place of min for negative advantages: it keeps pushing in corner 4 and
# stops in corner 3, the one where the policy went the wrong way.


# ------------------------------------------------------------------------------------------------
# 6. The KL penalty: do not drift too far from where you started
#
# A policy that only chases the reward forgets how to write. KL(pi_theta || pi_ref) measures how far it
# has gone; k3 estimates it from the tokens at hand.
# ------------------------------------------------------------------------------------------------


def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (N, T), (N, T) -> (N, T).

    Schulman's estimator (joschu.net/blog/kl-approx.html). Mind which policy is on top: with the
    fraction the other way round it estimates something else. For tokens drawn from pi_theta its mean
    is exactly KL(pi_theta || pi_ref): the last two terms give the KL itself, -log(pi_ref/pi_theta),
    and the mean of pi_ref/pi_theta - 1 is zero, since pi_ref sums to 1. It is never negative, since
    e^x >= 1 + x. Finite for any finite input.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-50, 50)  # log(pi_ref / pi_theta)
    return log_ratio.exp() - log_ratio - 1


# The apples, with pi_ref = 0.4 for every token: where pi_theta is 0.2 the fraction is 2 and
# k3 = 2 - log 2 - 1 = 0.3069; where it is 0.6, k3 = 2/3 - log 2/3 - 1 = 0.0721; where 0.4, 0.
# Its gradient with respect to log pi_theta is 1 - pi_ref/pi_theta: -1 for the first (come back up),
# +0.3333 for the second (come back down). The log-ratio alone ("k1") has the right mean as well,
# but its gradient is 1 for every token, and the mean of that over samples is zero: as a loss it
# regularises nothing at all.


# ------------------------------------------------------------------------------------------------
# 7. The masked mean: padding is not data
# ------------------------------------------------------------------------------------------------


def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is set (bool, int or float); 0, not NaN, where it is nowhere set.

    Multiplying by the mask would let a NaN behind it through, since 0 * NaN is NaN; `where` does not,
    neither in the value nor in the gradient.
    """
    mask = mask.bool().expand_as(values)
    kept = torch.where(mask, values, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ------------------------------------------------------------------------------------------------
# 8. The loss
#
# Everything above, put together, with a minus sign because optimizers minimise. What is left to decide
# is how the tokens of all answers are averaged. It looks like a detail, and it is not: it decides how
# much a long answer counts.
# ------------------------------------------------------------------------------------------------


def grpo_loss(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    *,
    epsilon=0.2,
    epsilon_high=None,
    beta=0.04,
    loss_type="grpo",
    max_completion_length=None,
    divisor=None,
):
    """-(clipped surrogate - beta * k3), averaged over tokens and answers; gives (loss, metrics).

    (N, T) log-probs of pi_theta, pi_old and pi_ref (None with beta = 0), (N,) advantages, (N, T) mask
    of real tokens; what stands behind the mask reaches nothing. `loss_type` is the average:

        "grpo"     mean over answers of the mean over their tokens (DeepSeekMath, the equation on top).
                   Each answer counts the same, so each token of a long one counts less: a long wrong
                   answer is hardly punished, and wrong answers grow
        "dapo"     mean over all tokens of all answers (arXiv:2503.14476): a long answer counts more
        "dr_grpo"  sum over tokens / (N * max_completion_length) (arXiv:2503.20783): as "dapo", but the
                   divisor does not depend on what was sampled, which is what makes it unbiased

    `divisor` is for micro-batches: the number of answers ("grpo"), of tokens ("dapo"), or that times
    max_completion_length ("dr_grpo") in the whole batch, of which these rows are a part. The losses,
    and the gradients, of the parts then add up to those of the whole. metrics are plain floats.
    """
    for name, given in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs), ("mask", mask)):
        if given is not None and given.shape != logprobs.shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, logprobs {tuple(logprobs.shape)}")
    if logprobs.dim() != 2 or advantages.shape != logprobs.shape[:1]:
        raise ValueError(
            f"wanted logprobs of shape (N, T) and advantages (N,), got {tuple(logprobs.shape)} and "
            f"{tuple(advantages.shape)}"
        )
    if beta and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, so ref_logprobs are needed; they may be None only with beta=0")
    # What stands behind the mask is replaced in the inputs. To mask the result is too late: NaN and
    # inf are gone from the value then, but come back in the gradient, through exp.
    mask = mask.bool()
    logprobs, old_logprobs, ref_logprobs = (
        None if x is None else x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs)
    )
    surrogate = clipped_surrogate(logprobs, old_logprobs, advantages, epsilon, epsilon_high)  # (N, T)
    kl = torch.zeros_like(surrogate) if ref_logprobs is None else k3_kl(logprobs, ref_logprobs)
    per_token = -(surrogate - beta * kl)  # (N, T)

    if loss_type == "grpo":
        total, whole = masked_mean(per_token, mask, dim=1).sum(), len(mask)
    elif loss_type == "dapo":
        total, whole = torch.where(mask, per_token, 0.0).sum(), int(mask.sum())
    elif loss_type == "dr_grpo":
        if divisor is None and max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' divides by max_completion_length, which is None")
        total, whole = torch.where(mask, per_token, 0.0).sum(), len(mask) * (max_completion_length or 0)
    else:
        raise ValueError(f"loss_type is {loss_type!r}, and must be 'grpo', 'dapo' or 'dr_grpo'")
    loss = total / max(whole if divisor is None else divisor, 1)

    with torch.no_grad():
        ratio = (logprobs - old_logprobs).clamp(-50, 50).exp()  # 1 behind the mask
        A = advantages.unsqueeze(1)
        high = epsilon if epsilon_high is None else epsilon_high
        clipped = (A > 0) & (ratio > 1 + high) | (A < 0) & (ratio < 1 - epsilon)  # corners 1 and 4
        metrics = {
            "loss": loss.item(),
            "kl": masked_mean(kl, mask).item(),
            "clip_fraction": masked_mean(clipped.float(), mask).item(),
            "ratio_max": torch.where(mask, ratio, 0.0).max().item() if mask.numel() else 0.0,
        }
    return loss, metrics


# The apples, beta 0.04, to be followed with a pencil:
#
#     answer                     1                  2        3        4
#     surrogate, per token       1.2, 1.0           0.5     -1.5     -0.8, -1.0
#     k3, per token              0.0721, 0          0.3069   0.0721   0.3069, 0
#
#     "grpo"     means over tokens 1.1, 0.5, -1.5, -0.9, of k3 0.0361, 0.3069, 0.0721, 0.1534
#                loss = -(-0.8 / 4) + 0.04 * 0.5685 / 4 = 0.2 + 0.0057 = 0.2057
#     "dapo"     sums over tokens -0.6 and 0.7580, of 6 tokens
#                loss = 0.6 / 6 + 0.04 * 0.7580 / 6 = 0.1 + 0.0051 = 0.1051
#     "dr_grpo"  the same sums over 4 answers * a cap of 4 tokens
#                loss = (0.6 + 0.04 * 0.7580) / 16 = 0.0394
#
# The gradient for "grpo" with respect to log pi_theta of answer 2's token: -(0.5 - 0.04 * (1 - 2)) / 4
# = -0.135; a step against it makes the token likelier, as it should. For the first token of answer 1
# the clip leaves only the KL: 0.04 * (1 - 2/3) / 2 tokens / 4 answers = 0.0017, a little less likely.
#
# Why does training start at a loss of 0? At the first update every ratio is 1 and every k3 is 0, so
# the "grpo" loss is minus the mean of the advantages, and those sum to zero in each group. Its gradient
# is not zero at all: -A / |o_i| / N for each token. ("dapo" and "dr_grpo" weigh by length, so theirs is
# 0 only if the answers are equally long.) For the same reason the loss says nothing about progress.
# Watch the reward.


# ------------------------------------------------------------------------------------------------
# 9. Settings
# ------------------------------------------------------------------------------------------------


def setting(default, text):
    """A field of GRPOConfig; the text is also what --help prints."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every knob. Names are TRL's GRPOConfig's where it has them, values the documents'."""

    # What is sampled in a step: prompts_per_step * num_generations answers.
    num_generations: int = setting(8, "G, answers to each question; 4 is few, 16 is comfortable")
    prompts_per_step: int = setting(32, "B, questions in a step")
    max_completion_length: int = setting(512, "T, tokens at which an answer is cut off")
    temperature: float = setting(1.0, "of sampling and of scoring; lower explores less")
    # The loss.
    beta: float = setting(0.04, "weight of the KL penalty; 0 saves the reference model")
    epsilon: float = setting(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: Optional[float] = setting(None, "how far it may rise above 1; default: epsilon")
    loss_type: str = setting("grpo", "average over tokens: grpo, dapo or dr_grpo")
    scale_rewards: str = setting("group", "divide advantages by the std of the group, or none")
    # The update.
    steps: int = setting(300, "rounds of sampling and learning")
    num_iterations: int = setting(1, "times that a step's answers are learned from")
    num_mini_batches: int = setting(1, "updates that each such pass is divided into")
    learning_rate: float = setting(1e-6, "AdamW's, at the end of the warm-up; 1e-5 for small steps")
    warmup_steps: int = setting(10, "steps over which the learning rate grows to that")
    lr_scheduler_type: str = setting("linear", "what follows: linear, cosine, constant_with_warmup")
    max_grad_norm: float = setting(1.0, "longest gradient that is followed at full length")
    # The run.
    seed: int = setting(0, "of the order of the questions and of the sampling")
    save_steps: int = setting(50, "steps between checkpoints")
    show_steps: int = setting(10, "steps between groups of answers shown on the screen; 0: never")
    gradient_checkpointing: bool = setting(False, "less memory for the update, for a third more time")
    tokens_per_micro_batch: Optional[int] = setting(None, "tokens in memory at once; default: fits")

    def __post_init__(self):
        # TRL takes True and False here, and so does the command line.
        spelled = {"true": "group", "false": "none"}
        self.scale_rewards = spelled.get(str(self.scale_rewards).lower(), self.scale_rewards)
        for names, wanted, good in (
            ("num_generations", "at least 2: there has to be something to compare", lambda x: x >= 2),
            ("prompts_per_step max_completion_length steps num_iterations num_mini_batches save_steps",
             "at least 1", lambda x: x >= 1),
            ("temperature learning_rate max_grad_norm", "above 0", lambda x: 0 < x < float("inf")),
            ("beta epsilon warmup_steps show_steps", "0 or more", lambda x: 0 <= x < float("inf")),
            ("epsilon_high", "0 or more", lambda x: x is None or x >= 0),
            ("tokens_per_micro_batch", "at least 1", lambda x: x is None or x >= 1),
            ("loss_type", "grpo, dapo or dr_grpo", lambda x: x in ("grpo", "dapo", "dr_grpo")),
            ("scale_rewards", "group or none", lambda x: x in ("group", "none")),
            ("lr_scheduler_type", "linear, cosine or constant_with_warmup",
             lambda x: x in ("linear", "cosine", "constant_with_warmup")),
        ):  # fmt: skip
            for name in names.split():
                if not good(getattr(self, name)):
                    raise ValueError(f"{name} is {getattr(self, name)!r}, and must be {wanted}")
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches is {self.num_mini_batches}: groups are not divided, so at most "
                f"prompts_per_step, which is {self.prompts_per_step}"
            )


# ------------------------------------------------------------------------------------------------
# 10. One step
# ------------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """What is kept from step to step."""

    model: torch.nn.Module  # pi_theta: samples, and is scored
    reference: Optional[torch.nn.Module]  # pi_ref, or None at beta = 0
    weights: list  # float32 master weights, one per trained parameter of the model
    optimizer: torch.optim.Optimizer
    budget: int  # tokens in a micro-batch
    questions_seen: int = 0
    failed_in_a_row: int = 0  # updates not made because a number was not finite
    shown: tuple = ()  # (prompt, texts, rewards, advantages) of one group, to look at


def make_learner(model, config):
    """Set up the precisions, the reference and the optimizer. Changes the model's dtype in place."""
    # On a GPU with bfloat16 the model computes in it, twice as fast and half as large. But an update
    # at learning rate 1e-6 is far smaller than the distance between neighbouring bfloat16 numbers:
    # some 98 % of the weights would not move at all. So the optimizer works on float32 copies, the
    # master weights, and the model gets them rounded, after each update. Elsewhere (CPU, Apple's
    # GPUs, older cards) the model computes in float32, and its parameters are the master weights.
    bf16 = model.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    weights = []
    for parameter in model.parameters():
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        # Only the parameters are cast. `model.to(torch.bfloat16)` would round the rotary embedding's
        # frequencies as well, which are a buffer, and get all the later positions wrong.
        parameter.data = wide.to(torch.bfloat16) if bf16 else wide
        if parameter.requires_grad:
            weights.append(wide if bf16 else parameter)
            weights[-1].grad = torch.zeros_like(wide)
    if not weights:
        raise ValueError("none of the model's parameters has requires_grad: there is nothing to train")
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta else None
    if config.gradient_checkpointing:
        # The method has two names: transformers 5.0's, and the one that replaces it later.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    # AdamW shrinks all weights by 0.01 * learning rate a step unless told otherwise.
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
    return Learner(model, reference, weights, optimizer, config.tokens_per_micro_batch or 8192)


def trained(learner):
    """Pairs of a trained parameter and its master weight, which in float32 are one and the same."""
    return zip([p for p in learner.model.parameters() if p.requires_grad], learner.weights)


def trained_names(model):
    """The names of the trained parameters, in the order of Learner.weights."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def score_rewards(reward_fn, rows, rollout, num_generations):
    """Call the reward function the way TRL does; gives (B, G) rewards, or a ValueError that says what
    is wrong with them. `rows` are the B rows of the data set, each repeated for its G answers."""
    repeated = [row for row in rows for _ in range(num_generations)]
    chats = not isinstance(rows[0]["prompt"], str)
    say = (lambda text: [{"role": "assistant", "content": text}]) if chats else str
    ids = [ids[real].tolist() for ids, real in zip(
        rollout.input_ids[:, -rollout.completion_mask.shape[1] :], rollout.completion_mask)]  # fmt: skip
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    try:
        rewards = reward_fn(
            prompts=[row["prompt"] for row in repeated],
            completions=[say(text) for text in rollout.texts],
            completion_ids=ids,
            **{column: [row[column] for row in repeated] for column in rows[0] if column != "prompt"},
        )
    except Exception as error:
        raise ValueError(f"the reward function {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(repeated):
        size = f" of {len(rewards)}" if isinstance(rewards, (list, tuple)) else ""
        raise ValueError(
            f"the reward function {name} gave a {type(rewards).__name__}{size}; wanted a list of "
            f"{len(repeated)} numbers, one for each completion"
        )
    for i, reward in enumerate(rewards):
        if not isinstance(reward, Real) or not abs(reward) < float("inf"):
            raise ValueError(
                f"the reward function {name} gave {reward!r} at place {i}; wanted one finite number "
                f"for each completion. That completion: {rollout.texts[i][:80]!r}"
            )
    return torch.tensor([float(reward) for reward in rewards]).view(len(rows), num_generations)


def pack(rollout, groups, num_generations, budget):
    """Cut groups into micro-batches of at most `budget` tokens, padding included, where possible.

    Gives a list of (rows, k): row numbers in which every k neighbours share a prompt. Whole groups,
    since their prompt is computed once; groups too large for the budget are cut into equal parts.
    Like lengths together, so that little is padding, and the longest first: if memory is short, it
    shows at once and not after an hour.
    """
    lengths = rollout.completion_mask.sum(dim=1).tolist()  # N
    widths = rollout.attention_mask.sum(dim=1).tolist()  # N, prompt and answer together
    G = k = num_generations
    longest = max((max(lengths[g * G : (g + 1) * G]) for g in groups), default=0)
    while k > 1 and k * longest > budget:
        k = max(part for part in range(1, k) if G % part == 0)
    pieces = [range(i, i + k) for g in groups for i in range(g * G, (g + 1) * G, k)]
    pieces.sort(key=lambda piece: -max(lengths[i] for i in piece))
    batches, filled = [], 0
    for piece in pieces:
        # In a micro-batch every answer is padded to the longest, which came first.
        if not filled:
            longest = max(lengths[i] for i in piece)
        cost = k * longest + widths[piece[0]] - lengths[piece[0]]  # and the prompt, once
        if not batches or filled + cost > budget:
            batches.append([])
            longest, filled = max(lengths[i] for i in piece), 0
            cost = k * longest + widths[piece[0]] - lengths[piece[0]]
        batches[-1].extend(piece)
        filled += cost
    return [(batch, k) for batch in batches]


def narrow(rollout, rows):
    """ids, attention mask and completion mask of some rows, without the columns that are padding in
    all of them: (n, P'+T'), (n, P'+T'), (n, T')."""
    P = rollout.input_ids.shape[1] - rollout.completion_mask.shape[1]
    P_used = int(rollout.attention_mask[rows, :P].sum(dim=1).max())  # the widest prompt among them
    T_used = int(rollout.completion_mask[rows].sum(dim=1).max())  # the longest answer
    columns = slice(P - P_used, P + T_used)
    mask = rollout.completion_mask[rows, :T_used]
    return rollout.input_ids[rows, columns], rollout.attention_mask[rows, columns], mask


def smaller_on_out_of_memory(work, learner, *rest):
    """work(learner, *rest), again with micro-batches of half the size as long as memory is too small.
    The result is the same: the gradients of micro-batches add up to the whole, however it is cut."""
    while True:
        try:
            return work(learner, *rest)
        except torch.OutOfMemoryError as error:
            if learner.budget < 64:
                raise RuntimeError(
                    "out of memory even for one answer at a time. What helps, most first: "
                    "gradient_checkpointing, a smaller max_completion_length, beta=0 (no reference "
                    "model: 2 bytes a weight), a smaller model"
                ) from error
        learner.budget //= 2
        torch.cuda.empty_cache()
        tqdm.write(f"out of memory: from here on {learner.budget} tokens in a micro-batch")


@torch.no_grad()
def score(learner, model, rollout, groups, config):
    """log-probs (N, T) of the rollout under `model`, without gradient: for pi_old and pi_ref."""
    logprobs = torch.zeros_like(rollout.logprobs)
    for rows, k in pack(rollout, groups, config.num_generations, learner.budget):
        ids, attention_mask, mask = narrow(rollout, rows)
        logprobs[rows, : mask.shape[1]] = token_logprobs(
            model, ids, attention_mask, mask.shape[1], config.temperature, num_generations=k
        ).to(logprobs.dtype)
    return logprobs


def accumulate(learner, rollout, groups, advantages, old_logprobs, ref_logprobs, divisor, config):
    """The gradient of one mini-batch, micro-batch by micro-batch, into the .grad of the master weights.
    Gives the metrics, as sums over its tokens."""
    model = learner.model
    learner.optimizer.zero_grad(set_to_none=False)
    # Dropout stays off (eval) while learning too: with it, the ratio would compare two different
    # networks. Gradient checkpointing asks for train mode, so just the modules that do it get it.
    for module in model.eval().modules():
        module.training = bool(getattr(module, "gradient_checkpointing", False))
    sums = {"tokens": 0, "loss": 0.0, "ratio_max": 0.0}
    for rows, k in pack(rollout, groups, config.num_generations, learner.budget):
        ids, attention_mask, mask = narrow(rollout, rows)
        T, k = mask.shape[1], 1 if config.gradient_checkpointing else k
        logprobs, entropies = token_logprobs(
            model, ids, attention_mask, T, config.temperature, num_generations=k, return_entropy=True
        )
        # With one update per batch of answers, pi_old is pi_theta itself, held constant. The ratio is
        # then 1, but its gradient is not 0: d(ratio) = d(log pi_theta).
        old = logprobs.detach() if old_logprobs is None else old_logprobs[rows, :T]
        loss, metrics = grpo_loss(
            logprobs,
            old,
            None if ref_logprobs is None else ref_logprobs[rows, :T],
            advantages[rows],
            mask,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon_high,
            beta=config.beta,
            loss_type=config.loss_type,
            divisor=divisor,
        )
        if not loss.isfinite():
            sound = logprobs.isfinite().all(dim=1).tolist()
            wrong = next((row for row, good in zip(rows, sound) if not good), rows[0])
            raise FloatingPointError(f"the loss is {loss.item()}, by answer {wrong}: {rollout.texts[wrong][:80]!r}")
        loss.backward()
        for parameter, weight in trained(learner):  # bfloat16 gradients, added up in float32
            if parameter is not weight and parameter.grad is not None:
                weight.grad += parameter.grad
                parameter.grad = None
        metrics["entropy"] = masked_mean(entropies.detach(), mask).item()
        metrics["sampler_gap"] = masked_mean((rollout.logprobs[rows, :T] - old).abs(), mask).item()
        # The losses are divided by the whole already, and add up; the others are means over tokens.
        tokens = int(mask.sum())
        sums["tokens"] += tokens
        sums["loss"] += metrics.pop("loss")
        sums["ratio_max"] = max(sums["ratio_max"], metrics.pop("ratio_max"))
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value * tokens
    return sums


def update(learner, rollout, advantages, config):
    """Learn from one rollout: num_iterations passes, each of num_mini_batches updates. Gives metrics.

    `advantages` is (N,). The gradient of each update is that of its mini-batch as a whole.
    """
    G = config.num_generations
    lengths = rollout.completion_mask.sum(dim=1).view(-1, G)  # (B, G)
    # A group of equal rewards has advantages of 0, and without KL no gradient at all. Its answers
    # need no forward and no backward pass. They are still counted in the divisor: nothing else changes.
    teaches = (advantages.view(-1, G) != 0).any(dim=1).tolist()  # B
    scored = [g for g in range(len(teaches)) if config.beta or teaches[g]]
    old_logprobs = ref_logprobs = None
    if config.beta:
        ref_logprobs = smaller_on_out_of_memory(score, learner, learner.reference, rollout, scored, config)
    if config.num_iterations * config.num_mini_batches > 1:
        # Several updates: pi_old has to be written down before the first of them moves pi_theta. It
        # is the scorer's word and not the sampler's, so that the ratio starts at exactly 1 and the
        # rounding differences between the two, in bfloat16, do not look like a policy that has moved.
        old_logprobs = smaller_on_out_of_memory(score, learner, learner.model, rollout, scored, config)
    total = {"tokens": 0, "updates": 0, "skipped_updates": 0}
    for _ in range(config.num_iterations):
        order = torch.randperm(len(teaches)) if config.num_mini_batches > 1 else torch.arange(len(teaches))
        for part in order.tensor_split(config.num_mini_batches):
            # What to divide by is counted over the whole mini-batch. If each micro-batch took the mean
            # of its own tokens, the way it is cut would decide what a token weighs.
            divisor = {
                "grpo": len(part) * G,
                "dapo": int(lengths[part.to(lengths.device)].sum()),
                "dr_grpo": len(part) * G * config.max_completion_length,
            }[config.loss_type]
            groups = [g for g in part.tolist() if g in scored]
            try:
                sums = smaller_on_out_of_memory(
                    accumulate, learner, rollout, groups, advantages, old_logprobs, ref_logprobs, divisor, config
                )
                # All gradients together are one long vector. If it is longer than max_grad_norm it is
                # cut to that: one strange batch then costs one step in the wrong direction, no more.
                norm = torch.nn.utils.clip_grad_norm_(learner.weights, config.max_grad_norm).item()
                if not norm < float("inf"):
                    raise FloatingPointError(f"the gradient's norm is {norm}")
            except FloatingPointError as error:
                learner.failed_in_a_row += 1
                total["skipped_updates"] += 1
                if learner.failed_in_a_row == 3:
                    raise
                tqdm.write(f"update skipped: {error}")
                continue
            learner.failed_in_a_row = 0
            learner.optimizer.step()
            with torch.no_grad():
                for parameter, weight in trained(learner):
                    if parameter is not weight:
                        parameter.copy_(weight)  # rounded to bfloat16
            sums["grad_norm"], sums["updates"] = norm, 1
            total["ratio_max"] = max(total.get("ratio_max", 0.0), sums.pop("ratio_max"))
            for name, value in sums.items():
                total[name] = total.get(name, 0) + value
    over = {"loss": "updates", "grad_norm": "updates"}  # means over updates, the others over tokens
    names = ("loss", "grad_norm", "kl", "clip_fraction", "entropy", "sampler_gap")
    means = {name: total.get(name, 0.0) / max(total[over.get(name, "tokens")], 1) for name in names}
    return {**means, "ratio_max": total.get("ratio_max", 0.0), "skipped_updates": total["skipped_updates"]}


def train_step(learner, tokenizer, questions, reward_fn, config):
    """One round: sample, score, compare, update. `questions` yields rows of the data set. Gives metrics."""
    G, started = config.num_generations, time.perf_counter()
    rows = [next(questions) for _ in range(config.prompts_per_step)]
    learner.questions_seen += len(rows)
    rollout = sample_groups(
        learner.model,
        tokenizer,
        [row["prompt"] for row in rows],
        G,
        max_completion_length=config.max_completion_length,
        temperature=config.temperature,
    )
    sampled = time.perf_counter()
    rewards = score_rewards(reward_fn, rows, rollout, G)  # (B, G)
    # Every answer counts in its group's mean and std, the cut ones too: to drop them before would
    # move the baseline of all the others.
    advantages = group_advantages(rewards, config.scale_rewards == "group")  # (B, G)
    metrics = update(learner, rollout, advantages.flatten().to(rollout.logprobs), config)
    done = time.perf_counter()
    flat = (advantages == 0).all(dim=1)  # (B,)
    g = int(flat.long().argmin())  # a group to look at: the first that teaches, if there is one
    learner.shown = (rows[g]["prompt"], rollout.texts[g * G : (g + 1) * G], rewards[g], advantages[g])
    lengths = rollout.completion_mask.sum(dim=1).float()
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "zero_variance_fraction": flat.float().mean().item(),
        "completion_length": lengths.mean().item(),
        "truncated_fraction": rollout.truncated.float().mean().item(),
        **metrics,
        "learning_rate": learner.optimizer.param_groups[0]["lr"],
        "sample_seconds": sampled - started,
        "update_seconds": done - sampled,
        "tokens_per_second": lengths.sum().item() / (done - started),
    }


# ------------------------------------------------------------------------------------------------
# 11. The loop, and what makes it safe to leave alone overnight
# ------------------------------------------------------------------------------------------------


def question_stream(dataset, seed, seen=0):
    """Rows of the data set for ever, shuffled anew each epoch; no row twice before all have been seen.
    The first `seen` are skipped: the order depends on nothing but the seed, so a run can go on."""
    epoch, place = divmod(seen, len(dataset))
    while True:
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        for i in torch.randperm(len(dataset), generator=shuffle).tolist()[place:]:
            yield dataset[i]
        epoch, place = epoch + 1, 0


def fingerprint(model):
    """What tells one set of weights from another: how many there are, and the sum of their sizes."""
    sizes = [p.detach().abs().sum(dtype=torch.float64).item() for p in model.parameters()]
    return {"parameters": sum(p.numel() for p in model.parameters()), "size": sum(sizes)}


def snapshot(learner):
    """Where the run stands, weights apart: the place in the data set and all random generators."""
    numpy_state = np.random.get_state()  # (name, 624 numbers, and three more)
    return {
        "questions_seen": learner.questions_seen,
        "failed_in_a_row": learner.failed_in_a_row,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),
    }


def save_checkpoint(output_dir, step, learner, state, run):
    """Write checkpoint-<step>; gives its path. Written beside and renamed when it is complete, so that
    whatever kills the process, and whenever, there is a whole checkpoint; then the one before goes."""
    path = os.path.join(output_dir, f"checkpoint-{step:06d}")
    beside = path + ".incomplete"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        os.makedirs(beside)
        weights = {name: weight.detach() for name, weight in zip(trained_names(learner.model), learner.weights)}
        save_file(weights, os.path.join(beside, "weights.safetensors"))
        torch.save({**state, "optimizer": learner.optimizer.state_dict()}, os.path.join(beside, "state.pt"))
        with open(os.path.join(beside, "run.json"), "w") as file:
            json.dump(run, file, indent=2)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(beside, path)
    except Exception as error:  # disk full, in the words of three different libraries
        shutil.rmtree(beside, ignore_errors=True)
        raise OSError(
            f"could not write {path} ({error}). Free some space (it needs about "
            f"{12 * sum(w.numel() for w in learner.weights) / 1e9:.1f} GB) and go on with resume; "
            f"the checkpoint before is untouched"
        ) from error
    for name in os.listdir(output_dir):
        if name.startswith("checkpoint-") and name != os.path.basename(path):
            shutil.rmtree(os.path.join(output_dir, name), ignore_errors=True)
    return path


def load_checkpoint(output_dir, learner, run):
    """Put the last checkpoint of `output_dir` into `learner`; gives its step, 0 where there is none."""
    names = sorted(n for n in os.listdir(output_dir) if re.fullmatch("checkpoint-[0-9]+", n))
    if not names:
        return 0
    path = os.path.join(output_dir, names[-1])
    with open(os.path.join(path, "run.json")) as file:
        saved = json.load(file)
    for part in run:
        for name in run[part].keys() | saved[part].keys():
            here, there = run[part].get(name), saved[part].get(name)
            if here != there and not (name == "size" and abs(here - there) < 1e-7 * abs(there)):
                raise ValueError(f"{path} is from a run with {part} {name} {there!r}, this one has {here!r}")
    weights = load_file(os.path.join(path, "weights.safetensors"))
    # weights_only: numbers and tensors, nothing that could run code while it is read.
    state = torch.load(os.path.join(path, "state.pt"), map_location="cpu", weights_only=True)
    learner.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, (parameter, weight) in zip(trained_names(learner.model), trained(learner)):
            weight.copy_(weights[name])
            parameter.copy_(weight)
    learner.questions_seen, learner.failed_in_a_row = state["questions_seen"], state["failed_in_a_row"]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    return int(names[-1].removeprefix("checkpoint-"))


def cut_back(path, step):
    """Keep only the lines of a .jsonl file up to `step`; gives them. A killed run has written more
    lines than its checkpoint knows of, the last perhaps in part."""
    kept = []
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                try:
                    kept.append(json.loads(line))
                except ValueError:
                    break
        kept = [row for row in kept if row["step"] <= step]
        with open(path + ".incomplete", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        os.replace(path + ".incomplete", path)
    return kept


def show_group(learner):
    """One question and its group of answers, as text, best first."""
    prompt, texts, rewards, advantages = learner.shown
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    lines = [f"    {question.strip()[:300]}"]
    for i in rewards.argsort(descending=True).tolist():
        answer = " ".join(texts[i].split())
        answer = answer if len(answer) < 160 else answer[:60] + " ... " + answer[-90:]
        lines.append(f"      reward {rewards[i]:4.1f}  advantage {advantages[i]:+5.2f}  {answer}")
    return "\n".join(lines)


def training_steps(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """The loop, as a generator: yields (metrics, learner) after each step, so that the caller can do
    anything in between, evaluate say: `for metrics, learner in training_steps(...): ...`.

    With an `output_dir` it writes config.json, metrics.jsonl (a line a step), samples.jsonl and
    checkpoints; with `resume` it goes on from the last of these, and then yields earlier steps'
    metrics not again. Ctrl-C finishes the step, saves and ends the loop; twice stops at once.
    """
    columns = sorted(dataset[0]) if len(dataset) else []
    if "prompt" not in columns:
        raise ValueError(f"the data set needs rows with a 'prompt' column, and has {columns or 'no rows'}")
    for i, row in enumerate(dataset):
        if sorted(row) != columns or not row["prompt"]:
            raise ValueError(f"row {i} of the data set needs a prompt and the columns {columns}: {row}")
    torch.manual_seed(config.seed)
    run = {"setting": asdict(config), "model": fingerprint(model), "data": {"rows": len(dataset)}}
    learner = make_learner(model, config)
    # The library's formula for the schedule. One step on, or the first step would be made at rate 0.
    shape = get_scheduler(
        config.lr_scheduler_type, learner.optimizer, config.warmup_steps, config.steps + 1
    ).lr_lambdas[0]
    first = 1
    if output_dir is not None:
        os.makedirs(output_dir, exist_ok=True)
        metrics_file, samples_file = (os.path.join(output_dir, n) for n in ("metrics.jsonl", "samples.jsonl"))
        if resume:
            first += load_checkpoint(output_dir, learner, run)
        elif os.path.exists(metrics_file):
            raise ValueError(f"{output_dir} holds a run already: resume it, or name another folder")
        cut_back(metrics_file, first - 1), cut_back(samples_file, first - 1)
        with open(os.path.join(output_dir, "config.json"), "w") as file:
            json.dump(run, file, indent=2)
    questions = question_stream(dataset, config.seed, learner.questions_seen)
    interrupts = []

    def on_interrupt(*_):
        tqdm.write("interrupted: finishing this step (once more to stop at once)")
        interrupts.append(signal.signal(signal.SIGINT, signal.default_int_handler))

    in_main_thread = threading.current_thread() is threading.main_thread()  # others get no signals
    before = signal.signal(signal.SIGINT, on_interrupt) if in_main_thread else None
    bar = tqdm(range(first, config.steps + 1), initial=first - 1, total=config.steps, unit="step")
    try:
        for step in bar:
            for group in learner.optimizer.param_groups:
                group["lr"] = config.learning_rate * shape(step)
            state = snapshot(learner)
            try:
                metrics = {"step": step, **train_step(learner, tokenizer, questions, reward_fn, config)}
            except Exception:
                # Whatever it was, what has been learned is kept: resume repeats this very step.
                if output_dir is not None and step > 1:
                    save_checkpoint(output_dir, step - 1, learner, state, run)
                raise
            show = config.show_steps and (step == 1 or step % config.show_steps == 0)
            if show:
                tqdm.write(f"step {step}: reward {metrics['reward_mean']:.3f}, one of its groups:")
                tqdm.write(show_group(learner))
            if output_dir is not None:
                with open(metrics_file, "a") as file:
                    file.write(json.dumps(metrics) + "\n")
                if show:
                    prompt, texts, rewards, _ = learner.shown
                    sample = {"step": step, "prompt": prompt, "completions": texts, "rewards": rewards.tolist()}
                    with open(samples_file, "a") as file:
                        file.write(json.dumps(sample) + "\n")
            bar.set_postfix_str(
                f"reward {metrics['reward_mean']:.3f} length {metrics['completion_length']:.0f} "
                f"kl {metrics['kl']:.4f}"
            )
            yield metrics, learner
            last = step == config.steps or interrupts
            if output_dir is not None and (last or step % config.save_steps == 0):
                save_checkpoint(output_dir, step, learner, snapshot(learner), run)
            if interrupts:
                break
    finally:
        bar.close()
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """Train `model` in place with GRPO; gives the list of the steps' metrics, resumed ones included.

    `dataset`: a datasets.Dataset or a list of dicts, with a `prompt` column (strings, or chats) and any
    others, which go to `reward_fn(prompts=, completions=, completion_ids=, **columns) -> list of
    floats`. `config` is a GRPOConfig; for `output_dir` and `resume` see `training_steps`.
    """
    steps = training_steps(model, tokenizer, dataset, reward_fn, config, output_dir, resume)
    metrics = [step_metrics for step_metrics, _ in steps]
    if metrics and metrics[0]["step"] > 1:
        with open(os.path.join(output_dir, "metrics.jsonl")) as file:
            metrics = [json.loads(line) for line in file]
    return metrics
