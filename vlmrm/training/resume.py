"""Resume a run: choose its checkpoint, compare its settings, and agree on both between ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import CheckpointError, ConfigError, VlmrmError
from vlmrm.files import write_json
from vlmrm.modeling import ModelArguments, find_checkpoints, newest_complete, verify_complete
from vlmrm.modeling.manifest import BEST, COMPLETE, FINAL, is_adapter, read_json_of, read_reward_file
from vlmrm.training.arguments import RewardTrainingArguments

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
    "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_experts",
)  # fmt: skip
# Also fixed where the schedule is not a function of the step, so that it cannot be entered in its middle.
SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")
PLATEAU = "reduce_lr_on_plateau"
# Settings that are no keys themselves, and the keys from which they follow.
DERIVED = {
    "rows_per_step": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "rows_per_batch": "per_device_train_batch_size x processes",
}
# Files are compared by content: they may have moved.
CONTENT = {"dataset_path": "dataset_path_content", "model_name_or_path": "model_name_or_path_config"}
PATHS = ("dataset_path", "output_dir", "resume_from_checkpoint", "run_name", "logging_dir")


def checkpoint_to_resume(args: RewardTrainingArguments) -> Path | None:
    """Return the checkpoint of `resume_from_checkpoint`: a folder, or with `auto` the newest complete one.

    None is a fresh start.

    Raises:
        ConfigError: for a fresh start in a folder that holds a training already.
        CheckpointError: when the checkpoint is broken or has no optimizer state.
    """
    choice = str(args.resume_from_checkpoint or "false")
    existing = find_checkpoints(args.output_dir)
    if choice.lower() == "false":
        finished = [path for path in (Path(args.output_dir, name) for name in (FINAL, BEST)) if path.exists()]
        if existing or finished:
            raise ConfigError(
                f"{args.output_dir} already holds {[*finished, *existing][-1].name}: continue with "
                "--resume_from_checkpoint auto, or choose another --output_dir."
            )
        return None
    if choice.lower() in ("auto", "true"):
        path = newest_complete(args.output_dir)
        if path is None:
            refuse_damaged(existing)
            which = "complete checkpoint" if existing else "checkpoint"
            logger.info("No %s in %s yet: starting from the beginning", which, args.output_dir)
            return None
    else:
        path = Path(choice)
    manifest = verify_complete(path)
    if not (any((path / name).exists() for name in OPTIMIZERS) or any(path.glob("global_step*"))):
        # HF would silently start with a fresh optimizer.
        raise CheckpointError(
            f"{path} has no optimizer state (save_only_model?): train from it as model_name_or_path."
        )
    if manifest["world_size"] != args.world_size:
        logger.warning(
            "%s was saved by %d processes and is resumed by %d: the run goes on, but not bit for bit",
            path, manifest["world_size"], args.world_size,
        )  # fmt: skip
    logger.info("Resuming from %s", path)
    return path


def refuse_damaged(checkpoints: Sequence[Path]) -> None:
    """Refuse to start anew over checkpoints that were complete once; one whose saving was interrupted never was.

    Raises:
        CheckpointError: naming the newest, and why it does not verify.
    """
    for folder in reversed(checkpoints):
        if (folder / COMPLETE).exists():
            try:
                verify_complete(folder)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{folder} was complete and no longer verifies ({str(error).rstrip('.')}): mend it, or choose "
                    "another output_dir."
                ) from error


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
        "rows_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        # Whether the last rows of an epoch fill a batch decides whether they are read.
        "rows_per_batch": args.train_batch_size * args.world_size if args.dataloader_drop_last else None,
        "deepspeed": None if engine is None else f"ZeRO-{engine.get_value('zero_optimization.stage', 0)}",
        "deepspeed_schedule": engine is not None and engine.get_value("scheduler.type") is not None,
        "dataset_path_content": from_first_rank(lambda: data_fingerprint(data_args.dataset_path)),
        "model_name_or_path_config": blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest(),
    }
    return json.loads(json.dumps(settings, default=str))


def check_base(checkpoint: Path, base: str, digest: str | None) -> None:
    """Refuse to resume an adapter on a base with other weights; `digest` is of those of `base`, None for no adapter.

    Raises:
        CheckpointError: when the checkpoint has another digest.
    """
    if digest is not None and (read_reward_file(checkpoint) or {}).get("base_digest") != digest:
        raise CheckpointError(
            f"model_name_or_path has other weights than it had ({base}): give the base that {checkpoint} was trained "
            "on, or start a new run into another output_dir."
        )


def save_settings(folder: Path, settings: dict[str, Any]) -> None:
    write_json(folder / SETTINGS, settings)


def check_settings(checkpoint: Path, settings: dict[str, Any]) -> list[str]:
    """Compare the settings of a run with those of the checkpoint that it resumes, and return the changes in words.

    Raises:
        ConfigError: when a key changed that a resumed run cannot change.
    """
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


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return on every rank the result of `compute` on the first, which alone calls it. Every rank must call this.

    Raises:
        VlmrmError: on every rank, when `compute` raises it on the first.
    """
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
