"""Engines: what a run is shared out with among its ranks, as its keys say, and what FSDP2 must know of a reward model.

Keys and combinations that would train something else, or nothing, are refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.dataclasses import get_module_class_from_name
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from vlmrm.config import NO_ENGINE
from vlmrm.errors import ConfigError
from vlmrm.libraries import LAUNCHER, relies_on
from vlmrm.modeling.head import Float32Linear
from vlmrm.settings import did_you_mean

if TYPE_CHECKING:
    from vlmrm.modeling.arguments import ModelArguments
    from vlmrm.modeling.reward_model import RewardModel
    from vlmrm.training.arguments import RewardTrainingArguments

ON = ("true", "full_shard", "full_shard auto_wrap")  # values of `fsdp`, the last two of transformers 4
# Keys of fsdp_config, and the values of those that have one alone.
FSDP_KEYS: dict[str, tuple[Any, ...]] = {
    "version": (2,),
    "reshard_after_forward": (),
    "activation_checkpointing": (),
    "cpu_ram_efficient_loading": (),
    "transformer_layer_cls_to_wrap": (),
    "auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "state_dict_type": ("FULL_STATE_DICT",),  # shards could not be scored
}
PIECES = (
    "packed rows are not split along the sequence: for long videos set max_tokens_per_batch or a lower "
    "video_max_frames, and share out the weights with deepspeed: zero3.json or fsdp: true"
)
COMPILED = "blocks are compiled by inductor, with sizes that vary: write torch_compile: true instead"
# Keys of transformers that would change the forward, and why they are refused.
UNSUPPORTED = {
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), COMPILED),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        "liger-kernel patches generative models alone, and torch_compile: true fuses more: remove it",
    ),
    "parallelism_config": PIECES,
}
# What `accelerate launch` sets, which would reach the trainer past the configuration.
ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "write deepspeed: FILE",
    "ACCELERATE_USE_FSDP": "write fsdp: true",
    "ACCELERATE_USE_MEGATRON_LM": "start it with run_distributed.sh",
    "ACCELERATE_USE_PARALLELISM_CONFIG": PIECES,
    "ACCELERATE_DYNAMO_BACKEND": COMPILED,
}


def read_engines(args: RewardTrainingArguments) -> None:
    """Bring `deepspeed` and `fsdp` into the form that transformers takes."""
    for key, why in UNSUPPORTED.items():
        if getattr(args, key):
            raise ConfigError(f"{key}: {why}.")
    if args.deepspeed is False or (isinstance(args.deepspeed, str) and args.deepspeed.lower() in NO_ENGINE):
        args.deepspeed = None
    if isinstance(args.deepspeed, str) and not args.deepspeed.startswith("{") and not Path(args.deepspeed).is_file():
        raise ConfigError(
            f"deepspeed names {args.deepspeed}, which is not there: give the path of a DeepSpeed configuration such "
            "as zero2.json, or null for none."
        )
    args.fsdp = _fsdp(args.fsdp)
    if args.fsdp and args.deepspeed:
        raise ConfigError("fsdp and deepspeed both share out the weights: remove one.")
    args.fsdp_config = _fsdp_config(args.fsdp_config)


def _fsdp(value: Any) -> Any:
    """Return True or None for `fsdp`, which transformers reads as a word of version 4."""
    word = str(value or "").lower()
    if word in NO_ENGINE:
        return None
    if word in ON:
        return True
    raise ConfigError(
        f"fsdp is {value}: write fsdp: true, and in fsdp_config how, such as reshard_after_forward: false."
    )


def _fsdp_config(value: Any) -> dict[str, Any] | None:
    """Return `fsdp_config`, a mapping, its JSON or the path of a file with it, without the prefixes of its keys."""
    config = value
    if isinstance(value, str):
        with suppress(OSError, ValueError):
            config = json.loads(value if value.startswith("{") else Path(value).read_text(encoding="utf-8"))
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"fsdp_config is {value}, which is no mapping: give a path such as fsdp2.json, or its keys.")
    config = {key.removeprefix("fsdp_"): setting for key, setting in config.items()}
    for key, setting in config.items():
        if key not in FSDP_KEYS:
            raise ConfigError(f"fsdp_config has {key}, which is not read here{did_you_mean(key, FSDP_KEYS)}")
        if FSDP_KEYS[key] and str(setting) not in map(str, FSDP_KEYS[key]):
            raise ConfigError(f"fsdp_config: {key} is {setting}: it must be {FSDP_KEYS[key][0]}, or left out.")
    return config


def join_alone(args: RewardTrainingArguments) -> None:
    """Let one process on one GPU be all the ranks of FSDP2: it then computes in `bf16` beside float32 weights."""
    if not args.fsdp or args.use_cpu or torch.cuda.device_count() != 1 or "LOCAL_RANK" in os.environ:
        return
    if not distributed.is_initialized():
        distributed.init_process_group(store=distributed.HashStore(), rank=0, world_size=1)
    os.environ["LOCAL_RANK"] = "0"  # by which accelerate looks for a group


def check_engine_files(args: RewardTrainingArguments) -> None:
    """Refuse what the engines' configurations say that is not computed here, or twice."""
    for path in ("sequence_parallel_size", "tensor_parallel.autotp_size"):
        if args.deepspeed and (args.hf_deepspeed_config.get_value(path) or 0) > 1:
            raise ConfigError(f"deepspeed: {path}: {PIECES}.")
    if not args.fsdp:
        return
    recomputed = _is_on(args.fsdp_config, "activation_checkpointing")
    if recomputed and args.gradient_checkpointing == "auto":
        set_checkpointing(args, 0)
    if recomputed and args.gradient_checkpointing:
        raise ConfigError(
            "gradient_checkpointing and activation_checkpointing of fsdp_config are the same: remove one."
        )
    if recomputed and not args.disable_dropout:
        raise ConfigError(
            "activation_checkpointing of fsdp_config draws other dropout when it computes a layer anew: write "
            "gradient_checkpointing: true instead, or disable_dropout: true."
        )


