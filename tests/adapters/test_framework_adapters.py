"""Every adapter gives the scorer's own raw scores, as its framework calls it, and can be sent to another process."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.adapters.frameworks import ADAPTERS, RewardManagerBase, import_file, install, verl_sample
from tests.serving import sent_media
from vlmrm.adapters.flow_factory_reward import GroupwiseReward, PointwiseReward
from vlmrm.adapters.openrlhf_reward import OpenRLHFReward, Unscored
from vlmrm.adapters.plain import Reward
from vlmrm.adapters.rows import SharedSet
from vlmrm.adapters.swift_orm import VlmrmORM, set_orms
from vlmrm.adapters.trl_reward import TRLReward, TRLRewardSet
from vlmrm.adapters.verl_reward import compute_rewards, compute_score
from vlmrm.conversation import media_of
from vlmrm.errors import ConfigError, RewardError, RowError
from vlmrm.formats.flow_factory import read_sample, sample_to_conversation
from vlmrm.formats.rollouts import read_answer
from vlmrm.rewards import PointwiseRewardModel, RewardArguments, RewardModelOutput, RewardSet
from vlmrm.scoring import RemoteScorer, load_scorer

LOAD = {"device": "cpu", "dtype": "float32"}
ANSWERS = ["It is red.", "It is green.", "Red", "It may be blue, I think."]
COLOURS = ["red", "red", "green", "green"]  # two groups of two
QUESTION = "Which colour is this?"


def png(colour: str) -> bytes:
    return sent_media.png(84, 56, colour)


IMAGES = [Pillow.open(io.BytesIO(png(colour))) for colour in COLOURS]


def asked(image=None, text: str = QUESTION) -> list[dict]:
    """A user turn; TRL and verl put images into it, `image=None` leaves a place for one."""
    part = {"type": "image"} if image is None else {"type": "image", "image": image}
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


def answered(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def expected(tiny_reward_model) -> list[float]:
    """What the scorer says of the four conversations."""
    conversations = [[*asked(image), *answered(text)] for image, text in zip(IMAGES, ANSWERS, strict=True)]
    scores = load_scorer(tiny_reward_model, **LOAD).score(conversations)
    assert len({round(score, 4) for score in scores}) == 4
    return scores


def near(scores: float | list[float]):
    return pytest.approx(scores, abs=1e-4)


TAG = "What does <image> mean in HTML?"


ASKED = [{"role": "user", "content": TAG}]
QUERY = f"<|im_start|>user\n{TAG}<|im_end|>\n<|im_start|>assistant\n"
SAMPLE = {"data_source": "people", "solution_str": "Red"}
BLIND = {
    "plain": lambda it: Reward(it)([TAG], ["Red"]),
    "TRL": lambda it: TRLReward(it, on_failure="raise")([ASKED], [answered("Red")], picture=["a.png"]),
    "TRL, some rows": lambda it: TRLReward(it, on_failure="raise")([ASKED], ["Red"], images=[None]),
    "ms-swift": lambda it: type("One", (VlmrmORM,), {"model": it})()(["Red"], messages=[[*ASKED, *answered("Red")]]),
    "verl": lambda it: asyncio.run(compute_score(**SAMPLE, model=it, extra_info={"prompt": TAG, "image": "a.png"})),
    "OpenRLHF": lambda it: OpenRLHFReward(it)([f"{TAG}Red"], [TAG], [{"prompt": TAG, "image": "a.png"}]),
    "OpenRLHF, rendered": lambda it: OpenRLHFReward(it)([f"{QUERY}Red"], [QUERY], ["42"]),
    "a video": lambda it: Reward(it)(["<video>What?"], ["Red"], images=["a.png"]),
    "reward sets": lambda it: TRLRewardSet([{"name": "long", "reward_model": "repetition"}], 1)([ASKED], ["Red"]),
    "Flow-Factory": lambda it: sample_to_conversation(read_sample({"prompt": "<image>Bluer", "image": "a.png"})),
}


@pytest.mark.parametrize("adapter", BLIND)
def test_a_prompt_missing_its_picture_has_no_score(adapter):
    with pytest.raises(BaseException, match=r"its prompt says <(image|video)> and the row has no (image|video)"):
        BLIND[adapter](Given())


def test_an_answer_may_hold_a_placeholder():
    assert Reward(Given(1.0))(["Which tag shows pictures?"], ["<image>"]) == [1.0]
    assert Reward(Given(1.0))(["\n\nHuman: Which?\n\nAssistant: <image>.\n\nHuman: Why?"], ["So."]) == [1.0]


def test_columns_contradicting_the_prompt_media_are_refused():
    shown = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}]
    assert read_answer(shown, "So.", images=["a.png"]) == read_answer(shown, "So.")
    assert [it.kind for it in read_answer(shown, "So.", videos=["v.mp4"]).messages[0].media] == ["video", "image"]
    with pytest.raises(RowError, match=r"its prompt shows 1 image\(s\) and its column has 2: give the same ones"):
        read_answer(shown, "So.", images=["a.png", "b.png"])


# Plain and TRL -------------------------------------------------------------------------------------------------------


def test_a_plain_callable_has_the_scorer_s_scores(tiny_reward_model, expected):
    reward = Reward(tiny_reward_model, **LOAD)
    assert reward([QUESTION] * 4, ANSWERS, IMAGES) == near(expected)
    assert reward([asked(image) for image in IMAGES], [answered(text) for text in ANSWERS]) == near(expected)
    assert reward(["<image>" + QUESTION] * 4, ANSWERS, [[image] for image in IMAGES]) == near(expected)
    assert reward.__name__ == tiny_reward_model.name


@pytest.mark.parametrize(
    "columns",
    [
        {"prompts": [asked(image) for image in IMAGES], "image": IMAGES},  # as TRL merges them: both are the same
        {"prompts": [asked() for _ in IMAGES], "images": [[image] for image in IMAGES]},
        {"prompts": [[{"role": "user", "content": QUESTION}]] * 4, "image": IMAGES},
    ],
    ids=["in prompts", "places in prompts", "columns alone"],
)
def test_trl_takes_prompt_images_else_column_images(tiny_reward_model, expected, columns):
    reward = TRLReward(tiny_reward_model, name="people", **LOAD)
    given = {"completions": [answered(text) for text in ANSWERS], "completion_ids": [[1]] * 4, "trainer_state": None}
    assert reward(**columns, **given, solution=["x"] * 4) == near(expected)
    assert reward.__name__ == "people"


GROUPED = {"name": "it", "reward_model": "vlm_reward_group"}


@pytest.mark.parametrize(
    ("made", "error", "word"),
    [
        (lambda it: TRLReward(it, devise="cpu"), ConfigError, "did you mean device"),
        (lambda it: TRLReward(RemoteScorer("http://host"), device="cpu"), ConfigError, "device is an option of check"),
        (lambda it: Reward(Given(), cache_bytes=1)(["?"], ["A"]), ConfigError, "cache_bytes is of a folder"),
        (lambda it: TRLReward(Given(), on_failure="zero"), ConfigError, "on_failure: .*mask"),
        (lambda it: VlmrmORM(), ConfigError, "VlmrmORM names no checkpoint"),
        (lambda it: Reward(it, **LOAD)(["?"], ["A"], ["missing.png"]), RewardError, "sample 0: missing.png"),
        (lambda it: Reward(it, **LOAD)("??", ["A", "B"]), RewardError, "a column is a single str"),
        (lambda it: TRLReward(it, **LOAD)(["?"] * 4, ANSWERS[:3]), RewardError, "4 prompts, but a column of 3"),
        (lambda it: verl_set([{**GROUPED, "model_path": str(it)}], "a"), ConfigError, "reward it is of groups"),
        (lambda it: reward_set(it)(["a", "b"], ["c", "d"]), RewardError, "blocks of 2 samples differ in prompt"),
        (lambda it: reward_set(it)([asked()] * 2, ["c", "d"]), RewardError, "people .*sample 0: .*more images"),
    ],
)
def test_what_cannot_be_meant_is_refused(tiny_reward_model, made, error, word):
    with pytest.raises(error, match=word):
        made(tiny_reward_model)


class Given:
    """A scorer that answers what it was given; NaN is no score."""

    def __init__(self, *scores: float):
        self.scores = scores

    def score_each(self, conversations):
        assert len(conversations) == len(self.scores)
        return list(self.scores)


NAN = float("nan")
NINE = {"on_failure": "fallback", "fallback_reward": -9.0}


def trl_advantages(*functions: list[float | None], weights: list[float], size: int) -> list[float]:
    """TRL 1.16.0, `GRPOTrainer._generate_and_score_completions`: a None beside another function's reward is 0."""
    rewards = torch.tensor([[NAN if value is None else value for value in each] for each in functions]).T
    alone = torch.isnan(rewards).all(dim=1)
    total = torch.where(alone, NAN, (rewards * torch.tensor(weights)).nansum(dim=1)).view(-1, size)
    return torch.nan_to_num((total - total.nanmean(dim=1, keepdim=True)).flatten(), nan=0.0).tolist()


