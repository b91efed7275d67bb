"""A trained model behind every route and every client: the same conversation has the same raw score."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from functools import reduce
from operator import getitem

import httpx2 as httpx
import pytest
from PIL import Image

from tests.adapters.frameworks import calls
from tests.serving.protocols.flow_factory_client import FlowFactoryClient
from tests.serving.services import served
from vlmrm import cli, load_scorer
from vlmrm.adapters.trl_reward import TRLReward
from vlmrm.data.media import png_of
from vlmrm.errors import RowError
from vlmrm.scoring import AsyncRemoteScorer, RemoteScorer

TOKEN = "s3cret"
QUESTION = "Which colour is this?"
ANSWERS = ["It is red.", "It may be blue,\nI think."]
PICTURE = Image.effect_noise((84, 56), 80).convert("RGB")
file = io.BytesIO()
PICTURE.save(file, "PNG")
PNG = base64.b64encode(file.getvalue()).decode()
URI = f"data:image/png;base64,{PNG}"


def asked(answer: str, image=None) -> list[dict]:
    shown = [] if image is None else [{"type": "image", "image": image}]
    content = [*shown, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def rendered(answer: str, image: bool = True) -> str:
    shown = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>" if image else ""
    return (
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{shown}{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    )


def asked_for() -> str:
    """The rendered prompt, up to where the policy begins."""
    return rendered("").removesuffix("<|im_end|>\n")


@pytest.fixture(scope="module")
def local(tiny_reward_model):
    return load_scorer(tiny_reward_model, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def url(tiny_reward_model):
    reward = {"reward_type": "vlm_reward", "model_path": str(tiny_reward_model), "dtype": "float32", "device": "cpu"}
    with served(reward, token=TOKEN) as address:
        yield address


@pytest.fixture
def post(url):
    def ask(route: str, body: dict) -> dict:
        answer = httpx.post(f"{url}{route}", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask


def chat(answer: str) -> list[dict]:
    """As OpenAI's clients write it."""
    messages = asked(answer, URI)
    messages[0]["content"][0] = {"type": "image_url", "image_url": {"url": URI}}
    return messages


def shown(answer: str) -> dict:
    """A query of a reranker."""
    return {"content": chat(answer)[0]["content"]}


RELEVANCE = ("results", 0, "relevance_score")


def as_json(answer: str) -> str:
    return json.dumps({"messages": asked(answer), "images": [URI]})


# Route, what it is sent for an answer, and where in its answer the raw score is.
ROUTES = [
    ("/v1/rewards", lambda a: {"items": [{"messages": chat(a)}]}, ("data", 0, "raw")),
    ("/v1/rewards", lambda a: {"items": [{"prompt": QUESTION, "response": a, "image": URI}]}, ("data", 0, "raw")),
    ("/classify", lambda a: {"messages": chat(a), "use_activation": False}, ("data", 0, "probs", 0)),
    ("/pooling", lambda a: {"messages": chat(a), "activation": False}, ("data", 0, "data", 0)),
    ("/v1/embeddings", lambda a: {"messages": chat(a)}, ("data", 0, "embedding", 0)),
    ("/score", lambda a: {"queries": chat(a)[0], "documents": [a], "use_activation": False}, ("data", 0, "score")),
    ("/get_reward", lambda a: {"query": [rendered(a)], "labels": [{"images": [URI]}]}, ("rewards", 0)),
    ("/v1/score/evaluation", lambda a: {"messages": [as_json(a)]}, ("scores", 0)),
    ("/predict", lambda a: {"inputs": [[as_json(a)]], "raw_scores": True}, (0, 0, "score")),
    ("/rerank", lambda a: {"query": shown(a), "documents": [a], "use_activation": False}, RELEVANCE),
    ("/remote_rm", lambda a: {"prompt": asked_for(), "response": a, "label": {"images": [URI]}}, ()),
]
TEXTS_ALONE = [
    ("/classify", lambda a: {"input": rendered(a, False), "use_activation": False}, ("data", 0, "probs", 0)),
    ("/v1/score", lambda a: {"text_1": QUESTION, "text_2": a, "use_activation": False}, ("data", 0, "score")),
    ("/predict", lambda a: {"inputs": [QUESTION, a], "raw_scores": True}, (0, "score")),
    ("/rerank", lambda a: {"query": QUESTION, "texts": [a], "raw_scores": True}, (0, "score")),
    ("/remote_rm", lambda a: {"prompt": QUESTION, "response": a}, ()),
]
EVERY_ROUTE = [(PICTURE, *one) for one in ROUTES] + [(None, *one) for one in TEXTS_ALONE]


