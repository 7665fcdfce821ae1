# SPDX-License-Identifier: MIT-0
"""Draw the README's pictures from the logs beside this folder.

python .experiments/scripts/pictures.py        with matplotlib installed

accuracy.svg      right answers to the held-out sums, by step: in full, and with LoRA
group.svg         one group of eight answers of a real run, with rewards and advantages
mistakes.svg      the mean reward by step, of runs with one mistake each beside a healthy one
collapse.svg      a run with a rate that is too high, beside one that is healthy
pieces.svg        accuracy, KL and clip of seed 0 with and without them
ladder.svg        the mean reward of the ladder by step, with easy numbers (rings) and without
what_matters.svg  the mean reward of the rehearsal, by setting
"""

import json
import sys
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from what_matters import RESULTS, best_of, is_default, mean, read_rows, results

from gsm8k_demo import read_jsonl

LOGS = Path(__file__).resolve().parents[1]
IMAGES = LOGS.parent / ".images"
# These can be read on a light and on a dark background.
GREY = "#848d97"
GREEN = "#2ea36a"
RED = "#e0533d"
BLUE = "#3b82f6"
ORANGE = "#e07b39"
VIOLET = "#b36ae2"
plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "grpo",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "axes.titlecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def save(figure, name):
    figure.savefig(IMAGES / name, transparent=True, bbox_inches="tight", metadata={"Date": None})


def accuracy_by_step(rows, untrained):
    """(steps, percent) of the quick tests, from the untrained model on."""
    tested = [row for row in rows if "accuracy" in row]
    steps = [0] + [row["step"] for row in tested]
    percent = [100 * untrained] + [100 * row["accuracy"] for row in tested]
    return steps, percent


def accuracy(untrained=0.07, told=0.76):
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.axhline(100 * told, color=GREY, linestyle=":", linewidth=1)
    axes.text(
        20.3,
        100 * told,
        "untrained, if asked\nfor the product,\nthen the sum",
        va="center",
        fontsize=9,
    )
    label = "LoRA, 8 steps (5 seeds)"
    for row in read_jsonl(LOGS / "quick" / "seeds.jsonl"):
        percent = [row["before"], row["step-4"], row["after"]]
        style = {"color": GREEN, "linewidth": 2, "marker": "o", "markersize": 4, "label": label}
        axes.plot([0, 4, 8], percent, **style, zorder=3, clip_on=False)
        label = None  # one entry in the legend for all seeds
    for folder, colour, label in (
        ("lora", ORANGE, "LoRA, 20 steps (3 seeds)"),
        ("sums", BLUE, "all weights, 20 steps (3 seeds)"),
    ):
        for path in sorted((LOGS / folder).glob("seed-*.jsonl")):
            steps, percent = accuracy_by_step(read_jsonl(path), untrained)
            axes.plot(steps, percent, color=colour, linewidth=1, alpha=0.7, label=label)
            label = None
    axes.text(0.3, 105, "what is 35 times 8 plus 27?", fontsize=11)
    axes.text(0.3, 37, "270", family="monospace", fontsize=13, color=RED)
    axes.plot([0.05, 0.5], [9, 34], color=RED, linewidth=0.8)
    axes.text(20, 105, "280 + 27 = 307", family="monospace", fontsize=13, color=GREEN, ha="right")
    axes.set(xlim=(0, 20), ylim=(0, 112), xlabel="step", xticks=range(0, 21, 4))
    axes.set(ylabel="right, of 100 new problems", yticks=range(0, 101, 20))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.08))
    save(figure, "accuracy.svg")


def group():
    shown = json.loads((LOGS / "sums" / "group.json").read_text())
    figure, axes = plt.subplots(figsize=(7, 2.9))
    answers = shown["answers"]
    axes.set(xlim=(-7.2, 3.4), ylim=(len(answers) - 0.3, -2.1))
    axes.axis("off")
    question = shown["question"].removeprefix("Answer in one short line: ")
    axes.text(-7.2, -1.5, question, fontsize=11)
    axes.text(-2.7, -0.75, "reward", ha="center", fontsize=9)
    axes.text(0, -1.4, "advantage", ha="center", fontsize=9)
    axes.text(-0.12, -0.75, "less likely ←", ha="right", fontsize=9)
    axes.text(0.12, -0.75, "→ more likely", ha="left", fontsize=9)
    axes.axvline(0, ymin=0, ymax=0.8, color=GREY, linewidth=0.8)
    for i, (text, reward, advantage) in enumerate(answers):
        colour = GREEN if advantage > 0 else RED
        axes.text(-7.2, i, text, family="monospace", fontsize=10, va="center")
        axes.text(-2.7, i, f"{reward:.0f}", ha="center", va="center", color=colour)
        axes.barh(i, advantage, color=colour, height=0.55)
        side = "left" if advantage > 0 else "right"
        x = advantage + (0.08 if advantage > 0 else -0.08)
        axes.text(x, i, f"{advantage:+.2f}", ha=side, va="center", color=colour, fontsize=10)
    save(figure, "group.svg")


