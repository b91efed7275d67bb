"""Preferences: TRL's `chosen` and `rejected`, ms-swift, LLaMA-Factory, RLHF-V, OpenAI, and pairs of images.

Answers that begin with the assistant follow the row's prompt. Answers that begin with a user or system turn are whole
conversations (TRL's "implicit prompt"), whose common messages are the prompt, and so are texts with the `Human:` and
`Assistant:` turns of Anthropic's HH data. Answers may be images: Pick-a-Pic, ImageReward, HPSv3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmrm.conversation import Message, Messages, shorten, text_of
from vlmrm.errors import RowError
from vlmrm.formats.layout import (
    CHOSEN,
    MEDIA,
    REJECTED,
    ParsedRow,
    Row,
    common_turns,
    first_of,
    image_turn,
    layout,
    media_in,
    question_turns,
    require_list,
    require_numbers,
    with_media,
)
from vlmrm.formats.openai import read_messages
from vlmrm.formats.texts import fill, read_hh_turns

PROMPTS = ("prompt", "question", "messages")  # the first that a row has


@layout("chosen / rejected", ["chosen", "rejected"], optional=[*MEDIA, "system", *PROMPTS])
def pair(row: Row) -> ParsedRow:
    return read_pair(row, ("chosen", "rejected"), PROMPTS)


def read_pair(row: Row, sides: tuple[str, str], prompts: Sequence[str]) -> ParsedRow:
    """Return the answers or whole conversations of two columns, the first as the better, after the row's prompt.

    The prompt is in the first of the columns `prompts` that the row has.
    """
    first, second = (_read_side(row, side) for side in sides)
    column = first_of(row, prompts)
    prompt = None if column is None else row[column]
    implicit = first[0].role != "assistant"
    if implicit != (second[0].role != "assistant"):
        names = f"`{sides[0]}` and `{sides[1]}`"
        raise RowError(f"one of {names} is a whole conversation, the other an answer: write both alike")
    # A prompt beside whole conversations usually repeats their beginning; a different one would be lost.
    if implicit and isinstance(prompt, str) and prompt.strip() not in text_of(first):
        raise RowError(f"`{sides[0]}` is a whole conversation without the row's `{column}` in it: leave one out")
    before = () if implicit else question_turns(row, prompt)
    conversations = [with_media(row, (*before, *answer)) for answer in (first, second)]
    shared = common_turns(*conversations) if implicit else len(before)
    skipped = frozenset({"system", *prompts}) - (frozenset() if implicit else {"system", column})
    return ParsedRow(conversations, [CHOSEN, REJECTED], shared, skipped=skipped)


def _read_side(row: Row, side: str) -> Messages:
    """Return the answer or the whole conversation in a column."""
    turns = read_hh_turns(row[side])
    if turns and turns[-1].role != "assistant":
        raise RowError(f"`{side}` ends without an answer of the assistant: remove the row")
    return turns or read_messages(row[side], "assistant")


@layout(
    "ms-swift",
    ["messages"],
    one_of=["rejected_response", "rejected_messages", "rejected_images", "rejected_videos"],
    optional=MEDIA,
)
def swift(row: Row) -> ParsedRow:
    # `messages` end with the chosen answer; the rejected one is another answer, conversation or set of media.
    chosen = read_messages(row["messages"], "user")
    if chosen[-1].role != "assistant":
        raise RowError("`messages` must end with the assistant's answer, the chosen one")
    if "rejected_messages" in row:
        rejected = read_messages(row["rejected_messages"], "user")
    elif "rejected_response" in row:
        rejected = (*chosen[:-1], *read_messages(row["rejected_response"], "assistant"))
    else:
        rejected = chosen
    images, videos = (
        [media_in(row, kind), media_in(row, kind, "rejected_") or media_in(row, kind)] for kind in ("image", "video")
    )
    conversations = [*map(fill, (chosen, rejected), images, videos)]
    return ParsedRow(conversations, [CHOSEN, REJECTED], common_turns(*conversations))


@layout("LLaMA-Factory alpaca", ["instruction", "chosen", "rejected"], optional=[*MEDIA, "input", "system", "history"])
def alpaca(row: Row) -> ParsedRow:
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    history: Messages = ()
    for exchange in row.get("history", []):
        if not isinstance(exchange, (list, tuple)) or len(exchange) != 2:
            raise RowError("`history` must be a list of [question, answer] pairs")
        history += read_messages(exchange[0], "user") + read_messages(exchange[1], "assistant")
    prompt = question_turns(row, (*history, *read_messages(question, "user")))
    return with_answers(row, prompt, [row["chosen"], row["rejected"]], [CHOSEN, REJECTED])


@layout("LLaMA-Factory sharegpt", ["conversations", "chosen", "rejected"], optional=[*MEDIA, "system"])
def sharegpt(row: Row) -> ParsedRow:
    prompt = question_turns(row, read_messages(row["conversations"], "user"))
    return with_answers(row, prompt, [row["chosen"], row["rejected"]], [CHOSEN, REJECTED])


def with_answers(row: Row, prompt: Messages, answers: Sequence[Any], values: Sequence[float]) -> ParsedRow:
    """Return text answers to a prompt, with the row's media in it."""
    conversations = [with_media(row, (*prompt, *read_messages(answer, "assistant"))) for answer in answers]
    return ParsedRow(conversations, values, len(prompt))


