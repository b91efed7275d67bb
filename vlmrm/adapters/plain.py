"""A plain callable of prompts and answers, for any training loop without an adapter of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrm.adapters.rows import Column, SharedSet, trained_model
from vlmrm.scoring.protocol import Scorer


class Reward:
    """A reward function of a trained model: `Reward("outputs/best")(prompts, answers, images)`.

    A call is collective: where a launcher started several processes, each makes it.

    Args:
        model: the folder of a checkpoint, the address of a service, or a `Scorer`.
        name: the name in logs; default: that of the folder.
        options: of any reward, and of `vlm_reward`.
    """

    def __init__(self, model: str | Path | Scorer, *, name: str | None = None, **options: Any):
        self.__name__ = name or (Path(model).name if isinstance(model, (str, Path)) else type(model).__name__)
        self.shared = SharedSet(trained_model(model, self.__name__, "raise", **options))

    def __call__(
        self, prompts: Column, answers: Column, images: Column | None = None, videos: Column | None = None
    ) -> list[float]:
        """Return the raw logit of each row. Prompts and answers are texts or messages, media an item or a list."""
        scored = self.shared.rewards((prompts, answers, images, videos), {}, range(len(prompts)))
        return scored.rewards[self.__name__].tolist()
