"""`unified_reward`: pointwise scores of UnifiedReward for generated images and videos (Wang et al. 2025)."""

from __future__ import annotations

import re
from typing import Any

from vlmrm.errors import RewardError
from vlmrm.rewards.contract import Verdict
from vlmrm.rewards.judges.edit_score import read_scores
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, text_part
from vlmrm.rewards.judges.replies import Reply, read_score, without_thinking

IMAGE = """A text caption and an image that was generated from it are given. Evaluate the image by two criteria:
1. Alignment with the Caption: are the objects, their attributes and their relations those of the caption?
2. Overall Image Quality: is it clear and detailed, are its colours right, and does it please the eye?
List the key elements of the caption in the format 'element (type): value', where value=1 means that the image shows
the element and value=0 that it does not, and then assign a score from 1 to 5 after 'Final Score:'.
Text Caption: [{prompt}]"""
VIDEO = """As an expert judge of AI-generated videos, look at the frames of a video and at the text prompt that it was
generated from. Score five dimensions by a number from 1 (bad) to 4 (perfect, like a real video), one a line:
visual quality: (clearness, resolution, brightness, colour)
temporal consistency: (do objects and people stay the same?)
dynamic degree: (how much changes?)
text-to-video alignment: (does it show what the prompt asks for?)
factual consistency: (does it agree with common sense and facts?)
Finally assign a score from 1 to 10 after 'Final Score:'.
Text Prompt: [{prompt}]"""
FINAL = re.compile(r"Final[ \t]+Score[\s*_]*(?:\([^)]{0,40}\)[\s*_]*)?(?::|：)(?P<value>.*)", re.IGNORECASE)
# UnifiedReward 2.0: several scores and no final one.
SEVERAL = re.compile(
    r"\b(?P<name>Alignment|Coherence|Physics|Style)[ \t]+Score[\s*_]*(?:\([^)]{0,40}\)[\s*_]*)?(?::|：)(?P<value>.*)",
    re.IGNORECASE,
)


class UnifiedRewardSettings(SampleSettings):
    vlm_model: str = "UnifiedReward"


class UnifiedReward(Judge):
    """The judge's final score unchanged, 1 to 5 for an image, 1 to 10 for a video: [N].

    Made for CodeGoat24/UnifiedReward-7b-v1.5 and UnifiedReward-qwen-7b, served by vLLM under the name `UnifiedReward`.
    The questions follow the published ones of
    `inference_qwen/{image,video}_generation/qwen_point_score_*_generation.py` in our own words; a `request_file` has
    the published ones. Without a final score, the reward is the mean of UnifiedReward 2.0's scores, each 1 to 5, or
    the smaller of UnifiedReward-Edit's two, 0 to 25.
    """

    Settings = UnifiedRewardSettings
    settings: UnifiedRewardSettings
    original = "unified_reward_2"

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        template = IMAGE if sample.video is None else VIDEO
        question = template.replace("{prompt}", fence(sample.prompt))
        return "You are a helpful assistant.", [*self.media(sample), text_part(question)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        best = 5.0 if sample.video is None else 10.0
        text = without_thinking(reply.text)
        finals = [match["value"] for match in FINAL.finditer(text)]
        if not finals:
            return _without_final(text)
        score = read_score(finals[-1], best)
        if not isinstance(score, float) or not 1 <= score <= best:
            raise RewardError(f"its Final Score is {finals[-1].strip()[:40]!r}, which is no number from 1 to {best:g}")
        return Verdict(score)


def _without_final(text: str) -> Verdict:
    """Return the verdict in the forms of UnifiedReward 2.0 and UnifiedReward-Edit."""
    values = {match["name"].title(): match["value"] for match in SEVERAL.finditer(text)}
    if '"score"' in text and not values:
        scores = read_scores(text)
        return Verdict(min(scores), {"aspects": scores})
    aspects = {}
    for name, value in values.items():
        score = read_score(value, 5.0)
        if not isinstance(score, float) or not 1 <= score <= 5:
            raise RewardError(f"its {name} score is {value.strip()[:40]!r}, no number from 1 to 5")
        aspects[name] = score
    if len(aspects) < 2:
        raise RewardError("the reply has no Final Score, nor the several scores of UnifiedReward 2.0")
    return Verdict(sum(aspects.values()) / len(aspects), {"aspects": aspects})
