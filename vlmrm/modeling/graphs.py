"""Replay the language model's forward of short packed rows as CUDA graphs: the host launches one, not each kernel.

A graph computes with the tensors that it was recorded with. So rows are padded to sizes that many share, and copied
into tensors of that size. Towers, embeddings and heads stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vlmrm.batching.shared import Gathered, Keep, Kept, PackedLayout
from vlmrm.errors import ConfigError
from vlmrm.modeling.attention import SHARED, attention_of
from vlmrm.modeling.kernels import along, log_once
from vlmrm.modeling.reward_model import RewardModel

TOKENS = 4096  # of the longest row that is replayed: the kernels of a longer one take longer than their launches
GRAPHS = 32  # the one replayed longest ago goes first
HOST = torch.device("cpu")
DIMENSIONS = {"inputs_embeds": 1, "position_ids": -1, "attention_mask": -1}  # of the tokens in the tensors of a row
Size = tuple[int, int, int, int, int, bool]  # tokens, keys, sequences, ends, held tokens; whether prefixes are kept


def replay_graphs(model: RewardModel) -> Graphs:
    """Let a model on CUDA replay its language model in scoring. Call it once, after `batcher_for`.

    Raises ConfigError where it cannot; what only a forward shows is raised by the first.
    """
    if model.device.type != "cuda":
        raise ConfigError(f"cuda_graphs: the model is on {model.device.type}: choose a CUDA device, or leave it out.")
    if attention_of(model) not in SHARED.values() or model.language_model is model.model or model.family.language_head:
        raise ConfigError(f"cuda_graphs: {model.family.name} has no packed rows here to replay: leave it out.")
    return Graphs(model.language_model)


class Graphs:
    """Stand for the forward of a language model: record rows of a new size, and replay later ones.

    One thread and stream at a time. What no graph can compute, the model computes; the log says once what.
    """

    def __init__(self, language_model: Any):
        self.model, self.forward = language_model, language_model.forward
        self.weights = [*language_model.parameters()]
        self.clear()
        language_model.forward = self

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self.rows: dict[Any, StaticRow] = {}  # the latest replayed last
        self._pool: Any = None  # one that has lost all of its graphs takes no more
        self._addresses: list[int] = []

    def __call__(self, **inputs: Any) -> Any:
        if odd := self._not_replayed(inputs):
            log_once("cuda_graphs", "no graph", f"rows with {odd}")
            return self.forward(**inputs)
        layout: PackedLayout = inputs.pop("layout")
        key = size, *_ = size_of(layout), *sorted(item for item in inputs.items() if item[0] not in DIMENSIONS)
        with torch.inference_mode():
            if (addresses := [weight.data_ptr() for weight in self.weights]) != self._addresses:
                self.clear()  # a graph reads the memory where the weights were
                self._addresses = addresses
            row = self.rows.pop(key, None) or StaticRow(size, inputs, layout)
            row.fill(inputs, layout)
            if row.replay is None:
                row.replay = self._record(lambda: row.run(self.forward))
            self.rows[key] = row
            if len(self.rows) > GRAPHS:
                del self.rows[next(iter(self.rows))]
            row.replay()
            return row.output(layout)

    def _not_replayed(self, inputs: dict[str, Any]) -> str | None:
        """Return what there is in these inputs that a graph cannot compute."""
        layout, device = inputs.get("layout"), self.weights[0].device.type
        if torch.is_grad_enabled() or self.model.training or torch.is_autocast_enabled(device):
            return "gradients, in training, or under autocast"
        if not isinstance(layout, PackedLayout) or len(layout) > TOKENS:
            return f"padding, or over {TOKENS} tokens"
        given = {name for name, value in inputs.items() if not isinstance(value, bool | int | float | str | None)}
        if given != {*DIMENSIONS, "layout"} or getattr(inputs["attention_mask"], "ndim", 0) != 2:
            return f"other inputs than the usual: {', '.join(sorted(given))}"
        return None

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches again what `run` launches, with the same memory."""
        device = self.weights[0].device
        if self._pool is None:
            log_once("cuda_graphs", "a graph each", f"sizes of rows of up to {TOKENS} tokens")
            # One for all: they run in turn, and what is between their layers may be at the same place.
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        graph, others = torch.cuda.CUDAGraph(), "thread_local"  # other threads may allocate meanwhile
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                run()  # what first calls load and allocate cannot be recorded
                run()
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=others):
                    run()
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"cuda_graphs: {type(self.model).__name__} cannot be recorded ({error}), as if it reads a row on the "
                "host: half precision without soft caps, sinks, states and experts does not. Leave it out."
            ) from error
        return graph.replay


