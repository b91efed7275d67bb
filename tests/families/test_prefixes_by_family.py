"""Prompts that are computed once: an answer that comes later has its score of a batch of its own, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from vlmrm.batching.caches import ByteCache, MediaCache, PrefixCache
from vlmrm.conversation import Conversation
from vlmrm.modeling.attention import batcher_for
from vlmrm.modeling.vision_cache import FeatureCache
from vlmrm.rendering import Rendered, Renderer

from .reference import rounding_nowhere, to_float64
from .test_families import SCORED, cases_of, naming, processor_of

TOLERANCE = 1e-9
SHORT = ("irrelevant branches", "images in answers", "video")  # of the families that differ less from others
IN_FULL = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llama4", "nemotron_h_omni")


class Streamed:
    """A model that keeps prompts, media and features from one row to the next."""

    def __init__(self, model: Any, processor: Any):
        cache = ByteCache(10**9)
        self.model, self.renderer = model, Renderer(processor, store=MediaCache(cache), by_content=True)
        self.prefixes = PrefixCache(cache, batcher_for(model, processor, "shared"))
        model.vision_cache = FeatureCache(cache, None)
        self.tokens: list[int] = []

    def rendered(self, conversation: Conversation) -> Rendered:
        rendered = self.renderer.render(conversation)
        return replace(rendered, prompt=self.renderer.prompt_tokens(conversation, rendered))

    @torch.inference_mode()
    def scores(self, conversations: Sequence[Conversation]) -> torch.Tensor:
        inputs = to_float64(self.prefixes.inputs(list(map(self.rendered, conversations))))
        with rounding_nowhere():
            scores = self.model(**inputs).logits[:, 0]
        self.prefixes.keep(inputs)
        self.tokens.append(inputs["input_ids"].numel())
        return scores


def reads_rows(model: Any) -> bool:
    """Whether masks read what a row says of each token: whether it is part of an image."""
    of_images = getattr(model.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    return of_images or model.config.model_type in ("gemma3", "molmo2")


@pytest.mark.parametrize("family", [pytest.param(f, id=f.model_type) for f in SCORED])
def test_scores_do_not_depend_on_earlier_ones(family):
    processor, errors = processor_of(family), []
    model = family.make_model(processor)
    plain, kept = batcher_for(model, processor, "shared"), Streamed(model, processor)
    for name, conversations in cases_of(family).items():
        if name not in SHORT and family.model_type not in IN_FULL:
            continue
        with naming(errors, name):
            rendered = list(map(kept.rendered, conversations))
            with rounding_nowhere(), torch.inference_mode():
                expected = model(**to_float64(plain(rendered))).logits[:, 0]
            one_by_one = torch.cat([kept.scores([conversation]) for conversation in conversations])
            assert (one_by_one - expected).abs().max() <= TOLERANCE
            again = kept.scores(conversations)  # all in one row, after prompts of other rows
            assert (again - expected).abs().max() <= TOLERANCE
            refused = "padded" if family.padded else "mask" if reads_rows(model) else None
            assert kept.prefixes.refused == refused
            if refused is None:
                assert kept.tokens[-1] <= sum(len(item) - item.prompt for item in rendered)
    if errors:
        raise ExceptionGroup(family.model_type, errors)
