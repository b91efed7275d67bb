"""A plan of a training: its rows, steps, memory, time and disk, and every reason why it would not start.

Memory is traced from the configuration and the longest rows. Time is that of a trial, a few steps of the real model on
this machine, where one process can stand for all and the model fits.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from vlmrm.config import Configuration
from vlmrm.data.comparisons import load_train_and_eval
from vlmrm.errors import VlmrmError
from vlmrm.files import plain_write_errors
from vlmrm.modeling import load_processor, lora_config
from vlmrm.training.arguments import RunArguments
from vlmrm.training.build import build_collator, build_model, build_trainer, weight_dtype
from vlmrm.training.checks import CHECKS, check_disk, check_visible, checkpoint_bytes
from vlmrm.training.engines import engine_environment, engine_of
from vlmrm.training.fit import fit
from vlmrm.training.folder import check_base, check_settings, check_unlocked, restart_of, training_settings
from vlmrm.training.main import base_digest, launch_alone, plain_memory_errors
from vlmrm.training.memory import Memory, estimate_memory, planned_model
from vlmrm.training.survey import Survey, check_survey, few_prompts, shared_prompts, survey
from vlmrm.training.trainer import ComparisonTrainer

SAMPLE = 500  # rows that a plan reads
TIMED_STEPS = 5  # of the trial, after one that is not timed
TRIAL_SECONDS = 60.0  # after which no further step is timed


@dataclass(frozen=True)
class Disk:
    """Bytes on the disk of `output_dir`: of one checkpoint, of all that are kept, and free."""

    checkpoint: int
    kept: int
    free: int


@dataclass
class TrainingPlan:
    """What a training would do. It would start if there are no `errors`."""

    config: dict[str, Any]
    errors: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    train: Survey | None = None
    held_out: Survey | None = None
    held_out_prompts: int = 0
    shared_prompts: tuple[int, int, int] | None = None  # evaluation rows also trained on, and both numbers compared
    launch: str = ""  # what to run, in words
    processes: int = 1
    rows_per_step: int = 0
    steps: int = 0
    epochs: float = 0.0
    trained_parameters: int | None = None
    memory: Memory | None = None
    step_seconds: float | None = None  # measured in the trial
    disk: Disk | None = None
    resumed: str | None = None
    restart: str = ""  # what the run goes on from, in words; empty for a fresh start
    set_aside: dict[str, str] = field(default_factory=dict)  # checkpoints that the run would pass over, and why
    changes: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self) -> Generator[None]:
        """Note an error of the user, and go on with the next stage."""
        try:
            yield
        except VlmrmError as error:
            self.errors.append(str(error))

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        content = dataclasses.asdict(self)
        for name in ("train", "held_out"):
            part: Survey | None = getattr(self, name)
            if part is not None:
                keys = ("rows", "sampled", "dropped_share", "images", "videos", "pairs")
                content[name] = {key: getattr(part, key) for key in keys}
                content[name] |= {"reasons": dict(part.reasons), "tokens": token_figures(part)}
        if self.memory is not None:
            content["memory"]["total"] = self.memory.total
        return content


def token_figures(part: Survey) -> dict[str, float]:
    """Return mean, 95th percentile and maximum of the tokens of a row, all its conversations together."""
    figures = {"mean": np.mean, "p95": lambda tokens: np.percentile(tokens, 95), "max": max}
    return {name: float(figure(part.tokens)) for name, figure in figures.items()} if part.tokens else {}


@engine_environment()
def plan_training(config: Configuration) -> TrainingPlan:
    """Plan the training of a configuration."""
    run = RunArguments.parse(config, "vlmrm plan")
    plan = TrainingPlan({key: run.value(key) for key in ("model_name_or_path", "dataset_path", "output_dir")})
    for check in CHECKS:
        if check is not check_visible:  # one process may plan what several will do
            with plan.stage():
                plan.remarks += check(run) or ()
    plan.processes = processes(run)
    plan.launch = launch(run, plan.processes)
    if not (run.model.model_name_or_path and run.data.dataset_path):
        return plan
    output = Path(run.training.output_dir).absolute()
    with plan.stage(), plain_write_errors(output, "output_dir"):
        tempfile.TemporaryFile(dir=existing_parent(output)).close()  # as a training would write there
    with plan.stage():
        check_unlocked(Path(run.training.output_dir))  # else a checkpoint that is being written looks broken
        _plan_resume(plan, run)
    with plan.stage():
        _plan_data_and_model(plan, run)
    return plan


def processes(run: RunArguments) -> int:
    """Return the processes of a launch on this machine: those that run now, or one for each GPU."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return max(launched, 1 if run.training.use_cpu else torch.accelerator.device_count())


def launch(run: RunArguments, ranks: int) -> str:
    """Return how many processes train, and what starts them."""
    args = run.training
    engine = engine_of(args)
    if ranks > 1:
        return f"{ranks} processes with {engine}: ./run_distributed.sh --gpus {ranks} --config FILE"
    return f"1 process{'' if engine == 'DDP' else f' with {engine}'}: vlmrm train FILE"


def existing_parent(path: Path) -> Path:
    """Return the path itself, or the nearest one above it that exists."""
    return path if path.exists() else existing_parent(path.parent)


