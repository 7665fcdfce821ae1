# SPDX-License-Identifier: MIT-0
"""How many steps of the greedy answers to level 5 are right, such as 280 + 4127 = 4407?

python .experiments/scripts/steps.py

A step is right if what stands behind an equals sign has the value of what stands before it. The
first one is compared with the result of the problem, unless it only copies the problem.
"""

import json
from pathlib import Path

LOG = Path(__file__).resolve().parents[1] / "ladder" / "greedy.jsonl"


def value(text):
    """The value of a sum of products of whole numbers, or None if it is something else."""
    total = 0
    for term in text.strip().rstrip(".").replace(" - ", " + -").split(" + "):
        product = 1
        for factor in term.split(" * "):
            if not factor.removeprefix("-").isdecimal():
                return None
            product *= int(factor)
        total += product
    return total


def steps(text, result):
    """For each step of the first line, whether it is right."""
    right = []
    before = result
    for i, part in enumerate(text.split("\n")[0].split("=")):
        now = value(part)
        if now is None:
            break
        copied = i == 0 and "*" in part and now == result
        if not copied:
            right.append(now == before)
        before = now
    return right


asked = (("untrained", 7), ("seed 0, after level 5", 0), ("seed 1, after level 5", 0))
lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
for model, wording in asked:
    right = []
    for line in lines:
        if (line["model"], line["wording"], line["level"]) != (model, wording, 5):
            continue
        if line["part"] == "test":
            right += steps(line["answers"][0][0], int(line["answer"]))
    print(f"{model}, wording {wording}: {sum(right)} of {len(right)} steps are right")
