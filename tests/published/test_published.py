"""`vlmrm import`: published layouts score by their authors' arithmetic, train further, and are never half read."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runs import SHORT, write_rows
from vlmrm import cli
from vlmrm.errors import CheckpointError, ConfigError, RowError
from vlmrm.export import export
from vlmrm.modeling import load_checkpoint, load_for_training
from vlmrm.modeling.published_import import import_reward
from vlmrm.modeling.published_layouts import LAYOUTS
from vlmrm.modeling.published_weights import weight_files
from vlmrm.scoring.loading import load_scorer
from vlmrm.scoring.scorer import LocalScorer
from vlmrm.training import train
from vlmrm.training.losses import gaussian

from .cases import CASES, SCORE, VALUE, Case, Published, picture, talk, tiny

BY_WHO = {case.who: case for case in CASES}
SKYWORK, SWIFT, EDIT = (BY_WHO[who] for who in ("Skywork-VL-Reward-7B", "ms-swift", "EditReward"))


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What is published, the folder of its import, and a scorer of that, each made once."""

    @cache
    def make(case: Case) -> tuple[Published, Path, Any]:
        folder = tmp_path_factory.mktemp(case.layout)
        published = case.write(folder)
        output = folder / "imported"
        import_reward(published.source, output, **published.options)
        return published, output, load_scorer(output, dtype="float32")

    return make


def distance(scorer: Any, published: Any) -> float:
    values = scorer.score_outputs(published.conversations)
    found = [scorer.score(published.conversations), *([of[name] for of in values] for name in published.outputs)]
    return (torch.tensor(found) - torch.stack([published.expected, *published.outputs.values()])).abs().max().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores_are_those_of_the_authors_arithmetic(made, case: Case):
    published, _, scorer = made(case)
    assert distance(scorer, published) < 1e-5
    assert published.expected.std() > 1e-2
    assert distance(LocalScorer(scorer.loaded, cache_bytes=2**26), published) < 1e-5  # and of prompts that are kept
    # The control: images at positions of their own are another score.
    if scorer.model.has_text_positions:
        del scorer.model.config.reward_positions
        assert distance(LocalScorer(scorer.loaded), published) > 1e-3
        scorer.model.config.reward_positions = "text"


def test_every_layout_is_tried():
    assert {case.layout for case in CASES} | {"robometer"} == {
        layout.name for layout in LAYOUTS
    }  # that with the robots


@pytest.mark.parametrize("batching", ["shared", "reference"])
def test_training_starts_from_the_trained_head(made, tmp_path, batching):
    """The first loss is that of the authors' scores, of each output, and weights of the head change."""
    published, folder, scorer = made(EDIT)
    paths = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, path in enumerate(paths):
        picture(448, 448, number).save(path)
    source, *edits = ([{"type": "image", "image": path}] for path in paths)
    answers = [[{"role": "assistant", "content": edit}] for edit in edits]
    prompt = {"role": "user", "content": [*source, published.conversations[0][0]["content"][1]]}
    row = {"prompt": [prompt], "chosen": answers[0], "rejected": answers[1], "quality": [1, 2]}
    rows = write_rows(tmp_path / "rows.jsonl", [row | {"id": name} for name in "ab"])
    keys = {**SHORT, "max_steps": 1, "model_name_or_path": str(folder), "dataset_path": str(rows)}
    with pytest.raises(CheckpointError, match=r"quality: gaussian apart. and total: .following: 0.5, quality: 0.5"):
        train({**keys, "output_dir": str(tmp_path / "run")})
    names = ("following", "quality")
    keys |= {"outputs": dict.fromkeys(names, "gaussian apart"), "total": dict.fromkeys(names, 0.5)}
    keys |= {"learning_rate": 1e-3, "warmup_steps": 0, "batching": batching}
    train({**keys, "output_dir": str(tmp_path / "run")})
    log = json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())["log_history"]
    chosen, rejected = scorer.score_outputs([[prompt, *answer] for answer in answers])
    leads = torch.tensor([chosen[names[0]] - rejected[names[0]], rejected[names[1]] - chosen[names[1]]])
    spreads = torch.tensor([sum(of[f"{name}_deviation"] ** 2 for of in (chosen, rejected)) for name in names])
    assert log[0]["loss"] == pytest.approx(gaussian(leads, spreads, torch.tensor(False)).sum().item(), abs=1e-4)
    command = ["score", "--model", str(tmp_path / "run/final"), "--input", str(rows), "--output", str(tmp_path / "s")]
    cli.app(command, result_action="return_value")
    table = pd.concat(map(pd.read_parquet, (tmp_path / "s").glob("*.parquet")))
    assert all(len(values) == 2 for name in names for values in table[f"output_{name}"])
    trained, imported = (load_file(path / "model.safetensors") for path in (tmp_path / "run/final", folder))
    assert not torch.equal(trained["score_hidden.0.weight"], imported["score_hidden.0.weight"])
    train({**keys, "output_dir": str(tmp_path / "lora"), "use_peft": True})
    adapted = load_checkpoint(tmp_path / "lora/final", check_sight=False)
    assert not torch.equal(adapted.model.score.weight, imported["score.weight"])


