"""A small model from random weights on real photos and what three people preferred, in both directions.

Trained on photos with captions and captions with photos, with and without irrelevant queries; measured on photos and
captions of neither. With every photo painted grey (`blank`) a model that looks falls to one half. The swapped margin
is the mean difference of two answers' scores under another sample's prompt: what the answers alone are worth to it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import harness, runs
from benchmarks.harness import Row, Skipped, row
from vlmrm.conversation import Comparison
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.pairs import credits_of, margins_of, scored_pairs
from vlmrm.modeling import make_tiny
from vlmrm.scoring import Scorer, load_scorer
from vlmrm.training import train

TRAIN = ("vl_expert_train", "t2i_expert_train", "vl_owncaption_train")
VAL = {"vl": "vl_expert_val", "t2i": "t2i_expert_val"}
BATCH = 16
STEPS = 800
CHUNK = 64  # comparisons whose pictures are held at a time
DEFAULT_DATA = Path(os.environ.get("VLMRM_TEST_DATA", "../shared/data"), "flickr8k_pref")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="the folder with the .jsonl files and images")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of {BATCH} pairs, for each of the two trainings")


def measure(options: argparse.Namespace) -> list[Row]:
    data = options.data.resolve()
    missing = [name for name in (*TRAIN, *VAL.values()) if not (data / f"{name}.jsonl").is_file()]
    if missing:
        raise Skipped(f"{data.name} has no {missing[0]}.jsonl: say where the data is with --data")
    rows = []
    with runs.workplace() as folder:
        base = make_tiny(folder / "base")
        for name, irrelevant in (("plain", False), ("irrelevant", True)):
            steps = 2 if options.quick else options.steps
            result = train(words(base, data, folder / name, steps, irrelevant))
            rate = result.metrics["train_samples_per_second"]
            rows.append(row(f"{name} training", rate, "pairs/s", steps=steps, pairs=steps * BATCH))
            scorer = load_scorer(result.model_dir)
            for direction, file in VAL.items():
                limit = 8 if options.quick else None
                rows += figures(f"{name} {direction}", scorer, data / f"{file}.jsonl", limit)
    return rows


def words(base: Path, data: Path, output: Path, steps: int, irrelevant: bool) -> list[str]:
    return runs.training_words(
        base,
        [data / f"{name}.jsonl" for name in TRAIN],
        output,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 8,
        use_irrelevant_queries=irrelevant,
        dataloader_num_workers=1,
        logging_steps=50,
    )


def figures(case: str, scorer: Scorer, file: Path, limit: int | None) -> list[Row]:
    """Return the accuracy with true and with blank images, and the margin under true and under swapped prompts."""
    rows: Any = load_comparisons([str(file)], arguments=DataArguments(dataset_path=[str(file)]), limit=limit)
    comparisons: list[Comparison] = rows[:]["comparison"]
    swap = prompt_swapper(comparisons)
    plain = margins(scorer, comparisons)
    painted = INTERVENTIONS["blank_image"]
    blank = margins(scorer, [cast(Comparison, painted(comparison)) for comparison in comparisons])
    swapped = margins(scorer, [swap(comparison) for comparison in comparisons])
    count = {"pairs": len(plain)}
    return [
        row(f"{case} accuracy", float(credits_of(plain).mean()), "of pairs", **count),
        row(f"{case} blank accuracy", float(credits_of(blank).mean()), "of pairs", **count),
        row(f"{case} margin", float(plain.mean()), "score", **count),
        row(f"{case} swapped margin", float(swapped.mean()), "score", **count),
    ]


def margins(scorer: Scorer, comparisons: list[Comparison]) -> np.ndarray:
    """Return the margin of every pair with a preference."""
    scores: list[list[float]] = []
    for start in range(0, len(comparisons), CHUNK):
        chunk = [comparison.conversations() for comparison in comparisons[start : start + CHUNK]]
        flat = iter(scorer.score([conversation for branches in chunk for conversation in branches]))
        scores += [[next(flat) for _ in branches] for branches in chunk]
    differences = margins_of(scored_pairs(comparisons, scores))
    return differences[~np.isnan(differences)]


def prompt_swapper(comparisons: list[Comparison]) -> Callable[[Comparison], Comparison]:
    """Return a function that gives a comparison the next different prompt from about half the data set away."""
    positions = {comparison.id: i for i, comparison in enumerate(comparisons)}

    def swap(comparison: Comparison) -> Comparison:
        start = positions[comparison.id] + len(comparisons) // 2
        prompts = (comparisons[(start + i) % len(comparisons)].prompt for i in range(len(comparisons)))
        return replace(comparison, prompt=next(prompt for prompt in prompts if prompt != comparison.prompt))

    return swap


if __name__ == "__main__":
    harness.main("flickr8k", measure, __doc__, add_options)
