"""A scorer with its model behind an address: the same scores, what it asks again, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle
import socket
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
import stamina
from PIL import Image

from vlmrm import load_scorer
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.scoring import AsyncRemoteScorer, RemoteScorer, Scorer, remote

URL = "http://service:8080/rm"


def asked(answer: str, *images) -> list[dict]:
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "Why?"}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


class Service:
    """Answers the length of each item's last text, after the `faults`, each taken once: (status, body, headers).

    The first `together` requests are answered when all of them are there.
    """

    def __init__(self, *faults, together: int = 1):
        self.together, self.all_there = together, asyncio.Event()
        self.faults = list(faults)
        self.requests: list[tuple[httpx.Request, dict, dict[str, bytes]]] = []
        self.busy = self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.busy += 1
        self.most = max(self.most, self.busy)
        body, files = parts_of(request)
        self.requests.append((request, body, files))
        if self.busy == self.together:
            self.all_there.set()
        await self.all_there.wait()
        self.busy -= 1
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            status, content, *headers = fault
            return httpx.Response(status, content=content, headers=headers[0] if headers else None)
        return httpx.Response(
            200, json={"revision": "abc", "data": [self.answer(*one) for one in enumerate(body["items"])]}
        )

    def answer(self, index: int, item: dict) -> dict:
        text = item["messages"][-1]["content"][0]["text"]
        return {
            "index": index,
            "raw": None if text == "bad" else float(len(text)),
            "error": "no" if text == "bad" else None,
        }

    def scorer(self, **options) -> AsyncRemoteScorer:
        return AsyncRemoteScorer(options.pop("url", URL), transport=httpx.MockTransport(self), **options)


def parts_of(request: httpx.Request) -> tuple[dict, dict[str, bytes]]:
    kind = request.headers["Content-Type"]
    if kind == "application/json":
        return json.loads(request.content), {}
    form = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + request.content)
    parts = {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in form.get_payload()
    }
    return json.loads(parts.pop("request")), parts


def ask(service: Service, conversations, **options):
    async def go():
        async with service.scorer(**options) as scorer:
            return await scorer.score(conversations)

    return asyncio.run(go())


def test_scores_keep_their_order_over_many_requests(monkeypatch):
    monkeypatch.setattr(remote, "CHUNK_ITEMS", 3)
    service = Service(together=4)
    answers = ["x" * (number % 7) for number in range(50)]
    assert ask(service, [asked(answer) for answer in answers], concurrency=4) == [len(answer) for answer in answers]
    assert len(service.requests) == 17 and service.most == 4


def test_outputs_come_by_their_names():
    service = Service()
    service.answer = lambda i, _: {"index": i, "raw": 1.0, "details": {"outputs": {"a": 2.0}} if i else None}

    async def go():
        async with service.scorer() as scorer:
            return await scorer.score_outputs([asked("one"), asked("other")])

    assert asyncio.run(go()) == [{"score": 1.0}, {"a": 2.0}]


def test_a_group_travels_whole(monkeypatch):
    monkeypatch.setattr(remote, "CHUNK_ITEMS", 3)
    service = Service()

    async def go():
        async with service.scorer() as scorer:
            return await scorer.score_groups([("Why?", ["a", "bb"]), ("Who?", ["ccc"] * 5), ("How?", [])])

    assert asyncio.run(go()) == [[1, 2], [3] * 5, []]
    [(_, body, _)] = service.requests
    assert [item["group"] for item in body["items"]] == ["0"] * 2 + ["1"] * 5


def test_each_distinct_picture_is_sent_once(tmp_path):
    red, blue = (Image.new("RGB", (28, 28), colour) for colour in ("red", "blue"))
    red.save(tmp_path / "red.jpg")
    encoded = (tmp_path / "red.jpg").read_bytes()
    service = Service()
    images = [
        blue,
        tmp_path / "red.jpg",
        str(tmp_path / "red.jpg"),
        encoded,
        blue.copy(),
        {"bytes": encoded, "path": None},
    ]
    ask(service, [asked("a", image) for image in images])
    [(_, body, files)] = service.requests
    shown = [item["messages"][0]["content"][0]["image"].removeprefix("attachment:") for item in body["items"]]
    assert set(shown) == set(files) and len(files) == 3  # a file and the same bytes are two
    assert files[shown[1]] == files[shown[2]] == files[shown[3]] == files[shown[5]] == encoded
    assert Image.open(io.BytesIO(files[shown[0]])).tobytes() == blue.tobytes() and shown[0] == shown[4]


def test_urls_are_passed_on_and_frames_become_files():
    service = Service()
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "blue", "red")]
    video = asked("a", "https://host/cat.png")
    video[0]["content"].append({"type": "video", "video": frames, "sample_fps": 1.0})
    ask(service, [video])
    [(_, body, files)] = service.requests
    image, _, shown = body["items"][0]["messages"][0]["content"]
    assert image["image"] == "https://host/cat.png" and shown["sample_fps"] == 1.0
    assert len(shown["video"]) == 3 and len(files) == 2


def test_unscorable_conversations_are_named_by_their_place(tmp_path):
    with pytest.raises(RowError, match=r"^conversation 2: no$"):
        ask(Service(), [asked("a"), asked("b"), asked("bad")])
    service = Service()
    with pytest.raises(RowError, match=r"^conversation 1: .*gone.png does not exist"):
        ask(service, [asked("a"), asked("b", tmp_path / "gone.png")])

    async def each():
        async with service.scorer() as scorer:
            return await scorer.score_each([asked("bad"), asked("bb", b""), asked("ccc")])

    first, second, third = asyncio.run(each())
    assert (first.reason, third) == ("no", 3) and "zero bytes" in second.reason


@pytest.mark.parametrize(
    "fault",
    [
        (503, b"", {"Retry-After": "0.01"}),
        (429, b""),
        (502, b"<html>"),
        (504, b"{}"),
        httpx.ConnectError("refused"),
        httpx.RemoteProtocolError("cut"),
    ],
)
def test_what_may_pass_is_asked_again(fault):
    service = Service(fault)
    with stamina.set_testing(True, attempts=2):  # without pauses
        assert ask(service, [asked("aaa")]) == [3]
    assert len(service.requests) == 2


def test_a_service_that_is_down_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens there
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with RemoteScorer(address, timeout=0.6) as scorer, pytest.raises(RewardError, match="cannot be reached"):
            scorer.score([asked("a")])


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ((401, b"{}"), ConfigError, "service:8080/rm/v1/rewards refused the token: set VLMRM_TOKEN"),
        ((404, b'{"error": {"message": "there is no reward x: choose from a, b."}}'), ConfigError, "choose from a, b"),
        ((307, b"", {"Location": "http://other"}), ConfigError, "answered 307: give the address"),
        ((400, b'{"error": {"message": "too many items"}}'), RewardError, "answered 400: too many items"),
        ((200, b"<html>"), RewardError, "did not answer with JSON"),
        ((200, b'{"data": [null]}'), RewardError, "with something else"),
        ((200, b'{"data": [{"index": 0, "raw": NaN}]}'), RowError, "its score is nan"),
        ((503, b"", {"Retry-After": "3600"}), RewardError, "answered 503"),
        (httpx.ReadTimeout("late"), RewardError, "did not answer in 600 s"),
    ],
)
def test_what_will_not_pass_is_said_at_once(fault, kind, reason):
    service = Service(fault)
    with pytest.raises(kind, match=reason):
        ask(service, [asked("a")])
    assert len(service.requests) == 1


@pytest.fixture
def minutes(monkeypatch):
    """`minutes(service)`: by the client's clock each request to it takes one, and nothing else any time."""

    def of(service: Service) -> Service:
        clock = SimpleNamespace(monotonic=lambda: 60.0 * len(service.requests))
        monkeypatch.setattr("vlmrm.http.time", clock)
        return service

    return of


