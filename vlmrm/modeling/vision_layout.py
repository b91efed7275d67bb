"""What a vision tower derives from the sizes of its images, computed on the host once for a batch.

Given a tensor of sizes on a GPU, the library's towers wait for it several times in every pass. The towers of Qwen's
kind take the results as keywords instead: positions, segments, windows, and where learned positions are interpolated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import vision_utils

from vlmrm.batching.media import Grid
from vlmrm.batching.shared import on_device
from vlmrm.libraries import relies_on
from vlmrm.modeling.vision_attention import Segments

for _function in (
    vision_utils.get_vision_position_ids,
    vision_utils.get_vision_attention_seqlens,
    vision_utils.get_vision_window_index,
    vision_utils.get_vision_interpolation_indices_and_weights,
):
    relies_on(_function, "kwargs")
relies_on(vision_utils._interpolation_axis_taps_weights, "index", "size", "side", "mode", "align_corners")


def tower_keywords(tower: Any, grids: Sequence[Grid], device: torch.device) -> dict[str, Any]:
    """Return the keywords that spare a tower of Qwen's kind to derive them from `grids`; tensors on `device`.

    The windows of a frame come in another order than the library's, in which equally long ones are neighbours: a tower
    puts the features back in the order of the patches, whatever order its windows had.
    """
    merge = tower.spatial_merge_size
    of_frames = Segments([rows * columns for frames, rows, columns in grids for _ in range(frames)])
    keywords: dict[str, Any] = {
        "position_ids": _on(device, np.concatenate([positions(grid, merge) for grid in grids])),
        "cu_seqlens": of_frames.cumulative(device),
        "max_seqlen": of_frames.longest,
    }
    if hasattr(tower, "fullatt_block_indexes"):
        index, lengths = windows(grids, merge, tower.window_size // merge // tower.patch_size)
        of_windows = Segments(lengths)
        keywords |= {
            "window_index": _on(device, index),
            "cu_window_seqlens": of_windows.cumulative(device),
            "max_window_seqlen": of_windows.longest,
        }
    if hasattr(tower, "interpolation_mode"):
        taps = [_taps(tower, grid, merge) for grid in grids]
        keywords["interp_indices"] = _on(device, np.concatenate([indices for indices, _ in taps]))
        keywords["interp_weights"] = _on(device, np.concatenate([weights for _, weights in taps]))
    return keywords


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return on_device(torch.from_numpy(array), device)


def positions(grid: Grid, merge: int) -> np.ndarray:
    """Return the row and the column of each patch, int64 [T, 2]; those that are merged into one token follow another.

    merge: side of the squares of patches that are merged.
    """
    frames, rows, columns = grid
    squares = (rows // merge, merge, columns // merge, merge)
    axes = [axis.reshape(squares).swapaxes(1, 2).ravel() for axis in np.indices((rows, columns))]
    return np.tile(np.stack(axes, axis=1), (frames, 1))


def windows(grids: Sequence[Grid], merge: int, side: int) -> tuple[np.ndarray, list[int]]:
    """Return the order of merged tokens [T / merge²] by windows, and the number of patches of each window.

    Of each frame the largest windows come first.

    side: merged tokens to a side of a window; at the right and lower edge of an image windows are smaller.
    """
    pieces: list[np.ndarray] = []
    before = 0
    for frames, *sides in grids:
        rows, columns = (patches // merge for patches in sides)
        index = before + np.arange(frames * rows * columns).reshape(frames, rows, columns)
        for frame in index:
            of_frame = [
                frame[row : row + side, column : column + side].ravel()
                for row in range(0, rows, side)
                for column in range(0, columns, side)
            ]
            pieces += sorted(of_frame, key=len, reverse=True)
        before += index.size
    return np.concatenate(pieces), [merge**2 * len(piece) for piece in pieces]


def _taps(tower: Any, grid: Grid, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the learned positions that each patch is interpolated from, int64 [T, N], and their weights, float32."""
    side, mode, align = tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners
    (row_taps, row_weights), (column_taps, column_weights) = (
        _axis_taps(length, side, mode, align) for length in grid[1:]
    )
    rows, columns = positions(grid, merge).T
    indices = row_taps[rows][:, :, None] * side + column_taps[columns][:, None, :]
    weights = row_weights[rows][:, :, None] * column_weights[columns][:, None, :]
    return indices.reshape(len(rows), -1), weights.reshape(len(rows), -1)


def _axis_taps(length: int, side: int, mode: str, align_corners: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return `_interpolation_axis_taps_weights` of the library for each place on an axis of `length` patches."""
    places, size = torch.arange(length), torch.tensor(length)
    taps, weights = vision_utils._interpolation_axis_taps_weights(places, size, side, mode, align_corners)
    return taps.numpy(), weights.numpy()
