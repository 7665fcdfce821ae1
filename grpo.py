# SPDX-License-Identifier: MIT-0
r"""GRPO in one file: how a language model learns to reason from nothing but a score.

GRPO (Group Relative Policy Optimization; DeepSeekMath, arXiv:2402.03300, and DeepSeek-R1,
arXiv:2501.12948) is a loop of five moves:

    1. sample     ask the model each question G times, at random              (section 2)
    2. score      let a rule, not a person, give every answer a number        (section 1)
    3. compare    advantage = how much better than the other G - 1 answers    (section 3)
    4. update     make the tokens of better answers likelier, of worse ones
                  less likely, but only a little at a time                    (sections 4 to 8)
    5. repeat     with fresh answers from the model as it is now              (sections 10 to 12)

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
is "John has 3 apples and buys 2 more. How many apples does he have?", and there are four answers:

    answer 1    3+2 = \boxed{5}    2 tokens        (In truth a dozen, but two and one are enough
    answer 2    \boxed{5}          1 token          to follow everything with a pencil.)
    answer 3    \boxed{6}          1 token
    answer 4    3-2 = \boxed{1}    2 tokens

Shapes: B questions, G answers to each, N = B * G rows; the G answers to one question stand next to
each other ("group-major": rows 0..G-1 belong to question 0). P is the width of the prompts,
padded on the left; T the width of the answers ("completions"), padded on the right; V the
vocabulary. Every function of the mathematics takes tensors and gives tensors, and stands alone:
paste it under `import torch` (`rule_reward` with `extract_boxed`, under `import re`; `grpo_loss`
with the three that it calls; `token_logprobs` with `tree_states`).

What is changed against the papers, and why: the mean over tokens is over the answers of a whole
step, however it is cut into micro-batches; a log-ratio is limited to +-50 so that nothing
overflows; answers may be sampled and scored in bfloat16 while the weights stay in float32. What
is left out: a learned reward model, a critic, iterated reference models, several GPUs.
"""

import copy, json, os, re, signal, threading, time, zlib  # noqa: E401
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Literal, Optional, get_args, get_origin

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import get_scheduler, set_seed


# ------------------------------------------------------------------------------------------------
# 1. The reward: a rule, not a model
#
# For mathematics nobody needs to train a reward model: the right answer is known, so a rule is
# the judge. The model is asked to put its result into \boxed{...}; 0.5 for doing so, 1.0 more for
# being right. The rule reads text that a model wrote, and a model under training writes anything
# at all: it must never raise, never take long, and never run what it reads (no eval).
# ------------------------------------------------------------------------------------------------


def extract_boxed(text):
    r"""Contents of the complete \boxed{...} that opens last in `text`, or None if there is none.

    The last one, because people and models write intermediate boxes first and the result last.
    Braces nest (\boxed{\frac{1}{2}} holds \frac{1}{2}); \{ and \} are printed braces and do not
    count. One pass over the text: time linear in its length.
    """
    open_braces = []  # where the contents of each open brace begin; -1 for one without \boxed
    best = (-1, -1)  # where the contents of the best box so far begin and end
    for brace in re.finditer(r"\\boxed\{|\\[{}]|[{}]", text):
        if brace.group() in ("\\boxed{", "{"):
            open_braces.append(brace.end() if brace.group() != "{" else -1)
        elif brace.group() == "}" and open_braces:  # a closing brace too many is just text
            best = max(best, (open_braces.pop(), brace.start()))  # the later one
    return None if best[0] < 0 else text[best[0] : best[1]]


def rule_reward(completion, answer):
    r"""Reward of one completion: 0.0 without a box, 0.5 for a box, 1.5 for a box with the answer.

    `completion` and `answer` are strings. The box counts as right if it equals the answer as a
    string or as a number (difference below 0.01), with numbers read as a person reads them:
    "1,000", "1{,}000", "$1000", "\$1000", "1000%", "1000." and "1000.00" are all the same number;
    "1_000", "nan" and digits of other scripts are none. Total: gives a float for every string, in
    linear time.

        >>> rule_reward(r"There are 9 * 7 = \boxed{63} eggs.", "63")
        1.5
    """

    def number(text):
        text = re.sub(r"\\?[$%]", " ", text.replace("{,}", ",")).strip().removesuffix(".").strip()
        # Written out instead of trusting float(), which also takes "nan", "1_000" and "٣".
        digits = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
        read = re.fullmatch(rf"([+-]?)\s*(?=\.?[0-9])({digits})", text)
        return float(read[1] + read[2].replace(",", "")) if read else float("nan")

    boxed = extract_boxed(completion)
    if boxed is None or not boxed.strip():
        return 0.0
    if boxed.strip() == answer.strip():
        return 1.5
    # round: 5.01 - 5 is 0.00999... in floating point, and would pass for "below 0.01". What is no
    # number is nan, what overflows inf, and neither is ever near anything.
    right = round(abs(number(boxed) - number(answer)), 9) < 0.01
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
    """What was sampled: N = B * G rows, group-major, prompts of width P, completions of width T"""

    input_ids: torch.Tensor  # (N, P+T) left-padded prompt, then right-padded completion
    attention_mask: torch.Tensor  # (N, P+T) 1 on every real token, the end token included
    completion_mask: torch.Tensor  # (N, T) bool: the tokens that the model chose
    logprobs: torch.Tensor  # (N, T) float32: the sampler's own log pi_old of each of them
    texts: list  # N strings, special tokens stripped
    truncated: torch.Tensor  # (N,) bool: the cap came before an end token


def end_token_ids(model, tokenizer):
    """All ids that end an answer. Qwen has two; to miss one trains the model on what it babbles
    after its answer. They are written down in three different places, so all three are asked."""
    found = [getattr(source, "eos_token_id", None)
             for source in (getattr(model, "generation_config", None), model.config, tokenizer)]
    ids = {i for x in found for i in (x if isinstance(x, (list, tuple)) else [x])} - {None}
    if not ids:
        raise ValueError("neither model nor tokenizer has an eos_token_id: no answer could end")
    return sorted(ids)


