"""`Robometer`: progress, or the probability of success, after each frame, by a Qwen3-VL with heads of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, PartialState, init_empty_weights
from qwen_vl_utils import fetch_image
from torch import Tensor, nn
from transformers import AutoConfig, AutoProcessor

from vlmrm.conversation import Conversation, Image, Message
from vlmrm.data.media import open_image
from vlmrm.errors import CheckpointError, RowError
from vlmrm.modeling import LoadedReward
from vlmrm.modeling.manifest import read_json_of
from vlmrm.modeling.published_weights import pretrained, read_weights, shared
from vlmrm.modeling.reward_model import reward_model_class
from vlmrm.rendering import ProcessedMedia, Rendered, Renderer
from vlmrm.rewards.built_in.reward_tokens import published_template
from vlmrm.rewards.contract import PLACEHOLDER, RewardArguments, choice
from vlmrm.scoring.scorer import LocalScorer
from vlmrm.weights import load_exactly
from vlmrm_robots.rewards.trajectory_model import TrajectoryModel, task_and_frames

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKEN = "<|prog_token|>"  # after each frame
# In the order in which the published code adds them to the tokenizer.
TOKENS = ("<|split_token|>", "<|reward_token|>", "<|pref_token|>", "<|sim_token|>", TOKEN)
OUTPUTS = ("progress", "success")
BACKBONE = re.compile(r"^model\.(?:model\.)?(?=visual\.|language_model\.)")  # of the published code and of LeRobot's
EMBEDDINGS = "language_model.embed_tokens.weight"


class Robometer(TrajectoryModel):
    """The progress in [0, 1] at the last frame, or the probability of success (Liang et al. 2026, Robometer).

    Qwen3-VL-4B reads the task and the frames as images, each followed by a token of its own, at which heads of two
    layers read the progress, as the mean of ten bins, and the success. A token sees no later frame, so that every
    prefix of an episode is the beginning of the next. The published head that compares two episodes is not read.
    Names, shapes and arithmetic are those of the published code; the weight files were not available to test.

    Settings:
        template_file: the published instruction as a text file; see docs/rewards.md.
        output: `progress` (default) or `success`.
        model_name_or_path: the folder or hub repository of the weights, in the published layout or LeRobot's.
        base_name_or_path: Qwen3-VL, for its configuration and processor.
        max_frames: of a sample, evenly spaced; 8 in the published training.
    """

    options = ("template_file", "output", "model_name_or_path", "base_name_or_path", "max_frames")
    most_frames = 8

    def __init__(self, config: RewardArguments, accelerator: Accelerator | PartialState):
        super().__init__(config, accelerator)
        template = published_template(config, "robometer")
        output = choice(config, "output", OUTPUTS[0], OUTPUTS)
        path = str(config.extra_kwargs.get("model_name_or_path", "robometer/Robometer-4B"))
        base = str(config.extra_kwargs.get("base_name_or_path", "Qwen/Qwen3-VL-4B-Instruct"))
        self.scorer = shared(_load, path, base, template, output, self.dtype, self.device)
        self.model = self.scorer.model


@dataclass
class ProgressRenderer(Renderer):
    """Renders an episode as the published code does, up to the token after its last frame."""

    template: str = ""

    def render(self, conversation: Conversation, cache: dict[str, ProcessedMedia] | None = None) -> Rendered:
        task, frames = task_and_frames(conversation)
        shown = [part for frame in frames for part in (Image(frame), TOKEN)]
        turn = Message.of("user", self.template.replace(PLACEHOLDER, task), *shown)
        rendered = super().render(Conversation((turn,)), cache)
        token = self.tokenizer.convert_tokens_to_ids(TOKEN)
        places = [place for place, found in enumerate(rendered.input_ids) if found == token]
        if len(places) != len(frames):
            raise RowError(f"its task spells {TOKEN}, the token at which the progress is read: remove it")
        end = places[-1] + 1
        return Rendered(rendered.input_ids[:end], rendered.type_ids[:end], rendered.media)

    def _process_image(self, medium: Image, key: str) -> ProcessedMedia:
        picture = fetch_image({"image": open_image(medium.reference)}, self.processor.image_processor.patch_size)
        return self._process_one(picture, medium.reference, key, "image", {"do_resize": False})


class FrameHead(nn.Module):
    """A published head: hidden states [N, H] to [N, 1] in [0, 1], float32.

    Of one output it is the sigmoid, of several the mean of evenly spaced bins from 0 to 1, by their softmax.
    """

    def __init__(self, width: int, outputs: int):
        super().__init__()
        layers = [nn.Linear(width, width // 2), nn.LayerNorm(width // 2), nn.GELU(), nn.Dropout(0.1)]
        self.layers = nn.Sequential(*layers, nn.Linear(width // 2, outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = self.layers(hidden.to(next(self.layers.parameters()).dtype)).float()
        if outputs.shape[-1] == 1:
            return outputs.sigmoid()
        bins = torch.linspace(0.0, 1.0, outputs.shape[-1], device=outputs.device)
        return (outputs.softmax(-1) * bins).sum(-1, keepdim=True)


def _load(path: str, base: str, template: str, output: str, dtype: torch.dtype, device: torch.device) -> LocalScorer:
    index = read_json_of(path, INDEX)
    files = {FILE} if index is None else set(index["weight_map"].values())
    stored = {name: value for file in sorted(files) for name, value in read_weights(path, file).items()}
    weights = {name: value.to(dtype) for name, value in stored.items()}  # by their published names
    backbone = {BACKBONE.sub("", name): value for name, value in weights.items() if BACKBONE.match(name)}
    prefix = f"{output}_head."
    head = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    for needed, found in ((EMBEDDINGS, EMBEDDINGS in backbone), (f"{output}_head", "4.weight" in head)):
        if not found:
            raise CheckpointError(f"{path} has no {needed}: it is no checkpoint of Robometer.")
    processor = pretrained(AutoProcessor, base)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    config = pretrained(AutoConfig, base)
    config.get_text_config().vocab_size = len(backbone[EMBEDDINGS])  # the weights decide the size of the vocabulary
    with init_empty_weights(include_buffers=False):
        model: Any = reward_model_class(config)(config)
        made = FrameHead(config.get_text_config().hidden_size, len(head["4.weight"]))
    load_exactly(model.model, backbone, path)
    load_exactly(made.layers, head, f"the head of {path}")
    model.set_submodule("score", made)
    model.eval().requires_grad_(False)
    model.to(device)
    renderer = partial(ProgressRenderer, template=template, written=(TOKEN,), variables={"add_vision_id": True})
    return LocalScorer(LoadedReward(model, processor, {}, path, path), renderer=renderer)
