"""Figures of a classifier on frames that no training has seen, its threshold, and whether it qualifies as a reward.

It qualifies if held-out episodes leave little doubt that it tells successes from failures, also within an episode and
at the same step, where neither the scenery nor a clock gives the answer away; that its rewards are for successes; and
that a policy which fails is seldom rewarded. Frames of one episode are alike, so bounds are bootstrapped over
episodes, not frames; whole episodes are counted, with exact bounds (Clopper-Pearson). In a training the epoch and the
threshold were chosen on the same episodes, which makes all figures a little optimistic: `vlmrm frames eval` measures
on others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from vlmrm.measures.statistics import expected_calibration_error, negative_log_likelihood, reliability, squared_errors

MIN_EPISODES = 5  # with a success, and with a failure
MIN_AUC = 0.6  # of the lower bound; 0.5 is chance
MIN_PRECISION = 0.9  # of the frames above the threshold, of the lower bound
MAX_FALSE_FIRES = 0.5  # share of failed episodes, of the upper bound
MAX_MISSES = 0.75  # share of successful episodes, of the upper bound: a miss costs less than a false fire
DRAWS = 1000
CANDIDATES = 256  # thresholds that are tried at once
LOWER, UPPER = 0.025, 0.975  # the ends of a 95 % interval
CONFIDENCE = 0.95  # of a bound on one side
# Of what else might tell successes from failures: the figure, where it is taken, what it excludes, why it is unknown.
CONTROLS = (
    (
        "episode_auc",
        "within an episode",
        "it may know episodes by their looks alone",
        "no held-out episode shows both a success and a failure",
    ),
    (
        "step_auc",
        "at the same step",
        "it may go by the time alone",
        "at no step does one held-out episode show a success and another a failure",
    ),
)


@dataclass(frozen=True)
class HeldOut:
    """Scored frames: logits [N], labels [N] of 0 and 1, and the episode [N] of each, as any numbers.

    Frames of an episode are in order.
    """

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

    def peaks(self) -> np.ndarray:
        """Return the highest logit of each failed episode, one without any success."""
        succeeded = np.bincount(self.owners, self.labels) > 0
        highest = np.full(len(succeeded), -np.inf)
        np.maximum.at(highest, self.owners, self.logits)
        return highest[~succeeded]

    def steps(self) -> np.ndarray:
        """Return the position of each frame in its episode: [N]."""
        order = np.argsort(self.owners, kind="stable")
        first = np.searchsorted(self.owners[order], self.owners[order])
        steps = np.empty(len(order), dtype=np.int64)
        steps[order] = np.arange(len(order)) - first
        return steps


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
    """Return the highest logit with the recall of the lowest that three limits allow.

    Above the lowest lie at most the share `target_fpr` of the failures, and frames of so few failed episodes that,
    with 95 % confidence, at most the share `max_false_fires` of all has one; or of none, if too few were held out to
    show that. Of the frames above, at least the share `min_precision` are successes, with the same confidence: where
    these are rare, the few failures of `target_fpr` are as many. Where nothing shows that, no held-out failure lies
    above. A higher threshold with the same recall keeps all limits, and rewards less that is no success.
    The logit is half-way from the lowest rewarded success to the next lower score.
    """
    logits = held_out.logits
    failures = np.sort(logits[held_out.labels == 0])[::-1]
    lowest = failures[int(target_fpr * len(failures))]
    peaks = np.sort(held_out.peaks())[::-1]
    if len(peaks):
        bounds = (upper_bound(fires, len(peaks)) for fires in range(len(peaks)))
        tolerated = sum(bound <= max_false_fires for bound in bounds)  # bounds grow with the fires
        lowest = max(lowest, peaks[max(tolerated - 1, 0)])
    lowest = _precise(held_out, np.append(lowest, failures[::-1][failures[::-1] > lowest]), min_precision)
    rewarded = logits[(held_out.labels == 1) & (logits > lowest)]
    if not len(rewarded):
        return float(logits.max())  # no threshold has a recall, and this one rewards nothing
    return float((logits[logits < rewarded.min()].max() + rewarded.min()) / 2)


def _precise(held_out: HeldOut, candidates: np.ndarray, precision: float) -> float:
    """Return the first of ascending thresholds above which the precision's lower bound is as high; else the last."""
    episodes = [held_out.owners == owner for owner in range(held_out.draws.shape[1])]
    positive = held_out.labels == 1
    for start in range(0, len(candidates), CANDIDATES):
        chunk = candidates[start : start + CANDIDATES]
        hits, false_hits = (
            np.array([_above(held_out.logits[episode & chosen], chunk) for episode in episodes])
            for chosen in (positive, ~positive)
        )
        bounds = np.quantile(_ratio(held_out.draws @ hits, held_out.draws @ (hits + false_hits), 0.0), LOWER, axis=0)
        if (bounds >= precision).any():
            return float(chunk[np.argmax(bounds >= precision)])
    return float(candidates[-1])


