"""Rewards being computed: asynchronous ones on threads while samples still come, the others when all are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from vlmrm.errors import RewardError
from vlmrm.rewards.audit import AuditLog
from vlmrm.rewards.calling import Answer, Mistake, accepted_fields, alike, call, named_fields
from vlmrm.rewards.exchange import answers_sent_back, groups_to_compute, joined
from vlmrm.rewards.loading import Reward
from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.samples import MEDIA, Samples
from vlmrm.settings import nearest

logger = logging.getLogger("vlmrm")

# What a failing judge, server or picture raises; anything else is a mistake in a program and never masked.
FAILURES = (RewardError, OSError, TimeoutError)


class Pending:
    """Samples of one round and the rewards they get. `add` any number of times, then `finish` once.

    Args:
        group_size: samples of a group, so that an asynchronous groupwise reward can start before `finish`.
    """

    def __init__(self, rewards: Sequence[Reward], audit: AuditLog | None, group_size: int | None):
        self.work = [_Work(reward, group_size) for reward in rewards]
        self.audit = audit
        self.samples: Samples | None = None

    def add(
        self, *, prompt: Sequence[Any], groups: Sequence[Hashable] | None = None, **columns: Sequence[Any] | None
    ) -> None:
        """Takes samples, and hands what is ready to the threads; it does not wait.

        Raises:
            RewardError: when columns differ in length, one is misnamed, or there are groups for some samples only.
        """
        come = Samples({"prompt": prompt, **columns}, groups)
        self._refuse_misnamed(come)
        if self.samples is not None:
            if (come.groups is None) != (self.samples.groups is None):
                raise RewardError("some samples have groups and some have none: give groups= each time or never.")
            come.places = [place + len(self.samples) for place in come.places]
            come = joined([self.samples, come])
        self.samples = come
        for work in self.work:
            work.submit_ready(come)

    def finish(self) -> Rewards:
        """Computes what is left and waits for the threads. A collective call: every rank makes it.

        Raises:
            RewardError: naming the reward and the sample, when one fails on any rank and its policy is `raise`.
        """
        if self.samples is None:
            raise RewardError("there are no samples: add some first.")
        try:
            self._compute(self.samples)
        except BaseException:  # Ctrl-C, too
            for work in self.work:
                work.cancel()
            raise
        errors = [work.error for work in self.work if work.error is not None]
        outcome = self._outcome(self.samples)
        try:
            _raise_anywhere(errors[0] if errors else None)
        finally:  # what a judge said is wanted most where it led to an error
            if self.audit is not None:
                self.audit.write(outcome, self.samples)
        return outcome

    def _compute(self, samples: Samples) -> None:
        """Ranks meet in `plan` and `collect`, so each gets there whatever goes wrong in between."""
        for work in self.work:
            work.plan(samples)
        for work in self.work:
            work.compute()
        for work in self.work:
            work.collect(stop=any(other.error is not None for other in self.work))

    def _refuse_misnamed(self, samples: Samples) -> None:
        """Columns that no reward asks for are for others; but `images` beside no `image` would be left out unseen.

        So would `respnse`, or TRL's `completion`: the image would be taken for the answer.
        """
        models = [work.reward.model for work in self.work]
        taken = {name for model in models for name in accepted_fields(model, samples)}
        absent = [name for model in models for name in named_fields(model) if name not in samples.columns]
        for name in samples.columns.keys() - taken:
            meant = next((medium for medium in MEDIA if medium.rstrip("s") == name.rstrip("s")), None)
            if meant is None and name in ("completion", "completions") and "response" in absent:
                meant = "response"
            elif meant is None:
                meant = nearest(name, absent, 0.8)
            if meant not in (None, name):
                raise RewardError(f"there is a column {name}, which no reward asks for: did you mean {meant}?")

    def _outcome(self, samples: Samples) -> Rewards:
        by_name = {work.name: work for work in self.work}
        return Rewards(
            rewards={name: work.values(len(samples)) for name, work in by_name.items()},
            weights={name: work.reward.arguments.weight for name, work in by_name.items()},
            groups=samples.groups,
            failures={name: work.answer.failures for name, work in by_name.items()},
            info={name: work.answer.info for name, work in by_name.items()},
            seconds={name: work.seconds for name, work in by_name.items()},
            counters={name: work.reward.model.counters() for name, work in by_name.items()},
        )


@dataclass
class _Work:
    """What one reward has done of a round, and has still to do."""

    reward: Reward
    group_size: int | None
    answer: Answer = field(default_factory=Answer)
    seconds: float = 0.0
    error: RewardError | None = None
    taken: set[int] = field(default_factory=set)  # samples that are on a thread
    parts: list[Samples] = field(default_factory=list)
    shared: list[Samples] = field(default_factory=list)
    exchanged: bool = False
    futures: list[Future[tuple[Answer, float]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.reward.arguments.name

    def submit_ready(self, samples: Samples) -> None:
        """Hands full batches, or whole groups, of an asynchronous reward to its threads."""
        if self.reward.threads is None:
            return
        waiting = [number for number in range(len(samples)) if number not in self.taken]
        size = self.reward.arguments.batch_size
        if self.reward.groupwise:
            size = self.group_size or 0
            parts = samples.take(waiting).grouped().values() if size else []
            ready = [[waiting[number] for number in part] for part in parts if len(part) == size]
        else:
            ready = [part for part in alike(self.reward.model, samples, waiting, size) if len(part) == size]
        for part in ready:
            self.taken.update(part)
            self._submit(samples.take(part))

    def plan(self, samples: Samples) -> None:
        """What is left to do on this rank."""
        rest = [number for number in range(len(samples)) if number not in self.taken]
        if not self.reward.groupwise:
            batches = alike(self.reward.model, samples, rest, self.reward.arguments.batch_size)
            self.parts = [samples.take(batch) for batch in batches]
            return
        if samples.groups is None:
            self.error = RewardError(f"reward {self.name} is of groups: give groups=, the id of each sample's prompt.")
        fields = accepted_fields(self.reward.model, samples)
        groups = groups_to_compute(samples.take(rest), fields)
        self.parts, self.shared, self.exchanged = groups.whole, groups.shared, groups.exchanged

    def compute(self) -> None:
        """The rest of a synchronous reward, on this thread; that of an asynchronous one goes to its threads."""
        if self.reward.threads is not None and self.error is None:
            for part in self.parts:
                self._submit(part)
            return
        for part in self.parts:
            if self.error is None:
                self._take(lambda part=part: self._call(part))

    def collect(self, stop: bool) -> None:
        """Waits for the threads, and for what other ranks computed of shared groups; `stop` where all is in vain."""
        for future in self.futures:
            if stop or self.error is not None:
                self.cancel()
                break
            self._take(future.result)
        own, self.answer = self.answer, Answer()
        for part in self.shared:
            if not stop and self.error is None:
                self._take(lambda part=part: self._call(part))
        if self.exchanged:
            own.update(answers_sent_back(self.answer))
        else:
            own.update(self.answer)
        self.answer = own
        if not stop:
            self._settle()

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()

    def _submit(self, part: Samples) -> None:
        assert self.reward.threads is not None
        self.futures.append(self.reward.threads.submit(self._call, part))

    def _call(self, part: Samples) -> tuple[Answer, float]:
        with self.reward.slots:
            started = time.perf_counter()
            try:
                answer = call(self.reward.model, part)
            except FAILURES as error:
                if self.reward.arguments.on_failure == "raise" or isinstance(error, Mistake):
                    raise
                answer = Answer(failures=dict.fromkeys(part.places, str(error).rstrip(".")))
            return answer, time.perf_counter() - started

    def _take(self, compute: Callable[[], tuple[Answer, float]]) -> None:
        try:
            answer, seconds = compute()
        except Exception as error:
            kind = "" if isinstance(error, FAILURES) else f"{type(error).__name__}: "
            self.error = RewardError(f"reward {self.name}: {kind}{error}")
            self.error.__cause__ = error
            return
        self.answer.update(answer)
        self.seconds += seconds

    def _settle(self) -> None:
        """Applies the policy to the samples that failed."""
        failures, arguments = self.answer.failures, self.reward.arguments
        if not failures or self.error is not None:
            return
        place, reason = min(failures.items())
        said = f"reward {self.name} failed for {len(failures)} samples, first sample {place}: {reason}"
        if arguments.on_failure == "raise":
            self.error = RewardError(f"{said}; set on_failure to mask or fallback to go on without")
            return
        logger.warning("%s; %s", said, "masked" if arguments.on_failure == "mask" else "its fallback_reward is taken")

    def values(self, size: int) -> np.ndarray:
        """The rewards of all samples: [N], NaN or the fallback where one failed."""
        fallback = self.reward.arguments.fallback_reward
        missing = float("nan") if fallback is None else fallback
        return np.array([self.answer.rewards.get(place, missing) for place in range(size)], dtype=np.float64)


def _raise_anywhere(error: RewardError | None) -> None:
    """Raises this rank's error, or says which rank has one, so that none waits for another for ever."""
    errors = gather_object([None if error is None else str(error)])
    if error is not None:
        raise error
    for rank, text in enumerate(errors):
        if text is not None:
            raise RewardError(f"rank {rank}: {text}")
