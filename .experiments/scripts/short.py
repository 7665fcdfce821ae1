"""python .experiments/scripts/short.py --lora 16: learn to explain a word in few words."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from gsm8k_demo import TASKS, Task, main

WORDS = ["rain", "money", "gravity", "music", "sleep", "glass"]
WORDS += ["bread", "light", "water", "fire", "stone", "wood"]


def load():
    rows = []
    for word in WORDS:
        for limit in (8, 12, 16):
            question = f"Explain in at most {limit} words what {word} is."
            rows.append(
                {"prompt": [{"role": "user", "content": question}], "word": word, "limit": limit}
            )
    return rows[:24], rows[24:]  # the last four words are only for the test


def short_reward(completions, word, limit, **columns):
    """1 for four words or more that name the word and keep to the limit, else 0."""
    rewards = []
    for chat, name, most in zip(completions, word, limit):
        text = chat[-1]["content"].lower()
        rewards.append(float(name in text and 4 <= len(text.split()) <= most))
    return rewards


settings = {"steps": 16, "prompts_per_step": 3, "max_completion_length": 32}
settings |= {"eval_steps": 4, "save_steps": 4}
TASKS["short"] = Task("Qwen/Qwen2.5-Coder-0.5B-Instruct", load, short_reward, settings)
if __name__ == "__main__":
    main("short")
