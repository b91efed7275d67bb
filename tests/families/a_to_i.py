"""The families whose model type begins with a to i."""

from __future__ import annotations

from transformers import (
    AyaVisionProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    GotOcr2ImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLProcessor,
    InternVLVideoProcessor,
)

from .tiny import Tiny

SQUARE = {"height": 28, "width": 28}
AREA = {"shortest_edge": 28 * 28, "longest_edge": 84 * 56}  # of Qwen's way to size images

FAMILIES = [
    Tiny(
        "aya_vision",
        lambda tokenizer, template: AyaVisionProcessor(
            GotOcr2ImageProcessor(size=SQUARE, max_patches=3),
            tokenizer,
            patch_size=14,
            img_size=28,
            chat_template=template,
        ),
        tokens={
            "start": "<|START_OF_IMG|>",
            "end": "<|END_OF_IMG|>",
            "patch": "<|IMG_PATCH|>",
            "tile": "TILE",
            "tile_global": "TILE_GLOBAL",
        },
        turn="<|START_OF_TURN_TOKEN|>{role}\n{content}<|END_OF_TURN_TOKEN|>",
        config={"downsample_factor": 1, "vision_config": {"vision_use_head": False}},
    ),
    Tiny(
        "gemma3",
        lambda tokenizer, template: Gemma3Processor(
            Gemma3ImageProcessor(size=SQUARE), tokenizer, chat_template=template, image_seq_length=4
        ),
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        image="<start_of_image>",
        turn="<start_of_turn>{role}\n{content}<end_of_turn>\n",
        config={"mm_tokens_per_image": 4},
        ids={
            "image_token_id": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    Tiny(
        "glm4v",
        lambda tokenizer, template: Glm4vProcessor(
            Glm4vImageProcessor(size=AREA), tokenizer, Glm4vVideoProcessor(size=AREA), template
        ),
        tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "bov": "<|begin_of_video|>",
            "eov": "<|end_of_video|>",
            "boi": "<|begin_of_image|>",
            "eoi": "<|end_of_image|>",
        },
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
        turn="<|{role}|>\n{content}",
        ids={
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
    ),
    Tiny(
        "idefics3",
        lambda tokenizer, template: Idefics3Processor(
            Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
            tokenizer,
            image_seq_len=1,
            chat_template=template,
        ),
        tokens={"fake": "<fake_token_around_image>", "global": "<global-img>"},
        turn="<|im_start|>{role}:{content}<end_of_utterance>\n",
        config={"scale_factor": 2},
    ),
    Tiny(
        "internvl",
        lambda tokenizer, template: InternVLProcessor(
            GotOcr2ImageProcessor(size=SQUARE, max_patches=3),
            tokenizer,
            InternVLVideoProcessor(size=SQUARE),
            image_seq_length=1,
            chat_template=template,
        ),
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        image="<IMG_CONTEXT>\n",
        video="<video>\n",
    ),
]
