"""One part of the verb: its cases one after another within a budget of seconds, whatever happens in any of them."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.results import Results
from benchmarks.harness import Row, Skipped, row
from vlmrm.errors import VlmrmError, first_line

Cases = Callable[[], Iterable[Row]]


class Unequal(AssertionError):
    """Two ways of computing the same that differ by more than rounding."""


class ContextLost(SystemExit):
    """An error after which this process can use its GPU no more: another has to go on."""

    code = 75


@dataclass
class Run:
    """What a part runs with.

    `attempt` measures a case and keeps its rows; a case that was measured before, in this process or another, is left
    out. `scratch` is a folder for checkpoints, which parts share.
    """

    name: str
    budget: float
    results: Results
    scratch: Path
    device: str
    tiny: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def rounds(self) -> int:
        return 1 if self.tiny else 5

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def over(self, attempt: str) -> bool:
        """Return whether there is nothing to do for a case: it is measured, or no time is left for it."""
        part = self.results.part(self.name)
        if part.holds(attempt):
            return True
        if self.spent < self.budget:
            return False
        part.cut[attempt] = round(self.spent, 1)
        self.results.save()
        return True

    def attempt(self, case: str, measure: Cases) -> None:
        """Keep the rows of a case, or in one row why it has none."""
        part = self.results.part(self.name)
        if self.over(case):
            return
        part.running, before = case, time.monotonic()
        self.results.save()
        rows: list[Row] = []
        lost = False
        try:
            for line in measure():
                rows.append(line)
        except Skipped as reason:
            rows.append(unmeasured(case, str(reason)))
        except torch.OutOfMemoryError:
            rows.append(unmeasured(case, "out of memory"))
        except (VlmrmError, Unequal) as error:
            rows.append(unmeasured(case, first_line(error), failed=True))
        except Exception as error:
            sys.stderr.write(traceback.format_exc())
            rows.append(unmeasured(case, f"{type(error).__name__}: {first_line(error)}", failed=True))
            lost = "CUDA error" in str(error)
        release(self.device)
        seconds = round(time.monotonic() - before, 2)
        part.keep(case, [line | {"attempt_seconds": seconds} for line in rows])
        part.running = ""
        self.results.save()
        if lost:
            raise ContextLost(ContextLost.code)


def unmeasured(case: str, status: str, *, failed: bool = False) -> Row:
    """Return the row of a case without a figure, because it `failed` or the machine lacks something."""
    return row(case, None, "") | {"status": status, "failed": failed}


def needed(*packages: str) -> None:
    """Raise Skipped if one of these packages is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise Skipped(f"{package} is not installed")


def release(device: str) -> None:
    """Give back what the last case held, exceptions with their frames included."""
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