def choose_tokens(logits, temperature, uniforms):
    """Logits (n, V) and uniform numbers (n,) -> a token (n,) each, and its log-probability (n,).

    Draws from softmax(logits / temperature) by inverting the cumulative distribution: lay the V
    probabilities end to end on a line, and see into whose stretch the uniform number falls.
    Temperature 0 takes the likeliest token (its log-probability is that at temperature 1).
    """
    # bfloat16 has three digits, too few to tell 150,000 probabilities apart: up-cast first.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (n, V)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)  # (n,)
    else:
        ends = logprobs.exp().cumsum(dim=-1, dtype=uniforms.dtype)  # (n, V) where stretches end
        at = uniforms.unsqueeze(1) * ends[:, -1:]  # (n, 1) on a line as long as it came out
        # right=True: a token of probability 0 has an empty stretch, and is never hit. The clamp
        # is for a point that rounding put at the very end.
        tokens = torch.searchsorted(ends, at, right=True).squeeze(1).clamp(max=ends.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


@torch.no_grad()
def sample_groups(model, tokenizer, prompts, num_generations, *, max_completion_length,
                  temperature=1.0, drop_every=4):
    """Sample `num_generations` answers to each of B prompts; gives a `Rollout` of N = B * G rows.

    `prompts` are B strings or B chats. Tokens are drawn from exactly softmax(logits /
    temperature), 0 meaning greedy, up to the first of the model's end tokens, or
    `max_completion_length` tokens. The ids are kept as they were drawn: to decode and encode
    again, as much published code does, need not give the same tokens back. Reproducible under
    torch.manual_seed. Every `drop_every` tokens the rows that have ended leave the batch; the
    samples do not depend on it. ValueError for settings out of range, and for a prompt that
    leaves too little room in the model's context.
    """
    G, T, device = num_generations, max_completion_length, model.device
    if not (min(len(prompts), G, T) >= 1 and temperature >= 0):
        raise ValueError(f"too small: {len(prompts)} prompts, {G=}, {T=} or {temperature=}")
    end_ids = torch.tensor(end_token_ids(model, tokenizer), device=device)
    # Strings are encoded as they are, chats through the chat template. add_generation_prompt: the
    # template's "now the assistant speaks", or the model would go on with the question.
    chat = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
    encoded = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str)
               else tokenizer.apply_chat_template(list(prompt), **chat) for prompt in prompts]
    if not all(encoded):
        raise ValueError(f"prompt {encoded.index([])} has no tokens: nothing to go on from")
    B, N, widths = len(prompts), len(prompts) * G, [len(ids) for ids in encoded]
    P, context = max(widths), getattr(model.config, "max_position_embeddings", None)
    if context and P + T > context:
        raise ValueError(f"{P} + {T} tokens, context {context}: {prompts[widths.index(P)]!r:.70}")

    # Pad the prompts on the left, so that all of them end, and all answers begin, in one column.
    # Any id will do as padding, even an end token: what is real is said by masks made from
    # positions. A mask made from values (`!= pad_token_id`) loses the end token wherever that is
    # the padding too, and then the model is never taught to stop.
    pad = int(end_ids[0]) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    prompt_ids = torch.tensor([[pad] * (P - len(ids)) + ids for ids in encoded], device=device)
    prompt_mask = torch.tensor([[0] * (P - w) + [1] * w for w in widths], device=device)  # (B, P)
    # The first real token is at position 0, however much padding stands before it. Models with
    # rotary positions forgive a shift; those with learned positions go wrong by tens of nats.
    positions = (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)  # (B, P)

    # All random numbers are drawn beforehand, one for each place of each row, so that a row's
    # sample does not depend on which other rows are still being written. In 64 bits, since a sum
    # of 150,000 float32 terms loses the small ones; Apple's GPUs have only 32.
    uniforms = torch.rand(N, T, dtype=torch.float64) if temperature > 0 else torch.zeros(N, T)
    uniforms = uniforms.to(torch.float32 if device.type == "mps" else torch.float64).to(device)
    completions = torch.full((N, T), pad, device=device)
    completion_mask = torch.zeros(N, T, dtype=torch.bool, device=device)
    logprobs = torch.zeros(N, T, device=device)

    # No dropout while sampling; and with gradient checkpointing, train() would turn the cache off.
    was_training = model.training
    model.eval()
    # Read each prompt once ("prefill"); only the last column's logits say what comes next.
    out = model(input_ids=prompt_ids, attention_mask=prompt_mask, position_ids=positions,
                use_cache=True, logits_to_keep=1)
    rows = torch.arange(B, device=device).repeat_interleave(G)  # (N,) 0 0 0 1 1 1 ...
    cache, logits = out.past_key_values, out.logits[rows, -1]  # logits (N, V)
    cache.reorder_cache(rows)  # B rows of keys and values become N
    mask = torch.nn.functional.pad(prompt_mask[rows], (0, T), value=1)  # (N, P+T)
    live, position = torch.arange(N, device=device), positions[rows, -1:]  # (n,) rows in the batch
    ended = torch.zeros(N, dtype=torch.bool, device=device)  # (n,) those of them at their end
    for t in range(T):
        tokens, logps = choose_tokens(logits, temperature, uniforms[live, t])
        completions[live, t], logprobs[live, t] = tokens, logps.float()
        completion_mask[live, t] = ~ended  # the first end token is in; what follows is not
        ended |= torch.isin(tokens, end_ids)
        # To ask a GPU who has ended is to wait for it, so it is asked every few tokens only.
        if (t + 1) % drop_every == 0 or t + 1 == T:
            keep = (~ended).nonzero().squeeze(1)
            if len(keep) == 0 or t + 1 == T:
                break
            if len(keep) < len(live):
                cache.reorder_cache(keep)
                live, ended, tokens = live[keep], ended[keep], tokens[keep]
                mask, position = mask[keep], position[keep]
        position = position + 1
        logits = model(input_ids=tokens.unsqueeze(1), attention_mask=mask[:, : P + t + 1],
                       position_ids=position, past_key_values=cache, use_cache=True).logits[:, -1]
    model.train(was_training)

    # Cut the columns that nobody reached, and blank what was drawn after an end token.
    T = int(completion_mask.sum(dim=1).max())
    completion_mask, logprobs = completion_mask[:, :T], logprobs[:, :T]
    completions = completions[:, :T].masked_fill(~completion_mask, pad)
    texts = [tokenizer.decode(ids[real].tolist(), skip_special_tokens=True)
             for ids, real in zip(completions.cpu(), completion_mask.cpu())]
    return Rollout(torch.cat([prompt_ids[rows], completions], dim=1),
                   torch.cat([prompt_mask[rows], completion_mask.long()], dim=1),
                   completion_mask, logprobs.masked_fill(~completion_mask, 0.0), texts,
                   ~(torch.isin(completions, end_ids) & completion_mask).any(dim=1))


# ------------------------------------------------------------------------------------------------
# 3. Advantages: better or worse than the other answers to the same question
#
# PPO trains a second network, the critic, to predict the reward that was to be expected. GRPO
# asks the model G times and takes the mean of the group as that expectation. What remains is the
# sign and the size of the surprise; all tokens of an answer share it.
# ------------------------------------------------------------------------------------------------


