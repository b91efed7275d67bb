"""State layers over packed rows: gated delta rules, Mamba-2 and short convolutions.

A state layer reads its sequence in order: a convolution looks a few tokens back, a recurrence carries a state. Over a
packed row (`vlmrm.batching.shared`) the sequence is a tree: a segment starts from the last inputs of its path and from
its parent's final state, and gradients flow back through both. Segments of equal depth are one batch, so a tree of
three levels takes three calls, of the library's own function, with whatever kernel it has.

The layers call functions of their own modules in transformers. `fork_states` replaces them there by ones that see the
keyword `layout`; without it they do what they did.
"""

from __future__ import annotations

import dis
import inspect
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import pad, softplus
from transformers import PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmrm.batching.shared import Keep, PackedLayout, PackedSegment, on_device
from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on

# Padding that a segment may have beside longer ones of its depth, in tokens; or as much as its own length.
MAX_PADDING = 256
SMALLEST_CHUNK = 16

Made = TypeVar("Made")
Function = Callable[..., Any]


# The tree of a row.


@dataclass(frozen=True)
class Level:
    """Segments of one depth in one call: `count`, each padded to `length` tokens.

    `parents` are their parents' places among the segments of the depth before; None where they start from nothing.
    """

    depth: int
    count: int
    length: int
    parents: torch.Tensor | None


@dataclass(frozen=True)
class StateTree:
    """Order a packed row of T tokens by its levels, as they are computed: M tokens with their padding.

    `taken` [M] are the row's tokens in that order, `padding` [M] marks padding (None: there is none), and `put_back`
    [T] is the index of each of the row's tokens in `taken`. Both orders are None where they are the row's own.
    `places` are the indices of segments among those of their depth: held ones first, then level by level.
    """

    levels: Sequence[Level]
    taken: torch.Tensor | None
    padding: torch.Tensor | None
    put_back: torch.Tensor | None
    places: dict[int, int]

    @classmethod
    def of(cls, layout: PackedLayout, device: torch.device) -> StateTree:
        """Return the tree of a layout."""
        segments = layout.segments
        levels: list[Level] = []
        taken, padding = [], []
        put_back = torch.empty(len(layout), dtype=torch.long)
        places: dict[int, int] = {}  # of segments among those of their depth
        used = 0
        for depth in range(1 + max(segment.depth for segment in segments)):
            numbers = [i for i, segment in enumerate(segments) if segment.depth == depth]
            groups = _by_length([i for i in numbers if not segments[i].held], segments)
            in_order = [*(i for i in numbers if segments[i].held), *(i for group in groups for i in group)]
            places |= {i: index for index, i in enumerate(in_order)}
            for group in groups:
                length = max(len(segments[i]) for i in group)
                indices = [places[segments[i].parent] for i in group] if depth else []
                parents = on_device(torch.tensor(indices), device) if depth else None
                levels.append(Level(depth, len(group), length, parents))
                for i in group:
                    start, stop = segments[i].start, segments[i].stop
                    put_back[start:stop] = torch.arange(used, used + stop - start)
                    # Padding repeats a token of the segment: unlike a constant, it is finite through any layer.
                    taken.append(torch.arange(start, start + length).clamp(max=stop - 1))
                    padding.append(torch.arange(start, start + length) >= stop)
                    used += length
        order, padded = torch.cat(taken), torch.cat(padding)
        if torch.equal(order, put_back):
            return cls(levels, None, None, None, places)
        mask = on_device(padded, device) if padded.any() else None
        return cls(levels, on_device(order, device), mask, on_device(put_back, device), places)

    def split(self, values: torch.Tensor, *, neutral: bool = False) -> list[torch.Tensor]:
        """Return values[1, T, ...] by level, [count, length, ...]; `neutral` puts zeros into padding."""
        row = values[0] if self.taken is None else values[0].index_select(0, self.taken)
        if neutral and self.padding is not None:
            row = row.masked_fill(self.padding.view(-1, *[1] * (row.dim() - 1)), 0)
        # Split, not sliced: the backward of each slice would add a whole row of zeros.
        pieces = row.split([level.count * level.length for level in self.levels])
        shapes = [(level.count, level.length) for level in self.levels]
        return [piece.unflatten(0, shape) for shape, piece in zip(shapes, pieces, strict=True)]

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of all levels as a row [1, T, ...]."""
        row = torch.cat([value.flatten(0, 1) for value in values])
        return (row if self.put_back is None else row.index_select(0, self.put_back)).unsqueeze(0)

    def scan(
        self,
        layout: PackedLayout,
        step: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        values: Sequence[torch.Tensor],
        rates: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Run a recurrence over the row, [1, T, ...].

        It reads `values` and `rates` [1, T, ...]; a token with rates of zero leaves the state as it is.
        `step(level, states, *values, *rates)` computes a level from the states before its segments (None: from
        nothing) and returns outputs and final states. Held segments of the layout have had theirs.
        """
        inputs = [*map(self.split, values), *(self.split(rate, neutral=True) for rate in rates)]
        outputs: list[torch.Tensor] = []
        finals: list[list[torch.Tensor]] = [[] for _ in range(1 + self.levels[-1].depth)]
        finals[0] += [state for [state] in layout.take()]
        for level, *pieces in zip(self.levels, *inputs, strict=True):
            states = None
            if level.parents is not None:
                above = finals[level.depth - 1]
                states = (above[0] if len(above) == 1 else torch.cat(above)).index_select(0, level.parents)
            output, final = step(level, states, *pieces)
            outputs.append(output)
            finals[level.depth].append(final)

        def final_state(keep: Keep) -> tuple[torch.Tensor]:
            places = torch.tensor([self.places[keep.segment]], device=outputs[0].device)
            return (torch.cat(finals[layout.segments[keep.segment].depth]).index_select(0, places),)

        layout.put(final_state)
        return self.join(outputs)


