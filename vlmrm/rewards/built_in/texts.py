"""Rewards that are formulas: `format` and `repetition`, guards beside a learned reward, and the size of a JPEG."""

from __future__ import annotations

import io
import re
from typing import Any

from PIL import Image
from pydantic import Field

from vlmrm.formats.openai import answer_text
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput
from vlmrm.settings import Strict, validate

QUALITY = 95
KILOBYTE = 1000
SCALE = 500  # kilobytes that cost a reward of 1


class FormatSettings(Strict, strict=True):
    pattern: re.Pattern[str]


class RepetitionSettings(Strict, strict=True):
    """The defaults are those of TRL and Open-R1."""

    ngram_size: int = Field(3, ge=1)
    max_penalty: float = Field(-1.0, lt=0)


class Format(PointwiseRewardModel):
    """1 where the whole `response` matches the regular expression `pattern`, else 0; a dot may be a line end."""

    required_fields = ("response",)
    options = tuple(FormatSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        settings = validate(FormatSettings, config.extra_kwargs, f"reward {config.name}")
        self.pattern = re.compile(settings.pattern.pattern, re.DOTALL)

    def __call__(self, response: list[Any]) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        return RewardModelOutput([float(self.pattern.fullmatch(answer_text(each)) is not None) for each in response])


class Repetition(PointwiseRewardModel):
    """`max_penalty` times the share of the `response`'s n-grams of words that are repetitions of earlier ones.

    With u different ones of t n-grams the reward is (1 - u / t) max_penalty, 0 for less than n words: the penalty of
    Yeo et al. 2025 (arXiv:2502.03373) as Open-R1 computes it. Words are what white space parts, in lower case.
    """

    required_fields = ("response",)
    options = tuple(RepetitionSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        settings = validate(RepetitionSettings, config.extra_kwargs, f"reward {config.name}")
        self.size, self.penalty = settings.ngram_size, settings.max_penalty

    def __call__(self, response: list[Any]) -> RewardModelOutput:  # ty: ignore[incompatible-method-override]
        return RewardModelOutput([self.penalty * repeated(answer_text(each), self.size) for each in response])


def repeated(text: str, size: int) -> float:
    """Return the share of the n-grams of a text that it has had before, in [0, 1)."""
    words = text.lower().split()
    ngrams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


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