def test_a_missing_score_neither_pays_nor_punishes():
    scores = TRLReward(Given(-3.1, -2.9, NAN, -3.3))(["a"] * 4, ANSWERS)
    assert scores == pytest.approx([-3.1, -2.9, -3.1, -3.3])
    assert trl_advantages(scores, [1.0] * 4, weights=[1.0, 1.0], size=4)[2] == pytest.approx(0.0, abs=1e-6)


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def test_groups_with_equal_text_stay_apart_by_image():
    prompts = [asked(IMAGES[0]), asked(IMAGES[1]), asked(IMAGES[2]), asked(IMAGES[3])]  # red, red, green, green
    assert TRLReward(Given(1.0, NAN, NAN, 5.0))(prompts, ANSWERS) == [1.0, 1.0, 5.0, 5.0]
    assert TRLReward(Given(1.0, NAN, NAN, 5.0))([QUESTION] * 4, ANSWERS, image=IMAGES) == [1.0, 1.0, 5.0, 5.0]


def test_a_missing_score_may_end_the_run_instead():
    reward = TRLReward(Given(-3.1, NAN), name="people", on_failure="raise")
    with pytest.raises(RewardError, match=r"reward people .*first sample 1: its score is nan"):
        reward(["a"] * 2, ANSWERS[:2])
    with pytest.raises(RewardError, match=r"reward People .*first sample 1: its score is nan"):
        swift_orm(1.0, NAN, policy="raise")(ANSWERS[:2], **swift_columns("a", "a"))


