"""Resume a run: choose its checkpoint, compare its settings, and agree on both between ranks."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import CheckpointError, ConfigError, TrainingError, VlmrmError
from vlmrm.files import write_json
from vlmrm.modeling import ModelArguments, verify_complete
from vlmrm.modeling.manifest import COMPLETE, is_adapter, read_json_of, read_reward_file
from vlmrm.training.arguments import RATES, RewardTrainingArguments
from vlmrm.training.folder import Restart, choose_restart, mend

logger = logging.getLogger("vlmrm")

T = TypeVar("T")

SETTINGS = "training_settings.json"
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # the second under FSDP
# Settings that a resumed run cannot change.
FIXED = (
    # HF restores the optimizer from the checkpoint, whatever the configuration says.
    "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "deepspeed", "fsdp",
    # It finds its position in the data by counting steps.
    "seed", "data_seed", "split_seed", "streaming", "shuffle_buffer", "train_sampling_strategy",
    "dataset_weights", "dataset_split", "eval_fraction", "max_train_samples", "columns",
    "rows_per_step", "dataloader_drop_last", "rows_per_batch",
    # The weights and the optimizer's state must fit the model.
    "head", "dtype", "freeze_vit", "freeze_merger", "freeze_llm", "load_in_4bit",
    "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_experts", "lora_vit",
    "lora_merger", "separate_rates",
)  # fmt: skip
# Also fixed where the schedule is not a function of the step, so that it cannot be entered in its middle.
SCHEDULE = ("learning_rate", *RATES.values(), "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
PLATEAU = "reduce_lr_on_plateau"
# Settings that are no keys themselves, and the keys from which they follow.
DERIVED = {
    "rows_per_step": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "rows_per_batch": "per_device_train_batch_size x processes",
    "separate_rates": "the learning rates that are set beside learning_rate",
}
# How gloo says that a neighbour's process has ended.
LOST_RANK = re.compile(r"gloo/.*(closed by peer|reset by peer|Broken pipe|Connection refused|[Tt]imed out)", re.DOTALL)
# Files are compared by content: they may have moved.
CONTENT = {"dataset_path": "dataset_path_content", "model_name_or_path": "model_name_or_path_config"}
PATHS = ("dataset_path", "output_dir", "resume_from_checkpoint", "run_name", "logging_dir")


def checkpoint_to_resume(args: TrainingArguments) -> Path | None:
    """Return the checkpoint that a run goes on from, None for a fresh start, and set broken ones aside.

    The first process chooses for all.
    """
    restart = from_first_rank(lambda: restart_of(args, mended=True))
    path = restart.checkpoint
    if path is None:
        if str(args.resume_from_checkpoint or "false").lower() != "false":
            which = "complete checkpoint" if restart.broken else "checkpoint"
            logger.info("No %s in %s yet: starting from the beginning", which, args.output_dir)
        return None
    if any_rank(not path.is_dir(), args.device):
        raise ConfigError(f"{path} is not on every machine: put output_dir on a disk that all of them share.")
    manifest = read_json_of(path, COMPLETE) or {}
    if manifest["world_size"] != args.world_size:
        logger.warning(
            "%s was saved by %d processes and is resumed by %d: the run goes on, but not bit for bit",
            path, manifest["world_size"], args.world_size,
        )  # fmt: skip
    logger.info("Resuming from %s", path)
    return path


def restart_of(args: TrainingArguments, mended: bool) -> Restart:
    """Return what a run goes on from, once its checkpoint was verified; with `mended` broken ones are set aside."""
    restart = choose_restart(args)
    path = restart.checkpoint
    if path is not None:
        verify_complete(path)
        if not (any((path / name).exists() for name in OPTIMIZERS) or any(path.glob("global_step*"))):
            # HF would silently start with a fresh optimizer.
            raise CheckpointError(
                f"{path} has no optimizer state (save_only_model?): train from it as model_name_or_path."
            )
    if mended:
        mend(Path(str(args.output_dir)), restart)
    return restart


def training_settings(
    model_args: ModelArguments, data_args: DataArguments, args: RewardTrainingArguments
) -> dict[str, Any]:
    """Return every key of a run, with fingerprints of its data and of its model's configuration."""
    config = read_json_of(model_args.model_name_or_path, "config.json", model_args.model_revision)
    engine = args.hf_deepspeed_config if args.deepspeed else None
    settings = {
        **asdict(model_args),
        **asdict(data_args),
        **args.to_dict(),
        # The one that the model has, whether or not the key is written.
        "head": model_args.head or (config or {}).get("reward_head") or "linear",
        "rows_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        # Whether the last rows of an epoch fill a batch decides whether they are read.
        "rows_per_batch": args.train_batch_size * args.world_size if args.dataloader_drop_last else None,
        "separate_rates": [key for key in RATES.values() if getattr(args, key) is not None],
        "deepspeed": None if engine is None else f"ZeRO-{engine.get_value('zero_optimization.stage', 0)}",
        "deepspeed_schedule": engine is not None and engine.get_value("scheduler.type") is not None,
        "dataset_path_content": from_first_rank(lambda: data_fingerprint(data_args.dataset_path)),
        "model_name_or_path_config": blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest(),
    }
    return json.loads(json.dumps(settings, default=str))


