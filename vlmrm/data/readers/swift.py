"""ms-swift: `messages` end with the chosen answer; the rejected one is an answer, a conversation, or other media."""

from __future__ import annotations

from vlmrm.data.messages import place_media, to_messages
from vlmrm.data.readers.layout import CHOSEN, MEDIA, REJECTED, Layout, Reading, Row, common_turns, media_of
from vlmrm.errors import RowError


def _read(row: Row) -> Reading:
    chosen = to_messages(row["messages"], "user")
    if chosen[-1]["role"] != "assistant":
        raise RowError("`messages` must end with the assistant's answer, the chosen one")
    if "rejected_messages" in row:
        rejected = to_messages(row["rejected_messages"], "user")
    elif "rejected_response" in row:
        rejected = [*chosen[:-1], *to_messages(row["rejected_response"], "assistant")]
    else:
        rejected = chosen
    media = {kind: media_of(row, kind) for kind in ("image", "video")}
    other = {kind: media_of(row, kind, "rejected_") or media[kind] for kind in media}
    conversations = [
        place_media(chosen, media["image"], media["video"]),
        place_media(rejected, other["image"], other["video"]),
    ]
    return Reading(conversations, [CHOSEN, REJECTED], common_turns(*conversations))


SWIFT = Layout(
    "ms-swift",
    _read,
    required=frozenset({"messages"}),
    one_of=frozenset({"rejected_response", "rejected_messages", "rejected_images", "rejected_videos"}),
    optional=MEDIA,
)
