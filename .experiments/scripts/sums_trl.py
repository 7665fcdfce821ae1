# SPDX-License-Identifier: MIT-0
"""`gsm8k_demo.py --task sums --lora 16`, and the same with TRL's GRPOTrainer, by turns.

    pip install trl==1.16 peft
    python .experiments/scripts/sums_trl.py MODEL STEPS SEED [SEED ...]

MODEL is the name or the folder of Qwen2.5-Coder-0.5B-Instruct. Each run is a process of its own,
and adds a line: seconds of each step, how much of them is sampling, memory at the peak, rewards,
and how many of the README's 100 sums are right in the end, asked by our own test. The same are
model, matrices of LoRA, prompts (in another order), reward, number and size of steps, rate and its
schedule, loss, and float32. What is set otherwise than by TRL's defaults stands in `train_trl`.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import gsm8k_demo as demo
from grpo import GRPOConfig, train

RESULTS = Path(__file__).resolve().parents[1] / "quick" / "trl.jsonl"
SETTINGS = {**demo.TASKS["sums"].settings, **demo.LORA_SETTINGS}


def our_config(steps, seed):
    names = GRPOConfig.__dataclass_fields__
    settings = {name: value for name, value in SETTINGS.items() if name in names}
    return GRPOConfig(**{**settings, "steps": steps, "seed": seed})


def train_ours(model, tokenizer, rows, steps, seed):
    """Seconds of each step, seconds of sampling in it, and rewards."""
    model = demo.add_lora(model, 16, seed)
    history = train(model, tokenizer, rows, demo.sum_reward, our_config(steps, seed))
    columns = ("seconds", "sample_seconds", "reward_mean")
    return model, [[metrics[name] for metrics in history] for name in columns]


def train_trl(model, tokenizer, rows, steps, seed):
    """The same with TRL."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback

    seconds = []
    sampling = []
    rewards = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *given, **more):
            self.started = time.perf_counter()

        def on_step_end(self, *given, **more):
            seconds.append(time.perf_counter() - self.started)

        def on_log(self, args, state, control, logs=None, **more):
            if "reward" in logs:
                rewards.append(logs["reward"])

    class Trainer(trl.GRPOTrainer):
        def _generate(self, *given, **more):
            started = time.perf_counter()
            result = super()._generate(*given, **more)
            sampling.append(time.perf_counter() - started)
            return result

    config = our_config(steps, seed)
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,  # as ours computes on a CPU
        gradient_checkpointing=False,  # it would save memory, and take time
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.prompts_per_step * 8 // config.micro_batch_size,
        num_generations=8,
        max_completion_length=config.max_completion_length,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        max_steps=config.steps,
        loss_type="grpo",  # the default is "dapo"
        seed=seed,
    )
    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    trainer = Trainer(
        model=model,
        reward_funcs=demo.sum_reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, **targets),
        callbacks=[Clock()],
    )
    trainer.train()
    return trainer.model, [seconds, sampling, rewards]


def one_run(name, steps, seed, who):
    rows, test_data = demo.load_sums()
    model, tokenizer = demo.load_model(name)
    started = time.perf_counter()
    trained = {"ours": train_ours, "trl": train_trl}[who](model, tokenizer, rows, steps, seed)
    model, (seconds, sampling, rewards) = trained
    minutes = (time.perf_counter() - started) / 60
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures = demo.evaluate(model, tokenizer, test_data, 32, reward=demo.sum_reward)
    return {
        "who": who,
        "seed": seed,
        "minutes": round(minutes, 2),
        "seconds": [round(x, 1) for x in seconds],
        "sampling": [round(x, 1) for x in sampling],
        "rewards": [round(x, 2) for x in rewards],
        "memory": round(memory, 1),
        "right": round(100 * figures["accuracy"]),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    if sys.argv[-1] in ("ours", "trl"):
        print(json.dumps(one_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
    else:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        for seed in sys.argv[3:]:
            for who in ("trl", "ours"):
                command = [sys.executable, __file__, *sys.argv[1:3], seed, who]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                line = done.stdout.splitlines()[-1]
                print(line, flush=True)
                with open(RESULTS, "a", encoding="utf-8") as file:
                    file.write(line + "\n")
