"""`reward:NAME`: a registered reward, pointwise or of groups, with its settings as options or in a YAML file.

`python:module.function`: a function of a list of conversations that returns a score for each.

`judge:MODEL@http://host:port/v1`: `pairwise_judge` of conversations, asked twice of each two answers, so that each is
shown first once. A score is the mean credit over the other answers and both orders: 1 for a win, a half for a tie, 0.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations
from pathlib import Path
from typing import Any

from PIL import Image as Pictures

from vlmrm.conversation import Conversation, Image, Message, Text
from vlmrm.data.media import open_image, open_video
from vlmrm.errors import CheckpointError, ConfigError, RewardError, RowError, VlmrmError, first_line
from vlmrm.evaluation.entry import FORMS, SECRETS, Entry, Spec, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, compared, origin_of
from vlmrm.modeling.manifest import checkpoint_digest
from vlmrm.plugins import imported_function
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardArguments
from vlmrm.rewards.judges.client import read_settings
from vlmrm.rewards.judges.judge import fence, image_part, spaced, text_part
from vlmrm.rewards.judges.pairwise import Pair, PairwiseJudge, PairwiseSettings
from vlmrm.rewards.judges.replies import Question
from vlmrm.rewards.registry import identity, reward_arguments, reward_model_class
from vlmrm.rewards.reward_set import FAILURES, Models
from vlmrm.rewards.samples import reward_items

logger = logging.getLogger("vlmrm")
# Published rewards by hub id, whose files no sequence classifier can open.
PUBLISHED = {
    "openai/clip-vit-large-patch14": "clip",
    "yuvalkirstain/PickScore_v1": "pickscore",
    "xswu/HPSv2": "hpsv2",
    "MizzenAI/HPSv3": "hpsv3",
    "THUDM/ImageReward": "image_reward",
    "zai-org/ImageReward": "image_reward",
    "KwaiVGI/VideoReward": "videoalign",
}
# Settings that the specification gives or must not hold, and those of samples in a tournament.
FIXED = ("api_base_url", "api_key", "vlm_model", "request_file", "rounds")


def reward_entries(spec: Spec) -> list[RewardEntry]:
    """Return an entry for each reward of a YAML file, or for the one that is named."""
    if spec.body.endswith((".yaml", ".yml", ".json")):
        spec.take(())
        return [RewardEntry(arguments, f"{spec.text}#{arguments.name}") for arguments in reward_arguments(spec.body)]
    spec.take([name for name in spec.options if name not in SECRETS])
    arguments = reward_arguments({"name": spec.body, "reward_model": spec.body, **spec.typed()})
    return [RewardEntry(arguments[0], spec.text)]


class RewardEntry(Entry):
    """A reward of `vlmrm.rewards`; its columns are filled from the prompt and from the answer."""

    def __init__(self, arguments: RewardArguments, path: str):
        if arguments.on_failure == "fallback":
            raise ConfigError(f"scorer {path}: a fallback_reward is no score: leave on_failure out.")
        super().__init__("reward", path.partition("#")[2] or path.partition(":")[2], path)
        self.arguments = arguments

    def digest(self) -> str:
        """Return the digest of the reward's settings, and of the folders that they name."""
        settings = {key: value for key, value in self.arguments.extra_kwargs.items() if key not in SECRETS}
        pieces = [identity(replace(self.arguments, extra_kwargs=settings))]
        for value in settings.values():
            if isinstance(value, str) and Path(value).is_dir():
                try:
                    pieces.append(checkpoint_digest(value))
                except CheckpointError:  # a folder of something else
                    continue
        return hashlib.sha256("\0".join(pieces).encode()).hexdigest()

    def open(self, run: SweepRun) -> _Reward:
        return _Reward(self, run)


class _Reward(ConversationScorer):
    def __init__(self, entry: RewardEntry, run: SweepRun):
        self.entry = entry
        self.compares = issubclass(reward_model_class(str(entry.arguments.reward_model)), GroupwiseRewardModel)
        super().__init__(entry.path, run)
        self.model: Any = Models(run.processes).reward(entry.arguments).model

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        return self._rewards(conversations, range(len(conversations)))

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        numbers = [number for number, group in enumerate(groups) for _ in group]
        rewards = iter(self._rewards(list(chain.from_iterable(groups)), numbers))
        return [compared([next(rewards) for _ in group]) for group in groups]

    def _rewards(self, conversations: Sequence[Conversation], groups: Sequence[int]) -> list[float | RowError]:
        try:
            result = reward_items(self.model, conversations, groups)
        except FAILURES as error:
            raise RewardError(f"{self.name}: {error}") from error
        indices = range(len(conversations))
        return [RowError(result.failures[i]) if i in result.failures else result.rewards[i] for i in indices]

    def origin(self) -> Origin:
        arguments = self.entry.arguments
        return origin_of(
            self.entry.digest(),
            device=str(self.model.device),
            dtype=None if self.model.model is None else str(arguments.dtype).removeprefix("torch."),
            reward_model=str(arguments.reward_model),
            settings=repr(arguments),
        )


class FunctionEntry(Entry):
    """A function of `vlmrm.conversation.Conversation`s, each of which ends with the answer to score."""

    def __init__(self, spec: Spec):
        spec.take(())
        module, _, name = spec.body.rpartition(".")
        super().__init__(f"python:{module}", name, spec.text)
        if not module:
            raise ConfigError(f"scorer {spec.text} names no module: write python:module.function.")
        self.function = imported_function(module, name, f"scorer {spec.text}")

    def digest(self) -> str | None:
        """Return the digest of the module's source; what it imports may change unnoticed."""
        try:
            source = inspect.getsource(inspect.getmodule(self.function) or self.function)
        except (OSError, TypeError):  # compiled, or written in a notebook
            return None
        return hashlib.sha256(source.encode()).hexdigest()

    def open(self, run: SweepRun) -> _Function:
        return _Function(self, run)


