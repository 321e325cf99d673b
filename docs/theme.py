"""Colors and size of the pictures on the site: they follow light and dark mode and fit a phone.

A picture is drawn in the light colors. Saved, each color becomes a CSS variable with a dark
counterpart, so that one SVG file serves both modes, on the site and on GitHub. Pictures are 5.6
inches wide: on a screen of 390 pixels, the smallest text is still readable.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 5.6
TITLE, TEXT = 13.0, 10.5  # sizes of type, in points
INK, FAINT, GRID, LINE, BOX = "#222222", "#6b6b6b", "#e6e6e6", "#bbbbbb", "#f6f6f6"
OURS, TORCH, LIGHT, GREEN = "#1f6fb4", "#d1812f", "#9dbfdc", "#3a8a4d"

# As Furo's background has it, and colors of the same hue that can be read on it.
_DARK = {
    "#ffffff": "#131416",
    "#000000": "#dddddd",
    INK: "#e3e3e3",
    FAINT: "#a3a7ab",
    GRID: "#2e3236",
    LINE: "#5a6066",
    BOX: "#1f2225",
    OURS: "#6cb2ee",
    TORCH: "#e9a15b",
    LIGHT: "#3d6486",
    GREEN: "#74c28a",
    # Other contestants of benchmarks, in benchmarks/harness/figure.py
    "#7a8a5c": "#a9bb86",
    "#9467a8": "#c39bd6",
    "#8c6d5a": "#c7a58f",
    "#5f8f96": "#8fc3ca",
    "#a3627a": "#d797ae",
    "#7f7f7f": "#a8a8a8",
    "#9a9a9a": "#7d8389",
}
# The same bytes every time, and text that a reader can search for.
_SVG: Any = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def framed(title: str, caption: str, *, height: float, left: float, bottom: float = 0.5) -> Axes:
    """Axes without a frame, under the finding and a few words on what was measured.

    Args:
        title: the finding.
        caption: what it is of.
        height: of the axes, in inches.
        left: room for the labels of the y axis, in inches.
        bottom: likewise, of the x axis.
    """
    titles, captions = textwrap.wrap(title, 44), textwrap.wrap(caption, 62)
    top = 0.24 + 0.24 * len(titles) + 0.18 * len(captions)
    total = top + height + bottom
    figure = Figure(figsize=(WIDTH, total), facecolor="white")
    axes = figure.add_axes(
        (left / WIDTH, bottom / total, (WIDTH - left - 0.3) / WIDTH, height / total),
        facecolor="white",
    )
    axes.tick_params(colors=FAINT, length=0, labelsize=TEXT)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom" and bottom > 0.2)
        spine.set_color(LINE)
    bold: dict[str, Any] = {"fontsize": TITLE, "fontweight": "bold", "color": INK}
    plain: dict[str, Any] = {"fontsize": TEXT, "color": FAINT}
    line = 0.26
    for words, look, step in ((titles, bold, 0.24), (captions, plain, 0.18)):
        for each in words:
            figure.text(0.1 / WIDTH, 1 - line / total, each, **look)
            line += step
    return axes


def save(axes: Axes | Figure, path: Path) -> None:
    """Write the picture as an SVG that follows the theme."""
    figure = axes if isinstance(axes, Figure) else axes.get_figure(root=True)
    assert figure is not None
    with matplotlib.rc_context(_SVG):
        figure.savefig(path, format="svg", metadata={"Date": None})
    follow_theme(path)


def follow_theme(path: Path) -> None:
    """Replace the colors of an SVG by variables that are set for light and for dark mode."""
    text = path.read_text()
    names = {color: f"--c{number}" for number, color in enumerate(_DARK)}
    used = [color for color in _DARK if re.search(color, text, re.IGNORECASE)]
    text = re.sub(r"(?<=: )black\b", "#000000", text)
    unknown = set(re.findall(r"(?<=: )#[0-9a-f]{6}\b", text)) - set(_DARK)
    if unknown:
        raise ValueError(f"{path.name}: no dark counterpart of {', '.join(sorted(unknown))}")
    for color in used:
        text = re.sub(color, f"var({names[color]})", text, flags=re.IGNORECASE)
    # What has no color is black: unlabelled paths have theirs, text need not.
    light = "; ".join(f"{names[color]}: {color}" for color in used)
    dark = "; ".join(f"{names[color]}: {_DARK[color]}" for color in used)
    style = (
        f"<style>:root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"text {{ fill: {INK}; font-family: {_FONTS} !important }}\n"
        f"@media (prefers-color-scheme: dark) {{ text {{ fill: {_DARK[INK]} }} }}</style>\n"
    )
    text = text.replace(" <defs>\n", f" {style} <defs>\n", 1)
    path.write_text(text)
