"""QLoRA holds the language model in 4 bits and no other part, and trains as the rounded weights would."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from peft import get_peft_model
from samples import SAMPLES, batch_of, scores
from transformers import Qwen2_5_VLConfig

from vlmrm.errors import ConfigError
from vlmrm.modeling import (
    ModelArguments,
    load_for_training,
    load_processor,
    lora_config,
    quantization_config,
    reward_model_class,
)
from vlmrm.modeling.quantization import keep_trainable, layers_to_quantize

QLORA = ModelArguments(use_peft=True, lora_r=4, load_in_4bit=True, lora_vit=True)
WITHOUT = importlib.util.find_spec("bitsandbytes") is None


@pytest.mark.skipif(not WITHOUT, reason="bitsandbytes is installed")
def test_4_bits_ask_for_bitsandbytes():
    assert quantization_config(ModelArguments()) is None
    with pytest.raises(ConfigError, match="load_in_4bit needs bitsandbytes: pip install"):
        quantization_config(QLORA)


def test_the_layers_of_a_3b_model_are_counted():
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                     "num_attention_heads": 16, "num_key_value_heads": 2},
        vision_config={"out_hidden_size": 2048},
    )  # fmt: skip
    with torch.device("meta"):
        model = reward_model_class(config)(config)
    layers = layers_to_quantize(model)
    assert len(layers) == 252
    # All the weights of the language model's layers but its norms and biases.
    held = sum(model.get_submodule(name).weight.numel() for name in layers)
    assert held == 36 * (2048 * (2 * 2048 + 2 * 256) + 3 * 2048 * 11008)


def test_a_training_is_that_of_the_rounded_weights(tiny_checkpoint):
    """Also after scoring, when bitsandbytes packs weights on some CPUs so that no gradient passes them."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    batch = batch_of(processor := load_processor(tiny_checkpoint), SAMPLES[:4])
    quantized = load_for_training(
        tiny_checkpoint, quantization_config=quantization_config(QLORA, torch.float32), dtype="float32"
    )
    keep_trainable(quantized)
    layers = [
        name for name, layer in quantized.named_modules() if hasattr(getattr(layer, "weight", None), "quant_state")
    ]
    rounded = load_for_training(tiny_checkpoint, dtype="float32")
    assert layers == layers_to_quantize(rounded)
    with torch.no_grad():
        for name in layers:
            weight = quantized.get_submodule(name).weight
            whole = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            rounded.get_submodule(name).weight.copy_(whole)
    assert (scores(rounded, processor) - scores(load_for_training(tiny_checkpoint), processor)).abs().max() > 1e-4

    gradients = []
    for model in (quantized, rounded):
        torch.manual_seed(0)
        get_peft_model(model, lora_config(QLORA, model))
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        with torch.no_grad():
            for weight in trained.values():
                weight.add_(0.05 * torch.randn(weight.shape))
        scores(model, processor)
        model.train()(**batch).logits.sum().backward()
        gradients.append({name: weight.grad for name, weight in trained.items()})
    torch.testing.assert_close(scores(quantized, processor), scores(rounded, processor), atol=1e-6, rtol=1e-5)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
