"""Replayed rows: the scores of eager ones, for every layout of a size. Kernels are recorded as CUDA records them."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.families.cases import CASES
from tests.families.table import FAMILIES
from tests.modeling.test_masks import bottom_right
from tests.scoring.test_caches import open_scorer
from vlmrm.batching.shared import PackedLayout, PackedSegment, Span
from vlmrm.errors import ConfigError
from vlmrm.modeling import batcher_for, kernels
from vlmrm.modeling.graphs import Graphs, replay_graphs
from vlmrm.modeling.tiny import make_tiny_reward_model
from vlmrm.rendering import Renderer

aten = torch.ops.aten
LENGTHS = "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, float scale, SymInt[] sides"
torch.library.define("vlmrm_test::varlen", f"({LENGTHS}) -> Tensor")


@torch.library.impl("vlmrm_test::varlen", "CPU")
def kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale, sides):
    assert cu_q.diff().max() <= max_q and cu_k.diff().max() <= max_k
    return bottom_right(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=sides, enable_gqa=True)


class Recorded(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph` and the context of its capture: replays operators, not Python, on their memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # CUDA refuses to wait for a number; `mask_rule` asks on a CPU alone whether all is attended.
        if func is aten._local_scalar_dense.default and args[0].dtype != torch.bool or func is aten.nonzero.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self):
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(*map(torch.utils._pytree.tree_leaves, (output, again)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch) -> list[Recorded]:
    """The graphs that are recorded; attention takes the way of half precision on CUDA."""
    made: list[Recorded] = []
    standing = dict.fromkeys(("graph_pool_handle", "Stream", "current_stream"), lambda *args: Mock())
    standing |= {
        "CUDAGraph": Recorded,
        "stream": nullcontext,
        "graph": lambda graph, *args, **kwargs: made.append(graph) or graph,
    }
    for name, value in standing.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(kernels, "kernel_for", lambda *args: "varlen")

    def varlen_attn(*args, scale, window_size, enable_gqa):
        return torch.ops.vlmrm_test.varlen(*args, scale, window_size)

    monkeypatch.setattr(kernels, "varlen_attn", varlen_attn)
    return made


def prepared(model_type: str, cases: list[str]):
    family = next(it for it in FAMILIES if it.model_type == model_type)
    processor = family.make_processor()
    model = family.make_model(processor).eval()
    batcher, renderer = batcher_for(model, processor, "shared"), Renderer(processor)
    return model, [batcher([renderer.render(it) for it in CASES[name]]) for name in cases]


def padded(batch, tokens: int, ends: int):
    """The batch with a sequence of padding at its end, and its last end once more."""
    layout, count = batch["layout"], len(batch["layout"])
    rows = {name: pad(batch[name], (0, tokens - count)) for name in ("input_ids", "position_ids", "mm_token_type_ids")}
    segments = [*layout.segments, PackedSegment(count, tokens, -1, 0, 1)]
    last = [*layout.last_tokens, *layout.last_tokens[-1:] * (ends - len(layout.last_tokens))]
    whole = PackedLayout(segments, [*layout.spans, Span(count, tokens, [(count, tokens)])], last)
    return batch | rows | {"attention_mask": torch.ones(1, tokens, dtype=torch.long), "layout": whole}


@torch.inference_mode()
def test_rows_of_a_size_replay_one_graph(graphs):
    model, batches = prepared("qwen2_5_vl", [name for name in CASES if name != "images in answers"])
    plain = [model(**batch).logits for batch in batches]
    as_padded = [model(**padded(batch, 64, 8)).logits for batch in batches]
    replaying = Graphs(model.language_model)
    replayed = [model(**batch).logits for batch in batches]
    assert len(graphs) == 1 and all(map(torch.equal, replayed, as_padded))
    torch.testing.assert_close(replayed, plain, rtol=0, atol=1e-5)

    layer = model.language_model.layers[0].mlp.up_proj.weight
    layer.data = -layer  # elsewhere, and other values
    assert not torch.equal(model(**batches[0]).logits, replayed[0]) and len(graphs) == 2 and len(replaying.rows) == 1


def test_prompts_are_kept_and_held_by_graphs(graphs, tmp_path):
    scorer = open_scorer(make_tiny_reward_model(tmp_path, arch="qwen2_5_vl"))
    expected = [scorer.score([it]) for case in CASES.values() for it in case]
    scorer.clear_caches()
    rows = Graphs(scorer.model.language_model).rows
    for _ in range(2):  # prompts are computed, or known
        scores = [scorer.score([it]) for case in CASES.values() for it in case]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert {(held > 0, keeps) for (*_, held, keeps), *_ in rows} == {(False, True), (True, False)}
    assert len(graphs) == len(rows) < len(scores)


@torch.inference_mode()
def test_what_graphs_cannot_compute_is_refused_or_computed_without(graphs, monkeypatch):
    model, [words, images] = prepared("qwen3_vl", ["text", "image"])  # features of images between the layers
    plain = model(**images).logits
    replaying = Graphs(model.language_model)
    assert torch.equal(model(**images).logits, plain) and not replaying.rows
    assert model(**words).logits.isfinite().all() and len(replaying.rows) == 1
    with pytest.raises(ConfigError, match="the model is on cpu"):
        replay_graphs(model)

    model, [batch] = prepared("qwen3_5", ["text"])
    Graphs(model.language_model)
    with pytest.raises(
        ConfigError, match="cuda_graphs: Qwen3_5TextModel cannot be recorded"
    ):  # its layers have states
        model(**batch)
