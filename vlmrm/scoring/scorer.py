"""A trained reward model as a function: conversations in, raw logits out, in request order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from vlmrm.batching import Batcher, to_device
from vlmrm.data.messages import to_messages
from vlmrm.errors import RowError
from vlmrm.modeling import LoadedReward, batcher_for
from vlmrm.rendering import MediaLimits, ProcessedMedia, Rendered, Renderer
from vlmrm.scoring.protocol import Conversation, Group, all_scores, conversations_of, finite, regrouped


class LocalScorer:
    """A `Scorer` with one loaded reward model. A score does not depend on what it is scored together with."""

    def __init__(self, loaded: LoadedReward, *, max_tokens_per_batch: int = 16384, batching: str = "shared"):
        self.loaded = loaded
        self.model = loaded.model.eval().requires_grad_(False)
        self.max_tokens_per_batch = max_tokens_per_batch
        limits = MediaLimits(loaded.info.get("min_pixels"), loaded.info.get("max_pixels"))
        self.renderer = Renderer(loaded.processor, limits)
        self.batcher: Batcher = batcher_for(loaded.model, loaded.processor, batching)

    @property
    def digest(self) -> str:
        """What names the model by its content: `checkpoint_digest`."""
        return self.loaded.digest

    def score(self, conversations: Sequence[Conversation]) -> list[float]:
        """The raw logit of each conversation, in order.

        Raises:
            RowError: naming the conversation by its place, when it ends without an answer or a medium cannot be read.
        """
        return all_scores(self.score_each(conversations))

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        """The raw logit of each conversation, in order, or why it cannot be scored."""
        cache: dict[str, ProcessedMedia] = {}
        scores: list[float | RowError] = [0.0] * len(conversations)
        rendered: list[tuple[int, Rendered]] = []
        for place, conversation in enumerate(conversations):
            try:
                rendered.append((place, self._render(conversation, cache)))
            except RowError as error:
                scores[place] = error
        for numbers in self.batcher.split([[item] for _, item in rendered], self.max_tokens_per_batch):
            for number, value in zip(numbers, self._forward([rendered[n][1] for n in numbers]), strict=True):
                scores[rendered[number][0]] = finite(value)
        return scores

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each (prompt, candidates), the raw logit of each candidate, in order."""
        conversations = conversations_of(groups)
        return regrouped(self.score(list(chain.from_iterable(conversations))), conversations)

    def score_images(self, prompt: Any, images: torch.Tensor) -> torch.Tensor:
        """The raw logits [N], float32, of `images[N, 3, H, W]` in [0, 1] as answers to `prompt`, with their gradient.

        So an image generator is trained by backpropagation through the reward (ReFL: Xu et al. 2023, ImageReward).
        The score is that of the same picture in `score`; `Renderer.process_tensors` says how far they may differ
        where the size changes. All N are kept until the backward pass; the model's own weights get no gradient.

        Raises:
            RowError: when the images have another shape, or the prompt cannot be shown.
        """
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise RowError(f"images are {images.dtype} {tuple(images.shape)}: give floats [N, 3, H, W] in [0, 1]")
        messages = [*to_messages(prompt, "user"), {"role": "assistant", "content": [{"type": "image", "image": None}]}]
        own = self.renderer.process(messages[:-1])
        rendered = [
            self.renderer.render_with(messages, [*own, item]) for item in self.renderer.process_tensors(images)
        ]
        parts = self.batcher.split([[item] for item in rendered], self.max_tokens_per_batch)
        scores = torch.cat([self._logits([rendered[place] for place in places]) for places in parts])
        return scores[torch.tensor([place for places in parts for place in places]).argsort().to(scores.device)]

    def _render(self, conversation: Conversation, cache: dict[str, ProcessedMedia]) -> Rendered:
        if not isinstance(conversation, Sequence) or isinstance(conversation, str):
            raise RowError(f"it is a single {type(conversation).__name__}: a conversation is a list of messages")
        messages = to_messages(conversation, "user")
        if messages[-1]["role"] != "assistant":
            raise RowError("it ends without an assistant message: there is no answer to score")
        return self.renderer.render(messages, cache)

    @torch.inference_mode()
    def _forward(self, rendered: Sequence[Rendered]) -> list[float]:
        return self._logits(rendered).tolist()

    def _logits(self, rendered: Sequence[Rendered]) -> torch.Tensor:
        return self.model(**to_device(self.batcher(rendered), self.model.device)).logits.squeeze(-1).float()
