"""QLoRA holds the language model in 4 bits and no other part, and trains as the rounded weights would."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from tests.modeling.samples import SAMPLES, batch_of, scores
from vlmrm.modeling import ModelArguments, load_for_training, load_processor, lora_config, quantization_config
from vlmrm.modeling.adapters import keep_trainable, layers_to_quantize

QLORA = ModelArguments(use_peft=True, lora_r=4, load_in_4bit=True, lora_vit=True)


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
