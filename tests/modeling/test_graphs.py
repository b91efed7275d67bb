"""Replayed rows: the scores of eager ones, for every layout of a size."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.batching.test_shared import CASES
from tests.modeling.test_compiled import prepared
from tests.modeling.test_masks import bottom_right
from tests.scoring.test_caches import open_scorer
from vlmrm.batching.shared import PackedLayout, PackedSegment, Span
from vlmrm.errors import ConfigError
from vlmrm.modeling import kernels
from vlmrm.modeling.graphs import Graphs
from vlmrm.modeling.tiny import make_tiny_reward_model

LENGTHS = "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k, float scale, int[] sides"
torch.library.define("vlmrm_test::varlen", f"({LENGTHS}) -> Tensor")  # one operator, as it is one kernel


@torch.library.impl("vlmrm_test::varlen", "CPU")
def varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, sides):
    assert cu_q.diff().max() <= max_q and cu_k.diff().max() <= max_k
    return bottom_right(q, k, v, cu_q, cu_k, scale=scale, window_size=sides)


class Recorded(TorchDispatchMode):
    """Stands for a CUDA graph and its capture: replays what operators did, and no Python, in the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # CUDA waits for no number then. Whether a mask is all ones is a question on a CPU alone, in `mask_rule`.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self):
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch) -> list[Recorded]:
    """The graphs that are recorded, with attention as for half precision on CUDA."""
    made: list[Recorded] = []
    cuda = dict.fromkeys(("graph_pool_handle", "Stream", "current_stream"), lambda *args: Mock())
    cuda |= {"CUDAGraph": Recorded, "stream": nullcontext, "graph": lambda it, *args, **kwargs: made.append(it) or it}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(kernels, "kernel_for", lambda *args: "varlen")
    call = torch.ops.vlmrm_test.varlen
    monkeypatch.setattr(kernels, "varlen_attn", lambda *args, scale, window_size, **_: call(*args, scale, window_size))
    return made


def padded(batch, tokens: int, ends: int):
    """The batch with a sequence of padding at its end, and with more ends."""
    layout, count = batch["layout"], len(batch["layout"])
    rows = {name: pad(batch[name], (0, tokens - count)) for name in ("input_ids", "position_ids", "mm_token_type_ids")}
    last = [*layout.last_tokens, *layout.last_tokens[-1:] * (ends - len(layout.last_tokens))]
    spans = [*layout.spans, Span(count, tokens, [(count, tokens)])]
    whole = PackedLayout([*layout.segments, PackedSegment(count, tokens, -1, 0, 1)], spans, last)
    return batch | rows | {"attention_mask": torch.ones(1, tokens, dtype=torch.long), "layout": whole}


@torch.inference_mode()
def test_rows_of_a_size_replay_one_graph(graphs, monkeypatch):
    model, batches = prepared("qwen2_5_vl", torch.float32)
    plain, whole = ([model(**it).logits for it in rows] for rows in (batches, [padded(it, 64, 8) for it in batches]))
    Graphs(model.eval().language_model)
    replayed = [model(**batch).logits for batch in batches]
    assert len(graphs) == 1 and all(map(torch.equal, replayed, whole))
    torch.testing.assert_close(replayed, plain, rtol=0, atol=1e-5)

    weight = model.language_model.layers[0].mlp.up_proj.weight
    weight.data = -weight  # elsewhere, and another
    assert not torch.equal(model(**batches[0]).logits, replayed[0]) and len(graphs) == 2

    monkeypatch.setattr(kernels, "kernel_for", lambda *args: "sdpa")  # as in float32, by spans that are on the host
    Graphs(model.language_model)
    with pytest.raises(ConfigError, match="it reads rows on the host"):
        model(**batches[0])


def test_prompts_are_kept_and_held_by_graphs(graphs, tmp_path):
    scorer = open_scorer(folder := make_tiny_reward_model(tmp_path, arch="qwen2_5_vl"))
    with pytest.raises(ConfigError, match="cuda_graphs needs a model on CUDA"):
        open_scorer(folder, cuda_graphs=True)
    conversations = [it for case in CASES.values() for it in case[:2]]
    expected = [scorer.score([it]) for it in conversations]
    scorer.clear_caches()
    replaying = Graphs(scorer.model.language_model)
    torch.testing.assert_close([scorer.score([it]) for it in conversations], expected, rtol=0, atol=1e-5)
    scorer.clear_caches()
    again = [*scorer.score(conversations[:1]), *scorer.score([conversations[0], conversations[2]])]  # held beside kept
    torch.testing.assert_close(again, [*expected[0], *expected[0], *expected[2]], rtol=0, atol=1e-5)
    kinds = {(held > 0, keeps) for (*_, held, keeps), *_ in replaying.rows}
    assert kinds == {(False, True), (True, False), (True, True)}


@torch.inference_mode()
def test_what_no_graph_computes_is_computed_or_refused(graphs):
    model, [batch, *_] = prepared("qwen3_vl", torch.float32)  # features of images between the layers
    plain = model(**batch).logits
    Graphs(model.eval().language_model)
    assert torch.equal(model(**batch).logits, plain) and not graphs
    model, [batch, *_] = prepared("qwen3_5", torch.float32)  # layers with states
    Graphs(model.eval().language_model)
    with pytest.raises(ConfigError, match="cuda_graphs cannot record Qwen3_5TextModel"):
        model(**batch)
