"""What a model takes: which kind of batch, and how long a conversation."""

from __future__ import annotations

import logging
from typing import Any

from vlmrm.batching import PaddedBatcher, SharedBatcher
from vlmrm.errors import ConfigError
from vlmrm.modeling.last_layer import prune_last_layer
from vlmrm.modeling.reward_model import QwenVLRewardModel, RewardModel
from vlmrm.modeling.shared_attention import SHARED_PREFIX

logger = logging.getLogger("vlmrm")


def batcher_for(model: RewardModel, processor: Any, batching: str) -> SharedBatcher | PaddedBatcher:
    """The batcher for `batching`; for `shared`, also gives the language model the attention that goes with it.

    Call it once, before training or scoring: attention that changes between a forward and its recomputation under
    checkpointing gives wrong gradients.
    """
    if batching == "shared" and isinstance(model, QwenVLRewardModel):
        model.set_attn_implementation({"text_config": SHARED_PREFIX})
        prune_last_layer(model.model.language_model)
        return SharedBatcher.for_model(model)
    if batching == "shared":
        logger.warning("batching: reference, because shared attention does not know %s", type(model).__name__)
    return PaddedBatcher.for_processor(processor)


def sequence_limit(model: RewardModel, max_seq_length: int | None) -> int:
    """The longest conversation in tokens: `max_seq_length`, or all that the model has positions for.

    Raises:
        ConfigError: when `max_seq_length` is more than that.
    """
    positions = model.config.get_text_config().max_position_embeddings
    if max_seq_length is not None and max_seq_length > positions:
        raise ConfigError(f"max_seq_length is {max_seq_length}, but the model has {positions} positions: lower it.")
    return max_seq_length or positions
