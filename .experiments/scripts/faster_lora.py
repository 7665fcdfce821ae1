"""gsm8k_demo.py with --lora and --cpu_bf16, and what makes it faster on a CPU with bfloat16 units.

    python faster_lora.py --task gsm8k --lora 16 --cpu_bf16 --model FOLDER --data DIR ...

It changes how fast the numbers come, and their last digits, but not what is computed.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import gsm8k_demo


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


gsm8k_demo.multiplies_bfloat16 = as_on_a_gpu
gsm8k_demo.add_lora = add_lora_with_contiguous_head
torch.multinomial = multinomial
if __name__ == "__main__":
    gsm8k_demo.main()
