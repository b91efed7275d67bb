"""Families with Qwen's processors, MiniCPM-V and Muse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as t

from vlmrm.modeling.families import BY_INDEX

from .grids import QWEN
from .sizes import area
from .tiny import Tiny

# Qwen's processors --------------------------------------------------------------------------------------------------
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
DELTA_NETS = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
QWEN2_VISION = {"window_size": 56}
QWEN3_VISION = {"num_position_embeddings": 64, "patch_size": 16}


def qwen(
    model_type: str, processor: Callable[..., Any], patch: int, text: Any, vision: Any, padded: str | None = None
) -> Tiny:
    video = t.Qwen3VLVideoProcessor if processor is t.Qwen3VLProcessor else t.Qwen2VLVideoProcessor
    return Tiny(
        model_type,
        lambda tokenizer, template: processor(
            image_processor=t.Qwen2VLImageProcessor(patch_size=patch, size=area(patch)),
            tokenizer=tokenizer,
            video_processor=video(patch_size=patch, size=area(patch)),
            chat_template=template,
        ),
        **QWEN,
        config={"text_config": text, "vision_config": vision},
        padded=padded,
    )


OMNI = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
EARS = {"num_mel_bins": 16, "output_dim": 64}


def omni(
    model_type: str, processor: Callable[..., Any], patch: int, text: Any, vision: Any, audio: Any, audio_id: str
) -> Tiny:
    return Tiny(
        model_type,
        lambda tokenizer, template: processor(
            t.Qwen2VLImageProcessor(patch_size=patch, size=area(patch)),
            t.Qwen2VLVideoProcessor(patch_size=patch, size=area(patch)),
            t.WhisperFeatureExtractor(feature_size=16),
            tokenizer,
            chat_template=template,
        ),
        tokens=OMNI,
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
        video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        config={"text_config": text, "vision_config": vision, "audio_config": {**EARS, **audio}},
        ids={
            audio_id: "<|AUDIO|>",
            "audio_start_token_id": "<|audio_bos|>",
            "vision_start_token_id": "<|vision_bos|>",
            "vision_end_token_id": "<|vision_eos|>",
        },
    )


QWENS = [
    qwen("qwen2_vl", t.Qwen2VLProcessor, 14, {"rope_parameters": THREE_AXES}, {"hidden_size": 64, "mlp_ratio": 2}),
    qwen("qwen2_5_vl", t.Qwen2_5_VLProcessor, 14, {"rope_parameters": THREE_AXES}, QWEN2_VISION),
    qwen("qwen3_vl", t.Qwen3VLProcessor, 16, {"rope_parameters": THREE_AXES}, QWEN3_VISION),
    qwen("qwen3_vl_moe", t.Qwen3VLProcessor, 16, {"rope_parameters": THREE_AXES}, QWEN3_VISION),
    qwen("qwen3_5", t.Qwen3VLProcessor, 16, DELTA_NETS, QWEN3_VISION),
    qwen("qwen3_5_moe", t.Qwen3VLProcessor, 16, DELTA_NETS, QWEN3_VISION),
    qwen(
        "qwen4_exp",
        t.Qwen3VLProcessor,
        16,
        {
            **DELTA_NETS,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_embed_dim": 16,
            "ngram_vocab_size_base": 64,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 4,
            "heads_per_ngram": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
        },
        QWEN3_VISION,
        BY_INDEX,
    ),
    omni(
        "qwen2_5_omni_thinker",
        t.Qwen2_5OmniProcessor,
        14,
        {"rope_parameters": THREE_AXES},
        QWEN2_VISION,
        {},
        "audio_token_index",
    ),
    omni(
        "qwen3_omni_moe_thinker",
        t.Qwen3OmniMoeProcessor,
        16,
        {"rope_parameters": {**THREE_AXES, "mrope_interleaved": True}},
        QWEN3_VISION,
        {"downsample_hidden_size": 16},
        "audio_token_id",
    ),
]

# MiniCPM-V: slices, and delta nets in the language model ------------------------------------------------------------
MINICPM = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def minicpm(model_type: str, processor: Any, image: Any, video: Any, ids: dict[str, str] | None = None) -> Tiny:
    return Tiny(
        model_type,
        lambda tokenizer, template: processor(
            image(scale_resolution=28, max_slice_nums=2, patch_size=7),
            video(scale_resolution=28, max_slice_nums=1, patch_size=7),
            tokenizer,
            chat_template=template,
        ),
        tokens=MINICPM,
        image="<|image_pad|>\n",
        video="<|video_pad|>\n",
        config={
            "insert_layer_id": 1,
            "text_config": {**DELTA_NETS, "rope_parameters": {"partial_rotary_factor": 0.5}},
            "vision_config": {"num_hidden_layers": 3, "patch_size": 7, "image_size": 56},
        },
        ids=ids or {},
    )


MINICPMS = [
    minicpm("minicpm_ocr", t.MiniCPMOcrProcessor, t.MiniCPMOcrImageProcessor, t.MiniCPMOcrVideoProcessor),
    minicpm("minicpmv4_6", t.MiniCPMV4_6Processor, t.MiniCPMV4_6ImageProcessor, t.MiniCPMV4_6VideoProcessor),
    minicpm(
        "minicpmv4_7",
        t.MiniCPMV4_7Processor,
        t.MiniCPMV4_6ImageProcessor,
        t.MiniCPMV4_6VideoProcessor,
        {
            "image_start_id": "<image>",
            "image_end_id": "</image>",
            "slice_start_id": "<slice>",
            "slice_end_id": "</slice>",
            "newline_id": "Ċ",  # a line feed, in the alphabet of byte-level tokenizers
        },
    ),
]

# Muse ---------------------------------------------------------------------------------------------------------------
MUSE = {
    "image_token": "<|patch|>",
    "video_token": "<|video|>",
    **{name: f"<|{name}|>" for name in ("image_start", "image_end", "vid_frame_separator", "vid_start", "vid_end")},
}
MUSE_TEXT = {"layer_rope_theta": [10000.0, 0]}
MUSE_VISION = {"pos_emb_height": 4, "pos_emb_width": 4}


def muse_media() -> tuple[t.MuseGlimmerImageProcessor, t.MuseGlimmerVideoProcessor]:
    return t.MuseGlimmerImageProcessor(max_image_tokens=6), t.MuseGlimmerVideoProcessor(max_video_frame_tokens=4)


MUSES = [
    Tiny(
        "muse_glimmer",
        lambda tokenizer, template: t.MuseGlimmerProcessor(*muse_media(), tokenizer, template),
        tokens=MUSE,
        image="<|patch|>",
        video="<|video|>",
        config={"vision_config": MUSE_VISION, "out_hidden_size": 128, "projector_hidden_size": 32},
    ),
    Tiny(
        "muse_spark",
        lambda tokenizer, template: t.MuseSparkProcessor(
            *muse_media(), tokenizer, t.MuseSparkFeatureExtractor(), template
        ),
        tokens={
            **MUSE,
            "audio_token": "<|audio|>",
            "audio_start": "<|soft_audio_start|>",
            "audio_end": "<|soft_audio_end|>",
        },
        image="<|patch|>",
        video="<|video|>",
        config={
            "text_config": {**MUSE_TEXT, "moe_hidden_size": 32, "mlp_layer_types": ["dense", "sparse"]},
            "vision_config": MUSE_VISION,
            "audio_config": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_hidden_layers": 4},
            "out_hidden_size": 128,
            "projector_hidden_size": 32,
        },
        ids={"audio_token_id": "<|audio|>"},
    ),
]


FAMILIES = [*QWENS, *MINICPMS, *MUSES]