def group_advantages(rewards, scale_rewards=True):
    """A_i = (R_i - mean(R)) / std(R) over the last dimension: (..., G) -> (..., G).

    The std is the population's (divided by G), as in the papers' formula and their worked
    numbers; torch's default divides by G - 1, and most code, TRL's included, follows it:
    advantages smaller by sqrt((G-1)/G), 6.5 % at G = 8. A group of equal rewards gets exact zeros:
    it has nothing to teach. `scale_rewards=False` leaves the std out (Dr. GRPO, section 9).
    ValueError for fewer than two rewards and for NaN or inf.
    """
    if rewards.dim() == 0 or rewards.shape[-1] < 2 or not rewards.isfinite().all():
        raise ValueError(f"wanted groups of 2 or more finite rewards, got {rewards}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    centered = rewards - rewards.mean(dim=-1, keepdim=True)  # (..., G)
    std = centered.square().mean(dim=-1, keepdim=True).sqrt()  # (..., 1)
    # The mean of three times 0.1 is not quite 0.1. Divided by a std of the same 1e-17, that
    # rounding error would become advantages of size 1: a lesson made of nothing. So "equal" has a
    # tolerance, and, unlike an epsilon in the divisor, it leaves every real group's value alone.
    flat = std <= 1e-6 * rewards.abs().amax(dim=-1, keepdim=True)  # (..., 1)
    advantages = centered / std.masked_fill(flat, 1.0) if scale_rewards else centered
    return advantages.masked_fill(flat, 0.0)


# The apples: R = [1.5, 1.5, 0.5, 0.5], mean 1, std 0.5, so A = [+1, +1, -1, -1]. A group in which
# all are right, or all wrong, is all zeros. Early on, most groups are all wrong; late in
# training, most are all right. The share of such groups is logged as zero_variance_fraction: near
# 1, the questions are too hard or too easy for this model, and no setting will make it learn.


# ------------------------------------------------------------------------------------------------
# 4. Log-probabilities: what the model thinks of each token now
#
# To move a token's probability, we need it as a differentiable number. One forward pass over
# prompt and answer gives it for all tokens at once: the hidden state in column j predicts the
# token in column j + 1. This is "scoring", and unlike sampling it is parallel over the T tokens.
# ------------------------------------------------------------------------------------------------


def token_logprobs(model, input_ids, attention_mask, completion_length, temperature=1.0, *,
                   num_generations=1, return_entropy=False, entropy_gradient=True,
                   tokens_per_chunk=512):
    """log pi_theta of each completion token: ids and mask (N, P+T) -> (N, T), differentiable.

    T is `completion_length`. `temperature` is the one that was sampled at: to score at another
    one compares two different distributions. float32 whatever the model computes in (float64 for
    a float64 model); 0 where `attention_mask` is. With `num_generations` = G > 1 the rows are
    groups of G that share a prompt, which is then computed once for all of them, gradients
    included (`tree_states`). With `return_entropy`, gives (log-probs, entropies): of the whole
    distribution at each token, in nats; without a gradient if `entropy_gradient` is False.
    ValueError for temperature 0 and a completion_length that leaves no prompt.
    """
    T, P, G = completion_length, input_ids.shape[1] - completion_length, num_generations
    if not (temperature > 0 and T >= 1 and P >= 1):
        raise ValueError(f"not > 0: temperature {temperature}, prompt {P}, completion_length {T}")
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)  # (N, P+T), as in the sampler
    real = attention_mask[:, P:].bool()  # (N, T); M of them are
    # The trunk makes hidden states of width H, the head turns each into V logits. Some models then
    # scale or cap these (Gemma 2, Granite, Cohere): head(trunk(x)) is wrong by nats. Compare once,
    # and for those go the long way: all logits at once, from the model itself.
    trunk, head, config = model.base_model, model.get_output_embeddings(), model.config
    if not hasattr(model, "head_gives_logits"):
        apart = head(trunk(input_ids[:1, :8], use_cache=False)[0]) - model(input_ids[:1, :8])[0]
        model.head_gives_logits = apart.abs().max().item() < 1e-3
    if not model.head_gives_logits:
        trunk, head = model, torch.nn.Identity()  # then H is V
    # Models that look back through a window, or without attention, are not for tree_states.
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windows = windows or getattr(config, "sliding_window", None)
    if G > 1 and not windows and config._attn_implementation in ("sdpa", "eager"):
        states = tree_states(trunk, input_ids, attention_mask, positions, P, G)  # the same, faster
    else:
        states = trunk(input_ids, attention_mask=attention_mask, position_ids=positions,
                       use_cache=False)[0]  # (N, P+T, H)
        # Off by one, on purpose: the prompt's last state predicts the answer's first token, and
        # the answer's last state has nothing left to predict.
        states = states[:, P - 1 : -1][real]  # (M, H)

    def score(states, targets):  # (n, H), (n,) -> (n,), (n,)
        logits = head(states)  # (n, V)
        # float32 before the softmax: in bfloat16 a log-probability is off by 0.025 on average.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        log_normaliser = logits.logsumexp(dim=-1)  # (n,)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - log_normaliser
        if not return_entropy:
            return logprobs, logprobs
        # -sum p log p. (-log p of the drawn token has the same mean, but its expected gradient is
        # zero, like k1's in section 6. An entropy bonus takes the whole distribution.)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            p = logits.softmax(dim=-1)  # where it is 0 the logit may be -inf, and 0 * -inf is NaN
            entropies = log_normaliser - (p * logits.masked_fill(p == 0, 0.0)).sum(dim=-1)
        return logprobs, entropies

    # The logits of 16 answers of 512 tokens over Qwen's vocabulary are 4.6 GiB in float32, and
    # the backward pass would keep three such tensors. So the head sees some hundred tokens at a
    # time, and `checkpoint` forgets each chunk's logits and makes them again in the backward
    # pass. Padding is left out altogether.
    pairs = zip(states.split(tokens_per_chunk), input_ids[:, P:][real].split(tokens_per_chunk))
    chunks = [torch.utils.checkpoint.checkpoint(score, *pair, use_reentrant=False)
              for pair in pairs]
    zeros = torch.zeros_like(real, dtype=chunks[0][0].dtype)  # (N, T)
    logprobs, entropies = (zeros.masked_scatter(real, torch.cat(part)) for part in zip(*chunks))
    return (logprobs, entropies) if return_entropy else logprobs


