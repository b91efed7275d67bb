"""Scored comparisons as a table: one row a pair, with all that the statistics and the report ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pandas as pd

from vlmrm.data.media import image_size, local_path, media_key
from vlmrm.data.schema import Branch, Comparison, Messages, media_references, text_of
from vlmrm.errors import ConfigError, RowError
from vlmrm.evaluation.ablations import ABLATIONS
from vlmrm.evaluation.evaluate import Evaluation

TEXT = 2000  # characters kept of a text, for the report


def scored_frame(
    result: Evaluation, *, model: str = "", checkpoint: str = "", step: int | None = None, group_by: Sequence[str] = ()
) -> pd.DataFrame:
    """One row for each pair of each comparison, in order.

    Columns: model, checkpoint, step; comparison_id, pair, prompt_id (what was asked, the cluster of the bootstrap),
    category, by/NAME for each of `group_by`; chosen_ and rejected_ branch, rating, score, length (characters), pixels,
    text; tie, weight, margin_label, agreement, images; prompt_text, image_paths; and for each ablation its _chosen and
    _rejected score, NaN where it means nothing.

    Raises:
        ConfigError: when no row has a column named in `group_by`.
    """
    for name in group_by:
        if not any(name in comparison.columns for comparison in result.comparisons):
            raise ConfigError(
                f"group_by names {name}, which no row of the evaluation data has: check the column's name."
            )
    rows: list[dict[str, Any]] = []
    for comparison, scores, ablated in zip(result.comparisons, result.scores, result.ablated, strict=True):
        shared = {"model": model, "checkpoint": checkpoint, "step": step, **_of_comparison(comparison, group_by)}
        branches = [_of_branch(branch) for branch in comparison.branches]
        for number, (chosen, rejected, tie) in enumerate(comparison.pairs()):
            row = {**shared, "pair": number, "tie": tie}
            for side, i in (("chosen", chosen), ("rejected", rejected)):
                row |= {f"{side}_branch": i, f"{side}_score": scores[i]}
                row |= {f"{side}_{name}": value for name, value in branches[i].items()}
                row |= {f"{name}_{side}": ablated[name][i] if name in ablated else None for name in ABLATIONS}
            rows.append(row)
    frame = pd.DataFrame(rows)
    numbers = [f"{name}_{side}" for name in ABLATIONS for side in ("chosen", "rejected")]
    for name in ("step", "margin_label", "agreement", *numbers):
        if name in frame:
            frame[name] = frame[name].astype("float64")
    return frame


def _of_comparison(comparison: Comparison, group_by: Sequence[str]) -> dict[str, Any]:
    images = [r for r in media_references(comparison.prompt) if not isinstance(r, (list, tuple))]
    return {
        "comparison_id": comparison.id,
        "prompt_id": _prompt_id(comparison),
        "category": comparison.category,
        **{f"by/{name}": comparison.columns.get(name) for name in group_by},
        "weight": comparison.weight,
        "margin_label": comparison.margin,
        "agreement": comparison.columns.get("agreement"),
        "images": len(images),
        "prompt_text": text_of(comparison.prompt)[:TEXT],
        "image_paths": _local_paths(images),
    }


def _of_branch(branch: Branch) -> dict[str, Any]:
    images = [r for r in media_references(branch.messages) if not isinstance(r, (list, tuple))]
    text = text_of(branch.messages)
    return {
        "rating": float(branch.rating),
        "length": len(text),
        "pixels": sum(map(_pixels, images)),
        "text": text[:TEXT],
        "image_paths": _local_paths(images),
    }


def _prompt_id(comparison: Comparison) -> str:
    asked: list[Messages] = [comparison.prompt] if comparison.prompt else [b.messages for b in comparison.branches]
    digest = blake2b(digest_size=8)
    for messages in asked:
        digest.update(text_of(messages).encode())
        for reference in media_references(messages):
            # A file by its name and folder: elsewhere on the disk it is the same image.
            named = isinstance(reference, str) and not reference.startswith("data:")
            digest.update(("/".join(Path(reference).parts[-2:]) if named else media_key(reference)).encode())
    return digest.hexdigest()


def _local_paths(references: Sequence[Any]) -> list[str]:
    paths = [local_path(reference) for reference in references if isinstance(reference, str)]
    return [path for path in paths if not path.startswith("data:")]


def _pixels(reference: Any) -> int:
    return _pixels_of_file(reference) if isinstance(reference, str) and Path(reference).exists() else _area(reference)


@cache
def _pixels_of_file(path: str) -> int:
    return _area(path)


def _area(reference: Any) -> int:
    try:
        width, height = image_size(reference)
    except RowError:  # a video
        return 0
    return width * height
