"""Everything that waits for a GPU: kernels, training steps, scoring and serving at real sizes with random weights.

Each part runs in a process of its own, with a budget of seconds, and writes each figure into OUTPUT/results.json as it
is measured; OUTPUT/index.html is a page of them. What is in the file is not measured again: a run that was stopped,
or a part that was cut, goes on where it was. No network is needed: weights are random, and made where they are used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
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


class Part(NamedTuple):
    """A module with a function of its own name that measures; its budget in seconds; what it measures."""

    module: str
    budget: float
    about: str


# Together under 30 minutes, with the seconds that a process takes to start.
PARTS = {
    "kernels": Part("kernels", 240, "every attention kernel against float32, outputs and gradients"),
    "steps_3b": Part("steps", 200, "steps of a 3B at 1, 4 and 16 pairs a row: MFU, memory, ratio to padded rows"),
    "steps_7b": Part("steps", 200, "the same of a 7B"),
    "lengths": Part("steps", 120, "tokens a second in rows of 1k to 64k tokens"),
    "tower": Part("tower", 60, "the vision tower's share of a step"),
    "noise": Part("noise", 80, "how far scores in bfloat16 depend on their company, and lie from float32"),
    "training": Part("trainings", 240, "vlmrm's own trainings: full, LoRA, QLoRA, 8-bit optimizers"),
    "offline": Part("offline", 100, "pairs a second from files to scores, and how busy the GPU is"),
    "service": Part("service", 120, "requests a second and latencies of the service at 1, 16 and 64 clients"),
    "vllm": Part("vllm", 240, "vLLM's classify beside the service on groups of 16"),
}
GRACE = 45.0  # seconds to start in, and for the case under way when the budget ends
TRIES = 3  # processes of a part
SCRATCH = Path(tempfile.gettempdir(), "vlmrm-gpu")
HIDDEN = ("attempt", "attempt_seconds", "failed", "lacking")  # of the table


def main() -> int:
    options = parsed()
    names = options.part or list(PARTS)
    results = Results.read(options.output, options.tiny)
    if options.merge:
        for file in options.merge:
            results.merge(Results.read(Path(file).parent, options.tiny))
        results.save()
        return finish(results, [], options)
    if not options.tiny and not torch.cuda.is_available():
        return finish(results, names, options, skipped="there is no CUDA GPU: run it on one (--tiny runs on a CPU)")
    if options.again:
        for name in names:
            results.parts.pop(name, None)
        results.save()
    if options.inside or options.tiny:
        for name in names:
            measure(name, results, options)
        return 0 if options.inside else finish(results, names, options)
    for name in names:
        measure_apart(name, options)
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
        try:
            function = getattr(importlib.import_module(f"benchmarks.gpu.{part.module}"), name)
        except ModuleNotFoundError as error:
            made.keep(name, [unmeasured(name, f"{error.name} is not installed", lacking=True)])
        else:
            made.keep(name, [])
            function(run)
    made.seconds = round(made.seconds + run.spent, 1)
    made.done = made.complete
    results.save()


def measure_apart(name: str, options: argparse.Namespace) -> None:
    """Run a part in processes of their own: an error that a GPU does not recover from, or no end, is a row of it."""
    end = time.monotonic() + PARTS[name].budget
    for _ in range(TRIES):
        left = end - time.monotonic()
        words = [sys.executable, "-m", "benchmarks.gpu", "--inside", "--part", name, "--budget", f"{left:.0f}"]
        words += ["--output", str(options.output), "--scratch", str(options.scratch)]
        status = supervise(words, left + GRACE)
        if status == 0:
            return
        if status != ContextLost.code:
            why = f"stopped after {left + GRACE:.0f} s" if status is None else f"its process ended with {status}"
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
            sys.stderr.write(f"{write_page(results)}\n")
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
    add("--output", type=Path, default="build/gpu", help="the folder of results and page; default: build/gpu")
    add("--again", action="store_true", help="measure again what is in the results")
    add("--merge", nargs="+", metavar="FILE", help="only add the rows of these results to OUTPUT's")
    add("--scratch", type=Path, default=SCRATCH, help=f"folder of random checkpoints; default: {SCRATCH}")
    add("--tiny", "--quick", action="store_true", help="a smoke run of seconds, also on a CPU")
    add("--json", action="store_true", help="print the rows as one JSON object instead of a table")
    add("--budget", type=float, help="seconds for each part, instead of its own")
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # the process of a part
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