def test_what_others_cannot_compute_is_not_exported(made, tmp_path):
    with pytest.raises(CheckpointError, match="a bias"):
        export(made(SKYWORK)[1], tmp_path / "exported")
    folder = shutil.copytree(made(SWIFT)[1], tmp_path / "text", ignore=shutil.ignore_patterns("COMPLETE.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"reward_positions": "text"}))
    with pytest.raises(CheckpointError, match="the positions of text"):
        export(folder, tmp_path / "exported")


@pytest.fixture
def source(tmp_path) -> Path:
    """A value head beside a language model, to be spoilt."""
    tiny(tmp_path / "rm", "qwen2_5_vl")
    save_file(VALUE, tmp_path / "rm/value_head.safetensors")
    return tmp_path / "rm"


def test_import_writes_a_checkpoint_that_other_verbs_open(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    cli.app(["import", str(source), "--output", out], result_action="return_value")
    assert "value_head, score" in "".join(capsys.readouterr())
    command = ["score", "--model", out, "--prompt", "Is seven odd?", "--response", "Yes."]
    cli.app(command, result_action="return_value")
    assert capsys.readouterr().out.strip()
    with pytest.raises(ConfigError, match="out"):
        import_reward(source, tmp_path / "out")


def spoil(folder: Path, file: str, change: Any) -> None:
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, folder / file, metadata={"format": "pt"})


def spoil_model(folder: Path, **weights: torch.Tensor) -> None:
    spoil(folder, "model.safetensors", lambda stored: stored.update(weights))


def without_head(folder: Path) -> None:
    (folder / "value_head.safetensors").unlink()


FAULTS = {
    "bias": (
        lambda f: spoil(f, "value_head.safetensors", lambda w: w.pop("v_head.summary.bias")), {}, "incomplete",
    ),
    "outputs": (
        lambda f: (without_head(f), spoil_model(f, **{"score.weight": torch.ones(3, 128)})), {}, "gives 3 numbers",
    ),
    "no head": (without_head, {}, r"no reward head in its \d+ weights"),
    "ambiguous": (
        lambda f: (without_head(f), save_file({"rm_head.weight": torch.ones(1, 128)}, f / "rm_head.safetensors")), {},
        "--layout videoalign",
    ),
    "other layout": (lambda f: None, {"layout": "score"}, "--layout value_head fits"),
    "missing": (
        lambda f: spoil(f, "model.safetensors", lambda w: w.pop("model.norm.weight")), {},
        "lacks model.language_model.norm.weight",
    ),
    "shape": (lambda f: spoil_model(f, **{"model.norm.weight": torch.ones(9)}), {}, r"norm.weight is \[9\]"),
    "two heads": (lambda f: spoil_model(f, **VALUE), {}, "a head in a file of its own and v_head.summary"),
    "no layout": (lambda f: None, {"layout": "my_layout"}, "choose one of value_head"),
    "no question": (lambda f: None, {"template": "t.txt"}, "leave --template out"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_imported_is_named_leaving_nothing(source, fault):
    change, options, message = FAULTS[fault]
    change(source)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        import_reward(source, source.parent / "out", **options)
    assert {path.name for path in source.parent.iterdir()} <= {"rm", "out"}
    assert not list((source.parent / "out").glob("*"))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({}, ConfigError, r"\{text_prompt\}"),
        ({"template": "t.txt"}, ConfigError, r"each of following, quality: write \{output\}"),
        ({"template": "{output}.txt"}, ConfigError, r"following.txt has <\|Reward\|> 0 times"),
        ({"template": "{output}.txt", "layout": "editreward_qwen3"}, CheckpointError, "qwen3_vl"),
    ],
)
def test_questions_need_their_instruction(made, tmp_path, monkeypatch, options, error, why):
    published, _, _ = made(EDIT)
    monkeypatch.chdir(tmp_path)
    Path("following.txt").write_text("{text_prompt}")
    with pytest.raises(error, match=why):
        import_reward(published.source, tmp_path / "out", base=published.options["base"], **options)


def test_a_prompt_cannot_write_the_reward_token(made):
    published, _, scorer = made(EDIT)
    [spelt] = scorer.score([[{"role": "user", "content": "a <|Reward|> cat"}, published.conversations[0][1]]])
    assert abs(spelt - published.expected[0].item()) > 1e-4
    with pytest.raises(RowError, match="an image or a video as the answer"):
        scorer.score([talk("a cat", "no image", picture(448, 448))])


def test_adapters_need_the_base_of_their_training(made, tmp_path):
    published, _, _ = made(BY_WHO["peft, `modules_to_save`"])
    tiny(tmp_path / "other", "mimo_vl")
    with pytest.raises(CheckpointError, match=r"--base"):
        import_reward(published.source, tmp_path / "out", base=tmp_path / "other")
    copy = Path(shutil.copytree(published.source, tmp_path / "dora"))
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora: True, which is not carried"):
        import_reward(copy, tmp_path / "out", base=published.options["base"])


@pytest.mark.parametrize("load", [load_checkpoint, load_for_training])
def test_an_unused_trained_head_points_to_import(made, load):
    for case in (SKYWORK, BY_WHO["LLaMA-Factory, `value_head.bin`"], BY_WHO["TRL, `v_head.*` in shards"]):
        with pytest.raises(CheckpointError, match=r"`vlmrm import .* --output DIR`"):
            load(made(case)[0].source)


@pytest.mark.parametrize("shard", ["/w.bin", "../w.bin", "a/../../w.bin"])
def test_a_shard_outside_the_checkpoint_is_refused(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=f"{shard}, which is outside"):
        weight_files(tmp_path)


def test_a_trained_head_in_plain_layout_starts_training(made):
    assert torch.equal(load_for_training(made(SWIFT)[0].source).score.weight, SCORE["score.weight"])
    assert load_for_training(made(SKYWORK)[1]).score.bias.item() == pytest.approx(0.7)


def test_half_precision_stays_as_it_is_stored(source, tmp_path):
    spoil(source, "model.safetensors", lambda w: w.update({n: t.bfloat16() for n, t in w.items()}))
    made = import_reward(source, tmp_path / "out").folder
    weights = load_file(made / "model.safetensors")
    assert {t.dtype for n, t in weights.items() if not n.startswith("score")} == {torch.bfloat16}
    assert {t.dtype for n, t in weights.items() if n.startswith("score")} == {torch.float32}
    assert load_for_training(made).model.dtype == torch.bfloat16


def test_large_models_are_written_in_shards(source, tmp_path, monkeypatch):
    monkeypatch.setattr("vlmrm.modeling.published_import.SHARD", 2**19)
    made = import_reward(source, tmp_path / "out").folder
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    single = import_reward(source, tmp_path / "one").folder
    states = [load_checkpoint(folder, check_sight=False).model.state_dict() for folder in (made, single)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
