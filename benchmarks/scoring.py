"""Forward alone, as in evaluation, best-of-N and rewards for rollouts: the naive way over ours, in CPU seconds.

The models are those of `train_step`: h512, windows_h512 and state_h512. A prompt is 256 image tokens and 32 of text,
an answer 32 tokens.
"""

from __future__ import annotations

import argparse

from benchmarks import harness
from benchmarks.contest import Contest
from benchmarks.harness import Row, row
from benchmarks.shapes import Pair, Workload, candidates, configuration, quick, training

IMAGE, TEXT, ANSWER = 256, 32, 32
# size, work, target of the ratio and of its share of the bound
CASES = {
    "best_of_16": ("h512", "best_of_16", 7.0, None),
    "pairs": ("h512", "pairs", 1.8, None),
    "windows_best_of_16": ("windows_h512", "best_of_16", 7.0, 0.9),
    "windows_pairs": ("windows_h512", "pairs", 1.8, 0.9),
    "state_best_of_16": ("state_h512", "best_of_16", 7.0, 0.9),
    "state_pairs": ("state_h512", "pairs", 1.8, 0.9),
}
ROUNDS = 5


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for case, (size, work, target, of_bound) in CASES.items():
        rows += speed(case, quick(size) if options.quick else size, work, target, of_bound, options.quick)
    return rows


def speed(case: str, size: str, work: str, target: float, of_bound: float | None, small: bool) -> list[Row]:
    lengths = (4, 6, 5) if small else (IMAGE, TEXT, ANSWER)
    config = configuration(size, lengths[0])
    contest = Contest(config, workload(config, work, *lengths))
    timings = harness.interleave(contest.forwards(), 1 if small else ROUNDS)
    naive, shared = contest.operations()
    bound = naive.forward / shared.forward
    line = row(case, **timings.ratio("naive", "ours"), unit="x naive", at_least=target, bound=bound)
    line |= {"naive_tokens": naive.tokens, "our_tokens": shared.tokens}
    line |= {"naive_seconds": timings.median("naive"), "our_seconds": timings.median("ours")}
    if of_bound is None:
        return [line]
    return [line, row(f"{case}_of_bound", line["measured"] / bound, "of bound", at_least=of_bound)]


def workload(config, work: str, image: int, text: int, answer: int) -> Workload:
    if work == "best_of_16":
        return candidates(config, 16, image, text, answer)
    return training(config, [Pair(image, text, answer, answer)] * 4, irrelevant=False)


if __name__ == "__main__":
    harness.main("scoring", measure, __doc__)
