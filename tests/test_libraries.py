"""Names that other libraries do not promise: each use is declared, checked at import, and bounded from above."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import trl
from transformers import ProcessorMixin, Qwen2_5_VLModel, Trainer

from vlmrm.errors import ConfigError
from vlmrm.libraries import RELIED_ON

ROOT = Path(__file__).resolve().parents[1]
USERS = (
    "vlmrm.modeling.adapters",
    "vlmrm.modeling.reward_model",
    "vlmrm.rendering",
    "vlmrm.training.trainer",
)
# Documented names with an underscore (named tuples', os._exit), and those of a module that is not installed for tests.
PROMISED = {"_asdict", "_replace", "_fields", "_exit", "_get_obs", "_is_success"}
# argparse's: Python keeps them, and no requirement could bound it.
PROMISED |= {"_actions"}


@pytest.fixture
def relied_on() -> dict[str, set[str]]:
    for user in USERS:
        importlib.import_module(user)
    return RELIED_ON


@pytest.mark.parametrize(
    ("user", "owner", "name", "library"),
    [
        ("vlmrm.training.trainer", Trainer, "_get_num_items_in_batch", "trl"),
        ("vlmrm.training.trainer", trl.RewardTrainer, "_prepare_dataset", "trl"),
        ("vlmrm.rendering", ProcessorMixin, "_process_images", "transformers"),
        ("vlmrm.modeling.reward_model", Qwen2_5_VLModel, "get_rope_index", "transformers"),
    ],
)
def test_a_vanished_library_name_is_one_sentence(monkeypatch, user, owner, name, library):
    importlib.import_module(user)
    monkeypatch.delitem(sys.modules, user)
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError) as refused:
        importlib.import_module(user)
    assert str(refused.value).startswith(f"{library} {metadata.version(library)} ") and name in str(refused.value)


def test_every_private_override_of_the_trainer_is_declared(relied_on):
    from vlmrm.training.trainer import ComparisonTrainer

    overrides = {
        name for name in vars(ComparisonTrainer) if re.match("_[a-z]", name) and hasattr(trl.RewardTrainer, name)
    }
    assert overrides <= relied_on["trl"], "an override that the library no longer calls is silent"


def test_every_private_name_of_another_library_is_declared(relied_on):
    used: dict[str, str] = {}
    defined = set()
    for path in sorted([*(ROOT / "vlmrm").rglob("*.py"), *(ROOT / "packages/robots/vlmrm_robots").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.setdefault(node.attr, str(path.relative_to(ROOT)))
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self":
                defined.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    declared = set().union(*relied_on.values())
    private = {name: path for name, path in used.items() if re.match("_[a-z]", name)}
    assert {name: path for name, path in private.items() if name not in defined | declared | PROMISED} == {}
