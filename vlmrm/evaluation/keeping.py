"""The end of a sweep: choose the best checkpoint, compare it with `fail_under`, and with `keep_best` delete others.

A checkpoint is deleted entirely or not at all, and only if no training, adapter or link needs it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.choosing import Criterion
from vlmrm.evaluation.entry import Entry
from vlmrm.evaluation.results import Results
from vlmrm.evaluation.schema import Best, Row
from vlmrm.evaluation.suite_table import SuiteTable
from vlmrm.modeling.manifest import (
    BEST,
    COMPLETE,
    FINAL,
    delete_checkpoint,
    find_checkpoints,
    is_finished,
    read_json_of,
    save_normalization,
)

logger = logging.getLogger("vlmrm")


@dataclass(frozen=True)
class SweepResult:
    """The table's rows, in the order of evaluation, and the one that `metric_for_best` chose.

    `paths` are those of the rows that this sweep was about; further rows are of earlier ones with this output.
    Of a suite, `sets` has the result of each set by name, and `unread` why a set could not be evaluated; rows are
    those of `SuiteTable`, and there is no such file as `scores`.
    """

    rows: list[Row]
    choice: Best | None
    csv: Path
    scores: Path  # every pair, as parquet
    paths: frozenset[str]
    sets: Mapping[str, SweepResult] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Row | None:
        """Return the row that was chosen; None where none has figures."""
        return next((row for row in self.rows if self.choice and row["path"] == self.choice["path"]), None)

    def _repr_html_(self) -> str:
        """Return the sweep as a notebook shows it: a row for each checkpoint, the best one in bold."""
        figures = ("preference_accuracy", "blank_image_accuracy", "average_margin", "sample_count")
        columns = ("checkpoint", *(self.sets or figures), "error")
        lines = []
        for row in self.rows:
            of_sets: Any = row.get("sets", {})
            on_sets = {name: of_set.get(figures[0]) for name, of_set in of_sets.items()}
            values = [{**row, **on_sets}.get(name) for name in columns]
            cells = [f"{it:.3f}" if isinstance(it, float) else escape(str("" if it is None else it)) for it in values]
            bold = " style='font-weight:bold'" if row is self.best else ""
            lines.append(f"<tr{bold}><td>{'<td>'.join(cells)}")
        return f"<table><tr><th>{'<th>'.join(columns)}{''.join(lines)}</table>"


@dataclass(frozen=True)
class Plan:
    """Folders to delete with their sizes in bytes, and those to leave although they are not kept, with the reason."""

    delete: dict[Path, int]
    spared: dict[Path, str]


def conclude(
    results: Results | SuiteTable,
    criterion: Criterion,
    looked_at: Sequence[Entry],
    args: EvaluationArguments,
    *,
    main: bool,
    stopped: bool,
) -> Best | None:
    """Choose the best of all rows, and apply `keep_best` to `looked_at`, the entries of this sweep; return the best.

    The `main` process alone writes and deletes; nothing is deleted of a sweep that was `stopped`.

    Raises:
        ConfigError: when no checkpoint can be chosen, or deleting needs an answer and there is no terminal.
        BelowThreshold: when the best is below `fail_under`.
    """
    paths = {entry.path for entry in looked_at}
    rows = [row for row in results.rows if row["path"] in paths]
    if not rows:
        raise ConfigError(f"watch saw no checkpoint in {', '.join(args.model_dirs)}: check the path, or wait longer.")
    # Of the mean of several sets the luck of the choice is not known.
    frame = results.frame if isinstance(results, Results) else None
    best = results.best = criterion.best(results.rows, frame)
    if best is not None and args.keep_best is not None:
        best["kept"] = [row["path"] for row in criterion.ranked(rows)[: args.keep_best]]
    if main:
        results.write_tables()
    try:
        criterion.require(results.rows)
    except ConfigError as error:
        raise ConfigError(f"{results.csv} has every checkpoint, but none is best: {error}") from None
    if main and best is not None and args.save_normalization and Path(best["path"]).is_dir():
        save_scale(best, results)
    check_threshold(best, args, results.csv)
    if main and best is not None and best["kept"] is not None and not stopped:
        if any(row["error"] for row in rows):
            logger.warning("keep_best deletes nothing, because not every checkpoint could be evaluated")
        else:
            evaluated = [Path(entry.path) for entry in looked_at]
            keep_best(evaluated, [Path(path) for path in best["kept"]], yes=args.yes)
    return best


def check_threshold(best: Best | None, args: EvaluationArguments, csv: Path) -> None:
    """Check that there is a best checkpoint, and that it reaches `fail_under`.

    Raises:
        BelowThreshold: when it does not, or there is none.
    """
    if args.fail_under is None or (best is not None and best["value"] >= args.fail_under):
        return
    reached = "no checkpoint has figures" if best is None else f"{best['path']}, the best, has {best['value']:.4f}"
    raise BelowThreshold(f"{reached}: {args.metric_for_best} is below the {args.fail_under} of fail_under: see {csv}.")


def save_scale(best: Best, results: Results | SuiteTable) -> None:
    """Save mean and standard deviation of the best checkpoint's scores, each branch once, with it.

    Where they cannot be saved, a warning is logged.
    """
    scores = results.scores_of(best)
    mean, std = float(scores.mean()), float(scores.std())
    if std == 0:
        logger.warning("All %d scores of %s are equal: nothing is saved to normalise by", len(scores), best["path"])
        return
    try:
        saved = save_normalization(best["path"], mean=mean, std=std, count=len(scores), data=results.data)
    except (ConfigError, CheckpointError) as error:
        logger.warning("The mean and spread of the scores are not saved with the best checkpoint: %s", error)
        return
    if saved:
        logger.info("Saved with %s: its scores are %.4f ± %.4f on these data", best["path"], mean, std)


def plan(evaluated: Sequence[Path], kept: Sequence[Path]) -> Plan:
    """Return which checkpoints of `evaluated` may be deleted, and why others that are not in `kept` may not."""
    paths = {folder.resolve() for folder in kept}
    reasons = {folder: reason_to_spare(folder, evaluated) for folder in evaluated if folder.resolve() not in paths}
    return Plan(
        {folder: _size(folder) for folder, reason in reasons.items() if reason is None},
        {folder: reason for folder, reason in reasons.items() if reason is not None},
    )


def reason_to_spare(folder: Path, evaluated: Sequence[Path]) -> str | None:
    """Return why a checkpoint of `evaluated` must not be deleted; None if it may be."""
    training = folder.parent
    if folder.is_symlink():
        return "it is a link"
    if folder.name in (FINAL, BEST):
        return "it is the result of a training"
    if not (folder / COMPLETE).is_file():
        return f"it has no {COMPLETE}, so a training may still be writing it"
    if not is_finished(training) and folder.name in _needed_by(training):
        return "its training has not finished, and may resume from it or choose it as the best"
    if link := next((link for link in _links(training) if _inside(link, folder) and folder not in link.parents), None):
        return f"{link} leads into it"
    for neighbour in {*evaluated, *(path.with_name(name) for path in evaluated for name in (FINAL, BEST))} - {folder}:
        if _inside(neighbour, folder):
            return f"{neighbour} lies in it"
        if (base := _base(neighbour)) is not None and _inside(base, folder):
            return f"it is the base of {neighbour}"
    return None


def keep_best(evaluated: Sequence[Path], kept: Sequence[Path], *, yes: bool) -> None:
    """Log which of `evaluated` are to be deleted, and delete them if `yes`, or after a yes typed at the terminal.

    Raises:
        ConfigError: without `yes`, when there is no terminal.
        CheckpointError: when a folder cannot be deleted.
    """
    planned = plan(evaluated, kept)
    for folder in kept:
        logger.info("keep    %s", folder)
    for folder, reason in planned.spared.items():
        logger.info("keep    %s: %s", folder, reason)
    for folder, size in planned.delete.items():
        logger.info("delete  %s: %s bytes", folder, f"{size:,}")
    if not planned.delete:
        logger.info("keep_best: there is nothing to delete")
        return
    total = f"{len(planned.delete)} checkpoints of {sum(planned.delete.values()):,} bytes"
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"keep_best would delete {total}, and nothing was deleted, because there is no terminal to ask on: "
                "add --yes true."
            )
        if _answer(f"Delete {total}? Only yes deletes them: ") != "yes":
            logger.info("Nothing was deleted")
            return
    for folder in planned.delete:
        delete_checkpoint(folder)
    logger.info("Deleted %s", total)


def _answer(question: str) -> str:
    try:
        return input(question).strip().lower()
    except EOFError:
        return ""


def _needed_by(training: Path) -> set[str]:
    """Return the checkpoints that an unfinished training still needs: the newest, and the best so far."""
    complete = [folder for folder in find_checkpoints(training) if (folder / COMPLETE).is_file()]
    if not complete:
        return set()
    newest = complete[-1]
    best = (read_json_of(newest, "trainer_state.json") or {}).get("best_model_checkpoint")
    return {newest.name, Path(best or newest).name}


def _links(training: Path) -> Iterator[Path]:
    """Yield the links in a training's folder, at any depth, and beside it."""
    for above, folders, files in os.walk(training):
        yield from (path for name in (*folders, *files) if (path := Path(above, name)).is_symlink())
    yield from (path for path in training.resolve().parent.iterdir() if path.is_symlink())


def _inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _base(checkpoint: Path) -> Path | None:
    """Return the folder of an adapter's base model; None for a full checkpoint."""
    if not checkpoint.is_dir():
        return None
    named = (read_json_of(checkpoint, "adapter_config.json") or {}).get("base_model_name_or_path")
    return None if named is None else Path(named)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
