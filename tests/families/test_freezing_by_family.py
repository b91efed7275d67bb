"""Freezing reaches the parts of every family, wherever they are, and nothing else."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from vlmrm.errors import ConfigError
from vlmrm.modeling import freeze
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


@pytest.mark.parametrize("family", MADE, ids=[family.model_type for family in MADE])
def test_freezing_leaves_the_weights_it_should(family):
    config = family.make_config(family.make_processor())
    with torch.device("meta"):
        model = reward_model_class(config)(config)
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
