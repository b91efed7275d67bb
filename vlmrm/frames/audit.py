"""Is the learned reward earned? Counts rewards without a success, and keeps the frames that fooled the classifier."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper
from PIL import Image, ImageDraw

from vlmrm.frames.frame_reward import FrameReward
from vlmrm.frames.pictures import BORDER, CAPTION, CELL, NOT_DONE, bordered, draw_caption, saved

SUSPECTS = 48  # frames of a sheet
COLUMNS = 12
FOOLED = (190, 40, 30)


@dataclass
class Counts:
    """Steps, and how many of them were rewarded or led to a true success.

    `false_positives` were rewarded without a success, `missed` are successes without a reward.
    """

    training_steps: int = 0
    true_successes: int = 0
    rewarded: int = 0
    false_positives: int = 0
    missed: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = asdict(self), asdict(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})

    @property
    def false_positive_share(self) -> float | None:
        """Of the rewards, None where there are none."""
        return self.false_positives / self.rewarded if self.rewarded else None


@dataclass(order=True)
class Suspect:
    """A frame [C,H,W] without a success, with its reward and probability, at a step of the training."""

    reward: float
    probability: float
    step: int
    rewarded: bool = field(compare=False)
    frame: np.ndarray = field(compare=False, repr=False)

    def described(self) -> dict[str, float | int | bool]:
        return {
            "step": self.step,
            "probability": self.probability,
            "reward": self.reward,
            "rewarded": self.rewarded,
        }


class RewardAudit(VectorWrapper):
    """Compares each learned reward with the true success of its state; the policy's rewards stay as they are.

    A binary reward counts where it is given, a continuous one above the classifier's threshold. Of each episode the
    frame with the highest reward, then the highest probability, and no success is a suspect; the worst are kept.
    """

    def __init__(self, env: FrameReward, most: int = SUSPECTS):
        super().__init__(env)
        self._key = env.scorer.config.image_keys[0]
        self._given = 0.0 if env.settings.reward_type == "binary" else env.scorer.config.threshold
        self._most = most
        self._recent = Counts()
        self._steps = 0
        self._worst_now: list[Suspect | None] = [None] * env.num_envs  # of the episodes under way
        self._worst: list[Suspect] = []  # a heap, the mildest first

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminations, truncations, info = self.env.step(actions)
        success, rewarded = info["true_success"], info["frame_reward"] > self._given
        self._steps += self.num_envs
        self._recent += Counts(
            training_steps=self.num_envs,
            true_successes=int(success.sum()),
            rewarded=int(rewarded.sum()),
            false_positives=int((rewarded & ~success).sum()),
            missed=int((~rewarded & success).sum()),
        )
        ended = terminations | truncations
        for i in np.flatnonzero(~success):
            self._suspect(i, info, bool(rewarded[i]), bool(ended[i]))
        for i in np.flatnonzero(ended):
            self._keep(i)
        return observation, reward, terminations, truncations, info

    def counts(self) -> Counts:
        """What was counted since the last call."""
        recent, self._recent = self._recent, Counts()
        return recent

    def suspects(self) -> list[Suspect]:
        """The worst, of ended episodes and of those under way, the worst first."""
        under_way = [suspect for suspect in self._worst_now if suspect is not None]
        return sorted([*self._worst, *under_way], reverse=True)[: self._most]

    def _suspect(self, i: int, info: Mapping[str, Any], rewarded: bool, ended: bool) -> None:
        reward, probability = float(info["frame_reward"][i]), float(info["frame_probability"][i])
        worst = self._worst_now[i]
        if worst is not None and (reward, probability) <= (worst.reward, worst.probability):
            return
        images = (info["final_info"] if ended else info)["images"]  # of the ended, the next episode's are shown
        frame = np.array(images[self._key][i])
        self._worst_now[i] = Suspect(reward, probability, self._steps, rewarded, frame)

    def _keep(self, i: int) -> None:
        suspect, self._worst_now[i] = self._worst_now[i], None
        if suspect is not None and len(self._worst) < self._most:
            heapq.heappush(self._worst, suspect)
        elif suspect is not None:
            heapq.heappushpop(self._worst, suspect)


def suspect_sheet(suspects: Sequence[Suspect], path: Path) -> Path:
    """Draws suspects in their order, each with its probability and its step; those that were rewarded are red.

    Raises:
        ConfigError: when the file cannot be written.
    """
    rows = -(-len(suspects) // COLUMNS)
    sheet = Image.new("RGB", (min(len(suspects), COLUMNS) * CELL, rows * (CELL + CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for place, suspect in enumerate(suspects):
        left, top = place % COLUMNS * CELL, place // COLUMNS * (CELL + CAPTION)
        draw_caption(draw, (left + BORDER, top), f"{suspect.probability:.3f} at {suspect.step:,}")
        sheet.paste(bordered(suspect.frame, FOOLED if suspect.rewarded else NOT_DONE), (left, top + CAPTION))
    return saved(sheet, path)
