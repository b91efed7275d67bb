"""Plugins: layouts, losses, metrics, interventions, rewards and protocols of a user, without a fork.

A plugin is a Python file, or a module, that adds to the declared tables when it is imported:

    from vlmrm.measures.metrics import Metric, register, share_of

    register(Metric("sure", "margins above 1", lambda pairs: share_of(pairs.credits * (pairs.margins > 1))))

`--plugin FILE` beside any verb names one, or the key `plugin` of a configuration; an installed package names its own
under the entry point `vlmrm.plugins`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from vlmrm.errors import ConfigError, VlmrmError, first_line
from vlmrm.settings import did_you_mean

ENTRY_POINTS = "vlmrm.plugins"
VARIABLE = "VLMRM_PLUGINS"  # tells the processes that this one starts
FLAG = "--plugin"


def load_plugins(names: Sequence[str] = ()) -> None:
    """Import the plugins of installed packages, of the parent process, and of `names`: files or modules, each once."""
    inherited = os.environ.get(VARIABLE, "").split(os.pathsep)
    files = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    wanted = [name for name in dict.fromkeys([*inherited, *files]) if name]
    for name in (*(entry.value for entry in entry_points(group=ENTRY_POINTS)), *wanted):
        try:
            _import_file(Path(name)) if name.endswith(".py") else imported_module(name, FLAG)
        except Exception as error:
            raise ConfigError(_failure(name, error)) from error
    if wanted:
        os.environ[VARIABLE] = os.pathsep.join(wanted)


def without_plugins(words: Sequence[str]) -> list[str]:
    """Load the plugins that a command line names, and return its other words."""
    rest: list[str] = []
    names: list[str] = []
    for word in words:
        if rest[-1:] == [FLAG]:
            rest.pop()
            names.append(word)
        elif word.startswith(f"{FLAG}="):
            names.append(word.partition("=")[2])
        else:
            rest.append(word)
    if FLAG in rest:
        raise ConfigError(f"{FLAG} needs a file or a module: write {FLAG} my_plugin.py.")
    load_plugins(names)
    return rest


def _import_file(path: Path) -> None:
    name = path.stem if path.stem.isidentifier() else ""
    found = importlib.util.find_spec(name) if name else None
    if not name or (found is not None and found.origin != str(path)):  # another module's name
        name = re.sub(r"\W", "_", str(path))
    if name in sys.modules:
        return
    if not path.is_file():
        raise ConfigError(f"there is no plugin {path}: check the path.")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses and pickles look
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _failure(name: str, error: Exception) -> str:
    """Return what went wrong in one sentence, with the first line that is neither vlmrm's nor the importer's."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines = [(error.filename or name, error.lineno)]
    ours = (str(Path(__file__).parent), "<frozen", str(Path(importlib.util.__file__).parent))
    place = next((f" at {file}:{line}" for file, line in lines if not file.startswith(ours)), "")
    if not place and isinstance(error, VlmrmError):
        return str(error)
    return f"the plugin {name} fails{place}: {type(error).__name__}: {first_line(error).rstrip('.')}."


# Names in settings ---------------------------------------------------------------------------------------------------


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
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # as `python -m` does
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{subject}: {module} needs {error.name}, which is not installed.") from error
        raise ConfigError(f"{subject}: there is no module {error.name}, also not in this folder.") from None
    finally:
        sys.path.remove(folder)