def reward_set(model, num_generations: int = 2, **settings) -> TRLRewardSet:
    common = {"model_path": str(model), "dtype": "float32", "device": "cpu"}
    return TRLRewardSet({"name": "people", "reward_model": "vlm_reward", **common, **settings}, num_generations)


def test_trl_gets_the_weighted_sum_of_rewards(tiny_reward_model, expected):
    logged = {}
    reward = reward_set(tiny_reward_model, weight=2.0)
    scores = reward([asked(i) for i in IMAGES], ANSWERS, image=IMAGES, log_metric=logged.__setitem__, log_extra=print)
    assert scores == near([2 * score for score in expected])
    assert logged["rm/people/mean"] == pytest.approx(np.mean(expected), abs=1e-4)


def test_reward_set_groups_are_the_blocks_of_trl(tiny_reward_model, expected):
    group = reward_set(tiny_reward_model, reward_model="vlm_reward_group", transform="rank")
    scores = group([asked(image) for image in IMAGES], ANSWERS, image=IMAGES)
    assert scores == [0.5 * (expected[i] > expected[i ^ 1]) for i in range(4)]


class Length(PointwiseRewardModel):
    """The length of an answer."""

    required_fields = ("prompt", "response")

    def __call__(self, prompt, response, **_):
        return RewardModelOutput(rewards=[float(len(text)) for text in response])


