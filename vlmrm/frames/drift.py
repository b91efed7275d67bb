"""Whether the frames of a policy are still like those on which its classifier was measured.

A policy looks for frames that are rewarded, and may find some that no held-out episode shows. Such frames tend to lie
far from the training's among the encoder's features (Mahalanobis distance, Lee et al. 2018), or their probabilities
are in doubt more often. Neither proves an error, and what the encoder ignores makes no frame novel: the classifier is
to be measured on the policy's episodes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("vlmrm")

QUANTILE = 0.99  # of the held-out distances: a frame beyond it is novel
WINDOW = 2048  # frames between two looks
NOVEL = 0.1  # share of novel frames that is warned of, where 0.01 is expected
DOUBT = (0.1, 0.9)  # a probability between them is in doubt,
MORE_DOUBT = 0.1  # and so much larger a share of them is warned of


@dataclass(frozen=True)
class Reference:
    """Known frames, by camera: their features' mean [K, D] and whitening matrix [K, D, D]; and of held-out frames the
    `limit` of the distance (scalar), and `doubt`, the share of their probabilities that is in doubt (scalar)."""

    mean: Tensor
    whitening: Tensor
    limit: Tensor
    doubt: Tensor

    @classmethod
    def fit(cls, training: Tensor, held_out: Tensor, probabilities: np.ndarray) -> Reference:
        """Return the reference of features [N, K, D], and of held-out ones [M, K, D] with their probabilities [M]."""
        from sklearn.covariance import LedoitWolf  # for the training alone: classifiers are read without it

        fits = [LedoitWolf().fit(camera.double().numpy()) for camera in training.unbind(1)]
        mean = torch.from_numpy(np.stack([fit.location_ for fit in fits])).float()
        precision = torch.from_numpy(np.stack([fit.precision_ for fit in fits]))
        doubt = torch.tensor(in_doubt(probabilities).mean(), dtype=torch.float32)
        unscaled = cls(mean, torch.linalg.cholesky(precision).float(), torch.ones(()), doubt)
        return replace(unscaled, limit=torch.quantile(unscaled.novelty(held_out), QUANTILE))

    def to(self, device: torch.device) -> Reference:
        return Reference(*(value.to(device) for value in vars(self).values()))

    def novelty(self, features: Tensor) -> Tensor:
        """Return the distances of features [N, K, D], the farthest camera's, in units of the limit: [N]."""
        whitened = torch.einsum("nkd,kde->nke", features.float() - self.mean, self.whitening)
        return torch.linalg.vector_norm(whitened, dim=2).amax(1) / self.limit


def in_doubt(probabilities: np.ndarray) -> np.ndarray:
    return (probabilities > DOUBT[0]) & (probabilities < DOUBT[1])


class DriftWatch:
    """Counts novel frames and doubtful probabilities, and warns once of each that becomes frequent."""

    def __init__(self, reference: Reference, name: object):
        self._expected, self._name = float(reference.doubt), name
        self._frames = self._novel = self._doubtful = 0
        self._warned: set[str] = set()

    def update(self, novelty: np.ndarray, probabilities: np.ndarray) -> None:
        """Count frames: their novelty [N] and probabilities [N]."""
        self._frames += len(novelty)
        self._novel += int((novelty > 1).sum())
        self._doubtful += int(in_doubt(probabilities).sum())
        if self._frames >= WINDOW:
            self._look()
            self._frames = self._novel = self._doubtful = 0

    def _look(self) -> None:
        novel, doubt = self._novel / self._frames, self._doubtful / self._frames
        if novel > NOVEL:
            self._warn("novel", f"{novel:.0%} of the last {self._frames} frames are unlike its training's")
        if doubt > self._expected + MORE_DOUBT:
            text = f"{doubt:.0%} of the last {self._frames} probabilities are between {DOUBT[0]} and {DOUBT[1]}"
            self._warn("doubt", f"{text}, where {self._expected:.0%} of the held-out ones were")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "%s: %s: measure it on this policy's episodes (`vlmrm frames eval`) before its rewards are believed.",
                self._name, text,
            )  # fmt: skip
