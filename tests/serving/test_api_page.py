"""The page at /docs: it needs nothing from elsewhere, lists every route, and its examples work."""

from __future__ import annotations

import json
import re
import shlex

from services import fake, in_loop, rewards, running

CHARACTERS = fake("people", "fake_reward.Characters")
NO_JSON = ("verl_omni", "enqueue", "pull")  # whose examples are of files and ids of one's own


@in_loop
async def test_the_page_loads_nothing_from_elsewhere_and_needs_the_token():
    async with running({**CHARACTERS, "token": "sesame"}, fake("two"), token="whole") as (_, client):
        assert (await client.get("/docs")).status_code == 401
        answer = await client.get("/docs", headers={"Authorization": "Bearer sesame"})
        document = (await client.get("/openapi.json", headers={"Authorization": "Bearer sesame"})).json()
    page, policy = answer.text, answer.headers["content-security-policy"]
    [nonce] = set(re.findall(r"'nonce-([\w-]+)'", policy))
    assert policy.startswith("default-src 'none'") and page.count(f'nonce="{nonce}"') == 1
    assert not re.findall(r"<script|@import|url\(|src=|style=|(?:href|action)=\"(?!#|data:,|openapi.json|\./)", page)
    assert "sesame" not in page
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page, path
    linked = set(re.findall(r'href="#(\w+)"', page))
    assert linked <= set(re.findall(r'id="(\w+)"', page)) and {"RewardRequest", "ErrorResponse"} <= linked


@in_loop
async def test_every_example_on_the_page_is_answered():
    async with running(CHARACTERS) as (_, client):
        await rewards(client, "until it is ready")
        page = (await client.get("/docs")).text
        commands = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
        asked = set()
        for command in commands:
            words = shlex.split(unescape(command), comments=True)
            assert words[:1] == ["curl"] and words[1].startswith("http://localhost/"), command
            if "VLMRM_ADMIN_TOKEN" in command:
                assert words[1].startswith("http://localhost/v1/rewards/people/")
                continue
            if words[1].endswith(NO_JSON):
                continue
            if "-d" in words:
                answer = await client.post(words[1], json=json.loads(words[words.index("-d") + 1]))
            else:
                answer = await client.request("POST" if "-X" in words else "GET", words[1])
            assert answer.status_code == 200, (command, answer.text)
            asked.add(words[1].removeprefix("http://localhost"))
        document = (await client.get("/openapi.json")).json()
    left = {path for path in document["paths"] if "{" not in path and not path.endswith(NO_JSON)} - asked
    assert left == {"/v1/score", "/v1/rerank", "/v2/rerank", "/api/reward/ping"}  # other names of what was asked


def unescape(text: str) -> str:
    for mark, sign in {"&#34;": '"', "&#39;": "'", "&lt;": "<", "&gt;": ">", "&amp;": "&"}.items():
        text = text.replace(mark, sign)
    return text