class LengthOfSome(Length):
    """Has no reward of a response that says nothing of it."""

    def __call__(self, prompt, response, **_):
        return RewardModelOutput(rewards=[len(text) if "?" not in text else NAN for text in response])


BOTH = [
    {"name": "all", "reward_model": f"{__name__}.Length"},
    {"name": "some", "reward_model": f"{__name__}.LengthOfSome", "on_failure": "mask"},
]
WEIGHTED = [{**BOTH[0], "weight": 1.0}, {**BOTH[1], "weight": 10.0}]


def test_a_masked_reward_becomes_its_group_mean():
    """As `RewardSet.advantages` has it; the other rewards of the sample count as they are."""
    rewards = TRLRewardSet(WEIGHTED, num_generations=4)
    answers = ["aaa", "a", "??", "aa", *("?????", "??", "???", "????")]
    scores = rewards(["x"] * 4 + ["y"] * 4, answers)
    assert scores[:4] == [33.0, 11.0, 22.0, 22.0]  # (3 + 1 + 2) / 3 for the third
    assert scores[4:] == [25.0, 22.0, 23.0, 24.0]  # nothing known of the group: the mean of all, for all of them


@pytest.mark.parametrize(("policy", "filled"), [({"on_failure": "mask"}, 3.0), (NINE, -9.0)])
def test_a_row_without_image_follows_the_failure_policy(policy, filled, caplog):
    config = {"name": "shown", "reward_model": f"{__name__}.Shown", **policy}
    prompts = [asked(IMAGES[0]), asked(), asked(IMAGES[0]), asked(IMAGES[0])]
    assert TRLRewardSet(config, 4)(prompts, ["a", "aa", "aaa", "aaaaa"]) == [1.0, filled, 3.0, 5.0]
    assert "failed for 1 samples, first sample 1: " in caplog.text


def test_gdpo_in_trl_gets_each_reward_separately():
    """By TRL's own arithmetic they are the set's own GDPO, also where one of a sample's rewards is masked."""
    prompts, answers = ["x"] * 4 + ["y"] * 4, ["aaa", "a", "??", "aa", "aaaaa", "aa", "aaa", "a?"]
    rewards = TRLRewardSet(WEIGHTED, num_generations=4)
    functions = pickle.loads(pickle.dumps(rewards.each()))

    columns = [function(prompts=prompts, completions=answers) for function in functions]

    grouped = torch.tensor(columns, dtype=torch.float64).T.view(-1, 4, 2)  # TRL 1.16, `normalize_then_sum`
    scaled = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    total = (scaled.view(-1, 2) * torch.tensor([1.0, 10.0])).sum(1)
    advantages = ((total - total.mean()) / (total.std() + 1e-4)).tolist()
    own = RewardSet(WEIGHTED)(prompt=prompts, response=answers, groups=prompts).advantages("gdpo")
    assert advantages == pytest.approx((own * (7 / 8) ** 0.5).tolist(), abs=1e-3)  # TRL's std is of a sample
    assert [function.__name__ for function in functions] == ["all", "some"] and rewards.weights() == [1.0, 10.0]


def test_an_unfinished_round_leaks_no_rewards():
    shared, first, second = SharedSet(None), ["a"], ["a"]
    rounds = iter([{"one": np.zeros(1), "two": np.zeros(1)}, {"one": np.ones(1), "two": np.ones(1)}])
    assert shared.take("one", first, lambda: next(rounds)) == 0.0
    assert shared.take("two", second, lambda: next(rounds)) == 1.0


# ms-swift ------------------------------------------------------------------------------------------------------------


def swift_orm(*scores: float, policy: str = "mask", args=None) -> VlmrmORM:
    class People(VlmrmORM):
        model, on_failure = Given(*scores), policy

    return People(args)


