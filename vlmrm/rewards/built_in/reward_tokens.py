"""What HPSv3 and VideoAlign share: a Qwen2-VL whose text has reward tokens, read by a head where they stand."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoProcessor, Qwen2VLConfig, Qwen2VLModel

from vlmrm.batching import PaddedBatcher, to_device
from vlmrm.conversation import Conversation, Medium, Message
from vlmrm.errors import ConfigError, RowError
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer
from vlmrm.rewards.built_in.weights import load_exactly, pretrained
from vlmrm.rewards.contract import RewardArguments
from vlmrm.rewards.templates import read_template

PLACE = "{text_prompt}"
EMBEDDINGS = "backbone.language_model.embed_tokens.weight"

# Names of transformers before 4.52 and since → those of `RewardTokenModel`, the first that fits.
NAMES = {
    r"^(model\.)?visual\.": "backbone.visual.",
    r"^model\.language_model\.": "backbone.language_model.",
    r"^model\.": "backbone.language_model.",
}


class RewardTokenModel(nn.Module):
    """Qwen2-VL and a head; `forward` gives the head's numbers at each reward token: [B, tokens, numbers]."""

    def __init__(self, config: Qwen2VLConfig, head: nn.Module):
        super().__init__()
        self.backbone = Qwen2VLModel(config)
        self.rm_head = head

    def forward(self, inputs: Mapping[str, torch.Tensor], token_ids: Sequence[int]) -> torch.Tensor:
        ids = inputs["input_ids"]
        # Plain positions, also where images are: the published code never comes to Qwen2-VL's three-dimensional ones.
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        hidden = self.backbone(**inputs, position_ids=positions, use_cache=False).last_hidden_state
        return self.rm_head(torch.stack([hidden[ids == token] for token in token_ids], dim=1).float())


class RewardTokenReader:
    """A published reward model with what prepares its inputs.

    Args:
        weights: by the names of the published file; what is only for generating text is left out.
        base: the Qwen2-VL it is of, for its configuration and processor; its weights are not needed.
        tokens: the reward tokens, in the order in which the published code adds them to the tokenizer.
        renderer: how images and videos are shown to the model.

    Raises:
        CheckpointError: when the base cannot be opened or the weights do not fit it.
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
        named = _named(weights)
        config = pretrained(AutoConfig, base)
        if EMBEDDINGS in named:  # one row for each token, however many the base has
            config.get_text_config().vocab_size = len(named[EMBEDDINGS])
        with init_empty_weights(include_buffers=False):
            self.model = RewardTokenModel(config, head)
        load_exactly(self.model, named, source)
        # As in the published code this rounds the rotary frequencies too, which the weights are used to.
        self.model.backbone.to(dtype)
        self.model.rm_head.float()
        self.model.eval().requires_grad_(False).to(device)
        self.renderer = renderer(processor, written=self.tokens)
        self.batch = PaddedBatcher.for_processor(processor)
        self.lock = threading.Lock()

    @torch.inference_mode()
    def read(self, conversations: Sequence[Conversation], batch_size: int) -> list[list[list[float]] | str]:
        """For each conversation the numbers at each reward token, or why there are none."""
        rendered: dict[int, Rendered] = {}
        found: dict[int, list[list[float]] | str] = {}
        with self.lock:
            cache: dict[str, ProcessedMedia] = {}
            for place, conversation in enumerate(conversations):
                try:
                    rendered[place] = self._render(conversation, cache)
                except RowError as error:
                    found[place] = error.reason
            places = list(rendered)
            for start in range(0, len(places), batch_size):
                part = places[start : start + batch_size]
                inputs = to_device(self.batch([rendered[place] for place in part]), self.model.backbone.device)
                inputs.pop("mm_token_type_ids", None)  # for positions, which are plain here
                found |= dict(zip(part, self.model(inputs, self.token_ids).tolist(), strict=True))
        return [found[place] for place in range(len(conversations))]

    def _render(self, conversation: Conversation, cache: dict[str, ProcessedMedia]) -> Rendered:
        rendered = self.renderer.render(conversation, cache)
        for name, token in zip(self.tokens, self.token_ids, strict=True):
            if rendered.input_ids.count(token) != 1:
                raise RowError(f"its prompt spells {name}, which is where the reward is read: remove it")
        return rendered


def published_template(config: RewardArguments, tokens: Sequence[str]) -> str:
    """The text around the prompt that the weights were trained with, from the file `template_file`.

    Raises:
        ConfigError: when there is no such file, or it lacks the place of the prompt or a reward token.
    """
    path = config.extra_kwargs.get("template_file")
    if path is None:
        raise ConfigError(
            f"reward {config.name} has no template_file: save the instruction of the published code as a text, "
            f"with {PLACE} where the prompt goes; docs/rewards.md says how."
        )
    return read_template(config, path, PLACE, *tokens)


def question(medium: Medium, template: str, prompt: str) -> Conversation:
    """The user's turn: what is to be judged, then the template with the prompt."""
    return Conversation((Message.of("user", medium, template.replace(PLACE, prompt)),))


def _named(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in weights.items():
        if name.startswith("lm_head."):
            continue
        old = next((old for old in NAMES if re.match(old, name)), None)
        found[name if old is None else re.sub(old, NAMES[old], name)] = value
    return found
