"""Every reward can be asked in either form, and groups of one request are not those of another."""

from __future__ import annotations

import asyncio

import pytest

from tests.serving.sent_media import data_uri, png
from tests.serving.services import HERE, Gate, fake, in_loop, queued, rewards, running
from vlmrm.conversation import Conversation, Image, Message, Sample
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import PromptTemplate, conversation_to_sample, read_sample, sample_to_conversation

RED, BLUE = b"red", b"blue"


def messages(turns):
    parts = lambda contents: [Image(it) if isinstance(it, bytes) else it for it in contents]  # noqa: E731
    return tuple(Message.of(role, *parts(contents)) for role, contents in turns)


FORMS = [
    ({"prompt": "Why?", "response": "So."}, [("user", ["Why?"]), ("assistant", ["So."])]),
    ({"prompt": "Why?", "response": "So.", "image": RED}, [("user", [RED, "Why?"]), ("assistant", ["So."])]),
    ({"prompt": "A red one", "image": RED}, [("user", ["A red one"]), ("assistant", [RED])]),
    (
        {"prompt": "Paint it", "image": RED, "condition_images": (BLUE,)},
        [("user", [BLUE, "Paint it"]), ("assistant", [RED])],
    ),
    (
        {"prompt": "Which?", "response": "Red.", "condition_images": (RED, BLUE)},
        [("user", [RED, BLUE, "Which?"]), ("assistant", ["Red."])],
    ),
    (
        {"prompt": messages([("system", ["Be kind."]), ("user", [RED, "Why?"])]), "response": "So."},
        [("system", ["Be kind."]), ("user", [RED, "Why?"]), ("assistant", ["So."])],
    ),
    (
        {"prompt": "Explain.", "response": messages([("assistant", ["So:", RED])])},
        [("user", ["Explain."]), ("assistant", ["So:", RED])],
    ),
]


@pytest.mark.parametrize(("sample", "turns"), FORMS)
def test_each_form_becomes_the_other_and_comes_back(sample, turns):
    conversation = Conversation(messages(turns))
    assert sample_to_conversation(Sample(**sample)) == conversation
    assert conversation_to_sample(conversation) == Sample(**sample)


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (PromptTemplate(), [RED, "What is the <image> tag?"]),
        (PromptTemplate("See <image>: {prompt}"), ["See ", RED, ": What is the <image> tag?"]),
    ],
)
def test_a_placeholder_written_by_clients_is_a_word(template, content):
    asked = Sample("What is the <image> tag?", "So.", image=RED)
    read = sample_to_conversation(asked, template, placeholders=False)
    assert read.messages == messages([("user", content), ("assistant", ["So."])])


@pytest.mark.parametrize("item", [{"image": RED}, {"prompt": "Why?"}])
def test_an_item_without_prompt_or_answer_is_refused(item):
    with pytest.raises(RowError, match="neither"):
        sample_to_conversation(read_sample(item))


@in_loop
async def test_equal_group_names_in_two_requests_stay_apart(tmp_path):
    gate = Gate(tmp_path)
    async with running(fake("group", "fake_reward.GroupSize")) as (service, client):
        busy = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        items = [{"prompt": "a", "group": "g"}, {"prompt": "b", "group": "g"}]
        bodies = [{"items": items}, {"items": [*items, {"prompt": "c", "group": "g"}]}]
        asking = [asyncio.create_task(client.post("/v1/rewards", json=body)) for body in bodies]
        await queued(service, 2, "group")  # so they are one batch
        gate.open()
        _, *answers = await asyncio.gather(busy, *asking)
    assert [[one["score"] for one in answer.json()["data"]] for answer in answers] == [[2, 2], [3, 3, 3]]


@in_loop
async def test_a_nonfinite_score_fails_its_item():
    async with running(fake("nan", "fake_reward.NotANumber")) as (_, client):
        answer = (await rewards(client, "a")).json()
    assert (answer["data"][0]["score"], answer["data"][0]["error"]) == (None, "its score is nan")


@in_loop
async def test_an_item_lacking_required_columns_costs_no_other():
    answered = {"reward_type": "shown_reward.Answered", "name": "answered", "import_from": [HERE], "device": "cpu"}
    items = [{"prompt": "a", "response": "bb"}, {"prompt": "a"}, {"prompt": "a", "response": ""}]
    async with running(answered) as (_, client):
        native = await client.post("/v1/rewards", json={"items": items})
        whole = await client.post("/compute", json={"prompt": ["a", "b"]})
    wrong = "it has no response, which this reward needs"
    assert native.status_code == 200, native.text
    assert [(one["score"], one["error"]) for one in native.json()["data"]] == [(2, None), (None, wrong), (0, None)]
    assert whole.status_code == 200 and whole.json() == {"error": f"sample 0: {wrong}"}


@in_loop
async def test_a_reward_of_either_medium_needs_one():
    either = {"reward_type": "shown_reward.Either", "name": "either", "import_from": [HERE], "device": "cpu"}
    picture = data_uri(png())
    items = [{"prompt": "a", "image": picture}, {"prompt": "a", "video": [picture]}, {"prompt": "a"}]
    async with running(either) as (service, client):
        data = (await client.post("/v1/rewards", json={"items": items})).json()["data"]
        assert service.health("either").info["required"] == ["prompt"]
    wrong = "it has no image or video, which this reward needs"
    assert [(one["score"], one["error"]) for one in data] == [(1, None), (2, None), (None, wrong)]