def check_base(checkpoint: Path, base: str, digest: str | None) -> None:
    """Refuse to resume an adapter on a base with other weights; `digest` is that of `base`, None for no adapter."""
    if digest is not None and (read_reward_file(checkpoint) or {}).get("base_digest") != digest:
        raise CheckpointError(
            f"model_name_or_path has other weights than it had ({base}): give the base that {checkpoint} was trained "
            "on, or start a new run into another output_dir."
        )


def save_settings(folder: Path, settings: dict[str, Any]) -> None:
    write_json(folder / SETTINGS, settings)


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> list[str]:
    """Compare the settings of a run with those of the checkpoint that it resumes, and return the changes in words."""
    before = read_json_of(checkpoint, SETTINGS)
    if before is None:
        raise CheckpointError(
            f"{checkpoint} has no {SETTINGS}, which says how it was trained: train from it as model_name_or_path."
        )
    merged = ", after vlmrm merge" if is_adapter(checkpoint) else ""
    instead = f"or start a new run from the checkpoint{merged}, as model_name_or_path, into another output_dir"
    for key, content in CONTENT.items():
        if before.get(content) != settings[content]:
            raise ConfigError(f"{key} is not the one that {checkpoint} was trained on: restore it, {instead}.")
    changed = {key: (before[key], settings[key]) for key in before.keys() & settings if before[key] != settings[key]}
    plateau = PLATEAU in (before.get("lr_scheduler_type"), settings["lr_scheduler_type"])
    for key in (*FIXED, *(SCHEDULE if plateau or settings["deepspeed_schedule"] else ())):
        if key in changed:
            old, new = changed[key]
            name = f"{key} ({DERIVED[key]})" if key in DERIVED else key
            raise ConfigError(
                f"{name} was {old} in {checkpoint} and is now {new}, which a resumed run cannot change: leave it as "
                f"it was, {instead}."
            )
    return [f"{key} {old} -> {new}" for key, (old, new) in sorted(changed.items()) if key not in PATHS]


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is set on any rank. Every rank must call it."""
    if not dist.is_initialized():
        return flag
    votes = torch.tensor(int(flag), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of a collective operation says that another rank has ended or does not answer."""
    return dist.is_initialized() and (isinstance(error, dist.DistError) or bool(LOST_RANK.search(str(error))))


@contextmanager
def plain_rank_errors() -> Generator[None]:
    """Turn the errors of ranks whose neighbour has ended into one sentence: why is in what that one said."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise TrainingError(
            f"rank {dist.get_rank()} lost another process of this training: see how that one ended, and continue with "
            "--resume_from_checkpoint auto."
        ) from error


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return on every rank the result of `compute` on the first, which alone calls it. Every rank must call this."""
    if not dist.is_initialized():
        return compute()
    results: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            results = [compute()]
        except VlmrmError as error:
            results = [error]
    dist.broadcast_object_list(results)
    if isinstance(results[0], VlmrmError):
        raise results[0]
    return results[0]
