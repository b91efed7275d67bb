"""Questions to a judge, its replies, a cache of replies, and the scores written in them."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from pydantic import BaseModel, ConfigDict

from vlmrm.errors import ConfigError, RewardError
from vlmrm.files import make_folder, write_file

logger = logging.getLogger("vlmrm")

AGAIN = 0.7  # temperature at which another reply is asked for where the likeliest cannot be read

# Numbers as judges write them: `3.5`, `**3**`, `3/4`, `2 out of 4`, `[3,5]`, `N/A (no text)`.
NOT_APPLICABLE = "N/A"
DECORATION = r"[\s*_`\[\](){}<>\"']*"
NUMBER = r"[-+]?(?:\d+(?:[.,]\d+)?|\.\d+)"
VALUE = re.compile(
    rf"^{DECORATION}(?:(?P<none>n\s*/\s*a|not applicable)\b|"
    rf"(?P<number>{NUMBER})(?![\d%])(?:{DECORATION}(?:/|out\s+of){DECORATION}(?P<of>\d+(?:\.\d+)?))?)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """The body of one call of `/chat/completions`, as the bytes that are sent; a `verbatim` one is never changed."""

    content: bytes
    verbatim: bool = False

    @classmethod
    def of(cls, model: str, messages: list[dict[str, Any]], parameters: dict[str, Any]) -> Question:
        return cls(_json({"model": model, "messages": messages, **parameters}))

    @cached_property
    def key(self) -> str:
        """Return a hash that is equal for the same model, messages and parameters."""
        return hashlib.sha256(self.content).hexdigest()

    def sampled(self) -> Question:
        """Return the same question for another reply than the likeliest one."""
        body = json.loads(self.content)
        if self.verbatim or body.get("temperature", 1) > 0:
            return self
        return Question(_json({**body, "temperature": AGAIN}))


class Reply(BaseModel):
    """A judge's reply, and the likeliest first tokens with their log-probabilities where asked for."""

    model_config = ConfigDict(frozen=True)

    text: str
    finish_reason: str | None = None
    top_logprobs: list[tuple[str, float]] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_completion(body: str) -> Reply:
    """Return the reply in a server's JSON; raise RewardError when it is no chat completion."""
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        message, usage = choice["message"], completion.get("usage") or {}
        text = message.get("content") or message.get("refusal") or ""
        tokens = (choice.get("logprobs") or {}).get("content")
        first = [(it["token"], it["logprob"]) for it in tokens[0].get("top_logprobs") or ()] if tokens else None
        return Reply(
            text=text,
            finish_reason=choice.get("finish_reason"),
            top_logprobs=first,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RewardError(f"what the server sent is no chat completion: {body[:200]!r}") from error


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class ReplyCache:
    """Replies by their question's key, in memory (`size` of them) and in a folder. Any thread may use it.

    In the folder, kept across runs and shared by processes, a reply is a JSON file that is never removed. Once its
    disk fails it is given up, with a warning.
    """

    def __init__(self, size: int, folder: str | Path | None = None):
        self.folder = None if folder is None else Path(folder)
        self.replies: LRUCache[str, Reply] = LRUCache(size)
        self.lock = threading.Lock()
        if self.folder is not None:
            make_folder(self.folder, "cache_dir")

    def get(self, key: str) -> Reply | None:
        with self.lock:
            reply = self.replies.get(key)
        if reply is not None or (path := self._path(key)) is None:
            return reply
        try:
            reply = Reply.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError:
            logger.warning("%s is no reply of a judge: asking again and replacing the file", path)
            return None
        self._remember(key, reply)
        return reply

    def put(self, key: str, reply: Reply) -> None:
        self._remember(key, reply)
        if (path := self._path(key)) is None:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            # Not durable: a reply that a crash loses can be asked for again.
            write_file(path, reply.model_dump_json(), durable=False)
        except (OSError, ConfigError) as error:
            logger.warning("cache_dir %s fails (%s); replies are kept in memory alone from now on", self.folder, error)
            self.folder = None

    def _remember(self, key: str, reply: Reply) -> None:
        with self.lock, suppress(ValueError):  # a cache of size 0
            self.replies[key] = reply

    def _path(self, key: str) -> Path | None:
        folder = self.folder  # another thread may give it up meanwhile
        return None if folder is None else folder / key[:2] / f"{key}.json"


def read_score(text: str, best: float) -> float | str | None:
    """Return the score at the start of `text`, `"N/A"`, or None where there is none or it is not out of `best`.

    A comma counts as a decimal point. The number may lie outside the scale; callers check that.
    """
    match = VALUE.match(text)
    if match is None:
        return None
    if match["none"]:
        return NOT_APPLICABLE
    if match["of"] is not None and float(match["of"]) != best:
        return None
    return float(match["number"].replace(",", "."))


def without_thinking(text: str) -> str:
    """Return the reply without the reasoning before `</think>`, which may hold scores that were then revised."""
    return text.rpartition("</think>")[2]


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, in order, without those inside others."""
    decoder, start = json.JSONDecoder(), 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, start = decoder.raw_decode(text, start)
        except ValueError:
            start += 1
            continue
        except RecursionError:  # so deep is no verdict, and its inner objects would each take as long
            return
        yield value
