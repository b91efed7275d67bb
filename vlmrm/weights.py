"""Weights in files, and into modules: code in a file is never run, and a weight that is missing or left over an error.

It needs torch and safetensors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vlmrm.errors import CheckpointError, first_line
from vlmrm.files import load_torch

WRAPPERS = ("model", "model_state_dict", "state_dict")  # keys under which torch files hold their weights


def read_weight_file(file: Path) -> dict[str, Any]:
    """Return the content of a weight file by name: safetensors, or torch's tensors, numbers and texts, never code."""
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}: check the path.")
    try:
        if is_torch_file(file):
            with open(file, "rb") as stream:  # of a path torch would go by the suffix
                content = load_torch(stream, file.stat().st_size)
        else:
            content = load_file(file)
    except Exception as error:  # each broken file has an error of its own kind
        reason = first_line(error)
        raise CheckpointError(
            f"{file} is no weight file that can be read safely ({reason}): copy it again."
        ) from error
    return _with_names(content, str(file))


def is_torch_file(path: Path) -> bool:
    """Return whether a file begins as torch's do (a zip, or a bare pickle), whatever its suffix."""
    with open(path, "rb") as stream:
        return stream.read(2) in (b"PK", b"\x80\x02")


def _with_names(content: Any, source: str) -> dict[str, Any]:
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{source} holds a {type(content).__name__} and no weights by name: name another file.")
    return dict(content)


def plain_weights(path: Path, content: Mapping[str, Any], keep_type: bool = False) -> dict[str, Tensor]:
    """Return the weights in a torch file's dictionary, without batch counters, as float32 unless `keep_type`."""
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
        # An expanded tensor of one number could claim any shape, and take all memory once it is copied.
        stored = value.untyped_storage().nbytes() // value.element_size()
        if stored < value.numel():
            raise CheckpointError(f"{path}: {name} has {value.numel()} numbers and stores {stored}: copy it again.")
        if not value.is_floating_point():
            raise CheckpointError(f"{path}: {name} has numbers of {value.dtype}: weights are floats.")
    return weights if keep_type else {name: value.float() for name, value in weights.items()}


def load_exactly(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load `weights` into `module`, all of them and no others; a module on the meta device becomes real."""
    expected = module.state_dict()
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} is not known" for name in weights if name not in expected]
    wrong += [
        f"{name} is {list(weights[name].shape)} and should be {list(value.shape)}"
        for name, value in expected.items()
        if name in weights and weights[name].shape != value.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{source} does not fit {type(module).__name__}: {wrong[0]} ({len(wrong)} such weights)."
        )
    module.load_state_dict(dict(weights), assign=True)
