"""`vlmrm distil`: what slow scorers say of answers, as rows to train a fast one on.

Each answer of a scorer goes into a file beside the output as it comes, and is not asked for again: a run that was
stopped goes on, and a longer data set costs what is new in it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.utils.data import Subset

from vlmrm.conversation import Comparison, Judgement
from vlmrm.data.arguments import DataArguments
from vlmrm.data.canonical import check_output, write_comparisons
from vlmrm.data.comparisons import index_rows, iterate_comparisons, open_groups
from vlmrm.data.media import messages_key
from vlmrm.data.rows import read_answers
from vlmrm.engine import ScoredRow
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.scorers import scorer_entries
from vlmrm.evaluation.sweep import launched
from vlmrm.files import make_folder, plain_write_errors
from vlmrm.formats import LAYOUTS_TO_SCORE
from vlmrm.logs import counted, duration, progress
from vlmrm.rendering import MediaLimits

logger = logging.getLogger("vlmrm")
DISAGREEMENT = "disagreement"  # the column
TOKENS = ("prompt_tokens", "completion_tokens")  # of judges, in the origin of their scores


class Distilled(NamedTuple):
    """The number of rows written, of rows left out by the reason, and how often scorers disagree."""

    rows: int
    failures: Counter[str]
    disagreement: float | None


class Answers:
    """What scorers answered, a line each in a file that only grows, by scorer and by what it was shown."""

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[tuple[str, str], Any] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError):  # the last one of a run that was killed
                answer = json.loads(line)
                self._known[answer["scorer"], answer["key"]] = answer

    def get(self, scorer: str, key: str) -> Any:
        return self._known.get((scorer, key))

    def add(self, scorer: str, key: str, row: ScoredRow) -> None:
        answer = {"scorer": scorer, "key": key, "scores": row.scores, "outputs": row.outputs}
        answer["verdicts"] = [[*pair, *credits] for pair, credits in row.verdicts.items()]
        self._known[scorer, key] = answer
        with plain_write_errors(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(answer)}")  # on a line of its own, even after one that was cut off


def distil(
    scorers: Sequence[str],
    data: Sequence[str],
    output: Path,
    *,
    reading: DataArguments,
    split: str = "train",
    limit: int | None = None,
    batch_rows: int = 8,
) -> Distilled:
    """Have scorers judge the answers of each row, and write the rows with these judgements in the canonical form.

    The answers so far are in `OUTPUT.answers`, from which a later run goes on. Equal rows are written once. Raises
    ConfigError for an output that was not written here, DataError when no row has an answer of every scorer.
    """
    check_output(output)
    answers = Answers(output.with_name(f"{output.name}.answers"))
    if output.exists() and not answers.path.exists():
        raise ConfigError(f"{output} exists, and {answers.path} does not: name a new file.")
    make_folder(output.parent)
    rows: Any = index_rows(open_groups(data, split, reading, read_answers, LAYOUTS_TO_SCORE), read_answers)
    rows = rows.select(range(min(len(rows), limit or len(rows))))
    failures: Counter[str] = Counter()
    first: dict[str, int] = {}  # the row of each key
    for number, row in enumerate(iterate_comparisons(rows)):
        if isinstance(row, RowError):
            failures[row.reason] += 1
        else:
            first.setdefault(_key(row), number)
    args = EvaluationArguments(scorer=[*scorers], interventions=["none"], eval_batch_size=batch_rows)
    with TemporaryDirectory(prefix="vlmrm-images-") as images:
        run = SweepRun(args, reading, launched(), Path(images))
        asked = {it.path: _ask(it, run, rows, first, answers, failures) for it in scorer_entries(scorers)}
    found = {key: {name: answers.get(scorer, key) for name, scorer in asked.items()} for key in first}
    complete = {key: of for key, of in found.items() if all(of.values())}
    if not complete:
        reason = next(iter(failures), "there are none")
        raise DataError(f"none of {counted(len(rows), 'row')} has an answer of every scorer, the first as {reason}.")
    judgements = {key: _judgements(of) for key, of in complete.items()}
    doubts = {key: _disagreement(of) for key, of in judgements.items()}

    def judged() -> Iterator[Comparison]:
        for key, of in judgements.items():
            row, doubt = rows[first[key]]["comparison"], doubts[key]
            yield replace(row, judgements=of, columns={} if doubt is None else {DISAGREEMENT: doubt})

    known = [doubt for doubt in doubts.values() if doubt is not None]
    count = write_comparisons(judged, output)
    return Distilled(count, failures, sum(known) / len(known) if known else None)


def _key(row: Comparison) -> str:
    return " ".join(messages_key(conversation.messages) for conversation in row.conversations())


def _ask(
    entry: Entry, run: SweepRun, rows: Any, first: Mapping[str, int], answers: Answers, failures: Counter[str]
) -> str:
    """Ask a scorer for what it has not answered yet, and return its name in `answers`."""
    scorer = entry.open(run)
    try:
        # Another version of it, or other sizes of images, are another scorer.
        limits = MediaLimits.of(run.data_args)
        name = f"{entry.path} {scorer.origin()['weights']} {limits}"
        missing = {number: key for key, number in first.items() if answers.get(name, key) is None}
        logger.info("%s: %s to judge, %d known", entry.path, counted(len(missing), "row"), len(first) - len(missing))
        indexed: Any = Subset(rows, [*missing])
        started = time.monotonic()
        judged = scorer.rows(indexed, batch_size=run.args.eval_batch_size)
        for done, row in enumerate(progress(judged, entry.path, len(missing)), 1):
            if row.error is None:
                answers.add(name, missing[row.index], row)
            else:
                failures[row.error.reason] += 1
            if done == run.args.eval_batch_size < len(missing):
                each = (time.monotonic() - started) / done
                spent = scorer.origin().get("scorer", {})
                tokens = "".join(f", {int(spent[it]) // done:,} {it} each" for it in TOKENS if it in spent)
                left = duration(each * (len(missing) - done))
                logger.info("%s: %d took %s; %s left%s", entry.path, done, duration(each * done), left, tokens)
        return name
    finally:
        scorer.close()


def _judgements(answers: Mapping[str, Any]) -> tuple[Judgement, ...]:
    """Return the judgements of each scorer, which together weigh 1: of a judge of pairs, one in each order."""
    judgements = []
    for scorer, answer in answers.items():
        shared = partial(Judgement, rater=scorer)
        everyone, weight = range(len(answer["scores"])), 1 / len(answers)
        for i, j, first, second in answer["verdicts"]:
            for credit in (first, second):
                judgements.append(shared((i, j), (credit, 1 - credit), weight=weight / 2))
        if not answer["verdicts"]:
            named = answer["outputs"] or {None: answer["scores"]}
            for name, values in named.items():
                judgements.append(shared(everyone, values, "rating", weight=weight, dimension=name))
    return tuple(judgements)


def _disagreement(judgements: Sequence[Judgement]) -> float | None:
    """Return the share of verdicts on two answers that are not the most common one; None where nobody gave two."""
    verdicts: dict[tuple[Any, ...], list[int]] = {}
    for it in judgements:
        for better, worse, tie in it.pairs():
            pair = (min(better, worse), max(better, worse))
            verdicts.setdefault((it.dimension, *pair), []).append(-1 if tie else pair.index(better))
    several = [given for given in verdicts.values() if len(given) > 1]
    most = sum(max(Counter(given).values()) for given in several)
    return round(1 - most / sum(map(len, several)), 4) if several else None
