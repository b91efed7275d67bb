"""A laboratory of named outputs: procedural pictures whose true reward is known, and one tiny model for all of it.

A picture is a disc: its size, its hue, and the light around it. One training has ratings of single pictures in three
dimensions (with noise, three in ten missing), pairs that a criterion in the prompt decides, solutions of three steps
that describe a picture rightly or wrongly, and episodes in which the disc grows, with rewinds. Figures are on new
ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from benchmarks import harness, runs
from benchmarks.harness import Row, row
from vlmrm.conversation import Comparison
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.measures.outputs import TOTAL, Reference, judged_outputs, output_figures, scale_of
from vlmrm.measures.statistics import CalibrationError
from vlmrm.modeling import load_for_training, load_processor, make_tiny
from vlmrm.outputs import Outputs
from vlmrm.scoring import load_scorer
from vlmrm.scoring.transforms import transform_named
from vlmrm.training import train
from vlmrm.training.losses import Objective, judged_weights

DIMENSIONS = ("light", "size", "hue")
OUTPUTS = {
    "better": "preference",
    **dict.fromkeys(DIMENSIONS, "rating 1-5"),
    "right": "correctness",
    "done": "progress",
}
TRUE = {"light": ("dark", "bright"), "size": ("small", "large"), "hue": ("red", "yellow")}
CRITERIA = {"light": "The brighter picture is better.", "size": "The larger disc is better."}
STEPS, FRAMES, STEPS_OF_TRAINING, OF_CRITIQUES = 3, 5, 1200, 100
SINGLES = 2000  # pictures that are rated anew: a correlation of 2000 is known to 0.022
NOISE, MISSING = 0.25, 0.3  # of ratings: a standard deviation of raters, and the share that is left out

Rows = list[dict[str, Any]]


def picture(file: Path, light: float, size: float, hue: float) -> str:
    image = Image.new("RGB", (56, 56), (int(40 + 160 * light),) * 3)
    radius = 4 + 14 * size
    box = (28 - radius, 28 - radius, 28 + radius, 28 + radius)
    ImageDraw.Draw(image).ellipse(box, fill=(255, int(255 * hue), 0))
    image.save(file)
    return file.name


def write_data(folder: Path, rng: np.random.Generator, count: int, singles: int, noise: float) -> dict[str, Path]:
    """Write `count` rows of each kind, of ratings `singles`, and return their files."""
    folder.mkdir(parents=True)
    number = itertools.count()

    def new(**known: float) -> tuple[str, dict[str, float]]:
        values = {name: known.get(name, float(rng.random())) for name in DIMENSIONS}
        return picture(folder / f"{next(number)}.png", **values), values

    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "ratings": lambda: _rated(new, rng, noise),
        "pairs": lambda: _pair(new, rng),
        "steps": lambda: _solution(new, rng),
        "episodes": lambda: _episode(new, rng),
    }
    files = {}
    for name, make in kinds.items():
        files[name] = folder / f"{name}.jsonl"
        rows: Rows = [make() for _ in range(singles if name == "ratings" else count)]
        files[name].write_text("".join(json.dumps(one) + "\n" for one in rows))
    return files


def _rated(new: Callable[..., Any], rng: np.random.Generator, noise: float) -> dict[str, Any]:
    image, values = new()
    rated = {name: float(np.clip(1 + 4 * value + rng.normal(0, noise), 1, 5)) for name, value in values.items()}
    kept = {name: it for name, it in rated.items() if not noise or rng.random() >= MISSING or name == "light"}
    return {"prompt": "Draw a disc.", "response_image": image, **kept, "truth": [*values.values()]}


def _pair(new: Callable[..., Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return two pictures of which one is brighter and the other has the larger disc; the criterion decides."""
    low, high = sorted(rng.random(2))
    small, large = sorted(rng.random(2))
    (bright, _), (big, _) = new(light=high, size=small), new(light=low, size=large)
    name = str(rng.choice([*CRITERIA]))
    chosen, rejected = (bright, big) if name == "light" else (big, bright)
    of = {bright: (high, small), big: (low, large)}
    critique = [f"{round(9 * light)} bright, {round(9 * size)} large." for light, size in (of[chosen], of[rejected])]
    return {"prompt": CRITERIA[name], "chosen_image": chosen, "rejected_image": rejected, "critique": critique}


def _solution(new: Callable[..., Any], rng: np.random.Generator) -> dict[str, Any]:
    image, values = new(**{name: float(rng.choice([0.15, 0.85]) + rng.uniform(-0.1, 0.1)) for name in DIMENSIONS})
    right = rng.random(STEPS) < 0.7
    texts = [
        f"It is {TRUE[name][int((values[name] > 0.5) == bool(ok))]}."
        for name, ok in zip(rng.permutation([*TRUE]), right, strict=True)
    ]
    return {"prompt": "Describe it.", "images": [image], "completions": texts, "labels": right.tolist()}


