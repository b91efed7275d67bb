"""Which batch a model takes: the shared one where its attention knows it, else the padded one."""

from __future__ import annotations

import logging
from typing import Any

from vlmrm.batching import PaddedBatcher, SharedBatcher
from vlmrm.modeling.reward_model import QwenVLRewardModel, RewardModel
from vlmrm.modeling.shared_attention import SHARED_PREFIX

logger = logging.getLogger("vlmrm")

BATCHING = ("shared", "reference")


def batcher_for(model: RewardModel, processor: Any, batching: str) -> SharedBatcher | PaddedBatcher:
    """The batcher for `batching`; for `shared`, also gives the language model the attention that goes with it.

    Call it once, before training or scoring: attention that changes between a forward and its recomputation under
    checkpointing gives wrong gradients.
    """
    if batching == "shared" and isinstance(model, QwenVLRewardModel):
        model.set_attn_implementation({"text_config": SHARED_PREFIX})
        return SharedBatcher.for_model(model)
    if batching == "shared":
        logger.warning("batching: reference, because shared attention does not know %s", type(model).__name__)
    return PaddedBatcher.for_processor(processor)