@layout("RLHF-V", ["text"], one_of=["image", "images"], optional=["system"])
def rlhf_v(row: Row) -> ParsedRow:
    try:
        fields = json.loads(row["text"]) if isinstance(row["text"], str) else row["text"]
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, Mapping) or not {"question", "chosen", "rejected"} <= fields.keys():
        raise RowError(
            "`text` beside an image must be RLHF-V's JSON of `question`, `chosen` and `rejected`: name it `prompt` if "
            f"it is one, it is {shorten(row['text'])}"
        )
    read = {name: fields[name] for name in ("question", "chosen", "rejected")}
    media = {name: row[name] for name in ("image", "images", "system") if name in row}
    unread = {name: value for name, value in fields.items() if name not in read}
    return replace(pair.read({**read, **media}), skipped=frozenset(), unread=unread)


@layout("OpenAI preferences", ["input", "preferred_output", "non_preferred_output"], optional=[*MEDIA, "system"])
def openai_preferences(row: Row) -> ParsedRow:
    fields = row["input"]
    if not isinstance(fields, Mapping) or "messages" not in fields:
        raise RowError(f"`input` must be an object with `messages`, and is {shorten(fields)}")
    if fields.get("tools"):
        raise RowError("`input` has `tools`, which are not read: write them into the system message, or remove them")
    prompt = question_turns(row, fields["messages"])
    answers = [row["preferred_output"], row["non_preferred_output"]]
    unread = {name: value for name, value in fields.items() if name not in ("messages", "tools")}
    return replace(with_answers(row, prompt, answers, [CHOSEN, REJECTED]), unread=unread)


# Images for a prompt: the prompt is the user's turn, each image an assistant turn of its own.

PROMPT_COLUMNS = [*MEDIA, "system"]  # which `images_for` reads


def images_for(
    row: Row, prompt: Any, images: Sequence[Any], ratings: Sequence[float], turn: Callable[[Any], Message] = image_turn
) -> ParsedRow:
    """Return images that answer a prompt; the row's `images` (one to edit, say) belong to the prompt."""
    before = with_media(row, question_turns(row, prompt))
    return ParsedRow([(*before, turn(image)) for image in images], ratings, len(before))


IMAGE_PAIRS = (("chosen_image", "rejected_image"), ("img_better", "img_worse"), ("image_better", "image_worse"))


@layout("text-to-image", ["prompt"], any_of=[IMAGE_PAIRS], optional=PROMPT_COLUMNS)
def image_pair(row: Row) -> ParsedRow:
    better, worse = next(names for names in IMAGE_PAIRS if set(names) <= row.keys())
    skipped = frozenset(name for names in IMAGE_PAIRS for name in names) - {better, worse}
    parsed = images_for(row, row["prompt"], [row[better], row[worse]], [CHOSEN, REJECTED])
    return replace(parsed, skipped=skipped)


@layout("HPSv3", ["prompt", "path1", "path2"], optional=PROMPT_COLUMNS)
def hpsv3(row: Row) -> ParsedRow:
    return images_for(row, row["prompt"], [row["path1"], row["path2"]], [CHOSEN, REJECTED])


@layout("Pick-a-Pic", ["caption", "jpg_0", "jpg_1", "label_0"], optional=[*PROMPT_COLUMNS, "label_1", "has_label"])
def pick_a_pic(row: Row) -> ParsedRow:
    label, second = row["label_0"], row.get("label_1")
    if label not in (0, 0.5, 1):
        raise RowError(f"`label_0` is {label!r}: it must be 1 (the first image), 0 (the second) or 0.5 (a tie)")
    parsed = images_for(row, row["caption"], [row["jpg_0"], row["jpg_1"]], [float(label), 1.0 - label])
    if not row.get("has_label", True):
        return replace(parsed, unjudged="`has_label` is false: nobody compared the images")
    if second is not None and second != 1 - label:
        return replace(parsed, unjudged=f"`label_0` is {label} and `label_1` is {second!r}, which do not add up to 1")
    return parsed


@layout("ImageReward", ["prompt", "generations", "ranking"], optional=PROMPT_COLUMNS)
def image_reward(row: Row) -> ParsedRow:
    images = require_list(row["generations"], "generations")
    ranks = require_numbers(row["ranking"], "ranking", len(images))
    return images_for(row, row["prompt"], images, [-rank for rank in ranks])