def swift_columns(*prompts: str, **columns) -> dict:
    """As `GRPOSample.to_reward_row` and `RowPreprocessor.rows_to_batched` make them."""
    turn = {"role": "assistant", "content": "It is red."}
    rows = [[{"role": "user", "content": prompt}, turn] for prompt in prompts]
    return {"messages": rows, "prompt_id": [""] * len(rows), "trainer_state": None, **columns}


def test_ms_swift_groups_share_prompt_and_image():
    """Its own `prompt_id` is of the text alone."""
    images = [[{"bytes": png(colour), "path": None}] for colour in COLOURS]
    columns = swift_columns(*["<image>" + QUESTION] * 4, images=images) | {"prompt_id": ["prompt_0"] * 4}
    assert swift_orm(1.0, NAN, NAN, 5.0)(ANSWERS, **columns) == [1.0, 1.0, 5.0, 5.0]


def test_ms_swift_gets_each_reward_of_a_set():
    answers = ["aaa", "a", "??", "aa"]
    rewards = {name: orm(args=None)(answers, **swift_columns(*["?"] * 4)) for name, orm in set_orms(BOTH).items()}
    assert rewards == {"all": [3.0, 1.0, 2.0, 2.0], "some": [3.0, 1.0, 2.0, 2.0]}


class Shown(PointwiseRewardModel):
    """The length of an answer about an image."""

    required_fields = ("prompt", "image", "response")

    def __call__(self, prompt, image, response):
        return [float(len(text)) for text in response]


# verl ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"prompt": "A sheet of one colour."}])
def test_verl_omni_s_pictures_are_answers(tiny_reward_model, extra):
    """Its `VisualRewardManager.run_single` calls it with these names, and no others."""
    common = {"data_source": "x", "ground_truth": "A red square.", "model": str(tiny_reward_model), "load": LOAD}
    found = [
        asyncio.run(compute_score(**common, solution_image=tensor, extra_info={"num_turns": None, **extra}))["score"]
        for tensor in (torch.tensor(np.array(picture)).permute(2, 0, 1) for picture in IMAGES[1:3])
    ]

    assert found == near(picture_scores(tiny_reward_model, extra.get("prompt", "A red square.")))
    assert abs(found[0] - found[1]) > 1e-3


@pytest.mark.parametrize("order", [(3, 0, 1, 2), (0, 1, 2, 3)])
def test_verl_omni_videos_are_read_in_either_order(order):
    frames, seen = np.arange(4 * 32 * 48 * 3, dtype=np.uint8).reshape(4, 32, 48, 3), []

    class Seen:
        def score_each(self, conversations):
            seen.extend(conversations)
            return [1.0] * len(conversations)

    video = torch.tensor(frames).permute(*order)
    asyncio.run(compute_score(data_source="x", solution_image=video, ground_truth="Run.", model=Seen()))
    [medium] = media_of(seen[0].messages)
    assert [np.array(frame).tolist() for frame in medium.reference] == frames.tolist()


@pytest.mark.parametrize(
    ("changed", "row", "word"),
    [
        ({}, {"index": 17}, "sample 17 of vqa/train: extra_info has no prompt"),
        ({"solution_image": torch.zeros(3, 8, 8)}, None, "a sample of vqa/train: extra_info has no prompt"),
        ({}, {"prompt": "<image><image>Which?", "images": [IMAGES[0]]}, "asks for more images"),
        ({}, {"prompt": "Which?", "index": 17}, "sample 17 of vqa/train: reward vlmrm: its score is nan"),
    ],
)
def test_verl_s_run_ends_with_the_sample_named(changed, row, word):
    given = {"data_source": "vqa/train", "solution_str": "Red", "ground_truth": None, **changed}
    given["model"] = Given(NAN)
    with pytest.raises(RewardError, match=word):
        asyncio.run(compute_score(**given, extra_info=row))


def verl_set(config, answer: str) -> dict[str, float]:
    return asyncio.run(compute_rewards("x", answer, rewards=config, extra_info={"prompt": "Which?", "index": 17}))


