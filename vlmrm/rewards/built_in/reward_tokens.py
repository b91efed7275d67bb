"""A Qwen2-VL that reads scores at reward tokens in its text: the shared part of HPSv3 and VideoAlign."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoProcessor, Qwen2VLConfig, Qwen2VLModel

from vlmrm.batching import PaddedBatcher, to_device
from vlmrm.conversation import Conversation, Medium, Message
from vlmrm.errors import ConfigError, RowError
from vlmrm.modeling.published_weights import load_exactly, pretrained
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer
from vlmrm.rewards.contract import PLACEHOLDER, RewardArguments, Verdict, read_template

Reading = Callable[[list[list[float]]], Verdict]  # of the head's outputs at each reward token
EMBEDDINGS = "backbone.language_model.embed_tokens.weight"

# Names of transformers before 4.52 and since → those of `RewardTokenModel`, the first that fits.
NAMES = {
    r"^(model\.)?visual\.": "backbone.visual.",
    r"^model\.language_model\.": "backbone.language_model.",
    r"^model\.": "backbone.language_model.",
}


class RewardTokenModel(nn.Module):
    """Qwen2-VL and a head; `forward` returns the head's outputs at each reward token: [B, tokens, outputs]."""

    def __init__(self, config: Qwen2VLConfig, head: nn.Module):
        super().__init__()
        self.backbone = Qwen2VLModel(config)
        self.rm_head = head

    def forward(self, inputs: Mapping[str, torch.Tensor], token_ids: Sequence[int]) -> torch.Tensor:
        ids = inputs["input_ids"]
        # One-dimensional positions for images too: the published code never computes Qwen2-VL's own.
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        hidden = self.backbone(**inputs, position_ids=positions, use_cache=False).last_hidden_state
        return self.rm_head(torch.stack([hidden[ids == token] for token in token_ids], dim=1).float())


class RewardTokenReader:
    """A published reward model, by its weights but `lm_head`, with the configuration and processor of `base`.

    The published code adds the reward tokens to the tokenizer in the order of `tokens`.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        base: str,
        tokens: Sequence[str],
        head: nn.Module,
        source: str,
        dtype: torch.dtype,
        device: torch.device,
        renderer: type[Renderer] = Renderer,
    ):
        processor = pretrained(AutoProcessor, base)
        processor.tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        self.tokens = list(tokens)
        self.token_ids = processor.tokenizer.convert_tokens_to_ids(self.tokens)
        named = _renamed(weights)
        config = pretrained(AutoConfig, base)
        if EMBEDDINGS in named:  # the weights decide the size of the vocabulary
            config.get_text_config().vocab_size = len(named[EMBEDDINGS])
        with init_empty_weights(include_buffers=False):
            self.model = RewardTokenModel(config, head)
        load_exactly(self.model, named, source)
        # This rounds the rotary frequencies too, as in the published code that the weights were trained with.
        self.model.backbone.to(dtype)
        self.model.rm_head.float()
        self.model.eval().requires_grad_(False).to(device)
        self.renderer = renderer(processor, written=self.tokens)
        self.batch = PaddedBatcher.for_processor(processor)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def verdicts(self, conversations: Sequence[Conversation], batch_size: int, verdict: Reading) -> list[Verdict]:
        """Return `verdict` of the head's outputs at each reward token of each conversation, or why there is none."""
        rendered: dict[int, Rendered] = {}
        results: dict[int, Verdict] = {}
        with self.lock:
            cache: dict[str, ProcessedMedia] = {}
            for index, conversation in enumerate(conversations):
                try:
                    rendered[index] = self._render(conversation, cache)
                except RowError as error:
                    results[index] = Verdict(failure=error.reason)
            indices = list(rendered)
            for start in range(0, len(indices), batch_size):
                part = indices[start : start + batch_size]
                inputs = to_device(self.batch([rendered[index] for index in part]), self.model.backbone.device)
                inputs.pop("mm_token_type_ids", None)  # only for three-dimensional positions
                results |= zip(part, map(verdict, self.model(inputs, self.token_ids).tolist()), strict=True)
        return [results[index] for index in range(len(conversations))]

    def _render(self, conversation: Conversation, cache: dict[str, ProcessedMedia]) -> Rendered:
        rendered = self.renderer.render(conversation, cache)
        for name, token in zip(self.tokens, self.token_ids, strict=True):
            if rendered.input_ids.count(token) != 1:
                raise RowError(f"its prompt spells {name}, the token at which the reward is read: remove it")
        return rendered


def published_template(config: RewardArguments, original: str, *tokens: str) -> str:
    """Return the instruction that the weights were trained with, from the file `template_file`."""
    if (template := read_template(config, *tokens)) is None:
        raise ConfigError(
            f"reward {config.name} has no template_file, its published instruction: `vlmrm rewards record "
            f"{original}` writes it."
        )
    return template


def question(medium: Medium, template: str, prompt: str) -> Conversation:
    """Return the user's turn: the medium, then the template with the prompt."""
    return Conversation((Message.of("user", medium, template.replace(PLACEHOLDER, prompt)),))


def _renamed(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, value in weights.items():
        if name.startswith("lm_head."):
            continue
        old = next((old for old in NAMES if re.match(old, name)), None)
        renamed[name if old is None else re.sub(old, NAMES[old], name)] = value
    return renamed
