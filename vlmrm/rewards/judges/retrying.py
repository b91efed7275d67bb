"""What a status of a judge's server means, and how long to wait before another try."""

from __future__ import annotations

from vlmrm.errors import RewardError
from vlmrm.http import Unavailable

PASSING = (408, 409, 429)  # a timeout, a conflict, too many calls; and 500 or more
OF_THE_ITEM = (400, 413, 422)  # the server lives, but does not take this item
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds


class Refused(RewardError):
    """An item that the server does not take."""


def failed_call(status: int, said: str, retry_after: float | None) -> RewardError:
    """The error of an HTTP status that is no success: Unavailable, Refused, or one of the server that stays."""
    reason = f"it answered {status}: {said}"
    if status in PASSING or status >= 500:
        return Unavailable(reason, retry_after)
    return Refused(reason) if status in OF_THE_ITEM else RewardError(reason)


def wait(error: Unavailable, tries: int, jitter: float) -> float:
    """Seconds until the next try, after `tries` of them; `jitter` in [0, 1) keeps callers from coming all at once.

    What the server asks for, and otherwise twice as long each time.
    """
    if error.wait is not None:
        return error.wait + FIRST_WAIT * jitter
    return min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)) * (1 + jitter) / 2
