"""The expectation of a reward over the digits that a judge might have written instead."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable

from vlmrm.errors import RewardError
from vlmrm.rewards.judges.replies import Reply

NEGLIGIBLE = 1e-5  # probability


def expected_reward(reply: Reply, read: Callable[[str], float]) -> float:
    """Return the expected reward over the likeliest digits in each place, the others as they were written.

    With p the probabilities of the digits d that give a reward, Σ p(d) read(d) / Σ p(d): of one score exactly its
    expectation, of a mean of scores the mean of theirs. Digits that change no score change nothing.

    Raises:
        RewardError: when the reply has no log-probabilities, or `read` refuses it as it is.
    """
    if reply.digits is None:
        raise RewardError("the server sent no log-probabilities of the digits: it must support logprobs")
    answer = reply.text.rfind("</think>")
    written = read(reply.text)
    total = written
    for start, token, likeliest in reply.digits:
        if start < answer:
            continue
        chances: dict[str, float] = defaultdict(float)
        for text, logprob in likeliest:
            if (digits := text.strip()).isdecimal() and digits.isascii():
                chances[digits] += math.exp(logprob)
        weights, weighted = chances.pop(token, 0.0), 0.0
        for digits, chance in chances.items():
            if chance > NEGLIGIBLE and (other := _read(reply.text, start, token, digits, read)) is not None:
                weights += chance
                weighted += chance * (other - written)
        total += weighted / weights if weights > 0 else 0.0
    return total


def _read(text: str, start: int, token: str, digits: str, read: Callable[[str], float]) -> float | None:
    """Return the reward of `text` with other digits at `start`, None where it has none: it is off the scale."""
    before, after = text[:start], text[start + len(token) :]
    if not re.search(r"\d[.,]?\d*$", before):  # the first of a number: 8 instead of 10, not 80
        after = re.sub(r"^\d+", "", after)
    try:
        return read(before + digits + after)
    except RewardError:
        return None
