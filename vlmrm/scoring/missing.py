"""What takes the place of a missing reward: the mean of its group, so that its sample is neither paid nor punished.

A zero would do either: raw logits have no zero.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.data.media import media_key
from vlmrm.errors import ConfigError, RewardError, RowError

logger = logging.getLogger("vlmrm")

ON_FAILURE = ("mean", "raise")


def with_group_means(values: np.ndarray, groups: Sequence[Hashable]) -> np.ndarray:
    """Return `values` [N] with each NaN as the mean of its group; it stays where the whole group is missing."""
    present: dict[Hashable, list[float]] = {}
    for group, value in zip(groups, values.tolist(), strict=True):
        if not np.isnan(value):
            present.setdefault(group, []).append(value)
    means = [float(np.mean(present[group])) if group in present else np.nan for group in groups]
    return np.where(np.isnan(values), means, values)


def without_failures(
    name: str, scores: Sequence[float | RowError], groups: Sequence[Hashable], on_failure: str
) -> list[float | None]:
    """Return the scores with each failed one as the mean of its group; None where the whole group failed.

    Args:
        name: what messages call the reward.
        groups: what tells each sample's prompt from others, such as `prompt_key`.
        on_failure: `mean`, or `raise`.

    Raises:
        RewardError: naming the first sample that failed, under `raise`.
    """
    failed = {place: score.reason for place, score in enumerate(scores) if isinstance(score, RowError)}
    values = np.array([np.nan if isinstance(score, RowError) else score for score in scores], dtype=np.float64)
    settled = [None if np.isnan(value) else value for value in with_group_means(values, groups).tolist()]
    for place, reason in failed.items():
        if on_failure == "raise":
            raise RewardError(f"reward {name}: sample {place}: {reason}")
        instead = "nor has its group" if settled[place] is None else f"it gets its group's mean, {settled[place]:.4g}"
        logger.warning("reward %s: sample %d has none: %s; %s", name, place, reason, instead)
    return settled


def checked_on_failure(on_failure: str) -> str:
    """Return the policy.

    Raises:
        ConfigError: when there is no such one.
    """
    if on_failure not in ON_FAILURE:
        raise ConfigError(f"on_failure is {on_failure!r}: choose from {', '.join(ON_FAILURE)}.")
    return on_failure


def prompt_key(value: Any) -> Hashable:
    """Return what is equal for prompts that say and show the same: of texts, messages, and media of any kind."""
    if isinstance(value, Mapping):
        return tuple((str(name), prompt_key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(prompt_key(item) for item in value)
    if isinstance(value, (bytes, Image.Image)):
        return media_key(value)
    return value if isinstance(value, Hashable) else id(value)  # alike to itself at least
