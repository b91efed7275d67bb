"""Every reward as one line of JSON, with what its model said: to look up later why a sample got what it got."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from accelerate import PartialState

from vlmrm.rewards.outcome import Rewards
from vlmrm.rewards.samples import Samples


class AuditLog:
    """Appends to a JSONL file; of several ranks each has its own, `NAME.rank1.jsonl`."""

    def __init__(self, path: str | Path):
        path, state = Path(path), PartialState()
        if state.num_processes > 1:
            path = path.with_suffix(f".rank{state.process_index}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.round = 0

    def write(self, outcome: Rewards, samples: Samples) -> None:
        """One line for each sample and reward: time, round, sample, group, prompt, reward and error.

        What the model said besides is in `extra`, apart: its names are the model's own.

        Where the round ended in an error, what was not computed any more has no line.
        """
        now = time.time()
        with open(self.path, "a", encoding="utf-8") as file:
            for place in range(len(samples)):
                for name, values in outcome.rewards.items():
                    value, error = float(values[place]), outcome.failures[name].get(place)
                    if error is None and not math.isfinite(value):
                        continue
                    line: dict[str, Any] = {
                        "time": now,
                        "round": self.round,
                        "sample": place,
                        "group": None if samples.groups is None else samples.groups[place],
                        "prompt": samples.columns["prompt"][place],
                        "reward_name": name,
                        "reward": value if math.isfinite(value) else None,
                        "error": error,
                        "extra": outcome.info[name].get(place, {}),
                    }
                    file.write(json.dumps(line, default=_text, ensure_ascii=False) + "\n")
        self.round += 1


def _text(value: Any) -> Any:
    """Numbers of arrays and tensors as numbers; of anything else (a picture, say) what it is called."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
