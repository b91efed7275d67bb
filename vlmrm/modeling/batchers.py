"""What a model takes: which kind of batch, and how long a conversation."""

from __future__ import annotations

import logging
from typing import Any

from vlmrm.batching import PaddedBatcher, SharedBatcher
from vlmrm.errors import ConfigError
from vlmrm.modeling.last_layer import prune_last_layer
from vlmrm.modeling.reward_model import QwenVLRewardModel, RewardModel
from vlmrm.modeling.shared_attention import SHARED_PREFIX, check_kernel

logger = logging.getLogger("vlmrm")


BATCHINGS = ("shared", "reference")


def batcher_for(model: RewardModel, processor: Any, batching: str) -> SharedBatcher | PaddedBatcher:
    """The batcher for `batching`; for `shared`, also gives the language model the attention that goes with it.

    Call it once, before training or scoring: attention that changes between a forward and its recomputation under
    checkpointing gives wrong gradients.

    Raises:
        ConfigError: when there is no such batching, or this torch lacks what shared attention computes with.
    """
    if batching not in BATCHINGS:
        raise ConfigError(f"batching is {batching!r}: choose from {', '.join(BATCHINGS)}.")
    if batching == "shared" and (reason := not_shared(model)):
        logger.warning("batching: reference, because shared attention does not know %s", reason)
    elif batching == "shared":
        check_kernel()
        model.set_attn_implementation({"text_config": SHARED_PREFIX})
        prune_last_layer(model.model.language_model)
        return SharedBatcher.for_model(model)
    return PaddedBatcher.for_processor(processor)


def not_shared(model: RewardModel) -> str | None:
    """Return what of the model keeps it from shared batches; None where nothing does."""
    if not isinstance(model, QwenVLRewardModel):
        return type(model).__name__
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    windowed = window is not None and "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windowed and window < config.max_position_embeddings:
        return f"the sliding window of {window} tokens in its layers"
    return None


def sequence_limit(model: RewardModel, max_seq_length: int | None) -> int:
    """The longest conversation in tokens: `max_seq_length`, or all that the model has positions for.

    Raises:
        ConfigError: when `max_seq_length` is more than that.
    """
    positions = model.config.get_text_config().max_position_embeddings
    if max_seq_length is not None and max_seq_length > positions:
        raise ConfigError(f"max_seq_length is {max_seq_length}, but the model has {positions} positions: lower it.")
    return max_seq_length or positions