def test_gdpo_in_verl_gets_each_reward_separately():
    assert verl_set(WEIGHTED, "bbb") == {"score": 33.0, "all": 3.0, "some": 3.0}
    held_out = [WEIGHTED[0], {**WEIGHTED[1], "weight": 0.0}]
    assert np.isnan(verl_set(held_out, "a?")["some"]), "held out, it may be missing"


@pytest.mark.parametrize("changed", [{}, {"weight": 0.0, "on_failure": "raise"}])
def test_a_missing_reward_ends_the_verl_run(changed):
    with pytest.raises(RewardError, match=r"sample 17 of x: reward some: its reward is nan"):
        verl_set([WEIGHTED[0], {**WEIGHTED[1], **changed}], "a?")


def test_concurrent_verl_samples_fail_alone():
    Sizes.calls.clear()
    config = [{"name": "sizes", "reward_model": f"{__name__}.Sizes", "batch_size": 32}]

    async def all_at_once(*answers: str):
        rows = [{"prompt": "Which?", "index": index} for index in range(len(answers))]
        pairs = zip(answers, rows, strict=True)
        waiting = [compute_rewards("x", text, rewards=config, extra_info=row) for text, row in pairs]
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = asyncio.run(all_at_once(*["a"] * 299, "?", *["a"] * 212))

    [error] = [str(it) for it in results if isinstance(it, Exception)]
    assert error == "sample 299 of x: reward sizes: its reward is nan"
    assert results[0] == {"score": 1.0, "sizes": 1.0}
    assert max(Sizes.calls) == 32 and len(Sizes.calls) < 64, "batches, none larger than asked for"


class Sizes(PointwiseRewardModel):
    """1 a sample, NaN for a question mark; `calls` has the sizes of the batches."""

    required_fields = ("prompt", "response")
    calls: ClassVar[list[int]] = []

    def __call__(self, prompt, response):
        self.calls.append(len(prompt))
        return [NAN if text == "?" else 1.0 for text in response]


@pytest.fixture
def manage(tiny_reward_model, monkeypatch):
    """`manage(row...)` is what verl's reward loop does with our manager: a result for each."""
    base = "verl.experimental.reward_loop.reward_manager.base"
    install(monkeypatch, base, RewardManagerBase=RewardManagerBase)
    manager_class = import_file(ADAPTERS / "verl_manager.py", "custom_module_2").VlmrmRewardManager
    kwargs = {"model": str(tiny_reward_model), "load": LOAD}
    config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=SimpleNamespace(reward_kwargs=kwargs)))
    tokenizer = load_scorer(tiny_reward_model, **LOAD).loaded.processor.tokenizer

    async def run(rows):
        manager = manager_class(config, tokenizer, None, reward_router_address=None, reward_model_tokenizer=None)
        return await asyncio.gather(*(manager.run_single(verl_sample(tokenizer, *row)) for row in rows))

    return lambda *rows: asyncio.run(run(rows))


def test_verl_s_reward_manager(manage, expected):
    prompts = [asked(image) for image in IMAGES]
    for [turn] in prompts:
        turn["content"][0] |= {"bytes": b"x", "path": None}  # verl leaves them there

    results = manage(*zip(prompts, ANSWERS, strict=True))

    assert [result["reward_score"] for result in results] == near(expected)
    assert results[0]["reward_extra_info"] == {"raw_score": results[0]["reward_score"]}


def test_verl_managers_end_at_a_row_without_image(manage):
    with pytest.raises(RewardError, match=r"sample 17 of x: .*asks for more images"):
        manage((asked(), "Red", {"index": 17}))


# OpenRLHF ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openrlhf_rows(tiny_reward_model) -> list[tuple[list[str], list[str], list]]:
    """(queries, prompts, labels) as OpenRLHF makes them: rendered, expanded to a token a patch, and decoded again."""
    processor = load_scorer(tiny_reward_model, **LOAD).loaded.processor
    rows = []
    for colour, image, text in zip(COLOURS, IMAGES, ANSWERS, strict=True):
        prompt = processor.apply_chat_template(asked(), tokenize=False, add_generation_prompt=True)
        shown = processor(text=[prompt], images=[image])["input_ids"][0]
        ids = [*shown, *processor.tokenizer(text + "<|im_end|>")["input_ids"]]
        query = processor.tokenizer.decode(ids, skip_special_tokens=False)
        assert query.count("<|image_pad|>") > 1
        rows.append(([query], [prompt], [{"prompt": asked(), "images": [png(colour)]}]))
    return rows


