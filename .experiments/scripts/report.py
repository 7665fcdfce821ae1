# SPDX-License-Identifier: MIT-0
"""The log of a run of gsm8k_demo.py, from the files in its folder and what it printed.

    python .experiments/scripts/report.py RUN SCREEN

RUN is the folder of a run of version eleven or newer, and SCREEN a file with what stood on the
screen. The machine, the time and the memory are in neither: they were written above by hand, from
`/usr/bin/time -v`.
"""

import json
import re
import sys
from pathlib import Path

run = Path(sys.argv[1])
screen = Path(sys.argv[2]).read_text().replace("\r", "\n")
NUMBER = r"\d[\d.,]*"


def rows(name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def answers(when):
    """One line: how many answers are right, and how many have one number only."""
    figures = json.loads((run / "results.json").read_text())[when]
    low, high = figures["interval"]
    alone = [
        row["reward"] >= 1
        for row in rows(f"{when}.jsonl")
        if len(re.findall(NUMBER, row["text"])) == 1
    ]
    print(
        f"{when}: {figures['accuracy']:.1%} of {figures['questions']} right (95 % interval "
        f"{low:.1%} to {high:.1%}), {figures['lenient_accuracy']:.1%} if numbers without a box "
        f"count; {len(alone)} answers have one number only, and {sum(alone)} of these are right"
    )


def steps():
    """A table of the metrics."""
    columns = {  # name in the table -> how to print it
        "step": lambda row: row["step"],
        "reward": lambda row: f"{row['reward_mean']:.2f}",
        "test": lambda row: f"{row['accuracy']:.0%}" if "accuracy" in row else "",
        "entropy": lambda row: f"{row['entropy']:.2f}",
        "equal groups": lambda row: f"{row['zero_variance_fraction']:.2f}",
        "tokens": lambda row: f"{row['completion_length']:.0f}",
        "cut off": lambda row: f"{row['truncated_fraction']:.0%}",
        "kl": lambda row: f"{row['kl']:.4f}",
        "clipped": lambda row: f"{row['clip_fraction']:.4f}",
        "sampler_gap": lambda row: f"{row['sampler_gap']:.1e}",
        "grad_norm": lambda row: f"{row['grad_norm']:.2f}",
        "rate": lambda row: f"{row['learning_rate']:.1e}",
        "seconds": lambda row: f"{row['seconds']:.0f}",
    }
    print("\n" + "  ".join(f"{name:>7}" for name in columns))
    for row in rows("metrics.jsonl"):
        cells = [f"{show(row):>{max(7, len(name))}}" for name, show in columns.items()]
        print("  ".join(cells))


def groups():
    """The groups of steps 1 and 4, and the last one that was shown."""
    shown = re.findall(r"step \d+: .*\n(?:  +\d+ x  reward .*\n)+", screen)
    for group in [*shown[:2], shown[-1]]:
        print("\n" + group.rstrip())


def pairs():
    """All answers, before and after, so that whoever doubts a figure can count again."""
    print("\nheld-out problems: before -> after")
    for before, after in zip(rows("before.jsonl"), rows("after.jsonl")):
        prompt = before["prompt"]
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        question = question.removeprefix("Answer in one short line: what is ")
        mark = "+" if after["reward"] >= 1 else "-"
        answer = f" ({before['answer']})" if "answer" in before else ""
        print(f"{mark} {question}{answer}  {before['text']!r} -> {after['text']!r}")


if __name__ == "__main__":
    answers("before")
    answers("after")
    steps()
    groups()
    pairs()
