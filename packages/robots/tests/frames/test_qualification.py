"""Figures on held-out frames, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, rankdata
from sklearn.metrics import precision_score

from vlmrm_robots.frames.qualification import (
    HeldOut,
    choose_threshold,
    disqualification,
    episodes_needed,
    figures,
)


def drawn(count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = (generator.random(count) < 0.3).astype(float)
    return generator.normal(2 * labels - 1), labels


def test_auc_and_loss_match_their_definitions():
    logits, labels = drawn()
    measured = figures(HeldOut(logits, labels, np.arange(len(labels)) // 40), 0.0)
    pairs = logits[labels == 1][:, None] - logits[labels == 0][None]
    assert measured["auc"] == pytest.approx((pairs > 0).mean() + 0.5 * (pairs == 0).mean())
    p = expit(logits)
    assert measured["loss"] == pytest.approx(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


@pytest.mark.parametrize("target", [0.0, 0.01, 0.1, 0.5])
def test_the_threshold_maximises_recall_within_false_positive_rate(target):
    logits, labels = drawn()
    threshold = choose_threshold(HeldOut(logits, labels, np.zeros(len(labels))), target, min_precision=0)
    failures, successes = logits[labels == 0], logits[labels == 1]
    assert (failures > threshold).mean() <= target
    lower = successes[successes <= threshold].max()  # with the next lower success above it failures are too many
    assert (failures >= lower).mean() > target
    assert logits[logits > threshold].min() in successes  # and any higher loses a success


@pytest.mark.parametrize("least", [0.5, 0.9, 0.99, 1.0])
def test_the_threshold_is_the_lowest_with_that_precision(least):
    generator = np.random.default_rng(1)
    labels = (np.arange(2000) < 40).astype(float)  # successes are as rare as false positives at 2 %
    logits = generator.normal(4 * labels)
    frames = HeldOut(logits, labels, np.zeros(2000))
    threshold = choose_threshold(frames, 0.1, 0.99, least)
    assert precision_score(labels, logits > threshold) >= least
    allowed = choose_threshold(frames, 0.1, 0.99, 0)
    lower = [cut for cut in logits if allowed <= cut < logits[logits <= threshold].max()][::5]
    assert all(precision_score(labels, logits > cut) < least for cut in [allowed, *lower] if cut < threshold)


@pytest.mark.parametrize(("failed", "share", "tolerated"), [(5, 0.5, 0), (30, 0.1, 0), (40, 0.2, 3), (4, 0.5, 0)])
def test_few_failed_episodes_fire_within_the_bound(failed, share, tolerated):
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(failed + 1, 20)), np.zeros((failed + 1, 20))
    logits[-1], labels[-1] = np.linspace(0.5, 4.3, 20), np.arange(20) >= 5
    frames = HeldOut(logits.ravel(), labels.ravel(), np.repeat(np.arange(failed + 1), 20))
    threshold = choose_threshold(frames, 0.9, share, min_precision=0)
    measured = figures(frames, threshold)
    assert measured["false_fires"] == (logits[:-1].max(axis=1) > threshold).sum() == tolerated
    # Clopper and Pearson's bound is where so few fires, or fewer, are seen in 5 % of all cases.
    assert binom.cdf(tolerated, failed, measured["false_fires_high"]) == pytest.approx(0.05)
    assert (measured["false_fires_high"] <= share) == (failed >= episodes_needed(share))
    if measured["false_fires_high"] <= share:
        assert binom.cdf(tolerated + 1, failed, share) > 0.05  # one more would be too many
    else:
        reason = disqualification(measured | {"auc_low": 1.0, "recall_low": 1.0}, share)
        assert reason is not None and f"it fires in 0 of the {failed} held-out episodes that fail" in reason


def test_a_threshold_above_every_frame_leaves_no_precision():
    measured = figures(HeldOut(np.array([-1.0, 1.0]), np.array([0.0, 1.0]), np.arange(2)), 2.0)
    assert np.isnan(measured["precision"]) and measured["recall"] == 0


# Whether a classifier qualifies as a reward --------------------------------------------------------------------------


def held_out(
    separation: float, episodes: int = 12, frames: int = 50, share: float = 0.3, spread: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels and episodes; the last `share` of each episode's frames are successes; as many episodes fail.

    Successes are `separation` standard deviations above failures; `spread` is that of the episodes among each other.
    """
    generator = np.random.default_rng(seed)
    succeeding = np.tile(np.arange(frames) >= (1 - share) * frames, episodes).astype(float)
    labels = np.concatenate([succeeding, np.zeros_like(succeeding)])
    owners = np.repeat(np.arange(2 * episodes), frames)
    logits = generator.normal(separation * labels) + spread * generator.normal(size=2 * episodes)[owners]
    return logits, labels, owners


