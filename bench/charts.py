"""Pictures of rows, as SVG that stands in a page and takes its colours from it.

Rows of one quantity at several sizes become a line for each contender. Other rows become a dot
each, beside its reference and its target.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.axes import make_logarithmic
from bench.report import Row, short

WIDTH_IN = 5.2
DPI = 72  # of SVG: a point is a pixel
TITLE_IN, LINE_IN, FOOT_IN = 0.45, 0.5, 0.5  # of a panel: its title, each row, its axis
CURVES_IN = 3.4
LOGARITHMIC_FROM = 30.0  # largest over smallest
OURS = "Baton"
SIZED = re.compile(r"(?P<thing>.+?)_(?P<kib>\d+)KiB(_over_.+)?")

# Placeholders for the page's own colours, which follow its light or dark scheme.
INK, MUTED, LINE, ACCENT, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
CURVES = ("#060606", "#070707", "#080808", "#090909")
VARIABLES = {
    INK: "--ink", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", BAD: "--bad",
    **{color: f"--curve-{index}" for index, color in enumerate(CURVES)},
}  # fmt: skip


def draw(rows: Sequence[Row], name: str) -> str:
    """An svg element; empty without rows. name: the section's, so that no two pictures of a page
    call their parts alike."""
    if not rows:
        return ""
    with style(name):
        sized = sizes_of(rows)
        return as_svg(draw_curves(sized) if sized else draw_dots(rows))


@contextmanager
def style(name: str) -> Iterator[None]:
    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": 11,
        "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": LINE, "grid.color": LINE,
        "xtick.color": MUTED, "ytick.color": MUTED, "axes.titlesize": 12,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def as_svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(
        written, format="svg", metadata={"Date": None, "Creator": None}, transparent=True
    )
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


# Of legends.
SMALL: dict[str, Any] = {
    "frameon": False,
    "fontsize": 11,
    "handletextpad": 0.3,
    "columnspacing": 1.2,
}


# Dots ---------------------------------------------------------------------------------------------


def draw_dots(rows: Sequence[Row]) -> Figure:
    """A panel for every unit: numbers of different units have no axis in common."""
    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.unit].append(row)
    heights = [TITLE_IN + LINE_IN * len(panel) + FOOT_IN for panel in panels.values()]
    height = sum(heights) + FOOT_IN
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    top = height
    for (unit, panel), panel_height in zip(panels.items(), heights, strict=True):
        bottom = top - panel_height + FOOT_IN
        box = (0.03, bottom / height, 0.94, LINE_IN * len(panel) / height)
        draw_panel(figure.add_axes(box), unit, panel)
        top -= panel_height
    draw_legend(figure)
    return figure


def draw_panel(axes: Axes, unit: str, rows: Sequence[Row]) -> None:
    axes.set_title(unit, loc="left", pad=8)
    axes.set(ylim=(len(rows) - 0.35, -0.65), yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(visible=True, axis="x", linewidth=0.6)
    axes.set_axisbelow(True)
    numbers: list[float] = []
    for index, row in enumerate(rows):
        numbers += draw_row(axes, index, row)
        axes.text(0.0, index - 0.28, row.name, transform=axes.get_yaxis_transform(), fontsize=10.5)
    if min(numbers) > 0 and max(numbers) / min(numbers) > LOGARITHMIC_FROM:
        make_logarithmic(axes.xaxis)
    else:
        axes.set_xlim(left=min(0.0, 1.15 * min(numbers)), right=1.08 * max(*numbers, 0.0) or 1.0)


def draw_row(axes: Axes, y: float, row: Row) -> list[float]:
    """Returns the numbers that the axis must show."""
    numbers = [row.value]
    y += 0.12
    if row.reference_value is not None:
        numbers.append(row.reference_value)
        axes.plot(numbers, [y, y], color=LINE, linewidth=2, zorder=1)
        axes.plot(row.reference_value, y, "o", color=MUTED, fillstyle="none", zorder=2)
    if (bound := bound_of(row)) is not None:
        numbers.append(bound)
        axes.plot(bound, y, "|", color=INK, markersize=13, markeredgewidth=1.6, zorder=3)
    is_missed = row.is_met is False
    mark, color = ("X", BAD) if is_missed else ("o", ACCENT)
    axes.plot(row.value, y, mark, color=color, markersize=7, zorder=4)
    return numbers


def bound_of(row: Row) -> float | None:
    """Where the target lies on the value's own axis."""
    if row.target is None:
        return None
    if row.ratio is None or row.reference_value is None:
        return row.target.bound
    return row.target.bound * row.reference_value


def draw_legend(figure: Figure) -> None:
    handles = [
        Line2D([], [], color=ACCENT, marker="o", linestyle="none", label="measured"),
        Line2D([], [], color=BAD, marker="X", linestyle="none", label="target missed"),
        Line2D([], [], color=MUTED, marker="o", fillstyle="none", linestyle="none",
               label="reference"),
        Line2D([], [], color=INK, marker="|", markersize=11, linestyle="none", label="target"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="lower left", ncols=4, **SMALL)


# Curves -------------------------------------------------------------------------------------------


def sizes_of(rows: Sequence[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """{thing: {reference: {KiB: row}}}; empty unless every row names a size and a reference."""
    found: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        match = SIZED.fullmatch(row.name)
        if match is None or row.reference is None:
            return {}
        found[match["thing"]][row.reference][int(match["kib"])] = row
    return found


def draw_curves(sized: dict[str, dict[str, dict[int, Row]]]) -> Figure:
    height = CURVES_IN * len(sized)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    for index, (thing, references) in enumerate(sized.items()):
        bottom = height - CURVES_IN * (index + 1) + 1.0
        box = (0.1, bottom / height, 0.87, (CURVES_IN - 1.5) / height)
        draw_thing(figure.add_axes(box), thing, references)
    return figure


def draw_thing(axes: Axes, thing: str, references: dict[str, dict[int, Row]]) -> None:
    rows = [row for sizes in references.values() for row in sizes.values()]
    axes.set_title(f"{thing}, {rows[0].unit} by KiB of a run", loc="left", pad=8)
    axes.grid(visible=True, axis="y", linewidth=0.6)
    axes.spines[["right", "top"]].set_visible(False)
    ours = {kib: row.value for sizes in references.values() for kib, row in sizes.items()}
    for index, (reference, sizes) in enumerate(references.items()):
        theirs = sorted((kib, row.reference_value) for kib, row in sizes.items())
        color = CURVES[index % len(CURVES)]
        axes.plot(*zip(*theirs, strict=True), "o--", color=color, markersize=4, label=reference)
    axes.plot(*zip(*sorted(ours.items()), strict=True), "o-", color=ACCENT, linewidth=2.4,
              label=OURS)  # fmt: skip
    for kib, value in ours.items():
        is_missed = any(sizes[kib].is_met is False for sizes in references.values() if kib in sizes)
        if is_missed:
            axes.plot(kib, value, "X", color=BAD, markersize=9)
        axes.annotate(short(value), (kib, value), (0, 9), textcoords="offset points",
                      ha="center", fontsize=9)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ours), [str(kib) for kib in sorted(ours)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0, top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.13), ncols=3, **SMALL)
