"""Families whose images keep their shape: the processor cuts each into as many patches as its area allows."""

from __future__ import annotations

from typing import Any

import transformers as t

from vlmrm.modeling.families import BY_CONVOLUTIONS, BY_INDEX

from .tiny import LLAMA3, ROPE, Tiny

AREA = {"shortest_edge": 28 * 28, "longest_edge": 84 * 56}  # of images in patches of 14
AREA16 = {"shortest_edge": 32 * 32, "longest_edge": 96 * 64}

# How the media of many families are written, and the ids of their configurations.
QWEN: dict[str, Any] = {
    "tokens": {
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "ids": {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
}  # fmt: skip
GLM: dict[str, Any] = {
    "tokens": {
        "image_token": "<|image|>", "video_token": "<|video|>", "bov": "<|begin_of_video|>",
        "eov": "<|end_of_video|>", "boi": "<|begin_of_image|>", "eoi": "<|end_of_image|>",
    },
    "image": "<|begin_of_image|><|image|><|end_of_image|>",
    "video": "<|begin_of_video|><|video|><|end_of_video|>",
    "turn": "<|{role}|>\n{content}",
    "ids": {
        "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
        "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
    },
}  # fmt: skip
TEXT = {"rope_parameters": {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}

GRIDS = [
    Tiny(
        "cohere_compass",
        lambda tokenizer, template: t.CohereCompassProcessor(
            t.CohereCompassImageProcessor(size=AREA),
            tokenizer,
            t.CohereCompassVideoProcessor(size=AREA, patch_size=14),
            template,
        ),
        tokens={
            "image_token": "<|IMAGE_PAD|>",
            "video_token": "<|VIDEO_PAD|>",
            "a": "<|VISION_START|>",
            "b": "<|VISION_END|>",
        },
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        video="<|VIDEO_PAD|>",
        ids={"vision_start_token_id": "<|VISION_START|>", "vision_end_token_id": "<|VISION_END|>"},
        config={"text_config": {"rope_parameters": {"full_attention": ROPE}}},
    ),
    Tiny(
        "cosmos3_edge",
        lambda tokenizer, template: t.Cosmos3EdgeProcessor(
            t.Cosmos3EdgeImageProcessor(size=AREA16), tokenizer, t.Cosmos3EdgeVideoProcessor(size=AREA16), template
        ),
        **QWEN,
        config={"projector_hidden_size": 48, "vision_config": {"patch_size": 16, "num_patches": 16}},
        options={"return_mm_token_type_ids": True},
    ),
    Tiny(
        "cosmos3_omni",
        lambda tokenizer, template: t.Qwen3VLProcessor(
            t.Qwen2VLImageProcessor(patch_size=16, size=AREA16),
            tokenizer,
            t.Qwen3VLVideoProcessor(size=AREA16),
            template,
        ),
        **QWEN,
        config={
            "vision_config": {"patch_size": 16},
            "text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        },
    ),
    Tiny(
        "dots3_note",
        lambda tokenizer, template: t.Dots3NoteProcessor(
            t.Qwen2VLImageProcessor(size=AREA, temporal_patch_size=1),
            tokenizer,
            t.Qwen3VLVideoProcessor(size=AREA, patch_size=14, temporal_patch_size=1),
            t.WhisperFeatureExtractor(),
            template,
        ),
        tokens={
            "image_token": "<|imgpad|>",
            "video_token": "<|video_pad|>",
            "audio_token": "<|audio_comp_pad|>",
            "a": "<|img|>",
            "b": "<|endofimg|>",
        },
        image="<|img|><|imgpad|><|endofimg|>",
        video="<|img|><|video_pad|><|endofimg|>",
        config={
            "text_config": {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "shared_experts_intermediate_size": 32,
                "index_head_dim": 16,
                "index_n_heads": 2,
                **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
                **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")},
                "swa_qk_nope_head_dim": 8,
            },
            "audio_config": {"feature_size": 8, "adapter_input_size": 32, "downsample_hidden_size": 8},
        },
        padded=BY_INDEX,
    ),
    Tiny(
        "ernie4_5_vl_moe",
        lambda tokenizer, template: t.Ernie4_5_VLMoeProcessor(
            t.Ernie4_5_VLMoeImageProcessor(size=AREA), tokenizer, t.Ernie4_5_VLMoeVideoProcessor(size=AREA), template
        ),
        tokens={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        video="<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        ids={
            "image_start_token_id": "<|IMAGE_START|>",
            "image_end_token_id": "<|IMAGE_END|>",
            "video_start_token_id": "<|VIDEO_START|>",
            "video_end_token_id": "<|VIDEO_END|>",
        },
        config={
            "text_config": {
                "moe_intermediate_size": [32, 16],
                "moe_num_shared_experts": 2,
                "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
            }
        },
        lacks={"video": "its processor writes times onto frames in a font of its checkpoint"},
    ),
    Tiny(
        "exaone4_5",
        lambda tokenizer, template: t.Exaone4_5_Processor(
            t.Qwen2VLImageProcessor(size=AREA), tokenizer, t.Qwen2VLVideoProcessor(size=AREA), template
        ),
        **QWEN,
        config={"text_config": {"rope_parameters": LLAMA3}},
    ),
    Tiny(
        "glm46v",
        lambda tokenizer, template: t.Glm46VProcessor(
            t.Glm46VImageProcessor(size=AREA), tokenizer, t.Glm46VVideoProcessor(size=AREA), template
        ),
        **GLM,
        config={"text_config": TEXT},
    ),
    Tiny(
        "glm4v",
        lambda tokenizer, template: t.Glm4vProcessor(
            t.Glm4vImageProcessor(size=AREA), tokenizer, t.Glm4vVideoProcessor(size=AREA), template
        ),
        **GLM,
        config={"text_config": TEXT},
    ),
    Tiny(
        "glm4v_moe",
        lambda tokenizer, template: t.Glm4vProcessor(
            t.Glm4vImageProcessor(size=AREA), tokenizer, t.Glm4vVideoProcessor(size=AREA), template
        ),
        **GLM,
        config={"text_config": TEXT},
    ),
    Tiny(
        "glm5_next",
        lambda tokenizer, template: t.Glm5NextProcessor(
            t.Glm5NextImageProcessor(min_image_tokens=1, max_image_tokens=6),
            tokenizer,
            t.Glm5NextVideoProcessor(),
            template,
        ),
        **GLM,
        config={
            "vision_config": {"projection_intermediate_size": 48},
            "text_config": {
                "num_key_value_heads": 4,
                "qk_rope_head_dim": 0,
                "linear_head_dim": 16,
                "linear_num_heads": 2,
                "index_n_heads": 2,
                "index_head_dim": 16,
            },
        },
        padded=BY_INDEX,
    ),
    Tiny(
        "glm_ocr",
        lambda tokenizer, template: t.Glm46VProcessor(
            t.Glm46VImageProcessor(size=AREA), tokenizer, t.Glm46VVideoProcessor(size=AREA), template
        ),
        **GLM,
        config={"text_config": TEXT},
    ),
    Tiny(
        "glmga",
        lambda tokenizer, template: t.Glm46VProcessor(
            t.GlmgaImageProcessor(size=AREA), tokenizer, t.GlmgaVideoProcessor(size=AREA), template
        ),
        **GLM,
        config={"text_config": TEXT},
    ),
    Tiny(
        "hunyuan_vl",
        lambda tokenizer, template: t.HunYuanVLProcessor(t.HunYuanVLImageProcessor(size=AREA16), tokenizer, template),
        tokens={"image_token": "<img>", "image_start_token": "<img_start>", "image_end_token": "<img_end>"},
        image="<img_start><img><img_end>",
        config={
            "vision_config": {"patch_size": 16, "max_image_size": 128},
            "text_config": {
                "rope_parameters": {"rope_type": "xdrope", "factor": 1.0, "alpha": 1e3, "mrope_section": [2, 2, 2, 2]}
            },
        },
        ids={"im_start_id": "<img_start>", "im_end_id": "<img_end>"},
    ),
    Tiny(
        "hyperclovax_vision_v2",
        lambda tokenizer, template: t.HyperCLOVAXVisionV2Processor(
            t.Qwen2VLImageProcessor(size=AREA), tokenizer, t.Qwen2VLVideoProcessor(size=AREA), template
        ),
        **QWEN,
    ),
    Tiny(
        "inkling2",
        lambda tokenizer, template: t.Inkling2Processor(t.Inkling2ImageProcessor(), tokenizer, template),
        tokens={"image_token": "<|unused_200054|>", "a": "<|content_image|>"},
        image="<|content_image|><|unused_200054|>",
        config={"vision_config": {"patch_size": 20}},
        padded=BY_CONVOLUTIONS,
    ),
]