def size_of(layout: PackedLayout) -> Size:
    """Return what a row is padded to: powers of two, tokens to multiples of 64 or of a sixteenth of their power."""
    tokens, row = len(layout), layout.gathered(HOST)
    step = max(64, _power(tokens) // 16)
    padded = -(-tokens // step) * step
    keys = _power(len(row.keys) + padded - tokens, 256)
    held = _power(layout.before, 64) if layout.held else 0
    return padded, keys, _power(len(row.cu_queries), 8), _power(len(layout.last_tokens), 8), held, bool(layout.keep)


def _power(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


class StaticRow(PackedLayout):
    """The inputs and the layout of all rows of a size, in tensors that stay where they are; no segments and spans."""

    replay: Callable[[], None] | None = None

    def __init__(self, size: Size, inputs: dict[str, Any], layout: PackedLayout):
        tokens, keys, sequences, ends, held, keeps = size
        nothing: Any = None  # for what would read a row on the host
        super().__init__(nothing, nothing, ())
        for of in layout.held[:1]:
            self.held = [Kept(held, [tuple(_static(states, held, 2) for states in layer) for layer in of.layers])]
        self.keep = {"": Keep(0, [(0, tokens)], Kept(tokens))} if keeps else {}
        new = inputs["position_ids"].new_zeros
        lengths = new(2, sequences + 1, dtype=torch.int32)
        self._ends, self.spread = new(ends), Gathered(new(keys), *lengths, tokens, held + tokens)
        self._gathered = self.spread
        static = {name: _static(inputs[name], tokens, dimension) for name, dimension in DIMENSIONS.items()}
        static["attention_mask"].fill_(1)
        self.inputs: dict[str, Any] = {**inputs, **static, "layout": self}

    def __len__(self) -> int:
        return self.spread.max_queries

    @property
    def longest(self) -> int:
        return self.spread.max_keys

    @property
    def before(self) -> int:
        return self.longest - len(self)

    def fill(self, inputs: dict[str, Any], layout: PackedLayout) -> None:
        """Copy a row in. The padding is a sequence of its own, which no other sees; those left over are empty."""
        for name in ("inputs_embeds", "position_ids"):
            own, padding = self.inputs[name].tensor_split([len(layout)], DIMENSIONS[name])
            own.copy_(inputs[name])
            padding.zero_()
        row, padding = layout.gathered(HOST), torch.arange(len(layout), len(self))
        moved = row.keys + (row.keys >= layout.before) * (self.before - layout.before)  # behind all held
        _fill(self.spread.keys, torch.cat([moved, padding + self.before]))
        _fill(self.spread.cu_queries, torch.cat([row.cu_queries, row.cu_queries[-1:] + len(padding)]))
        _fill(self.spread.cu_keys, torch.cat([row.cu_keys, row.cu_keys[-1:] + len(padding)]))
        _fill(self.ends(self.spread.keys.device), layout.ends(HOST))
        for i, layer in enumerate(self.held[0].layers if self.held else ()):
            for held, *states in zip(layer, *(kept.layers[i] for kept in layout.held), strict=True):
                torch.cat(states, dim=2, out=held[:, :, : layout.before])

    def run(self, forward: Callable[..., Any]) -> None:
        """Compute what was copied in."""
        self._calls = 0
        for keep in self.keep.values():
            keep.kept.layers.clear()
        self._output = forward(**self.inputs)

    def output(self, layout: PackedLayout) -> Any:
        """Return a copy of the row's output, and keep its prefixes as `layout` asks."""
        for layer in (layer for keep in self.keep.values() for layer in keep.kept.layers):
            layout.put(lambda keep, own=layer: tuple(along(states, keep.ranges, copy=True) for states in own))
        return type(self._output)(last_hidden_state=self._output.last_hidden_state[:, : len(layout)].clone())


def _static(tensor: torch.Tensor, size: int, dimension: int) -> torch.Tensor:
    return tensor.new_zeros(*tensor.shape[:dimension], size, *tensor.shape[dimension:][1:])


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values from the host without waiting for what is queued, and repeat the last."""
    tensor.copy_(torch.cat([values, values[-1:].expand(len(tensor) - len(values))]), non_blocking=True)
