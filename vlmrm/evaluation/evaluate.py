"""Evaluate one entry of the table, a checkpoint or another scorer: its row, and its scored pairs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from accelerate.utils import gather_object

from vlmrm.conversation import Comparison
from vlmrm.data.comparisons import iterate_comparisons
from vlmrm.engine import Engine, ScoredRow
from vlmrm.errors import CheckpointError, ConfigError, DataError, RewardError, RowError, ScoreError, VlmrmError
from vlmrm.evaluation.entry import Entry, OpenEntry, SweepRun
from vlmrm.evaluation.results import table_figures
from vlmrm.evaluation.schema import Provenance, Row, Statistics
from vlmrm.evaluation.suite import OpenSet
from vlmrm.logs import progress
from vlmrm.measures.analysis import Finding, analyse, audit
from vlmrm.measures.donors import BLOCKS, Traits, cluster_of, donors_of, is_sampled, traits_of
from vlmrm.measures.intervals import numbered
from vlmrm.measures.outputs import judged_outputs, output_changes, output_figures, references
from vlmrm.measures.pairs import PairArrays, PairTable, ScoredComparisons, pair_table, scored_frame
from vlmrm.modeling import provenance
from vlmrm.outputs import ONE, Outputs

logger = logging.getLogger("vlmrm")
FIRST_SAMPLE = 300  # comparisons under interventions; as many again until every question is decided


class _Rows(Sequence[Comparison]):
    """The comparisons of some rows of a data set, read anew each time: images in them may be more than memory."""

    def __init__(self, dataset: Any, indices: list[int]):
        self.indices = indices
        self._dataset = dataset.select(indices)
        self._key = (id(dataset), *indices)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[number]["comparison"]

    def __iter__(self) -> Iterator[Any]:
        return iterate_comparisons(self._dataset)

    def __eq__(self, rows: object) -> bool:
        return isinstance(rows, _Rows) and rows._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass
class _Share:
    """A rank's rows of a data set: every `ranks`-th block of `block` rows, so that neighbours stay together.

    A row has its `index` in the data set. About `sample` rows are `sampled` for interventions, and have `donors`. With
    `beyond` there are only the rows of the sample that are in no such smaller one.
    """

    dataset: Any
    block: int
    rank: int
    ranks: int
    sample: int | None
    cluster_by: str | None = None
    beyond: int | None = None

    def __post_init__(self):
        starts = range(self.rank * self.block, len(self.dataset), self.ranks * self.block)
        self._indices = [i for start in starts for i in range(start, min(start + self.block, len(self.dataset)))]
        self._traits: dict[int, Traits | None] = {}
        if self.beyond is not None:
            rows = ((i, self.dataset[i]["comparison"]) for i in self._indices)
            self._indices = [
                i for i, row in rows if self._drawn(row, self.sample) and not self._drawn(row, self.beyond)
            ]

    def _drawn(self, row: Any, sample: int | None) -> bool:
        share = (sample or 0) / len(self.dataset)
        return isinstance(row, Comparison) and is_sampled(row, share, self.cluster_by)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        indices = [self._indices[number] for number in numbers]
        comparisons = self.dataset[indices]["comparison"]
        rows = [{"index": index, "comparison": c} for index, c in zip(indices, comparisons, strict=True)]
        if self.sample is not None:
            for row in rows:
                row["sampled"] = self._drawn(row["comparison"], self.sample)
            first = min(indices) // BLOCKS[-1] * BLOCKS[-1]  # rows before it are in earlier blocks
            self._traits = {index: traits for index, traits in self._traits.items() if index >= first}
            if any(row["sampled"] for row in rows):
                self._traits |= {row["index"]: traits_of(row["comparison"]) for row in rows}
            for row in rows:
                if row["sampled"]:
                    row["donors"] = donors_of(row["comparison"], row["index"], self.dataset, self._traits)
        return rows


@contextmanager
def opened(entry: Entry, run: SweepRun) -> Generator[OpenEntry | str]:
    """Open an entry on every rank and close it in the end; yield it, or the reason why a rank cannot open it."""
    scorer, error = None, None
    try:
        scorer = entry.open(run)
    except (CheckpointError, ConfigError, RewardError, torch.OutOfMemoryError) as failure:
        error = _line(failure)
    try:
        # A rank that cannot load must not leave the others waiting for its scores.
        errors = [message for message in gather_object([error]) if message is not None]
        yield errors[0] if errors or scorer is None else scorer
    finally:
        if scorer is not None:
            scorer.close()


def evaluate_entry(
    entry: Entry, scorer: OpenEntry | str, data: OpenSet, run: SweepRun
) -> tuple[Row, pd.DataFrame | None]:
    """Return an opened entry's row of the table and its scored pairs; of one that fails the row has the error."""
    if isinstance(scorer, str):
        return entry.row(scorer), None
    row, frame = dict[str, Any](entry.row()), None
    try:
        figures, frame = measure(entry, scorer, data, run)
        row |= figures
    except RowError:
        raise  # the data are at fault, for every entry alike
    except (CheckpointError, ConfigError, DataError, RewardError) as failure:
        row["error"] = str(failure)
    except torch.OutOfMemoryError as failure:
        row["error"] = f"{_line(failure)}: lower eval_batch_size, max_tokens_per_batch or max_pixels."
    return cast(Row, row), frame


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def measure(
    entry: Entry, scorer: OpenEntry, data: OpenSet, run: SweepRun
) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """Return the figures of one open entry on one data set, and the scored pairs, where there are any."""
    args, processes, definition = run.args, run.processes, data.definition
    outputs = definition.data_args.named_outputs
    score = partial(
        evaluate,
        scorer,
        data.dataset,
        batch_size=args.eval_batch_size,
        num_workers=run.workers,
        rank=processes.process_index,
        ranks=processes.num_processes,
        cluster_by=definition.cluster_by,
    )
    sample = min(FIRST_SAMPLE, args.intervention_sample)
    result = score(description=entry.checkpoint, sample=sample)
    if not result.comparisons:
        raise DataError(f"none of the {len(data.dataset)} rows could be scored: the first was {result.dropped[0]}.")
    if result.comparisons not in data.tables:
        table = pair_table(result.comparisons, definition.group_by, definition.cluster_by, outputs)
        data.tables[result.comparisons] = table
        say_clusters(table.frame)
    table = data.tables[result.comparisons]
    figures: dict[str, Any] = {"dropped_rows": len(result.dropped)}
    judged, clusters = {}, np.empty(0)
    if outputs != ONE:
        check_outputs(entry, outputs, result.outputs[0])
        judged = judged_outputs(outputs, result.comparisons, result.outputs)
        clusters = numbered([cluster_of(comparison, definition.cluster_by) for comparison in result.comparisons])
        figures["outputs"] = output_figures(outputs, judged, clusters)
    statistics, frame = Statistics(overall={}, category={}, by={}, audit=[]), None
    if len(table.frame):
        framed = partial(_framed, result, entry, table)
        budget = min(args.intervention_sample, len(data.dataset))
        frame, findings = _until_decided(result, framed, score, sample, budget)
        if data.leakage is not None:
            frame["by/leaked"] = np.where(frame["comparison_id"].isin(data.leakage.leaked), "yes", "no")
        statistics = cast(Statistics, analyse(frame, findings))
        figures = {**table_figures(statistics["overall"]), **figures}
    if judged:
        figures["altered_outputs"] = output_changes(outputs, judged, result.altered_outputs, clusters)
    margins = np.empty(0) if frame is None else PairArrays(frame).decided
    data.results.references[entry.path] = references(outputs, judged, result.scores, margins)
    if result.dropped:
        counts = f"{len(result.dropped)} of {len(data.dataset)}"
        logger.warning("%s: %s rows are left out, the first because: %s", entry.path, counts, result.dropped[0])
    if limits := {**scorer.limits, **limits_met(result, scorer.interventions)}:
        figures["limits"] = limits
        for reason in dict.fromkeys(limits.values()):
            names = ", ".join(name for name, its_reason in limits.items() if its_reason == reason)
            if (names, reason) not in run.warnings:  # said once; the rows of other entries have it too
                run.warnings.add((names, reason))
                logger.warning("%s: no %s: %s", entry.path, names, reason)
    if definition.benchmark is not None and frame is not None:
        estimates = definition.benchmark.estimate(frame)
        figures["benchmark"] = {name: estimate._asdict() for name, estimate in estimates.items()}
    made = provenance({})
    came_from: Provenance = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "git_commit": made["git_commit"],
        "versions": made["versions"],
        "data": data.results.settings["data"],
        "processes": processes.num_processes,
        **scorer.origin(),
    }
    return {**figures, "statistics": statistics, "provenance": came_from}, frame


