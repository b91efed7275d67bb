"""One reader of settings files, one check, one way to say what is wrong."""

from __future__ import annotations

import pytest
from pydantic import Field, SecretStr

from vlmrm.errors import ConfigError
from vlmrm.settings import Strict, load_file, validate


class Block(Strict):
    size: int = Field(1, ge=1)
    token: SecretStr = SecretStr("")


class Keys(Strict):
    rate: float
    block: Block = Field(default_factory=Block)
    blocks: list[Block] = Field(default_factory=list)


@pytest.fixture
def written(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "rate: 3e-4\nname: no\nblock: {size: 2}"),
        ("a.json", '{"rate": 3e-4, "name": "no", "block": {"size": 2}}'),
        ("a.toml", 'rate = 3e-4\nname = "no"\n[block]\nsize = 2'),
    ],
)
def test_a_word_means_the_same_in_every_file(written, name, text):
    assert load_file(written(name, text)) == {"rate": 3e-4, "name": "no", "block": {"size": 2}}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "rate: 1\nrate: 2", "'rate' is on line 1 and on line 2"),
        ("a.json", '{"rate": 1, "rate": 2}', "'rate' is there 2 times"),
        ("a.toml", "rate = 1\nrate = 2", "not valid TOML"),
        ("a.yaml", "rate: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", "- rate", "`key: value` lines"),
    ],
)
def test_a_file_that_cannot_be_settings_is_named(written, name, text, says):
    with pytest.raises(ConfigError) as error:
        load_file(written(name, text))
    assert name in str(error.value) and says in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"rte": 1}, "unknown key rte (did you mean rate?)"),
        ({"rate": 1, "blocks": [{}, {"sise": 1}]}, "unknown key blocks.1.sise (did you mean size?)"),
        ({}, "rate is missing"),
        ({"rate": float("inf")}, "rate: "),
        ({"rate": 1, "block": {"size": 0}}, "block.size: "),
    ],
)
def test_an_invalid_setting_is_named(content, says):
    with pytest.raises(ConfigError) as error:
        validate(Keys, content, "file")
    assert str(error.value).startswith(f"file: {says}")


def test_secret_values_are_not_in_messages():
    with pytest.raises(ConfigError) as error:
        validate(Keys, {"rate": 1, "block": {"token": ["abc"]}}, "file", secret=True)
    assert "block.token" in str(error.value) and "abc" not in str(error.value)
    assert error.value.__suppress_context__
