# SPDX-License-Identifier: MIT-0
"""How few steps teach a real model the sums? LoRA with a rank of 16, one setting changed at a time.

    python .experiments/scripts/quick.py MODEL            all runs, one after the other
    python .experiments/scripts/quick.py MODEL --fast     the same, in bfloat16
    python .experiments/scripts/quick.py MODEL --table    a table of the runs that are done

MODEL is the name or the folder of Qwen2.5-Coder-0.5B-Instruct. With --fast, it computes as
`faster_lora.py` does, in less than half of the time, on a CPU with units for bfloat16. The 100 sums
of the test are not the README's, and are not trained on. A run adds a line to the file, with how
many of them are right after each of its last two steps, and how long the steps took, without the
tests. If you stop the script, start it again: it goes on with the runs that are not in the file.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "--fast" in sys.argv:
    import faster_lora  # noqa: F401  it changes the demo's functions, and comes before them
from grpo import GRPOConfig
from gsm8k_demo import (
    LORA_SETTINGS,
    add_lora,
    evaluate,
    load_model,
    load_sums,
    read_jsonl,
    sum_reward,
    train,
)

RESULTS = Path(__file__).resolve().parents[1] / "quick" / "runs.jsonl"
BASE = {"max_completion_length": 32, "micro_batch_size": 8, **LORA_SETTINGS}
SEEDS = (10, 11, 12, 13)


def setting(steps, prompts, warmup, rate):
    return {
        "steps": steps,
        "prompts_per_step": prompts,
        "warmup_steps": warmup,
        "learning_rate": rate,
    }


TRIES = [
    setting(8, 6, 2, 1e-4),
    setting(8, 6, 4, 1e-4),
    setting(10, 6, 4, 1e-4),
    setting(12, 6, 4, 1e-4),
    setting(8, 6, 1, 1.5e-4),
    setting(6, 8, 1, 2e-4),
    setting(5, 12, 2, 1e-4),
    setting(5, 12, 2, 2e-4),
]


def run(name, settings, seed, fast):
    """Train and test. Returns the line for the file."""
    rows = load_sums()[0]
    test_data = rows[:100]
    train_data = rows[100:]
    model, tokenizer = load_model(name)
    model = add_lora(model, 16, seed)
    right = {}
    clock = {"tests": 0.0}

    def after_step(metrics, groups):
        if metrics["step"] > config.steps - 2:
            started = time.perf_counter()
            figures = evaluate(model, tokenizer, test_data, 32, reward=sum_reward)
            right[metrics["step"]] = round(100 * figures["accuracy"])
            clock["tests"] += time.perf_counter() - started

    config = GRPOConfig(**{**BASE, **settings, "seed": seed})
    history = train(model, tokenizer, train_data, sum_reward, config, after_step=after_step)
    return {
        "settings": settings,
        "seed": seed,
        "fast": fast,
        "right": right,
        "rewards": [round(metrics["reward_mean"], 3) for metrics in history],
        "entropy": [round(metrics["entropy"], 3) for metrics in history],
        "tokens": [round(metrics["completion_length"], 1) for metrics in history],
        "seconds": [round(metrics["seconds"], 1) for metrics in history],
        "test_seconds": round(clock["tests"], 1),
    }


def done_runs():
    return read_jsonl(RESULTS) if RESULTS.exists() else []


def run_all(name, seeds, fast):
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for settings in TRIES:
            wanted = {"settings": settings, "seed": seed, "fast": fast}
            if any(wanted.items() <= row.items() for row in done_runs()):
                continue
            row = run(name, settings, seed, fast)
            with open(RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def table():
    """A line for each run, those with the same settings together."""
    print("steps, prompts, warm-up, rate: seed, minutes, minutes until 85, right after each step")
    for settings in TRIES:
        for row in done_runs():
            if row["settings"] != settings:
                continue
            right = {int(step): n for step, n in row["right"].items()}
            good = next((step for step, n in right.items() if n >= 85), None)
            until = f"{sum(row['seconds'][:good]) / 60:.1f}" if good else "never"
            minutes = f"{sum(row['seconds']) / 60:.1f}"
            rewards = f"mean reward {mean(row['rewards']):.2f}"
            what = ", ".join(str(value) for value in settings.values())
            what += ", fast" if row["fast"] else ""
            print(f"{what}: {row['seed']}, {minutes}, {until}, {list(right.values())}, {rewards}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    table() if args.table else run_all(args.model, args.seeds, args.fast)
