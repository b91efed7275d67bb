"""Rewards of trajectories: the frames that they look at, and the shared part of TOPReward and Robometer.

The published models show the frames as images, and read a number at one place of the text. Each is a scorer like that
of a model trained here, with another head and another rendering of the same conversation: the task, and frames as the
answer. The prefixes of an episode share its frames in one forward.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from accelerate import Accelerator, PartialState

from vlmrm.conversation import Conversation, Image, Message, Part, Text, Video
from vlmrm.errors import ConfigError, RowError
from vlmrm.formats.openai import read_messages
from vlmrm.rewards.contract import PointwiseRewardModel, RewardArguments, RewardModelOutput
from vlmrm.rewards.judges.judge import spaced
from vlmrm.scoring.scorer import LocalScorer


def frames_of_samples(
    count: int,
    image: Sequence[Any] | None,
    video: Sequence[Any] | None,
    response: Sequence[Any] | None,
    convert: Callable[[Any], Any],
) -> tuple[dict[int, Sequence[Any]], dict[int, str]]:
    """Return the frames of samples in the order of time, and why the others of `count` have none, by number.

    They are its image, its video, or the images or video of an answer as messages, which `convert` turns into what the
    reward takes. An answer as a text beside an image or video is another reward's.
    """
    found: dict[int, Sequence[Any]] = {}
    failures: dict[int, str] = {}
    columns = zip(*(column or [None] * count for column in (image, video, response)), strict=True)
    for index, values in enumerate(columns):
        try:
            found[index] = _frames(*values, convert)
        except RowError as error:
            failures[index] = error.reason
    return found, failures


def _frames(image: Any, video: Any, response: Any, convert: Callable[[Any], Any]) -> Sequence[Any]:
    shown = [[image]] * (image is not None) + [video] * (video is not None)
    if response is not None and not (isinstance(response, str) and shown):
        parts = [part for message in read_messages(response, "assistant") for part in message.content]
        shown.append([convert(reference) for reference in frames_in(parts)])
    if len(shown) != 1:
        several = "several of an image, a video and an answer of frames" if shown else "no image, video or answer"
        raise RowError(f"it has {several}: give one of them")
    return shown[0]


def frames_in(parts: Sequence[Part]) -> Sequence[Any]:
    """Return the frames that an answer consists of: its images, or those of its one video."""
    if len(parts) == 1 and isinstance(parts[0], Video) and isinstance(parts[0].reference, (list, tuple)):
        return parts[0].reference
    images = [part.reference for part in parts if isinstance(part, Image)]
    if not images or len(images) < len(parts):
        raise RowError("its answer is no list of images, and this reward looks at frames: give images, or a video")
    return images


def task_and_frames(conversation: Conversation) -> tuple[str, Sequence[Any]]:
    """Return the task of an episode, a prompt of one text, and the frames that are its answer."""
    prompt = conversation.prompt
    if len(prompt) != 1 or prompt[0].role != "user" or not all(isinstance(part, Text) for part in prompt[0].content):
        raise RowError("its prompt is no single text, and this reward reads the task as one")
    return prompt[0].text, frames_in(conversation.answer.content)


class TrajectoryModel(PointwiseRewardModel):
    """The common part: frames of samples, at most `max_frames` of each, and prefixes; a subclass opens `scorer`."""

    required_fields = ("prompt",)
    text_prompts = True
    message_responses = True
    scorer: LocalScorer
    most_frames: ClassVar[int]  # the published default of `max_frames`

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        self.max_frames = config.extra_kwargs.get("max_frames", self.most_frames)
        if not isinstance(self.max_frames, int) or isinstance(self.max_frames, bool) or self.max_frames < 1:
            raise ConfigError(f"reward {config.name}: max_frames is {self.max_frames!r}: write a number above 0.")
        self.lock = threading.Lock()

    def __call__(  # ty: ignore[incompatible-method-override]
        self,
        prompt: list[str],
        image: list[Any] | None = None,
        video: list[Any] | None = None,
        response: list[Any] | None = None,
    ) -> RewardModelOutput:
        rewards = [math.nan] * len(prompt)
        found, failures = frames_of_samples(len(prompt), image, video, response, lambda frame: frame)
        conversations: dict[int, Conversation] = {}
        for index, frames in found.items():
            shown = map(Image, spaced(frames, self.max_frames))
            conversations[index] = Conversation((Message.of("user", prompt[index]), Message.of("assistant", *shown)))
        with self.lock:
            scores = self.scorer.score_each(list(conversations.values()))
        for index, score in zip(conversations, scores, strict=True):
            if isinstance(score, RowError):
                failures[index] = score.reason
            else:
                rewards[index] = score
        return RewardModelOutput(rewards, failures=failures)

    def score_prefixes(self, task: str, frames: Sequence[Any]) -> list[float]:
        """Return the reward after each of `frames`, [T], from one forward, as `LocalScorer.score_prefixes` does."""
        with self.lock:
            return self.scorer.score_prefixes(task, frames)
