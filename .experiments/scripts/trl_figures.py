# SPDX-License-Identifier: MIT-0
"""The loss and its gradient by TRL's own code: the figures in test_grpo.py.

    python .experiments/scripts/trl_figures.py        with TRL 1.16 installed

It calls GRPOTrainer._compute_loss. The trainer is an object with only the fields that this method
reads.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer

MAX_LENGTH = 7  # for dr_grpo
SETTINGS = {
    "GRPO": {},
    "no KL": {"beta": 0.0},
    "two limits": {"epsilon": 0.1, "epsilon_high": 0.28},
    "DAPO": {"loss_type": "dapo", "beta": 0.0, "epsilon_high": 0.28},
    "Dr. GRPO": {"loss_type": "dr_grpo", "beta": 0.0},
    "GSPO": {"importance_sampling_level": "sequence", "epsilon": 0.1, "beta": 0.3},
    "GSPO over tokens": {"importance_sampling_level": "sequence", "loss_type": "dapo"},
}


def some_completions():
    """Six completions, of which one is empty. test_grpo.py has the same numbers.

    They are sines of squares. TRL multiplies by its mask, so what stands behind it must be a
    number, and here it is 0.
    """
    noise = (torch.arange(120, dtype=torch.float64) ** 2).sin().view(4, 6, 5)
    mask = torch.arange(5) < torch.tensor([[5], [1], [0], [3], [4], [2]])  # (6, 5)
    logprobs, old, ref = (0.4 * noise[:3] - 2).masked_fill(~mask, 0.0)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": ref,
        "advantages": noise[3, :, 0],
        "mask": mask,
    }


def trl_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, **settings):
    """TRL's loss of a batch with these log-probs, and these settings of its GRPOConfig."""
    defaults = {"beta": 0.04, "loss_type": "grpo", "use_bias_correction_kl": False}
    config = GRPOConfig(
        "unused",
        report_to="none",
        bf16=False,
        use_cpu=True,
        max_completion_length=MAX_LENGTH,
        **{**defaults, **settings},
    )
    fields = vars(config) | {
        "args": SimpleNamespace(**vars(config) | {"delta": None}),
        "epsilon_low": config.epsilon,
        "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
        "model": SimpleNamespace(training=False),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=torch.clone, reduce=lambda tensor, reduction: tensor
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros(6, 5), None),
        "_metrics": {"eval": defaultdict(list)},
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
    }
    ids = mask.long()
    batch = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": ids,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": ids.sum(),
    }
    return GRPOTrainer._compute_loss(SimpleNamespace(**fields), None, batch)


def main():
    for name, settings in SETTINGS.items():
        given = some_completions()
        given["logprobs"].requires_grad_()
        loss = trl_loss(**given, **settings)
        [slopes] = torch.autograd.grad(loss, given["logprobs"])
        print(f"{name} {settings}: {loss:.13g}, {slopes.sum():.13g}, {slopes.norm():.13g}")


if __name__ == "__main__":
    main()
