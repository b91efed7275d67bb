"""`vlmrm serve prepare` does what the scripts say, once, and stops where one fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrm.errors import ConfigError
from vlmrm.rewards import reward_model_class
from vlmrm.serving.settings import load_settings
from vlmrm.serving.worker_spec import prepare, worker_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "service.toml"

SCRIPT = 'mkdir -p "$2/bin" && echo "$1|$2|$#" >> "$1/calls" && ln -sf /bin/true "$2/bin/python"\n'


@pytest.fixture
def place(tmp_path):
    """A folder with a space in its name, and a `$(...)` that a shell would run."""
    folder = tmp_path / "down loads $(touch ran)"
    folder.mkdir()
    return folder


def write(place, *rewards, script=SCRIPT):
    """A configuration of rewards that `script` prepares; keys beside its own are in `rewards`."""
    (place / "setup.sh").write_text(script)
    blocks = []
    for number, keys in enumerate(rewards):
        given = {
            "reward_type": f"reward{number}",
            "setup_script": str(place / "setup.sh"),
            "download_path": str(place),
            "venv_python": f"{place}/venv{number}/bin/python",
            **keys,
        }
        blocks.append("[[reward_args]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items()))
    (place / "service.toml").write_text("\n".join(blocks))
    return place / "service.toml"


def calls(place):
    return (place / "calls").read_text().splitlines() if (place / "calls").exists() else []


def test_each_script_gets_two_folders_without_a_shell(place):
    said = []
    prepare(write(place, {}, {"enable": False}, {}), said.append)
    assert calls(place) == [f"{place}|{place}/venv{number}|2" for number in (0, 2)]
    assert said == ["reward0: preparing", "reward0: prepared", "reward2: preparing", "reward2: prepared"]
    assert not (place / "ran").exists()


def test_what_is_prepared_is_left_until_something_changes(place):
    said = []
    config = write(place, {})
    for _ in range(2):
        prepare(config, said.append)
    assert said[1::2] == ["reward0: prepared", "reward0: is prepared already"]
    prepare(write(place, {}, script=SCRIPT + "# newer\n"), said.append)
    (place / "venv0" / "bin" / "python").unlink()
    prepare(config, said.append)
    assert said[5::2] == ["reward0: prepared", "reward0: prepared"]
    assert len(calls(place)) == 3


def test_a_failing_script_stops_all_and_runs_again(place):
    failing = SCRIPT + 'test -e "$1/good" || exit 3\n'
    config = write(place, {}, {}, script=failing)
    with pytest.raises(ConfigError, match=r"reward reward0: .* ended with status 3: see its output above"):
        prepare(config, print)
    assert len(calls(place)) == 1
    (place / "good").touch()
    prepare(config, print)
    assert len(calls(place)) == 3


def test_every_reward_of_the_example_exists(tmp_path):
    everything = tmp_path / "service.toml"
    everything.write_text(EXAMPLE.read_text().replace("enable = false", "enable = true"))
    assert len(load_settings(EXAMPLE, {}).reward_args) == 4
    for reward in load_settings(everything, {}).reward_args:
        engine = worker_spec(reward, reward.device, 30.0)
        if "reward_model" in engine.options:
            known = reward_model_class(engine.options["reward_model"]).options
            assert set(reward.options) - {"batch_size"} <= set(known), reward.name
