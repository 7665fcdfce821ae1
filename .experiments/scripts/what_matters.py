# SPDX-License-Identifier: MIT-0
"""Which settings matter? The rehearsal, trained with one setting changed at a time.

    python .experiments/scripts/what_matters.py            all runs, on two cores
    python .experiments/scripts/what_matters.py --table    a table of the runs that are done

The default has 40 steps of 16 prompts with 8 answers each, one update a step, and no KL penalty. A
run starts from the pre-trained model of its seed, and adds a line to the file. If you stop the
script, start it again: it goes on with the runs that are not in the file yet.

The reward of a step is what its answers earn before the update, by boxed_reward, whatever the run
was paid for. It is always that of answers at temperature 1, which are drawn for this alone if the
run trains at another temperature.

With one update, GSPO is GRPO, and REINFORCE is Dr. GRPO, since every ratio is 1. RLOO is then Dr.
GRPO, too, but for a constant factor.
"""

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from statistics import mean
from unittest import mock

import torch
from gallery import CAP, SETTINGS, grpo, no_baseline

from gsm8k_demo import boxed_reward, evaluate, read_jsonl, rehearsal, right_reward

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".experiments" / "what_matters" / "runs.jsonl"
MODELS = ROOT / "runs" / "what_matters"  # delete them if the rehearsal has changed
GOOD = 1.3  # a mean reward that the default reaches in a fifth of its steps

# The three below the settings of `train` belong to this script alone.
BASE = {
    **vars(grpo.GRPOConfig(**SETTINGS | {"beta": 0.0})),
    "reward": "boxed",
    "baseline": "mean",
    "other_draws": 0,
}
RATES = {"/ 10": 5e-5, "/ 3": 1.67e-4, "x 1": 5e-4, "x 3": 1.5e-3, "x 10": 5e-3}
TWO = {"num_iterations": 2}
NO_STD = {"scale_rewards": "none"}
RIGHT = {"reward": "right"}
DR_GRPO = NO_STD | {"loss_type": "dr_grpo"}
DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}

