"""`RemoteScorer` against a real server: many conversations, faults that it outlasts, other processes."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from tests.serving.redis_server import reserved
from tests.serving.services import fake, served
from vlmrm.scoring import RemoteScorer

CHARACTERS = fake("characters", "fake_reward.Characters")
PICTURE = Image.effect_noise((64, 64), 50)


def asked(answer: str, *images) -> list[dict]:
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": ""}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def url():
    with served(CHARACTERS) as address:
        yield address


@pytest.fixture
def scorer(url):
    with RemoteScorer(url) as one:
        yield one


def test_many_threaded_conversations_come_back_in_order(scorer):
    rows = [asked("x" * (number % 13), *[PICTURE] * (number % 2)) for number in range(500)]
    expected = [pytest.approx(number % 13 / 10 + number % 2) for number in range(500)]
    with ThreadPoolExecutor(3) as threads:
        assert all(found == expected for found in threads.map(scorer.score, [rows] * 3))


def test_a_worker_that_dies_is_not_noticed(tmp_path):
    with served(fake("last", "fake_reward.LastText")) as url, RemoteScorer(url) as scorer:
        assert scorer.score([asked(f"die once {tmp_path / 'died'}"), asked("aaa")]) == [1, 3]


def test_a_service_not_there_yet_is_waited_for(monkeypatch):
    monkeypatch.setattr("vlmrm.scoring.remote.UNREACHABLE_S", 600.0)
    with reserved() as holder, ThreadPoolExecutor(1) as thread:
        port = holder.getsockname()[1]
        with RemoteScorer(f"http://127.0.0.1:{port}") as scorer:
            waiting = thread.submit(scorer.score, [asked("aaa")])
            with served(CHARACTERS, listen=port):
                assert waiting.result(timeout=300) == [0.3]


def _child(scorer: RemoteScorer, found) -> None:
    found.put(scorer.score([asked("aaa")]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_ask_by_themselves(scorer, method):
    assert scorer.score([asked("a")]) == [0.1]
    context = multiprocessing.get_context(method)
    found = context.SimpleQueue()
    child = context.Process(target=_child, args=[scorer, found])
    child.start()
    child.join(300)
    assert child.exitcode == 0 and found.get() == [0.3]
    assert scorer.score([asked("aa")]) == [0.2]
