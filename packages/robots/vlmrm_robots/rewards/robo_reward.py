"""`robo_reward`: RoboReward's rating, 1 to 5, of how far a robot got with its task by the end (Lee et al. 2026)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image
from pydantic import Field

from vlmrm.errors import RewardError
from vlmrm.rewards.contract import RewardModelOutput, Verdict
from vlmrm.rewards.judges.judge import Judge, JudgeSample, SampleSettings, fence, text_part
from vlmrm.rewards.judges.replies import Reply, read_score, without_thinking
from vlmrm.rewards.samples import to_pil
from vlmrm_robots.rewards.trajectory_model import frames_of_samples

BEST = 5.0
QUESTION = """The pictures are frames of a robot at work, in the order of time. Rate by 1, 2, 3, 4 or 5 how far its
task is done in the final state, however long it took, and answer in the format 'ANSWER: <score>'.
1: nothing of what the task asks for has changed.
2: there is a small change towards the goal, and far too little.
3: much is done, but an important requirement, or more than one, is not met.
4: the right things are in the right places, and one minor requirement is not met.
5: every requirement is met.
Task: {prompt}"""
ANSWER = re.compile(r"ANSWER[\s*_]*(?::|：)(?P<value>.*)", re.IGNORECASE)


class RoboRewardSettings(SampleSettings):
    vlm_model: str = "RoboReward"
    max_frames: int = Field(16, ge=1)
    """Frames of a trajectory, evenly spaced from the first to the last."""


class RoboReward(Judge):
    """The judge's rating unchanged, 1 (nothing) to 5 (perfect): [N].

    Made for teetone/RoboReward-4B and RoboReward-8B, served by vLLM under the name `RoboReward`, which answer
    `ANSWER: <score>`. Scale and reply are the published ones, the question is in our own words; a `request_file` has
    the published one. The published code shows a video; here it is sent as frames. A trajectory is a video, an image,
    or an answer of several images.
    """

    Settings = RoboRewardSettings
    settings: RoboRewardSettings
    options = tuple(RoboRewardSettings.model_fields)
    message_responses = True

    def __call__(  # ty: ignore[lost-keyword-for-regular-parameter]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        shown, failures = frames_of_samples(len(prompt), image, video, response, to_pil)
        output = super().__call__(
            [prompt[index] for index in shown], video=[list(frames) for frames in shown.values()]
        )
        places = list(shown)

        def scattered(values: Sequence[Any], absent: Any) -> list[Any]:
            by_place = dict(zip(places, values, strict=True))
            return [by_place.get(index, absent) for index in range(len(prompt))]

        failures |= {places[place]: reason for place, reason in output.failures.items()}
        info = {name: scattered(values, None) for name, values in (output.extra_info or {}).items()}
        return RewardModelOutput(scattered([*map(float, output.rewards)], math.nan), info, failures)

    def chat(self, sample: JudgeSample) -> tuple[str, list[dict[str, Any]]]:
        question = QUESTION.replace("{prompt}", fence(sample.prompt))
        return "You judge the work of robots.", [*self.media(sample), text_part(question)]

    def verdict(self, reply: Reply, sample: JudgeSample) -> Verdict:
        answer = ANSWER.search(without_thinking(reply.text))  # the first counts, as in the published code
        if answer is None:
            raise RewardError("the reply has no ANSWER")
        score = read_score(answer["value"], BEST)
        if not isinstance(score, float) or not 1 <= score <= BEST:
            raise RewardError(f"its ANSWER is {answer['value'].strip()[:40]!r}, which is no number from 1 to {BEST:g}")
        return Verdict(score)
