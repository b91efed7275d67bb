"""Labelled frames of two folders of trajectories: their index, the training and validation split."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vlmrm.errors import ConfigError, DataError
from vlmrm.files import content_digest
from vlmrm_robots.frames.settings import Crop
from vlmrm_robots.trajectories.trajectory import (
    TrajectoryFile,
    check_images,
    digest,
    listed,
    open_folder,
    trajectory_paths,
)

BLOCKS, ALIKE = 8, 4.0  # parts of a side of first frames, and how far apart their means are in the same scenery
Inputs = dict[str, Tensor]  # of a classifier for B frames, by name; `labels` [B] beside them


class FrameIndex:
    """All frames of some trajectories: frame n is frame `steps[n]` of `files[owners[n]]`; labels [N] are 0 or 1."""

    def __init__(self, files: Sequence[TrajectoryFile], keys: Sequence[str]):
        self.files, self.keys = list(files), tuple(keys)
        self.owners = np.repeat(np.arange(len(files)), [len(file) for file in files])
        self.steps = np.concatenate([np.arange(len(file)) for file in files])
        self.labels = np.concatenate([file.successes for file in files]).astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, numbers: Sequence[int]) -> Inputs:
        """Read a batch of frames by their numbers, with its `labels`."""
        return {**self.images(numbers), "labels": torch.from_numpy(self.labels[numbers])}

    @property
    def fingerprint(self) -> str:
        """A hash of the files' contents, in whichever order."""
        return sha256("".join(sorted(content_digest(file.path) for file in self.files)).encode()).hexdigest()

    @property
    def environment(self) -> str | None:
        """The environments that the files name."""
        names = {file.metadata.get("environment") for file in self.files} - {None}
        return ", ".join(sorted(map(str, names))) or None

    @property
    def crop(self) -> Crop:
        """The part of each camera's frames that was kept; DataError if files differ in it."""
        crops: list[Crop] = []
        for file in self.files:
            try:
                stored = json.loads(file.metadata.get("crop", "{}")).items()
                crop = {key: (x0, y0, x1, y1) for key, (x0, y0, x1, y1) in stored if key in self.keys}
            except (ValueError, TypeError, AttributeError):
                raise DataError(f"{file.path} has the crop {file.metadata['crop']!r}: collect it anew.") from None
            crops.append(crop)
            if crop != crops[0]:
                other = f"{self.files[0].path} {crops[0]}"
                raise DataError(f"{file.path} has the crop {crop} and {other}: a classifier looks at frames of one.")
        return crops[0]

    @cached_property
    def sceneries(self) -> np.ndarray:
        """The number [E] of each file's scenery."""
        return sceneries(self.files, self.keys[0])

    def images(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Read these frames alone, uint8 [B,C,H,W] by camera."""
        return {
            key: torch.from_numpy(
                np.stack([self.files[self.owners[n]].frame(key, int(self.steps[n])) for n in numbers])
            )
            for key in self.keys
        }

    def summary(self, numbers: np.ndarray) -> str:
        """Return the counts of some frames in words."""
        return _count(len(np.unique(self.owners[numbers])), self.labels[numbers])


def _count(trajectories: int, labels: np.ndarray) -> str:
    return f"{trajectories} trajectories, {len(labels)} frames, {labels.sum():.0f} of them successes"


def index_frames(
    positive_dir: Path, negative_dir: Path, keys: Sequence[str], image_size: Sequence[int]
) -> tuple[FrameIndex, str]:
    """Return the frames of both folders without duplicate trajectories, and the counts of each folder in words."""
    # Every episode may succeed at some time: the frames before it does are failures enough.
    empty = Path(negative_dir).is_dir() and not trajectory_paths(negative_dir)
    folders = [positive_dir] if empty else [positive_dir, negative_dir]
    index, summary = index_files([file for folder in folders for file in open_folder(folder)], keys, image_size)
    if index.labels.all() or not index.labels.any():
        lacking = "a failure" if index.labels.all() else "a success"
        raise DataError(f"no frame is {lacking}, so there is nothing to tell apart ({summary}): collect some.")
    return index, summary


def index_files(
    every: Sequence[TrajectoryFile], keys: Sequence[str], image_size: Sequence[int] | None = None
) -> tuple[FrameIndex, str]:
    """Return the frames of files, of any size by default, without duplicates, and the counts of folders in words."""
    folders: dict[Path, list[TrajectoryFile]] = {}
    for file in every:
        folders.setdefault(file.path.parent, []).append(file)
    for folder, files in folders.items():
        check_images(folder, files, keys, image_size)
    summary = "; ".join(
        f"{folder}: {_count(len(files), np.concatenate([file.successes for file in files]))}"
        for folder, files in folders.items()
    )
    if repeats := _repeats(every, keys):
        names, left_out = listed(file.path.name for file in repeats), {file.path for file in repeats}
        summary += f"; {len(repeats)} trajectories repeat others frame for frame and are left out ({names})"
        every = [file for file in every if file.path not in left_out]
    return FrameIndex(every, keys), summary


def _repeats(files: Sequence[TrajectoryFile], keys: Sequence[str]) -> list[TrajectoryFile]:
    """Return the files that repeat an earlier one, which would leak held-out frames into the training."""
    outlines = [outline_of(file, keys) for file in files]
    counts, seen, repeats = Counter(outlines), set(), []
    for file, outline in zip(files, outlines, strict=True):
        if counts[outline] > 1:  # only these need to be read further
            whole = digest({key: file.frames(key) for key in keys}, file.labels)
            if whole in seen:
                repeats.append(file)
            seen.add(whole)
    return repeats


def outline_of(file: TrajectoryFile, keys: Sequence[str]) -> str:
    """Return a hash of an episode's middle frames and its labels, by which a checkpoint knows it again."""
    return digest({key: file.frame(key, len(file) // 2) for key in keys}, file.labels)


def split(index: FrameIndex, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and of the validation frames; no trajectory has frames in both.

    `fraction` of the trajectories with a success is held out, at least one, and as large a share of those without.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"val_fraction is {fraction}: a share between 0 and 1 is held out.")
    generator = np.random.default_rng(seed)
    with_success = np.bincount(index.owners, weights=index.labels, minlength=len(index.files)) > 0
    held_out: list[int] = []
    for group in (np.flatnonzero(with_success), np.flatnonzero(~with_success)):
        # Both sides need a trajectory of each kind, even where the fraction rounds to none or all.
        count = min(max(1, round(fraction * len(group))), len(group) - 1)
        held_out += generator.permutation(group)[: max(count, 0)].tolist()
    validation = np.isin(index.owners, held_out)
    for name, side in (("training", ~validation), ("validation", validation)):
        labels = np.unique(index.labels[side])
        if len(labels) < 2:
            raise DataError(
                f"{with_success.sum()} of {len(index.files)} trajectories have a success, which leaves the {name} "
                f"frames without {'successes' if 1 not in labels else 'failures'}: collect more trajectories."
            )
    return np.flatnonzero(~validation), np.flatnonzero(validation)


def sceneries(files: Sequence[TrajectoryFile], key: str) -> np.ndarray:
    """Return a number [E] for each episode, equal where episodes have one scenery; below 0 for a failure in another.

    Those of one environment and task that succeed have one. A failure has theirs if it starts like one of them: the
    means of each of `BLOCKS` x `BLOCKS` parts of their first frames differ by at most `ALIKE`.
    """
    kinds = [(file.metadata.get("environment"), file.metadata.get("task"), file.shapes[key]) for file in files]
    starts = [_coarse(file.frame(key, 0)) for file in files]
    good = [bool(file.successes.any()) for file in files]
    numbers = []
    for i, kind in enumerate(kinds):
        alike = [starts[j] for j, other in enumerate(kinds) if good[j] and other == kind]
        own = good[i] or (alike and (np.abs(np.stack(alike) - starts[i]).max(axis=(1, 2, 3)) <= ALIKE).any())
        numbers.append(kinds.index(kind) if own else -1)
    return np.array(numbers)


def _coarse(frame: np.ndarray) -> np.ndarray:
    """Return the means of parts of a frame [C,H,W]: [C,BLOCKS,BLOCKS], or of its pixels where it is smaller."""
    rows, columns = (np.linspace(0, side, min(BLOCKS, side) + 1).astype(int) for side in frame.shape[1:])
    sums = np.add.reduceat(np.add.reduceat(frame.astype(np.float64), rows[:-1], axis=1), columns[:-1], axis=2)
    return sums / np.outer(np.diff(rows), np.diff(columns))
