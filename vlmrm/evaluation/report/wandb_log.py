"""`vlmrm report --wandb`: a report as a run of Weights & Biases shows it, with figures, table and page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from vlmrm.errors import ConfigError
from vlmrm.evaluation.report.checkpoints import scores_path

FOLDER = "report"  # what the names in the run begin with


def log_report(page: Path, results: Sequence[Path], destination: str) -> str:
    """Logs the report `page` of `results`, and returns where it is: a URL, or offline the folder to sync.

    `destination` is PROJECT for a run of its own, or PROJECT/RUN for the run with that id, such as the training's.
    wandb's own settings hold: `WANDB_ENTITY`, `WANDB_MODE=offline`, and so on.

    Raises:
        ConfigError: without wandb, without the table of the results, or when wandb refuses the run.
    """
    try:
        from wandb import Artifact, Error, Html, Image, Table, init
    except ImportError as error:  # a folder wandb/ of offline runs can be imported too, but is empty
        raise ConfigError("--wandb needs wandb, which is not installed: pip install wandb.") from error
    html, rows = page.read_text(encoding="utf-8"), _table(results)
    # Figures of an earlier report may lie beside; the page's own begin their ids with the figure's name.
    figures = [path for path in sorted(page.parent.glob("plots/*.png")) if f"#{path.stem}-" in html]
    project, _, run_id = destination.partition("/")
    artifact = Artifact("report", type="report")
    artifact.add_file(str(page))
    try:
        with init(project=project, id=run_id or None, resume="must" if run_id else None) as run:
            run.log(
                {
                    **{f"{FOLDER}/{path.stem}": Image(str(path)) for path in figures},
                    f"{FOLDER}/checkpoints": Table(dataframe=rows),
                    f"{FOLDER}/page": Html(str(page), inject=False),  # it has its own style
                }
            )
            run.log_artifact(artifact)
            return run.url or str(Path(run.dir).parent)
    except Error as error:
        raise ConfigError(f"wandb does not take the report to {destination}: {error}") from error


def _table(results: Sequence[Path]) -> pd.DataFrame:
    """The tables (.csv) of all results, one row a checkpoint; None where a cell is empty."""
    paths = [scores_path(path).with_suffix("").with_suffix(".csv") for path in results]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ConfigError(f"there is no {missing[0]}, the table of the results: keep it beside the scored pairs.")
    rows = pd.concat([pd.read_csv(path) for path in paths], ignore_index=True).astype(object)
    return rows.where(rows.notna(), None)
