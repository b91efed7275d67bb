"""The status page, in a real browser; and the figures that it and Prometheus show."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import quote, urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.browser import CHROMIUM, Browser
from tests.serving.sent_media import data_uri, png
from tests.serving.services import Gate, fake, in_loop, queued, rewards, running
from tests.serving.test_server import served

EVIL = '<img src=x onerror="document.title=1">'


@in_loop
async def test_the_page_loads_nothing_but_its_own():
    async with running() as (_, client):
        first, second = [await client.get("/") for _ in range(2)]
    nonces = [re.findall(r"'nonce-([\w-]+)'", one.headers["content-security-policy"]) for one in (first, second)]
    assert nonces[0] != nonces[1] and len(set(nonces[0])) == 1
    assert first.text.count(f'nonce="{nonces[0][0]}"') == 2
    assert "default-src 'none'" in first.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]*)"', first.text)
    assert set(links) == {"data:,", "docs", "metrics"}


@in_loop
async def test_status_shows_what_the_token_opens():
    blocks = [fake("one"), fake("two", options={"info": {"model": EVIL}})]
    first = {"name": "one's", "token": "first", "rewards": ["one"]}
    async with running(*blocks, token="whole", clients=[first]) as (_, client):
        assert (await client.get("/")).status_code == (await client.get("/v1/status")).status_code == 401
        client.headers = {"Authorization": "Bearer whole"}
        await rewards(client, "aaa", "refuse", model="two")
        await rewards(client, "raise", model="one")
        whole = (await client.get("/v1/status")).json()
        client.headers = {"Authorization": "Bearer first"}
        part = (await client.get("/v1/status")).json()
        assert "two" not in (await client.get("/")).text.partition("<script")[0]
    shown = [[one[key] for key in ("name", "ready", "jobs", "restarts")] for one in whole["rewards"]]
    assert shown == [["one", 1, 0, 0], ["two", 1, 0, 0]]
    one, two = (reward["hour"] for reward in whole["rewards"])
    assert {len(two[name]) for name in ("requests", "items", "waiting", "p50", "p95", "p99")} == {60}
    assert (sum(two["items"]), sum(two["requests"]), sum(one["requests"])) == (2, 1, 0)
    assert 0 < two["latency"]["p50"] == two["latency"]["p99"] and one["latency"]["p50"] is None
    found = [(one["reward"], one["reason"], one["message"]) for one in whole["failures"]]
    assert found == [("one", "job", "RuntimeError: out of memory"), ("two", "item", "it is refused")]
    assert [one["name"] for one in part["rewards"]] == [one["reward"] for one in part["failures"]] == ["one"]


@in_loop
async def test_prometheus_can_scrape_what_happened(tmp_path):
    gate = Gate(tmp_path)
    async with running(limits={"queue_items": 2}) as (service, client):
        busy = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        await rewards(client, "late", timeout=0.01)
        scored = asyncio.create_task(rewards(client, "aaa", "bb"))
        await queued(service, 1)
        await rewards(client, "c", timeout=1)  # over the queue's two items
        gate.open()
        await asyncio.gather(busy, scored)
        await rewards(client, "refuse")
        await rewards(client, "raise")
        await client.get("/absent")
        text = (await client.get("/metrics")).text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, value in {
        ("vlmrm_requests_total", "/v1/rewards", "200", "other"): 3,
        ("vlmrm_requests_total", "/v1/rewards", "500", "other"): 1,
        ("vlmrm_requests_total", "/v1/rewards", "504", "other"): 1,
        ("vlmrm_requests_total", "404", "other", "other"): 1,
        ("vlmrm_client_items_total", "length", "other"): 6,
        ("vlmrm_failures_total", "item", "length"): 1,
        ("vlmrm_failures_total", "job", "length"): 1,
        ("vlmrm_failures_total", "length", "refused"): 1,
        ("vlmrm_failures_total", "length", "timeout"): 1,
        ("vlmrm_batch_items_sum", "length"): 4,
        ("vlmrm_score_count", "length"): 3,
        ("vlmrm_score_bucket", "2.0", "length"): 1,
        ("vlmrm_stage_seconds_count", "length", "waiting"): 4,
        ("vlmrm_queue_jobs", "length"): 0,
        ("vlmrm_workers_ready", "length"): 1,
    }.items():
        assert found.get(name) == value, name


# In Chromium -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_form_scores_answers_in_a_browser(tmp_path):
    asked = {"prompt": "What is this?", "answer": ["A cat.", EVIL, "refuse"], "image": data_uri(png()), "run": ""}
    fragment = urlencode(asked, doseq=True, quote_via=quote)
    refused = "document.getElementById('failures').innerText.includes('it is refused')"
    with (
        served(tmp_path, 'token = "the-token"', engine="fake_reward.Answers") as (_, url, _),
        Browser(tmp_path / "chromium") as browser,
    ):
        browser.call("Page.navigate", url=url.replace("//", "//user:the-token@") + f"/#{fragment}")
        browser.evaluate(f"new Promise((done) => setInterval(() => {refused} && done(), 50))")
        shown = browser.evaluate(
            "Object.fromEntries([...document.querySelectorAll('[id]')].map((one) => [one.id, one.textContent]))"
        )
        bars = browser.evaluate(
            "[...document.querySelectorAll('.bar')].map((one) => [one.className, one.style.width])"
        )
        title = browser.evaluate("document.title")

    assert browser.complaints == []
    assert shown["state"] == "ready"
    assert "length" in shown["rewards"] and "1 of 1" in shown["rewards"]
    assert "A cat." in shown["scores"] and EVIL in shown["scores"]  # as text
    assert "6.000" in shown["scores"] and f"−{len(EVIL)}.000" in shown["scores"]
    assert "it is refused" in shown["scores"]
    assert [kind for kind, _ in bars] == ["bar", "bar negative"]
    assert float(bars[0][1].removesuffix("%")) == pytest.approx(100 * 6 / (6 + len(EVIL)), abs=1e-3)
    assert "Items: 3, at most 3 a minute; requests: 1" in shown["hour"]
    assert title == "vlmrm reward service"