def _by_length(numbers: Sequence[int], segments: Sequence[PackedSegment]) -> list[list[int]]:
    """Return the segments of one depth in groups of one call each: one group, unless padding would be costly."""
    groups: list[list[int]] = []
    for i in sorted(numbers, key=lambda i: -len(segments[i])):
        longest = len(segments[groups[-1][0]]) if groups else 0
        if not groups or longest > len(segments[i]) + max(len(segments[i]), MAX_PADDING):
            groups.append([])
        groups[-1].append(i)
    return groups


@dataclass(frozen=True)
class Windows:
    """The starts of segments that do not follow their parent in the row, with the tokens before them on their path.

    `taken` [S * 2W] are W tokens before each of the S starts and the first W of the segment; where there is no such
    token, `missing` [S * 2W] is true. `kept` [K] are the places in [S, W] that belong to a segment, and `put` [K]
    their tokens in the row. The last W tokens of each held segment are taken from behind the row.
    """

    width: int
    taken: torch.Tensor
    missing: torch.Tensor
    kept: torch.Tensor
    put: torch.Tensor

    @classmethod
    def of(cls, layout: PackedLayout, device: torch.device, width: int) -> Windows | None:
        """Return the windows of W = `width` tokens; None where every segment follows its parent."""
        taken: list[int] = []
        behind: dict[int, int] = {}
        for number, segment in enumerate((s for s in layout.segments if s.held), 1):
            last = len(layout) + number * width - 1
            behind |= {segment.stop - 1 - i: last - i for i in range(min(width, len(segment)))}
        for segment in (segment for segment in layout.segments if not segment.held):
            before = _path(layout.segments, segment.parent, width)
            if before != list(range(max(0, segment.start - width), segment.start)):
                own = list(range(segment.start, min(segment.stop, segment.start + width)))
                before = [behind.get(token, token) for token in before]
                taken += [-1] * (width - len(before)) + before + own + [-1] * (width - len(own))
        if not taken:
            return None
        indices = torch.tensor(taken)
        firsts = indices.view(-1, 2, width)[:, 1].flatten()
        kept = (firsts >= 0).nonzero()[:, 0]
        tensors = (indices.clamp(min=0), indices < 0, kept, firsts[kept])
        return cls(width, *(on_device(tensor, device) for tensor in tensors))


def _path(segments: Sequence[PackedSegment], index: int, width: int) -> list[int]:
    """Return the last tokens of the path that ends with segment `index`, `width` or as many as there are."""
    tokens: list[int] = []
    while index >= 0 and len(tokens) < width:
        start, stop = segments[index].start, segments[index].stop
        tokens = [*range(max(start, stop - width + len(tokens)), stop), *tokens]
        index = segments[index].parent
    return tokens


def _last_tokens(layout: PackedLayout, device: torch.device, segment: int, width: int) -> torch.Tensor:
    return on_device(torch.tensor(_path(layout.segments, segment, width)), device)


