"""The optimizer: learning rates by part of the model, and what each of HF's optimizers needs and keeps."""

from __future__ import annotations

from collections.abc import Container, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.training_args import OptimizerNames

from vlmrm.errors import ConfigError, first_line
from vlmrm.modeling.head import Float32Linear
from vlmrm.modeling.parts import IN_WORDS, LANGUAGE, MERGER, has_merger, trained_by_part
from vlmrm.training.arguments import RATES, RewardTrainingArguments

# Values that an optimizer keeps of each weight, by the beginning of its name; Adam and others keep two.
STATES = {
    **{"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1, "lion": 1, "ademamix": 3},
    **{"grokadamw": 3, "schedule_free_sgd": 1},
}
BLOCK = 256  # values of fewer than 32 bits that share a float32 scale


# Learning rates ------------------------------------------------------------------------------------------------------


def rates(args: RewardTrainingArguments) -> dict[str, float]:
    """Return the learning rates of the parts that have one of their own."""
    return {part: getattr(args, key) for part, key in RATES.items() if getattr(args, key) is not None}


def rate_of(args: RewardTrainingArguments, group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group of weights, as the keys have it."""
    return rates(args).get(group.get("part", LANGUAGE), args.learning_rate)


def check_rates(args: RewardTrainingArguments, model: nn.Module) -> None:
    """Refuse a learning rate of a part that is not trained; adapters must be in the model."""
    trained = trained_by_part(model)
    for part in rates(args):
        if part == MERGER and not has_merger(model):
            name = type(model.get_submodule("model")).__name__
            raise ConfigError(f"merger_lr: {name} has no merger under a known name: remove it.")
        if not trained[part]:
            raise ConfigError(
                f"{RATES[part]} is {getattr(args, RATES[part])}, and the {IN_WORDS[part]} is not trained: remove it, "
                "or train that part (freeze_vit, freeze_merger, and under use_peft lora_vit, lora_merger)."
            )


def split_groups(optimizer: Any, args: RewardTrainingArguments, model: nn.Module) -> None:
    """Split the groups of an optimizer by part of the model, each with its own learning rate; weight decay stays.

    Groups say their `part`; without separate rates they stay as HF makes them.
    """
    trained, separate = trained_by_part(model), rates(args)
    part_by_weight = {id(weight): part for part in separate for weight in trained[part]}
    if not separate:
        return
    groups = []
    for group in getattr(optimizer, "param_groups", []):
        by_part: dict[str, list[nn.Parameter]] = {}
        for weight in group["params"]:
            by_part.setdefault(part_by_weight.pop(id(weight), LANGUAGE), []).append(weight)
        # No empty ones: DeepSpeed drops those, and a schedule would then take the rate of one for that of the next.
        groups += [{**group, "params": weights, "part": part} for part, weights in by_part.items()]
    if part_by_weight:
        keys = ", ".join(RATES[part] for part in separate)
        raise ConfigError(f"{keys}: optim {args.optim} has one learning rate for all weights: remove one.")
    for group in groups:
        set_rate(group, rate_of(args, group))
    optimizer.param_groups[:] = sorted(groups, key=lambda group: group["part"] != LANGUAGE)


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a group, which some optimizers keep in a tensor."""
    group["lr"] = torch.full_like(group["lr"], rate) if torch.is_tensor(group["lr"]) else rate


def logged_rates(optimizer: Any) -> dict[str, float]:
    """Return the current learning rates of an optimizer by key, `learning_rate` and those of parts."""
    keys = {LANGUAGE: "learning_rate", **RATES}
    return {keys[group["part"]]: float(group["lr"]) for group in optimizer.param_groups if "part" in group}


# HF's optimizers -----------------------------------------------------------------------------------------------------


def uses_bitsandbytes(optim: str) -> bool:
    """Return whether an optimizer of HF's is that of bitsandbytes."""
    return optim.startswith(("paged_", "lion_", "ademamix")) or "bnb" in optim or optim == "adamw_8bit"


def optimizer_bytes(optim: str, width: int = 4) -> float:
    """Return the bytes that an optimizer keeps of each trained weight, itself of `width` bytes.

    Blocks of 256 values in 8 or 4 bits share a scale (Dettmers et al. 2022, section 2). Paged ones count in full: the
    GPU holds them while there is room.
    """
    name = optim.removeprefix("paged_")
    states = next((count for start, count in STATES.items() if name.startswith(start)), 2)
    if bits := 8 * ("8bit" in name) + 4 * ("4bit" in name):
        return states * (bits / 8 + 4 / BLOCK)
    return states * (4 if uses_bitsandbytes(optim) else width)


def check_optimizer(args: RewardTrainingArguments, written: Container[str]) -> None:
    """Refuse an optimizer that cannot run here, or not with this engine."""
    optim = OptimizerNames(args.optim).value
    if (uses_bitsandbytes(optim) or "bit" in optim) and (args.deepspeed or args.fsdp):
        raise ConfigError(
            f"optim: {optim} does not work with {'deepspeed' if args.deepspeed else 'fsdp'}, which hands it other "
            "weights than the model's, and the head's state would be rounded: write optim: adamw_torch, whose state "
            "is divided among the ranks."
        )
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"optim is {optim}: {first_line(error).rstrip('.')}.") from error
    engine = args.hf_deepspeed_config if args.deepspeed else None
    for section in ("optimizer", "scheduler"):
        if engine is not None and engine.get_value(f"{section}.type") is not None:
            keys = [RATES[part] for part in rates(args)] + ["optim"] * (section == "optimizer" and "optim" in written)
            if keys:
                raise ConfigError(
                    f"{', '.join(keys)}: the {section} of deepspeed's configuration goes before it, with one learning "
                    f"rate for all weights: remove {section} from that configuration."
                )


def keep_head_in_32_bits(optimizer: Any, model: nn.Module) -> None:
    """Have an optimizer of 8 or 4 bits keep float32 state of the head, as HF has bitsandbytes do of embeddings.

    The head's few weights turn hidden states into scores: rounding them saves nothing. Call it before the first step.
    """
    library = type(optimizer).__module__.partition(".")[0]
    layers = [layer for layer in model.modules() if isinstance(layer, Float32Linear) and layer.weight.requires_grad]
    if library == "bitsandbytes":
        manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        for layer in layers:
            for name, _ in layer.named_parameters(recurse=False):
                manager.register_module_override(layer, name, {"optim_bits": 32})
    elif library == "torchao":
        for weight in (weight for layer in layers for weight in layer.parameters()):
            moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