class _Function(ConversationScorer):
    def __init__(self, entry: FunctionEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        try:
            scores = [float(score) for score in self.entry.function(list(conversations))]
        except VlmrmError:
            raise
        except Exception as error:  # whatever the user's function raises
            logger.debug("%s", self.name, exc_info=True)
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise RewardError(f"{self.name} failed on {len(conversations)} conversations: {reason}.") from error
        if len(scores) != len(conversations):
            raise RewardError(f"{self.name} returned {len(scores)} scores of {len(conversations)} conversations.")
        return [*scores]

    def origin(self) -> Origin:
        return origin_of(self.entry.digest(), function=self.entry.path.partition(":")[2])


class JudgeEntry(RewardEntry):
    """A judge by its model's name and its address; the model behind it may change unnoticed."""

    def __init__(self, spec: Spec):
        model, at, url = spec.body.partition("@http")
        if not at or not model:
            raise ConfigError(f"scorer {spec.text} lacks a model or an address: write {FORMS['judge']}.")
        spec.take([name for name in PairwiseSettings.model_fields if name not in FIXED])
        extra = {**spec.typed(), "vlm_model": model, "api_base_url": f"http{url}"}
        self.arguments = RewardArguments(spec.text, "pairwise_judge", device="cpu", extra_kwargs=extra)
        read_settings(PairwiseSettings, self.arguments)
        host = url.partition("//")[2].partition("/")[0]
        Entry.__init__(self, f"judge:{host}", model + spec.suffix, spec.text)

    def open(self, run: SweepRun) -> _Judge:  # ty: ignore[incompatible-method-override]
        return _Judge(self, run)


class _Judge(ConversationScorer):
    compares = True

    def __init__(self, entry: JudgeEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry
        self.judge = PairwiseJudge(entry.arguments, None)

    def score_groups(self, groups: Sequence[Sequence[Conversation]]) -> list[Compared | RowError]:
        # By group, the credit of answer i where it is shown first and j second.
        credits: list[dict[Pair, float | RowError]] = [{} for _ in groups]
        questions: dict[tuple[int, Pair], Question] = {}
        for number, group in enumerate(groups):
            for i, j in permutations(range(len(group)), 2):
                try:
                    questions[number, (i, j)] = self._question(group[i], group[j])
                except RowError as error:
                    credits[number][i, j] = error
        asked = self.judge.credits(list(questions.values()))
        for (number, order), credit in zip(questions, asked, strict=True):
            credits[number][order] = RowError(str(credit)) if isinstance(credit, RewardError) else credit
        return [_compared(len(group), of_group) for group, of_group in zip(groups, credits, strict=True)]

    def _question(self, first: Conversation, second: Conversation) -> Question:
        # Two prompts, as of answers to differently worded ones.
        prompts = [first.prompt, *([second.prompt] if second.prompt != first.prompt else [])]
        prompt = [
            part
            for messages in prompts
            for part in (
                text_part("The prompt:"),
                *(part for turn in messages for part in (text_part(f"{turn.role}:"), *self._parts(turn))),
            )
        ]
        return self.judge.asked(prompt, self._parts(first.answer), self._parts(second.answer))

    def _parts(self, message: Message) -> list[dict[str, Any]]:
        """Return the content of a message as the API takes it: texts fenced, images and frames as data URIs."""
        parts: list[dict[str, Any]] = []
        for part in message.content:
            if isinstance(part, Text):
                parts.append(text_part(fence(part.text)))
            elif isinstance(part, Image):
                parts.append(image_part(open_image(part.reference)))
            else:
                frames, _ = open_video(part, self.reading.video_fps, self.reading.video_max_frames)
                pictures = [Pictures.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
                parts += map(image_part, spaced(pictures, self.judge.settings.max_frames))
        return parts

    def close(self) -> None:
        usage = self.judge.client.usage
        tokens = f"{usage['prompt_tokens']:,} prompt and {usage['completion_tokens']:,} completion tokens"
        logger.info("%s: %d calls, %s", self.name, usage["calls"], tokens)

    def origin(self) -> Origin:
        settings, usage = self.judge.settings, self.judge.client.usage
        details = {"model": settings.vlm_model, "url": settings.api_base_url}
        details |= {name: str(usage[name]) for name in ("calls", "prompt_tokens", "completion_tokens")}
        return origin_of(self.entry.digest(), **details)


def _compared(count: int, credits: Mapping[Pair, float | RowError]) -> Compared | RowError:
    """Return the mean credit of each of `count` answers, and the verdicts.

    `credits[i, j]` is what answer i got where it was shown first, and j second.
    """
    failure = next((credit for credit in credits.values() if isinstance(credit, RowError)), None)
    if failure is not None or count < 2:
        return failure or RowError("it has one answer alone, and a judge of pairs compares two")
    first = {pair: float(credit) for pair, credit in credits.items() if not isinstance(credit, RowError)}
    totals = [sum(first[i, j] + 1 - first[j, i] for j in range(count) if j != i) for i in range(count)]
    scores = [total / (2 * (count - 1)) for total in totals]
    return Compared(scores, {(i, j): (first[i, j], 1 - first[j, i]) for i, j in combinations(range(count), 2)})
