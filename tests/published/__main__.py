"""Write the table of published reward models into docs/models.md: `python -m tests.published`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vlmrm.modeling.published_import import import_reward
from vlmrm.modeling.published_layouts import BY_NAME
from vlmrm.scoring.loading import load_scorer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

from .cases import CASES, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- published: python -m tests.published -->", "<!-- end of published -->"


def lines(difference: Callable[[Case], str]) -> Iterator[str]:
    """Yield the lines of the table; `difference` returns the largest difference of a case's scores."""
    yield "| Layout | Published by | Architecture | Largest difference | Its arithmetic |"
    yield "|---|---|---|---|---|"
    for case in CASES:
        source = BY_NAME[case.layout].source
        yield f"| `{case.layout}` | {case.who} | {case.architecture} | {difference(case)} | {source} |"
    for layout in BY_NAME.values():
        if layout.refused:
            yield f"| `{layout.name}` | IXC-2.5-Reward | refused: {layout.refused} | | {layout.source} |"


def measured(case: Case) -> str:
    """Return the largest difference between the scores of an imported case and those of its reference."""
    with tempfile.TemporaryDirectory() as folder:
        published = case.write(Path(folder))
        import_reward(published.source, Path(folder, "imported"), **published.options)
        scores = load_scorer(Path(folder, "imported"), dtype="float32").score(published.conversations)
    return f"{(torch.tensor(scores) - published.expected).abs().max().item():.0e}"


def page(difference: Callable[[Case], str]) -> str:
    """Return docs/models.md with the table as it is now."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([f"{before}{BEGIN}", "", *lines(difference), "", END]) + after.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(measured), encoding="utf-8")