MISTAKES = {  # name in gallery.jsonl -> the words above its panel, and the healthy run beside it
    "targets not shifted": ("log-probs of the\nwrong column", "healthy"),
    "sign of loss": ("loss with the\nwrong sign", "healthy"),
    "rate x 10": ("learning rate ten\ntimes too high", "healthy"),
    "cap 16": ("answers cut off\ntoo early", "healthy"),
    "box alone": ("the same reward\nfor any box", "healthy"),
    "weights in bfloat16": ("weights in bfloat16\n(at a tenth of the rate)", "healthy, rate / 10"),
    "pi_old renewed": ("pi_old recomputed\n(4 updates, 20 steps)", "healthy, four updates"),
    "one end token known": ("only one of two\nend tokens known", "healthy"),
}


def mistakes():
    runs = {row["name"]: row["history"] for row in read_jsonl(LOGS / "gallery" / "seed-0.jsonl")}
    figure, panels = plt.subplots(2, 4, figsize=(7, 3.8), sharex=True, sharey=True)
    for axes, (name, (words, beside)) in zip(panels.flat, MISTAKES.items()):
        for run, colour, label in ((beside, GREY, "healthy"), (name, RED, "with the mistake")):
            rewards = [row["reward_mean"] for row in runs[run]]
            steps = range(1, len(rewards) + 1)
            axes.plot(steps, rewards, color=colour, linewidth=1.5, label=label)
        axes.set_title(words, fontsize=9)
        axes.set(xlim=(1, 40), ylim=(0, 1.55), xticks=(1, 20, 40), yticks=(0, 0.5, 1, 1.5))
        axes.tick_params(labelsize=8)
    for axes in panels[1]:
        axes.set_xlabel("step", fontsize=9)
    for axes in panels[:, 0]:
        axes.set_ylabel("mean reward", fontsize=9)
    figure.tight_layout()
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        frameon=False,
        ncol=2,
        fontsize=9,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.03),
    )
    save(figure, "mistakes.svg")


def collapse():
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.3))
    runs = (
        ("pieces/simple.jsonl", GREY, "healthy: 93 of 100 right in the end"),
        ("collapse/rate-1e-5.jsonl", RED, "learning rate x 5, short warm-up: 44 of 100"),
    )
    keys = {"reward_mean": "mean reward", "entropy": "entropy"}
    keys["zero_variance_fraction"] = "groups of equal rewards"
    for path, colour, label in runs:
        rows = read_jsonl(LOGS / path)
        for axes, key in zip(panels, keys):
            axes.plot(
                [row["step"] for row in rows], [row[key] for row in rows], color=colour, label=label
            )
    for axes, title in zip(panels, keys.values()):
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(1, 20), ylim=(0, None), xlabel="step", xticks=(1, 5, 10, 15, 20))
        axes.tick_params(labelsize=9)
    figure.tight_layout()
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        frameon=False,
        ncol=2,
        fontsize=9,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.04),
    )
    save(figure, "collapse.svg")


def pieces(untrained=0.07):
    runs = (
        ("pieces/one-update.jsonl", VIOLET, "one update, β = 0"),
        ("pieces/two-updates.jsonl", ORANGE, "two updates, β = 1e-9"),
        ("sums/seed-0.jsonl", BLUE, "two updates, β = 0.04"),
    )
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.4))
    for path, colour, words in runs:
        rows = read_jsonl(LOGS / path)
        steps = [row["step"] for row in rows]
        style = {"color": colour, "linewidth": 1.5, "label": words}
        panels[0].plot(*accuracy_by_step(rows, untrained), **style)
        if colour != VIOLET:  # at β = 0, the KL is not measured
            panels[1].plot(steps, [row["kl"] for row in rows], **style)
        panels[2].plot(steps, [row["clip_fraction"] for row in rows], **style)
    for axes, title in zip(panels, ("right of 100", "kl", "clip_fraction")):
        axes.set_title(title, fontsize=10)
        axes.set(xlim=(0, 20), ylim=(0, None), xlabel="step", xticks=range(0, 21, 5))
        axes.tick_params(labelsize=9)
    panels[0].set_ylim(0, 100)
    figure.tight_layout()
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        frameon=False,
        ncol=3,
        fontsize=9,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        columnspacing=1.2,
        handlelength=1.2,
    )
    save(figure, "pieces.svg")


