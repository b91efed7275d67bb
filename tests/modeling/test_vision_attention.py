"""Vision towers under the project's attention have the features and gradients of the library's own, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen
from transformers import Glm46VConfig, Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig

from tests.modeling.test_masks import bottom_right
from vlmrm.batching.media import DistinctMedia, Grid
from vlmrm.errors import ConfigError
from vlmrm.modeling import RewardModel, kernels, reward_model_class, vision
from vlmrm.modeling.vision import Segments, by_segments

SCORES, GRADIENTS = 1e-10, 1e-8
FLOAT32_SOFTMAX = 1e-5  # of the library's eager attention, whatever the type of its inputs
CPU = torch.device("cpu")
# Windows of 112 pixels are 8 patches: 10 and 6 do not divide by them. Two images are equal, and one has two frames.
GRIDS: list[Grid] = [(1, 10, 6), (1, 16, 16), (1, 10, 6), (1, 4, 18), (2, 6, 12)]
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64, "pad_token_id": 0}
TEXT = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None}
TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 1, "vision_end_token_id": 2}
VISION = {"depth": 3, "num_heads": 2}
QWEN3 = {"intermediate_size": 48, "num_position_embeddings": 36, "deepstack_visual_indexes": [1]}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLConfig, {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (Qwen2_5_VLConfig, {"window_size": 112, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (Qwen3VLConfig, QWEN3),
    "glm46v": (Glm46VConfig, {"image_size": 84}),
}


@cache
def model_of(name: str) -> RewardModel:
    make, vision = FAMILIES[name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    torch.manual_seed(0)
    config = make(text_config=TEXT, vision_config={**VISION, **sizes, **vision}, **TOKENS)
    model: Any = reward_model_class(config)(config).double()
    for weight in model.parameters():  # so large that attention is not flat
        nn.init.normal_(weight, std=0.3)
    return model.train()


def images_of(model: RewardModel, grids: Sequence[Grid] = (), kind: str = "image") -> DistinctMedia:
    grids = grids or [grid for grid in GRIDS if grid[0] == 1 or kind == "video" or model.family.videos_as_images]
    counts = [int(np.prod(grid)) for grid in grids]
    vision: Any = model.config.vision_config
    generator = torch.Generator().manual_seed(1)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(sum(counts), width, generator=generator, dtype=torch.float64)
    name = f"pixel_values{'_videos' if kind == 'video' else ''}"
    return {
        "tensors": {name: pixels, f"{kind}_grid_thw": torch.tensor(grids)},
        "rows": {name: counts, f"{kind}_grid_thw": [1] * len(grids)},
        "tokens": [count // vision.spatial_merge_size**2 for count in counts],
        "order": list(range(len(grids))),
        "grids": list(grids),
    }


Result = tuple[torch.Tensor, list[torch.Tensor]]


def own(model: RewardModel, attention: str, kind: str = "image") -> Result:
    """Return the library's features, without keywords, and their gradients by the tower's weights."""
    tower: Any = model.vision_modules()[0]
    before, tower.config._attn_implementation = tower.config._attn_implementation, attention
    media = images_of(model, kind=kind)
    try:
        output = getattr(model.model, f"get_{kind}_features")(*media["tensors"].values(), return_dict=True)
        features = torch.cat([torch.cat(layer) for layer in layers_of(output)])
        return features.detach(), gradients(features, tower)
    finally:
        tower.config._attn_implementation = before


def layers_of(output: Any) -> list[Sequence[torch.Tensor]]:
    return [output.pooler_output, *(output.get("deepstack_features") or ())]


def ours(model: RewardModel, kind: str = "image") -> Result:
    """Return the features that the reward model reads, in the order of `own`, and their gradients."""
    images = model.run_tower(kind, images_of(model, kind=kind))
    features = torch.cat([torch.cat(layer) for layer in zip(*(image.layers for image in images), strict=True)])
    return features.detach(), gradients(features, model.vision_modules()[0])


def gradients(features: torch.Tensor, tower: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(linear(features), list(tower.parameters())))


def linear(features: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(-1, 1, features.numel(), dtype=features.dtype).view_as(features) * features).sum()


def error(result: Result, expected: Result) -> tuple[float, float]:
    """Return the largest relative errors of features and of gradients."""
    pairs = [(result[0], expected[0])], list(zip(result[1], expected[1], strict=True))
    scores, slopes = ([((a - b).abs().max() / b.abs().max()).item() for a, b in part if b.any()] for part in pairs)
    return max(scores), max(slopes)


def stub(query, key, value, cu_queries, cu_keys, max_queries, max_keys, *, window_size, **options):
    assert window_size == (-1, -1) and cu_queries is cu_keys and max_queries == max_keys == cu_queries.diff().max()
    return bottom_right(query, key, value, cu_queries, cu_keys, window_size=window_size, **options)


def through_varlen(query, key, value, segments, scaling, dropout):
    states = [s[0].transpose(0, 1) for s in (query, key, value)]
    cumulative, longest = segments.cumulative(CPU), segments.longest
    return kernels.attend_varlen(
        kernels.TORCH, *states, cumulative, cumulative, longest, longest, scaling=scaling, causal=False
    )[None]


@pytest.fixture(params=["padded", "by length", "varlen"])
def backend(request, monkeypatch) -> str:
    if request.param == "by length":
        monkeypatch.setattr(vision, "SHORT", 0)
    if request.param == "padded":
        monkeypatch.setattr(vision, "SHORT", 10**6)
    if request.param == "varlen":
        monkeypatch.setattr(kernels, "varlen_attn", stub)
        monkeypatch.setattr(vision, "per_length", through_varlen)
    return request.param


@cache
def expected_of(name: str, attention: str, kind: str = "image") -> Result:
    return own(model_of(name), attention, kind)


@pytest.mark.parametrize("name", FAMILIES)
def test_features_and_gradients_are_the_librarys(name, backend):
    model = model_of(name)
    scores, slopes = error(ours(model), expected_of(name, "sdpa"))
    assert scores <= SCORES and slopes <= GRADIENTS
    assert max(error(ours(model), expected_of(name, "eager"))) <= FLOAT32_SOFTMAX


@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm46v"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_videos_and_checkpointing(name, reentrant):
    model = model_of(name)
    expected = expected_of(name, "sdpa", "video")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # as the trainer does
        for weight in model.parameters():
            weight.grad = None
    try:
        images = model.run_tower("video", images_of(model, kind="video"))
        features = torch.cat([torch.cat(layer) for layer in zip(*(image.layers for image in images), strict=True)])
        linear(features).backward()  # torch.autograd.grad does not go through a reentrant checkpoint
    finally:
        model.gradient_checkpointing_disable()
    tower = model.vision_modules()[0]
    slopes = [torch.zeros_like(w) if w.grad is None else w.grad for w in tower.parameters()]
    for weight in model.parameters():
        weight.grad = None
    errors = error((features.detach(), slopes), expected)
    assert errors[0] <= SCORES and errors[1] <= GRADIENTS


def test_nothing_that_changes_attention_is_dropped():
    states = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    lengths = Segments([3, 4]).cumulative(CPU)
    module, known = nn.Identity(), {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    for keywords in ({"softcap": 1.0}, {"sliding_window": 2}, {"is_causal": True}, {"cu_seq_lens_k": lengths.clone()}):
        with pytest.raises(ConfigError, match=next(iter(keywords)).replace("cu_seq_lens_k", "other lengths of keys")):
            by_segments(module, *states, None, **{**known, **keywords})


def test_a_hopper_gpu_takes_flash_for_the_tower(monkeypatch):
    chosen = []

    def choose(query, key, value, cu_queries, cu_keys, longest, *_, window_size, **__):
        chosen.append(varlen._select_backend(query, key, value, cu_queries, cu_queries, longest, list(window_size)))
        return query

    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: True)
    monkeypatch.setattr(varlen, "_cudnn_version_and_major_capability", lambda index: (92600, 9))
    monkeypatch.setattr(kernels, "varlen_attn", choose)
    with FakeTensorMode():
        states = [torch.empty(256, 16, 80, device="cuda", dtype=torch.bfloat16)] * 3
        lengths = torch.empty(5, device="cuda", dtype=torch.int32)
        kernels.attend_varlen(kernels.TORCH, *states, lengths, lengths, 64, 64, scaling=None, causal=False)

    assert chosen == [varlen._FLASH_ATTENTION_BACKEND]
