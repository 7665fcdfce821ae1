# SPDX-License-Identifier: MIT-0
"""What the untrained model of the demo's --task sums scores if it is prompted in other words.

    python .experiments/scripts/control.py [MODEL]

Greedy, in bfloat16, on the task's 100 test problems. With the first two prompts, the limit is 32
tokens, as in the task. A completion is right if its last number is.
"""

import random
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo import chunks, sample_groups

PROMPTS = {  # the words -> the largest number of tokens
    "Answer in one short line: what is {} times {} plus {}?": 32,
    "What is {} times {} plus {}? Write the product, then the sum, in one short line.": 32,
    "Answer in one short line, with the product first, like 60 + 5 = 65: "
    "what is {} times {} plus {}?": 64,
    "What is {} times {} plus {}?": 256,
    "What is {} times {} plus {}? Think step by step, without code, and end with the result.": 256,
}

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-Coder-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
model.to("cuda" if torch.cuda.is_available() else "cpu")
numbers = [(a, b, c) for a in range(11, 40) for b in range(2, 10) for c in range(2, 41)]
random.Random(0).shuffle(numbers)
for words, limit in PROMPTS.items():
    right, tokens, texts = 0, 0, []
    for part in chunks(numbers[:100], 50):
        problems = [{"prompt": [{"role": "user", "content": words.format(*n)}]} for n in part]
        with torch.autocast(model.device.type, torch.bfloat16):
            groups = sample_groups(model, tokenizer, problems, 1, limit, temperature=0)
        for (a, b, c), [completion] in zip(part, groups):
            found = re.findall(r"[0-9]+(?:\.[0-9]+)?", completion.text)
            right += bool(found) and float(found[-1]) == a * b + c
            tokens += len(completion.ids)
            texts.append(completion.text)
    print(f"{right:3} of 100 right, {tokens / 100:.0f} tokens on average: {words}", flush=True)
    print(f"    the first answer: {texts[0]!r:.150}", flush=True)
