"""Rows of an RL framework as samples of a `RewardSet`, which the functions of a process share.

verl and OpenRLHF score one sample at a time and wait for many at once: `MicroBatcher` gathers those into batches, so
that a group of rollouts shares its prompt.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.conversation import Conversation
from vlmrm.data.media import media_key
from vlmrm.errors import ConfigError, MediaError, RewardError, RowError
from vlmrm.formats.flow_factory import conversation_to_sample, write_sample
from vlmrm.formats.rollouts import read_answer, zip_columns
from vlmrm.rewards import RewardArguments, Rewards, RewardSet, reward_arguments
from vlmrm.rewards.samples import MEDIA
from vlmrm.scoring.loading import is_address
from vlmrm.scoring.protocol import Scorer

WAIT = 0.005  # seconds that the first call of a batch waits for more
MOST = 1024  # items of a batch
# Columns that frameworks pass and no reward takes: the images of a row are those of its prompt.
NO_COLUMNS = ("messages", "completion_ids", "trainer_state", "log_extra", "environments", "images", "videos")

Groups = Sequence[Hashable]
Column = Sequence[Any]
Rows = tuple[Column, Column, Column | None, Column | None]  # prompts, answers, images, videos


def trained_model(
    model: str | Path | Scorer, name: str, on_failure: str = "mask", **options: Any
) -> list[RewardArguments]:
    """Return the configuration of a set of one reward: the raw logit of a trained model.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        options: of any reward, and of `vlm_reward`.
    """
    path = str(model) if isinstance(model, Path) else model
    if not isinstance(path, str) or is_address(path):
        for option in sorted(options.keys() & {"device", "dtype"}):
            raise ConfigError(f"{option} is an option of checkpoints: leave it out with a service or a loaded scorer.")
    reward = {"name": name, "reward_model": "vlm_reward", "model_path": path, "on_failure": on_failure}
    return reward_arguments({"batch_size": MOST, **reward, **options})


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
        extra = {name: column for name, column in columns.items() if name not in NO_COLUMNS and column is not None}
        return self._set(**{**extra, **text_columns(*rows)}, groups=groups)

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


class SampleBatcher(MicroBatcher):
    """A set of pointwise rewards that computes the samples of concurrent calls together.

    Its results are `{"score": weighted sum, name: reward, ...}`.
    """

    def __init__(self, config: Any):
        configured = reward_arguments(config)
        # One sample's failure must not end the batch of the others, and such a batch may be a single sample.
        self.rewards = RewardSet(
            [
                replace(each, max_missing=1.0, on_failure="mask" if each.on_failure == "raise" else each.on_failure)
                for each in configured
            ]
        )
        self.needed = {each.name for each in configured if each.weight or each.on_failure == "raise"}
        for reward in self.rewards.rewards:
            if reward.groupwise:
                raise ConfigError(f"reward {reward.arguments.name} is of groups, and one sample alone is passed.")
        super().__init__(self._each)

    def submit_conversation(self, conversation: Conversation) -> Future[dict[str, float]]:
        return self.submit(write_sample(conversation_to_sample(conversation)))

    def _each(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | RewardError]:
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        try:
            columns = {name: [row.get(name) for row in rows] for name in names}
            scored = self.rewards(prompt=[row["prompt"] for row in rows], **columns)
        except RewardError as error:  # the whole call's: alone, each sample has its own
            return [error] if len(rows) == 1 else [self._each([row])[0] for row in rows]
        totals = scored.total()
        return [self._of_sample(scored, index, float(totals[index])) for index in range(len(rows))]

    def _of_sample(self, scored: Rewards, index: int, total: float) -> dict[str, float] | RewardError:
        rewards = {name: float(values[index]) for name, values in scored.rewards.items()}
        for name, value in rewards.items():
            if np.isnan(value) and name in self.needed:
                return RewardError(f"reward {name}: {scored.failures[name][index]}")
        return {"score": total, **rewards}


def sample_batcher(config: Any) -> SampleBatcher:
    """Return the batcher of this process for a configuration; its models are loaded once, by the first call."""
    with _lock:
        return _batchers.get(str(config)) or _batchers.setdefault(str(config), SampleBatcher(config))


_lock = threading.Lock()
_batchers: dict[str, SampleBatcher] = {}


def text_columns(
    prompts: Column, answers: Column, images: Column | None = None, videos: Column | None = None
) -> dict[str, list[Any]]:
    """Return a text policy's rows as columns of samples (`response`: the answer); the prompt of a bad row says why."""
    samples: list[Mapping[str, Any]] = []
    for row in zip_columns(prompts, answers, images, videos):
        try:
            samples.append(write_sample(conversation_to_sample(read_answer(*row))))
        except RowError as error:
            samples.append({"prompt": error})
    return {name: [sample.get(name) for sample in samples] for name in ("prompt", "response", *MEDIA)}


def prompt_keys(prompts: Column, *media: Column | None) -> list[Hashable]:
    """Return the key of each row's prompt and media, [N]."""
    return [prompt_key(row) for row in zip_columns(prompts, *media)]


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
