"""The model card: the hub reads it, its snippet runs, and the checkpoint stays whole."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from tests.evaluation.scored import results_of, scored
from vlmrm import cli
from vlmrm.errors import CheckpointError, ConfigError
from vlmrm.evaluation.report import build_report, summary, write_card
from vlmrm.evaluation.schema import dump_results
from vlmrm.measures.analysis import figures
from vlmrm.modeling import verify_complete, write_complete


@pytest.fixture
def checkpoint(tmp_path, tiny_reward_model):
    """A trained checkpoint of which a sweep has results."""
    folder = tmp_path / "outputs/mine/checkpoint-100"
    shutil.copytree(tiny_reward_model, folder)
    info = json.loads((folder / "reward_model.json").read_text())
    info |= {"reward_mean": 0.25, "reward_std": 1.5}
    info["provenance"] = {"base_model": "Qwen/Qwen2.5-VL-3B-Instruct", "seed": 7, "versions": {"trl": "1.2.3"}}
    (folder / "reward_model.json").write_text(json.dumps(info))
    write_complete(folder, world_size=2, step=100)
    return folder


def test_the_hub_reads_the_results(checkpoint):
    frame = scored(90)
    data = ModelCard.load(write_card(checkpoint, frame, data="me/pairs")).data
    [result] = data.eval_results
    expected = (frame["chosen_score"] > frame["rejected_score"])[~frame["tie"]].mean()
    assert result.metric_value == pytest.approx(expected, abs=1e-6)
    assert (result.dataset_name, data.model_name, data.base_model) == (
        "me/pairs",
        "mine-checkpoint-100",
        "Qwen/Qwen2.5-VL-3B-Instruct",
    )


def test_the_card_says_how_good_and_where_from(checkpoint):
    frame = scored(90)
    text = write_card(checkpoint, frame, data="pairs | of mine").read_text()
    found = figures(frame)
    for name, shown in (("preference_accuracy", "all pairs"), ("blank_image_accuracy", "images painted grey")):
        one = found[name]
        assert f"| {shown} | {one['value']:.1%} | {one['low']:.1%} to {one['high']:.1%} |" in text
    for line in ("| seed | 7 |", "| trl | 1.2.3 |", "0.2500", "1.5000", "pairs \\| of mine"):
        assert line in text
    assert "/outputs/" not in text  # no path of this machine


def test_page_card_and_terminal_say_the_same(checkpoint, tmp_path):
    frame = scored(300)
    said = re.findall(r"^  (.*?\?) +(yes|no|cannot tell) +(.*?)(?: \((.*)\))?$", summary([frame]), re.MULTILINE)
    card = write_card(checkpoint, frame, data="pairs").read_text()
    page = build_report([frame], tmp_path).read_text()
    assert len(said) == 4
    for question, answer, number, spread in said:
        assert f"| {question} | {answer} | {number} | {spread} |" in card
        assert re.search(
            rf"{re.escape(question)}</dt>\s*<dd[^>]*>{answer}</dd><dd><b>{number}</b> {re.escape(spread)}<", page
        )


def test_the_snippet_runs_and_the_checkpoint_stays_whole(checkpoint, monkeypatch):
    (checkpoint / "README.md").write_text("written by hand")
    write_complete(checkpoint, world_size=2, step=100)
    with pytest.raises(ConfigError, match=r"README\.md was not written by this command"):
        write_card(checkpoint, scored(90), data="pairs")
    (checkpoint / "README.md").write_text("[More Information Needed]")  # PEFT's
    write_complete(checkpoint, world_size=2, step=100)
    write_card(checkpoint, scored(90), data="pairs")
    text = write_card(checkpoint, scored(90), data="pairs").read_text()
    manifest = verify_complete(checkpoint)
    assert (manifest["world_size"], manifest["step"]) == (2, 100) and "README.md" in manifest["files"]
    monkeypatch.chdir(checkpoint)
    Image.new("RGB", (56, 56), "orange").save("cat.jpg")
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict = {}
    exec(program, namespace)
    assert len(namespace["scores"]) == 2


def test_results_of_others_make_no_card(checkpoint):
    for other in (scored(90, step=200), scored(90, model="outputs/other")):
        with pytest.raises(ConfigError, match="0 checkpoints named mine/checkpoint-100"):
            write_card(checkpoint, other, data="pairs")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        write_card(checkpoint, scored(90), data="pairs")


def test_the_command_writes_the_card_from_sweep_results(checkpoint, tmp_path, capsys):
    scored(90).to_parquet(tmp_path / "mine.scores.parquet")
    words = ["card", str(checkpoint), str(tmp_path / "mine.csv"), "--data", "pairs"]
    cli.app(words, exit_on_error=False, result_action="return_value")
    assert str(checkpoint / "README.md") in capsys.readouterr().out
    (tmp_path / "mine.json").write_text(dump_results(results_of(scored(90))))
    text = write_card(checkpoint, tmp_path / "mine.csv", data="pairs").read_text()
    assert "2026-11-21 on cpu in float32" in text and "`0123abcd`" in text
