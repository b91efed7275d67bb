"""What a section of the report is made of, and how it writes numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vlmrm.evaluation.intervals import wilson
from vlmrm.evaluation.report.figures import Share


@dataclass(frozen=True)
class Drawing:
    """A figure with its file name, what is to be seen in it, and the caption below."""

    name: str
    figure: Figure
    alt: str
    caption: str


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first of each names it."""

    caption: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Section:
    """One heading of the page. Without drawings and tables, `text` says why there is nothing to show."""

    id: str
    title: str
    text: str
    drawings: list[Drawing] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1%}"


def interval(share: Share) -> str:
    return "–" if np.isnan(share.low) else f"{share.low:.1%} to {share.high:.1%}"


def points(value: float) -> str:
    return number(100 * value, 1)


def number(value: float, digits: int = 3) -> str:
    """With a true minus, and none before zero."""
    text = f"{abs(value):.{digits}f}"
    return f"−{text}" if value < 0 and float(text) else text


def accuracy_share(figures: Mapping[str, Any]) -> Share:
    """The accuracy in `vlmrm.evaluation.analysis.figures` of some pairs, with the interval that draws whole prompts.

    Where all pairs are right or all wrong, they are so in every draw, which says nothing of the others: then it is
    Wilson's, of so many prompts as if each had one pair. Of a single prompt there is none.
    """
    found = figures["preference_accuracy"]
    prompts = found["prompts"]  # without those that have nothing but ties
    low, high = found["low"], found["high"]
    if low == high:
        low, high = wilson(round(found["value"] * prompts), prompts)
    return Share(found["value"], low, high, figures["sample_count"])
