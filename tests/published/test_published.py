"""`vlmrm import`: published layouts score by their authors' arithmetic, train further, and are never half read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import Template
from runs import SHORT, write_rows
from safetensors.torch import load_file, save_file
from torch.nn.functional import logsigmoid

from vlmrm import cli
from vlmrm.errors import CheckpointError, ConfigError, RowError
from vlmrm.export import export
from vlmrm.modeling import load_checkpoint, load_for_training, manifest, published_weights
from vlmrm.modeling.published_import import import_reward
from vlmrm.modeling.published_layouts import LAYOUTS, TurnTemplate, question_template
from vlmrm.modeling.published_weights import StoredWeights, read_adapter, weight_files
from vlmrm.training import train

from . import __main__ as table
from .cases import CASES, SCORE, VALUE, Case, picture, talk, tiny

BY_WHO = {case.who: case for case in CASES}
SKYWORK, SWIFT, HPS = (BY_WHO[who] for who in ("Skywork-VL-Reward-7B", "ms-swift", "HPSv3"))


def distance(scorer: Any, published: Any) -> float:
    return (torch.tensor(scorer.score(published.conversations)) - published.expected).abs().max().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores_are_those_of_the_authors_arithmetic(made, case: Case):
    published, folder, scorer = made(case)
    assert distance(scorer, published) < 1e-5
    assert published.expected.std() > 1e-2
    info = json.loads((folder / "reward_model.json").read_text())
    assert info["provenance"]["layout"] == case.layout
    # Controls: another head, a bias that is dropped, and images at positions of their own.
    head = scorer.model.score
    with torch.no_grad():
        trained = head.weight.clone()
        head.weight.copy_(trained.roll(1, dims=1))
        assert distance(scorer, published) > 1e-2
        head.weight.copy_(trained)
        if head.bias is not None:
            bias = head.bias.clone()
            head.bias.zero_()
            assert distance(scorer, published) > 1e-2
            head.bias.copy_(bias)
    if scorer.model.has_text_positions:
        del scorer.model.config.reward_positions
        assert distance(type(scorer)(scorer.loaded), published) > 1e-3
        scorer.model.config.reward_positions = "text"


def test_the_table_in_the_documentation_is_current():
    text = table.PAGE.read_text(encoding="utf-8")
    written = dict(re.findall(r"^\| `\w+` \| (.+?) \| .+? \| (\de-\d\d) \|", text, re.MULTILINE))
    assert all(float(difference) < 1e-5 for difference in written.values())
    assert text == table.page(lambda case: written[case.who]), "write it again: python -m tests.published"


def test_every_layout_is_tried():
    assert {case.layout for case in CASES} == {layout.name for layout in LAYOUTS if not layout.refused}


def test_constants_of_the_authors_are_the_normalisation(made):
    _, folder, _ = made(BY_WHO["VideoAlign, `TA`"])
    info = json.loads((folder / "reward_model.json").read_text())
    assert (info["reward_mean"], info["reward_std"]) == (2.8105, 2.5121)


def test_training_starts_from_the_trained_head(made, tmp_path):
    """The first loss is that of the authors' scores, and weights of the head change."""
    published, folder, _ = made(HPS)
    for number, talked in enumerate(published.conversations):
        talked[1]["content"][0]["image"].save(tmp_path / f"{number}.png")
    question = published.conversations[0][0]["content"]
    row = {
        "id": "a",
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": [{"type": "image", "image": str(tmp_path / "0.png")}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "image", "image": str(tmp_path / "1.png")}]}],
    }
    rows = write_rows(tmp_path / "rows.jsonl", [row, row | {"id": "b"}])
    keys = {**SHORT, "max_steps": 1, "model_name_or_path": str(folder), "dataset_path": str(rows)}
    train({**keys, "output_dir": str(tmp_path / "run"), "learning_rate": 1e-3, "warmup_steps": 0})
    state = json.loads((tmp_path / "run/checkpoint-1/trainer_state.json").read_text())
    loss = state["log_history"][0]["loss"]
    scores = made(HPS)[2].score([[row["prompt"][0], row[name][0]] for name in ("chosen", "rejected")])
    assert loss == pytest.approx(-logsigmoid(torch.tensor(scores[0] - scores[1])).item(), abs=1e-4)
    trained, imported = (load_file(path / "model.safetensors") for path in (tmp_path / "run/final", folder))
    assert trained.keys() == imported.keys()
    assert not torch.equal(trained["score_hidden.0.weight"], imported["score_hidden.0.weight"])
    train({**keys, "output_dir": str(tmp_path / "lora"), "use_peft": True})
    adapted = load_checkpoint(tmp_path / "lora/final", check_sight=False)
    assert adapted.model.config.reward_head == {"hidden": [1024, 16], "activation": "relu", "bias": True}
    assert not torch.equal(adapted.model.score.weight, imported["score.weight"])


