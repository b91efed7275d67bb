"""Families with a shape of their own, from j to z."""

from __future__ import annotations

from typing import Any

import transformers as t
from transformers.models.smolvlm import processing_smolvlm

from vlmrm.modeling.families import BY_INDEX

from .grids import QWEN
from .llavas import LATENT
from .qwens import THREE_AXES
from .sizes import MEDIA, SQUARE, area
from .tiny import LLAMA3, YARN, Tiny


def smolvlm(tokenizer: Any, template: str) -> Any:
    # It writes the number of frames in words, with a package that nothing else here needs.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    return processing_smolvlm.SmolVLMProcessor(
        t.SmolVLMImageProcessor(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        tokenizer,
        t.SmolVLMVideoProcessor(
            size={"longest_edge": 28}, max_image_size={"longest_edge": 28}, num_frames=4, fps=1, patch_size=14
        ),
        image_seq_len=1,
        chat_template=template,
    )


FAMILIES = [
    Tiny(
        "janus",
        lambda tokenizer, template: t.JanusProcessor(
            t.JanusImageProcessor(size=SQUARE), tokenizer, chat_template=template, num_image_tokens=4
        ),
        tokens={"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        image="<image_placeholder>\n",
        config={
            "vision_config": {"projection_dim": 64, "num_image_tokens": 4, "mlp_ratio": 2.0},
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
        },
        ids={"image_token_id": "<image_placeholder>"},
    ),
    Tiny(
        "kimi_k25",
        lambda tokenizer, template: t.Kimi_K25Processor(
            t.Kimi_K25ImageProcessor(size={"max_height": 84, "max_width": 84}),
            tokenizer,
            t.Kimi_K25VideoProcessor(size={"max_height": 56, "max_width": 56}),
            chat_template=template,
        ),
        tokens={
            "image_token": "<|media_pad|>",
            "video_token": "<|kimi_k25_video_placeholder|>",
            "start": "<|media_begin|>",
            "content": "<|media_content|>",
            "end": "<|media_end|>",
        },
        image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        video="<|kimi_k25_video_placeholder|>",
        turn="<|im_{role}|>{role}<|im_middle|>{content}<|im_end|>",
        config={
            "text_config": {**LATENT, "n_group": 2, "rope_parameters": YARN},
            "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8},
            "projection_hidden_size": 32,
        },
        ids={"vision_start_token_id": "<|media_begin|>", "vision_end_token_id": "<|media_end|>"},
        lacks={
            "video": "its own forward in transformers 5.23 has features for one frame of a chunk and tokens for all"
        },
    ),
    Tiny(
        "lfm2_vl",
        lambda tokenizer, template: t.Lfm2VlProcessor(
            t.Lfm2VlImageProcessor(
                tile_size=32,
                size={"height": 32, "width": 32},
                min_image_tokens=1,
                max_image_tokens=2,
                max_tiles=2,
                max_num_patches=8,
            ),
            tokenizer,
            chat_template=template,
        ),
        tokens={
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
            **{f"row_{row}_{column}": f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)},
        },
        config={
            "text_config": {
                "num_hidden_layers": 4,
                "layer_types": ["conv", "full_attention"] * 2,
                "block_multiple_of": 8,
            },
            "vision_config": {"patch_size": 16, "num_patches": 16},
            "projector_hidden_size": 32,
        },
    ),
    Tiny(
        "lfm3_vl",
        lambda tokenizer, template: t.Lfm3VlProcessor(
            image_processor=t.Qwen2VLImageProcessor(patch_size=16, size=area(16)),
            tokenizer=tokenizer,
            video_processor=t.Qwen3VLVideoProcessor(patch_size=16, size=area(16)),
            chat_template=template,
        ),
        tokens={**MEDIA, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
        image="<|vision_start|><image><|vision_end|>",
        video="<video>",
        config={"vision_config": {"patch_size": 16, "num_key_value_heads": 1}, "projector_hidden_size": 32},
        ids={"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    ),
    Tiny(
        "llama4",
        lambda tokenizer, template: t.Llama4Processor(
            t.Llama4ImageProcessor(size=SQUARE, max_patches=2), tokenizer, patch_size=7, chat_template=template
        ),
        tokens={
            name: f"<|{name}|>"
            for name in ("image", "image_start", "image_end", "patch", "tile_x_separator", "tile_y_separator")
        },
        image="<|image|>",
        turn="<|header_start|>{role}<|header_end|>\n\n{content}<|eot|>",
        config={
            "text_config": {
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 96,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0, 1, 0],
                "attention_chunk_size": 24,
                "layer_types": ["chunked_attention", "full_attention"] * 2,
                "floor_scale": 8,
                "rope_parameters": LLAMA3,
            },
            "vision_config": {
                "patch_size": 7,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        ids={"boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>", "image_token_id": "<|patch|>"},
    ),
    Tiny(
        "minimax_m3_vl",
        lambda tokenizer, template: t.MiniMaxM3VLProcessor(
            t.MiniMaxM3VLImageProcessor(size=area(14)),
            tokenizer,
            t.MiniMaxM3VLVideoProcessor(size={"height": 56, "width": 56}),
            chat_template=template,
        ),
        tokens={
            "image_token": "]<]image[>[",
            "video_token": "]<]video[>[",
            "start": "]<]start of image[>[",
            "end": "]<]end of image[>[",
        },
        image="]<]image[>[",
        video="]<]video[>[",
        turn="]~b]{role}\n{content}[e~[\n",
        config={
            "text_config": {
                "dense_intermediate_size": 96,
                "shared_intermediate_size": 32,
                "intermediate_size": 32,
                "rotary_dim": 8,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["full_attention", "minimax_m3_sparse"],
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_block_size": 4,
                "index_topk_blocks": 2,
            },
            "vision_config": {"image_size": 56},
            "projector_hidden_size": 32,
        },
        padded=BY_INDEX,
    ),
    Tiny(
        "molmo2",
        lambda tokenizer, template: t.Molmo2Processor(
            t.Molmo2ImageProcessor(size={"height": 56, "width": 56}, max_crops=2, overlap_margins=[1, 1]),
            t.Molmo2VideoProcessor(size={"height": 56, "width": 56}),
            tokenizer,
            chat_template=template,
        ),
        tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            **{
                name: f"<{name}>"
                for name in (
                    "im_patch",
                    "im_col",
                    "im_start",
                    "low_res_im_start",
                    "frame_start",
                    "im_end",
                    "frame_end",
                    "im_low",
                )
            },
        },
        image="<|image|>",
        video="<|video|>",
        config={
            "text_config": {"rope_parameters": YARN, "rope_scaling_layers": [1], "additional_vocab_size": 16},
            "vision_config": {"head_dim": 16, "image_size": [56, 56]},
            "adapter_config": {"vision_feature_layer": [1, 0], "head_dim": 16},
        },
        ids={
            "image_start_token_id": "<im_start>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "image_end_token_id": "<im_end>",
            "video_token_id": "<im_patch>",
            "frame_start_token_id": "<frame_start>",
            "frame_end_token_id": "<frame_end>",
        },
    ),
    Tiny(
        "nemotron_h_omni",
        lambda tokenizer, template: t.NemotronH_Omni_Reasoning_V3Processor(
            t.NemotronH_Omni_Reasoning_V3ImageProcessor(min_num_patches=4, max_num_patches=16),
            t.NemotronH_Omni_Reasoning_V3VideoProcessor(
                video_target_num_patches=4, norm_mean=[0.5] * 3, norm_std=[0.5] * 3
            ),
            tokenizer,
            t.ParakeetFeatureExtractor(),
            chat_template=template,
        ),
        tokens={
            "image_start_token": "<img>",
            "image_end_token": "</img>",
            "video_token": "<video>",
            "audio_token": "<so_embedding>",
            "audio_start": "<so_start>",
            "audio_end": "<so_end>",
        },
        video="<video>",
        config={
            "text_config": {
                "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 16,
                "ssm_state_size": 8,
                "n_groups": 2,
                "chunk_size": 8,
                "moe_shared_expert_intermediate_size": 32,
            },
            "vision_config": {
                "patch_size": 16,
                "image_size": 64,
                "max_img_size": 128,
                "num_cls_tokens": 1,
                "num_registers": 1,
                "summary_idxs": [0],
                "mlp_ratio": 2.0,
                "video_temporal_patch_size": 2,
            },
            "projector_hidden_size": 32,
            "vision_hidden_size": 32,
        },
        ids={"audio_token_id": "<so_embedding>"},
        lacks={"video": "its processor writes the text of a video in its own call alone"},
    ),
    Tiny(
        "ovis2",
        lambda tokenizer, template: t.Ovis2Processor(
            t.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=2),
            tokenizer,
            image_seq_length=4,
            chat_template=template,
        ),
        tokens={
            "start": "<IMG_START>",
            "atom": "<IMG_ATOM>",
            "grid": "<IMG_GRID>",
            "column": "<IMG_COL>",
            "row": "<IMG_ROW>",
            "end": "<IMG_END>",
        },
        image="<image>\n",
        config={"vision_config": {"vocab_size": 32}, "hidden_size": 64},
        ids={
            "image_token_id": "<IMG_ATOM>",
            "visual_indicator_token_ids": ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
        },
    ),
    Tiny(
        "paddleocr_vl",
        lambda tokenizer, template: t.PaddleOCRVLProcessor(
            t.PaddleOCRVLImageProcessor(size=area(14)), tokenizer, chat_template=template
        ),
        tokens={
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "start": "<|IMAGE_START|>",
            "end": "<|IMAGE_END|>",
            "video_token": "<|video_pad|>",
        },
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        config={"text_config": {"rope_parameters": THREE_AXES}, "vision_config": {"image_size": 56}},
        ids={
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|IMAGE_START|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
    ),
    Tiny(
        "perception_lm",
        lambda tokenizer, template: t.PerceptionLMProcessor(
            t.PerceptionLMVideoProcessor(size=SQUARE),
            t.PerceptionLMImageProcessor(tile_size=28, max_num_tiles=2),
            tokenizer,
            patch_size=14,
            pooling_ratio=1,
            chat_template=template,
        ),
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
        image="<|image|>",
        video="<|video|>",
        config={
            "vision_config": {
                "architecture": "vit_pe_core_large_patch14_336",
                "model_args": {
                    "embed_dim": 32,
                    "img_size": [28, 28],
                    "depth": 2,
                    "num_heads": 2,
                    "global_pool": "",
                    "use_post_transformer_norm": False,
                    "init_values": 0.1,
                    "ref_feat_shape": [2, 2],
                },
            }
        },
        needs="timm",
        lacks={"turns": "its processor does not take images of different numbers of tiles"},
    ),
    Tiny(
        "qianfan_ocr",
        lambda tokenizer, template: t.QianfanOCRProcessor(
            t.GotOcr2ImageProcessor(size=SQUARE, max_patches=2), tokenizer, image_seq_length=4, chat_template=template
        ),
        tokens={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        image="<image>\n",
        config={"vision_config": {"patch_size": [7, 7], "drop_path_rate": 0.0}, "image_seq_length": 4},
    ),
    Tiny(
        "smolvlm",
        smolvlm,
        tokens={
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
            "video_token": "<video>",
            **{f"row_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
        },
        video="<video>",
        turn="<|im_start|>{role}:{content}<end_of_utterance>\n",
    ),
    Tiny(
        "step3p7",
        lambda tokenizer, template: t.Step3p7Processor(
            t.Step3p7ImageProcessor(size={"height": 112, "width": 112}, patch_size=56),
            tokenizer,
            chat_template=template,
        ),
        tokens={
            name: f"<{name}>"
            for name in ("im_patch", "im_start", "im_end", "patch_start", "patch_end", "patch_newline")
        },
        image="<im_patch>",
        config={
            "text_config": {
                "num_hidden_layers": 4,
                "share_expert_dim": 32,
                "num_sliding_attention_heads": 6,
                "swiglu_limits": [None, 0.5] * 2,
                "swiglu_limits_shared": [None, 0.5] * 2,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 6,
                "mlp_layer_types": ["dense", "sparse"] * 2,
                "rope_parameters": {
                    "full_attention": {**LLAMA3, "partial_rotary_factor": 0.5},
                    "sliding_attention": {},
                },
            },
            "vision_config": {"image_size": 112, "mlp_ratio": 1.5, "max_position_embeddings": 64},
        },
    ),
    Tiny(
        "unlimited_ocr",
        lambda tokenizer, template: t.UnlimitedOcrProcessor(
            t.UnlimitedOcrImageProcessor(size={"height": 128, "width": 128}, tile_size=32, max_patches=2),
            tokenizer,
            chat_template=template,
        ),
        image="<image>\n",
        config={
            "vision_config": {
                "sam_config": {
                    "patch_size": 16,
                    "output_channels": 16,
                    "image_size": 128,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                    "mlp_dim": 48,
                    "downsample_channels": [16, 32],
                }
            }
        },
    ),
    Tiny(
        "video_llama_3",
        lambda tokenizer, template: t.VideoLlama3Processor(
            t.VideoLlama3ImageProcessor(size=area(14)),
            tokenizer,
            t.VideoLlama3VideoProcessor(size=area(14)),
            chat_template=template,
        ),
        tokens=QWEN["tokens"],
        image="<|image_pad|>",
        video="<|video_pad|>",
    ),
]
