"""`vlmrm train`: train a reward model from a configuration."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME

from vlmrm.batching import ComparisonCollator, PaddedBatcher
from vlmrm.batching.collator import plain_worker_errors
from vlmrm.batching.media import blank_image
from vlmrm.config import Configuration
from vlmrm.data.arguments import DataArguments
from vlmrm.data.canonical import write_held_out
from vlmrm.data.comparisons import IrrelevantQueries, load_train_and_eval
from vlmrm.data.tables import name_tables
from vlmrm.errors import ConfigError, Interrupted, Preempted, TrainingError, first_line
from vlmrm.logs import start_log
from vlmrm.modeling import (
    batcher_for,
    find_checkpoints,
    freeze,
    load_for_training,
    load_processor,
    lora_config,
    provenance,
    quantization_config,
    save_reward_files,
    sequence_limit,
)
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.manifest import BEST, COMPLETE, FINAL, is_finished, local_folder, read_json_of, weights_digest
from vlmrm.modeling.parts import IN_WORDS, trained_by_part
from vlmrm.modeling.quantization import describe, keep_trainable, quantized_layers
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.modeling.sight import prove_sight
from vlmrm.rendering import MediaLimits, Renderer
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.callbacks import ProbedDataset, SightCallback
from vlmrm.training.checks import CHECKS, RunArguments, check_disk, check_gpus, checkpoint_bytes
from vlmrm.training.engines import engine_environment, reads_weights_once
from vlmrm.training.folder import output_lock
from vlmrm.training.optimizer import rate_of
from vlmrm.training.resume import (
    check_base,
    check_settings,
    checkpoint_to_resume,
    from_first_rank,
    plain_rank_errors,
    save_settings,
    training_settings,
)
from vlmrm.training.survey import (
    can_evaluate,
    can_train,
    check_survey,
    few_prompts,
    shared_prompts,
    survey,
)
from vlmrm.training.trainer import DROPPED_ROWS, ComparisonTrainer

logger = logging.getLogger("vlmrm")

T = TypeVar("T")

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
NOTHING_LEFT = "%s was the last step of this training already: nothing was left to train"


@dataclass(frozen=True)
class TrainingResult:
    """The folder of the trained model, and the metrics of the run."""

    model_dir: Path
    metrics: dict[str, Any]


@engine_environment()
def train(config: Configuration = (), /, **keys: Any) -> TrainingResult:
    """Train a reward model, as `vlmrm train` does.

        load_scorer(train("mine.yaml", learning_rate=1e-5).model_dir)

    Args:
        config: a YAML or JSON file, a mapping of keys to values, or the words of a command line.
        keys: keys of the configuration, which override those of `config`. `dataset_path` and `eval_dataset_path` may
            be a `datasets.Dataset`.

    Raises:
        VlmrmError: with one sentence for everything a user can mend; `Preempted` after a save on SIGTERM.
    """
    config = name_tables(config) if isinstance(config, Mapping) else config
    arguments = RunArguments.parse(config, "train_rm.py", **name_tables(keys))
    log_path = start_log("train")
    check_before(arguments)
    with output_lock(arguments.training), plain_rank_errors():
        return train_in_folder(arguments, log_path)


def check_before(arguments: RunArguments) -> None:
    """Refuse a launch or a configuration that cannot work, before any file is written, and log remarks on others."""
    end_with_launcher()
    launch_alone(arguments.training)
    for check in CHECKS:
        for remark in check(arguments):
            logger.warning(remark)


def end_with_launcher() -> None:
    """Have Linux send SIGTERM to this process when torchrun dies: it would else train on, and hold `output_dir`."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launch_alone(args: RewardTrainingArguments) -> None:
    """Set the environment variables of a launcher with one process: without them DeepSpeed needs mpi4py.

    Raises:
        ConfigError: when that process would leave other GPUs unused.
    """
    if args.deepspeed and "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        if not args.use_cpu:
            check_gpus(torch.accelerator.device_count())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def train_in_folder(arguments: RunArguments, log_path: Path | None) -> TrainingResult:
    """Train, with `output_dir` locked."""
    resume_from = checkpoint_to_resume(arguments.training)
    sources = open_sources(arguments)
    if resume_from is not None and not check_resumed(resume_from, sources, arguments):
        return TrainingResult(model_dir_of(arguments.training), {})
    trainer = construct(ComparisonTrainer, sources, arguments)
    complete(trainer, arguments)
    report_start(trainer, log_path)
    return run(trainer, resume_from)


