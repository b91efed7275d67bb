"""The weights of a published reward model by their stored names, read one at a time: files, shards and adapters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from vlmrm.errors import CheckpointError, first_line
from vlmrm.http import hub_answers
from vlmrm.modeling.manifest import ADAPTER_CONFIG, read_json_of
from vlmrm.modeling.published_weights import is_torch_file, lora_merged, plain_weights, read_weights

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# What wrappers put before and into the names of weights.
WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|pretrained_model\.|base_model\.model\.)+")
INSIDE = re.compile(r"\.(?:modules_to_save(?:\.default)?|original_module|base_layer)(?=\.)")
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
# Keys of an adapter's configuration that change what it computes, with the values that are plain LoRA.
PLAIN_LORA: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "lora_bias": (None, False),
}


Reader = Callable[[], torch.Tensor]


class StoredWeights:
    """Weights by their names without wrappers, each read from its file when it is asked for.

    `readers` are whole weights; `lora` are the A and B of linear layers, by the layers' names. A safetensors file
    stays open, and a torch file is read whole.
    """

    def __init__(self, *files: Path) -> None:
        self.readers: dict[str, Reader] = {}
        self.lora: dict[str, dict[str, Reader]] = {}
        for file in files:
            self.add(file)

    def add(self, file: Path) -> None:
        """Add the weights of a file.

        Raises:
            CheckpointError: when it is missing or cannot be read, or a name is there already.
        """
        for stored, read in _readers(file).items():
            name = INSIDE.sub("", WRAPPERS.sub("", stored))
            if match := LORA.fullmatch(name):
                self.lora.setdefault(match["module"], {})[match["part"]] = read
            elif "lora_" in name:
                raise CheckpointError(f"{name} is no LoRA weight of a linear layer: merge the adapter with peft.")
            elif name in self.readers:
                raise CheckpointError(f"{file} has {name} a second time: leave one file of the two in the folder.")
            elif ".original_module." not in stored:  # what `modules_to_save` replaced
                self.readers[name] = read


def _readers(file: Path) -> dict[str, Reader]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: copy the checkpoint again.")
    if is_torch_file(file):
        content = read_weights(file)
        tensors = plain_weights(file, content.get("model", content), keep_type=True)
        return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    try:
        stored = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({first_line(error)}): copy it again.") from error
    return {name: lambda name=name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def with_lora(name: str, weight: Reader, parts: Mapping[str, Reader], scale: float) -> Reader:
    """Return the reader of W + scale · BA, in the type of W.

    Raises:
        CheckpointError: when A or B is missing; on reading, when they have other shapes than W.
    """
    if parts.keys() != {"A", "B"}:
        raise CheckpointError(f"{name} has lora_{min(parts)} alone: copy the adapter again.")

    def merged() -> torch.Tensor:
        base, down, up = weight(), parts["A"](), parts["B"]()
        if base.shape != (len(up), down.shape[1]):
            raise CheckpointError(
                f"{name} of the base is {list(base.shape)}, and the adapter's {[len(up), down.shape[1]]}: name the "
                "model that the adapter was trained on by --base."
            )
        return lora_merged(base, down, up, scale)

    return merged


def lora_scale(rank: int, alpha: float, rank_stabilised: bool | None) -> float:
    """Return the factor of BA: alpha / r, or alpha / sqrt(r) where it is rank-stabilised (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def local_copy(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder or file on this machine of a folder, file or hub repository, fetched where it must be.

    Raises:
        CheckpointError: when there is no such thing.
    """
    if Path(source).exists():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), revision=revision, local_files_only=not hub_answers()))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"{source} is no folder, file or repository that can be reached: check it.") from error


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's weights, without separate heads and adapters; a shard of an index may be missing.

    Raises:
        CheckpointError: when there is none, or it is open which of several is meant.
    """
    if path.is_file():
        return [path]
    for name in INDICES:
        if (path / name).is_file():
            index = json.loads((path / name).read_text(encoding="utf-8"))
            return [path / shard for shard in sorted(set(index["weight_map"].values()))]
    for suffix in SUFFIXES:
        inner = [*path.glob(f"*{suffix}"), *path.glob(f"checkpoint-*/*{suffix}")]
        files = sorted(file for file in inner if file not in head_files(path) and file.name not in ADAPTERS)
        files = [file for file in files if file.stem not in ("training_args", "optimizer", "scheduler")]
        if len(files) == 1:
            return files
        if files:
            raise CheckpointError(f"{path} has {len(files)} weight files and no index: name one, such as {files[0]}.")
    raise CheckpointError(f"{path} has no weights ({', '.join(SUFFIXES)}): check the path.")


def head_files(path: Path) -> list[Path]:
    """Return the files that hold a trained head and nothing else, by their names, safetensors before torch's."""
    if not path.is_dir():
        return []
    files = [file for file in path.iterdir() if file.suffix in SUFFIXES and file.stem.endswith("head")]
    return sorted((f for f in files if f.stem != "lm_head"), key=lambda file: (SUFFIXES.index(file.suffix), file.name))


def read_adapter(path: Path) -> tuple[StoredWeights, float]:
    """Return the weights of an adapter, and the scale of its BA.

    Raises:
        CheckpointError: when it cannot be read, or is more than LoRA of linear layers.
    """
    settings = read_json_of(path, ADAPTER_CONFIG) or {}
    for key, plain in PLAIN_LORA.items():
        if settings.get(key) not in plain:
            raise CheckpointError(
                f"{path} is an adapter with {key}: {settings[key]!r}, which is not carried: merge it with peft, and "
                "import the merged model."
            )
    file = next((path / name for name in ADAPTERS if (path / name).is_file()), path / ADAPTERS[0])
    return StoredWeights(file), lora_scale(settings["r"], settings["lora_alpha"], settings.get("use_rslora"))
