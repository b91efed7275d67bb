"""Figures of a classifier on frames that no training has seen, its threshold, and whether it qualifies as a reward.

It qualifies if held-out episodes leave little doubt that it tells successes from failures, and that a policy which
fails is seldom rewarded. Frames of one episode are alike, so bounds are bootstrapped over episodes, not frames; whole
episodes are counted, with exact bounds (Clopper-Pearson). In a training the epoch and the threshold were chosen on the
same episodes, which makes all figures a little optimistic: `vlmrm frames eval` measures on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from vlmrm.measures.statistics import expected_calibration_error, negative_log_likelihood, reliability, squared_errors

MIN_EPISODES = 5  # with a success, and with a failure
MIN_AUC = 0.6  # of the lower bound; 0.5 is chance
MIN_PRECISION = 0.9  # of the frames above the threshold
MAX_FALSE_FIRES = 0.5  # share of failed episodes, of the upper bound
DRAWS = 1000
LOWER, UPPER = 0.025, 0.975  # the ends of a 95 % interval
CONFIDENCE = 0.95  # of a bound on one side


@dataclass(frozen=True)
class HeldOut:
    """Scored frames: logits [N], labels [N] of 0 and 1, and the episode [N] of each, as any numbers."""

    logits: np.ndarray
    labels: np.ndarray
    episodes: np.ndarray

    def peaks(self) -> np.ndarray:
        """Return the highest logit of each failed episode, one without any success."""
        owners = np.unique(self.episodes, return_inverse=True)[1]
        succeeded = np.bincount(owners, self.labels) > 0
        highest = np.full(len(succeeded), -np.inf)
        np.maximum.at(highest, owners, self.logits)
        return highest[~succeeded]


def auc_and_loss(logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the area under the ROC curve and the mean binary cross-entropy of logits[N] for labels[N] of 0 and 1."""
    return float(roc_auc_score(labels, logits)), _loss(logits, labels)


def _loss(logits: np.ndarray, labels: np.ndarray) -> float:
    return negative_log_likelihood(_label_logits(logits, labels))


def choose_threshold(
    held_out: HeldOut,
    target_fpr: float,
    max_false_fires: float = MAX_FALSE_FIRES,
    min_precision: float = MIN_PRECISION,
) -> float:
    """Return the lowest logit that three limits allow.

    Above it lie at most the share `target_fpr` of the failures, and frames of so few failed episodes that, with 95 %
    confidence, at most the share `max_false_fires` of all has one; or of none, if too few were held out to show that.
    Of the frames above it, at least the share `min_precision` are successes: where these are rare, the few failures
    of `target_fpr` are as many. The logit is half-way to the next higher score, which changes no prediction on the
    held-out frames.
    """
    logits = held_out.logits
    failures = np.sort(logits[held_out.labels == 0])[::-1]
    lowest = failures[int(target_fpr * len(failures))]
    peaks = np.sort(held_out.peaks())[::-1]
    if len(peaks):
        bounds = (upper_bound(fires, len(peaks)) for fires in range(len(peaks)))
        tolerated = sum(bound <= max_false_fires for bound in bounds)  # bounds grow with the fires
        lowest = max(lowest, peaks[max(tolerated - 1, 0)])
    lowest = _precise(np.sort(logits[held_out.labels == 1]), failures[::-1], lowest, min_precision)
    above = logits[logits > lowest]
    return float((lowest + above.min()) / 2 if len(above) else lowest)


def _precise(successes: np.ndarray, failures: np.ndarray, lowest: float, precision: float) -> float:
    """Return the lowest logit from `lowest` on with that precision above it; both classes' logits are sorted."""
    candidates = np.append(lowest, failures[failures > lowest])  # above the last is no failure
    hits, false_hits = (len(one) - np.searchsorted(one, candidates, "right") for one in (successes, failures))
    return float(candidates[np.argmax(hits >= precision * (hits + false_hits))])


def upper_bound(count: int, of: int) -> float:
    """Return the share that `count` of `of` episodes leave possible, with 95 % confidence; 1 for none."""
    return float(binomtest(count, of, alternative="less").proportion_ci(CONFIDENCE).high) if of else 1.0


def episodes_needed(share: float) -> int:
    """Return the least number of failed episodes, none of which fires, that shows at most this share."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(1 - share)))


def figures(held_out: HeldOut, threshold: float) -> dict[str, float]:
    """Return the figures of scored frames with a threshold on the logit.

    `auc`, `precision`, `recall` and `false_positive_rate` are of frames, with the ends `_low` and `_high` of their
    95 % intervals by episode; NaN where nothing is counted. `false_fires` of the `failed_episodes` have a frame above
    the threshold, and at most `false_fires_high` of all such episodes, as a share; `rewarded_episodes` of the
    `successful_episodes` have a success above it, and at least `rewarded_episodes_low` of all such.
    """
    values = frame_figures(held_out.logits, held_out.labels, threshold) | intervals(held_out, threshold)
    peaks = held_out.peaks()
    rewarded = np.unique(held_out.episodes[(held_out.labels == 1) & (held_out.logits > threshold)])
    succeeding = int(values["successful_episodes"])
    fires = int((peaks > threshold).sum())
    return {
        **values,
        "failed_episodes": len(peaks),
        "false_fires": fires,
        "false_fires_high": upper_bound(fires, len(peaks)),
        "rewarded_episodes": len(rewarded),
        "rewarded_episodes_low": 1 - upper_bound(succeeding - len(rewarded), succeeding),
    }


def frame_figures(logits: np.ndarray, labels: np.ndarray, threshold: float) -> dict[str, float]:
    """Return figures of logits[N] for labels[N] of 0 and 1, with a threshold on the logit."""
    both = len(np.unique(labels)) > 1
    auc, loss = auc_and_loss(logits, labels) if both else (float("nan"), _loss(logits, labels))
    predicted, success = logits > threshold, labels == 1
    margins = _label_logits(logits, labels)
    return {
        "auc": auc,
        "loss": loss,
        "precision": float(success[predicted].mean()) if predicted.any() else float("nan"),
        "recall": float(predicted[success].mean()) if success.any() else float("nan"),
        "false_positive_rate": float(predicted[~success].mean()) if not success.all() else float("nan"),
        "calibration_error": expected_calibration_error(reliability(margins)),
        "brier": float(squared_errors(margins).mean()),
    }


def _label_logits(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the logits of the true labels: the margins that `vlmrm.measures.statistics` takes."""
    return np.where(labels == 1, logits, -logits).astype(np.float64)


