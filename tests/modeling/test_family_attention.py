"""The families' own forwards under shared attention: language models with windows, chunks, image blocks, sinks and
soft caps give the scores and gradients of the padded batch, in float64.

Features of images are given; towers and processors are tested with the families.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import (
    ChameleonConfig,
    CLIPVisionConfig,
    Cohere2VisionConfig,
    Exaone4_5_Config,
    Gemma2Config,
    Gemma3Config,
    Gemma4Config,
    GptOssConfig,
    Llama4Config,
    LlavaConfig,
    MiniMaxM3VLConfig,
    PaliGemmaConfig,
    PreTrainedConfig,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from vlmrm.batching.shared import PackedLayout
from vlmrm.batching.tree import grow
from vlmrm.errors import ConfigError
from vlmrm.modeling import families, kernels
from vlmrm.modeling.attention import SHARED_PREFIX, attention_of, not_shared, use_attention
from vlmrm.modeling.masks import MaskRule
from vlmrm.modeling.reward_model import reward_model_class

IMAGE = 299
TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
WINDOWED = TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {name: value for name, value in WINDOWED.items() if name != "rope_parameters"}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}


def llava(text: PreTrainedConfig) -> LlavaConfig:
    return LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**VISION), image_token_index=IMAGE)


def gemma3() -> Gemma3Config:
    text = GEMMA | {"query_pre_attn_scalar": 16}
    return Gemma3Config(text_config=text, vision_config=VISION, image_token_id=IMAGE)


def gemma4() -> Gemma4Config:
    text = GEMMA | {
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0},
        **{"global_head_dim": 32, "use_bidirectional_attention": "vision"},
    }
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 16}
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE)


def llama4() -> Llama4Config:
    text = TEXT | {
        **{"intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2},
        **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
        **{"no_rope_layers": [1, 0], "floor_scale": 7},
    }
    vision = VISION | {"vision_output_dim": 64, "intermediate_size": 128, "projector_output_dim": 32}
    return Llama4Config(text_config=text, vision_config=vision, image_token_index=IMAGE)


def cohere2_vision() -> Cohere2VisionConfig:
    vision = VISION | {"model_type": "siglip_vision_model"}
    return Cohere2VisionConfig(
        text_config=WINDOWED | {"model_type": "cohere2"}, vision_config=vision, image_token_id=IMAGE
    )


def exaone4_5() -> Exaone4_5_Config:
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    return Exaone4_5_Config(
        text_config=WINDOWED | {"model_type": "exaone4"}, vision_config=vision, image_token_id=IMAGE
    )


def sinks() -> LlavaConfig:
    return llava(GptOssConfig(**WINDOWED, num_local_experts=2, num_experts_per_tok=1))


def soft_caps() -> LlavaConfig:
    return llava(Gemma2Config(**WINDOWED, attn_logit_softcapping=0.5, query_pre_attn_scalar=16))


class Case(NamedTuple):
    config: Callable[[], PreTrainedConfig]
    # The features of images [I, tokens, H] in the form that the backbone takes.
    features: Callable[[torch.Tensor], Any] = tuple
    reference: str = "sdpa"


CASES = {
    "gemma3": Case(gemma3, lambda features: features),
    "gemma4": Case(gemma4),
    "llama4": Case(llama4, lambda features: features),
    "cohere2_vision": Case(cohere2_vision, lambda features: features),
    "exaone4_5": Case(exaone4_5),
    "sinks": Case(sinks, reference="eager"),
    "soft caps": Case(soft_caps, reference="eager"),
}


def built(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = reward_model_class(config)(config)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 or name.endswith("sinks"):
            nn.init.normal_(weight, std=0.1)
    model.set_experts_implementation("eager")
    return model.double().eval()


@contextmanager
def rounding_nowhere():
    """The models round to float32 in places whatever their type: here not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def words(count: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 250, (count,), generator=torch.Generator().manual_seed(seed))


PICTURE = torch.full((5,), IMAGE)


