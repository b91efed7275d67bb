"""The request's id in every line about it."""

from __future__ import annotations

import json

import httpx2 as httpx

from tests.serving.hosts import hosts


def test_lines_about_a_request_name_it(tmp_path):
    with hosts(tmp_path, "", settings={"log_format": "json"}) as [host]:
        for prompt in ("aaa", "raise"):
            ask = {"items": [{"prompt": prompt}]}
            httpx.post(f"{host.url}/v1/rewards", json=ask, headers={"X-Request-ID": "it-7"}, timeout=300)
        said = host.said.read_text()
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    named = [it["request_id"] for it in lines if it["message"] == "request" and it["route"] == "/v1/rewards"]
    assert named == ["it-7"] * 2
    assert "request_id=it-7 Traceback" in said  # the worker's own
