"""`vlmrm train`: train a reward model from a configuration."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME

from vlmrm.batching.collator import plain_worker_errors
from vlmrm.data.comparisons import data_fingerprint, load_train_and_eval
from vlmrm.errors import ConfigError, Interrupted, Preempted, TrainingError
from vlmrm.files import write_json
from vlmrm.logs import start_log
from vlmrm.modeling import find_checkpoints, load_processor, provenance, save_reward_files
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.manifest import BEST, COMPLETE, FINAL, is_finished, local_folder, read_json_of, weights_digest
from vlmrm.modeling.parts import IN_WORDS, trained_by_part
from vlmrm.training.arguments import RewardTrainingArguments, RunArguments
from vlmrm.training.build import build_collator, build_model, build_trainer
from vlmrm.training.checks import CHECKS, check_disk, check_gpus, checkpoint_bytes
from vlmrm.training.engines import compiles
from vlmrm.training.folder import (
    SETTINGS,
    check_base,
    check_settings,
    checkpoint_to_resume,
    from_first_rank,
    plain_rank_errors,
    training_settings,
)
from vlmrm.training.optimizer import rate_of
from vlmrm.training.trainer import DROPPED_ROWS, ComparisonTrainer

logger = logging.getLogger("vlmrm")

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NOTHING_LEFT = "%s was the last step of this training already: nothing was left to train"


@dataclass(frozen=True)
class TrainingResult:
    """The folder of the trained model, and the metrics of the run."""

    model_dir: Path
    metrics: dict[str, Any]


class Run:
    """A training: its keys are parsed, then it is checked, opened, trained and closed."""

    def __init__(self, keys: RunArguments):
        self.keys = keys
        self.model_args, self.data_args, self.args = keys.model, keys.data, keys.training
        self.checkpoint: Path | None = None  # what it goes on from
        self.metrics: dict[str, Any] = {}
        self.trainer: Any = None  # once it is open

    def start_log(self) -> None:
        self.log_path = start_log("train")

    def check(self) -> None:
        """Refuse a launch, keys or sources that cannot work, before any file is written, and log remarks on others."""
        end_with_launcher()
        launch_alone(self.args)
        for check in CHECKS:
            for remark in check(self.keys) or ():
                logger.warning(remark)
        keys, args = self.model_args, self.args
        transformers.set_seed(args.seed)
        self.processor = load_processor(keys.model_name_or_path, keys.model_revision, args.trust_remote_code)
        if len(self.data_args.named_outputs.branches) > 1 and "output" not in str(self.processor.chat_template):
            raise ConfigError(
                "an output is apart, and the chat template knows no variable `output`: write a question of "
                "each into it, or remove apart."
            )
        self.settings = training_settings(keys, self.data_args, args)  # every key, and fingerprints of data and model
        self.base_digest = from_first_rank(lambda: base_digest(keys))
        self.reference = self.settings["dataset_path_content"]
        if held_out := self.data_args.eval_dataset_path:
            self.reference = from_first_rank(lambda: data_fingerprint(held_out))

    def resume(self) -> bool:
        """Choose the checkpoint that the run goes on from, compare both, and return whether there are steps left."""
        self.checkpoint = checkpoint = checkpoint_to_resume(self.args)
        if checkpoint is None:
            return True
        if changes := check_settings(checkpoint, self.settings):
            logger.info("Changed since %s: %s", checkpoint.name, ", ".join(changes))
        check_base(checkpoint, str(self.model_args.model_name_or_path), self.base_digest)
        if 0 < self.args.max_steps <= steps_of(checkpoint) and is_finished(self.args.output_dir):
            # HF would train one more step before it looks at max_steps.
            logger.warning(NOTHING_LEFT, checkpoint)
            return False
        return True

    def open(self, make: Callable[..., Any] = ComparisonTrainer, **more: Any) -> None:
        """Open data and model, and `make` the trainer, a `ComparisonTrainer`, with them and `more`."""
        from vlmrm.modeling import lora_config
        from vlmrm.training.fit import Fit, fit
        from vlmrm.training.survey import check_data

        keys, args = self.model_args, self.args
        train_dataset, eval_dataset = load_train_and_eval(self.data_args)
        # Before weights are read.

        def checked_fit() -> Fit | None:
            rows = check_data(self.keys, self.processor, train_dataset, eval_dataset)
            return fit(self.keys, args.world_size, self.processor, train_dataset, rows)

        if (fitted := from_first_rank(checked_fit)) is not None:
            logger.info(fitted.why)
            fitted.apply(self.keys)
        model = build_model(self.keys, self.processor)
        if eval_dataset is not None and self.data_args.eval_fraction and args.process_index == 0:
            from vlmrm.data.canonical import write_held_out

            write_held_out(eval_dataset, Path(args.output_dir))
        if eval_dataset is not None and args.probe_samples:
            from vlmrm.training.probe import ProbedDataset

            eval_dataset = ProbedDataset(eval_dataset, args.probe_samples, self.data_args.split_seed)
        made = build_trainer(
            make,
            model=model,
            args=args,
            processor=self.processor,
            collator=build_collator(self.keys, self.processor, model, train_dataset),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            peft_config=lora_config(keys, model) if keys.use_peft else None,
            save_extras=partial(self._save_extras, head=model.config.reward_head),
            **more,
        )
        self.trainer = trainer = made or self.trainer
        if args.save_strategy != "no":
            needed = checkpoint_bytes(model.parameters(), args, adapter=keys.use_peft)
            for remark in check_disk(Path(args.output_dir), needed, args.save_total_limit or 1):
                logger.warning(remark)
        if not keys.check_sight:
            logger.warning("check_sight: false: nothing checks that %s sees images", keys.model_name_or_path)
        trainer.prove_sight = self._prove_sight if keys.check_sight else None
        trainer.compiles = partial(compiles, keys, args, model)
        if keys.vision_cache_dir is not None:  # adapters have frozen the model by now
            model.use_vision_cache(keys.vision_cache_dir, keys.vision_cache_gb)
            # No optimizer misses a frozen tower; but under ZeRO-3 ranks gather its weights together or not at all.
            if not is_deepspeed_zero3_enabled():
                model.touch_vision = None

    def _save_extras(self, folder: Path, head: Any) -> None:
        """Write the files that scoring and resuming need beside the weights in `folder`."""
        source = {
            "base_model": self.model_args.model_name_or_path,
            "base_revision": self.model_args.model_revision,
            "data": self.settings["dataset_path_content"],
            "seed": self.args.seed,
        }
        save_reward_files(
            folder,
            processor=self.processor,
            head=head,
            shown=self.data_args.input_record(),
            provenance=provenance(source),
            base_digest=self.base_digest,
            outputs=self.data_args.named_outputs,
            **{**self.trainer.scales.get(self.trainer.state.global_step, {}), "reward_data": self.reference},
        )
        write_json(folder / SETTINGS, self.settings)

    def _prove_sight(self) -> None:
        """Prove sight of the model as wrapped for this run: under ZeRO-3 and FSDP only the wrapper has all weights."""
        from vlmrm.modeling.sight import prove_sight

        trainer = self.trainer
        wrapped = trainer.model_wrapped if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled else trainer.model

        def run(inputs: dict[str, Any]) -> None:
            with trainer.compute_loss_context_manager():
                wrapped(**trainer._prepare_inputs(inputs))

        keys = self.model_args
        prove_sight(
            trainer.reward_model, self.processor, name=keys.model_name_or_path, batching=keys.batching, run=run
        )

    def _report_start(self) -> None:
        """Log the size of the run, and of each part that is trained with its learning rate."""
        parts = {
            part: sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)  # ZeRO-3 empties the shape
            for part, weights in trained_by_part(self.trainer.reward_model).items()
        }
        if not any(parts.values()):
            raise TrainingError("nothing is left to train: unfreeze a part of the model.")
        trained = [
            f"{IN_WORDS[part]} {count / 1e6:.3g} M at {rate_of(self.args, {'part': part}):g}"
            for part, count in parts.items()
            if count
        ]
        logger.info(
            "Training %.4g M parameters (%s) on %s comparisons; log: %s, checkpoints: %s",
            sum(parts.values()) / 1e6, ", ".join(trained), len(self.trainer.train_dataset),
            self.log_path, self.args.output_dir,
        )  # fmt: skip

    def train(self) -> None:
        """Train, and save the last model, or with `load_best_model_at_end` the best one."""
        self._report_start()
        args, trainer, checkpoint = self.args, self.trainer, self.checkpoint
        trainer.row_tally.trained_before = checkpoint is not None
        done_before = -1 if checkpoint is None else steps_of(checkpoint)  # the checkpoint may be gone at the end
        try:
            with plain_worker_errors(), plain_rank_errors(), plain_memory_errors():
                # HF's own loop: `RewardTrainer.train` calls this method.
                result = Trainer.train(trainer, None if checkpoint is None else str(checkpoint))
        except KeyboardInterrupt as error:
            end = ", and no checkpoint was saved yet: start again, or lower save_steps."
            if saved := [folder for folder in find_checkpoints(args.output_dir) if (folder / COMPLETE).is_file()]:
                end = f": continue from {saved[-1]} with --resume_from_checkpoint auto."
            raise Interrupted(f"interrupted after step {trainer.state.global_step}{end}") from error
        trainer.row_tally.report()
        if trainer.state.global_step == done_before:
            logger.warning(NOTHING_LEFT, checkpoint)
        if trainer.preemption.stopped_at is not None:
            if trainer.row_tally.nothing_trained():
                raise Preempted(
                    "stopped by SIGTERM before any row was trained on, so nothing was saved: start it again, and see "
                    f"*_{DROPPED_ROWS} of {args.output_dir} for the rows that were left out."
                )
            raise Preempted(
                f"stopped by SIGTERM after saving {args.output_dir}/checkpoint-{trainer.preemption.stopped_at}: "
                "continue with --resume_from_checkpoint auto."
            )
        trainer.save_final(model_dir_of(args))
        logger.info("The trained reward model is in %s", model_dir_of(args))
        self.metrics = {**result.metrics, "best_metric": trainer.state.best_metric}

    def close(self) -> TrainingResult:
        return TrainingResult(model_dir_of(self.args), self.metrics)


def end_with_launcher() -> None:
    """Have Linux send SIGTERM to this process when torchrun dies: it would else train on, and hold `output_dir`."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launch_alone(args: RewardTrainingArguments) -> None:
    """Set the environment variables of a launcher with one process: without them DeepSpeed needs mpi4py."""
    if args.deepspeed and "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        if not args.use_cpu:
            check_gpus(torch.accelerator.device_count())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def base_digest(model_args: ModelArguments) -> str | None:
    """Return the digest by which adapters know their base; None where no adapter is trained."""
    if not model_args.use_peft:
        return None
    return weights_digest(local_folder(model_args.model_name_or_path, model_args.model_revision))


@contextmanager
def plain_memory_errors() -> Generator[None]:
    """Turn want of memory into one sentence; on a CPU torch and oneDNN say so in words only."""
    words = ("can't allocate memory", "Cannot allocate memory", "could not create a primitive", "out of memory")
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(it in str(error) for it in words):
            raise
        where = "the accelerator" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        raise TrainingError(
            f"{where} is out of memory: lower max_tokens_per_batch, max_pixels or max_seq_length, or use deepspeed: "
            "zero3.json, and resume from the last checkpoint where there is one."
        ) from error


def steps_of(checkpoint: Path) -> int:
    """Return the number of steps trained up to a checkpoint; -1 where its state is missing."""
    return (read_json_of(checkpoint, TRAINER_STATE_NAME) or {}).get("global_step", -1)


def model_dir_of(args: RewardTrainingArguments) -> Path:
    """Return the folder of a finished training's model."""
    return Path(args.output_dir) / (BEST if args.load_best_model_at_end else FINAL)