# Keys of activation_checkpointing_kwargs that are transformers' own, not torch.utils.checkpoint's.
LAYER_KEYS = ("every_n_layers", "offload") if hasattr(PreTrainedModel, "activation_checkpointing_enable") else ()


def check_checkpointing(args: RewardTrainingArguments) -> None:
    """Refuse keys of activation checkpointing read by nobody before a step, and offloading with nothing to save."""
    keys: Any = args.gradient_checkpointing_kwargs or {}  # as the newer key says, where it is the one that is set
    known = (*LAYER_KEYS, "use_reentrant", "preserve_rng_state", "determinism_check")
    if unknown := next((key for key in keys if key not in known), None):
        raise ConfigError(f"activation_checkpointing_kwargs has {unknown}{did_you_mean(unknown, known)}")
    if args.gradient_checkpointing == "auto" and set(LAYER_KEYS) & keys.keys():
        set_checkpointing(args, 1)
    for name, value in {"activation_offloading": args.activation_offloading, "offload": keys.get("offload")}.items():
        if value and args.use_cpu:
            raise ConfigError(f"{name} moves activations to the CPU: without a GPU, remove it.")
    if args.activation_offloading and keys.get("offload"):
        raise ConfigError("activation_offloading and offload of activation_checkpointing_kwargs: remove one.")


def set_checkpointing(args: Any, every: int) -> None:
    """Set the keys by which every so many-th layer is computed twice; 0: none."""
    args.gradient_checkpointing = args.activation_checkpointing = every > 0
    if every > 1:
        kwargs = {**(args.gradient_checkpointing_kwargs or {}), "every_n_layers": every}
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = kwargs


LARGE, LONG = 1e9, 200  # weights and steps that a minute or two of compiling is small beside


def compiles(keys: ModelArguments, args: RewardTrainingArguments, model: RewardModel, steps: int) -> bool:
    """Return whether blocks are compiled: as `torch_compile` says, else where it was measured, and pays in `steps`."""
    if args.torch_compile is not None:
        return args.torch_compile
    usual = args.bf16 and args.world_size == 1 and engine_of(args) == "DDP" and not keys.load_in_4bit
    measured = usual and args.device.type == "cuda" and model.family.compiled
    return bool(measured and steps >= LONG and sum(weight.numel() for weight in model.parameters()) > LARGE)


def reads_weights_once(args: RewardTrainingArguments) -> bool:
    """Return whether the first process of a machine alone reads the weights."""
    return bool(args.fsdp) and _is_on(args.fsdp_config, "cpu_ram_efficient_loading")


def _is_on(config: Any, key: str) -> bool:
    return str(config.get(key, "")).lower() in ("true", "1")


@contextmanager
def engine_environment() -> Generator[None]:
    """Take the variables of the environment back that a run sets, before the next run reads them."""
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, *LAUNCHER)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_environment(args: RewardTrainingArguments) -> None:
    """Refuse an engine that accelerate's environment sets and the configuration does not."""
    own = {"ACCELERATE_USE_DEEPSPEED": args.deepspeed, "ACCELERATE_USE_FSDP": args.fsdp}
    for name, instead in ENVIRONMENT.items():
        if os.environ.get(name, "").lower() not in ("", "0", "false", "no") and not own.get(name):
            raise ConfigError(
                f"{name} is set in the environment, which a configuration says here: unset it; {instead}."
            )


