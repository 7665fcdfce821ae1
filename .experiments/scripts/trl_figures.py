# SPDX-License-Identifier: MIT-0
"""The loss and its gradient by TRL's own code: the figures of PARITY in test_grpo.py.

    python .experiments/scripts/trl_figures.py        with TRL 1.16 installed

It calls GRPOTrainer._compute_loss on the inputs of test_grpo.loss_inputs. The trainer is an object
with only the fields that this method reads.
"""

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from test_grpo import loss_inputs, MAX_LENGTH, PARITY


def trl_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, **settings):
    """TRL's loss of a batch with these log-probs, and these settings of its GRPOConfig."""
    defaults = dict(beta=0.04, loss_type="grpo", use_bias_correction_kl=False)
    config = GRPOConfig(
        "unused",
        report_to="none",
        bf16=False,
        use_cpu=True,
        max_completion_length=MAX_LENGTH,
        **defaults | settings,
    )
    trainer = SimpleNamespace(
        **vars(config)
        | dict(
            args=SimpleNamespace(**vars(config) | dict(delta=None)),
            epsilon_low=config.epsilon,
            model=SimpleNamespace(training=False),
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            accelerator=SimpleNamespace(
                num_processes=1, gather=torch.clone, reduce=lambda tensor, reduction: tensor
            ),
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(6, 5), None),
            _metrics={"eval": defaultdict(list)},
            off_policy_mask_threshold=None,
            top_entropy_quantile=1.0,
            aux_loss_enabled=False,
            use_vllm=False,
            _entropy_bonus_enabled=False,
        )
    )
    ids = mask.long()
    return GRPOTrainer._compute_loss(
        trainer,
        None,
        dict(
            prompt_ids=ids,
            prompt_mask=ids,
            completion_ids=ids,
            completion_mask=ids,
            advantages=advantages,
            old_per_token_logps=old_logprobs,
            ref_per_token_logps=ref_logprobs,
            num_items_in_batch=ids.sum(),
        ),
    )


for name, (settings, figures) in PARITY.items():
    inputs = loss_inputs()
    inputs["logprobs"].requires_grad_()
    loss = trl_loss(**inputs, **settings)
    [slope] = torch.autograd.grad(loss, inputs["logprobs"])
    print(f"{name}: {loss:.13g} {slope.sum():.13g} {slope.norm():.13g}, in the test {figures}")
