"""Policies for Acrobot whose reward is the true success, a classifier of frames, or both, over three seeds.

Frames, classifier and policies are as in `vlmrm frames demo`, with one classifier for all seeds. `--output` keeps all
of it, and goes on where it was. A policy of the learned reward must clearly exceed random actions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from vlmrm_robots.frames.checkpoint import read_config
from vlmrm_robots.policies.comparison import markdown, write_comparison
from vlmrm_robots.policies.demo import classifier, policy_settings
from vlmrm_robots.policies.training import PolicyRun, train_policies

SOURCES = ["success", "learned", "both"]
SEEDS = [0, 1, 2]
AUC = 0.99
ABOVE_CHANCE = 0.5  # of the worst seed's true success rate, above that of random actions


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="a folder that keeps all of it; default: none")


def measure(options: argparse.Namespace) -> list[Row]:
    output = options.output and options.output.resolve()
    with runs.workplace() as temporary:
        return trained(output or temporary, options.quick)


def trained(folder: Path, quick: bool) -> list[Row]:
    checkpoint = classifier(folder, SEEDS[0], *((8, 2, 1) if quick else ()))
    changes = {"total_steps": 512, "evaluation_episodes": 2} if quick else {}
    seeds = SEEDS[:1] if quick else SEEDS
    settings = policy_settings(folder, checkpoint, accept_unqualified=quick, seeds=seeds, sources=SOURCES, **changes)
    trained_runs = train_policies(settings)
    sys.stdout.write(markdown(write_comparison(trained_runs, settings)))
    line = row("classifier", read_config(checkpoint).metrics["auc"], "AUC", at_least=AUC)
    return [line, *(of_source(source, [run for run in trained_runs if run.source == source]) for source in SOURCES)]


def of_source(source: str, source_runs: list[PolicyRun]) -> Row:
    """Return the worst seed's final true success rate, and the classifier's false positives over all seeds."""
    final, chance = [run.final for run in source_runs], [run.random_success_rate for run in source_runs]
    line = row(source, min(final), "success", at_least=max(chance) + ABOVE_CHANCE if source == "learned" else None)
    line |= {
        "seeds": len(source_runs),
        "mean": float(np.mean(final)),
        "highest": max(final),
        "chance": float(np.mean(chance)),
    }
    shares = [share for run in source_runs if (share := run.counts.false_positive_share) is not None]
    return line | {"false_positive_share": float(np.mean(shares)) if shares else None}


if __name__ == "__main__":
    harness.main("frames_rl", measure, __doc__, add_options)
