"""What all judges do: ask about each sample, read the reply, and say of each one that cannot be read why."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accelerate import Accelerator, PartialState
from PIL import Image

from vlmrm.errors import MediaError, RewardError
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput
from vlmrm.rewards.judges.client import JudgeClient
from vlmrm.rewards.judges.messages import FENCED, frame_parts, image_part
from vlmrm.rewards.judges.replies import Question, Reply
from vlmrm.rewards.judges.settings import JudgeSettings, read_settings


@dataclass(frozen=True)
class Sample:
    """What is to be judged: an image or the frames of a video, made for `prompt`, perhaps out of `sources`."""

    prompt: str
    image: Image.Image | None = None
    video: Sequence[Image.Image] | None = None
    sources: Sequence[Image.Image] | None = None


@dataclass(frozen=True)
class Verdict:
    """The reward in a reply; `details` goes to the audit log beside the reply itself."""

    reward: float
    details: dict[str, Any] = field(default_factory=dict)


class Judge(PointwiseRewardModel):
    """A vision-language model that is asked about each sample over an OpenAI-compatible API.

    A reply that has no reward in it is a failure with the reply's beginning, never a number; so is one that was cut
    off. `extra_info` has every `reply` and what was read from it; `counters` are of calls, tokens and cost.
    """

    required_fields = ("prompt",)
    text_prompts = True
    Settings: ClassVar[type[JudgeSettings]]
    cut_off: ClassVar[tuple[str, ...]] = ("length", "content_filter")  # ends of replies that are not whole

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        self.settings = read_settings(self.Settings, config)
        self.deterministic = self.settings.temperature == 0
        self.client = JudgeClient(self.settings)

    @abstractmethod
    def chat(self, sample: Sample) -> tuple[str, list[dict[str, Any]]]:
        """The system message and the parts of the user's.

        Raises:
            RewardError: when the sample lacks what is asked about.
        """

    @abstractmethod
    def verdict(self, reply: Reply, sample: Sample) -> Verdict:
        """What the reply says.

        Raises:
            RewardError: when it says nothing that is a reward.
        """

    def parameters(self) -> dict[str, Any]:
        """What a call says beside the model and the messages."""
        return {"temperature": self.settings.temperature, "max_completion_tokens": self.settings.max_tokens}

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Image.Image] | None = None,
        video: list[list[Image.Image]] | None = None,
        condition_images: list[list[Image.Image]] | None = None,
    ) -> RewardModelOutput:
        none = [None] * len(prompt)
        columns = zip(prompt, image or none, video or none, condition_images or none, strict=True)
        samples = [Sample(*values) for values in columns]
        questions: dict[int, Question] = {}
        failures: dict[int, str] = {}
        for place, sample in enumerate(samples):
            try:
                questions[place] = self._question(sample)
            except (MediaError, RewardError) as error:
                failures[place] = str(error)
        answers = dict(zip(questions, self.client.ask(list(questions.values())), strict=True))
        rewards = [math.nan] * len(samples)
        info: list[dict[str, Any]] = [{} for _ in samples]
        for place, answer in answers.items():
            try:
                if isinstance(answer, RewardError):
                    raise answer
                info[place] |= {"reply": answer.text}
                verdict = self._read(answer, samples[place])
            except RewardError as error:
                failures[place] = str(error)
                continue
            self.client.keep(questions[place], answer)
            rewards[place] = verdict.reward
            info[place] |= verdict.details
        names = list(dict.fromkeys(name for each in info for name in each))
        return RewardModelOutput(rewards, {name: [each.get(name) for each in info] for name in names}, failures)

    def _question(self, sample: Sample) -> Question:
        system, parts = self.chat(sample)
        messages = [{"role": "system", "content": f"{system}\n{FENCED}"}, {"role": "user", "content": parts}]
        return Question.of(self.settings.vlm_model, messages, self.parameters())

    def _read(self, reply: Reply, sample: Sample) -> Verdict:
        begins = f"it begins {reply.text[:200]!r}" if reply.text.strip() else "it is empty"
        if reply.finish_reason in self.cut_off:
            hint = f": raise max_tokens above {self.settings.max_tokens}" if reply.finish_reason == "length" else ""
            raise RewardError(f"the reply was cut off ({reply.finish_reason}){hint}; {begins}")
        try:
            return self.verdict(reply, sample)
        except RewardError as error:
            raise RewardError(f"{error}; {begins}") from error

    def counters(self) -> dict[str, float]:
        usage = self.client.usage
        names = ("calls", "retries", "cache_hits", "prompt_tokens", "completion_tokens", "cost")
        return {name: getattr(usage, name) for name in names}

    def media(self, sample: Sample) -> list[dict[str, Any]]:
        """The sample's image, or frames of its video.

        Raises:
            RewardError: when it has neither, or both.
        """
        if (sample.image is None) == (sample.video is None):
            count = "neither an image nor a video" if sample.image is None else "both an image and a video"
            raise RewardError(f"the sample has {count}: give one of them")
        if sample.image is not None:
            return [image_part(sample.image)]
        return frame_parts(sample.video or (), self.settings.max_frames)