class Batch:
    """Conversations as a padded batch and as a packed row. Their first images are one image, their second another."""

    def __init__(self, sequences: list[torch.Tensor]):
        self.sequences = sequences
        tree = grow([self._identities(sequence).numpy() for sequence in sequences])
        self.layout = PackedLayout.of(tree)
        self.row = torch.cat([sequences[s.sequence][s.begin : s.end] for s in tree.segments])[None]
        self.ends = torch.tensor([self.layout.segments[end].stop - 1 for end in tree.ends])
        images = max(map(self._images, sequences))
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(images, 5, 64, generator=generator, dtype=torch.float64).requires_grad_()

    def _images(self, sequence: torch.Tensor) -> int:
        return int((sequence == IMAGE).sum()) // 5

    def _identities(self, sequence: torch.Tensor) -> torch.Tensor:
        numbers = torch.tensor([-1, -2]).repeat_interleave(5)
        return sequence.clone().index_put((sequence == IMAGE,), numbers[: 5 * self._images(sequence)])

    def padded(self) -> tuple[dict[str, Any], list[int]]:
        ids = nn.utils.rnn.pad_sequence(self.sequences, batch_first=True)
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        shown = [image for sequence in self.sequences for image in range(self._images(sequence))]
        return {"input_ids": ids, "attention_mask": mask}, shown

    def shared(self) -> tuple[dict[str, Any], list[int]]:
        return {
            "input_ids": self.row,
            "attention_mask": torch.ones_like(self.row),
            "position_ids": torch.as_tensor(self.layout.positions())[None],
            "branch_ends": self.ends,
            "layout": self.layout,
        }, list(range(len(self.features)))


def two_images() -> Batch:
    """Three answers about two images, and another question about the first."""
    first = torch.cat([words(7, 1), PICTURE, words(3, 2)])
    second = torch.cat([first, words(2, 3), PICTURE, words(4, 4)])
    return Batch([*(torch.cat([second, words(n, n)]) for n in (4, 9, 3)), torch.cat([first, words(6, 6)])])


