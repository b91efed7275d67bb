"""Frames that a classifier does not know: how far they are, and when that is warned of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import LedoitWolf
from squares import settings, square_trajectory, write_squares

from vlmrm.errors import CheckpointError
from vlmrm.frames.checkpoint import load_classifier, save_classifier
from vlmrm.frames.drift import WINDOW, DriftWatch, Reference
from vlmrm.frames.frame_reward import FrameScorer
from vlmrm.frames.training import train_classifier


def reference(doubt=0.0):
    generator = np.random.default_rng(0)
    mixing = generator.normal(size=(6, 6))
    known, held_out, new = (generator.normal(size=(n, 6)) @ mixing + 3 for n in (500, 300, 20))
    probabilities = np.where(np.arange(300) < 300 * doubt, 0.5, 0.999)
    return (
        Reference.fit(*(torch.from_numpy(points)[:, None] for points in (known, held_out)), probabilities),
        known,
        held_out,
        new,
    )


def test_the_novelty_is_scipys_mahalanobis_distance_over_the_held_out_frames_99th_percentile():
    fitted, known, held_out, new = reference()
    covariance = LedoitWolf().fit(known)

    def distances(points):
        return np.array([mahalanobis(point, covariance.location_, covariance.precision_) for point in points])

    expected = distances(new) / np.quantile(distances(held_out), 0.99)
    assert fitted.novelty(torch.from_numpy(new)[:, None]).numpy() == pytest.approx(expected, rel=1e-4)
    assert (fitted.novelty(torch.from_numpy(held_out)[:, None]) > 1).float().mean() == pytest.approx(0.01, abs=0.002)


def test_the_farthest_camera_counts():
    generator = torch.Generator().manual_seed(0)
    known, held_out = torch.randn(400, 2, 3, generator=generator), torch.randn(200, 2, 3, generator=generator)
    fitted = Reference.fit(known, held_out, np.ones(200))
    usual = torch.zeros(1, 2, 3)
    for camera in range(2):
        strange = usual.clone()
        strange[0, camera] = 9.0
        assert fitted.novelty(usual) < 1 < fitted.novelty(strange)


def test_frames_that_are_unlike_are_warned_of_once(caplog):
    watch = DriftWatch(reference()[0], "the classifier")
    like, unlike = np.linspace(0, 1.01, WINDOW), np.full(WINDOW, 1.5)
    sure = np.full(WINDOW, 0.999)
    watch.update(like, sure)
    assert not caplog.records
    watch.update(unlike[1:], sure[1:])
    assert not caplog.records  # a window is not full
    watch.update(unlike, sure)
    watch.update(unlike, sure)
    [warning] = caplog.records
    assert "100% of the last 4095 frames are unlike its training's" in warning.getMessage()


def test_doubtful_probabilities_are_warned_of_where_held_out_ones_were_not(caplog):
    novelty, doubtful = np.zeros(WINDOW), np.full(WINDOW, 0.5)
    DriftWatch(reference(doubt=0.95)[0], "a doubting classifier").update(novelty, doubtful)
    assert not caplog.records
    DriftWatch(reference(doubt=0.05)[0], "a sure classifier").update(novelty, doubtful)
    assert "where 5% of the held-out ones were" in caplog.text


def test_a_trained_checkpoint_knows_its_frames(tmp_path):
    trained = train_classifier(settings(write_squares(tmp_path), epochs=6, batch_size=16))
    scorer = FrameScorer(load_classifier(trained.path, device="cpu"))
    usual = square_trajectory(np.random.default_rng(5), successes=20, frames=40).images
    black = {"base_camera": np.zeros_like(usual["base_camera"])}  # which it takes for successes
    assert (scorer.scores(usual)[1] > 1).mean() < 0.3
    assert (scorer.scores(black)[1] > 1).all()


def test_a_reference_of_another_classifier_is_refused(tmp_path):
    trained = train_classifier(settings(write_squares(tmp_path, positive=2, negative=1)))
    save_classifier(tmp_path / "other", trained.model, trained.config, reference()[0])
    with pytest.raises(CheckpointError, match=r"has a reference of .*'mean': \[1, 6\]"):
        load_classifier(tmp_path / "other")
