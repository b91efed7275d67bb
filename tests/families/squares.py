"""Families whose images become squares of one size: one each, or one for each tile of an image."""

from __future__ import annotations

from typing import Any

import transformers as t

from vlmrm.modeling.families import BY_CONVOLUTIONS, BY_WORDS

from .sizes import SQUARE
from .tiny import MULTIPLIERS, YARN, Tiny

GEMMA_TURN = "<start_of_turn>{role}\n{content}<end_of_turn>\n"

MEDIA_TOKENS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
TWICE = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}  # half share keys


POOLED = {"patch_size": 4, "pooling_kernel_size": 2}
GEMMA4_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
}


def gemma4(text: dict[str, Any], vision: dict[str, Any], kind: str = "") -> Tiny:
    def made(part: str, **keys: Any) -> Any:
        return getattr(t, f"Gemma4{kind}{part}")(**keys)

    return Tiny(
        f"gemma4{kind and '_'}{kind.lower()}",
        lambda tokenizer, template: made(
            "Processor",
            feature_extractor=made("AudioFeatureExtractor"),
            image_processor=made("ImageProcessor", **POOLED, max_soft_tokens=70),
            tokenizer=tokenizer,
            video_processor=made("VideoProcessor", **POOLED, max_soft_tokens=70),
            chat_template=template,
        ),
        tokens=MEDIA_TOKENS,
        image="<|image|>",
        video="<|video|>",
        turn=GEMMA_TURN,
        config={"text_config": {**TWICE, **text}, "vision_config": {**POOLED, **vision}},
    )