def test_requests_give_up_on_absent_or_slow_servers(monkeypatch, minutes):
    monkeypatch.setattr(remote, "UNREACHABLE_S", 0)
    with pytest.raises(RewardError, match="refused"):
        ask(Service(*[httpx.ConnectError("refused")] * 9), [asked("a")])
    service = minutes(Service(*[(503, b"", {"Retry-After": "0.01"})] * 99))
    with pytest.raises(RewardError, match="asked 4 times in 240 s"):
        ask(service, [asked("a")], timeout=200)
    assert len(service.requests) == 4


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"token": "s3cret"}, "Bearer s3cret"),
        ({}, "Bearer of the environment"),
        ({"url": "http://user:pw@service:8080/rm"}, "Basic dXNlcjpwdw=="),
    ],
)
def test_the_token_and_the_reward_go_along(monkeypatch, options, sent):
    if "url" not in options:
        monkeypatch.setenv("VLMRM_TOKEN", "of the environment")
    service = Service()
    ask(service, [asked("a")], model="people", **options)
    [(request, body, _)] = service.requests
    assert request.headers["Authorization"] == sent and body["model"] == "people"


def test_a_password_is_in_no_message():
    assert "pw" not in repr(RemoteScorer("http://user:pw@service"))
    with pytest.raises(RewardError) as caught:
        ask(Service((400, b"no")), [asked("a")], url="http://user:pw@service")
    assert "pw" not in str(caught.value)


