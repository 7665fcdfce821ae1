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
    """For each step of the first line, how far it is off: 0 is right."""
    off = []
    before = result
    for i, part in enumerate(text.split("\n")[0].split("=")):
        now = value(part)
        if now is None:
            break
        copied = i == 0 and "*" in part and now == result
        if not copied:
            off.append(abs(now - before))
        before = now
    return off


def main():
    asked = (("untrained", 7), ("seed 0, after level 5", 0), ("seed 1, after level 5", 0))
    lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    wrong = []  # for each wrong answer of the trained models, its steps
    for model, wording in asked:
        all_steps = []
        for line in lines:
            if (line["model"], line["wording"], line["level"]) != (model, wording, 5):
                continue
            if line["part"] == "test":
                off = steps(line["answers"][0][0], int(line["answer"]))
                all_steps += off
                if wording == 0 and not line["right"]:
                    wrong.append([n for n in off if n != 0])
        right = all_steps.count(0)
        print(f"{model}, wording {wording}: {right} of {len(all_steps)} steps are right")

    single = sum(len(off) == 1 for off in wrong)
    # 6684 + 72 = 6856 is off by 100. So is 6900 in place of 7000: only one digit was not carried.
    one_digit = sum(len(str(off[0]).rstrip("0")) == 1 for off in wrong if off)
    print(f"Of the {len(wrong)} wrong answers of the trained models, {single} have one wrong step,")
    print(f"and in {one_digit}, the first wrong step is off by one digit in one place.")


if __name__ == "__main__":
    main()
