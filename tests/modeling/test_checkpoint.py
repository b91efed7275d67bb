"""Checkpoints come back as they were saved, and broken or foreign ones are refused in one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests import preloaded
from tests.modeling.samples import scores
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.modeling import (
    load_checkpoint,
    load_for_training,
    load_processor,
    provenance,
    save_reward_files,
    write_complete,
)
from vlmrm.modeling.manifest import find_file


@pytest.fixture
def copy(tiny_reward_model, tmp_path) -> Path:
    """A reward model to break."""
    return Path(shutil.copytree(tiny_reward_model, tmp_path / "copy"))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_round_trip_scores_the_same(tiny_checkpoint, tmp_path, head):
    processor = load_processor(tiny_checkpoint)
    model = load_for_training(tiny_checkpoint, head=head, seed=5)
    expected = scores(model, processor)
    model.save_pretrained(tmp_path)
    save_reward_files(
        tmp_path,
        processor=processor,
        head=head,
        shown={"min_pixels": 3136},
        provenance=provenance({"base_model": "tiny"}),
        reward_mean=0.5,
        reward_std=2.0,
    )
    write_complete(tmp_path, world_size=1, step=3)

    loaded = load_checkpoint(tmp_path)
    assert torch.equal(scores(loaded.model, loaded.processor), expected)
    assert not loaded.model.training
    assert loaded.info["head"] == head
    assert loaded.info["architecture"] == "Qwen2_5_VLForSequenceClassification"
    assert (loaded.info["min_pixels"], loaded.info["max_pixels"]) == (3136, None)
    assert (loaded.info["reward_mean"], loaded.info["reward_std"]) == (0.5, 2.0)
    assert loaded.info["provenance"]["versions"]["torch"] == metadata.version("torch")
    further = load_for_training(tmp_path, head=head, seed=6)
    assert torch.equal(further.score.weight, model.score.weight)


def test_head_is_made_from_the_seed(tiny_checkpoint):
    torch.manual_seed(123)
    first = load_for_training(tiny_checkpoint, head="mlp", seed=1)
    state = torch.random.get_rng_state()
    second = load_for_training(tiny_checkpoint, head="mlp", seed=1)
    third = load_for_training(tiny_checkpoint, head="mlp", seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in ("score.weight", "score_hidden.0.weight"):
        assert torch.equal(first.get_parameter(name), second.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), third.get_parameter(name))


def test_a_reward_model_keeps_its_kind_of_head(tiny_reward_model):
    with pytest.raises(CheckpointError, match=r"linear head: set head: linear"):
        load_for_training(tiny_reward_model, head="mlp")
    with pytest.raises(ConfigError, match="'ranker'"):
        load_for_training(tiny_reward_model, head="ranker")


def test_a_plain_language_model_does_not_score(tiny_checkpoint):
    with pytest.raises(CheckpointError, match="Qwen2_5_VLForConditionalGeneration and has no reward head of ours"):
        load_checkpoint(tiny_checkpoint)


NORM = "model.language_model.norm.weight"


@pytest.mark.parametrize("load", [load_checkpoint, load_for_training])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("score.weight"), r"head \(score.weight\) is missing"),
        (
            lambda w: w.update({"rm_head.weight": w.pop("score.weight")}),
            r"another trainer's layout \(rm_head\.weight\)",
        ),
        (lambda w: w.pop(NORM), rf"lacks {NORM}, 1 weights"),
        (lambda w: w.update(extra=torch.ones(1)), r"more than its architecture knows: extra"),
        (lambda w: w.update({NORM: torch.ones(9)}), r"other shapes.*norm.weight"),
    ],
)
def test_wrong_weights_are_named(copy, load, change, message):
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / "COMPLETE.json").unlink()
    with pytest.raises(CheckpointError, match=message):
        load(copy)


@pytest.fixture
def language_model(tiny_checkpoint, tmp_path) -> Path:
    """A copy of a checkpoint without a head of ours."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "language-model"))


VALUE_HEAD = {"v_head.summary.weight": torch.ones(1, 128), "v_head.summary.bias": torch.ones(1)}


