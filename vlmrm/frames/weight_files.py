"""Weight files, of safetensors or of torch, told apart by their content; nothing that they hold is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vlmrm.errors import CheckpointError, first_line

WRAPPERS = ("state_dict", "model_state_dict")  # what torch files put around weights
PREFIXES = ("module.", "_orig_mod.", "model.", "backbone.", "resnet_backbone.")  # and before their names


def encoder_weights(path: Path) -> dict[str, Tensor]:
    """Pretrained weights of a ResNet's backbone by torchvision's names; its last, classifying layer is left out.

    Raises:
        CheckpointError: when there is no such file, or it holds more than tensors.
    """
    weights = read_weights(path)
    for wrapper in WRAPPERS:
        weights = weights[wrapper] if isinstance(weights.get(wrapper), Mapping) else weights
    named = {_bare(name): value for name, value in weights.items() if isinstance(value, Tensor)}
    return {
        name: value
        for name, value in named.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }


def read_weights(path: Path) -> dict[str, Any]:
    """What a safetensors file or a torch file holds; of the latter tensors, numbers and texts, and nothing that runs.

    Raises:
        CheckpointError: when it is missing or something else.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no file {path}: check the path.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if is_torch_file(path) else load_file(path)
    except Exception as error:  # each broken file has an error of its own kind
        reason = first_line(error)
        raise CheckpointError(
            f"{path} is no weight file that can be read safely ({reason}): copy it again."
        ) from error


def is_torch_file(path: Path) -> bool:
    """Whether a file is torch's (a zip, or a bare pickle) and not safetensors, whatever its name."""
    with open(path, "rb") as stream:
        start = stream.read(2)
    return start in (b"PK", b"\x80\x02")


def _bare(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name
