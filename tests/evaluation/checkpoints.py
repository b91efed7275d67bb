"""Checkpoints that score otherwise, and what the scorer says of a file's rows."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from vlmrm import load_scorer
from vlmrm.modeling import write_complete


def scale_head(folder: Path, factor: float, step: int) -> None:
    """Another checkpoint of the same training: its scores are `factor` times as large."""
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = weights["score.weight"] * factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_complete(folder, world_size=1, step=step)


def own_scores(checkpoint: Path, data: Path) -> list[list[float]]:
    """The scores of chosen and rejected of each row of a file."""
    groups = []
    for row in map(json.loads, data.read_text().splitlines()):
        image = {"type": "image", "image": data.parent / row["images"][0]}
        question = {"role": "user", "content": [image, {"type": "text", "text": row["prompt"]}]}
        groups.append(([question], [row["chosen"], row["rejected"]]))
    return load_scorer(checkpoint).score_groups(groups)
