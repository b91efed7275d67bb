"""Whether the frames of a policy are still like those on which its classifier was measured.

A policy looks for frames that are rewarded, and may find some that no held-out episode shows. Such frames tend to lie
far from the training's among the encoder's features (Mahalanobis distance, Lee et al. 2018), or their probabilities
are in doubt more often. Neither proves an error, and what the encoder ignores makes no frame novel: the classifier is
to be measured on the policy's episodes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger("vlmrm")

QUANTILE = 0.99  # of the held-out distances: a frame beyond it is novel
WINDOW = 2048  # frames between two looks
LEAST = 128  # frames of a last look, at the end
FLOOR = 1e-12  # of a feature's variance: an encoder may say the same of all frames
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
        floor = FLOOR * np.eye(training.shape[2])
        precision = torch.from_numpy(np.stack([np.linalg.inv(fit.covariance_ + floor) for fit in fits]))
        doubt = torch.tensor(in_doubt(probabilities).mean(), dtype=torch.float32)
        unscaled = cls(mean, torch.linalg.cholesky(precision).float(), torch.ones(()), doubt)
        farthest = unscaled.novelty(held_out).amax(1)
        return replace(unscaled, limit=torch.quantile(farthest, QUANTILE).clamp(min=FLOOR))

    def to(self, device: torch.device) -> Reference:
        return Reference(*(value.to(device) for value in vars(self).values()))

    def novelty(self, features: Tensor) -> Tensor:
        """Return the distances of features [N, K, D] in units of the limit, by camera: [N, K]."""
        whitened = torch.einsum("nkd,kde->nke", features.float() - self.mean, self.whitening)
        return torch.linalg.vector_norm(whitened, dim=2) / self.limit


def in_doubt(probabilities: np.ndarray) -> np.ndarray:
    return (probabilities > DOUBT[0]) & (probabilities < DOUBT[1])


class DriftWatch:
    """Counts novel frames and doubtful probabilities, and warns once of each that becomes frequent.

    Args:
        cameras: their K names, by which it says which one shows what is new.
        name: of the classifier.
    """

    def __init__(self, reference: Reference, cameras: Sequence[str], name: object):
        self._expected, self._cameras, self._name = float(reference.doubt), cameras, name
        self._warned: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self._frames = self._doubtful = 0
        self._novel = np.zeros(len(self._cameras), dtype=np.int64)

    def update(self, novelty: np.ndarray, probabilities: np.ndarray) -> None:
        """Count frames: their novelty [N, K] and probabilities [N]."""
        self._frames += len(novelty)
        self._novel += (novelty > 1).sum(axis=0)
        self._doubtful += int(in_doubt(probabilities).sum())
        if self._frames >= WINDOW:
            self.look()

    def look(self) -> None:
        """Warn of what is frequent among the frames since the last look, if there are enough of them."""
        if self._frames >= LEAST:
            for camera, count in zip(self._cameras, self._novel, strict=True):
                if count > NOVEL * self._frames:
                    where = f" of {camera}" if len(self._cameras) > 1 else ""
                    share = f"{count / self._frames:.0%} of the last {self._frames} frames"
                    self._warn(f"novel{where}", f"{share}{where} are unlike its training's")
            if self._doubtful > (self._expected + MORE_DOUBT) * self._frames:
                share = f"{self._doubtful / self._frames:.0%} of the last {self._frames} probabilities"
                doubted = (
                    f"are between {DOUBT[0]} and {DOUBT[1]}, where {self._expected:.0%} of the held-out ones were"
                )
                self._warn("doubt", f"{share} {doubted}")
        self._begin()

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(
                "%s: %s: measure it on this policy's episodes (`vlmrm frames eval`) before its rewards are believed.",
                self._name, text,
            )  # fmt: skip
