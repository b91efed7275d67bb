"""A reward for a service's workers that needs neither vlmrm nor torch: it reads conversations."""

from __future__ import annotations

from typing import Any, ClassVar


def score(messages: list[dict[str, Any]]) -> float:
    """The characters of the answer, and a tenth of those of the prompt; each image counts three."""
    contents = [[content] if isinstance(content := m["content"], str) else content for m in messages]
    sizes = [sum(map(_size, content)) for content in contents]
    return sizes[-1] + 0.1 * sum(sizes[:-1])


def _size(part: Any) -> int:
    text = part if isinstance(part, str) else part.get("text")
    return 3 if text is None else len(text)


class AnswerLength:
    info: ClassVar[dict[str, Any]] = {"kind": "conversations", "model": "length"}

    def __call__(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"score": score(item["messages"])} for item in items]
