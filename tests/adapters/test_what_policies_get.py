"""What a policy gets where its reward fails: the table of docs/rewards.md, each cell by each adapter that it names.

A service scores a first round; in the second one four answers to one prompt, and two to another, meet the failure.
"""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.adapters.frameworks import calls
from tests.rewards.judges.judge_server import JudgeServer, error
from tests.runs import ROOT
from vlmrm.adapters.flow_factory_reward import PointwiseReward
from vlmrm.adapters.openrlhf_reward import Unscored
from vlmrm.errors import RewardError
from vlmrm.rewards import RewardArguments

PROMPTS = [[{"role": "user", "content": text}] for text in "xxxxyy"]
GOOD = ["a", "aaa", "aa", "aaaa", "aaaaaa", "aaaaa"]  # each scores its length
ONE_BAD, GROUP_BAD = [GOOD[0], "bad", *GOOD[2:]], [*GOOD[:4], "bad", "bad!"]
GETS = {"its group's mean": [1, 7 / 3, 2, 4, 6, 5], "the batch's mean": [1, 3, 2, 4, 2.5, 2.5], "the others": [0] * 6}
QUICK = {"timeout": 0.1, "retry_attempts": 1}
FAILURES = {
    "one sample is refused": (ONE_BAD, lambda it, body: it.scores(body)),
    "its score is not finite": (ONE_BAD, lambda it, body: it.scores(body, {"raw": float("nan")})),
    "a whole group is refused": (GROUP_BAD, lambda it, body: it.scores(body)),
    "the service is gone": (GOOD, None),
    "it is silent": (GOOD, lambda it, body: it.hold()),
    "401": (GOOD, lambda it, body: error(401)),
    "404": (GOOD, lambda it, body: error(404)),
    "it answers something else": (GOOD, lambda it, body: (200, {}, '{"data": 1}')),
}


class Service(JudgeServer):
    """Scores an item by the length of its text, but one that says `bad`."""

    def _take(self, request: Any) -> tuple[dict[str, Any], int]:
        sent = request.rfile.read(int(request.headers["Content-Length"])).decode("latin-1")  # a form, if it has files
        return json.JSONDecoder().raw_decode(sent, sent.index('{"model"'))[0], 0

    def scores(self, body: dict[str, Any], bad: Any = {"error": "its picture is broken"}) -> Any:  # noqa: B006
        texts = ["".join(re.findall('"(bad|a+)!?"', json.dumps(item))) for item in body["items"]]
        rows = [bad if text == "bad" else {"raw": float(len(text))} for text in texts]
        return 200, {}, json.dumps({"data": [{"index": index, **row} for index, row in enumerate(rows)]})


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr("vlmrm.rewards.servers.FIRST_PAUSE", 0.01)
    server = Service("")
    server.behave = lambda body, number: server.scores(body)
    with server.running():
        yield server


def three(url: str) -> list[dict[str, Any]]:
    """Three rewards, of which two have 0 for each of these answers."""
    others = [{"name": f"repeats_{size}", "reward_model": "repetition", "ngram_size": size} for size in (3, 4)]
    return [{"name": "it", "reward_model": "vlm_reward", "model_path": url, "on_failure": "mask", **QUICK}, *others]


def flow_factory(url: str) -> Any:
    extra = {"model_path": url, **QUICK}
    config = RewardArguments(name="it", reward_model="x", device="cpu", extra_kwargs=extra)
    reward = PointwiseReward(config, SimpleNamespace(device="cpu"))
    return lambda _, prompts, images: reward(prompt=prompts, image=[Image.new("RGB", (8, 8))] * len(prompts)).rewards


def got(call: Any, answers: list[str]) -> str:
    """What the policy gets, in the words of the table."""
    try:
        values = call(PROMPTS, answers, [[]] * len(answers))
    except (RewardError, Unscored):
        return "raises"
    missing = {repr(value) for value in values if value is None or np.isnan(value)}
    found = [words for words, expected in GETS.items() if not missing and np.allclose(values, expected)]
    return found[0] if found else {"{'None'}": "`None`", "{'nan'}": "NaN"}.get(str(missing), str(values))


def rows() -> list[tuple[str, str, str]]:
    """The table: failure, adapter and what the policy gets."""
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    lines = page[page.index("| adapter | one") :].split("\n\n")[0].splitlines()
    header, _, *body = [line.strip("| ").split(" | ") for line in lines]
    return [
        (failure, adapter, cell)
        for adapters, *cells in body
        for adapter in re.findall("`(.*?)`", adapters)
        for failures, cell in zip(header[1:], cells, strict=True)
        for failure in failures.split(", ")
    ]


@pytest.mark.parametrize(("failure", "adapter", "cell"), rows())
def test_a_policy_gets_what_the_table_says(service, monkeypatch, failure, adapter, cell):
    adapters = {**calls(service.url, three(service.url), QUICK, monkeypatch), "flow_factory_reward": flow_factory}
    call = adapters[adapter](service.url) if adapter == "flow_factory_reward" else adapters[adapter]
    assert np.allclose(call(PROMPTS, GOOD, [[]] * len(GOOD)), [1, 3, 2, 4, 6, 5])
    answers, behave = FAILURES[failure]
    service.behave = lambda body, number: behave(service, body)
    if failure == "the service is gone":
        service.close()

    assert got(call, answers) == cell


def test_the_table_has_each_failure_by_each_adapter(monkeypatch):
    adapters = {*calls("http://host", three("http://host"), {}, monkeypatch), "flow_factory_reward"}
    assert {row[:2] for row in rows()} == {(failure, adapter) for failure in FAILURES for adapter in adapters}
