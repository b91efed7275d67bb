"""Layers that cannot be shared are found in families that nobody declared; those declared are tested by family."""

from __future__ import annotations

import torch
from transformers import MiniMaxM3VLConfig

from vlmrm.modeling import families
from vlmrm.modeling.attention import not_shared
from vlmrm.modeling.reward_model import reward_model_class

TEXT = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "pad_token_id": 0, "rotary_dim": 8},
    **{"dense_intermediate_size": 96, "shared_intermediate_size": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
SPARSE = TEXT | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8}


def test_a_layer_that_indexes_its_keys_is_found(monkeypatch):
    """As MiniMax M3 would be, of which some checkpoints have such layers, and others have none."""
    monkeypatch.delitem(families.BY_MODEL_TYPE, "minimax_m3_vl")
    reasons = []
    for text in (TEXT, SPARSE):
        config = MiniMaxM3VLConfig(text_config=text, vision_config={"hidden_size": 32, "depth": 1})
        with torch.device("meta"):
            reasons.append(not_shared(reward_model_class(config)(config)))
    assert reasons == [None, families.BY_INDEX]
