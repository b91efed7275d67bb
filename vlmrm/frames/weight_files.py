"""Weight files, of safetensors or of torch, told apart by their content; nothing that they hold is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vlmrm.errors import CheckpointError, first_line

WRAPPERS = ("model_state_dict", "state_dict")  # what torch files put around weights
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "resnet_backbone.")  # and before their names


def encoder_weights(path: Path) -> dict[str, Tensor]:
    """Pretrained weights of a ResNet's backbone by torchvision's names; its last, classifying layer is left out.

    Raises:
        CheckpointError: when there is no such file, or it holds more than tensors.
    """
    named = {_bare(name): value for name, value in unwrapped(path, read_weights(path)).items()}
    return {name: value for name, value in named.items() if not name.startswith("fc.")}


def unwrapped(path: Path, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a file, out of what torch files put around them, as float32; counters are left out.

    Raises:
        CheckpointError: when they have no names, are no floats, or claim more numbers than the file stores.
    """
    for wrapper in WRAPPERS:
        if wrapper in content:
            content = _with_names(content[wrapper], f"{path}: {wrapper}")
    weights = {
        name: value
        for name, value in content.items()
        if isinstance(value, Tensor) and not name.endswith("num_batches_tracked")
    }
    for name, value in weights.items():
        if value.layout != torch.strided or value.is_meta:
            raise CheckpointError(f"{path}: {name} is sparse or has no numbers: save plain tensors.")
        stored = value.untyped_storage().nbytes() // value.element_size()
        if stored < value.numel():
            raise CheckpointError(f"{path}: {name} has {value.numel()} numbers and stores {stored}: copy it again.")
        if not value.is_floating_point():
            raise CheckpointError(f"{path}: {name} has numbers of {value.dtype}: weights are floats.")
    return {name: value.float() for name, value in weights.items()}


def read_weights(path: Path) -> dict[str, Any]:
    """What a safetensors file or a torch file holds; of the latter tensors, numbers and texts, and nothing that runs.

    Raises:
        CheckpointError: when it is missing or something else, or what it holds has no names.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no file {path}: check the path.")
    try:
        torch_file = is_torch_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True) if torch_file else load_file(path)
    except Exception as error:  # each broken file has an error of its own kind
        reason = first_line(error)
        raise CheckpointError(
            f"{path} is no weight file that can be read safely ({reason}): copy it again."
        ) from error
    return _with_names(content, str(path))


def is_torch_file(path: Path) -> bool:
    """Whether a file is torch's (a zip, or a bare pickle) and not safetensors, whatever its name."""
    with open(path, "rb") as stream:
        start = stream.read(2)
    return start in (b"PK", b"\x80\x02")


def _with_names(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{where} holds a {type(content).__name__} and no weights by name: name another file.")
    return dict(content)


def _bare(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name
