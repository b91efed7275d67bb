"""What a learned reward paid for: its counts against the true success of each state, and the worst frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper

from vlmrm_robots.frames.frame_reward import FrameReward
from vlmrm_robots.trajectories.pictures import NOT_DONE, Cell, draw_sheet

SUSPECTS = 48  # frames of a sheet, in rows of COLUMNS
COLUMNS = 12
REWARDED = (190, 40, 30)  # red: the border of a frame without a success that was rewarded


@dataclass
class Counts:
    """Steps of training, and how many of them were rewarded or led to a true success."""

    training_steps: int = 0
    true_successes: int = 0
    rewarded: int = 0
    false_positives: int = 0  # rewarded without a success
    missed: int = 0  # successes without a reward
    novel: int = 0  # frames unlike those that the classifier knows
    paid: float = 0.0  # sum of the learned rewards
    unearned: float = 0.0  # of it, in steps without a success

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def false_positive_share(self) -> float | None:
        """Share of the rewards; None without any."""
        return self.false_positives / self.rewarded if self.rewarded else None

    @property
    def unearned_share(self) -> float | None:
        """Share of the sum of rewards: continuous ones pay below the threshold too. None without any."""
        return self.unearned / self.paid if self.paid else None

    def figures(self) -> dict[str, float | None]:
        """Return the counts and their shares by name, as tables and summaries have them."""
        shares = {"false_positive_share": self.false_positive_share, "unearned_share": self.unearned_share}
        return {**asdict(self), **shares}


@dataclass(order=True)
class Suspect:
    """A frame [C,H,W] without a success, with its reward and probability, at a step of the training."""

    reward: float
    probability: float
    step: int
    rewarded: bool = field(compare=False)
    frame: np.ndarray = field(compare=False, repr=False)

    def record(self) -> dict[str, float | int | bool]:
        return {name: getattr(self, name) for name in ("step", "probability", "reward", "rewarded")}


class RewardAudit(VectorWrapper):
    """Compares each learned reward with the true success of its state, and leaves the rewards as they are.

    A binary reward counts if it is not 0, a continuous one above the classifier's threshold. Of each episode, the
    frame without a success that has the highest reward, then probability, is a suspect; the worst are kept.
    """

    def __init__(self, env: FrameReward, limit: int = SUSPECTS):
        super().__init__(env)
        self._key = env.scorer.config.image_keys[0]
        self._threshold = 0.0 if env.settings.reward_type == "binary" else env.scorer.config.threshold
        self._limit = limit
        self._recent = Counts()
        self._steps = 0
        self._current: list[Suspect | None] = [None] * env.num_envs  # of the unfinished episodes
        self._worst: list[Suspect] = []  # of the finished episodes, the worst first

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminations, truncations, info = self.env.step(actions)
        success, rewarded = info["true_success"], info["frame_reward"] > self._threshold
        self._steps += self.num_envs
        self._recent += Counts(
            training_steps=self.num_envs,
            true_successes=int(success.sum()),
            rewarded=int(rewarded.sum()),
            false_positives=int((rewarded & ~success).sum()),
            missed=int((~rewarded & success).sum()),
            novel=int((info["frame_novelty"] > 1).sum()),
            paid=float(info["frame_reward"].sum()),
            unearned=float(info["frame_reward"][~success].sum()),
        )
        ended = terminations | truncations
        for i in np.flatnonzero(~success):
            self._update(i, info, bool(rewarded[i]), bool(ended[i]))
        for i in np.flatnonzero(ended):
            self._worst, self._current[i] = self._merged([self._current[i]]), None
        return observation, reward, terminations, truncations, info

    def counts(self) -> Counts:
        """Return the counts since the last call."""
        recent, self._recent = self._recent, Counts()
        return recent

    def suspects(self) -> list[Suspect]:
        """Return the suspects of finished and unfinished episodes, the worst first."""
        return self._merged(self._current)

    def _merged(self, current: Sequence[Suspect | None]) -> list[Suspect]:
        suspects = [suspect for suspect in current if suspect is not None]
        return sorted([*self._worst, *suspects], reverse=True)[: self._limit]

    def _update(self, i: int, info: Mapping[str, Any], rewarded: bool, ended: bool) -> None:
        reward, probability = float(info["frame_reward"][i]), float(info["frame_probability"][i])
        worst = self._current[i]
        if worst is not None and (reward, probability) <= (worst.reward, worst.probability):
            return
        images = (info["final_info"] if ended else info)["images"]  # of ended episodes, info shows the next one's
        frame = np.array(images[self._key][i])
        self._current[i] = Suspect(reward, probability, self._steps, rewarded, frame)


def suspect_sheet(suspects: Sequence[Suspect], path: Path) -> Path:
    """Draw suspects in their order, each with its probability and its step; those that were rewarded are red."""
    cells = [
        Cell(
            suspect.frame, REWARDED if suspect.rewarded else NOT_DONE, f"{suspect.probability:.3f} at {suspect.step:,}"
        )
        for suspect in suspects
    ]
    lines = [cells[i : i + COLUMNS] for i in range(0, len(cells), COLUMNS)]
    return draw_sheet(lines, min(len(cells), COLUMNS), path)
