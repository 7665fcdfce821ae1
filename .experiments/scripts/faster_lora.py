# SPDX-License-Identifier: MIT-0
"""gsm8k_demo.py with --lora, and what makes it faster on a CPU that has units for bfloat16.

    python .experiments/scripts/faster_lora.py --task sums --lora 16 --model FOLDER
    GSM8K=DIR python .experiments/scripts/faster_lora.py --task gsm8k --lora 16 --model FOLDER

With GSM8K=DIR, the problems come from DIR/train.jsonl and DIR/test.jsonl and not from the hub. The
policy is rounded to bfloat16, and its tokens are drawn by other random numbers, though from the
same distribution. So no figure is that of a run without this script, but the method is the same.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import gsm8k_demo


def gsm8k_from_a_folder():
    """As gsm8k_demo.load_gsm8k, from the two files that GSM8K's repository has."""
    parts = [
        gsm8k_demo.read_jsonl(Path(os.environ["GSM8K"], f"{n}.jsonl")) for n in ("train", "test")
    ]
    return tuple([gsm8k_demo.gsm8k_row(row) for row in rows] for rows in parts)


def as_on_a_gpu(device):
    """Then the frozen weights are kept in bfloat16, and autocast need not cast them per token."""
    return True


add_lora = gsm8k_demo.add_lora


def add_lora_with_contiguous_head(model, rank, seed):
    """With bfloat16 weights, PyTorch 2.13 copies the output matrix for each row, if the input of
    the output layer is a slice. A contiguous copy of the slice avoids that."""
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(make_contiguous)
    return add_lora(model, rank, seed)


def make_contiguous(module, inputs):
    return (inputs[0].contiguous(),)


def multinomial(probs, num_samples):
    """Draw by inverting the sums of the probabilities: one random number for each row.

    torch.multinomial needs one for each token of the vocabulary, and on a CPU this takes as long
    as half of the model.
    """
    assert num_samples == 1
    sums = probs.cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.rand(len(probs), 1, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp(max=probs.shape[1] - 1)


# Training and tests multiply in bfloat16, but the merge in between must not.
in_bfloat16 = torch.autocast("cpu", torch.bfloat16)
gsm8k_demo.train = in_bfloat16(gsm8k_demo.train)
gsm8k_demo.evaluate = in_bfloat16(gsm8k_demo.evaluate)
gsm8k_demo.multiplies_bfloat16 = as_on_a_gpu
gsm8k_demo.add_lora = add_lora_with_contiguous_head
torch.multinomial = multinomial
if "GSM8K" in os.environ:
    gsm8k_demo.TASKS["gsm8k"].load = gsm8k_from_a_folder
if __name__ == "__main__":
    gsm8k_demo.main()
