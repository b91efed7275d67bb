"""The weights of a sibling checkpoint in the open model give the scores of the checkpoint opened by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.modeling.samples import save_adapter, scores
from vlmrm.errors import CheckpointError
from vlmrm.modeling import load_checkpoint, load_weights, write_complete


def move(folder: Path, by: float) -> Path:
    """Changes every floating-point weight of a checkpoint, the vision tower's and the head's too."""
    [path] = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: weight + by * torch.randn(weight.shape, generator=generator) for name, weight in load_file(path).items()
    }
    save_file(moved, path, metadata={"format": "pt"})
    write_complete(folder, world_size=1, step=2)
    return folder


@pytest.fixture(scope="module", params=["full", "adapter"])
def siblings(request, tiny_checkpoint, tiny_reward_model, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    first = folder / "checkpoint-1"
    if request.param == "full":
        shutil.copytree(tiny_reward_model, first)
    else:
        save_adapter(first, tiny_checkpoint)
    return first, move(Path(shutil.copytree(first, folder / "checkpoint-2")), 0.1)


def test_it_scores_as_if_opened_by_itself(siblings):
    opened = load_checkpoint(siblings[0])
    before = scores(opened.model, opened.processor)
    swapped = load_weights(opened, siblings[1])
    assert swapped is not None and swapped.model is opened.model
    alone = load_checkpoint(siblings[1])
    assert torch.equal(scores(swapped.model, swapped.processor), scores(alone.model, alone.processor))
    assert swapped.digest == alone.digest != opened.digest
    assert not torch.allclose(scores(swapped.model, swapped.processor), before)
    assert load_weights(swapped, siblings[0]) is not None, "and back"
    assert torch.equal(scores(opened.model, opened.processor), before)


def another_setting(folder: Path) -> None:
    info = json.loads((folder / "reward_model.json").read_text())
    (folder / "reward_model.json").write_text(json.dumps(info | {"max_pixels": 3136}))


def missing_weight(folder: Path) -> None:
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    del weights[min(weights)]
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("change", [another_setting, missing_weight])
def test_another_kind_of_checkpoint_is_opened_by_itself(siblings, tmp_path, change):
    opened = load_checkpoint(siblings[0])
    before = scores(opened.model, opened.processor)
    copy = Path(shutil.copytree(siblings[1], tmp_path / "copy"))
    change(copy)
    write_complete(copy, world_size=1, step=2)

    assert load_weights(opened, copy) is None
    assert torch.equal(scores(opened.model, opened.processor), before)


def test_a_changed_byte_is_found(siblings, tmp_path):
    opened = load_checkpoint(siblings[0])
    copy = Path(shutil.copytree(siblings[1], tmp_path / "copy"))
    [path] = copy.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bytes of .* were changed"):
        load_weights(opened, copy)
