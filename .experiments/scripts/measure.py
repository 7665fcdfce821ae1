# SPDX-License-Identifier: MIT-0
"""Of how many of the ladder's sums is at least one of k answers right (pass@k)?

    python .experiments/scripts/measure.py MODEL --level 5 --samples 16 --out after.jsonl
    python .experiments/scripts/measure.py MODEL --level 5 --samples 1 --temperature 0

It draws many answers to each problem, or takes the likeliest one, and saves all of them. If it is
stopped, the same command goes on.
"""

import argparse
import json
from collections import Counter
from math import comb
from pathlib import Path

import torch
from faster_lora import gsm8k_demo as demo
from ladder import problems

from grpo import grade, sample_groups

# As the task asks, and other ways, to see whether the untrained model can do it already. The last
# two show how the trained model writes, the last one in EXAMPLES, as turns of a conversation.
WORDINGS = (
    "Answer in one short line: what is {}?",
    "What is {}?",
    "What is {}? Write each product, then the result, in one short line.",
    "What is {}? Calculate step by step, each step in a short line, and end with the result.",
    "Calculate {}. First each product, then the sums, without code.",
    "Answer in one short line, with the steps first, like 60 + 28 = 88: what is {}?",
    "Answer in one short line, like 14 * 9 + 2058 - 93 + 13 * 5 - 22 = 126 + 2058 - 93 + 65 - 22"
    " = 2184 - 93 + 65 - 22 = 2091 + 65 - 22 = 2156 - 22 = 2134: what is {}?",
    "Answer in one short line: what is {}?",
)
EXAMPLES = {
    "14 times 9 plus 2058 minus 93 plus 13 times 5 minus 22": "14 * 9 + 2058 - 93 + 13 * 5 - 22"
    " = 126 + 2058 - 93 + 65 - 22 = 2184 - 93 + 65 - 22 = 2091 + 65 - 22 = 2156 - 22 = 2134",
    "31 times 4 plus 6207 minus 48 plus 26 times 3 minus 67": "31 * 4 + 6207 - 48 + 26 * 3 - 67"
    " = 124 + 6207 - 48 + 78 - 67 = 6331 - 48 + 78 - 67 = 6283 + 78 - 67 = 6361 - 67 = 6294",
    "17 times 6 plus 4519 minus 75 plus 38 times 2 minus 31": "17 * 6 + 4519 - 75 + 38 * 2 - 31"
    " = 102 + 4519 - 75 + 76 - 31 = 4621 - 75 + 76 - 31 = 4546 + 76 - 31 = 4622 - 31 = 4591",
}
CAPS = {2: 32, 3: 48, 4: 80, 5: 104, 6: 160}  # tokens for a level's answer


def asker(wording):
    """ask(words) -> the conversation that ends with the question in this wording."""

    def ask(words):
        turns = []
        if wording == 7:
            for example, answer in EXAMPLES.items():
                turns.append({"role": "user", "content": WORDINGS[wording].format(example)})
                turns.append({"role": "assistant", "content": answer})
        turns.append({"role": "user", "content": WORDINGS[wording].format(words)})
        return turns

    return ask


def pass_at(k, n, right):
    """The chance that k of the n answers, drawn without replacement, hold one of the right ones."""
    return 1 - comb(n - right, k) / comb(n, k)


@torch.autocast("cpu", torch.bfloat16)
def measure(args):
    """Draw what `args.out` does not have yet, and print its pass@k: a stop costs one batch."""
    cap = args.cap or CAPS[args.level]
    asked = {"model": args.model, "level": args.level, "part": args.part, "wording": args.wording}
    asked |= {"temperature": args.temperature, "samples": args.samples, "cap": cap}
    asked |= {"seed": args.seed}
    rows = problems(args.level, args.part, args.problems, asker(args.wording))
    done = [line for line in read_lines(args.out) if asked.items() <= line.items()]
    model, tokenizer = demo.load_model(args.model)  # in bfloat16
    at_once = max(1, 256 // args.samples)
    for i in range(len(done), len(rows), at_once):
        torch.manual_seed(1000 * args.seed + i)
        batch = rows[i : i + at_once]
        groups = sample_groups(model, tokenizer, batch, args.samples, cap, args.temperature)
        for row, group in zip(batch, groups):
            rewards = grade(demo.sum_reward, group).tolist()
            answers = Counter(zip([c.text for c in group], rewards)).most_common()
            line = {**asked, "prompt": row["prompt"][-1]["content"], "answer": row["answer"]}
            line["right"] = int(sum(rewards))
            line["cut_off"] = sum(c.truncated for c in group)
            line["answers"] = [[text, reward, n] for (text, reward), n in answers]
            done.append(line)
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    show(done[: len(rows)])


def read_lines(path):
    return demo.read_jsonl(path) if Path(path).exists() else []


def show(lines):
    first = lines[0]
    words = WORDINGS[first["wording"]]
    print(f"{first['model']}, level {first['level']}, {first['part']}: {words}")
    cut_off = sum(line["cut_off"] for line in lines) / len(lines) / first["samples"]
    print(f"  at most {first['cap']} tokens ({cut_off:.1%} cut off)")
    print(f"  temperature {first['temperature']}, {first['samples']} answers to a problem")
    for k in (1, 8, 16, 64, 256):
        if k <= first["samples"]:
            shares = [pass_at(k, first["samples"], line["right"]) for line in lines]
            share = sum(shares) / len(shares)
            low, high = demo.wilson_interval(share, len(shares))
            print(f"  pass@{k}: {share:.1%} of {len(shares)} ({low:.1%} to {high:.1%})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--level", type=int, default=5)
    parser.add_argument("--part", default="test", choices=["test", "new"])
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--wording", type=int, default=0)
    parser.add_argument("--cap", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="answers.jsonl")
    measure(parser.parse_args())
