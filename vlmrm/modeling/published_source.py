"""The weights of a published reward model by their stored names, read one at a time: files, shards and adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vlmrm.errors import CheckpointError, first_line
from vlmrm.http import hub_answers
from vlmrm.modeling.manifest import ADAPTER_CONFIG, file_names, hub_snapshot, is_adapter, read_json_of
from vlmrm.modeling.published_weights import is_torch_file, lora_merged, lora_scale, plain_weights, read_weights

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")  # beginnings of files of no weights
NOT_NESTED = re.compile(r"(checkpoint-[^/]*/)?[^/]+")
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
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
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
        """Add the weights of a file."""
        for stored, read in _readers(file).items():
            name = INSIDE.sub("", WRAPPERS.sub("", stored))
            if ".original_module." in stored:
                continue  # what `modules_to_save` replaced
            if match := LORA.fullmatch(name):
                self.lora.setdefault(match["module"], {})[match["part"]] = read
            elif "lora_" in name:
                raise CheckpointError(f"{name} is no LoRA weight of a linear layer: merge the adapter with peft.")
            elif name in self.readers:
                raise CheckpointError(f"{file} has {name} a second time: leave one file of the two in the folder.")
            else:
                self.readers[name] = read


def _readers(file: Path) -> dict[str, Reader]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: copy the checkpoint again.")
    if is_torch_file(file):
        tensors = plain_weights(file, read_weights(file), keep_type=True)
        return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}
    try:
        stored = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({first_line(error)}): copy it again.") from error
    return {name: lambda name=name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def with_lora(name: str, weight: Reader, parts: Mapping[str, Reader], scale: float) -> Reader:
    """Return the reader of W + scale · BA, in the type of W."""
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


def local_copy(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder or file on this machine of a folder, file or hub repository, fetched where it must be.

    Of a repository's weights only those are fetched that are read, not the same in further formats.
    """
    if Path(source).exists():
        return Path(source)
    unread: list[str] = []
    if hub_answers():
        read = {*head_files(source, revision)}
        read.update(ADAPTERS if is_adapter(source, revision) else weight_names(source, revision))
        stored = [name for name in file_names(source, revision) if PurePath(name).suffix in SUFFIXES]
        unread = [name for name in stored if name not in read]
    return hub_snapshot(source, revision, ignore_patterns=unread)


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model's weights, without separate heads and adapters; an indexed shard may be missing."""
    if path.is_file():
        return [path]
    files = [path / name for name in weight_names(path)]
    if not files:
        raise CheckpointError(f"{path} has no weights ({', '.join(SUFFIXES)}): check the path.")
    if len(files) > 1 and not any((path / name).is_file() for name in INDICES):
        raise CheckpointError(f"{path} has {len(files)} weight files and no index: name one, such as {files[0]}.")
    return files


def weight_names(path: str | Path, revision: str | None = None) -> list[str]:
    """Return the names of a folder's or repository's `weight_files`, or of those that could be; empty without any."""
    for name in INDICES:
        if index := read_json_of(path, name, revision):
            shards = sorted(set(index.get("weight_map", {}).values()))
            if outside := [shard for shard in shards if shard.startswith("/") or ".." in PurePath(shard).parts]:
                raise CheckpointError(f"{name} of {path} names {outside[0]}, which is outside: copy it again.")
            return shards
    heads = head_files(path, revision)
    names = [name for name in file_names(path, revision) if NOT_NESTED.fullmatch(name) and name not in heads]
    files = [file for file in map(PurePath, names) if file.name not in ADAPTERS]
    files = [file for file in files if file.suffix in SUFFIXES and not file.stem.startswith(OF_TRAINING)]
    first = min((SUFFIXES.index(file.suffix) for file in files), default=0)
    return [str(file) for file in files if file.suffix == SUFFIXES[first]]


def head_files(path: str | Path, revision: str | None = None) -> list[str]:
    """Return the names of a folder's or repository's files with a trained head alone, safetensors before torch's."""
    files = [PurePath(name) for name in file_names(path, revision) if "/" not in name]
    heads = [f for f in files if f.suffix in SUFFIXES and f.stem.endswith("head") and f.stem != "lm_head"]
    return [file.name for file in sorted(heads, key=lambda file: (SUFFIXES.index(file.suffix), file.name))]


def read_adapter(path: Path) -> tuple[StoredWeights, float]:
    """Return the weights of an adapter, and the scale of its BA."""
    settings = read_json_of(path, ADAPTER_CONFIG) or {}
    for key, plain in PLAIN_LORA.items():
        if settings.get(key) not in plain:
            raise CheckpointError(
                f"{path} is an adapter with {key}: {settings.get(key)!r}, which is not carried: merge it with peft, "
                "and import the merged model."
            )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not (isinstance(rank, int) and rank > 0 and isinstance(alpha, int | float)):
        raise CheckpointError(
            f"{ADAPTER_CONFIG} of {path} has r: {rank!r} and lora_alpha: {alpha!r}, which are no numbers: copy it "
            "again."
        )
    file = next((path / name for name in ADAPTERS if (path / name).is_file()), path / ADAPTERS[0])
    return StoredWeights(file), lora_scale(rank, alpha, settings.get("use_rslora"))
