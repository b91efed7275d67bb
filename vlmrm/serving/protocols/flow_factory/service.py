"""A request of Flow-Factory's as items: samples whose media are decoded, in one group."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from vlmrm.conversation import Sample
from vlmrm.errors import MediaError, RowError
from vlmrm.formats.wire import Item, write_item
from vlmrm.serving.intake import Intake
from vlmrm.serving.protocols.flow_factory.schema import ComputeRequest


def items_of(body: ComputeRequest, intake: Intake) -> list[Item]:
    """The samples, in order.

    Raises:
        RowError: naming the sample whose media cannot be read.
    """
    items: list[Item] = []
    columns = body.columns()
    for place, prompt in enumerate(body.prompt):
        try:
            # No conditions are an empty list here and nothing there.
            media = {name: _media(name, column[place], intake) for name, column in columns.items() if column[place]}
            items.append(write_item(Sample(prompt, **media), "request"))
        except RowError as error:
            raise type(error)(f"sample {place}: {error.reason}") from error
    return items


def _media(name: str, value: Any, intake: Intake) -> Any:
    """Base64, however deep, as bytes that have been looked at; a video is a list of frames."""
    if isinstance(value, str):
        return intake.image(_decoded(value))
    if name in ("video", "condition_videos") and not (value and isinstance(value[0], list)):
        return intake.video(tuple(map(_decoded, value)))
    return tuple(_media(name, one, intake) for one in value)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"an image is no base64 of a file ({error})") from error
