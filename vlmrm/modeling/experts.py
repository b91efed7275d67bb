"""Routers of mixture-of-experts language models: their load-balancing loss, and the experts' weights.

A token counts once for each conversation that holds it, so a shared batch has the loss of the padded one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from vlmrm.batching.shared import PackedLayout, on_device
from vlmrm.errors import ConfigError
from vlmrm.libraries import relies_on

relies_on(PreTrainedModel, "can_record_outputs")

# Routers whose recorded output is not logits but probabilities.
GIVE_PROBABILITIES = ("Gemma4TextRouter",)


@dataclass(frozen=True)
class Router:
    """A module that sends each token to `choices` experts; its output number `index` is recorded as its logits."""

    path: str
    module: nn.Module
    index: int
    choices: int


def find_routers(model: nn.Module) -> list[Router]:
    """Return the routers that transformers records in a model, in the order of its layers; without experts none."""
    indices = dict(_recorded_classes(model))
    config = getattr(model, "config", None)
    choices = getattr(config.get_text_config(), "num_experts_per_tok", 1) if config is not None else 1
    return [
        Router(name, module, index, getattr(module, "top_k", choices))
        for name, module in model.named_modules()
        if (index := indices.get(type(module))) is not None
    ]


def _recorded_classes(model: nn.Module) -> Iterator[tuple[type[nn.Module], int]]:
    """Yield the class of each kind of router, and which of its outputs are the logits."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            specs = part.can_record_outputs.get("router_logits") or []
            for spec in specs if isinstance(specs, list) else [specs]:
                yield (spec.target_class, spec.index) if isinstance(spec, OutputRecorder) else (spec, 1)


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of a model's weights [experts, ., .] that hold all experts of a layer."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, weight in module.named_parameters(recurse=False)
        # DeepSpeed empties the weights that it partitions.
        if len(shape := getattr(weight, "ds_shape", weight.shape)) == 3
        and shape[0] == getattr(module, "num_experts", None)
    ]


def token_weights(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return how many conversations hold each token of a batch, float32 [B x T]: 0 for padding."""
    tokens, layout, mask = inputs["input_ids"], inputs.get("layout"), inputs.get("attention_mask")
    if isinstance(layout, PackedLayout):
        return on_device(torch.from_numpy(layout.conversations()).float(), tokens.device)
    if mask is None:
        return torch.ones(tokens.numel(), device=tokens.device)
    return mask.flatten().float()


def tokens_of_vision_experts(config: PreTrainedConfig, token_ids: torch.Tensor) -> torch.Tensor:
    """Return 1 for the tokens [B, T] that ERNIE 4.5 VL sends to its experts for images, and 0 for others.

    They are those of images and videos and, unlike in `mm_token_type_ids`, of the marks around them.
    """
    names = [f"{kind}{mark}_token_id" for kind in ("image", "video") for mark in ("", "_start", "_end")]
    ids = on_device(torch.tensor([getattr(config, name) for name in names]), token_ids.device)
    return torch.isin(token_ids, ids).long()


def touch_vision_experts(model: nn.Module) -> None:
    """Make every batch of a training reach ERNIE 4.5 VL's experts for images, with images or without.

    Ranks then reduce the same gradients, those of a batch of texts zeros. Other families' experts are one tensor a
    layer, which has a gradient wherever any token goes.
    """
    for module in model.modules():
        if hasattr(module, "vision_moe"):
            module.register_forward_hook(_add_zero)


def _add_zero(
    layer: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not layer.training or (len(args) > 1 and args[1] is not None):
        return None
    hidden, logits = layer.vision_moe(args[0][:1, :1])
    return output[0] + 0 * (hidden.sum() + logits.sum()), output[1]


@dataclass(frozen=True)
class Decision:
    """What one router decided: logits [T, experts], each token's experts [T, choices], and the tokens' weights [T]."""

    logits: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, router: Router, output: Sequence[torch.Tensor], weights: torch.Tensor) -> Decision:
        """Return the decision of a router that returned `output`."""
        logits = output[router.index].flatten(0, -2)
        # Not always those of the largest logits: some routers add a bias, or choose groups of experts first.
        chosen = next((it for it in output if torch.is_tensor(it) and not it.is_floating_point()), None)
        if chosen is None:
            chosen = logits.detach().topk(router.choices).indices
        if type(router.module).__name__ in GIVE_PROBABILITIES:
            logits = logits.log()
        return cls(logits, chosen.flatten(0, -2), weights.to(logits.device))

    def load(self) -> torch.Tensor:
        """Return the weight of the tokens that each expert gets, float32 [experts]."""
        load = torch.zeros(self.logits.shape[1], dtype=torch.float32, device=self.logits.device)
        return load.scatter_add_(0, self.chosen.flatten(), self.weights.repeat_interleave(self.chosen.shape[1]))

    def probability(self) -> torch.Tensor:
        """Return each expert's probability, summed over the weighted tokens, float32 [experts]."""
        return self.weights @ self.logits.float().softmax(-1)


def balance_loss(decisions: list[Decision]) -> torch.Tensor:
    """Return the load-balancing loss of one forward, E Σ f P over the E experts.

    f is the share of tokens that an expert gets, counted over all layers, and P its mean probability: even loads have
    a loss of the number of experts a token is sent to, others a higher one (Fedus et al. 2021,
    https://huggingface.co/papers/2101.03961, Eqs. 4 to 6, in the form of transformers).
    """
    load = torch.stack([it.load() for it in decisions]).sum(0)
    probability = torch.stack([it.probability() for it in decisions]).sum(0)
    tokens = torch.stack([it.weights.sum() for it in decisions]).sum().clamp_min(torch.finfo(torch.float32).tiny)
    if torch.is_grad_enabled() and not probability.requires_grad:
        raise ConfigError(
            "router_aux_loss_coef changes no weight in this training: remove it, or train the language model, without "
            "reentrant gradient checkpointing (gradient_checkpointing_kwargs: {use_reentrant: false})."
        )
    return len(load) * (load / tokens * (probability / tokens)).sum()


class Routers:
    """Watches the routers of a model while it runs."""

    def __init__(self, routers: list[Router]):
        self.routers = routers
        self._outputs: dict[Router, Sequence[torch.Tensor]] | None = None  # of the forward that is watched
        for router in routers:
            router.module.register_forward_hook(self._recorder(router))

    def _recorder(self, router: Router) -> Callable[..., None]:
        def record(module: Any, args: tuple, output: Sequence[torch.Tensor]) -> None:
            # Gradient checkpointing runs the router again in the backward pass, when nobody watches, and compares what
            # autograd keeps in both: nothing may be computed here.
            if self._outputs is not None:
                self._outputs[router] = output

        return record

    @contextmanager
    def watching(self, inputs: Mapping[str, Any]) -> Generator[list[Decision]]:
        """Yield a list that has the decisions of all routers after the forward of `inputs` that runs inside."""
        decisions: list[Decision] = []
        outputs = self._outputs = {}
        try:
            yield decisions
        finally:
            self._outputs = None
        if not self.routers:
            return
        weights = token_weights(inputs)
        decisions += [Decision.of(router, outputs[router], weights) for router in self.routers]
