"""Media beside a text that says where they go: `<image>` and `<video>`, and parts without a reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlmrm.conversation import Image, Message, Messages, Part, Text, Video, media_of
from vlmrm.errors import RowError
from vlmrm.formats.openai import KINDS, read_reference

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}


def fill(messages: Sequence[Message], images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> Messages:
    """Return messages with images and videos where they ask for them.

    These fill, in order, parts of their kind without a reference; where there are no such parts, the placeholders
    `<image>` and `<video>` in the texts of others than the assistant. Media that nothing asks for come first in the
    first user message, as TRL does it. Without media or with parts for them, a placeholder is text like any other:
    people ask what `<image>` means in HTML.

    Raises:
        RowError: when there are more places than media, or places for only some of them.
    """
    empty = {medium.kind for medium in media_of(messages) if medium.reference is None}
    filler = _Filler(images, videos, spelled_out={"image", "video"} - empty)
    filled = [filler.message(message) for message in messages]
    if left := filler.left():
        number = next((n for n, message in enumerate(filled) if message.role == "user"), None)
        if number is None:
            raise RowError("the row has images but no user message to show them in")
        filled[number] = Message("user", (*left, *filled[number].content))
    return tuple(filled)


class _Filler:
    """Hands out media, one place after another."""

    def __init__(self, images: Sequence[Any], videos: Sequence[Any], spelled_out: set[str]):
        self.waiting = {"image": list(images), "video": list(videos)}
        self.filled = {"image": 0, "video": 0}
        self.tags = {PLACEHOLDERS[kind]: kind for kind in spelled_out if self.waiting[kind]}
        self.pattern = re.compile(f"({'|'.join(self.tags)})")

    def message(self, message: Message) -> Message:
        parts = (part for old in message.content for part in self._parts(old, message.role))
        return Message(message.role, tuple(parts))

    def _parts(self, part: Part, role: str) -> list[Part]:
        if not isinstance(part, Text):
            return [self._take(part) if part.reference is None else part]
        if not self.tags or role == "assistant" or not self.pattern.search(part.text):
            return [part]
        pieces = self.pattern.split(part.text)
        return [self._take(KINDS[self.tags[it]]()) if it in self.tags else Text(it) for it in pieces if it]

    def _take(self, place: Image | Video) -> Part:
        kind = place.kind
        if not self.waiting[kind]:
            raise RowError(
                f"the text asks for more {kind}s than the row has ({self.filled[kind]}): check its `{kind}s` column"
            )
        self.filled[kind] += 1
        reference = read_reference(self.waiting[kind].pop(0))
        return Video(reference, place.options) if isinstance(place, Video) else Image(reference)

    def left(self) -> list[Part]:
        """Return the media without a place.

        Raises:
            RowError: when others of their kind had one.
        """
        for kind, media in self.waiting.items():
            if media and self.filled[kind]:
                raise RowError(f"the row has {len(media)} more {kind}(s) than its text has places for")
        return [KINDS[kind](read_reference(it)) for kind, media in self.waiting.items() for it in media]
