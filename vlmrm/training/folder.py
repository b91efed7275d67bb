"""The folder of a run, `output_dir`: who trains in it, which checkpoint a restart takes, which count and which go.

A restart needs no hand. Checkpoints that do not verify are set aside under another name, where neither it nor a sweep
finds them again, and it goes on from the newest one that does; a run that never completed one begins anew. Settings of
a run are compared with those of the checkpoint that it goes on from.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from transformers import Trainer, TrainingArguments

from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import data_fingerprint
from vlmrm.errors import CheckpointError, ConfigError, TrainingError, VlmrmError, first_line
from vlmrm.files import exclusive_lock, make_folder
from vlmrm.libraries import relies_on
from vlmrm.modeling import ModelArguments
from vlmrm.modeling.manifest import (
    BEST,
    COMPLETE,
    FINAL,
    TRAINING_LOCK,
    delete_checkpoint,
    find_checkpoints,
    is_adapter,
    read_json_of,
    read_reward_file,
    verify_complete,
    write_complete,
)
from vlmrm.training.arguments import RATES, RewardTrainingArguments

logger = logging.getLogger("vlmrm")

T = TypeVar("T")

LOCK_SECONDS = 10.0  # the workers of a killed run take this long to notice, and hold its lock until then
INCOMPLETE, DAMAGED = "incomplete", "damaged"
INTERRUPTED = "saving it was interrupted"
AUTO = ("auto", "true")
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # the second under FSDP
# How gloo says that a neighbour's process has ended.
LOST_RANK = re.compile(r"gloo/.*(closed by peer|reset by peer|Broken pipe|Connection refused|[Tt]imed out)", re.DOTALL)

relies_on(Trainer, "_save_checkpoint", overridden=("_save_checkpoint",))

# Ranks ---------------------------------------------------------------------------------------------------------------


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


# Locking -------------------------------------------------------------------------------------------------------------


@contextmanager
def output_lock(args: TrainingArguments) -> Generator[None]:
    """Hold `output_dir`, of which the first process locks a file while it trains."""
    folder = Path(str(args.output_dir))
    if args.process_index != 0:
        yield
        return
    make_folder(folder, "output_dir")
    with _locked(folder, LOCK_SECONDS):
        yield


@contextmanager
def _locked(folder: Path, wait: float) -> Generator[None]:
    refusal = f"another training is writing into {folder}: wait for its end, or choose another --output_dir."
    with exclusive_lock(folder / TRAINING_LOCK, refusal, wait=wait):
        yield


def check_unlocked(folder: Path) -> None:
    """Refuse a folder in which another process trains now, without writing into it."""
    if (folder / TRAINING_LOCK).exists():
        with _locked(folder, wait=0.0):
            pass


# Restarting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restart:
    """What a run goes on from: a checkpoint, or None for its first step; and the broken ones, with the reason."""

    checkpoint: Path | None
    broken: dict[Path, str]

    def __str__(self) -> str:
        if self.checkpoint is not None:
            return f"goes on from {self.checkpoint}"
        return "begins anew: no checkpoint was ever complete" if self.broken else "begins: no checkpoint yet"


def choose_restart(args: TrainingArguments) -> Restart:
    """Choose what a run goes on from by `resume_from_checkpoint`: a folder, or with `auto` the newest complete one.

    It only reads. A checkpoint that was never complete, or is not any more, is passed over.
    """
    choice = str(args.resume_from_checkpoint or "false")
    output = Path(str(args.output_dir))
    steps = own_checkpoints(output)
    if choice.lower() == "false":
        existing = [path for path in (output / FINAL, output / BEST) if path.exists()] + steps[-1:]
        if existing:
            raise ConfigError(
                f"{output} already holds {existing[-1].name}: continue with --resume_from_checkpoint auto, or choose "
                "another --output_dir."
            )
        return Restart(None, {})
    if choice.lower() not in AUTO:
        return Restart(Path(choice), {folder: INTERRUPTED for folder in steps if not (folder / COMPLETE).exists()})
    newest, broken = None, {}
    for folder in reversed(steps):
        try:
            verify_complete(folder, hashed=newest is None)  # of older ones only sizes: hashing reads every byte
        except CheckpointError as error:
            whole = (folder / COMPLETE).exists()
            broken[folder] = str(error).rstrip(".") if whole else INTERRUPTED
        else:
            newest = newest or folder
    damaged = [folder for folder in broken if (folder / COMPLETE).exists()]
    if newest is None and damaged:
        raise CheckpointError(
            f"{damaged[0]} was complete and no longer verifies ({broken[damaged[0]]}): mend it, or choose another "
            "output_dir."
        )
    return Restart(newest, broken)


def own_checkpoints(output: Path) -> list[Path]:
    """Return the folders `checkpoint-STEP` in order; `checkpoint-8-copy` is the user's."""
    return [folder for folder in find_checkpoints(output) if re.fullmatch(r"checkpoint-\d+", folder.name)]


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


