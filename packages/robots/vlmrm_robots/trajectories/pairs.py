"""`vlmrm frames pairs`: preferences between episodes, as rows on which reward models are trained like on any others.

The task is the prompt, and the frames of an episode up to its first success are the answer. It is preferred to

    outcome      the frames of an episode without success
    truncation   its own beginning
    rewind       its own frames up to a step before success, and back again
    instruction  the same frames under the instruction of another task

Both answers of a pair have equally many frames, evenly spread: as many as the shorter of the two has, up to a limit.
Otherwise a model that only counts frames would prefer the better one, as most beginnings are shorter than their whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from vlmrm.conversation import Comparison, Image, Judgement, Message
from vlmrm.data.canonical import check_output, write_comparisons
from vlmrm.errors import ConfigError, DataError
from vlmrm.files import require_new_file
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


def write_pairs(
    files: Sequence[TrajectoryFile],
    output: Path,
    *,
    task: str | None = None,
    kinds: Sequence[Kind] = ("outcome", "truncation", "rewind"),
    frames: int = 8,
    per_episode: int = 1,
    image_key: str | None = None,
    seed: int = 0,
) -> Counter[Kind]:
    """Write `per_episode` pairs of each kind for each episode with a success, and return the number of each kind.

    Each frame is written once, as a PNG in the folder `{output.stem}_frames` beside the output.
    """
    if min(frames, per_episode) < 1 or not kinds:
        raise ConfigError("there is no pair to write: give one or more kinds, frames and pairs of an episode.")
    require_new_file(output)
    check_output(output)
    folder = output.parent / f"{output.stem}_frames"
    if folder.exists():
        raise ConfigError(f"{folder} exists already, and the frames of {output.name} would be mixed with it: move it.")
    key = image_key or files[0].keys[0]
    if lacking := [file.path for file in files if key not in file.keys]:
        raise DataError(f"{listed(lacking)} have no images {key}: name another image key.")
    tasks = [task_of(file, task) for file in files]
    pairs = [
        (kind, pair)
        for kind in dict.fromkeys(kinds)
        for pair in _drawn(kind, files, tasks, per_episode, np.random.default_rng([seed, KINDS.index(kind)]))
    ]
    counts = Counter(kind for kind, _ in pairs)
    for kind in kinds:
        if not counts[kind]:
            raise DataError(
                f"there is no pair of the kind {kind}, because {LACKING[kind]}: leave it out, or add some."
            )
    numbers = {file.path: number for number, file in enumerate(files)}  # two folders may have files of one name

    def picture(file: TrajectoryFile, step: int) -> Path:
        path = folder / f"{numbers[file.path]:06d}_{file.path.stem}_{step:04d}.png"
        return path if path.exists() else save_picture(as_picture(file.frame(key, step)), path)

    def rows() -> Iterator[Comparison]:
        for number, (kind, pair) in enumerate(pairs):
            yield _comparison(f"{kind}-{number}", kind, pair, frames, picture)

    write_comparisons(rows, output)
    return counts


def task_of(file: TrajectoryFile, task: str | None) -> str:
    """Return the instruction of a trajectory, or else `task`; DataError if neither is there."""
    if (found := file.metadata.get("task") or task) is None:
        raise DataError(f"{file.path} does not say its task: name it with --task.")
    return found


# Which frames --------------------------------------------------------------------------------------------------------


def _drawn(
    kind: Kind, files: Sequence[TrajectoryFile], tasks: Sequence[str], count: int, chance: np.random.Generator
) -> Iterator[tuple[Clip, Clip]]:
    """Yield (better, worse) clips of one kind: `count` for each success that allows it."""
    draw = {"truncation": _truncated, "rewind": _rewound}.get(kind)
    for file, task in zip(files, tasks, strict=True):
        if not file.successes.any():
            continue
        first = int(file.successes.argmax())
        better: Clip = (file, task, range(first + 1))
        for _ in range(count):
            if draw is not None:
                if first >= 2:
                    yield better, (file, task, draw(first, chance))
            elif kind == "instruction":
                if others := sorted({*tasks} - {task}):
                    yield better, (file, others[chance.integers(len(others))], better[2])
            elif failures := [f for f, t in zip(files, tasks, strict=True) if t == task and _failed(f)]:
                worse = failures[chance.integers(len(failures))]
                yield better, (worse, task, range(len(worse)))


def _failed(file: TrajectoryFile) -> bool:
    return not file.successes.any() and file.metadata.get("success_once") != "true"


def _truncated(first: int, chance: np.random.Generator) -> Steps:
    """Return the steps up to one at least two before the first success."""
    return range(int(chance.integers(0, first - 1)) + 1)


def _rewound(first: int, chance: np.random.Generator) -> Steps:
    """Return the steps up to the one before the first success, and back to an earlier one."""
    return [*range(first), *range(first - 2, int(chance.integers(0, first - 1)) - 1, -1)]


# Rows ----------------------------------------------------------------------------------------------------------------


def _comparison(
    name: str, kind: str, clips: tuple[Clip, Clip], frames: int, picture: Callable[[TrajectoryFile, int], Path]
) -> Comparison:
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
