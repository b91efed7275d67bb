"""A reward model of this project as a classifier of frames."""

from __future__ import annotations

import pytest
import torch
from squares import SIDE, settings, small_classifier, small_config, write_squares
from torchvision.transforms.functional import to_pil_image

from vlmrm.errors import CheckpointError
from vlmrm.scoring import load_scorer
from vlmrm_robots.frames.checkpoint import load_classifier
from vlmrm_robots.frames.training import train_classifier


def prompted(path, **changes):
    values = {"architecture": "reward_model", "reward_model": str(path), "freeze_encoder": True}
    return small_classifier(**{**values, **changes})


def test_the_logit_is_the_margin_of_yes_over_no_after_the_pictures_and_the_prompt(tiny_reward_model):
    model = prompted(tiny_reward_model, image_keys=("front", "wrist"), prompt="Is the cup full?")
    chance = torch.Generator().manual_seed(0)
    images = {key: torch.rand(2, 3, SIDE, SIDE, generator=chance) for key in ("wrist", "front")}
    logits = model(images)
    scorer = load_scorer(tiny_reward_model)
    for moment in range(2):
        question = [
            *({"type": "image", "image": to_pil_image(images[key][moment])} for key in ("front", "wrist")),
            {"type": "text", "text": "Is the cup full?"},
        ]
        message = {"role": "user", "content": question}
        yes, no = (scorer.score([[message, {"role": "assistant", "content": word}]])[0] for word in ("Yes.", "No."))
        assert logits[moment].item() == pytest.approx(yes - no, rel=1e-3, abs=1e-5)


def test_only_its_scale_and_offset_are_trained_and_kept(tmp_path, tiny_reward_model):
    write_squares(tmp_path, positive=2, negative=1)
    values = settings(tmp_path, backbone="reward_model", reward_model=str(tiny_reward_model), prompt="Done?", lr=0.1)
    trained = train_classifier(values)
    loaded = load_classifier(trained.path)
    assert loaded.config.prompt == "Done?" and loaded.config.freeze_encoder
    assert set(loaded.model.state_dict()) == {"classifier.weight", "classifier.bias"}
    assert loaded.model.classifier.weight.item() != 1.0
    assert trained.path.stat().st_size < 10_000


def test_a_reward_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        prompted(tmp_path / "nowhere")
    assert small_config(architecture="reward_model").prompt == "Is the task done?"
