# SPDX-License-Identifier: MIT-0
"""What fits on a card? The README's table, calculated and not measured:

    python .experiments/scripts/fits.py        a minute or two, on any computer

The update of one micro-batch runs on fake tensors, which have shapes but no contents, and all bytes
that live at the same time are counted. The rest is arithmetic: AdamW's two averages, pi_ref, and
for sampling the keys and values of all tokens, and four float32 tensors of rows x vocabulary."""

import sys
import weakref
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo import token_logprobs

PROMPT, COMPLETION, VOCABULARY = 150, 512, 151_936
SIZES = {
    "0.5B": dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
    ),
    "1.5B": dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
    ),
}


class Bytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = set(), 0, 0

    def note(self, x):
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.alive:
            storage = x.untyped_storage()
            self.alive.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def free(self, key, size):
        self.alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tree_map(self.note, out)
        return out


class Lora(torch.nn.Module):
    """A frozen linear layer, and a trained one of rank 16 beside it."""

    def __init__(self, base, rank=16):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x))


def with_lora(model):
    model.requires_grad_(False)
    for module in [*model.model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Lora(child))
    return model


def fits(size, beta, micro_batch_size, sampling_batch_size=256, lora=False):
    """Gigabytes at the peak of an update, and of sampling."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                **SIZES[size],
            )
        )
        model = with_lora(model) if lora else model
        weights = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        n = micro_batch_size
        ids, mask = torch.zeros(n, PROMPT + COMPLETION).long(), torch.ones(n, COMPLETION).bool()
        with Bytes() as count:
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = token_logprobs(model, ids, torch.ones_like(ids), COMPLETION)
            ratio = logprobs - logprobs.detach()
            (-(ratio.exp() - beta * ratio.expm1()).masked_fill(~mask, 0).mean()).backward()
    kept = 4 * weights + 8 * trained + (4 * weights if beta > 0 else 0)
    layers, heads = SIZES[size]["num_hidden_layers"], SIZES[size]["num_attention_heads"]
    token = (
        layers * 2 * SIZES[size]["hidden_size"] // heads * (4 + 2)
    )  # keys float32, values bfloat16
    sampling = sampling_batch_size * ((PROMPT + COMPLETION) * token + 4 * 4 * VOCABULARY) + 2 * (
        trained if not lora else weights // 10
    )  # bfloat16 copies
    return [(kept + x) / 1e9 for x in (count.peak, sampling)]


if __name__ == "__main__":
    for row in (
        dict(size="0.5B", beta=0.04, micro_batch_size=4),
        dict(size="0.5B", beta=0, micro_batch_size=1),
        dict(size="1.5B", beta=0, micro_batch_size=1),
        dict(size="1.5B", beta=0, micro_batch_size=1, lora=True),
        dict(size="1.5B", beta=0, micro_batch_size=1, lora=True, sampling_batch_size=64),
    ):
        update, sampling = fits(**row)
        print(
            f"{max(update, sampling):5.1f} GB (update {update:.1f}, sampling {sampling:.1f})", row
        )