def test_a_linear_head_is_exported_and_a_bias_refused(made, tmp_path):
    published, folder, _ = made(SWIFT)
    export(folder, tmp_path / "exported")
    assert distance(made(SWIFT)[2], published) < 1e-5
    with pytest.raises(CheckpointError, match=r"is linear, with a bias, and others take a linear one without a bias"):
        export(made(SKYWORK)[1], tmp_path / "biased")
    with pytest.raises(CheckpointError, match="gives images the positions of text"):
        export(made(BY_WHO["VideoAlign, `VQ`"])[1], tmp_path / "positioned")


def test_the_verb_writes_a_checkpoint_that_the_verbs_open(tmp_path, capsys):
    source = tmp_path / "rm"
    tiny(source, "qwen2_5_vl")
    save_file(VALUE, source / "value_head.safetensors")
    cli.app(["import", str(source), "--output", str(tmp_path / "out")], result_action="return_value")
    assert "value_head, output score" in "".join(capsys.readouterr())
    command = ["score", "--model", str(tmp_path / "out"), "--prompt", "Is seven odd?", "--response", "Yes."]
    cli.app(command, result_action="return_value")
    assert float(re.findall(r"-?\d+\.\d+", capsys.readouterr().out)[0])
    with pytest.raises(ConfigError, match="out"):
        import_reward(source, tmp_path / "out")


@pytest.fixture
def source(tmp_path) -> Path:
    """A value head beside a language model, to be spoilt."""
    tiny(tmp_path / "rm", "qwen2_5_vl")
    save_file(VALUE, tmp_path / "rm/value_head.safetensors")
    return tmp_path / "rm"


def spoil(folder: Path, file: str, change: Any) -> None:
    weights = load_file(folder / file)
    change(weights)
    save_file(weights, folder / file, metadata={"format": "pt"})


def add_score(folder: Path, rows: int = 1) -> None:
    spoil(folder, "model.safetensors", lambda weights: weights.update({"score.weight": torch.ones(rows, 128)}))


def without_head(folder: Path) -> None:
    (folder / "value_head.safetensors").unlink()


def truncate(folder: Path) -> None:
    file = folder / "value_head.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


