"""The configuration parser: what wins, what is refused, and what the message says."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from vlmrm.config import parse
from vlmrm.errors import ConfigError
from vlmrm.settings import load_file


class When(StrEnum):
    NO = "no"
    STEPS = "steps"


@dataclass
class Keys:
    learning_rate: float = 1e-5
    batch_size: int = 8
    name: str = "run"
    limit: int | None = None
    shuffle: bool = True
    quick: bool = False
    when: When | str = When.NO
    paths: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    options: dict | str | None = None
    head: str = field(default="linear", metadata={"choices": ["linear", "mlp"]})
    deepspeed: str | None = None


@pytest.fixture
def read(tmp_path):
    """`read(text, *words)`: the keys that a file of `text` and the command-line words give."""

    def read(text: str, *words: str, name: str = "config.yaml") -> Keys:
        path = tmp_path / name
        path.write_text(text)
        return parse([Keys], [str(path), *words], "test")[0]

    return read


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?"))
    return message


def test_command_line_beats_file_beats_defaults(read):
    keys = read("learning_rate: 2e-5\nbatch_size: 4", "--learning_rate", "3e-5")
    assert (keys.learning_rate, keys.batch_size, keys.name) == (3e-5, 4, "run")


def test_the_file_may_be_named_in_three_ways(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("batch_size: 4")
    for words in ([str(path)], ["--config", str(path)], ["--name", "x", f"--config={path}"]):
        assert parse([Keys], words, "test")[0].batch_size == 4
    assert parse([Keys], ["--batch_size", "5"], "test")[0].batch_size == 5


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("learning_rate: 1e-5", "learning_rate", 1e-5),
        ("name: 7", "name", "7"),
        ("limit: ~", "limit", None),
        ("shuffle: no", "shuffle", False),
        ("quick: 1", "quick", True),
        ("when: no", "when", When.NO),
        ("paths: one", "paths", ["one"]),
        ("weights: [1, 0.5]", "weights", [1.0, 0.5]),
        ("options: {min_lr: 1e-6, fused: true}", "options", {"min_lr": 1e-6, "fused": True}),
        ("head: mlp", "head", "mlp"),
    ],
)
def test_a_file_value_converts_like_the_command_line(read, line, key, value):
    result = getattr(read(line), key)
    assert result == value and type(result) in (type(value), str)


@pytest.mark.parametrize("words", [["--limit", "null"], ["--limit=null"]])
def test_null_on_the_command_line_overrides_the_file(read, words):
    keys = read("limit: 3", *words, "--name", "null")
    assert keys.limit is None and keys.name == "null", "a name may be so"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("learning_rate: fast", "learning_rate is 'fast'"),
        ("learning_rate: {a: 1}", "learning_rate takes a value, not a mapping"),
        ("learning_rate:", "learning_rate is empty"),
        ("batch_size: 2.5", "batch_size is 2.5"),
        ("shuffle: maybe", "shuffle is 'maybe'"),
        ("when: never", "when is 'never': choose from no, steps"),
        ("head: tree", "head is 'tree': choose from linear, mlp"),
        ("weights: [1, heavy]", "weights is 'heavy'"),
        ("learning_rte: 1", "did you mean learning_rate?"),
        ("stage: rm\nlr: 1\nname: a", "'stage', 'lr' (did you mean learning_rate?)"),
        ("batch_size: 1\nname: a\nbatch_size: 2", "'batch_size' is on line 1 and on line 3"),
        ("env: [A]", "env must hold"),
        ("deepspeed: zero9.json", "deepspeed is 'zero9.json'"),
    ],
)
def test_a_bad_line_names_its_file_and_key(read, line, expected):
    message = refusal(read, line)
    assert expected in message and "config.yaml" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--learning_rte=1"], "did you mean --learning_rate?"),
        (["--lr", "1", "--zzz=2"], "--lr (did you mean --learning_rate?), --zzz"),
        (["pairs.jsonl", "--head", "mlp"], "write --dataset_path"),
        (["--batch", "1"], "did you mean --batch_size?"),
        (["--batch_size", "many"], "--batch_size"),
        (["--head", "tree"], "--head"),
        (["--config"], "--config needs a file"),
    ],
)
def test_a_bad_word_is_refused_with_its_neighbour(words, expected):
    assert expected in refusal(parse, [Keys], words, "test")


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "7b_config.yaml").touch()
    message = refusal(load_file, tmp_path / "7b_confg.yaml")
    assert message.endswith("7b_config.yaml?")


def test_env_sets_environment_variables(read, monkeypatch):
    monkeypatch.setenv("VLMRM_TEST_VARIABLE", "old")
    read("env:\n  VLMRM_TEST_VARIABLE: 3")
    assert os.environ["VLMRM_TEST_VARIABLE"] == "3"


def test_deepspeed_files_are_found_near_the_configuration(tmp_path, monkeypatch):
    configs, elsewhere = tmp_path / "repository" / "training_configs", tmp_path / "elsewhere"
    configs.mkdir(parents=True), elsewhere.mkdir()
    config = configs / "c.yaml"
    config.write_text("deepspeed: zero2.json")
    monkeypatch.chdir(elsewhere)

    def result() -> Path:
        return Path(parse([Keys], [str(config)], "test")[0].deepspeed or "").resolve()

    for folder in (configs.parent, configs, elsewhere):
        (folder / "zero2.json").write_text("{}")
        assert result() == folder / "zero2.json"
