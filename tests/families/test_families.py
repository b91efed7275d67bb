"""Every image-text family: a shared batch has the scores and gradients of the family's own forward, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmrm.batching import SharedBatcher
from vlmrm.batching.media import blank_image
from vlmrm.conversation import Conversation
from vlmrm.errors import ConfigError
from vlmrm.modeling import load_for_training
from vlmrm.modeling.attention import SHARED_PREFIX, batcher_for
from vlmrm.modeling.sight import prove_sight
from vlmrm.rendering import Rendered, Renderer

from .__main__ import PAGE, page
from .cases import CASES, WITH_GRADIENTS
from .reference import gradients, own_scores, processed, rounding_nowhere, to_float64
from .table import FAMILIES
from .tiny import Tiny

SCORES, GRADIENTS = 1e-10, 1e-8
OF_TOKENS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"}
SCORED = [family for family in FAMILIES if family.refused is None]
BY_NAME = {family.model_type: family for family in FAMILIES}


@cache
def processor_of(family: Tiny) -> Any:
    return family.make_processor()


def cases_of(family: Tiny) -> dict[str, Sequence[Conversation]]:
    without = {*family.lacks, *(["video"] if family.video is None else [])}
    return {name: conversations for name, conversations in CASES.items() if name not in without}


@contextmanager
def naming(errors: list[Exception], case: str) -> Iterator[None]:
    """Collect the error of a case, so that the others run too."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {case!r}")
        errors.append(error)


def rendered_of(family: Tiny, case: str) -> list[Rendered]:
    renderer, cache = Renderer(processor_of(family)), {}
    return [renderer.render(conversation, cache) for conversation in CASES[case]]


def named(families: Sequence[Tiny]) -> Any:
    def missing(family: Tiny) -> pytest.MarkDecorator:
        lacks = family.needs is not None and find_spec(family.needs) is None
        return pytest.mark.skipif(lacks, reason=f"transformers makes its model with {family.needs}")

    return pytest.mark.parametrize(
        "family", [pytest.param(family, id=family.model_type, marks=missing(family)) for family in families]
    )


