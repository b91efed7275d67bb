"""All families, in alphabetical order: the tiny checkpoints, and those that are refused by name."""

from __future__ import annotations

from vlmrm.modeling.families import REFUSED

from . import llavas, qwens, singles
from .grids import GRIDS
from .squares import SQUARES
from .tiny import Tiny

REFUSALS = [Tiny(model_type, refused=reason) for model_type, reason in REFUSED.items()]
FAMILIES: list[Tiny] = sorted(
    [*GRIDS, *SQUARES, *llavas.FAMILIES, *qwens.FAMILIES, *singles.FAMILIES, *REFUSALS],
    key=lambda family: family.model_type,
)

# What published sizes of a family switch on beyond the defaults of its configuration: `text` and `vision` are its
# parts, and a value is that of at least one tiny model.
PUBLISHED: dict[str, str] = {
    "ernie4_5_vl_moe": "text.moe_num_shared_experts=2",
    "exaone4_5": "text.rope_parameters.rope_type=llama3",
    "gemma3": "text.rope_parameters.full_attention.rope_type=linear",
    "gemma4": "text.num_kv_shared_layers text.use_double_wide_mlp text.hidden_size_per_layer_input "
    "text.attention_k_eq_v text.enable_moe_block text.use_bidirectional_attention=vision "
    "vision.use_clipped_linears vision.standardize",
    "gemma4_unified": "text.attention_k_eq_v",
    "granite4_vision": "deepstack_layer_map.1 spatial_target_layers.1",
    "hunyuan_vl": "text.rope_parameters.alpha",
    "internvl": "text.model_type=gpt_oss vision.use_qk_norm",
    "kimi_k25": "text.rope_parameters.rope_type=yarn",
    "llama4": "text.rope_parameters.rope_type=llama3 text.use_qk_norm text.attn_temperature_tuning",
    "llava": "text.model_type=mistral",
    "llava_next": "text.model_type=granite vision_feature_layer.1",
    "mistral3": "text.model_type=ministral3 text.model_type=mistral4 text.rope_parameters.llama_4_scaling_beta",
    "molmo2": "text.rope_parameters.rope_type=yarn",
    "step3p7": "text.swiglu_limits.1 text.rope_parameters.full_attention.rope_type=llama3 "
    "text.rope_parameters.full_attention.partial_rotary_factor",
    **dict.fromkeys(
        ("glm4v", "glm46v", "glm4v_moe", "glm_ocr"),
        "text.rope_parameters.mrope_section text.rope_parameters.partial_rotary_factor=0.5",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "text.rope_parameters.mrope_section"),
}
# What a tiny model leaves off that its configuration has on by default, and why.
LEFT_OFF = {
    "vision_use_head": "no family reads the pooled image",
    "tie_word_embeddings": "a reward model has no language head",
    "global_attn_indexes": "the tower of Unlimited-OCR has it; those of others take thousands of patches",
    "drop_path_rate": "it is drawn at random",
    **dict.fromkeys(("hidden_act", "norm_type"), "each token has its own"),
    **dict.fromkeys(("architecture", "global_pool", "model_args"), "timm makes it"),
    "full_attn_idxs": "the kinds of layers say the same",
    "summary_idxs": "no family reads the class tokens",
    "model_type": "several language models go with one tower",
    "audio_config": "sounds are not read here",
    "vq_config": "it makes images",
}
