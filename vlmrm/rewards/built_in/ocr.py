"""`ocr`: the share of the text quoted in a prompt that can be read in the image or video."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlmrm.errors import RewardError
from vlmrm.libraries import needs
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput, Verdict, choice
from vlmrm.rewards.pictures import views_of

# A " after a digit is inches. Each pattern has one group, the quoted text.
DOUBLE = (r'(?<!\d)["“”„]([^"“”„]*)["“”]', "«([^»]*)»", "「([^」]*)」")
# A ' inside or after a word is an apostrophe, so a quotation starts after and ends before what is no letter.
SINGLE = (r"(?<!\w)['‘](?!\s)(.*?)(?<!\s)['’](?!\w)",)
WITHOUT_QUOTES = ("error", "prompt")
INTERVAL = 4  # frames of a video from one that is read to the next


class OCR(PointwiseRewardModel):
    """The share of the text that the prompt quotes which is read in the image, in [0, 1].

    With the target t and the text r that is read, both without white space and case, it is 1 where t is in r, else 1 -
    min(levenshtein(t, r), len(t)) / len(t): the rule of Flow-GRPO (Liu et al. 2025, arXiv:2505.05470), whose target is
    the text between the first pair of double quotes. Here all quoted texts count: each in r is a 1, else they are one
    target in their order. A prompt that quotes nothing fails; with `without_quotes: prompt` all of it is the target,
    as in Flow-Factory. Of a video every fourth frame is read, and those with a reward above 0 count with their mean.

    The PP-OCR models in RapidOCR's package read Latin letters and Chinese, on the CPU. Published figures use
    PaddleOCR, which makes other mistakes.
    """

    required_fields = ("prompt", "image", "video")
    text_prompts = True
    options = ("without_quotes",)

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        self.whole_prompt = choice(config, "without_quotes", "error", WITHOUT_QUOTES) == "prompt"
        with needs("rewards", "the reward ocr"):
            import rapidfuzz  # noqa: F401
            from rapidocr import RapidOCR
        self.reader = RapidOCR(params={"Global.log_level": "error"})

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], image: list[Image.Image] | None = None, video: list[list[Image.Image]] | None = None
    ) -> RewardModelOutput:
        return RewardModelOutput.each(self._verdict, prompt, views_of(image, video, "mean"))

    def _verdict(self, prompt: str, frames: Sequence[Image.Image]) -> Verdict:
        quotes = quoted(prompt) or ([prompt] if self.whole_prompt else [])
        targets = [normalised(target) for target in quotes if normalised(target)]
        if not targets:
            raise RewardError(f"there is no text between quotes in its prompt, {prompt[:80]!r}, to look for")
        texts = [self._read(frame) for frame in frames[::INTERVAL]]
        above = [share for share in (likeness(targets, normalised(each)) for each in texts) if share > 0]
        return Verdict(sum(above) / len(above) if above else 0.0, {"read": "\n\n".join(texts)})

    def _read(self, image: Image.Image) -> str:
        """Return the lines of text in the image, from the top."""
        result: Any = self.reader(np.ascontiguousarray(np.asarray(image)[:, :, ::-1]))  # RGB to OpenCV's BGR
        return "\n".join(result.txts or ())


def quoted(prompt: str) -> list[str]:
    """Return the texts that the prompt quotes, in order, including empty ones."""
    for patterns in (DOUBLE, SINGLE):
        matches = [match for pattern in patterns for match in re.finditer(pattern, prompt, re.DOTALL)]
        if matches:
            return [match.group(1) for match in sorted(matches, key=lambda match: match.start())]
    return []


def normalised(text: str) -> str:
    """Return the text without case, white space, and the width and shape of characters."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'").replace("‘", "'")
    return "".join(text.casefold().split())


def likeness(targets: list[str], read: str) -> float:
    """Return how much of the `targets` is in `read`, in [0, 1]; all are normalised, and no target is empty."""
    from rapidfuzz.distance import Levenshtein

    if all(target in read for target in targets):
        return 1.0
    target = "".join(targets)
    return 1.0 - min(Levenshtein.distance(target, read), len(target)) / len(target)
