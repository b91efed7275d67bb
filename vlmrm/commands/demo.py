"""`vlmrm demo`: training, evaluation and scoring without a GPU, downloads or your own data.

A tiny model with random weights learns from handwritten digits; its checkpoints are evaluated and the best one scores.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vlmrm.conversation import Image, Message
from vlmrm.data.digits import QUESTION, write_digits
from vlmrm.errors import ConfigError
from vlmrm.evaluation.report import build_report, summary
from vlmrm.evaluation.schema import load_results
from vlmrm.evaluation.sweep import SweepResult, sweep
from vlmrm.files import make_folder, write_json
from vlmrm.logs import say
from vlmrm.modeling import make_tiny
from vlmrm.scoring import load_scorer
from vlmrm.training import train

CONFIGS = Path(__file__).parents[1] / "demo_configs"
MARKER = ".vlmrm_demo"  # marks a folder of the demo, which a new demo may replace
OUTPUTS = ("tiny_model", "data", "training", "evaluation_results.csv", "evaluation_results.json", "report")


def run_demo(output: Path) -> dict[str, Any]:
    """Train, evaluate and score in `output`, replacing an earlier demo; return the content of summary.json."""
    make_folder(output)
    if not (output / MARKER).exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty and was not made by this demo: name a new folder as --output.")
    (output / MARKER).touch()
    started = time.perf_counter()
    torch.set_num_threads(1)  # the tensors are so small that more threads would be slower
    for name in OUTPUTS:
        path = output / name
        if path.exists():
            say(f"replacing {path} of an earlier demo")
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    model = make_tiny(output / "tiny_model")
    files = write_digits(output / "data")
    say(f"made a tiny Qwen2.5-VL in {model} and preferences about handwritten digits in {output / 'data'}")

    training_started = time.perf_counter()
    train(training_words(output, model, files))
    train_seconds = time.perf_counter() - training_started

    result = sweep(evaluation_words(output, files))
    best = load_results(result.csv.with_suffix(".json"))["best"]
    assert result.best is not None and best is not None
    page = build_report([result.scores], output / "report", "What the demo's model learned")
    scores = score_one(Path(best["path"]), files["eval_answers"])
    figures = {
        "train_seconds": round(train_seconds, 1),
        "wall_seconds": round(time.perf_counter() - started, 1),
        "preference_accuracy": result.best["preference_accuracy"],
        # What the report begins with: of four checkpoints the best is also a lucky one.
        "accuracy_without_luck": best["without_luck"],
        "blank_image_accuracy": result.best["blank_image_accuracy"],
        "sample_count": result.best["sample_count"],
        "best_checkpoint": best["path"],
        "scores": scores,
    }
    write_json(output / "summary.json", figures)
    print_summary(output, result, figures, page)
    return figures


def training_words(output: Path, model: Path, files: Mapping[str, Path]) -> list[str]:
    return [
        str(CONFIGS / "demo.yaml"),
        *("--model_name_or_path", str(model)),
        *("--dataset_path", *(str(path) for name, path in files.items() if name.startswith("train"))),
        *("--eval_dataset_path", *(str(path) for name, path in files.items() if name.startswith("eval"))),
        *("--output_dir", str(output / "training")),
    ]


def evaluation_words(output: Path, files: Mapping[str, Path]) -> list[str]:
    return [
        str(CONFIGS / "demo_eval.yaml"),
        *("--model_dirs", str(output / "training")),
        *("--dataset_path", *(str(path) for name, path in files.items() if name.startswith("eval"))),
        *("--output_file", str(output / "evaluation_results.csv")),
    ]


def score_one(checkpoint: Path, rows: Path) -> dict[str, Any]:
    """Score both answers about the first held-out image."""
    row = json.loads(rows.read_text(encoding="utf-8").splitlines()[0])
    image = str(rows.parent / row["image"])
    question = Message.of("user", Image(image), QUESTION)
    answers = [row["chosen"], row["rejected"]]
    [scores] = load_scorer(checkpoint).score_groups([(question, answers)])
    return {"image": image, "prompt": QUESTION, **dict(zip(answers, scores, strict=True))}


def print_summary(output: Path, result: SweepResult, figures: Mapping[str, Any], page: Path) -> None:
    image, _, right, wrong = figures["scores"].items()
    say(
        f"""
What happened: in {figures["train_seconds"]:.0f} s a vision-language model with random weights learned which of two
answers, or of two pictures, is preferred.

{summary([result.scores])}

Asked "{QUESTION}" about {image[1]}, it scores

    {right[1]:+.3f}  {right[0]}
    {wrong[1]:+.3f}  {wrong[0]}

  report            {page}
  every checkpoint  {result.csv}
  these numbers     {output / "summary.json"}

Next:
  vlmrm score --model {figures["best_checkpoint"]} --image {image[1]} \\
      --prompt "{QUESTION}" --response "{right[0]}" --response "{wrong[0]}"
"""
    )
