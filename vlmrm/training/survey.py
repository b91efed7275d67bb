"""A survey of the rows before a training, each read once: how many can be used, why others cannot, and how long."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vlmrm.batching import ComparisonCollator
from vlmrm.batching.collator import OverlongError
from vlmrm.conversation import Comparison, media_of
from vlmrm.data.check import describe_margins, margins_of
from vlmrm.data.columns import CRITIQUE
from vlmrm.data.comparisons import Subject, are_unrelated, iterate_comparisons, split_key, subject
from vlmrm.data.duplicates import Repeats
from vlmrm.data.media import media_key
from vlmrm.errors import ConfigError, MediaError, RowError, TrainingError
from vlmrm.logs import counted
from vlmrm.measures.analysis import CLUSTERS
from vlmrm.outputs import ONE, Outputs
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator

logger = logging.getLogger("vlmrm")

SAMPLE = 64  # rows that a training renders before its first step
LOOKED = 10_000  # rows whose prompts and margins are read, and that are compared with each other


@dataclass
class Survey:
    """What the rows of a data set hold: all that were looked at, and a sample that was rendered."""

    rows: int  # all of them
    trains: bool  # else it evaluates, and rows are not compared with each other
    sampled: int = 0
    useful: int = 0  # can be used, and have a pair that trains (or that an evaluation counts)
    tokens: list[int] = field(default_factory=list)  # of all conversations of a row that can be used, images included
    positions: list[int] = field(default_factory=list)  # in the data set, of the rows with `tokens`
    images: int = 0
    videos: int = 0
    pairs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why rows are left out
    last_reason: str = ""
    prompts: list[str] = field(default_factory=list)  # the keys of those of all rows looked at
    margins: list[float] = field(default_factory=list)
    contradictions: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    outputs: Outputs = ONE
    judged: set[str] = field(default_factory=set)  # the names of outputs that a row judges
    compared: bool = False  # whether a row has answers that the total compares
    critiques: bool = False  # whether rows' critiques are taught
    subjects: set[Subject] = field(default_factory=set)  # of prompts, until two are `unrelated`
    unrelated: bool = False

    @property
    def dropped(self) -> int:
        return self.reasons.total()

    @property
    def dropped_share(self) -> float:
        return self.dropped / max(self.sampled, 1)

    @property
    def looked(self) -> int:
        return len(self.prompts)

    def look(self, row: Comparison) -> None:
        """Compare a row with the earlier ones."""
        self.prompts.append("\0".join(split_key(row, "")))
        self.compared = self.compared or self.outputs.counted(row) is not None
        if not self.trains:
            return
        self.margins += margins_of(row)
        self.judged |= {self.outputs.names[self.outputs.index(judgement)] for judgement in row.judgements}
        self.judged |= {CRITIQUE} if any(row.critiques) else set()
        repeat = self.repeats.find(row)
        self.contradictions += repeat is not None and repeat.contradicts
        if not self.unrelated and row.prompt and (new := subject(row.prompt)) not in self.subjects:
            self.unrelated = any(are_unrelated(new, earlier) for earlier in self.subjects)
            self.subjects.add(new)

    def render(self, position: int, row: dict[str, Any], collator: ComparisonCollator) -> None:
        """Count a row of the sample, as the training reads it."""
        batch = collator([row])
        self.sampled += 1
        if batch["dropped"]:
            [(_, error)] = batch["dropped"]
            self.reasons[_kind(error)] += 1
            self.last_reason = str(error)
            return
        pairs = [part["pairs"] for part in batch["parts"]]
        self.useful += any(bool(it["weight"].sum() > 0 if self.trains else (~it["tie"]).any()) for it in pairs)
        self.tokens.append(batch["counts"]["tokens"])
        self.positions.append(position)
        self.pairs += batch["counts"]["pairs"]
        media = [medium for talk in row["comparison"].conversations() for medium in media_of(talk.messages)]
        kinds = Counter({media_key(medium.reference): medium.kind for medium in media}.values())
        self.images += kinds["image"]
        self.videos += kinds["video"]

    def remarks(self, irrelevant: bool) -> Iterator[str]:
        """Yield what is odd; where answers train under `irrelevant` prompts, refuse rows of which none has any."""
        wanted = {name: f"judges the output {name}" for name in self.outputs.names}
        wanted |= {CRITIQUE: "has a critique"} if self.critiques else {}
        if idle := [said for name, said in wanted.items() if name not in self.judged]:
            reason = f"no row of {self.looked:,} {idle[0]}: map its column to this name, or remove it"
            if self.rows <= LOOKED:
                raise ConfigError(f"{reason}.")
            yield reason
        if irrelevant and not self.unrelated:
            reason = (
                f"use_irrelevant_queries does nothing: no two of {self.looked:,} rows have prompts of different "
                "images or, without images, of different texts; remove it, or mix in other data"
            )
            if self.rows <= LOOKED:
                raise ConfigError(f"{reason}.")
            yield f"{reason}, if that is so of the others too"
        if self.margins:
            yield f"{describe_margins(self.margins)}: of {self.looked:,} rows read"
        if self.contradictions:
            yield (
                f"{self.contradictions:,} of {self.looked:,} rows read have the prompt and answers of an earlier one "
                "with another order: vlmrm check-data names them"
            )


def survey(
    dataset: Any, collator: ComparisonCollator, seed: int, limit: int = SAMPLE, *, trains: bool = True
) -> Survey:
    """Look at `LOOKED` rows, and render a random sample of `limit`."""
    collator = dataclasses.replace(collator, irrelevant=None)
    result = Survey(len(dataset), trains, outputs=collator.outputs, critiques=collator.critique_weight > 0)
    for position, row, sampled in _rows(dataset, seed, limit):
        if isinstance(row["comparison"], Comparison):
            result.look(row["comparison"])
        if sampled:
            result.render(position, row, collator)
    return result


def _rows(dataset: Any, seed: int, limit: int) -> Iterator[tuple[int, dict[str, Any], bool]]:
    """Yield the position of each row to look at, the row, and whether it is in the sample."""
    looked, sampled = (_drawn(len(dataset), number, seed) for number in (LOOKED, limit))
    positions, of_sample = np.union1d(looked, sampled), {*sampled.tolist()}
    rows = iterate_comparisons(dataset.select(positions))
    for position, comparison in zip(positions.tolist(), rows, strict=True):
        yield position, {"index": position, "comparison": comparison}, position in of_sample


def _drawn(count: int, number: int, seed: int) -> np.ndarray:
    return np.arange(count) if count <= number else np.random.default_rng(seed).choice(count, number, replace=False)


def _kind(error: RowError) -> str:
    if isinstance(error, OverlongError):
        return "over max_seq_length"
    return "with an image or video that cannot be read" if isinstance(error, MediaError) else "wrong"


def check_survey(result: Survey, key: str, max_dropped_share: float) -> None:
    """Refuse data of which too much, or all, would be left out."""
    rows = f"the {result.sampled} rows" if result.rows == result.sampled else f"{result.sampled} sampled rows"
    if not result.useful:
        requirement = "weighs anything" if result.trains else "has a preference"
        why = f"can be used ({result.last_reason})" if result.last_reason else requirement
        raise TrainingError(f"none of {rows} of {key} {why}: vlmrm check-data says what they hold.")
    if result.dropped_share > max_dropped_share:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.reasons.most_common())
        raise TrainingError(
            f"{result.dropped} of {rows} of {key} would be left out ({reasons}; the last: {result.last_reason}): mend "
            f"that, or allow it with max_dropped_share: {min(1.0, result.dropped_share + 0.05):.2f}."
        )


def shared_prompts(train: Survey, held_out: Survey) -> int:
    """Return the number of evaluation rows looked at whose prompt, images included, is among those of the training."""
    trained = {*train.prompts}
    return sum(prompt in trained for prompt in held_out.prompts)


def few_prompts(held_out: Survey) -> str:
    """Return a remark on an evaluation of too few prompts to tell anything; nothing where they are enough."""
    if (prompts := len({*held_out.prompts})) >= CLUSTERS:
        return ""
    return (
        f"the evaluation has {counted(held_out.rows, 'row')} of {counted(prompts, 'prompt')}, too few to tell a "
        f"better checkpoint from a lucky one: raise eval_fraction or give eval_dataset_path, for {CLUSTERS} prompts "
        "or more"
    )


def check_data(arguments: RunArguments, processor: Any, train_dataset: Any, eval_dataset: Any) -> Survey:
    """Read a sample of the rows, and refuse data of which none or too little can be used."""
    data_args, args = arguments.data, arguments.training
    collator = build_collator(arguments, processor)
    rows = survey(train_dataset, collator, data_args.split_seed)
    check_survey(rows, "dataset_path", args.max_dropped_share)
    for remark in rows.remarks(args.use_irrelevant_queries):
        logger.warning(remark)
    size = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and rows.rows < size:
        raise ConfigError(
            f"dataloader_drop_last leaves out all {rows.rows} rows, which do not fill a batch of {size}: remove it, "
            "or lower per_device_train_batch_size."
        )
    if eval_dataset is None or args.eval_strategy == "no":
        return rows
    key = "eval_dataset_path" if data_args.eval_dataset_path else f"eval_fraction {data_args.eval_fraction}"
    held_out = survey(eval_dataset, collator, data_args.split_seed, trains=False)
    check_survey(held_out, key, args.max_dropped_share)
    figures, wanted = data_args.named_outputs.figures, (args.metric_for_best_model or "").removeprefix("eval_")
    if args.load_best_model_at_end and figures and wanted not in figures and not held_out.compared:
        raise ConfigError(
            f"metric_for_best_model is {wanted}, of pairs, and no row of {key} has two answers that the total "
            f"compares: choose one of {', '.join(figures)}."
        )
    if remark := few_prompts(held_out):
        logger.warning(remark)
    if data_args.eval_dataset_path and (both := shared_prompts(rows, held_out)):
        shared = f"{both} of {held_out.looked} evaluation prompts are among {rows.looked} of the training"
        logger.warning("%s: vlmrm leakage says which", shared)
    return rows
