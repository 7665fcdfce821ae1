# SPDX-License-Identifier: MIT-0
"""Draw the README's pictures from the logs of runs of `gsm8k_demo.py --task sums`:

python .experiments/scripts/pictures.py        with matplotlib installed

accuracy.svg   right answers to the held-out problems, by step, of .experiments/scripts/sums-seed-*.jsonl
group.svg      one group of eight answers, from .experiments/scripts/group.json
pieces.svg     accuracy, KL and clip of seed 0 with and without them, of .experiments/scripts/pieces-*.jsonl
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
GREY, GREEN, RED = "#848d97", "#2ea36a", "#e0533d"  # readable on a light and on a dark background
COLOURS = ("#3b82f6", "#e07b39", "#b36ae2")
plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "grpo",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def wilson(share, n=100):
    """The 95 % interval of a share of n."""
    z2 = 1.96**2 / n
    half = (z2 * (share * (1 - share) + z2 / 4)) ** 0.5
    return [(share + z2 / 2 + side) / (1 + z2) for side in (-half, half)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def save(figure, name):
    figure.savefig(HERE / name, transparent=True, bbox_inches="tight", metadata={"Date": None})


def accuracy(untrained=0.07, told=0.76):
    figure, axes = plt.subplots(figsize=(7, 3))
    for share, words in ((untrained, "untrained"), (told, "untrained, but told how in words")):
        axes.axhline(100 * share, color=GREY, linestyle=":", linewidth=1)
        axes.text(20.3, 100 * share, f"{words}: {share:.0%}", va="center", fontsize=9)
    for path, colour in zip(sorted(HERE.glob("sums-seed-*.jsonl")), COLOURS):
        rows = read(path)
        points = [(0, untrained)] + [
            (row["step"], row["accuracy"]) for row in rows if "accuracy" in row
        ]
        steps, shares = zip(*points)
        low, high = zip(*(wilson(share) for share in shares))
        axes.fill_between(
            steps,
            [100 * x for x in low],
            [100 * x for x in high],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            steps,
            [100 * x for x in shares],
            color=colour,
            marker="o",
            markersize=4,
            label=path.stem.removeprefix("sums-").replace("-", " "),
        )
    axes.set(
        xlim=(0, 20),
        ylim=(0, 100),
        xlabel="step",
        xticks=range(0, 21, 4),
        ylabel="right, of 100 held-out problems",
    )
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12))
    save(figure, "accuracy.svg")


def group():
    shown = json.loads((HERE / "group.json").read_text())
    figure, axes = plt.subplots(figsize=(7, 2.6))
    axes.set(xlim=(0, 10), ylim=(len(shown["answers"]) + 0.4, -1.4))
    axes.axis("off")
    axes.text(0, -0.9, f"step {shown['step']}: {shown['question']}", fontsize=10.5)
    for x, words in ((5.8, "reward"), (7.4, "advantage")):
        axes.text(x, -0.05, words, ha="right", fontsize=9)
    for i, (text, reward, advantage) in enumerate(shown["answers"]):
        colour = GREEN if advantage > 0 else RED
        axes.text(0, i + 0.85, text, family="monospace", fontsize=10)
        axes.text(5.8, i + 0.85, f"{reward:.0f}", ha="right", color=colour)
        axes.text(7.4, i + 0.85, f"{advantage:+.2f}", ha="right", color=colour)
        axes.text(7.8, i + 0.85, "more likely" if advantage > 0 else "less likely", color=colour)
    save(figure, "group.svg")


def pieces(untrained=0.07):
    runs = [
        (name, words, read(HERE / f"{name}.jsonl"))
        for name, words in (
            ("pieces-one-update", "one update, β = 0"),
            ("pieces-two-updates", "two updates, β = 1e-9"),
            ("sums-seed-0", "two updates, β = 0.04"),
        )
    ]
    figure, panels = plt.subplots(1, 3, figsize=(7, 2.4))
    for (name, words, rows), colour in zip(runs, (COLOURS[2], COLOURS[1], COLOURS[0])):
        tested = [row for row in rows if "accuracy" in row]
        lines = [
            (
                [0] + [row["step"] for row in tested],
                [100 * untrained] + [100 * row["accuracy"] for row in tested],
            )
        ]
        lines += [
            ([row["step"] for row in rows], [row[key] for row in rows])
            for key in ("kl", "clip_fraction")
        ]
        for axes, (steps, values) in zip(panels, lines):
            if name != "pieces-one-update" or axes is not panels[1]:  # its KL was not measured
                axes.plot(steps, values, color=colour, linewidth=1.5, label=words)
    for axes, title in zip(panels, ("right of 100", "kl", "clip_fraction")):
        axes.set_title(title, fontsize=10, color=GREY)
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


if __name__ == "__main__":
    accuracy()
    group()
    pieces()
