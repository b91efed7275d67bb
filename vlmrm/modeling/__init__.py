"""The reward model: architectures, heads, freezing, adapters, and checkpoints that verify themselves.

Importing it registers the reward models with transformers' `AutoModelForSequenceClassification`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.attention import batcher_for, resolve_attention, sequence_limit
from vlmrm.modeling.checkpoint import load_for_training, load_processor
from vlmrm.modeling.manifest import (
    checkpoint_digest,
    find_checkpoints,
    provenance,
    save_reward_files,
    template_hash,
    verify_complete,
    write_complete,
)
from vlmrm.modeling.parts import freeze
from vlmrm.modeling.reward_model import RewardModel, reward_model_class

if TYPE_CHECKING:
    from vlmrm.modeling.adapters import lora_config, quantization_config
    from vlmrm.modeling.loading import LoadedReward, load_checkpoint, load_weights, merge
    from vlmrm.modeling.published_import import import_reward
    from vlmrm.modeling.tiny import make_tiny, make_tiny_reward_model

# Modules that a training may do without, imported on the first use of a name.
LAZY = {
    "LoadedReward": "loading",
    "import_reward": "published_import",
    "load_checkpoint": "loading",
    "load_weights": "loading",
    "lora_config": "adapters",
    "quantization_config": "adapters",
    "merge": "loading",
    "make_tiny": "tiny",
    "make_tiny_reward_model": "tiny",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)


__all__ = [
    "LoadedReward", "ModelArguments", "RewardModel", "batcher_for", "checkpoint_digest", "find_checkpoints", "freeze",
    "import_reward", "load_checkpoint", "load_for_training", "load_processor", "load_weights", "lora_config",
    "make_tiny", "make_tiny_reward_model", "merge", "provenance", "quantization_config", "resolve_attention",
    "reward_model_class", "save_reward_files", "sequence_limit", "template_hash", "verify_complete", "write_complete",
]  # fmt: skip