@dataclass(frozen=True)
class Sources:
    """What a run starts from: the processor, every key with the fingerprints of data and model, the base's digest."""

    processor: Any
    settings: dict[str, Any]
    base_digest: str | None


def open_sources(arguments: RunArguments) -> Sources:
    """Seed the run, open its processor and fingerprint what it reads."""
    model_args, data_args, args = arguments.model, arguments.data, arguments.training
    transformers.set_seed(args.seed)
    processor = load_processor(model_args.model_name_or_path, model_args.model_revision, args.trust_remote_code)
    settings = training_settings(model_args, data_args, args)
    return Sources(processor, settings, from_first_rank(lambda: base_digest(arguments.model)))


def check_resumed(checkpoint: Path, sources: Sources, arguments: RunArguments) -> bool:
    """Compare a run with the checkpoint that it resumes; return whether there are steps left to train."""
    args = arguments.training
    changes = check_settings(checkpoint, sources.settings)
    if changes:
        logger.info("Changed since %s: %s", checkpoint.name, ", ".join(changes))
    check_base(checkpoint, str(arguments.model.model_name_or_path), sources.base_digest)
    if 0 < args.max_steps <= steps_of(checkpoint) and is_finished(args.output_dir):
        # HF would train one more step before it looks at max_steps.
        logger.warning(NOTHING_LEFT, checkpoint)
        return False
    return True


def construct(make: Callable[..., T], sources: Sources, arguments: RunArguments, **more: Any) -> T:
    """Open data and model, and call `make`, the constructor of `ComparisonTrainer`, with them and `more`."""
    model_args, data_args, args, processor = arguments.model, arguments.data, arguments.training, sources.processor
    train_dataset, eval_dataset = load_train_and_eval(data_args)
    from_first_rank(lambda: check_data(arguments, processor, train_dataset, eval_dataset))  # before weights are read
    model = build_model(model_args, args, processor)
    return build_trainer(
        make,
        model=model,
        args=args,
        processor=processor,
        collator=build_collator(arguments, model, processor, train_dataset),
        train_dataset=train_dataset,
        eval_dataset=probed(eval_dataset, args, data_args),
        peft_config=lora_config(model_args, model) if model_args.use_peft else None,
        save_extras=partial(
            save_extras,
            settings=sources.settings,
            processor=processor,
            head=model.config.reward_head,
            shown=data_args.input_record(),
            provenance=provenance(
                {
                    "base_model": model_args.model_name_or_path,
                    "base_revision": model_args.model_revision,
                    "data": sources.settings["dataset_path_content"],
                    "seed": args.seed,
                }
            ),
            base_digest=sources.base_digest,
        ),
        **more,
    )


def build_trainer(make: Callable[..., T], **arguments: Any) -> T:
    """Return what a constructor of trainers makes; HF's refusals of combinations of keys become our errors.

    Raises:
        ConfigError: with HF's reason.
    """
    try:
        return make(**arguments)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"the trainer cannot be made: {first_line(error).rstrip('.')}.") from error


