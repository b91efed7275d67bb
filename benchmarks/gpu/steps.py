"""Forward and backward of training steps at real sizes, beside those of padded rows, and in rows of any length.

Padded rows have the same attention in the vision tower, so that what differs is what is shared.

Weights, gradients and activations are bfloat16. Utilisation (MFU) counts the operations of unique tokens, forward and
backward once, over the data sheet's rate: recomputation under checkpointing counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks import flops, harness
from benchmarks.contest import Contest, Prepare
from benchmarks.gpu.models import matrix_product, peak, peak_gib, real_configuration
from benchmarks.gpu.running import Run, release
from benchmarks.harness import Row, Timings, row
from benchmarks.shapes import Pair, Workload, reward_model, training
from vlmrm.batching import to_device
from vlmrm.modeling.compiled import compile_blocks
from vlmrm.modeling.vision import attend_by_segments

PAIR = Pair(1024, 64, 256, 256)  # an image of 896 x 896 pixels, a question and two answers
SHORT = Pair(512, 64, 224, 224)  # 1026 tokens, shared
QUICK = Pair(4, 6, 5, 3)
SIZES = (1, 4, 16)  # pairs of a row
LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # thousands of tokens
WAYS = {"checkpointing": 1, "every second": 2, "no checkpointing": 0}  # and every how many layers recompute
UTILISATION = {"checkpointing": 0.40, "no checkpointing": 0.45}  # to reach at 3B, compiled, with several pairs a row
CASE_SECONDS = 12.0  # that the turns of a case may take, where its first steps leave more than one
SCORE_ROUNDING = 0.2  # of bfloat16, through all layers


def steps_3b(run: Run) -> None:
    """Steps of a 3B, which has targets."""
    Steps(run, "3b").measure(targets=True)


def steps_7b(run: Run) -> None:
    """Steps of a 7B."""
    Steps(run, "7b").measure(targets=False)


def lengths(run: Run) -> None:
    """Rows of pairs from one to as many as make 64k tokens, and of a single long pair; checkpointing."""
    model = ours_alone(run)
    for thousands in LENGTHS[:2] if run.tiny else LENGTHS:
        pairs = [QUICK if run.tiny else SHORT] * thousands
        run.attempt(f"row {thousands}k", partial(row_speed, run, model, f"row {thousands}k", pairs))
    for thousands in (8,) if run.tiny else (16, 64):
        pair = QUICK if run.tiny else Pair(1024, 1000 * thousands - 1026 - 512, 256, 256)
        run.attempt(f"one {thousands}k", partial(row_speed, run, model, f"one pair of {thousands}k", [pair]))


class Steps:
    """Both models of a size, with one workload after another."""

    def __init__(self, run: Run, size: str):
        self.run, self.size = run, size
        self._contest: Contest | None = None
        self.compiled = False  # for the rest of this process

    def measure(self, targets: bool) -> None:
        for compiled in (False, True):
            for way in WAYS:
                for count in SIZES[:2] if self.run.tiny else SIZES:
                    goal = UTILISATION.get(way) if targets and compiled and count > 1 else None
                    pairs = f"{count} {'pair' if count == 1 else 'pairs'}"
                    case = f"{self.size} {pairs}, {way}{', compiled' * compiled}"
                    self.run.attempt(case, partial(self.rows, case, count, way, compiled, goal))

    def contest(self, work: Workload) -> Contest:
        """Return the contest of the two models with this work; they are made once, on first use.

        Raises:
            AssertionError: when their scores differ by more than rounding.
        """
        if self._contest is None:
            config = real_configuration(self.size, self.run.tiny)
            options = {"tolerance": SCORE_ROUNDING, "device": self.run.device, "dtype": torch.bfloat16}
            self._contest = Contest(config, work, **options)
            lm: Any = self._contest.naive.lm
            lm.tie_weights()  # the weights that it took over
            attend_by_segments(lm.model, [lm.model.visual])  # a call for each window would be most of its step
        else:
            self._contest.work = work
            self._contest.compare(SCORE_ROUNDING)
        return self._contest

    def rows(self, case: str, count: int, way: str, compiled: bool, goal: float | None) -> Iterator[Row]:
        """Yield the utilisation, and of eager steps under checkpointing the ratio to padded rows."""
        run = self.run
        work = training(
            real_configuration(self.size, run.tiny), [QUICK if run.tiny else PAIR] * count, irrelevant=False
        )
        contest = self.contest(work)
        for model in (contest.model, contest.naive.lm):
            checkpoint_layers(model, WAYS[way])
        if compiled and not self.compiled:
            compile_blocks(contest.model, "aot_eager" if run.tiny else "inductor")
            self.compiled = True
        padded = WAYS[way] == 1 and not compiled
        started = time.monotonic()
        gib, ways = fitting({name: step for name, step in contest.steps().items() if padded or name == "ours"}, run)
        if "ours" not in ways:
            raise torch.OutOfMemoryError
        first = time.monotonic() - started
        timings = harness.interleave(ways, max(1, min(run.rounds, int(CASE_SECONDS / first) - 1)), run.device)
        naive, shared = contest.operations()
        head = contest.naive.lm.lm_head.weight
        if gib["ours"] is not None and head is not contest.naive.lm.get_input_embeddings().weight:
            gib["ours"] -= head.nbytes / 2**30  # it lies in memory, and is no part of ours
        memory: dict[str, Any] = {f"{name}_peak_gib": peak for name, peak in gib.items()} | {"first_seconds": first}
        yield speed_row(f"{case}: MFU", run, shared, timings, count, goal) | memory
        if not padded:
            return
        if "naive" not in ways:
            yield row(f"{case}: ratio", None, "x naive") | {"status": "padded rows are out of memory"} | memory
            return
        ratio, bound = timings.ratio("naive", "ours"), naive.training / shared.training
        tokens = {"naive_tokens": naive.tokens, "our_tokens": shared.tokens}
        yield row(f"{case}: ratio", **ratio, unit="x naive", bound=bound, of_bound=ratio["measured"] / bound) | tokens


def checkpoint_layers(model: Any, every: int) -> None:
    """Let every so many layers of text and vision be checkpointed; 0: none."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # its older name
    if every:
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False}, every_n_layers=every)
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def fitting(ways: Mapping[str, Prepare], run: Run) -> tuple[dict[str, float | None], dict[str, Prepare]]:
    """Return the peak GiB of each way's first step, None where there is no GPU, and the ways that fit in memory."""
    gib: dict[str, float | None] = {}
    fit: dict[str, Prepare] = {}
    for name, prepare in ways.items():
        try:
            gib[name] = peak_gib(prepare(), run.device)
            fit[name] = prepare
        except torch.OutOfMemoryError:
            gib[name] = None
        release(run.device)
    return gib, fit


