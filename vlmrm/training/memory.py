"""The memory of a training process: what it needs, by the model's configuration alone, and what is free for it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from vlmrm.modeling import lora_config, reward_model_class
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.freezing import freeze
from vlmrm.training.checks import RunArguments
from vlmrm.training.main import weight_dtype
from vlmrm.training.survey import Survey

# Bytes of activations that a layer keeps for each token and unit of width, in half precision and with an attention
# that keeps no weights (Korthikanti et al. 2022, eq. 2).
KEPT_BYTES = 34


@dataclass(frozen=True)
class Memory:
    """Bytes of one process; `available` is what this machine has free for it."""

    weights: int
    gradients: int
    optimizer: int
    rest: int  # activations, and what libraries and the allocator take
    measured: bool
    available: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.rest


def estimate_memory(run: RunArguments, rows: Survey, ranks: int) -> Memory:
    """Estimate the memory of a process from the model's configuration: no weights are read.

    Weights, gradients and Adam's moments are counted; ZeRO divides them among the ranks. Activations are those of
    the longest row's batch.
    """
    args, keys = run.training, run.model
    config = read_config(keys.model_name_or_path, keys.model_revision, args.trust_remote_code)
    unset_hf_deepspeed_config()  # under ZeRO-3 transformers would start the process group to make a model
    with torch.device("meta"):
        model: Any = reward_model_class(config)(config)
    if args.deepspeed:
        set_hf_deepspeed_config(args.hf_deepspeed_config)
    freeze(model, vit=keys.freeze_vit, merger=keys.freeze_merger, llm=keys.freeze_llm)
    if keys.use_peft:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(keys, model))
    count = sum(weight.numel() for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    width = weight_dtype(keys, args).itemsize
    stage = args.hf_deepspeed_config.get_value("zero_optimization.stage", 0) if args.deepspeed else 0
    weights = count * (0.5 if keys.load_in_4bit else width) / (ranks if stage == 3 else 1)
    gradients = trained * width / (ranks if stage >= 2 else 1)
    # DeepSpeed keeps a float32 copy beside both moments; adapters are float32 by themselves.
    moments = trained * (12 if args.deepspeed else 2 * (4 if keys.use_peft else width))
    optimizer = moments / (ranks if stage >= 1 else 1)
    text = config.get_text_config()
    tokens = min(args.train_batch_size * max(rows.tokens, default=0), keys.max_tokens_per_batch or math.inf)
    half = 1 if args.bf16 or args.fp16 else 2
    layer = KEPT_BYTES * text.hidden_size * tokens * half
    kept = 2 * half * text.hidden_size * tokens * text.num_hidden_layers
    activations = layer + kept if args.gradient_checkpointing else layer * text.num_hidden_layers
    return Memory(
        int(weights), int(gradients), int(optimizer), int(activations), measured=False, available=free_memory(run)
    )


def free_memory(run: RunArguments) -> int:
    """Return the bytes that are free on the accelerator, or without one in the memory of this machine."""
    if not run.training.use_cpu and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return host_memory()


def host_memory() -> int:
    """Return the bytes that are free in the memory of this machine; all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