def _framed(result: ScoredComparisons, entry: Entry, table: PairTable) -> pd.DataFrame:
    frame = scored_frame(result, model=entry.model, checkpoint=entry.checkpoint, step=entry.step, table=table)
    add_verdicts(frame, result)
    return frame


def _until_decided(
    result: ScoredComparisons,
    framed: Callable[[], pd.DataFrame],
    score: Callable[..., ScoredComparisons],
    sample: int,
    budget: int,
) -> tuple[pd.DataFrame, list[Finding]]:
    """Return the pairs and their audit, once all questions about all rows are decided or the sample is the budget."""
    while True:
        frame = framed()
        findings = audit(frame)
        if sample >= budget or all(it.state != "undecided" or it.reason + it.category for it in findings):
            return frame, findings
        beyond, sample = sample, min(2 * sample, budget)
        more = score(description=f"{sample} rows under interventions", sample=sample, beyond=beyond)
        add_interventions(result, more)


def check_outputs(entry: Entry, outputs: Outputs, answered: Collection[str]) -> None:
    """Refuse an entry that does not answer all of the outputs that are measured."""
    if missing := [name for name in outputs.names if name not in answered]:
        has = ", ".join(answered) or "one number"
        raise CheckpointError(f"{entry.path} has no output {missing[0]}: it answers {has}.")


