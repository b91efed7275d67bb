"""`vlmrm report`: scored pairs into one self-contained page and the same figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import vlmrm
from vlmrm.evaluation.report import style
from vlmrm.evaluation.report.checkpoints import read_frames, split
from vlmrm.evaluation.report.examples import galleries
from vlmrm.evaluation.report.figures import Share
from vlmrm.evaluation.report.parts import Section, interval, number, percent
from vlmrm.evaluation.report.reliance import headline
from vlmrm.evaluation.report.sections import sections
from vlmrm.evaluation.report.sweeps import choose, read_sweeps
from vlmrm.files import make_folder, write_file

PAGE, PLOTS = "report.html", "plots"
# The ablations that stand below the headline, which rests on them.
FACTS = {"swapped_image": "with another row's image", "blank_image": "with images painted grey"}


def build_report(
    sources: Sequence[pd.DataFrame | str | Path], output_dir: str | Path, title: str = "Reward model report"
) -> Path:
    """Writes `report.html` and `plots/*.svg|png` to `output_dir`, and returns the page's path.

    Args:
        sources: frames of scored pairs, `.scores.parquet` files, or the results (.csv, .json) that they lie beside.
            Where the .json is there, its best checkpoint is the report's; else that is the most accurate one.

    Raises:
        ConfigError: when a source does not exist, a checkpoint is in two of them, or `output_dir` cannot be written.
        DataError: when a source cannot be read or holds nothing that can be shown.
    """
    checkpoints, left_out = split(read_frames(sources))
    choice = choose(checkpoints, read_sweeps(sources))
    best = choice.best
    folder = Path(output_dir)
    make_folder(folder / PLOTS)
    with style.drawing():
        shown = sections(checkpoints, choice)
        drawn = _save_drawings(shown, folder / PLOTS)
    page = _environment().get_template("page.html.jinja")
    html = page.render(
        title=title,
        best=best,
        reason=choice.reason if len(checkpoints) > 1 else None,
        leakage=choice.leakage,
        accuracy=percent(best.accuracy.value),
        interval=interval(best.accuracy),
        ablated={shown: _measured(best.ablated(name)) for name, shown in FACTS.items()},
        prompts=best.pairs["prompt_id"].nunique(),
        ties=len(best.rows) - len(best.pairs),
        headline=headline(best),
        left_out=left_out,
        sections=shown,
        drawn=drawn,
        number=number,
        galleries=galleries(best),
        light=style.css_variables(dark=False),
        dark=style.css_variables(dark=True),
        version=vlmrm.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    path = folder / PAGE
    write_file(path, html)
    return path


def _measured(share: Share) -> str:
    return percent(share.value) if share.n else "not measured"


def _save_drawings(shown: Sequence[Section], folder: Path) -> dict[str, str]:
    """Every figure as files; the SVG elements for the page by name."""
    return {
        drawing.name: style.save(drawing.figure, folder, drawing.name)
        for section in shown
        for drawing in section.drawings
    }


def _environment() -> Environment:
    # Texts of the data are escaped; the figures alone, which matplotlib has escaped already, are marked safe.
    loader = PackageLoader("vlmrm.evaluation.report", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
