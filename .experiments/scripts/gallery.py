# SPDX-License-Identifier: MIT-0
"""What GRPO looks like when it is wrong: the rehearsal, trained with one mistake at a time.

    python .experiments/scripts/gallery.py                 all of them, three seeds: half an hour
    python .experiments/scripts/gallery.py healthy "box alone" --seeds 0 1

A mistake is a function that takes the place of one in grpo.py, or a setting. The script prints the
accuracy on 256 held-out problems, and what the metrics of some steps show. With --out FILE, it adds
a line of JSON for each run, with these metrics of all its steps.
"""

import argparse
import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from gsm8k_demo import TASKS, boxed_reward, evaluate, rehearsal

TASK = TASKS["rehearsal"]
CAP = TASK.settings["max_completion_length"]
SETTINGS = {name: value for name, value in TASK.settings.items() if name in vars(grpo.GRPOConfig())}
FOUR_UPDATES = {"steps": 20, "num_iterations": 4, "learning_rate": 1e-3}
TEN_TIMES_SLOWER = {"learning_rate": 5e-5}
FIGURES = (
    "reward_mean",
    "completion_length",
    "truncated_fraction",
    "kl",
    "entropy",
    "sampler_gap",
    "clip_fraction",
    "grad_norm",
    "zero_variance_fraction",
)
right = SimpleNamespace(**vars(grpo))  # the functions as they should be, whatever is patched below


# ---- Mistakes in sampling ----------------------------------------------------------------------
def sampled_at_06(model, tokenizer, examples, G, cap, temperature):
    """Colder than the log-probs of the loss."""
    return right.sample_groups(model, tokenizer, examples, G, cap, 0.6)


def top_k_and_top_p_left_on(model, ids, mask, **more):
    """As Qwen's generation settings have it: the sampler's logits are cut, and the loss's not."""
    out = right.forward(model, ids, mask, **more)
    if more["use_cache"]:
        logits = out.logits[:, -1].float()
        logits = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits))
        out.logits = logits.unsqueeze(1)
    return out


def one_end_token_known(model, tokenizer):
    """The sampler misses the other one, and writes on and on."""
    return {min(right.end_token_ids(model, tokenizer))}


def padded_on_the_right(rows, side, device):
    """Prompts, too: then a completion does not follow its prompt at once."""
    return right.pad_rows(rows, "right", device)


def positions_that_count_padding(model, ids, mask, **more):
    """0, 1, 2 and so on, from the first column, whatever is in it."""
    positions = torch.arange(mask.shape[1]).expand_as(mask)[:, -ids.shape[1] :]
    return model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, **more)


# ---- Mistakes in log-probs and loss ------------------------------------------------------------
def targets_not_shifted(model, ids, mask, T, temperature=1.0):
    """The logits of a column, taken for the token in this column instead of the next."""
    out = right.forward(model, ids, mask, use_cache=False)
    logprobs = (out.logits[:, -T:].float() / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, ids[:, -T:].unsqueeze(-1)).squeeze(-1)


def no_end_in_the_mask(logprobs, old, ref, advantages, mask, **settings):
    """The last token of each completion is taken for padding."""
    mask = torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return right.grpo_loss(logprobs, old, ref, advantages, mask, **settings)


def no_baseline(rewards, scale_rewards="group"):
    """The rewards themselves, without the mean of the group."""
    return rewards.float()


def sign_of_the_loss(*args, **settings):
    """J is minimised instead of -J."""
    loss, metrics = right.grpo_loss(*args, **settings)
    return -loss, metrics


def sign_of_the_kl(*args, beta, **settings):
    """Going away from the reference is paid for."""
    return right.grpo_loss(*args, beta=-beta, **settings)


def k3_upside_down(logprobs, ref_logprobs):
    """pi_theta/pi_ref in the place of pi_ref/pi_theta."""
    return right.k3_kl(ref_logprobs, logprobs)


def max_for_min(ratio, advantages, epsilon=0.2, epsilon_high=None):
    """Clipped where nothing should stop, and pushed on where it should."""
    A = advantages.unsqueeze(1)
    return torch.max(ratio * A, ratio.clamp(1 - epsilon, 1 + epsilon) * A)


def pi_old_renewed(logprobs, old, *args, **settings):
    """pi_old is pi_theta in all updates, so every ratio is 1."""
    return right.grpo_loss(logprobs, logprobs.detach(), *args, **settings)


def micro_batches_alike(logprobs, old, ref, advantages, mask, **settings):
    """Each adds its mean with full weight, instead of its share of the N completions."""
    loss, metrics = right.grpo_loss(logprobs, old, ref, advantages, mask, **settings)
    N = SETTINGS["prompts_per_step"] * 8
    return loss * N / len(advantages), metrics


