"""Who may ask what; and that nothing says more than it should, whatever is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import socket

import httpx2 as httpx
import pytest
from services import eventually, fake, in_loop, rewards, running, served, settings_of

from vlmrm.serving.app import create_app
from vlmrm.serving.errors import InvalidRequest
from vlmrm.serving.service import Service
from vlmrm.serving.settings import Limits
from vlmrm.serving.strict_json import strict_json
from vlmrm.serving.telemetry import LineFormatter
from vlmrm.serving.worker.channel import find_secrets, redact, redact_paths

OPEN = ["/health", "/ready"]
GUARDED = ["/v1/models", "/metrics", "/docs", "/openapi.json"]
SECRET = "s3cret-of-the-service"


def basic(user: str, password: str = "") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@in_loop
async def test_a_token_guards_everything_but_the_probes():
    async with running(fake(), token=SECRET) as (_, client):
        assert [(await client.get(path)).status_code for path in GUARDED] == [401] * len(GUARDED)
        assert [(await client.get(path, headers=bearer(SECRET))).status_code for path in GUARDED] == [200] * 4
        assert [(await client.get(path)).status_code == 401 for path in OPEN] == [False] * 2
        refused = await rewards(client, "a")
        assert refused.status_code == 401 and "Basic" in refused.headers["www-authenticate"]
        assert refused.json()["error"]["message"] == "a token is needed: send it as Authorization: Bearer TOKEN."
        for given in (bearer(SECRET), basic("anyone", SECRET), basic(SECRET)):
            client.headers = given
            assert (await rewards(client, "aaa")).status_code == 200
        for given in (
            bearer(SECRET[:-1]),
            bearer(""),
            basic("", ""),
            {"Authorization": "Basic %%"},
            {"Authorization": "x"},
        ):
            client.headers = given
            assert (await rewards(client, "aaa")).status_code == 401


def routes() -> list[tuple[str, str]]:
    """The method and an address of every route that there is."""
    app = create_app(Service(settings_of(fake("one")), workers=False))
    paths = app.openapi()["paths"]
    listed = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    hidden = {("GET", path) for path in ("/", "/docs", "/openapi.json")}
    return sorted((method, re.sub(r"{\w+}", "one", path)) for method, path in listed | hidden if path not in OPEN)


@pytest.mark.parametrize("tokens", [{"token": SECRET}, {"reward": "first"}, {"token": SECRET, "reward": "first"}])
@pytest.mark.parametrize(("method", "path"), routes())
def test_a_body_is_not_read_before_its_token(method, path, tokens):
    settings = settings_of(fake("one", token=tokens.get("reward", "")), token=tokens.get("token", ""))
    app = create_app(Service(settings, workers=False))

    async def unread():
        raise AssertionError("the body was read")
        yield b""

    @in_loop
    async def ask():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for given in ({}, bearer("wrong"), basic("any", "wrong")):
                answer = await client.request(method, path, headers=given, content=unread())
                assert answer.status_code == 401 and "Basic" in answer.headers["www-authenticate"]
                assert answer.json()["error"]["message"].startswith("a token is needed")

    ask()


@in_loop
async def test_a_body_is_not_validated_before_its_token():
    rewards = fake("one", token="first"), fake("two")
    async with running(*rewards, workers=False, admin_token=SECRET) as (_, client):
        guarded = [(method, path) for method, path in routes() if "/one/" in path]  # elsewhere a body names the reward
        assert len(guarded) > 10
        for method, path in guarded:
            for body in (b"{", b"{}"):
                sent = {"content": body, "headers": {"Content-Type": "application/json", **bearer("wrong")}}
                answer = await client.request(method, path, **sent)
                assert answer.status_code == 401, (method, path, answer.text)
    async with running(workers=False) as (_, client):
        answer = await client.put("/v1/rewards/length/model", content=b"{}")
        assert answer.status_code == 403 and "VLMRM_ADMIN_TOKEN" in answer.text


def test_a_body_that_does_not_come_is_not_waited_for_without_a_token():
    with served(token=SECRET, limits={"body_timeout": 5}) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 80), timeout=60) as client:
            client.sendall(b"POST /v1/rewards HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n\r\n")
            assert client.makefile("rb").readline().split()[1] == b"401"


@in_loop
async def test_a_body_to_one_reward_is_not_read_for_the_token_of_another():
    async def unread():
        raise AssertionError("the body was read")
        yield b""

    async with running(fake("one", token="first"), fake("two", token="second"), workers=False) as (_, client):
        for path in ("/two/compute", "/two/predict", "/two/get_reward"):
            assert (await client.post(path, headers=bearer("first"), content=unread())).status_code == 401
        absent = await client.post("/three/compute", headers=bearer("first"), json={"prompt": ["a"]})
        assert "no reward three" in absent.json()["error"]


@in_loop
async def test_a_reward_s_own_token_opens_that_reward_alone():
    async with running(fake("one", token="first"), fake("two"), token=SECRET) as (_, client):
        client.headers = bearer("first")
        assert (await rewards(client, "a", model="one")).status_code == 200
        assert (await rewards(client, "a", model="two")).status_code == 401
        assert (await rewards(client, "a", model="three")).status_code == 401  # nor what there is
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["one"]
        assert (await client.get("/metrics")).status_code == 401


@in_loop
async def test_without_a_token_only_the_machine_s_own_names_are_answered():
    async with running() as (_, client):
        for host in ("evil.test", "evil.test:8080", "localhost.evil.test", "", "127.0.0.1.evil.test"):
            refused = await client.get("/v1/models", headers={"Host": host})
            assert refused.status_code == 421, host
        for host in ("localhost:8080", "127.0.0.1:1", "[::1]:8080", "10.1.2.3"):
            assert (await client.get("/v1/models", headers={"Host": host})).status_code == 200, host
    async with running(token=SECRET) as (_, client):
        assert (await client.get("/health", headers={"Host": "rewards.internal"})).status_code == 200


@in_loop
async def test_probes_may_ask_for_the_head_alone():
    async with running() as (service, client):
        await eventually(lambda: service.health("length").ready)
        for path in OPEN:
            answer = await client.head(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), path


def test_a_probe_of_http_1_0_is_answered():
    with served() as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 80), timeout=300) as probe:
            probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert probe.makefile("rb").readline().split()[1] == b"200"
        with socket.create_connection((address.host, address.port or 80), timeout=300) as nameless:
            nameless.sendall(b"GET /health HTTP/1.0\r\nHost: evil.test\r\n\r\n")
            assert nameless.makefile("rb").readline().split()[1] == b"421"


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
    long = {"Content-Type": "application/json"}
    gzip = {"Content-Encoding": "gzip"}
    h2c = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}

    async def endless():
        while True:
            yield b" " * 500

    async def stalled():
        yield b'{"items":'
        await asyncio.Event().wait()

    async with running(limits=limits) as (_, client):
        found = [
            (await client.get("/absent"), 404, "there is no such address"),
            (await client.get("/v1/rewards"), 405, "this address does not take this method"),
            (await client.post("/v1/rewards", json={"items": []}), 422, "items: List should have at least 1 item"),
            (await client.post("/v1/rewards", json={"itms": [], "x": 1}), 422, "itms (did you mean items?), and 2"),
            (await client.post("/v1/rewards", json={}), 422, "items is missing."),
            (await client.post("/v1/rewards", json=[]), 422, "the body: "),
            (await client.post("/v1/rewards", json={"items": [{"group": True}]}), 422, "items.0.group: Input"),
            (await client.post("/rerank", json={"query": "a", "documents": [1]}), 422, "documents.0: Input should be"),
            (await client.post("/predict", json={"inputs": "a", "raw": 1}), 422, "unknown key raw."),
            (await client.post("/get_reward", json={"query": ["a"], "label": [1]}), 422, "(did you mean labels?)"),
            (await client.post("/remote_rm", json={"prompt": "a", "respons": "b"}), 422, "(did you mean response?)"),
            (await client.post("/v1/rewards?timeout=3", json={}), 400, "?timeout of the address would not be read"),
            (await client.put("/v1/rewards/length/model?beside=false", json={}), 400, "?beside of the address"),
            (await client.post("/v1/rewards", json={}, headers=gzip), 415, "the Content-Encoding"),
            (await client.post("/v1/rewards", json={}, headers=h2c), 400, "an upgrade to h2c: send it in HTTP/1.1"),
            (await client.post("/v1/rewards", json={}, headers={"X": "x" * 2**16}), 431, "over the limit of 65536"),
            (await client.post("/v1/rewards", content=b"{}"), 422, "send it as Content-Type: application/json."),
            (await client.post("/v1/rewards", content=b'{"a": 1,', headers=long), 400, "the JSON is broken"),
            (await rewards(client, *"abcd"), 400, "there are 4 items: send between 1 and 3"),
            (await client.post("/v1/rewards", content=b" " * 2001, headers=long), 413, "over the limit of 2000 bytes"),
            (await client.post("/v1/rewards", content=endless(), headers=long), 413, "over the limit of 2000 bytes"),
            (await client.post("/v1/rewards", content=stalled(), headers=long), 408, "did not come in 0.2 s"),
            (await rewards(client, "raise"), 500, "RuntimeError: out of memory"),
        ]  # fmt: skip
    for answer, status, sentence in found:
        assert answer.status_code == status, answer.text
        [error] = answer.json().values()
        assert set(error) == {"message", "type"} and sentence in error["message"]
        assert error["message"].endswith(".") and "\n" not in error["message"]
        assert answer.headers["x-request-id"] and answer.headers["x-content-type-options"] == "nosniff"


@in_loop
async def test_a_fault_of_the_service_says_nothing_but_the_request_id(caplog, monkeypatch):
    async with running() as (service, client):
        monkeypatch.setattr(service, "accept", None)
        answer = await client.post(
            "/v1/rewards", json={"items": [{"prompt": "a"}]}, headers={"X-Request-ID": "mine-1"}
        )
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["error"]["message"] == "the service failed: tell its operator the request id mine-1."
    assert "'NoneType' object is not callable" in caplog.text


@in_loop
async def test_request_ids_are_the_client_s_where_they_are_harmless():
    async with running() as (_, client):
        for given, kept in (("abc-1.2_X", True), ("a" * 65, False), ("a b", False), ('a"\\', False), ("é", False)):
            answer = await client.get("/health", headers={"X-Request-ID": given.encode("latin-1")})
            assert (answer.headers["x-request-id"] == given) == kept
        plain = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert plain[0] != plain[1]


@in_loop
async def test_a_worker_knows_no_token_of_the_service_and_is_no_rank(monkeypatch):
    monkeypatch.setenv("VLMRM_TOKEN", SECRET)
    monkeypatch.setenv("RANK", "0")
    async with running(fake("environment", "fake_reward.Environment"), token=SECRET) as (_, client):
        client.headers = bearer(SECRET)
        [known] = (await rewards(client, "VLMRM_TOKEN")).json()["data"]
        [rank] = (await rewards(client, "RANK")).json()["data"]
        [path] = (await rewards(client, "PATH")).json()["data"]
    assert (known["score"], rank["score"], path["score"]) == (0, 0, 1)


@in_loop
async def test_no_answer_and_no_log_holds_a_secret(tmp_path, capfd):
    leaky = fake("leaky", "fake_reward.Leaky", options={"api_key": SECRET, "folder": str(tmp_path)})
    async with running(leaky, fake("one", token="f1rst"), token="wh0le") as (service, client):
        client.headers = bearer("wh0le")
        texts = [(await rewards(client, what, model="leaky")).text for what in ("a", "item", "raise")]
        texts += [(await client.get(path)).text for path in [*OPEN, *GUARDED]]
    whole = "\n".join(texts)
    assert "cannot read weights.bin" in whole and "with the key ***" in whole
    log = capfd.readouterr().err + repr([service.settings, *(one.spec for one in service.replicas["leaky"])])
    assert "RuntimeError: cannot read" in log
    assert [one for one in (SECRET, "f1rst", "wh0le", str(tmp_path)) if one in whole] == []
    assert [one for one in (SECRET, "'f1rst'", "'wh0le'") if one in log] == []


def test_paths_and_secrets_are_left_out_of_texts():
    for text, rest in [
        ("FileNotFoundError: '/srv/models/a b/x.bin'", "FileNotFoundError: 'a b/x.bin'"),
        ("no /srv/models/x.bin: look", "no x.bin: look"),
        ("https://host/a/b.png and org/model and 3/4 and </b>", "https://host/a/b.png and org/model and 3/4 and </b>"),
        ("~/keys/id and /tmp", "id and /tmp"),
    ]:
        assert redact_paths(text) == rest
    assert find_secrets({"api_key": "a", "b": [{"hf_token": "c", "name": "d"}], "key": ""}) == {"a", "c"}
    assert redact({"x": ["say a", 1, b"/a/b"]}, {"say"}) == {"x": ["*** a", 1, b"/a/b"]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (b'[{"b": {"c": 1, "c": 1}}]', "the key 'c' twice"),
        (b"[NaN]", "has NaN"),
        (b"[-Infinity]", "has -Infinity"),
        (b"[" * 50 + b"]" * 50, "nested deeper than the limit of 32"),
        (b"[" * 900 + b"]" * 900, "nested deeper than the limit of 32"),
        (b'"",' * 5000, "over 1000 values"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "nested deeper than"),
        (b"[" + b"0," * 2_000 + b"0]", "over 1000 values"),
        (b"[[]" * 900 + b"]" * 900, "over 1000 values"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": {"b": ":", "a:": ":\\u003a", "a:": 1}}', "the key 'a:' twice"),
        (b'{"a": "::", "a": "\\u003A"}', "the key 'a' twice"),
        (b"[1e999]", "a number that is too large"),
        (b'["\\udc00"]', "broken: lone leading surrogate"),
        (b'{"a": tru}', "broken: .* at line 1 column 10"),
        (b"", "broken: .* at line 1 column 0"),
        (b"[" + b"1" * 5000 + b"]", "broken: number out of range"),
        (b'"' + b'\\"' * 1_000_000 + b"[" * 2000, "broken: EOF while parsing a string"),
    ],
)
def test_json_that_is_ambiguous_or_a_bomb_is_refused(body, sentence):
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


def test_json_within_the_limits_is_what_it_says():
    text = "[{" + ",".join(f'"{n}": "[[[{{{{,,,\\"" ' for n in range(900)) + "}]"
    assert strict_json(text.encode(), Limits(max_json_values=1000)) == json.loads(text)
    deep = "[" * 32 + "]" * 32
    assert strict_json(deep.encode(), Limits()) == json.loads(deep)


def test_log_lines_cannot_be_forged_and_are_json_on_demand():
    record = logging.LogRecord("vlmrm", logging.INFO, "", 0, "request %s", ("a\nb",), None)
    record.fields = {"status": 200, "route": "/x\r\ny"}
    line = LineFormatter(as_json=False).format(record)
    assert line.endswith("info request a\\nb status=200 route=/x\\r\\ny") and len(line.splitlines()) == 1
    found = json.loads(LineFormatter(as_json=True).format(record))
    assert found["message"] == "request a\nb" and found["status"] == 200 and found["level"] == "info"


@in_loop
async def test_every_request_is_one_line_with_its_id(caplog):
    caplog.set_level(logging.INFO, "vlmrm")
    async with running() as (_, client):
        await client.post(
            "/v1/rewards", json={"items": [{"prompt": "secret words"}]}, headers={"X-Request-ID": "id-1"}
        )
        await client.get("/health")
        await client.get("/absent/secret words")
    lines = [one.fields for one in caplog.records if one.getMessage() == "request"]
    assert [(one["route"], one["status"], one["method"]) for one in lines] == [
        ("/v1/rewards", 200, "POST"),
        ("other", 404, "GET"),
    ]
    assert "secret words" not in caplog.text
