"""The exception tree. Every error a user can cause is one of these, and prints as one sentence.

A message says what is wrong, where, and what to do. docs/troubleshooting.md has a table of the exit codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")


class VlmrmError(Exception):
    """Base of every error raised on purpose; `exit_code` is the process's exit status."""

    exit_code = 1


class ConfigError(VlmrmError):
    """A configuration key, command-line flag or combination that cannot work."""

    exit_code = 2


class DataError(VlmrmError):
    """A data set that cannot be read as preferences."""

    exit_code = 3


class RowError(DataError):
    """A row that cannot be used; `row_id` names it in its source, `reason` is the message without that name."""

    def __init__(self, message: str, row_id: str | None = None):
        super().__init__(message if row_id is None else f"row {row_id}: {message}")
        self.row_id = row_id
        self.reason = message

    def __reduce__(self):
        # DataLoader workers send exceptions to the main process by pickling them.
        return type(self), (self.reason, self.row_id)


class MediaError(RowError):
    """An image or video that cannot be read or shown to the model."""


class ScoreError(RowError):
    """A score that is not a finite number: the model is to blame, not the row."""


class UnreadColumnError(RowError):
    """A column that holds media or a part of the conversation, but that its layout does not read."""


class CheckpointError(VlmrmError):
    """A checkpoint that is missing, broken, incomplete, or made for something else."""

    exit_code = 4


class TrainingError(VlmrmError):
    """A training run that cannot go on."""

    exit_code = 5


class BelowThreshold(VlmrmError):
    """An evaluation with a checkpoint that misses a required figure."""

    exit_code = 6


class RewardError(VlmrmError):
    """A reward that cannot be computed; the message names the reward and the sample."""

    exit_code = 7


class Denied(RewardError):
    """A call that would be refused in every round: where it is all that a round got, no `on_failure` masks it."""


class Interrupted(VlmrmError, KeyboardInterrupt):
    """A run that was stopped by Ctrl-C; the message names its newest checkpoint."""

    exit_code = 130


class Preempted(VlmrmError):
    """A run that received SIGTERM and stopped, after saving a checkpoint if there was anything to save."""

    exit_code = 143


WEIGHTS = ": look for broken weights, or compute in float32"  # what to do where it is our model that gave it


def finite_or_error(score: float, label: str = "score", row_id: str | None = None) -> float | ScoreError:
    """Return the score, or an error if it is NaN or infinite: NaN would pass unnoticed into means and advantages.

    A user's own scorer may also answer what is no number.
    """
    try:
        if math.isfinite(score):
            return score
    except TypeError:
        return ScoreError(f"its {label} is {score!r:.60}, which is no number", row_id)
    return ScoreError(f"its {label} is {score}{WEIGHTS}", row_id)


def or_error(make: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made | RowError:
    """Return what `make` returns, or the error of a row that it raises."""
    try:
        return make(*given, **named)
    except RowError as error:
        return error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the name of the error if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
