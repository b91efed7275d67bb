"""What runs inside the decoder's worker: latents of Wan's video autoencoder in, frames out."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vlmrm.devices import dtype_named
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.formats.wire import Item, WireOutcome
from vlmrm.serving.arrays import array_of


class WanDecoder:
    """An AutoencoderKLWan of diffusers, of Wan 2.1 (16 channels) or 2.2 (48).

    Latents are as the diffusion model has them: (z - mean) / std by channel, with the checkpoint's own figures, which
    is undone. An item is `latents`, [C, T, H, W] as the bytes of a .npy file; its outcome has in `extra` the `video`,
    the frames uint8 [T', 3, H', W'] as such bytes, and as `score`, which every outcome has, the seconds that it took.
    Values are cut to [-1, 1] and then, as in cosmos-rl, cut off rather than rounded to whole numbers. Each video is
    decoded by itself, so that none depends on its batch.

    Args:
        model_path: a folder or repository in the layout of diffusers; `subfolder` where it is a part of a pipeline.
    """

    def __init__(self, model_path: str, subfolder: str = "", dtype: str = "bfloat16", device: str = ""):
        try:
            from diffusers import AutoencoderKLWan
        except ImportError:
            raise ConfigError(
                "decoding latents needs diffusers: pip install -e '.[latents]' in vlmrm's folder."
            ) from None
        weights = getattr(torch, dtype_named(dtype))
        try:
            vae = AutoencoderKLWan.from_pretrained(
                model_path, subfolder=subfolder or None, torch_dtype=weights, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"there is no AutoencoderKLWan in {model_path}: {error}") from error
        self.vae: Any = vae.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        config = self.vae.config
        self.mean, self.std = (
            torch.tensor(each).view(-1, 1, 1, 1) for each in (config.latents_mean, config.latents_std)
        )
        self.info = {
            "kind": "latents",
            "channels": config.z_dim,
            "spatial": config.scale_factor_spatial,
            "temporal": config.scale_factor_temporal,
        }

    def __call__(self, items: Sequence[Item]) -> list[WireOutcome]:
        return [self._outcome(array_of(item["latents"])) for item in items]

    def _outcome(self, latents: np.ndarray) -> WireOutcome:
        channels = len(self.mean)
        if latents.ndim != 4 or latents.shape[0] != channels:
            return {"error": f"its latents are {list(latents.shape)}, and the decoder's are [{channels}, T, H, W]"}
        if not np.isfinite(latents).all():
            return {"error": "its latents have values that are not finite"}
        started = time.perf_counter()
        frames = self._decoded(torch.from_numpy(latents.astype(np.float32))).numpy()
        file = io.BytesIO()
        np.save(file, frames)
        return {"score": time.perf_counter() - started, "extra": {"video": file.getvalue()}}

    @torch.no_grad()
    def _decoded(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [C, T, H, W] as frames, uint8 [T', 3, H', W']."""
        raw = (latents * self.std + self.mean).to(self.vae.device, self.vae.dtype)
        video = self.vae.decode(raw[None]).sample[0].float().clamp(-1, 1)
        return ((video + 1) / 2 * 255).to(torch.uint8).permute(1, 0, 2, 3).contiguous().cpu()
