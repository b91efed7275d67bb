"""The GenEval reward on tiny random models, and its detections and colours against plain computing."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    SwinConfig,
)

from vlmrm.rewards import RewardSet
from vlmrm.rewards.built_in.gen_eval import (
    COLORS,
    ColorClassifier,
    Detection,
    Detector,
    conditions,
    confident_objects,
    graded,
    requirements,
    strict,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """A tiny Mask2Former of four classes and a tiny CLIP, with random weights."""
    folder = tmp_path_factory.mktemp("gen_eval")
    torch.manual_seed(0)
    swin = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    detector = Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=10,
        id2label=dict(enumerate(["dog", "mouse", "cat", "car"])), init_std=1.0,
    )  # fmt: skip
    Mask2FormerForUniversalSegmentation(detector).save_pretrained(folder / "detector")
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder / "detector")

    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "-"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    clip = CLIPConfig(
        text_config={
            "vocab_size": len(words), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "eos_token_id": len(words) - 1, "bos_token_id": len(words) - 2,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        projection_dim=8,
    )  # fmt: skip
    CLIPModel(clip).save_pretrained(folder / "clip")
    CLIPProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32),
        CLIPTokenizer({word: number for number, word in enumerate(words)}, []),
    ).save_pretrained(folder / "clip")
    return {"detector_path": str(folder / "detector"), "clip_path": str(folder / "clip")}


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_objects_are_detected_under_their_detector_names(models, tmp_path):
    """COCO's own, VOC's, and those of configurations on the hub."""
    theirs = ["mouse", "motorbike", "diningtable", "traffic_light"]
    geneval_s = ["computer mouse", "motorcycle", "dining table", "traffic light"]
    shutil.copytree(models["detector_path"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = dict(enumerate(theirs))
    del config["label2id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewards = RewardSet({"reward_model": "gen_eval", **models, "detector_path": str(tmp_path)})
    rows = [{"tag": "single_object", "include": [{"class": name, "count": 1}]} for name in geneval_s]
    scored = rewards(prompt=geneval_s, image=[noise(64, 64, 0)] * 4, metadata=rows)
    assert not scored.failures["default"]
    assert {label for found in scored.info["default"].values() for label in found["found"]} <= set(geneval_s)


@torch.no_grad()
def test_detections_match_transformers_at_its_own_size(models):
    detector = Detector(models["detector_path"], torch.device("cpu"))
    detector.processor = Mask2FormerImageProcessor(size={"height": 384, "width": 384})
    image = noise(384, 384, 3)
    found = [each for each in detector(image) if each.score > 0.35]
    outputs = detector.model(**detector.processor(image, return_tensors="pt"))
    [expected] = detector.processor.post_process_instance_segmentation(
        outputs, threshold=0.35, target_sizes=[(384, 384)], return_binary_maps=True
    )
    by_score = sorted(
        zip(expected["segments_info"], expected["segmentation"], strict=True), key=lambda each: -each[0]["score"]
    )
    found.sort(key=lambda each: -each.score)
    assert len(found) == len(by_score) > 2
    for mine, (info, mask) in zip(found, by_score, strict=True):
        assert mine.score == pytest.approx(info["score"], abs=1e-5)
        assert mine.label == detector.labels[info["label_id"]]
        np.testing.assert_array_equal(mine.mask, mask.bool().numpy())


def test_a_colour_is_the_nearest_over_three_sentences(models):
    objects = [Detection("car", 1.0, (0, 0, 40, 40)), Detection("car", 1.0, (10, 20, 60, 60))]
    image = noise(64, 64, 1)
    model = CLIPModel.from_pretrained(models["clip_path"]).eval().requires_grad_(False)
    processor = CLIPProcessor.from_pretrained(models["clip_path"])

    def unit(output: torch.Tensor) -> torch.Tensor:
        return output / output.norm()

    expected = []
    for each in objects:
        seen = processor(images=image.crop(each.box), return_tensors="pt")
        scores = []
        for color in COLORS:
            texts = [f"a photo of a {color} car", f"a photo of a {color}-colored car", f"a photo of a {color} object"]
            sides = [model(**processor(text=text, return_tensors="pt"), **seen) for text in texts]
            direction = unit(sum(unit(side.text_embeds[0]) for side in sides))
            scores.append((direction @ unit(sides[0].image_embeds[0])).item())
        expected.append(COLORS[int(np.argmax(scores))])
    assert ColorClassifier(models["clip_path"], torch.device("cpu"))(image, objects) == expected


@pytest.mark.parametrize(("score", "rule"), [("strict", strict), ("graded", graded)])
def test_the_reward_applies_the_rules_to_detections(models, score, rule):
    rows = [
        {"tag": "colors", "include": [{"class": "dog", "count": 2, "color": color}], "exclude": []} for color in COLORS
    ] + [{"tag": "counting", "include": [{"class": "cat", "count": 1}]}]
    images = [noise(90, 60, number) for number in range(len(rows))]
    rewards = RewardSet({"name": "g", "reward_model": "Gen_Eval", "score": score, "batch_size": 4, **models})
    scored = rewards(prompt=["dogs"] * len(rows), image=images, metadata=[*rows[:-1], json.dumps(rows[-1])])
    detector = Detector(models["detector_path"], torch.device("cpu"))
    colors = ColorClassifier(models["clip_path"], torch.device("cpu"))
    judged = []
    for image, row in zip(images, rows, strict=True):
        objects = confident_objects(detector(image), row["tag"])
        judged.append(
            conditions(requirements(row, detector.labels), objects, lambda found, on=image: colors(on, found))
        )
    assert scored.rewards["g"].tolist() == [rule(each) for each in judged]
    assert len({graded(each) for each in judged}) > 1
    assert scored.info["g"][0]["conditions"] == [[each.text, each.met] for each in judged[0]]


def test_a_row_that_is_wrong_fails_alone(models):
    rewards = RewardSet({"name": "g", "reward_model": "gen_eval", "on_failure": "mask", **models})
    good = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    scored = rewards(prompt=["a cat"] * 2, image=[noise(64, 64, 0)] * 2, metadata=[good, {"tag": "single_object"}])
    assert np.isnan(scored.rewards["g"]).tolist() == [False, True]
    assert scored.failures["g"] == {1: "its metadata: include is missing"}
