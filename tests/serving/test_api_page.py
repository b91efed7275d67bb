"""The page at /docs: its examples show every route, and work."""

from __future__ import annotations

import html
import json
import pickle
import re
import shutil
import subprocess

import httpx2 as httpx
import pytest

from tests.serving.services import fake, served

CHARACTERS = fake("people", "fake_reward.Characters")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl calls")
@pytest.mark.parametrize("others", [[], [fake("two")]], ids=["of the only reward", "of one of two"])
def test_every_example_on_the_page_is_answered(others, tmp_path):
    """In a shell, one after the other, as whoever pastes them would run them."""
    with served(CHARACTERS, *others) as url:
        page = httpx.get(f"{url}/docs", timeout=300).text
        commands = [html.unescape(one) for one in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
        document = httpx.get(f"{url}/openapi.json", timeout=300).json()
        paths = [re.findall(rf"{url}(\S+)", command)[0] for command in commands]
        own = [command for command in commands if "VLMRM_ADMIN_TOKEN" not in command]
        lines = [f"echo MARK {paths[commands.index(command)]}\n{command}\necho" for command in own]
        script = 'curl() { command curl --fail-with-body -sS --max-time 60 "$@" || echo FAILED; }\n' + "\n".join(lines)
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    answers = dict(part.split("\n", 1) for part in done.stdout.split("MARK ")[1:])
    assert done.stderr == "" and len(answers) == len(own)
    for path, answer in answers.items():
        assert not re.search(r'FAILED|"errors?": ?[^\s\[{n]|"errors":\[\{"', answer), (path, answer)
    assert pickle.loads((tmp_path / "answer.pickle").read_bytes()) == {"scores": [1.8]}
    assert json.loads(answers["/api/reward/pull"])["scores"] == {"people": [1.8]}
    left = {path for path in document["paths"] if "{" not in path} - set(paths)
    assert others or left == {"/v1/score", "/v1/rerank", "/v2/rerank", "/api/reward/ping"}  # other names of asked ones
