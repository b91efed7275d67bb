"""Models and conversations of random weights, tokens and pixels, in chosen sizes.

`h512` and `h768` have the proportions of Qwen2.5-VL 3B and 7B: what the vision tower and the language-model head cost
beside a token of text. Costs depend on shapes alone, so random weights and tokens do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import logsigmoid
from transformers import Qwen2_5_VLConfig

from vlmrm.batching import SharedBatcher
from vlmrm.modeling import RewardModel, batcher_for, reward_model_class
from vlmrm.rendering import ProcessedMedia, Rendered

PAD, VISION_START, VISION_END, IMAGE, VIDEO = range(5)
FIRST_WORD = 10  # token ids from here on are text
TIE_WEIGHT = 0.1

# hidden, layers, heads, key heads, feed-forward, vocabulary; vision: hidden, depth, feed-forward
SIZES = {
    "tiny": (64, 2, 4, 2, 160, 128, 32, 3, 80),
    "h256": (256, 6, 4, 2, 704, 4864, 128, 4, 342),
    "h512": (512, 8, 8, 2, 1408, 4864, 256, 6, 684),
    "h768": (768, 8, 12, 3, 2112, 5504, 256, 6, 684),
}


def configuration(size: str) -> Qwen2_5_VLConfig:
    """Return the configuration of one of `SIZES`."""
    hidden, layers, heads, key_heads, forward, vocabulary, vision, depth, vision_forward = SIZES[size]
    pairs = hidden // heads // 2  # rotary pairs of a head, shared out between time, height and width
    side = 3 * pairs // 8
    return Qwen2_5_VLConfig(
        text_config={
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "intermediate_size": forward,
            "vocab_size": vocabulary,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [pairs - 2 * side, side, side],
            },
            "pad_token_id": PAD,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision,
            "intermediate_size": vision_forward,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "window_size": 112,
            "fullatt_block_indexes": [depth // 2 - 1, depth - 1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def reward_model(
    config: Qwen2_5_VLConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
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
    batcher = batcher_for(model, None, "shared")
    assert isinstance(batcher, SharedBatcher)
    return model, batcher


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


def training(config: Qwen2_5_VLConfig, pairs: Sequence[Pair], irrelevant: bool = True, seed: int = 0) -> Workload:
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


def candidates(config: Qwen2_5_VLConfig, count: int, image: int, text: int, answer: int, seed: int = 0) -> Workload:
    """Return `count` answers to one prompt."""
    words = Words(config, seed)
    prompt = words.prompt(image, text)
    return Workload([answered(prompt, words.text(answer)) for _ in range(count)])


class Words:
    """Random prompts and texts in the tokens of one model."""

    def __init__(self, config: Qwen2_5_VLConfig, seed: int):
        self.config: Any = config
        self.generator = torch.Generator().manual_seed(seed)
        self.images = 0

    def text(self, length: int) -> list[int]:
        beyond = self.config.text_config.vocab_size * 9 // 10  # special tokens come last in Qwen's vocabulary
        return torch.randint(FIRST_WORD, beyond, (length,), generator=self.generator, device="cpu").tolist()

    def prompt(self, image: int, text: int) -> Rendered:
        """Return a prompt of an image of `image` tokens and `text` further tokens."""
        config = self.config
        image_tokens = [config.vision_start_token_id, *[config.image_token_id] * image, config.vision_end_token_id]
        ids = [*image_tokens, *self.text(text)]
        return Rendered(ids, [int(token == config.image_token_id) for token in ids], (self.picture(image),))

    def picture(self, tokens: int) -> ProcessedMedia:
        """Return an image of `tokens` tokens, as near to a square as possible."""
        vision = self.config.vision_config
        merge = vision.spatial_merge_size
        rows = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.images += 1
        tensors = {
            "pixel_values": torch.randn(tokens * merge**2, numbers, generator=self.generator, device="cpu"),
            "image_grid_thw": torch.tensor([[1, rows * merge, tokens // rows * merge]], device="cpu"),
        }
        return ProcessedMedia(f"picture {self.images}", "image", tensors, "", [self.config.image_token_id] * tokens)


def answered(prompt: Rendered, answer: Sequence[int]) -> Rendered:
    """Return the conversation of a prompt and an answer."""
    return Rendered([*prompt.input_ids, *answer], [*prompt.type_ids, *[0] * len(answer)], prompt.media)
