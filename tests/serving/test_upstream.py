"""A reward that another server computes: the raw score is that server's, and its failures are never numbers."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads

import pytest

from tests.serving.sent_media import data_uri, png
from tests.serving.services import eventually, fake, in_loop, running, served
from vlmrm.errors import ConfigError
from vlmrm.scoring.transforms import sigmoid
from vlmrm.serving.upstream import VLLM

VLLM_ENGINE = "vlmrm.serving.upstream.VLLM"


def proxy(url: str, **settings):
    return {"reward_type": "far", "engine": VLLM_ENGINE, "endpoint_url": url, **settings}


def talk(answer: str, image: str | None = None) -> dict:
    shown = [{"type": "image_url", "image_url": {"url": image}}] if image else []
    asked = {"role": "user", "content": [*shown, {"type": "text", "text": "2 + 2?"}]}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


@in_loop
async def test_upstream_scores_survive_a_server_going_away():
    def far(port: int = 0):
        return served(fake("characters", "fake_reward.Characters"), listen=port, token="far")

    first = far()
    url = await asyncio.to_thread(first.__enter__)
    port = int(url.rpartition(":")[2])
    key = {"endpoint_api_key": "far", "options": {"timeout": 2.0}}
    async with running(proxy(url, **key), limits={"silence": 20.0}) as (service, client):
        items = [talk("four"), talk("four", data_uri(png())), {"prompt": "Why?", "response": "So."}]
        video = {"prompt": "a", "video": [data_uri(png())] * 2}
        answer = (await client.post("/v1/rewards", json={"items": [*items, video]})).json()
        scores = [item["score"] for item in answer["data"]]
        assert scores == [1.0, 2.0, 0.7, None]
        assert "a video cannot be handed to another server" in answer["data"][3]["error"]
        await asyncio.to_thread(first.__exit__, None, None, None)
        lost = asyncio.create_task(client.post("/v1/rewards", json={"items": [talk("another")]}))
        await eventually(lambda: service.health("far").unavailable)
        refused = await client.post("/v1/rewards", json={"items": [talk("again")]})
        assert refused.status_code == 503
        with far(port) as again:
            assert again == url
            assert (await lost).json()["data"][0]["score"] == 1.3


@pytest.fixture
def server():
    """A server that answers what its `answer` says, a status and a function of the request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = self.server.answer(body)
            data = dumps(content).encode()
            self.wfile.write(b"HTTP/1.0 %d .\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))

        def log_message(self, *words): ...

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    made.url = f"http://127.0.0.1:{made.server_port}"
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def classified(*numbers: float) -> dict:
    """vLLM's answer."""
    return {"object": "list", "data": [{"index": 0, "label": "LABEL_0", "probs": list(numbers), "num_classes": 1}]}


def test_a_server_without_raw_logits_is_refused(server):
    server.answer = lambda body: (200, classified(0.9))  # it does not know use_activation
    with pytest.raises(ConfigError, match="not its sigmoid"):
        VLLM(server.url)
    server.answer = lambda body: (400, {"error": {"message": "no such model"}})
    with pytest.raises(ConfigError, match="no such model"):
        VLLM(server.url)


@pytest.mark.parametrize(
    "status, content", [(200, classified(0.2, 0.8)), (200, classified()), (200, {"data": []}), (200, 0.0), (500, {})]
)
def test_an_answer_without_a_number_fails_its_item(server, status, content):
    server.answer = lambda body: (
        200,
        classified(3.0 if body["use_activation"] is False else float(sigmoid([3.0])[0])),
    )
    engine = VLLM(server.url)
    server.answer = lambda body: (status, content)
    [outcome] = engine([{"messages": talk("4")["messages"]}])
    assert "score" not in outcome and server.url in outcome["error"]