def test_openrlhf_asks_on_many_threads(tiny_reward_model, expected, openrlhf_rows):
    reward = OpenRLHFReward(tiny_reward_model, **LOAD)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda row: reward(*row), openrlhf_rows))
    raw = torch.cat([result["rewards"] for result in results])
    assert raw.tolist() == near(expected)
    assert torch.equal(torch.cat([result["scores"] for result in results]), raw.sigmoid())
    assert torch.equal(results[2]["extra_logs"]["raw_score"], raw[2:3])


def test_openrlhf_imports_the_file_and_finds_its_model(tiny_reward_model, monkeypatch):
    module = import_file(ADAPTERS / "openrlhf_reward.py", "reward_func")
    row = (["Two?Three."], ["Two?"], [json.dumps({"prompt": "Two?"})])
    monkeypatch.delenv("VLMRM_REWARD_MODEL", raising=False)
    with pytest.raises(module.Unscored, match="VLMRM_REWARD_MODEL is not set"):
        module.reward_func(*row)
    monkeypatch.setenv("VLMRM_REWARD_MODEL", str(tiny_reward_model))
    [[score]] = load_scorer(tiny_reward_model).score_groups([("Two?", ["Three."])])
    assert module.reward_func(*row)["rewards"].tolist() == near([score])


@pytest.mark.parametrize(
    "query, prompt, label, reason",
    [
        ("Two?Three.", "One?", {"prompt": "One?"}, "does not begin with its prompt"),
        ("Two?Three.", "Two?", "4", "its label is not"),
        ("Two?Three.", "Two?", {"prompt": "<image><video>Two?", "images": ["a", "b"]}, "1 more image"),
        ("Two?Three.", "Two?", {"prompt": "Two?"}, "reward people: the answer 'Three.' to 'Two.': its score is nan"),
    ],
)
def test_openrlhf_s_run_ends_with_the_sample_named(query, prompt, label, reason):
    """It only logs an `Exception`, and would end later, on a reward model that nobody configured."""
    assert not issubclass(Unscored, Exception)
    with pytest.raises(Unscored, match=reason):
        OpenRLHFReward(Given(NAN), name="people")([query], [prompt], [label])


# Flow-Factory --------------------------------------------------------------------------------------------------------


def arguments(model, **settings) -> RewardArguments:
    path = "vlmrm.adapters.flow_factory_reward.PointwiseReward"
    extra = {"model_path": str(model), **settings}
    return RewardArguments(name="people", reward_model=path, dtype="float32", device="cpu", extra_kwargs=extra)


def picture_scores(model, prompt: str = "A red square") -> list[float]:
    pictures = [[{"role": "assistant", "content": [{"type": "image", "image": image}]}] for image in IMAGES[1:3]]
    return load_scorer(model, **LOAD).score_groups([(prompt, pictures)])[0]


def test_flow_factory_gets_a_reward_of_vlmrm(tiny_reward_model):
    reward = PointwiseReward(arguments(tiny_reward_model), SimpleNamespace(device=torch.device("cpu")))
    assert set(reward.required_fields) == {"prompt", "image", "video"} and not reward.use_tensor_inputs
    assert reward(prompt=["A red square"] * 2, image=IMAGES[1:3]).rewards == near(picture_scores(tiny_reward_model))
    with pytest.raises(RewardError, match="reward people: sample 0: it has neither a response"):
        reward(prompt=["A red square"])


class Sample(SimpleNamespace):
    """Flow-Factory's `BaseSample`: what it has no value for is None."""

    prompt = image = video = None


