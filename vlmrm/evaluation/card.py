"""`vlmrm card`: a checkpoint's README.md, with its use, its figures and its provenance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub import EvalResult, ModelCardData

from vlmrm.errors import ConfigError
from vlmrm.evaluation.report import templates
from vlmrm.evaluation.report.audit import headline
from vlmrm.evaluation.report.checkpoints import (
    Checkpoint,
    choose,
    interval,
    number,
    percent,
    read_frames,
    read_sweeps,
    split,
)
from vlmrm.files import require_own_file, write_file
from vlmrm.measures.intervals import Estimate
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.modeling.manifest import read_reward_file, verify_complete, write_complete

CARD = "README.md"
CARDS = ("<!-- Written by vlmrm card", "[More Information Needed]")  # ours, and PEFT's empty form


def write_card(model_dir: str | Path, results: pd.DataFrame | str | Path, *, data: str) -> Path:
    """Write README.md into a complete checkpoint, in place of an earlier card, and return its path.

    Args:
        results: scored pairs of this checkpoint, possibly among others, or the results of a sweep with them.
        data: the name of the evaluation data in the card; a hub id if they have one.
    """
    folder = Path(model_dir)
    manifest = verify_complete(folder)
    require_own_file(folder / CARD, *CARDS)
    info = read_reward_file(folder) or {}
    [frame] = read_frames([results])
    measured, sweeps = _find(folder, frame), read_sweeps([results])
    choice = choose(split([frame])[0], sweeps)
    chosen = (choice.best.model, choice.best.name) == (measured.model, measured.name)
    accuracy, among = (choice.accuracy, choice.among) if chosen else (measured.accuracy, 1)
    rows = (row for sweep in sweeps for row in sweep["results"] if "provenance" in row)
    named = (row for row in rows if (row["model"], row["checkpoint"]) == (measured.model, measured.name))
    altered = {it.view: measured.altered(name) for name, it in INTERVENTIONS.items()}
    shares = {"all pairs": accuracy, **{name: share for name, share in altered.items() if share.n}}
    base = info.get("provenance", {}).get("base_model")
    environment = templates(escape=False)  # in Markdown, texts of the data are cells of tables, which `cell` escapes
    environment.filters["cell"] = _cell
    text = environment.get_template("card.md.jinja").render(
        metadata=_metadata(folder, base, accuracy, data).to_yaml(),
        name=_name(folder),
        base=Path(base).name if base is not None and Path(base).exists() else base,  # a hub id, or a folder's name
        data=data,
        accuracy=percent(accuracy.value),
        among=among,
        on_these=percent(measured.accuracy.value),
        rows=[(name, percent(it.value), interval(it), f"{it.n:,}") for name, it in shares.items()],
        headline=headline(measured.audit),
        length=percent(measured.figures["length_baseline_accuracy"]["value"]),
        correlation=number(measured.figures["margin_length_correlation"]["value"], 2),
        scored=next((row["provenance"] for row in named), None),  # scored pairs alone have none
        info=info,
        provenance=info.get("provenance", {}),
    )
    write_file(folder / CARD, text)
    write_complete(folder, manifest["world_size"], manifest["step"])  # which listed an earlier card
    return folder / CARD


def _find(folder: Path, frame: pd.DataFrame) -> Checkpoint:
    """Return the checkpoint with the names of the folder and its parent: paths may have changed since the sweep."""
    path = folder.resolve()
    rows = frame[frame["checkpoint"] == path.name] if "checkpoint" in frame else frame
    measured = split([rows])[0] if len(rows) else []
    matching = [checkpoint for checkpoint in measured if Path(checkpoint.model).resolve().name == path.parent.name]
    if len(matching) != 1:
        raise ConfigError(
            f"the results hold {len(matching)} checkpoints named {path.parent.name}/{path.name}: evaluate {folder} by "
            "itself, and give those results."
        )
    return matching[0]


def _metadata(folder: Path, base: str | None, accuracy: Estimate, data: str) -> ModelCardData:
    """Return the metadata that the hub reads from a card, with the results."""
    result = EvalResult(
        task_type="preference-evaluation",
        task_name="Preference evaluation",
        dataset_type=data,
        dataset_name=data,
        metric_type="accuracy",
        metric_name="Preference accuracy",
        metric_value=round(accuracy.value, 6),
    )
    base_entry: dict[str, Any] = {} if base is None or Path(base).exists() else {"base_model": base}
    return ModelCardData(
        model_name=_name(folder),
        library_name="transformers",
        tags=["reward-model", "vision-language", "vlmrm"],
        eval_results=[result],
        **base_entry,
    )


def _name(folder: Path) -> str:
    """Return the names of the training and the checkpoint, as `best` alone is ambiguous."""
    path = folder.resolve()
    return f"{path.parent.name}-{path.name}"


def _cell(text: Any) -> str:
    return " ".join(str(text).replace("|", "\\|").split())
