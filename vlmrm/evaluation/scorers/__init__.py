"""The entries of the table of a sweep: checkpoints of trainings, and any other scorer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmrm.errors import ConfigError
from vlmrm.evaluation.entry import Entry
from vlmrm.evaluation.scorers.checkpoint import CheckpointEntry, HubEntry
from vlmrm.evaluation.scorers.classifier import ClassifierEntry
from vlmrm.evaluation.scorers.function import FunctionEntry
from vlmrm.evaluation.scorers.judge import JudgeEntry
from vlmrm.evaluation.scorers.reward import PUBLISHED, reward_entries
from vlmrm.evaluation.scorers.service import ServiceEntry
from vlmrm.evaluation.scorers.spec import Spec, read_spec


def scorer_entries(texts: Sequence[str]) -> list[Entry]:
    """Return the entries that the key `scorer` names.

    Raises:
        ConfigError: when one has no form that is known, is named twice, or cannot be what it says.
    """
    entries = [entry for text in texts for entry in _entries(read_spec(text))]
    names = [(entry.model, entry.checkpoint) for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"scorer names {entry.path} twice, or two of the same name: leave one out.")
    return entries


def _entries(spec: Spec) -> Sequence[Entry]:
    if spec.kind == "checkpoint":
        return [CheckpointEntry(Path(spec.body)) if Path(spec.body).is_dir() else HubEntry(spec.body)]
    if spec.kind == "hf" and spec.body in PUBLISHED:
        return reward_entries(Spec("reward", PUBLISHED[spec.body], spec.options, spec.text))
    if spec.kind == "reward":
        return reward_entries(spec)
    kinds = {"hf": ClassifierEntry, "judge": JudgeEntry, "http": ServiceEntry, "python": FunctionEntry}
    return [kinds[spec.kind](spec)]
