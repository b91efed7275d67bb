"""Cached features of images: the same scores and gradients without the tower, and never those of something else."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from tests.modeling.samples import SAMPLES, batch_of, conversation
from tests.runs import colour_pairs, largest_difference, short_training, text_pairs, train, words
from vlmrm.batching.media import blank_image
from vlmrm.errors import ConfigError
from vlmrm.evaluation.sweep import sweep
from vlmrm.modeling import freeze, load_for_training, make_tiny
from vlmrm.scoring import load_scorer

# Of the distinct pictures in SAMPLES: red, blue, white, green, black, white and red in other sizes, yellow.
PICTURES = 8


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def checkpoint(request, tiny_checkpoint, tmp_path_factory) -> Path:
    if request.param == "qwen2_5_vl":
        return tiny_checkpoint
    return make_tiny(tmp_path_factory.mktemp("tiny") / request.param, arch=request.param)


def frozen(folder: Path, **options):
    model = load_for_training(folder, **options)
    freeze(model, vit=True)
    return model.eval()


def score(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def picture_batch(processor, colour: str, *more: str):
    return batch_of(processor, [conversation("What?", "It.", image) for image in (colour, *more)])


@contextmanager
def counted(model):
    """A list of how many images each run of the tower got."""
    runs: list[int] = []
    hook = model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: runs.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    try:
        yield runs
    finally:
        hook.remove()


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def later(folder: Path) -> None:
    """Every file was used a minute longer ago; the kernel's clock may stand still between two uses."""
    for path in stored(folder):
        status = path.stat()
        os.utime(path, (status.st_atime, status.st_mtime - 60))


