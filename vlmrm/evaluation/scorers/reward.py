"""`reward:NAME`: a registered reward, pointwise or of groups, with its settings as options or in a YAML file.

`python:module.function`: a function of a list of conversations that returns a score for each.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import CheckpointError, ConfigError, RewardError, RowError, VlmrmError, first_line
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import Compared, ConversationScorer, compared, origin_of
from vlmrm.evaluation.scorers.spec import SECRETS, Spec
from vlmrm.modeling.manifest import checkpoint_digest
from vlmrm.plugins import imported_function
from vlmrm.rewards.contract import GroupwiseRewardModel, RewardArguments
from vlmrm.rewards.items import reward_items
from vlmrm.rewards.registry import identity, reward_arguments, reward_model_class
from vlmrm.rewards.reward_set import FAILURES, Models

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
