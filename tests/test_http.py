"""Retry-After, retries, their messages, and the hosts of this machine."""

from __future__ import annotations

import asyncio

import pytest
import stamina

from vlmrm.errors import RewardError
from vlmrm.http import LONGEST_WAIT, Unavailable, retried, retry_after


@pytest.mark.parametrize(
    ("header", "seconds"), [("3", 3.0), ("-5", 0.0), (None, None), ("", None), ("Fri, 01 Jan 2100 00:00:00 GMT", None)]
)
def test_retry_after_is_seconds_or_nothing(header, seconds):
    assert retry_after(header) == seconds


@pytest.mark.parametrize(
    ("error", "seconds", "tries"),
    [
        (Unavailable("starting"), 1.0, 2),
        (Unavailable("busy", 7.0), 8.0, 2),
        (Unavailable("busy", 7.0), 7.0, 1),
        (Unavailable("busy", LONGEST_WAIT + 1), 3600.0, 1),
        (Unavailable("starting"), 0.0, 1),
        (RewardError("no such model"), 3600.0, 1),
    ],
)
def test_a_request_is_retried_within_the_caller_patience(error, seconds, tries):
    asked = []

    async def send(left: float) -> None:
        asked.append(left)
        raise error

    with stamina.set_testing(True, attempts=2), pytest.raises(type(error), match=str(error)):
        asyncio.run(retried(send, seconds=seconds))
    assert len(asked) == tries
