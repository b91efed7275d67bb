"""Rows to train a reward model on, from labelled episodes: preferences between them, or what each frame shows.

A model that only counts frames must not be right: both answers of a pair have equally many, and of values there are
also beginnings and rewinds with as many frames as a success.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from vlmrm.conversation import Comparison, Image, Judgement, Message
from vlmrm.data.canonical import check_output, write_comparisons
from vlmrm.errors import ConfigError, DataError
from vlmrm.files import require_new_file, write_file
from vlmrm_robots.trajectories.pictures import as_picture, save_picture
from vlmrm_robots.trajectories.trajectory import TrajectoryFile, listed

Kind = Literal["outcome", "truncation", "rewind", "instruction"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LACKING = {
    "outcome": "no success and failure are of one task",
    "truncation": "no success has two frames before it",
    "rewind": "no success has two frames before it",
    "instruction": "all trajectories are of one task",
}
Steps = Sequence[int]  # of an episode, in the order in which they are shown
Clip = tuple[TrajectoryFile, str, Steps]  # with its instruction
Picture = Callable[[TrajectoryFile, int], Path]  # the PNG of a frame


def write_pairs(
    files: Sequence[TrajectoryFile],
    output: Path,
    *,
    task: str | None = None,
    kinds: Sequence[Kind] = ("outcome", "truncation", "rewind"),
    frames: int = 8,
    image_key: str | None = None,
    seed: int = 0,
) -> Counter[Kind]:
    """Write a pair of each kind for each episode with a success, and return the number of each kind.

    Each frame is written once, as a PNG in the folder `{output.stem}_frames` beside the output.
    """
    if frames < 1 or not kinds:
        raise ConfigError("there is no pair to write: give one or more kinds and frames.")
    check_output(output)
    picture = _pictures(files, output, image_key)
    tasks = [task_of(file, task) for file in files]
    pairs = [
        (kind, pair)
        for kind in dict.fromkeys(kinds)
        for pair in _drawn(kind, files, tasks, np.random.default_rng([seed, KINDS.index(kind)]))
    ]
    counts = Counter(kind for kind, _ in pairs)
    for kind in kinds:
        if not counts[kind]:
            raise DataError(
                f"there is no pair of the kind {kind}, because {LACKING[kind]}: leave it out, or add some."
            )

    def rows() -> Iterator[Comparison]:
        for number, (kind, pair) in enumerate(pairs):
            yield _comparison(f"{kind}-{number}", kind, pair, frames, picture)

    write_comparisons(rows, output)
    return counts


def write_values(
    files: Sequence[TrajectoryFile],
    output: Path,
    *,
    task: str | None = None,
    frames: int = 8,
    image_key: str | None = None,
    seed: int = 0,
) -> Counter[str]:
    """Write clips with the `progress` and `success` of each frame, and return the number of each kind.

    Progress is the share of the way to the first success. Each success is written whole, up to a drawn frame, and with
    its frames back again; a failure has no progress, which trains nothing, and under another task no frame is a
    success and progress is 0. So an output of the kind `progress`, and one called `success` of the kind `correctness`,
    learn as SARM's and Robometer's heads do (Chen et al. 2025; Liang et al. 2026).

    Args:
        output: the new file, .jsonl; its pictures go into the folder `{output.stem}_frames`.
        frames: of a clip, evenly spread.
    """
    if frames < 2:
        raise ConfigError(f"{frames} frames of an episode have no order: give two or more.")
    picture = _pictures(files, output, image_key)
    tasks = [task_of(file, task) for file in files]
    clips: list[tuple[str, Clip]] = [
        ("success" if file.successes.any() else "failure", (file, own, file.way))
        for file, own in zip(files, tasks, strict=True)
    ]
    for kind in ("truncation", "rewind", "instruction"):
        drawn = _drawn(kind, files, tasks, np.random.default_rng([seed, KINDS.index(kind)]))
        clips += [(kind, worse) for _, worse in drawn]
    counts = Counter(kind for kind, _ in clips)
    if not counts["success"]:
        raise DataError(f"none of {len(files)} episodes shows a success, and progress leads to one: add some.")
    lines = []
    for kind, (file, told, steps) in clips:
        shown = spread_steps(steps, frames)
        reached = max(len(file.way) - 1, 1)
        way = [0.0 if kind == "instruction" else step / reached for step in shown]
        row: dict[str, Any] = {
            "task": told,
            "frames": [str(picture(file, step).relative_to(output.parent)) for step in shown],
        }
        row |= {"progress": [None if kind == "failure" else value for value in way]}
        row |= {"success": [float(kind == "success" and file.successes[step]) for step in shown]}
        lines.append(row | {"category": kind, "episode": str(file.path)})
    write_file(output, "".join(json.dumps(line) + "\n" for line in lines))
    return counts


def _pictures(files: Sequence[TrajectoryFile], output: Path, image_key: str | None) -> Picture:
    """Return what writes a frame of one camera beside the new file `output`, once."""
    require_new_file(output)
    folder = output.parent / f"{output.stem}_frames"
    if folder.exists():
        raise ConfigError(f"{folder} exists already, and the frames of {output.name} would be mixed with it: move it.")
    key = image_key or files[0].keys[0]
    if lacking := [file.path for file in files if key not in file.keys]:
        raise DataError(f"{listed(lacking)} have no images {key}: name another image key.")
    numbers = {file.path: number for number, file in enumerate(files)}  # two folders may have files of one name

    def picture(file: TrajectoryFile, step: int) -> Path:
        path = folder / f"{numbers[file.path]:06d}_{file.path.stem}_{step:04d}.png"
        return path if path.exists() else save_picture(as_picture(file.frame(key, step)), path)

    return picture


def task_of(file: TrajectoryFile, task: str | None) -> str:
    """Return the instruction of a trajectory, or else `task`; DataError if neither is there."""
    if (found := file.metadata.get("task") or task) is None:
        raise DataError(f"{file.path} does not say its task: name it with --task.")
    return found


# Which frames --------------------------------------------------------------------------------------------------------


def _drawn(
    kind: Kind, files: Sequence[TrajectoryFile], tasks: Sequence[str], chance: np.random.Generator
) -> Iterator[tuple[Clip, Clip]]:
    """Yield (better, worse) clips of one kind: one for each success that allows it."""
    for file, task in zip(files, tasks, strict=True):
        if not file.successes.any():
            continue
        first = len(file.way) - 1
        better: Clip = (file, task, file.way)
        if kind in ("truncation", "rewind"):
            if first >= 2:
                stop = int(chance.integers(0, first - 1))
                back = [*range(first), *range(first - 2, stop - 1, -1)]  # from the one before the first success
                yield better, (file, task, range(stop + 1) if kind == "truncation" else back)
        elif kind == "instruction":
            if others := sorted({*tasks} - {task}):
                yield better, (file, others[chance.integers(len(others))], better[2])
        elif failures := [f for f, t in zip(files, tasks, strict=True) if t == task and not _positive(f)]:
            worse = failures[chance.integers(len(failures))]
            yield better, (worse, task, range(len(worse)))


def _positive(file: TrajectoryFile) -> bool:
    return bool(file.successes.any()) or file.metadata.get("success_once") == "true"


# Rows ----------------------------------------------------------------------------------------------------------------


def _comparison(name: str, kind: str, clips: tuple[Clip, Clip], frames: int, picture: Picture) -> Comparison:
    prompts = [Message.of("user", task) for _, task, _ in clips]
    count = min(frames, *(len(steps) for _, _, steps in clips))
    shown = [spread_steps(steps, count) for _, _, steps in clips]
    answers = [
        Message.of("assistant", *map(Image, map(str, map(partial(picture, file), steps))))
        for (file, _, _), steps in zip(clips, shown, strict=True)
    ]
    columns = {}
    for side, (file, _, _), steps in zip(("chosen", "rejected"), clips, shown, strict=True):
        columns |= {f"{side}_episode": str(file.path), f"{side}_steps": " ".join(map(str, steps))}
        columns |= {f"{side}_environment": file.metadata.get("environment", "")}
    judgement = (Judgement((0, 1), (1.0, 0.0)),)
    if prompts[0] == prompts[1]:
        return Comparison(name, (prompts[0],), tuple((a,) for a in answers), judgement, kind, columns)
    return Comparison(name, (), tuple(zip(prompts, answers, strict=True)), judgement, kind, columns)


def spread_steps(steps: Steps, count: int) -> list[int]:
    """Return at most `count` of the steps, evenly spread and with the last."""
    places = np.linspace(0, len(steps) - 1, min(count, len(steps))) if count > 1 else [len(steps) - 1]
    return [steps[round(place)] for place in places]