_MADE: WeakKeyDictionary[PackedLayout, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()


def _once(make: Callable[..., Made], layout: PackedLayout, *args: Any) -> Made:
    """Return `make(layout, *args)`, computed once for all layers."""
    made = _MADE.setdefault(layout, {})
    if (make, *args) not in made:
        made[make, *args] = make(layout, *args)
    return made[make, *args]


# The functions of state layers, over the tree.


def tree_convolution(
    plain: Function,
    layout: PackedLayout,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **keywords: Any,
) -> torch.Tensor:
    """Convolve hidden_states[1, C, T] along each path with the taps weight[C, W + 1].

    One call for the row, and one for the starts of segments that follow another token than the one before them.
    """
    output = plain(hidden_states, weight, bias, activation=activation, **keywords)
    device, width = hidden_states.device, weight.shape[-1] - 1

    def last_inputs(keep: Keep) -> tuple[torch.Tensor]:
        inputs = hidden_states.index_select(2, _once(_last_tokens, layout, device, keep.segment, width))
        return (pad(inputs, (width - inputs.shape[2], 0)),)

    layout.put(last_inputs)
    held = [inputs for [inputs] in layout.take()]
    row = torch.cat([hidden_states, *held], dim=2) if held else hidden_states
    windows = _once(Windows.of, layout, device, width)
    if windows is None:
        return output
    tokens = row[0].index_select(1, windows.taken).masked_fill(windows.missing, 0)
    around = tokens.unflatten(1, (-1, 2 * windows.width)).transpose(0, 1).contiguous()
    starts = plain(around, weight, bias, activation=activation, **keywords)[..., windows.width :]
    starts = starts.transpose(0, 1).flatten(1).index_select(1, windows.kept)
    return output.index_copy(2, windows.put, starts.unsqueeze(0))


def tree_delta_rule(
    plain: Function,
    layout: PackedLayout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Apply a gated delta rule along each path: query and key[1, T, H, K], value[1, T, V, D] → [1, T, V, D].

    `g` are the logarithms of the decays, [1, T, V] or one a channel, and `beta` [1, T, V] the rates of writing.
    """

    def step(level: Level, states: torch.Tensor | None, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, g, beta = inputs
        size = {} if query.is_cuda else {"chunk_size": _chunk(level, 64)}  # kernels choose their own
        return plain(
            query, key, value, g=g, beta=beta, initial_state=states, output_final_state=True, **size, **keywords
        )

    return _once(StateTree.of, layout, query.device).scan(layout, step, (query, key, value), (g, beta)), None


def tree_mamba(
    plain: Function,
    layout: PackedLayout,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    chunk_size: int,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **keywords: Any,
) -> torch.Tensor:
    """Scan hidden_states[1, T, H, P] along each path as Mamba-2 does, with steps dt[1, T, H] → [1, T, H, P]."""
    # Computed here: a lower limit would let padding, whose step is zero, decay the state.
    steps = dt.float()
    if dt_bias is not None:
        steps = steps + dt_bias
    steps = (softplus(steps) if dt_softplus else steps).clamp(*dt_limit)

    def step(level: Level, states: torch.Tensor | None, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, B, C, dt = inputs
        size = chunk_size if dt.is_cuda else _chunk(level, chunk_size)
        return plain(
            hidden_states, dt, A, B, C, chunk_size=size, initial_states=states, return_final_states=True, **keywords
        )

    return _once(StateTree.of, layout, dt.device).scan(layout, step, (hidden_states, B, C), (steps,))


def no_fused_scan(plain: Function, layout: PackedLayout, *args: Any, **keywords: Any) -> None:
    """Return None, as the library does where it has no kernel for the whole layer: its parts are computed apart."""


def _chunk(level: Level, most: int) -> int:
    """Return the tokens of a chunk: a power of two, and no more than a level of short segments needs."""
    return min(most, max(SMALLEST_CHUNK, 1 << (level.length - 1).bit_length()))


TREES: dict[str, Function] = {
    "causal_conv1d_fn": tree_convolution,
    "torch_chunk_gated_delta_rule": tree_delta_rule,
    "chunk_kimi_delta_attention": tree_delta_rule,
    "mamba2_chunk_scan": tree_mamba,
    "mamba2_split_conv1d_scan_combined": no_fused_scan,
}
SCANS = frozenset(TREES) - {"causal_conv1d_fn"}
# What our calls pass to each; a wrapper of transformers drops keywords that its function does not know.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "causal_conv1d_fn": ("activation",),
    "torch_chunk_gated_delta_rule": ("g", "beta", "initial_state", "output_final_state", "chunk_size"),
    "chunk_kimi_delta_attention": ("g", "beta", "initial_state", "output_final_state", "chunk_size"),
    "mamba2_chunk_scan": ("chunk_size", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"),
    "mamba2_split_conv1d_scan_combined": (),
}
# Keywords of caches and of rows packed in other ways.
REFUSED = frozenset(
    {"initial_state", "initial_states", "output_final_state", "return_final_states", "cu_seqlens", "seq_idx", "z"}
)


# Preparing a model.


def fork_states(model: PreTrainedModel) -> list[str]:
    """Let the language model's state layers compute packed rows as trees; return the names of their classes.

    Call it before the first forward; calling it again does nothing. Padded batches are computed as before.
    """
    if unknown := unknown_state_layers(model):
        raise ConfigError(
            f"batching: shared does not know the state layers {', '.join(unknown)}: write batching: reference."
        )
    decoder = model.get_decoder()
    classes = {type(module) for module in decoder.modules() if is_state_layer(type(module))}
    for layer_class in classes:
        namespace = inspect.unwrap(layer_class.forward).__globals__
        for name in _names(layer_class) & TREES.keys():
            if not isinstance(namespace[name], Forked):
                relies_on(getattr(namespace[name], "forward", namespace[name]), *PARAMETERS[name])
                namespace[name] = Forked(name, namespace[name])
    if classes and not hasattr(decoder, "forks_states"):
        decoder.forks_states = True
        decoder.register_forward_pre_hook(_enter, with_kwargs=True)
        decoder.register_forward_hook(_leave, always_call=True)
    return sorted(layer_class.__name__ for layer_class in classes)


def unknown_state_layers(model: PreTrainedModel) -> list[str]:
    """Return the sorted names of the language model's state layers that `fork_states` does not know."""
    decoder = model.get_decoder()
    classes = {type(module) for module in decoder.modules()}
    unknown = {c.__name__ for c in classes if any(map(STATE.search, _names(c))) and not is_state_layer(c)}
    # A second look: a layer may keep its state under names of its own.
    kinds, layers = getattr(decoder.config, "layer_types", None) or (), getattr(decoder, "layers", ())
    for kind, layer in zip(kinds, layers, strict=False):
        if kind in STATE_LAYER_TYPES and not any(is_state_layer(type(module)) for module in layer.modules()):
            unknown.add(f"{type(layer).__name__} ({kind})")
    return sorted(unknown)


# Names by which a layer reads or writes a state, such as `update_conv_state`.
STATE = re.compile(r"(conv|recurrent|ssm)_states?$")
# Such layers take a mask of padding in place of one of attention.
STATE_LAYER_TYPES = frozenset(
    kind
    for kind, mask in LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.items()
    if create_recurrent_attention_mask in (mask.values() if isinstance(mask, dict) else (mask,))
)

PLAIN = (*nn.Module.__mro__, GradientCheckpointingLayer)


def _names(layer_class: type[nn.Module]) -> set[str]:
    """Return the functions, methods and attributes that a layer's methods name, without the library's decorators."""
    written = {name: value for c in reversed(layer_class.__mro__) for name, value in vars(c).items() if c not in PLAIN}
    methods = filter(inspect.isfunction, map(inspect.unwrap, written.values()))
    return {name for method in methods for name in method.__code__.co_names}


def is_state_layer(layer_class: type[nn.Module]) -> bool:
    """Return whether a layer keeps all of its state in functions that are replaced, and hands its keywords to them."""
    names = _names(layer_class)
    return (
        bool(names & TREES.keys())
        and ("causal_conv1d_fn" in names or "update_conv_state" not in names)
        and (bool(names & SCANS) or "update_recurrent_state" not in names)
        and any(
            step.opname == "CALL_FUNCTION_EX" for step in dis.get_instructions(inspect.unwrap(layer_class.forward))
        )
    )


class Forked:
    """A state layer's function that computes a packed row as a tree, where it has the keyword `layout`."""

    def __init__(self, name: str, plain: Function):
        self.name, self.plain = name, plain

    def __call__(self, *args: Any, layout: PackedLayout | None = None, **keywords: Any) -> Any:
        if layout is None:
            if getattr(_ROW, "is_packed", False):
                raise ConfigError(
                    f"batching: shared cannot reach {self.name} of {self.plain.__module__}, whose layer does not hand "
                    "the layout on: write batching: reference."
                )
            return self.plain(*args, **keywords)
        refused = [
            name for name in REFUSED & keywords.keys() if keywords[name] is not None and keywords[name] is not False
        ]
        if refused:
            raise ConfigError(
                f"batching: shared does not compute {', '.join(sorted(refused))} of {self.name}: write batching: "
                "reference."
            )
        keywords = {name: value for name, value in keywords.items() if name not in REFUSED}
        return TREES[self.name](self.plain, layout, *args, **keywords)


# Whether this thread's language model is computing a packed row. Only to refuse a layer that was not told: layouts
# themselves come as keywords, which checkpointing keeps for its recomputation.
_ROW = threading.local()


def _enter(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _ROW.is_packed = kwargs.get("layout") is not None


def _leave(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _ROW.is_packed = False
