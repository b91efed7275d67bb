"""Who a client is, whatever it sends."""

from __future__ import annotations

import pytest

from tests.serving.services import fake, settings_of
from vlmrm.serving.clients import Clients

PEER = "10.0.0.1"
TOKENS = {"token": "T", "clients": [{"name": "a", "token": "A", "rewards": ["one"], "weight": 2}]}
PROXIES = {"trusted_proxies": ["10.0.0.0/24", "::1"]}


@pytest.mark.parametrize(
    ("settings", "header", "value", "name", "label"),
    [
        (TOKENS, "authorization", "Bearer A", "a", "a"),
        (TOKENS, "authorization", "Bearer T", "default", "default"),
        (TOKENS, "authorization", "Bearer a", None, None),
        ({}, "authorization", "Bearer invented", PEER, "other"),
        ({}, "x-forwarded-for", "1.1.1.1", PEER, "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1, 2.2.2.2", "2.2.2.2", "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1,2.2.2.2, ::1,10.0.0.9", "2.2.2.2", "other"),
        (PROXIES, "x-forwarded-for", "1.1.1.1, unknown", PEER, "other"),
        (PROXIES, "x-forwarded-for", "", PEER, "other"),
    ],
)
def test_a_client_is_a_configured_name_or_an_address(settings, header, value, name, label):
    client = Clients(settings_of(fake("one"), **settings)).identify({header.encode(): value.encode()}, PEER)
    assert (client and client.name, client and client.label) == (name, label)


def test_neither_invented_rewards_nor_tokens_make_lanes():
    clients = Clients(settings_of(fake("one"), fake("two")))
    lanes = set()
    for number in range(9):
        client = clients.identify({b"authorization": b"Bearer %d" % number}, PEER)
        assert client is not None
        lanes.add(client.lane(f"/{number}/compute", b'{"model": "%d"}' % number))
    of_two = client.lane("/v1/rewards", b'{"items": [], "model": "two"}')
    assert len(lanes) == 1 and of_two == client.lane("/two/compute", b"") and of_two not in lanes
