# SPDX-License-Identifier: MIT-0
"""How much of what LoRA has learned is lost if its matrices are merged in bfloat16?

python .experiments/scripts/merge.py

It merges a tiny model twice, and compares what the merge has changed in its weights.
"""

import copy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import gsm8k_demo


def merged(model):
    """All weights after the merge, by their name in the model without LoRA."""
    weights = copy.deepcopy(model).float().merge_and_unload().state_dict()
    return {name: weight.double() for name, weight in weights.items()}


def main():
    gsm8k_demo.PRETRAIN_STEPS = 1
    model = gsm8k_demo.rehearsal(0)[0]
    old = {name: weight.double() for name, weight in model.state_dict().items()}
    model = gsm8k_demo.add_lora(model, 16, 0)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)

    exact = merged(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = merged(model)
    error = sum((exact[name] - rounded[name]).square().sum() for name in old)
    change = sum((exact[name] - old[name]).square().sum() for name in old)
    print(f"merged in bfloat16, the change is off by {(error / change).sqrt():.2%}")


if __name__ == "__main__":
    main()