def tree_states(trunk, input_ids, attention_mask, positions, P, G):
    """The states (M, H) that predict the M real answer tokens, each prompt computed once. (Skip on
    a first reading: the same numbers and gradients as a plain pass, from less work.)

    The G answers to a prompt make one row, without padding, that is read as a tree:

        prompt | answer 1 | answer 2 | ... | answer G       <- each continues the prompt

    The attention mask hides the answers from one another, and their positions all go on from the
    prompt's last; so each token sees what it would see if its answer stood there alone. The prompt
    receives the sum of the gradients of its answers.
    """
    N, device = len(input_ids), input_ids.device
    branch = torch.zeros_like(input_ids)  # (N, P+T) 0 in the prompt, else which answer it is
    branch[:, P:] = torch.arange(1, N + 1, device=device).unsqueeze(1)

    def tree(x):  # (N, P+T) -> (n, P + G*T): one prompt, then all of its answers
        return torch.cat([x[::G, :P], x[:, P:].reshape(N // G, -1)], dim=1)

    real = tree(attention_mask)
    order = real.argsort(dim=1, descending=True, stable=True)  # padding goes to the end ...
    order = order[:, : int(real.sum(dim=1).max())]  # (n, L) ... and off
    ids, positions, real, branch = (tree(x).gather(1, order)  # (n, L) each
                                    for x in (input_ids, positions, attention_mask, branch))
    # A token (a line of the mask) sees what comes before it, in the prompt and its own answer.
    sees = (branch.unsqueeze(1) == 0) | (branch.unsqueeze(1) == branch.unsqueeze(2))  # (n, L, L)
    dtype = next(trunk.parameters()).dtype
    wall = torch.zeros_like(sees, dtype=dtype).masked_fill(~sees.tril(), torch.finfo(dtype).min)
    states = trunk(ids, attention_mask=wall.unsqueeze(1), position_ids=positions,
                   use_cache=False)[0]  # (n, L, H)
    # What predicts a token is the state before it; for the first of an answer, the prompt's last.
    width = ((branch == 0) & (real > 0)).sum(dim=1, keepdim=True)  # (n, 1) of the prompt
    place = torch.arange(order.shape[1], device=device)  # (L,)
    before = torch.where(positions == width, width, place) - 1  # (n, L)
    states = states.gather(1, before.clamp(min=0).unsqueeze(2).expand_as(states))  # (n, L, H)
    return states[(branch > 0) & (real > 0)]


# What tells that all of this is right is not that "the ratio is 1 at the first step": that holds
# whatever the sampler does, since both sides of the ratio come from the scorer. It is that the
# scorer agrees with what the *sampler* said of the same tokens. Their mean distance is logged as
# sampler_gap: about 1e-6 in float32, a few hundredths at most in bfloat16 (which rounds
# differently in the two). More means that one of them uses another temperature, another mask,
# other positions.


# ------------------------------------------------------------------------------------------------
# 5. Ratio and clip: learn from an answer, but not too much
#
# The answers were written by pi_old. After some updates pi_theta is another policy, and the ratio
# of the two says how much more often it would choose this token. The objective is ratio *
# advantage; but as soon as the ratio has gone far enough *in the direction that pays*, the min
# takes the clipped branch, which is constant: no gradient, no further push from this token.
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


# The four corners, at eps 0.2, with the apples after some updates. Say that pi_old gave every
# token the probability 0.4, and pi_theta now gives
#
#     answer 1: 0.6, 0.4     answer 2: 0.2     answer 3: 0.6     answer 4: 0.2, 0.4
#
#     A    r             min(r A, clip(r) A)                 gradient with respect to log pi_theta
#     +1   1.5 (ans. 1)  min( 1.5,  1.2) =  1.2  clipped      0    liked, and already much likelier
#     +1   0.5 (ans. 2)  min( 0.5,  0.8) =  0.5  not clipped  0.5  liked: bring it back up
#     -1   1.5 (ans. 3)  min(-1.5, -1.2) = -1.5  not clipped -1.5  disliked: push it down
#     -1   0.5 (ans. 4)  min(-0.5, -0.8) = -0.8  clipped      0    disliked, and already rare
#     any  1.0           A                       not clipped  A    every token, at the first update
#
# With one update per batch of answers, pi_theta *is* pi_old when the gradient is taken: every
# ratio is 1 and the clip never acts. It starts to work with num_iterations > 1 or several
# mini-batches. A common mistake is max in place of min for negative advantages: it keeps pushing
# in corner 4 and stops in corner 3, the one where the policy went the wrong way.


# ------------------------------------------------------------------------------------------------
# 6. The KL penalty: do not drift too far from where you started
#
# A policy that only chases the reward forgets how to write. KL(pi_theta || pi_ref) measures how
# far it has gone; k3 estimates it from the tokens at hand.
# ------------------------------------------------------------------------------------------------


def k3_kl(logprobs, ref_logprobs):
    """k3 = pi_ref/pi_theta - log(pi_ref/pi_theta) - 1 per token: (N, T), (N, T) -> (N, T).

    Schulman's estimator (joschu.net/blog/kl-approx.html). Mind which policy is on top: with the
    fraction the other way round it estimates something else. For tokens drawn from pi_theta its
    mean is exactly KL(pi_theta || pi_ref): the last two terms give the KL itself,
    -log(pi_ref/pi_theta), and the mean of pi_ref/pi_theta - 1 is zero, since pi_ref sums to 1. It
    is never negative, since e^x >= 1 + x. Finite for any finite input.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-1e30, 50)  # log(pi_ref / pi_theta)
    return torch.expm1(log_ratio) - log_ratio  # expm1(x) is e^x - 1, without losing small x


# The apples, with pi_ref = 0.4 for every token: where pi_theta is 0.2 the fraction is 2 and k3 =
# 2 - log 2 - 1 = 0.3069; where it is 0.6, k3 = 2/3 - log 2/3 - 1 = 0.0721; where 0.4, 0. Its
# gradient with respect to log pi_theta is 1 - pi_ref/pi_theta: -1 for the first (come back up),
# +0.3333 for the second (come back down). The log-ratio alone ("k1") has the right mean as well,
# but its gradient is 1 for every token, and the mean of that over samples is zero: as a loss it
# regularises nothing at all.


# ------------------------------------------------------------------------------------------------
# 7. The masked mean: padding is not data
# ------------------------------------------------------------------------------------------------


def masked_mean(values, mask, dim=None):
    """Mean of `values` where `mask` is set (bool, int or float); 0, not NaN, where none is.

    Multiplying by the mask would let a NaN behind it through, since 0 * NaN is NaN; `where` does
    not, neither in the value nor in the gradient.
    """
    mask = mask.bool().expand_as(values)
    kept = torch.where(mask, values, 0.0)
    return kept.sum(dim=dim) / mask.sum(dim=dim).clamp(min=1)


# ------------------------------------------------------------------------------------------------
# 8. The loss
#
# Everything above, put together, with a minus sign because optimizers minimise. What is left to
# decide is how the tokens of all answers are averaged. It looks like a detail, and it is not: it
# decides how much a long answer counts.
# ------------------------------------------------------------------------------------------------


def grpo_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, epsilon=0.2,
              epsilon_high=None, beta=0.04, loss_type="grpo", max_completion_length=None,
              divisor=None, importance_sampling_level="token", kl_penalty_type="low_var_kl",
              use_bias_correction_kl=False, entropies=None, entropy_bonus=0.0):
    """-(clipped surrogate - beta * k3), averaged over tokens and answers; gives (loss, metrics).

    (N, T) log-probs of pi_theta, pi_old and pi_ref (None with beta = 0), (N,) advantages, (N, T)
    mask of real tokens; what stands behind the mask reaches nothing. `loss_type` is the average:

        "grpo"     mean over answers of the mean over their tokens (DeepSeekMath; the equation on
                   top). Every answer counts the same, so a token of a long one counts less: long
                   wrong answers are punished too little, and grow
        "dapo"     mean over all tokens of all answers (arXiv:2503.14476): long answers count more
        "dr_grpo"  sum over tokens / (N * max_completion_length) (arXiv:2503.20783): as "dapo", but
                   with a divisor that does not depend on what was sampled, hence unbiased

    `divisor` is for micro-batches: the number of answers ("grpo"), of tokens ("dapo"), or of
    answers times max_completion_length ("dr_grpo") in the whole batch of which these rows are a
    part. The losses and gradients of the parts then add up to those of the whole. The last five
    settings belong to the relatives (section 9). metrics are plain floats. ValueError for wrong
    shapes and settings.
    """
    shapes = [getattr(x, "shape", None) and tuple(x.shape)
              for x in (logprobs, old_logprobs, ref_logprobs, mask, advantages)]
    N, T = (*shapes[0], 0, 0)[:2]
    if shapes != [(N, T), (N, T), shapes[2] and (N, T), (N, T), (N,)]:
        raise ValueError(f"wanted log-probs and mask (N, T) and, last, advantages (N,): {shapes}")
    if loss_type not in ("grpo", "dapo", "dr_grpo"):
        raise ValueError(f"loss_type is {loss_type!r}, and must be 'grpo', 'dapo' or 'dr_grpo'")
    if beta and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, so ref_logprobs are needed: None goes with beta=0 only")
    if loss_type == "dr_grpo" and not (max_completion_length or divisor):
        raise ValueError(f"'dr_grpo' divides by max_completion_length: {max_completion_length}")
    # What stands behind the mask is replaced in the inputs. To mask the result is too late: NaN
    # and inf are gone from the value then, but come back in the gradient, through exp.
    mask = mask.bool()
    logprobs, old_logprobs, ref_logprobs, entropies = (
        None if x is None else x.masked_fill(~mask, 0.0)
        for x in (logprobs, old_logprobs, ref_logprobs, entropies))

    policy, kl = logprobs, torch.zeros_like(logprobs)  # (N, T) both
    if importance_sampling_level != "token":  # one ratio for a whole answer
        policy = answer_level(logprobs, old_logprobs, mask, importance_sampling_level)
    surrogate = clipped_surrogate(policy, old_logprobs, advantages, epsilon, epsilon_high)
    if ref_logprobs is not None:
        kl = (k3_kl(logprobs, ref_logprobs) if kl_penalty_type == "low_var_kl"
              else kl_estimate(logprobs, ref_logprobs, kl_penalty_type))
    ratio = (policy - old_logprobs).clamp(-50, 50).exp()  # (N, T), 1 behind the mask
    per_token = -surrogate + beta * (ratio * kl if use_bias_correction_kl else kl)  # (N, T)
    if entropy_bonus:
        per_token = per_token - entropy_bonus * entropies

    if loss_type == "grpo":
        total, whole = masked_mean(per_token, mask, dim=1).sum(), N
    else:
        total = torch.where(mask, per_token, 0.0).sum()
        whole = int(mask.sum()) if loss_type == "dapo" else N * (max_completion_length or 0)
    loss = total / max(whole if divisor is None else divisor, 1)

    A, high = advantages.unsqueeze(1), epsilon if epsilon_high is None else epsilon_high
    clipped = (A > 0) & (ratio > 1 + high) | (A < 0) & (ratio < 1 - epsilon)  # corners 1 and 4
    largest = torch.where(mask, ratio.detach(), 0.0).max().item() if mask.any() else 0.0
    return loss, {"loss": loss.item(), "ratio_max": largest, "kl": masked_mean(kl, mask).item(),
                  "clip_fraction": masked_mean(clipped.to(kl), mask).item()}


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
# The gradient for "grpo" with respect to log pi_theta of answer 2's token: -(0.5 - 0.04 * (1 -
# 2)) / 4 = -0.135; a step against it makes the token likelier, as it should. For the first token
# of answer 1 the clip leaves only the KL: 0.04 * (1 - 2/3) / 2 tokens / 4 answers = 0.0017, a
# little less likely.
#
# Why does training start at a loss of 0? At the first update every ratio is 1 and every k3 is 0,
# so the "grpo" loss is minus the mean of the advantages, and those sum to zero in each group. Its
# gradient is not zero at all: -A / |o_i| / N for each token. ("dapo" and "dr_grpo" weigh by
# length, so theirs is 0 only if the answers are equally long.) For the same reason the loss says
# nothing about progress. Watch the reward.


# ------------------------------------------------------------------------------------------------
# 9. The relatives (skip on a first reading: the plain algorithm goes on in section 10)
#
# GRPO's relatives share everything above but a line or two. Each of those lines is here, or is a
# setting that we have met already:
#
#   Dr. GRPO    scale_rewards="none", loss_type="dr_grpo": no std, and a constant divisor. A std is
#               small where a question is almost solved, or hopeless; those would count most.
#   RLOO        scale_rewards="rloo", one update per batch, beta=0. `group_scale` below.
#   REINFORCE   With one update per batch and beta=0, r = 1, and the gradient of r * A is A times
#               that of log pi: REINFORCE with the group's mean as baseline. Nothing to change.
#   DAPO        epsilon_high=0.28 ("clip-higher": a rare token that was good may grow faster, so
#               exploration does not die out), loss_type="dapo", dynamic_sampling > 0 (section 11),
#               `overlong_penalty` added to the reward, beta=0.
#   GSPO        importance_sampling_level="sequence"; "sequence_sum" is the course's own code.
#   RLinf       kl_penalty_type and entropy_bonus are settings here too; normalize_advantages:
#               False is scale_rewards="none". Two keys are left out: early_stop_imp_ratio drops a
#               mini-batch whose mean ratio runs away (ratio_max shows that, the clip and
#               max_grad_norm bound it), and use_valid_token_scale divides advantages by the number
#               of tokens, which under a sum over tokens is the mean that "grpo" takes anyway.
#   PPO         subtracts the KL from the reward: R_i - beta * sum over t of log(pi_old / pi_ref).
#               (k1 is right there: nobody differentiates a reward.) Left out: the group's std
#               would rescale it, and every token would be blamed for the drift of one. And it
#               trains a critic V, for A_t = delta_t + gamma * lambda * A_t+1 with delta_t = r_t +
#               gamma * V_t+1 - V_t (GAE). For r_t = 1, V_t = 5, V_t+1 = 5.5, gamma = 0.99 it is
#               1.445. If the only reward, R, comes at the end, and gamma = lambda = 1, the sum
#               telescopes to A_t = R - V_t. With the group's mean in place of V_t that is GRPO's
#               advantage, and the critic and all of this are unnecessary.
# ------------------------------------------------------------------------------------------------


def group_scale(rewards, scale_rewards):
    """Advantages (B, G) under each `scale_rewards`: "group" as in section 3, and three others.

    "none" (Dr. GRPO, arXiv:2503.20783): R_i - mean. "batch": that over the std of all B * G
    rewards, so that every question keeps its weight. "rloo" (arXiv:2402.14740): R_i minus the
    mean of the *other* G - 1 rewards, a baseline that does not contain the answer itself. Since
    the mean of all is a little of R_i, "none" is the same, times (G - 1) / G.
    """
    if scale_rewards == "group":
        return group_advantages(rewards)
    centered, G = group_advantages(rewards, scale_rewards=False), rewards.shape[-1]
    if scale_rewards == "rloo":
        return centered * G / (G - 1)  # = R_i - (sum of R - R_i) / (G - 1), the others' mean
    std = rewards.std(correction=0)
    return centered / std if scale_rewards == "batch" and std > 0 else centered


def overlong_penalty(lengths, max_completion_length, buffer):
    """DAPO's soft penalty, for a reward function to add (lengths: of completion_ids). It is 0 up
    to `buffer` tokens before the cap, then falling in a line to -1 at the cap. Lengths (N,) ->
    (N,). A cliff at the cap would punish one token too many as hard as nonsense."""
    return ((max_completion_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def answer_level(logprobs, old_logprobs, mask, level):
    """log-probs (N, T) that give every token of an answer the same ratio. "sequence" (GSPO,
    arXiv:2507.18071): the geometric mean of its tokens' ratios. "sequence_sum": their product, the
    ratio of the answers' probabilities, which for long answers is out of every clip's bounds."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(dim=1, keepdim=True)  # (N, 1)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return old_logprobs + log_ratio


def kl_estimate(logprobs, ref_logprobs, kl_penalty_type):
    """Estimators of KL(pi_theta || pi_ref) per token, (N, T), by RLinf's names and Schulman's.

    With x = log(pi_theta / pi_ref): "kl" (k1) is x, unbiased, of either sign, and useless as a
    loss: its gradient is that of log pi_theta, whose mean is zero. "abs" is |x|. "mse" (k2) is
    x^2 / 2, a biased value with the right gradient. "low_var_kl" (k3), the default, is unbiased
    with little variance, but the mean of its gradient is that of KL(pi_ref || pi_theta). TRL
    multiplies k3 by the ratio (use_bias_correction_kl): on-policy the same value, and the
    gradient of k2.
    """
    x, k3 = (logprobs - ref_logprobs).clamp(-1e18, 1e18), k3_kl(logprobs, ref_logprobs)
    return {"kl": x, "abs": x.abs(), "mse": x.square() / 2, "low_var_kl": k3}[kl_penalty_type]


# ------------------------------------------------------------------------------------------------
# 10. Settings
# ------------------------------------------------------------------------------------------------


def knob(default, text):
    """A field of GRPOConfig; `text` is also what --help prints."""
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig:
    """Every knob. Names are TRL's GRPOConfig's where it has them, values the documents'."""

    # What is sampled in a step: prompts_per_step * num_generations answers.
    num_generations: int = knob(8, "G, answers to each question; 4 is few, 16 is comfortable")
    prompts_per_step: int = knob(32, "B, questions in a step")
    max_completion_length: int = knob(512, "tokens at which an answer is cut off")
    temperature: float = knob(1.0, "of sampling and of scoring; lower explores less")
    # The loss.
    beta: float = knob(0.04, "weight of the KL penalty; 0 saves the reference model")
    epsilon: float = knob(0.2, "how far the ratio may fall below 1 before the clip acts")
    epsilon_high: Optional[float] = knob(None, "how far it may rise above 1; default: epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = knob("grpo", "average over the tokens")
    scale_rewards: Literal["group", "none", "batch", "rloo"] = knob("group", "scale of advantages")
    # The update.
    steps: int = knob(300, "rounds of sampling and learning")
    num_iterations: int = knob(1, "times that a step's answers are learned from")
    num_mini_batches: int = knob(1, "updates into which each such pass is divided")
    learning_rate: float = knob(1e-6, "AdamW's; 1e-6 for 256 answers a step, 1e-5 for 64")
    warmup_steps: int = knob(10, "steps over which the learning rate grows to that")
    lr_scheduler_type: Literal["linear", "cosine", "constant_with_warmup"] = knob("linear", "then")
    max_grad_norm: float = knob(1.0, "a longer gradient is shortened to this")
    # The relatives, section 9.
    importance_sampling_level: Literal["token", "sequence", "sequence_sum"] = knob("token", "of r")
    kl_penalty_type: Literal["low_var_kl", "kl", "abs", "mse"] = knob("low_var_kl", "estimator")
    use_bias_correction_kl: bool = knob(False, "multiply the KL by the ratio, as TRL does")
    entropy_bonus: float = knob(0.0, "reward for an undecided policy")
    mask_truncated_completions: bool = knob(False, "answers that were cut off: not in the loss")
    dynamic_sampling: int = knob(0, "times that groups without variance are replaced")
    # The run.
    seed: int = knob(0, "of the order of the questions and of the sampling")
    save_steps: int = knob(50, "steps between checkpoints; 0: none")
    gradient_checkpointing: bool = knob(False, "less memory in the update, for a third more time")
    tokens_per_micro_batch: int = knob(8192, "at once in the update; halved where it must be")

    def __post_init__(self):
        trl = {"True": "group", "False": "none"}  # TRL takes these too
        self.scale_rewards = trl.get(str(self.scale_rewards), self.scale_rewards)
        least = {"num_generations": 2, "temperature": 1e-6, "max_grad_norm": 1e-6} | dict.fromkeys(
            ("prompts_per_step", "max_completion_length", "steps", "num_iterations",
             "num_mini_batches", "tokens_per_micro_batch"), 1)
        for f in fields(self):
            value, choices, low = getattr(self, f.name), get_args(f.type), least.get(f.name, 0)
            if get_origin(f.type) is Literal and value not in choices:
                raise ValueError(f"{f.name} is {value!r}, and must be one of {choices}")
            if isinstance(value, Real) and not low <= value < float("inf"):
                raise ValueError(f"{f.name} is {value}, and must be at least {low}, and finite")
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError("num_mini_batches is above prompts_per_step; groups are not divided")
        if not self.beta and (self.use_bias_correction_kl or self.kl_penalty_type != "low_var_kl"):
            raise ValueError("beta is 0: there is no KL to estimate or to correct")


# ------------------------------------------------------------------------------------------------
# 11. One step
# ------------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """What is kept from step to step."""

    model: torch.nn.Module  # pi_theta: samples, and is scored
    reference: Optional[torch.nn.Module]  # pi_ref; None at beta = 0
    parameters: list  # the model's trained parameters, in the precision that it computes in
    weights: list  # their float32 masters, which the optimizer moves
    optimizer: torch.optim.Optimizer
    budget: int  # tokens in a micro-batch
    questions_seen: int = 0
    failed: int = 0  # updates in a row that were skipped because a number was not finite
    last: tuple = ()  # rows, rollout, rewards (B, G), advantages (B, G) of the last step


def computes_in_bf16(model):
    """Whether a model (or a tensor) is on a GPU that computes in bfloat16."""
    return model.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def make_learner(model, config):
    """Set up precisions, reference and optimizer. Casts the model's parameters in place.

    On a GPU with bfloat16 the model computes in it: twice as fast, half as large. But an update
    at learning rate 1e-6 is far smaller than the gap between neighbouring bfloat16 numbers; some
    98 % of the weights would not move at all. So the optimizer moves float32 copies, the master
    weights, and the model gets them, rounded, after each update. Everywhere else (CPU, Apple's
    GPUs, older cards) the model computes in float32, and its parameters are the master weights
    themselves.
    """
    parameters, weights, bf16 = [], [], computes_in_bf16(model)
    for parameter in model.parameters():
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        # Only parameters are cast. `model.to(torch.bfloat16)` would round a buffer as well, the
        # frequencies of the rotary embedding, and get the angles of all late positions wrong.
        parameter.data = wide.to(torch.bfloat16) if bf16 else wide
        if parameter.requires_grad:
            parameters.append(parameter)
            weights.append(wide if bf16 else parameter)
            weights[-1].grad = torch.zeros_like(wide)
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.beta else None
    if config.gradient_checkpointing:  # the method has a new name and an old one
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    # AdamW shrinks all weights by 0.01 * learning rate in each step unless told otherwise.
    optimizer = torch.optim.AdamW(weights, lr=config.learning_rate, weight_decay=0.0)
    return Learner(model, reference, parameters, weights, optimizer, config.tokens_per_micro_batch)


def score_rewards(reward_fn, rows, rollout, num_generations):
    """Call the reward function as TRL does. `rows` are the B rows of the data set; gives (B, G)
    rewards. Anything but one finite number for each completion is a ValueError that says where."""
    texts, name = rollout.texts, f"reward function {getattr(reward_fn, '__name__', reward_fn)}"
    columns = {key: [row[key] for row in rows for _ in range(num_generations)] for key in rows[0]}
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns["completions"] = list(texts) if isinstance(rows[0]["prompt"], str) else chats
    masks = rollout.completion_mask
    ids = [row[mask].tolist() for row, mask in zip(rollout.input_ids[:, -masks.shape[1] :], masks)]
    try:
        rewards = reward_fn(prompts=columns.pop("prompt"), completion_ids=ids, **columns)
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(texts):
        raise ValueError(f"{name} gave {rewards!r:.99}, wanted a list of {len(texts)} numbers")
    for i, reward in enumerate(rewards):
        if not isinstance(reward, Real) or not abs(reward) < 1e30:  # NaN is not below it either
            raise ValueError(f"{name} gave {reward!r} at place {i}; wanted a finite number")
    return torch.tensor(rewards, dtype=torch.float64).view(len(rows), num_generations)


def micro_batches(rollout, groups, num_generations, budget):
    """Cut groups into parts of at most `budget` tokens, or one piece. Yields (rows, k): every k
    neighbouring rows are a piece, answers to one prompt.

    A piece is a whole group (k = G), since its prompt is computed once, unless the longest answers
    are too long for that. Like sizes go together, since all are padded to the largest: within a
    fifth of it. The largest come first, so that memory, if it is short, is short at once and not
    after an hour.
    """
    G, P = num_generations, rollout.input_ids.shape[1] - rollout.completion_mask.shape[1]
    widths = rollout.attention_mask[:, :P].sum(dim=1).tolist()  # N, of the prompts
    lengths = rollout.attention_mask[:, P:].sum(dim=1).tolist()  # N, of the answers
    room = budget // max((lengths[g * G + i] for g in groups for i in range(G)), default=1)
    k = max(k for k in range(1, G + 1) if G % k == 0 and k <= max(room, 1))
    pieces = [range(i, i + k) for g in groups for i in range(g * G, g * G + G, k)]
    size = {piece: widths[piece[0]] + sum(lengths[i] for i in piece) for piece in pieces}
    pieces.sort(key=size.get, reverse=True)
    while pieces:
        largest = size[pieces[0]]
        alike = sum(size[piece] > 0.8 * largest for piece in pieces)
        count = max(1, min(alike, budget // largest))
        yield [row for piece in pieces[:count] for row in piece], k
        pieces = pieces[count:]


def fit_memory(work, learner, *rest):
    """work(learner, *rest); again, with half the tokens in a micro-batch, if memory is too small.
    The result is the same: gradients of micro-batches add up to the whole, however it is cut."""
    while True:
        try:
            return work(learner, *rest)
        except torch.OutOfMemoryError as error:
            if learner.budget < 64:
                raise RuntimeError("no memory for one answer: gradient_checkpointing?") from error
        learner.budget //= 2
        torch.cuda.empty_cache()
        tqdm.write(f"out of memory: {learner.budget} tokens in a micro-batch from here on")


@torch.no_grad()
def score(learner, model, rollout, groups, config):
    """log-probs (N, T) of the rollout under `model`, without gradient: for pi_old and pi_ref."""
    model.eval()  # with dropout pi_old would be another network
    logprobs = torch.zeros_like(rollout.logprobs)
    for rows, k in micro_batches(rollout, groups, config.num_generations, learner.budget):
        logprobs[rows] = token_logprobs(
            model, rollout.input_ids[rows], rollout.attention_mask[rows], logprobs.shape[1],
            config.temperature, num_generations=k).float()
    return logprobs


def accumulate(learner, rollout, groups, advantages, old_logprobs, ref_logprobs, settings, config):
    """The gradient of one update, micro-batch by micro-batch, into the master weights' .grad.
    `settings` are grpo_loss's. Gives each micro-batch's metrics."""
    model = learner.model
    learner.optimizer.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)  # what a pass that ran out of memory has left
    # Dropout is off (eval) while learning too: with it, the ratio would compare two different
    # networks. Gradient checkpointing works in train mode only, so just those modules get it.
    for module in model.eval().modules():
        module.training = getattr(module, "gradient_checkpointing", False)
    results = []
    for rows, k in micro_batches(rollout, groups, config.num_generations, learner.budget):
        mask = rollout.completion_mask[rows]  # (n, T)
        logprobs, entropies = token_logprobs(
            model, rollout.input_ids[rows], rollout.attention_mask[rows], mask.shape[1],
            config.temperature, num_generations=k, return_entropy=True,
            entropy_gradient=config.entropy_bonus > 0)
        # With one update per batch of answers, pi_old is pi_theta itself, held constant. The ratio
        # is then 1, but its gradient is not 0: d(ratio) = d(log pi_theta).
        old = logprobs.detach() if old_logprobs is None else old_logprobs[rows]
        ref = None if ref_logprobs is None else ref_logprobs[rows]
        loss, metrics = grpo_loss(logprobs, old, ref, advantages[rows], mask, entropies=entropies,
                                  **settings)
        if not loss.isfinite():
            bad = rows[int(logprobs.isfinite().all(dim=1).long().argmin())]
            asked = learner.last and learner.last[0][bad // config.num_generations]["prompt"]
            raise FloatingPointError(f"loss {loss.item()} by answer {bad}, to {asked!r:.99}")
        loss.backward()
        for parameter, weight in zip(learner.parameters, learner.weights):
            if parameter is not weight and parameter.grad is not None:
                weight.grad += parameter.grad  # bfloat16 gradients, added up in float32
                parameter.grad = None
        metrics["entropy"] = masked_mean(entropies.detach(), mask).item()
        metrics["sampler_gap"] = masked_mean((rollout.logprobs[rows] - old).abs(), mask).item()
        results.append({**metrics, "tokens": int(mask.sum())})
    return results


def update(learner, rollout, advantages, ref_logprobs, config):
    """Learn from a rollout: num_iterations passes of num_mini_batches updates each. Gives metrics.

    Advantages (N,), ref_logprobs (N, T) or None. The gradient of an update is that of its
    mini-batch as a whole, whatever the memory holds at once.
    """
    G, cut = config.num_generations, rollout.truncated & config.mask_truncated_completions
    mask = rollout.completion_mask & ~cut[:, None]  # (N, T) the tokens in the loss
    rollout = replace(rollout, completion_mask=mask)
    tokens = mask.reshape(-1, G * mask.shape[1]).sum(dim=1).cpu()  # (B,)
    # A group of equal rewards has advantages of 0, and without KL no gradient at all. Its answers
    # need no forward and no backward pass. They still count in the divisor: nothing else changes.
    everything = ref_logprobs is not None or config.entropy_bonus > 0
    teaches = (advantages.view(-1, G) != 0).any(dim=1) | everything  # (B,)
    B, groups, old_logprobs = len(teaches), teaches.nonzero().flatten().tolist(), None
    if config.num_iterations * config.num_mini_batches > 1:
        # pi_old has to be written down before the first update moves pi_theta. It is the scorer's
        # word and not the sampler's, so that the ratio starts at exactly 1, and the rounding
        # differences of the two, in bfloat16, do not look like a policy that has moved.
        old_logprobs = fit_memory(score, learner, learner.model, rollout, groups, config)
    # The settings of the loss bear the same names in the config.
    settings = {name: x for name, x in vars(config).items() if name in grpo_loss.__kwdefaults__}
    settings["beta"] = 0.0 if ref_logprobs is None else config.beta
    results, norms = [], []
    order = torch.randperm if config.num_mini_batches > 1 else torch.arange  # anew in each pass
    passes = [order(B).tensor_split(config.num_mini_batches) for _ in range(config.num_iterations)]
    for part in sum(passes, ()):
        # What to divide by is counted over the whole mini-batch. If each micro-batch took the mean
        # of its own tokens, the way it is cut would decide what a token weighs.
        wholes = {"grpo": len(part) * G, "dr_grpo": len(part) * G * config.max_completion_length}
        settings["divisor"] = wholes.get(config.loss_type, int(tokens[part].sum()))  # for dapo
        some = [g for g in part.tolist() if g in groups]
        try:
            one = fit_memory(accumulate, learner, rollout, some, advantages, old_logprobs,
                             ref_logprobs, settings, config)
            # All gradients together are one long vector. If it is longer than max_grad_norm it is
            # cut to that: a strange batch then costs one step in a wrong direction, no more.
            norm = torch.nn.utils.clip_grad_norm_(learner.weights, config.max_grad_norm).item()
            if not norm < float("inf"):
                raise FloatingPointError(f"gradient of norm {norm}")
        except FloatingPointError as error:
            learner.failed += 1
            tqdm.write(f"update skipped, {learner.failed} in a row: {error}")
            if learner.failed == 3:
                raise
            continue
        learner.optimizer.step()
        for parameter, weight in zip(learner.parameters, learner.weights):
            if parameter is not weight:
                parameter.data.copy_(weight)  # rounded to bfloat16
        learner.failed, results, norms = 0, results + one, norms + [norm]
    updates, tokens = max(len(norms), 1), max(sum(m["tokens"] for m in results), 1)
    names = ("kl", "clip_fraction", "entropy", "sampler_gap")  # means over all tokens of the step
    means = {name: sum(m["tokens"] * m[name] for m in results) / tokens for name in names}
    return {"loss": sum(m["loss"] for m in results) / updates, "grad_norm": sum(norms) / updates,
            "ratio_max": max((m["ratio_max"] for m in results), default=0.0), **means,
            "skipped_updates": len(sum(passes, ())) - len(norms)}


def join(first, second, keep):
    """Rows `keep` of two rollouts, numbered through, as one, padded to the wider of the two."""
    T = [r.completion_mask.shape[1] for r in (first, second)]
    P = [r.input_ids.shape[1] - t for r, t in zip((first, second), T)]

    def both(name, left):
        parts = [torch.nn.functional.pad(getattr(r, name), ((max(P) - p) * left, max(T) - t))
                 for r, p, t in zip((first, second), P, T)]
        return torch.cat(parts)[keep]

    return Rollout(both("input_ids", 1), both("attention_mask", 1), both("completion_mask", 0),
                   both("logprobs", 0), [(first.texts + second.texts)[i] for i in keep],
                   torch.cat([first.truncated, second.truncated])[keep])


def sample_and_score(learner, tokenizer, questions, reward_fn, count, config):
    """G answers to the next `count` questions: their rows, the rollout, (count, G) rewards."""
    rows = [next(questions) for _ in range(count)]
    learner.questions_seen += count
    rollout = sample_groups(learner.model, tokenizer, [row["prompt"] for row in rows],
                            config.num_generations, temperature=config.temperature,
                            max_completion_length=config.max_completion_length)
    rewards = score_rewards(reward_fn, rows, rollout, config.num_generations)
    return rows, rollout, rewards


def train_step(learner, tokenizer, questions, reward_fn, config):
    """One round: sample, score, compare, update. `questions` yields rows of the data set."""
    G, B, started = config.num_generations, config.prompts_per_step, time.perf_counter()
    rows, rollout, rewards = sample_and_score(learner, tokenizer, questions, reward_fn, B, config)
    for _ in range(config.dynamic_sampling):
        keep = [g for g, row in enumerate(group_advantages(rewards)) if row.any()]
        if len(keep) == B:
            break
        fresh = sample_and_score(learner, tokenizer, questions, reward_fn, B - len(keep), config)
        keep += range(B, 2 * B - len(keep))  # the groups that teach, and the fresh ones
        rollout = join(rollout, fresh[1], [g * G + i for g in keep for i in range(G)])
        rows, rewards = [(rows + fresh[0])[g] for g in keep], torch.cat([rewards, fresh[2]])[keep]
    sampled, ref = time.perf_counter(), None
    if learner.reference is not None:
        ref = fit_memory(score, learner, learner.reference, rollout, range(B), config)
        ref[0, 0].item()  # a GPU works behind Python's back: wait for it before the clock is read
    scored = time.perf_counter()
    # Every answer counts in its group's mean and std, those that were cut off too: to drop some of
    # them first would move the baseline of all the others.
    advantages = group_scale(rewards, config.scale_rewards)  # (B, G)
    learner.last = (rows, rollout, rewards, advantages)
    metrics = update(learner, rollout, advantages.flatten().to(rollout.logprobs), ref, config)
    done, lengths = time.perf_counter(), rollout.completion_mask.cpu().sum(dim=1).double()
    # What to watch. reward_mean is progress; loss is not. zero_variance_fraction near 1: nothing
    # to learn from. reward_mean stuck at 0.5 while completion_length collapses: the box is being
    # had without the answer (reward hacking). entropy near 0 early: the policy has stopped
    # exploring (collapse). ratio_max of several, or a kl that jumps: the steps are too large.
    return {"reward_mean": rewards.mean().item(), "reward_std": rewards.std(correction=0).item(),
            "zero_variance_fraction": (advantages == 0).all(dim=1).double().mean().item(),
            "completion_length": lengths.mean().item(),
            "truncated_fraction": rollout.truncated.cpu().double().mean().item(), **metrics,
            "questions_seen": learner.questions_seen,
            "learning_rate": learner.optimizer.param_groups[0]["lr"],
            "sample_seconds": sampled - started, "score_seconds": scored - sampled,
            "update_seconds": done - scored,
            "tokens_per_second": lengths.sum().item() / (done - started)}


# ------------------------------------------------------------------------------------------------
# 12. The loop, and what makes it safe to leave alone overnight
# ------------------------------------------------------------------------------------------------


def question_stream(dataset, seed, seen=0):
    """Rows of the data set for ever, shuffled anew each epoch; none twice before all were seen.
    The first `seen` are skipped: the order depends on nothing but the seed, so a run can go on."""
    epoch, place = divmod(seen, len(dataset))
    while True:
        shuffle = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        for i in torch.randperm(len(dataset), generator=shuffle).tolist()[place:]:
            yield dataset[i]
        epoch, place = epoch + 1, 0


def save_checkpoint(path, step, learner, seen, run):
    """All that a run needs to go on, in one file with nothing in it that could be executed. It is
    written beside and then renamed, so whatever kills the process, and whenever, the file at
    `path` is a whole checkpoint: this one, or the one before."""
    tensors = {f"{i} {key}": x.detach() for i, weight in enumerate(learner.weights)
               for key, x in {"weight": weight, **learner.optimizer.state[weight]}.items()}
    try:
        save_file(tensors, path + ".new", metadata={"json": json.dumps([step, seen, run])})
        os.replace(path + ".new", path)
    except Exception as error:  # a full disk, in the words of whichever library met it
        if os.path.exists(path + ".new"):
            os.remove(path + ".new")
        raise OSError(f"step {step} not saved, {error}: make room, resume from the intact {path}"
                      ) from error


def load_checkpoint(path, learner, run):
    """Put a checkpoint into `learner`; gives its step. ValueError if it belongs to another run."""
    with safe_open(path, framework="pt") as file:
        step, learner.questions_seen, saved = json.loads(file.metadata()["json"])
    # What changes only time and memory may differ: one may go on with less of either.
    for name in run.keys() - {"save_steps", "gradient_checkpointing", "tokens_per_micro_batch"}:
        if run[name] != saved.get(name):
            raise ValueError(f"{path} has {name} {saved.get(name)}, this run has {run[name]}")
    for name, x in load_file(path).items():
        i, key = name.split()
        weight, parameter = learner.weights[int(i)], learner.parameters[int(i)]
        if key == "weight":
            weight.data.copy_(x), parameter.data.copy_(x)
        else:  # Adam's two averages, and its count of steps, which stays on the CPU
            learner.optimizer.state[weight][key] = x if key == "step" else x.to(weight.device)
    return step


def training_steps(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """The loop, as a generator: yields (metrics, learner) after each step, so that a caller can do
    what it likes in between: `for metrics, learner in training_steps(...): evaluate(...)`.

    With an `output_dir` it writes metrics.jsonl (a line a step) and, every save_steps and at the
    end, a checkpoint; with `resume` it goes on from that. Ctrl-C finishes the step, saves and ends
    the loop; twice stops at once.
    """
    rows = list(dataset)
    bad = [i for i, r in enumerate(rows) if not r.get("prompt") or r.keys() != rows[0].keys()]
    if bad or not rows:
        raise ValueError(f"{len(rows)} rows of data, of which {bad[:9]} lack a prompt or a column")
    # What a checkpoint has to have in common with the run that goes on from it.
    sizes = sum(p.detach().cpu().double().abs().sum().item() for p in model.parameters())
    run = {**asdict(config), "model": f"{type(model).__name__} {sizes:.6e}",
           "data": f"{len(rows)} rows {zlib.crc32(repr(rows).encode(errors='replace'))}"}
    learner, done = make_learner(model, config), 0
    # The library's formula for the schedule. One step on, or the first would be made at rate 0.
    rate = get_scheduler(config.lr_scheduler_type, learner.optimizer, config.warmup_steps,
                         config.steps + 1).lr_lambdas[0]
    if output_dir:
        os.makedirs(output_dir, exist_ok=True)
        checkpoint = os.path.join(output_dir, "checkpoint.safetensors")
        metrics_file = os.path.join(output_dir, "metrics.jsonl")
        if os.path.exists(checkpoint) and not resume:
            raise ValueError(f"{output_dir} holds a run: resume it, or name another folder")
        done = load_checkpoint(checkpoint, learner, run) if os.path.exists(checkpoint) else 0
        # A killed run may have written more lines than its checkpoint knows of, the last in part.
        kept = open(metrics_file).readlines()[:done] if done else []
        with open(metrics_file + ".new", "w") as file:
            file.writelines(kept)
        os.replace(metrics_file + ".new", metrics_file)
    elif resume:
        raise ValueError("resume needs the output_dir of the run")
    questions = question_stream(rows, config.seed, learner.questions_seen)
    interrupted = []

    def on_interrupt(*_):
        tqdm.write("interrupted: this step is finished and saved first (again: stop at once)")
        interrupted.append(signal.signal(signal.SIGINT, signal.default_int_handler))

    listens = threading.current_thread() is threading.main_thread()  # other threads get no signals
    handler = signal.signal(signal.SIGINT, on_interrupt) if listens else None
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, unit="step")
    try:
        for step in bar:
            learner.optimizer.param_groups[0]["lr"] = config.learning_rate * rate(step)
            seen = learner.questions_seen
            # All random numbers of a step, a reward function's included, come from the seed and
            # the step's number: a run that goes on draws what it would have drawn.
            set_seed((config.seed * 1_000_003 + step) % 2**32)
            try:
                metrics = train_step(learner, tokenizer, questions, reward_fn, config)
            except Exception:  # whatever it was: what was learned is kept, resume tries again
                if output_dir and step > 1:
                    save_checkpoint(checkpoint, step - 1, learner, seen, run)
                raise
            bar.set_postfix_str(f"reward {metrics['reward_mean']:.2f}")
            if output_dir:
                with open(metrics_file, "a") as file:
                    file.write(json.dumps({"step": step, **metrics}) + "\n")
            yield {"step": step, **metrics}, learner
            due = config.save_steps and (step % config.save_steps == 0 or step == config.steps)
            if output_dir and (due or interrupted):
                save_checkpoint(checkpoint, step, learner, learner.questions_seen, run)
            if interrupted:
                break
    finally:
        if listens:
            signal.signal(signal.SIGINT, handler)


def train(model, tokenizer, dataset, reward_fn, config, output_dir=None, resume=False):
    """Train `model` in place with GRPO; gives the steps' metrics, a list, resumed ones included.

    `dataset`: a datasets.Dataset or a list of dicts, with a `prompt` column (strings, or chats)
    and any others, which go to `reward_fn(prompts=, completions=, completion_ids=, **columns) ->
    list of floats`. `config` is a GRPOConfig; for `output_dir` and `resume` see `training_steps`.
    """
    steps = training_steps(model, tokenizer, dataset, reward_fn, config, output_dir, resume)
    metrics = [step_metrics for step_metrics, _ in steps]
    if resume:
        metrics = [json.loads(line) for line in open(os.path.join(output_dir, "metrics.jsonl"))]
    return metrics
