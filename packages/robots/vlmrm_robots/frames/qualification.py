"""Figures of a classifier on frames that no training has seen, its threshold, and whether it qualifies as a reward.

It does if held-out episodes leave little doubt that it tells successes from failures, also within an episode, where
the scenery does not give the answer away. Frames of one episode are alike, so bounds are bootstrapped over episodes;
whole episodes are counted, with exact bounds (Clopper-Pearson).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_expit
from scipy.stats import binomtest

MIN_EPISODES = 5  # with a success, and with a failure
MIN_AUC = 0.6  # of the lower bound; 0.5 is chance
MIN_PRECISION = 0.9  # of the frames above the threshold, of the lower bound
MAX_FALSE_FIRES = 0.5  # share of failed episodes, of the upper bound
DRAWS = 1000
CANDIDATES = 256  # thresholds that are tried at once
LOWER, UPPER = 0.025, 0.975  # the ends of a 95 % interval
CONFIDENCE = 0.95  # of a bound on one side


@dataclass(frozen=True)
class HeldOut:
    """Scored frames: logits [N], labels [N] of 0 and 1, and the episode [N] of each."""

    logits: np.ndarray
    labels: np.ndarray
    episodes: np.ndarray

    @cached_property
    def owners(self) -> np.ndarray:
        """The episodes as numbers from 0 on: [N]."""
        return np.unique(self.episodes, return_inverse=True)[1]

    @cached_property
    def draws(self) -> np.ndarray:
        """How often each of E episodes is in a sample of as many, drawn with replacement: [DRAWS, E]."""
        count = int(self.owners.max()) + 1
        return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS).astype(np.float64)

    def count(self, chosen: np.ndarray) -> np.ndarray:
        """Return how many frames of each episode are chosen: [E]."""
        return np.bincount(self.owners[chosen], minlength=self.draws.shape[1])

    def peaks(self) -> np.ndarray:
        """Return the highest logit of each failed episode, one without any success."""
        highest = np.full(self.draws.shape[1], -np.inf)
        np.maximum.at(highest, self.owners, self.logits)
        return highest[self.count(self.labels == 1) == 0]


def choose_threshold(
    held_out: HeldOut,
    target_fpr: float,
    max_false_fires: float = MAX_FALSE_FIRES,
    min_precision: float = MIN_PRECISION,
) -> float:
    """Return the highest logit with the recall of the lowest that three limits allow.

    Above it lie at most the share `target_fpr` of the failures; with 95 % confidence at most the share
    `max_false_fires` of failed episodes has a frame there, or none, where too few were held out to show that; and at
    least the share `min_precision` of the frames there are successes, or else no failure is.
    """
    logits = held_out.logits
    failures = np.sort(logits[held_out.labels == 0])[::-1]
    lowest = failures[int(target_fpr * len(failures))]
    if len(peaks := np.sort(held_out.peaks())[::-1]):
        tolerated = sum(upper_bound(fires, len(peaks)) <= max_false_fires for fires in range(len(peaks)))
        lowest = max(lowest, peaks[max(tolerated - 1, 0)])  # bounds grow with the fires
    lowest = _precise(held_out, np.append(lowest, failures[::-1][failures[::-1] > lowest]), min_precision)
    rewarded = logits[(held_out.labels == 1) & (logits > lowest)]
    if not len(rewarded):
        return float(logits.max())  # no threshold has a recall, and this one rewards nothing
    return float((logits[logits < rewarded.min()].max() + rewarded.min()) / 2)


def _precise(held_out: HeldOut, candidates: np.ndarray, precision: float) -> float:
    """Return the first of ascending thresholds above which the precision's lower bound is as high; else the last."""
    draws, positive = held_out.draws, held_out.labels == 1
    scores = [
        [np.sort(held_out.logits[(held_out.owners == owner) & chosen]) for owner in range(draws.shape[1])]
        for chosen in (positive, ~positive)
    ]
    for start in range(0, len(candidates), CANDIDATES):
        chunk = candidates[start : start + CANDIDATES]
        hits, false_hits = (
            np.array([len(of) - np.searchsorted(of, chunk, "right") for of in episodes]) for episodes in scores
        )
        bounds = np.quantile(_ratio(draws @ hits, draws @ (hits + false_hits), 0.0), LOWER, axis=0)
        if (bounds >= precision).any():
            return float(chunk[np.argmax(bounds >= precision)])
    return float(candidates[-1])


def upper_bound(count: int, of: int) -> float:
    """Return the share that `count` of `of` episodes leave possible, with 95 % confidence; 1 for none."""
    return float(binomtest(count, of, alternative="less").proportion_ci(CONFIDENCE).high) if of else 1.0


