"""Augmented frames: moved by whole pixels and coloured, each in its own way."""

from __future__ import annotations

import torch

from vlmrm_robots.frames.training import augment, random_colour, random_shift


def test_a_shift_moves_a_frame_by_at_most_a_sixteenth():
    torch.manual_seed(0)
    frames = torch.zeros(64, 1, 32, 48)
    frames[:, :, 15, 20] = 1.0
    moved = random_shift(frames)
    assert (moved.sum((1, 2, 3)) == 1).all()
    positions = moved[:, 0].nonzero()[:, 1:] - torch.tensor([15, 20])
    assert positions.abs().max() == 2 and len(positions.unique(dim=0)) > 10


def test_a_shift_repeats_the_border():
    frames = torch.rand(16, 3, 1, 1).expand(16, 3, 32, 32)
    assert torch.equal(random_shift(frames), frames)


def test_colours_stay_in_range_and_differ_by_frame():
    torch.manual_seed(0)
    frames = torch.rand(1, 3, 8, 8).expand(32, 3, 8, 8)
    coloured = random_colour(frames)
    assert coloured.min() >= 0 and coloured.max() <= 1
    assert len(coloured.mean((1, 2, 3)).unique()) == 32
    assert (coloured - frames).abs().max() < 0.45


def test_augmentation_follows_torchs_seed():
    frames = torch.rand(4, 3, 16, 16)
    torch.manual_seed(3)
    first = augment(frames)
    torch.manual_seed(3)
    assert torch.equal(augment(frames), first)
    assert not torch.equal(augment(frames), first)
