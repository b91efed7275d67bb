"""Other pictures of the same moment: frames shifted by a few pixels, and brighter, darker, paler or more vivid."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 1 / 16  # of a side, at most; 4 pixels of 64, as in DrQ (Kostrikov et al. 2021)
COLOUR = 0.2  # brightness and contrast change by at most this factor


def augment(frames: Tensor) -> Tensor:
    """Frames float [B,C,H,W] in [0, 1], each changed by chance in its own way, by torch's random numbers."""
    return random_colour(random_shift(frames))


def random_shift(frames: Tensor) -> Tensor:
    """Each frame moved by whole pixels, its border repeated."""
    count, _, height, width = frames.shape
    reach = max(1, round(SHIFT * min(height, width)))
    padded = F.pad(frames, [reach] * 4, mode="replicate").permute(0, 2, 3, 1)
    rows, columns = (
        torch.randint(2 * reach + 1, (count, 1), device=frames.device) + torch.arange(side, device=frames.device)
        for side in (height, width)
    )
    each = torch.arange(count, device=frames.device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_colour(frames: Tensor) -> Tensor:
    """Each frame with a brightness and a contrast of its own."""
    brightness, contrast = 1 + COLOUR * (2 * torch.rand(2, len(frames), 1, 1, 1, device=frames.device) - 1)
    mean = frames.mean((1, 2, 3), keepdim=True)
    return (((frames - mean) * contrast + mean) * brightness).clamp(0, 1)
