"""Rewards that an installed package offers by an entry point."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlmrm.errors import ConfigError
from vlmrm.rewards import RewardSet, reward_model_class
from vlmrm.rewards.remote import RemotePointwiseRewardModel

MODULE = """
from vlmrm.rewards import PointwiseRewardModel

class Vowels(PointwiseRewardModel):
    required_fields = ("prompt",)

    def __call__(self, prompt, **kwargs):
        return [float(sum(letter in "aeiou" for letter in text)) for text in prompt]
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path as pip leaves it there."""
    (tmp_path / "letter_rewards.py").write_text(MODULE)
    (tmp_path / "letter_broken.py").write_text("import a_package_that_is_not_here\n")
    about = tmp_path / "letter_rewards-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: letter-rewards\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vlmrm.rewards]\n"
        "Vowels = letter_rewards:Vowels\n"
        "remote_pointwise = letter_rewards:Vowels\n"
        "module = letter_rewards\n"
        "broken = letter_broken:Vowels\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("letter_rewards", "letter_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("installed")
def test_an_installed_package_reward_is_found_by_name():
    scored = RewardSet({"reward_model": "vowels"})(prompt=["a cat", "sky"])
    assert scored.rewards["default"].tolist() == [2.0, 0.0]
    assert reward_model_class("VOWELS").__module__ == "letter_rewards"


@pytest.mark.usefixtures("installed")
def test_packages_cannot_take_the_name_of_built_ins():
    assert reward_model_class("remote_pointwise") is RemotePointwiseRewardModel


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("vowel", ConfigError, "did you mean vowels"),
        ("module", ConfigError, "neither a PointwiseRewardModel nor"),
        ("broken", ModuleNotFoundError, "a_package_that_is_not_here"),
    ],
)
def test_what_is_no_reward_is_refused(name, error, named):
    with pytest.raises(error, match=named):
        reward_model_class(name)