def speed_row(
    case: str, run: Run, work: flops.Work, timings: Timings, pairs: int, at_least: float | None = None
) -> Row:
    """Return the utilisation of our step, with what it is made of."""
    seconds = timings.median("ours")
    rate = 3 * work.body / seconds
    product = matrix_product(run.device, 8192 if run.cuda else 256)
    line = row(case, rate / peak(run.device), "of peak", at_least=at_least, of_product=rate / product)
    line |= {"tflops": rate / 1e12, "our_seconds": seconds, "pairs_per_second": pairs / seconds}
    line |= {"tokens_per_second": work.tokens / seconds, "our_tokens": work.tokens}
    return line | {f"{name}_seconds": timings.median(name) for name in timings.seconds if name != "ours"}


def ours_alone(run: Run) -> Callable[[], tuple[Any, Any]]:
    """Return a function that returns a 3B reward model under checkpointing with its batcher, made on first use."""
    made: list[tuple[Any, Any]] = []

    def model() -> tuple[Any, Any]:
        if not made:
            made.append(reward_model(real_configuration("3b", run.tiny), run.device, torch.bfloat16))
            checkpoint_layers(made[0][0].train(), 1)
        return made[0]

    return model


def step_of(model: Any, batcher: Any, work: Workload) -> Prepare:
    """Return forward and backward of a model for `harness.interleave`."""

    def prepare() -> Callable[[], Any]:
        model.zero_grad()
        inputs = to_device(batcher(work.conversations), model.device)
        return lambda: work.loss(model(**inputs).logits.squeeze(-1)).backward()

    return prepare


def row_speed(run: Run, make: Callable[[], tuple[Any, Any]], case: str, pairs: list[Pair]) -> Iterator[Row]:
    """Yield the utilisation of a step over one row."""
    model, batcher = make()
    work = training(model.config, pairs, irrelevant=False)
    prepare = step_of(model, batcher, work)
    gib = peak_gib(prepare(), run.device)
    timings = harness.interleave({"ours": prepare}, min(run.rounds, 3), run.device)
    shared = flops.of_shared(model.config, batcher(work.conversations))
    line = row(case, shared.tokens / timings.median("ours"), "tokens/s", our_peak_gib=gib)
    yield (
        line
        | {
            name: value
            for name, value in speed_row(case, run, shared, timings, len(pairs)).items()
            if name in ("our_tokens", "our_seconds", "tflops", "of_product")
        }
        | {"mfu": 3 * shared.body / timings.median("ours") / peak(run.device)}
    )
