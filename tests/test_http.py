"""Retry-After, retries, their messages, and the hosts of this machine."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import stamina

from vlmrm.errors import RewardError
from vlmrm.http import LONGEST_WAIT, Unavailable, Unreachable, is_loopback, retried, retry_after


def test_retry_after_is_seconds_or_a_date():
    assert retry_after("3") == 3.0
    assert retry_after("-5") == retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0.0
    assert retry_after("Fri, 01 Jan 2100 00:00:00 GMT") > 1e9


@pytest.mark.parametrize("header", [None, "", "soon", "Fri, 01 Jan 2100 00:00:00 +9999999999999"])
def test_a_retry_after_that_says_nothing_is_none(header):
    assert retry_after(header) is None


@pytest.mark.parametrize(
    ("error", "seconds", "tries"),
    [
        (Unavailable("starting"), 1.0, 2),
        (Unreachable("refused"), 1.0, 2),
        (Unavailable("busy", 0.0), 1.0, 2),
        (Unavailable("busy", 7.0), 8.0, 2),
        (Unavailable("busy", 7.0), 7.0, 1),
        (Unavailable("busy", LONGEST_WAIT + 1), 3600.0, 1),
        (Unavailable("starting"), 0.0, 1),
        (RewardError("no such model"), 3600.0, 1),
    ],
)
def test_a_request_is_retried_after_retry_after_within_the_caller_s_patience(error, seconds, tries):
    asked = []

    async def send(left: float) -> None:
        asked.append(left)
        raise error

    with stamina.set_testing(True, attempts=2), pytest.raises(type(error), match=str(error)):
        asyncio.run(retried(send, seconds=seconds))
    assert len(asked) == tries


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("judge", False),
        ("10.0.0.1", False),
    ],
)
def test_only_hosts_of_this_machine_bypass_proxies(host, loopback):
    assert is_loopback(host) is loopback


def test_the_log_says_once_why_requests_are_sent_again(caplog):
    async def send(left: float) -> None:
        raise Unavailable("http://judge: overloaded")

    async def together() -> None:
        await asyncio.gather(*(retried(send, attempts=3) for _ in range(3)), return_exceptions=True)

    with stamina.set_testing(True, attempts=2):
        asyncio.run(together())
    assert caplog.messages == ["http://judge: overloaded: asking again in 0 s"]


def test_the_hub_is_asked_once_where_it_cannot_be_reached(monkeypatch, tmp_path):
    """Its client would try for half a minute before each file; a mistyped folder should not wait for that."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    from vlmrm.errors import CheckpointError
    from vlmrm.libraries import hub_answers
    from vlmrm.modeling.manifest import find_file

    requests = []

    def head(*args, **kwargs):
        requests.append(args)
        raise httpx.ConnectError("Name or service not known")

    def download(*args, local_files_only, **kwargs):
        assert local_files_only, "the hub's client would ask"
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", head)
    monkeypatch.setattr("vlmrm.modeling.manifest.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/mine").mkdir(parents=True)
    hub_answers.cache_clear()
    try:
        for name in ("config.json", "processor_config.json"):
            with pytest.raises(CheckpointError, match=r"did you mean outputs/mine\?"):
                find_file("outputs/min", name)
        assert len(requests) == 1
    finally:
        hub_answers.cache_clear()
