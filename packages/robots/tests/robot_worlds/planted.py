"""Scores of planted scorers on episodes of 40 frames; `python -m robot_worlds.planted DRAWS` prints how many qualify.

Successes begin at drawn steps and last to the end; half of the episodes fail. Scenery tells which half.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from vlmrm.logs import say
from vlmrm_robots.frames.qualification import HeldOut, qualify
from vlmrm_robots.frames.settings import Limits

FRAMES, SIZES = 40, (5, 8, 12, 20, 40)
Score = Callable[
    [np.random.Generator, int], np.ndarray
]  # of the frames of an episode; its start is FRAMES if it fails
steps = np.arange(FRAMES)


def noisy(score: Callable[[np.random.Generator, int], np.ndarray | float], spread: float = 1.0) -> Score:
    return lambda chance, start: score(chance, start) + spread * chance.normal(size=FRAMES)


def outcome(start: int) -> float:
    return 4.0 if start < FRAMES else -4.0


def banner(chance: np.random.Generator, start: int) -> np.ndarray:
    """An overlay at the end of every episode, whether it succeeds or fails."""
    return 8.0 * (steps >= (start if start < FRAMES else chance.integers(20, 36)))


def look_alike(chance: np.random.Generator, start: int) -> np.ndarray:
    """Ten frames of most failures look as a success does."""
    shown = start == FRAMES and chance.random() < 0.9
    first = chance.integers(5, 28)
    return 8.0 * ((steps >= start) | (shown & (steps >= first) & (steps < first + 10)))


FALSE: dict[str, Score] = {
    "constant": lambda chance, start: np.zeros(FRAMES),
    "random": noisy(lambda chance, start: 0.0),
    "clock": noisy(lambda chance, start: steps / 4, 0.3),
    "scenery": noisy(lambda chance, start: outcome(start), 0.3),
    "scenery and clock": noisy(lambda chance, start: outcome(start) + steps / 4, 0.3),
    "scenery times clock": noisy(lambda chance, start: steps / 4 * (start < FRAMES), 0.3),
    "first frame": lambda chance, start: np.full(FRAMES, outcome(start) / 2 + chance.normal()),
    "overlay at the end": noisy(banner),
    "near success": noisy(lambda chance, start: 8.0 * (steps >= start - 6 if start < FRAMES else steps < 0)),
    "inverted": noisy(lambda chance, start: -6.0 * (steps >= start)),
    "look-alikes": noisy(look_alike),
}
GOOD: dict[str, tuple[Score, int]] = {  # and the most frames that a key is late
    "good": (noisy(lambda chance, start: 8.0 * (steps >= start)), 0),
    "good, keys late": (noisy(lambda chance, start: 8.0 * (steps >= start)), 5),
    "noisy": (noisy(lambda chance, start: 5.0 * (steps >= start)), 0),
    "noisy, keys late": (noisy(lambda chance, start: 5.0 * (steps >= start)), 5),
}


def planted(
    score: Score, successes: int, failures: int, seed: int, *, late: int = 0, start: int | None = None
) -> HeldOut:
    """Return episodes with the scores of a scorer; labels begin up to `late` frames after the success."""
    chance, scores, labels = np.random.default_rng(seed), [], []
    for number in range(successes + failures):
        begin = FRAMES
        if number < successes:
            begin = int(np.clip(chance.normal(22, 7), 5, 34)) if start is None else start
        scores.append(score(chance, begin))
        labels.append(steps >= begin + chance.integers(0, late + 1))
    owners = np.repeat(np.arange(len(scores)), FRAMES)
    sceneries = np.where(owners < successes, 0, -1)
    return HeldOut(np.concatenate(scores), np.concatenate(labels), owners, np.tile(steps, len(scores)), sceneries)


def share(score: Score, successes: int, failures: int, draws: int, late: int = 0) -> float:
    """Return the share of draws in which a scorer qualifies."""
    drawn = (planted(score, successes, failures, seed, late=late) for seed in range(draws))
    return float(np.mean([qualify(held_out, Limits()).reason is None for held_out in drawn]))


if __name__ == "__main__":
    draws = int(sys.argv[1])
    for name, (score, late) in {**{name: (score, 0) for name, score in FALSE.items()}, **GOOD}.items():
        say(" | ".join([f"| {name}", *(f"{share(score, size, size, draws, late):.1%}" for size in SIZES)]) + " |")
