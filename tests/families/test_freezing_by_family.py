"""Freezing, adapters and 4 bits reach the parts of every family, wherever they are, and nothing else."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from vlmrm.errors import ConfigError
from vlmrm.modeling import ModelArguments, freeze, lora_config
from vlmrm.modeling.adapters import NOT_QUANTIZED, layers_to_quantize
from vlmrm.modeling.parts import part_of
from vlmrm.modeling.reward_model import RewardModel, reward_model_class

from .table import FAMILIES

# Parts for sounds, and Janus's for making images: neither vision nor language.
APART = re.compile(r"model\.(audio_tower|embed_audio|generation_\w+|vqmodel)\.")
MADE = [family for family in FAMILIES if family.refused is None and (family.needs is None or find_spec(family.needs))]


def trained_after(model: RewardModel, **parts: bool) -> set[str]:
    """The names of the weights that train after a freeze, parts apart aside."""
    model.requires_grad_(True)
    freeze(model, **parts)
    towers = tuple(f"model.{path}." for path in model.family.towers)
    return {
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and (name.startswith(towers) or not APART.match(name))
    }


@pytest.fixture(scope="module", params=MADE, ids=[family.model_type for family in MADE])
def model(request) -> RewardModel:
    """A family's reward model on the meta device; the tests of one family follow each other."""
    config = request.param.make_config(request.param.make_processor())
    with torch.device("meta"):
        return reward_model_class(config)(config)


def test_freezing_leaves_the_weights_it_should(model):
    backbone, paths = model.model, {id(weight): name for name, weight in model.named_parameters()}
    modules = dict(backbone.named_modules())

    def names(*parts: nn.Module) -> set[str]:
        return {paths[id(weight)] for part in parts for weight in part.parameters()}

    # As transformers finds them, by names of its own; our declaration says only what mergers are.
    decoder, encoder = backbone.get_decoder(), backbone.get_encoder("image")
    mergers = names(*(modules[path] for path in model.family.mergers if path in modules))
    marks = {paths[id(weight)] for weight in backbone.parameters(recurse=False)}  # between rows and images
    everything, language, head = trained_after(model), names(decoder), names(model.score)
    if decoder is backbone:  # the language model is spread over it
        with pytest.raises(ConfigError, match="freeze_llm"):
            freeze(model, llm=True)
        language = everything - names(*model.vision_modules()) - head
    else:
        assert trained_after(model, llm=True) == everything - language
    assert trained_after(model, vit=True) == language | head
    without_tower = trained_after(model, vit=True, merger=False)
    assert without_tower == language | head | mergers | marks
    if encoder is not backbone:
        assert not without_tower & (names(encoder) - mergers)
    if mergers:
        assert trained_after(model, merger=True) == everything - mergers - marks


def under(model: RewardModel, paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"model.{path}." for path in paths)


def test_adapters_are_on_linear_layers_of_each_part(model):
    """As peft chooses them; a layer that is called past its module cannot be adapted."""
    towers, mergers = under(model, model.family.towers), under(model, model.family.mergers)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear -= {f"{name}.out_proj" for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    in_merger = {name for name in linear if f"{name}.".startswith(mergers)}
    in_tower = {name for name in linear if name.startswith(towers)} - in_merger
    for key, expected in {"lora_vit": in_tower, "lora_merger": in_merger}.items():
        arguments = ModelArguments(use_peft=True, freeze_llm=True, **{key: True})
        if not expected:
            with pytest.raises(ConfigError, match=f"{key}: the .* has no linear layers under a known name"):
                lora_config(arguments, model)
            continue
        config = lora_config(arguments, model)
        chosen = {name for name, _ in model.named_modules() if check_target_module_exists(config, name)}
        assert chosen == expected


class Linear4bit(nn.Linear):
    """What transformers puts in the place of a layer, for the names of its arguments."""

    def __init__(self, inputs, outputs, bias, compute_dtype, **options):
        super().__init__(inputs, outputs, bias)


def test_4_bits_are_for_the_language_model_only(model, monkeypatch):
    """As transformers replaces layers, counted by part; it runs last, as the model is another one then."""
    monkeypatch.setattr(
        "transformers.integrations.bitsandbytes.bnb",
        SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit)),
        raising=False,
    )
    expected = layers_to_quantize(model)
    replaced = quantize(copy.deepcopy(model), NOT_QUANTIZED)
    assert set(replaced) == set(expected)
    parts = Counter(part_of(model, name) for name in replaced)
    assert parts.keys() <= {"language"}
    # Of the decoder, as transformers finds it, all layers that need not be float32; one that is spread over the
    # backbone stays as it is.
    decoder, whole = model.model.get_decoder(), tuple(model._keep_in_fp32_modules)
    linear = [name for name, m in decoder.named_modules() if type(m) is nn.Linear and not name.endswith(whole)]
    assert parts["language"] == (0 if decoder is model.model else len(linear))
    if model.family.name == "Qwen2.5-VL, MiMo-VL":  # the pattern that is anchored at the start of a name
        assert {part_of(model, name) for name in quantize(model, "visual")} == {"language", "vision", "merger"}


def quantize(model: RewardModel, skipped: str) -> list[str]:
    """Let transformers replace layers but those skipped, and return the names of the replaced."""
    quantizer = Bnb4BitHfQuantizer(
        SimpleNamespace(
            llm_int8_skip_modules=[skipped],
            llm_int8_enable_fp32_cpu_offload=False,
            quantization_method=lambda: "nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_quant_storage=torch.uint8,
        ),
        pre_quantized=False,
    )
    quantizer._process_model_before_weight_loading(model, None)
    return [name for name, module in model.named_modules() if isinstance(module, Linear4bit)]
