# SPDX-License-Identifier: MIT-0
"""Draw the mean reward of runs of README.md's sums.py as an SVG, from what they printed:
    python .ci/curves.py .ci/sums-*.txt > .ci/curves.svg
"""

import re
import sys
from pathlib import Path

# Readable on a light and on a dark background, which the picture leaves as it is.
GREY, COLOURS = "#848d97", ("#3b82f6", "#e07b39", "#2ea36a", "#b36ae2")
WIDTH, HEIGHT, LEFT, TOP = 640, 180, 40, 50  # of the panel, and the room beside it


def text(x, y, words, colour=GREY, anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def across(step, steps):
    return LEFT + (WIDTH - LEFT - 10) * (step - 1) / (steps - 1)


def up(reward):
    return TOP + HEIGHT * (1 - reward)


runs = {}  # "seed 0" -> the mean reward of each step
for name in sys.argv[1:]:
    printed = re.findall(r"^step +\d+ +reward ([\d.]+)", Path(name).read_text(), re.M)
    runs[Path(name).stem.removeprefix("sums-").replace("-", " ")] = [float(x) for x in printed]
steps = max(len(rewards) for rewards in runs.values())
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 40}" '
      'font-family="sans-serif" font-size="12">')
print(text(LEFT, 16, "mean reward of each step"))
for tick in (0, 0.5, 1):
    line = f"M{LEFT} {up(tick):.1f}H{WIDTH - 10}"
    print(f'<path d="{line}" stroke="{GREY}" opacity="0.35"/>')
    print(text(LEFT - 6, up(tick) + 4, tick, anchor="end"))
for step in (1, *range(5, steps + 1, 5)):
    print(text(across(step, steps), TOP + HEIGHT + 18, step, anchor="middle"))
for i, ((name, rewards), colour) in enumerate(zip(runs.items(), COLOURS)):
    points = " ".join(f"{across(j + 1, steps):.1f},{up(r):.1f}" for j, r in enumerate(rewards))
    print(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    print(text(LEFT + 150 * i, 34, name, colour))
print("</svg>")
