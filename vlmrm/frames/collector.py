"""Collects labelled frames while anything steps a vector of environments: a policy in training, a script, a person.

Each environment has a buffer of its own, and each frame in it is beside the label of the state that it shows. The last
frame of an episode is the episode's own, whichever way the environment then starts the next.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vlmrm.errors import ConfigError, DataError
from vlmrm.files import make_folder
from vlmrm.frames.observations import (
    LABELS,
    LabelledFrame,
    autoreset_mode,
    labelled_frames,
    last_of_episode,
    own_observation,
    says_success_once,
)
from vlmrm.frames.sigterm import sigterm
from vlmrm.frames.trajectory import (
    Trajectory,
    digest,
    locked,
    named,
    trajectory_paths,
    write_trajectory,
)

logger = logging.getLogger("vlmrm")


@dataclass
class _Episode:
    """What one environment has shown since its last reset; `number` counts its episodes since it was seeded."""

    number: int
    seed: int | None = None  # of the environment's last reset with one
    frames: list[LabelledFrame] = field(default_factory=list)
    success_once: bool = False
    discarded: bool = False


class RewardDataCollector(VectorWrapper):
    """Writes every episode of a vector environment as a trajectory, into the positive ones or the negative ones.

    The wrapped environment says in `info`, or in its observation, which `images` there are, by camera key [C,H,W] or
    [H,W,C], uint8 or floats in [0, 1], and in `info` whether the state is a `success`. One that takes k steps at once
    answers images [k,C,H,W] and labels [k]; with terminations [N,k] an episode may end within them. A reset's frame is
    kept where the environment labels it. An episode is positive when a frame of it is a success, or when `info` says
    `success_once`.

    Trajectories that other processes wrote into the folders count against the limits too; what another process with
    the same seed has stored already is left out, counted in `twins` and warned of. Episodes under way are
    written when the collector is closed, when the program ends, and when SIGTERM ends it, unless the program handles
    that itself.

    Args:
        env: any vector environment that names its `autoreset_mode` in its metadata.
        positive_dir: folder of the positive trajectories.
        negative_dir: folder of the others.
        image_keys: the cameras to keep.
        max_positive_trajectories: how many trajectories that folder may hold; None is no limit.
        max_negative_trajectories: the same of the other.
        collect_data: whether to collect; otherwise nothing but the environment is there.
        environment: what the trajectories say they are of. Default: the name that the environment is registered by.

    Raises:
        ConfigError: when there is no key or no `autoreset_mode`, or both folders are one.
        DataError: from `reset` and `step`, when images or labels are missing or do not fit each other.
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
    ):
        super().__init__(env)
        if not image_keys:
            raise ConfigError("image_keys is empty: name the cameras to collect.")
        if Path(positive_dir).resolve() == Path(negative_dir).resolve():
            raise ConfigError(f"positive_dir and negative_dir are both {positive_dir}: name two folders.")
        self.written: dict[bool, list[Path]] = {True: [], False: []}  # by whether they are positive
        self.twins = 0  # episodes that another process of the same seed had stored
        self._folders = {True: Path(positive_dir), False: Path(negative_dir)}
        self._limits = {True: max_positive_trajectories, False: max_negative_trajectories}
        self._full: set[bool] = set()
        self._keys = list(image_keys)
        self._collect = collect_data
        self._name = environment or (type(env.unwrapped).__name__ if env.spec is None else env.spec.id)
        self._mode = autoreset_mode(env)
        self._episodes = [_Episode(0) for _ in range(env.num_envs)]
        self._starting = np.zeros(env.num_envs, dtype=bool)  # those whose next step is a reset
        if collect_data:
            for positive, folder in self._folders.items():
                make_folder(folder)
                self._has_room(positive)
            atexit.register(self.flush)
            sigterm.install()

    @property
    def full(self) -> bool:
        """Whether both folders hold as many trajectories as they may."""
        return len(self._full) == 2

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, dtype=bool))  # Gymnasium takes it out
        observation, info = self.env.reset(seed=seed, options=options)
        if self._collect:
            for i in np.flatnonzero(mask):
                self._finish(i)
                own = seed + int(i) if isinstance(seed, int) else None if seed is None else seed[i]
                if own is not None:
                    self._episodes[i] = _Episode(0, own)
                self._add_reset(i, own_observation(i, observation), info)
            self._starting[mask] = False
        return observation, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, rewards, terminations, truncations, info = self.env.step(actions)
        if self._collect:
            ended = np.logical_or(terminations, truncations)
            for i in range(self.num_envs):
                self._after_step(i, ended[i], own_observation(i, observation), info)
        return observation, rewards, terminations, truncations, info

    def close(self, **kwargs: Any) -> None:
        """Writes the episodes under way and closes the environments."""
        self.flush()
        atexit.unregister(self.flush)
        super().close(**kwargs)

    def flush(self) -> None:
        """Writes the episodes under way as they are; what comes then is written as others."""
        with sigterm.held_back():
            for i in range(self.num_envs):
                self._finish(i)

    def discard(self, i: int) -> None:
        """Forgets the episode under way in environment `i`, from its beginning to its end."""
        self._episodes[i].discarded = True
        self._episodes[i].frames.clear()

    # One environment -------------------------------------------------------------------------------------------------

    def _after_step(self, i: int, ended: Any, observation: Any, info: Mapping[str, Any]) -> None:
        if self._starting[i]:  # next-step mode: this step was a reset
            self._starting[i] = False
            self._add_reset(i, observation, info)
        elif self._mode is AutoresetMode.SAME_STEP and np.any(ended):  # what is shown is the next episode's
            self._add_step(i, *last_of_episode(i, info), ended=False)
            self._finish(i)
            self._add_reset(i, observation, info)
        else:
            self._add_step(i, observation, info, ended)
            self._starting[i] = self._mode is AutoresetMode.NEXT_STEP and np.atleast_1d(ended)[-1]

    def _add_reset(self, i: int, observation: Any, info: Mapping[str, Any]) -> None:
        """Puts the frame that an episode begins with into the buffer, where it has a label."""
        for frame in labelled_frames(i, self._keys, observation, info, self.num_envs):
            self._append(i, frame)

    def _add_step(self, i: int, observation: Any, info: Mapping[str, Any], ended: Any) -> None:
        """Puts the frames of a step into the buffer, which is written after each that ended an episode."""
        frames = labelled_frames(i, self._keys, observation, info, self.num_envs)
        if not frames:
            raise DataError(f"environment {i} does not say whether its state is a success: info has no {LABELS[0]!r}.")
        self._episodes[i].success_once |= says_success_once(i, info, self.num_envs)
        ends = np.array([*[False] * (len(frames) - 1), ended]) if np.ndim(ended) == 0 else ended
        if len(ends) != len(frames):
            raise DataError(
                f"environment {i} showed {len(frames)} states, and says of {len(ends)} whether they are last."
            )
        for frame, end in zip(frames, ends, strict=True):
            self._append(i, frame)
            if end:
                self._finish(i)

    def _append(self, i: int, frame: LabelledFrame) -> None:
        if self._episodes[i].discarded:
            return
        buffer = self._episodes[i].frames
        first, _ = buffer[0] if buffer else frame
        for key, image in frame[0].items():
            if image.shape != first[key].shape:
                raise DataError(
                    f"environment {i} shows {key!r} as {list(image.shape)} after {list(first[key].shape)}: an episode "
                    "has frames of one size."
                )
        buffer.append(frame)

    def _finish(self, i: int) -> None:
        episode = self._episodes[i]
        with sigterm.held_back():
            if episode.frames:
                self._write(i, episode)
            self._episodes[i] = _Episode(episode.number + bool(episode.frames), episode.seed)

    def _write(self, i: int, episode: _Episode) -> None:
        about = {
            "environment": self._name,
            "seed": "none" if episode.seed is None else str(episode.seed),
            "episode": str(episode.number),  # since that seed
            "success_once": "true" if episode.success_once else "false",
        }
        images = {key: np.stack([image[key] for image, _ in episode.frames]) for key in self._keys}
        trajectory = Trajectory(images, np.array([label for _, label in episode.frames], dtype=np.float32), about)
        positive = trajectory.positive
        folder = self._folders[positive]
        with locked(folder):
            if self._has_room(positive):
                unique = None if episode.seed is None else digest(images, trajectory.labels, about.values())
                twin = named(folder, unique) if unique else None
                if twin is None:
                    self.written[positive].append(write_trajectory(folder, trajectory, unique))
                else:
                    self._leave_out(episode, twin)
            self._has_room(positive)  # says so once it was the last

    def _leave_out(self, episode: _Episode, twin: Path) -> None:
        self.twins += 1
        if self.twins == 1:
            logger.warning(
                "%s has this episode of seed %s, frame for frame, and so it is not stored again: give processes that "
                "share folders different seeds.",
                twin,
                episode.seed,
            )

    def _has_room(self, positive: bool) -> bool:
        """Whether a folder holds fewer trajectories than it may, whoever wrote them; once full it stays so."""
        limit, folder = self._limits[positive], self._folders[positive]
        if limit is not None and positive not in self._full and len(trajectory_paths(folder)) >= limit:
            self._full.add(positive)
            logger.info("%s holds %d trajectories: no more are collected there", folder, limit)
        return positive not in self._full
