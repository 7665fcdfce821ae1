# SPDX-License-Identifier: MIT-0
"""What GRPO looks like when it is wrong: the rehearsal, trained with one mistake at a time.

    python .ci/gallery.py                        all of them, an hour on two idle cores
    python .ci/gallery.py healthy "no clip" --seeds 0 1 --settings '{"num_iterations": 4}'

Prints the accuracy on 256 held-out problems and some steps' figures; --out FILE keeps them all.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo  # noqa: E402
from grpo import (choose_tokens, clipped_surrogate, end_token_ids, group_advantages,  # noqa: E402
                  grpo_loss, k3_kl, make_learner, pad_left, sample_groups)
from gsm8k_demo import boxed_reward, evaluate, rehearsal  # noqa: E402

SETTINGS = {"steps": 40, "prompts_per_step": 16, "max_completion_length": 28, "beta": 0.02,
            "learning_rate": 5e-4, "warmup_steps": 5}
FIGURES = ("reward_mean", "completion_length", "truncated_fraction", "kl", "entropy", "sampler_gap",
           "ratio_max", "clip_fraction", "grad_norm", "zero_variance_fraction")


def sample_without_end(*args, **options):
    rollout = sample_groups(*args, **options)
    last = rollout.completion_mask.sum(dim=1) - 1
    rollout.completion_mask[range(len(last)), last] &= rollout.truncated
    return rollout


def sample_with_padding(*args, **options):
    rollout = sample_groups(*args, **options)
    rollout.completion_mask[:] = True
    rollout.attention_mask[:, -rollout.completion_mask.shape[1] :] = 1
    return rollout


def choose_as_qwen(logits, *rest):
    p, order = logits.softmax(dim=-1).sort(descending=True)
    outside = p.cumsum(dim=-1) - p > 0.8  # top_p
    outside[:, 20:] = True  # top_k
    outside = outside.scatter(1, order, outside)
    return choose_tokens(logits.masked_fill(outside, float("-inf")), *rest)


def score_rolled(by, model, input_ids, attention_mask, T, temperature, **options):
    logits = model(input_ids, attention_mask=attention_mask).logits
    logprobs = logits.roll(by, dims=1)[:, -T:].log_softmax(dim=-1)  # right is 1
    return logprobs.gather(2, input_ids[:, -T:, None]).squeeze(2)


def sum_of_means(new, *rest, **options):
    loss, metrics = grpo_loss(new, *rest, **options)
    return loss * 128 / len(new), metrics  # undoes the micro-batch's share of the 128 rows


def make_learner_without_masters(*args):
    learner = make_learner(*args)
    for weight in learner.weights:
        weight.data = weight.data.bfloat16()
    return learner


# name -> what is put in place: functions of grpo, the reward, settings
GALLERY = {
    "healthy": {},
    "sampled at 0.6": {"choose_tokens": lambda logits, _, u: choose_tokens(logits, 0.6, u)},
    "top_k left on": {"choose_tokens": choose_as_qwen},
    "no end in the mask": {"sample_groups": sample_without_end},
    "padding in the mask": {"sample_groups": sample_with_padding},
    "one end token known": {"end_token_ids": lambda *a: end_token_ids(*a)[:1]},
    "targets not shifted": {"token_logprobs": lambda *a, **o: score_rolled(0, *a, **o)},
    "targets shifted twice": {"token_logprobs": lambda *a, **o: score_rolled(2, *a, **o)},
    "no positions": {"position_ids": lambda mask: torch.ones_like(mask).cumsum(dim=1) - 1},
    "padded right": {"pad_left": lambda rows, pad: [
        padded.flip(1) for padded in pad_left([row[::-1] for row in rows], pad)]},
    "other order": {"reward": lambda answer, **o: boxed_reward(answer=answer[::8] * 8, **o)},
    "first box": {"extract_boxed": lambda text: text.partition("ed{")[2].partition("}")[0]},
    "box alone": {"reward": lambda **o: [min(reward, 0.5) for reward in boxed_reward(**o)]},
    "length": {"reward": lambda completion_ids, **o: [
        reward + 0.1 * len(ids) for reward, ids in zip(boxed_reward(**o), completion_ids)]},
    "whole batch": {"group_scale": lambda R, _: (R - R.mean()) / (R.std() + 1e-4)},
    "no baseline": {"group_scale": lambda R, _: R},
    "sign of loss": {"group_scale": lambda R, _: -group_advantages(R)},
    "sign of KL": {"grpo_loss": lambda *a, beta, **o: grpo_loss(*a, beta=-beta, **o)},
    "k3 upside down": {"kl_estimate": lambda new, ref, **_: k3_kl(ref, new)},
    "KL to itself": {"kl_estimate": lambda new, ref, **_: k3_kl(new, new.detach())},
    "k1": {"kl_penalty_type": "kl"},
    "max for min": {"clipped_surrogate": lambda p, q, A, *e: -clipped_surrogate(p, q, -A, *e)},
    "old anew": {"grpo_loss": lambda new, _, *a, **o: grpo_loss(new, new.detach(), *a, **o)},
    "no clip": {"epsilon": 1e6},
    "micro-batches alike": {"grpo_loss": sum_of_means, "tokens_per_micro_batch": 512},
    "no masters": {"make_learner": make_learner_without_masters, "bf16": False},
    "gradients kept": {"clear_gradients": lambda learner: None},
    "rate x 10": {"learning_rate": 5e-3},
    "rate / 100": {"learning_rate": 5e-6},
    "beta 1": {"beta": 1.0},
    "temperature 0.2": {"temperature": 0.2},
    "cap 16": {"max_completion_length": 16},
}


def train(name, model, tokenizer, train_data, **settings):
    """Train `model` in place with a mistake. Returns the steps' metrics."""
    changes = dict(GALLERY[name])
    reward = changes.pop("reward", boxed_reward)
    functions = {key: changes.pop(key) for key in GALLERY[name] if hasattr(grpo, key)}
    config = grpo.GRPOConfig(**SETTINGS | settings | changes)
    with patch.dict(vars(grpo), functions):
        return grpo.train(model, tokenizer, train_data, reward, config, loss_fn=grpo.grpo_loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(GALLERY))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--out", default="gallery.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        base, tokenizer, train_data, test_data = rehearsal(seed)
        for name in options.names:
            model = copy.deepcopy(base)
            history = train(name, model, tokenizer, train_data, seed=seed, **options.settings)
            end = evaluate(model, tokenizer, list(test_data)[:256], 28, sampled=True)
            print(f"\n{name}, seed {seed}: {end['sampled_accuracy']:.1%} right when sampled, "
                  f"{end['accuracy']:.1%} greedily")
            print("  step" + "".join(f"{figure:>10.9}" for figure in FIGURES))
            for row in history[:5] + history[9::10]:
                print(f"{row['step']:6}" + "".join(f"{row[figure]:10.3g}" for figure in FIGURES))
            run = {"name": name, "seed": seed} | options.settings | end | {"history": history}
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