def scored(
    model, attention: str, batch: Batch, features, inputs, shown, kinds=lambda ids: ids == IMAGE
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores, and the gradients of parameters and features. `kinds` are the processor's types of tokens."""
    model.set_attn_implementation({"text_config": attention})
    model.zero_grad()
    batch.features.grad = None
    images = features(batch.features[shown])
    output = BaseModelOutputWithPooling(last_hidden_state=images, pooler_output=images)
    types = dict.fromkeys(model.type_names, kinds(inputs["input_ids"]).long())
    with rounding_nowhere():
        scores = model(**inputs, **types, mm_encoder_outputs={"image": output}).logits[:, 0]
        (scores.square().sum() - nn.functional.logsigmoid(scores[:-1] - scores[1:]).sum()).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return scores.detach(), gradients | {"features": batch.features.grad.clone()}


def assert_equal(shared, reference) -> None:
    (shared_scores, shared_gradients), (scores, gradients) = shared, reference
    assert (shared_scores - scores).abs().max() <= 1e-10
    assert scores.max() - scores.min() > 1e-2
    assert gradients.keys() == shared_gradients.keys()
    for weight, gradient in gradients.items():
        distance = (shared_gradients[weight] - gradient).norm() / gradient.norm().clamp_min(1e-6)
        assert distance <= 1e-8, f"{weight}: {distance}"


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_are_those_of_the_padded_batch(name, monkeypatch):
    case, batch = CASES[name], two_images()
    model = built(case.config())
    reference, gradients = scored(model, case.reference, batch, case.features, *batch.padded())
    computed = []
    attend = kernels.attend

    def counted(query, key, value, layout, rule, **keywords):
        computed.append((query.shape[2], rule, keywords["softcap"], keywords["sinks"]))
        return attend(query, key, value, layout, rule, **keywords)

    monkeypatch.setattr("vlmrm.modeling.attention.attend", counted)
    scores, shared_gradients = scored(model, SHARED_PREFIX, batch, case.features, *batch.shared())
    assert [tokens for tokens, *_ in computed] == [batch.row.shape[1]] * 2
    assert batch.row.shape[1] < sum(map(len, batch.sequences)) * 0.6
    assert any(isinstance(rule, MaskRule) for _, rule, _, _ in computed)
    assert (computed[0][2] is not None) == (name == "soft caps") and (computed[0][3] is not None) == (name == "sinks")
    assert_equal((scores, shared_gradients), (reference, gradients))

    def causal(query, key, value, layout, rule, **keywords):
        return attend(query, key, value, layout, None, **keywords | {"softcap": None, "sinks": None})

    monkeypatch.setattr("vlmrm.modeling.attention.attend", causal)
    control, _ = scored(model, SHARED_PREFIX, batch, case.features, *batch.shared())
    assert (control - reference).abs().max() > 1e-4, "the family's mask changes scores"


def test_a_prefix_that_sees_both_ways_is_shared_whole_or_not_at_all(monkeypatch):
    """PaliGemma's, were it told which words are a prefix, as no chat template tells: here those with ids below 250."""
    monkeypatch.setattr(families, "REFUSED", {})
    vision = VISION | {"model_type": "siglip_vision_model", "projection_dim": 64}
    text = TEXT | {"model_type": "gemma"}
    model = built(PaliGemmaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, projection_dim=64))
    question = torch.cat([PICTURE, words(5, 1)])
    answers = [250 + words(n, n) % 49 for n in (3, 6)]
    kinds = {"features": lambda features: features, "kinds": lambda ids: (ids >= 250) & (ids != IMAGE)}
    batch = Batch([torch.cat([question, answer]) for answer in answers])
    padded, shown = batch.padded()
    padded["position_ids"] = torch.arange(padded["input_ids"].shape[1])[None]  # its own begin at 1
    reference = scored(model, "sdpa", batch, inputs=padded, shown=shown, **kinds)
    row, shown = batch.shared()
    assert row["input_ids"].shape[1] < sum(map(len, batch.sequences))
    assert_equal(scored(model, SHARED_PREFIX, batch, inputs=row, shown=shown, **kinds), reference)
    batch = Batch([torch.cat([PICTURE, words(5, n), answers[0]]) for n in range(2)])
    row, shown = batch.shared()
    with pytest.raises(ConfigError, match="cannot divide a prefix whose tokens attend to tokens after it"):
        scored(model, SHARED_PREFIX, batch, inputs=row, shown=shown, **kinds)


def test_attention_is_set_where_one_configuration_is_for_all():
    tower = {"base_channels": 32, "channel_multiplier": [1]}
    config = ChameleonConfig(**TEXT | {"head_dim": None}, vq_config=tower, vocabulary_map={"<image>": IMAGE})
    model = built(config)
    use_attention(model, SHARED_PREFIX)
    assert attention_of(model) == model.model.layers[0].self_attn.config._attn_implementation == SHARED_PREFIX


def test_a_model_that_does_not_take_attention_from_the_library_is_refused(monkeypatch):
    model = built(llava(Gemma2Config(**WINDOWED)))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda self: False)
    monkeypatch.setattr(type(model.model.language_model), "_can_set_attn_implementation", lambda self: False)
    with pytest.raises(ConfigError, match="computes attention in its own way, not by shared_prefix"):
        use_attention(model, SHARED_PREFIX)


def test_a_layer_that_indexes_its_keys_is_found_in_a_family_that_is_not_declared(monkeypatch):
    """As MiniMax M3 would be, of which some checkpoints have such layers, and others have none."""
    monkeypatch.delitem(families.BY_MODEL_TYPE, "minimax_m3_vl")
    text = TEXT | {"dense_intermediate_size": 96, "shared_intermediate_size": 32, "rotary_dim": 8}
    sparse = text | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}
    reasons = [
        not_shared(built(MiniMaxM3VLConfig(text_config=layers, vision_config={"hidden_size": 32, "depth": 1})))
        for layers in (text, sparse)
    ]
    assert reasons == [None, families.BY_INDEX]
