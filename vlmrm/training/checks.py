"""Checks before a training, the cheap ones first; `vlmrm plan` runs the same ones.

A check raises an error where the training must not start, and returns remarks that the log shows where it may.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import torch
from torch import distributed
from transformers.integrations import get_available_reporting_integrations

from vlmrm.errors import ConfigError, TrainingError, first_line
from vlmrm.files import size_text
from vlmrm.libraries import missing
from vlmrm.modeling.manifest import BEST, FINAL, TRAINING_LOCK, find_checkpoints
from vlmrm.outputs import Outputs
from vlmrm.settings import did_you_mean
from vlmrm.training.arguments import RewardTrainingArguments, RunArguments
from vlmrm.training.callbacks import LOGGED
from vlmrm.training.engines import check_combination
from vlmrm.training.optimizer import check_optimizer, optimizer_bytes


def check_launch(run: RunArguments) -> None:
    """Refuse launches whose processes would not train together."""
    args = run.training
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        ranks = args.world_size  # starts the process group
    except (ValueError, ImportError, RuntimeError) as error:  # RuntimeError: a port in use, ranks that do not meet
        raise ConfigError(f"the training cannot be launched so: {first_line(error).rstrip('.')}.") from error
    if ranks != launched:
        raise ConfigError(
            f"launched with {launched} processes, but each would train alone ({args.parallel_mode.value}): start it "
            "with run_distributed.sh, and on a machine without GPUs add --use_cpu true."
        )


def check_visible(run: RunArguments) -> None:
    """Refuse a launch of a single process on several GPUs, or with FSDP2 on anything but one of CUDA."""
    check_gpus(run.training.n_gpu)
    if run.training.fsdp and not run.training.use_cpu and not distributed.is_initialized():
        raise ConfigError("fsdp of one process needs a CUDA GPU: remove it, or start several processes.")


def check_gpus(count: int) -> None:
    if count > 1:
        raise ConfigError(
            f"{count} GPUs are visible to one process: start it with run_distributed.sh --gpus {count}, or set "
            "CUDA_VISIBLE_DEVICES=0."
        )


def check_required(run: RunArguments) -> Iterator[str]:
    """Refuse configurations that lack a key, or combine keys that exclude each other."""
    args, data = run.training, run.data
    if not run.model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing: give a checkpoint, such as Qwen/Qwen2.5-VL-7B-Instruct.")
    if not data.dataset_path:
        raise ConfigError("dataset_path is missing: give a hub id, a folder or a file of preferences.")
    if args.eval_strategy != "no" and not (data.eval_dataset_path or data.eval_fraction):
        raise ConfigError(f"eval_strategy is {args.eval_strategy.value}: give eval_dataset_path or eval_fraction.")
    check_best(args, data.named_outputs)
    for name in args.report_to:
        if name not in get_available_reporting_integrations():
            if name in ("tensorboard", "trackio", "wandb"):
                raise ConfigError(missing(f"report_to: {name}", name, name))
            hint = did_you_mean(name, ("tensorboard", "trackio", "wandb", "none"), f": pip install {name}.")
            raise ConfigError(f"report_to names {name}, which is not installed{hint}")
    if "wandb" in args.report_to and not args.process_index:
        check_wandb()
    if args.push_to_hub:
        raise ConfigError("push_to_hub does not work here: upload what vlmrm export writes with hf upload.")
    check_optimizer(args, run.written)
    if run.model.load_in_4bit:
        from vlmrm.modeling.adapters import quantization_config

        quantization_config(run.model)
        if args.use_cpu:
            yield "load_in_4bit on a CPU saves memory and no time: each layer is unpacked whenever it is used"


def check_wandb() -> None:
    """Refuse a run of wandb that would not begin: without a login it says so after the model was loaded."""
    import wandb

    if wandb.setup().settings.mode in ("offline", "disabled"):
        return
    otherwise = "run `wandb login`, set WANDB_API_KEY, or keep the run here with WANDB_MODE=offline."
    try:
        if not wandb.login(prompt=False):
            raise ConfigError(f"report_to: wandb is not logged in: {otherwise}")
    except wandb.Error as error:
        raise ConfigError(f"report_to: wandb cannot log in ({first_line(error).rstrip('.')}): {otherwise}") from error


def check_engine(run: RunArguments) -> None:
    """Refuse parts of a run that its engine does not carry, and FSDP where transformers would ignore it."""
    args = run.training
    check_combination(run.model, args)
    if args.fsdp and args.device.type == "cpu":
        raise ConfigError("fsdp does not run on a CPU: remove it, or use deepspeed: zero2.json.")


def check_best(args: RewardTrainingArguments, outputs: Outputs) -> None:
    """Refuse a metric that no evaluation has: HF would fail after the first evaluation, with all steps lost."""
    if args.metric_for_best_model is None or args.eval_strategy == "no":
        return
    from vlmrm.measures.analysis import trl_summary

    no_pairs = pd.DataFrame({"chosen_score": [], "rejected_score": [], "tie": []})
    metrics = [*trl_summary(no_pairs), *outputs.figures]
    metrics += [name for names in LOGGED.values() for name in names] if args.probe_samples else []
    metric = args.metric_for_best_model.removeprefix("eval_")
    if metric not in metrics:
        hint = did_you_mean(metric, metrics, f": choose from {', '.join(metrics)}.")
        raise ConfigError(f"metric_for_best_model is {args.metric_for_best_model}, which no evaluation has{hint}")


# Keys that are off by default: their values in a configuration, on and off, and the keys that do nothing while off.
SWITCHES: dict[str, tuple[str, str, str]] = {
    "use_peft": (
        *("true", "false"),
        "lora_r lora_alpha lora_dropout lora_target_modules lora_experts lora_vit lora_merger",
    ),
    "fsdp": ("true", "null", "fsdp_config"),
    "gradient_checkpointing": ("true", "false", "activation_checkpointing_kwargs gradient_checkpointing_kwargs"),
    "use_irrelevant_queries": ("true", "false", "num_irrelevant_pairs irrelevant_loss_weight"),
    "vision_cache_dir": ("FOLDER", "null", "vision_cache_gb"),
    "eval_strategy": ("steps", "no", "eval_dataset_path eval_steps max_eval_samples probe_samples"),
    "eval_dataset_path": ("FILE", "[]", "eval_dataset_split"),
    "load_best_model_at_end": ("true", "false", "metric_for_best_model greater_is_better"),
    "save_strategy": ("steps", "no", "save_steps save_total_limit"),
}


def check_ignored(run: RunArguments) -> Iterator[str]:
    """Refuse keys that would do nothing, unless the key that switches them off is written too.

    So `--eval_strategy no` may be added to a file with `eval_steps`, but `lora_r` without `use_peft` is a mistake.
    """
    for switch, (on, off, keys) in SWITCHES.items():
        idle = [key for key in keys.split() if key in run.written]
        if not idle or run.value(switch) not in (False, None, "no", []):
            continue
        if switch not in run.written:
            raise ConfigError(
                f"{idle[0]} does nothing without {switch}: add {switch}: {on}, or remove it; {switch}: {off} says "
                "that it is to do nothing."
            )
        yield f"{', '.join(idle)}: not used, as {switch} is {off}"
    if run.model.model_revision and Path(run.model.model_name_or_path).is_dir():
        raise ConfigError("model_revision is for the hub, and model_name_or_path is a folder: remove it.")
    for split, paths in {"dataset_split": "dataset_path", "eval_dataset_split": "eval_dataset_path"}.items():
        files = [path for path in run.value(paths) if Path(path).is_file()]
        if split in run.written and files and len(files) == len(run.value(paths)):
            raise ConfigError(f"{split} does nothing for a file ({files[0]}): remove it.")


def check_output(run: RunArguments) -> None:
    """Refuse an `output_dir` that a training did not make and that is not empty."""
    folder = Path(run.training.output_dir)
    if run.training.process_index or not folder.is_dir() or (folder / TRAINING_LOCK).exists():
        return
    if find_checkpoints(folder) or any((folder / name).is_dir() for name in (FINAL, BEST)):
        return  # of a training whose hidden files were not copied
    if names := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
        raise ConfigError(
            f"output_dir {folder} holds {names[0]} and was not made by a training: name a new or an empty folder."
        )


def check_bfloat16(run: RunArguments) -> Iterator[str]:
    """Remark on a CPU without bfloat16 instructions: it computes bfloat16 many times slower than float32."""
    if run.training.bf16 and run.training.device.type == "cpu" and not has_bfloat16():
        yield "bf16: true, and this CPU has no bfloat16: --bf16 false trains many times faster here"


def has_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions; of other kinds than x86 it is not known, and assumed."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_tile"))


# Before anything is read or opened.
CHECKS = (check_launch, check_visible, check_engine, check_required, check_ignored, check_output, check_bfloat16)


# Once the model is open ----------------------------------------------------------------------------------------------


def checkpoint_bytes(weights: Iterable[torch.nn.Parameter], args: RewardTrainingArguments, *, adapter: bool) -> int:
    """Return the size of one checkpoint: the weights, or of an adapter the trained ones, and the optimizer's state."""
    resumable = not args.save_only_model
    size = 0.0
    for weight in (weight for weight in weights if weight.requires_grad or not adapter):
        each = weight.element_size() * (2 if args.fsdp and resumable else 1)  # FSDP resumes from a copy of its own
        if weight.requires_grad and resumable:  # DeepSpeed has float32 copies
            each += 4 + optimizer_bytes(args.optim) if args.deepspeed else optimizer_bytes(args.optim, weight.itemsize)
        size += each * getattr(weight, "ds_numel", weight.numel())  # ZeRO-3 empties the shape
    return int(size)


def check_disk(folder: Path, needed: int, saves: int) -> Iterator[str]:
    """Refuse a disk without room for one checkpoint; remark on one without room for `saves` of them."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TrainingError(
            f"a checkpoint takes {size_text(needed)} and {folder} has {size_text(free)} free: free some space, "
            "choose another output_dir, or write save_only_model: true."
        )
    if free < needed * saves:
        yield (
            f"{saves} checkpoints take {size_text(saves * needed)} and {folder} has {size_text(free)} free: "
            "lower save_total_limit"
        )
