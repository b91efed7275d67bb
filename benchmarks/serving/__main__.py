"""The reward service against the offline scorer and a plain server, by the clock on the wall.

The model is that of `train_step`'s h512.
"""

from __future__ import annotations

import argparse

from benchmarks import harness, runs
from benchmarks.harness import Row
from benchmarks.servers import SERVE, server
from benchmarks.serving.busy import worker_busy
from benchmarks.serving.overload import overload
from benchmarks.serving.shuffled import GROUPS as SHUFFLED
from benchmarks.serving.shuffled import shuffled
from benchmarks.serving.streamed import streamed
from benchmarks.serving.swap import swap
from benchmarks.serving.throughput import concurrent, low_load, rl_load
from benchmarks.shapes import configuration, reward_checkpoint
from vlmrm.scoring.loading import load_local_scorer
from vlmrm.serving.engines import CACHE_BYTES

EACH = 2
ALONE = 40
GROUPS = 4
ROUNDS = 3
SWAPS = 20
STORM_S = 20.0


def measure(options: argparse.Namespace) -> list[Row]:
    rounds, size = (1, "tiny") if options.quick else (ROUNDS, "h512")
    with runs.workplace() as folder:
        checkpoint = str(reward_checkpoint(folder, configuration(size)))
        scorer = load_local_scorer(checkpoint)
        with (
            server(*SERVE, "--model", checkpoint, "--port", log=folder / "service.log") as (service, process),
            server("-m", "benchmarks.plain_server", checkpoint, log=folder / "plain.log") as (plain, _),
        ):
            rows = [
                concurrent(scorer, service, 2 if options.quick else EACH, rounds),
                low_load(
                    load_local_scorer(checkpoint, cache_bytes=CACHE_BYTES), service, 3 if options.quick else ALONE
                ),
                rl_load(service, plain, 1 if options.quick else GROUPS, rounds),
                *shuffled(scorer, service, 4 if options.quick else SHUFFLED),
                worker_busy(scorer, service, 1 if options.quick else EACH, rounds),
                streamed(service, process, 1 if options.quick else GROUPS, rounds),
            ]
        rows.append(swap(folder, 2 if options.quick else SWAPS))
        return [*rows, *overload(folder, 2 if options.quick else STORM_S)]


if __name__ == "__main__":
    harness.main("serving", measure, __doc__)
