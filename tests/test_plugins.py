"""Plugins: what a user's own file adds is used, and its mistakes are one sentence."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image as Pillow

from vlmrm import cli, plugins
from vlmrm.config import parse
from vlmrm.conversation import Comparison, Image, Judgement, Message, Video, media_of, text_of
from vlmrm.errors import ConfigError
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.formats import LAYOUTS, LAYOUTS_TO_SCORE
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS
from vlmrm.plugins import load_plugins, without_plugins
from vlmrm.training.losses import PAIR_LOSSES, Objective

MINE = """
from dataclasses import replace

import torch

from vlmrm.conversation import Message
from vlmrm.formats import register as register_layout
from vlmrm.formats.layout import CHOSEN, REJECTED, ParsedRow, layout, prompt_turns
from vlmrm.formats.openai import read_messages
from vlmrm.measures.interventions import Intervention, register as register_intervention
from vlmrm.measures.metrics import Metric, register as register_metric, share_of
from vlmrm.training.losses import register as register_loss


def empty_answers(comparison, donors=()):
    return replace(comparison, answers=tuple((Message.of("assistant", ""),) for _ in comparison.answers))


@layout("better / worse", ["question", "better", "worse"])
def better_worse(row):
    prompt = prompt_turns(row, row["question"])
    answers = [read_messages(row[name], "assistant") for name in ("better", "worse")]
    return ParsedRow([(*prompt, *answer) for answer in answers], [CHOSEN, REJECTED], len(prompt))


register_layout(better_worse)
register_metric(Metric("sure", "margins above 3", lambda p: share_of(p.margins > 3), better="higher", column=True))
register_intervention(Intervention("empty_answers", empty_answers, "style", "no answers", "without answers"))
register_loss("hinge", lambda difference, tie: torch.relu(1 - difference))


def lengths(conversations):
    return [len(conversation.messages[-1].text) for conversation in conversations]
"""

EXAMPLE = Path(__file__).parents[1] / "examples/interventions.py"
PLAIN = "The dog is red. It weighs 3.5 kg!"
SMILE = " \N{SMILING FACE WITH SMILING EYES}"
EXPECTED = {
    "translated_answers": "Das Hund ist rot. Es weighs 3.5 kg!",
    "lower_case": "the dog is red. it weighs 3.5 kg!",
    "no_punctuation": "The dog is red It weighs 3.5 kg",
    "numbered_answers": "1. The dog is red.\n2. It weighs 3.5 kg!",
    "smiling_answers": f"The dog is red.{SMILE} It weighs 3.5 kg!{SMILE}",
    "repeated_question": f"You asked: What is shown?\n\n{PLAIN}",
}


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Generator[str]:
    """A plugin in the working folder, whose additions end with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(plugins.VARIABLE, "")
    (tmp_path / "mine.py").write_text(MINE)
    tables = {id(table): (table, table.copy()) for table in (LAYOUTS, LAYOUTS_TO_SCORE, INTERVENTIONS, METRICS)}
    modules = {*sys.modules}
    yield "mine.py"
    for table, before in tables.values():
        table.clear()
        table.extend(before) if isinstance(table, list) else table.update(before)
    PAIR_LOSSES.pop("hinge", None)
    for name in {*sys.modules} - modules:
        if name in ("mine", "interventions", "bad") or "examples" in name:
            del sys.modules[name]


def test_an_evaluation_uses_what_a_plugin_adds(mine, tmp_path):
    rows = [{"question": f"{i}?", "better": "long" * i, "worse": "no"} for i in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = ["--dataset_path", "rows.jsonl", "--scorer", "python:mine.lengths", "--interventions", "empty_answers"]
    keys += ["--output_file", "r.csv"]
    with pytest.raises(SystemExit, match="0"):
        cli.app(without_plugins(["eval", *keys, "--metric_for_best", "sure", "--plugin", mine]))
    [row] = pd.read_csv("r.csv").to_dict("records")
    assert row["sure"] == 0.75 and row["empty_answers_accuracy"] == 0.5 and row["preference_accuracy"] == 1


def test_a_configuration_names_plugins_for_process_and_children(mine, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("plugin: mine.py\nmodel_dirs: m\ninterventions: empty_answers")
    monkeypatch.chdir("/")
    [arguments] = parse([EvaluationArguments], str(tmp_path / "mine.yaml"), "eval")
    assert arguments.interventions == ["empty_answers"]
    assert os.environ[plugins.VARIABLE] == str(tmp_path / mine)
    values = {
        "chosen": 0,
        "rejected": 1,
        "irrelevant": False,
        "margin": 0.0,
        "tie": False,
        "weight": 1.0,
        "output": 0,
        "target": math.nan,
    }
    pairs = {name: torch.tensor([value]) for name, value in values.items()}
    loss = Objective(pair_loss="hinge")(torch.tensor([[0.25], [0.0]]), pairs, torch.ones(2))
    assert loss["preference"] == 0.75


def test_an_installed_package_names_its_plugins(mine, monkeypatch):
    class Entry:
        value = "mine"

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry] if group == "vlmrm.plugins" else [])
    load_plugins()
    assert "empty_answers" in INTERVENTIONS


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x = 1\n\nx.y", ["bad.py"], r"bad\.py:3: AttributeError"),
        ("def", ["bad.py"], r"bad\.py:1: SyntaxError"),
        (MINE + "register_layout(better_worse)", ["bad.py"], r"bad\.py:\d+: ConfigError: there is already a layout"),
        ("", ["absent.py"], r"no plugin .*absent\.py"),
        ("", ["no_such_module"], "no module no_such_module"),
        ("", [], "--plugin needs a file or a module"),
    ],
)
def test_a_broken_plugin_is_named_with_its_line(mine, tmp_path, text, words, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        without_plugins(["train", "--plugin", *words])


def test_the_examples_interventions_do_what_their_names_say(mine):
    before = {*INTERVENTIONS}
    load_plugins([str(EXAMPLE)])
    picture = Image(Pillow.effect_noise((84, 56), 100).convert("RGB"))
    prompt = (Message.of("user", picture, Video((picture.reference, Pillow.new("RGB", (84, 56)))), "What is shown?"),)
    answers = tuple((Message.of("assistant", text),) for text in (PLAIN, "`is. it`"))
    row = Comparison("row", prompt, answers, (Judgement((0, 1), (1, 0)),))
    changed = {name: INTERVENTIONS[name](row) for name in {*INTERVENTIONS} - before}
    texts = {name: text_of(it.answers[0]) for name, it in changed.items() if it.prompt == row.prompt}
    assert sorted(texts.pop("misspelt_answers")) == sorted(PLAIN) and texts.items() >= EXPECTED.items()
    assert PLAIN not in texts.values()
    assert text_of(changed["lower_case"].answers[1]) == "`is. it`", "code stays as it is"
    assert text_of(changed["paraphrased_question"].prompt).strip() == "What is depicted?"
    media = {name: media_of(changed[name].prompt) for name in ("mean_image", "blurred_image", "frozen_frames")}
    assert len(media["mean_image"][0].reference.getcolors()) == 1
    assert media["blurred_image"][0].reference.size == (84, 56)
    first, second = media["frozen_frames"][1].reference
    assert first is second
