"""The families of vision-language models: what the reward model must know of each beyond its configuration.

Most is found by itself: positions by the backbone's `get_rope_index`, masks by those that it makes, features by its
`get_image_features`. A family is declared here for what cannot be found, and because tests show that it is exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

# Paths in backbones. The Qwen family's mergers are inside its tower.
TOWERS = ("visual", "vision_tower", "vision_model", "vision_encoder", "image_tower", "video_tower")
MERGERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector", "vision_projection")
LANGUAGE_MODELS = ("language_model", "text_model")


@dataclass(frozen=True)
class Family:
    """A family: its name, the `model_types` of its configurations, and where it differs from the usual."""

    name: str
    model_types: Sequence[str] = ()
    towers: Sequence[str] = TOWERS  # paths of the vision towers in the backbone, those that exist
    # Paths of what maps a tower's features to the language model's width; empty where the tower does.
    mergers: Sequence[str] = MERGERS
    language_models: Sequence[str] = LANGUAGE_MODELS  # paths of the language model; the first that exists
    language_head: str | None = None  # path of a head over the hidden states in the backbone itself; it is left out
    # The field of `get_image_features` whose rows take the placeholders' places; None where all stand beside layers.
    feature_field: str | None = "pooler_output"
    constants: Sequence[str] = ()  # further fields that the backbone reads, which depend on no image
    images_see_all: bool = False  # the tokens of an image see those of later images of the conversation
    positions_of_batch: bool = False  # its `get_rope_index` is wrong for several conversations at once
    kinds_apart: bool = False  # a batch may have images or videos, and not both
    # Its tower takes what it derives from the sizes of images as keywords, by the names of Qwen's towers (`vision`).
    host_layout: bool = False
    grids_on_device: bool = False  # such a tower also reads the sizes on the device of the patches
    # Features take the places of placeholders and do nothing else, so that the language model can be given them there.
    in_place: bool = False
    videos_as_images: bool = False  # one pass of the tower takes images and videos, both patches with a grid
    trains_all: bool = False  # a batch with an image gives every weight a gradient, so that DDP need not search
    compiled: bool = False  # a GPU has shown that its blocks are faster compiled, and as exact
    padded: str | None = None  # why it cannot share prefixes; None where it can
    refused: str | None = None  # why it cannot be a reward model at all; None where it can
    tested: bool = True  # its shared batches are proved exact by the tests. Others prove it when they are loaded


BY_CONVOLUTIONS = "its short convolutions and their state layers cannot be forked here"
BY_WORDS = "its images are words, whose embeddings are those of the language model"
BY_INDEX = "an index chooses the keys of each token among those before it in the row"
as_qwen = partial(Family, trains_all=True, videos_as_images=True, host_layout=True)
as_glm = partial(Family, kinds_apart=True, host_layout=True, in_place=True)
FAMILIES = (
    Family("Aria", ["aria"]),
    Family("Aya Vision", ["aya_vision"]),
    Family("Chameleon", ["chameleon"], towers=["vqmodel"], mergers=[], padded=BY_WORDS),
    Family("Command A Vision", ["cohere2_vision"]),
    Family("Cohere Compass", ["cohere_compass"], host_layout=True),
    Family("Cosmos 3 Edge", ["cosmos3_edge"], mergers=["projector"]),
    Family("Cosmos 3 Omni", ["cosmos3_omni"]),
    Family("DeepSeek-OCR 2", ["deepseek_ocr2"]),
    Family("DeepSeek-VL", ["deepseek_vl"], mergers=["aligner"]),
    Family(
        "DeepSeek-VL, hybrid",
        ["deepseek_vl_hybrid"],
        towers=["vision_model", "high_res_vision_model"],
        mergers=["aligner", "high_res_vision_neck", "high_res_vision_proj"],
    ),
    Family("Dots 3 Note", ["dots3_note"], mergers=["vision_tower.merger"], padded=BY_INDEX),
    Family("ERNIE 4.5 VL", ["ernie4_5_vl_moe"], mergers=["resampler_model"]),
    Family("EXAONE 4.5", ["exaone4_5"], host_layout=True),
    Family("FastVLM", ["fast_vlm"]),
    Family("Gemma 3", ["gemma3"]),
    Family("Gemma 3n", ["gemma3n"], mergers=["embed_vision"]),
    Family("Gemma 4", ["gemma4"], mergers=["embed_vision"]),
    Family("Gemma 4 Unified", ["gemma4_unified"], towers=["embed_vision"], mergers=[]),
    as_glm("GLM-4.1V, 4.6V, GLM-GA", ["glm4v", "glm46v", "glmga"], grids_on_device=True),
    as_glm("GLM-4.5V", ["glm4v_moe"], grids_on_device=True),
    Family("GLM-5 Next", ["glm5_next"], padded=BY_INDEX),
    as_glm("GLM-OCR", ["glm_ocr"]),
    Family("GOT-OCR 2", ["got_ocr2"]),
    Family("Granite Docling", ["granite_docling"], mergers=["vision_model.connector"], constants=["router_logits"]),
    Family(
        "Granite Vision 4",
        ["granite4_vision"],
        mergers=["layerwise_projectors", "spatial_projectors"],
        feature_field=None,
    ),
    Family("HunYuan VL", ["hunyuan_vl"], mergers=["vision_tower.patch_merger"], positions_of_batch=True),
    Family("HyperCLOVA X Vision 2", ["hyperclovax_vision_v2"], mergers=["projector"]),
    Family("Idefics 2", ["idefics2"]),
    Family("Idefics 3", ["idefics3"]),
    Family("Inkling", ["inkling_mm_model"], mergers=[], padded=BY_CONVOLUTIONS),
    Family("Inkling 2", ["inkling2"], mergers=["vision_tower.merger"], padded=BY_CONVOLUTIONS),
    Family("InternVL", ["internvl"]),
    Family("Janus", ["janus"], mergers=["aligner"]),
    Family("Kimi K2.5", ["kimi_k25"], mergers=["mm_projector"]),
    Family("LFM2-VL", ["lfm2_vl"]),
    Family("LFM3-VL", ["lfm3_vl"]),
    Family("LightOnOCR", ["lighton_ocr"]),
    Family(
        "Llama 4",
        ["llama4"],
        language_models=["language_model.model"],
        language_head="language_model.lm_head",
        feature_field="last_hidden_state",
    ),
    Family("LLaVA", ["llava"]),
    Family("LLaVA-NeXT", ["llava_next"]),
    Family("LLaVA-NeXT-Video", ["llava_next_video"], mergers=["multi_modal_projector", "vision_resampler"]),
    Family("LLaVA-OneVision", ["llava_onevision"]),
    Family("MiniCPM-V 4.6, 4.7, MiniCPM-OCR", ["minicpmv4_6", "minicpmv4_7", "minicpm_ocr"], mergers=["merger"]),
    Family("MiniMax M3", ["minimax_m3_vl"], padded=BY_INDEX),
    Family("Mistral 3", ["mistral3"]),
    Family("Mistral Large 4", ["mistral_large4"], padded=BY_INDEX),
    Family("Molmo 2", ["molmo2"], images_see_all=True, kinds_apart=True),
    Family(
        "Muse Glimmer, Muse Spark",
        ["muse_glimmer", "muse_spark"],
        mergers=["vision_adapter", "vision_projection", "perception_emb_norm"],
    ),
    Family(
        "Nemotron-H Omni",
        ["nemotron_h_omni"],
        mergers=["vision_final_layernorm", "multi_modal_projector"],
        language_models=["language_model.model"],
        language_head="language_model.lm_head",
    ),
    Family("Ovis 2", ["ovis2"], mergers=["visual_embeddings_table"], constants=["visual_indicator_features"]),
    Family("PaddleOCR-VL", ["paddleocr_vl"], mergers=["projector"]),
    Family("Perception LM", ["perception_lm"]),
    Family("Qianfan-OCR", ["qianfan_ocr"]),
    as_qwen("Qwen2-VL", ["qwen2_vl"], in_place=True),
    as_qwen("Qwen2.5-VL, MiMo-VL", ["qwen2_5_vl"], in_place=True, compiled=True),
    Family("Qwen2.5-Omni, its thinker", ["qwen2_5_omni_thinker"], host_layout=True),
    as_qwen("Qwen3-VL", ["qwen3_vl"]),
    as_qwen("Qwen3-VL, mixtures of experts", ["qwen3_vl_moe"]),
    Family(
        "Qwen3-Omni, its thinker",
        ["qwen3_omni_moe_thinker"],
        mergers=["visual.merger", "visual.merger_list"],
        host_layout=True,
    ),
    as_qwen("Qwen3.5", ["qwen3_5"], in_place=True),
    as_qwen("Qwen3.5, mixtures of experts", ["qwen3_5_moe"], in_place=True),
    Family("Qwen4, experimental", ["qwen4_exp"], padded=BY_INDEX),
    Family("SmolVLM", ["smolvlm"]),
    Family("Step 3.7", ["step3p7"]),
    Family("Unlimited-OCR", ["unlimited_ocr"]),
    Family("VideoLLaMA 3", ["video_llama_3"], mergers=["projector"]),
    Family("Video-LLaVA", ["video_llava"]),
    Family("ViP-LLaVA", ["vipllava"]),
)
# Why a family cannot be a reward model at all, by the model type.
IMAGE_FIRST = "its processor writes one image before each text, wherever the conversation has it"
ENCODER_DECODER = "an encoder-decoder: a prompt and its answer are not one sequence of tokens"
REFUSED = {
    **dict.fromkeys(("blip-2", "fuyu", "git", "instructblip", "kosmos-2", "kosmos-2.5"), IMAGE_FIRST),
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), ENCODER_DECODER),
    "vision-encoder-decoder": ENCODER_DECODER,
    "blip": "its answers come from a decoder that sees one image and no chat",
    "diffusion_gemma": "it fills in blocks of masked tokens, and has no state of a finished answer",
    "emu3": "the words of an image depend on the sizes of others in its batch",
    "evolla": "it reads proteins, not images",
    "idefics": "its processor takes no text of a chat template, but lists of texts and images",
    "instructblipvideo": "its processor writes one video before each text, wherever the conversation has it",
    "mistral4": "it has no vision tower; it is a language model of Mistral 3",
    "mllama": "its images stand beside the text, in cross attention for which rendering writes no masks",
    "paligemma": "its prompt sees both ways and its answer does not, and its processor takes no conversations",
    "pi0": "it answers with the movements of a robot",
    "pp_chart2table": "its processor writes no places for images",
    "shieldgemma2": "its processor asks a question of its own about each image",
}
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def existing_parts(backbone: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Return the modules at those of the paths that exist."""
    parts = []
    for path in paths:
        with suppress(AttributeError):
            parts.append(backbone.get_submodule(path))
    return parts


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a configuration; for one that is not declared, the usual one, untested."""
    name = config.model_type
    return BY_MODEL_TYPE.get(name) or Family(name, [name], refused=REFUSED.get(name), tested=False)


@cache
def _function_parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(function)).parameters)


@cache
def _lists_of(function: Any) -> tuple[str, ...]:
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return tuple(p.name for p in parameters if str(p.annotation).startswith("list["))


def as_annotated(method: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return `inputs` with lists where a method takes them: Unlimited-OCR's splits by numbers of tiles."""
    lists = inputs.keys() & _lists_of(method.__func__)
    return inputs | {name: inputs[name].tolist() for name in lists if torch.is_tensor(inputs[name])}


def parameters_of(method: Any) -> tuple[str, ...]:
    """Return the names of a method's parameters, as its class declares them."""
    return _function_parameters(method.__func__)
