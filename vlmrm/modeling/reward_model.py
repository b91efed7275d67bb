"""The reward model: a vision-language backbone with scores in place of its language head."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from vlmrm.batching.media import DistinctMedia, Grid, Media, as_images, grids_of, in_order
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.libraries import relies_on
from vlmrm.modeling.experts import tokens_of_vision_experts, touch_vision_experts
from vlmrm.modeling.families import BY_MODEL_TYPE, Family, as_annotated, existing_parts, family_of, parameters_of
from vlmrm.modeling.head import Float32Linear, Head, at_branches, language_loss
from vlmrm.modeling.vision import (
    EncoderOutput,
    Features,
    align,
    assemble,
    attend_by_segments,
    reset_attention,
    split,
    tower_keywords,
)
from vlmrm.outputs import Outputs

logger = logging.getLogger("vlmrm")

relies_on(
    PreTrainedModel,
    overridden=(
        *("_init_weights", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"),
        "_set_gradient_checkpointing",
    ),
    attributes=("_require_grads_hook", "_require_grads_hooks"),
)
relies_on(PreTrainedModel._set_gradient_checkpointing, "gradient_checkpointing_func")


class RewardModel(PreTrainedModel):
    """Turns a `<Arch>PreTrainedModel` into an `<Arch>ForSequenceClassification` whose logits are scores.

    `model` is the backbone; `score` maps the hidden state of a conversation's last token to its scores, those of
    `outputs` (`config.reward_outputs`). The hidden layers of `config.reward_head`, where it has some, are
    `score_hidden`, before it. Both stay in float32.
    `config.reward_positions` is `text` for a model that was trained with images at the positions of text.
    """

    base_model_prefix = "model"
    # The loss is no mean over tokens: the trainer must not rescale it by their number.
    accepts_loss_kwargs = False
    # A `VisionCache`, set by `use_vision_cache`; transformers resolves annotations, and this one is imported on use.
    vision_cache: Any = None
    # A blank image. Run the tower in every batch, with or without images, so that all ranks gather and reduce the same
    # weights in the same order. Training sets it.
    touch_vision: Any = None
    # The head of the language model [V, H], frozen, where the training has critiques; no file of the model has it.
    language_head: torch.Tensor | None
    # Whether FSDP2 shares out the weights: ranks gather those of a layer together, as under ZeRO-3. Training sets it.
    sharded = False
    # Whether inputs of checkpointed layers must need gradients: the layers themselves are frozen.
    _marks_inputs = False
    # Whether the loaded model has proved that it sees, and why it then could not share prefixes.
    proved = False
    padded_because: str | None = None
    # A vision-language checkpoint has a language head; a reward model has no use for it.
    _keys_to_ignore_on_load_unexpected = [r"\blm_head\."]  # noqa: RUF012 (the library's own form)
    _keep_in_fp32_modules_strict = ["score", "score_hidden"]  # noqa: RUF012

    def __init__(self, config: PreTrainedConfig):
        self.outputs = Outputs.of(getattr(config, "reward_outputs", None))
        config.num_labels = 1  # of which TRL's trainer takes no other number
        config.problem_type = "regression"
        config.reward_head = getattr(config, "reward_head", "linear")
        super().__init__(config)
        reset_attention(config)
        # Nemotron-H Omni has no class for its backbone alone.
        make = AutoModel if type(config) in MODEL_MAPPING else AutoModelForImageTextToText
        self.model = make.from_config(config)
        if self.family.language_head:
            self.model.set_submodule(self.family.language_head, nn.Identity())
        width = config.get_text_config().hidden_size
        head = Head.of(config.reward_head, width)
        if head.hidden:
            self.score_hidden = head.hidden_layers(width)
        bias = head.bias or any(output.rates for output in self.outputs)  # of pairs only differences mean something
        self.register_buffer("language_head", None, persistent=False)
        apart = [output.columns for output in self.outputs] if head.heads > 1 else ()
        self.score = Float32Linear([width, *head.hidden][-1], self.outputs.columns, bias=bias, heads=apart)
        touch_vision_experts(self)
        towers = existing_parts(self.model, self.family.towers)
        attend_by_segments(self.model, towers)
        align(towers)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            # Scores start near zero, and so a pair's loss near ln 2.
            init.normal_(module.weight, mean=0.0, std=1 / (module.in_features + 1))
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of training; batch norms keep that of evaluation, as an image's features are its alone."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                module.eval()
        return self

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        branch_ends: torch.Tensor | None = None,
        taught_places: torch.Tensor | None = None,
        taught_ids: torch.Tensor | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Return `logits[N, C]`, float32, the columns of `outputs` per conversation: a row of `input_ids[B, T]`.

        `attention_mask[B, T]` is 1 for tokens and 0 for padding on either side; without it there is no padding.
        `branch_ends` are the positions of the last tokens of the branches packed into one row, [1, T]; then the mask
        may be anything that the backbone takes. Outputs that are apart have a branch each. `inputs`: `hidden_states`.
        `loss` is the `language_loss` of `taught_ids` [M], the tokens after `taught_places` in the batch as one row.
        """
        inputs = {name: value for name, value in inputs.items() if value is not None}
        # A key-value cache, on by default, would turn off the library's detection of packed rows.
        inputs |= {"use_cache": False, "return_dict": True}
        hidden = self.hidden_states(input_ids=input_ids, attention_mask=attention_mask, **inputs)
        logits = at_branches(self.outputs, self.head(self.pool(hidden, attention_mask, branch_ends)))
        loss = None
        if self.language_head is not None and torch.is_grad_enabled():
            if taught_places is None or taught_ids is None:  # ranks under ZeRO-3 need outputs of the same number
                taught_places = taught_ids = torch.zeros(0, dtype=torch.long, device=hidden.device)
            loss = language_loss(self.language_head, hidden.flatten(0, 1)[taught_places], taught_ids)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits)

    def hidden_states(self, media: Media | None = None, **inputs: Any) -> torch.Tensor:
        """Return the backbone's last hidden states [B, T, H].

        `media` are the distinct images and videos of the batch; the tower encodes each once. A processor's batch has
        their pixels instead (pixel_values, image_grid_thw, ...); they go to the backbone as they are.
        """
        if self.has_text_positions and "position_ids" not in inputs:
            mask = inputs.get("attention_mask")
            mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask
            inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        both = len(media or ()) > 1 or {"pixel_values", "pixel_values_videos"} <= inputs.keys()
        if self.family.kinds_apart and both:
            raise ConfigError(
                f"{self.family.name} does not take images and videos in one batch: train and score them apart."
            )
        media = self._media_of(inputs) if media is None else media
        if self.vision_cache is not None:
            # Here, not where features are cached: ranks with a batch of texts must take part too.
            self.identify_vision(self.vision_cache)
        if media:
            for distinct in media.values():
                sizes = [name for name in distinct["tensors"] if not name.startswith("pixel")]
                inputs |= in_order(distinct, [name for name in sizes if name in self.input_names])
            features = self.encode(media)
            if self.family.in_place and all("places" in distinct for distinct in media.values()):
                inputs["inputs_embeds"] = self._in_place(inputs.pop("input_ids"), features, media)
            else:
                inputs["mm_encoder_outputs"] = features
            if "moe_mm_token_type_ids" in self.input_names:
                inputs["moe_mm_token_type_ids"] = tokens_of_vision_experts(self.config, inputs["input_ids"])
        if pixels := [name for name in inputs if name.startswith("pixel_values")]:
            dtype = next(self.vision_modules()[0].parameters()).dtype
            # Llama 4's processor gives bfloat16, whatever the model is in.
            inputs |= {name: inputs[name].to(dtype) for name in pixels if dtype.is_floating_point}
        if self.touch_vision is None or media or pixels:
            return self._last_hidden_states(**inputs)
        # Before the language model, as with images: under ZeRO-3 all ranks gather weights in one order.
        layers = [layer for image in self.run_tower("image", self.touch_vision) for layer in image.layers]
        if self.family.feature_field == "last_hidden_state":  # before the merger, which the backbone runs
            layers += [merger(layer) for merger in existing_parts(self.model, self.family.mergers) for layer in layers]
        # A zero that depends on every weight of the tower: its gradients are then zeros, not missing.
        zero = torch.stack([(0 * layer).sum() for layer in layers]).sum()
        if self.family.in_place and "layout" in inputs:
            inputs["inputs_embeds"] = self._in_place(inputs.pop("input_ids"), {}, {})
        return self._last_hidden_states(**inputs) + zero

    def _in_place(self, ids: torch.Tensor, features: dict[str, EncoderOutput], media: Media) -> torch.Tensor:
        """Return the embeddings [1, T, H] of a row's tokens `ids` with features in the places of their placeholders.

        The library finds the places by a mask, and would wait for their number in the backward pass.
        """
        embeddings = self.get_input_embeddings()(ids)
        for kind, output in features.items():
            rows = torch.cat(output.pooler_output).to(embeddings).unsqueeze(0)
            embeddings = embeddings.index_copy(1, media[kind]["places"], rows)
        return embeddings

    def _last_hidden_states(self, **inputs: Any) -> torch.Tensor:
        output = self.model(**as_annotated(self.model.forward, inputs))
        return output.logits if self.family.language_head else output.last_hidden_state

    def encode(self, media: Media) -> dict[str, EncoderOutput]:
        """Return the features of each kind of media in the order shown, as the backbone takes them."""
        media = kinds = {kind: media[kind] for kind in sorted(media)}  # images first, whichever stand first
        if len(media) > 1 and self.family.videos_as_images:
            kinds = {"image": as_images(media["image"], media["video"])}
        elif len(media) > 1 and self.training and (self.sharded or is_deepspeed_zero3_enabled()):
            engine = "FSDP" if self.sharded else "ZeRO-3"
            raise ConfigError(
                f"{self.family.name} runs its tower apart for images and for videos, which {engine} does not take in "
                "one batch: use ZeRO-2, or train with one kind."
            )
        # One tower call may have joined both kinds, images first: they are dealt out again by their numbers.
        features = iter([image for kind, distinct in kinds.items() for image in self.vision_features(kind, distinct)])
        by_kind = {kind: list(islice(features, len(distinct["tokens"]))) for kind, distinct in media.items()}
        return {
            kind: assemble([by_kind[kind][index] for index in distinct["order"]]) for kind, distinct in media.items()
        }

    def vision_features(self, kind: str, media: DistinctMedia) -> list[Features]:
        """Return the features of each distinct image or video, from the cache but for pixels that need a gradient."""
        if self.vision_cache is None or any(tensor.requires_grad for tensor in media["tensors"].values()):
            return self.run_tower(kind, media)
        ran = False

        def run(missing: DistinctMedia) -> list[Features]:
            nonlocal ran
            ran = True
            return self.run_tower(kind, missing)

        features = self.vision_cache.features(media, run)
        if self.touch_vision is not None and not ran:
            # Other ranks may have images that are not cached: under ZeRO-3 all gather the tower's weights together.
            self.run_tower("image", self.touch_vision)
        return features

    def run_tower(self, kind: str, media: DistinctMedia) -> list[Features]:
        """Return the features of `vision_features`, computed by the tower."""
        # Some families encode a video as images, under the names of images.
        encode = getattr(self.model, f"get_{kind}_features", self.model.get_image_features)
        named = {name.removesuffix("_videos"): tensor for name, tensor in media["tensors"].items()}
        tensors = named if encode == self.model.get_image_features else media["tensors"]
        dtype = next(self.vision_modules()[0].parameters()).dtype
        inputs = {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
            if name in parameters_of(encode)
        }
        keywords = self._layout_keywords(inputs, media["grids"])
        differentiable = self.trains_vision() or any(tensor.requires_grad for tensor in inputs.values())
        if self._marks_inputs and self.trains_tower():
            # Reentrant checkpointing drops the gradients of layers none of whose inputs needs one.
            pixels = {name: tensor for name, tensor in inputs.items() if tensor.is_floating_point()}
            inputs |= {name: tensor.detach().requires_grad_() for name, tensor in pixels.items()}
        # Adapters of the language model leave the whole tower frozen: its activations need not be kept then.
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            output = encode(**as_annotated(encode, inputs), **keywords, return_dict=True)
        return split(output, media["tokens"], self.family.feature_field, self.family.constants)

    def _layout_keywords(self, inputs: dict[str, torch.Tensor], grids: Sequence[Grid]) -> dict[str, Any]:
        """Return the tower's keywords for images of these grids, and put those among its inputs on the host."""
        [name] = [name for name in inputs if name.endswith("_grid_thw")] or [None]
        if name is None or not self.family.host_layout:
            return {}
        if not self.family.grids_on_device:
            inputs[name] = torch.tensor(grids)
        return tower_keywords(self.vision_modules()[0], grids, self.device)

    def _media_of(self, inputs: dict[str, Any]) -> Media:
        """Take the media out of a processor's batch, for a family with grids that assign patches to media."""
        media: Media = {}
        for kind, suffix in (("image", ""), ("video", "_videos")):
            pixels, grid = inputs.get(f"pixel_values{suffix}"), inputs.get(f"{kind}_grid_thw")
            if f"{kind}_grid_thw" not in self.input_names or (pixels is None and grid is None):
                continue
            if pixels is None or grid is None:
                raise ValueError(f"a batch with {kind}s needs both their pixels and {kind}_grid_thw.")
            # transformers falls back to one-dimensional positions without an error.
            known = ["position_ids", *self.type_names]
            if self.type_names and hasattr(self.model, "get_rope_index") and inputs.keys().isdisjoint(known):
                raise ValueError(
                    "a batch with images needs mm_token_type_ids (the processor returns them) or position_ids: "
                    "without them its images would silently get the positions of text."
                )
            merge = getattr(self.config.vision_config, "spatial_merge_size", None)
            if merge is not None and len(pixels) == (patches := grid.prod(1)).sum():
                media[kind] = {
                    "tensors": {name: inputs[name] for name in (f"pixel_values{suffix}", f"{kind}_grid_thw")},
                    "rows": {f"pixel_values{suffix}": patches.tolist(), f"{kind}_grid_thw": [1] * len(grid)},
                    "tokens": (patches // merge**2).tolist(),
                    "order": list(range(len(grid))),
                    "grids": grids_of({f"{kind}_grid_thw": grid}),
                }
        if not media:
            return media
        placeholders = torch.tensor(sorted(self.placeholders), device=self.device)
        ids = inputs.get("input_ids")
        counted = sum(count for distinct in media.values() for count in distinct["tokens"])
        if ids is None or torch.isin(ids.to(self.device), placeholders).sum() != counted:
            return {}  # a grid of something else: the backbone takes the pixels as they are
        for distinct in media.values():
            for name in distinct["tensors"]:
                del inputs[name]
        return media

    @property
    def family(self) -> Family:
        """What is declared of the model's family."""
        return family_of(self.config)

    @property
    def has_text_positions(self) -> bool:
        """Whether the tokens of images have the positions of text, in place of the family's own."""
        return getattr(self.config, "reward_positions", None) == "text"

    @property
    def language_model(self) -> nn.Module:
        """The language model inside the backbone."""
        return next(iter(existing_parts(self.model, self.family.language_models)), self.model)

    @property
    def input_names(self) -> Sequence[str]:
        """The names of the backbone's inputs."""
        return parameters_of(self.model.forward)

    @property
    def type_names(self) -> Sequence[str]:
        """The backbone's keywords for the kinds of tokens, `Rendered.type_ids`."""
        return [name for name in ("mm_token_type_ids", "token_type_ids") if name in self.input_names]

    @property
    def placeholders(self) -> frozenset[int]:
        """The tokens that the features of images and videos replace."""
        names = (f"{kind}_token_{form}" for kind in ("image", "video") for form in ("id", "index"))
        tokens = (getattr(self.config, name, None) for name in names)
        return frozenset(token for token in tokens if token is not None)

    def vision_modules(self) -> list[nn.Module]:
        """Return the vision towers and mergers: the features of images depend on their weights."""
        return existing_parts(self.model, (*self.family.towers, *self.family.mergers))

    def identify_vision(self, cache: Any) -> None:
        """Let a `VisionCache` hash all that the features of images depend on."""
        modules = [*self.vision_modules(), nn.ParameterList(self.model.parameters(recurse=False))]
        cache.identify(modules, self.config)

    def trains_tower(self) -> bool:
        """Return whether anything of the vision tower itself is trained, such as its adapters."""
        towers, mergers = (existing_parts(self.model, paths) for paths in (self.family.towers, self.family.mergers))
        apart = {id(weight) for merger in mergers for weight in merger.parameters()}
        weights = (weight for tower in towers for weight in tower.parameters() if id(weight) not in apart)
        return any(weight.requires_grad for weight in weights)

    def trains_vision(self) -> bool:
        """Return whether any weight or adapter of the tower or the merger, or a mark between images, is trained."""
        weights = [weight for module in self.vision_modules() for weight in module.parameters()]
        return any(weight.requires_grad for weight in (*weights, *self.model.parameters(recurse=False)))

    def pool(self, hidden: torch.Tensor, attention_mask: Any, branch_ends: torch.Tensor | None) -> torch.Tensor:
        """Return `hidden[B, T, H]` at the last token of each conversation, [N, H].

        The mask tells which token is last. The pad token cannot: some templates use it as an ordinary token.
        """
        if branch_ends is not None:
            return hidden[0, branch_ends]
        if attention_mask is None:
            return hidden[:, -1]
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (attention_mask.to(hidden.device) * positions).argmax(dim=1)
        return hidden[torch.arange(len(hidden), device=hidden.device), last]

    def head(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map `pooled[N, H]` to scores [N, C] in float32."""
        return self.score(self.score_hidden(pooled) if hasattr(self, "score_hidden") else pooled)

    def use_vision_cache(self, directory: str | Path, gigabytes: float = 50.0) -> None:
        """Cache the features of images in `directory`; the vision tower and merger must be frozen."""
        from vlmrm.modeling.vision_cache import VisionCache

        if self.trains_vision():
            raise ConfigError(
                "vision_cache_dir: the features of a trained vision tower or merger change with every step: set "
                "freeze_vit: true without freeze_merger: false, or remove vision_cache_dir."
            )
        if self.family.constants:
            raise ConfigError(
                f"vision_cache_dir: the tower of {self.family.name} gives more than features of images: remove it."
            )
        self.vision_cache = VisionCache(directory, gigabytes)

    def enable_input_require_grads(self) -> None:
        """Let gradients reach adapters behind frozen embeddings, as the library's method does, of text.

        The library's also marks the image patches, and a frozen vision tower would keep its activations for nothing:
        `run_tower` does so where adapters of the tower need it.
        """
        self._marks_inputs = True

        def require_grad(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
            output.requires_grad_(True)

        hook = self.get_input_embeddings().register_forward_hook(require_grad)
        self._require_grads_hooks = [hook]
        self._require_grads_hook = hook

    def _set_gradient_checkpointing(self, *args: Any, **keywords: Any) -> None:
        """Refuse reentrant checkpointing where layers share keys: it would lose their gradients without a word."""
        function = keywords.get("gradient_checkpointing_func")
        reentrant = function is not None and function.keywords.get("use_reentrant") is not False  # as torch's default
        if reentrant and any(getattr(module, "is_kv_shared_layer", False) for module in self.modules()):
            raise ConfigError(
                f"gradient checkpointing: layers of {self.family.name} share keys, whose gradients are lost in the "
                "reentrant kind: write activation_checkpointing_kwargs: {use_reentrant: false}, and with adapters "
                "ZeRO-2 in place of ZeRO-3."
            )
        super()._set_gradient_checkpointing(*args, **keywords)

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """Save under the names that the weights have in memory.

        The trainer reads its own checkpoints with a plain `load_state_dict`, which would skip any other names.
        """
        super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)


for _backbone in (Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel):
    relies_on(_backbone, "get_rope_index", "get_vision_position_ids", "get_image_features")  # see RotaryPositions
    relies_on(_backbone.forward, "mm_encoder_outputs")  # else **kwargs would swallow it: a model blind to images


def reward_model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the reward model class for a configuration, such as `Qwen2_5_VLForSequenceClassification`."""
    if family_of(config).refused:
        raise CheckpointError(f"{config.model_type} cannot be a reward model: {family_of(config).refused}.")
    return _class_for(type(config))


@cache
def _class_for(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    try:
        language_model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    except KeyError:
        raise CheckpointError(
            f"a checkpoint of type {config_class.model_type!r} is no vision-language model: start from Qwen2.5-VL, "
            "MiMo-VL, Qwen2-VL, Qwen3-VL or another that AutoModelForImageTextToText opens."
        ) from None
    name = language_model.__name__.removesuffix("ForConditionalGeneration") + "ForSequenceClassification"
    base = next(parent for parent in language_model.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    if config_class.model_type not in BY_MODEL_TYPE:
        logger.warning("using the generic factory for %s: training it this way is untested", config_class.model_type)
    model_class = type(name, (RewardModel, base), {"__module__": __name__, "config_class": config_class})
    # transformers looks up how to rename a checkpoint's weights by the name of the class, and skips classes that are
    # not its own: unregistered, a downloaded checkpoint would load as a random backbone.
    mapping = get_checkpoint_conversion_mapping(language_model.__name__)
    if mapping is None and (of_type := get_checkpoint_conversion_mapping(config_class.model_type)) is not None:
        # Under the type's own name, so that it is not applied to the backbone, which is of that type, once more.
        name, mapping = config_class.model_type, of_type
    register_checkpoint_conversion_mapping(name, mapping or [], overwrite=True)
    AutoModelForSequenceClassification.register(config_class, model_class, exist_ok=True)
    return model_class


# Registered by now; others are where they are first asked for.
REWARD_MODELS = {config: _class_for(config) for config in (Qwen2VLConfig, Qwen2_5_VLConfig, Qwen3VLConfig)}
