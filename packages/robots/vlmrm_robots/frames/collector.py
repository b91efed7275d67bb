"""Collects labelled frames while anything steps a vector environment: a policy in training, a script, a person."""

from __future__ import annotations

import atexit
import json
import logging
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vlmrm.errors import ConfigError, DataError, Preempted
from vlmrm.files import make_folder
from vlmrm_robots.frames.images import Views, as_array, value_of
from vlmrm_robots.frames.settings import Crop
from vlmrm_robots.trajectories.trajectory import Trajectory, holds, locked, write_trajectory

logger = logging.getLogger("vlmrm")

LABELS = ("success", "success_frame", "is_success")  # in info; the first that is present counts
LabelledFrame = tuple[dict[str, np.ndarray], float]  # one state's frames uint8 [C,H,W] by camera, and its label


@dataclass
class _Episode:
    """The frames of one environment since its last reset."""

    number: int  # of its episodes since it was seeded
    seed: int | None = None  # of the environment's last reset with one
    frames: list[LabelledFrame] = field(default_factory=list)
    success_once: bool = False
    discarded: bool = False


class RewardDataCollector(VectorWrapper):
    """Writes every episode of a vector environment as a trajectory, into the positive or the negative folder.

    The wrapped environment has an `autoreset_mode` in its metadata, shows images in `info` or in its observation (see
    `frames.images`), and says in `info` whether the state is a `success`. One that takes k steps at once returns
    images [k,C,H,W] and labels [k]; with terminations [N,k] an episode may end within them. A reset's frame is kept if
    it has a label. An unfinished episode that shows a success is written when the collector is closed, when the
    program ends, and at SIGTERM, unless the program handles that itself; one without is dropped.

    Args:
        max_positive_trajectories: the most in that folder, whoever wrote them.
        metadata: what else the trajectories say.
        crop: not of an environment whose metadata say that it crops.
    """

    def __init__(
        self,
        env: VectorEnv,
        positive_dir: Path | str,
        negative_dir: Path | str,
        image_keys: Sequence[str],
        max_positive_trajectories: int | None = None,
        max_negative_trajectories: int | None = None,
        collect_data: bool = True,
        environment: str | None = None,
        metadata: Mapping[str, str] | None = None,
        image_size: Sequence[int] | None = None,
        crop: Crop | None = None,
    ):
        super().__init__(env)
        if Path(positive_dir).resolve() == Path(negative_dir).resolve():
            raise ConfigError(f"positive_dir and negative_dir are both {positive_dir}: name two folders.")
        self.written: dict[bool, list[Path]] = {True: [], False: []}  # by whether they are positive
        self._folders = {True: Path(positive_dir), False: Path(negative_dir)}
        self._limits = {True: max_positive_trajectories, False: max_negative_trajectories}
        self._full: set[bool] = set()
        self._keys = list(image_keys)
        self._collect = collect_data
        self._crop = crop or {}
        self._views = Views(self._keys, image_size, self._crop)
        self._shown: Crop = env.metadata.get("crop", {})  # what the environment itself has cropped
        if self._shown and self._crop:
            raise ConfigError("crop is given, and the environment crops its frames itself: leave one out.")
        self._notes = dict(metadata or {})
        self._name = environment or (type(env.unwrapped).__name__ if env.spec is None else env.spec.id)
        self._mode = autoreset_mode(env)
        self._episodes = [_Episode(0) for _ in range(env.num_envs)]
        self._starting = np.zeros(env.num_envs, dtype=bool)  # the environments whose next step is a reset
        if collect_data:
            for positive, folder in self._folders.items():
                make_folder(folder)
                self._has_room(positive)
            # A policy's training may end anywhere, without close(): at SIGTERM too, unless somebody else handles it.
            atexit.register(self.flush)
            on_main_thread = threading.current_thread() is threading.main_thread()
            if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(Preempted.exit_code))

    @property
    def full(self) -> bool:
        """True once both folders have reached their limits."""
        return len(self._full) == 2

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = reset_mask(self.num_envs, options)
        observation, info = self.env.reset(seed=seed, options=options)
        if self._collect:
            for i in np.flatnonzero(mask):
                self._finish(i)
                env_seed = seed + int(i) if isinstance(seed, int) else None if seed is None else seed[i]
                if env_seed is not None:
                    self._episodes[i] = _Episode(0, env_seed)
                self._add(i, self._labelled(i, observation_of(i, observation), info))
            self._starting[mask] = False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, rewards, terminations, truncations, info = self.env.step(actions)
        if self._collect:
            ended = np.logical_or(as_array(terminations), as_array(truncations))
            for i in range(self.num_envs):
                shown = observation_of(i, observation)
                if self._starting[i]:  # next-step mode: this step was a reset
                    self._starting[i] = False
                    self._add(i, self._labelled(i, shown, info))
                elif self._mode is AutoresetMode.SAME_STEP and np.any(ended[i]):  # the next episode's first is shown
                    self._add_step(i, *final_state(i, info), ended=False)
                    self._finish(i)
                    self._add(i, self._labelled(i, shown, info))
                else:
                    self._add_step(i, shown, info, ended[i])
                    self._starting[i] = self._mode is AutoresetMode.NEXT_STEP and np.atleast_1d(ended[i])[-1]
        return observation, rewards, terminations, truncations, info

    def close(self, **kwargs: Any) -> None:
        """Write the unfinished episodes that show a success, and close the environments."""
        self.flush()
        atexit.unregister(self.flush)
        super().close(**kwargs)

    def flush(self) -> None:
        """Write the unfinished episodes that show a success, and drop the others; later frames start new ones."""
        for i in range(self.num_envs):
            self._finish(i, ended=False)

    def discard(self, i: int) -> None:
        """Drop the whole unfinished episode of environment `i`, with the frames that are yet to come."""
        self._episodes[i].discarded = True
        self._episodes[i].frames.clear()

    # One environment -------------------------------------------------------------------------------------------------

    def _add_step(self, i: int, observation: Any, info: Mapping[str, Any], ended: Any) -> None:
        """Buffer the frames of a step, and write the buffer after each that ended an episode."""
        frames = self._labelled(i, observation, info)
        if not frames:
            raise DataError(f"environment {i} does not say whether its state is a success: info has no {LABELS[0]!r}.")
        for block in (info, info.get("episode", {})):
            once = value_of(i, "success_once", block, self.num_envs)
            self._episodes[i].success_once |= once is not None and bool(np.any(once))
        ends = np.array([*[False] * (len(frames) - 1), ended]) if np.ndim(ended) == 0 else ended
        if len(ends) != len(frames):
            raise DataError(f"environment {i} showed {len(frames)} states, and says of {len(ends)} if they are last.")
        for frame, end in zip(frames, ends, strict=True):
            self._add(i, [frame])
            if end:
                self._finish(i)

    def _labelled(self, i: int, observation: Any, info: Mapping[str, Any]) -> list[LabelledFrame]:
        """Return environment `i`'s frames, `fitted`, and label of each state of a step; none without labels."""
        labels = _labels_of(i, info, self.num_envs)
        if labels is None:
            return []
        images = self._views.of(i, observation, info, self.num_envs, len(labels))
        return [({key: images[key][t] for key in self._keys}, float(labels[t])) for t in range(len(labels))]

    def _add(self, i: int, frames: list[LabelledFrame]) -> None:
        if not self._episodes[i].discarded:
            self._episodes[i].frames += frames

    def _finish(self, i: int, ended: bool = True) -> None:
        episode = self._episodes[i]
        if episode.frames:
            self._write(episode, ended)
        self._episodes[i] = _Episode(episode.number + bool(episode.frames), episode.seed)

    def _write(self, episode: _Episode, ended: bool) -> None:
        metadata = {
            **self._notes,
            "environment": self._name,
            "seed": "none" if episode.seed is None else str(episode.seed),
            "episode": str(episode.number),  # since that seed
            "success_once": str(episode.success_once).lower(),
            "ended": str(ended).lower(),
        }
        if crop := {key: box for key, box in (self._crop or self._shown).items() if key in self._keys}:
            metadata["crop"] = json.dumps(crop)
        images = {key: np.stack([image[key] for image, _ in episode.frames]) for key in self._keys}
        trajectory = Trajectory(images, np.array([label for _, label in episode.frames], dtype=np.float32), metadata)
        positive = trajectory.positive
        if not (ended or positive):
            return
        folder = self._folders[positive]
        with locked(folder):  # another process may fill the folder
            if self._has_room(positive):
                self.written[positive].append(write_trajectory(folder, trajectory))
                self._has_room(positive)  # logs that the folder is full

    def _has_room(self, positive: bool) -> bool:
        """Return whether a folder is below its limit, whoever wrote into it; a full one stays full."""
        limit, folder = self._limits[positive], self._folders[positive]
        if limit is not None and positive not in self._full and holds(folder, limit):
            self._full.add(positive)
            logger.info("%s holds %d trajectories: no more are collected there", folder, limit)
        return positive not in self._full


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """Return how an environment starts the next episode; ConfigError if its metadata does not say."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError as error:
        said = f"{type(env.unwrapped).__name__} does not say how it starts a new episode"
        raise ConfigError(f"{said}: set metadata['autoreset_mode'] to an AutoresetMode.") from error


def reset_mask(count: int, options: Mapping[str, Any] | None) -> np.ndarray:
    """Return which of `count` environments a reset is for, before Gymnasium takes `reset_mask` out of its options."""
    return (options or {}).get("reset_mask", np.ones(count, dtype=bool))


def final_state(i: int, info: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return observation and info of the last state of environment `i` before it was reset in the same step."""
    if "final_info" not in info:
        raise DataError(f"environment {i} ended an episode without final_info: its last frame is unknown.")
    final = info.get("final_obs", info.get("final_observation"))  # Gymnasium's name, and ManiSkill's
    return None if final is None else observation_of(i, final), info["final_info"]


