"""`vlmrm report --wandb` puts the figures, the table and the page into a run, without a network too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.evaluation.scored import scored
from vlmrm import cli
from vlmrm.errors import ConfigError
from vlmrm.evaluation.report import log_report

wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture
def results(tmp_path, monkeypatch) -> Iterator[Path]:
    """A sweep's table, and its pairs beside it."""
    frame = scored(60)
    frame.to_parquet(tmp_path / "mine.scores.parquet")
    (tmp_path / "mine.csv").write_text(
        "checkpoint,preference_accuracy,error\ncheckpoint-50,,broken\ncheckpoint-100,0.75,\n"
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    for kind in ("", "CACHE_", "CONFIG_", "DATA_"):
        monkeypatch.setenv(f"WANDB_{kind}DIR", str(tmp_path / "runs"))
    wandb.teardown()  # it reads the environment once
    yield tmp_path / "mine.csv"
    wandb.teardown()


def test_a_run_has_figures_and_table_and_page(results, tmp_path, capsys):
    output = tmp_path / "report"
    output.joinpath("plots").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(output / "plots/of_an_earlier_report.png")
    cli.report(results, output=output, wandb="rewards")
    drawn = {path.stem for path in output.glob("plots/*.svg")}
    [run] = tmp_path.glob("runs/wandb/offline-run-*")
    assert capsys.readouterr().out.endswith(f"in wandb it is {run}\n")
    media = run / "files/media"
    logged = {path.name.rsplit("_", 2)[0] for path in media.glob("images/report/*.png")}
    assert drawn and logged == drawn
    [page] = media.glob("html/report/page_*.html")
    assert page.read_bytes() == (output / "report.html").read_bytes()
    assert page.read_bytes() in [path.read_bytes() for path in tmp_path.glob("runs/artifacts/staging/*")]
    [table] = media.glob("table/report/checkpoints_*.table.json")
    assert json.loads(table.read_text())["data"] == [["checkpoint-50", None, "broken"], ["checkpoint-100", 0.75, None]]


def test_what_is_missing_is_said_in_a_sentence(results, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    page.write_text("<p>short</p>")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs wandb: pip install"):
        log_report(page, [results], "rewards")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    results.unlink()
    with pytest.raises(ConfigError, match=r"there is no .*mine\.csv"):
        log_report(page, [tmp_path / "mine.scores.parquet"], "rewards")
