"""Models and conversations of random weights, tokens and pixels, in chosen sizes.

`h512` and `h768` have the proportions of Qwen2.5-VL 3B and 7B: what the vision tower and the language-model head cost
beside a token of text. `windows_h512` and `state_h512` are Gemma 3 and Qwen3.5 in those of `h512`: five of six layers
see a window, three of four are gated delta nets. Costs depend on shapes alone, so random weights and tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid
from transformers import Gemma3Config, PreTrainedConfig, Qwen2_5_VLConfig, Qwen3_5Config

from vlmrm.batching import SharedBatcher
from vlmrm.modeling import (
    RewardModel,
    load_processor,
    make_tiny,
    reward_model_class,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.attention import share
from vlmrm.rendering import ProcessedMedia, Rendered

PAD, VISION_START, VISION_END, IMAGE, VIDEO = range(5)
FIRST_WORD = 10  # token ids from here on are text
TIE_WEIGHT = 0.1
LARGEST_SIDE = 448  # pixels of an image of a checkpoint on disk: 256 tokens


class Size(NamedTuple):
    """Widths and depths of a language model and its vision tower."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    forward: int
    vocabulary: int
    vision: int
    vision_depth: int
    vision_forward: int
    window: int = 64  # tokens that a layer with a window sees


SIZES = {
    "tiny": Size(64, 2, 4, 2, 160, 128, 32, 3, 80),
    "h256": Size(256, 6, 4, 2, 704, 4864, 128, 4, 342),
    "h512": Size(512, 8, 8, 2, 1408, 4864, 256, 6, 684),
    "h768": Size(768, 8, 12, 3, 2112, 5504, 256, 6, 684),
    "windows_tiny": Size(64, 6, 4, 2, 160, 128, 32, 3, 80, window=4),
    "windows_h512": Size(512, 6, 8, 2, 1408, 4864, 256, 6, 684),
    "state_tiny": Size(64, 4, 4, 2, 160, 128, 32, 3, 80),
    "state_h512": Size(512, 8, 8, 2, 1408, 4864, 256, 6, 684),
}


def quick(size: str) -> str:
    """Return the tiny one of the architecture of a size."""
    return f"{size.rpartition('_')[0]}_tiny".strip("_")


def configuration(size: str, image: int = 144) -> PreTrainedConfig:
    """Return the configuration of one of `SIZES`; Gemma's images are all of `image` tokens."""
    name = size.rpartition("_")[0]
    make: Callable[..., PreTrainedConfig] = {"windows": _gemma3, "state": _qwen3_5}.get(name, _qwen2_5)
    return make(SIZES[size], image)


def _text(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "intermediate_size": size.forward,
        "vocab_size": size.vocabulary,
        "rms_norm_eps": 1e-6,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rotary(pairs: int) -> dict[str, Any]:
    """Share out a head's rotary pairs between time, height and width."""
    side = 3 * pairs // 8
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [pairs - 2 * side, side, side]}


QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def _vision(size: Size) -> dict[str, Any]:
    """Return the part of a configuration that the towers of Qwen2.5-VL and Qwen3.5 have in common."""
    return {
        "depth": size.vision_depth,
        "hidden_size": size.vision,
        "intermediate_size": size.vision_forward,
        "num_heads": 4,
        "out_hidden_size": size.hidden,
    }


