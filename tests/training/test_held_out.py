"""The rows that a training holds out are in its folder, and evaluations read them like any other data."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from tests.runs import colour_pairs
from vlmrm.data.arguments import DataArguments
from vlmrm.data.canonical import HELD_OUT, canonical
from vlmrm.data.comparisons import load_comparisons, load_train_and_eval
from vlmrm.evaluation.sweep import sweep

KEYS = {"eval_fraction": 0.25, "split_seed": 3}


def test_held_out_rows_can_be_evaluated_from_anywhere(train_here, tmp_path, monkeypatch):
    data = colour_pairs(tmp_path / "p", 24, prompt=[f"Which colour is square {i}?" for i in range(24)])
    train_here(data, max_steps=1, **KEYS)
    _, held_out = load_train_and_eval(DataArguments(dataset_path=[str(data)], **KEYS))
    expected = [canonical(row["comparison"]) for row in held_out]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file = str(tmp_path / "out" / HELD_OUT)
    rows = load_comparisons([file], arguments=DataArguments())
    assert [canonical(row["comparison"]) for row in rows] == expected
    sweep(["--model_dirs", str(tmp_path / "out/final"), "--dataset_path", file, "--interventions", "none"])
    scored = pd.read_parquet(next(Path.cwd().rglob("*.scores.parquet")))
    assert set(scored["comparison_id"]) == {row.id for row in expected}