def test_every_image_text_family_of_transformers_is_listed():
    library = {config.model_type for config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    assert library <= {family.model_type for family in FAMILIES}


@named(SCORED)
def test_rendered_tokens_and_pixels_match_the_processor(family):
    errors: list[Exception] = []
    for name, conversations in cases_of(family).items():
        with naming(errors, name):
            rendered = rendered_of(family, name)
            for conversation, item in ((conversations[i], rendered[i]) for i in (0, -1)):
                own = processed(family, processor_of(family), conversation)
                assert item.input_ids == own["input_ids"][0].tolist()
                if name == "image":  # several may be padded to one size, and are compared by their scores
                    assert item.media[0].tensors.keys() == own.keys() - OF_TOKENS
                    for tensor_name, tensor in item.media[0].tensors.items():
                        assert torch.equal(tensor, torch.as_tensor(own[tensor_name]).reshape(tensor.shape))
    if errors:
        raise ExceptionGroup(family.model_type, errors)


@named(SCORED)
def test_scores_and_gradients_match_the_family_forward(family, monkeypatch):
    processor, errors = processor_of(family), []
    model = family.make_model(processor)
    expected = {}
    for name, conversations in cases_of(family).items():
        with naming(errors, name):
            scores = own_scores(family, model, processor, conversations)
            assert scores.max() - scores.min() > 1e-5  # else there would be nothing to compare
            expected[name] = scores.detach(), gradients(model, scores) if name in WITH_GRADIENTS else {}
    assert model.family.tested
    batcher = batcher_for(model, processor, "shared")
    assert isinstance(batcher, SharedBatcher) == (family.padded is None)
    calls = counting(monkeypatch)
    for name, (scores, own_gradients) in expected.items():
        with naming(errors, name):
            rendered = rendered_of(family, name)
            inputs = to_float64(batcher(rendered))
            calls.clear()
            checkpoint(model, bool(own_gradients))
            with rounding_nowhere():
                ours = model(**inputs).logits[:, 0]
            if family.padded is None:  # it really was shared
                assert inputs["input_ids"].numel() < sum(map(len, rendered))
                assert calls
            assert (ours - scores).abs().max() <= SCORES, f"{(ours - scores).abs().max():.1e}"
            if own_gradients:
                assert_equal_gradients(gradients(model, ours), own_gradients)
    if errors:
        raise ExceptionGroup(family.model_type, errors)


@named(SCORED)
def test_a_downloaded_checkpoint_loads_whole_and_proves_itself(family, tmp_path):
    """In the library's own layout; transformers maps the names of some families' weights."""
    processor = processor_of(family)
    own = family.make_model(processor).float()
    downloaded = AutoModelForImageTextToText.from_config(family.make_config(processor), dtype=torch.float32)
    getattr(downloaded, "model", downloaded).load_state_dict(own.model.state_dict(), strict=False)
    downloaded.save_pretrained(tmp_path)
    model = load_for_training(tmp_path, dtype=torch.float32)
    weights = dict(own.model.named_parameters())
    for name, weight in model.model.named_parameters():
        assert torch.equal(weight, weights[name]), name
    prove_sight(model, processor, name=family.model_type, batching="shared")
    assert model.padded_because is None
    if family.padded is None:
        assert_features_depend_on_vision_alone(model, processor)


def assert_features_depend_on_vision_alone(model: Any, processor: Any) -> None:
    """What is frozen and cached as the vision tower and the merger is all that features depend on.

    But for weights of the backbone itself, such as the embedding of a new line.
    """
    features = model.run_tower("image", blank_image(processor, model.placeholders))
    torch.stack([layer.sum() for image in features for layer in image.layers]).sum().backward()
    known = {weight for module in model.vision_modules() for weight in module.parameters()}
    used = {name for name, weight in model.model.named_parameters() if weight.grad is not None and weight not in known}
    assert not [name for name in used if "." in name]


def counting(monkeypatch) -> list[str]:
    """Return the list to which each call of shared attention adds the name of its module."""
    calls: list[str] = []
    attention = ALL_ATTENTION_FUNCTIONS[SHARED_PREFIX]

    def counted(module, *args, **kwargs):
        calls.append(type(module).__name__)
        return attention(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED_PREFIX, counted)
    return calls


def checkpoint(model: Any, enable: bool) -> None:
    """Compute layers anew in the backward pass, as training does; without dropout."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = enable


def assert_equal_gradients(ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    """Compare each weight's gradient; none at all is one of zeros, as of the last layer's experts for images."""
    for name in ours.keys() | own.keys():
        difference = ours.get(name, 0) - own.get(name, 0)
        distance = difference.norm() / own.get(name, difference).norm().clamp_min(1e-3)
        assert distance <= GRADIENTS, f"{name}: {distance:.1e}"


@named([family for family in FAMILIES if family.model_type in ("gemma3", "hunyuan_vl", "qwen3_5")])
def test_padded_batch_scores_do_not_depend_on_neighbours(family):
    """HunYuan's own positions count the images of the whole batch."""
    processor = processor_of(family)
    model = family.make_model(processor)
    batcher = batcher_for(model, processor, "reference")
    rendered = rendered_of(family, "irrelevant branches")
    with rounding_nowhere(), torch.no_grad():
        alone = [model(**to_float64(batcher([item]))).logits[0, 0] for item in rendered]
        together = model(**to_float64(batcher(rendered))).logits[:, 0]
    assert (together - torch.stack(alone)).abs().max() <= SCORES


@named([family for family in FAMILIES if family.model_type in ("glm4v", "molmo2")])
def test_batches_mixing_images_and_videos_are_refused(family):
    processor = processor_of(family)
    model = family.make_model(processor)
    rendered = [*rendered_of(family, "image"), *rendered_of(family, "video")]
    for batching in ("shared", "reference"):
        inputs = to_float64(batcher_for(model, processor, batching)(rendered))
        with pytest.raises(ConfigError, match="does not take images and videos in one batch"):
            model(**inputs)


@pytest.mark.parametrize("kind", [{"use_reentrant": True}, {"preserve_rng_state": False}])
def test_shared_keys_refuse_reentrant_checkpointing(kind):
    family = next(family for family in FAMILIES if family.model_type == "gemma4")
    model = family.make_model(processor_of(family))
    with pytest.raises(ConfigError, match=r"share keys.*use_reentrant: false"):
        model.gradient_checkpointing_enable(kind)


@named([family for family in FAMILIES if family.model_type == "fast_vlm"])
def test_image_features_ignore_other_images_in_training(family):
    """FastVLM's tower has batch norms."""
    model = family.make_model(processor_of(family)).train()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert norms and not any(norm.training for norm in norms)


def test_the_documentation_has_the_table_as_it_is():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.families"
