"""Frames of scored pairs, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def pair_frame(margins, **columns: Any) -> pd.DataFrame:
    """One comparison of two branches a margin, each about a prompt of its own; `columns` come on top."""
    margins = np.asarray(margins, dtype=np.float64)
    names = [f"row{i}" for i in range(len(margins))]
    plain = {
        "model": "model",
        "checkpoint": "checkpoint-1",
        "comparison_id": names,
        "pair": 0,
        "cluster": [f"prompt-{name}" for name in names],
        "chosen_branch": 0,
        "rejected_branch": 1,
        "chosen_rating": 1.0,
        "rejected_rating": 0.0,
        "tie": False,
        "weight": 1.0,
        "chosen_score": margins,
        "rejected_score": 0.0,
    }
    return pd.DataFrame({**plain, **columns})


def list_frame(scores: list[list[float]], ratings: list[list[float]]) -> pd.DataFrame:
    """Every pair of every ranked list, the better-rated first, as comparisons make them."""
    rows = []
    for number, (s, r) in enumerate(zip(scores, ratings, strict=True)):
        pairs = [(i, j) if r[i] >= r[j] else (j, i) for i in range(len(s)) for j in range(i + 1, len(s))]
        for pair, (i, j) in enumerate(pairs):
            row = {"comparison_id": f"list{number}", "cluster": f"prompt{number}", "pair": pair, "tie": r[i] == r[j]}
            row |= {"chosen_branch": i, "chosen_rating": r[i], "chosen_score": s[i]}
            row |= {"rejected_branch": j, "rejected_rating": r[j], "rejected_score": s[j]}
            rows.append({**row, "weight": 1.0})
    return pd.DataFrame(rows)
