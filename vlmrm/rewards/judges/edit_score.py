"""`edit_score`: EditScore's overall score of an edited image, from two questions to a judge."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from PIL import Image
from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import PointwiseRewardModel, Processes, RewardArguments, RewardModelOutput
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, Verdict, fence, source_part, text_part
from vlmrm.rewards.judges.replies import Reply, without_thinking

SYSTEM = "You are a professional digital artist who judges generated pictures by rules."
FORM = """Reply in this form, with a short reasoning:
{"reasoning": "...", "score": [score1, score2]}"""
FOLLOWING = """The first image was edited into the second one by the instruction. The two may be alike, where the edit
failed. Give two scores from 0 to 25:
score1: is the instruction carried out? (0: not at all, 25: entirely)
score2: is all else as it was? (0: another scene, 25: no more is changed than was asked for)
The instruction:"""
QUALITY = """Give the image two scores from 0 to 25:
score1: does it look natural: distances, shadows, light? (0: not at all, 25: entirely)
score2: is it free of artifacts: distortions, watermarks, scratches, blurred faces, odd limbs? (0: full of them, 25: of
all)"""
BEST = 25.0
SCALE = 10.0  # of the score of a pass
# {"reasoning": "...", "score": [20, 15]} with any quotes, also where the reasoning breaks the JSON; or [20, 15] alone.
LIST = r"\[\s*([-+]?\d+(?:\.\d+)?)\s*,\s*([-+]?\d+(?:\.\d+)?)\s*,?\s*\]"
SCORES = re.compile(rf"""(?:["'“”‘’]score["'“”‘’]|\bscore)\s*[:=]\s*{LIST}""", re.IGNORECASE)
ALONE = re.compile(rf"\s*{LIST}\s*")


class EditScoreSettings(SampleSettings):
    vlm_model: str = "EditScore"
    temperature: float = Field(0.7, ge=0)
    quality_request_file: str | None = None
    """File with the whole request of the second question; it goes with `request_file`, that of the first."""


class EditScore(PointwiseRewardModel):
    """sqrt(min(SC) min(PQ)) of a pass, 0 to 10, and the mean over the passes: [N] (Luo et al. 2025, arXiv:2509.23909).

    SC are the judge's two scores of how the edit follows the instruction and keeps the rest, PQ those of how natural
    and clean the edited image looks, each 0 to 25; `replies` is the number of passes. Made for EditScore/EditScore-7B
    and its Qwen3-VL forms. A sample has one condition image, the source. A reply without two scores on the scale is
    asked again and then a failure; the published code guesses one at random, or takes the middle of the scale.
    """

    required_fields = ("prompt", "image", "condition_images")
    text_prompts = True
    options = tuple(EditScoreSettings.model_fields)

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        extra = dict(config.extra_kwargs)
        quality = extra.pop("quality_request_file", None)
        if (quality is None) != ("request_file" not in extra):
            raise ConfigError(
                f"reward {config.name}: request_file and quality_request_file are the two questions: give both or "
                "neither."
            )
        self.following = _Following(replace(config, extra_kwargs=extra), accelerator)
        if quality is not None:
            extra["request_file"] = quality
        self.quality = _Quality(replace(config, extra_kwargs=extra), accelerator)
        self.quality.client = self.following.client  # one limit of calls, and one breaker
        self.deterministic = self.following.deterministic

    def __call__(  # ty: ignore[incompatible-method-override]
        self, prompt: list[str], image: list[Image.Image], condition_images: list[list[Image.Image]]
    ) -> RewardModelOutput:
        with ThreadPoolExecutor(1) as thread:  # both questions share a round
            asked = thread.submit(self.quality, prompt, image, condition_images=condition_images)
            following = self.following(prompt, image, condition_images=condition_images)
            quality = asked.result()
        failures = {**quality.failures, **following.failures}
        followed, natural = (self._passes(output) for output in (following, quality))
        passes = [
            [] if index in failures else [math.sqrt(sc * pq) for sc, pq in zip(*pair, strict=True)]
            for index, pair in enumerate(zip(followed, natural, strict=True))
        ]
        rewards = [statistics.fmean(scores) if scores else math.nan for scores in passes]
        info = {
            f"{name}_{key}": values
            for name, output in (("following", following), ("quality", quality))
            for key, values in (output.extra_info or {}).items()
            if key in ("reply", "scores")
        }
        return RewardModelOutput(rewards, {"passes": passes, **info}, failures)

    def reward_in(self, reply: str) -> float:
        """Return the smaller of two scores in the text of a reply, out of 10."""
        return self.following.reward_in(reply)

    def counters(self) -> dict[str, float]:
        return self.following.counters()

    def _passes(self, output: RewardModelOutput) -> list[Sequence[float]]:
        """Return each sample's scores of one question, a number a pass."""
        if "rewards" in (info := output.extra_info or {}):
            return [rewards or () for rewards in info["rewards"]]
        return [(float(reward),) for reward in output.rewards]


class _Question(Judge):
    """The smaller of two scores that a reply gives, out of 10."""

    Settings = EditScoreSettings

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        scores = read_scores(reply.text)
        return Verdict(min(scores) / (BEST / SCALE), {"scores": scores})


class _Following(_Question):
    original = "edit_score"
    shown = ("image", "source")

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        pictures = [source_part(sample), *self.media(sample)]
        return SYSTEM, [*pictures, text_part(f"{FOLLOWING}\n{fence(sample.prompt)}\n{FORM}")]


class _Quality(_Question):
    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        return SYSTEM, [*self.media(sample), text_part(f"{QUALITY}\n{FORM}")]


def read_scores(text: str) -> list[float]:
    """Return the two scores of a reply, the last that it gives."""
    text = without_thinking(text)
    alone = ALONE.fullmatch(text)
    found = [match.groups() for match in SCORES.finditer(text)] or ([alone.groups()] if alone else [])
    if not found:
        raise RewardError('the reply has no "score": [score1, score2]')
    scores = [float(number) for number in found[-1]]
    if off := [score for score in scores if not 0 <= score <= BEST]:
        raise RewardError(f"it has the score {off[0]:g}, which is not from 0 to {BEST:g}")
    return scores
