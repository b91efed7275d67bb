"""The guide's blocks that need no framework; `make neighbours` runs the others in their own environments."""

from __future__ import annotations

import re

import pytest
import yaml
from PIL import Image

from tests.runs import ROOT
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer

PAGE = (ROOT / "docs/howto/rl.md").read_text()
ADDRESS = "http://host:8080"
QUESTION, ANSWERS = "What is this?", ["A cat.", "A dog."]


def block(language: str, word: str) -> str:
    """The block of the page that has a word in it."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
    [found] = [text for kind, text in blocks if kind == language and word in text]
    return found


@pytest.fixture
def here(tmp_path, tiny_reward_model, monkeypatch):
    """A folder with pictures, the checkpoint and the configuration of the page."""
    for name, colour in (("cat.jpg", "orange"), ("dog.jpg", "brown")):
        Image.new("RGB", (84, 56), colour).save(tmp_path / name)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/best").symlink_to(tiny_reward_model)
    (tmp_path / "rewards.yaml").write_text(block("yaml", "# rewards.yaml").replace(ADDRESS, "outputs/best"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def expected(here):
    asked = [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": QUESTION}]
    prompt = [{"role": "user", "content": asked}]
    return pytest.approx(load_scorer("outputs/best").score_groups([(prompt, ANSWERS)])[0], abs=1e-5)


def test_flow_factory_s_configuration_scores(here):
    config = yaml.safe_load(block("yaml", "flow_factory_reward"))
    scored = RewardSet(config["rewards"])(prompt=["A cat"], image=["cat.jpg"])
    picture = [{"role": "assistant", "content": [{"type": "image", "image": "cat.jpg"}]}]
    [[score]] = load_scorer("outputs/best").score_groups([("A cat", [picture])])
    assert scored.rewards["people"].tolist() == pytest.approx([score], abs=1e-5)


def test_the_loop_of_one_s_own(here, expected):
    namespace: dict = {}
    exec(block("python", "scored.metrics()"), namespace)
    assert namespace["scored"].rewards["people"].tolist() == expected
    metrics = namespace["scored"].metrics()
    for name in re.findall(r"^- `rewards/(?:NAME/)?(\w+)`", PAGE, re.MULTILINE):
        if name != "held_out":  # of a reward of weight 0
            assert f"rewards/people/{name}" in metrics