def episodes_needed(share: float) -> int:
    """Return the least number of failed episodes, none of which fires, that shows at most this share."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(1 - share)))


def figures(held_out: HeldOut, threshold: float) -> dict[str, float]:
    """Return the figures of scored frames with a threshold on the logit.

    Those of frames have the ends `_low` and `_high` of their 95 % intervals, by a percentile bootstrap over episodes;
    NaN where nothing is counted. `episode_auc` is that of pairs of frames of one episode. `false_fires_high` is the
    share of all failed episodes that may have a frame above the threshold.
    """
    positive, above = held_out.labels == 1, held_out.logits > threshold
    successes, failures, hits, false_hits = (
        held_out.count(chosen) for chosen in (positive, ~positive, positive & above, ~positive & above)
    )
    pairs, of_pairs = ordered_pairs(held_out), np.outer(successes, failures)

    def sums(draws: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
        """Return what is counted, of how many, and what a share of none is, for samples [D,E] of episodes."""
        return {
            "auc": (_over_pairs(draws, pairs), _over_pairs(draws, of_pairs), 0.5),
            "episode_auc": (draws @ pairs.diagonal(), draws @ of_pairs.diagonal(), 0.5),
            "recall": (draws @ hits, draws @ successes, 0.0),
            "precision": (draws @ hits, draws @ (hits + false_hits), 0.0),
            "false_positive_rate": (draws @ false_hits, draws @ failures, 0.0),
        }

    values = {"loss": loss_of(held_out.logits, held_out.labels)}
    whole = sums(np.ones((1, len(hits))))
    for name, (part, of, otherwise) in sums(held_out.draws).items():
        low, high = np.quantile(_ratio(part, of, otherwise), (LOWER, UPPER))
        value = _ratio(*whole[name][:2], np.nan).item()
        values |= {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
    peaks = held_out.peaks()
    fires = int((peaks > threshold).sum())
    return values | {
        "successful_episodes": int((successes > 0).sum()),
        "failing_episodes": int((failures > 0).sum()),
        "failed_episodes": len(peaks),
        "false_fires": fires,
        "false_fires_high": upper_bound(fires, len(peaks)),
    }


def loss_of(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean binary cross-entropy of logits[N] for labels[N] of 0 and 1."""
    return -float(log_expit(np.where(labels == 1, logits, -logits).astype(np.float64)).mean())


def ordered_pairs(held_out: HeldOut) -> np.ndarray:
    """Return how many pairs of a success of episode i and a failure of episode j are in order, ties as halves: [E,E].

    The sum over a drawn sample is its AUC, so that no draw needs to sort frames again.
    """
    logits, owners, positive = held_out.logits, held_out.owners, held_out.labels == 1
    count = held_out.draws.shape[1]
    ordered = np.zeros((count, count))
    for j in range(count):
        failures = np.sort(logits[(owners == j) & ~positive])
        below = sum(np.searchsorted(failures, logits[positive], side) for side in ("left", "right")) / 2
        ordered[:, j] = np.bincount(owners[positive], below, minlength=count)
    return ordered


def _over_pairs(draws: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the sums of pairs [E,E] of episodes over samples [D,E]: [D]."""
    return ((draws @ pairs) * draws).sum(axis=1)


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full(np.shape(below), otherwise), where=below > 0)


def disqualification(
    measured: Mapping[str, float], max_false_fires: float = MAX_FALSE_FIRES, min_precision: float = MIN_PRECISION
) -> str | None:
    """Return why a classifier with these `figures` is no reward; None if it qualifies."""
    succeeding, failing = measured["successful_episodes"], measured["failing_episodes"]
    if min(succeeding, failing) < MIN_EPISODES:  # other bounds follow from it
        reasons = [
            f"{succeeding:.0f} held-out episodes show a success and {failing:.0f} a failure, of which at least "
            f"{MIN_EPISODES} each are needed (raise val_fraction or collect more episodes)"
        ]
    else:
        reasons = _doubts(measured, min_precision)
    if not measured["false_fires_high"] <= max_false_fires:
        reasons.append(
            f"it fires in {measured['false_fires']:.0f} of the {measured['failed_episodes']:.0f} held-out episodes "
            f"that fail, so that it may fire in {measured['false_fires_high']:.0%} of all, more than max_false_fires, "
            f"{max_false_fires:.0%} (which {episodes_needed(max_false_fires)} episodes without a fire would show)"
        )
    return ", and ".join(reasons) or None


def _doubts(measured: Mapping[str, float], min_precision: float) -> list[str]:
    """Return what is to be doubted by the figures of frames, and of episodes that succeed."""

    def said(name: str) -> str:
        return f"is {measured[name]:.3f} and may be as low as {measured[f'{name}_low']:.3f}, which is"

    reasons = []
    if measured["auc_low"] <= MIN_AUC:
        reasons.append(f"its AUC {said('auc')} not above {MIN_AUC}")
    elif not measured["episode_auc_low"] > MIN_AUC or np.isnan(measured["episode_auc"]):
        looks = "it may know episodes by their looks alone"
        reasons.append(f"within an episode its AUC {said('episode_auc')} not above {MIN_AUC}: {looks}")
    if measured["precision_low"] < min_precision and not np.isnan(measured["precision"]):
        reasons.append(f"its precision {said('precision')} below min_precision, {min_precision:g}")
    if measured["recall_low"] <= (rate := measured["false_positive_rate"]):
        reasons.append(f"its recall {said('recall')} not above its rate of false positives, {rate:.4f}")
    return reasons


def in_words(measured: Mapping[str, float], threshold: float) -> str:
    """Return `figures` in three lines; `threshold` is the probability."""

    def interval(name: str) -> str:
        if np.isnan(measured[name]):
            return "unknown"
        return f"{measured[name]:.4f} ({measured[f'{name}_low']:.4f} to {measured[f'{name}_high']:.4f})"

    return (
        f"  AUC {interval('auc')}, within an episode {interval('episode_auc')}; loss {measured['loss']:.4f}\n"
        f"  above {threshold:.4f}: precision {interval('precision')}, recall {interval('recall')}, "
        f"false positives {interval('false_positive_rate')}\n"
        f"  it fires in {measured['false_fires']:.0f} of {measured['failed_episodes']:.0f} episodes that fail, and "
        f"with 95 % confidence in at most {measured['false_fires_high']:.0%} of all such"
    )
