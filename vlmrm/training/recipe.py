"""A configuration that starts: chosen by a few facts of the data, the model and the machine.

`choose` is a pure function of those facts; `facts_of_data`, `facts_of_model` and `Machine.here` gather them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vlmrm.conversation import Comparison, Video, media_of, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.check import describe_margins, margins_of
from vlmrm.data.comparisons import is_held_out_key, load_comparisons, prompt_keys
from vlmrm.data.media import image_size
from vlmrm.errors import CheckpointError, ConfigError, DataError, RowError
from vlmrm.libraries import install_command
from vlmrm.measures.audit import PROMPTS
from vlmrm.modeling import reward_model_class
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.manifest import find_file
from vlmrm.training.checks import has_bfloat16
from vlmrm.training.memory import host_memory

SAMPLE = 200  # rows that are read
SPLIT_ROWS = 20_000  # whose prompts are counted
LEAST_ROWS = 20  # of fewer none are held out
SHARES = (0.05, 0.1, 0.2)  # of the prompts, from which the first is held out that holds enough
USABLE = 0.7  # share of the memory for weights and optimizer; the rest is for activations
FULL_BYTES, HALF_BYTES, QUANTIZED_BYTES = 16, 2, 0.7  # a parameter: trained whole, frozen in half precision, in 4 bits
TOKEN_PIXELS = 28 * 28
SMALL = 5e7  # parameters of a model for trials
# DeepSpeed fills in `auto` from the other keys.
ZERO = """deepspeed:  # ZeRO-{stage}
  zero_optimization: {{stage: {stage}, overlap_comm: true, contiguous_gradients: true, reduce_bucket_size: auto}}
  bf16: {{enabled: auto}}
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto"""


@dataclass(frozen=True)
class DataFacts:
    """What a sample of the rows shows; `characters` of the longest row, `pixels` of its larger images (p95)."""

    paths: tuple[str, ...]
    rows: int
    characters: int
    pixels: int  # 0 without images
    held_out: float  # share of prompts that can be held out, 0 for none
    held_out_prompts: int = PROMPTS
    bad_share: float = 0.0
    reason: str = ""  # why the last bad row is bad
    margins: str = ""  # of the sample, in words
    reading: Mapping[str, Any] = field(default_factory=dict)  # keys that say how the rows are read


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint and its number of parameters."""

    name: str
    parameters: float


@dataclass(frozen=True)
class Machine:
    """GPUs with their memory in bytes, the memory of the host, and what is installed."""

    gpus: int
    gpu_bytes: float
    host_bytes: float
    bfloat16: bool
    deepspeed: bool = True
    quantization: bool = True
    cores: int = 8

    @classmethod
    def here(cls) -> Machine:
        """Return the facts of this machine."""
        from importlib.util import find_spec

        gpus = torch.cuda.device_count()
        return cls(
            gpus=gpus,
            gpu_bytes=min((torch.cuda.mem_get_info(i)[1] for i in range(gpus)), default=0),
            host_bytes=host_memory(),
            bfloat16=torch.cuda.is_bf16_supported() if gpus else has_bfloat16(),
            deepspeed=find_spec("deepspeed") is not None,
            quantization=find_spec("bitsandbytes") is not None,
            cores=os.cpu_count() or 1,
        )

    def __str__(self) -> str:
        if not self.gpus:
            return f"a CPU with{'' if self.bfloat16 else 'out'} bfloat16, {self.host_bytes / 1e9:.0f} GB"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} of {self.gpu_bytes / 1e9:.0f} GB"


@dataclass(frozen=True)
class Method:
    """How the weights are trained: the kind is `whole`, `lora` or `qlora`, with ZeRO's stage (0: none), and why."""

    kind: str
    zero: int
    why: str


