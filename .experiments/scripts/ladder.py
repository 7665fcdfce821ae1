# SPDX-License-Identifier: MIT-0
"""Sums of two terms, then of three, four and five: does GRPO teach what was never right before?

    python .experiments/scripts/ladder.py MODEL                     climb, with seed 0
    python .experiments/scripts/ladder.py MODEL --seed 1 --output runs/ladder-1
    python .experiments/scripts/ladder.py MODEL --rungs mixed       a control: all levels at once
    python .experiments/scripts/ladder.py MODEL --rungs top         another: the top alone
    python .experiments/scripts/measure.py runs/ladder/model --level 5 --samples 16

MODEL is the name or the folder of Qwen2.5-Coder-0.5B-Instruct. LoRA's matrices and the optimizer
go from rung to rung as they are. The next rung begins when the mean reward of two steps has reached
ENOUGH, or after a number of steps, and the last one gets all steps that are left. If it is stopped,
the same command goes on after its last step. It uses what makes `faster_lora.py` fast, and needs a
CPU with units for bfloat16.

One number is drawn from 9,000, so that 256 blind guesses hit at most 2.8 % of the problems.
"""

import argparse
import json
import random
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from statistics import mean

import torch
from faster_lora import gsm8k_demo as demo

from grpo import GRPOConfig

TOP = 5
TEST_CAP = 104  # tokens for an answer in the tests
CAPS = {"1": 20, "2": 24, "3": 40, "4": 64, "5": 88}  # and in training
RUNGS = {  # (levels to practise, at most so many steps); the last rung gets all that are left
    "climb": [
        (["1"], 20),
        (["2 easy", "2"], 15),
        (["3 easy", "3"], 20),
        (["4 easy", "4"], 15),
        (["5 easy", "5"], 12),
        (["5"], 0),
    ],
    "mixed": [(["1", "2 easy", "2", "3 easy", "3", "4 easy", "4", "5 easy", "5"], 0)],
    "top": [(["5"], 0)],
}
ENOUGH = 0.75  # the mean reward of two steps that ends a rung
SETTINGS = {
    "prompts_per_step": 6,
    "micro_batch_size": 24,
    "learning_rate": 1e-4,
    "warmup_steps": 8,
    "beta": 0.0,
}


# ---- The problems ------------------------------------------------------------------------------
def sum_of(level, rng, easy=False):
    """(the sum in words, its result): 35 times 8 plus 4127, and with each level a term more.

    A product, a large number, a small one to take away, a product, and another one to take away.
    If it is easy, the large number has three digits, and not four.
    """
    parts = []
    result = 0
    for term in range(level):
        if term in (0, 3):
            a = rng.randint(11, 39)
            m = rng.randint(2, 9)
            parts.append(f"plus {a} times {m}")
            result += a * m
        elif term == 1:
            b = rng.randint(100, 999) if easy else rng.randint(1000, 9999)
            parts.append(f"plus {b}")
            result += b
        else:
            b = rng.randint(11, 99)
            parts.append(f"minus {b}")
            result -= b
    return " ".join(parts).removeprefix("plus "), result


def in_short(words):
    """The conversation that asks for a sum."""
    return [{"role": "user", "content": f"Answer in one short line: what is {words}?"}]


def problems(level, part, n, ask=in_short, easy=False):
    """n rows of a level. Each part ("train", "test" or "new") is drawn by a seed of its own."""
    rng = random.Random(f"{level} {part}{easy * ' easy'}")
    rows = []
    for _ in range(n):
        words, result = sum_of(level, rng, easy)
        rows.append({"prompt": ask(words), "answer": str(result)})
    return rows


def rows_to_train_on(levels):
    """5,000 rows of each level. Level 1 is the demo's short sums."""
    rows = []
    for level in levels:
        if level == "1":
            some = demo.load_sums()[0][:5000]
        else:
            some = problems(int(level[0]), "train", 5000, easy="easy" in level)
        rows += [{**row, "level": level} for row in some]
    return rows


# ---- The climb ---------------------------------------------------------------------------------
class Climbed(Exception):
    """It leaves `train` after the last step of a rung, or of the run."""


def next_rung(rungs, history):
    """The rung of the next step: the one of the last step, or if it has been climbed, the next."""
    if not history:
        return 0
    rung = history[-1]["rung"]
    rewards = [metrics["reward_mean"] for metrics in history if metrics["rung"] == rung]
    most = rungs[rung][1]
    climbed = len(rewards) == most or (len(rewards) > 1 and mean(rewards[-2:]) >= ENOUGH)
    return rung + 1 if climbed and rung + 1 < len(rungs) else rung


def rewards_by_level(groups):
    """{level: mean reward of its answers}."""
    rewards = {}
    for group in groups:
        for completion in group:
            rewards.setdefault(completion.example["level"], []).append(completion.reward)
    return {level: mean(values) for level, values in rewards.items()}


def climb(args):
    """Test the top level, climb to it, and test it again. All files go into args.output."""
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    rungs = RUNGS[args.rungs]
    model, tokenizer = demo.load_model(args.model)
    model = demo.add_lora(model, 16, args.seed)
    optimizer = torch.optim.Adam(demo.learning_weights(model).values())
    results, history = demo.restore(folder, model, optimizer)

    def test(when):
        rows = problems(TOP, "test", 50) + problems(TOP, "new", 50)
        figures = demo.evaluate(model, tokenizer, rows, TEST_CAP, reward=demo.sum_reward)
        demo.write_jsonl(folder / f"{when}.jsonl", figures.pop("answers"))
        results[when] = figures
        demo.write_whole(folder / "results.json", json.dumps(results, indent=2))
        print(f"\n{when}: {demo.in_words(figures)}")

    def after_step(metrics, groups):
        metrics["rung"] = rung
        metrics["rewards"] = rewards_by_level(groups)
        history.append(metrics)
        demo.write_jsonl(folder / "metrics.jsonl", history)
        demo.save_checkpoint(folder, model, optimizer, history)
        demo.show_group(metrics, groups)
        if len(history) == args.steps or next_rung(rungs, history) != rung:
            raise Climbed

    if "before" not in results:
        test("before")
    while len(history) < args.steps:
        rung = next_rung(rungs, history)
        levels = rungs[rung][0]
        print(f"\nFrom step {len(history) + 1} on, it practises level {' and '.join(levels)}.")
        config = GRPOConfig(
            **SETTINGS,
            steps=round(1.19 * args.steps),  # so that the rate ends at 18 %, and not at 0
            seed=args.seed,
            max_completion_length=max(CAPS[level[0]] for level in levels),
        )
        with suppress(Climbed):
            demo.train(
                model,
                tokenizer,
                rows_to_train_on(levels),
                demo.sum_reward,
                config,
                optimizer=optimizer,
                after_step=after_step,
                first_step=len(history) + 1,
            )
    test("after")
    seconds = sum(metrics["seconds"] for metrics in history)
    print(f"{args.steps} steps took {seconds / 60:.0f} minutes, without the tests.")
    demo.save_model(model.float().merge_and_unload(), tokenizer, folder / "model")


def main():
    sys.stdout.reconfigure(line_buffering=True)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rungs", choices=RUNGS, default="climb")
    parser.add_argument("--steps", type=int, default=84)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/ladder")
    try:
        climb(parser.parse_args())
    except KeyboardInterrupt:
        print(f"\nStopped. To go on:\n    {shlex.join(['python', *sys.argv])}")
        sys.exit(130)


if __name__ == "__main__":
    main()