@pytest.mark.parametrize(("picture", "route", "body", "path"), EVERY_ROUTE, ids=[one[1] for one in EVERY_ROUTE])
def test_every_route_scores_an_answer_alike(local, post, picture, route, body, path):
    expected = local.score([asked(answer, picture) for answer in ANSWERS])
    found = [reduce(getitem, path, post(route, body(answer))) for answer in ANSWERS]
    assert found == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - expected[1]) > 1e-2


TURNS = [
    {"role": "system", "content": "Say one colour."},
    {"role": "user", "content": f"<image>{QUESTION}"},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "<image>And this?"},
]
PICTURES = [PICTURE, PICTURE.rotate(180)]


def in_parts(answer: str, *shown: dict) -> list[dict]:
    """The turns and the answer, with a part for each `<image>`."""
    left = iter(shown)
    turns = [(turn["role"], turn["content"].split("<image>")) for turn in TURNS]
    contents = [(role, [*([next(left)] if others else []), {"type": "text", "text": (text, *others)[-1]}])
                for role, (text, *others) in turns]  # fmt: skip
    return [{"role": role, "content": content} for role, content in [*contents, ("assistant", answer)]]


def test_turns_with_pictures_score_alike_on_every_route(tiny_reward_model, local, url, post, monkeypatch):
    """By every adapter, in this process and by the service, and by every route that takes turns."""
    pictures = [{"type": "image", "image": picture} for picture in PICTURES]
    expected = pytest.approx(local.score([in_parts(answer, *pictures) for answer in ANSWERS]), abs=1e-6)
    monkeypatch.setenv("VLMRM_TOKEN", TOKEN)
    folder = {"dtype": "float32", "device": "cpu"}
    for model, options in ((str(tiny_reward_model), folder), (url, {})):
        rewards = {"name": "it", "reward_model": "vlm_reward", "model_path": model, **options}
        for name, call in calls(model, rewards, options, monkeypatch).items():
            assert list(call([TURNS] * 2, ANSWERS, [PICTURES] * 2)) == expected, name

    uris = ["data:image/png;base64," + base64.b64encode(png_of(picture)).decode() for picture in PICTURES]
    pads = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
    prompt = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TURNS)
    prompt = prompt.replace("<image>", pads) + "<|im_start|>assistant\n"
    openai = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    whole = [
        (
            in_parts(a, *openai),
            f"{prompt}{a}<|im_end|>\n",
            {"messages": [*TURNS, {"role": "assistant", "content": a}], "images": uris},
        )
        for a in ANSWERS
    ]
    bodies = {
        "/v1/rewards": (lambda chat, text, row: {"items": [{"messages": chat}]}, ("data", 0, "raw")),
        "/classify": (lambda chat, text, row: {"messages": chat, "use_activation": False}, ("data", 0, "probs", 0)),
        "/pooling": (lambda chat, text, row: {"messages": chat, "activation": False}, ("data", 0, "data", 0)),
        "/get_reward": (lambda chat, text, row: {"query": [text], "labels": [{"images": uris}]}, ("rewards", 0)),
        "/v1/score/evaluation": (lambda chat, text, row: {"messages": [json.dumps(row)]}, ("scores", 0)),
        "/predict": (lambda chat, text, row: {"inputs": [[json.dumps(row)]], "raw_scores": True}, (0, 0, "score")),
    }
    for route, (body, path) in bodies.items():
        assert [reduce(getitem, path, post(route, body(*one))) for one in whole] == expected, route


