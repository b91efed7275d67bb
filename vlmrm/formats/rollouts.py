"""Prompts with answers but without preferences: rows to score, and the inputs of RL frameworks and TEI."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlmrm.conversation import Conversation, Messages, media_of
from vlmrm.errors import RewardError, RowError
from vlmrm.formats.layout import (
    MEDIA,
    ParsedRow,
    Row,
    as_list,
    image_turn,
    layout,
    media_in,
    prompt_turns,
    require_list,
    with_media,
)
from vlmrm.formats.openai import read_messages
from vlmrm.formats.texts import fill, load_json, read_prompt, read_text, refuse_lost_media

# In an OpenRLHF query: a run of placeholders, one for each token of an image; the end of the last turn, with padding.
PADS = re.compile(r"(<\|?(?:image|video)(?:_pad)?\|?>)\1+")
UNJUDGED = "nothing says how good its answers are"
END = re.compile(r"(?:(?:<\|[^<>|]+\|>|</s>)\s*)+$")


def read_answer(prompt: Any, answer: Any, images: Any = None, videos: Any = None) -> Conversation:
    """Return a row of an RL framework as the conversation that ends with the answer.

    Images and videos, one or a list, are filled into the slots of the prompt, such as `<image>` in a text, or else
    before its first text. If messages of the prompt contain media, the row's column of that kind repeats them.
    """
    messages = read_prompt(prompt)
    columns = {"image": as_list(images), "video": as_list(videos)}
    for kind, media in columns.items():
        filled = [medium.reference is not None for medium in media_of(messages) if medium.kind == kind]
        if any(filled) and not all(filled):
            raise RowError("some media parts of its prompt are empty: fill all of them or none")
        if any(filled) and media:
            if len(media) != len(filled):
                raise RowError(
                    f"its prompt shows {len(filled)} {kind}(s) and its column has {len(media)}: give the same ones, "
                    "or leave the column out"
                )
            columns[kind] = []
    messages = fill(messages, columns["image"], columns["video"])
    refuse_lost_media(prompt, messages)
    return Conversation((*messages, *read_messages(answer, "assistant")))


def read_candidates(group: Any) -> list[Conversation]:
    """Return the conversation of each candidate of (prompt, candidates)."""
    if not isinstance(group, Sequence) or isinstance(group, str) or len(group) != 2:
        raise RowError("it is no pair: give (prompt, candidates)")
    prompt, candidates = group
    if isinstance(candidates, str) or not isinstance(candidates, Sequence):
        raise RowError(f"its candidates are a single {type(candidates).__name__}: give a list")
    messages = read_prompt(prompt)
    return [Conversation((*messages, *read_messages(candidate, "assistant"))) for candidate in candidates]


@layout(
    "prompt / response",
    ["prompt"],
    one_of=["response", "responses", "response_image", "response_images"],
    optional=[*MEDIA, "system"],
)
def prompt_response(row: Row) -> ParsedRow:
    if "response" in row and "responses" in row:
        raise RowError("it has both `response` and `responses`: keep one of them")
    prompt = with_media(row, prompt_turns(row, row["prompt"]))
    texts = [row["response"]] if "response" in row else require_list(row.get("responses", []), "responses")
    answers = [read_messages(text, "assistant") for text in texts]
    answers += [(image_turn(image),) for image in media_in(row, "image", "response_")]
    conversations = [(*prompt, *answer) for answer in answers]
    return ParsedRow(conversations, [0.0] * len(answers), len(prompt), unjudged=UNJUDGED)


@layout("conversation", ["messages"], optional=MEDIA)
def conversation(row: Row) -> ParsedRow:
    messages = with_media(row, read_messages(row["messages"], "user"))
    return ParsedRow([messages], [0.0], len(Conversation(messages).prompt), unjudged=UNJUDGED)


def zip_columns(prompts: Sequence[Any], *columns: Sequence[Any] | None) -> list[tuple[Any, ...]]:
    """Return prompts and further columns as rows; a column that is None gives None to each row."""
    for column in (prompts, *columns):
        if isinstance(column, (str, bytes)):
            raise RewardError(f"a column is a single {type(column).__name__}: give a list, a value for each prompt.")
        if column is not None and len(column) != len(prompts):
            raise RewardError(
                f"there are {len(prompts)} prompts, but a column of {len(column)}: give a value for each prompt."
            )
    filled = ([None] * len(prompts) if column is None else column for column in columns)
    return list(zip(prompts, *filled, strict=True))


def read_openrlhf_query(prompt: str | None, query: str, label: Any) -> Conversation:
    """Return the conversation of an OpenRLHF query, for its reward functions and its reward server alike.

    It is the prompt of the label with the answer of the query, or else the query itself, rendered or in JSON.
    """
    row = _read_label(label)
    images, videos = row.get("images"), row.get("videos")
    readable = "<|im_start|>" in query or (prompt is None and query.lstrip()[:1] in ("[", "{"))
    if "prompt" not in row and not readable:
        raise RowError('its label is not {"prompt": ..., "images": [...]}: name such a column with --data.label_key')
    if "prompt" not in row and prompt is None:
        return read_text(query, images or (), videos or ())
    query = PADS.sub(r"\1", query)
    prompt = None if prompt is None else PADS.sub(r"\1", prompt)
    if prompt is None or not query.startswith(prompt):
        raise RowError("the query does not begin with its prompt: was it cut? Allow for longer prompts")
    answer = END.sub("", query[len(prompt) :])
    if "prompt" not in row:
        # Only the prompt is parsed into turns: all that the policy wrote after it is the answer, even control tokens.
        before = read_text(f"{prompt}<|im_end|>", images or (), videos or ()).prompt
        refuse_lost_media(prompt, before)
        return Conversation((*before, *read_messages(answer, "assistant")))
    return read_answer(row["prompt"], answer, images, videos)


def read_slime_sample(prompt: str | Sequence[Any], response: str, label: Any) -> Conversation:
    """Read a sample of slime as a conversation; the prompt is a text, messages, or rendered ChatML.

    A label as of OpenRLHF says what was asked where the prompt does not, such as its images.
    """
    row = _read_label(label)
    if isinstance(prompt, str) and "<|im_start|>" in prompt:
        return read_openrlhf_query(prompt, prompt + response, row)
    return read_answer(row.get("prompt", prompt), END.sub("", response), row.get("images"), row.get("videos"))


def _read_label(label: Any) -> dict[str, Any]:
    """Return a label that is an object, or the JSON of one; anything else, such as the right answer, is left out."""
    try:
        row = load_json(label) if isinstance(label, str) and label.startswith("{") else label
    except (ValueError, RecursionError) as error:
        raise RowError(f"its label looks like JSON but is not valid ({error})") from error
    return row if isinstance(row, dict) else {}


def read_verl_prompt(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Return verl's `raw_prompt` as messages; verl leaves `bytes` and `path` beside the opened image."""

    def opened(part: Any) -> Any:
        has_image = isinstance(part, Mapping) and part.get("image") is not None
        return {"type": "image", "image": part["image"]} if has_image else part

    contents = [message.get("content") for message in messages]
    return read_prompt(
        [
            {**message, "content": [*map(opened, content)]} if isinstance(content, list) else message
            for message, content in zip(messages, contents, strict=True)
        ]
    )


def read_tei_input(texts: Sequence[str]) -> Conversation:
    """Return an input of Text Embeddings Inference: a rendered conversation `[text]`, or prompt and answer."""
    if len(texts) == 1:
        return read_text(texts[0])
    if len(texts) == 2:
        return read_answer(*texts)
    raise RowError(f"an input has {len(texts)} texts: send a rendered conversation, or a prompt and its answer")