def _episode(new: Callable[..., Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return an episode: the disc's size is the progress, which goes back as often as on."""
    sizes = rng.random(FRAMES).round(2).tolist()
    light, hue = rng.random(2)
    frames = [new(size=size, light=light, hue=hue)[0] for size in sizes]
    return {"task": "Make the disc large.", "frames": frames, "progress": sizes}


def one_seed(folder: Path, seed: int, quick: bool) -> dict[str, float]:
    """Train the model of a seed, and return its figures."""
    count = 24 if quick else 700
    rng = np.random.default_rng(seed)
    trained, held_out = (
        write_data(folder / it, rng, n, singles, noise)
        for it, n, singles, noise in (
            ("train", count, count, NOISE),
            ("new", 24 if quick else 300, 24 if quick else SINGLES, 0.0),
        )
    )
    base = make_tiny(folder / "base")

    def trained_on(data: Sequence[Path], steps: int, **keys: Any) -> Any:
        steps = 4 if quick else steps
        keys |= {"max_steps": steps, "warmup_steps": steps // 12, "seed": seed}
        keys |= {"per_device_train_batch_size": 16, "learning_rate": 1e-3, "lr_scheduler_type": "cosine"}
        result = train(runs.training_words(base, data, folder / f"out{len([*folder.iterdir()])}", **keys))
        return load_scorer(result.model_dir, dtype="float32")

    kinds = [f"{name}={kind}" for name, kind in OUTPUTS.items()]
    scorer = trained_on([*trained.values()], STEPS_OF_TRAINING, outputs=kinds)
    scored = {name: Scored.of(scorer, file) for name, file in held_out.items()}
    alone, beside = (
        pair_accuracy(trained_on([trained["pairs"]], OF_CRITIQUES, critique_weight=weight), held_out["pairs"])
        for weight in (0.0, 0.3)
    )
    ratings = scored["ratings"].figures
    return {
        **{f"rank_{name}": ratings[name]["rank"] for name in DIMENSIONS},
        **leak(scored["ratings"]),
        "leak_of_labels": leak_of_labels(trained["ratings"]),
        "auc": scored["steps"].figures["right"]["auc"],
        "order": scored["episodes"].figures["done"]["order"],
        "criterion": scored["pairs"].figures["better"]["accuracy"],
        **calibration(scored["pairs"], scored["ratings"]),
        "gain": beside - alone,
    }


def pair_accuracy(scorer: Any, file: Path) -> float:
    rows = [one["comparison"] for one in load_comparisons([str(file)], arguments=DataArguments())]
    scores = iter(scorer.score([it for row in rows for it in row.conversations()]))
    return statistics.mean(float(better > worse) for better, worse in zip(scores, scores, strict=True))


class Scored:
    """Comparisons with the values of each output of their answers, and the figures of both."""

    def __init__(self, comparisons: Sequence[Comparison], values: Sequence[Mapping[str, Sequence[float]]]):
        self.comparisons, self.values = comparisons, values
        outputs = Outputs.parse(OUTPUTS)
        self.figures = output_figures(outputs, judged_outputs(outputs, comparisons, values))

    @classmethod
    def of(cls, scorer: Any, file: Path) -> Scored:
        rows = load_comparisons([str(file)], arguments=DataArguments(outputs=OUTPUTS))
        comparisons = [one["comparison"] for one in rows]
        named = iter(scorer.score_outputs([it for row in comparisons for it in row.conversations()]))
        of_rows = [[*itertools.islice(named, len(row.answers))] for row in comparisons]
        return cls(comparisons, [{name: [it[name] for it in of] for name in OUTPUTS} for of in of_rows])


def leak(scored: Scored) -> dict[str, float]:
    """Return the largest correlation of an output with another dimension, without what its own explains.

    It is a share of what is left, which is little where an output is good. Beside it are the largest change of an
    output, as a share of its range, while the other goes from end to end, and the mean correlation where pictures are
    mixed, which so many of them cannot tell from none.
    """
    truth = {
        name: np.array([next(j.values[0] for j in it.judgements if j.dimension == name) for it in scored.comparisons])
        for name in DIMENSIONS
    }
    rests = []
    for name, other in itertools.permutations(DIMENSIONS, 2):
        own = np.stack([np.ones_like(truth[name]), truth[name]], 1)
        of_both = np.stack([[values[name][0] for values in scored.values], truth[other]], 1)
        rests.append((of_both - own @ np.linalg.lstsq(own, of_both, rcond=None)[0]).T)

    def largest(order: np.ndarray) -> float:
        return max(abs(float(np.corrcoef(output[order], other)[0, 1])) for output, other in rests)

    count, rng = len(scored.values), np.random.default_rng(0)
    return {
        "leak": largest(np.arange(count)),
        "leak_of_range": max(abs(float(output @ other / (other @ other))) for output, other in rests),
        "leak_floor": statistics.mean(largest(rng.permutation(count)) for _ in range(100)),
    }


def leak_of_labels(file: Path) -> float:
    """Return the largest change of a rating, as a share of its range, that a regression on the truth gives another.

    It is what the noise of the ratings leaves to an estimate without bias.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = []
    for name in DIMENSIONS:
        rated = [it for it in rows if name in it]
        truth = np.array([[1.0, *it["truth"]] for it in rated])
        _, *slopes = np.linalg.lstsq(truth, np.array([it[name] for it in rated]), rcond=None)[0]
        found += [abs(slope) / 4 for other, slope in zip(DIMENSIONS, slopes, strict=True) if other != name]
    return float(max(found))


def calibration(pairs: Scored, singles: Scored) -> dict[str, float]:
    """Return the error of probabilities and of percentiles, each on a half that did not set the scale.

    Where no pair of a half is wrong there is no temperature, and so no probability.
    """
    margins = np.array([values["better"][0] - values["better"][1] for values in pairs.values])
    scores = np.array([values["better"][0] for values in singles.values])
    scale = scale_of({TOTAL: Reference(scores[::2], margins[::2])})
    temperature = scale["reward_temperature"]
    ece = {} if temperature is None else {"ece": CalibrationError(margins[1::2] / temperature).influence().value}
    percentile = transform_named("percentile", scale)
    shares = np.sort(percentile(scores[1::2]))
    uniform = (np.arange(len(shares)) + 0.5) / len(shares)
    return {**ece, "percentile": float(np.abs(shares - uniform).mean())}


def step_cost(folder: Path, rounds: int) -> Row:
    """Return the time of a training step with eight outputs over that with one, on the same pairs."""
    base, data = make_tiny(folder / "cost"), runs.picture_pairs(folder / "pairs", 8, 8, size=(112, 112))
    eight = Outputs.parse({"first": "preference", **{f"more{i}": "rating 1-5" for i in range(7)}})

    def steps(outputs: Outputs) -> Callable[[], Callable[[], Any]]:
        model = load_for_training(base, outputs=outputs, dtype=torch.float32, attn_implementation="sdpa").train()
        collator = runs.collator(model, load_processor(base))
        collator.outputs = outputs
        [part] = runs.batches(collator, data, 8)[0]["parts"]
        objective, totals = Objective(outputs=outputs), judged_weights(part["pairs"], len(outputs))

        def step() -> None:
            terms = objective(model(**part["inputs"][0]).logits, part["pairs"], totals)
            torch.stack(list(terms.values())).sum().backward()

        return lambda: step

    timings = harness.interleave({"eight": steps(eight), "one": steps(Outputs())}, rounds)
    return row("step_cost", **timings.ratio("eight", "one"), unit="x one output", at_most=1.1)


def measure(options: argparse.Namespace) -> list[Row]:
    seeds = range(1 if options.quick else options.seeds)
    with runs.workplace() as folder:
        found = []
        for seed in seeds:
            found.append(one_seed(folder / str(seed), seed, options.quick))
            sys.stderr.write(f"seed {seed}: {json.dumps(found[-1])}\n")
        cost = step_cost(folder, 2 if options.quick else 20)

    def line(case: str, values: Sequence[float], unit: str, **more: float) -> Row:
        spread = {"lowest": min(values), "highest": max(values), "seeds": len(values)}
        return row(case, statistics.mean(values), unit, **more, **spread)

    def of(name: str) -> list[float]:
        return [figures[name] for figures in found if name in figures]

    beside = {name: statistics.mean(of(f"leak_{name}")) for name in ("of_range", "floor", "of_labels")}
    ranks = [min(figures[f"rank_{name}"] for name in DIMENSIONS) for figures in found]
    return [
        line("ratings_rank", ranks, "Spearman, the least of three dimensions", at_least=0.95),
        line("dimensions_leak", of("leak"), "partial correlation, the largest of six", at_most=0.05, **beside),
        line("steps_auc", of("auc"), "AUC", at_least=0.95),
        line("progress_order", of("order"), "share of frames two by two", at_least=0.95),
        line("criterion_accuracy", of("criterion"), "share of pairs", at_least=0.9),
        line("critique_gain", of("gain"), "accuracy with critiques less without, at equal steps"),
        *([line("calibrated_ece", of("ece"), "ECE", at_most=0.03)] if of("ece") else []),
        line("percentile_error", of("percentile"), "mean distance", at_most=0.03),
        cost,
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="models that are trained, each on data of its own")


if __name__ == "__main__":
    harness.main("outputs", measure, __doc__, add_options)
