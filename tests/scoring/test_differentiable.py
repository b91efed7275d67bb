"""Scores of image tensors: the ordinary path's, with a gradient that leads a picture to a higher score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vlmrm import load_scorer
from vlmrm.errors import MediaError, RowError

PROMPT = "A red square."


@pytest.fixture(scope="module")
def scorer(tiny_reward_model):
    return load_scorer(tiny_reward_model, dtype="float32")


def pictures(count: int, height: int, width: int) -> torch.Tensor:
    """Smooth pictures in 8-bit levels, [N, 3, H, W] in [0, 1], with black and white in them."""
    y, x = torch.meshgrid(torch.linspace(0, 6, height), torch.linspace(0, 5, width), indexing="ij")
    waves = [torch.stack([(x + n).sin(), (y * (n + 1)).cos(), (x * y / 3).sin() * 2]) for n in range(count)]
    return ((torch.stack(waves) * 0.6 + 0.5).clamp(0, 1) * 255).round() / 255


def as_pil(images: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images]


def ordinary(scorer, images: torch.Tensor, prompt=PROMPT) -> list[float]:
    answers = [{"role": "assistant", "content": [{"type": "image", "image": image}]} for image in as_pil(images)]
    [scores] = scorer.score_groups([(prompt, answers)])
    return scores


@pytest.mark.parametrize("size", [(61, 90), (400, 300), (40, 33)])
def test_pixels_of_another_size_differ_by_little(scorer, size):
    images = pictures(2, *size)
    expected = scorer.loaded.processor.image_processor(as_pil(images), return_tensors="pt")
    found = [media.tensors for media in scorer.renderer.process_tensors(images)]
    assert torch.cat([media["image_grid_thw"] for media in found]).tolist() == expected["image_grid_thw"].tolist()
    level = 1 / 255 / min(scorer.loaded.processor.image_processor.image_std)
    difference = torch.cat([media["pixel_values"] for media in found]) - expected["pixel_values"]
    assert difference.abs().mean() < 0.5 * level and difference.abs().max() < 5 * level


def test_scores_are_the_ordinary_path_s(scorer):
    images = pictures(3, 56, 84)
    assert scorer.score_images(PROMPT, images).tolist() == pytest.approx(ordinary(scorer, images), abs=1e-5)
    about = [
        {"role": "user", "content": [{"type": "image", "image": as_pil(images)[2]}, {"type": "text", "text": "Edit."}]}
    ]
    found = scorer.score_images(about, images[:2]).tolist()
    assert found == pytest.approx(ordinary(scorer, images[:2], about), abs=1e-5)


def test_the_gradient_is_that_of_finite_differences(scorer):
    images = pictures(1, 56, 56).clamp(0.1, 0.9).requires_grad_()
    [gradient] = torch.autograd.grad(scorer.score_images(PROMPT, images).sum(), images)
    step = 1e-3 * gradient.sign()
    with torch.no_grad():
        rise = scorer.score_images(PROMPT, images + step) - scorer.score_images(PROMPT, images - step)
    assert rise.item() == pytest.approx(2 * (gradient * step).sum().item(), rel=0.05)


def test_a_gradient_step_moves_a_picture_towards_preference(scorer, tmp_path, tiny_reward_model):
    cached = load_scorer(tiny_reward_model, dtype="float32", vision_cache_dir=tmp_path / "cache")
    for each in (scorer, cached):
        images = pictures(2, 61, 90).requires_grad_()
        before = each.score_images(PROMPT, images)
        before.sum().backward()
        assert images.grad is not None and all(weight.grad is None for weight in each.model.parameters())
        moved = (images + 0.02 * images.grad.sign()).detach().clamp(0, 1)
        assert (each.score_images(PROMPT, moved) > before.detach()).all()
        rounded = (moved * 255).round() / 255  # what a file keeps of it
        assert (np.array(ordinary(each, rounded)) > np.array(before.tolist())).all()


def test_what_are_no_images_is_refused(scorer):
    with pytest.raises(RowError, match=r"\(3, 56, 56\): give floats \[N, 3, H, W\]"):
        scorer.score_images(PROMPT, torch.zeros(3, 56, 56))
    with pytest.raises(RowError, match="uint8"):
        scorer.score_images(PROMPT, torch.zeros(1, 3, 56, 56, dtype=torch.uint8))
    with pytest.raises(MediaError, match="the model cannot take the images"):
        scorer.score_images(PROMPT, torch.zeros(1, 3, 28, 9000))
