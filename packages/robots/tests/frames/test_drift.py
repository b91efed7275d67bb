"""Frames that a classifier does not know: how far they are, and when that is warned of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import LedoitWolf
from squares import settings, square_trajectory, write_squares

from vlmrm.errors import CheckpointError
from vlmrm_robots.frames.checkpoint import load_classifier, save_classifier
from vlmrm_robots.frames.drift import LEAST, WINDOW, DriftWatch, Reference
from vlmrm_robots.frames.frame_reward import FrameScorer
from vlmrm_robots.frames.training import train_classifier


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
    assert fitted.novelty(torch.from_numpy(new)[:, None]).numpy()[:, 0] == pytest.approx(expected, rel=1e-4)
    assert (fitted.novelty(torch.from_numpy(held_out)[:, None]) > 1).float().mean() == pytest.approx(0.01, abs=0.002)


def test_each_camera_counts_by_itself():
    generator = torch.Generator().manual_seed(0)
    known, held_out = torch.randn(400, 2, 3, generator=generator), torch.randn(200, 2, 3, generator=generator)
    fitted = Reference.fit(known, held_out, np.ones(200))
    usual = torch.zeros(1, 2, 3)
    assert (fitted.novelty(usual) < 1).all()
    for camera in range(2):
        strange = usual.clone()
        strange[0, camera] = 9.0
        assert (fitted.novelty(strange) > 1).tolist() == [[camera == 0, camera == 1]]
    assert (fitted.novelty(held_out).amax(1) > 1).float().mean() == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("frames", [2, 50])
def test_an_encoder_that_says_the_same_of_all_frames_has_a_reference_too(frames):
    same = torch.ones(frames, 1, 6)
    fitted = Reference.fit(same, same, np.ones(frames))
    assert (fitted.novelty(same) == 0).all() and (fitted.novelty(same + 0.1) > 1).all()


def watching(doubt=0.0, cameras=("front",), name="the classifier"):
    return DriftWatch(reference(doubt)[0], cameras, name)


def test_frames_that_are_unlike_are_warned_of_once(caplog):
    watch = watching()
    like, unlike = np.linspace(0, 1.01, WINDOW)[:, None], np.full((WINDOW, 1), 1.5)
    sure = np.full(WINDOW, 0.999)
    watch.update(like, sure)
    assert not caplog.records
    watch.update(unlike[1:], sure[1:])
    assert not caplog.records  # a window is not full
    watch.update(unlike, sure)
    watch.update(unlike, sure)
    [warning] = caplog.records
    assert "100% of the last 4095 frames are unlike its training's" in warning.getMessage()


@pytest.mark.parametrize(("frames", "said"), [(LEAST - 1, False), (LEAST, True)])
def test_the_last_look_is_at_fewer_frames(caplog, frames, said):
    watch = watching()
    watch.update(np.full((frames, 1), 1.5), np.full(frames, 0.999))
    assert not caplog.records
    watch.look()
    assert (f"100% of the last {frames} frames are unlike" in caplog.text) == said


def test_the_camera_that_shows_something_new_is_named(caplog):
    watch = watching(cameras=("front", "wrist"))
    novelty = np.tile([0.5, 1.5], (WINDOW, 1))
    watch.update(novelty, np.full(WINDOW, 0.999))
    [warning] = caplog.records
    assert "frames of wrist are unlike" in warning.getMessage()


def test_doubtful_probabilities_are_warned_of_where_held_out_ones_were_not(caplog):
    novelty, doubtful = np.zeros((WINDOW, 1)), np.full(WINDOW, 0.5)
    watching(doubt=0.95).update(novelty, doubtful)
    assert not caplog.records
    watching(doubt=0.05).update(novelty, doubtful)
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