def test_cache_hits_keep_scores_without_running_the_tower(checkpoint, tmp_path):
    batch = batch_of(AutoProcessor.from_pretrained(checkpoint), SAMPLES)
    results = []
    for cached in (False, True, True):
        model = frozen(checkpoint).train()
        if cached:
            model.use_vision_cache(tmp_path)
        with counted(model) as runs:
            scores = model(**batch).logits
        scores.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((runs, scores.detach(), gradients))
    (_, scores, gradients), (first, *missed), (second, *hit) = results
    assert first == [PICTURES] and second == [], "each distinct image once, and then never again"
    assert not any("visual" in name for name in gradients) and len(gradients) > 10
    for cached_scores, cached_gradients in (missed, hit):
        torch.testing.assert_close(cached_scores, scores, atol=1e-6, rtol=0)
        assert cached_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(cached_gradients[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_sharded_towers_run_in_every_batch_despite_caching(tiny_checkpoint, tmp_path):
    """Under ZeRO-3 a rank whose images are all cached gathers the tower's weights with the others."""
    processor, model = AutoProcessor.from_pretrained(tiny_checkpoint), frozen(tiny_checkpoint)
    batches = [picture_batch(processor, "red"), batch_of(processor, [conversation("What?", "A text.")])]
    expected = [score(model, batch) for batch in batches]
    model.use_vision_cache(tmp_path)
    model.touch_vision = blank_image(processor, model.placeholders)
    with counted(model) as runs:
        for _ in range(2):
            for batch, scores in zip(batches, expected, strict=True):
                torch.testing.assert_close(score(model, batch), scores, atol=0, rtol=0)
    assert runs == [1, 1, 1, 1]


def test_other_weights_types_sizes_or_pixels_are_computed(tiny_checkpoint, tmp_path):
    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    red = picture_batch(processor, "red")
    model = frozen(tiny_checkpoint)
    model.use_vision_cache(tmp_path)
    score(model, red)

    changed = frozen(tiny_checkpoint)
    with torch.no_grad():
        next(changed.model.visual.merger.parameters())[0] += 1e-3
    wider = conversation("What?", "It.", "red")
    wider[0]["content"][0]["image"] = Image.new("RGB", (84, 56), "red")
    almost = conversation("What?", "It.", "red")
    almost[0]["content"][0]["image"].putpixel((3, 3), (254, 0, 0))
    cases = {
        "weights": (changed, red),
        "type": (frozen(tiny_checkpoint, dtype="bfloat16"), red),
        "size": (frozen(tiny_checkpoint), batch_of(processor, [wider])),
        "pixels": (frozen(tiny_checkpoint), batch_of(processor, [almost])),
    }
    for case, (variant, batch) in cases.items():
        expected = score(variant, batch)
        variant.use_vision_cache(tmp_path)
        with counted(variant) as runs:
            for _ in range(2):
                torch.testing.assert_close(score(variant, batch), expected, atol=0, rtol=0, msg=case)
        assert runs == [1], case


@pytest.mark.parametrize("damage", ["cut", "one byte changed"])
def test_a_broken_file_is_recomputed_with_one_warning(tiny_checkpoint, tmp_path, caplog, damage):
    batch = picture_batch(AutoProcessor.from_pretrained(tiny_checkpoint), "red", "blue")
    model = frozen(tiny_checkpoint)
    expected = score(model, batch)
    model.use_vision_cache(tmp_path)
    score(model, batch)
    intact = {path: path.read_bytes() for path in stored(tmp_path)}
    for path, content in intact.items():
        last = bytes([content[-1] ^ 1])
        path.write_bytes({"cut": content[:-4], "one byte changed": content[:-1] + last}[damage])
    caplog.clear()  # of what was said once a process, when the model was loaded
    with caplog.at_level(logging.WARNING, logger="vlmrm"):
        torch.testing.assert_close(score(model, batch), expected, atol=1e-6, rtol=0)
    [message] = caplog.messages
    assert "computed anew" in message and str(tmp_path) in message
    assert {path: path.read_bytes() for path in stored(tmp_path)} == intact


def test_a_full_cache_drops_the_least_recently_used(tiny_checkpoint, tmp_path):
    processor, model = AutoProcessor.from_pretrained(tiny_checkpoint), frozen(tiny_checkpoint)
    batches = {colour: picture_batch(processor, colour) for colour in ("red", "green", "blue", "white")}
    model.use_vision_cache(tmp_path / "one")
    score(model, batches["red"])
    [file] = stored(tmp_path / "one")
    limit = 3.5 * file.stat().st_size  # room for three, and for two after it was full: KEPT is 0.9
    model.use_vision_cache(tmp_path / "all", gigabytes=limit / 1e9)
    with counted(model) as runs:
        for colour in ("red", "green", "blue", "red", "white"):
            score(model, batches[colour])
            later(tmp_path / "all")
            assert sum(path.stat().st_size for path in stored(tmp_path / "all")) <= limit
        assert len(runs) == 4
        score(model, batches["red"])
        score(model, batches["white"])
        assert len(runs) == 4, "used again, and the newest"
        score(model, batches["green"])
        assert len(runs) == 5, "used longest ago"


def test_what_cannot_work_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "file").touch()
    model = load_for_training(tiny_checkpoint)
    with pytest.raises(ConfigError, match="set freeze_vit: true without freeze_merger: false"):
        model.use_vision_cache(tmp_path)
    freeze(model, vit=True, merger=False)
    with pytest.raises(ConfigError, match="freeze_merger"):
        model.use_vision_cache(tmp_path)
    freeze(model, merger=True)
    with pytest.raises(ConfigError, match=r"vision_cache_dir .* cannot be written"):
        model.use_vision_cache(tmp_path / "file")
    with pytest.raises(ConfigError, match="vision_cache_gb is 0"):
        model.use_vision_cache(tmp_path, gigabytes=0)


def test_training_sweep_and_scorer_share_a_cache(train_here, tmp_path):
    data = [colour_pairs(tmp_path / "data", 8), text_pairs(tmp_path / "texts", 2)]
    folder, frozen_keys = tmp_path / "cache", {"freeze_vit": True}
    plain = train_here(data, "plain", **frozen_keys)
    cached, again = (train_here(data, name, vision_cache_dir=folder, **frozen_keys) for name in ("cached", "again"))
    for result in (cached, again):
        assert largest_difference(plain.model_dir, result.model_dir) < 1e-5

    before = {path: path.stat().st_ino for path in stored(folder)}
    keys = {"model_dirs": cached.model_dir, "dataset_path": data[0], "interventions": "none"}
    swept, without = (
        sweep(words(**keys, **more, output_file=tmp_path / f"{name}.csv"))
        for name, more in (("cached", {"vision_cache_dir": folder}), ("without", {}))
    )
    assert swept.rows[0]["average_margin"] == pytest.approx(without.rows[0]["average_margin"], abs=1e-5)
    row = conversation("What?", "It is red.")
    row[0]["content"].insert(0, {"type": "image", "image": str(tmp_path / "data" / "0_red.png")})
    [score] = load_scorer(cached.model_dir, vision_cache_dir=folder).score([row])
    assert [score] == pytest.approx(load_scorer(cached.model_dir).score([row]), abs=1e-5)
    assert {path: path.stat().st_ino for path in stored(folder)} == before, "nothing was computed again"


def test_ranks_that_have_different_images_cached_train_together(tmp_path, tiny_checkpoint, train_here):
    """Batches of one row: while one rank finds its picture, another computes its own, and a third case has none."""
    data = [colour_pairs(tmp_path / "data", 6), text_pairs(tmp_path / "texts", 4)]
    keys = {"freeze_vit": True, "per_device_train_batch_size": 1, "dtype": "float32"}
    plain = train_here(data, "plain", gradient_accumulation_steps=2, **keys)
    folder = tmp_path / "cache"
    for name in ("empty", "half"):
        arguments = short_training(tiny_checkpoint, data, tmp_path / name, vision_cache_dir=folder, **keys)
        train(*arguments, cwd=tmp_path, processes=2)
        assert largest_difference(plain.model_dir, tmp_path / name / "final") < 1e-4
        assert len(stored(folder)) == 6
        for path in sorted(stored(folder))[::2]:
            path.unlink()
