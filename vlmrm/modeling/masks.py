"""Masks of packed rows, from the mask functions of the model families.

transformers composes a family's mask function (causal, windows, chunks, images that see both ways) when a forward
begins, and hands it to the mask interface that is registered for the attention. Here it becomes a `MaskRule`, which
travels to the attention function as its `attention_mask`, and is evaluated there along the paths of the row's layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

from vlmrm.batching.shared import PackedLayout, PackedSegment, Span
from vlmrm.errors import ConfigError

REFERENCE = "write batching: reference"
# Queries that one call of attention takes where a rule is masked. Fewer leave more keys out, more call less often.
QUERIES = 128

# Of the indices of batch, head, query and key. The library annotates them as numbers; here they are tensors.
MaskFunction = Callable[..., Any]


class MaskedSpan(NamedTuple):
    """Queries `start` to `stop` of a row, and the ranges of keys that they attend to under `mask` [queries, keys].

    Keys are counted from the first that is held. Without a mask they are causal, aligned to the top left.
    """

    start: int
    stop: int
    keys: Sequence[tuple[int, int]]
    mask: torch.Tensor | None


def plain_spans(layout: PackedLayout, device: torch.device) -> list[MaskedSpan]:
    """Return the spans of a layout under the causal mask."""
    return [
        MaskedSpan(
            span.start, span.stop, _from_held(span.keys, layout), layout.mask(span, device) if span.before else None
        )
        for span in layout.spans
    ]


def _from_held(ranges: Sequence[tuple[int, int]], layout: PackedLayout) -> list[tuple[int, int]]:
    """Return ranges of places in the row, below zero where they are held, as ranges of the keys."""
    return [(start + layout.before, stop + layout.before) for start, stop in ranges]


def mask_rule(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **keywords: Any,
) -> MaskRule:
    """Return the rule of a packed row's mask.

    The interface is that of `transformers.AttentionMaskInterface`; `keywords` are hints for kernels.
    """
    if batch_size != 1 or q_length != kv_length or q_offset or kv_offset:
        raise ConfigError(
            f"batching: shared attends over one packed row without a cache, not over {batch_size} rows of {q_length} "
            f"queries and {kv_length} keys: {REFERENCE}."
        )
    # On a GPU the question would wait for it in every forward; only a row made by hand could have padding.
    if attention_mask is not None and attention_mask.device.type == "cpu" and not bool(attention_mask.all()):
        raise ConfigError(f"batching: shared has a packed row with padding in its attention_mask: {REFERENCE}.")
    functions = list(_nested(mask_function))
    if any(_made_like(function, packed_sequence_mask_function(torch.zeros(1, 1))) for function in functions):
        # Restarts of the positions are branches here, not documents that do not see each other.
        raise ConfigError("batching: shared needs an attention_mask of ones [1, T] beside the position_ids.")
    rule = MaskRule(mask_function, q_length)
    if rule.plain and not allow_is_causal_skip:
        raise ConfigError(f"batching: shared does not compute attention with an index of its own keys: {REFERENCE}.")
    return rule


class MaskRule(BlockMask):
    """A family's mask, by its own function of (batch, head, query, key): tensors of indices that broadcast.

    In arithmetic the indices of queries and keys are positions on their path. Where the function reads a tensor at
    such an index, as it does with the number of each token's image, they are positions in the row; once evaluated,
    `reads_rows` says whether it does.

    By its type and `shape` the library takes it for a finished mask, where a family's outer model makes the mask and
    its language model would make another. Of what else a `BlockMask` can do, it can be cut to all of its queries.
    """

    ndim = 4

    def __init__(self, function: MaskFunction, length: int):
        self.function = function
        self.length = length
        self._spans: dict[torch.device, list[MaskedSpan]] = {}
        # Not the layout: caches that live as long as it does hold rules.
        self._segments: Sequence[PackedSegment] | None = None
        self.reads_rows = False

    def __repr__(self) -> str:
        return f"MaskRule({self.function}, {self.length})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> MaskRule:
        """Return the rule itself: before layers that share keys, Gemma 4 takes the queries that it keeps, here all."""
        whole = isinstance(index, tuple) and len(index) == self.ndim
        if not whole or any(range(size)[part] != range(size) for part, size in zip(index, self.shape, strict=True)):
            raise ConfigError(f"batching: shared does not compute attention of a part of the queries: {REFERENCE}.")
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return 1, 1, self.length, self.length

    @property
    def plain(self) -> bool:
        """Whether the rule is causal and nothing more."""
        return self.function is causal_mask_function

    @property
    def window(self) -> int | None:
        """The number of tokens that a query sees back, itself included, if that is the rule and nothing more."""
        parts = _conjuncts(self.function)
        windows = [part for part in parts if _made_like(part, sliding_window_overlay(1))]
        if len(parts) != 2 or len(windows) != 1 or causal_mask_function not in parts:
            return None
        return inspect.getclosurevars(windows[0]).nonlocals["sliding_window"]

    def spans(self, layout: PackedLayout, device: torch.device) -> list[MaskedSpan]:
        """Return the row in blocks of queries with the keys that they attend to; computed once for all layers."""
        if self._segments != layout.segments:  # FSDP copies layouts for each layer
            self._segments, self._spans = layout.segments, {}
        if device not in self._spans:
            self._spans[device] = self._evaluate(layout, device)
        return self._spans[device]

    def _evaluate(self, layout: PackedLayout, device: torch.device) -> list[MaskedSpan]:
        window = self.window
        if window is not None and window >= layout.longest:
            return plain_spans(layout, device)
        positions = torch.as_tensor(layout.positions(held=True), device=device)
        if causal_mask_function not in _conjuncts(self.function):
            self._check_paths(layout, positions)
        masks: dict[tuple[int, int], torch.Tensor] = {}
        spans = []
        for span in layout.spans:
            for start in range(span.start, span.stop, QUERIES):
                stop = min(start + QUERIES, span.stop)
                if window is None:
                    block = self._block(span, start, stop, positions)
                    spans.append(block._replace(keys=_from_held(block.keys, layout)))
                    continue
                # Windows of equal shapes are equal, and where they begin is known.
                last = span.before + stop - span.start
                keys = _cut(span.keys, max(0, last - (stop - start) - window + 1), last)
                shape = stop - start, sum(b - a for a, b in keys)
                if shape not in masks:
                    masks[shape] = self.allowed(
                        torch.arange(start, stop, device=device), _rows(keys, device), positions
                    )
                spans.append(MaskedSpan(start, stop, _from_held(keys, layout), masks[shape]))
        return spans

    def _block(self, span: Span, start: int, stop: int, positions: torch.Tensor) -> MaskedSpan:
        """Return queries `start` to `stop` of a span with the keys from the first to the last that they attend to."""
        queries = torch.arange(start, stop, device=positions.device)
        mask = self.allowed(queries, _rows(span.keys, positions.device), positions)
        attended = mask.any(0).nonzero().flatten().tolist()
        first, last = attended[0], attended[-1] + 1
        keys, mask = _cut(span.keys, first, last), mask[:, first:last].contiguous()
        square = keys == [(start, stop)] and torch.equal(mask, torch.ones_like(mask).tril())
        return MaskedSpan(start, stop, keys, None if square else mask)

    def _check_paths(self, layout: PackedLayout, positions: torch.Tensor) -> None:
        """Refuse a rule that lets a token attend to one that only some of its conversations have."""
        below: list[list[tuple[int, int]]] = [[] for _ in layout.segments]
        for segment in layout.segments:
            parent = segment.parent
            while parent >= 0:
                below[parent].append((segment.start, segment.stop))
                parent = layout.segments[parent].parent
        for segment, ranges in zip(layout.segments, below, strict=True):
            if not ranges:
                continue
            keys = _rows(ranges, positions.device)
            for start in range(segment.start, segment.stop, QUERIES):
                queries = torch.arange(start, min(start + QUERIES, segment.stop), device=positions.device)
                if bool(self.allowed(queries, keys, positions).any()):
                    raise ConfigError(
                        "batching: shared cannot divide a prefix whose tokens attend to tokens after it, as under "
                        f"this model's mask (images or a prompt seen both ways): {REFERENCE}."
                    )

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return which keys the queries attend to, boolean [Q, K], given as positions [Q] and [K] in the row.

        `positions` are those on the paths: of the row's T tokens, then of those held. Whether a key is on a query's
        path is not looked at.
        """
        query_rows, key_rows = queries[None, None, :, None], keys[None, None, None, :]
        query, key = positions[query_rows], positions[key_rows]
        first = query_rows.new_zeros(1, 1, 1, 1)  # of the batch, and of the heads, for which there is one mask
        rows = _RowsOf([(query, query_rows), (key, key_rows), (first, first)], held=len(positions) > self.length)
        with rows:
            allowed = self.function(first, first, query, key)
        self.reads_rows |= rows.read
        return allowed.expand(1, 1, len(queries), len(keys))[0, 0]


