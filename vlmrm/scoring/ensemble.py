"""Several reward models as one `Scorer`, and how much its members disagree.

Optimising against the minimum of several models, or against a mean less their disagreement, is harder to exploit than
optimising against one of them (Coste et al. 2024, Reward Model Ensembles Help Mitigate Overoptimization).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlmrm.errors import ConfigError, RowError
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.protocol import ConversationLike, Group, Scorer, conversations_of, regrouped
from vlmrm.scoring.transforms import Normalization, Transform, zscore

COMBINE = {"mean": np.mean, "min": np.min}
SCALES = ("saved", "call")


class Judged(NamedTuple):
    """Scores [N] of an ensemble, and the standard deviation [N] over its members."""

    scores: list[float]
    uncertainty: list[float]


class Ensemble:
    """A `Scorer` that combines several, after bringing the scores of each to a common scale.

    Raw scores of different models cannot be compared: each has a zero and a unit of its own.

    Args:
        members: the models, in the order of `member_scores`.
        scales: a transform of each member's raw scores, such as its `Normalization`; default: z-scores over one call,
            which then depend on what is scored together.
        combine: `mean` or `min` over the members.
    """

    def __init__(self, members: Sequence[Scorer], *, scales: Sequence[Transform] | None = None, combine: str = "mean"):
        if len(members) < 2:
            raise ConfigError(f"an ensemble of {len(members)}: name two models or more.")
        if combine not in COMBINE:
            raise ConfigError(f"combine is {combine!r}: choose one of {', '.join(COMBINE)}.")
        self.members = list(members)
        self.scales = list(scales or [zscore] * len(members))
        if len(self.scales) != len(members):
            raise ConfigError(f"{len(self.scales)} scales for {len(members)} models: give one for each.")
        self.combine = COMBINE[combine]

    def score(self, conversations: Sequence[ConversationLike]) -> list[float]:
        return self.judge(conversations).scores

    def score_each(self, conversations: Sequence[ConversationLike]) -> list[float | RowError]:
        """Score as `score` does; a conversation that any member cannot score has no score and is in no z-score."""
        # Members of one call see the same conversations, so that z-scores over the call are comparable.
        by_member = [member.score_each(conversations) for member in self.members]
        errors = [_first_error(scores) for scores in zip(*by_member, strict=True)]
        raw = [[score for score, error in zip(scores, errors, strict=True) if error is None] for scores in by_member]
        combined = iter(self.combine(self._scaled(raw), axis=0).tolist())
        return [next(combined) if error is None else error for error in errors]

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        return [judged.scores for judged in self.judge_groups(groups)]

    def judge(self, conversations: Sequence[ConversationLike]) -> Judged:
        """Score as `score` does, with the uncertainty of each score."""
        scores = self.member_scores(conversations)
        return Judged(self.combine(scores, axis=0).tolist(), scores.std(axis=0).tolist())

    def judge_groups(self, groups: Sequence[Group]) -> list[Judged]:
        """Score as `score_groups` does, with the uncertainty of each score."""
        conversations = conversations_of(groups)
        judged = self.judge(list(chain.from_iterable(conversations)))
        return [Judged(*group) for group in zip(*(regrouped(part, conversations) for part in judged), strict=True)]

    def member_scores(self, conversations: Sequence[ConversationLike]) -> np.ndarray:
        """Return each member's scaled scores: [members, N]."""
        return self._scaled([member.score(conversations) for member in self.members])

    def _scaled(self, raw: Sequence[Sequence[Any]]) -> np.ndarray:
        return np.stack([scale(scores) for scale, scores in zip(self.scales, raw, strict=True)])


def _first_error(scores: Sequence[float | RowError]) -> RowError | None:
    return next((score for score in scores if isinstance(score, RowError)), None)


def load_ensemble(
    models: Sequence[str | Path], *, combine: str = "mean", scale: str = "saved", **options: Any
) -> Ensemble:
    """Load several checkpoints as an ensemble.

    Args:
        models: the folders of the checkpoints.
        combine: `mean` or `min`.
        scale: `saved`: by the mean and std of held-out scores that each checkpoint carries, so that a score does not
            depend on what is scored with it; `call`: z-scores over each call.
        options: keywords of `load_scorer`, for every checkpoint.
    """
    folders = [Path(model).resolve() for model in models]
    if len(set(folders)) < len(folders):
        raise ConfigError("an ensemble names a checkpoint twice: name each once.")
    if scale not in SCALES:
        raise ConfigError(f"scale is {scale!r}: choose one of {', '.join(SCALES)}.")
    members = [load_local_scorer(model, **options) for model in models]
    scales = None
    if scale == "saved":
        scales = [
            Normalization.of(member.loaded.info, str(model)) for member, model in zip(members, models, strict=True)
        ]
    return Ensemble(members, scales=scales, combine=combine)