def test_flow_factory_pictures_are_answers_to_their_prompts(local, url):
    conversations = [
        [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": [{"type": "image", "image": image}]}]
        for image in (PICTURE, PICTURE.rotate(180))
    ]
    client = FlowFactoryClient(f"{url.replace('//', f'//any:{TOKEN}@')}/vlm_reward")
    found = client([QUESTION] * 2, image=[PICTURE, PICTURE.rotate(180)])
    assert found == pytest.approx(local.score(conversations), abs=1e-4)


def test_concurrent_requests_score_like_single_ones(local, url):
    """Their pictures are prepared together, and beside a batch that is computed."""
    pictures = [PICTURE.rotate(angle) for angle in range(0, 360, 30)] + [Image.new("RGB", (3, 900))]
    conversations = [asked(answer, picture) for picture in pictures for answer in ANSWERS]

    async def ask() -> list[list[float | RowError]]:
        async with AsyncRemoteScorer(url, token=TOKEN) as scorer:
            return await asyncio.gather(*(scorer.score_each([one]) for one in conversations))

    found = [score for [score] in asyncio.run(ask())]
    assert [isinstance(score, RowError) for score in found] == [False] * (len(found) - 2) + [True] * 2
    assert found[:-2] == pytest.approx(local.score(conversations[:-2]), abs=1e-5)


def test_the_clients_are_the_scorer(local, url, monkeypatch, tmp_path):
    monkeypatch.setenv("VLMRM_TOKEN", TOKEN)
    PICTURE.save(tmp_path / "noise.png")
    forms = [None, PICTURE, tmp_path / "noise.png", URI, PICTURE.convert("L")]
    conversations = [asked(answer, image) for answer in ANSWERS for image in forms]
    expected = pytest.approx(local.score(conversations), abs=1e-4)
    with load_scorer(url) as scorer:
        assert scorer.score(conversations) == expected
        [group] = scorer.score_groups([(conversations[1][:1], ANSWERS)])
        assert group == pytest.approx(local.score_groups([(conversations[1][:1], ANSWERS)])[0], abs=1e-4)
        with pytest.raises(RowError, match=r"conversation 1: .*3x900"):
            scorer.score([conversations[0], asked("x", Image.new("RGB", (3, 900)))])

    async def ask() -> list[float]:
        async with AsyncRemoteScorer(url) as scorer:
            return await scorer.score(conversations)

    assert asyncio.run(ask()) == expected


def test_episode_prefixes_score_like_the_local_scorer(local, url):
    frames = [PICTURE.rotate(angle) for angle in range(0, 360, 30)]
    expected = local.score_prefixes("Turn it around.", frames)
    with RemoteScorer(url, token=TOKEN) as scorer:
        assert scorer.score_prefixes("Turn it around.", frames) == pytest.approx(expected, abs=1e-5)
        other = scorer.score_prefixes("Turn it around.", frames[::-1])
        with pytest.raises(RowError, match=r"conversation 1: .*3x900"):
            scorer.score_prefixes("Turn it around.", [PICTURE, Image.new("RGB", (3, 900))])
    assert max(abs(a - b) for a, b in zip(other, expected, strict=True)) > 1e-3


def test_adapters_and_the_command_line_take_the_address(local, url, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("VLMRM_TOKEN", TOKEN)
    expected = pytest.approx(local.score([asked(answer, PICTURE) for answer in ANSWERS]), abs=1e-4)
    narrow = Image.new("RGB", (3, 900))
    assert TRLReward(url)([QUESTION] * 3, [*ANSWERS, "x"], images=[PICTURE, PICTURE, narrow])[:2] == expected
    assert TRLReward(url)([QUESTION], ["x"], images=[narrow]) == [None]
    PICTURE.save(tmp_path / "noise.png")
    shown = ["--prompt", QUESTION, "--image", str(tmp_path / "noise.png"), "--json"]
    answers = [word for answer in ANSWERS for word in ("--response", answer)]
    cli.app(["score", "--url", url, *shown, *answers], result_action="return_value")
    found = json.loads(capsys.readouterr().out)["answers"]
    assert [one["score"] for one in found] == expected
