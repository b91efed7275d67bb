"""A checkpoint counts only when every file it lists is there, whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from vlmrm.errors import CheckpointError
from vlmrm.modeling import (
    checkpoint_digest,
    find_checkpoints,
    load_checkpoint,
    load_for_training,
    manifest,
    verify_complete,
    write_complete,
)
from vlmrm.modeling.manifest import find_file, verify_if_listed
from vlmrm.scoring import load_scorer


def checkpoint(output: Path, step: int) -> Path:
    folder = output / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "global_step" / "optimizer.pt").write_bytes(b"moments")
    write_complete(folder, world_size=2, step=step)
    return folder


def listed(content: bytes) -> dict:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_complete_lists_every_file_with_its_content(tmp_path):
    folder = checkpoint(tmp_path, 4)
    assert verify_complete(folder) == {
        "world_size": 2,
        "step": 4,
        "files": {"global_step/optimizer.pt": listed(b"moments"), "model.safetensors": listed(b"weights")},
    }
    # Written again, it does not list itself or anything left of its own writing.
    write_complete(folder, world_size=1, step=4)
    assert set(verify_complete(folder)["files"]) == {"global_step/optimizer.pt", "model.safetensors"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "global_step/optimizer.pt").unlink(), "global_step/optimizer.pt is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w"), "has 1 bytes instead of 7"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"wEights"), "bytes of model.safetensors were"),
        (lambda folder: (folder / "COMPLETE.json").unlink(), "has no COMPLETE.json"),
        (lambda folder: (folder / "COMPLETE.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "COMPLETE.json").write_text('{"files": {"model": 7}}'), "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    older, newest = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    damage(newest)
    with pytest.raises(CheckpointError, match=message):
        verify_complete(newest)
    assert verify_complete(older)


def test_opening_a_model_verifies_what_scores_depend_on(tmp_path):
    folder = checkpoint(tmp_path, 4)
    (folder / "global_step/optimizer.pt").write_bytes(b"mOments")
    verify_if_listed(folder)
    with pytest.raises(CheckpointError, match=r"bytes of global_step/optimizer\.pt were"):
        verify_complete(folder)
    (folder / "global_step/optimizer.pt").write_bytes(b"m")
    with pytest.raises(CheckpointError, match="has 1 bytes instead of 7"):
        verify_if_listed(folder)
    (folder / "global_step/optimizer.pt").write_bytes(b"moments")
    (folder / "model.safetensors").write_bytes(b"wEights")
    with pytest.raises(CheckpointError, match=r"bytes of model\.safetensors were"):
        verify_if_listed(folder)


def test_checkpoints_come_in_natural_order(tmp_path):
    for step in (100, 9, 20):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-5").write_text("a file")
    names = [folder.name for folder in find_checkpoints(tmp_path)]
    assert names == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]


@pytest.mark.parametrize(
    ("error", "said"), [(GatedRepoError, "is gated: ask for access"), (RepositoryNotFoundError, "a private one")]
)
def test_an_inaccessible_model_says_how_to_log_in(error, said, monkeypatch):
    def refuse(*args, **keys):
        raise error("401 Client Error.", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(manifest, "hub_answers", lambda: True)
    monkeypatch.setattr(manifest, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=f"google/gemma-9 .*{said}.*log in with `hf auth login`"):
        find_file("google/gemma-9", "config.json")


def test_a_digest_covers_only_what_scores_depend_on(tmp_path, tiny_reward_model):
    copy = Path(shutil.copytree(tiny_reward_model, tmp_path / "elsewhere"))
    digest = checkpoint_digest(copy)
    assert digest == checkpoint_digest(tiny_reward_model)
    for name in ("optimizer.pt", "trainer_state.json", "training_settings.json"):
        (copy / name).write_bytes(b"of the training")
    info = json.loads((copy / "reward_model.json").read_text())
    for story in ({"reward_mean": 3.0}, {"provenance": {"git_commit": "another"}}):
        (copy / "reward_model.json").write_text(json.dumps(info | story))
    assert checkpoint_digest(copy) == digest, "neither the optimizer nor the story of a training changes a score"
    changed = {digest}
    for name, altered in {
        "reward_model.json": json.dumps(info | {"max_pixels": 3136}).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": (copy / "model.safetensors").read_bytes()[:-1] + b"?",
    }.items():
        (copy / name).write_bytes(altered)
        changed.add(checkpoint_digest(copy))
    assert len(changed) == 4
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        checkpoint_digest(tmp_path)


def test_hashing_can_be_switched_off_with_a_notice(tiny_reward_model, tmp_path, caplog):
    copy = shutil.copytree(tiny_reward_model, tmp_path / "copy")
    digest = load_checkpoint(copy).digest
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-4:] = b"\1\2\3\4"
    (copy / "model.safetensors").write_bytes(weights)
    for load in (load_checkpoint, load_for_training, load_scorer):
        with pytest.raises(CheckpointError, match=r"bytes of model\.safetensors were changed"):
            load(copy)
        caplog.clear()
        load(copy, check_files=False)
        assert caplog.text.count("check_files: false: nothing checks") == 1
    assert load_checkpoint(copy, check_files=False).digest == digest, "what COMPLETE.json says is taken on trust"
    (copy / "model.safetensors").write_bytes(weights[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes instead of"):
        load_checkpoint(copy, check_files=False)
