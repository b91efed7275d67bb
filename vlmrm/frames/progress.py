"""`vlmrm frames progress`: a reward model's score after each frame of episodes, and whether it rises with time.

The value-order correlation (VOC: Ma et al. 2024, Vision Language Models are In-Context Value Learners) of an episode
is Spearman's correlation of step and score: 1 where each later frame scores higher. Of successes, up to the first, it
should be high; of failures it need not be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vlmrm.errors import ConfigError
from vlmrm.files import require_new_file, write_file
from vlmrm.frames.pairs import spread_steps, task_of
from vlmrm.frames.pictures import as_picture
from vlmrm.frames.trajectory import TrajectoryFile
from vlmrm.measures.intervals import Estimate, Mean
from vlmrm.measures.statistics import spearman_within
from vlmrm.scoring.scorer import LocalScorer


class Scored(NamedTuple):
    """The scores [T] after some steps [T] of an episode; of a success, up to the first one."""

    file: TrajectoryFile
    steps: Sequence[int]
    scores: Sequence[float]

    @property
    def success(self) -> bool:
        return bool(self.file.successes.any())


def score_episodes(
    scorer: LocalScorer, files: Sequence[TrajectoryFile], *, task: str | None, frames: int, image_key: str | None
) -> list[Scored]:
    """Return the scores of each episode after at most `frames` steps, evenly spread, each from one forward.

    Raises:
        ConfigError: for fewer than two frames, which have no order.
        DataError: when an episode has no task or camera.
    """
    if frames < 2:
        raise ConfigError(f"{frames} frames of an episode have no order: give two or more.")
    scored = []
    for file in files:
        key = image_key or files[0].keys[0]
        stop = int(file.successes.argmax()) + 1 if file.successes.any() else len(file)
        steps = spread_steps(range(stop), frames)
        pictures = [as_picture(file.frame(key, step)) for step in steps]
        scored.append(Scored(file, steps, scorer.score_prefixes(task_of(file, task), pictures)))
    return scored


def value_order(episodes: Sequence[Scored]) -> Estimate:
    """Return the mean value-order correlation with its interval by episode; episodes of one frame do not count."""
    steps, scores = (
        np.concatenate([[], *column]) for column in ([e.steps for e in episodes], [e.scores for e in episodes])
    )
    owners = np.repeat(np.arange(len(episodes)), [len(e.steps) for e in episodes])
    by_episode = spearman_within(scores, steps, owners)
    return Mean(by_episode, scale="difference").estimate(np.arange(len(by_episode)))


def write_scores(episodes: Sequence[Scored], output: Path) -> None:
    """Write a line of JSON for each episode: its file, whether it succeeds, and the scores after its steps."""
    require_new_file(output)
    lines = (
        {"episode": str(e.file.path), "success": e.success, "steps": [*e.steps], "scores": [*e.scores]}
        for e in episodes
    )
    write_file(output, "".join(json.dumps(line) + "\n" for line in lines))


def summarise(episodes: Sequence[Scored]) -> str:
    """Return the value-order correlations of successes and of failures as lines."""
    lines = []
    for name, success in (("successes", True), ("failures", False)):
        found = value_order([episode for episode in episodes if episode.success == success])
        if found.n:
            lines.append(
                f"value-order correlation of {found.n} {name}: {found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
            )
    return "\n".join(lines) or "no episode has two frames: there is no order of values"
