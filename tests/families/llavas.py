"""LLaVA, those who built on it, and those with Pixtral's tower."""

from __future__ import annotations

from typing import Any

import transformers as t

from vlmrm.modeling.families import BY_INDEX

from .sizes import GRIDS, MEDIA, SHORT, SQUARE
from .tiny import MULTIPLIERS, YARN, Tiny

# LLaVA and those who built on it ------------------------------------------------------------------------------------
# CLIP's class token is counted and then dropped.
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def llava(tokenizer: Any, template: str) -> t.LlavaProcessor:
    return t.LlavaProcessor(
        t.CLIPImageProcessor(size=SHORT, crop_size=SQUARE), tokenizer, chat_template=template, **LLAVA
    )


LLAVAS = [
    Tiny(  # with the language model of BakLLaVA
        "llava", llava, image="<image>\n", config={"text_config": {"model_type": "mistral", "sliding_window": 24}}
    ),
    Tiny("vipllava", llava, image="<image>\n", config={"vision_feature_layer": [-1, -2]}),
    Tiny(
        "llava_next",
        lambda tokenizer, template: t.LlavaNextProcessor(
            t.LlavaNextImageProcessor(size=SHORT, crop_size=SQUARE, image_grid_pinpoints=GRIDS),
            tokenizer,
            chat_template=template,
            **LLAVA,
        ),
        image="<image>\n",
        config={  # as Granite Vision 3
            "image_grid_pinpoints": GRIDS,
            "vision_feature_layer": [-2, -1],
            "text_config": {"model_type": "granite", **MULTIPLIERS},
        },
    ),
    Tiny(
        "llava_next_video",
        lambda tokenizer, template: t.LlavaNextVideoProcessor(
            t.LlavaNextVideoVideoProcessor(size=SHORT, crop_size=SQUARE),
            t.LlavaNextImageProcessor(size=SHORT, crop_size=SQUARE, image_grid_pinpoints=GRIDS),
            tokenizer,
            chat_template=template,
            **LLAVA,
        ),
        tokens=MEDIA,
        image="<image>\n",
        video="<video>\n",
        config={"image_grid_pinpoints": GRIDS},
    ),
    Tiny(
        "llava_onevision",
        lambda tokenizer, template: t.LlavaOnevisionProcessor(
            t.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=GRIDS),
            tokenizer,
            t.LlavaOnevisionVideoProcessor(size=SQUARE),
            num_image_tokens=4,
            vision_feature_select_strategy="full",
            chat_template=template,
        ),
        tokens=MEDIA,
        image="<image>\n",
        video="<video>\n",
        config={"image_grid_pinpoints": GRIDS},
        lacks=dict.fromkeys(["two images", "turns"], "its processor reads several images coarsely: refused"),
    ),
    Tiny(
        "video_llava",
        lambda tokenizer, template: t.VideoLlavaProcessor(
            t.VideoLlavaImageProcessor(size=SHORT, crop_size=SQUARE),
            t.VideoLlavaVideoProcessor(size=SHORT, crop_size=SQUARE),
            tokenizer,
            patch_size=14,
            chat_template=template,
        ),
        tokens=MEDIA,
        image="<image>\n",
        video="<video>\n",
    ),
]

# Pixtral's tower ----------------------------------------------------------------------------------------------------
# Multi-head latent attention, in the parts of DeepSeek.
LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
# A temperature that grows with the position, here from the fourth token on.
SCALED = {"rope_parameters": {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.1}}
PIXTRAL = {"image_size": 112, "patch_size": 7}


def pixtral(tokenizer: Any, template: str) -> t.PixtralProcessor:
    return t.PixtralProcessor(
        t.PixtralImageProcessor(size={"longest_edge": 42}),
        tokenizer,
        patch_size=7,
        spatial_merge_size=2,
        chat_template=template,
    )


IMG = {"image_token": "[IMG]", "break_token": "[IMG_BREAK]", "end_token": "[IMG_END]"}
INSTRUCT = "[{role}]{content}[/{role}]"
PIXTRALS = [
    Tiny(  # with the language model of Ministral 3
        "mistral3",
        pixtral,
        tokens=IMG,
        image="[IMG]",
        turn=INSTRUCT,
        config={"vision_config": PIXTRAL, "text_config": {**SCALED, "model_type": "ministral3"}},
    ),
    Tiny(  # with the language model of Mistral 4
        "mistral3",
        pixtral,
        tokens=IMG,
        image="[IMG]",
        turn=INSTRUCT,
        config={
            "vision_config": PIXTRAL,
            "text_config": {
                **LATENT,
                **SCALED,
                "model_type": "mistral4",
                "head_dim": 16,
                "q_lora_rank": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
        },
    ),
    Tiny(
        "mistral_large4",
        pixtral,
        tokens=IMG,
        image="[IMG]",
        turn=INSTRUCT,
        config={
            "vision_config": PIXTRAL,
            "text_config": {
                **LATENT,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["indexed_attention"] * 2,
                "indexer_types": ["full"] * 2,
                "no_rope_layers": [1, 0],
                "kv_source_layers": [0, 1],
                "index_head_dim": 16,
                "index_n_heads": 2,
            },
        },
        padded=BY_INDEX,
    ),
    Tiny(
        "lighton_ocr",
        lambda tokenizer, template: t.LightOnOcrProcessor(
            t.PixtralImageProcessor(size={"longest_edge": 42}, patch_size=7),
            tokenizer,
            patch_size=7,
            chat_template=template,
        ),
        tokens={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        image="<|image_pad|>",
        config={"vision_config": PIXTRAL},
    ),
]


FAMILIES = [*LLAVAS, *PIXTRALS]
