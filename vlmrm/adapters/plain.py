"""A plain callable of prompts and answers, for any training loop without an adapter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrm.adapters.rows import Column, SharedScorer
from vlmrm.errors import RewardError, RowError
from vlmrm.scoring.protocol import Scorer


class Reward:
    """A reward function of a trained model: `Reward("outputs/best")(prompts, answers, images)`.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        name: the name in logs; default: that of the folder.
        options: keywords of `vlmrm.load_scorer`.
    """

    def __init__(self, model: str | Path | Scorer, *, name: str | None = None, **options: Any):
        self.scorer = SharedScorer(model, **options)
        self.__name__ = name or (Path(model).name if isinstance(model, (str, Path)) else type(model).__name__)

    def __call__(
        self, prompts: Column, answers: Column, images: Column | None = None, videos: Column | None = None
    ) -> list[float]:
        """Return the raw logit of each row. Prompts and answers are texts or messages, media an item or a list."""
        scores = self.scorer.score_rows(prompts, answers, images, videos)
        for index, score in enumerate(scores):
            if isinstance(score, RowError):
                raise RewardError(f"reward {self.__name__}: sample {index}: {score.reason}") from score
        return [score for score in scores if not isinstance(score, RowError)]
