"""A survey of the rows before a training: how many can be used, why others cannot, and how long they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import numpy as np
import torch

from vlmrm.batching import ComparisonCollator
from vlmrm.batching.collator import OverlongError
from vlmrm.conversation import Comparison, media_of
from vlmrm.data.check import Repeats, describe_margins, margins_of
from vlmrm.data.comparisons import are_unrelated, iterate_readable, split_key, subject
from vlmrm.data.media import media_key
from vlmrm.errors import ConfigError, MediaError, RowError, TrainingError
from vlmrm.logs import counted
from vlmrm.measures.audit import PROMPTS
from vlmrm.training.losses import weights

SAMPLE = 64  # rows that a training reads before its first step
LOOKED = 10_000  # rows whose margins are read, and that are compared with each other
COMPARED = 2000  # rows of each side whose prompts are compared

HasUse = Callable[[dict[str, torch.Tensor]], bool]  # of the pairs of a part


@dataclass
class Survey:
    """A sample of the rows of a data set; `rows` are all of them, None of a stream.

    Of each row that can be used: `tokens` of all its conversations, images included, and of the longest one.
    """

    rows: int | None
    sampled: int = 0
    useful: int = 0  # can be used, and have a pair that trains (or that an evaluation counts)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # in the data set, of the rows with `tokens`
    images: int = 0
    videos: int = 0
    pairs: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # why rows are left out
    last_reason: str = ""

    @property
    def dropped(self) -> int:
        return self.reasons.total()

    @property
    def dropped_share(self) -> float:
        return self.dropped / max(self.sampled, 1)


def can_train(pairs: dict[str, torch.Tensor]) -> bool:
    """Return whether some pair has a weight above 0."""
    return bool(weights(pairs).sum() > 0)


def can_evaluate(pairs: dict[str, torch.Tensor]) -> bool:
    """Return whether some pair has a preference."""
    return bool((~pairs["tie"]).any())


def survey(dataset: Any, collator: ComparisonCollator, has_use: HasUse, seed: int, limit: int = SAMPLE) -> Survey:
    """Read a random sample of at most `limit` rows as the training reads them; of a stream its first rows."""
    collator = dataclasses.replace(collator, irrelevant=None)  # it would remember these rows as donors
    result = Survey(len(dataset) if isinstance(dataset, Sized) else None)
    for position, row in _sample(dataset, seed, limit):
        batch = collator([row])
        result.sampled += 1
        if batch["dropped"]:
            [(_, error)] = batch["dropped"]
            result.reasons[_kind(error)] += 1
            result.last_reason = str(error)
            continue
        result.useful += any(has_use(part["pairs"]) for part in batch["parts"])
        result.tokens.append(batch["counts"]["tokens"])
        result.positions.append(position)
        result.pairs += batch["counts"]["pairs"]
        kinds = Counter(
            {
                media_key(medium.reference): medium.kind
                for conversation in row["comparison"].conversations()
                for medium in media_of(conversation.messages)
            }.values()
        )
        result.images += kinds["image"]
        result.videos += kinds["video"]
    return result


def _sample(dataset: Any, seed: int, limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
    if not isinstance(dataset, Sized):
        yield from enumerate(islice(iter(dataset), limit))
        return
    count = len(dataset)
    positions = range(count) if count <= limit else np.sort(np.random.default_rng(seed).choice(count, limit, False))
    for position in positions:
        yield int(position), dataset[int(position)]


def _kind(error: RowError) -> str:
    if isinstance(error, OverlongError):
        return "over max_seq_length"
    return "with an image or video that cannot be read" if isinstance(error, MediaError) else "wrong"


def check_survey(result: Survey, key: str, max_dropped_share: float, requirement: str) -> None:
    """Refuse data of which too much, or all, would be left out."""
    rows = f"the {result.sampled} rows" if result.rows == result.sampled else f"{result.sampled} sampled rows"
    if not result.useful:
        why = f"can be used ({result.last_reason})" if result.last_reason else requirement
        raise TrainingError(f"none of {rows} of {key} {why}: vlmrm check-data says what they hold.")
    if result.dropped_share > max_dropped_share:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.reasons.most_common())
        raise TrainingError(
            f"{result.dropped} of {rows} of {key} would be left out ({reasons}; the last: {result.last_reason}): mend "
            f"that, or allow it with max_dropped_share: {min(1.0, result.dropped_share + 0.05):.2f}."
        )


def look_through(dataset: Any, seed: int, irrelevant: bool) -> Iterator[str]:
    """Read at most `LOOKED` rows, of a stream `SAMPLE`, and remark on margins and contradictions.

    Args:
        irrelevant: refuse rows of which none has a prompt that is irrelevant to another's.
    """
    repeats, subjects, unrelated = Repeats(), set(), False
    margins: list[float] = []
    count = contradictions = 0
    for row in _readable(dataset, seed):
        count += 1
        margins += margins_of(row)
        repeat = repeats.find(row)
        contradictions += repeat is not None and repeat.contradicts
        if irrelevant and not unrelated and row.prompt and (new := subject(row.prompt)) not in subjects:
            unrelated = any(are_unrelated(new, earlier) for earlier in subjects)
            subjects.add(new)
    if irrelevant and not unrelated:
        raise ConfigError(
            f"use_irrelevant_queries does nothing: no two of {count:,} rows have prompts of different images or, "
            "without images, of different texts; remove it, or mix in other data."
        )
    if margins:
        yield f"{describe_margins(margins)}: of {count:,} rows read"
    if contradictions:
        yield (
            f"{contradictions:,} of {count:,} rows read have the prompt and answers of an earlier one with another "
            "order: vlmrm check-data names them"
        )


def _readable(dataset: Any, seed: int) -> Iterator[Comparison]:
    if isinstance(dataset, Sized):
        if (count := len(dataset)) > LOOKED:
            dataset = cast(Any, dataset).select(np.sort(np.random.default_rng(seed).choice(count, LOOKED, False)))
        yield from iterate_readable(dataset)
        return
    rows = (row["comparison"] for row in islice(dataset, SAMPLE))
    yield from (row for row in rows if isinstance(row, Comparison))


def shared_prompts(train: Any, held_out: Any, seed: int, limit: int = COMPARED) -> tuple[int, int, int]:
    """Compare the prompts of at most `limit` rows of each side, images included.

    Returns:
        The numbers of evaluation rows whose prompt is trained on, and of evaluation and training rows compared.
    """
    trained, evaluated = (
        [tuple(split_key(row, "")) for row in _comparisons(part, seed, limit) if row.prompt]
        for part in (train, held_out)
    )
    prompts = set(trained)
    return sum(key in prompts for key in evaluated), len(evaluated), len(trained)


def count_prompts(dataset: Any, seed: int) -> int:
    """Return the number of different prompts of at most `COMPARED` rows, images included."""
    return len({tuple(split_key(row, "")) for row in _comparisons(dataset, seed, COMPARED)})


def few_prompts(rows: int, prompts: int) -> str:
    """Return a remark on an evaluation of too few prompts to tell anything; nothing where they are enough."""
    if prompts >= PROMPTS:
        return ""
    return (
        f"the evaluation has {counted(rows, 'row')} of {counted(prompts, 'prompt')}, too few to tell a better "
        f"checkpoint from a lucky one: raise eval_fraction or give eval_dataset_path, for {PROMPTS} prompts or more"
    )


def _comparisons(dataset: Any, seed: int, limit: int) -> Iterator[Comparison]:
    for _, row in _sample(dataset, seed, limit):
        if isinstance(row["comparison"], Comparison):
            yield row["comparison"]
