"""Several rewards of the same samples, with each model loaded once."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vlmrm.data.media import RoundMedia, media_round
from vlmrm.errors import Denied, RewardError, RowError
from vlmrm.rewards.contract import BaseRewardModel, GroupwiseRewardModel, Processes, RewardArguments
from vlmrm.rewards.outcome import AuditLog, Rewards
from vlmrm.rewards.ranks import exchange_results, gather, groups_to_compute, process_state
from vlmrm.rewards.registry import Config, identity, reward_arguments, reward_model_class
from vlmrm.rewards.samples import MEDIA, CallResult, ContractError, Samples, accepted_fields, batched, call, join
from vlmrm.settings import nearest

logger = logging.getLogger("vlmrm")

# Errors of a judge, server or picture. Any other is of the reward's own code.
FAILURES = (RewardError, OSError, TimeoutError)
GONE = 3  # rounds in a row without a reward, which is then taken to be gone: a server that restarts misses fewer
ANSWERS = {"completion": "response", "completions": "response"}  # as others name them


class RewardSet:
    """The rewards of a configuration.

        rewards = RewardSet("rewards.yaml")
        scored = rewards(prompt=prompts, image=images, groups=prompt_ids)
        scored.rewards["aesthetic"], scored.advantages("gdpo")

    Args:
        config: a YAML file, or anything that `vlmrm.rewards.registry.reward_arguments` takes.
        block: `rewards` or `eval_rewards`.
        accelerator: passed to reward models; default: accelerate's state of this process, None without accelerate.
        models: share one between two sets, as of the two blocks, and they share their models.
        audit_log: a JSONL file that every reward is appended to, with its model's details.
    """

    def __init__(
        self,
        config: Config,
        *,
        block: str = "rewards",
        accelerator: Processes = None,
        models: Models | None = None,
        audit_log: str | Path | None = None,
    ):
        self.models = Models(accelerator) if models is None else models
        self.rewards = [self.models.reward(arguments) for arguments in reward_arguments(config, block)]
        self.audit = None if audit_log is None else AuditLog(audit_log)

    def __call__(
        self, *, prompt: Sequence[Any], groups: Sequence[Hashable] | None = None, **columns: Sequence[Any] | None
    ) -> Rewards:
        """Compute all rewards of N samples, whose columns are lists of N (see `Samples`).

        A collective call: every rank makes it.
        """
        pending = self.start()
        pending.add(prompt=prompt, groups=groups, **columns)
        return pending.finish()

    def start(self, group_size: int | None = None) -> Pending:
        """Start a round whose samples are added bit by bit; asynchronous rewards are computed meanwhile.

        With a `group_size` those of groups need not wait for the last sample.
        """
        return Pending(self.rewards, self.audit, group_size)

    def close(self) -> None:
        """Cancel calls of asynchronous rewards that have not started."""
        for reward in self.rewards:
            if reward.threads is not None:
                reward.threads.cancel()


class Threads:
    """At most `count` threads, which take submitted calls in order and end when there are none.

    Unlike an executor's they do not keep a process from exiting: Ctrl-C does not wait for a judge that does not
    answer.
    """

    def __init__(self, count: int, name: str):
        self.count, self.name = count, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._working = 0

    def submit(self, compute: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return the future of `compute(*arguments)`."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((future, compute, arguments))
            if self._working < self.count:
                self._working += 1
                threading.Thread(target=self._work, name=self.name, daemon=True).start()
        return future

    def cancel(self) -> None:
        """Cancel the calls that no thread has started."""
        with self._lock:
            for future, _, _ in self._waiting:
                future.cancel()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                future, compute, arguments = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():  # cancelled while it waited
                continue
            try:
                future.set_result(compute(*arguments))
            except BaseException as error:
                future.set_exception(error)


@dataclass(frozen=True)
class ConfiguredReward:
    """One name of a configuration, with the model that it shares with rewards of the same identity.

    `slots` bounds the concurrent calls of the shared model; `threads` are those of an asynchronous reward;
    `poor_rounds` are the first errors of the rounds in a row in which more than `max_missing` had no reward.
    """

    arguments: RewardArguments
    model: BaseRewardModel
    slots: threading.Semaphore
    threads: Threads | None
    poor_rounds: list[str] = field(default_factory=list)

    @property
    def groupwise(self) -> bool:
        return isinstance(self.model, GroupwiseRewardModel)


class Models:
    """Loaded reward models by identity. Pass one to two reward sets and they share their models."""

    def __init__(self, accelerator: Processes = None):
        self.accelerator = accelerator or process_state()
        self._loaded: dict[str, tuple[BaseRewardModel, threading.Semaphore]] = {}

    def __len__(self) -> int:
        return len(self._loaded)

    def reward(self, arguments: RewardArguments) -> ConfiguredReward:
        """Return the reward of one name; load its model unless an equal one is loaded."""
        key = identity(arguments)
        if key not in self._loaded:
            model = reward_model_class(str(arguments.reward_model))(arguments, self.accelerator)
            # Only an asynchronous reward, which waits for a network, is safe to call from several threads.
            self._loaded[key] = model, threading.Semaphore(arguments.num_workers if arguments.async_reward else 1)
        model, slots = self._loaded[key]
        threads = Threads(arguments.num_workers, f"reward-{arguments.name}") if arguments.async_reward else None
        if model.config is not arguments:
            model = model.with_config(arguments)
        return ConfiguredReward(arguments, model, slots, threads)


class Pending:
    """The samples of one round and the rewards being computed. Call `add` any number of times, then `finish` once."""

    def __init__(self, rewards: Sequence[ConfiguredReward], audit: AuditLog | None, group_size: int | None):
        media = RoundMedia()
        self.work = [_PendingReward(reward, group_size, media) for reward in rewards]
        self.audit = audit
        self.samples: Samples | None = None

    def add(
        self, *, prompt: Sequence[Any], groups: Sequence[Hashable] | None = None, **columns: Sequence[Any] | None
    ) -> None:
        """Add samples and submit what is ready to the threads, without waiting."""
        added = Samples({"prompt": prompt, **columns}, groups)
        self._check_columns(added)
        if self.samples is not None:
            if (added.groups is None) != (self.samples.groups is None):
                raise RewardError("some samples have groups and some have none: give groups= each time or never.")
            added.indices = [index + len(self.samples) for index in added.indices]
            added = join([self.samples, added])
        self.samples = added
        for work in self.work:
            work.submit_ready(added)

    def finish(self) -> Rewards:
        """Compute the remaining rewards and wait for the threads. A collective call: every rank makes it."""
        if self.samples is None:
            raise RewardError("there are no samples: add some first.")
        try:
            # Ranks meet in `plan` and `collect`, which each reaches whatever fails in between.
            for work in self.work:
                work.plan(self.samples)
            for work in self.work:
                work.compute()
            for work in self.work:
                work.collect(stop=any(item.error is not None for item in self.work))
        except BaseException:  # Ctrl-C, too
            for work in self.work:
                work.cancel()
            raise
        # The first by configuration, not by time: the same error whatever the threads' timing.
        errors = [work.error for work in self.work if work.error is not None]
        outcome = self._outcome(self.samples)
        try:
            _raise_anywhere(errors[0] if errors else None)
        finally:  # the log matters most where a reply led to an error
            if self.audit is not None:
                self.audit.write(outcome, self.samples)
        return outcome

    def _check_columns(self, samples: Samples) -> None:
        """Refuse a column that no reward reads and that is nearly named as one."""
        names = [*samples.columns, "response"]
        read = {name for work in self.work for name in accepted_fields(work.reward.model, names)}
        wanted = [*MEDIA, *({"response"} & read - samples.columns.keys())]
        for name in samples.columns.keys() - read - {*MEDIA, "response"}:
            if (meant := nearest(ANSWERS.get(name, name), wanted, 0.85)) is not None:
                raise RewardError(f"there is a column {name}, which no reward asks for: did you mean {meant}?")

    def _outcome(self, samples: Samples) -> Rewards:
        by_name = {work.name: work for work in self.work}
        return Rewards(
            rewards={name: work.values(len(samples)) for name, work in by_name.items()},
            weights={name: work.reward.arguments.weight for name, work in by_name.items()},
            groups=samples.groups,
            failures={name: work.result.failures for name, work in by_name.items()},
            info={name: work.result.info for name, work in by_name.items()},
            seconds={name: work.seconds for name, work in by_name.items()},
            counters={name: work.reward.model.counters() for name, work in by_name.items()},
        )


@dataclass
class _PendingReward:
    """The calls of one reward in a round: submitted, computed, and still to do."""

    reward: ConfiguredReward
    group_size: int | None
    media: RoundMedia
    result: CallResult = field(default_factory=CallResult)
    seconds: float = 0.0
    error: RewardError | None = None
    raised: Exception | None = None  # by the reward's own code and none of FAILURES, or Denied
    submitted: set[int] = field(default_factory=set)  # positions of samples that a thread has
    parts: list[Samples] = field(default_factory=list)
    shared: list[Samples] = field(default_factory=list)
    exchanged: bool = False
    calls: list[tuple[Future[tuple[CallResult, float]], Samples]] = field(default_factory=list)
    waits_since: float = 0.0

    @property
    def name(self) -> str:
        return self.reward.arguments.name

    def submit_ready(self, samples: Samples) -> None:
        """Submit full batches, or complete groups, of an asynchronous reward to its threads."""
        if self.reward.threads is None:
            return
        waiting = [number for number in range(len(samples)) if number not in self.submitted]
        size = self.reward.model.samples_a_call
        if self.reward.groupwise:
            size = self.group_size or 0
            parts = samples.take(waiting).by_group().values() if size else []
            ready = [[waiting[number] for number in part] for part in parts if len(part) == size]
        else:
            ready = [part for part in batched(self.reward.model, samples, waiting, size) if len(part) == size]
        for part in ready:
            self.submitted.update(part)
            self._submit(samples.take(part))

    def plan(self, samples: Samples) -> None:
        """Split the remaining samples into the calls of this rank. A collective call for groupwise rewards."""
        remaining = [number for number in range(len(samples)) if number not in self.submitted]
        if not self.reward.groupwise:
            batches = batched(self.reward.model, samples, remaining, self.reward.model.samples_a_call)
            self.parts = [samples.take(batch) for batch in batches]
            return
        if samples.groups is None:
            self.error = RewardError(f"reward {self.name} is of groups: give groups=, the id of each sample's prompt.")
        fields = accepted_fields(self.reward.model, samples.columns)
        if self.reward.arguments.length_penalty:
            fields = [*fields, "response"]
        self.parts, self.shared, self.exchanged = groups_to_compute(samples.take(remaining), fields)

    def compute(self) -> None:
        """Compute the remaining calls of a synchronous reward; submit those of an asynchronous one."""
        self.waits_since = time.monotonic()
        if self.reward.threads is not None and self.error is None:
            for part in self.parts:
                self._submit(part)
            return
        for part in self.parts:
            if self.error is None:
                self._collect_one(lambda part=part: self._call(part))

    def collect(self, stop: bool) -> None:
        """Wait for the threads, and exchange the results of shared groups; with `stop` cancel what has not started."""
        for future, part in self.calls:
            if stop or self.error is not None:
                self.cancel()
                break
            if self._in_time(future):
                self._collect_one(future.result)
            else:
                reason = f"it had no reward {self.reward.arguments.deadline:g} s after the last sample"
                self.result.update(CallResult(failures=dict.fromkeys(part.indices, reason)))
        local, self.result = self.result, CallResult()
        for part in self.shared:
            if not stop and self.error is None:
                self._collect_one(lambda part=part: self._call(part))
        local.update(exchange_results(self.result) if self.exchanged else self.result)
        self.result = local
        if not stop:
            self._settle()

    def _in_time(self, future: Future[Any]) -> bool:
        """Wait for a call until the deadline, and cancel one that has not started by then."""
        deadline = self.reward.arguments.deadline
        if deadline is None:
            return True
        done, _ = wait([future], max(self.waits_since + deadline - time.monotonic(), 0.0))
        return bool(done) or (not future.cancel() and future.done())

    def cancel(self) -> None:
        for future, _ in self.calls:
            future.cancel()

    def _submit(self, part: Samples) -> None:
        assert self.reward.threads is not None
        self.calls.append((self.reward.threads.submit(self._call, part), part))

    def _call(self, part: Samples) -> tuple[CallResult, float]:
        with self.reward.slots, media_round(self.media):
            started = time.perf_counter()
            try:
                result = call(self.reward.model, part)
            except Exception as error:
                if self.reward.arguments.on_failure == "raise" or isinstance(error, ContractError):
                    raise
                if isinstance(error, Denied) or not isinstance(error, FAILURES):
                    self.raised = error
                result = CallResult(failures=dict.fromkeys(part.indices, _said(error).rstrip(".")))
            if self.reward.model.text_prompts and not any(
                isinstance(prompt, (str, RowError)) for prompt in part.columns["prompt"]
            ):
                self.raised = self.raised or Denied(next(iter(result.failures.values())))
            return result, time.perf_counter() - started

    def _collect_one(self, compute: Callable[[], tuple[CallResult, float]]) -> None:
        try:
            result, seconds = compute()
        except Exception as error:
            self._end(error)
            return
        self.result.update(result)
        self.seconds += seconds

    def _end(self, error: Exception) -> None:
        self.error = RewardError(f"reward {self.name}: {_said(error)}")
        self.error.__cause__ = error

    def _settle(self) -> None:
        """Apply `on_failure` to the samples that failed."""
        failures, arguments, poor = self.result.failures, self.reward.arguments, self.reward.poor_rounds
        most = arguments.max_missing * (len(failures) + len(self.result.rewards))
        poor[:] = [*poor, min(failures.items())[1]] if len(failures) > most else []
        if not failures or self.error is not None:
            return
        if self.raised is not None and not self.result.rewards:  # a mistake in the program, not in a sample
            self._end(self.raised)
            return
        index, reason = min(failures.items())
        summary = f"reward {self.name} failed for {len(failures)} samples, first sample {index}: {reason}"
        if arguments.on_failure == "raise":
            self.error = RewardError(f"{summary}; set on_failure to mask or fallback to go on without")
            return
        if len(poor) == GONE:
            self.error = RewardError(
                f"reward {self.name} is gone: {GONE} rounds in a row over {arguments.max_missing:.0%} of the samples "
                f"have none, first because {poor[0]}; raise max_missing to go on without"
            )
            return
        logger.warning(
            "%s; %s", summary, "masked" if arguments.on_failure == "mask" else "its fallback_reward is taken"
        )

    def values(self, size: int) -> np.ndarray:
        """Return the rewards of all samples: [N], NaN or the fallback where one failed."""
        fallback = self.reward.arguments.fallback_reward
        missing = float("nan") if fallback is None else fallback
        return np.array([self.result.rewards.get(index, missing) for index in range(size)], dtype=np.float64)


def _said(error: Exception) -> str:
    """Return what an error says, with its type where it is of the reward's own code."""
    return str(error) if isinstance(error, FAILURES) else f"{type(error).__name__}: {error}"


def _raise_anywhere(error: RewardError | None) -> None:
    """Raise this rank's error, or another rank's by its number, so that no rank waits for one that failed."""
    errors = gather(None if error is None else str(error))
    if error is not None:
        raise error
    for number, text in enumerate(errors):
        if text is not None:
            raise RewardError(f"rank {number}: {text}")
