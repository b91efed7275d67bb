"""The device that a name stands for, if this machine has it."""

from __future__ import annotations

import torch

from vlmrm.errors import ConfigError


def device_named(name: str | torch.device | None) -> torch.device:
    """The device of a name; of None this machine's accelerator, or the CPU where it has none.

    It is asked for without being used: a process that only waits for a server has no CUDA context.

    Raises:
        ConfigError: when there is no such device here.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: write cuda, cuda:1 or cpu.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device}, which this machine has not: write cpu, or leave it out.")
    return device
