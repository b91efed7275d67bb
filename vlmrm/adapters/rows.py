"""Rows of an RL framework as conversations, scored by a scorer that all adapters of a process share.

verl and OpenRLHF score one sample at a time and wait for many at once: `MicroBatcher` gathers those into batches, so
that a group of rollouts shares its prompt.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.conversation import Conversation
from vlmrm.data.media import media_key, media_round
from vlmrm.errors import ConfigError, MediaError, RewardError, RowError, finite_or_error
from vlmrm.formats.flow_factory import conversation_to_sample, write_sample
from vlmrm.formats.rollouts import read_answer, zip_columns
from vlmrm.rewards import Rewards, RewardSet
from vlmrm.rewards.outcome import with_group_means
from vlmrm.rewards.ranks import gather, rank, world_size
from vlmrm.rewards.samples import MEDIA
from vlmrm.scoring.loading import SCORER_OPTIONS, load_scorer
from vlmrm.scoring.protocol import ConversationLike, Scorer
from vlmrm.scoring.remote import RemoteScorer

logger = logging.getLogger("vlmrm")

WAIT = 0.005  # seconds that the first call of a batch waits for more
MOST = 1024  # items of a batch
ON_FAILURE = ("mean", "raise")
# Columns that frameworks pass and no reward takes: the images of a row are those of its prompt.
NO_COLUMNS = ("messages", "completion_ids", "trainer_state", "log_extra", "environments", "images")

Scores = Sequence[float | RowError]
Groups = Sequence[Hashable]
Column = Sequence[Any]
Rows = tuple[Column, Column, Column | None]  # prompts, answers, images
Elsewhere = Sequence[tuple[Hashable, float]]  # groups and values of other ranks


class SharedScorer:
    """A scorer that is loaded on first use, once a process however many adapters name it.

    It can be pickled: only the path travels. It may be called from several threads; a model in this process scores for
    one at a time.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`, which is pickled with it.
        options: keywords of `vlmrm.load_scorer`.
    """

    def __init__(self, model: str | Path | Scorer, **options: Any):
        self.model = str(model) if isinstance(model, (str, Path)) else model
        self.options = options
        # Checked now: the scorer may be loaded much later, in another process.
        if options and not isinstance(self.model, str):
            raise ConfigError(f"{min(options)} is an option of load_scorer, and this scorer is loaded: leave it out.")
        if unknown := options.keys() - SCORER_OPTIONS:
            raise ConfigError(f"load_scorer takes no {min(unknown)}: docs/scoring.md has its keywords.")

    def score_each(self, conversations: Sequence[ConversationLike]) -> list[float | RowError]:
        """Return the raw logit of each conversation, or the error of one that has none."""
        shared = self._registered()
        with shared.lock:
            shared.scorer = shared.scorer or load_scorer(str(self.model), **self.options)
        # A model in this process scores for one thread at a time; a service takes concurrent requests.
        with media_round(), nullcontext() if isinstance(shared.scorer, RemoteScorer) else shared.lock:
            scores = shared.scorer.score_each(conversations)
        # A user's own scorer may return NaN.
        return [score if isinstance(score, RowError) else finite_or_error(score) for score in scores]

    def score_rows(
        self, prompts: Column, answers: Column, images: Column | None = None, videos: Column | None = None
    ) -> list[float | RowError]:
        """Return the raw logit of each row, or its error; see `vlmrm.formats.rollouts.read_answer`."""
        rows: list[Conversation | RowError] = []
        for row in zip_columns(prompts, answers, images, videos):
            try:
                rows.append(read_answer(*row))
            except RowError as error:
                rows.append(error)
        scores = iter(self.score_each([row for row in rows if isinstance(row, Conversation)]))
        return [row if isinstance(row, RowError) else next(scores) for row in rows]

    @property
    def micro_batcher(self) -> MicroBatcher:
        """Return the batcher of all threads and tasks of this process."""
        shared = self._registered()
        with _registry_lock:
            shared.micro_batcher = shared.micro_batcher or MicroBatcher(self.score_each)
            return shared.micro_batcher

    def _registered(self) -> _Registration:
        key = (self.model, *sorted(self.options.items())) if isinstance(self.model, str) else id(self.model)
        with _registry_lock:
            return _registry.setdefault(key, _Registration(None if isinstance(self.model, str) else self.model))


@dataclass
class _Registration:
    """A scorer with its lock and batcher, shared by the adapters of this process that name it."""

    scorer: Scorer | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    micro_batcher: MicroBatcher | None = None


_registry_lock = threading.Lock()
_registry: dict[Hashable, _Registration] = {}


class SharedSet:
    """A `RewardSet` that is made at the first call; several reward functions take the rewards of a round one by one.

    It can be pickled: only the configuration travels.
    """

    def __init__(self, config: Any):
        self.config = config
        self._set: RewardSet | None = None
        self._answers: Any = None
        self._left: dict[str, np.ndarray] = {}

    def __reduce__(self):
        return type(self), (self.config,)

    def rewards(self, rows: Rows, columns: Mapping[str, Any], groups: Groups) -> Rewards:
        """Return the rewards of a text policy's rows; `columns` is what the framework passes beside them.

        A collective call. A row that is no conversation, as its images do not fit its prompt, fails in every reward.
        """
        self._set = self._set or RewardSet(self.config)
        own, reasons = text_columns(*rows)
        whole = [index for index in range(len(groups)) if index not in reasons]
        extra = {name: column for name, column in columns.items() if name not in NO_COLUMNS and column is not None}
        taken = {name: [it[index] for index in whole] for name, it in extra.items() if len(it) == len(groups)}
        scored = self._set(**{**extra, **taken, **own}, groups=[groups[index] for index in whole])
        return scored.with_failures(whole, groups, reasons, [reward.arguments for reward in self._set.rewards])

    def take(self, name: str, answers: Any, compute: Callable[[], dict[str, np.ndarray]]) -> np.ndarray:
        """Return the reward `name`, [N]. A framework calls all functions of a round with one list of answers."""
        if self._answers is not answers or name not in self._left:  # a name again begins another round
            self._answers, self._left = answers, compute()
        values = self._left.pop(name)
        if not self._left:
            self._answers = None
        return values


class MicroBatcher:
    """A thread that scores submitted items in batches; what is submitted meanwhile is the next batch.

    `score_each` returns a result, such as a raw logit, or an error for each item; the first of a batch waits `wait`
    seconds for more.
    """

    def __init__(self, score_each: Callable[[Sequence[Any]], Sequence[Any]], wait: float = WAIT):
        self.score_each = score_each
        self.wait = wait
        self.calls: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="vlmrm-micro-batcher", daemon=True)
        self.thread.start()

    def submit(self, item: Any) -> Future[Any]:
        """Return the future result; `asyncio.wrap_future` makes it awaitable. It raises where there is none."""
        future: Future[Any] = Future()
        self.calls.put((item, future))
        return future

    def _work(self) -> None:
        while True:
            batch = [self.calls.get()]
            deadline = time.monotonic() + self.wait
            while len(batch) < MOST:
                try:
                    batch.append(self.calls.get(timeout=max(deadline - time.monotonic(), 0.0)))
                except queue.Empty:
                    break
            batch = [(item, future) for item, future in batch if future.set_running_or_notify_cancel()]
            try:
                results = self.score_each([item for item, _ in batch])
            except BaseException as error:  # the callers get it, and the thread goes on
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if isinstance(result, BaseException):
                    future.set_exception(result)
                else:
                    future.set_result(result)


def text_columns(
    prompts: Column, answers: Column, images: Column | None
) -> tuple[dict[str, list[Any]], dict[int, str]]:
    """Return a text policy's rows as columns of samples (`response`: the answer), and by index why others fail."""
    samples: list[dict[str, Any]] = []
    reasons: dict[int, str] = {}
    for index, row in enumerate(zip_columns(prompts, answers, images)):
        try:
            samples.append(write_sample(conversation_to_sample(read_answer(*row))))
        except RowError as error:
            reasons[index] = error.reason
    return {name: [sample.get(name) for sample in samples] for name in ("prompt", "response", *MEDIA)}, reasons


def values_elsewhere(groups: Groups, values: np.ndarray) -> Elsewhere:
    """Return the values of all other ranks that are no NaN, each with its group. A collective call."""
    if world_size() == 1:
        return []
    own = [pair for pair in zip(groups, values.tolist(), strict=True) if not np.isnan(pair[1])]
    return [pair for number, share in enumerate(gather(own)) if number != rank() for pair in share]


def scores_elsewhere(name: str, groups: Groups, scores: Scores, here: int | None) -> Elsewhere:
    """Return the scores of all other ranks, each with its group. A collective call where `here` is None.

    A call on a thread can ask no other rank: all `here` samples of a group must be here where one has failed; 0 where
    their number is not known.
    """
    if here is None:
        return values_elsewhere(groups, numbers(scores))
    for index, score in enumerate(scores):
        if isinstance(score, RowError) and world_size() > 1 and (not here or groups.count(groups[index]) % here):
            raise RewardError(
                f"reward {name}: sample {index}: {score.reason}; another process may have more of its prompt, whose "
                "mean it would get: use the reward that is not asynchronous, or give each process whole groups, and "
                "say num_generations"
            )
    return []


def numbers(scores: Scores) -> np.ndarray:
    """Return the scores, NaN for those that failed: [N]."""
    return np.array([np.nan if isinstance(score, RowError) else score for score in scores], dtype=np.float64)


def without_failures(
    name: str, scores: Scores, groups: Groups, on_failure: str, elsewhere: Elsewhere = ()
) -> list[float | None]:
    """Return the scores with each failed one as the mean of its group; None where the whole group failed.

    The mean neither rewards nor punishes its sample; a zero could do either, since raw logits have no zero. `name` is
    the reward in messages, and `elsewhere` has the groups and scores of other ranks.
    """
    failed = {index: score.reason for index, score in enumerate(scores) if isinstance(score, RowError)}
    filled = with_group_means(numbers(scores), groups, elsewhere)
    settled = [None if np.isnan(value) else value for value in filled.tolist()]
    if failed:
        index, reason = min(failed.items())
        if on_failure == "raise":
            raise RewardError(f"reward {name}: sample {index}: {reason}")
        alone = sum(settled[index] is None for index in failed)
        logger.warning(
            "reward %s: %d of %d samples have none, first sample %d: %s; %d get their group's mean, and the groups of "
            "%d have none",
            *(name, len(failed), len(scores), index, reason, len(failed) - alone, alone),
        )
    return settled


def checked_on_failure(on_failure: str) -> str:
    """Return the policy."""
    if on_failure not in ON_FAILURE:
        raise ConfigError(f"on_failure is {on_failure!r}: choose from {', '.join(ON_FAILURE)}.")
    return on_failure


def prompt_key(value: Any) -> Hashable:
    """Return a key that is equal for prompts with the same text and media, in any form."""
    if isinstance(value, Mapping):
        return tuple((str(name), prompt_key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(prompt_key(item) for item in value)
    if isinstance(value, Image.Image):
        try:
            return media_key(value)
        except MediaError:  # a scorer says so
            return "broken", value.size
    if isinstance(value, bytes):
        return media_key(value)
    return value if isinstance(value, Hashable) else id(value)  # equal to itself only
