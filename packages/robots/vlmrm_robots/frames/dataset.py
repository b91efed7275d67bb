"""Labelled frames of two folders of trajectories: their index, the training and validation split, and batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from vlmrm.errors import ConfigError, DataError
from vlmrm_robots.frames.settings import Crop
from vlmrm_robots.trajectories.trajectory import (
    TrajectoryFile,
    check_images,
    digest,
    listed,
    open_folder,
    trajectory_paths,
)

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

    @property
    def environment(self) -> str | None:
        """The environments that the files name."""
        names = {file.metadata.get("environment") for file in self.files} - {None}
        return ", ".join(sorted(map(str, names))) or None

    @property
    def crop(self) -> Crop:
        """The part of each camera's frames that was kept; DataError if files differ in it."""
        crops = [_crop_of(file, self.keys) for file in self.files]
        for file, crop in zip(self.files, crops, strict=True):
            if crop != crops[0]:
                raise DataError(
                    f"{file.path} has the crop {crop} and {self.files[0].path} {crops[0]}: a classifier looks at "
                    "frames of one crop."
                )
        return crops[0]

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
        return _count(len(np.unique(self.owners[numbers])), len(numbers), self.labels[numbers].sum())


def _crop_of(file: TrajectoryFile, keys: Sequence[str]) -> Crop:
    try:
        crop = json.loads(file.metadata.get("crop", "{}"))
        return {key: (left, top, right, bottom) for key, (left, top, right, bottom) in crop.items() if key in keys}
    except (ValueError, TypeError, AttributeError):
        raise DataError(f"{file.path} has the crop {file.metadata['crop']!r}: collect it anew.") from None


def _count(trajectories: int, frames: int, successes: float) -> str:
    return f"{trajectories} trajectories, {frames} frames, {successes:.0f} of them successes"


def index_frames(
    positive_dir: Path, negative_dir: Path, keys: Sequence[str], image_size: Sequence[int]
) -> tuple[FrameIndex, str]:
    """Return the frames of both folders without duplicate trajectories, and the counts of each folder in words."""
    # Every episode may succeed at some time: the frames before it does are failures enough.
    empty = Path(negative_dir).is_dir() and not trajectory_paths(negative_dir)
    index, summary = index_folders([positive_dir] if empty else [positive_dir, negative_dir], keys, image_size)
    if index.labels.all() or not index.labels.any():
        lacking = "a failure" if index.labels.all() else "a success"
        raise DataError(f"no frame is {lacking}, so there is nothing to tell apart ({summary}): collect some.")
    return index, summary


def index_folders(folders: Sequence[Path], keys: Sequence[str], image_size: Sequence[int]) -> tuple[FrameIndex, str]:
    """Return the frames of all folders without duplicate trajectories, and the counts of each folder in words."""
    opened = {Path(folder): open_folder(folder) for folder in folders}
    for folder, files in opened.items():
        check_images(folder, files, keys, image_size)
    distinct, duplicates = _separate_duplicates([file for files in opened.values() for file in files], keys)
    summary = "; ".join(
        f"{folder}: {_count(len(files), sum(map(len, files)), sum(file.successes.sum() for file in files))}"
        for folder, files in opened.items()
    )
    if duplicates:
        names = listed(file.path.name for file in duplicates)
        summary += f"; {len(duplicates)} trajectories repeat others frame for frame and are left out ({names})"
    return FrameIndex(distinct, keys), summary


def _separate_duplicates(
    files: Sequence[TrajectoryFile], keys: Sequence[str]
) -> tuple[list[TrajectoryFile], list[TrajectoryFile]]:
    """Return the distinct files, and those with which another begins: copies, and episodes that were cut off.

    These would leak held-out frames into the training.
    """

    @cache
    def look(number: int, step: int) -> str:
        return digest({key: files[number].frame(key, step) for key in keys}, files[number].labels[step : step + 1])

    def begins_with(number: int, start: int) -> bool:
        """Return whether the first frames and labels of one file are all those of another."""
        count = len(files[start])
        if not np.array_equal(files[number].labels[:count], files[start].labels):
            return False
        return all(look(number, step) == look(start, step) for step in reversed(range(count)))

    # Only files that begin alike need to be read further, the longest first.
    beginnings: dict[str, list[int]] = {}
    for number in range(len(files)):
        beginnings.setdefault(look(number, 0), []).append(number)
    distinct: set[int] = set()
    for alike in beginnings.values():
        kept: list[int] = []
        for number in sorted(alike, key=lambda number: -len(files[number])):
            if not any(begins_with(other, number) for other in kept):
                kept.append(number)
        distinct.update(kept)
    numbers = range(len(files))
    return [files[n] for n in numbers if n in distinct], [files[n] for n in numbers if n not in distinct]


def outline_of(file: TrajectoryFile, keys: Sequence[str]) -> str:
    """Return a hash of an episode's middle frames and its labels, by which a checkpoint knows it again."""
    return digest({key: file.frame(key, len(file) // 2) for key in keys}, file.labels)


def split(index: FrameIndex, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and of the validation frames; no trajectory has frames in both.

    The split is stratified: `fraction` of the trajectories with a success is held out, at least one, and as large a
    share of those without.
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


# Batches -------------------------------------------------------------------------------------------------------------


class FrameDataset(Dataset):
    """The frames `numbers`, read a batch at a time by `read`, which returns the model's inputs for numbers of frames.

    Items are whole batches for HF's trainer, so that frames are stacked once: `first_of` is the collator.
    """

    def __init__(self, read: Callable[[Sequence[int]], Inputs], labels: np.ndarray, numbers: np.ndarray):
        self.read = read
        self.numbers = numbers
        self.labels = labels[numbers]

    def __getitems__(self, index: list[int]) -> list[Inputs]:
        return [{**self.read(self.numbers[index].tolist()), "labels": torch.from_numpy(self.labels[index])}]

    def __getitem__(self, index: int) -> Inputs:
        return self.__getitems__([index])[0]

    def __len__(self) -> int:
        return len(self.numbers)


def first_of(batches: list[Inputs]) -> Inputs:
    """Return the one batch of `FrameDataset`."""
    return batches[0]


class BalancedSampler(Sampler[int]):
    """Draws as many frames as there are, successes as often as failures, with replacement, anew in each epoch."""

    def __init__(self, labels: np.ndarray, seed: int):
        weights = class_weights(labels)[labels.astype(int)]
        self._shares = weights / weights.sum()
        self._seed, self._epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = np.random.default_rng((self._seed, self._epoch))
        return iter(generator.choice(len(self), len(self), p=self._shares).tolist())

    def __len__(self) -> int:
        return len(self._shares)


def class_weights(labels: np.ndarray) -> np.ndarray:
    """Return the weights of a failure and of a success by which both classes of labels[N] weigh N / 2."""
    share = labels.mean()
    return np.array([0.5 / (1 - share), 0.5 / share])