def ladder():
    figure, axes = plt.subplots(figsize=(7, 3.2))
    rows = read_jsonl(LOGS / "ladder" / "climb-seed-0.jsonl")
    colours = dict(zip("12345", (GREY, ORANGE, VIOLET, BLUE, GREEN)))
    for level, colour in colours.items():
        for name, marker in ((f"{level} easy", "none"), (level, colour)):
            steps = [row["step"] for row in rows if name in row["rewards"]]
            rewards = [row["rewards"][name] for row in rows if name in row["rewards"]]
            axes.scatter(steps, rewards, s=14, facecolors=marker, edgecolors=colour)
    begin = 0.5
    for words, part in groupby(rows, key=terms):
        end = begin + len(list(part))
        axes.axvline(end, color=GREY, linewidth=0.5)
        axes.text((begin + end) / 2, 1.06, words, ha="center", fontsize=9)
        begin = end
    axes.set(xlim=(0.5, len(rows) + 0.5), ylim=(-0.03, 1.03), xlabel="step")
    axes.set_ylabel("mean reward")
    save(figure, "ladder.svg")


def terms(row):
    """How many terms the sums of the step have."""
    level = next(iter(row["rewards"]))[0]
    return f"{max(2, int(level))} terms"


def what_matters(lowest=-0.2):
    """A row for each value, with a dot for each seed: its mean reward minus the default's."""
    knobs = results(read_rows(RESULTS))
    default = [run["mean_reward"] for run in knobs["rate"]["x 1"][""]]

    def differences(knob, value):
        """Of all seeds, at the best rate."""
        runs = knobs[knob][value]
        rewards = [run["mean_reward"] for run in runs[best_of(runs)]]
        return [reward - usual for reward, usual in zip(rewards, default, strict=True)]

    luck = differences("chance", "other draws")
    names = {
        "relatives": "relatives, one update",
        "group size": "group size, 128 answers",
        "prompts": "prompts of 8 answers",
        "beta": "β",
    }
    panels = (
        ("rate", "updates", "updates, no clip", "relatives", "relatives, two updates"),
        ("group size", "prompts", "beta", "temperature", "warm-up", "baseline"),
    )
    figure, columns = plt.subplots(1, 2, figsize=(8, 5))
    figure.subplots_adjust(wspace=0.5)
    for axes, shown in zip(columns, panels):
        row = 0
        axes.axvspan(min(luck), max(luck), color=GREY, alpha=0.25, linewidth=0)
        for knob in shown:
            axes.text(lowest - 0.085, row, names.get(knob, knob), fontsize=9, va="center")
            for value in knobs[knob]:
                row += 1
                seeds = differences(knob, value)
                colour = GREY
                if is_default(knob, value):
                    colour = BLUE
                elif min(seeds) > 0:
                    colour = GREEN
                elif max(seeds) < 0:
                    colour = RED
                style = {"color": colour, "fontsize": 9, "va": "center"}
                axes.text(lowest - 0.015, row, value, ha="right", **style)
                axes.text(0.07, row, f"{mean(default) + mean(seeds):.2f}", **style)
                if min(seeds) < lowest:
                    furthest = f"← \N{MINUS SIGN}{-min(seeds):.2f}"
                    axes.text(lowest - 0.005, row, furthest, **style)
                for i, difference in enumerate(seeds):
                    if difference >= lowest:
                        place = [difference], [row + 0.12 * (i - 2)]
                        axes.plot(*place, "o", color=colour, markersize=2.5, clip_on=False)
            row += 1.4
        axes.set(xlim=(lowest, 0.06), ylim=(31, -0.7), xlabel="mean reward minus the default's")
        axes.set_xticks([-0.2, -0.1, 0])
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    save(figure, "what_matters.svg")


if __name__ == "__main__":
    for draw in (accuracy, group, mistakes, collapse, pieces, ladder, what_matters):
        draw()
