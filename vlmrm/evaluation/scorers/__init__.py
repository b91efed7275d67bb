"""The entries of the table of a sweep: checkpoints of trainings, and any other scorer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.evaluation.entry import Entry, Spec, read_spec
from vlmrm.evaluation.scorers.checkpoint import CheckpointEntry, HubEntry
from vlmrm.evaluation.scorers.classifier import ClassifierEntry
from vlmrm.evaluation.scorers.reward import PUBLISHED, FunctionEntry, JudgeEntry, reward_entries
from vlmrm.evaluation.scorers.service import ServiceEntry
from vlmrm.modeling.manifest import read_json_of


def scorer_entries(texts: Sequence[str]) -> list[Entry]:
    """Return the entries that the key `scorer` names."""
    entries = [entry for text in texts for entry in _entries(read_spec(text))]
    names = [(entry.model, entry.checkpoint) for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"scorer names {entry.path} twice, or two of the same name: leave one out.")
    return entries


def _entries(spec: Spec) -> Sequence[Entry]:
    if spec.kind == "checkpoint" and not Path(spec.body).is_dir():
        return [HubEntry(spec.body)]
    if spec.kind == "checkpoint":
        config = {"vision_config": None}
        with suppress(CheckpointError):  # opening it raises the same error
            config = read_json_of(Path(spec.body), "config.json") or {}
        if "vision_config" not in config and "ForSequenceClassification" in str(config.get("architectures")):
            raise ConfigError(f"scorer {spec.text} is a classifier of texts and none of ours: write hf:{spec.text}.")
        return [CheckpointEntry(Path(spec.body))]
    if spec.kind == "hf" and spec.body in PUBLISHED:
        return reward_entries(Spec("reward", PUBLISHED[spec.body], spec.options, spec.text))
    if spec.kind == "reward":
        return reward_entries(spec)
    kinds = {"hf": ClassifierEntry, "judge": JudgeEntry, "http": ServiceEntry, "python": FunctionEntry}
    return [kinds[spec.kind](spec)]