def _above(logits: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return how many logits are above each threshold."""
    return len(logits) - np.searchsorted(np.sort(logits), thresholds, "right")


def upper_bound(count: int, of: int) -> float:
    """Return the share that `count` of `of` episodes leave possible, with 95 % confidence; 1 for none."""
    return float(binomtest(count, of, alternative="less").proportion_ci(CONFIDENCE).high) if of else 1.0


def episodes_needed(share: float) -> int:
    """Return the least number of failed episodes, none of which fires, that shows at most this share."""
    return int(np.ceil(np.log(1 - CONFIDENCE) / np.log(1 - share)))


def figures(held_out: HeldOut, threshold: float) -> dict[str, float]:
    """Return the figures of scored frames with a threshold on the logit.

    `auc`, `precision`, `recall` and `false_positive_rate` are of frames, with the ends `_low` and `_high` of their
    95 % intervals by episode; NaN where nothing is counted. `episode_auc` is that of pairs of frames of one episode,
    `step_auc` that of pairs at the same step of their episodes. `false_fires` of the `failed_episodes` have a frame
    above the threshold, and at most `false_fires_high` of all such episodes, as a share; `rewarded_episodes` of the
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

    A percentile bootstrap over episodes, of which as many are drawn with replacement. Draws without a success, or
    without a failure, show nothing: an AUC of one half, a recall of 0.
    """
    positive, above, draws = held_out.labels == 1, held_out.logits > threshold, held_out.draws
    successes, failures, hits, false_hits = (
        np.bincount(held_out.owners[chosen], minlength=draws.shape[1])
        for chosen in (positive, ~positive, positive & above, ~positive & above)
    )
    pairs, of_pairs = ordered_pairs(held_out), np.outer(successes, failures)
    at_step, of_at_step = pairs_at_step(held_out)
    drawn_hits = draws @ hits
    samples = {
        "auc": _ratio(_over_pairs(draws, pairs), _over_pairs(draws, of_pairs), 0.5),
        "episode_auc": _ratio(draws @ pairs.diagonal(), draws @ of_pairs.diagonal(), 0.5),
        "step_auc": _ratio(_over_pairs(draws, at_step), _over_pairs(draws, of_at_step), 0.5),
        "recall": _ratio(drawn_hits, draws @ successes, 0.0),
        "precision": _ratio(drawn_hits, drawn_hits + draws @ false_hits, 0.0),
        "false_positive_rate": _ratio(draws @ false_hits, draws @ failures, 0.0),
    }
    ends = {
        f"{name}_{end}": float(np.quantile(values, quantile))
        for name, values in samples.items()
        for end, quantile in (("low", LOWER), ("high", UPPER))
    }
    return ends | {
        "episode_auc": _share(pairs.trace(), of_pairs.trace()),
        "step_auc": _share(at_step.sum(), of_at_step.sum()),
        "successful_episodes": int((successes > 0).sum()),
        "failing_episodes": int((failures > 0).sum()),
    }


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


def pairs_at_step(held_out: HeldOut) -> tuple[np.ndarray, np.ndarray]:
    """Return `ordered_pairs` of frames at the same step of their episodes, and how many such pairs there are."""
    steps, positive = held_out.steps(), held_out.labels == 1
    ordered, pairs = np.zeros((2, held_out.draws.shape[1], held_out.draws.shape[1]))
    for frames in np.split(order := np.argsort(steps, kind="stable"), np.flatnonzero(np.diff(steps[order])) + 1):
        successes, failures = frames[positive[frames]], frames[~positive[frames]]
        difference = held_out.logits[successes][:, None] - held_out.logits[failures]
        at = np.ix_(held_out.owners[successes], held_out.owners[failures])
        ordered[at] += (np.sign(difference) + 1) / 2
        pairs[at] += 1
    return ordered, pairs


def _over_pairs(draws: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the sums of pairs [E,E] of episodes over samples [DRAWS,E]: [DRAWS]."""
    return ((draws @ pairs) * draws).sum(axis=1)


def _share(part: float, of: float) -> float:
    return float(part / of) if of else float("nan")


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full(np.shape(below), otherwise), where=below > 0)