def intervals(held_out: HeldOut, threshold: float) -> dict[str, float]:
    """Return 95 % intervals of AUC, recall, precision and false positives, and the numbers of episodes behind them.

    A percentile bootstrap over episodes, of which as many are drawn with replacement.
    """
    logits, positive = held_out.logits, held_out.labels == 1
    names, owners = np.unique(held_out.episodes, return_inverse=True)
    count = len(names)
    successes, failures, hits, false_hits = (
        np.bincount(owners[chosen], minlength=count)
        for chosen in (positive, ~positive, positive & (logits > threshold), ~positive & (logits > threshold))
    )
    # ordered[i, j]: pairs of a success of episode i above a failure of episode j, ties as halves; their sum over a
    # drawn sample is its AUC, so that no draw needs to sort frames again.
    ordered = np.zeros((count, count))
    for j in range(count):
        below_it = np.sort(logits[(owners == j) & ~positive])
        below = sum(np.searchsorted(below_it, logits[positive], side) for side in ("left", "right")) / 2
        ordered[:, j] = np.bincount(owners[positive], below, minlength=count)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS).astype(np.float64)
    drawn_hits, drawn_false, drawn_successes, drawn_failures = (
        draws @ counts for counts in (hits, false_hits, successes, failures)
    )
    # Draws without a success, or without a failure, show nothing: an AUC of one half, a recall of 0.
    samples = {
        "auc": _ratio(((draws @ ordered) * draws).sum(axis=1), drawn_successes * drawn_failures, 0.5),
        "recall": _ratio(drawn_hits, drawn_successes, 0.0),
        "precision": _ratio(drawn_hits, drawn_hits + drawn_false, 0.0),
        "false_positive_rate": _ratio(drawn_false, drawn_failures, 0.0),
    }
    ends = {
        f"{name}_{end}": float(np.quantile(values, quantile))
        for name, values in samples.items()
        for end, quantile in (("low", LOWER), ("high", UPPER))
    }
    return ends | {
        "successful_episodes": int((successes > 0).sum()),
        "failing_episodes": int((failures > 0).sum()),
    }


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(below), otherwise), where=below > 0)


def disqualification(measured: Mapping[str, float], max_false_fires: float = MAX_FALSE_FIRES) -> str | None:
    """Return why a classifier with these `figures` is no reward; None if it qualifies."""
    reasons = []
    if min(measured["successful_episodes"], measured["failing_episodes"]) < MIN_EPISODES:
        reasons.append(
            f"{measured['successful_episodes']:.0f} held-out episodes show a success and "
            f"{measured['failing_episodes']:.0f} a failure, of which at least {MIN_EPISODES} each are needed "
            "(raise val_fraction or collect more episodes)"
        )
    if measured["auc_low"] <= MIN_AUC and not np.isnan(measured["auc"]):
        reasons.append(
            f"its AUC is {measured['auc']:.3f} and may be as low as {measured['auc_low']:.3f}, which is not above "
            f"{MIN_AUC}"
        )
    if measured["recall_low"] <= measured["false_positive_rate"] and not np.isnan(measured["recall"]):
        reasons.append(
            f"its recall is {measured['recall']:.3f} and may be as low as {measured['recall_low']:.3f}, which is not "
            f"above its rate of false positives, {measured['false_positive_rate']:.4f}"
        )
    if not measured["false_fires_high"] <= max_false_fires:
        reasons.append(
            f"it fires in {measured['false_fires']:.0f} of the {measured['failed_episodes']:.0f} held-out episodes "
            f"that fail, so that it may fire in {measured['false_fires_high']:.0%} of all, more than max_false_fires, "
            f"{max_false_fires:.0%} (which {episodes_needed(max_false_fires)} episodes without a fire would show)"
        )
    return ", and ".join(reasons) or None


def in_words(measured: Mapping[str, float], threshold: float) -> str:
    """Return `figures` in three lines; `threshold` is the probability."""

    def interval(name: str) -> str:
        if np.isnan(measured[name]):
            return "unknown"
        return f"{measured[name]:.4f} ({measured[f'{name}_low']:.4f} to {measured[f'{name}_high']:.4f})"

    return (
        f"  AUC {interval('auc')}, loss {measured['loss']:.4f}, calibration error "
        f"{measured['calibration_error']:.4f}\n"
        f"  above {threshold:.4f}: precision {interval('precision')}, recall {interval('recall')}, "
        f"false positives {interval('false_positive_rate')}\n"
        f"  it fires in {measured['false_fires']:.0f} of {measured['failed_episodes']:.0f} episodes that fail, and "
        f"with 95 % confidence in at most {measured['false_fires_high']:.0%} of all such; in "
        f"{measured['rewarded_episodes']:.0f} of {measured['successful_episodes']:.0f} that succeed it sees a success"
    )