@pytest.mark.parametrize("load", [load_checkpoint, load_for_training])
@pytest.mark.parametrize(("save", "name"), [(save_file, "value_head.safetensors"), (torch.save, "rm_head.pt")])
def test_a_trained_head_in_another_file_is_named(language_model, load, save, name):
    """LLaMA-Factory's layout, in which Skywork-VL-Reward is published, and its like."""
    save(VALUE_HEAD, language_model / name)
    with pytest.raises(CheckpointError, match=rf"trained head in {name}.*vlmrm import"):
        load(language_model)


def test_torch_files_point_to_the_import(language_model):
    """A pickle is not opened to look for it; an index tells the names."""
    weights = load_file(language_model / "model.safetensors")
    (language_model / "model.safetensors").unlink()
    torch.save(weights | VALUE_HEAD, language_model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights in pytorch_model\.bin .*vlmrm import"):
        load_for_training(language_model)
    index = language_model / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights | VALUE_HEAD, "pytorch_model.bin")}))
    with pytest.raises(CheckpointError, match=r"(weights in pytorch_model|layout \(v_head\.summary).*vlmrm import"):
        load_for_training(language_model)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def say_otherwise(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("helpful", "harmful"))


@pytest.mark.parametrize(
    ("damage", "listed", "by_hand"),
    [
        (cut, r"model.safetensors has \d+ bytes instead of", r"weights of .* cannot be read"),
        (say_otherwise, r"bytes of chat_template.jinja were changed", r"chat template .* is not the one"),
    ],
)
def test_damage_is_noticed_without_a_list_too(copy, damage, listed, by_hand):
    damage(copy)
    with pytest.raises(CheckpointError, match=listed):
        load_checkpoint(copy)
    (copy / "COMPLETE.json").unlink()  # as in a copy that somebody put together by hand
    with pytest.raises(CheckpointError, match=by_hand):
        load_checkpoint(copy)


def test_a_text_model_is_refused_as_such(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(CheckpointError, match=r"text model \(qwen2\)"):
        load_processor(tmp_path)


def test_processor_may_come_from_the_base_model(copy, tiny_checkpoint):
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / name).unlink()
    (copy / "COMPLETE.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no processor.*base_model_path"):
        load_checkpoint(copy)
    loaded = load_checkpoint(copy, base_model_path=tiny_checkpoint)
    assert loaded.processor.tokenizer.get_vocab() == load_processor(tiny_checkpoint).tokenizer.get_vocab()


@pytest.mark.parametrize("load", [load_checkpoint, load_for_training])
def test_what_is_no_checkpoint_is_named(tmp_path, load):
    with pytest.raises(CheckpointError, match=f"{tmp_path} is no checkpoint that transformers can open"):
        load(tmp_path)
    for name in ("best", "checkpoint-9", "checkpoint-10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"name one, such as {tmp_path}/best or {tmp_path}/checkpoint-10"):
        load(tmp_path)
    for path in ("no-such/model-on-any-hub", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=f"{path} is neither a folder nor a hub checkpoint"):
            load(path)


def test_without_network_the_fetched_files_are_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--org--name"
    (kept / "snapshots" / "c0ffee").mkdir(parents=True)
    (kept / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("c0ffee")
    assert find_file("org/name", "config.json") == kept / "snapshots" / "c0ffee" / "config.json"
    assert find_file("org/name", "reward_model.json") is None
    with pytest.raises(CheckpointError, match="org/other is neither a folder nor a hub checkpoint"):
        find_file("org/other", "reward_model.json")


def test_a_newer_schema_is_refused(copy):
    edit_json(copy / "reward_model.json", schema_version=99)
    (copy / "COMPLETE.json").unlink()
    with pytest.raises(CheckpointError, match="schema version 99"):
        load_checkpoint(copy)


def test_scoring_needs_none_of_the_training_libraries(tiny_reward_model):
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["peft", "trl", "datasets", "deepspeed"]))
from vlmrm.modeling import load_checkpoint
print(load_checkpoint({str(tiny_reward_model)!r}).info["head"])
"""
    done = subprocess.run([preloaded.python(), "-c", program], capture_output=True, text=True)
    assert done.stdout == "linear\n", done.stderr
