"""Whether a scorer of frames is a reward: its threshold, its figures on episodes it has not seen, and a verdict.

The threshold is chosen on one half of the episodes and proved on the other, in both directions. In a bound an episode
counts once, however many frames it has: the bounds of whole episodes are Clopper and Pearson's, those of shares of an
episode's frames Gaffke's (2005), which are the same where the shares are 0 and 1. A success is compared with episodes
of the same scenery that have not succeeded at that step: where scores depend on scenery and step alone, its rank among
them is as if drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import betaincinv, log_expit
from scipy.stats import mannwhitneyu

from vlmrm_robots.frames.settings import Limits

MIN_EPISODES = 6  # with a success, and with a failure: of fewer no bound is above chance
ENOUGH = 12  # of each side, for what errs seldom: see the table of docs/frames.md
CONFIDENCE = 0.95  # of a bound on one side
DOUBT = (1 - CONFIDENCE) / 2  # the most likely that chance may be to do as well
CHANCE = 0.5  # of an AUC, and of a precision among as many successes as failures
FALSE_FIRE = 2.0  # so many successes must a threshold win for one failing episode in which it fires
DRAWS = 4000
FIRES = {"false": "failed", "early": "successful"}  # figures of fires, and of the episodes of which they are counted


@dataclass(frozen=True)
class HeldOut:
    """Scored frames: score, label (0 or 1), episode and step of each [N], and its scenery [N], which is compared."""

    scores: np.ndarray
    labels: np.ndarray
    episodes: np.ndarray
    steps: np.ndarray
    sceneries: np.ndarray

    def played(self, ignore_around: int) -> list[Played]:
        """Return the episodes, without the failures that are as near to a success as `ignore_around`."""
        found = []
        for name in np.unique(self.episodes):
            chosen = np.flatnonzero(self.episodes == name)
            steps, success = self.steps[chosen], self.labels[chosen] == 1
            near = np.abs(steps[:, None] - steps[success]).min(axis=1, initial=np.iinfo(np.int64).max)
            failure = ~success & (near > ignore_around)
            found.append(Played(int(name), self.scores[chosen], steps, success, failure, self.sceneries[chosen[0]]))
        return found


@dataclass(frozen=True)
class Played:
    """An episode: the score and step of each frame [T], which are successes and which failures, and its scenery."""

    episode: int
    scores: np.ndarray
    steps: np.ndarray
    success: np.ndarray
    failure: np.ndarray
    scenery: int

    @cached_property
    def succeeds(self) -> bool:
        return bool(self.success.any())

    @cached_property
    def peak(self) -> float:
        """The highest score of a failure; -inf without one."""
        return float(self.scores[self.failure].max(initial=-np.inf))

    def share(self, chosen: np.ndarray, threshold: Any) -> Any:
        """Return the share of the chosen frames above a threshold, or above each of several."""
        ordered = np.sort(self.scores[chosen])
        return 1 - np.searchsorted(ordered, threshold, "right") / len(ordered)


@dataclass(frozen=True)
class Verdict:
    """The figures of a scorer above `threshold`, and why it is no reward; None if it qualifies.

    `worst` are each episode's highest failure and lowest success, worst first, as an episode and a step.
    """

    threshold: float
    figures: dict[str, float]
    reason: str | None
    worst: tuple[list[tuple[int, int]], list[tuple[int, int]]]


def qualify(held_out: HeldOut, limits: Limits, threshold: float | None = None) -> Verdict:
    """Return whether scored frames of episodes that a scorer has not seen show it to be a reward.

    Without a `threshold`, one is chosen on each half of the episodes. The higher of both is the verdict's: false fires
    count above the one that the other half has chosen, and successes above the higher.
    """
    played = held_out.played(limits.ignore_around)
    proved = np.full(len(played), threshold, dtype=np.float64)
    if threshold is None:
        second = np.zeros(len(played), dtype=bool)  # every other one of those that fail, and of those that succeed
        second[np.argsort([one.succeeds for one in played], kind="stable")[1::2]] = True
        for half in (second, ~second):
            proved[~half] = choose_threshold([played[i] for i in np.flatnonzero(half)])
        threshold = float(proved.max())
    measured = figures(played, threshold, proved)
    return Verdict(threshold, measured, disqualification(measured, limits), (_worst(played, -1), _worst(played, 1)))


def _worst(played: Sequence[Played], sign: int) -> list[tuple[int, int]]:
    found = []
    for one in played:
        scores = np.where(one.success if sign > 0 else one.failure, sign * one.scores, np.inf)
        found.append((float(scores.min()), one.episode, int(one.steps[scores.argmin()])))
    return [(episode, step) for score, episode, step in sorted(found) if score < np.inf]


def choose_threshold(played: Sequence[Played]) -> float:
    """Return the score above which the mean share of successes, less `FALSE_FIRE` times that of fires, is highest.

    A fire is a failing episode, or the failures of another, with a frame above. Of the scores with that difference it
    is the middle; where none is above 0, the highest of all, above which nothing is rewarded.
    """
    peaks = np.unique([one.peak for one in played if one.failure.any()])
    winning = [one for one in played if one.succeeds]
    if not winning or not len(peaks):
        return max((float(one.scores.max()) for one in played), default=np.inf)
    recall = np.mean([one.share(one.success, peaks) for one in winning], axis=0)
    fires = np.mean([one.peak > peaks for one in played if one.failure.any()], axis=0)
    gain = (recall - FALSE_FIRE * fires)[::-1]
    lowest = peaks[::-1][gain.argmax()]
    above = [one.scores[one.success & (one.scores > lowest)] for one in winning]
    rewarded = np.concatenate(above).min(initial=np.inf)
    return float(lowest if np.isinf(rewarded) else (lowest + rewarded) / 2)


# Bounds --------------------------------------------------------------------------------------------------------------


def upper_bound(count: int, of: int) -> float:
    """Return the share that `count` of `of` episodes leave possible, with 95 % confidence; 1 for none."""
    return float(betaincinv(count + 1, of - count, CONFIDENCE)) if count < of else 1.0


def lower_mean(shares: np.ndarray, confidence: float = 1 - DOUBT) -> float:
    """Return a lower bound of the mean of which shares [E], each from 0 to 1, are drawn: Gaffke's.

    It is a quantile of the mean with random weights (Dirichlet's), in which another share, 0, has a weight too. Of
    zeros and ones it is Clopper and Pearson's.
    """
    weights = np.random.default_rng(0).standard_exponential((DRAWS, len(shares) + 1))
    return float(np.quantile(weights[:, 1:] @ shares / weights.sum(axis=1), 1 - confidence))


def episodes_needed(share: float) -> int:
    """Return the least number of failed episodes, none of which fires, that shows at most this share."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(1 - share)))


def same_step(played: Sequence[Played]) -> tuple[float, float, float]:
    """Compare each first success with failures of the same scenery at the same step.

    Returns the share of pairs in order (ties as halves), how likely scores that depend on scenery and step alone have
    as high a share, and how likely they have all in order: above `DOUBT`, nothing can be shown.
    """
    starts = np.array([one.steps[one.success].min(initial=np.iinfo(np.int64).max) for one in played])
    below, sizes = 0.0, []
    for first, start in zip(played, starts, strict=True):
        same = zip(played, starts > start, strict=True)  # one that has succeeded before is no rival any more
        rivals = [
            one.scores[one.failure & (one.steps == start)]
            for one, later in same
            if later and one.scenery == first.scenery
        ]
        if len(others := np.concatenate([*rivals, []])):
            score = first.scores[first.steps == start]
            below += (others < score).sum() + (others == score).sum() / 2
            sizes.append(len(others))
    if not sizes:
        return np.nan, 1.0, 1.0
    ranks = np.array(sizes) + 1
    drawn = np.random.default_rng(0).integers(0, ranks, (DRAWS, len(ranks))).sum(axis=1)
    return below / sum(sizes), float((1 + (drawn >= below).sum()) / (1 + DRAWS)), float(np.prod(1.0 / ranks))


def before_success(played: Sequence[Played]) -> np.ndarray:
    """Return for each episode the share of its successes above its last failure before the first of them.

    Ties are halves; an episode without such a failure is left out.
    """
    shares = []
    for one in played:
        earlier = np.flatnonzero(one.failure[: int(one.success.argmax())]) if one.succeeds else []
        if len(earlier):
            after, before = one.scores[one.success], one.scores[earlier[-1]]
            shares.append((after > before).mean() + (after == before).mean() / 2)
    return np.array(shares)


# Figures -------------------------------------------------------------------------------------------------------------


def figures(played: Sequence[Played], threshold: float, proved: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the figures of episodes; failures of episode i fire above `proved[i]`. NaN where nothing is counted.

    `precision_low` is for as many successes as failures: of the mean recall of an episode, and of its mean share of
    failures that fire, each has the worse of two bounds of 97.5 %.
    """
    winning = [one for one in played if one.succeeds]
    every = [*zip(played, map(float, proved), strict=True)]
    false, early = ([one.peak > cut for one, cut in every if one.succeeds == side] for side in (False, True))
    recall = np.array([one.share(one.success, threshold) for one in winning])
    rate = np.array([one.share(one.failure, cut) for one, cut in every if one.failure.any()])
    recall_low, rate_high = lower_mean(recall), 1 - lower_mean(1 - rate)
    successes, failures = (np.array([getattr(one, of).sum() for one in played]) for of in ("success", "failure"))
    hits, false_hits = recall @ successes[successes > 0], rate @ failures[failures > 0]
    ordered, chance, at_best = same_step(played)
    edge = before_success(played)
    frames = sum(len(one.scores) for one in played)
    return {
        "validation_frames": frames,
        "validation_successes": int(successes.sum()),
        "auc": _auc(played),
        "same_step_auc": ordered,
        "same_step_chance": chance,
        "same_step_chance_at_best": at_best,
        "before_success_auc": _share(edge.sum(), len(edge)),
        "before_success_auc_low": lower_mean(edge),
        "before_success_episodes": len(edge),
        "precision": _share(hits, hits + false_hits),
        "precision_low": _share(recall_low, recall_low + rate_high),
        "recall": _share(hits, successes.sum()),
        "recall_low": recall_low,
        "false_positive_rate": _share(false_hits, failures.sum()),
        "false_positive_rate_high": rate_high,
        "ignored_frames": frames - int(successes.sum() + failures.sum()),
        "successful_episodes": len(winning),
        "failing_episodes": len(rate),
        "failed_episodes": len(false),
        "false_fires": sum(false),
        "false_fires_high": upper_bound(sum(false), len(false)),
        "early_fires": sum(early),
        "early_fires_high": upper_bound(sum(early), len(early)),
    }


def _auc(played: Sequence[Played]) -> float:
    good, bad = (np.concatenate([one.scores[getattr(one, of)] for one in played]) for of in ("success", "failure"))
    if not len(good) or not len(bad):
        return np.nan
    return float(mannwhitneyu(good, bad).statistic / (len(good) * len(bad)))


def _share(part: Any, of: Any) -> float:
    return float(part / of) if of else np.nan


def loss_of(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean binary cross-entropy of logits[N] for labels[N] of 0 and 1."""
    return -float(log_expit(np.where(labels == 1, logits, -logits).astype(np.float64)).mean())


def disqualification(measured: Mapping[str, float], limits: Limits) -> str | None:
    """Return why a scorer with these `figures` is no reward, and what would help; None if it qualifies."""
    if min(measured["successful_episodes"], measured["failing_episodes"]) < MIN_EPISODES:  # no bound can be met
        return (
            f"{measured['successful_episodes']:.0f} held-out episodes show a success and "
            f"{measured['failing_episodes']:.0f} a failure, of which at least {MIN_EPISODES} each are needed (collect "
            f"more: {ENOUGH} that succeed and {ENOUGH} that fail are enough for most; a training may hold out more)"
        )
    reasons = [*_doubts_of_sight(measured, limits), *_doubts_of_fires(measured, limits)]
    if np.isnan(measured["precision"]):
        turned = "turn its scores round" if measured["auc"] < CHANCE else "train it longer"
        reasons.append(f"no threshold rewards more successes than it fires for nothing ({turned})")
    elif not measured["precision"] >= limits.min_precision:
        reasons.append(
            f"its precision is {measured['precision']:.3f}, below min_precision, {limits.min_precision:g} (train it "
            "on more of what it takes for a success)"
        )
    elif not measured["precision_low"] > CHANCE:
        reasons.append(
            f"among as many successes as failures its precision may be as low as {measured['precision_low']:.3f}, not "
            f"above {CHANCE} (measure it on more episodes)"
        )
    return ", and ".join(reasons) or None


def _doubts_of_sight(measured: Mapping[str, float], limits: Limits) -> Iterator[str]:
    """Yield why it may not see the success itself."""
    if not measured["same_step_chance_at_best"] <= DOUBT:
        yield (
            "whether it sees more than scenery and step cannot be told, because too few successes begin where an "
            "episode of the same scenery has not succeeded yet (collect failures from the starts of successes, or "
            "successes that begin at other steps)"
        )
    elif not measured["same_step_chance"] <= DOUBT:
        yield (
            f"of pairs of a success and an episode of the same scenery that has not succeeded at that step, "
            f"{measured['same_step_auc']:.0%} are in order, which chance does with a probability of "
            f"{measured['same_step_chance']:.2f}: it may know scenery and step alone (train on failures from the "
            "starts of successes)"
        )
    if (count := measured["before_success_episodes"]) < MIN_EPISODES:
        yield (
            f"{count:.0f} successes have a failure more than {limits.ignore_around} steps before them, and "
            f"{MIN_EPISODES} are needed (begin episodes earlier, or lower ignore_around)"
        )
    elif not measured["before_success_auc_low"] > CHANCE:
        yield (
            f"{limits.ignore_around + 1} steps before a success it scores below {measured['before_success_auc']:.0%} "
            f"of the successes after it, and perhaps below {measured['before_success_auc_low']:.0%}: it may fire near "
            "a success (collect episodes that come near and fail; if the labels are late, raise ignore_around)"
        )


def _doubts_of_fires(measured: Mapping[str, float], limits: Limits) -> Iterator[str]:
    """Yield in which episodes it fires for nothing."""
    share = limits.max_false_fires
    for fires, episodes in FIRES.items():
        which = "that fail" if fires == "false" else "that succeed, beside the success"
        count, high = measured[f"{episodes}_episodes"], measured[f"{fires}_fires_high"]
        if high > share:
            yield (
                f"it fires in {measured[f'{fires}_fires']:.0f} of the {count:.0f} held-out episodes {which}, so that "
                f"it may fire in {high:.0%} of all, more than max_false_fires, {share:.0%} (which "
                f"{episodes_needed(share)} episodes without a fire would show)"
            )


def in_words(measured: Mapping[str, float], threshold: float) -> str:
    """Return `figures` in three lines, with the threshold on the scale that users see."""
    shown = {name: "unknown" if np.isnan(value) else f"{value:.4f}" for name, value in measured.items()}
    return (
        f"  AUC {shown['auc']}, at the same step in the same scenery {shown['same_step_auc']}, just before a success "
        f"{shown['before_success_auc']}\n"
        f"  above {threshold:.4g}: precision {shown['precision']}, recall {shown['recall']} (at least "
        f"{shown['recall_low']}), false positives {shown['false_positive_rate']} (at most "
        f"{shown['false_positive_rate_high']}); {measured['ignored_frames']:.0f} near a success do not count\n"
        f"  it fires in {measured['false_fires']:.0f} of {measured['failed_episodes']:.0f} episodes that fail, at "
        f"most {measured['false_fires_high']:.0%} of all such; in {measured['early_fires']:.0f} of "
        f"{measured['successful_episodes']:.0f} that succeed, beside it, at most {measured['early_fires_high']:.0%}"
    )
