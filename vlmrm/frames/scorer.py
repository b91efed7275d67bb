"""A trained classifier as a function: frames as they are stored or shown in, probabilities of success out."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.frames.checkpoint import LoadedClassifier, load_classifier
from vlmrm.frames.classifier_config import ClassifierConfig
from vlmrm.frames.inputs import unit
from vlmrm.frames.pixels import to_uint8
from vlmrm.frames.settings import RewardModelSettings

logger = logging.getLogger("vlmrm")

MATCHED = ("image_keys", "image_size", "hidden_dim", "num_spatial_blocks", "freeze_encoder")


class FrameScorer:
    """Scores frames in one batch; a frame's probability does not depend on the others in it.

    It warns of a classifier that does not qualify as a reward, or of which nothing says whether it does.
    """

    def __init__(self, loaded: LoadedClassifier):
        self.model = loaded.model
        self.config = loaded.config
        if self.config.qualified is None:
            logger.warning(
                "%s does not say whether it qualifies as a reward: measure it before it trains a policy.", loaded.path
            )
        elif not self.config.qualified:
            logger.warning(
                "%s does not qualify as a reward: %s; it is scored with all the same.",
                loaded.path,
                self.config.unqualified_because,
            )

    @classmethod
    def open(cls, settings: RewardModelSettings) -> FrameScorer:
        """The classifier of `settings.checkpoint_path`.

        Raises:
            CheckpointError: when it is missing or broken, or does not qualify as a reward.
            ConfigError: when it is not what the settings say, naming both values.
        """
        path = settings.checkpoint_path
        if path is None:
            raise ConfigError("reward_model has no checkpoint_path: name a classifier of `vlmrm frames train`.")
        loaded = load_classifier(path, image_size=settings.image_size, device=settings.device)
        refuse_unqualified(loaded.config, settings, path)
        for name in MATCHED:
            given, there = getattr(settings, name), getattr(loaded.config, name)
            unsaid = name == "freeze_encoder" and not loaded.described
            if given is not None and _plain(given) != _plain(there) and not unsaid:
                raise ConfigError(
                    f"{name} is {_plain(given)} in the configuration and {_plain(there)} in {path}: "
                    "leave it out, or name the checkpoint that was meant."
                )
        if settings.use_pretrain not in (None, loaded.config.use_pretrain):
            logger.warning(
                "use_pretrain is %s in the configuration and %s in %s, which is taken.",
                settings.use_pretrain,
                loaded.config.use_pretrain,
                path,
            )
        return cls(loaded)

    def probabilities(self, images: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """P(success) [N], float64, of N moments: frames [N,C,H,W] by camera, uint8 or floats in [0, 1].

        Floats are rounded to bytes, as those of training were.

        Raises:
            ConfigError: when a camera is missing, or frames have another size.
            DataError: when they have another type or range.
        """
        seen = {key: self._seen(key, frames) for key, frames in images.items()}
        with torch.inference_mode():
            return expit(self.model(seen).cpu().double().numpy())

    def _seen(self, key: str, frames: np.ndarray | Tensor) -> Tensor:
        array = frames.numpy(force=True) if isinstance(frames, Tensor) else np.asarray(frames)
        return unit(torch.from_numpy(to_uint8(array, f"the images {key!r}")), self.model.device)


def refuse_unqualified(config: ClassifierConfig, settings: RewardModelSettings, name: object) -> None:
    """Refuse a classifier that its training found to be no reward, unless the settings accept it.

    Raises:
        CheckpointError: naming it and why it is none.
    """
    if config.qualified is False and not settings.accept_unqualified:
        raise CheckpointError(
            f"{name} does not qualify as a reward: {config.unqualified_because}: train it on more episodes or for "
            "longer, or take it as it is with accept_unqualified: true."
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, (tuple, list)) else value