# Engines by the name that docs/training.md has for them.
ENGINES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")


def engine_of(args: RewardTrainingArguments) -> str:
    """Return which of `ENGINES` a run has."""
    if args.fsdp:
        return "FSDP2"
    stage = args.hf_deepspeed_config.get_value("zero_optimization.stage", 0) if args.deepspeed else 0
    return ENGINES[stage]


def check_combination(model: ModelArguments, args: RewardTrainingArguments) -> None:
    """Refuse a part of the run that its engine does not carry."""
    engine = engine_of(args)
    zero2 = "remove one, or use deepspeed: zero2.json"
    offload = "it would move their copies of the weights too: write activation_checkpointing_kwargs: {offload: true}"
    refused = [
        ("vision_cache_dir", model.vision_cache_dir, ENGINES[4:], zero2),
        ("load_in_4bit", model.load_in_4bit, ENGINES[3:], f"weights of 4 bits cannot be shared out: {zero2}"),
        ("activation_offloading", args.activation_offloading, ENGINES[1:], offload),
        ("fp16", args.fp16, ENGINES[4:], "write bf16: true"),
        ("torch_compile", args.torch_compile, ENGINES[3:4], "remove it"),
    ]
    for part, used, engines, instead in refused:
        if used and engine in engines:
            key = "fsdp" if engine == "FSDP2" else f"deepspeed ({engine})"
            raise ConfigError(f"{part} does not work with {key}: {instead}.")


# FSDP2 ---------------------------------------------------------------------------------------------------------------
#
# accelerate shards the model (`fsdp2_prepare_model`) and saves it whole: a checkpoint is that of any other run.

relies_on(
    FullyShardedDataParallelPlugin,
    attributes=("mixed_precision_policy", "transformer_cls_names_to_wrap", "cpu_ram_efficient_loading"),
)


def describe(plugin: Any, model: nn.Module, reward_model: RewardModel, half: torch.dtype | None) -> None:
    """Tell accelerate's plugin what to shard apart and what to compute in `half` (None: in float32).

    `model` is `reward_model`, or the adapters around it. Call it before accelerate prepares the model.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError("fsdp needs torch 2.15 or newer: install it, or use deepspeed: zero3.json.")
    if plugin.transformer_cls_names_to_wrap is None:
        # Of the classes that transformers never splits: it also names those of other models of the family.
        names = sorted(getattr(model, "_no_split_modules", None) or ())
        present = [name for name in names if get_module_class_from_name(model, name) is not None]
        plugin.transformer_cls_names_to_wrap = present
    lists = [module for module in reward_model.language_model.modules() if isinstance(module, nn.ModuleList)]
    apart = plugin.transformer_cls_names_to_wrap
    if not any(type(layer).__name__ in apart for layers in lists for layer in layers):
        raise ConfigError(
            f"fsdp: {type(reward_model).__name__} does not say which of its layers are sharded apart: name their "
            "class in fsdp_config as transformer_layer_cls_to_wrap, or use deepspeed: zero3.json."
        )
    saved = model.state_dict().keys()
    kept = [name for name, _ in model.named_buffers() if name in saved]
    if plugin.cpu_ram_efficient_loading and kept:
        raise ConfigError(
            f"fsdp_config: cpu_ram_efficient_loading does not carry {kept[0]} of {type(reward_model).__name__}: "
            "remove it, and every process reads the weights."
        )
    plugin.mixed_precision_policy = precision(model, half)


def precision(model: nn.Module, half: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the types that FSDP computes in: layers in `half`, the head and sums of gradients in float32.

    accelerate's own policy would round scores and gradients to `half`. Inputs stay as they are: to cast them, torch
    makes every layer a copy of the row's layout, and rounds positions.
    """

    def keep(weight: nn.Parameter) -> torch.dtype | None:
        heads = [module for module in model.modules() if isinstance(module, Float32Linear)]
        return weight.dtype if any(weight is own for head in heads for own in head.parameters(False)) else None

    return MixedPrecisionPolicy(
        param_dtype=half,
        reduce_dtype=None if half is None else torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,
        param_dtype_override_fn=keep if half is not None else None,
    )


def reduce_all(model: Any, reward_model: RewardModel) -> None:
    """Let ranks reduce the gradients of weights that their batches do not reach: they would wait for ever."""
    if not reward_model.family.trains_all:
        model.set_reduce_scatter_unused_params(True)


def own_part(weight: Any) -> torch.Tensor:
    """Return what this rank holds of a weight: under ZeRO-3 and FSDP2 a part of it."""
    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if isinstance(weight, DTensor) else weight
