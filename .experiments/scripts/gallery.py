# SPDX-License-Identifier: MIT-0
"""What GRPO looks like when it is wrong: the rehearsal, trained with one mistake at a time.

    python .experiments/scripts/gallery.py                        all of them on three seeds, half an hour
    python .experiments/scripts/gallery.py healthy "box alone" --seeds 0 1

Prints the accuracy on 256 held-out problems and some steps' figures; --out FILE keeps them all.
"""

import argparse
import ast
import copy
import json
import sys
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from gsm8k_demo import boxed_reward, evaluate, rehearsal

CAP = 28
SETTINGS = {
    "steps": 40,
    "prompts_per_step": 16,
    "max_completion_length": CAP,
    "beta": 0.02,
    "learning_rate": 5e-4,
    "warmup_steps": 5,
    "micro_batch_size": 64,
}
FOUR_PASSES = {"steps": 20, "num_iterations": 4, "learning_rate": 1e-3}
FIGURES = (
    "reward_mean",
    "completion_length",
    "truncated_fraction",
    "kl",
    "entropy",
    "sampler_gap",
    "clip_fraction",
    "grad_norm",
    "zero_variance_fraction",
)

TOP_K_LEFT_ON = """\
from transformers import TopKLogitsWarper, TopPLogitsWarper
            logits = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits))
            logprobs = (logits.float() / (temperature or 1.0))"""
ROUND_THE_WEIGHTS = """\
(optimizer.step(), [p.data.copy_(p.data.bfloat16()) for p in model.parameters()])"""


def other_order(answer, **columns):
    """Right answers as 1, 2, ..., 1, 2, ... beside completions that come as 1, 1, ..., 2, ..."""
    return boxed_reward(answer=answer[::8] * 8, **columns)


def box_alone(**columns):
    return [min(reward, 0.5) for reward in boxed_reward(**columns)]


# name -> "code": what stands in grpo.py, and what in its place; "reward"; and settings
GALLERY = {
    "healthy": {},
    "healthy, four passes": FOUR_PASSES,
    "healthy, rate / 10": {"learning_rate": 5e-5},
    # The completions
    "sampled at 0.6": {
        "code": ("max_completion_length, config.temperature)", "max_completion_length, 0.6)")
    },
    "top_k left on": {
        "code": ("logprobs = (logits.float() / (temperature or 1.0))", TOP_K_LEFT_ON)
    },
    "one end token known": {"code": ("return found", "return {min(found)}")},
    "no end in the mask": {
        "code": (
            "for c in batch]), mask,",
            "for c in batch]), torch.nn.functional.pad(mask[:, 1:], (0, 1)),",
        )
    },
    "padded right": {"code": ("pad_rows(prompts, 'left'", "pad_rows(prompts, 'right'")},
    "no positions": {"code": ("mask.cumsum(dim=1)", "torch.ones_like(mask).cumsum(dim=1)")},
    "targets not shifted": {"code": ("out.logits[:, -T - 1:-1]", "out.logits[:, -T:]")},
    "cap 16": {"max_completion_length": 16},
    # The reward and the advantages
    "other order": {"reward": other_order},
    "box alone": {"reward": box_alone},
    "no baseline": {"code": ("advantages.masked_fill(equal, 0.0)", "rewards")},
    # The loss
    "sign of loss": {"code": ("-average(surrogate - beta * kl", "average(surrogate + beta * kl")},
    "sign of KL": {"code": ("surrogate - beta * kl", "surrogate + beta * kl")},
    "k3 upside down": {"code": ("(ref_logprobs - logprobs)", "(logprobs - ref_logprobs)")},
    "max for min": {"code": ("torch.min(ratio", "torch.max(ratio"), **FOUR_PASSES},
    "pi_old renewed": {"code": ("if update == 0:", "if True:"), **FOUR_PASSES},
    # The update
    "micro-batches alike": {
        "code": ("(loss * share).backward()", "loss.backward()"),
        "micro_batch_size": 16,
    },
    "weights in bfloat16": {"code": ("optimizer.step()", ROUND_THE_WEIGHTS), "learning_rate": 5e-5},
    "rate x 10": {"learning_rate": 5e-3},
}


def with_other_code(right, wrong):
    """grpo.py as another module, in which `wrong` stands wherever `right` stood."""
    tree = ast.parse(Path(grpo.__file__).read_text(encoding="utf-8"))
    source = ast.unparse(tree)  # the code without comments, however its lines were broken
    if right not in source:
        raise ValueError(f"grpo.py has no {right!r} any more")
    module = ModuleType("grpo")
    exec(source.replace(right, wrong), vars(module))
    return module


def train(name, model, tokenizer, train_data, **settings):
    """Train `model` in place with a mistake. Returns the steps' metrics."""
    changes = {"reward": boxed_reward, **SETTINGS, **GALLERY[name], **settings}
    reward = changes.pop("reward")
    module = grpo
    if "code" in changes:
        module = with_other_code(*changes.pop("code"))
    return module.train(model, tokenizer, train_data, reward, module.GRPOConfig(**changes))


def read_flags():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="the names: " + "; ".join(GALLERY),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them if none is given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", default="gallery.jsonl")
    options = parser.parse_args()
    options.names = options.names or list(GALLERY)
    unknown = [name for name in options.names if name not in GALLERY]
    if unknown:
        parser.error(f"no such name: {unknown}. The names: {'; '.join(GALLERY)}")
    return options


def main():
    options = read_flags()
    torch.set_num_threads(1)
    for seed in options.seeds:
        base, tokenizer, train_data, test_data = rehearsal(seed)
        test_data = test_data[:256]
        sampled, greedy = [
            evaluate(base, tokenizer, test_data, CAP, temperature)["accuracy"]
            for temperature in (1, 0)
        ]
        print(f"\nuntrained, seed {seed}: {sampled:.1%} right when sampled, {greedy:.1%} greedily")
        for name in options.names:
            model = copy.deepcopy(base)
            history = train(name, model, tokenizer, train_data, seed=seed)
            end = evaluate(model, tokenizer, test_data, CAP)
            del end["texts"]
            sampled = evaluate(model, tokenizer, test_data, CAP, temperature=1)["accuracy"]
            print(
                f"\n{name}, seed {seed}: {sampled:.1%} right when sampled, "
                f"{end['accuracy']:.1%} greedily"
            )
            print("  step" + "".join(f"{figure:>10.9}" for figure in FIGURES))
            for row in history[:5] + history[9::10]:
                print(f"{row['step']:6}" + "".join(f"{row[figure]:10.3g}" for figure in FIGURES))
            run = {
                "name": name,
                "seed": seed,
                "sampled_accuracy": sampled,
                **end,
                "history": history,
            }
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
