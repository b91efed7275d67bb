"""A family's own way to a score: its processor's call on a conversation's text, and its backbone's plain forward.

One conversation at a time, so that nothing is padded, packed or shared; the head alone is ours.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vlmrm.batching.media import blank_image
from vlmrm.conversation import Conversation, Video, media_of
from vlmrm.data.media import open_image, open_video
from vlmrm.modeling import batcher_for
from vlmrm.rendering import Renderer

from .cases import CASES
from .tiny import Tiny


@contextmanager
def rounding_nowhere() -> Generator[None]:
    """Compute in float64 where models round to float32 whatever their type: norms, rotary embeddings, the head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def processed(family: Tiny, processor: Any, conversation: Conversation) -> dict[str, torch.Tensor]:
    """Return what the processor's own call makes of a conversation, through its chat template."""
    options: dict[str, Any] = dict(family.options)
    media = media_of(conversation.messages)
    if images := [open_image(medium.reference) for medium in media if not isinstance(medium, Video)]:
        options["images"] = [images] if family.nested else images
    if videos := [open_video(medium, 2.0, 768) for medium in media if isinstance(medium, Video)]:
        options |= {
            "videos": [frames for frames, _ in videos],
            "videos_kwargs": {
                "video_metadata": [metadata for _, metadata in videos],
                "do_sample_frames": False,
                "return_metadata": True,
            },
        }
    text = Renderer(processor).text(conversation.messages)
    outputs = processor(text=[text], return_tensors="pt", **options)
    return {name: value for name, value in outputs.items() if name != "video_metadata"}


def twins(family: Tiny) -> tuple[Any, Any, list[Any]]:
    """Return a model of a family twice, ready for ranks with and without images, and a shared batch of each kind."""
    processor = family.make_processor()
    models = [family.make_model(processor).train() for _ in range(2)]
    for model in models:
        model.proved = True
        model.touch_vision = blank_image(processor, model.placeholders)
        batcher = batcher_for(model, processor, "shared")
    renderer = Renderer(processor)
    batches = [to_float64(batcher([renderer.render(it) for it in CASES[name]])) for name in ("text", "image")]
    return *models, batches


def to_float64(inputs: Any) -> Any:
    """Return the inputs with float64 in place of every other floating type."""
    if isinstance(inputs, dict):
        return {name: to_float64(value) for name, value in inputs.items()}
    return inputs.double() if torch.is_tensor(inputs) and inputs.is_floating_point() else inputs


def own_scores(family: Tiny, model: Any, processor: Any, conversations: Sequence[Conversation]) -> torch.Tensor:
    """Return the score of each conversation [N], float64."""
    scores = []
    for conversation in conversations:
        inputs = to_float64(processed(family, processor, conversation))
        with rounding_nowhere():
            output = model.model(**inputs, use_cache=False)
            # Some families have no backbone without their language head, in whose place the identity stands.
            hidden = output.logits if model.family.language_head else output.last_hidden_state
            scores.append(model.head(hidden[:, -1])[0, 0])
    return torch.stack(scores)


def gradients(model: Any, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of each weight, of a Bradley-Terry loss over neighbouring conversations."""
    model.zero_grad()
    with rounding_nowhere():
        (-torch.nn.functional.logsigmoid(scores[:-1] - scores[1:]).mean()).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
