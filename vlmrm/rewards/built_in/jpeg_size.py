"""`jpeg_compressibility` and `jpeg_incompressibility`: how small, or large, an image is as a JPEG file."""

from __future__ import annotations

import io

from PIL import Image

from vlmrm.rewards.contract import PointwiseRewardModel, RewardModelOutput

QUALITY = 95
KILOBYTE = 1000
SCALE = 500  # kilobytes that cost a reward of 1


class JpegIncompressibility(PointwiseRewardModel):
    """The kilobytes of the image as a JPEG file of quality 95 (Black et al. 2023, arXiv:2305.13301)."""

    required_fields = ("image",)
    options = ()

    def __call__(self, image: list[Image.Image]) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        return RewardModelOutput([kilobytes(picture) for picture in image])


class JpegCompressibility(JpegIncompressibility):
    """The same, divided by -500 as in Flow-GRPO; Black et al. have the negative kilobytes themselves."""

    def __call__(self, image: list[Image.Image]) -> RewardModelOutput:
        return RewardModelOutput([-kilobytes(picture) / SCALE for picture in image])


def kilobytes(image: Image.Image) -> float:
    """Return the size of the image as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.tell() / KILOBYTE
