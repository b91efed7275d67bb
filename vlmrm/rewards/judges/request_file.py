"""Whole requests in a file of the user's: a published judge is asked in its own program's words, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from pydantic import Field

from vlmrm.errors import ConfigError, RewardError
from vlmrm.rewards.judges.replies import Question
from vlmrm.rewards.pictures import Encoding, base64_of
from vlmrm.settings import Strict, load_file, validate

PICTURES = ("image", "source", "first", "second")
PLACEHOLDER = re.compile(r"\{(prompt|image|source|first|second)\}")


class RequestFile(Strict, frozen=True, strict=True):
    """A request with places for a sample: `{prompt}`, and the base64 of pictures: `{image}`, `{source}` and so on.

    A part of a message that names a picture is repeated for each frame of a video, and for each source. Any other
    braces are text. Nothing is added or fenced: neither the system message nor the warning of the built-in wording.
    """

    body: dict[str, Any] = Field(min_length=2)
    """What is sent, in this order: `messages`, `model`, and the parameters."""
    style: Literal["compact", "spaced"] = "compact"
    """JSON as the Python packages `openai` (compact, UTF-8) or `requests` (spaced, ASCII) write it."""
    pictures: Encoding = Encoding()

    @property
    def decides(self) -> dict[str, Any]:
        """Return what it decides of a judge's settings; a server samples where no temperature is given."""
        length = self.body.get("max_completion_tokens", self.body.get("max_tokens"))
        decides = {"vlm_model": self.body["model"], "temperature": float(self.body.get("temperature", 1.0))}
        return decides if length is None else {**decides, "max_tokens": length}

    def question(self, prompt: str, pictures: Mapping[str, Sequence[Image.Image]]) -> Question:
        """Return the request of a sample, with its pictures by their placeholders."""
        text = {"prompt": [prompt]}
        encoded = {name: [base64_of(image, self.pictures) for image in images] for name, images in pictures.items()}
        [body] = self._filled(self.body, {**encoded, **text})
        spaced = self.style == "spaced"
        content = json.dumps(body, ensure_ascii=spaced, separators=None if spaced else (",", ":"), allow_nan=False)
        return Question(content.encode("utf-8", "surrogatepass"), verbatim=True)

    def _filled(self, value: Any, values: Mapping[str, Sequence[str]]) -> list[Any]:
        """Return a value of the body with its places filled: several of a part that shows several pictures."""
        if isinstance(value, dict) and "messages" not in value and "role" not in value:
            count = 1
            for name in {name for name in _names(value) if name in PICTURES}:
                count = len(values.get(name, ()))
                if not count:
                    raise RewardError(f"the sample has nothing for {{{name}}}, which the request_file shows")
            return [_replaced(value, values, number) for number in range(count)]
        if isinstance(value, dict):
            return [{key: self._filled(item, values)[0] for key, item in value.items()}]
        if isinstance(value, list):
            return [[filled for item in value for filled in self._filled(item, values)]]
        return [_replaced(value, values, 0)]


def read_request_file(path: str, where: str, placeholders: Sequence[str]) -> RequestFile:
    """Read a request that shows all pictures in `placeholders`, and no others but `{source}`."""
    where = f"{where}: request_file {path}"
    request = validate(RequestFile, load_file(Path(path)), where)
    body = request.body
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(body.get("model"), str):
        raise ConfigError(f"{where}: body needs messages, a list, and model, a text.")
    if not isinstance(body.get("temperature", 0.0), (int, float)) or body.get("stream") or body.get("n", 1) != 1:
        raise ConfigError(f"{where}: body asks for no one reply: temperature is a number; leave out stream and n.")
    shown = set(_names(messages)) & set(PICTURES)
    for name in placeholders:
        if name not in shown:
            raise ConfigError(f"{where}: its messages have no {{{name}}}: write it where its base64 belongs.")
    for name in sorted(shown - {*placeholders, "source"}):
        raise ConfigError(f"{where}: {{{name}}} means nothing to this reward: it fills in {{{placeholders[0]}}}.")
    return request


def _names(value: Any) -> list[str]:
    """Return the placeholders in all texts of a value."""
    if isinstance(value, str):
        return PLACEHOLDER.findall(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [name for item in items for name in _names(item)]


def _replaced(value: Any, values: Mapping[str, Sequence[str]], number: int) -> Any:
    """Return a value with its places filled at once: what a prompt says is never a place."""
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda match: values[match[1]][number if match[1] in PICTURES else 0], value)
    if isinstance(value, dict):
        return {key: _replaced(item, values, number) for key, item in value.items()}
    return [_replaced(item, values, number) for item in value] if isinstance(value, list) else value