def complete(trainer: ComparisonTrainer, arguments: RunArguments) -> None:
    """Check the trainer's engine and disk, have it prove sight once it is on its devices, give it the vision cache."""
    model_args, args = arguments.model, arguments.training
    check_engine(args, trainer)
    if args.save_strategy != "no":
        needed = checkpoint_bytes(trainer.reward_model, args, adapter=model_args.use_peft)
        for remark in check_disk(Path(args.output_dir), needed, args.save_total_limit or 1):
            logger.warning(remark)
    if model_args.check_sight:
        trainer.add_callback(SightCallback(partial(prove_sight_of, trainer, model_args)))
    else:
        logger.warning("check_sight: false: nothing checks that %s sees images", model_args.model_name_or_path)
    cache_vision(trainer.reward_model, model_args)
    if arguments.data.eval_fraction and args.process_index == 0:
        rows = trainer.eval_dataset
        write_held_out(rows.dataset if isinstance(rows, ProbedDataset) else rows, Path(args.output_dir))


def base_digest(model_args: ModelArguments) -> str | None:
    """Return the digest by which adapters know their base; None where no adapter is trained."""
    if not model_args.use_peft:
        return None
    return weights_digest(local_folder(model_args.model_name_or_path, model_args.model_revision))


def build_model(model_args: ModelArguments, args: RewardTrainingArguments, processor: Any) -> RewardModel:
    """Load the reward model, with a seeded head and its frozen parts."""
    if args.deepspeed and args.use_cpu:
        # ZeRO-3 reads the number of ranks inside from_pretrained, before anything else starts the process group.
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    if args.fsdp:
        # With cpu_ram_efficient_loading the first process of a machine alone reads the weights, if this is set by now.
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    model = load_for_training(
        model_args.model_name_or_path,
        head=model_args.head,
        dtype=weight_dtype(model_args, args),
        attn_implementation=model_args.attn_implementation,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        seed=args.seed,
        quantization_config=quantization_config(model_args, weight_dtype(model_args, args)),
        check_files=model_args.check_files,
    )
    if model_args.load_in_4bit:
        keep_trainable(model)
        logger.info("4-bit: %s", describe(model, quantized_layers(model), weight_dtype(model_args, args)))
    freeze(model, vit=model_args.freeze_vit, merger=model_args.freeze_merger, llm=model_args.freeze_llm)
    # Every rank runs the vision tower on every batch, or ranks with a batch of texts would leave the others waiting.
    # A single process does too, for equal results: the optimizer skips weights without a gradient, but not those with
    # a zero one (weight decay, momentum).
    model.touch_vision = blank_image(processor, model.placeholders)
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = not model.family.trains_all
    holds_weights = not is_deepspeed_zero3_enabled() and not reads_weights_once(args)
    if not model.family.tested and model_args.check_sight and holds_weights:
        # Before its batcher is made, which is for shared batches only if they are exact.
        prove_sight(model, processor, name=model_args.model_name_or_path, batching=model_args.batching)
    return model


def weight_dtype(model_args: ModelArguments, args: RewardTrainingArguments) -> torch.dtype:
    """Return the type of the weights; `auto` is half precision where float32 copies of the trained ones exist."""
    if model_args.dtype != "auto":
        return getattr(torch, model_args.dtype)
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return half if args.deepspeed or model_args.use_peft else torch.float32


def irrelevant_queries(args: RewardTrainingArguments, data_args: DataArguments, train_dataset) -> Any:
    if not args.use_irrelevant_queries:
        return None
    return IrrelevantQueries(args.num_irrelevant_pairs, args.seed, None if data_args.streaming else train_dataset)


