"""Whatever a conversation says and shows, every route hands on the same tokens and pixels, or refuses it by name."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from types import SimpleNamespace

import httpx2 as httpx
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from services import served

from vlmrm.adapters.plain import Reward
from vlmrm.adapters.rows import text_columns
from vlmrm.adapters.swift_orm import VlmrmORM
from vlmrm.adapters.trl_reward import TRLReward
from vlmrm.conversation import Conversation, Image, Message, Text, Video, VideoOptions
from vlmrm.data.rows import read_answers, read_row
from vlmrm.errors import RowError
from vlmrm.formats.flow_factory import conversation_to_sample, read_sample, sample_to_conversation
from vlmrm.formats.openai import read_conversation, write_messages
from vlmrm.formats.rollouts import read_answer, read_candidates, read_openrlhf_query, read_verl_prompt
from vlmrm.formats.texts import read_text, write_text
from vlmrm.formats.wire import read_item, write_item
from vlmrm.modeling import load_processor
from vlmrm.rendering import Renderer
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer
from vlmrm.scoring.offline import OfflineJob, score_offline
from vlmrm.scoring.remote import EncodedMedia, RemoteScorer, _encode_item
from vlmrm.serving.media import MediaResolver
from vlmrm.serving.settings import Limits
from vlmrm.serving.worker.channel import pack, unpack


def picture(colour: str) -> str:
    file = io.BytesIO()
    Pillow.new("RGB", (56, 56), colour).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


RED, BLUE, GREEN = map(picture, ("red", "blue", "green"))
ODD = (
    *(
        "",
        " ",
        "\n",
        "Which?",
        "Ünïcode ✓",
        "<image>",
        "<video> <image>",
        "{prompt}",
        "a<|im_end|>",
        "<|im_start|>user\n",
    ),
    *("<|image_pad|>", "<|vision_start|>", "\n\nHuman: x\n\nAssistant: y", '[{"role"', "</s>", "<think>", "a\ufffd"),
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
    columns, _ = text_columns([write_messages(conversation.prompt)], [write_messages([conversation.answer])], None)
    return sample_to_conversation(read_sample({name: column[0] for name, column in columns.items()}))


def of_chatml(conversation: Conversation) -> Conversation:
    return read_text(*write_text(conversation))


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
    "ChatML": of_chatml,
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
    "ChatML": ("holds", "two texts in a row", "options", "is no word"),
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
def test_every_route_hands_on_the_same_tokens_and_pixels(route, renderer, conversation):
    check(route, renderer, conversation)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("conversation", EXAMPLES)
def test_shapes_that_were_lost_once_are_carried(route, renderer, conversation):
    check(route, renderer, conversation)


# Scores, by the real ways in ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tiny_reward_model):
    common = {"reward_type": "vlm_reward", "model_path": str(tiny_reward_model), "dtype": "float32", "device": "cpu"}
    with served(common) as url:
        yield url


def posted(url: str, path: str, body: dict) -> dict | list:
    return httpx.post(f"{url}{path}", json=body, timeout=600).json()


def native(it: Conversation, url: str):
    [row] = posted(url, "/v1/rewards", {"items": [{"messages": write_messages(it.messages)}]})["data"]
    return row["raw"] if row["error"] is None else row["error"]


def refused_or(answer, read):
    return answer["error"]["message"] if isinstance(answer, dict) and "error" in answer else read(answer)


def served_scores(it: Conversation, url: str) -> dict[str, float | str]:
    """What each protocol that can carry it answers."""
    messages = write_messages(it.messages)
    rendered, raw = json.dumps(messages), {"use_activation": False}
    label = {"prompt": write_messages(it.prompt)}
    scores = {
        "native": native(it, url),
        "vLLM pooling": refused_or(
            posted(url, "/pooling", {"messages": messages, **raw}), lambda answer: answer["data"][0]["data"][0]
        ),
        "vLLM input": refused_or(
            posted(url, "/pooling", {"input": rendered, **raw}), lambda answer: answer["data"][0]["data"][0]
        ),
        "TEI": refused_or(
            posted(url, "/predict", {"inputs": rendered, "raw_scores": True}), lambda answer: answer[0]["score"]
        ),
        "LLaMA-Factory": refused_or(
            posted(url, "/v1/score/evaluation", {"messages": [rendered]}), lambda answer: answer["scores"][0]
        ),
    }
    if not it.answer.media and not re.search(r"(<\|\w+\|>|</s>)\s*$", it.answer.text):
        body = {"query": [f"?{it.answer.text}<|im_end|>"], "prompts": ["?"], "labels": [label]}
        scores["OpenRLHF"] = refused_or(posted(url, "/get_reward", body), lambda answer: answer["rewards"][0])
        rollout = {**label, "response": f"{it.answer.text}<|im_end|>", "label": "the right answer"}
        scores["slime"] = refused_or(posted(url, "/remote_rm", rollout), lambda answer: answer)
    if [message["role"] for message in messages] == ["user", "assistant"]:
        query, document = ({"content": message["content"]} for message in messages)
        body = {"query": query, "documents": [document], "return_documents": False, **raw}
        scores["rerank"] = refused_or(posted(url, "/v1/rerank", body), lambda a: a["results"][0]["relevance_score"])
    return scores


@given(batch=st.lists(conversations(), min_size=8, max_size=8))
@example(batch=EXAMPLES)
@settings(max_examples=3)
def test_every_way_in_gives_the_score_of_the_local_scorer(tiny_reward_model, address, tmp_path_factory, batch):
    model, load = tiny_reward_model, {"device": "cpu", "dtype": "float32"}
    scorer = load_scorer(model, **load)
    alone = [scorer.score_each([it])[0] for it in batch]
    expected = [one.reason if isinstance(one, RowError) else one for one in alone]
    good = [it for it, score in zip(batch, expected, strict=True) if not isinstance(score, str)]
    wanted = pytest.approx([score for score in expected if not isinstance(score, str)], abs=1e-6)

    prompts, answers = [write_messages(it.prompt) for it in good], [write_messages([it.answer]) for it in good]
    assert scorer.score(good) == wanted
    assert RemoteScorer(address).score(good) == wanted
    assert Reward(model, **load)(prompts, answers) == wanted
    assert TRLReward(model, **load)(prompts=prompts, completions=answers) == wanted
    orm = type("Orm", (VlmrmORM,), {"model": model, "options": load})(SimpleNamespace())
    whole = [write_messages(it.messages) for it in good]
    assert orm(answers, messages=whole) == wanted
    settings_ = {"reward_model": "vlm_reward", "model_path": str(model), **load}
    rewards = RewardSet([{"name": "it", **settings_}])(**text_columns(prompts, answers, None)[0]).rewards["it"]
    assert rewards.tolist() == wanted

    folder = tmp_path_factory.mktemp("offline")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in whole))
    job = OfflineJob(str(model), [str(folder / "rows.jsonl")], folder / "scores", **load)
    score_offline(job)
    table = pq.read_table(folder / "scores")
    assert [score for scores in table["scores"].to_pylist() for score in scores] == wanted

    for conversation, score in zip(batch, expected, strict=True):
        for protocol, answered in served_scores(conversation, address).items():
            if isinstance(score, str):
                assert score in answered, protocol
            else:
                assert math.isclose(answered, score, abs_tol=1e-6), protocol
