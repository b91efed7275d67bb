"""The images and videos of a batch: the tensors of the distinct ones, and which of them stand where."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import torch
from PIL import Image as Pillow
from torch.nn.functional import pad

from vlmrm.conversation import Image, Message
from vlmrm.rendering import ProcessedMedia, Renderer

BLANK_SIDE = 56  # pixels; processors enlarge it to what their models take


# The patches of an image or video: frames (pairs of them, where a patch has two), rows and columns. A plain tuple, as
# HF's trainer cannot copy a named one.
Grid = tuple[int, int, int]


class DistinctMedia(TypedDict):
    """N distinct images, or N distinct videos, and their M occurrences in a batch.

    `tensors` are the processor's outputs, joined along their first dimension: `rows[name][i]` rows are medium i's, and
    `tokens[i]` placeholders stand for it in a conversation. `order` [M] is the index of each occurrence among the
    distinct media, in the order of the tokens. Trainers move it to a device like any plain dictionary.

    `grids` are the media's grids as numbers on the host, if their processor gives them. `places` are the positions of
    all placeholders in a packed row. `keys` name the N media by content, where later batches reuse their features.
    """

    tensors: dict[str, torch.Tensor]
    rows: dict[str, list[int]]
    tokens: list[int]
    order: list[int]
    grids: list[Grid]
    places: NotRequired[torch.Tensor]
    keys: NotRequired[list[str]]


Tensors = dict[str, torch.Tensor]
Media = dict[str, DistinctMedia]  # by kind: image, video


def distinct_media(media: Sequence[ProcessedMedia], placeholders: Collection[int]) -> DistinctMedia:
    """Deduplicate `media` of one kind, in the order of their first occurrences.

    The features replace the tokens `placeholders`.
    """
    distinct = {medium.key: medium for medium in media}
    index_of = {key: index for index, key in enumerate(distinct)}
    tensors = join(list(distinct.values()))
    return {
        "tensors": tensors,
        "rows": {
            name: [m.tensors[name].shape[_axis(name, tensors)] if name in m.tensors else 0 for m in distinct.values()]
            for name in tensors
        },
        "tokens": [placeholders_in(medium, placeholders) for medium in distinct.values()],
        "order": [index_of[medium.key] for medium in media],
        "grids": grids_of(tensors),
    }


def grids_of(tensors: Tensors) -> list[Grid]:
    """Return the grids among the processor's outputs, in the order of the media."""
    named = [tensor for name, tensor in tensors.items() if name.endswith("_grid_thw")]
    return [(frames, rows, columns) for tensor in named for frames, rows, columns in tensor.tolist()]


def placeholders_in(medium: ProcessedMedia, placeholders: Collection[int]) -> int:
    """Return how many of the tokens that stand for a medium are placeholders for its features."""
    return sum(map(medium.ids.count, placeholders))


def select(media: DistinctMedia, indices: Sequence[int]) -> DistinctMedia:
    """Select the distinct media `indices`, one occurrence each."""
    parts = parts_of(media)
    return {
        "tensors": _joined([parts[index] for index in indices]),
        "rows": {name: [counts[index] for index in indices] for name, counts in media["rows"].items()},
        "tokens": [media["tokens"][index] for index in indices],
        "order": list(range(len(indices))),
        "grids": [media["grids"][index] for index in indices if media["grids"]],
    }


def in_order(media: DistinctMedia, names: Collection[str]) -> Tensors:
    """Return tensors that give the sizes of media, by `names`, for each occurrence."""
    parts = {name: media["tensors"][name].split(media["rows"][name], _axis(name, media["tensors"])) for name in names}
    return {name: torch.cat([parts[name][index] for index in media["order"]]) for name in names}


def as_images(images: DistinctMedia, videos: DistinctMedia) -> DistinctMedia:
    """Join images and videos as images, for a tower that takes both as patches with grids."""
    pixels, grid = ("pixel_values", "pixel_values_videos"), ("image_grid_thw", "video_grid_thw")
    joined: DistinctMedia = {
        "tensors": {a: torch.cat([images["tensors"][a], videos["tensors"][b]]) for a, b in (pixels, grid)},
        "rows": {a: [*images["rows"][a], *videos["rows"][b]] for a, b in (pixels, grid)},
        "tokens": [*images["tokens"], *videos["tokens"]],
        "order": [],
        "grids": [*images["grids"], *videos["grids"]],
    }
    if "keys" in images and "keys" in videos:
        joined["keys"] = [*images["keys"], *videos["keys"]]
    return joined


def blank_image(processor: Any, placeholders: Collection[int]) -> DistinctMedia:
    """Return a small grey image, as a processor gives it to the model; `placeholders` as in `distinct_media`."""
    grey = Pillow.new("RGB", (BLANK_SIDE, BLANK_SIDE), "grey")
    return distinct_media(Renderer(processor).process([Message.of("user", Image(grey))]), placeholders)


def join(media: Sequence[ProcessedMedia]) -> dict[str, torch.Tensor]:
    """Return the tensors of `media` joined along the first dimension, the others padded with zeros to the largest.

    So do the processors that pad images of different sizes; their models know the sizes by further tensors.
    """
    return _joined([medium.tensors for medium in media])


def _joined(media: Sequence[Tensors]) -> Tensors:
    moved, patches = [], 0
    for tensors in media:
        moved.append(_moved(tensors, patches))
        patches += _patches(tensors)
    names = dict.fromkeys(name for tensors in media for name in tensors)
    return {name: _join([t[name] for t in moved if name in t], _axis(name, names)) for name in names}


def parts_of(media: DistinctMedia) -> list[Tensors]:
    """Return the tensors of each medium, as they were joined."""
    split = {
        name: tensor.split(media["rows"][name], _axis(name, media["tensors"]))
        for name, tensor in media["tensors"].items()
    }
    parts, patches = [], 0
    for index in range(len(media["tokens"])):
        tensors = {name: pieces[index] for name, pieces in split.items() if media["rows"][name][index]}
        parts.append(_moved(tensors, -patches))
        patches += _patches(tensors)
    return parts


def _axis(name: str, names: Collection[str]) -> int:
    """Return the dimension along which a tensor of several media is joined.

    MiniCPM-V's slices stand side by side in one row of patches, with their `target_sizes`.
    """
    return -1 if name.startswith("pixel_values") and any(other.startswith("target_sizes") for other in names) else 0


def _moved(tensors: Tensors, patches: int) -> Tensors:
    """Return a medium's tensors behind `patches` of other media: Molmo 2 numbers the patches that it pools."""
    return {
        name: torch.where(tensor >= 0, tensor + patches, tensor) if name.endswith("_token_pooling") else tensor
        for name, tensor in tensors.items()
    }


def _patches(tensors: Tensors) -> int:
    return sum(len(tensor) * tensor.shape[1] for name, tensor in tensors.items() if name.startswith("pixel_values"))


def _join(tensors: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    sizes = [tensor.shape[1:] for tensor in tensors]
    if axis or len(set(sizes)) == 1:
        return torch.cat(list(tensors), axis)
    largest = [max(lengths) for lengths in zip(*sizes, strict=True)]
    return torch.cat([_pad(tensor, largest) for tensor in tensors])


def _pad(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    missing = [size - length for size, length in zip(sizes, tensor.shape[1:], strict=True)]
    return pad(tensor, [n for length in reversed(missing) for n in (0, length)])
