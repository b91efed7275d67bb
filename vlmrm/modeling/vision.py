"""Vision towers: their attention, what they derive from the sizes of images, uneven widths, and features by image.

Attention takes one call a layer for all windows and images of a batch. Towers that pack images attend within segments:
images, frames or windows, by their cumulative lengths. The library hands these to an attention function whose name
contains "flash", and calls any other once for each segment, with lengths that it waits for in every layer.
`by_segments` is registered under such a name. It is chosen when a model is made, and computes with the kernels of the
text (`vlmrm.modeling.kernels`), or with torch's own where those do not run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, vision_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from vlmrm.batching.media import Grid
from vlmrm.batching.shared import on_device
from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on
from vlmrm.modeling.kernels import FLASH, TORCH, WIDEST_HEAD, attend_varlen, log_once

relies_on(PreTrainedConfig, "_attn_implementation")
if not is_flash_attention_requested(requested_attention_implementation="flash_segments"):
    raise ConfigError("transformers no longer knows FlashAttention by its name: install an older version.")

# By the kernel under them, for half precision on CUDA.
SEGMENTS = {TORCH: "flash_segments", **{kernel: f"flash_segments_{kernel[-1]}" for kernel in FLASH}}
# Segments of no more tokens than these are padded to one length: their attention is a small part of a layer.
SHORT = 256
# Keywords of the library without effect on attention.
WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "max_length_q", "max_length_k", "output_attentions", "output_hidden_states", "return_dict"),
        *("use_cache", "cache_position", "interpolate_pos_encoding", "grid_thw"),
    )
)


@dataclass(eq=False)
class Segments:
    """Divide a row of T tokens into N segments; their lengths are known on the host."""

    lengths: Sequence[int]
    _padding: Padding | None = field(default=None, init=False)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int]]:
        """Return the (length, number) of neighbours of equal length."""
        return [(length, len([*run])) for length, run in groupby(self.lengths)]

    def cumulative(self, device: torch.device) -> torch.Tensor:
        """Return the cumulative lengths [N + 1], int32, on a device; `segments_of` knows what they are."""
        total = on_device(torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int32)), device)
        _SEGMENTS[total] = self
        return total

    def padding(self, device: torch.device) -> Padding | None:
        """Return how all segments are padded to the longest; None where that costs more than calls of their own."""
        if self.longest > SHORT:
            return None
        if self._padding is None or self._padding.taken.device != device:
            self._padding = Padding.of(self.lengths, device)
        return self._padding


@dataclass(frozen=True)
class Padding:
    """N segments padded to L tokens: `taken` [N * L] of the row, `put` [T], where among them the row's tokens are.

    `mask` [N, 1, 1, L] is minus infinity at padding, which repeats the first token of its segment.
    """

    taken: torch.Tensor
    put: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Padding:
        starts, places = np.cumsum([0, *lengths])[:-1, None], np.arange(max(lengths))
        real = places < np.array(lengths)[:, None]
        taken, put = np.where(real, starts + places, starts).ravel(), np.flatnonzero(real)
        mask = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None]
        return cls(*(on_device(torch.from_numpy(array), device) for array in (taken, put, mask)))


# By the tensors of cumulative lengths that were made from them, or from which they were read.
_SEGMENTS = WeakTensorKeyDictionary()


def segments_of(cumulative: torch.Tensor) -> Segments:
    """Return the segments of cumulative lengths [N + 1]. Unless they are known, the host waits for them once."""
    if cumulative not in _SEGMENTS:
        _SEGMENTS[cumulative] = Segments([length for length in cumulative.diff().tolist() if length])
    return _SEGMENTS[cumulative]


def by_segments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    is_causal: bool | None = None,
    flash: str = TORCH,
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend both ways within segments: query[1, H, T, D], key[1, KV, T, D], value[1, KV, T, V] → [1, T, H, V].

    Without `cu_seq_lens_q` it is the library's sdpa. `flash` is the kernel for half precision on CUDA.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **keywords
        )
    refused = [name for name, setting in keywords.items() if setting is not None and name not in WITHOUT_EFFECT]
    refused += ["attention_mask"] * (attention_mask is not None) + ["is_causal"] * bool(is_causal)
    refused += ["other lengths of keys"] * (cu_seq_lens_k is not cu_seq_lens_q)
    if refused:
        raise ConfigError(
            f"the attention of vision towers does not compute {', '.join(refused)} of {type(module).__name__}: "
            "install another version of transformers."
        )
    segments = segments_of(cu_seq_lens_q)
    where = f"{value.dtype} on {value.device.type}"
    half = value.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[3]
    if value.is_cuda and half and not dropout and width == value.shape[3] <= WIDEST_HEAD and width % 8 == 0:
        log_once(f"vision attention: {flash} for {where}")
        queries, keys, values = (
            states[0].transpose(0, 1).to(value.dtype).contiguous() for states in (query, key, value)
        )
        # Some towers count on the host.
        here = cu_seq_lens_q if cu_seq_lens_q.device == value.device else segments.cumulative(value.device)
        lengths = (here, here, segments.longest, segments.longest)
        return attend_varlen(flash, queries, keys, values, *lengths, scaling=scaling, causal=False).unsqueeze(0), None
    log_once(f"vision attention: sdpa for {where}")
    return per_length(query, key, value, segments, scaling, dropout), None


def per_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Call torch's attention once for all segments, padded, or once for neighbours of a length; on any device.

    Equal lengths need no padding; images of different sizes would need too much.
    """
    attend = partial(
        scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    if len(segments.lengths) == 1:
        return attend(query, key, value).transpose(1, 2)
    rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]  # [T, H, D]
    runs = segments.runs()
    padding = segments.padding(query.device) if len(runs) > 1 else None
    if padding is not None:
        shape = (len(segments.lengths), segments.longest)
        padded = [_batch(states.index_select(0, padding.taken), *shape) for states in rows]
        output = attend(*padded, attn_mask=padding.mask.to(query.dtype))
        return output.transpose(1, 2).flatten(0, 1).index_select(0, padding.put).unsqueeze(0)
    sizes = [length * count for length, count in runs]
    pieces = zip(*(states.split(sizes) for states in rows), strict=True)
    outputs = [
        attend(*(_batch(states, count, length) for states in piece)).transpose(1, 2).flatten(0, 1)
        for (length, count), piece in zip(runs, pieces, strict=True)
    ]
    return torch.cat(outputs).unsqueeze(0)


