"""Whatever a conversation says and shows, every route hands on the same tokens and pixels, or refuses it by name."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.sent_media import data_uri, png
from vlmrm.adapters.rows import text_columns
from vlmrm.conversation import Conversation, Image, Message, Text, Video, VideoOptions
from vlmrm.data.rows import read_answers, read_row
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import conversation_to_sample, read_sample, sample_to_conversation
from vlmrm.formats.openai import read_conversation, write_messages
from vlmrm.formats.rollouts import read_answer, read_candidates, read_openrlhf_query, read_verl_prompt
from vlmrm.formats.texts import read_text
from vlmrm.formats.wire import read_item, write_item
from vlmrm.modeling import load_processor
from vlmrm.rendering import Renderer
from vlmrm.scoring.remote import EncodedMedia, _encode_item
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.settings import Limits
from vlmrm.serving.worker.channel import pack, unpack

RED, BLUE, GREEN = (data_uri(png(56, 56, colour)) for colour in ("red", "blue", "green"))
ODD = (
    *("", " ", "\n", "Which?", "Ünïcode ✓", "<image>", "<video> <image>", "{prompt}"),
    *("a<|im_end|>", "<|im_start|>user\n", "<|image_pad|>", "<|vision_start|>", "\n\nHuman: x\n\nAssistant: y"),
    *('[{"role"', "</s>", "<think>", "a\ufffd"),
)
texts = st.builds(Text, st.one_of(st.sampled_from(ODD), st.text(max_size=12)))
images = st.builds(Image, st.sampled_from([RED, BLUE, GREEN]))
options = st.sampled_from([VideoOptions(), VideoOptions(sample_fps=4.0)])
videos = st.builds(Video, st.lists(st.sampled_from([RED, BLUE]), min_size=2, max_size=3).map(tuple), options)
parts = st.lists(st.one_of(texts, texts, images, videos), max_size=4).map(tuple)


@st.composite
def conversations(draw) -> Conversation:
    """A system turn or none, one to three questions, each answered."""
    messages = [Message("system", (draw(texts),))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [Message("user", draw(parts)), Message("assistant", draw(parts))]
    return Conversation(tuple(messages))


def talk(*turns: tuple[str, list]) -> Conversation:
    return Conversation(tuple(Message.of(role, *content) for role, content in turns))


def attached(conversation: Conversation) -> Conversation:
    """As the client of the service sends it, with its media as files of a form, and the service takes it."""
    item, files = _encode_item(conversation, EncodedMedia(), None)
    intake = MediaResolver(Limits(), None).with_attachments(files)
    return read_item(intake.item(read_conversation(json.loads(item)["messages"])))


def of_columns(conversation: Conversation) -> Conversation:
    """As the adapters give it to a `RewardSet`."""
    columns = text_columns([write_messages(conversation.prompt)], [write_messages([conversation.answer])], None)
    return sample_to_conversation(read_sample({name: column[0] for name, column in columns.items()}))


def of_pair(conversation: Conversation) -> Conversation:
    row = {
        "prompt": write_messages(conversation.prompt),
        "chosen": write_messages([conversation.answer]),
        "rejected": "Something else.",
    }
    return read_row(row, "1", lambda it: it).conversations()[0]


def of_whole_pair(conversation: Conversation) -> Conversation:
    other = (*conversation.prompt, Message.of("assistant", "Something else."))
    row = {"chosen": write_messages(conversation.messages), "rejected": write_messages(other)}
    return read_row(row, "1", lambda it: it).conversations()[0]


def of_openrlhf(conversation: Conversation) -> Conversation:
    if conversation.answer.media:
        raise RowError("a query is a text")
    if re.search(r"(<\|\w+\|>|</s>)\s*$", conversation.answer.text):
        raise RowError("a query ends with such a token")
    query = f"?{conversation.answer.text}<|im_end|>\n<|endoftext|><|endoftext|>"
    return read_openrlhf_query("?", query, {"prompt": write_messages(conversation.prompt)})


ROUTES = {
    "a list of messages": lambda it: read_conversation(json.loads(json.dumps(write_messages(it.messages)))),
    "candidates of a prompt": lambda it: read_candidates((list(it.prompt), [[it.answer]]))[0],
    "an RL framework's row": lambda it: read_answer(write_messages(it.prompt), write_messages([it.answer])),
    "verl's prompt": lambda it: read_answer(read_verl_prompt(write_messages(it.prompt)), [it.answer]),
    "OpenRLHF's label": of_openrlhf,
    "columns of a RewardSet": of_columns,
    "a sample": lambda it: sample_to_conversation(conversation_to_sample(it)),
    "a form to the service": attached,
    "an item of the queue": lambda it: read_item(unpack(pack(write_item(it)))),
    "a sample in the queue": lambda it: sample_to_conversation(
        read_item(unpack(pack(write_item(conversation_to_sample(it)))))
    ),
    "JSON as a text": lambda it: read_text(json.dumps(write_messages(it.messages))),
    "a row to score": lambda it: read_answers(
        {"messages": write_messages(it.messages)}, "1", lambda it: it
    ).conversations()[0],
    "responses to score": lambda it: read_answers(
        {"prompt": write_messages(it.prompt), "responses": [write_messages([it.answer])]}, "1", lambda it: it
    ).conversations()[0],
    "a training pair": of_pair,
    "a training pair of whole conversations": of_whole_pair,
}
# What a vocabulary cannot carry, and says so.
REFUSALS = {
    "OpenRLHF's label": ("a query is a text", "a query ends"),
    "a training pair": ("is empty", "the answers are the same"),
    "a training pair of whole conversations": ("is empty", "the answers are the same"),
}
EXAMPLES = [
    talk(("user", ["Explain."]), ("assistant", ["So:", Image(RED), "See?"])),
    talk(("user", ["Draw two."]), ("assistant", [Image(RED), Image(BLUE)])),
    talk(("user", [Image(RED), "Is this an <image>?"]), ("assistant", ["Yes."])),
    talk(("user", ["What does <image> mean in HTML?"]), ("assistant", ["A picture."])),
    talk(("user", [Image(RED)]), ("assistant", ["Red."])),
    talk(("user", [Image(RED), "A?"]), ("assistant", ["B."]), ("user", ["C?"]), ("assistant", ["D"])),
    talk(("system", ["Be brief."]), ("user", [Image(RED), "Which?"]), ("assistant", ["This."])),
    talk(("user", ["Q", Image(RED), Image(BLUE)]), ("assistant", ["So.<|im_end|>\n<|im_start|>user\nGood."])),
    talk(("user", [Video((RED, BLUE), VideoOptions(sample_fps=4.0)), "Film?"]), ("assistant", [Video((BLUE, RED))])),
    talk(("user", [""]), ("assistant", [""])),
    talk(("user", []), ("assistant", [])),
    talk(("user", ["\n\nHuman: hi\n\nAssistant: bye"]), ("assistant", ["So."])),
    talk(("user", ["Human: hi\n\nAssistant: bye\n\nHuman: more\n\nAssistant:"]), ("assistant", ["So."])),
    talk(("assistant", ["An answer to nothing."])),
]


@pytest.fixture(scope="module")
def renderer(tiny_checkpoint) -> Renderer:
    return Renderer(load_processor(tiny_checkpoint))


PROCESSED: dict = {}  # each picture once


def shown(renderer: Renderer, conversation: Conversation):
    """What the model reads, or why it reads nothing."""
    try:
        rendered = renderer.render(conversation, PROCESSED)
    except RowError as error:
        return error.reason
    pixels = [{name: tensor.numpy().tobytes() for name, tensor in medium.tensors.items()} for medium in rendered.media]
    return rendered.input_ids, rendered.type_ids, pixels


def check(route: str, renderer: Renderer, conversation: Conversation) -> None:
    try:
        carried = ROUTES[route](conversation)
    except RowError as error:
        assert any(name in error.reason for name in REFUSALS.get(route, ())), error.reason
        return
    assert shown(renderer, carried) == shown(renderer, conversation)


@pytest.mark.smoke
@pytest.mark.parametrize("route", ROUTES)
@given(conversation=conversations())
@settings(max_examples=40)
def test_every_route_hands_on_equal_tokens_and_pixels(route, renderer, conversation):
    check(route, renderer, conversation)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("conversation", EXAMPLES)
def test_shapes_that_were_lost_once_are_carried(route, renderer, conversation):
    check(route, renderer, conversation)