# What a mask function may compute, by the names of torch's functions without underscores.
POINTWISE = frozenset(
    (
        *("le", "lt", "ge", "gt", "eq", "ne"),
        *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "floordiv", "floor_divide", "mod", "remainder"),
        *("abs", "neg", "clamp", "minimum", "maximum", "where"),
        *("and", "rand", "or", "ror", "xor", "invert", "bitwise_and", "bitwise_or", "bitwise_not"),
        *("logical_and", "logical_or", "logical_not"),
        *("to", "bool", "new_ones", "new_zeros", "get"),
    )
)


class _RowsOf(TorchFunctionMode):
    """Reads tensors at the rows of indices that are positions; refuses any function that is not pointwise.

    A row says nothing of tokens that are `held`: with them, no index of a query or key may be read at.
    """

    def __init__(self, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], *, held: bool):
        super().__init__()
        self.rows, self.held = rows, held
        self.read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        if name == "getitem":
            tensor, index = args
            return func(tensor, tuple(map(self._row, index if isinstance(index, tuple) else (index,))))
        if name not in POINTWISE:
            raise ConfigError(f"batching: shared cannot evaluate {name} in the mask of this model: {REFERENCE}.")
        return func(*args, **(kwargs or {}))

    def _row(self, index: Any) -> Any:
        """Return the index into a tensor of the row; a computed one would be neither a position nor a row."""
        if not isinstance(index, torch.Tensor):
            return index
        for position, row in self.rows:
            if index is position:
                self.read |= row is not position  # the batch's and the head's index is its own row
                if self.read and self.held:
                    raise ConfigError("batching: shared cannot read this model's mask at tokens of earlier rows.")
                return row
        raise ConfigError(f"batching: shared cannot evaluate a computed index in the mask of this model: {REFERENCE}.")


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in ranges])


def _cut(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the elements `first` to `last` of ranges one after another, as ranges."""
    cut, before = [], 0
    for start, stop in ranges:
        low, high = max(start, start + first - before), min(stop, start + last - before)
        if low < high:
            cut.append((low, high))
        before += stop - start
    return cut


# The library composes masks of closures; what they are made of is recognised by their code. One that is not
# recognised is evaluated in full: slower, and no less exact.


def _nested(function: Any) -> Iterator[Any]:
    """Yield a mask function and those that it is composed of."""
    yield function
    if inspect.isfunction(function):
        for value in inspect.getclosurevars(function).nonlocals.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if callable(part):
                    yield from _nested(part)


def _conjuncts(function: Any) -> list[Any]:
    """Return the mask functions that must all hold."""
    if not _made_like(function, and_masks(causal_mask_function)):
        return [function]
    parts = inspect.getclosurevars(function).nonlocals["mask_functions"]
    return [conjunct for part in parts for conjunct in _conjuncts(part)]


def _made_like(function: Any, example: Any) -> bool:
    return getattr(function, "__code__", None) is example.__code__
