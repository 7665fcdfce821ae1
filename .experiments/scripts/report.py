# SPDX-License-Identifier: MIT-0
"""What the logs .experiments/scripts/sums-*.txt and .experiments/scripts/pieces-*.txt say of a run of `gsm8k_demo.py --task sums`:

    python .experiments/scripts/report.py RUN SCREEN

RUN is the run's folder, SCREEN a file with what it printed. The command, the machine, the time and
the memory are not in the folder: they were written above by hand, from `/usr/bin/time -v`."""

import json
import re
import sys
from pathlib import Path

run, screen = Path(sys.argv[1]), Path(sys.argv[2]).read_text().replace("\r", "\n")


def rows(name):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


for when, result in json.loads((run / "results.json").read_text()).items():
    low, high = result["interval"]
    alone = [
        row["right"]
        for row in rows(f"{when}.jsonl")
        if len(re.findall(r"\d[\d.]*", row["text"])) == 1
    ]
    print(
        f"{when}: {result['accuracy']:.0%} of {result['questions']} right (95 % interval {low:.1%} to "
        f"{high:.1%}); {len(alone)} answers have one number only, and {sum(alone)} of these are right"
    )

print(
    "\nstep  reward  right in the test  kl      clip_fraction  sampler_gap  grad_norm  entropy  "
    "equal groups  seconds"
)
for row in rows("metrics.jsonl"):
    print(
        f"{row['step']:4}  {row['reward_mean']:6.2f}  {row.get('accuracy', ''):>17}  {row['kl']:.4f}  "
        f"{row['clip_fraction']:13.4f}  {row['sampler_gap']:11.1e}  {row['grad_norm']:9.2f}  "
        f"{row['entropy']:7.2f}  {row['zero_variance_fraction']:12.2f}  "
        f"{row['sample_seconds'] + row['update_seconds']:7.0f}"
    )

print("\none group of " + re.search(r"step 4: .*\n(?:  reward .*\n)+", screen)[0])
print("the held-out problems, greedy: before -> after")
for before, after in zip(rows("before.jsonl"), rows("after.jsonl")):
    question = before["question"].removeprefix("Answer in one short line: what is ")
    print(f"  {question:20} ({before['answer']})  {before['text']!r:34} -> {after['text']!r}")
