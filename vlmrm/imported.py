"""Functions of users, named in settings by their module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrm.errors import ConfigError
from vlmrm.settings import did_you_mean


def imported_function(module: str, name: str, subject: str) -> Callable[..., Any]:
    """Return a function of a module, of the working directory too; errors begin with `subject`."""
    imported = imported_module(module, subject)
    function = getattr(imported, name, None)
    if not callable(function):
        names = [key for key, value in vars(imported).items() if callable(value)]
        raise ConfigError(f"{subject}: {module} has no function {name}{did_you_mean(name, names)}")
    return function


def imported_module(module: str, subject: str) -> ModuleType:
    """Import a module, of the working directory too; ConfigError as `imported_function`."""
    try:
        with _working_directory():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{subject}: {module} needs {error.name}, which is not installed.") from error
        raise ConfigError(f"{subject}: there is no module {error.name}, also not in this folder.") from None


@contextmanager
def _working_directory() -> Generator[None]:
    """Look for modules in the working directory too, as `python -m` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