def verdict(logits: np.ndarray, labels: np.ndarray, owners: np.ndarray, target_fpr: float = 0.01) -> str | None:
    frames = HeldOut(logits, labels, owners)
    return disqualification(figures(frames, choose_threshold(frames, target_fpr)))


def test_classifiers_that_tell_success_apart_qualify():
    assert verdict(*held_out(8)) is None  # AUC 1, as the demo's
    assert verdict(*held_out(3.5, spread=0.3)) is None


@pytest.mark.parametrize("factor", [0, 1])
def test_a_constant_or_chance_does_not_qualify(factor):
    logits, labels, owners = held_out(0)

    reason = verdict(factor * logits, labels, owners)

    assert reason is not None and "its AUC is 0.5" in reason.replace("0.4", "0.5") and "above 0.6" in reason


@pytest.mark.parametrize(("episodes", "enough"), [(4, False), (5, True)])
def test_few_episodes_say_too_little(episodes, enough):
    reason = verdict(*held_out(8, episodes=episodes))
    assert (reason is None) == enough
    if reason is not None:
        assert "4 held-out episodes show a success and 8 a failure" in reason and "at least 5" in reason
        assert "(raise val_fraction or collect more episodes)" in reason


def test_a_classifier_knowing_only_scenery_does_not_qualify():
    """Frames of one room, where the task is done almost throughout, and of another, where it fails."""
    owners = np.repeat(np.arange(24), 100)
    labels = ((owners % 2 == 0) & (np.tile(np.arange(100), 24) >= 1)).astype(float)
    logits = 9.0 * (owners % 2 == 0) + np.random.default_rng(3).normal(size=2400) / 10
    frames = HeldOut(logits, labels, owners)

    measured = figures(frames, choose_threshold(frames, 0.01))
    reason = disqualification(measured)

    assert reason is not None and "it may know episodes by their looks alone" in reason and measured["auc_low"] > 0.9
    assert disqualification(measured | {"episode_auc_low": 1.0, "recall_low": 1.0}) is None


def test_auc_within_episodes_uses_only_those_pairs():
    logits, labels, owners = held_out(1, episodes=3, frames=12)
    order = np.random.default_rng(2).permutation(72)
    logits, labels, owners = logits.round(1)[order], labels[order], owners[order]

    measured = figures(HeldOut(logits, labels, owners), 0.0)

    pairs = (labels[:, None] > labels) & (owners[:, None] == owners)
    difference = (logits[:, None] - logits)[pairs]
    assert measured["episode_auc"] == pytest.approx((difference > 0).mean() + 0.5 * (difference == 0).mean())
    assert measured["episode_auc_low"] < measured["episode_auc"] < measured["episode_auc_high"]


def test_precision_counts_by_its_lower_bound():
    """Nine of ten rewards are right, all false ones in two episodes: drawn again, it may be fewer."""
    logits, labels, owners = held_out(9, episodes=8, frames=50)
    rewarded_too_early = np.isin(owners, (0, 1)) & (labels == 0) & (np.arange(len(labels)) % 50 > 28)
    logits[rewarded_too_early] += 20
    measured = figures(HeldOut(logits, labels, owners), 4.5)
    assert measured["precision"] > 0.9 > measured["precision_low"]
    reason = disqualification(measured | {"false_fires_high": 0.0})
    assert reason is not None and "which is below min_precision, 0.9" in reason
    assert disqualification(measured | {"false_fires_high": 0.0}, min_precision=0.7) is None
    assert choose_threshold(HeldOut(logits, labels, owners), 0.2, 0.99) > 9


def test_bounds_are_those_of_episodes_drawn_again():
    logits, labels, owners = held_out(1.5, episodes=8, frames=40, spread=1.0)
    logits = logits.round(1)  # with ties
    frames = HeldOut(logits, labels, owners)
    threshold = choose_threshold(frames, 0.05, 0.99)
    generator, aucs, recalls = np.random.default_rng(9), [], []
    for _ in range(2000):
        drawn = np.concatenate([np.flatnonzero(owners == i) for i in generator.integers(16, size=16)])
        success = labels[drawn] == 1
        wins = rankdata(logits[drawn])[success].sum() - success.sum() * (success.sum() + 1) / 2  # Mann and Whitney's U
        aucs.append(wins / (success.sum() * (~success).sum()))
        recalls.append((logits[drawn] > threshold)[labels[drawn] == 1].mean())
    bounds = figures(frames, threshold)
    assert bounds["auc_low"] == pytest.approx(np.quantile(aucs, 0.025), abs=0.01)
    assert bounds["recall_low"] == pytest.approx(np.quantile(recalls, 0.025), abs=0.02)
    assert (bounds["successful_episodes"], bounds["failing_episodes"]) == (8, 16)
    assert bounds == figures(frames, threshold)