FAULTS = {
    "bias": (
        lambda f: spoil(f, "value_head.safetensors", lambda w: w.pop("v_head.summary.bias")), {},
        "layer 0 of the head is incomplete",
    ),
    "cut": (truncate, {}, r"value_head.safetensors cannot be read"),
    "narrow": (
        lambda f: save_file({**VALUE, "v_head.summary.weight": torch.ones(1, 64)}, f / "value_head.safetensors"), {},
        r"\[1, 64\] and should be \[1, 128\]",
    ),
    "outputs": (lambda f: (without_head(f), add_score(f, 3)), {}, "head gives 3 numbers, and that of score gives 1"),
    "no head": (without_head, {}, r"no reward head in its \d+ weights: train one"),
    "unknown": (
        lambda f: (without_head(f), spoil(f, "model.safetensors", lambda w: w.update({"my_head.x": torch.ones(1)}))),
        {}, r"in no layout that is known \(my_head.x\)",
    ),
    "ambiguous": (
        lambda f: (without_head(f), save_file({"rm_head.weight": torch.ones(1, 128)}, f / "rm_head.safetensors")), {},
        "say which it is by --layout videoalign",
    ),
    "other layout": (lambda f: None, {"layout": "score"}, "no head of layout score: .*--layout value_head fits"),
    "missing": (
        lambda f: spoil(f, "model.safetensors", lambda w: w.pop("model.norm.weight")), {},
        r"lacks model.language_model.norm.weight, 1 weights",
    ),
    "more": (
        lambda f: spoil(f, "model.safetensors", lambda w: w.update({"model.extra": torch.ones(1)})), {},
        "has model.extra, which a Qwen2_5_VLForSequenceClassification has not",
    ),
    "shape": (
        lambda f: spoil(f, "model.safetensors", lambda w: w.update({"model.norm.weight": torch.ones(9)})), {},
        r"norm.weight is \[9\], and by the configuration \[128\]",
    ),
    "two heads": (
        lambda f: spoil(f, "model.safetensors", lambda w: w.update(VALUE)), {},
        "a head in a file of its own and v_head.summary",
    ),
    "own": (lambda f: (f / "reward_model.json").write_text("{}"), {}, "reward model of vlmrm already"),
    "settings": (
        lambda f: (without_head(f), save_file({"rm_head.weight": torch.ones(1, 128)}, f / "rm_head.safetensors")),
        {"layout": "videoalign", "output_name": "VQ", "template": "t.txt"}, "model_config.json",
    ),
    "refused": (lambda f: None, {"layout": "ixc_reward"}, "cannot be imported: its architecture"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_carried_is_named_and_leaves_nothing(source, fault):
    change, options, message = FAULTS[fault]
    change(source)
    with pytest.raises(CheckpointError, match=message):
        import_reward(source, source.parent / "out", **options)
    assert {path.name for path in source.parent.iterdir()} <= {"rm", "out"}
    assert not list((source.parent / "out").glob("*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "my_layout"}, "--layout is 'my_layout': choose one of value_head"),
        ({"template": "t.txt"}, "read through its chat template: leave --template out"),
        ({"output_name": "VQ"}, "has no output 'VQ': import one by --output-name score"),
    ],
)
def test_options_that_do_not_fit_are_named(source, options, message):
    with pytest.raises(ConfigError, match=message):
        import_reward(source, source.parent / "out", **options)


def test_a_configuration_that_transformers_does_not_know_is_that_of_the_base(made, tmp_path):
    published, _, _ = made(BY_WHO["MM-RLHF-Reward"])
    with pytest.raises(CheckpointError, match=r"^llava-hf/llava-onevision-qwen2-7b-ov-hf "):  # which is not here
        import_reward(published.source, tmp_path / "out", template=published.options["template"])


def test_questions_need_their_instruction_and_their_output(made, tmp_path):
    published, _, scorer = made(BY_WHO["EditReward, `quality`"])
    base = published.options["base"]
    with pytest.raises(ConfigError, match="several outputs: import one by --output-name following, quality"):
        import_reward("TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508", tmp_path / "out")  # before anything is fetched
    with pytest.raises(CheckpointError, match="cannot be imported: its architecture"):
        import_reward("internlm/internlm-xcomposer2d5-7b-reward", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"asked by an instruction of its authors: .*\{text_prompt\}"):
        import_reward(published.source, tmp_path / "out", base=base, output_name="quality")
    (tmp_path / "t.txt").write_text("{text_prompt}")
    question = {"base": base, "template": tmp_path / "t.txt", "output_name": "quality"}
    with pytest.raises(CheckpointError, match="is a qwen2_5_vl, and editreward_qwen3 is a qwen3_vl"):
        import_reward(published.source, tmp_path / "out", layout="editreward_qwen3", **question)
    with pytest.raises(ConfigError, match=r"has <\|Reward\|> 0 times"):
        import_reward(
            published.source, tmp_path / "out", base=base, output_name="quality", template=tmp_path / "t.txt"
        )
    with pytest.raises(RowError, match="scores an image or a video as the answer to a text"):
        scorer.score([talk("a cat", "no image", picture(448, 448))])
    # The prompt cannot write the token at which the score is read.
    [spelt] = scorer.score([[{"role": "user", "content": "a <|Reward|> cat"}, published.conversations[0][1]]])
    assert abs(spelt - published.expected[0].item()) > 1e-4


def test_adapters_need_the_base_of_their_training(made, tmp_path):
    published, _, _ = made(BY_WHO["peft, `modules_to_save`"])
    with pytest.raises(CheckpointError, match=r"make it one of ours by `vlmrm import"):
        load_checkpoint(made(BY_WHO["LLaMA-Factory, LoRA"])[0].source)
    wide = tmp_path / "other"
    tiny(wide, "mimo_vl")
    with pytest.raises(CheckpointError, match=r"--base"):
        import_reward(published.source, tmp_path / "out", base=wide)
    copy = Path(shutil.copytree(published.source, tmp_path / "dora"))
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="adapter with use_dora: True, which is not carried"):
        import_reward(copy, tmp_path / "out", base=published.options["base"])


@pytest.mark.parametrize("load", [load_checkpoint, load_for_training])
def test_a_head_that_is_not_used_points_to_the_import(made, load):
    for case in (SKYWORK, BY_WHO["LLaMA-Factory, `value_head.bin`"], BY_WHO["TRL, `v_head.*` in shards"]):
        with pytest.raises(CheckpointError, match=r"one of ours by `vlmrm import .* --output DIR`"):
            load(made(case)[0].source)
    with pytest.raises(CheckpointError, match="one of ours by `vlmrm import"):
        load_checkpoint(made(SWIFT)[0].source)


def test_an_instruction_is_written_character_for_character():
    """Beyond the 16 bits of JSON's escapes too, and with what Jinja and JSON mean something by."""
    text = 'Rate \U0001f600 "é" \\n {{ 7 }} {% x %}\nof {text_prompt} \u2028<|Reward|>'
    around = TurnTemplate("\U0001f642 ", "", "", {})
    template = Template(question_template(around, text, ["{text_prompt}"], "<|Reward|>"))
    written = template.render(messages=[{"role": "user", "content": "a \U0001f431"}])
    assert written == around.before + text.replace("{text_prompt}", "a \U0001f431")


def test_files_that_are_half_there_are_refused_in_a_sentence(tmp_path):
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    for key in settings:
        (tmp_path / "adapter_config.json").write_text(json.dumps({k: v for k, v in settings.items() if k != key}))
        with pytest.raises(CheckpointError, match=rf"\b{key}: None"):
            read_adapter(tmp_path)
    torch.save({"model": torch.ones(2)}, tmp_path / "w.bin")
    with pytest.raises(CheckpointError, match="holds a Tensor and no weights by name"):
        StoredWeights(tmp_path / "w.bin")
    for shard in ("/w.bin", "../w.bin", "a/../../w.bin"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(CheckpointError, match=rf"names {shard}, which is outside"):
            weight_files(tmp_path)


@pytest.mark.parametrize("adapter", [False, True])
def test_of_a_repository_only_what_is_read_is_fetched(tmp_path, monkeypatch, adapter):
    """Not the weights in a second format, those of its optimiser, or the full ones beside an adapter."""
    listed = ["config.json", "adapter_model.bin", "model.safetensors", "original/consolidated.00.pth"]
    listed += ["optimizer.pt", "pytorch_model.bin", "value_head.bin", "vocab.txt"]
    fetched = []
    for module in (published_weights, manifest):
        monkeypatch.setattr(module, "hub_answers", lambda: True)
    monkeypatch.setattr(published_weights, "is_adapter", lambda *_: adapter)
    monkeypatch.setattr(manifest, "read_json_of", lambda *_: None)
    for module in (published_weights, manifest):
        monkeypatch.setattr(module, "file_names", lambda *_: listed)

    def fetch(source: str, *, revision: str | None, local_files_only: bool, ignore_patterns: list[str]) -> Path:
        fetched.extend(name for name in listed if name not in ignore_patterns)
        return tmp_path

    monkeypatch.setattr(manifest, "snapshot_download", fetch)
    assert published_weights.local_copy("org/name") == tmp_path
    weights = ["adapter_model.bin"] if adapter else ["model.safetensors"]
    assert fetched == ["config.json", *weights, "value_head.bin", "vocab.txt"]


def test_the_trained_head_of_a_plain_layout_is_the_start_of_training(made):
    assert torch.equal(load_for_training(made(SWIFT)[0].source).score.weight, SCORE["score.weight"])
    assert load_for_training(made(SKYWORK)[1]).score.bias.item() == pytest.approx(0.7)
    with pytest.raises(CheckpointError, match="linear, with a bias head: set head: null"):
        load_for_training(made(SKYWORK)[1], head="linear")


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
