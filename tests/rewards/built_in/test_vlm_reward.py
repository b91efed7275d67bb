"""`vlm_reward`: the scores of the scorer, of the conversations of training, by sample and by group."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from tests.serving.services import served
from vlmrm.errors import CheckpointError, ConfigError, RewardError
from vlmrm.formats.preferences import image_pair, pair
from vlmrm.modeling.manifest import save_scale
from vlmrm.rewards import RewardSet
from vlmrm.scoring import load_scorer

PICTURES = RED, GREEN, BLUE, WHITE = [Image.new("RGB", (56, 56), name) for name in ("red", "green", "blue", "white")]
PROMPT = "Draw the digit 3 {not} 4"  # braces are no places


@pytest.fixture(scope="module")
def scorer(tiny_reward_model):
    return load_scorer(tiny_reward_model, device="cpu", dtype="float32")


@pytest.fixture
def reward(tiny_reward_model):
    def make(model: str = "vlm_reward", path=tiny_reward_model, **settings) -> RewardSet:
        common = {"reward_model": model, "model_path": str(path), "dtype": "float32", "device": "cpu"}
        return RewardSet({"name": "vlm", **common, **settings})

    return make


def turn(role: str, *parts) -> dict:
    kinds = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": role, "content": kinds}


def test_a_picture_is_the_answer_to_its_prompt(reward, scorer):
    found = reward(batch_size=3)(prompt=[PROMPT] * 4, image=PICTURES)
    [expected] = scorer.score_groups([(PROMPT, [[turn("assistant", picture)] for picture in PICTURES])])
    assert np.allclose(found.rewards["vlm"], expected, atol=1e-5)
    assert len({round(value, 4) for value in expected}) == 4
    assert found.info["vlm"][2]["score"] == pytest.approx(expected[2], abs=1e-5)


BLUE_ANSWER = turn("assistant", "It is blue.")


@pytest.mark.parametrize(
    ("columns", "conversation"),
    [
        (
            {"prompt": "Which?", "image": RED, "response": "So."},
            [turn("user", RED, "Which?"), turn("assistant", "So.")],
        ),
        (
            {
                "prompt": [turn("user", "?")],
                "image": RED,
                "condition_images": [GREEN, BLUE],
                "response": [BLUE_ANSWER],
            },
            [turn("user", GREEN, BLUE, RED, "?"), BLUE_ANSWER],
        ),
        (
            {"prompt": "A digit", "video": [RED, BLUE]},
            [turn("user", "A digit"), {"role": "assistant", "content": [{"type": "video", "video": [RED, BLUE]}]}],
        ),
    ],
    ids=["response", "conditions before the picture", "video"],
)
def test_columns_make_a_conversation(reward, scorer, columns, conversation):
    found = reward()(**{name: [value] for name, value in columns.items()}).rewards["vlm"]
    assert found.tolist() == pytest.approx(scorer.score([conversation]), abs=1e-5)


def test_prompt_wording_matches_that_of_training_rows(reward, scorer):
    words, system = "Judge this: {prompt} {with care}", "You are a critic."
    row = {"prompt": words.replace("{prompt}", PROMPT), "system": system, "images": [BLUE]}
    row |= {"chosen_image": RED, "rejected_image": GREEN}
    found = reward(custom_prompt=words, system=system)(
        prompt=[PROMPT] * 2, image=[RED, GREEN], condition_images=[[BLUE]] * 2
    )
    assert np.allclose(found.rewards["vlm"], scorer.score(image_pair.read(row).conversations), atol=1e-5)


def test_text_answers_are_placed_as_in_training_rows(reward, scorer):
    row = {"prompt": "Look at <image> and say which.", "images": [RED], "chosen": "It is six.", "rejected": "x"}
    found = reward()(prompt=[row["prompt"]] * 2, image=[RED] * 2, response=["It is six.", "x"])
    assert np.allclose(found.rewards["vlm"], scorer.score(pair.read(row).conversations), atol=1e-5)


def test_a_remote_model_scores_any_conversation_alike(tiny_reward_model, reward, scorer):
    system, asked = turn("system", "Think."), turn("user", RED, "Which?")
    again = [asked, turn("assistant", "It is 3."), turn("user", "Sure?")]
    prompts, answers = [[system, asked], [system, asked], again, again], ["One.", "Two.", "Yes.", "No."]
    expected = scorer.score([[*p, turn("assistant", a)] for p, a in zip(prompts, answers, strict=True)])
    columns = {"prompt": prompts, "response": answers, "groups": [0, 0, 1, 1]}
    block = {"reward_type": "vlm_reward", "model_path": str(tiny_reward_model), "dtype": "float32", "device": "cpu"}
    with served(block | {"name": "people"}, block | {"name": "other"}) as url:
        settings = {"path": url, "reward": "people"}
        one = reward(**settings)(**columns).rewards["vlm"]
        group = reward("vlm_reward_group", **settings)(**columns)
        with pytest.raises(RewardError, match=r"reward vlm: .*nobody"):
            reward(**settings | {"reward": "nobody"}, on_failure="mask")(**columns)
    assert one == pytest.approx(expected, abs=1e-5)
    assert [group.info["vlm"][index]["score"] for index in range(4)] == pytest.approx(expected, abs=1e-5)


def test_transforms_of_a_sample(reward, tiny_reward_model, tmp_path):
    columns = {"prompt": [PROMPT] * 4, "image": PICTURES}
    raw = reward()(**columns).total()
    assert np.allclose(reward(transform="sigmoid")(**columns).total(), 1 / (1 + np.exp(-raw)), atol=1e-6)
    with pytest.raises(CheckpointError, match="no scale for normalized"):
        reward(transform="normalized")
    measured = shutil.copytree(tiny_reward_model, tmp_path / "measured")
    save_scale(measured, {"reward_mean": 0.5, "reward_std": 2.0})
    found = reward(path=measured, transform="normalized")(**columns).total()
    assert np.allclose(found, (raw - 0.5) / 2.0, atol=1e-5)


def test_transforms_of_a_group(reward):
    groups = [7, 8, 7, 7, 8, 8]
    columns = {"prompt": [PROMPT] * 6, "image": [RED, *PICTURES, RED]}
    raw = reward()(**columns).total()
    oracles = {
        "win_rate": lambda s: [np.mean([1 / (1 + np.exp(b - a)) for j, b in enumerate(s) if j != i])
                               for i, a in enumerate(s)],
        "zscore": lambda s: (s - s.mean()) / s.std(),
        "rank": lambda s: [((s < a).sum() + ((s == a).sum() - 1) / 2) / len(s) for a in s],
    }  # fmt: skip
    for name, oracle in oracles.items():
        found = reward("vlm_reward_group", transform=name)(**columns, groups=groups).total()
        for members in ([0, 2, 3], [1, 4, 5]):
            # In group 8 two pictures are the same one, and tie.
            assert np.allclose(found[members], oracle(raw[members]), atol=1e-3), name


def test_what_cannot_be_scored_fails_alone(reward):
    drawn = [{"role": "assistant", "content": [{"type": "image", "image": "gone.png"}]}]
    answers = ["It is one.", None, drawn, "It is three."]
    columns = {"prompt": ["Which?"] * 4, "response": answers, "image": [None] * 4, "groups": [0] * 4}
    found = reward(on_failure="mask")(**columns)
    assert np.isnan(found.rewards["vlm"]).tolist() == [False, True, True, False]
    assert "neither a response, an image nor a video" in found.failures["vlm"][1]
    assert "gone.png does not exist" in found.failures["vlm"][2]
    wins = reward("vlm_reward_group", on_failure="mask")(**columns).rewards["vlm"]
    assert wins[0] + wins[3] == pytest.approx(1.0)
    assert np.isnan(wins[1:3]).all()
    with pytest.raises(RewardError, match="sample 0: it has both an image and a video"):
        reward()(prompt=["A digit"], image=PICTURES[:1], video=[PICTURES])


@pytest.mark.parametrize(
    ("settings", "answer", "judged"),
    [
        ({"drop_thinking": True}, "<think>One or two?</think>\nIt is one.", "It is one."),
        ({"drop_thinking": True}, "It is one.", "It is one."),
        ({"answer_tag": "answer"}, "<answer>Two</answer> No: <answer> It is one. </answer>", "It is one."),
        ({"drop_system": True}, "It is one.", "It is one."),
    ],
)
def test_what_a_policy_says_besides_can_be_dropped(reward, scorer, settings, answer, judged):
    asked = [turn("system", "Think first."), turn("user", "Which?")]

    [found] = reward(**settings)(prompt=[asked], response=[answer]).rewards["vlm"]

    kept = asked[1:] if "drop_system" in settings else asked
    assert [found] == pytest.approx(scorer.score_groups([(kept, [judged])])[0], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "word"), [({"drop_thinking": True}, "ends inside <think>"), ({"answer_tag": "answer"}, "no <answer>")]
)
def test_an_answer_without_its_end_fails(reward, settings, word):
    scored = reward(on_failure="mask", **settings)(prompt=["Which?"], response=["<think>One or"])
    assert np.isnan(scored.rewards["vlm"]).all() and word in scored.failures["vlm"][0]


def test_settings_that_cannot_work(reward, tiny_reward_model):
    with pytest.raises(ConfigError, match=r"custom_prompt has no \{prompt\} in it"):
        reward(custom_prompt="Judge this")
    with pytest.raises(ConfigError, match="timeout is of an address, and model_path is a folder"):
        reward(timeout=5.0)
    with pytest.raises(ConfigError, match="check_sight is of a folder, and model_path is an address"):
        reward(path="http://host:8080", check_sight=False)
    with pytest.raises(ConfigError, match="transform is normalized, which needs a checkpoint's folder"):
        reward(path="http://host:8080", transform="normalized")
    with pytest.raises(ConfigError, match="choose from raw"):
        reward(transform="rank")
    with pytest.raises(ConfigError, match="give the checkpoint once"):
        reward(model_name_or_path=str(tiny_reward_model))
    with pytest.raises(RewardError, match="custom_prompt and system go around a text"):
        reward(system="You are a critic.")(prompt=[[turn("user", "Which?")]], response=["It is one."])


def test_without_a_dtype_scores_use_the_checkpoint_type(tiny_reward_model):
    common = {"model_path": str(tiny_reward_model), "device": "cpu"}
    rewards = RewardSet([{"name": "raw", "reward_model": "vlm_reward", **common}])
    scorer = load_scorer(tiny_reward_model, device="cpu")
    scored = rewards(prompt=["Why?"] * 2, response=["So.", "No."]).rewards["raw"]
    assert scored.tolist() == scorer.score_groups([("Why?", ["So.", "No."])])[0]
