"""A trained reward model as a function: conversations in, raw logits out, in request order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vlmrm.batching import Batcher, to_device
from vlmrm.data.messages import to_messages
from vlmrm.data.schema import Message
from vlmrm.errors import RowError
from vlmrm.modeling import LoadedReward, batcher_for, load_checkpoint
from vlmrm.rendering import MediaLimits, ProcessedMedia, Rendered, Renderer

# OpenAI-style messages ending in the assistant's answer; images as PIL, path, bytes or data URI.
Conversation = Sequence[Message]
# A prompt (a text or messages) and its candidate answers (texts or messages).
Group = tuple[Any, Sequence[Any]]


def load_scorer(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    attn_implementation: str = "auto",
    max_tokens_per_batch: int = 16384,
    batching: str = "shared",
    base_model_path: str | None = None,
    trust_remote_code: bool = False,
    vision_cache_dir: str | Path | None = None,
    vision_cache_gb: float = 50.0,
) -> Scorer:
    """A `Scorer` from a checkpoint folder, after verifying it.

    Args:
        device: default is the GPU where there is one.
        dtype: `auto` keeps the type of the checkpoint; bfloat16, float16 or float32.
        max_tokens_per_batch: memory bound; a single longer conversation still goes, alone.
        batching: `shared`, or `reference` to compute every conversation whole.
        base_model_path: where the base of an adapter checkpoint is now.
        vision_cache_dir: where to keep, and find again, what the vision tower makes of images.

    Raises:
        CheckpointError: when the checkpoint is broken, incomplete, or no reward model.
        ConfigError: when the model or the folder cannot be used with a vision cache.
    """
    loaded = load_checkpoint(
        model,
        dtype=dtype,
        attn_implementation=attn_implementation,
        device=device,
        trust_remote_code=trust_remote_code,
        base_model_path=base_model_path,
    )
    if vision_cache_dir is not None:
        loaded.model.requires_grad_(False)
        loaded.model.use_vision_cache(vision_cache_dir, vision_cache_gb)
    return Scorer(loaded, max_tokens_per_batch=max_tokens_per_batch, batching=batching)


class Scorer:
    """Scores with one loaded reward model. A score does not depend on what it is scored together with."""

    def __init__(self, loaded: LoadedReward, *, max_tokens_per_batch: int = 16384, batching: str = "shared"):
        self.loaded = loaded
        self.model = loaded.model.eval()
        self.max_tokens_per_batch = max_tokens_per_batch
        limits = MediaLimits(loaded.info.get("min_pixels"), loaded.info.get("max_pixels"))
        self.renderer = Renderer(loaded.processor, limits)
        self.batcher: Batcher = batcher_for(loaded.model, loaded.processor, batching)

    def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """The raw logit of each conversation, in order.

        Raises:
            RowError: naming the conversation by its place, when it ends without an answer or a medium cannot be read.
        """
        cache: dict[str, ProcessedMedia] = {}
        rendered = [self._render(conversation, place, cache) for place, conversation in enumerate(conversations)]
        scores = [0.0] * len(rendered)
        for places in self.batcher.split([[item] for item in rendered], self.max_tokens_per_batch):
            for place, value in zip(places, self._forward([rendered[place] for place in places]), strict=True):
                scores[place] = value
        return scores

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each (prompt, candidates), the raw logit of each candidate, in order."""
        conversations, sizes = [], []
        for prompt, candidates in groups:
            start = to_messages(prompt, "user")
            conversations += [[*start, *to_messages(candidate, "assistant")] for candidate in candidates]
            sizes.append(len(candidates))
        scores = iter(self.score(conversations))
        return [[next(scores) for _ in range(size)] for size in sizes]

    def _render(self, conversation: Conversation, place: int, cache: dict[str, ProcessedMedia]) -> Rendered:
        try:
            messages = to_messages(conversation, "user")
            if messages[-1]["role"] != "assistant":
                raise RowError("it ends without an assistant message: there is no answer to score")
            return self.renderer.render(messages, cache)
        except RowError as error:
            raise type(error)(f"conversation {place}: {error.reason}") from error

    @torch.inference_mode()
    def _forward(self, rendered: Sequence[Rendered]) -> list[float]:
        return self.model(**to_device(self.batcher(rendered), self.model.device)).logits.squeeze(-1).float().tolist()
