"""The reward model computes one score a conversation, whatever stands beside it, and its head stays exact."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor

from tests.modeling.samples import SAMPLES, batch_of, scores
from vlmrm.batching.media import blank_image
from vlmrm.modeling import load_for_training, make_tiny
from vlmrm.modeling.tiny import ARCHITECTURES


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp(request.param), arch=request.param)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_for_training(checkpoint).eval()


@pytest.fixture(scope="module")
def processor(checkpoint):
    return AutoProcessor.from_pretrained(checkpoint)


@pytest.fixture
def plain(tiny_checkpoint):
    """A fresh Qwen2.5-VL reward model and its processor, to change as a test likes."""
    return load_for_training(tiny_checkpoint), AutoProcessor.from_pretrained(tiny_checkpoint)


def gradients(model, **batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).logits.pow(2).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def test_score_does_not_depend_on_company_or_padding(model, processor):
    alone = torch.cat([scores(model, processor, [sample]) for sample in SAMPLES])
    assert alone.std() > 1e-3
    for side in ("left", "right"):
        torch.testing.assert_close(scores(model, processor, SAMPLES, side), alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(scores(model, processor, SAMPLES[::-1], side).flip(0), alone, atol=1e-5, rtol=0)


def test_score_is_the_head_on_the_last_state(checkpoint, processor):
    model = load_for_training(checkpoint, head="mlp").eval()
    weights = dict(model.named_parameters())
    for sample in SAMPLES[:4]:
        batch = batch_of(processor, [sample])
        with torch.no_grad():
            hidden = model.model(**batch, use_cache=False).last_hidden_state[0, -1]
            inner = weights["score_hidden.0.weight"] @ hidden + weights["score_hidden.0.bias"]
            expected = model.score.weight[0] @ torch.nn.functional.silu(inner)
            torch.testing.assert_close(model(**batch).logits, expected.reshape(1, 1), atol=1e-5, rtol=0)


def test_images_and_videos_may_stand_in_one_conversation(model, processor):
    video = torch.randint(0, 255, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.manual_seed(0))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "same?"}]}]
    batch = dict(
        processor(
            text=[processor.apply_chat_template(messages)],
            images=[SAMPLES[0][0]["content"][0]["image"]],
            videos=[video],
            return_tensors="pt",
            videos_kwargs={"do_sample_frames": False},
        )
    )
    with torch.no_grad():
        hidden = model.model(**batch, use_cache=False).last_hidden_state
        expected = hidden[:, -1] @ model.score.weight.T
        torch.testing.assert_close(model(**batch).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("missing", ["mm_token_type_ids", "image_grid_thw", "pixel_values"])
def test_half_an_image_is_refused(plain, missing):
    """The backbone would score it: at the wrong positions, or without seeing it."""
    model, processor = plain
    batch = batch_of(processor, SAMPLES[:1])
    del batch[missing]
    with pytest.raises(ValueError, match="a batch with images needs"):
        model(**batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_half_precision_keeps_the_head_exact(tiny_checkpoint, tmp_path, dtype, head):
    model = load_for_training(tiny_checkpoint, head=head, dtype=dtype).eval()
    weights = {name: weight.dtype for name, weight in model.named_parameters()}
    assert {t for name, t in weights.items() if name.startswith("score")} == {torch.float32}
    assert {t for name, t in weights.items() if not name.startswith("score")} == {dtype}

    model.save_pretrained(tmp_path)
    again = load_for_training(tmp_path, head=head, dtype="auto")
    assert {name: weight.dtype for name, weight in again.named_parameters()} == weights

    batch = batch_of(AutoProcessor.from_pretrained(tiny_checkpoint), SAMPLES)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(**batch).logits
    # More digits than half precision has.
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(dtype).float())


def test_touching_vision_gives_gradients_without_changing_scores(model, processor):
    batch = batch_of(processor, SAMPLES[4:6])
    untouched = gradients(model, **batch)
    expected = model(**batch).logits
    assert not any("visual" in name for name in untouched)
    model.touch_vision = blank_image(processor, model.placeholders)
    try:
        touched = gradients(model, **batch)
        torch.testing.assert_close(model(**batch).logits, expected, atol=0, rtol=0)
    finally:
        model.touch_vision = None
    assert set(touched) == {name for name, _ in model.named_parameters()}
    for name, gradient in touched.items():
        torch.testing.assert_close(gradient, untouched.get(name, torch.zeros_like(gradient)), msg=name)