def test_the_plain_one_works_after_closing_and_pickling():
    with RemoteScorer(URL, transport=httpx.MockTransport(Service())) as scorer:
        assert isinstance(scorer, Scorer)
        assert scorer.score([asked("aaa")]) == [3]
        scorer.close()
        assert scorer.score_groups([("Why?", ["a", "bb"])]) == [[1, 2]]
        assert scorer.digest == "abc"
    again = pickle.loads(pickle.dumps(RemoteScorer(URL, model="people", timeout=5)))
    assert repr(again) == f"RemoteScorer({URL})"


def test_load_scorer_takes_an_address():
    assert isinstance(load_scorer(URL, reward="people"), RemoteScorer)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (URL, {"device": "cpu"}, "device is an option of checkpoints"),
        ("outputs/best", {"reward": "people"}, "is a folder: leave reward out"),
        ("http://", {}, "cannot be used: write http://host:port"),
        ("host:8080/rm", {}, "is no folder: an address begins with http://"),
    ],
)
def test_what_is_no_address_is_refused(model, options, said):
    with pytest.raises(ConfigError, match=said):
        load_scorer(model, **options)


@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"concurrency": 0}, {"timeout": math.nan}])
def test_a_time_or_number_of_nothing_is_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}: write a number above 0"):
        RemoteScorer(URL, **wrong)


def test_it_needs_no_torch():
    code = (
        "import sys, vlmrm\n"
        "from vlmrm.scoring import AsyncRemoteScorer, RemoteScorer\n"
        f"vlmrm.load_scorer({URL!r}).close()\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'accelerate', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=Path(__file__).parents[2])


def test_an_episode_is_one_request_of_distinct_frames():
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 90, 180)]
    service = Service()
    service.answer = lambda index, item: {"index": index, "raw": float(len(item["messages"][-1]["content"]))}

    async def ask() -> list[float]:
        async with service.scorer() as scorer:
            return await scorer.score_prefixes("Push it.", [*frames, frames[0]])

    assert asyncio.run(ask()) == [1.0, 2.0, 3.0, 4.0]
    [(_, body, files)] = service.requests
    assert len(files) == 3 and len({item["group"] for item in body["items"]}) == 1
    shown = [part["image"] for part in body["items"][-1]["messages"][-1]["content"]]
    assert shown[0] == shown[3] and len(set(shown)) == 3
    with pytest.raises(RowError, match="an episode has no frames"):
        asyncio.run(AsyncRemoteScorer(URL).score_prefixes("Push it.", []))
