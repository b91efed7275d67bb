"""What a training is made of, by its keys: the model, the collators and the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from vlmrm.batching import ComparisonCollator, PaddedBatcher
from vlmrm.batching.media import blank_image
from vlmrm.data.comparisons import IrrelevantQueries
from vlmrm.errors import ConfigError, first_line
from vlmrm.modeling import batcher_for, freeze, load_for_training, sequence_limit
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.reward_model import RewardModel
from vlmrm.rendering import MediaLimits, Renderer
from vlmrm.training.arguments import RewardTrainingArguments, RunArguments
from vlmrm.training.engines import reads_weights_once


def build_model(keys: RunArguments, processor: Any) -> RewardModel:
    """Load the reward model, with a seeded head and its frozen parts."""
    from vlmrm.modeling.adapters import keep_trainable, quantization_config

    model_args, args = keys.model, keys.training
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
        outputs=keys.data.named_outputs,
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
    if keys.data.critique_weight:
        from vlmrm.modeling.published_weights import read_language_head

        head = read_language_head(model_args.model_name_or_path, model.config, model_args.model_revision)
        model.language_head = head.to(model.score.weight.device)
    freeze(model, vit=model_args.freeze_vit, merger=model_args.freeze_merger, llm=model_args.freeze_llm)
    # Every rank runs the vision tower on every batch, or ranks with a batch of texts would leave the others waiting.
    # A single process does too, for equal results: the optimizer skips weights without a gradient, but not those with
    # a zero one (weight decay, momentum).
    model.touch_vision = blank_image(processor, model.placeholders)
    if args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = not model.family.trains_all
    holds_weights = not is_deepspeed_zero3_enabled() and not reads_weights_once(args)
    if not model.family.tested and model_args.check_sight and holds_weights:
        from vlmrm.modeling.sight import prove_sight

        # Before its batcher is made, which is for shared batches only if they are exact.
        prove_sight(model, processor, name=model_args.model_name_or_path, batching=model_args.batching)
    return model


def weight_dtype(model_args: ModelArguments, args: RewardTrainingArguments) -> torch.dtype:
    """Return the type of the weights; `auto` is half precision where float32 copies of the trained ones exist."""
    if model_args.dtype != "auto":
        return getattr(torch, model_args.dtype)
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return half if args.deepspeed or model_args.use_peft else torch.float32


def build_trainer(make: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a constructor of trainers makes; HF's refusals of combinations of keys become our errors."""
    try:
        return make(**arguments)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"the trainer cannot be made: {first_line(error).rstrip('.')}.") from error


def build_collator(
    keys: RunArguments, processor: Any, model: RewardModel | None = None, train_dataset: Any = None
) -> ComparisonCollator:
    """Return the collator of the training; without its model one that reads rows alike, for a survey."""
    data, args, name = keys.data, keys.training, keys.model.model_name_or_path
    batcher, irrelevant = PaddedBatcher.for_processor(processor), None
    if model is not None:
        batcher = batcher_for(model, processor, keys.model.batching)
        if args.use_irrelevant_queries:
            irrelevant = IrrelevantQueries(args.num_irrelevant_pairs, args.seed, train_dataset)
    config = model.config if model else read_config(name, keys.model.model_revision, args.trust_remote_code)
    return ComparisonCollator(
        Renderer(processor, MediaLimits.of(data), branches=data.named_outputs.branches),
        batcher,
        max_seq_length=sequence_limit(config, data.max_seq_length),
        max_tokens_per_batch=cast(Any, keys.model.max_tokens_per_batch) if model else None,
        overlong=data.overlong,
        bad_rows=data.bad_rows,
        critique_weight=data.critique_weight,
        irrelevant=irrelevant,
        outputs=data.named_outputs,
    )