@dataclass
class Recipe:
    """Keys with their values and comments, by section; `text` is the configuration."""

    method: Method
    launch: str
    header: list[str]
    sections: dict[str, list[tuple[str, Any, str]]] = field(default_factory=dict)
    engine: str = ""

    def values(self) -> dict[str, Any]:
        return {key: value for lines in self.sections.values() for key, value, _ in lines}

    def text(self) -> str:
        """Return the commented configuration."""
        lines = [f"# {line}" for line in self.header]
        for title, keys in self.sections.items():
            lines += ["", f"# {title}"]
            lines += [f"{key}: {_yaml(value)}{f'  # {comment}' if comment else ''}" for key, value, comment in keys]
        return "\n".join([*lines, *([self.engine] if self.engine else [])]) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and 0 < value < 1e-3:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa)}e{int(exponent)}"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./~-]+", value):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


# Choosing ------------------------------------------------------------------------------------------------------------


def default_model(machine: Machine) -> str:
    """Return the checkpoint to start from where none is named: the largest that trains at ease."""
    large = machine.gpus and machine.gpu_bytes >= 40e9
    return f"Qwen/Qwen2.5-VL-{7 if large else 3}B-Instruct"


def choose_method(parameters: float, machine: Machine) -> Method:
    """Return how a model of so many parameters is trained: whole where it fits, else LoRA, else QLoRA."""
    room = USABLE * (machine.gpu_bytes if machine.gpus else machine.host_bytes)
    whole, half = parameters * FULL_BYTES, parameters * HALF_BYTES
    size = f"{parameters / 1e6:.3g} M parameters" if parameters < 1e9 else f"{parameters / 1e9:.2g} B parameters"
    if machine.gpus <= 1:
        if whole <= room and (machine.gpus or parameters <= SMALL):
            return Method("whole", 0, f"{size} take {whole / 1e9:.3g} GB trained whole")
        frozen = half if machine.bfloat16 else 2 * half
        if frozen <= room:
            return Method("lora", 0, f"{size} take {whole / 1e9:.3g} GB trained whole, {frozen / 1e9:.3g} GB frozen")
    elif machine.deepspeed:
        if half + (whole - half) / machine.gpus <= room:
            return Method("whole", 2, f"{size}, their gradients and optimizer shared by {machine.gpus} GPUs")
        if whole / machine.gpus <= room:
            return Method("whole", 3, f"{size}, shared by {machine.gpus} GPUs with gradients and optimizer")
    if machine.gpus > 1 and half <= room:
        why = "" if machine.deepspeed else f"; whole needs DeepSpeed: {install_command('deepspeed')}"
        return Method("lora", 0, f"{size} take {half / 1e9:.3g} GB frozen in each GPU{why}")
    if machine.gpus and machine.quantization and parameters * QUANTIZED_BYTES <= room:
        return Method("qlora", 0, f"{size} take {parameters * QUANTIZED_BYTES / 1e9:.3g} GB in 4 bits")
    raise ConfigError(
        f"{size} do not fit into {machine}: name a smaller checkpoint as --model"
        + ("." if machine.quantization or not machine.gpus else f", or install QLoRA: {install_command('qlora')}.")
    )


