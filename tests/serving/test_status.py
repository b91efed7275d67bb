"""The status page, in a real browser; and the figures that it and Prometheus show."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.sent_media import data_uri, png
from tests.serving.services import Gate, fake, in_loop, queued, rewards, running
from tests.serving.test_server import served

CHROMIUM = shutil.which("chromium")
EVIL = '<img src=x onerror="document.title=1">'


@in_loop
async def test_the_page_runs_and_loads_nothing_but_its_own():
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
    blocks = [fake("one", token="first"), fake("two", options={"info": {"model": EVIL}})]
    async with running(*blocks, token="whole") as (_, client):
        assert (await client.get("/")).status_code == (await client.get("/v1/status")).status_code == 401
        client.headers = {"Authorization": "Bearer whole"}
        await rewards(client, "aaa", "refuse", model="two")
        await rewards(client, "raise", model="one")
        whole = (await client.get("/v1/status")).json()
        client.headers = {"Authorization": "Bearer first"}
        part = (await client.get("/v1/status")).json()
        assert "two" not in (await client.get("/")).text.partition("<script")[0]
    assert [(one["name"], one["ready"], one["jobs"]) for one in whole["rewards"]] == [("one", 1, 0), ("two", 1, 0)]
    assert [one["restarts"] for one in whole["rewards"]] == [0, 0]
    one, two = (reward["hour"] for reward in whole["rewards"])
    assert {len(two[name]) for name in ("requests", "items", "waiting", "p50", "p95", "p99")} == {60}
    assert (sum(two["items"]), sum(two["requests"]), sum(one["requests"])) == (2, 1, 0)
    assert 0 < two["latency"]["p50"] == two["latency"]["p99"] and one["latency"]["p50"] is None
    found = [(one["reward"], one["reason"], one["message"]) for one in whole["failures"]]
    assert found == [("one", "job", "RuntimeError: out of memory"), ("two", "item", "it is refused")]
    assert [one["name"] for one in part["rewards"]] == ["one"]
    assert [one["reward"] for one in part["failures"]] == ["one"]


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
        ("vlmrm_requests_total", "/v1/rewards", "200"): 3,
        ("vlmrm_requests_total", "/v1/rewards", "500"): 1,
        ("vlmrm_requests_total", "/v1/rewards", "504"): 1,
        ("vlmrm_requests_total", "404", "other"): 1,
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


class Page(HTMLParser):
    """The text of each element that has an id; and the widths of the bars."""

    def __init__(self, html: str):
        super().__init__()
        self.texts: dict[str, str] = {}
        self.bars: list[tuple[str, str]] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in ("meta", "link", "input", "img", "br"):
            self._open.append((tag, given.get("id")))
        if (given.get("class") or "").startswith("bar"):
            self.bars.append((given["class"] or "", given.get("style") or ""))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, name in self._open:
            if name is not None:
                self.texts[name] = self.texts.get(name, "") + data


def browse(folder: Path, address: str, *options: str) -> tuple[str, str]:
    """The page as Chromium has it in the end, and what it complained about."""
    command = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'chromium'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=10000", *options]
    done = subprocess.run([str(CHROMIUM), *command, address], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_form_scores_answers_in_a_browser(tmp_path):
    asked = {"prompt": "What is this?", "answer": ["A cat.", EVIL, "refuse"], "image": data_uri(png()), "run": ""}
    fragment = urlencode(asked, doseq=True, quote_via=quote)
    with served(tmp_path, 'token = "the-token"', engine="fake_reward.Answers") as (_, url, _):
        html, complaints = browse(tmp_path, url.replace("//", "//user:the-token@") + f"/#{fragment}", "--dump-dom")
        token = {"Authorization": "Bearer the-token"}
        scored = httpx.get(f"{url}/v1/status", headers=token, timeout=300).json()
    page = Page(html)
    assert complaints == ""
    assert page.texts["state"] == "ready"
    assert "length" in page.texts["rewards"] and "1 of 1" in page.texts["rewards"]
    assert "A cat." in page.texts["scores"] and EVIL in page.texts["scores"]  # as text
    assert "6.000" in page.texts["scores"] and f"−{len(EVIL)}.000" in page.texts["scores"]
    assert "it is refused" in page.texts["scores"] and "it is refused" in page.texts["failures"]
    assert [kind for kind, _ in page.bars] == ["bar", "bar negative"]
    assert f"width: {100 * 6 / (6 + len(EVIL)):.4f}"[:14] in page.bars[0][1]
    assert "Items: 3, at most 3 a minute; requests: 1" in page.texts["hour"]
    assert sum(scored["rewards"][0]["hour"]["items"]) == 3
    assert "<title>vlmrm reward service</title>" in html


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_errors_are_shown_in_a_browser(tmp_path):
    decoder = f'decode_args = {{ model_path = "vae", venv_python = "{tmp_path / "python"}" }}'
    with served(tmp_path, decoder, engine="fake_reward.Answers") as (_, url, _):
        html, complaints = browse(tmp_path, f"{url}/#prompt=raise&run", "--dump-dom")
    page = Page(html)
    assert "RuntimeError: out of memory" in page.texts["problem"]
    assert "decoder of latents" in page.texts["rewards"] and "cannot be started" in page.texts["rewards"]
    assert complaints == ""