KNOBS = {  # knob -> value -> settings that differ from BASE; the most wanted knobs come first
    "relatives": {"GRPO": {}, "Dr. GRPO": DR_GRPO, "DAPO": DAPO},
    "rate": {name: {"learning_rate": rate} for name, rate in RATES.items()},
    "updates": {str(n): {"num_iterations": n} for n in (1, 2, 4, 8)},
    "updates, no clip": {
        "1": {},  # nothing is clipped in a first update
        **{str(n): {"num_iterations": n, "epsilon": 1e9} for n in (2, 4, 8)},
    },
    "group size": {  # always 128 answers
        str(G): {"num_generations": G, "prompts_per_step": 128 // G} for G in (2, 4, 8, 16, 32)
    },
    "prompts": {str(B): {"prompts_per_step": B} for B in (2, 4, 8, 16, 32)},  # of 8 answers
    "relatives, two updates": {
        "GRPO": TWO,
        "Dr. GRPO": TWO | DR_GRPO,
        "DAPO": TWO | DAPO,
        "GSPO": TWO | GSPO,
    },
    "std": {"with": {}, "without": NO_STD},
    "std, reward 0 or 1": {"with": RIGHT, "without": RIGHT | NO_STD},
    "baseline": {"mean": {}, "none": {"baseline": "none"}},
    "beta": {str(beta): {"beta": beta} for beta in (0, 0.02, 0.1, 0.5)},
    "temperature": {str(T): {"temperature": T} for T in (0.5, 0.7, 1, 1.3)},
    "warm-up": {str(steps): {"warmup_steps": steps} for steps in (0, 5, 20)},
    "chance": {"default": {}, "other draws": {"other_draws": 1}},  # how far luck alone goes
}
# Some of their values change the size of a step. So all values are run at three rates, and the best
# of three is compared with the best of three.
FAIR = ("relatives", "relatives, two updates", "std", "std, reward 0 or 1", "baseline")


# ---- The runs ----------------------------------------------------------------------------------
def at_rates(knob, settings):
    """{rate: settings that differ from BASE}, for one rate or for three."""
    rates = {"": {}}
    if knob in FAIR:
        rates = {name: {"learning_rate": RATES[name]} for name in ("x 1", "/ 3", "x 3")}
    found = {}
    for name, rate in rates.items():
        both = settings | rate
        found[name] = {key: value for key, value in both.items() if value != BASE[key]}
    return found


def is_default(knob, value):
    return all(setting == BASE[key] for key, setting in KNOBS[knob][value].items())


def label_of(value, rate):
    return f"{value}, rate {rate}" if rate else value


def key_of(settings, seed):
    return json.dumps(settings, sort_keys=True), seed


def runs_to_do(seeds, done):
    """(knob, value, settings, seed) of all runs that are not done, none of them twice."""
    found = {}
    for knob, values in KNOBS.items():
        for value, settings in values.items():
            for rate, differing in at_rates(knob, settings).items():
                for seed in seeds:
                    job = (knob, label_of(value, rate), differing, seed)
                    found.setdefault(key_of(differing, seed), job)
    return [job for key, job in found.items() if key not in done]


def prepare(seed):
    """Pre-train the model of the seed, if it is not there yet."""
    path = MODELS / f"seed-{seed}.pt"
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        torch.save(rehearsal(seed), new)
        new.replace(path)


def run(job):
    """Train and test. Returns the line for the file."""
    knob, value, settings, seed = job
    started = time.perf_counter()
    torch.set_num_threads(1)
    saved = torch.load(MODELS / f"seed-{seed}.pt", weights_only=False)
    model, tokenizer, train_data, test_data = saved

    config = BASE | settings
    config["seed"] = seed + 100 * config.pop("other_draws")
    reward = {"boxed": boxed_reward, "right": right_reward}[config.pop("reward")]
    baseline = {"mean": grpo.group_advantages, "none": no_baseline}[config.pop("baseline")]
    config = grpo.GRPOConfig(**config)
    sample_groups = grpo.sample_groups
    rewards = []  # of each step

    def sample_and_measure(model, tokenizer, batch, G, cap, temperature):
        """`train` calls it once a step, since no step here has more than 256 answers."""
        groups = sample_groups(model, tokenizer, batch, G, cap, temperature)
        looked_at = groups
        if temperature != 1:  # `train` sets a new seed in each step, so these draws change nothing
            looked_at = sample_groups(model, tokenizer, batch, G, cap, 1.0)
        answers = [c for group in looked_at for c in group]
        earned = [grpo.rule_reward(c.text, c.example["answer"]) for c in answers]
        rewards.append(mean(earned))
        return groups

    with mock.patch.multiple(grpo, group_advantages=baseline, sample_groups=sample_and_measure):
        history = grpo.train(model, tokenizer, train_data, reward, config)

    test_data = test_data[:256]
    return {
        "knob": knob,
        "value": value,
        "seed": seed,
        "settings": settings,
        "rewards": [round(reward, 4) for reward in rewards],
        "mean_reward": round(mean(rewards), 4),
        "first_good_step": next((i for i, r in enumerate(rewards, 1) if r >= GOOD), None),
        "sampled": evaluate(model, tokenizer, test_data, CAP, temperature=1)["accuracy"],
        "greedy": evaluate(model, tokenizer, test_data, CAP, temperature=0)["accuracy"],
        "last_entropy": float(f"{history[-1]['entropy']:.4g}"),
        "max_grad_norm": float(f"{max(row['grad_norm'] for row in history):.4g}"),
        "answers": config.steps * config.prompts_per_step * config.num_generations,
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_all(seeds, out, processes):
    done = {key_of(row["settings"], row["seed"]) for row in read_rows(out)}
    jobs = runs_to_do(seeds, done)
    out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the new processes
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(prepare, seeds, chunksize=1)
        print(f"{len(jobs)} runs to do, {len(done)} done", flush=True)
        for i, row in enumerate(pool.imap_unordered(run, jobs), 1):
            with open(out, "a", encoding="utf-8") as file:  # only this process writes
                file.write(json.dumps(row) + "\n")
            print(
                f"{i:3} of {len(jobs)}  {row['knob']}: {row['value']}, seed {row['seed']}: mean "
                f"reward {row['mean_reward']:.3f}, {row['sampled']:.0%} right, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )


# ---- The table ---------------------------------------------------------------------------------
def read_rows(path):
    return read_jsonl(path) if path.exists() else []


def results(rows):
    """{knob: {value: {rate: its rows, in the order of the seeds}}}, of the runs that are done."""
    done = {key_of(row["settings"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = {}
    for knob, values in KNOBS.items():
        found[knob] = {}
        for value, settings in values.items():
            rates = {}
            for rate, differing in at_rates(knob, settings).items():
                keys = [key_of(differing, seed) for seed in seeds]
                rates[rate] = [done[key] for key in keys if key in done]
            rates = {rate: rows for rate, rows in rates.items() if rows}
            if rates:
                found[knob][value] = rates
    return {knob: values for knob, values in found.items() if values}


def best_of(rates):
    """The name of the rate with the highest mean reward."""
    return max(rates, key=lambda rate: mean(row["mean_reward"] for row in rates[rate]))


def with_range(numbers, form):
    return f"{mean(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


def cells(rows, default):
    """Means over the seeds, and ranges."""
    rewards = [row["mean_reward"] for row in rows]
    more = [row["mean_reward"] - default[row["seed"]] for row in rows]
    steps = [row["first_good_step"] for row in rows if row["first_good_step"]]
    first = with_range(steps, ".3g") if steps else "never"
    if 0 < len(steps) < len(rows):
        first += f", {len(rows) - len(steps)} never"
    return [
        str(len(rows)),
        f"{rows[0]['answers']:,}",
        with_range(rewards, ".3f"),
        with_range(more, "+.3f"),
        first,
        with_range([100 * row["sampled"] for row in rows], ".0f"),
        with_range([100 * row["greedy"] for row in rows], ".0f"),
    ]


def print_table(rows):
    default = {row["seed"]: row["mean_reward"] for row in rows if not row["settings"]}
    heads = ["knob", "value", "seeds", "answers in all", "mean reward", "more than the default"]
    heads += [f"first step at {GOOD}", "% right, sampled", "% right, greedy"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for knob, values in results(rows).items():
        for value, rates in values.items():
            for rate, runs in rates.items():
                name = label_of(value, rate)
                if len(rates) > 1 and rate == best_of(rates):
                    name += " (its best rate)"
                print("| " + " | ".join([knob, name, *cells(runs, default)]) + " |")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a line of JSON for each run")
    args = parser.parse_args()
    if not args.table:
        run_all(args.seeds, args.out, args.processes)
    print_table(read_rows(args.out))


if __name__ == "__main__":
    main()