def _qwen2_5(size: Size, image: int) -> PreTrainedConfig:
    return Qwen2_5_VLConfig(
        text_config=_text(size) | {"rope_parameters": _rotary(size.hidden // size.heads // 2)},
        vision_config=_vision(size)
        | {"window_size": 112, "fullatt_block_indexes": [size.vision_depth // 2 - 1, size.vision_depth - 1]},
        **QWEN,
    )


def _qwen3_5(size: Size, image: int) -> PreTrainedConfig:
    """Qwen3.5: keys of a delta net are half as wide as the model, values as wide; a quarter of a head is rotated."""
    head = size.hidden // size.heads
    delta_net = {"linear_num_key_heads": size.heads // 2, "linear_num_value_heads": size.heads}
    delta_net |= {"linear_key_head_dim": head, "linear_value_head_dim": head}
    return Qwen3_5Config(
        text_config=_text(size)
        | delta_net
        | {"head_dim": head, "rope_parameters": _rotary(head // 8) | {"partial_rotary_factor": 0.25}},
        vision_config=_vision(size),
        **QWEN,
    )


def _gemma3(size: Size, image: int) -> PreTrainedConfig:
    """Gemma 3: its images are squares of one size, here with four patches to a token as Qwen's."""
    patch, side = 14, math.isqrt(image)
    if side**2 != image:
        raise ValueError(f"an image of Gemma 3 is a square of tokens, and {image} is none")
    return Gemma3Config(
        text_config=_text(size) | {"head_dim": size.hidden // size.heads, "sliding_window": size.window},
        vision_config={
            "num_hidden_layers": size.vision_depth,
            "hidden_size": size.vision,
            "intermediate_size": size.vision_forward,
            "num_attention_heads": 4,
            "image_size": 2 * side * patch,
            "patch_size": patch,
            "vision_use_head": False,
        },
        mm_tokens_per_image=image,
        image_token_id=IMAGE,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )


def reward_model(
    config: PreTrainedConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[RewardModel, SharedBatcher]:
    """Return a reward model with random weights, created on its device, and its shared batcher."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = reward_model_class(config)(config)
    finally:
        torch.set_default_dtype(before)
    assert isinstance(model, RewardModel)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():  # Gemma's projector begins as zero: its images would count for nothing
                weight.normal_(std=0.02)
    return model, share(model)


def reward_checkpoint(
    folder: Path, config: PreTrainedConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint of random weights, made on `device`, with the tiny one's tokenizer and processor."""
    processor: Any = load_processor(make_tiny(folder / "base"))
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
        setattr(config, f"{name}_token_id", processor.tokenizer.convert_tokens_to_ids(token))
    text: Any = config.get_text_config()
    text.pad_token_id = processor.tokenizer.pad_token_id
    text.vocab_size = max(text.vocab_size, len(processor.tokenizer))
    made = folder / "reward-model"
    reward_model(config, device, dtype)[0].save_pretrained(made)
    save_reward_files(made, processor=processor, head="linear", provenance={}, shown={"max_pixels": LARGEST_SIDE**2})
    write_complete(made, world_size=1, step=0)
    return made


@dataclass(frozen=True)
class Pair:
    """Tokens of one preference pair: its image, the text of its prompt, and its two answers."""

    image: int
    text: int
    chosen: int
    rejected: int


@dataclass
class Workload:
    """Conversations, and which of them (by number) are compared: the better first in `pairs`, equals in `ties`."""

    conversations: list[Rendered]
    pairs: list[tuple[int, int]] = field(default_factory=list)
    ties: list[tuple[int, int]] = field(default_factory=list)

    def loss(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the Bradley-Terry loss over the pairs of scores[N], plus the tie loss over the ties."""
        chosen, rejected = torch.tensor(self.pairs, device=scores.device).unbind(1)
        loss = -logsigmoid(scores[chosen] - scores[rejected]).mean()
        if self.ties:
            first, second = torch.tensor(self.ties, device=scores.device).unbind(1)
            difference = scores[first] - scores[second]
            loss = loss - TIE_WEIGHT / 2 * (logsigmoid(difference) + logsigmoid(-difference)).mean()
        return loss


def training(config: PreTrainedConfig, pairs: Sequence[Pair], irrelevant: bool = True, seed: int = 0) -> Workload:
    """Return a batch of pairs; `irrelevant` adds the answers of the first under the prompt of the second."""
    words = Words(config, seed)
    prompts = [words.prompt(pair.image, pair.text) for pair in pairs]
    answers = [(words.text(pair.chosen), words.text(pair.rejected)) for pair in pairs]
    work = Workload([])
    for prompt, both in zip(prompts, answers, strict=True):
        work.pairs.append((len(work.conversations), len(work.conversations) + 1))
        work.conversations += [answered(prompt, answer) for answer in both]
    if irrelevant:
        work.ties.append((len(work.conversations), len(work.conversations) + 1))
        work.conversations += [answered(prompts[1], answer) for answer in answers[0]]
    return work


def candidates(config: PreTrainedConfig, count: int, image: int, text: int, answer: int, seed: int = 0) -> Workload:
    """Return `count` answers to one prompt."""
    words = Words(config, seed)
    prompt = words.prompt(image, text)
    return Workload([answered(prompt, words.text(answer)) for _ in range(count)])


class Words:
    """Random prompts and texts in the tokens of one model."""

    def __init__(self, config: PreTrainedConfig, seed: int):
        self.config: Any = config
        self.generator = torch.Generator().manual_seed(seed)
        self.images = 0

    def text(self, length: int) -> list[int]:
        beyond = self.config.text_config.vocab_size * 9 // 10  # special tokens come last in Qwen's vocabulary
        return torch.randint(FIRST_WORD, beyond, (length,), generator=self.generator, device="cpu").tolist()

    def prompt(self, image: int, text: int) -> Rendered:
        """Return a prompt of an image of `image` tokens and `text` further tokens."""
        ids = [VISION_START, *[IMAGE] * image, VISION_END, *self.text(text)]
        return Rendered(ids, [int(token == IMAGE) for token in ids], (self.picture(image),))

    def picture(self, tokens: int) -> ProcessedMedia:
        """Return an image of `tokens` tokens, as near to a square as possible."""
        vision = self.config.vision_config
        self.images += 1
        if self.config.model_type == "gemma3":
            pixels = (1, 3, vision.image_size, vision.image_size)
            tensors = {"pixel_values": torch.randn(pixels, generator=self.generator, device="cpu")}
        else:
            merge = vision.spatial_merge_size
            rows = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
            pixels = (tokens * merge**2, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
            tensors = {
                "pixel_values": torch.randn(pixels, generator=self.generator, device="cpu"),
                "image_grid_thw": torch.tensor([[1, rows * merge, tokens // rows * merge]], device="cpu"),
            }
        return ProcessedMedia(f"picture {self.images}", "image", tensors, "", [IMAGE] * tokens)


def answered(prompt: Rendered, answer: Sequence[int]) -> Rendered:
    """Return the conversation of a prompt and an answer."""
    return Rendered([*prompt.input_ids, *answer], [*prompt.type_ids, *[0] * len(answer)], prompt.media)
