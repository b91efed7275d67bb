"""Offline scoring of pairs about pictures in files, as `vlmrm score` does it, and of groups of candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import harness, runs
from benchmarks.gpu.models import checkpoint
from benchmarks.gpu.running import Run
from benchmarks.gpu.trainings import pictures
from benchmarks.harness import Row, row
from benchmarks.serving.clients import LARGE, Item, item, picture
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.scoring.offline import OfflineJob, ShardScoring
from vlmrm.scoring.scorer import LocalScorer

PAIRS = 512
WORKERS = (0, 4, 12)  # processes that open pictures
GROUP = 16


def offline(run: Run) -> None:
    """Score pairs with several numbers of workers, groups of 16 from memory, and one request by CUDA graphs."""
    scorer = opened(run)
    for workers in WORKERS[:1] if run.tiny else WORKERS:
        run.attempt(f"pairs, {workers} workers", partial(pairs, run, scorer, workers))
    run.attempt(f"groups of {GROUP}", partial(groups, run, scorer))
    if run.cuda:
        run.attempt("one request, by graphs", partial(replayed, run, scorer))  # the last: the model keeps its graphs


def opened(run: Run) -> Callable[[], LocalScorer]:
    """Return a function that returns the scorer of a 3B in bfloat16, opened on first use."""
    made: list[LocalScorer] = []

    def scorer() -> LocalScorer:
        if not made:
            made.append(load_local_scorer(str(checkpoint(run.scratch, "3b", run.device, run.tiny)), device=run.device))
        return made[0]

    return scorer


def pairs(run: Run, scorer: Callable[[], LocalScorer], workers: int) -> Iterator[Row]:
    """Yield the pairs a second from files to shards of scores, and the share of the time that the GPU computes."""
    count = 8 if run.tiny else PAIRS
    data, model = pictures(run.scratch, count), scorer()
    warm_up(model)
    with runs.workplace() as folder:
        path = str(checkpoint(run.scratch, "3b", run.device, run.tiny))
        job = OfflineJob(path, [str(data)], folder / "scores", num_workers=workers, device=run.device)
        scoring = ShardScoring(job, model, job.open_rows())
        started = time.perf_counter()
        with busy(model.model, run) as seconds:
            scoring.run(0, 1)
        wall = time.perf_counter() - started
        summary: Any = job.shards.summary(count)
    if summary.errors:
        raise AssertionError(f"{summary.errors} of {count} pairs were not scored")
    line = row(f"pairs, {workers} workers", count / wall, "pairs/s", seconds=wall, workers=workers)
    yield line | {"gpu_busy": sum(seconds) / wall}


def groups(run: Run, scorer: Callable[[], LocalScorer]) -> Iterator[Row]:
    """Yield the candidates a second of groups about one picture each, opened, rendered and scored in one process."""
    model = scorer()

    def prepare() -> Callable[[], Any]:
        image = picture(LARGE)
        made = [conversation(item(image)) for _ in range(GROUP)]
        return lambda: model.score(made)

    timings = harness.interleave({"group": prepare}, 2 * run.rounds, "wall")
    seconds = timings.median("group")
    yield row(f"groups of {GROUP}", GROUP / seconds, "candidates/s", milliseconds=1000 * seconds)


def replayed(run: Run, scorer: Callable[[], LocalScorer]) -> Iterator[Row]:
    """Yield the milliseconds of one request whose language model is replayed; it scores as when it is launched."""
    made = [[conversation(item(picture(LARGE)))] for _ in range(GROUP)]
    scores, seconds = {}, {}
    for way, graphs in (("launched", False), ("replayed", True)):
        model = LocalScorer(scorer().loaded, cuda_graphs=graphs)
        scores[way] = torch.tensor([model.score(it)[0] for it in made])
        timings = harness.interleave({way: lambda model=model: partial(model.score, made[0])}, 2 * run.rounds, "wall")
        seconds[way] = timings.median(way)
    off = float((scores["replayed"] - scores["launched"]).abs().max() / scores["launched"].std())
    if not off <= 0.25:  # rounding in bfloat16 takes a tenth
        raise AssertionError(f"replayed scores are off by {off:.2g} of their spread")
    launched = 1000 * seconds["launched"]
    yield row("one request, by graphs", 1000 * seconds["replayed"], "ms", at_most=25.0, launched=launched, off=off)


def conversation(question: Item) -> list[dict[str, Any]]:
    return question.conversation({"bytes": question.picture})


def warm_up(scorer: LocalScorer) -> None:
    """Score once what is not timed: the first call of a kernel loads it."""
    scorer.score([conversation(item(picture(LARGE))) for _ in range(2)])


@contextmanager
def busy(model: torch.nn.Module, run: Run) -> Iterator[list[float]]:
    """Collect the seconds of each forward of a model: on a GPU of its stream, on a CPU of the processor."""
    seconds: list[float] = []
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    started: list[Any] = []

    def before(*_: Any) -> None:
        started.append(event() if run.cuda else time.perf_counter())

    def after(*_: Any) -> None:
        if run.cuda:
            marks.append((started.pop(), event()))
        else:
            seconds.append(time.perf_counter() - started.pop())

    hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()
        if marks:
            torch.cuda.synchronize()
        seconds += [first.elapsed_time(last) / 1000 for first, last in marks]


def event() -> torch.cuda.Event:
    """Return an event that the stream reaches now."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