def _batch(states: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return states[count * length, H, D] as [count, H, length, D]."""
    return states.reshape(count, length, *states.shape[1:]).transpose(1, 2)


for _kernel, _name in SEGMENTS.items():
    AttentionInterface.register(_name, partial(by_segments, flash=_kernel))
    AttentionMaskInterface.register(_name, sdpa_mask)


def attend_by_segments(backbone: PreTrainedModel, towers: Sequence[nn.Module]) -> None:
    """Let the towers of a backbone that take cumulative lengths attend by segments; others keep their attention."""
    shared = [backbone.config, backbone.config.get_text_config()]
    for tower in towers:
        config = getattr(tower, "config", None)
        if config is None or any(config is text for text in shared) or not takes_segments(tower):
            continue
        config._attn_implementation = SEGMENTS.get(config._attn_implementation, SEGMENTS[TORCH])


def reset_attention(config: PreTrainedConfig) -> None:
    """Take back what `attend_by_segments` chose for a model of this configuration, before another is made of it.

    The library would look for a kernel of that name to download.
    """
    kernels = {name: kernel for kernel, name in SEGMENTS.items()}
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None and part._attn_implementation in kernels:
            kernel = kernels[part._attn_implementation]
            part._attn_implementation = kernel if kernel in FLASH else "sdpa"


def takes_segments(tower: nn.Module) -> bool:
    """Return whether a tower hands cumulative lengths to attention functions that are called "flash..."."""
    codes = [inspect.unwrap(forward).__code__ for forward in {type(module).forward for module in tower.modules()}]
    asking = [code for code in codes if is_flash_attention_requested.__name__ in code.co_names]
    return bool(asking) and all(
        any(isinstance(names, tuple) and "cu_seq_lens_q" in names for names in code.co_consts) for code in asking
    )


# Layouts -------------------------------------------------------------------------------------------------------------
#
# Given a tensor of sizes on a GPU, the library's towers wait for it several times in every pass. The towers of Qwen's
# kind take the results as keywords instead: positions, segments, windows, and where learned positions are
# interpolated.


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


# Widths --------------------------------------------------------------------------------------------------------------
#
# Matrix units read sixteen bytes at a time. Where a row of a matrix is no multiple of that, as in the vision tower of
# Qwen2.5-VL with its 3420, cuBLAS takes kernels of a third of the speed; padding the weights in each call costs less.

ALIGNED = 8  # numbers of half precision in sixteen bytes


class AlignedLinear(nn.Linear):
    """A linear layer that computes with its weights padded, where that is faster; its parameters stay as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        half = input.dtype in (torch.bfloat16, torch.float16)
        if input.is_cuda and (half or torch.is_autocast_enabled("cuda")):
            return aligned_linear(input, self.weight, self.bias)
        return super().forward(input)


def aligned_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return states[..., I] times weight[O, I] plus bias[O]: [..., O], with I and O padded by zeros."""
    outputs, inputs = weight.shape
    rows, columns = -outputs % ALIGNED, -inputs % ALIGNED
    if bias is not None and rows:
        bias = pad(bias, (0, rows))
    padded = linear(pad(states, (0, columns)) if columns else states, pad(weight, (0, columns, 0, rows)), bias)
    return padded[..., :outputs] if rows else padded


def align(parts: Iterable[nn.Module]) -> None:
    """Make `AlignedLinear` of the linear layers in `parts` with a width that is no multiple of eight."""
    for part in parts:
        for module in part.modules():
            if type(module) is nn.Linear and (module.in_features % ALIGNED or module.out_features % ALIGNED):
                module.__class__ = AlignedLinear


# Features ------------------------------------------------------------------------------------------------------------
#
# Families hold the features of a batch of images in different forms: a tensor for each image or tile, one tensor for
# all of them, further ones for deepstack layers. Each image's features keep the form of their family.


@dataclass
class EncoderOutput(ModelOutput):
    """Features as a backbone takes them in `mm_encoder_outputs`; a field for each that a family reads."""

    pooler_output: Any = None
    deepstack_features: Any = None
    last_hidden_state: Any = None
    visual_indicator_features: Any = None
    router_logits: Any = None


@dataclass(frozen=True)
class LayerForm:
    """How a family holds the features of one layer."""

    one_tensor: bool  # for all images, or one each
    shape: Sequence[int]  # of a tensor without its first dimension
    index: int | None  # of the language model's layer beside which they stand

    def assemble(self, images: Sequence[torch.Tensor]) -> Any:
        pieces = [image.reshape(-1, *self.shape) for image in images]
        value = torch.cat(pieces) if self.one_tensor else tuple(pieces)
        return value if self.index is None else (self.index, value)


@dataclass(frozen=True)
class FeatureForm:
    """How a family holds features."""

    merged: str | None  # the field of the merger's; None where all are deepstack layers (Granite Vision 4)
    layers: Sequence[LayerForm]
    deepstack: bool  # some layers are
    constants: Mapping[str, torch.Tensor | None] = field(default_factory=dict)  # what else is in an output

    def to_json(self) -> str:
        return json.dumps([self.merged, [asdict(layer) for layer in self.layers], self.deepstack])

    @classmethod
    def from_json(cls, text: str) -> FeatureForm:
        merged, layers, deepstack = json.loads(text)
        return cls(merged, [LayerForm(**layer) for layer in layers], deepstack)


@dataclass(frozen=True)
class Features:
    """Features of one image: those of the merger [tokens, H], then those of each deepstack layer."""

    layers: Sequence[torch.Tensor]
    form: FeatureForm


def split(output: ModelOutput, tokens: Sequence[int], merged: str | None, constants: Sequence[str]) -> list[Features]:
    """Split a tower's output into the features of each image; image i has `tokens[i]` placeholders."""
    deepstack = output.get("deepstack_features")
    values = [*([output[merged]] if merged else ()), *(deepstack or ())]
    form = FeatureForm(
        merged,
        [_form(value) for value in values],
        deepstack is not None,
        {name: output.get(name) for name in constants},
    )
    layers = []
    for value in values:
        rows = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in _tensors(value)])
        if len(rows) != sum(tokens):
            raise ConfigError(
                f"the vision tower has {len(rows)} features for the {sum(tokens)} placeholders of a batch: where "
                "videos of different numbers of frames cannot be in one batch, write per_device_train_batch_size: 1."
            )
        layers.append(rows.split(list(tokens)))
    return [Features(image, form) for image in zip(*layers, strict=True)]


def assemble(images: Sequence[Features]) -> EncoderOutput:
    """Return the output for images in the order shown."""
    form = images[0].form
    layers = [
        layer.assemble(pieces)
        for layer, pieces in zip(form.layers, zip(*(image.layers for image in images), strict=True), strict=True)
    ]
    merged = {form.merged: layers.pop(0)} if form.merged else {}
    return EncoderOutput(**merged, **form.constants, deepstack_features=layers if form.deepstack else None)


def _form(value: Any) -> LayerForm:
    return LayerForm(
        isinstance(value, torch.Tensor) or (_is_named(value) and isinstance(value[1], torch.Tensor)),
        tuple(_tensors(value)[0].shape[1:]),
        value[0] if _is_named(value) else None,
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    value = value[1] if _is_named(value) else value
    return [value] if isinstance(value, torch.Tensor) else value


def _is_named(value: Any) -> bool:
    """Return whether these are the index of a layer and its features (Granite Vision 4)."""
    return isinstance(value, tuple) and isinstance(value[0], int)
