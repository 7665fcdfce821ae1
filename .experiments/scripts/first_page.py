# SPDX-License-Identifier: MIT-0
"""Run the program on the first page of grpo.py, and ask all its questions before and after.

    python .experiments/scripts/first_page.py MODEL [SEED]

MODEL is a name or a folder, and takes the place of the name on the page. Nothing else is changed.
"""

import random
import re
import sys
import textwrap
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo


def program(model):
    """The lines of the page from the imports to the print, with another model."""
    _, start, page = grpo.__doc__.partition("    import copy")
    page, end, _ = page.partition("print(step")
    last_line = grpo.__doc__.partition(end)[2].partition("\n")[0]
    lines = textwrap.dedent(start + page + end + last_line)
    return re.sub('name = ".*"', f"name = {model!r}", lines)


def ask(model, names):
    """Print how many questions the model answers rightly, with its likeliest tokens."""
    examples = names["examples"]
    groups = grpo.sample_groups(model, names["tokenizer"], examples, 1, 64, temperature=0)
    completions = [group[0] for group in groups]
    rewards = grpo.grade(names["reward_fn"], completions)
    print(f"{rewards.sum():.0f} of {len(rewards)} right")
    print([completion.text for completion in completions])


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    random.seed(seed)
    torch.manual_seed(seed)
    names = {}
    started = time.time()
    exec(program(sys.argv[1]), names)
    print(f"{time.time() - started:.0f} seconds")
    for when in ("reference", "model"):
        print("before" if when == "reference" else "after", end=": ")
        ask(names[when], names)