def disqualification(
    measured: Mapping[str, float], max_false_fires: float = MAX_FALSE_FIRES, min_precision: float = MIN_PRECISION
) -> str | None:
    """Return why a classifier with these `figures` is no reward; None if it qualifies."""
    if (
        min(measured["successful_episodes"], measured["failing_episodes"]) < MIN_EPISODES
    ):  # other bounds follow from it
        reasons = [
            f"{measured['successful_episodes']:.0f} held-out episodes show a success and "
            f"{measured['failing_episodes']:.0f} a failure, of which at least {MIN_EPISODES} each are needed "
            "(raise val_fraction or collect more episodes)"
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
    reasons = []
    if measured["auc_low"] <= MIN_AUC:
        reasons.append(
            f"its AUC is {measured['auc']:.3f} and may be as low as {measured['auc_low']:.3f}, which is not above "
            f"{MIN_AUC}"
        )
    for name, where, doubt, lacking in () if reasons else CONTROLS:
        if np.isnan(measured[name]):
            reasons.append(f"{lacking}, so that {doubt}")
        elif measured[f"{name}_low"] <= MIN_AUC:
            reasons.append(
                f"{where} its AUC is {measured[name]:.3f} and may be as low as {measured[f'{name}_low']:.3f}, which "
                f"is not above {MIN_AUC}: {doubt}"
            )
    if measured["precision_low"] < min_precision and not np.isnan(measured["precision"]):
        reasons.append(
            f"its precision is {measured['precision']:.3f} and may be as low as {measured['precision_low']:.3f}, "
            f"which is below min_precision, {min_precision:g}"
        )
    if measured["recall_low"] <= measured["false_positive_rate"]:
        reasons.append(
            f"its recall is {measured['recall']:.3f} and may be as low as {measured['recall_low']:.3f}, which is not "
            f"above its rate of false positives, {measured['false_positive_rate']:.4f}"
        )
    if measured["rewarded_episodes_low"] < 1 - MAX_MISSES:
        reasons.append(
            f"it sees the success in {measured['rewarded_episodes']:.0f} of the {measured['successful_episodes']:.0f} "
            f"held-out episodes that succeed, so that it may miss {1 - measured['rewarded_episodes_low']:.0%} of all, "
            f"more than {MAX_MISSES:.0%}"
        )
    return reasons


def in_words(measured: Mapping[str, float], threshold: float) -> str:
    """Return `figures` in four lines; `threshold` is the probability."""

    def interval(name: str) -> str:
        if np.isnan(measured[name]):
            return "unknown"
        return f"{measured[name]:.4f} ({measured[f'{name}_low']:.4f} to {measured[f'{name}_high']:.4f})"

    return (
        f"  AUC {interval('auc')}, loss {measured['loss']:.4f}, calibration error "
        f"{measured['calibration_error']:.4f}\n"
        f"  AUC within an episode {interval('episode_auc')}, at the same step {interval('step_auc')}\n"
        f"  above {threshold:.4f}: precision {interval('precision')}, recall {interval('recall')}, "
        f"false positives {interval('false_positive_rate')}\n"
        f"  it fires in {measured['false_fires']:.0f} of {measured['failed_episodes']:.0f} episodes that fail, and "
        f"with 95 % confidence in at most {measured['false_fires_high']:.0%} of all such; in "
        f"{measured['rewarded_episodes']:.0f} of {measured['successful_episodes']:.0f} that succeed it sees a success"
    )
