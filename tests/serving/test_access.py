"""Who may ask what; and that nothing says more than it should, whatever is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from unittest.mock import Mock

import pytest

from tests.serving.services import fake, in_loop, rewards, running, settings_of
from vlmrm.serving.app import create_app
from vlmrm.serving.clients import Clients
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.front import Front
from vlmrm.serving.http_server import HttpRequest
from vlmrm.serving.service import Service
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import strict_json

OPEN = ["/health", "/ready"]
GUARDED = ["/v1/models", "/metrics", "/docs", "/openapi.json"]
SECRET = "s3cret-of-the-service"
FIRST = {"name": "one's", "token": "f1rst", "rewards": ["one"], "weight": 2.0}
H2C = {"Connection": "Upgrade, HTTP2-Settings"}


def basic(user: str, password: str = "") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}".strip()}


@in_loop
async def test_a_token_guards_everything_but_the_probes():
    async with running(fake(), token=SECRET) as (_, client):
        assert [(await client.get(path)).status_code for path in GUARDED] == [401] * len(GUARDED)
        assert [(await client.get(path, headers=bearer(SECRET))).status_code for path in GUARDED] == [200] * 4
        assert [(await client.get(path)).status_code == 401 for path in OPEN] == [False] * 2
        for given in (bearer(SECRET), basic("anyone", SECRET), basic(SECRET)):
            client.headers = given
            assert (await rewards(client, "aaa")).status_code == 200
        for given in ({}, bearer(SECRET[:-1]), bearer(""), basic("", ""), {"Authorization": "Basic %%"}):
            client.headers = given
            refused = await rewards(client, "aaa")
            assert refused.status_code == 401 and "Basic" in refused.headers["www-authenticate"]


def routes() -> list[tuple[str, str]]:
    """The method and an address of every route that there is."""
    settings = settings_of(fake("one"))
    app = create_app(settings, Service(settings, workers=False))
    paths = app.openapi()["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    hidden = {("GET", path) for path in ("/", "/docs", "/openapi.json")}
    return sorted((method, re.sub(r"{\w+}", "one", path)) for method, path in listed | hidden if path not in OPEN)


@pytest.mark.parametrize("tokens", [{"token": SECRET}, {"clients": [FIRST]}, {"token": SECRET, "clients": [FIRST]}])
@pytest.mark.parametrize(("method", "path"), routes())
def test_a_body_is_not_read_before_its_token(method, path, tokens):
    front, connection = Front(settings_of(fake("one"), **tokens)), Mock(peer="127.0.0.1")
    for given in ({}, bearer("wrong"), basic("any", "wrong")):
        headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
        front.begin(HttpRequest(connection, method, path, b"", "1.1", headers))  # of a head alone
        _, status, headers, body = connection.answer.call_args.args
        assert status == 401 and b"Basic" in dict(headers)[b"www-authenticate"]
        assert json.loads(body)["error"]["message"].startswith("a token is needed")


@in_loop
async def test_a_client_opens_its_own_rewards_alone():
    async with running(fake("one"), fake("two"), token=SECRET, clients=[FIRST]) as (service, client):
        client.headers = bearer("f1rst")
        assert (await rewards(client, "a", model="one")).status_code == 200
        assert [(it.job.client, it.job.weight) for it in service.backend._entries.values()] == [("one's", 2.0)]
        for named in ({"model": "two"}, {"models": ["one", "two"]}, {"model": "three"}):  # nor what there is
            assert (await rewards(client, "a", **named)).status_code == 401
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["one"]
        assert (await client.get("/metrics")).status_code == 401


PEER = "10.0.0.1"
TOKENS = {"token": "T", "clients": [FIRST]}
PROXIES = {"trusted_proxies": ["10.0.0.0/24", "::1"]}


@pytest.mark.parametrize(
    ("settings", "header", "value", "name", "label"),
    [
        (TOKENS, "authorization", "Bearer f1rst", "one's", "one's"),
        (TOKENS, "authorization", "Bearer T", "default", "default"),
        (TOKENS, "authorization", "Bearer t", None, None),
        ({}, "authorization", "Bearer invented", PEER, "other"),
        ({}, "x-forwarded-for", "1.1.1.1", PEER, "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1, 2.2.2.2", "2.2.2.2", "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1,2.2.2.2, ::1,10.0.0.9", "2.2.2.2", "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1, unknown", PEER, "other"),
    ],
)
def test_a_client_is_a_configured_name_or_an_address(settings, header, value, name, label):
    client = Clients(settings_of(fake("one"), **settings)).identify({header.encode(): value.encode()}, PEER)
    assert (client and client.name, client and client.label) == (name, label)


def test_neither_invented_rewards_nor_tokens_make_lanes():
    clients, lanes = Clients(settings_of(fake("one"), fake("two"))), set()
    for number in range(9):
        client = clients.identify({b"authorization": b"Bearer %d" % number}, PEER)
        lanes.add(client.lane(f"/{number}/compute", b'{"model": "%d"}' % number))
    of_two = client.lane("/v1/rewards", b'{"items": [], "model": "two"}')
    assert len(lanes) == 1 and of_two == client.lane("/two/compute", b"") and of_two not in lanes


@in_loop
async def test_without_a_token_only_local_names_are_answered():
    async with running() as (_, client):
        for host in ("evil.test", "evil.test:8080", "localhost.evil.test", "", "127.0.0.1.evil.test"):
            refused = await client.get("/v1/models", headers={"Host": host})
            assert refused.status_code == 421, host
        for host in ("localhost:8080", "127.0.0.1:1", "[::1]:8080", "10.1.2.3"):
            assert (await client.get("/v1/models", headers={"Host": host})).status_code == 200, host
    async with running(token=SECRET) as (_, client):
        assert (await client.get("/health", headers={"Host": "rewards.internal"})).status_code == 200


@in_loop
async def test_pages_of_other_sites_cannot_ask():
    async with running() as (_, client):
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            client.headers = {"Sec-Fetch-Site": site}
            assert (await rewards(client, "a")).status_code == status
            assert (await client.get("/")).status_code == 200  # by a link


@in_loop
async def test_every_error_is_one_sentence_in_one_form():
    limits = {"max_body_bytes": 2000, "max_items": 3, "body_timeout": 0.2}
    json_ = {"Content-Type": "application/json"}

    async def endless():  # as far as anybody reads it
        for _ in range(100):
            yield b" " * 500

    async with running(limits=limits) as (_, client):
        found = [
            (await client.get("/absent"), 404, "no such address"),
            (await client.get("/v1/rewards"), 405, "method"),
            (await client.post("/v1/rewards", json={"itms": [], "x": 1}), 422, "itms (did you mean items?), and 2"),
            (await client.post("/v1/rewards", json={"items": [{"group": True}]}), 422, "items.0.group: Input"),
            (await client.post("/get_reward", json={"query": ["a"], "label": [1]}), 422, "(did you mean labels?)"),
            (await client.post("/v1/rewards?timeout=3", json={}), 400, "?timeout of the address"),
            (await client.post("/v1/rewards", json={}, headers={"Content-Encoding": "gzip"}), 415, "Content-Encoding"),
            (await client.post("/v1/rewards", json={}, headers={"Upgrade": "h2c", **H2C}), 400, "an upgrade to h2c"),
            (await client.post("/v1/rewards", json={}, headers={"X": "x" * 2**16}), 431, "limit of 65536"),
            (await client.post("/v1/rewards", content=b"{}"), 422, "Content-Type: application/json"),
            (await client.post("/v1/rewards", content=b'{"a": 1,', headers=json_), 400, "the JSON is broken"),
            (await rewards(client, *"abcd"), 400, "there are 4 items"),
            (await client.post("/v1/rewards", content=b" " * 2001, headers=json_), 413, "over the limit of 2000"),
            (await client.post("/v1/rewards", content=endless(), headers=json_), 413, "over the limit of 2000"),
            (await rewards(client, "raise"), 500, "RuntimeError: out of memory"),
        ]
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        stalled = await reader.read()
        writer.close()
    assert b" 408 " in stalled and b"did not come in 0.2 s, with" in stalled
    for answer, status, words in found:
        assert answer.status_code == status, answer.text
        [error] = answer.json().values()
        assert set(error) == {"message", "type"} and words in error["message"]
        assert error["message"].endswith(".") and "\n" not in error["message"]
        assert answer.headers["x-request-id"] and answer.headers["x-content-type-options"] == "nosniff"


@in_loop
async def test_a_service_fault_tells_only_the_request_id(caplog, monkeypatch):
    async with running() as (service, client):
        monkeypatch.setattr(service, "score", None)
        client.headers = {"X-Request-ID": "mine-1"}
        answer = await rewards(client, "a")
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["error"]["message"] == "the service failed: its log says more of this id."
    assert "'NoneType' object is not callable" in caplog.text


@in_loop
async def test_a_worker_knows_neither_service_token_nor_rank(monkeypatch):
    monkeypatch.setenv("VLMRM_TOKEN", SECRET)
    monkeypatch.setenv("RANK", "0")
    async with running(fake("environment", "fake_reward.Environment"), token=SECRET) as (_, client):
        client.headers = bearer(SECRET)
        known = (await rewards(client, "VLMRM_TOKEN", "RANK", "PATH")).json()["data"]
    assert [one["score"] for one in known] == [0, 0, 1]


@in_loop
async def test_no_answer_and_no_log_holds_a_secret(tmp_path, capfd):
    leaky = fake("leaky", "fake_reward.Leaky", options={"api_key": SECRET, "folder": str(tmp_path)})
    async with running(leaky, fake("one"), token="wh0le", clients=[FIRST]) as (service, client):
        client.headers = bearer("wh0le")
        texts = [(await rewards(client, what, model="leaky")).text for what in ("a", "item", "raise")]
        texts += [(await client.get(path)).text for path in [*OPEN, *GUARDED]]
    whole = "\n".join(texts)
    assert "cannot read weights.bin" in whole and "with the key ***" in whole
    log = capfd.readouterr().err + repr([service.settings, *(one.spec for one in service.replicas["leaky"])])
    assert "RuntimeError: cannot read" in log
    assert [one for one in (SECRET, "f1rst", "wh0le", str(tmp_path)) if one in whole] == []
    assert [one for one in (SECRET, "'f1rst'", "'wh0le'") if one in log] == []


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (b"[NaN]", "has NaN"),
        (b"[" * 50 + b"]" * 50, "nested deeper than the limit of 32"),
        (b"[" + b"0," * 2_000 + b"0]", "over 1000 values"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "::", "a": "\\u003A"}', "the key 'a' twice"),
        (b"[1e999]", "a number that is too large"),
        (b'["\\udc00"]', "broken: lone leading surrogate"),
        (b'{"a": tru}', "broken: .* at line 1 column 10"),
    ],
)
def test_ambiguous_json_and_json_bombs_are_refused(body, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        strict_json(body, Limits(max_json_values=1000))


@in_loop
async def test_every_route_reads_its_json_strictly():
    async with running(fake("one")) as (_, client):
        paths = (await client.get("/openapi.json")).json()["paths"]
        takes = {path: str(one.get("post", {}).get("requestBody")) for path, one in paths.items()}
        posts = [re.sub(r"\{\w+\}", "one", path) for path, body in takes.items() if "application/json" in body]
        for path in posts:
            sent = {"content": b'{"a": 1, "a": 2}', "headers": {"Content-Type": "application/json"}}
            answer = await client.post(path, **sent)
            assert answer.status_code != 422 and "twice" in answer.text, f"{path}: {answer.text}"
    assert len(posts) > 5


@in_loop
async def test_every_request_is_one_line_with_its_client(caplog):
    caplog.set_level(logging.INFO, "vlmrm")
    async with running() as (_, client):
        await rewards(client, "secret words")
        await client.get("/health")
        await client.get("/absent/secret words")
    lines = [one.fields for one in caplog.records if one.getMessage() == "request"]
    told = [(one["client"], one["route"], one["status"], one["method"]) for one in lines]
    assert told == [("127.0.0.1", "/v1/rewards", 200, "POST"), ("127.0.0.1", "other", 404, "GET")]
    assert "secret words" not in caplog.text
