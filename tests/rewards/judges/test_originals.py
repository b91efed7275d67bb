"""Wording of published judges from a checkout, made here in their shape and other words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewards.judges.judge_server import completion
from vlmrm.errors import ConfigError
from vlmrm.rewards.originals import originals, record

FORM = '{"reasoning" : "...", "score" : [...]}'
EDIT_SCORE = f"""
_context_no_delimit_reasoning_first = {FORM!r}
_prompts_0shot_two_image_edit_rule = "Two images."
_prompts_0shot_tie_rule_SC = "From 0 to 10: <instruction>"
_prompts_0shot_rule_PQ = "10 is good."
"""


def checkout(folder: Path, name: str, code: str) -> Path:
    file = folder / originals()[name].sources[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"import nothing_that_there_is\nprint('run')\n{code}")
    return folder


def test_judges_ask_in_their_checkout_s_words(server, judge, picture, tmp_path, capfd, caplog):
    _, files = record("Edit_Score", checkout(tmp_path, "edit_score", EDIT_SCORE), tmp_path / "made")
    server.behave = lambda *_: completion('{"score": [20, 15]}')

    output = judge("edit_score", **{setting: str(path) for setting, path in files.items()})(
        ["make it {image}"], [picture], condition_images=[[picture]]
    )

    assert output.rewards == pytest.approx([6.0]) and "run" not in capfd.readouterr().out and not caplog.records
    assert sorted(body["messages"][0]["content"][0]["text"] for body in server.bodies) == [
        f"{FORM}\n25 is good.", f"{FORM}\nTwo images.\nFrom 0 to 25: make it {{image}}"
    ]  # fmt: skip
    assert judge("edit_score") and "vlmrm rewards record edit_score" in caplog.text


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("hpsv4", "", "did you mean hpsv3"),
        ("videoalign", "DETAILED_PROMPT_WITH_SPECIAL_TOKEN = open('x').read()", "open.* without being run"),
        ("videoalign", "DETAILED_PROMPT_WITH_SPECIAL_TOKEN = 'Rate {text_prompt}'", r"VQ_reward.* 0 times"),
        ("unified_reward_2", "problem = f'Rate {prompt} as {scale}'", "no scale"),
        ("unified_reward_2", "problem = f'Rate {prompt}. Score: X'", "another form of reply"),
    ],
)
def test_wording_that_needs_running_is_refused(tmp_path, name, code, said):
    known = name if name in originals() else "hpsv3"

    with pytest.raises(ConfigError, match=said):
        record(name, checkout(tmp_path, known, code), tmp_path / "made")

    assert not list(tmp_path.glob("made/*"))
    with pytest.raises(ConfigError, match="clone of"):
        record(known, tmp_path / "elsewhere", tmp_path)
