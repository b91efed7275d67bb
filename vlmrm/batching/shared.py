"""The shared batch: one packed row in which nothing is computed twice, equal to the padded one in every score.

Conversations become a tree; each of its tokens keeps the id and the rotary position that it has in its conversation.
Each distinct image is given to the vision tower once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vlmrm.batching.batcher import Unit
from vlmrm.batching.layout import Layout
from vlmrm.batching.tree import Segment, Tree, common_prefix, grow, sort_key
from vlmrm.rendering import ProcessedMedia, Rendered

KINDS = {"image": 1, "video": 2}  # their numbers in `Rendered.type_ids`


@dataclass(frozen=True)
class RotaryPositions:
    """Qwen's own rotary positions, without a model: its method needs the configuration and nothing else."""

    backbone: Any  # the class
    config: Any

    def get_vision_position_ids(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.backbone.get_vision_position_ids(self, *args, **kwargs)

    def __call__(self, rendered: Rendered) -> torch.Tensor:
        """Temporal, height and width position of each token: [3, T]."""
        grids: dict[str, list[torch.Tensor]] = {}
        for medium in rendered.media:
            for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts"):
                if name in medium.tensors:
                    grids.setdefault(name, []).append(medium.tensors[name])
        positions, _ = self.backbone.get_rope_index(
            self,
            torch.tensor([rendered.input_ids]),
            torch.tensor([rendered.type_ids]),
            **{name: torch.cat(values) for name, values in grids.items()},
        )
        return positions[:, 0]


@dataclass(frozen=True)
class SharedBatcher:
    """Conversations → one packed row and its layout.

    `input_ids` [1, T], `position_ids` [3, 1, T], `branch_ends` [N] (where in the row each conversation ends), the
    pixels and grid of each distinct image or video, and `image_order`, `video_order`: which the row shows, in turn.
    """

    positions: RotaryPositions
    merge: int  # vision patches that make one token

    @classmethod
    def for_model(cls, model: Any) -> SharedBatcher:
        """The batcher for a reward model of the Qwen-VL family."""
        return cls(RotaryPositions(type(model.model), model.config), model.config.vision_config.spatial_merge_size**2)

    def __call__(self, rendered: Sequence[Rendered]) -> dict[str, Any]:
        numbers: dict[str, int] = {}
        tree = grow([self.identities(item, numbers) for item in rendered])
        used = {segment.sequence for segment in tree.segments}
        positions = {i: self.positions(rendered[i]) for i in used}
        ids = [token for s in tree.segments for token in rendered[s.sequence].input_ids[s.begin : s.end]]
        lasts = np.cumsum([len(segment) for segment in tree.segments]) - 1
        return {
            "input_ids": torch.tensor([ids]),
            "position_ids": torch.cat([positions[s.sequence][:, s.begin : s.end] for s in tree.segments], 1)[:, None],
            "branch_ends": torch.from_numpy(lasts[tree.ends]),
            "layout": Layout.of(tree),
            **self._media(rendered, tree),
        }

    def split(self, units: Sequence[Unit], budget: int) -> list[list[int]]:
        """Parts under the budget, what their units share counted once; units that share most go together."""
        numbers: dict[str, int] = {}
        identities = [sorted((self.identities(item, numbers) for item in unit), key=sort_key) for unit in units]
        parts: list[list[int]] = []
        used = 0
        before: np.ndarray | None = None  # the conversation last placed: sorted, each shares most with its neighbour
        held: set[str] = set()
        for number in sorted(range(len(units)), key=lambda i: sort_key(identities[i][0])):
            media = {medium.key: medium.patches for item in units[number] for medium in item.media}
            tokens = tokens_after(before, identities[number])
            patches = sum(count for key, count in media.items() if key not in held)
            if not parts or used + tokens + patches > budget:
                parts.append([])
                used, held = 0, set()
                tokens, patches = tokens_after(None, identities[number]), sum(media.values())
            parts[-1].append(number)
            used, before, held = used + tokens + patches, identities[number][-1], held | media.keys()
        return parts

    def identities(self, rendered: Rendered, numbers: dict[str, int]) -> np.ndarray:
        """The conversation as integers [T], equal where tokens are: those of an image by the image's number.

        `numbers` has those of the images seen so far, and gets those of new ones. They count from the first, so that
        the order of a row's segments, and with it the last bits of its scores, is no matter of where files are.
        """
        ids = np.array(rendered.input_ids, dtype=np.int64)
        types = np.array(rendered.type_ids)
        for kind, number in KINDS.items():
            media = [medium for medium in rendered.media if medium.kind == kind]
            # Negative: no token has such an id.
            keys = [-1 - numbers.setdefault(medium.key, len(numbers)) for medium in media]
            ids[types == number] = np.repeat(np.array(keys, dtype=np.int64), list(map(self._tokens, media)))
        return ids

    def _media(self, rendered: Sequence[Rendered], tree: Tree) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for kind in KINDS:
            shown = [medium for segment in tree.segments for medium in self._shown(rendered, segment, kind)]
            distinct = {medium.key: medium for medium in shown}
            number = {key: i for i, key in enumerate(distinct)}
            for name in next(iter(distinct.values())).tensors if distinct else ():
                tensors[name] = torch.cat([medium.tensors[name] for medium in distinct.values()])
            if distinct:
                tensors[f"{kind}_order"] = torch.tensor([number[medium.key] for medium in shown])
        return tensors

    def _shown(self, rendered: Sequence[Rendered], segment: Segment, kind: str) -> list[ProcessedMedia]:
        """The media of one kind whose tokens stand in the segment. No segment ends inside an image."""
        item = rendered[segment.sequence]
        media = [medium for medium in item.media if medium.kind == kind]
        places = np.flatnonzero(np.array(item.type_ids) == KINDS[kind])
        firsts = np.cumsum([0, *map(self._tokens, media)])[:-1]
        return [m for m, first in zip(media, firsts, strict=True) if segment.begin <= places[first] < segment.end]

    def _tokens(self, medium: ProcessedMedia) -> int:
        return int(medium.tensors[f"{medium.kind}_grid_thw"].prod()) // self.merge


def tokens_after(before: np.ndarray | None, sequences: Sequence[np.ndarray]) -> int:
    """Tokens that sorted `sequences` add to a tree that ends with `before`."""
    count = 0
    for sequence in sequences:
        count += len(sequence) - (0 if before is None else common_prefix(before, sequence))
        before = sequence
    return count
