"""The settings of a service: mistakes are said in a sentence that names the key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from vlmrm.errors import ConfigError
from vlmrm.serving.settings import DecodeSettings, Limits, RewardSettings, ServiceSettings, load_settings
from vlmrm.serving.worker_spec import worker_spec

REWARD = '[[reward_args]]\nreward_type = "vlm_reward"\n'
CLIENT = '[[clients]]\nname = "a"\ntoken = "secret"\n'


@pytest.fixture
def written(tmp_path):
    def write(content: str) -> Path:
        path = tmp_path / "service.toml"
        path.write_text(content)
        return path

    return write


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"prot = 1\n{REWARD}", "unknown key prot (did you mean port?)."),
        (f"{REWARD}modelpath = 'x'", "unknown key reward_args.0.modelpath (did you mean model_path?)."),
        (f"{REWARD}[limits]\nmax_itens = 1", "unknown key limits.max_itens (did you mean max_items?)."),
        (f"{REWARD}[decode_args]\nmodelpath = 'x'", "unknown key decode_args.modelpath (did you mean model_path?)."),
        (f"{REWARD}output = 'x'", "unknown key reward_args.0.output (did you mean options.output?)."),
        ("[[reward_args]]\nname = 'x'", "reward_args.0.reward_type is missing."),
        (f"{REWARD}{REWARD}", "2 rewards are called vlm_reward: give each a name of its own."),
        ("port = 1", "no reward is enabled: give at least one [[reward_args]]."),
        (f"token = ['secret']\n{REWARD}", "token: "),
        (f"host = '0.0.0.0'\n{REWARD}", "without a token: set VLMRM_TOKEN."),
        (f"{REWARD}dtype = 'half'", "reward_args.0: dtype is 'half': choose from auto, bfloat16"),
        (f"token = 'secret€'\n{REWARD}", "token: no header carries it"),
        (f"{REWARD}{CLIENT}{CLIENT.replace('secret', 'x')}", "the client a has another's name or token: give"),
        (f"token = 'secret'\n{REWARD}{CLIENT}", "the client a has another's name or token: give each its own."),
        (f"{REWARD}{CLIENT}rewards = ['x']", "the client a opens x: choose from vlm_reward."),
        (f"{REWARD}{CLIENT}weight = 0", "clients.0.weight: "),
        (f"trusted_proxies = ['proxy']\n{REWARD}", "trusted_proxies.0: "),
        (f"token = 't'\ntrusted_proxies = ['::1']\n{REWARD}", "by address, but here tokens do"),
        *((f"{REWARD}[limits]\n{name} = -1", f"limits.{name}: ") for name in Limits.model_fields),
        (f"redis_port = -1\n{REWARD}", "redis_port: "),
    ],
)
def test_a_mistake_is_named_and_no_value_told(written, content, said):
    path = written(content)
    with pytest.raises(ConfigError) as error:
        load_settings(path, {})
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)
    assert "secret" not in str(error.value)


def test_an_environment_token_is_validated_like_a_setting(written):
    with pytest.raises(ConfigError, match="token: no header carries it"):
        load_settings(written(REWARD), {"VLMRM_TOKEN": "secret\n"})


def test_given_settings_beat_the_file_before_validation(written, tmp_path):
    path = written(f"host = '0.0.0.0'\nport = 1\n{REWARD}")
    settings = load_settings(path, {}, host="127.0.0.1", media_root=tmp_path)
    assert (settings.host, settings.port, settings.media_root) == ("127.0.0.1", 1, tmp_path)


@pytest.mark.parametrize("reward", ["vlm_reward", "vlm_reward_group"])
def test_a_dtype_has_equal_names_for_all_rewards(written, reward):
    [settings] = load_settings(written(f"[[reward_args]]\nreward_type = '{reward}'\ndtype = 'bf16'"), {}).reward_args
    assert worker_spec(settings, "cpu", silence=1.0).options["dtype"] == "bfloat16"


def test_every_key_is_documented():
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    [shown] = re.findall(r"The defaults:\n\n```toml\n(.*?)```", page, re.DOTALL)
    assert Limits(**tomllib.loads(shown)["limits"]) == Limits()
    models = (ServiceSettings, RewardSettings, DecodeSettings, Limits)
    assert {name for model in models for name in model.model_fields if not re.search(rf"\b{name}\b", page)} == set()
