"""The scale of a checkpoint's scores, saved with it: the checkpoint is whole before, after, and at every moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vlmrm.modeling import manifest, verify_complete
from vlmrm.modeling.manifest import save_scale

SCALE = {"reward_mean": 0.25, "reward_std": 1.5, "reward_count": 12, "reward_data": "abc"}


@pytest.fixture
def folder(tmp_path, tiny_reward_model) -> Path:
    return Path(shutil.copytree(tiny_reward_model, tmp_path / "checkpoint-1"))


def info(folder: Path) -> dict:
    return json.loads((folder / "reward_model.json").read_text())


def test_fields_of_the_scale_change_and_nothing_else(folder):
    before, manifest = info(folder), verify_complete(folder)
    assert save_scale(folder, SCALE)
    assert info(folder) == before | SCALE
    unchanged = {name: file for name, file in verify_complete(folder)["files"].items() if name != "reward_model.json"}
    assert unchanged | {"reward_model.json": manifest["files"]["reward_model.json"]} == manifest["files"]
    written = (folder / "COMPLETE.json").stat().st_mtime_ns
    assert not save_scale(folder, SCALE)
    assert (folder / "COMPLETE.json").stat().st_mtime_ns == written, "what is there already is not written again"
    assert save_scale(folder, SCALE | {"reward_data": "other"}) and info(folder)["reward_data"] == "other"


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_kill_after_any_write_leaves_checkpoints_whole(folder, writes, monkeypatch):
    write_json, done = manifest.write_json, []

    def killed(path, content):
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(write_json(path, content))

    monkeypatch.setattr(manifest, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        save_scale(folder, SCALE)
    verify_complete(folder)
    assert info(folder)["reward_mean"] in (None, 0.25)
    monkeypatch.setattr(manifest, "write_json", write_json)
    assert save_scale(folder, SCALE) and "reward_model.json" in verify_complete(folder)["files"]
