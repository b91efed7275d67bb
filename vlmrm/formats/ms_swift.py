"""ms-swift: `messages` end with the chosen answer; the rejected one is an answer, a conversation, or other media."""

from __future__ import annotations

from vlmrm.errors import RowError
from vlmrm.formats.layout import CHOSEN, MEDIA, REJECTED, Layout, Reading, Row, common_turns, media_in
from vlmrm.formats.openai import read_messages
from vlmrm.formats.placeholders import fill


def _read(row: Row) -> Reading:
    chosen = read_messages(row["messages"], "user")
    if chosen[-1].role != "assistant":
        raise RowError("`messages` must end with the assistant's answer, the chosen one")
    if "rejected_messages" in row:
        rejected = read_messages(row["rejected_messages"], "user")
    elif "rejected_response" in row:
        rejected = (*chosen[:-1], *read_messages(row["rejected_response"], "assistant"))
    else:
        rejected = chosen
    media = {kind: media_in(row, kind) for kind in ("image", "video")}
    other = {kind: media_in(row, kind, "rejected_") or media[kind] for kind in media}
    conversations = [
        fill(chosen, media["image"], media["video"]),
        fill(rejected, other["image"], other["video"]),
    ]
    return Reading(conversations, [CHOSEN, REJECTED], common_turns(*conversations))


SWIFT = Layout(
    "ms-swift",
    _read,
    required=frozenset({"messages"}),
    one_of=frozenset({"rejected_response", "rejected_messages", "rejected_images", "rejected_videos"}),
    optional=MEDIA,
)
