"""The interface of every scorer, and what the local and the remote ones share. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from vlmrm.conversation import Conversation, Image, Message, Reference
from vlmrm.errors import RowError
from vlmrm.formats.rollouts import read_candidates
from vlmrm.formats.texts import read_prompt

# A conversation, or its messages as OpenAI writes them, ending in the answer; images as PIL, path, bytes or data URI.
ConversationLike: TypeAlias = Conversation | Sequence[Mapping[str, Any]]
# A prompt (a text or messages) and its candidate answers (texts or messages).
Group = tuple[Any, Sequence[Any]]

Value = TypeVar("Value")


@runtime_checkable
class Scorer(Protocol):
    """A model that returns the raw logit of each conversation, in request order, for a function of `transforms`."""

    def score(self, conversations: Sequence[ConversationLike]) -> list[float]:
        """Return the raw logit of each conversation; raise RowError with the index of one that cannot be scored."""
        ...

    def score_each(self, conversations: Sequence[ConversationLike]) -> list[float | RowError]:
        """Return the raw logit of each conversation, or the error of one that cannot be scored."""
        ...

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the raw logit of each candidate of each (prompt, candidates)."""
        ...


def prefixes_of(task: Any, frames: Sequence[Reference]) -> list[Conversation]:
    """Return the conversation of each prefix of an episode: its frames up to each one, as the answer to `task`."""
    if not frames:
        raise RowError("an episode has no frames: give one image or more")
    prompt = read_prompt(task)
    images = [Image(frame) for frame in frames]
    answers = (Message.of("assistant", *images[:stop]) for stop in range(1, len(images) + 1))
    return [Conversation((*prompt, answer)) for answer in answers]


def all_scores(scores: Sequence[Value | RowError]) -> list[Value]:
    """Return the scores, when all conversations have one."""
    for index, score in enumerate(scores):
        if isinstance(score, RowError):
            raise type(score)(f"conversation {index}: {score.reason}") from score
    return [score for score in scores if not isinstance(score, RowError)]


def conversations_of(groups: Iterable[Group]) -> list[list[Conversation]]:
    """Return the conversations of each (prompt, candidates), one for each candidate."""
    conversations = []
    for index, group in enumerate(groups):
        try:
            conversations.append(read_candidates(group))
        except RowError as error:
            raise type(error)(f"group {index}: {error.reason}") from error
    return conversations


def regrouped(values: Iterable[Value], groups: Iterable[Sequence[Any]]) -> list[list[Value]]:
    """Split flat `values` into lists of the sizes of `groups`."""
    remaining = iter(values)
    return [[next(remaining) for _ in group] for group in groups]
