"""Which class makes a reward model of which checkpoint, and how checkpoints of either kind load into it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2_5_VLPreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen2VLPreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLPreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from vlmrm.errors import CheckpointError
from vlmrm.modeling.reward_model import QwenVLRewardModel, RewardModel
from vlmrm.private_names import relies_on

logger = logging.getLogger("vlmrm")

for _backbone in (Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel):
    relies_on(_backbone, "get_rope_index", "get_vision_position_ids", "get_image_features")  # see RotaryPositions
    relies_on(_backbone.forward, "mm_encoder_outputs")  # else it would be dropped among its other keywords: no images


class Qwen2VLForSequenceClassification(QwenVLRewardModel, Qwen2VLPreTrainedModel):
    """Qwen2-VL with a score."""


class Qwen2_5_VLForSequenceClassification(QwenVLRewardModel, Qwen2_5_VLPreTrainedModel):
    """Qwen2.5-VL, and MiMo-VL which is one in other proportions, with a score."""


class Qwen3VLForSequenceClassification(QwenVLRewardModel, Qwen3VLPreTrainedModel):
    """Qwen3-VL with a score."""


def reward_model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The reward model for a checkpoint of this configuration; made on the spot for one that is not listed above.

    Raises:
        CheckpointError: when the checkpoint is no vision-language model.
    """
    return KNOWN.get(type(config)) or _made_on_the_spot(type(config))


@cache
def _made_on_the_spot(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    try:
        language_model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    except KeyError:
        raise CheckpointError(
            f"a checkpoint of type {config_class.model_type!r} is no vision-language model: start from Qwen2.5-VL, "
            "MiMo-VL, Qwen2-VL, Qwen3-VL or another that AutoModelForImageTextToText opens."
        ) from None
    name = language_model.__name__.removesuffix("ForConditionalGeneration") + "ForSequenceClassification"
    base = next(parent for parent in language_model.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    logger.warning("using the generic factory for %s: training it this way is untested", config_class.model_type)
    made = type(name, (RewardModel, base), {"__module__": __name__})
    _register(config_class, made, language_model.__name__)
    return made


def _register(config_class: type[PreTrainedConfig], model_class: type[PreTrainedModel], language_model: str) -> None:
    """Tells transformers about the class: for `AutoModelForSequenceClassification`, and for the names of weights.

    The library looks up how to rename a checkpoint's weights by the name of the class, and passes over classes that
    are not its own: unregistered, a downloaded checkpoint would load as a random backbone.
    """
    mapping = get_checkpoint_conversion_mapping(language_model)
    if mapping is None:
        mapping = get_checkpoint_conversion_mapping(config_class.model_type)
    register_checkpoint_conversion_mapping(model_class.__name__, mapping or [], overwrite=True)
    AutoModelForSequenceClassification.register(config_class, model_class, exist_ok=True)


KNOWN: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    Qwen2VLConfig: Qwen2VLForSequenceClassification,
    Qwen2_5_VLConfig: Qwen2_5_VLForSequenceClassification,
    Qwen3VLConfig: Qwen3VLForSequenceClassification,
}
for _config, _model in KNOWN.items():
    _register(_config, _model, _model.__name__.replace("SequenceClassification", "ConditionalGeneration"))
