"""The conversations that every family is asked to score: each case is one batch."""

from __future__ import annotations

import numpy as np
from PIL import Image as Pillow

from vlmrm.conversation import Conversation, Image, Message, Part, Video


def picture(width: int, height: int, seed: int) -> Pillow.Image:
    return Pillow.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def asked(*turns: tuple[Part | str, ...] | Part | str) -> Conversation:
    """Return a conversation whose turns are the user's and the assistant's in turn."""
    parts = [turn if isinstance(turn, tuple) else (turn,) for turn in turns]
    return Conversation(tuple(Message.of(("user", "assistant")[i % 2], *part) for i, part in enumerate(parts)))


RED, BLUE, WIDE = Image(picture(28, 28, 1)), Image(picture(40, 32, 2)), Image(picture(64, 28, 3))
MOVING = Video(tuple(picture(56, 56, seed) for seed in range(4)))

CASES = {
    "text": [asked("Is it?", a) for a in ("y", "n no")],
    "image": [asked((RED, "What?"), a) for a in ("It is a cat.", "dog")],
    "two images": [asked((RED, BLUE, "Compare."), a) for a in ("one", "two of")],
    "images in answers": [
        asked("Draw a red square, a blue circle and a green house on a hill.", (a,)) for a in (RED, BLUE, WIDE)
    ],
    "ranked list": [asked((BLUE, "Rank."), a) for a in ("a", "a b", "a b c", "d", "a b")],
    "irrelevant branches": [
        *(asked((RED, "What?"), a) for a in ("red one", "other")),
        *(asked((BLUE, "Who?"), a) for a in ("blue", "green")),
        *(asked((BLUE, "Who?"), a) for a in ("red one", "other")),
    ],
    "turns": [asked((RED, "What?"), "A.", (WIDE, "And?"), a) for a in ("B.", "C d.")],
    "video": [asked((MOVING, "What?"), a) for a in ("it moves", "no")],
}
WITH_GRADIENTS = ("two images", "irrelevant branches")