def flow_factory_rewards(model, samples: list[Sample], group_on_same_rank: bool) -> list[float]:
    """Flow-Factory a0b2bc5, `RewardProcessor._compute_groupwise_local` and `_distributed`, of one rank and one group.

    Groups that lie on several ranks are made anew of their `required_fields` alone. What all samples have, and the
    call of the model names, it is called with.
    """
    if not group_on_same_rank:
        samples = [Sample(**{name: getattr(each, name) for name in model.required_fields}) for each in samples]
    named = inspect.signature(model.__call__).parameters
    columns = {name: [getattr(each, name, None) for each in samples] for name in named}
    return model(**{name: column for name, column in columns.items() if None not in column}).rewards


@pytest.mark.parametrize("group_on_same_rank", [True, False])
def test_flow_factory_edits_are_scored_with_their_source(tiny_reward_model, group_on_same_rank):
    settings = {"gathered_fields": ["condition_images"]}
    reward = GroupwiseReward(arguments(tiny_reward_model, **settings), SimpleNamespace(device="cpu"))
    edits = [Sample(prompt="Make it red", image=image, condition_images=[IMAGES[3]]) for image in IMAGES[1:3]]
    conversation = {"prompt": ["Make it red"] * 2, "image": IMAGES[1:3], "condition_images": [[IMAGES[3]]] * 2}
    expected = reward(**conversation).rewards
    without = reward(**{**conversation, "condition_images": None}).rewards
    assert without != near(expected)
    assert flow_factory_rewards(reward, edits, group_on_same_rank) == near(expected)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"modle_path": "x"}, "unknown key 'modle_path'"),
        ({"gathered_fields": ["images"]}, "list condition_images"),
        ({"on_failure": "mask"}, "reward people: on_failure"),
        ({"deadline": 5.0}, "reward people: deadline"),
    ],
)
def test_flow_factory_settings_are_checked(tiny_reward_model, settings, word):
    with pytest.raises(ConfigError, match=word):
        GroupwiseReward(arguments(tiny_reward_model, **settings), SimpleNamespace(device="cpu"))


def test_flow_factory_s_policy_is_used(tiny_reward_model, caplog):
    reward = PointwiseReward(arguments(tiny_reward_model, **NINE), SimpleNamespace(device="cpu"))
    [whole, broken, also] = reward(prompt=["A red square"] * 3, image=[IMAGES[1], b"broken", b"broken"]).rewards
    assert whole == near(picture_scores(tiny_reward_model)[0]) and broken == also == -9.0
    [line] = [line for line in caplog.messages if "fallback_reward" in line]
    assert "reward people: sample 1: " in line and "2 of 3 samples" in line


# What they share -----------------------------------------------------------------------------------------------------


def made_reward_set(model, **options) -> TRLRewardSet:
    return reward_set(model)


@pytest.mark.parametrize("adapter", [TRLReward, made_reward_set])
def test_adapters_are_pickled_without_model_and_work_elsewhere(tiny_reward_model, expected, adapter):
    used = adapter(tiny_reward_model, **LOAD)
    used([QUESTION] * 4, ANSWERS, image=IMAGES)
    pickled = pickle.dumps(used)

    assert len(pickled) < 1000
    assert pickle.loads(pickled)([QUESTION] * 4, ANSWERS, image=IMAGES) == near(expected)


def test_one_checkpoint_is_loaded_once_a_process(tiny_reward_model, monkeypatch):
    loads, path = [], "vlmrm.rewards.built_in.vlm_reward.load_local_scorer"
    monkeypatch.setattr(path, lambda *args, **more: loads.append(args) or load_scorer(*args, **more))
    options = {**LOAD, "max_tokens_per_batch": 4321}  # as in no other test
    rewards = [Reward(tiny_reward_model, **options), Reward(str(tiny_reward_model), **options)]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda reward: reward([QUESTION], ANSWERS[:1], [IMAGES[0]]), rewards)
    assert len(loads) == 1 and first == near(second)