def state_after(
    i: int, mode: AutoresetMode, ended: np.ndarray, observation: Any, info: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Return observation and info of the state that a step led environment `i` to; `ended` [N] are those at an end."""
    same_step = mode is AutoresetMode.SAME_STEP  # of ended environments, it shows the next episode's start
    return final_state(i, info) if same_step and ended[i] else (observation_of(i, observation), info)


def with_own(info: Mapping[str, Any], **own: np.ndarray) -> dict[str, Any]:
    """Return `info` with values [N] of a wrapper's own, present in all environments."""
    return {**info, **own, **{f"_{name}": np.ones(len(values), dtype=bool) for name, values in own.items()}}


def observation_of(i: int, observation: Any) -> Any:
    """Return environment `i`'s part of a batched observation."""
    if isinstance(observation, Mapping):
        return {key: observation_of(i, value) for key, value in observation.items()}
    return observation[i]


def _labels_of(i: int, info: Mapping[str, Any], count: int) -> np.ndarray | None:
    for name in LABELS:
        value = value_of(i, name, info, count)
        if value is not None:
            labels = np.atleast_1d(as_array(value)).astype(np.float32)
            if labels.ndim != 1 or not ((labels >= 0) & (labels <= 1)).all():
                raise DataError(f"environment {i} says {name} {value}: it is true, false, or from 0 to 1.")
            return labels
    return None
