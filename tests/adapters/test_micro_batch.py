"""Single calls become batches: together when they come together, and each with its own answer or error."""

from __future__ import annotations

import threading

import pytest

from vlmrm.adapters.rows import MOST, MicroBatcher
from vlmrm.errors import RowError


class Lengths:
    """Scores a text by its length; a batch waits until `go` is set."""

    def __init__(self):
        self.batches: list[list[str]] = []
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, texts):
        self.batches.append(list(texts))
        self.began.set()
        assert self.go.wait(60)
        if "crash" in texts:
            raise RuntimeError("out of memory")
        return [RowError("it is empty") if not text else float(len(text)) for text in texts]


@pytest.fixture
def lengths():
    return Lengths()


def test_samples_arriving_during_a_batch_form_the_next(lengths):
    batcher = MicroBatcher(lengths, wait=0.0)
    first = batcher.submit("a")
    assert lengths.began.wait(60)
    others = [batcher.submit("b" * n) for n in (3, 2, 1)]
    lengths.go.set()
    assert [future.result(60) for future in (first, *others)] == [1.0, 3.0, 2.0, 1.0]
    assert lengths.batches == [["a"], ["bbb", "bb", "b"]]


def test_the_first_waits_for_others(lengths):
    lengths.go.set()
    batcher = MicroBatcher(lengths, wait=600.0)
    futures = [batcher.submit("a") for _ in range(MOST)]  # a full batch does not wait for its deadline
    assert [future.result(60) for future in futures] == [1.0] * MOST
    assert [len(batch) for batch in lengths.batches] == [MOST]


def test_a_failure_is_of_its_own_call(lengths):
    batcher = MicroBatcher(lengths, wait=0.0)
    batcher.submit("a")
    assert lengths.began.wait(60)
    bad, good = batcher.submit(""), batcher.submit("bb")
    lengths.go.set()
    with pytest.raises(RowError, match="it is empty"):
        bad.result(60)
    assert good.result(60) == 2.0


def test_after_a_crash_it_goes_on(lengths):
    lengths.go.set()
    batcher = MicroBatcher(lengths, wait=0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.submit("crash").result(60)
    assert batcher.submit("abc").result(60) == 3.0
