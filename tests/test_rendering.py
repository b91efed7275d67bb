"""Rendering gives exactly the tokens and pixels of the library's own `apply_chat_template`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from vlmrm.data.messages import to_messages
from vlmrm.errors import RowError
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rendering import MediaLimits, Renderer

REAL = Path(os.environ.get("VLMRM_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


CONVERSATIONS = {
    "text": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is 3."}],
    "system": [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "image", "image": picture(84, 56)}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "Noise."},
    ],
    "two images, two turns": [
        {"role": "user", "content": [{"type": "image", "image": picture(56, 112)}, {"type": "text", "text": "This?"}]},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": [{"type": "text", "text": "Or "}, {"type": "image", "image": picture(90, 60, 1)}]},
        {"role": "assistant", "content": "The other, naïve 図."},
    ],
    "image in the answer": [
        {"role": "user", "content": "Draw noise."},
        {"role": "assistant", "content": [{"type": "image", "image": picture(100, 100, 2)}]},
    ],
}


def check_against_library(renderer: Renderer, conversation) -> None:
    messages = to_messages(conversation, "user")
    rendered = renderer.render(messages)
    expected = renderer.processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert rendered.input_ids == expected["input_ids"][0].tolist()
    assert rendered.type_ids == expected["mm_token_type_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        if name in expected:
            ours = torch.cat([medium.tensors[name] for medium in rendered.media])
            torch.testing.assert_close(ours, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_apply_chat_template(tiny_checkpoint, name):
    check_against_library(Renderer(AutoProcessor.from_pretrained(tiny_checkpoint)), CONVERSATIONS[name])


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_apply_chat_template_of_the_real_processor(name):
    folder = REAL / "qwen2.5-vl-7b-processor"
    if not folder.exists():
        pytest.skip(f"no real processor in {folder}: set VLMRM_TEST_DATA")
    check_against_library(Renderer(AutoProcessor.from_pretrained(folder)), CONVERSATIONS[name])


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_video_equals_the_processor_on_the_same_frames(tmp_path, arch):
    processor = AutoProcessor.from_pretrained(make_tiny(tmp_path / arch, arch=arch))
    frames = [picture(56, 56, seed) for seed in range(4)]
    messages = to_messages(
        [
            {"role": "user", "content": [{"type": "video", "video": frames, "sample_fps": 2.0}, {"text": "What?"}]},
            {"role": "assistant", "content": "It."},
        ],
        "user",
    )
    rendered = Renderer(processor).render(messages)
    [video] = rendered.media
    from vlmrm.data.media import open_video

    tensor, metadata = open_video(messages[0]["content"][0], 2.0, 768)
    expected = processor(
        text=[Renderer(processor).text(messages)],
        videos=[tensor],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert rendered.input_ids == expected["input_ids"][0].tolist()
    assert rendered.type_ids == expected["mm_token_type_ids"][0].tolist()
    assert rendered.type_ids.count(2) > 0
    torch.testing.assert_close(video.tensors["pixel_values_videos"], expected["pixel_values_videos"], rtol=0, atol=0)


def test_an_image_used_twice_is_processed_once(tiny_checkpoint):
    renderer = Renderer(AutoProcessor.from_pretrained(tiny_checkpoint))
    cache = {}
    first = renderer.render(to_messages(CONVERSATIONS["system"], "user"), cache)
    second = renderer.render(to_messages(CONVERSATIONS["system"], "user"), cache)
    assert len(cache) == 1
    assert first.media[0] is second.media[0]


def test_pixel_limits_bound_the_image(tiny_checkpoint):
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    messages = to_messages(
        [
            {"role": "user", "content": [{"type": "image", "image": picture(280, 280)}]},
            {"role": "assistant", "content": "A"},
        ],
        "user",
    )
    large = Renderer(processor, MediaLimits(max_pixels=280 * 280)).render(messages)
    small = Renderer(processor, MediaLimits(min_pixels=28 * 28, max_pixels=56 * 56)).render(messages)
    assert large.type_ids.count(1) == 100
    assert small.type_ids.count(1) == 4


def test_a_text_that_spells_out_the_image_token_is_refused(tiny_checkpoint):
    renderer = Renderer(AutoProcessor.from_pretrained(tiny_checkpoint))
    messages = to_messages(
        [{"role": "user", "content": "<|image_pad|>"}, {"role": "assistant", "content": "A"}], "user"
    )
    with pytest.raises(RowError, match="spells that token out"):
        renderer.render(messages)


def test_trimming_cuts_the_answer_and_keeps_the_closing_tokens(tiny_checkpoint):
    renderer = Renderer(AutoProcessor.from_pretrained(tiny_checkpoint))
    messages = to_messages(CONVERSATIONS["system"], "user")
    long = [*messages[:-1], {"role": "assistant", "content": [{"type": "text", "text": "word " * 50}]}]
    limit = len(renderer.render(messages)) + 5
    trimmed = renderer.trim(long, limit, {})
    assert trimmed is not None
    assert len(trimmed) <= limit
    assert trimmed.input_ids[-2:] == renderer.render(messages).input_ids[-2:]
    assert trimmed.type_ids.count(1) == renderer.render(messages).type_ids.count(1)
    assert renderer.trim(long, 5, {}) is None
