"""A trained reward model on this machine as a `Scorer`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from PIL import Image as Pillow

from vlmrm.batching import ComparisonCollator, SharedBatcher
from vlmrm.batching.caches import ByteCache, MediaCache, PrefixCache, usual_limit
from vlmrm.batching.media import BLANK_SIDE
from vlmrm.conversation import Conversation, Image, Message, Reference
from vlmrm.data.arguments import DataArguments
from vlmrm.data.media import media_round
from vlmrm.engine import Engine, rendered_each
from vlmrm.errors import ConfigError, RowError
from vlmrm.formats.openai import read_conversation
from vlmrm.formats.rollouts import read_candidates
from vlmrm.modeling import LoadedReward, batcher_for, sequence_limit
from vlmrm.modeling.graphs import Graphs
from vlmrm.modeling.head import total_of
from vlmrm.modeling.kernels import log_once
from vlmrm.modeling.vision_cache import FeatureCache
from vlmrm.outputs import Outputs
from vlmrm.rendering import MediaLimits, ProcessedMedia, Rendered, Renderer
from vlmrm.scoring.protocol import ConversationLike, Group, all_scores, conversations_of, prefixes_of, regrouped

GREY = Image(Pillow.new("RGB", (BLANK_SIDE, BLANK_SIDE), "grey"))
PLACEHOLDER = Conversation((Message.of("user", GREY), Message.of("assistant", "-")))
TEXT = Conversation((Message.of("user", "-"), Message.of("assistant", "-")))


class LocalScorer:
    """A `Scorer` of one loaded reward model. A score does not depend on what is scored with it, or was before.

        LocalScorer(load_checkpoint("outputs/mine/best")).score(conversations)

    Args:
        cache_bytes: bound on what is kept in memory between calls: media, features of images, and what layers
            made of prompts, so that a later answer to one costs its own tokens. 0 keeps nothing; None: `usual_limit`.
        renderer: what a conversation is shown to the model as, for one that was not trained here.
    """

    def __init__(
        self,
        loaded: LoadedReward,
        *,
        max_tokens_per_batch: int = 16384,
        batching: str = "shared",
        cache_bytes: int | None = 0,
        cuda_graphs: bool = False,
        renderer: Callable[..., Renderer] = Renderer,
    ):
        self.loaded = loaded
        self.model = loaded.model.eval().requires_grad_(False)
        shown = DataArguments().as_trained(loaded.info)
        self.cache = ByteCache(usual_limit(self.model.device) if cache_bytes is None else cache_bytes)
        store = MediaCache(self.cache) if self.cache.limit else None
        options = {"by_content": store is not None, "branches": loaded.model.outputs.branches}
        self.renderer = renderer(loaded.processor, MediaLimits.of(shown), store, **options)
        collator = ComparisonCollator(
            self.renderer,
            batcher_for(loaded.model, loaded.processor, batching),
            max_seq_length=sequence_limit(loaded.model.config, shown.max_seq_length),
            max_tokens_per_batch=max_tokens_per_batch,
            overlong=shown.overlong,
            bad_rows="skip",
            outputs=loaded.model.outputs,
        )
        self.engine = Engine(self.model, collator)
        if cuda_graphs and not (self.model.device.type == "cuda" and isinstance(collator.batcher, SharedBatcher)):
            raise ConfigError("cuda_graphs needs a model on CUDA, in shared batches: change one, or leave it out.")
        self._graphs = Graphs(self.model.language_model) if cuda_graphs else None
        if self.cache.limit:
            self.engine.prefixes = PrefixCache(self.cache, collator.batcher)
            self.model.vision_cache = FeatureCache(self.cache, self.model.vision_cache)
        if self.cache.limit or cuda_graphs:
            self.score_each([PLACEHOLDER])  # a model refuses in its first forward: `prompts_kept` is known from now on
            if cuda_graphs:
                self.score_each([TEXT])  # of some models, graphs compute no row with an image
            self.clear_caches()

    @property
    def digest(self) -> str:
        """Return `checkpoint_digest`, which identifies the model by content."""
        return self.loaded.digest

    @property
    def prompts_kept(self) -> str:
        """Whether prompts are computed once for all calls: `yes`, or one word of why each call computes its own.

        They are `off`; or batches are `padded`; or the model's `mask` reads what a row says of each of its tokens.
        """
        return "off" if self.engine.prefixes is None else self.engine.prefixes.refused or "yes"

    def clear_caches(self) -> None:
        """Drop all that is kept between calls, as after a change of the model's weights."""
        self.cache.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def score(self, conversations: Sequence[ConversationLike]) -> list[float]:
        """Return the raw logit of each conversation, in order; raise RowError with the index of one without."""
        return all_scores(self.score_each(conversations))

    def score_each(
        self, conversations: Sequence[Any], read: Callable[[Any], Conversation] = read_conversation
    ) -> list[float | RowError]:
        """Return the raw logit of each item, read as a conversation by `read`, or the error of one that has none."""
        return self.engine.score(self.rendered(conversations, read))

    def rendered(
        self,
        conversations: Sequence[Any],
        read: Callable[[Any], Conversation] = read_conversation,
        media: Mapping[str, ProcessedMedia] | None = None,
    ) -> list[Rendered | RowError]:
        """Return each item as `outputs_rendered` takes it, without the model; another thread may score meanwhile.

        `media` are processed already, by the renderer's keys.
        """

        def render(item: Any, cache: dict[str, ProcessedMedia]) -> Rendered:
            conversation = read(item)
            _ = conversation.answer  # raises where there is none
            rendered = self.engine.collator.fit(conversation, cache)
            if self.engine.prefixes is None:
                return rendered
            return replace(rendered, prompt=self.renderer.prompt_tokens(conversation, rendered))

        with media_round():
            return rendered_each(conversations, render, media)

    @property
    def outputs(self) -> Outputs:
        """Return what the model answers: their names, kinds and ranges."""
        return self.engine.outputs

    def score_outputs(
        self, conversations: Sequence[Any], read: Callable[[Any], Conversation] = read_conversation
    ) -> list[dict[str, float] | RowError]:
        """Return the value of each output by name for each conversation, or the error of one that has none.

        >>> scorer.score_outputs(conversations)[0]
        {'overall': 0.71, 'clarity': 4.2}
        """
        return self.outputs_rendered(self.rendered(conversations, read))

    def outputs_rendered(self, items: Sequence[Rendered | RowError]) -> list[dict[str, float] | RowError]:
        """Return the value of each output by name for each item that `rendered` made, or its error."""
        return self.engine.outputs_of(items)

    def score_groups(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return the raw logit of each candidate of each (prompt, candidates), in order."""
        conversations = conversations_of(groups)
        return regrouped(self.score(list(chain.from_iterable(conversations))), conversations)

    def score_prefixes(self, task: Any, frames: Sequence[Reference]) -> list[float]:
        """Return the raw logit of each prefix of an episode, [T]: of the frames up to each as the answer to `task`.

        The model reads the task and every frame once, in one forward within the token budget; the scores are those of
        the T conversations alone. A model that cannot share prefixes computes these, and logs once why. A video is no
        list of frames here: where a family merges frames, as Qwen's do in pairs, its prefixes have other tokens.
        """
        conversations = prefixes_of(task, frames)
        if why := self.repeats_prefixes:
            log_once(f"score_prefixes computes each prefix from its start, because {why}", logging.WARNING)
        return self.score(conversations)

    @property
    def repeats_prefixes(self) -> str | None:
        """Why `score_prefixes` computes the frames of an episode anew for each prefix; None where it does not."""
        batcher = self.engine.collator.batcher
        if not isinstance(batcher, SharedBatcher):
            return "its batches are padded"
        return f"an image of {self.model.family.name} sees later ones" if batcher.images_see_all else None

    def score_images(self, prompt: Any, images: torch.Tensor) -> torch.Tensor:
        """Return the raw logits [N], float32, of `images[N, 3, H, W]` in [0, 1] as answers to `prompt`, with gradient.

        So an image generator can be trained by backpropagation through the reward (ReFL: Xu et al. 2023, ImageReward).
        The score is that of the same image in `score`; `Renderer.process_tensors` says how far they may differ where
        the size changes. Activations of all N are kept until the backward pass; the model's weights get no gradient.
        """
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise RowError(f"images are {images.dtype} {tuple(images.shape)}: give floats [N, 3, H, W] in [0, 1]")
        [conversation] = read_candidates((prompt, [Message.of("assistant", Image("a tensor"))]))
        prompt_media = self.renderer.process(conversation.prompt)
        processed = self.renderer.process_tensors(images)
        logits = self.engine.logits(
            [self.renderer.render_with(conversation, [*prompt_media, item]) for item in processed]
        )
        return total_of(self.outputs, logits)