class AdamOnBfloat16(torch.optim.Adam):
    """It rounds the weights to bfloat16 after each step."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.copy_(weight.data.bfloat16())


# ---- Mistakes in the reward --------------------------------------------------------------------
def answers_in_another_order(completions, answer, **columns):
    """Right answers as 1, 2, ..., 1, 2, ... beside completions that come as 1, 1, ..., 2, 2, ..."""
    return boxed_reward(completions, answer[::8] * 8)


def box_alone(completions, answer, **columns):
    """Half a point for any box, and nothing more for the right number in it."""
    return [min(reward, 0.5) for reward in boxed_reward(completions, answer)]


GALLERY = {  # name -> a function of grpo.py and what takes its place, a reward, or settings
    "healthy": {},
    "healthy, four updates": FOUR_UPDATES,
    "healthy, rate / 10": TEN_TIMES_SLOWER,
    "sampled at 0.6": {"sample_groups": sampled_at_06},
    "top_k left on": {"forward": top_k_and_top_p_left_on},
    "one end token known": {"end_token_ids": one_end_token_known},
    "padded right": {"pad_rows": padded_on_the_right},
    "no positions": {"forward": positions_that_count_padding},
    "cap 16": {"max_completion_length": 16},
    "targets not shifted": {"token_logprobs": targets_not_shifted},
    "no end in the mask": {"grpo_loss": no_end_in_the_mask},
    "no baseline": {"group_advantages": no_baseline},
    "sign of loss": {"grpo_loss": sign_of_the_loss},
    "sign of KL": {"grpo_loss": sign_of_the_kl},
    "k3 upside down": {"k3_kl": k3_upside_down},
    "max for min": {"clipped_surrogate": max_for_min, **FOUR_UPDATES},
    "pi_old renewed": {"grpo_loss": pi_old_renewed, **FOUR_UPDATES},
    "micro-batches alike": {"grpo_loss": micro_batches_alike, "micro_batch_size": 16},
    "weights in bfloat16": {"optimizer": AdamOnBfloat16, **TEN_TIMES_SLOWER},
    "rate x 10": {"learning_rate": 5e-3},
    "other order": {"reward": answers_in_another_order},
    "box alone": {"reward": box_alone},
}


def train(name, model, tokenizer, train_data, seed):
    """Train `model` in place with a mistake. Returns the steps' metrics."""
    entry = GALLERY[name]
    reward = entry.get("reward", boxed_reward)
    optimizer = entry["optimizer"](model.parameters()) if "optimizer" in entry else None
    config = {**SETTINGS, "seed": seed}
    wrong = {}
    for key, value in entry.items():
        if key in vars(grpo.GRPOConfig()):
            config[key] = value
        elif key not in ("reward", "optimizer"):
            wrong[key] = value
    with mock.patch.multiple(grpo, **wrong) if wrong else mock.MagicMock():
        config = grpo.GRPOConfig(**config)
        return grpo.train(model, tokenizer, train_data, reward, config, optimizer=optimizer)


def read_flags():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="the names: " + "; ".join(GALLERY),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them if none is given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", help="a file for the metrics of all steps")
    args = parser.parse_args()
    args.names = args.names or list(GALLERY)
    unknown = [name for name in args.names if name not in GALLERY]
    if unknown:
        parser.error(f"no such name: {unknown}. The names: {'; '.join(GALLERY)}")
    return args


def main():
    args = read_flags()
    torch.set_num_threads(1)
    for seed in args.seeds:
        base, tokenizer, train_data, test_data = rehearsal(seed)
        test_data = test_data[:256]

        def accuracy(model, temperature, tokenizer=tokenizer, test_data=test_data):
            return evaluate(model, tokenizer, test_data, CAP, temperature)["accuracy"]

        print(
            f"\nuntrained, seed {seed}: {accuracy(base, 1):.1%} right when sampled, "
            f"{accuracy(base, 0):.1%} greedily",
            flush=True,
        )
        for name in args.names:
            model = copy.deepcopy(base)
            history = train(name, model, tokenizer, train_data, seed)
            sampled = accuracy(model, 1)
            greedy = accuracy(model, 0)
            print(f"\n{name}, seed {seed}: {sampled:.1%} right when sampled, {greedy:.1%} greedily")
            print("  step" + "".join(f"{figure:>10.9}" for figure in FIGURES))
            for row in history[:5] + history[9::10]:
                print(f"{row['step']:6}" + "".join(f"{row[figure]:10.3g}" for figure in FIGURES))
            sys.stdout.flush()
            if args.out:
                rows = [
                    {"step": row["step"]} | {name: float(f"{row[name]:.4g}") for name in FIGURES}
                    for row in history
                ]
                run = {"name": name, "seed": seed, "sampled": sampled, "greedy": greedy}
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**run, "history": rows}) + "\n")


if __name__ == "__main__":
    main()
