"""A configuration that starts: one of three presets, chosen by the model's size and the memory of this machine.

Its text is in config.yaml.jinja.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from vlmrm.conversation import Video, media_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.columns import read_columns
from vlmrm.data.comparisons import is_held_out_key, load_comparisons, prompt_keys
from vlmrm.data.media import image_size
from vlmrm.data.tables import load_sources
from vlmrm.errors import CheckpointError, ConfigError, DataError, RowError
from vlmrm.formats import LAYOUTS_TO_SCORE
from vlmrm.libraries import install_command
from vlmrm.logs import counted
from vlmrm.measures.analysis import CLUSTERS
from vlmrm.modeling import reward_model_class
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.manifest import find_file
from vlmrm.outputs import Outputs
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
LEVELS = 10  # up to which whole numbers are an ordinal
READING = ("columns", "image_root", "outputs")  # keys that say how rows are read


@dataclass(frozen=True)
class DataFacts:
    """What a sample of the rows shows."""

    paths: tuple[str, ...]
    rows: int
    images: bool
    held_out: float  # share of prompts that can be held out, 0 for none
    held_out_prompts: int = CLUSTERS
    bad_share: float = 0.0
    reason: str = ""  # why the last bad row is bad
    reading: Mapping[str, Any] = field(default_factory=dict)  # keys that say how the rows are read


@dataclass(frozen=True)
class Machine:
    """GPUs with their memory in bytes, the memory of the host, and what is installed."""

    gpus: int
    gpu_bytes: float
    host_bytes: float
    bfloat16: bool
    deepspeed: bool = True
    quantization: bool = True

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
        )

    def __str__(self) -> str:
        if not self.gpus:
            return f"a CPU with{'' if self.bfloat16 else 'out'} bfloat16, {self.host_bytes / 1e9:.0f} GB"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} of {self.gpu_bytes / 1e9:.0f} GB"


@dataclass(frozen=True)
class Method:
    """A preset (small, LoRA or whole), perhaps in 4 bits or with ZeRO's stage, and why."""

    preset: str
    why: str
    quantized: bool = False
    zero: int = 0

    def __str__(self) -> str:
        return f"{'Q' * self.quantized}{self.preset}{f' with ZeRO-{self.zero}' if self.zero else ''}"


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
    why = f"{size} take {whole / 1e9:.3g} GB trained whole, {half / 1e9:.3g} GB frozen in half precision"
    if parameters <= SMALL:
        return Method("small", why)
    if machine.gpus and whole <= room:
        return Method("whole", why)
    if machine.gpus > 1 and machine.deepspeed:
        for stage, each in ((2, half + (whole - half) / machine.gpus), (3, whole / machine.gpus)):
            if each <= room:
                return Method("whole", f"{why}, and the GPUs share them", zero=stage)
    if (half if machine.bfloat16 else 2 * half) <= room:
        needs = machine.gpus > 1 and not machine.deepspeed
        return Method("LoRA", why + f"; whole needs DeepSpeed: {install_command('deepspeed')}" * needs)
    if machine.gpus and machine.quantization and parameters * QUANTIZED_BYTES <= room:
        return Method("LoRA", f"{why}, {parameters * QUANTIZED_BYTES / 1e9:.3g} GB in 4 bits", quantized=True)
    raise ConfigError(
        f"{size} do not fit into {machine}: name a smaller checkpoint as --model"
        + ("." if machine.quantization or not machine.gpus else f", or install QLoRA: {install_command('qlora')}.")
    )


def launch_of(machine: Machine, file: str) -> str:
    """Return the command that starts the training of a configuration on all GPUs."""
    return f"./run_distributed.sh --gpus {machine.gpus} --config {file}" if machine.gpus > 1 else f"vlmrm train {file}"


