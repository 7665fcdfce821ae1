# SPDX-License-Identifier: MIT-0
"""What the untrained model of `gsm8k_demo.py --task sums` scores if it is asked in other words.

    python .experiments/scripts/control.py [--model MODEL] [--out FILE]

MODEL is a name on the hub, or a folder. It answers the task's 100 test problems greedily, in
bfloat16. FILE gets all answers, a line of JSON for each.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gsm8k_demo import TASKS, evaluate, load_model, load_sums, sum_reward

ASKED = "Answer in one short line: what is "  # how the task begins its questions
LIMITS = {  # the words in its place, and after the sum -> the largest number of tokens
    (ASKED, "?"): 32,
    ("What is ", "? Write the product, then the sum, in one short line."): 32,
    (f"{ASKED[:-10]}, with the product first, like 60 + 5 = 65: what is ", "?"): 64,
    ("What is ", "?"): 256,
    ("What is ", "? Think step by step, without code, and end with the result."): 256,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=TASKS["sums"].model)
    parser.add_argument("--out", default="control.jsonl")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    _, problems = load_sums()
    for (before, after), limit in LIMITS.items():
        rows = []
        for row in problems:
            [message] = row["prompt"]
            question = before + message["content"].removeprefix(ASKED).removesuffix("?") + after
            rows.append({**row, "prompt": [{"role": "user", "content": question}]})
        with torch.autocast(model.device.type, torch.bfloat16):
            figures = evaluate(model, tokenizer, rows, limit, batch_size=50, reward=sum_reward)
        print(f"{figures['accuracy']:4.0%} right: {before}{{}} times {{}} plus {{}}{after}")
        print(f"    the first answer: {figures['answers'][0]['text']!r:.150}", flush=True)
        with open(args.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in figures["answers"])


if __name__ == "__main__":
    main()
