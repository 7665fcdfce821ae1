# SPDX-License-Identifier: MIT-0
"""What fits on a card? The README's table, calculated and not measured.

    python .experiments/scripts/fits.py        some minutes, on any computer

The update of two micro-batches runs on fake tensors, which have shapes but no contents, and all
bytes that live at the same time are counted. (Two, because the second one finds the gradients of
the first.) The rest is arithmetic: Adam's two averages, pi_ref, and for sampling the keys and
values of all tokens, and four float32 tensors of rows x vocabulary.
"""

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

VOCABULARY = 151_936
SIZES = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}


class Bytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.alive = set()
        self.now = 0
        self.peak = 0

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
    """As the demo's --lora 16 on a GPU: frozen weights in bfloat16, and adapters in float32."""
    model.requires_grad_(False)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(module, name, Lora(child))
    return model


def update_bytes(model, beta, n, prompt, completion):
    """The peak of two micro-batches of n completions, without the weights themselves."""
    ids = torch.zeros(n, prompt + completion).long()
    mask = torch.ones(n, completion).bool()
    with Bytes() as count:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                logprobs = token_logprobs(model, ids, torch.ones_like(ids), completion)
            ratio = logprobs - logprobs.detach()
            loss = -(ratio.exp() - beta * ratio.expm1()).masked_fill(~mask, 0).mean()
            loss.backward()
    return count.peak


def fits(
    size, beta, micro_batch_size, lora=False, sampling_batch_size=256, prompt=150, completion=512
):
    """Gigabytes at the peak of an update, and of sampling, for lengths in tokens."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = Qwen2Config(
            vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **SIZES[size]
        )
        model = Qwen2ForCausalLM(config)
        if lora:
            model = with_lora(model)
        weights = sum(w.numel() * w.element_size() for w in model.parameters())
        learning = sum(w.numel() for w in model.parameters() if w.requires_grad)
        update = update_bytes(model, beta, micro_batch_size, prompt, completion)
    kept = weights + 8 * learning  # Adam's averages
    if beta > 0:
        kept += weights  # pi_ref
    # Keys are float32, or bfloat16 where the frozen weights are; values are bfloat16.
    key_and_value = 2 + 2 if lora else 4 + 2
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    cache = (prompt + completion) * config.num_hidden_layers * width * key_and_value
    sampling = sampling_batch_size * (cache + 4 * 4 * VOCABULARY) + 2 * learning
    return (kept + update) / 1e9, (kept + sampling) / 1e9


SUMS = {"size": "0.5B", "beta": 0, "micro_batch_size": 2, "lora": True}
SUMS |= {"sampling_batch_size": 100, "prompt": 50, "completion": 32}  # 100 questions of a test
ROWS = (
    SUMS,
    {"size": "0.5B", "beta": 0.04, "micro_batch_size": 4},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 4},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 2},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 1},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 4, "lora": True},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 2, "lora": True},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 1, "lora": True},
    {"size": "0.5B", "beta": 0, "micro_batch_size": 1, "lora": True, "sampling_batch_size": 128},
    {"size": "1.5B", "beta": 0, "micro_batch_size": 1},
    {"size": "1.5B", "beta": 0, "micro_batch_size": 4, "lora": True},
    {"size": "1.5B", "beta": 0, "micro_batch_size": 1, "lora": True},
)


if __name__ == "__main__":
    for row in ROWS:
        update, sampling = fits(**row)
        print(
            f"{max(update, sampling):5.1f} GB (update {update:.1f}, sampling {sampling:.1f})", row
        )