def configuration(data: DataFacts, model: str, method: Method, machine: Machine, file: str = "config.yaml") -> str:
    """Return the commented configuration of these data, this model and this machine, to be written as `file`."""
    ranks, large = max(machine.gpus, 1), machine.gpu_bytes >= 40e9
    rows = max(round(data.rows * (1 - data.held_out)), 1)
    per_device = max(min(32, max(rows // 20, 1)) // ranks, 1)  # 32 rows a step, but at least 20 steps an epoch
    loader = PackageLoader("vlmrm.training", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["yaml"] = _yaml
    return environment.get_template("config.yaml.jinja").render(
        data=data,
        model=model,
        method=method,
        machine=machine,
        file=file,
        launch=launch_of(machine, file),
        enough_prompts=CLUSTERS,
        metric=[*Outputs.parse(data.reading.get("outputs")).figures, "accuracy"][0],
        image_tokens=1280 if large else 512 if machine.gpus else 256,
        token_pixels=TOKEN_PIXELS,
        workers=min(max((os.cpu_count() or 1) // ranks - 1, 0), 4),
        output=f"outputs/{Path(data.paths[0]).stem or 'reward_model'}",
        epochs=1 if rows > 5000 else 3,
        per_device=per_device,
        step=counted(per_device * ranks, "row"),
    )


def _yaml(value: Any) -> str:
    """Return a value in YAML, which JSON is."""
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z.~][\w./~-]*/[\w./~-]*", value)
    return value if plain else json.dumps(value, ensure_ascii=False)


# Gathering facts -----------------------------------------------------------------------------------------------------


def facts_of_data(arguments: DataArguments) -> DataFacts:
    """Read a sample of the rows, and the sizes of their images."""
    dataset: Any = None
    try:
        dataset = cast(Any, load_comparisons(arguments.dataset_path, arguments=arguments))
    except DataError:
        if arguments.outputs or not (outputs := rating_columns(arguments)):
            raise
        arguments = replace(arguments, outputs=outputs)
        dataset = cast(Any, load_comparisons(arguments.dataset_path, arguments=arguments))
    count = len(dataset)
    chosen = np.sort(np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False))
    rows = [dataset[int(number)]["comparison"] for number in chosen]
    images, errors = False, []
    for row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            media = [medium for talk in row.conversations() for medium in media_of(talk.messages)]
            sizes = [image_size(cast(Any, medium.reference)) for medium in media if not isinstance(medium, Video)]
            images |= bool(sizes)
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
        images=images,
        held_out=share,
        held_out_prompts=prompts,
        bad_share=len(errors) / len(rows),
        reason=errors[-1].reason if errors else "",
        reading={name: value for name in READING if (value := getattr(arguments, name)) is not None},
    )


def rating_columns(arguments: DataArguments) -> dict[str, str]:
    """Return the columns of numbers beside single answers as outputs, of the range that their values have."""
    outputs: dict[str, str] = {}
    with suppress(DataError):
        [[source, *_], *_] = load_sources(
            arguments.dataset_path, bad_rows="skip", columns=arguments.column_names, layouts=LAYOUTS_TO_SCORE
        )
        read = read_columns()
        for name in (it for it in source.columns if it not in read and not it.lower().endswith("id")):
            values = np.array([it for it in cast(Any, source.table)[name] if it is not None])
            if len(values) and values.dtype.kind in "iuf" and values.min() < values.max():
                low, high = int(np.floor(values.min())), int(np.ceil(values.max()))
                whole = high - low <= LEVELS and bool((values == np.round(values)).all())
                outputs[name] = f"{'ordinal' if whole else 'rating'} {low}-{high}"
    return outputs


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
        if held[share] >= CLUSTERS:
            return share, held[share]
    share = max((share for share in held if 0 < held[share] < len(keys)), default=0.0)
    return share, held.get(share, 0)


def count_parameters(name: str) -> float:
    """Return the size of a checkpoint, by its configuration, or by its name where the hub cannot be reached."""
    size = re.search(r"(\d+(?:\.\d+)?)B\b", name)
    if size and not Path(name).is_dir():
        return float(size[1]) * 1e9 * 1.1  # names count the language model alone
    if find_file(name, "config.json") is None:
        raise CheckpointError(f"{name} has no config.json: name a checkpoint of a vision-language model as --model.")
    config = read_config(name)
    with torch.device("meta"):
        model = reward_model_class(config)(config)
    return float(sum(weight.numel() for weight in model.parameters()))
