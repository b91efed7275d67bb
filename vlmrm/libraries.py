"""Other libraries: the packages of each extra, the private names that vlmrm uses, devices and dtypes by name.

Importing it needs none of them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import CodeType
from typing import TYPE_CHECKING, Any

from vlmrm.errors import ConfigError

if TYPE_CHECKING:
    import torch


# Each extra's own packages, by the names that they are imported by.
PACKAGES: dict[str, tuple[str, ...]] = {
    "local": (
        *("torch", "torchvision", "transformers", "tokenizers", "huggingface_hub", "accelerate", "peft"),
        *("qwen_vl_utils", "av", "safetensors", "numpy", "jinja2"),
    ),
    "report": ("pandas", "pyarrow", "scipy", "matplotlib", "jinja2"),
    "train": ("trl", "datasets", "sklearn", "tqdm", "openpyxl"),
    "deepspeed": ("deepspeed", "ninja"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "flash": ("flash_attn",),
    "qlora": ("bitsandbytes",),
    "ray": ("ray",),
    "rewards": ("rapidocr", "onnxruntime", "rapidfuzz", "ftfy"),
    "serve": (
        *("fastapi", "starlette", "anyio", "httptools", "uvloop", "python_multipart", "redis"),
        "prometheus_client",
    ),
    "latents": ("diffusers",),
}
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each rank
ROBOTS, ROBOTS_FOLDER = "vlmrm-robots", "packages/robots"  # the distribution next door, which adds its own extras


@contextmanager
def needs(extra: str, purpose: str, *packages: str) -> Generator[None]:
    """Say what to install for a `purpose`, such as `training`; around a block that imports, or a function.

    The `packages` are looked for at once, because they are imported late.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(missing(purpose, package, extra))
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if all(package not in names for names in PACKAGES.values()):
            raise
        raise ConfigError(missing(purpose, package, extra)) from error


def missing(purpose: str, package: str, extra: str) -> str:
    """Return the sentence that asks for an extra."""
    return f"{purpose} needs {package}: {install_command(extra)}."


def installed_version(library: str) -> str | None:
    """Return the version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation: to its checkout, wheel or repository.

    An extra of vlmrm-robots is written as pip takes it; without one it is vlmrm-robots itself.
    """
    robots = extra.startswith(ROBOTS)
    name, extras = (ROBOTS, extra.removeprefix(ROBOTS)) if robots else ("vlmrm", f"[{extra}]")
    folder, part = (ROBOTS_FOLDER, f"#subdirectory={ROBOTS_FOLDER}") if robots else (".", "")
    own, core = _origin(name), _origin("vlmrm")
    if "archive_info" in own:
        return f"pip install '{name}{extras} @ {own['url']}'"
    if vcs := core.get("vcs_info"):
        return f"pip install '{name}{extras} @ {vcs['vcs']}+{core['url']}@{vcs['commit_id']}{part}'"
    return f"pip install -e '{folder}{extras}' in vlmrm's folder"


def _origin(distribution: str) -> dict[str, Any]:
    """Return where a distribution was installed from; nothing where it was not."""
    try:
        return json.loads(metadata.distribution(distribution).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return {}


# Private names that vlmrm uses or overrides, checked when the module that needs them is imported.
#
# Without the check, a version of a library that renamed a method would silently never call our override of it.
# `pyproject.toml` bounds these libraries from above.

RELIED_ON: dict[str, set[str]] = {}  # names by library, of the modules imported so far


def relies_on(
    owner: type | Callable[..., Any], *names: str, overridden: Iterable[str] = (), attributes: Iterable[str] = ()
) -> None:
    """Check that a class still has the attributes `names`, or a function the parameters.

    A class must also use the names that are `overridden`, or our overrides would never be called, and the
    `attributes` of its instances.
    """
    library, _, _ = owner.__module__.partition(".")
    name = getattr(owner, "__qualname__", repr(owner))
    declared = RELIED_ON.setdefault(library, set())
    declared.update(names, overridden, attributes)
    if isinstance(owner, type):
        parents = [vars(parent) for parent in owner.__mro__]
        present = set().union(*parents)
        used = {name for parent in parents for value in parent.values() for name in _names_in(value)}
    else:
        declared.add(name.rpartition(".")[2])
        present, used = set(inspect.signature(owner).parameters), set()
    missing = {*names, *overridden} - present | {*overridden, *attributes} - used
    if missing:
        raise ConfigError(
            f"{library} {metadata.version(library)} does not have or use {name}'s "
            f"{', '.join(sorted(missing))}, which vlmrm needs: install a version of {library} that its "
            "pyproject.toml allows, or a newer vlmrm."
        )


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names that a function, method or property uses, those in its nested functions included."""
    value = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
    codes = [getattr(value, "__code__", None)]
    while codes:
        if isinstance(code := codes.pop(), CodeType):
            yield from code.co_names
            codes += code.co_consts


# Devices and dtypes by name.

HUB_SECONDS = 9.0  # in which the hub must answer
SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse_device(name: str | torch.device | None) -> torch.device:
    """Return the device of a name; for None the accelerator of this machine, or its CPU.

    It creates no CUDA context, which a process that only waits for a server should not have.
    """
    import torch

    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: write cuda, cuda:1 or cpu.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device}, which this machine does not have: write cpu, or leave it out.")
    return device


def parse_dtype(name: str, *, auto: bool = False) -> str:
    """Return the full name of a dtype: bfloat16, float16 or float32, or `auto` if that is allowed."""
    full = SHORT_NAMES.get(name, name)
    names = ("auto", *SHORT_NAMES.values()) if auto else tuple(SHORT_NAMES.values())
    if full not in names:
        raise ConfigError(f"dtype is {name!r}: choose from {', '.join(names)}.")
    return full


@cache
def hub_answers() -> bool:
    """Return whether the hub of models and data sets can be reached, by one request for the process.

    Its own client would try for half a minute before each file.
    """
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except httpx.HTTPError:
        return False
    return True