SQUARES = [
    Tiny(
        "aria",
        lambda tokenizer, template: t.AriaProcessor(
            t.AriaImageProcessor(max_image_size=490, min_image_size=28),
            tokenizer,
            template,
            size_conversion={490: 4, 980: 8},
        ),
        config={
            "projector_patch_to_query_dict": {49: 4, 196: 8},
            "vision_config": {"image_size": 490, "patch_size": 70},
            "text_config": {"num_key_value_heads": 4},
        },
    ),
    Tiny(
        "aya_vision",
        lambda tokenizer, template: t.AyaVisionProcessor(
            t.GotOcr2ImageProcessor(size=SQUARE, max_patches=3),
            tokenizer,
            patch_size=14,
            img_size=28,
            chat_template=template,
        ),
        tokens={"a": "<|START_OF_IMG|>", "b": "<|END_OF_IMG|>", "c": "<|IMG_PATCH|>", "d": "TILE", "e": "TILE_GLOBAL"},
        turn="<|START_OF_TURN_TOKEN|>{role}\n{content}<|END_OF_TURN_TOKEN|>",
        config={"downsample_factor": 1},
    ),
    Tiny(
        "chameleon",
        lambda tokenizer, template: t.ChameleonProcessor(
            t.ChameleonImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
            tokenizer,
            image_seq_length=16,
        ),
        tokens={"boi_token": "<racm3:break>", "eoi_token": "<eoss>"},
        codes=["<image>", *(f"IMGIMG{letter}Z" for letter in "ABCDEFGH")],
        options={"return_for_text_completion": True},
        config={
            "vq_config": {
                "num_embeddings": 8,
                "embed_dim": 4,
                "latent_channels": 4,
                "resolution": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "num_res_blocks": 1,
            }
        },
        padded=BY_WORDS,
    ),
    Tiny(
        "cohere2_vision",
        lambda tokenizer, template: t.Cohere2VisionProcessor(
            t.Cohere2VisionImageProcessor(size=SQUARE, max_patches=3, patch_size=2), tokenizer, template
        ),
        tokens={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        image="<|IMG_PATCH|>",
        config={"downsample_factor": 1, "alignment_intermediate_size": 48},
    ),
    Tiny(
        "deepseek_ocr2",
        lambda tokenizer, template: t.DeepseekOcr2Processor(
            t.DeepseekOcr2ImageProcessor(size={"height": 48, "width": 48}, tile_size=48),
            tokenizer,
            template,
            patch_size=1,
        ),
        config={
            "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
            "vision_config": {
                "sam_config": {
                    "image_size": 48,
                    "patch_size": 1,
                    "mlp_dim": 48,
                    "output_channels": 8,
                    "downsample_channels": [16, 32],
                    "window_size": 6,
                    "global_attn_indexes": [],
                }
            },
        },
    ),
    Tiny(
        "deepseek_vl",
        lambda tokenizer, template: t.DeepseekVLProcessor(
            t.DeepseekVLImageProcessor(size=SQUARE), tokenizer, template, num_image_tokens=4
        ),
    ),
    Tiny(
        "deepseek_vl_hybrid",
        lambda tokenizer, template: t.DeepseekVLHybridProcessor(
            t.DeepseekVLHybridImageProcessor(size=SQUARE, high_res_size={"height": 64, "width": 64}),
            tokenizer,
            template,
            num_image_tokens=4,
        ),
        config={
            "high_res_vision_config": {
                "image_size": 64,
                "patch_size": 16,
                "mlp_dim": 48,
                "output_channels": 8,
                "num_pos_feats": 4,
                "window_size": 2,
                "global_attn_indexes": [1],
                "scale": 8,
            }
        },
    ),
    Tiny(
        "fast_vlm",
        lambda tokenizer, template: t.LlavaProcessor(
            t.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
            tokenizer,
            patch_size=32,
            vision_feature_select_strategy="full",
            chat_template=template,
        ),
        config={"vision_config": {"architecture": "mobilenetv3_small_050", "hidden_size": 288}},
        scatter=0.4,
        needs="timm",
    ),
    Tiny(
        "gemma3",
        lambda tokenizer, template: t.Gemma3Processor(
            t.Gemma3ImageProcessor(size=SQUARE), tokenizer, chat_template=template, image_seq_length=4
        ),
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        image="<start_of_image>",
        turn=GEMMA_TURN,
        config={
            "mm_tokens_per_image": 4,
            "text_config": {
                "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}}
            },
        },
        ids={"image_token_id": "<image_soft_token>"},
    ),
    Tiny(
        "gemma3n",
        lambda tokenizer, template: t.Gemma3nProcessor(
            t.Gemma3nAudioFeatureExtractor(),
            t.SiglipImageProcessor(size={"height": 64, "width": 64}),
            tokenizer,
            template,
            image_seq_length=4,
        ),
        tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "audio_token": "<audio_soft_token>",
            "boa_token": "<start_of_audio>",
            "eoa_token": "<end_of_audio>",
        },
        image="<image_soft_token>",
        turn=GEMMA_TURN,
        config={
            "vision_soft_tokens_per_image": 4,
            "text_config": {**TWICE, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
            "vision_config": {"architecture": "mobilenetv3_small_050", "hidden_size": 288},
            "audio_config": {"conf_num_hidden_layers": 1},
        },
        scatter=0.4,
        needs="timm",
    ),
    gemma4(  # as E2B
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}, {**GEMMA4_TOWER, "use_clipped_linears": True}
    ),
    gemma4(  # as 26B-A4B
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {**GEMMA4_TOWER, "standardize": True},
    ),
    gemma4(
        {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64},
        "Unified",
    ),
    Tiny(
        "got_ocr2",
        lambda tokenizer, template: t.GotOcr2Processor(
            t.GotOcr2ImageProcessor(size={"height": 64, "width": 64}), tokenizer, template
        ),
        tokens={"image_token": "<imgpad>", "a": "<img>", "b": "</img>"},
        image="<img><imgpad></img>\n",
        nested=False,
        lacks={"text": "it reads images"},
        config={
            "vision_config": {
                "image_size": 64,
                "patch_size": 1,
                "mlp_dim": 48,
                "output_channels": 8,
                "window_size": 8,
                "global_attn_indexes": [],
            }
        },
    ),
    Tiny(
        "granite4_vision",
        lambda tokenizer, template: t.Granite4VisionProcessor(
            t.LlavaNextImageProcessor(
                size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
            ),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            chat_template=template,
            num_additional_image_tokens=1,
            downsample_rate="1/2",
        ),
        config={
            "vision_config": {"hidden_size": 64},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
            "deepstack_layer_map": [[-2, 0], [-1, 1]],
            "spatial_target_layers": [1, 2],
            "text_config": {"num_hidden_layers": 3, **MULTIPLIERS},
            "downsample_rate": "1/2",
        },
    ),
    Tiny(
        "granite_docling",
        lambda tokenizer, template: t.GraniteDoclingProcessor(
            t.GraniteDoclingImageProcessor(size={"height": 32, "width": 32}, max_patches=4),
            tokenizer,
            image_seq_len=1,
            chat_template=template,
        ),
        tokens={"fake": "<fake_token_around_image>", "global": "<global-img>"},
        config={"vision_config": {"image_size": 32, "patch_size": 8}},
    ),
    Tiny(
        "idefics2",
        lambda tokenizer, template: t.Idefics2Processor(
            t.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56}),
            tokenizer,
            image_seq_len=4,
            chat_template=template,
        ),
        tokens={"image_boundary_token": "<fake_token_around_image>"},
        config={
            "text_config": {"sliding_window": 24},  # in all layers: a smaller one sees no image from the end
            "perceiver_config": {
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 16,
            },
        },
    ),
    Tiny(
        "idefics3",
        lambda tokenizer, template: t.Idefics3Processor(
            t.Idefics3ImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
            tokenizer,
            image_seq_len=1,
            chat_template=template,
        ),
        tokens={"fake": "<fake_token_around_image>", "global": "<global-img>"},
        turn="<|im_start|>{role}:{content}<end_of_utterance>\n",
    ),
    Tiny(
        "inkling_mm_model",
        lambda tokenizer, template: t.InklingProcessor(
            t.InklingFeatureExtractor(), t.InklingImageProcessor(size={"height": 16, "width": 16}), tokenizer, template
        ),
        tokens={
            "image_token": "<|unused_200054|>",
            "audio_token": "<|unused_200053|>",
            "a": "<|content_image|>",
            "b": "<|content_audio_input|>",
        },
        image="<|content_image|><|unused_200054|>",
        config={"vision_config": {"patch_size": 16, "n_layers": 3}, "audio_config": {"n_mel_bins": 4}},
        padded=BY_CONVOLUTIONS,
    ),
    Tiny(
        "internvl",
        lambda tokenizer, template: t.InternVLProcessor(
            t.GotOcr2ImageProcessor(size=SQUARE, max_patches=3),
            tokenizer,
            t.InternVLVideoProcessor(size=SQUARE),
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
        config={  # with the language model of gpt-oss and the large tower
            "text_config": {
                "model_type": "gpt_oss",
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 6,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_parameters": YARN,
            },
            "vision_config": {"use_qk_norm": True, "norm_type": "rms_norm"},
        },
    ),
]
