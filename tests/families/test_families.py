"""Every image-text family: a shared batch has the scores and gradients of the family's own forward, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vlmrm.batching import SharedBatcher
from vlmrm.conversation import Conversation
from vlmrm.modeling.attention import SHARED_PREFIX, batcher_for
from vlmrm.rendering import Rendered, Renderer

from .cases import CASES, WITH_GRADIENTS
from .reference import gradients, own_scores, processed, rounding_nowhere, to_float64
from .table import FAMILIES
from .tiny import Tiny

SCORES, GRADIENTS = 1e-10, 1e-8


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


def rendered_of(family: Tiny, conversations: Sequence[Conversation]) -> list[Rendered]:
    renderer, cache = Renderer(processor_of(family)), {}
    return [renderer.render(conversation, cache) for conversation in conversations]


def named(families: Sequence[Tiny]) -> Any:
    return pytest.mark.parametrize("family", families, ids=[family.model_type for family in families])


@named([family for family in FAMILIES if family.refused is None])
def test_the_renderers_tokens_are_those_of_the_processors_own_call(family):
    errors: list[Exception] = []
    for name, conversations in cases_of(family).items():
        with naming(errors, name):
            for conversation, item in zip(conversations, rendered_of(family, conversations), strict=True):
                assert item.input_ids == processed(family, processor_of(family), conversation)["input_ids"][0].tolist()
    if errors:
        raise ExceptionGroup(family.model_type, errors)


@named([family for family in FAMILIES if family.refused is None])
def test_scores_and_gradients_are_those_of_the_familys_own_forward(family, monkeypatch):
    processor, errors = processor_of(family), []
    model = family.make_model(processor)
    expected = {}
    for name, conversations in cases_of(family).items():
        with naming(errors, name):
            scores = own_scores(family, model, processor, conversations)
            assert (scores.max() - scores.min()) > 1e-4  # else there would be nothing to compare
            expected[name] = scores.detach(), gradients(model, scores) if name in WITH_GRADIENTS else {}
    model.proved = True  # else one that is not declared as tested would be padded
    batcher = batcher_for(model, processor, "shared" if family.padded is None else "reference")
    assert isinstance(batcher, SharedBatcher) == (family.padded is None)
    calls = counting(monkeypatch)
    for name, (scores, own_gradients) in expected.items():
        with naming(errors, name):
            rendered = rendered_of(family, CASES[name])
            inputs = to_float64(batcher(rendered))
            calls.clear()
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


def counting(monkeypatch) -> list[str]:
    """Return the list to which each call of shared attention adds the name of its module."""
    calls: list[str] = []
    attention = ALL_ATTENTION_FUNCTIONS[SHARED_PREFIX]

    def counted(module, *args, **kwargs):
        calls.append(type(module).__name__)
        return attention(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED_PREFIX, counted)
    return calls


def assert_equal_gradients(ours: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == own.keys()
    for name, gradient in own.items():
        distance = (ours[name] - gradient).norm() / gradient.norm().clamp_min(1e-3)
        assert distance <= GRADIENTS, f"{name}: {distance:.1e}"
