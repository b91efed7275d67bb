"""Everything that waits for a GPU: kernels, training steps, scoring and serving at real sizes with random weights.

Each part runs in a process of its own, with a budget of seconds, and writes each figure into OUTPUT/results.json as it
is measured; OUTPUT/index.html is a page of them. What is in the file is not measured again: a run that was stopped,
or a part that was cut, goes on where it was. No network is needed: weights are random, and made where they are used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import ContextLost, Run, unmeasured
from benchmarks.gpu.supervising import supervise
from vlmrm.errors import first_line


class Part(NamedTuple):
    """A module with a function of its own name that measures; its budget in seconds; what it measures."""

    module: str
    budget: float
    about: str


# What is fast first, and what is right last, which was measured before: three runs of nine minutes.
PARTS = {
    "profile": Part("profile", 90, "where a step of a 3B goes, by class of kernel; the tower alone; one score"),
    "steps_3b": Part(
        "steps", 180, "steps of a 3B, eager and compiled, at 1, 4 and 16 pairs: MFU, memory, padded rows"
    ),
    "training": Part("trainings", 240, "trainings by vlmrm itself: LoRA and full, with the MFU that they log"),
    "offline": Part("offline", 100, "pairs a second from files to scores, and how busy the GPU is"),
    "service": Part("service", 120, "requests a second and latencies of the service at 1, 16 and 64 clients"),
    "lengths": Part("steps", 120, "tokens a second in rows of 1k to 64k tokens"),
    "steps_7b": Part("steps", 200, "the steps of a 7B"),
    "vllm": Part("vllm", 240, "the classify route of vLLM beside the service, on groups of 16"),
    "noise": Part("noise", 80, "how far scores in bfloat16 depend on their company, and lie from float32"),
    "kernels": Part("kernels", 240, "every attention kernel against float32, outputs and gradients"),
    "families": Part("families", 300, "the tiny model of every family: scores and gradients against float64"),
}
GRACE = 75.0  # seconds to start in, and for the case under way when the budget ends
LEAST = 60.0  # seconds that a part is started with
CLOSING = 20.0  # seconds for the tables and the page
TRIES = 3  # processes of a part
SCRATCH = Path(tempfile.gettempdir(), "vlmrm-gpu")
HIDDEN = ("attempt", "attempt_seconds", "failed")  # of the table


def main() -> int:
    options = parsed()
    names = options.part or list(PARTS)
    results = Results.read(options.output, options.tiny)
    if options.merge:
        for file in options.merge:
            results.merge(Results.read(Path(file).parent, options.tiny))
        results.save()
        return finish(results, [], options)
    if not (options.tiny or options.inside or torch.cuda.is_available()):
        return finish(results, names, options, skipped="there is no CUDA GPU: run it on one (--tiny runs on a CPU)")
    if options.again:
        for name in names:
            results.parts.pop(name, None)
        results.save()
    if options.inside or options.tiny:
        for name in names:
            measure(name, results, options)
        return 0 if options.inside else finish(results, names, options)
    end = time.monotonic() + (options.seconds or math.inf) - CLOSING
    for name in names:
        if not Results.read(options.output).part(name).done and end - time.monotonic() > LEAST:
            measure_apart(name, options, end)
    return finish(Results.read(options.output), names, options)


def measure(name: str, results: Results, options: argparse.Namespace) -> None:
    """Run a part in this process, unless it is done."""
    part, made = PARTS[name], results.part(name)
    if made.done:
        return
    results.where = {**harness.machine(), "versions": harness.versions()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run(name, options.budget or part.budget, results, options.scratch, device, options.tiny)
    with redirect_stdout(sys.stderr):  # the trainer prints its log
        made.keep(name, [])
        try:
            getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), name)(run)
        except ModuleNotFoundError as error:
            made.keep(name, [unmeasured(name, f"{error.name} is not installed")])
        except Exception as error:  # outside of any case
            sys.stderr.write(traceback.format_exc())
            made.keep(name, [unmeasured(name, f"{type(error).__name__}: {first_line(error)}", failed=True)])
    made.seconds = round(made.seconds + run.spent, 1)
    made.done = not made.cut
    results.save()


def measure_apart(name: str, options: argparse.Namespace, latest: float) -> None:
    """Run a part in processes of their own: an error that a GPU does not recover from, or no end, is a row of it."""
    budget = options.budget or PARTS[name].budget
    end = min(time.monotonic() + budget, latest - LEAST / 2)
    for _ in range(TRIES):
        left = end - time.monotonic()
        words = [sys.executable, "-m", "benchmarks.gpu", "--inside", "--part", name, "--budget", f"{left:.0f}"]
        words += ["--output", str(options.output), "--scratch", str(options.scratch)]
        patience = min(left + GRACE, latest - time.monotonic())
        status = supervise(words, patience)
        if status == 0:
            return
        if status is None and patience < left + GRACE:  # the call ends, and the next one goes on
            results = Results.read(options.output)
            results.part(name).running = ""
            results.save()
            return
        if status != ContextLost.code:
            why = f"stopped after {patience:.0f} s" if status is None else f"its process ended with {status}"
            if not blame(name, why, options.output, failed=status is not None):
                return
        if status is None or time.monotonic() > end:
            return


def blame(name: str, why: str, folder: Path, *, failed: bool) -> bool:
    """Keep why the process of a part ended as the row of the case that it ran; return whether there was one."""
    results = Results.read(folder)
    part = results.part(name)
    case, part.running = part.running, ""
    part.keep(case or name, [unmeasured(case or name, why, failed=failed)])
    results.save()
    return bool(case)


def finish(results: Results, names: Sequence[str], options: argparse.Namespace, skipped: str | None = None) -> int:
    """Print the rows of these parts, write the page of all, and return 1 if something failed."""
    report = {"benchmark": "gpu", "quick": options.tiny, "machine": harness.machine(), "versions": harness.versions()}
    report["rows"] = [
        {name: value for name, value in {"part": part, **line}.items() if name not in HIDDEN}
        | ({"holds": None} if options.tiny else {})
        for part in names
        if part in results.parts
        for line in results.parts[part].report()
    ]
    if skipped is not None:
        report["skipped"] = skipped
    sys.stdout.write((json.dumps(report) if options.json else tables(report)) + "\n")
    if results.parts:
        try:
            from benchmarks.gpu.page import write_page
        except ModuleNotFoundError as error:
            sys.stderr.write(f"no page: {error.name} is not installed; run --merge {results.path} where it is\n")
        else:
            sys.stderr.write(f"{write_page(results, {name: part.about for name, part in PARTS.items()})}\n")
    failures = results.failures(names)
    sys.stderr.write("".join(f"failed: {line}\n" for line in failures))
    return 1 if failures else 0


def tables(report: dict[str, Any]) -> str:
    """Return the report as text, a table for each part."""
    if not report["rows"]:
        return harness.table(report)
    parts = groupby(report["rows"], key=lambda line: line["part"])
    texts = [harness.table(report | {"rows": [*lines]}).splitlines() for _, lines in parts]
    return "\n".join([*texts[0][:2], *("\n".join(["", *text[2:]]) for text in texts)])


def parsed() -> argparse.Namespace:
    listing = "\n".join(f"  {name:<10}{part.budget:4.0f} s  {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=f"parts:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", action="append", choices=PARTS, metavar="NAME", help="run this part; may be repeated")
    add("--output", type=Path, help="folder of results and page; default: build/gpu, or build/gpu-tiny")
    add("--again", action="store_true", help="measure again what is in the results")
    add("--merge", nargs="+", metavar="FILE", help="only add the rows of these results to OUTPUT's")
    add("--scratch", type=Path, default=SCRATCH, help=f"folder of random checkpoints; default: {SCRATCH}")
    add("--tiny", "--quick", action="store_true", help="a smoke run of seconds, also on a CPU")
    add("--json", action="store_true", help="print the rows as one JSON object instead of a table")
    add("--seconds", type=float, help="end after so long; run it again to go on")
    add("--budget", type=float, help="seconds for each part, instead of its own")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of a part
    options = parser.parse_args()
    options.output = options.output or Path("build/gpu-tiny" if options.tiny else "build/gpu")
    return options


if __name__ == "__main__":
    sys.exit(main())
