"""ImageReward: the published arithmetic on tiny weights in the published names, whatever the company."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import conv2d, gelu, layer_norm, scaled_dot_product_attention
from transformers import BertTokenizer

from tests.rewards.built_in.tiny_clip import noise
from vlmrm.errors import CheckpointError
from vlmrm.rewards import RewardSet

SIZE, PATCH, VISION, TEXT, LAYERS = 28, 14, 128, 32, 2  # the vision encoder's heads are of 64
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "square", "two", "long"]
TEXT_HEADS = 4
CONFIG = {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": TEXT,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": TEXT_HEADS,
    "max_position_embeddings": 64,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "encoder_width": 768,  # the published code does not read it
    "add_cross_attention": True,
}
PROMPTS = ["a red square", "two", "a long long long red square", "two"]


def published_weights() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "blip.visual_encoder.cls_token": (1, 1, VISION),
        "blip.visual_encoder.pos_embed": (1, 1 + (SIZE // PATCH) ** 2, VISION),
        "blip.visual_encoder.patch_embed.proj.weight": (VISION, 3, PATCH, PATCH),
        "blip.visual_encoder.patch_embed.proj.bias": (VISION,),
        "blip.text_encoder.embeddings.word_embeddings.weight": (CONFIG["vocab_size"], TEXT),
        "blip.text_encoder.embeddings.position_embeddings.weight": (64, TEXT),
        "blip.vision_proj.weight": (16, VISION),
        "blip.text_proj.weight": (16, TEXT),
    }
    linear = {f"mlp.layers.{i}": s for i, s in zip((0, 2, 4, 6, 7), ((1024, TEXT), (128, 1024), (64, 128), (16, 64),
              (1, 16)), strict=True)}  # fmt: skip
    norms = {"blip.visual_encoder.norm": VISION, "blip.text_encoder.embeddings.LayerNorm": TEXT}
    for layer in range(LAYERS):
        block, text = f"blip.visual_encoder.blocks.{layer}", f"blip.text_encoder.encoder.layer.{layer}"
        norms |= {f"{block}.norm1": VISION, f"{block}.norm2": VISION, f"{text}.output.LayerNorm": TEXT}
        linear |= {
            f"{block}.attn.qkv": (3 * VISION, VISION),
            f"{block}.attn.proj": (VISION, VISION),
            f"{block}.mlp.fc1": (256, VISION),
            f"{block}.mlp.fc2": (VISION, 256),
            f"{text}.intermediate.dense": (64, TEXT),
            f"{text}.output.dense": (TEXT, 64),
        }
        for name, width in (("attention", TEXT), ("crossattention", VISION)):
            norms[f"{text}.{name}.output.LayerNorm"] = TEXT
            linear |= {
                f"{text}.{name}.self.query": (TEXT, TEXT),
                f"{text}.{name}.self.key": (TEXT, width),
                f"{text}.{name}.self.value": (TEXT, width),
                f"{text}.{name}.output.dense": (TEXT, TEXT),
            }
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    for name, width in norms.items():
        found |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.randn(width, generator=generator)}
    found["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
    return found


def published_score(weights: dict[str, torch.Tensor], ids: list[int], pixels: torch.Tensor) -> float:
    """One text and one picture [3, SIZE, SIZE], step by step."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)

    eye = "blip.visual_encoder"
    patches = conv2d(pixels[None], weights[f"{eye}.patch_embed.proj.weight"], weights[f"{eye}.patch_embed.proj.bias"],
                     stride=PATCH)[0].flatten(1).T  # fmt: skip
    x = torch.cat([weights[f"{eye}.cls_token"][0], patches]) + weights[f"{eye}.pos_embed"][0]
    for layer in range(LAYERS):
        block = f"{eye}.blocks.{layer}"
        x = x + linear(f"{block}.attn.proj", attend(*linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x, 1e-6))
                                                    .chunk(3, -1), VISION // 64))  # fmt: skip
        x = x + linear(f"{block}.mlp.fc2", gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6))))
    seen = norm(f"{eye}.norm", x, 1e-6)

    reader = "blip.text_encoder"
    y = weights[f"{reader}.embeddings.word_embeddings.weight"][ids]
    y = y + weights[f"{reader}.embeddings.position_embeddings.weight"][: len(ids)]
    y = norm(f"{reader}.embeddings.LayerNorm", y, 1e-12)
    for layer in range(LAYERS):
        block = f"{reader}.encoder.layer.{layer}"
        for name in ("attention", "crossattention"):
            part, source = f"{block}.{name}", y if name == "attention" else seen
            mixed = attend(linear(f"{part}.self.query", y), linear(f"{part}.self.key", source),
                           linear(f"{part}.self.value", source), TEXT_HEADS)  # fmt: skip
            y = norm(f"{part}.output.LayerNorm", linear(f"{part}.output.dense", mixed) + y, 1e-12)
        inner = linear(f"{block}.output.dense", gelu(linear(f"{block}.intermediate.dense", y)))
        y = norm(f"{block}.output.LayerNorm", inner + y, 1e-12)

    z = y[0]
    for number in (0, 2, 4, 6, 7):
        z = linear(f"mlp.layers.{number}", z)
    return (float(z) - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image-reward")
    torch.save(published_weights(), folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(CONFIG))
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures():
    return noise(*[(SIZE, SIZE)] * len(PROMPTS))


@pytest.fixture
def reward(folder):
    def make(**settings) -> RewardSet:
        places = {"model_name_or_path": str(folder), "tokenizer_name_or_path": str(folder)}
        return RewardSet({"reward_model": "ImageReward", "dtype": "float32", "device": "cpu", **places, **settings})

    return make


def expected(text: str, picture: Image.Image) -> float:
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.tensor((np.asarray(picture) / 255 - mean) / std).permute(2, 0, 1).float()
    ids = [2, *(WORDS.index(word) for word in text.split()), 3][:35]
    return published_score(published_weights(), ids, pixels)


def test_the_score_matches_the_published_alone_or_batched(reward, pictures):
    oracle = [expected(text, picture) for text, picture in zip(PROMPTS, pictures, strict=True)]
    assert np.ptp(oracle) > 0.01
    for size in (1, 4):
        found = reward(batch_size=size)(prompt=PROMPTS, image=pictures).total()
        assert np.allclose(found, oracle, rtol=5e-6, atol=0)


def test_a_video_is_mean_of_frames_or_first(reward, pictures):
    oracle = [expected("two", picture) for picture in pictures]
    columns = {"prompt": ["two", "two"], "video": [pictures[:3], pictures[3:]]}
    assert np.allclose(reward()(**columns).total(), [np.mean(oracle[:3]), oracle[3]], rtol=5e-6, atol=0)
    assert np.allclose(reward(video_frames="first")(**columns).total(), [oracle[0], oracle[3]], rtol=5e-6, atol=0)


def test_the_middle_of_a_wide_picture_is_seen(reward, pictures):
    wide = Image.new("RGB", (SIZE * 3, SIZE), "white")
    wide.paste(pictures[0], (SIZE, 0))
    found = reward()(prompt=["two"] * 2, image=[wide, pictures[0]]).total()
    assert found[0] == pytest.approx(found[1], rel=5e-6)


def test_prompts_over_35_tokens_are_cut_with_notice(reward, pictures, caplog):
    with caplog.at_level(logging.WARNING, "vlmrm"):
        rewards = reward()
        found = [rewards(prompt=["a red " * count], image=pictures[:1]).total()[0] for count in (20, 40)]
    assert found[0] == pytest.approx(found[1], abs=5e-6)
    assert caplog.text.count("reads the first 35") == 1


def test_other_weights_are_refused(reward, tmp_path):
    (tmp_path / "med_config.json").write_text(json.dumps(CONFIG))
    headless = {name: value for name, value in published_weights().items() if not name.startswith("mlp.")}
    for weights, named in ((headless, "head.0.weight is missing"), ({"x": torch.ones(2)}, "BLIP's vision encoder")):
        torch.save(weights, tmp_path / "ImageReward.pt")
        with pytest.raises(CheckpointError, match=named):
            reward(model_name_or_path=str(tmp_path))
    (tmp_path / "med_config.json").unlink()
    with pytest.raises(CheckpointError, match="med_config"):
        reward(model_name_or_path=str(tmp_path))
