"""QLoRA: the frozen layers of the language model in 4 bits, and no other part of a reward model."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from vlmrm.errors import ConfigError
from vlmrm.libraries import missing, relies_on
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.families import LANGUAGE_MODELS

relies_on(HfQuantizer.get_modules_to_not_convert, "model", "skip_modules", "keep_in_fp32_modules")
relies_on(PreTrainedModel, "_keep_in_fp32_modules")
relies_on(should_convert_module, "full_name", "patterns")

# All modules outside the language model. transformers matches the pattern with the start of a module's name, so a list
# of towers would have to name each family's in full.
NOT_QUANTIZED = rf"(?!model\.(?:{'|'.join(LANGUAGE_MODELS)})\.).*"


def quantization_config(arguments: ModelArguments, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return QLoRA's 4-bit configuration of a language model that computes in `dtype`; None without QLoRA."""
    if not arguments.load_in_4bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(missing("load_in_4bit", "bitsandbytes", "qlora"))
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[NOT_QUANTIZED],
    )


def keep_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights when a CPU scores with them: no gradient passes packed ones."""
    for layer in model.modules():
        if type(layer).__name__ == "Linear4bit":
            relies_on(type(layer), attributes=("support_avx512bf16_for_cpu",))
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010 - no attribute of every module


def layers_to_quantize(model: PreTrainedModel) -> list[str]:
    """Return the names of the layers that transformers will hold in 4 bits; the model may be on the meta device."""
    skipped = HfQuantizer.get_modules_to_not_convert(model, [NOT_QUANTIZED], list(model._keep_in_fp32_modules or ()))
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, skipped)
    ]
