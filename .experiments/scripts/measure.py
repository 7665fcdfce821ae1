# SPDX-License-Identifier: MIT-0
"""What the README says of the short sums, beside the runs of `gsm8k_demo.py --task sums`:

    python .experiments/scripts/measure.py MODEL           of the 100 held-out problems, how many does it get right?
    python .experiments/scripts/measure.py MODEL lora 0    the same before and after training with LoRA, on seed 0

MODEL is a name on the hub, or a folder. Add bf16 at the end to compute in bfloat16 on a CPU that
has units for it. LoRA needs the package peft."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo import GRPOConfig, chunks, grade, sample_groups, train
from gsm8k_demo import evaluate, load_model, load_sums, sum_reward


def show(when, model, tokenizer, problems):
    """Greedy, sampled, and pass@8: the share of problems that one of eight samples gets right."""
    greedy = evaluate(model, tokenizer, problems, 32, reward=sum_reward)["accuracy"]
    torch.manual_seed(0)
    rewards = torch.cat(
        [
            grade(sum_reward, sum(sample_groups(model, tokenizer, some, 8, 32), []))
            for some in chunks(problems, 6)
        ]
    ).view(-1, 8)  # (problems, 8)
    print(
        f"{when}: of {len(problems)} problems, greedy {greedy:.0%}, sampled {rewards.mean():.1%}, "
        f"pass@8 {rewards.amax(dim=1).mean():.0%}",
        flush=True,
    )


def lora(model, tokenizer, data, seed):
    """As --task sums, but with LoRA, one update per step, beta 0, and a rate of 1e-4."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{weights / 1e6:.1f} M weights are trained", flush=True)
    config = GRPOConfig(
        steps=20,
        prompts_per_step=6,
        max_completion_length=32,
        beta=0,
        seed=seed,
        learning_rate=1e-4,
        warmup_steps=8,
        micro_batch_size=8,
    )

    def after_step(metrics, groups):
        print(
            "step {step:2}  reward {reward_mean:.2f}  entropy {entropy:.2f}  sampler_gap "
            "{sampler_gap:.4f}  grad_norm {grad_norm:.2f}  seconds {sample_seconds:.0f} + "
            "{update_seconds:.0f}".format(**metrics),
            flush=True,
        )

    train(model, tokenizer, data, sum_reward, config, after_step=after_step)
    return model


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    started, (data, problems) = time.time(), load_sums()
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in rest):
        model, tokenizer = load_model(name)
        show("before", model, tokenizer, problems)
        if rest[:1] == ["lora"]:
            trained = time.time()
            model = lora(model, tokenizer, data, int(rest[1]))
            print(f"trained in {(time.time() - trained) / 60:.1f} minutes", flush=True)
            show("after", model, tokenizer, problems)
    print(f"{(time.time() - started) / 60:.1f} minutes in all")
