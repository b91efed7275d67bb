"""The card of a frame classifier says its figures and its verdict, and replaces nothing but cards."""

from __future__ import annotations

import pytest
from squares import settings, write_squares

from vlmrm.errors import ConfigError
from vlmrm_robots.frames.card import card, card_path, write_card
from vlmrm_robots.frames.checkpoint import read_config
from vlmrm_robots.frames.training import train_classifier


def test_a_training_writes_the_card_of_its_classifier(tmp_path):
    options = settings(write_squares(tmp_path))
    trained = train_classifier(options)
    text = card_path(options.output_checkpoint).read_text(encoding="utf-8")
    metrics = read_config(options.output_checkpoint).metrics
    assert f"| AUC | {metrics['auc']:.4f} | {metrics['auc_low']:.4f} to {metrics['auc_high']:.4f} |" in text
    assert (
        f"| failed ones with a frame above it | {metrics['false_fires']:.0f} of {metrics['failed_episodes']:.0f} |"
        in text
    )
    assert f"threshold {trained.config.threshold:.4g}" in text
    assert ("**It qualifies as a reward.**" in text) == bool(trained.config.qualified)


def test_the_card_says_why_a_classifier_is_no_reward(tmp_path):
    config = train_classifier(settings(write_squares(tmp_path))).config
    doubtful = config.model_copy(update={"qualified": False, "unqualified_because": "its AUC is 0.510"})
    assert "**It does not qualify as a reward: its AUC is 0.510. A policy takes it with" in card("model", doubtful)
    unmeasured = config.model_copy(update={"qualified": None, "metrics": {}})
    assert "Nobody has measured" in (text := card("model", unmeasured)) and "AUC" not in text


def test_another_file_in_the_place_of_the_card_is_kept_before_anything_is_trained(tmp_path):
    options = settings(write_squares(tmp_path))
    path = card_path(options.output_checkpoint)
    path.write_text("my notes", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path.name} was not written by this command"):
        train_classifier(options)
    assert not options.output_checkpoint.exists() and path.read_text(encoding="utf-8") == "my notes"
    path.unlink()
    config = train_classifier(options).config
    assert write_card(options.output_checkpoint, config) == path  # in place of the earlier card
