"""Make a tiny vision-language checkpoint with random weights, without a download: for tests, the demo and dry runs.

It has every file of a downloaded one (config, weights, byte-level tokenizer, image and video processor, chat
template), so whatever trains it trains the real thing.
"""

from __future__ import annotations

import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vlmrm.errors import ConfigError
from vlmrm.files import make_folder, require_new_folder
from vlmrm.modeling.checkpoint import load_for_training, load_processor
from vlmrm.modeling.manifest import save_reward_files, write_complete

SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]

# Qwen's pre-tokenisation: contractions, words with their leading space, single digits, punctuation, white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The tokenizer learns its merges from the words of the chat template and of the digits demo.
CORPUS = [
    "system\nYou are a helpful assistant.\nuser\nWhich digit is this?\nassistant\nThis is a handwritten digit.",
    "You are MiMo, an AI assistant developed by Xiaomi.",
    "The digit is zero. It is one two three four five six seven eight nine, even or odd.",
    "What is in the image?\nA photo of the number.\nDraw the digit",
]

# Weights this large let two layers learn the demo; with the usual 0.02 so small a model learns nothing.
WEIGHT_STD = 0.1

MIMO_SYSTEM_PROMPT = "You are MiMo, an AI assistant developed by Xiaomi."

TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
# MiMo-VL beside Qwen2.5-VL-7B: deeper and wider, four query heads to a key head, another epsilon.
MIMO_TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 516,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
}
# Qwen3.5: three gated delta nets to a layer of attention, whose heads rotate a quarter of their channels.
DELTA_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ARCHITECTURES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5", "mimo_vl")


def make_tiny(folder: str | Path, arch: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Write a tiny `*ForConditionalGeneration` checkpoint of `arch` into `folder`, and return the folder.

    `arch` is one of `ARCHITECTURES`; `mimo_vl` is a Qwen2.5-VL in MiMo-VL's proportions. Equal seeds write equal
    bytes. Images are 56x56 (64x64 for Qwen3-VL and Qwen3.5) and larger.
    """
    if arch not in ARCHITECTURES:
        raise ConfigError(f"there is no tiny {arch!r}: choose one of {', '.join(ARCHITECTURES)}.")
    folder = _new_folder(folder)
    tokenizer = _tokenizer()
    _processor(arch, tokenizer).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(_config(arch, tokenizer), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def make_tiny_reward_model(folder: str | Path, arch: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """Write a tiny reward model of `arch` with an untrained linear head, as training would save it."""
    folder = _new_folder(folder)
    with tempfile.TemporaryDirectory() as base:
        make_tiny(base, arch, seed)
        load_for_training(base, seed=seed, dtype=torch.float32).save_pretrained(folder)
        processor = load_processor(base)
    save_reward_files(folder, processor=processor, head="linear", provenance={})
    write_complete(folder, world_size=1, step=0)
    return folder


def _new_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    require_new_folder(folder, "the tiny model")
    make_folder(folder)
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=1
        ),
    )
    bpe = json.loads(tokenizer.to_str())["model"]
    merges: Any = [tuple(merge) for merge in bpe["merges"]]
    # Through Qwen's own class, so that the checkpoint names it and reloads as it.
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        additional_special_tokens=SPECIAL_TOKENS[1:],
        model_max_length=4096,
    )


def _processor(arch: str, tokenizer: Qwen2Tokenizer) -> ProcessorMixin:
    template = resources.files("vlmrm.modeling").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    if arch == "mimo_vl":
        template = template.replace("You are a helpful assistant.", MIMO_SYSTEM_PROMPT)
    patch = 16 if arch in ("qwen3_vl", "qwen3_5") else 14
    pixels = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    make, make_video = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
        "qwen3_5": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }.get(arch, (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor))
    return make(
        image_processor=Qwen2VLImageProcessor(patch_size=patch, size=pixels),
        video_processor=make_video(patch_size=patch, size=pixels),
        tokenizer=tokenizer,
        chat_template=template,
    )


def _config(arch: str, tokenizer: Qwen2Tokenizer) -> PreTrainedConfig:
    text = {"mimo_vl": MIMO_TEXT, "qwen3_5": DELTA_TEXT}.get(arch, TEXT)
    # As in the real checkpoints, there are more embedding rows than tokens; MiMo-VL and Qwen differ in how many.
    rows = 64 if arch == "mimo_vl" else 16
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return AutoConfig.for_model(
        "qwen2_5_vl" if arch == "mimo_vl" else arch,
        text_config={
            **text,
            "vocab_size": len(tokenizer) + rows - len(tokenizer) % rows,
            "head_dim": 32 if arch == "qwen3_5" else 16,
            "max_position_embeddings": 4096,
            "initializer_range": WEIGHT_STD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 1, 1] if arch == "qwen3_5" else [2, 3, 3],  # half of the rotated channels
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config=_vision(arch, out=text["hidden_size"]),
        tie_word_embeddings=False,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _vision(arch: str, out: int) -> dict[str, Any]:
    common = {"depth": 2, "num_heads": 4, "initializer_range": WEIGHT_STD}
    if arch == "qwen2_vl":
        return {**common, "embed_dim": 64, "hidden_size": out, "mlp_ratio": 2}
    widths = {**common, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": out}
    if arch == "qwen3_vl":
        return {**widths, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    if arch == "qwen3_5":
        return {**widths, "num_position_embeddings": 64}
    return {**widths, "window_size": 112, "fullatt_block_indexes": [1]}
