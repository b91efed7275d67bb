"""vlmrm trains vision-language reward models from preferences, measures them honestly, and puts them to work."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmrm.evaluation.sweep import sweep as evaluate
    from vlmrm.scoring import load_scorer
    from vlmrm.training import train
    from vlmrm.training.arguments import RewardConfig
    from vlmrm.training.reward_trainer import RewardTrainer

__version__ = "0.1.0"
__all__ = ["RewardConfig", "RewardTrainer", "evaluate", "load_scorer", "train"]

# By name, the module, the extra and the purpose; lazy, because `import vlmrm` and help must not import torch.
_LAZY = {
    "RewardConfig": ("vlmrm.training.arguments:RewardConfig", "train", "training"),
    "RewardTrainer": ("vlmrm.training.reward_trainer:RewardTrainer", "train", "training"),
    "evaluate": ("vlmrm.evaluation.sweep:sweep", "train", "evaluating"),
    "load_scorer": ("vlmrm.scoring:load_scorer", "local", "scoring"),
    "train": ("vlmrm.training:train", "train", "training"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vlmrm' has no attribute {name!r}")
    from vlmrm.libraries import needs

    path, extra, purpose = _LAZY[name]
    module, _, attribute = path.partition(":")
    with needs(extra, purpose):
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
