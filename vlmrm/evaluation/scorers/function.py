"""`python:module.function`: a function of a list of conversations that returns a score for each."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Sequence

from vlmrm.conversation import Conversation
from vlmrm.errors import ConfigError, RewardError, RowError, VlmrmError, first_line
from vlmrm.evaluation.entry import Entry, SweepRun
from vlmrm.evaluation.schema import Origin
from vlmrm.evaluation.scorers.conversations import ConversationScorer, origin_of
from vlmrm.evaluation.scorers.spec import Spec
from vlmrm.plugins import imported_function

logger = logging.getLogger("vlmrm")


class FunctionEntry(Entry):
    """A function of `vlmrm.conversation.Conversation`s, each of which ends with the answer to score."""

    def __init__(self, spec: Spec):
        spec.take(())
        module, _, name = spec.body.rpartition(".")
        super().__init__(f"python:{module}", name, spec.text)
        if not module:
            raise ConfigError(f"scorer {spec.text} names no module: write python:module.function.")
        self.function = imported_function(module, name, f"scorer {spec.text}")

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
