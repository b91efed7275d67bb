"""`edit_score`: EditScore's overall score of an edited image, from two questions to a judge."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.contract import Processes, RewardArguments, Verdict
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, source_part, text_part
from vlmrm.rewards.judges.replies import Question, Reply, without_thinking
from vlmrm.rewards.judges.request_file import read_request_file

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


class EditScore(Judge):
    """sqrt(min(SC) min(PQ)) of a pass, 0 to 10, and the mean over the passes: [N] (Luo et al. 2025, arXiv:2509.23909).

    SC are the judge's two scores of how the edit follows the instruction and keeps the rest, PQ those of how natural
    and clean the edited image looks, each 0 to 25; `replies` is the number of passes. Made for EditScore/EditScore-7B
    and its Qwen3-VL forms. A sample has one condition image, the source. A reply without two scores on the scale is
    asked again and then a failure; the published code guesses one at random, or takes the middle of the scale.
    """

    required_fields = ("prompt", "image", "condition_images")
    Settings = EditScoreSettings
    settings: EditScoreSettings
    original = "edit_score"
    shown = ("image", "source")

    def __init__(self, config: RewardArguments, accelerator: Processes):
        super().__init__(config, accelerator)
        path, where = self.settings.quality_request_file, f"reward {config.name}"
        if (path is None) != (self.request is None):
            raise ConfigError(
                f"{where}: request_file and quality_request_file are the two questions: give both or neither."
            )
        self.quality = None if path is None else read_request_file(path, where, ("image",))

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        pictures = [source_part(sample), *self.media(sample)]
        return SYSTEM, [*pictures, text_part(f"{FOLLOWING}\n{fence(sample.prompt)}\n{FORM}")]

    def questions(self, sample: JudgeSample) -> list[Question]:
        """Return the question how the edit follows the instruction, and that how the edited image looks."""
        if self.quality is None:
            quality = self.chat_question(SYSTEM, [*self.media(sample), text_part(f"{QUALITY}\n{FORM}")])
        else:
            quality = self.quality.question(sample.prompt, {"image": self.frames(sample)})
        return [*super().questions(sample), quality]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        scores = read_scores(reply.text)
        return Verdict(min(scores) / (BEST / SCALE), {"scores": scores})

    def combined(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Return the score of a pass."""
        scores = [verdict.details["scores"] for verdict in verdicts]
        return Verdict(math.sqrt(math.prod(verdict.reward for verdict in verdicts)), {"scores": scores})


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
