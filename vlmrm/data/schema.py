"""What was preferred: one prompt with two or more branches, and what people said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A message is {"role": str, "content": [part, ...]}. A part is one of
#   {"type": "text",  "text": str}
#   {"type": "image", "image": reference}
#   {"type": "video", "video": reference or list of image references, "fps": ..., "max_frames": ...}
# A reference is what `vlmrm.data.media` opens: a path, a data URI, bytes or a PIL image. It is never decoded here.
Message = dict[str, Any]
Messages = Sequence[Message]


class Pair(NamedTuple):
    """Indices of two branches of one comparison; with `tie` the order means nothing."""

    chosen: int
    rejected: int
    tie: bool


@dataclass(frozen=True)
class Branch:
    """One continuation of a prompt. `rating` is higher for better; equal ratings are a tie."""

    messages: Messages
    rating: float


@dataclass(frozen=True)
class Comparison:
    """One prompt, its branches, and what people said of them.

    `prompt` is the part that all branches share; it is empty when the branches have nothing in common (another
    image in the question, say). `columns` keeps the row's other scalar columns, for grouping results.
    """

    id: str
    prompt: Messages
    branches: Sequence[Branch]
    margin: float | None = None
    weight: float = 1.0
    category: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def conversations(self) -> list[list[Message]]:
        """The whole conversation of each branch: the prompt's messages, then the branch's own."""
        return [[*self.prompt, *branch.messages] for branch in self.branches]

    def pairs(self) -> list[Pair]:
        """Every pair of branches, the better first: K branches make K(K-1)/2 pairs."""
        return list(_pairs([branch.rating for branch in self.branches]))

    def is_pair(self) -> bool:
        return len(self.branches) == 2


def _pairs(ratings: Sequence[float]) -> Iterator[Pair]:
    for i in range(len(ratings)):
        for j in range(i + 1, len(ratings)):
            if ratings[i] >= ratings[j]:
                yield Pair(i, j, tie=ratings[i] == ratings[j])
            else:
                yield Pair(j, i, tie=False)


def media_parts(messages: Messages) -> list[dict[str, Any]]:
    """The image and video parts of `messages`, in reading order."""
    return [part for message in messages for part in message["content"] if part["type"] in ("image", "video")]


def media_references(messages: Messages) -> list[Any]:
    """The image and video references of `messages`, in reading order."""
    return [part[part["type"]] for part in media_parts(messages)]


def text_of(messages: Messages) -> str:
    """The text of `messages` without media, roles kept apart by newlines."""
    return "\n".join(
        "".join(part["text"] for part in message["content"] if part["type"] == "text") for message in messages
    )
