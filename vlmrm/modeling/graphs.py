"""Replay the language model's forward of short packed rows as CUDA graphs: the host launches one, not each kernel.

A graph computes with the tensors that it was recorded with. So rows are padded to sizes that many share, and copied
into tensors of that size. Towers, embeddings and heads stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch.nn.functional import pad

from vlmrm.batching.shared import Gathered, Keep, Kept, PackedLayout, Span
from vlmrm.errors import ConfigError
from vlmrm.modeling.kernels import along, log_once

TOKENS = 4096  # of the longest row that is replayed, and held before it: longer ones take longer than their launches
GRAPHS = 16  # the one replayed longest ago goes first
HOST = torch.device("cpu")
RECORDING = Lock()  # CUDA records one graph at a time
SIDES = {"inputs_embeds": (0, 0, 0), "position_ids": (0,), "attention_mask": (0,)}  # that stay, where rows are padded


class Graphs:
    """Stand for the forward of a language model: record rows of a new size, and replay later ones.

    Of a model on CUDA, by one thread and stream at a time. What no graph computes, the model does; the log says what.
    """

    def __init__(self, language_model: Any):
        self.model, before = language_model, language_model.forward
        self.forward: Callable[..., Any] = before.forward if isinstance(before, Graphs) else before
        self.clear()
        self._device = self.weights[0].device
        self._stream = torch.cuda.Stream(self._device)
        language_model.forward = self

    def clear(self) -> None:
        """Drop the graphs and their memory."""
        self.rows: dict[Any, StaticRow] = {}  # the latest replayed last
        self.weights = [*self.model.parameters()]
        self._addresses: list[int] = []
        self._pool = torch.cuda.graph_pool_handle()  # of all, as they run in turn; without graphs it is of no more use

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        layout: Any = inputs.get("layout")
        given = {name for name, value in inputs.items() if not isinstance(value, bool | int | float | str | None)}
        trained = torch.is_grad_enabled() or self.model.training or torch.is_autocast_enabled()
        odd, mask = given ^ {*SIDES, "layout"}, inputs.get("attention_mask")
        if args or odd or trained or not isinstance(mask, torch.Tensor) or mask.device != self._device:
            log_once(f"cuda_graphs: none for gradients, on another device, or of {sorted(odd) or 'other masks'}")
            return self.forward(*args, **inputs)
        if max(len(layout), layout.before) > TOKENS:
            return self.forward(**inputs)
        key = size, *_ = size_of(layout), *sorted(item for item in inputs.items() if item[0] not in given)
        with torch.inference_mode():
            if (addresses := [weight.data_ptr() for weight in self.weights]) != self._addresses:
                self.clear()  # a graph reads the memory where the weights were
                self._addresses = addresses
            row = self.rows.pop(key, None) or StaticRow(size, inputs)
            row.fill(inputs, layout)
            try:
                row.replay = row.replay or self._record(lambda: row.run(self.forward))
            except torch.OutOfMemoryError:
                log_once("cuda_graphs: no memory is left for more")
                self.clear()
                return self.forward(**inputs)
            self.rows[key] = row
            if len(self.rows) > GRAPHS:
                del self.rows[next(iter(self.rows))]
            row.replay()
            return row.output(layout)

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches what `run` launches, in the same memory; raise ConfigError if none can."""
        log_once(f"cuda_graphs: one for each size of rows of up to {TOKENS} tokens")
        graph, others = torch.cuda.CUDAGraph(), "thread_local"  # other threads may allocate meanwhile
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with RECORDING, torch.cuda.stream(self._stream):
                run()  # what first calls load and allocate cannot be recorded
                run()
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=others):
                    run()
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError) as error:
            why = error if isinstance(error, RuntimeError) else "it reads rows on the host, as in float32"
            name = type(self.model).__name__
            raise ConfigError(f"cuda_graphs cannot record {name}: {why}; leave it out, or use bfloat16.") from error
        return graph.replay


