"""peft adapts what a family's adapter names, and loads every weight of it: it renames both for some families."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict

from vlmrm.modeling import ModelArguments, lora_config

from .table import FAMILIES

CASES = [("glm4v_moe", False), ("unlimited_ocr", True), ("ernie4_5_vl_moe", True), ("llama4", False)]


@pytest.mark.parametrize(("model_type", "experts"), CASES)
def test_an_adapter_comes_back_where_it_was(tmp_path, model_type, experts):
    family = next(family for family in FAMILIES if family.model_type == model_type)
    model, again = (family.make_model(family.make_processor()) for _ in range(2))
    arguments = ModelArguments(use_peft=True, lora_r=2, lora_experts=experts)
    adapted = get_peft_model(model, lora_config(arguments, model))
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    places = {name.rpartition(".lora_")[0] for name in weights if "lora_" in name}
    assert all(".language_model." in place for place in places)
    assert any(place.endswith("q_proj") for place in places)
    # Layers that are linear, which a shared expert's are; of experts, and of routers, there are none unless named.
    assert any("shared_expert" in place and place.endswith("down_proj") for place in places)
    assert any(".experts" in place for place in places) == experts
    assert not any(place.endswith(("gate", "router")) for place in places)

    torch.manual_seed(0)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.1 * torch.randn_like(weight))
    adapted.save_pretrained(tmp_path)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(again, str(tmp_path)), save_embedding_layers=False)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
