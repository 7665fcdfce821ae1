# SPDX-License-Identifier: MIT-0
"""How many of the 100 test problems of `--task sums` a model gets right, in three ways.

    python .experiments/scripts/measure.py MODEL [bf16]

MODEL is a name on the hub, or a folder, such as the --output of a run. It prints the greedy and the
sampled accuracy, and pass@8: of how many problems at least one of eight samples is right. With bf16
it computes in bfloat16 on a CPU that has units for it.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo import chunks, grade, sample_groups
from gsm8k_demo import evaluate, load_model, load_sums, sum_reward


def main():
    name = sys.argv[1]
    model, tokenizer = load_model(name)
    _, problems = load_sums()
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in sys.argv):
        greedy = evaluate(model, tokenizer, problems, 32, reward=sum_reward)["accuracy"]
        completions = []
        for rows in chunks(problems, 6):
            for group in sample_groups(model, tokenizer, rows, 8, 32):
                completions += group
    rewards = grade(sum_reward, completions).view(-1, 8)  # (problems, 8)
    print(
        f"{name}: of {len(problems)} problems, greedy {greedy:.0%}, sampled {rewards.mean():.1%}, "
        f"pass@8 {rewards.amax(dim=1).mean():.0%}"
    )


if __name__ == "__main__":
    main()
