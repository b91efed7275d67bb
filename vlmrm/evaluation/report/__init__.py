"""`vlmrm report`: a self-contained page about scored pairs, its figures as files, and both in a run of wandb."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import vlmrm
from vlmrm.errors import ConfigError
from vlmrm.evaluation.report.checkpoints import (
    Choice,
    choose,
    interval,
    number,
    percent,
    read_frames,
    read_sweeps,
    scores_path,
    split,
    training_logs,
    without_figures,
)
from vlmrm.evaluation.report.examples import galleries
from vlmrm.evaluation.report.explorer import pack_pairs
from vlmrm.evaluation.report.sections import Section, halves, headline, sections
from vlmrm.files import make_folder, require_own_file, write_file
from vlmrm.libraries import missing
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.plots import Share, css_variables, drawing, save

PAGE, PLOTS = "report.html", "plots"
WANDB_PREFIX = "report"  # of the names in a run of wandb


def build_report(
    sources: Sequence[pd.DataFrame | str | Path], output_dir: str | Path, title: str = "Reward model report"
) -> Path:
    """Write `report.html` and `plots/*.svg|png` to `output_dir`, and return the page's path.

        build_report(["results/mine.csv"], "results/report")

    Args:
        sources: frames of scored pairs, `.scores.parquet` files, or the results (.csv, .json) beside them. The
            report is about the best checkpoint of the .json, or without one about the most accurate.

    Raises:
        ConfigError: when a source does not exist, a checkpoint is in two of them, or `output_dir` cannot be written
            or holds a report.html that is no report.
        DataError: when a source cannot be read or holds nothing that can be shown.
    """
    checkpoints, left_out = split(read_frames(sources))
    sweeps = read_sweeps(sources)
    choice = choose(checkpoints, sweeps)
    best = choice.best
    folder = Path(output_dir)
    require_own_file(folder / PAGE, 'content="vlmrm report"')
    make_folder(folder / PLOTS)
    with drawing():
        page_sections = sections(checkpoints, choice, training_logs(sweeps))
        drawn = _save_drawings(page_sections, folder / PLOTS)
    page = _environment().get_template("page.html.jinja")
    style, script = _style(), _beside("explorer.js")
    html = page.render(
        title=title,
        best=best,
        reason=_reason(choice) if len(checkpoints) > 1 else None,
        leakage=choice.leakage,
        accuracy=percent(choice.accuracy.value),
        interval=interval(choice.accuracy),
        altered={
            i.condition: _measured(best.altered(i.name))
            for i in INTERVENTIONS.values()
            if i.family == "image" and i.standard and not i.repeats
        },
        prompts=best.pairs["prompt_id"].nunique(),
        ties=len(best.rows) - len(best.pairs),
        headline=headline(best),
        left_out=[*left_out, *without_figures(sweeps)],
        sections=page_sections,
        halves=halves(page_sections),
        drawn=drawn,
        number=number,
        galleries=galleries(best),
        pairs=pack_pairs(checkpoints, best),
        group="category" if "category" in best.rows else "",
        style=style,
        script=script,
        policy=_policy(style, script),
        version=vlmrm.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
    path = folder / PAGE
    write_file(path, html)
    return path


def _reason(choice: Choice) -> str:
    """Return why the checkpoint was chosen, and that its accuracy is without the luck of that, where it is."""
    if choice.among == 1:
        return choice.reason
    on_these = percent(choice.best.accuracy.value)
    return f"{choice.reason}, less the luck of the choice among {choice.among}: on these pairs it has {on_these}"


def _measured(share: Share) -> str:
    return percent(share.value) if share.n else "not measured"


def _style() -> str:
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} }} }}"
    return f":root {{ {css_variables(dark=False)} }}\n{dark}\n{_beside('page.css')}"


def _beside(name: str) -> str:
    """Return a file of this package."""
    return files("vlmrm.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the page's content security policy: nothing is loaded, and nothing runs but the script by its digest.

    Attributes of style are allowed, as matplotlib's drawings have them; nothing of the data is in one.
    """
    style_digest, script_digest = (b64encode(sha256(text.encode()).digest()).decode() for text in (style, script))
    return (
        f"default-src 'none'; script-src 'sha256-{script_digest}'; style-src-elem 'sha256-{style_digest}'; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _save_drawings(page_sections: Sequence[Section], folder: Path) -> dict[str, str]:
    """Write every figure as files, and return the SVG elements for the page by name."""
    drawings = [drawing for section in page_sections for drawing in section.drawings]
    return {drawing.name: save(drawing.figure, folder, drawing.name) for drawing in drawings}


def _environment() -> Environment:
    # Texts of the data are escaped; the figures alone, which matplotlib has escaped already, are marked safe.
    loader = PackageLoader("vlmrm.evaluation.report", ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def log_report(page: Path, results: Sequence[Path], destination: str) -> str:
    """Log the report `page` of `results` to wandb, and return its URL, or offline the folder to sync.

    `destination` is PROJECT for a run of its own, or PROJECT/RUN for the run with that id, such as the training's.
    wandb's own settings hold: `WANDB_ENTITY`, `WANDB_MODE=offline`, and so on.

    Raises:
        ConfigError: without wandb, without the table of the results, or when wandb refuses the run.
    """
    try:
        from wandb import Artifact, Error, Html, Image, Table, init
    except ImportError as error:  # a folder wandb/ of offline runs can be imported too, but is empty
        raise ConfigError(missing("--wandb", "wandb", "wandb")) from error
    html, rows = page.read_text(encoding="utf-8"), _results_table(results)
    # The folder may hold figures of an earlier report; the ids in the page begin with the names of its figures.
    figures = [path for path in sorted(page.parent.glob("plots/*.png")) if f"#{path.stem}-" in html]
    project, _, run_id = destination.partition("/")
    artifact = Artifact("report", type="report")
    artifact.add_file(str(page))
    try:
        with init(project=project, id=run_id or None, resume="must" if run_id else None) as run:
            run.log(
                {
                    **{f"{WANDB_PREFIX}/{path.stem}": Image(str(path)) for path in figures},
                    f"{WANDB_PREFIX}/checkpoints": Table(dataframe=rows),
                    f"{WANDB_PREFIX}/page": Html(str(page), inject=False),  # it has its own style
                }
            )
            run.log_artifact(artifact)
            return run.url or str(Path(run.dir).parent)
    except Error as error:
        raise ConfigError(f"wandb does not take the report to {destination}: {error}") from error


def _results_table(results: Sequence[Path]) -> pd.DataFrame:
    """Return the tables (.csv) of all results, one row a checkpoint; None where a cell is empty."""
    paths = [scores_path(path).with_suffix("").with_suffix(".csv") for path in results]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"there is no {missing[0]}, the table of the results: keep it beside the scored pairs.")
    rows = pd.concat([pd.read_csv(path) for path in paths], ignore_index=True).astype(object)
    return rows.where(rows.notna(), None)
