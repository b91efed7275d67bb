"""Frames of scored pairs made up for the tests: what a sweep would write, with pictures that can be opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image, ImageDraw

from vlmrm.evaluation.results import table_figures
from vlmrm.evaluation.schema import SCHEMA_VERSION
from vlmrm.measures.analysis import analyse

CATEGORIES = ["chart", "counting", "document", "ocr", "scene"]


def scored(
    count: int = 400,
    *,
    skill: float = 1.5,
    looks: float = 1.0,
    folder: Path | None = None,
    model: str = "outputs/mine",
    step: int = 100,
    seed: int = 0,
) -> pd.DataFrame:
    """`count` pairs with margins around `skill`, of which greyed images take away the share `looks`.

    Frames of equal `seed` and `count` have the same pairs. Every eighth prompt has a ranked list of three answers.
    """
    data, scores = np.random.default_rng(seed), np.random.default_rng([seed, step])
    paths = [str(picture(folder, number)) for number in range(24)] if folder else []
    prompts = np.arange(count) // 3
    ranked = prompts % 8 == 0  # the three pairs of a list: 0 > 1, 0 > 2, 1 > 2
    number = np.arange(count) % 3
    branch = [(0, 1), (0, 2), (1, 2)]
    base = scores.normal(0, 1, count)
    noise = scores.normal(0, 1.6, count)
    margin = skill * data.lognormal(0, 0.5, count) + noise
    greyed = (1 - looks) * margin + scores.normal(0, 0.4, count)
    chosen_length, rejected_length = data.integers(20, 400, count), data.integers(20, 300, count)
    rows = pd.DataFrame(
        {
            "model": model,
            "checkpoint": f"checkpoint-{step}",
            "step": float(step),
            "comparison_id": [
                f"list-{p}" if r else f"row-{i}" for i, (p, r) in enumerate(zip(prompts, ranked, strict=True))
            ],
            "pair": np.where(ranked, number, 0),
            "cluster": [f"prompt-{p}" for p in prompts],
            "category": [CATEGORIES[p % 5] for p in prompts],
            "by/language": [("en", "de")[p % 2] for p in prompts],
            "chosen_branch": [branch[n][0] if r else 0 for n, r in zip(number, ranked, strict=True)],
            "rejected_branch": [branch[n][1] if r else 1 for n, r in zip(number, ranked, strict=True)],
            "tie": data.random(count) < 0.03,
            "weight": 1.0,
            "margin_label": np.nan,
            "chosen_score": base + margin / 2,
            "rejected_score": base - margin / 2,
            "chosen_length": chosen_length,
            "rejected_length": rejected_length,
            "chosen_pixels": 0,
            "rejected_pixels": 0,
            "images": 1,
            "pixels": 640 * 420,
            "blank_image_chosen": greyed,
            "blank_image_rejected": 0.0,
            "swapped_image_chosen": greyed - 0.3 * looks,
            "swapped_image_rejected": 0.0,
            "swapped_prompt_chosen": scores.normal(0.1, 1, count),
            "swapped_prompt_rejected": 0.0,
            "response_only_chosen": scores.normal(0.2, 1, count),
            "response_only_rejected": 0.0,
            "chosen_text": [
                f"There are {p % 7} red dots in the picture. " + "They lie in a row. " * (p % 30) for p in prompts
            ],
            "rejected_text": [f"I count {p % 7 + 1} of them." for p in prompts],
            "prompt_text": [f"How many red dots are there in picture {p}?" for p in prompts],
            "image_paths": [[paths[p % 24]] if paths else [] for p in prompts],
        }
    )
    # A list gives each of its answers one score.
    for start in np.flatnonzero(ranked & (number == 0) & (np.arange(count) + 2 < count)):
        best, middle, worst = base[start] + margin[start], base[start], base[start] - margin[start + 1]
        rows.loc[[start, start + 1], "chosen_score"] = best
        rows.loc[[start, start + 2], ["rejected_score", "chosen_score"]] = [[middle, best], [worst, middle]]
        rows.loc[start + 1, "rejected_score"] = worst
    rows["chosen_rating"] = 2.0 - rows["chosen_branch"]
    rows["rejected_rating"] = 2.0 - rows["rejected_branch"]
    return rows


def picture(folder: Path, number: int) -> Path:
    """A PNG of red dots on a colour, wide or tall."""
    folder.mkdir(parents=True, exist_ok=True)
    size = (640, 420) if number % 3 else (360, 520)
    image = Image.new("RGB", size, ((37 * number) % 200, 120, 160))
    draw = ImageDraw.Draw(image)
    for dot in range(number % 7):
        draw.ellipse((30 + 45 * dot, 60, 66 + 45 * dot, 96), fill=(220, 30, 30))
    path = folder / f"{number}.png"
    image.save(path)
    return path


def results_of(frame: pd.DataFrame) -> Any:
    """What a sweep's details would hold of the one checkpoint of `frame`."""
    statistics: Any = analyse(frame)
    model, checkpoint = (str(frame[name].iloc[0]) for name in ("model", "checkpoint"))
    provenance = {"date": "2026-11-21T03:00:00Z", "git_commit": None, "versions": {"torch": "2.15.0"}}
    provenance |= {"data": "0123abcd", "weights": "89abcdef", "device": "cpu", "processes": 2, "dtype": "float32"}
    provenance |= {"attention": "shared_prefix", "chat_template_sha256": "4567ef"}
    provenance["checkpoint"] = {"base_model": "Qwen/Qwen2.5-VL-3B-Instruct", "base_revision": "main"}
    row = {"model": model, "checkpoint": checkpoint, "path": f"{model}/{checkpoint}", "error": None}
    row |= table_figures(statistics["overall"]) | {"dropped_rows": 0, "seconds": 1.5, "statistics": statistics}
    row["provenance"] = provenance
    settings = {"data": provenance["data"]}
    return {"schema_version": SCHEMA_VERSION, "settings": settings, "leakage": None, "best": None, "results": [row]}