def evaluate(
    scorer: OpenEntry | Engine,
    dataset,
    *,
    batch_size: int,
    num_workers: int = 0,
    rank: int = 0,
    ranks: int = 1,
    description: str = "scoring",
    sample: int | None = None,
    cluster_by: str | None = None,
    beyond: int | None = None,
) -> ScoredComparisons:
    """Score every row of `load_comparisons` once, and about `sample` rows, by default all, under each intervention.

    With `beyond`, only the rows that the sample has more than one of so many.

    Of several ranks each takes a share, and all get the whole result in the data set's order, or the first error.
    """
    drawn = (len(dataset) if sample is None else sample) if scorer.interventions else None
    share = _Share(dataset, batch_size, rank, ranks, drawn, cluster_by, beyond)
    rows = scorer.rows(share, batch_size=batch_size, num_workers=num_workers)
    scored: list[ScoredRow] = []
    failed: Exception | None = None
    try:
        for row in progress(rows, description, len(share), show=rank == 0):
            if isinstance(row.error, ScoreError):
                raise CheckpointError(f"{row.error}.")
            scored.append(row)
    except (torch.OutOfMemoryError, VlmrmError) as error:
        failed = error
    # A rank that cannot go on must not leave the others waiting for its scores.
    for failure in gather_object([failed]):
        if failure is not None:
            raise failure
    gathered = sorted(gather_object(scored), key=lambda row: row.index)
    kept = [row for row in gathered if row.error is None]
    return ScoredComparisons(
        _Rows(dataset, [row.index for row in kept]),
        scores=[row.scores for row in kept],
        altered=[row.altered for row in kept],
        dropped=[row.error for row in gathered if row.error is not None],
        failed=[row.failed for row in kept],
        verdicts=[row.verdicts for row in kept],
        outputs=[row.outputs for row in kept],
        altered_outputs=[row.altered_outputs for row in kept],
    )


def add_interventions(result: ScoredComparisons, more: ScoredComparisons) -> None:
    """Add what further rows of the same data set have under interventions."""
    assert isinstance(result.comparisons, _Rows) and isinstance(more.comparisons, _Rows)
    places = {index: place for place, index in enumerate(result.comparisons.indices)}
    for number, index in enumerate(more.comparisons.indices):
        if (place := places.get(index)) is not None:  # else a judge had no verdict the first time
            for name in ("altered", "failed", "altered_outputs"):
                getattr(result, name)[place] = getattr(more, name)[number]


def limits_met(result: ScoredComparisons, interventions: Iterable[str]) -> dict[str, str]:
    """Return, by intervention, of how many rows it has no score, and why; also where it applies to none."""
    reasons: dict[str, list[str]] = {}
    for failed in result.failed:
        for name, reason in failed.items():
            reasons.setdefault(name, []).append(reason)
    scored = Counter(name for altered in result.altered for name in altered)
    untouched = [name for name in interventions if not scored[name] and name not in reasons]
    return dict.fromkeys(untouched, "nothing in these rows, or in the sample of them, can be changed so") | {
        name: of_rows[0] if not scored[name] else f"{len(of_rows)} of {len(of_rows) + scored[name]} rows: {of_rows[0]}"
        for name, of_rows in reasons.items()
    }


def say_clusters(frame: pd.DataFrame) -> None:
    """Log how many questions share an image or a value of `cluster_by`, where any do."""
    clusters, questions = frame["cluster"].nunique(), len(frame[["cluster", "prompt_text"]].drop_duplicates())
    if clusters < questions:
        logger.info("%d questions are %d clusters, the units of intervals (cluster_by)", questions, clusters)


def add_verdicts(frame: pd.DataFrame, result: ScoredComparisons) -> None:
    """Add what a judge of pairs gave the chosen answer where it was shown first and second: 1, a half for a tie, 0."""
    if not any(result.verdicts):
        return
    counts = [len(comparison.agreed()) for comparison in result.comparisons]
    owners = np.repeat(np.arange(len(counts)), counts)
    credits = []
    for owner, *pair in zip(owners, frame["chosen_branch"], frame["rejected_branch"], strict=True):
        first, second = result.verdicts[owner].get((min(pair), max(pair)), (np.nan, np.nan))
        credits.append((first, second) if pair[0] < pair[1] else (1 - second, 1 - first))
    frame[["credit_first", "credit_second"]] = np.array(credits, dtype=np.float64)