def choose(data: DataFacts, model: ModelFacts, machine: Machine, name: str = "config.yaml") -> Recipe:
    """Return a configuration of these data, this model and this machine, written as the file `name`."""
    method = choose_method(model.parameters, machine)
    small = model.parameters <= SMALL
    max_pixels = _max_pixels(data, machine)
    row_tokens = 2 * (data.characters // 3 + max_pixels // TOKEN_PIXELS) + 1
    room = 8192 * max(machine.gpu_bytes / 24e9, 1) if machine.gpus else 2048
    per_device = int(min(max(room // row_tokens, 1), 8))
    train_rows = max(round(data.rows * (1 - data.held_out)), 1)
    ranks = max(machine.gpus, 1)
    target = min(32, max(train_rows // 20, 1))  # rows a step, but at least 20 steps an epoch
    per_device = max(min(per_device, target // ranks), 1)
    accumulation = max(round(target / (per_device * ranks)), 1)
    epochs = 1 if train_rows > 5000 else 3
    steps = epochs * math.ceil(train_rows / (per_device * ranks * accumulation))
    every = max(steps // 5, 1)
    launch = f"vlmrm train {name}" if ranks == 1 else f"./run_distributed.sh --gpus {ranks} --config {name}"
    recipe = Recipe(
        method,
        launch,
        header=[
            f"Trains a reward model from {model.name} on {', '.join(data.paths)}: {data.rows:,} rows.",
            f"Made for {machine}: {method.why}.",
            f"Plan:   vlmrm plan {name}",
            f"Launch: {launch}",
        ],
        engine=ZERO.format(stage=method.zero) if method.zero else "",
    )
    adapters = method.kind != "whole"
    half = machine.bfloat16 and bool(machine.gpus or not small)
    recipe.sections = {
        "Model": [("model_name_or_path", model.name, "")]
        + [("use_peft", True, "LoRA: adapters and the head are trained")] * adapters
        + [("lora_r", 16, "rank; 32 or 64 learn more and take little more memory")] * adapters
        + [("lora_alpha", 32, "")] * adapters
        + [("load_in_4bit", True, "QLoRA: the frozen weights in 4 bits")] * (method.kind == "qlora"),
        "Data": [("dataset_path", data.paths[0] if len(data.paths) == 1 else data.paths, "")]
        + [(name, value, "") for name, value in data.reading.items()]
        + [("eval_fraction", data.held_out, _of_held_out(data))] * bool(data.held_out)
        + [("max_pixels", max_pixels, f"at most {max_pixels // TOKEN_PIXELS} tokens an image")] * bool(max_pixels)
        + [("bad_rows", "skip", f"of a sample {data.bad_share:.1%} cannot be read")] * bool(data.bad_share)
        + [("dataloader_num_workers", min(max(machine.cores // ranks - 1, 0), 4), "processes that read ahead")],
        "Training": [
            ("output_dir", f"outputs/{Path(data.paths[0]).stem or 'reward_model'}", ""),
            ("num_train_epochs", epochs, f"about {steps:,} steps of {per_device * ranks * accumulation} rows"),
            ("per_device_train_batch_size", per_device, "lower it first when memory runs out"),
            ("gradient_accumulation_steps", accumulation, ""),
            ("learning_rate", _rate(method, small), ""),
            ("lr_scheduler_type", "cosine", ""),
            ("warmup_steps", steps // 20, ""),
            ("use_irrelevant_queries", False, "true: answers should tie under another row's image and question"),
        ],
        "Memory and speed": [
            ("bf16", half, "" if half else "float32 is faster here"),
            ("gradient_checkpointing", not small, "" if small else "computes activations twice to keep few"),
        ]
        + [("use_cpu", True, "")] * (not machine.gpus),
        "Evaluation, checkpoints, logs": _cadence(bool(data.held_out), every, steps),
    }
    return recipe


def _of_held_out(data: DataFacts) -> str:
    if data.held_out_prompts >= PROMPTS:
        return "share of prompts held out; no prompt is on both sides"
    return f"share of prompts held out, here {data.held_out_prompts}: too few to tell, so add prompts"


def _max_pixels(data: DataFacts, machine: Machine) -> int:
    """Return an area that shows most images whole, within what the machine computes in reasonable time."""
    if not data.pixels:
        return 0
    limit = 1280 if machine.gpu_bytes >= 40e9 else 512 if machine.gpus else 256  # tokens
    tokens = math.ceil(data.pixels / TOKEN_PIXELS)
    return TOKEN_PIXELS * min(max(64, 64 * math.ceil(tokens / 64)), limit)


def _rate(method: Method, small: bool) -> float:
    return 1e-3 if small else 1e-5 if method.kind == "whole" else 1e-4


def _cadence(evaluates: bool, every: int, steps: int) -> list[tuple[str, Any, str]]:
    keys: list[tuple[str, Any, str]] = [
        ("logging_steps", max(min(10, steps // 20), 1), ""),
        ("save_steps", every, ""),
        ("save_total_limit", 2, "checkpoints kept"),
        ("report_to", "none", "wandb, tensorboard or trackio"),
    ]
    if not evaluates:
        return [("eval_strategy", "no", "too few prompts to hold any out: give eval_dataset_path"), *keys]
    return [
        ("eval_strategy", "steps", ""),
        ("eval_steps", every, ""),
        ("load_best_model_at_end", True, ""),
        ("metric_for_best_model", "accuracy", ""),
        *keys,
    ]


# Gathering facts -----------------------------------------------------------------------------------------------------


def facts_of_data(arguments: DataArguments) -> DataFacts:
    """Read a sample of the rows, and the sizes of their images."""
    dataset: Any = load_comparisons(arguments.dataset_path, arguments=arguments)
    count = len(dataset)
    chosen = np.sort(np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False))
    rows = [dataset[int(number)]["comparison"] for number in chosen]
    characters, areas, errors = [0], [0], []
    margins: list[float] = []
    for row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            characters.append(sum(len(text_of((*row.prompt, *answer))) for answer in row.answers))
            areas += _areas(row)
            margins += margins_of(row)
        except RowError as error:
            errors.append(error)
    if len(errors) > 0.1 * len(rows):
        raise DataError(
            f"{len(errors)} of {len(rows)} sampled rows cannot be read, the last because {errors[-1].reason}: "
            "vlmrm check-data names them."
        )
    share, prompts = _held_out(dataset, count)
    return DataFacts(
        paths=tuple(arguments.dataset_path),
        rows=count,
        characters=max(characters),
        pixels=int(np.percentile(areas, 95)),
        held_out=share,
        held_out_prompts=prompts,
        bad_share=len(errors) / len(rows),
        reason=errors[-1].reason if errors else "",
        margins=describe_margins(margins) if margins else "",
        reading={name: value for name in ("columns", "image_root") if (value := getattr(arguments, name)) is not None},
    )


def _areas(row: Comparison) -> list[int]:
    areas = []
    for conversation in row.conversations():
        for medium in media_of(conversation.messages):
            if not isinstance(medium, Video):
                width, height = image_size(cast(Any, medium.reference))
                areas.append(width * height)
    return areas


def _held_out(dataset: Any, count: int) -> tuple[float, int]:
    """Return the share of prompts to hold out, 0 for none, and how many these are of the rows that were counted."""
    if count < LEAST_ROWS:
        return 0.0, 0
    if count > SPLIT_ROWS:
        dataset = dataset.select(np.sort(np.random.default_rng(0).choice(count, SPLIT_ROWS, replace=False)))
    keys = {key for key in prompt_keys(dataset) if isinstance(key, str)}
    held: dict[float, int] = {}
    for share in SHARES if count >= 1000 else SHARES[1:]:
        held[share] = sum(is_held_out_key(key, share, DataArguments().split_seed) for key in keys)
        if held[share] >= PROMPTS:
            return share, held[share]
    share = max((share for share in held if 0 < held[share] < len(keys)), default=0.0)
    return share, held.get(share, 0)


def facts_of_model(name: str) -> ModelFacts:
    """Return the size of a checkpoint, by its configuration, or by its name where the hub cannot be reached."""
    size = re.search(r"(\d+(?:\.\d+)?)B\b", name)
    if size and not Path(name).is_dir():
        return ModelFacts(name, float(size[1]) * 1e9 * 1.1)  # names count the language model alone
    if find_file(name, "config.json") is None:
        raise CheckpointError(f"{name} has no config.json: name a checkpoint of a vision-language model as --model.")
    config = read_config(name)
    with torch.device("meta"):
        model = reward_model_class(config)(config)
    return ModelFacts(name, float(sum(weight.numel() for weight in model.parameters())))
