# SPDX-License-Identifier: MIT-0
"""Draw the curves of runs as an SVG: the reward above, and the length of the completions below:
    python .ci/curves.py runs/sums-0 runs/sums-1 runs/sums-2 > .ci/curves.svg
"""

import json
import sys
from pathlib import Path

# Readable on a light and on a dark background, which the picture leaves as it is.
GREY, COLOURS = "#848d97", ("#3b82f6", "#e07b39", "#2ea36a", "#b36ae2")
WIDTH, HEIGHT, LEFT, TOP = 640, 150, 40, 34  # of a panel, and the room beside it
PANELS = {"reward_mean": ("mean reward of each step", (0, 0.5, 1)),
          "completion_length": ("tokens in a completion, mean of each step", (0, 5, 10, 15))}


def text(x, y, words, colour=GREY, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def panel(runs, figure, top):
    """The lines of SVG for one figure of all runs; `top` is the panel's upper edge."""
    title, ticks = PANELS[figure]
    steps = max(len(history) for history in runs.values())
    highest = max(ticks[-1], *(m[figure] for history in runs.values() for m in history))
    across = lambda step: LEFT + (WIDTH - LEFT - 10) * (step - 1) / max(1, steps - 1)
    up = lambda value: top + HEIGHT * (1 - value / highest)
    lines = [text(LEFT, top - 12, title)]
    for tick in ticks:
        line = f"M{LEFT} {up(tick):.1f}H{WIDTH - 10}"
        lines.append(f'<path d="{line}" stroke="{GREY}" opacity="0.35"/>')
        lines.append(text(LEFT - 6, up(tick) + 4, tick, anchor="end"))
    for history, colour in zip(runs.values(), COLOURS):
        line = " ".join(f"{across(m['step']):.1f},{up(m[figure]):.1f}" for m in history)
        lines.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for step in (1, *range(5, steps + 1, 5)):
        lines.append(text(across(step), top + HEIGHT + 16, step, anchor="middle"))
    return lines


runs = {Path(folder).name: [json.loads(line) for line in open(Path(folder, "metrics.jsonl"))]
        for folder in sys.argv[1:]}
height = len(PANELS) * (HEIGHT + TOP + 24)
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
      'font-family="sans-serif" font-size="12">')
for i, figure in enumerate(PANELS):
    print("\n".join(panel(runs, figure, TOP + i * (HEIGHT + TOP + 24))))
for i, (name, colour) in enumerate(zip(runs, COLOURS)):
    print(text(WIDTH - 80 * (len(runs) - i), 16, name.replace("sums-", "seed "), colour))
print("</svg>")
