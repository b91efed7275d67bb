"""What a classifier in training sees of frames: their pixels, or the features that a frozen encoder made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vlmrm.frames.augmentation import augment
from vlmrm.frames.classifier import FrameClassifier
from vlmrm.frames.dataset import FrameIndex

ENCODING_BATCH = 64


def unit(frames: Tensor, device: torch.device) -> Tensor:
    """Frames uint8 as a model takes them: float32 in [0, 1], on its device."""
    return frames.to(device, non_blocking=True).float() / 255


class Pixels:
    """Frames as they are stored; each is changed by chance in training where `augmented`."""

    def __init__(self, model: FrameClassifier, index: FrameIndex, augmented: bool):
        self.model = model
        self.read = index.images
        self.augmented = augmented

    def logits(self, seen: Mapping[str, Tensor]) -> Tensor:
        images = {key: unit(frames, self.model.device) for key, frames in seen.items()}
        if self.augmented and self.model.training:
            images = {key: augment(frames) for key, frames in images.items()}
        return self.model(images)


class CachedFeatures:
    """What the encoder makes of every frame, once, in a file of `folder` that is mapped into memory."""

    def __init__(self, model: FrameClassifier, index: FrameIndex, folder: Path):
        self.model = model
        self._features = encode_all(model.eval(), index, folder / "features")

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        return {"features": self._features[torch.as_tensor(numbers)]}

    def logits(self, seen: Mapping[str, Tensor]) -> Tensor:
        return self.model.decide(seen["features"].to(self.model.device))


@torch.inference_mode()
def encode_all(model: FrameClassifier, index: FrameIndex, file: Path) -> Tensor:
    """The encoder's output for every frame, float32 [N, ...], on disk."""
    features: Any = None
    for start in tqdm(range(0, len(index), ENCODING_BATCH), desc="encoding frames", unit="batch", disable=None):
        numbers = range(start, min(start + ENCODING_BATCH, len(index)))
        images = {key: unit(frames, model.device) for key, frames in index.images(numbers).items()}
        encoded = model.encode(images).cpu()
        if features is None:
            features = np.memmap(file, dtype=np.float32, mode="w+", shape=(len(index), *encoded.shape[1:]))
        features[start : numbers.stop] = encoded.numpy()
    return torch.from_numpy(features)
