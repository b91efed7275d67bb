"""Sizes and tokens that several families share."""

from __future__ import annotations

SQUARE = {"height": 28, "width": 28}
SHORT = {"shortest_edge": 28}
GRIDS = [[28, 28], [28, 56], [56, 28]]  # the sizes to which LLaVA-NeXT enlarges images
MEDIA = {"image_token": "<image>", "video_token": "<video>"}


def area(patch: int) -> dict[str, int]:
    """Return limits of an image's pixels: of one to six merged patches."""
    return {"shortest_edge": (2 * patch) ** 2, "longest_edge": 6 * (2 * patch) ** 2}
