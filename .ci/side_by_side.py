# SPDX-License-Identifier: MIT-0
"""Seconds a step on the rehearsal: grpo.py, the same step with model.generate, and TRL's trainer.

    python .ci/side_by_side.py [ROUNDS] [BETA]

By turns in one process, on one thread, each the rehearsal's 40 steps of 16 prompts x 8 completions.
TRL takes part where it is installed: with everything in one micro-batch, no logging, no gradient
checkpointing. Prints every run, and the medians.
"""

import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))
import gsm8k_demo  # noqa: E402
import grpo  # noqa: E402

STEPS, B, G, CAP, RATE = 40, 16, 8, 28, 5e-4  # the rehearsal's


def with_ours(model, tokenizer, examples, beta):
    config = grpo.GRPOConfig(steps=STEPS, prompts_per_step=B, num_generations=G, beta=beta,
                             max_completion_length=CAP, learning_rate=RATE, micro_batch_size=B * G)
    grpo.train(model, tokenizer, examples, gsm8k_demo.boxed_reward, config)


def with_generate(model, tokenizer, examples, beta):
    """GRPO as it is mostly written: generate, and one forward pass over everything."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    end_ids = torch.tensor(grpo.end_token_ids(model, tokenizer))
    tokenizer.padding_side = "left"
    for step in range(STEPS):
        batch = [examples[(step * B + i) % len(examples)] for i in range(B)]
        chats = [example["prompt"] for example in batch]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
        ids = model.generate(
            input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"],
            do_sample=True, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0,
            num_return_sequences=G, max_new_tokens=CAP)
        completions = ids[:, prompts["input_ids"].shape[1] :]
        ended = torch.isin(completions, end_ids).long()
        real = ended.cumsum(dim=1) - ended == 0
        mask = prompts["attention_mask"].repeat_interleave(G, dim=0)
        mask = torch.cat([mask, real.long()], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        rewards = []
        for i in range(B * G):
            text = tokenizer.decode(completions[i][real[i]], skip_special_tokens=True)
            rewards.append(grpo.rule_reward(text, batch[i // G]["answer"]))
        advantages = grpo.group_advantages(torch.tensor(rewards).view(B, G)).flatten()

        def compute_logprobs(network):
            logits = network(ids, attention_mask=mask, position_ids=positions,
                             logits_to_keep=completions.shape[1] + 1).logits[:, :-1]
            logprobs = logits.log_softmax(dim=-1)
            return logprobs.gather(2, completions.unsqueeze(2)).squeeze(2)

        ref_logprobs = None
        if beta > 0:
            with torch.no_grad():
                ref_logprobs = compute_logprobs(reference)
        logprobs = compute_logprobs(model)
        loss, _ = grpo.grpo_loss(logprobs, logprobs.detach(), ref_logprobs, advantages, real,
                                 beta=beta)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def with_trl(model, tokenizer, examples, beta):
    import trl

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)  # TRL reads its reference from there
    model.config._name_or_path = folder
    model.name_or_path = folder
    config = trl.GRPOConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=B * G, num_generations=G, beta=beta,
        max_completion_length=CAP, learning_rate=RATE, loss_type="grpo", use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True)
    trainer = trl.GRPOTrainer(
        model=model, processing_class=tokenizer, args=config,
        reward_funcs=gsm8k_demo.boxed_reward, train_dataset=Dataset.from_list(examples))
    trainer.train()


def main(rounds=3, beta=0.02):
    torch.set_num_threads(1)
    model, tokenizer, train_data, _ = gsm8k_demo.rehearsal(0)
    ways = {"grpo.py": with_ours, "generate": with_generate}
    if importlib.util.find_spec("trl"):
        ways["TRL"] = with_trl
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            copied = copy.deepcopy(model)
            started = time.perf_counter()
            way(copied, tokenizer, train_data, beta)
            seconds[name].append((time.perf_counter() - started) / STEPS)
            print(f"{name}: {seconds[name][-1]:.3f} s a step", flush=True)
    ours = statistics.median(seconds["grpo.py"])
    for name, all_rounds in seconds.items():
        median = statistics.median(all_rounds)
        print(f"median, beta {beta}: {name} {median:.3f} s a step, {median / ours:.1f} x grpo.py")


if __name__ == "__main__":
    main(*(float(x) if "." in x else int(x) for x in sys.argv[1:]))
