"""What pictures of different things have in common."""

from __future__ import annotations

from matplotlib.axis import XAxis, YAxis
from matplotlib.ticker import LogLocator, NullFormatter


def make_logarithmic(axis: XAxis | YAxis) -> None:
    """With numbers as people write them, at 1, 2 and 5."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