def _plan_resume(plan: TrainingPlan, run: RunArguments) -> None:
    restart = restart_of(run.training, mended=False)
    if str(run.training.resume_from_checkpoint or "false").lower() != "false":
        plan.restart = str(restart)
    plan.set_aside = {folder.name: reason for folder, reason in restart.broken.items()}
    if (checkpoint := restart.checkpoint) is None:
        return
    plan.resumed = str(checkpoint)
    plan.changes = check_settings(checkpoint, training_settings(run.model, run.data, run.training))
    check_base(checkpoint, run.model.model_name_or_path, base_digest(run.model))


def _plan_data_and_model(plan: TrainingPlan, run: RunArguments) -> None:
    model, data, args = run.model, run.data, run.training
    train_dataset, eval_dataset = load_train_and_eval(data)
    processor = load_processor(model.model_name_or_path, model.model_revision, args.trust_remote_code)
    collator = build_collator(run, processor)
    plan.train = survey(train_dataset, collator, data.split_seed, SAMPLE)
    plan.rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * plan.processes
    plan.steps, plan.epochs = count_steps(run, plan.train.rows, plan.processes)
    with plan.stage():
        check_survey(plan.train, "dataset_path", args.max_dropped_share)
        plan.remarks += plan.train.remarks(args.use_irrelevant_queries)
    if eval_dataset is not None and args.eval_strategy != "no":
        plan.held_out = survey(eval_dataset, collator, data.split_seed, SAMPLE, trains=False)
        with plan.stage():
            check_survey(plan.held_out, "the evaluation", args.max_dropped_share)
        plan.held_out_prompts = len({*plan.held_out.prompts})
        if remark := few_prompts(plan.held_out):
            plan.remarks.append(remark)
        if data.eval_dataset_path:
            both = shared_prompts(plan.train, plan.held_out)
            plan.shared_prompts = both, plan.held_out.looked, plan.train.looked
    if not plan.train.tokens:
        return
    if (fitted := fit(run, plan.processes, processor, train_dataset, plan.train)) is not None:
        plan.remarks.append(fitted.why)
        fitted.apply(run)
    plan.memory = estimate = estimate_memory(run, plan.processes, processor, train_dataset, plan.train)
    with plan.stage():
        _plan_disk(plan, run)
    if not plan.errors and plan.processes == 1 and estimate.total <= estimate.available:
        launch_alone(args)
        _measure(plan, run, processor, train_dataset)


def _plan_disk(plan: TrainingPlan, run: RunArguments) -> None:
    """Fill in the disk that checkpoints take, and what is trained."""
    args, adapter = run.training, run.model.use_peft
    parent = existing_parent(Path(args.output_dir).absolute())
    weights = [*planned_model(run, weight_dtype(run.model, args))[0].parameters()]
    plan.trained_parameters = sum(weight.numel() for weight in weights if weight.requires_grad)
    final = sum(weight.nbytes for weight in weights if weight.requires_grad or not adapter)
    checkpoint = checkpoint_bytes(weights, args, adapter=adapter)
    saves = min(args.save_total_limit or plan.steps, _saves(plan, args))
    plan.disk = Disk(checkpoint, saves * checkpoint + final, shutil.disk_usage(parent).free)
    plan.remarks += check_disk(parent, checkpoint, max(saves, 1))


def count_steps(run: RunArguments, rows: int, ranks: int) -> tuple[int, float]:
    """Return the steps of a run, and its epochs."""
    args = run.training
    batches = rows / (args.train_batch_size * ranks)
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    each = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * each)
    return steps, steps / each


# Measuring -----------------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """The times at the end of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(perf_counter())
        if self.steps[-1] - self.steps[0] > TRIAL_SECONDS:
            control.should_training_stop = True


def _measure(plan: TrainingPlan, run: RunArguments, processor: Any, train_dataset: Any) -> None:
    """Train a few steps in a temporary folder beside `output_dir`, and fill in the time of one."""
    model_args, args = run.model, run.training
    parent = existing_parent(Path(args.output_dir).absolute())
    model = build_model(run, processor)
    collator = build_collator(run, processor, model, train_dataset)
    with tempfile.TemporaryDirectory(prefix=".vlmrm-plan-", dir=parent) as folder:
        trainer: Any = build_trainer(
            ComparisonTrainer,
            model=model,
            args=trial_arguments(args, Path(folder)),
            processor=processor,
            collator=collator,
            train_dataset=train_dataset,
            eval_dataset=None,
            peft_config=lora_config(model_args, model) if model_args.use_peft else None,
            save_extras=lambda folder: None,
        )
        clock = Clock()
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        with plain_memory_errors():
            trainer.train()
    plan.step_seconds = (clock.steps[-1] - clock.steps[0]) / (len(clock.steps) - 1)


def trial_arguments(args: Any, folder: Path) -> Any:
    """Return the keys of a trial: a few steps in `folder`, neither saved nor reported."""
    trial = copy.copy(args)
    trial.output_dir = str(folder)
    trial.max_steps = 1 + TIMED_STEPS
    trial.save_strategy = type(args.save_strategy)("no")
    trial.eval_strategy, trial.eval_on_start = type(args.eval_strategy)("no"), False
    trial.logging_strategy = type(args.logging_strategy)("no")
    trial.load_best_model_at_end, trial.metric_for_best_model = False, None
    trial.report_to, trial.disable_tqdm, trial.resume_from_checkpoint = [], True, None
    return trial


def _saves(plan: TrainingPlan, args: Any) -> int:
    """Return how many times the run saves."""
    strategy, every = args.save_strategy.value, args.save_steps
    if strategy == "no":
        return 0
    if strategy != "steps":
        return max(round(plan.epochs), 1)
    every = every if every >= 1 else math.ceil(every * plan.steps)
    return math.ceil(plan.steps / every)
