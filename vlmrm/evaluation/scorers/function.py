"""`python:module.function`: a function of a list of conversations that returns a score for each."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrm.conversation import Conversation
from vlmrm.errors import ConfigError, RewardError, RowError, VlmrmError, first_line
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import ConversationScorer, origin_of
from vlmrm.evaluation.scorers.spec import Spec
from vlmrm.settings import did_you_mean

logger = logging.getLogger("vlmrm")


class FunctionEntry(Entry):
    """A function of `vlmrm.conversation.Conversation`s, each of which ends with the answer to score.

    Raises:
        ConfigError: when there is no such function.
    """

    def __init__(self, spec: Spec):
        spec.take(())
        module, _, name = spec.body.rpartition(".")
        super().__init__(f"python:{module}", name, spec.text)
        self.function = _find(module, name, spec.text)

    def digest(self) -> str | None:
        """Return the digest of the module's source; what it imports may change unnoticed."""
        try:
            source = inspect.getsource(inspect.getmodule(self.function) or self.function)
        except (OSError, TypeError):  # compiled, or written in a notebook
            return None
        return hashlib.sha256(source.encode()).hexdigest()

    def open(self, run: SweepRun) -> _Function:
        return _Function(self, run)


class _Function(ConversationScorer):
    def __init__(self, entry: FunctionEntry, run: SweepRun):
        super().__init__(entry.path, run)
        self.entry = entry

    def score_each(self, conversations: Sequence[Conversation]) -> list[float | RowError]:
        try:
            scores = [float(score) for score in self.entry.function(list(conversations))]
        except VlmrmError:
            raise
        except Exception as error:  # whatever the user's function raises
            logger.debug("%s", self.name, exc_info=True)
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise RewardError(f"{self.name} failed on {len(conversations)} conversations: {reason}.") from error
        if len(scores) != len(conversations):
            raise RewardError(f"{self.name} returned {len(scores)} scores of {len(conversations)} conversations.")
        return [*scores]

    def origin(self) -> Origin:
        return origin_of(self.entry.digest(), function=self.entry.path.partition(":")[2])


def _find(module: str, name: str, text: str) -> Callable[[list[Conversation]], Any]:
    if not module:
        raise ConfigError(f"scorer {text} names no module: write python:module.function.")
    try:
        with _working_directory():
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"scorer {text}: {module} needs {error.name}, which is not installed.") from error
        raise ConfigError(f"scorer {text}: there is no module {error.name}, also not in this folder.") from None
    function = getattr(imported, name, None)
    if not callable(function):
        names = [key for key, value in vars(imported).items() if callable(value)]
        raise ConfigError(f"scorer {text}: {module} has no function {name}{did_you_mean(name, names)}")
    return function


@contextmanager
def _working_directory():
    """Look for modules in the working directory too, as `python -m` does."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
