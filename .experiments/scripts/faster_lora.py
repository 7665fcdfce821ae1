# SPDX-License-Identifier: MIT-0
"""gsm8k_demo.py with --lora, and what makes it faster on a CPU that has units for bfloat16.

    python .experiments/scripts/faster_lora.py --task sums --lora 16 --model FOLDER
    GSM8K=DIR python .experiments/scripts/faster_lora.py --task gsm8k --lora 16 --model FOLDER

With GSM8K=DIR, the problems come from DIR/train.jsonl and DIR/test.jsonl and not from the hub. The
policy is rounded to bfloat16, its tokens are drawn by other random numbers, though from the same
distribution, and the update reads a prompt once for all of its completions. So no figure is that of
a run without this script, but the method is the same.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
import gsm8k_demo
from grpo import forward, pad_rows


def gsm8k_from_a_folder(*names):
    """As datasets.load_dataset, from the two files that GSM8K's repository has."""
    folder = Path(os.environ["GSM8K"])
    return {part: gsm8k_demo.read_jsonl(folder / f"{part}.jsonl") for part in ("train", "test")}


load_model = gsm8k_demo.load_model


def load_model_in_bfloat16(name):
    """As on a GPU, where autocast need not cast the frozen weights for each token. LoRA's own
    matrices, which come later, are float32."""
    model, tokenizer = load_model(name)
    model.get_output_embeddings().register_forward_pre_hook(make_contiguous)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    return model, tokenizer


def make_contiguous(module, inputs):
    """With bfloat16 weights, PyTorch 2.13 copies the output matrix for each row, if the input of
    the output layer is a slice. A contiguous copy of the slice avoids that."""
    return (inputs[0].contiguous(),)


def multinomial(probs, num_samples):
    """Draw by inverting the sums of the probabilities: one random number for each row.

    PyTorch's own needs one for each token of the vocabulary, and on a CPU this takes as long as
    half of the model.
    """
    assert num_samples == 1
    sums = probs.cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp(max=probs.shape[1] - 1)


def compute_logprobs(model, completions, temperature=1.0):
    """As grpo.compute_logprobs, but each prompt is read once, and not for each of its completions.

    The last token of a prompt is read with each completion, whose first token it predicts.
    """
    prompts = sorted({tuple(c.prompt_ids) for c in completions})
    prompt_of = [prompts.index(tuple(c.prompt_ids)) for c in completions]
    prompt_ids, prompt_mask = pad_rows(prompts, "left", model.device)  # (m, P)
    ids, mask = pad_rows([c.ids for c in completions], "right", model.device)  # (n, T)
    begin = forward(
        model, prompt_ids[:, :-1], prompt_mask[:, :-1], use_cache=True, logits_to_keep=1
    )
    begin.cache.reorder_cache(torch.tensor(prompt_of, device=model.device))
    inputs = torch.cat([prompt_ids[prompt_of, -1:], ids[:, :-1]], dim=1)  # (n, T)
    seen = torch.cat([prompt_mask[prompt_of], mask[:, :-1]], dim=1)  # (n, P + T - 1)
    logits = forward(model, inputs, seen, use_cache=True, cache=begin.cache).logits  # (n, T, V)
    logprobs = (logits.float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1), mask


# Training and tests multiply in bfloat16, but the merge after them must not. Each has a context of
# its own, because one that is entered again, by a test while training, stays on in the end.
gsm8k_demo.train = torch.autocast("cpu", torch.bfloat16)(gsm8k_demo.train)
gsm8k_demo.evaluate = torch.autocast("cpu", torch.bfloat16)(gsm8k_demo.evaluate)
gsm8k_demo.load_model = load_model_in_bfloat16
grpo.compute_logprobs = compute_logprobs
torch.multinomial = torch.Tensor.multinomial = multinomial  # whichever the sampler calls
if "GSM8K" in os.environ:
    gsm8k_demo.load_dataset = gsm8k_from_a_folder
if __name__ == "__main__":
    gsm8k_demo.main()
