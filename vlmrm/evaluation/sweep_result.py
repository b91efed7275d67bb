"""The end of a sweep: choose the best checkpoint, save the scale of its scores, compare it with `fail_under`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmrm.errors import BelowThreshold, CheckpointError, ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.choosing import Criterion
from vlmrm.evaluation.entry import Entry
from vlmrm.evaluation.results import Results
from vlmrm.evaluation.schema import Best, Row
from vlmrm.evaluation.suite_table import SuiteTable
from vlmrm.modeling.manifest import save_normalization

logger = logging.getLogger("vlmrm")


@dataclass(frozen=True)
class SweepResult:
    """The table's rows, in the order of evaluation, and the one that `metric_for_best` chose.

        result.best["preference_accuracy"], result.rows, result.csv

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


def conclude(
    results: Results | SuiteTable,
    criterion: Criterion,
    looked_at: Sequence[Entry],
    args: EvaluationArguments,
    *,
    main: bool,
) -> Best | None:
    """Choose and return the best of all rows; the `main` process alone writes."""
    paths = {entry.path for entry in looked_at}
    if not any(row["path"] in paths for row in results.rows):
        raise ConfigError(f"watch saw no checkpoint in {', '.join(args.model_dirs)}: check the path, or wait longer.")
    # Of the mean of several sets the luck of the choice is not known.
    frame = results.frame if isinstance(results, Results) else None
    best = results.best = criterion.best(results.rows, frame)
    if main:
        results.write_tables()
    try:
        criterion.require(results.rows)
    except ConfigError as error:
        raise ConfigError(f"{results.csv} has every checkpoint, but none is best: {error}") from None
    if main and best is not None and args.save_normalization and Path(best["path"]).is_dir():
        save_scale(best, results)
    check_threshold(best, args, results.csv)
    return best


def check_threshold(best: Best | None, args: EvaluationArguments, csv: Path) -> None:
    """Check that there is a best checkpoint, and that it reaches `fail_under`."""
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