def check_data(arguments: RunArguments, processor: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Read a sample of the rows, and refuse data of which none or too little can be used.

    Raises:
        TrainingError: naming the key, the share left out, and why.
        RowError: when a row of the sample cannot be used, and `bad_rows` or `overlong` is `error`.
    """
    data_args, args = arguments.data, arguments.training
    collator = survey_collator(arguments, processor)
    rows = survey(train_dataset, collator, can_train, data_args.split_seed)
    check_survey(rows, "dataset_path", args.max_dropped_share, "weighs anything")
    for remark in rows.remarks(args.use_irrelevant_queries):
        logger.warning(remark)
    if rows.rows is not None and args.dataloader_drop_last:
        check_last_batch(rows.rows, args)
    if eval_dataset is None or args.eval_strategy == "no":
        return
    key = "eval_dataset_path" if data_args.eval_dataset_path else f"eval_fraction {data_args.eval_fraction}"
    held_out = survey(eval_dataset, collator, can_evaluate, data_args.split_seed)
    check_survey(held_out, key, args.max_dropped_share, "has a preference")
    if remark := few_prompts(held_out):
        logger.warning(remark)
    if data_args.eval_dataset_path and (both := shared_prompts(rows, held_out)):
        logger.warning(
            "%d of %d evaluation prompts are among %d of the training: vlmrm leakage says which",
            both, held_out.looked, rows.looked,
        )  # fmt: skip


def check_last_batch(rows: int, args: RewardTrainingArguments) -> None:
    """Refuse a batch larger than the data, which `dataloader_drop_last` would drop whole.

    Raises:
        ConfigError: naming both sizes.
    """
    size = args.train_batch_size * args.world_size
    if rows < size:
        raise ConfigError(
            f"dataloader_drop_last leaves out all {rows} rows, which do not fill a batch of {size}: remove it, or "
            "lower per_device_train_batch_size."
        )


def survey_collator(arguments: RunArguments, processor: Any) -> ComparisonCollator:
    """Return a collator that reads rows as the training does, without its model."""
    model, data = arguments.model, arguments.data
    config = read_config(model.model_name_or_path, model.model_revision, arguments.training.trust_remote_code)
    return ComparisonCollator(
        Renderer(processor, MediaLimits.of(data)),
        PaddedBatcher.for_processor(processor),
        max_seq_length=sequence_limit(config, data.max_seq_length),
        overlong=data.overlong,
        bad_rows=data.bad_rows,
    )


def build_collator(
    arguments: RunArguments, model: RewardModel, processor: Any, train_dataset: Any
) -> ComparisonCollator:
    """Return the collator of the training."""
    data = arguments.data
    return ComparisonCollator(
        Renderer(processor, MediaLimits.of(data)),
        batcher_for(model, processor, arguments.model.batching),
        max_seq_length=sequence_limit(model.config, data.max_seq_length),
        max_tokens_per_batch=arguments.model.max_tokens_per_batch,
        overlong=data.overlong,
        bad_rows=data.bad_rows,
        irrelevant=irrelevant_queries(arguments.training, data, train_dataset),
    )


def probed(eval_dataset: Any, args: RewardTrainingArguments, data_args: DataArguments) -> Any:
    """Return the evaluation set, with its probe where `probe_samples` sets one."""
    if eval_dataset is None or not args.probe_samples:
        return eval_dataset
    return ProbedDataset(eval_dataset, args.probe_samples, data_args.split_seed)


def save_extras(folder: Path, settings: dict[str, Any], **reward_files: Any) -> None:
    """Write the files that scoring and resuming need beside the weights in `folder`."""
    save_reward_files(folder, **reward_files)
    save_settings(folder, settings)


def check_engine(args: RewardTrainingArguments, trainer: ComparisonTrainer) -> None:
    """Refuse an engine that is set but not active: HF's trainer silently replaces FSDP by plain DDP."""
    if args.fsdp and not trainer.is_fsdp_enabled:
        raise ConfigError("fsdp is set but does not run on this device: remove it, or use deepspeed: zero2.json.")
    if args.deepspeed and not trainer.is_deepspeed_enabled:
        raise ConfigError("deepspeed is set but not active: check that it is installed, and its configuration's path.")


def prove_sight_of(trainer: ComparisonTrainer, model_args: ModelArguments) -> None:
    """Prove sight of the model as wrapped for this run: under ZeRO-3 and FSDP only the wrapper has all weights."""
    engine = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    wrapped: Any = trainer.model_wrapped if engine else trainer.model

    def run(inputs: dict[str, Any]) -> None:
        with trainer.compute_loss_context_manager():
            wrapped(**trainer._prepare_inputs(inputs))

    prove_sight(
        trainer.reward_model,
        cast(Any, trainer.processing_class),
        name=model_args.model_name_or_path,
        batching=model_args.batching,
        run=run,
    )


def cache_vision(model, model_args: ModelArguments) -> None:
    """Use `vision_cache_dir`, if set. Call it after the trainer was made: adapters have frozen the model by then."""
    if model_args.vision_cache_dir is None:
        return
    model.use_vision_cache(model_args.vision_cache_dir, model_args.vision_cache_gb)
    # The optimizer never misses a frozen tower; but under ZeRO-3 ranks gather its weights together or not at all.
    if not is_deepspeed_zero3_enabled():
        model.touch_vision = None


def report_start(trainer: ComparisonTrainer, log_path: Path | None) -> None:
    """Log the size of the run, and of each part that is trained with its learning rate.

    Raises:
        TrainingError: when no weight is trained.
    """
    parts = {
        part: sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)  # ZeRO-3 empties the shape
        for part, weights in trained_by_part(trainer.reward_model).items()
    }
    if not any(parts.values()):
        raise TrainingError("nothing is left to train: unfreeze a part of the model.")
    args = trainer.args
    trained = [
        f"{IN_WORDS[part]} {count / 1e6:.3g} M at {rate_of(args, {'part': part}):g}"
        for part, count in parts.items()
        if count
    ]
    rows = len(trainer.train_dataset) if isinstance(trainer.train_dataset, Sized) else "a stream of"
    logger.info(
        "Training %.4g M parameters (%s) on %s comparisons; log: %s, checkpoints: %s",
        sum(parts.values()) / 1e6, ", ".join(trained), rows, log_path, args.output_dir,
    )  # fmt: skip


