"""Stand-ins for what the RL frameworks import and call, with the signatures of their releases.

None of them is a dependency: ms-swift 4.6.0, verl 0.9.1, OpenRLHF 0.11.2, Flow-Factory a0b2bc5.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import vlmrm.adapters

ADAPTERS = Path(vlmrm.adapters.__file__).parent


def import_file(path: Path, name: str) -> ModuleType:
    """As ms-swift, verl and OpenRLHF import a user's file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class RewardManagerBase:
    """verl's `verl.experimental.reward_loop.reward_manager.base.RewardManagerBase`."""

    def __init__(self, config, tokenizer, compute_score):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = asyncio.get_running_loop()


def install(monkeypatch, dotted: str, **names: Any) -> None:
    """Makes `from dotted import name` work."""
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for name, value in names.items():
        setattr(sys.modules[dotted], name, value)


def verl_sample(
    tokenizer: Any, messages: list[dict], answer: str, row: dict[str, Any] | None = None
) -> list[SimpleNamespace]:
    """A one-item DataProto: the response right-padded, and its mask."""
    import torch

    ids = tokenizer(answer)["input_ids"]
    padded = torch.tensor([*ids, *[tokenizer.pad_token_id] * 3])
    mask = torch.tensor([1] * 5 + [1] * len(ids) + [0] * 3)
    return [SimpleNamespace(
        batch={"responses": padded, "attention_mask": mask},
        non_tensor_batch={"raw_prompt": messages, "data_source": "x", "extra_info": row or {}},
    )]  # fmt: skip
