"""Flow-Factory's samples: a conversation in the columns that its rewards take, and back without loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vlmrm.conversation import (
    Conversation,
    Image,
    Message,
    Messages,
    Part,
    Sample,
    Text,
    Video,
    VideoOptions,
    media_of,
)
from vlmrm.errors import ConfigError, RowError
from vlmrm.formats.layout import prompt_turns, with_media
from vlmrm.formats.openai import read_messages, read_reference, write_messages
from vlmrm.formats.texts import PLACEHOLDERS, read_hh_turns, read_prompt, refuse_lost_media

PROMPT_SLOT = "{prompt}"


@dataclass(frozen=True)
class PromptTemplate:
    """The text around the prompts of the training rows: a `system` turn, and a text with `{prompt}` in it."""

    custom_prompt: str = PROMPT_SLOT
    system: str | None = None

    def __post_init__(self):
        if PROMPT_SLOT not in self.custom_prompt:
            raise ConfigError(f"custom_prompt has no {PROMPT_SLOT} in it: write where the prompt goes.")

    def format(self, prompt: Any) -> Any:
        """Return a prompt in the template."""
        if isinstance(prompt, str):
            return self.custom_prompt.replace(PROMPT_SLOT, prompt)
        if self != PromptTemplate():
            raise RowError("custom_prompt and system go around a text, and this prompt is messages: put them in there")
        return prompt


def read_sample(columns: Mapping[str, Any]) -> Sample:
    """Return the columns of a row as a sample, without those that are not part of the conversation."""
    if columns.get("prompt") is None:
        raise RowError("it has neither messages nor a prompt")
    prompt, response = columns["prompt"], columns.get("response")
    for name in ("condition_images", "condition_videos"):
        if isinstance(columns.get(name), (str, bytes)):
            raise RowError(f"{name} is a single {type(columns[name]).__name__}: give a list")
    images, videos = ([] if (it := columns.get(f"condition_{kind}s")) is None else it for kind in ("image", "video"))
    return Sample(
        prompt if isinstance(prompt, str) else read_prompt(prompt),
        response if response is None or isinstance(response, str) else read_messages(response, "assistant"),
        read_reference(columns.get("image")),
        read_reference(columns.get("video")),
        tuple(map(read_reference, images)),
        tuple(map(read_reference, videos)),
    )


def write_sample(sample: Sample) -> dict[str, Any]:
    """Return the columns of a sample as rewards take them: messages as dictionaries, tuples as lists."""
    columns: dict[str, Any] = {}
    for name in (field.name for field in fields(sample)):
        value = getattr(sample, name)
        if isinstance(value, tuple):
            value = write_messages(value) if name in ("prompt", "response") else list(value)
        if name == "prompt" or not (value is None or value == []):
            columns[name] = value
    return columns


def data_uri(text: str) -> str:
    """Return base64 as the data URI of a file; a data URI as it is."""
    return text if text.startswith("data:") else f"data:;base64,{text}"


def sample_to_conversation(
    sample: Sample, template: PromptTemplate = PromptTemplate(), *, placeholders: bool = True
) -> Conversation:
    """Return the conversation to score for a sample, built like that of a training row.

    - The prompt goes into `template`; `condition_images` and `condition_videos` belong to it.
    - A `response` is the answer; `image` and `video` then belong to the prompt, after the conditions. Without one, the
      `image` or the `video` is the answer, an assistant turn as in text-to-image rows.

    Args:
        placeholders: whether `<image>` and `<video>` in a text prompt are places for its media, as in training rows;
            for a client, who sends media beside a text, they are words, and only those of the template are places.
    """
    images, videos = list(sample.condition_images), list(sample.condition_videos)
    if sample.response is not None:
        images += [] if sample.image is None else [sample.image]
        videos += [] if sample.video is None else [sample.video]
        answer = read_messages(sample.response, "assistant")
    else:
        answer = (Message.of("assistant", _media_answer(sample)),)
    row = {"system": template.system, "images": images, "videos": videos}
    words = sample.prompt
    if isinstance(words, str) and words and not placeholders and not read_hh_turns(words):
        messages = with_media(row, (*prompt_turns(row, template.custom_prompt), *answer))
        asked = len(messages) - len(answer) - 1
        parts = messages[asked].content
        content = (Text(it.text.replace(PROMPT_SLOT, words)) if isinstance(it, Text) else it for it in parts)
        return Conversation((*messages[:asked], Message("user", tuple(content)), *messages[asked + 1 :]))
    prompt = template.format(sample.prompt)
    messages = with_media(row, (*prompt_turns(row, prompt), *answer))
    refuse_lost_media(prompt, messages[: -len(answer)])
    return Conversation(messages)


def conversation_to_sample(conversation: Conversation) -> Sample:
    """Return a conversation as a sample: the inverse of `sample_to_conversation`, but adjacent texts are joined.

    An answer of one image or video becomes `image` or `video`, any other `response`: its text, or the message if it
    has media. With a `response`, the prompt's only image is `image`; otherwise its images are `condition_images`. A
    prompt stays messages where columns could not restore its text and media.
    """
    answer = conversation.answer
    prompt, media = _text_and_media(conversation.prompt)
    columns: dict[str, Any] = {}
    if len(answer.content) == 1 and _is_plain_medium(answer.content[0]):
        [part] = answer.media
        columns[part.kind] = part.reference
    else:
        columns["response"] = (answer,) if answer.media else answer.text
    for kind, references in media.items():
        if len(references) == 1 and "response" in columns:
            columns[kind] = references[0]
        elif references:
            columns[f"condition_{kind}s"] = tuple(references)
    return Sample(prompt, **columns)


def _media_answer(sample: Sample) -> Part:
    if (sample.image is None) == (sample.video is None):
        both = sample.image is not None
        has = "both an image and a video" if both else "neither a response, an image nor a video"
        raise RowError(f"it has {has}, and one of them is the answer: give one")
    return Video(sample.video) if sample.image is None else Image(sample.image)


def _text_and_media(prompt: Messages) -> tuple[str | Messages, dict[str, list[Any]]]:
    """Return one user turn of images, videos and a text, in this order, as its text and media; else the prompt."""
    parts = prompt[0].content if len(prompt) == 1 and prompt[0].role == "user" else ()
    media = {kind: [part.reference for part in media_of(prompt) if part.kind == kind] for kind in PLACEHOLDERS}
    ordered = [part.kind for part in parts] == [*(kind for kind in PLACEHOLDERS for _ in media[kind]), "text"]
    if not ordered or not all(map(_is_plain_medium, parts[:-1])):
        return prompt, {}
    text = prompt[0].text
    # An empty text would be read back as no prompt, HH's turns as messages, and a placeholder as a slot.
    if not text or read_hh_turns(text) or any(tag in text for tag in PLACEHOLDERS.values()):
        return prompt, {}
    return text, media


def _is_plain_medium(part: Part) -> bool:
    """Return whether a part is an image or video without options: columns cannot express options."""
    return not isinstance(part, Text) and getattr(part, "options", VideoOptions()) == VideoOptions()