def run(trainer: ComparisonTrainer, resume_from: Path | None) -> TrainingResult:
    """Train, then save the last model, or with `load_best_model_at_end` the best one."""
    args = trainer.args
    trainer.row_tally.trained_before = resume_from is not None
    done_before = -1 if resume_from is None else steps_of(resume_from)  # the checkpoint may be gone at the end
    try:
        with plain_worker_errors(), plain_rank_errors():
            # HF's own loop: `RewardTrainer.train` calls this function.
            result = Trainer.train(trainer, None if resume_from is None else str(resume_from))
    except KeyboardInterrupt as error:
        raise Interrupted(interruption(args, trainer.state.global_step)) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = "the accelerator" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        raise TrainingError(
            f"{where} is out of memory: lower per_device_train_batch_size, max_pixels or max_seq_length, or "
            "use deepspeed: zero3.json, and resume from the last checkpoint where there is one."
        ) from error
    trainer.row_tally.report()
    if trainer.state.global_step == done_before:
        logger.warning(NOTHING_LEFT, resume_from)
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
    model_dir = model_dir_of(args)
    trainer.save_final(model_dir)
    logger.info("The trained reward model is in %s", model_dir)
    return TrainingResult(model_dir, {**result.metrics, "best_metric": trainer.state.best_metric})


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was wanting; on a CPU torch and oneDNN say so in words only."""
    words = ("can't allocate memory", "Cannot allocate memory", "could not create a primitive", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(text in str(error) for text in words)


def interruption(args: RewardTrainingArguments, step: int) -> str:
    """Return the sentence after Ctrl-C: the newest checkpoint whose saving was completed, and how to go on."""
    saved = [folder for folder in find_checkpoints(args.output_dir) if (folder / COMPLETE).is_file()]
    if not saved:
        return f"interrupted after step {step}, and no checkpoint was saved yet: start again, or lower save_steps."
    return f"interrupted after step {step}: continue from {saved[-1]} with --resume_from_checkpoint auto."


def steps_of(checkpoint: Path) -> int:
    """Return the number of steps trained up to a checkpoint; -1 where its state is missing."""
    return (read_json_of(checkpoint, TRAINER_STATE_NAME) or {}).get("global_step", -1)


def model_dir_of(args: RewardTrainingArguments) -> Path:
    """Return the folder of a finished training's model."""
    return Path(args.output_dir) / (BEST if args.load_best_model_at_end else FINAL)
