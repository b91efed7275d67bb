"""The cost of an evaluation beside its forward pass: interventions in CPU seconds, and the report of many pairs.

`interventions` is one evaluation with the standard ones, `audit` one with all that apply, of pairs of the `h512
144+32+32` shape (tokens of the image, of the remaining prompt and of an answer, chat template included), from opening
the images to the scores, over the same without interventions. Those that run on a sample run on a sixth of the
pairs: of 1,800, the default of 300. `bound` is the ratio of the two ways' operations (benchmarks/flops.py).
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from benchmarks import flops, harness, runs
from benchmarks.browser import CHROMIUM, Browser
from benchmarks.harness import Row, row
from benchmarks.shapes import configuration, reward_model
from vlmrm.batching import ComparisonCollator
from vlmrm.conversation import Conversation, Message
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.rows import read_row
from vlmrm.engine import Engine
from vlmrm.evaluation.evaluate import evaluate
from vlmrm.measures import changes
from vlmrm.measures.donors import is_sampled
from vlmrm.measures.interventions import INTERVENTIONS, named
from vlmrm.modeling import RewardModel, load_processor, make_tiny
from vlmrm.rendering import MediaLimits, Renderer

SIDE, TEXT, ANSWER = 336, 32, 32  # pixels: 12 x 12 tokens
PAIRS, BATCH, ROUNDS = 24, 8, 3
SHARE = 1 / 6  # of the pairs, in the sample
LIMITS = {"standard": ("interventions", 2.0), "all": ("audit", 3.5)}
SAMPLE = 300  # comparisons, the default
REPORTED, SECONDS, GIBIBYTES, FILTER_SECONDS = 100_000, 60.0, 2.0, 0.2
# One after another, each with those before it. Orders and words are dear the first time.
FILTERS = (
    *(("order", order) for order in ("-margin", "near", "data", "margin")),
    *(("words", words) for words in ("number 77", "picture", "e", "nothing of the kind", "")),
    *(("flip", flip) for flip in ("any", "")),
    *(("verdict", "1"), ("low", "-1"), ("group-0", "3"), ("group-0", ""), ("low", ""), ("verdict", "")),
)


def measure(options: argparse.Namespace) -> list[Row]:
    with runs.workplace() as folder:
        rows = interventions(folder, options.quick)
    count = 200 if options.quick else REPORTED
    seconds, peak, filters = harness.in_new_process(report, count)
    rows.append(row("report_100k", seconds, "s", at_most=SECONDS, pairs=count))
    rows.append(row("report_100k_memory", peak / 1024, "GiB", at_most=GIBIBYTES, pairs=count))
    if filters:
        slowest = max(filters, key=lambda name: filters[name])
        rows.append(row("page_filter", filters[slowest], "s", at_most=FILTER_SECONDS, pairs=count, slowest=slowest))
    return rows


def interventions(folder: Path, quick: bool) -> list[Row]:
    collator, model = workbench(folder / "base", "tiny" if quick else "h512")
    count = 4 if quick else PAIRS
    sample = max(1, round(SHARE * count))
    data = load_comparisons([str(pairs(folder, collator.renderer, count, sample))], arguments=DataArguments())

    def evaluation(word: str) -> Callable[[], Any]:
        engine = Engine(model, replace(collator, interventions={name: INTERVENTIONS[name] for name in named([word])}))
        return lambda: evaluate(engine, data, batch_size=BATCH, sample=sample)

    ways = {word: evaluation(word) for word in ("none", *LIMITS)}
    timings = harness.interleave({name: lambda w=way: w for name, way in ways.items()}, 1 if quick else ROUNDS)
    work = {name: operations(model, way) for name, way in ways.items()}
    lines = []
    for word, (case, limit) in LIMITS.items():
        line = row(case, **timings.ratio(word, "none"), unit="x without", at_most=limit)
        line |= {"bound": work[word][0] / work["none"][0], "share": sample / count}
        for name in (word, "none"):
            _, tokens, images = work[name]
            line |= {f"{name}_seconds": timings.median(name), f"{name}_tokens": tokens / count}
            line[f"{name}_images"] = images / count
        lines.append(line)
    return lines


def workbench(base: Path, size: str) -> tuple[ComparisonCollator, RewardModel]:
    """Return a model of a size of benchmarks/shapes.py, with the tiny model's image processor and its tokenizer, to
    which the words that the texts and the rewrites are made of are one token each, as to a large one."""
    make_tiny(base)
    spelt = [form for word in vocabulary() for form in (word, word.upper(), word.capitalize())]
    lines = [line for word in spelt for line in (word, f". {word}")]
    tokenizer = load_processor(base).tokenizer.train_new_from_iterator(lines * 20, 8000)
    tokenizer.save_pretrained(base)
    processor = load_processor(base)
    config: Any = configuration(size)
    if size == "tiny":
        config.text_config.vocab_size = 8192  # room for the tokenizer's
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        key = f"{name.removesuffix('_pad')}_token_id"
        setattr(config, key, processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>"))
    model, batcher = reward_model(config)
    renderer = Renderer(processor, MediaLimits(max_pixels=SIDE * SIDE))
    return ComparisonCollator(renderer, batcher, max_seq_length=4096), model.eval()


def vocabulary() -> list[str]:
    """Return the words of which the template, texts and rewrites are made."""
    texts = ("system user a helpful assistant", changes.HEADING, changes.AGREEMENT, *changes.FILLERS)
    return sorted({word.lower() for text in texts for word in re.findall(r"[^\W\d_]+", str(text))})


def pairs(folder: Path, renderer: Renderer, count: int, sample: int) -> Path:
    """Write `count` pairs of sentences, each with a different image; the sample of `sample` is spread over them."""
    rng = np.random.default_rng(0)
    words = vocabulary()

    def sentences(length: int) -> str:
        """Return so many tokens: sentences of eight words with a full stop."""
        tokens = [f" {words[i]}" for i in rng.integers(0, len(words), length)]
        tokens[8::9] = ["."] * len(tokens[8::9])
        return "".join(tokens).strip()

    question, answer = Message.of("user", "the"), Message.of("assistant", "the")
    question_tokens = (
        len(renderer.render(Conversation((question,)))) + 1
    )  # with the marks around the picture, less the word
    answer_tokens = len(renderer.render(Conversation((question, answer)))) - question_tokens
    path = folder / "pairs.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            picture = folder / f"{number}.png"
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(picture)
            texts = {name: sentences(ANSWER - answer_tokens - 1) for name in ("chosen", "rejected")}
            drawn = number % (count // sample) == 0
            while True:
                line = {"image": picture.name, "prompt": sentences(TEXT - question_tokens), **texts}
                comparison = read_row(line, "", lambda name: str(folder / name))
                if is_sampled(comparison, sample / count) == drawn:
                    break
            file.write(json.dumps(line) + "\n")
    return path


def operations(model: RewardModel, run: Callable[[], Any]) -> tuple[float, int, int]:
    """Return the operations, tokens of the language model and images of the vision tower that `run` computes."""
    parts: list[tuple[float, int, int]] = []

    def count(model: Any, args: Any, inputs: dict[str, Any]) -> None:
        work = flops.of_shared(model.config, inputs)
        parts.append((work.forward, work.tokens, len(inputs["media"]["image"]["tokens"]) if inputs["media"] else 0))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    run()
    hook.remove()
    total, tokens, images = zip(*parts, strict=True)
    return sum(total), sum(tokens), sum(images)


def report(count: int) -> tuple[float, float, dict[str, float]]:
    """Return the seconds of a report of `count` scored pairs from their file, the peak memory in MB, and `filters`."""
    from vlmrm.evaluation.report import build_report

    with runs.workplace() as folder:
        scored(count, folder).to_parquet(folder / "results.scores.parquet", index=False)
        harness.memory()
        started = time.perf_counter()
        page = build_report([folder / "results.csv"], folder / "report")
        return time.perf_counter() - started, harness.peak_memory(), filters(page)


def filters(page: Path) -> dict[str, float]:
    """Return the seconds from an input to the listed pairs, in Chromium, by what was put in; none without Chromium."""
    if CHROMIUM is None:
        return {}
    seconds = {}
    with TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.resize(1280, 900)
        browser.open(page, "!document.getElementById('explorer').hidden")
        for name, value in FILTERS:
            milliseconds = browser.evaluate(
                f"((field) => {{ field.value = '{value}'; const started = performance.now();"
                "field.dispatchEvent(new Event('input', {bubbles: true})); document.body.offsetHeight;"
                f"return performance.now() - started; }})(document.getElementById('pairs-form').elements['{name}'])"
            )
            seconds[f"{name} {value}"] = milliseconds / 1000
    return seconds


def scored(count: int, folder: Path) -> pd.DataFrame:
    """Return the scores of a checkpoint, as a sweep writes them: long texts, 30 categories, all interventions."""
    rng = np.random.default_rng(0)
    sampled = rng.random(count) < SAMPLE / count
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
        "cluster": [f"prompt-{i}" for i in prompts],
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
        for name, intervention in INTERVENTIONS.items():
            scores = sign * rng.normal(0.2, 1, count)
            columns[f"{name}_{side}"] = np.where(sampled | (not intervention.sampled), scores, np.nan)
    return pd.DataFrame(columns)


if __name__ == "__main__":
    harness.main("evaluation", measure, __doc__)