def set_aside(folder: Path) -> Path:
    """Rename a broken checkpoint, so that nothing takes it for one, and return its new path.

    It replaces an earlier one of that name, and one that was never complete all such: a run that is often killed would
    else fill the disk.
    """
    was_complete = (folder / COMPLETE).exists()
    target = folder.with_name(f"{DAMAGED if was_complete else INCOMPLETE}-{folder.name}")
    for earlier in folder.parent.glob(target.name if was_complete else f"{INCOMPLETE}-*"):
        delete_checkpoint(earlier)
        logger.info("%s, set aside by an earlier restart, was deleted", earlier.name)
    return folder.rename(target)


def mend(output: Path, restart: Restart) -> None:
    """Set aside the broken checkpoints of a restart, and finish deletions that a killed run began."""
    for leftover in output.glob(".*.deleted"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder, reason in restart.broken.items():
        target = set_aside(folder)
        logger.warning("skipping %s: %s; it is now %s", folder.name, reason, target.name)


# Saving --------------------------------------------------------------------------------------------------------------


class CompleteCheckpoints(Trainer):
    """Save checkpoints with a manifest, written last; older checkpoints go only after that."""

    save_extras: Callable[[Path], None]  # writes further files into a checkpoint's folder

    def worth_saving(self) -> bool:
        """Return whether anything was trained yet."""
        return True

    def _check_finite(self) -> None:
        """Refuse to save weights that are not finite; a TrainingError says so."""
        raise NotImplementedError

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
        if not self.worth_saving():
            logger.warning("%s is not saved: no row was trained on yet", folder)
            return
        keep, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go once this one is complete
        try:
            with self._saving(folder):
                # Past TRL's: its model card shows a text pipeline that cannot load a vision-language model.
                Trainer._save_checkpoint(self, model, trial)
        finally:
            self.args.save_total_limit = keep
        if self.args.should_save:
            rotate(folder, keep, self.state.best_model_checkpoint)

    @contextmanager
    def _saving(self, folder: Path) -> Generator[None]:
        """Save a complete checkpoint: the files saved inside, then those of `save_extras`, then `COMPLETE.json`."""
        self._check_finite()
        try:
            if self.args.should_save and folder.exists():
                if (folder / COMPLETE).exists():
                    (folder / COMPLETE).unlink()  # what is overwritten must not count until it is complete again
                else:
                    set_aside(folder)  # left by a killed run
            self.accelerator.wait_for_everyone()
            yield
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.save_extras(folder)
                write_complete(folder, world_size=self.args.world_size, step=self.state.global_step)
            self.accelerator.wait_for_everyone()
        except (ConfigError, OSError, SafetensorError, RuntimeError) as error:  # RuntimeError is torch's
            if is_lost_rank(error):
                raise
            full = "No space left" in str(error) or shutil.disk_usage(folder.parent).free < 2**20
            reason = "the disk is full" if full else first_line(error).rstrip(".")
            raise TrainingError(
                f"{folder} could not be saved: {reason}; earlier checkpoints are untouched, free space and resume."
            ) from error


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete older checkpoints of a run until `limit` are left; never the one just saved, nor the best.

    Those beyond the newest go first: they are of a run that this one left at an earlier step.
    """
    if limit is None:
        return
    kept = {newest.name, Path(best or newest).name}
    steps = own_checkpoints(newest.parent)
    behind = steps.index(newest) + 1
    doomed = [folder for folder in (*steps[behind:], *steps[:behind]) if folder.name not in kept]
    for folder in doomed[: max(len(steps) - limit, 0)]:
        delete_checkpoint(folder)


# Settings ------------------------------------------------------------------------------------------------------------

SETTINGS = "training_settings.json"
# Settings that a resumed run cannot change.
FIXED = (
    # HF restores the optimizer from the checkpoint, whatever the configuration says.
    "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "deepspeed", "fsdp",
    # It finds its position in the data by counting steps.
    "seed", "data_seed", "split_seed", "train_sampling_strategy",
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
# Files are compared by content: they may have moved.
CONTENT = {"dataset_path": "dataset_path_content", "model_name_or_path": "model_name_or_path_config"}
PATHS = ("dataset_path", "output_dir", "resume_from_checkpoint", "run_name", "logging_dir")


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
