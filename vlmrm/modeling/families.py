"""The families of vision-language models: what the reward model must know of each beyond its configuration.

Most is found by itself: positions by the backbone's `get_rope_index`, masks by those that it makes, features by its
`get_image_features`. A family is declared here for what cannot be found, and because tests show that it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

# Paths in backbones. The Qwen family's mergers are inside its tower.
TOWERS = ("visual", "vision_tower", "vision_model")
MERGERS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector", "connector")
LANGUAGE_MODELS = ("language_model", "text_model")


@dataclass(frozen=True)
class Family:
    """A family: its name, the `model_types` of its configurations, and where it differs from the usual.

    Args:
        towers: paths of the vision towers in the backbone, those that exist.
        mergers: paths of what maps a tower's features to the language model's width.
        language_models: paths of the language model; the first that exists.
        feature_field: the field of `get_image_features` whose rows take the placeholders' places.
        constants: further fields that the backbone reads, which depend on no image.
        images_see_all: whether the tokens of an image see those of later images of the conversation.
        trains_all: whether a batch with an image gives every weight a gradient, so that DDP need not search for those
            without.
        padded: why it cannot share prefixes; None where it can.
        refused: why it cannot be a reward model at all; None where it can.
        tested: whether its shared batches are proved exact by the tests. Others prove it when they are loaded.
    """

    name: str
    model_types: Sequence[str] = ()
    towers: Sequence[str] = TOWERS
    mergers: Sequence[str] = MERGERS
    language_models: Sequence[str] = LANGUAGE_MODELS
    feature_field: str = "pooler_output"
    constants: Sequence[str] = ()
    images_see_all: bool = False
    trains_all: bool = False
    padded: str | None = None
    refused: str | None = None
    tested: bool = True


FAMILIES = (
    Family("Qwen2-VL", ["qwen2_vl"], trains_all=True),
    Family("Qwen2.5-VL, MiMo-VL", ["qwen2_5_vl"], trains_all=True),
    Family("Qwen3-VL", ["qwen3_vl"], trains_all=True),
    Family("Qwen3.5", ["qwen3_5"], trains_all=True),
    Family("Llama 4", ["llama4"], feature_field="last_hidden_state"),
    Family("Molmo 2", ["molmo2"], images_see_all=True),
    Family("Ovis 2", ["ovis2"], constants=["visual_indicator_features"]),
)
BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a configuration; for one that is not declared, the usual one, untested."""
    declared = BY_MODEL_TYPE.get(config.model_type)
    return declared or Family(config.model_type, [config.model_type], tested=False)
