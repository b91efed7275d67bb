"""Rerank: the dialects that share its addresses, and what none of them may be told silently."""

from __future__ import annotations

import pytest

from tests.serving.services import fake, in_loop, running

QUERY = {"query": "Why?"}
TEI = {**QUERY, "texts": ["So.", "It is."]}
OTHERS = {**QUERY, "documents": ["So.", "It is."]}


@in_loop
async def test_keys_a_dialect_lacks_are_refused_by_name():
    cases = [
        (QUERY, "give either texts, as TEI's clients do, or documents"),
        ({**TEI, "documents": ["a"]}, "give either texts"),
        *(({**TEI, key: value}, f"{key} does not go with texts") for key, value in
          {"return_documents": True, "use_activation": False, "max_tokens_per_doc": 9}.items()),
        *(({**OTHERS, key: True}, f"{key} does not go with documents") for key in ("raw_scores", "return_text")),
        ({**OTHERS, "rank_fields": ["title"]}, "rank_fields may name text alone"),
        ({**OTHERS, "max_tokens_per_doc": 5}, "max_tokens_per_doc may cut a document off"),
        ({**OTHERS, "max_chunks_per_doc": 10}, "max_chunks_per_doc: "),
        ({**OTHERS, "truncate_prompt_tokens": 10}, "truncate_prompt_tokens cannot be chosen here"),
        ({**OTHERS, "topn": 1}, "unknown key topn (did you mean top_n?)"),
    ]  # fmt: skip
    async with running(fake("one", "fake_reward.Characters")) as (_, client):
        for body, reason in cases:
            refused = await client.post("/rerank", json=body)
            assert refused.status_code == 422 and reason in refused.json()["error"]["message"], (body, refused.text)
        for document in ({"title": "a"}, {"text": "a", "image": "data:,x"}, {"content": 7}, {"audio": "a"}):
            refused = await client.post("/rerank", json={**QUERY, "documents": ["a", document]})
            assert refused.status_code == 400 and "item 1: " in refused.json()["error"]["message"], refused.text


@in_loop
async def test_the_best_come_first_with_ties_in_order():
    async with running(fake("one", "fake_reward.Characters")) as (_, client):
        documents = ["aa", "a", "aaa", "aa"]
        answer = (await client.post("/v2/rerank", json={**QUERY, "documents": documents, "top_n": 0})).json()
        assert [one["index"] for one in answer["results"]] == [2, 0, 3, 1]
        assert all("document" not in one for one in answer["results"])
        assert all(0 < one["relevance_score"] < 1 for one in answer["results"])
        shown = (
            await client.post("/v2/rerank", json={**QUERY, "documents": documents, "return_documents": True})
        ).json()
        assert [one["document"]["text"] for one in shown["results"]] == ["aaa", "aa", "aa", "a"]


@in_loop
async def test_model_or_address_names_the_reward():
    async with running(fake("one", "fake_reward.Characters"), fake("two", "fake_reward.Characters")) as (_, client):
        assert (await client.post("/rerank", json=TEI)).status_code == 404
        assert (await client.post("/two/rerank", json=TEI)).status_code == 200
        assert (await client.post("/v1/rerank", json={**OTHERS, "model": "two"})).json()["model"] == "two"
        both = await client.post("/two/rerank", json={**OTHERS, "model": "one"})
        assert both.status_code == 400 and "and model another" in both.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
@in_loop
async def test_an_unscorable_document_fails_the_whole_request(route):
    async with running(fake("one", "fake_reward.LastText")) as (_, client):
        refused = await client.post(route, json={**QUERY, "documents": ["a", "refuse"]})
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "item 1: it is refused"