def size_of(layout: PackedLayout) -> tuple[int, ...]:
    """Return the tokens, keys, sequences, ends and held tokens of a row, padded, and whether prefixes are kept."""
    tokens, row = len(layout), layout.gathered(HOST)
    step = max(64, _power(tokens) // 16)
    padded = -(-tokens // step) * step
    keys, sequences = _power(len(row.keys) + padded - tokens, 256), _power(len(row.cu_queries), 8)
    held = _power(layout.before, 64) if layout.held else 0
    return padded, keys, sequences, _power(len(layout.last_tokens), 8), held, bool(layout.keep)


def _power(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


class StaticRow:
    """The inputs of all rows of a size, in tensors that stay where they are."""

    replay: Callable[[], None] | None = None

    def __init__(self, size: tuple[int, ...], inputs: dict[str, Any]):
        tokens, keys, sequences, ends, held, keeps = size
        segments: Any = None  # what reads a row on the host fails
        self.layout = PackedLayout(segments, [Span(0, tokens, [(-held, tokens)])], ())
        self.inputs: dict[str, Any] = {**inputs, **_padded(inputs, tokens), "layout": self.layout}
        new = inputs["position_ids"].new_zeros
        lengths = new(2, sequences + 1, dtype=torch.int32)
        self.spread = self.layout._gathered = Gathered(new(keys), *lengths, tokens, held + tokens)
        self.ends = self.layout._ends = new(ends)
        self.held = [
            tuple(pad(states, (0, 0, 0, held - states.shape[2])) for states in layer)
            for kept in inputs["layout"].held[:1]
            for layer in kept.layers
        ]
        self.kept = Kept(tokens)
        self.layout.held = [Kept(held, self.held)] if held else []
        self.layout.keep = {"": Keep(0, [(0, tokens)], self.kept)} if keeps else {}

    def fill(self, inputs: dict[str, Any], layout: PackedLayout) -> None:
        """Copy a row in. The padding is a sequence of its own, which no other sees; those left over are empty."""
        for name, tensor in _padded(inputs, len(self.layout)).items():
            self.inputs[name].copy_(tensor)
        row, padding = layout.gathered(HOST), torch.arange(len(layout), len(self.layout))
        held = self.layout.longest - len(self.layout)
        moved = row.keys + (row.keys >= layout.before) * (held - layout.before)  # behind all that are held
        _fill(self.spread.keys, torch.cat([moved, padding + held]))
        _fill(self.spread.cu_queries, torch.cat([row.cu_queries, row.cu_queries[-1:] + len(padding)]))
        _fill(self.spread.cu_keys, torch.cat([row.cu_keys, row.cu_keys[-1:] + len(padding)]))
        _fill(self.ends, layout.ends(HOST))
        for i, layer in enumerate(self.held):
            for static, *states in zip(layer, *(kept.layers[i] for kept in layout.held), strict=True):
                torch.cat(states, dim=2, out=static[:, :, : layout.before])

    def run(self, forward: Callable[..., Any]) -> None:
        """Compute what was copied in."""
        self.layout._calls = 0
        self.kept.layers.clear()
        output = forward(**self.inputs)
        self.kind, self.hidden = type(output), output.last_hidden_state

    def output(self, layout: PackedLayout) -> Any:
        """Return a copy of the row's output, and keep its prefixes as `layout` asks."""
        for layer in self.kept.layers:
            layout.put(lambda keep, own=layer: tuple(along(states, keep.ranges, copy=True) for states in own))
        return self.kind(last_hidden_state=self.hidden[:, : len(layout)].clone())


def _padded(inputs: dict[str, Any], tokens: int) -> dict[str, torch.Tensor]:
    missing = tokens - len(inputs["layout"])
    return {it: pad(inputs[it], (*sides, missing), value=it == "attention_mask") for it, sides in SIDES.items()}


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values from the host without waiting for what is queued, and repeat the last."""
    tensor.copy_(torch.cat([values, values[-1:].expand(len(tensor) - len(values))]), non_blocking=True)
