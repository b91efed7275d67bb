"""The cost of an evaluation beside its forward pass: all interventions in CPU seconds, and the report of many pairs.

`interventions` is one evaluation of pairs of the `h512 144+32+32` shape (tokens of the image, of the remaining prompt
and of an answer, chat template included), from opening the images to the scores, over the same without
interventions. `bound` is the ratio of the two ways' operations (benchmarks/flops.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from benchmarks import flops, harness, runs
from benchmarks.harness import Row, row
from benchmarks.shapes import configuration, reward_model
from vlmrm.batching import ComparisonCollator
from vlmrm.conversation import Conversation, Message
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.engine import Engine
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.measures.interventions import INTERVENTIONS, Intervention
from vlmrm.modeling import RewardModel, load_processor, make_tiny
from vlmrm.rendering import MediaLimits, Renderer

SIDE, TEXT, ANSWER = 336, 32, 32  # pixels: 12 x 12 tokens
PAIRS, BATCH, ROUNDS = 16, 8, 3
LIMIT = 2.0
REPORTED, SECONDS, GIBIBYTES = 100_000, 60.0, 2.0


def measure(options: argparse.Namespace) -> list[Row]:
    with runs.workplace() as folder:
        rows = [interventions(folder, options.quick)]
    count = 200 if options.quick else REPORTED
    seconds, peak = harness.in_new_process(report, count)
    rows.append(row("report_100k", seconds, "s", at_most=SECONDS, pairs=count))
    rows.append(row("report_100k_memory", peak / 1024, "GiB", at_most=GIBIBYTES, pairs=count))
    return rows


def interventions(folder: Path, quick: bool) -> Row:
    collator, model = workbench(folder / "base", "tiny" if quick else "h512")
    file = pairs(folder, collator.renderer, 4 if quick else PAIRS)
    data = load_comparisons([str(file)], arguments=DataArguments())

    def evaluation(changes: Mapping[str, Intervention]) -> Callable[[], Any]:
        engine = Engine(model, replace(collator, interventions=changes))
        return lambda: evaluate(engine, data, batch_size=BATCH)

    ways = {"all": evaluation(INTERVENTIONS), "none": evaluation({})}
    timings = harness.interleave({name: lambda w=way: w for name, way in ways.items()}, 1 if quick else ROUNDS)
    line = row("interventions", **timings.ratio("all", "none"), unit="x without", at_most=LIMIT)
    work = {name: operations(model, way) for name, way in ways.items()}
    line["bound"] = work["all"][0] / work["none"][0]
    for name in ways:
        _, tokens, images = work[name]
        line |= {f"{name}_seconds": timings.median(name), f"{name}_tokens": tokens / len(data)}
        line[f"{name}_images"] = images / len(data)
    return line


def workbench(base: Path, size: str) -> tuple[ComparisonCollator, RewardModel]:
    """Return a model of a size of benchmarks/shapes.py, with the tiny model's tokenizer and image processor."""
    make_tiny(base)
    processor = load_processor(base)
    config: Any = configuration(size)
    if size == "tiny":
        config.text_config.vocab_size = 1024  # room for the tokenizer's
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        key = f"{name.removesuffix('_pad')}_token_id"
        setattr(config, key, processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>"))
    model, batcher = reward_model(config)
    renderer = Renderer(processor, MediaLimits(max_pixels=SIDE * SIDE))
    return ComparisonCollator(renderer, batcher, max_seq_length=4096), model.eval()


def pairs(folder: Path, renderer: Renderer, count: int) -> Path:
    """Write `count` pairs, each with a different image. A digit is one token of Qwen's tokenizers."""
    rng = np.random.default_rng(0)

    def digits(length: int) -> str:
        return "".join(map(str, rng.integers(0, 10, length)))

    question, answer = Message.of("user", "1"), Message.of("assistant", "1")
    question_tokens = (
        len(renderer.render(Conversation((question,)))) + 1
    )  # with the marks around the picture, less the digit
    answer_tokens = len(renderer.render(Conversation((question, answer)))) - question_tokens
    path = folder / "pairs.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            picture = folder / f"{number}.png"
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(picture)
            texts = {name: digits(ANSWER - answer_tokens - 1) for name in ("chosen", "rejected")}
            file.write(json.dumps({"image": picture.name, "prompt": digits(TEXT - question_tokens), **texts}) + "\n")
    return path


def operations(model: RewardModel, run: Callable[[], Any]) -> tuple[float, int, int]:
    """Return the operations, tokens of the language model and images of the vision tower that `run` computes."""
    parts: list[tuple[float, int, int]] = []

    def count(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        work = flops.of_shared(model.config, inputs)
        parts.append((work.forward, work.tokens, len(inputs["image_grid_thw"])))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    run()
    hook.remove()
    total, tokens, images = zip(*parts, strict=True)
    return sum(total), sum(tokens), sum(images)


def report(count: int) -> tuple[float, float]:
    """Return the seconds of a report of `count` scored pairs from their file, and the peak memory in MB."""
    from vlmrm.evaluation.report import build_report

    with runs.workplace() as folder:
        scored(count, folder).to_parquet(folder / "results.scores.parquet", index=False)
        harness.memory()
        started = time.perf_counter()
        build_report([folder / "results.csv"], folder / "report")
        return time.perf_counter() - started, harness.peak_memory()


def scored(count: int, folder: Path) -> pd.DataFrame:
    """Return the scores of a checkpoint, as a sweep writes them: long texts, 30 categories, all interventions."""
    rng = np.random.default_rng(0)
    picture = folder / "picture.png"
    Image.fromarray(rng.integers(0, 255, (480, 640, 3), dtype=np.uint8)).save(picture)
    prompts = np.arange(count) // 2
    margins = rng.normal(1.0, 1.5, count)
    columns: dict[str, Any] = {
        "model": "outputs/mine",
        "checkpoint": "checkpoint-100",
        "step": 100.0,
        "comparison_id": [f"row-{i}" for i in range(count)],
        "pair": 0,
        "prompt_id": [f"prompt-{i}" for i in prompts],
        "category": [f"category {i % 30}" for i in prompts],
        "tie": rng.random(count) < 0.02,
        "weight": 1.0,
        "images": 1,
        "pixels": rng.integers(10_000, 300_000, count),
        "prompt_text": [f"What is shown in picture {i}? " * 10 for i in prompts],
        "image_paths": [[str(picture)]] * count,
    }
    for side, branch, sign in (("chosen", 0, 1), ("rejected", 1, -1)):
        columns |= {f"{side}_branch": branch, f"{side}_rating": float(sign), f"{side}_score": sign * margins / 2}
        columns |= {f"{side}_length": rng.integers(20, 900, count), f"{side}_pixels": 0}
        columns |= {f"{side}_text": [f"{side} answer number {i}. " * 20 for i in range(count)]}
        columns |= {f"{side}_image_paths": [[]] * count}
        columns |= {f"{name}_{side}": sign * rng.normal(0.2, 1, count) for name in INTERVENTIONS}
    return pd.DataFrame(columns)


if __name__ == "__main__":
    harness.main("evaluation", measure, __doc__)
