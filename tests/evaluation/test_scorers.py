"""`--scorer`: whatever gives scores is one command, and the command's scores are those of asking it directly."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from transformers import (
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5ForSequenceClassification,
)

from tests.rewards.built_in.tiny_clip import save_checkpoint
from tests.rewards.judges.judge_server import JudgeServer, completion, error
from tests.runs import colour_pairs, text_pairs, words, write_rows
from tests.serving.answer_length import score as served_score
from tests.serving.services import fake, served
from vlmrm import load_scorer
from vlmrm.conversation import Comparison, Conversation, text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.media import open_image
from vlmrm.errors import ConfigError
from vlmrm.evaluation.evaluate import _Share
from vlmrm.evaluation.report import build_report
from vlmrm.evaluation.schema import load_results
from vlmrm.evaluation.sweep import sweep
from vlmrm.formats.openai import write_messages
from vlmrm.measures.interventions import INTERVENTIONS, alterations
from vlmrm.modeling.tiny import make_tiny
from vlmrm.rewards import RewardSet

ASKED = ["blank_image", "swapped_prompt", "response_only"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return colour_pairs(tmp_path_factory.mktemp("colours"), 6)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return text_pairs(tmp_path_factory.mktemp("texts"), 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_reward_model) -> Path:
    """Random classifiers of transformers: `text` and `pair` (two labels, no chat template), and `visual`."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(tiny_reward_model)
    torch.manual_seed(0)
    for name, labels in {"text": ["score"], "pair": ["bad", "good"], "three": ["a", "b", "c"]}.items():
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.3,
            id2label=dict(enumerate(labels)),
            label2id={label: number for number, label in enumerate(labels)},
        )
        LlamaForSequenceClassification(config).save_pretrained(folder / name)
        tokenizer.chat_template = tokenizer.chat_template if name == "text" else None
        tokenizer.save_pretrained(folder / name)
    _visual(folder / "visual", make_tiny(folder / "generative", "qwen3_vl"))
    return folder


def _visual(folder: Path, generative: Path) -> None:
    processor = AutoProcessor.from_pretrained(generative)
    ids = processor.tokenizer.convert_tokens_to_ids
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(processor.tokenizer) + 16,
        "layer_types": ["full_attention"],
        "pad_token_id": ids("<|endoftext|>"),
        "initializer_range": 0.3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
            "partial_rotary_factor": 1.0,
        },
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
    model = Qwen3_5ForSequenceClassification(
        Qwen3_5Config(
            text_config=text,
            vision_config={**vision, "num_position_embeddings": 64},
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
            num_labels=1,
        )
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def asked(data, *scorers, **keys) -> list[str]:
    keys = {"interventions": ASKED, "output_file": "results.csv", "save_normalization": False, **keys}
    return words(scorer=scorers, dataset_path=data, **keys)


def rows_of(data) -> list[tuple[Comparison, dict[str, Comparison]]]:
    """Each row of the data, and it altered."""
    rows = load_comparisons([str(data)], arguments=DataArguments())
    share = _Share(rows, 8, 0, 1, len(rows))
    changes = [INTERVENTIONS[name] for name in ASKED]
    return [
        (row["comparison"], {i.name: c for i, c in alterations(row["comparison"], row["donors"], changes)})
        for row in (share[number] for number in range(len(share)))
    ]


def check_scores(frame: pd.DataFrame, data, score, without=()) -> None:
    """Compares the scores of a sweep's pairs with those of `score(conversation)`."""
    frame = frame.set_index("comparison_id")
    for comparison, altered in rows_of(data):
        for name, changed in {"": comparison, **altered}.items():
            if name in without:
                continue
            scores = [score(conversation) for conversation in changed.conversations()]
            columns = [f"{name}_chosen", f"{name}_rejected"] if name else ["chosen_score", "rejected_score"]
            assert frame.loc[comparison.id, columns].tolist() == pytest.approx(scores, abs=1e-5), (comparison.id, name)
    both = pd.concat([frame["chosen_score"], frame["rejected_score"]])
    assert both.round(6).nunique() > 1, "scores that are all equal test nothing"


def frames(path: str = "results.scores.parquet") -> list[pd.DataFrame]:
    return [frame for _, frame in pd.read_parquet(path).groupby(["model", "checkpoint"], sort=False)]


# Each kind is one command --------------------------------------------------------------------------------------------


def test_a_checkpoint_scores_alike_natively_or_as_classifier(here, data, tiny_reward_model, models):
    local = load_scorer(tiny_reward_model)
    result = sweep(asked(data, tiny_reward_model, f"hf:{tiny_reward_model}", f"hf:{models / 'visual'}"))
    assert [row["error"] for row in result.rows] == [None] * 3
    ours, as_classifier, visual = frames()
    for frame in (ours, as_classifier):
        check_scores(frame, data, lambda conversation: local.score([conversation])[0])
    processor = AutoProcessor.from_pretrained(models / "visual")
    model = AutoModelForSequenceClassification.from_pretrained(models / "visual").eval()

    @torch.inference_mode()
    def direct(conversation: Conversation) -> float:
        images = [open_image(medium.reference) for m in conversation.messages for medium in m.media]
        text = processor.apply_chat_template(write_messages(conversation.messages), tokenize=False)
        return float(model(**processor(text=[text], images=images or None, return_tensors="pt")).logits)

    check_scores(visual, data, direct)


def test_hub_ids_score_like_their_snapshots(here, texts, tiny_reward_model, models, monkeypatch):
    """As downloaded before: the tests have no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    folders = {"org/mine": tiny_reward_model, "org/classifier": models / "text"}
    for name, folder in folders.items():
        stored = here / "hub" / f"models--{name.replace('/', '--')}"
        shutil.copytree(folder, stored / "snapshots" / "c0ffee")
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text("c0ffee")
    specs = ["org/mine", "hf:org/classifier", tiny_reward_model, f"hf:{models / 'text'}"]
    rows = sweep(asked(texts, *specs, interventions="none")).rows
    by_id, by_folder = (frames()[start : start + 2] for start in (0, 2))
    for one, other in zip(by_id, by_folder, strict=True):
        assert one["chosen_score"].tolist() == other["chosen_score"].tolist()
    assert [(row["model"], row["checkpoint"]) for row in rows[:2]] == [("org", "mine"), ("hf:org", "classifier")]
    assert [row["provenance"]["weights"] for row in rows[:2]] == [row["provenance"]["weights"] for row in rows[2:]]


def test_a_text_classifier_says_that_it_cannot_see(here, data, texts, models):
    tokenizer = AutoTokenizer.from_pretrained(models / "text")
    model = AutoModelForSequenceClassification.from_pretrained(models / "text").eval()

    @torch.inference_mode()
    def direct(conversation: Conversation) -> float:
        messages = [{"role": m.role, "content": m.text} for m in conversation.messages]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        return float(model(**tokenizer(rendered, return_tensors="pt", add_special_tokens=False)).logits)

    with pytest.raises(ConfigError, match="write hf:"):
        sweep(asked(texts, models / "text"))
    spec = f"hf:{models / 'text'}"
    sweep(asked(texts, spec, output_file="texts.csv"))
    check_scores(*frames("texts.scores.parquet"), texts, direct)
    [row] = sweep(asked(data, spec, output_file="refused.csv")).rows
    assert "row pair-0" in (row["error"] or "") and "scorer_drops_media" in (row["error"] or "")
    [row] = sweep(asked(data, spec, scorer_drops_media=True)).rows
    check_scores(*frames(), data, direct, without=["blank_image"])
    assert row["limits"] == {"blank_image": "it changes nothing that this scorer is shown"}
    assert "blank_image_chosen" not in frames()[0] and "blank_image_accuracy" not in row
    assert pd.read_csv("results.csv")["limits"].tolist() == ["blank_image"]


def test_of_two_labels_the_score_is_their_difference(here, texts, models):
    specs = [f"hf:{models / 'pair'}{label}" for label in ("", "?label=bad", "?label=good")]
    rows = sweep(asked(texts, *specs, f"hf:{models / 'three'}")).rows
    whole, bad, good = (frame["chosen_score"].to_numpy() for frame in frames())
    assert whole == pytest.approx(good - bad, abs=1e-5)
    said = [row["provenance"]["scorer"]["score"] for row in rows[:3]]
    assert said == ["the logit of good minus that of bad", "the logit of bad", "the logit of good"]
    assert "has 3 labels (a, b, c): choose one as hf:" in (rows[3]["error"] or "")
    tokenizer = AutoTokenizer.from_pretrained(models / "pair")
    model = AutoModelForSequenceClassification.from_pretrained(models / "pair").eval()
    first, _ = rows_of(texts)[0]
    pair = tokenizer(text_of(first.prompt), text_of(first.answers[0]), return_tensors="pt")
    with torch.inference_mode():
        assert good[0] == pytest.approx(float(model(**pair).logits[0, 1]), abs=1e-5)


def test_clip_rewards_and_group_rewards_score_in_sweeps(here):
    save_checkpoint(here / "clip")
    colours = ["red", "green", "blue", "black", "white", "yellow"]
    for colour in colours:
        Image.new("RGB", (40, 40), colour).save(f"{colour}.png")
    rows = [
        {"id": c, "prompt": f"a {c} square", "chosen_image": f"{c}.png", "rejected_image": f"{other}.png"}
        for c, other in zip(colours, [*colours[1:], "red"], strict=True)
    ]
    data = write_rows(here / "squares.jsonl", rows)
    options = "model_name_or_path=clip&device=cpu&dtype=float32"
    Path("rank.yaml").write_text(
        "rewards:\n- {name: rank, reward_model: pickscore_rank, model_name_or_path: clip, "
        "processor_name_or_path: clip, device: cpu, dtype: float32}\n"
    )
    clip, rank = sweep(asked(data, f"reward:clip?{options}", "reward:rank.yaml")).rows
    assert clip["error"] is None and rank["error"] is None
    rewards = RewardSet({"rewards": {"reward_model": "clip", **dict(o.split("=") for o in options.split("&"))}})

    def direct(conversation: Conversation) -> float:
        [image] = conversation.answer.media
        return rewards(prompt=[text_of(conversation.prompt)], image=[image.reference]).rewards["default"][0]

    by_clip, by_rank = frames()
    check_scores(by_clip, data, direct, without=["response_only"])
    assert "prompt" in clip["limits"]["response_only"] and "response_only_chosen" not in by_clip
    better = by_clip["chosen_score"].to_numpy() > by_clip["rejected_score"].to_numpy()
    assert (by_rank["chosen_score"].to_numpy() == better / 2).all(), "the share of the pair with a lower score"


def test_a_python_function_is_a_scorer(here, data):
    Path("my_scorer.py").write_text(
        "def length(conversations):\n"
        "    return [len(c.answer.text) + 0.1 * len(c.messages) for c in conversations]\n"
        "def short(conversations):\n    return [1.0]\n"
        "def broken(conversations):\n    raise KeyError('reward')\n"
    )
    specs = (f"python:my_scorer.{name}" for name in ("length", "short", "broken"))
    one, short, broken = sweep(asked(data, *specs)).rows
    check_scores(frames()[0], data, lambda c: len(c.answer.text) + 0.1 * len(c.messages))
    assert one["error"] is None and "returned 1 scores of" in (short["error"] or "")
    assert "KeyError: 'reward'" in (broken["error"] or "")


def test_a_score_of_nan_drops_its_row_alone(here, data):
    Path("my_nan.py").write_text("def sick(talks):\n    return [float('nan')] + [1.0] * (len(talks) - 1)\n")

    [kept] = sweep(asked(data, "python:my_nan.sick", interventions="none", bad_rows="skip")).rows
    [ended] = sweep(asked(data, "python:my_nan.sick", interventions="none", output_file="other.csv")).rows

    assert kept["error"] is None and kept["dropped_rows"] == 1
    assert "my_nan.sick has no score for row" in ended["error"] and "its score is nan" in ended["error"]


# Judges --------------------------------------------------------------------------------------------------------------


def answers_of(body: dict) -> list[str]:
    """The two answers that a judge is shown, in order."""
    parts = [part.get("text", "") for part in body["messages"][-1]["content"]]
    return [re.sub(r"</?data-.*?>", "", parts[parts.index(f"Answer {name}:") + 1]).strip() for name in "12"]


def biased(body: dict, number: int):
    """Prefers the longer answer, but to short questions the one that it is shown first."""
    first, second = answers_of(body)
    question = " ".join(part.get("text", "") for part in body["messages"][-1]["content"][:8])
    if "Which colour is this?" in question:
        winner = "Answer 1"
    else:
        winner = "tie" if len(first) == len(second) else "Answer 1" if len(first) > len(second) else "Answer 2"
    return completion(f"thinking: {{odd</think>```json\n{json.dumps({'winner': winner})}\n```")


@pytest.fixture
def judge():
    with JudgeServer().running() as server:
        server.behave = biased
        yield server


def test_a_pairwise_judge_reveals_its_position_bias(here, data, judge, capfd):
    spec = f"judge:org/model-7b@{judge.url}"
    [row] = sweep(asked(data, spec, interventions="none")).rows
    [frame] = frames()
    assert len(judge.bodies) == 2 * len(frame) == 12 and all(len(judge.images(n)) == 1 for n in range(12))
    by_position = (frame["prompt_text"] == "Which colour is this?").to_numpy()
    longer = (frame["chosen_length"] - frame["rejected_length"]).to_numpy()
    assert by_position.sum() == 3 and (longer != 0).all()
    credit = (longer > 0).astype(float)
    assert frame["credit_first"].tolist() == [*np.where(by_position, 1.0, credit)]
    assert frame["credit_second"].tolist() == [*np.where(by_position, 0.0, credit)]
    margins = frame["chosen_score"] - frame["rejected_score"]
    assert margins.tolist() == [*np.where(by_position, 0.0, 2 * credit - 1)]
    assert row["position_consistency"] == 0.5 and row["first_shown_credit"] == 0.75
    assert row["score_ties"] == 3 and "the same in both orders 0.500" in capfd.readouterr().err
    estimate = row["statistics"]["overall"]["position_consistency"]
    assert estimate["clusters"] == 6 and estimate["low"] <= 0.5 <= estimate["high"]
    page = build_report(["results.csv"], here / "report").read_text()
    assert "org/model-7b" in page


def test_lists_are_judged_by_win_rates_without_attacks(here, judge):
    answers = ["a", "bbbb", "cc", "dd"]
    rows = [{"id": "list", "prompt": "Say much", "responses": answers, "scores": [0, 3, 2, 1]}]
    data = write_rows(here / "lists.jsonl", rows)
    [row] = sweep(asked(data, f"judge:m@{judge.url}", interventions=["response_only", "padded_answers"])).rows
    [frame] = frames()
    scores = {row["chosen_text"]: row["chosen_score"] for _, row in frame.iterrows()}
    assert scores == {"bbbb": 1.0, "cc": 0.5, "dd": 0.5}
    assert row["position_consistency"] == 1.0
    assert "a list has no pair" in row["limits"]["padded_answers"]


def test_a_judge_is_attacked_with_one_answer_changed(here, data, judge):
    """The longer rejected answer wins, where the judge looks at the answers at all."""
    names = [name for name, intervention in INTERVENTIONS.items() if intervention.attack]
    [row] = sweep(asked(data, f"judge:m@{judge.url}", interventions=names)).rows
    frame = frames()[0].set_index("comparison_id")
    checked = 0
    for comparison in (row["comparison"] for row in load_comparisons([str(data)], arguments=DataArguments())):
        first_wins = text_of(comparison.prompt) == "Which colour is this?"
        for intervention, changed in alterations(comparison, (), [INTERVENTIONS[name] for name in names]):
            chosen, rejected = text_of(comparison.answers[0]), text_of(changed.answers[1])
            longer = float((len(chosen) > len(rejected)) - (len(chosen) < len(rejected)))
            margin = (
                frame.loc[comparison.id, "chosen_score"] - frame.loc[comparison.id, f"{intervention.name}_rejected"]
            )
            assert margin == (0.0 if first_wins else longer), (comparison.id, intervention.name)
            checked += 1
    assert checked >= 6 and row["padded_answers_accuracy"] == 0.25, "three ties and three defeats"


def test_a_judge_without_an_answer_is_an_error(here, data, judge, monkeypatch):
    spec = f"judge:m@{judge.url}?max_retries=0"
    monkeypatch.setattr("vlmrm.rewards.servers.COOL_DOWN", 0.0)  # for which the judge would not be asked
    for reply, said in (
        (completion("Both are fine."), "names no winner"),
        (completion('{"winner": "Answer 1"}', "length"), "row pair-0"),
        (error(503, "overloaded"), "503"),
    ):
        judge.behave = lambda body, number, reply=reply: reply
        [row] = sweep(asked(data, spec, interventions="none", output_file="failed.csv")).rows
        assert said in (row["error"] or "") and not Path("failed.scores.parquet").exists()
    judge.behave = lambda body, number: completion("no") if "black" in answers_of(body)[0] else biased(body, number)
    [row] = sweep(asked(data, spec, interventions="none", bad_rows="skip", output_file="some.csv")).rows
    assert row["error"] is None and row["dropped_rows"] == 2


# Services ------------------------------------------------------------------------------------------------------------


def test_a_service_by_each_protocol(here, data, texts):
    def direct(conversation: Conversation) -> float:
        return served_score(write_messages(conversation.messages))

    with served(fake("length", "answer_length.AnswerLength")) as url:
        sweep(asked(data, url, f"{url}/classify", output_file="images.csv"))
        for frame in frames("images.scores.parquet"):
            check_scores(frame, data, direct)
        [row] = sweep(asked(texts, f"{url}?model=lenght", output_file="typo.csv")).rows
        assert "has no reward lenght: did you mean length?" in (row["error"] or "")
    [native, _] = load_results("images.json")["results"]
    known = native["provenance"]["scorer"]
    assert known["url"] == url and known["reward"] == "length"
    assert (native["model"], native["checkpoint"]) == (url, "rewards")


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hf:", "write hf:ID"),
        ("jugde:m@http://judge/v1", "did you mean judge:?"),
        ("judge:http://judge/v1", "write judge:MODEL@"),
        ("judge:m@http://judge/v1?replyes=2", "did you mean replies?"),
        ("judge:m@http://judge/v1?api_key=s3cret", "api_key would be written into the results"),
        ("judge:m@http://u:s3cret@judge/v1", "more than an address"),
        ("python:json.dumbs", "did you mean dumps?"),
        ("python:no_such_module.score", "no module no_such_module"),
        ("reward:clipp", "did you mean clip?"),
        ("./absent", "./absent does not exist"),
        ("http://server?tmeout=3", "did you mean timeout?"),
        ("hf:a/b?label", "?key=value"),
    ],
)
def test_a_mistyped_scorer_is_refused(here, texts, spec, sentence):
    with pytest.raises(ConfigError) as refused:
        sweep(asked(texts, spec))
    assert sentence in str(refused.value) and "s3cret" not in str(refused.value)
    assert not Path("results.json").exists()


def test_a_scorer_that_cannot_open_spares_others(here, texts, tiny_checkpoint):
    Path("scorer_of_texts.py").write_text("def one(conversations): return [len(repr(c)) for c in conversations]\n")
    with socket.socket() as silent:  # bound, and nobody listens
        silent.bind(("127.0.0.1", 0))
        server = f"http://user:s3cret@127.0.0.1:{silent.getsockname()[1]}"
        specs = [server, f"hf:{tiny_checkpoint}", "hf:org/absent", "outputs/absent", "python:scorer_of_texts.one"]
        rows = sweep(asked(texts, *specs)).rows
    said = ("cannot be reached", "score.weight", "hf:org/absent", "neither a folder nor a hub checkpoint", "")
    for row, part in zip(rows, said, strict=True):
        assert part in (row["error"] or "") and "\n" not in (row["error"] or "")
    assert rows[-1]["error"] is None
    assert "s3cret" not in Path("results.json").read_text() + Path("results.csv").read_text()


def test_scorers_are_not_scored_again_unless_they_changed(here, texts, monkeypatch):
    path = Path("scorer_that_changes.py")
    path.write_text("calls = []\ndef one(cs):\n    calls.append(len(cs))\n    return [len(repr(c)) for c in cs]\n")
    sweep(asked(texts, "python:scorer_that_changes.one"))
    import scorer_that_changes

    before = len(scorer_that_changes.calls)
    assert before and len(sweep(asked(texts, "python:scorer_that_changes.one")).rows) == 1
    assert len(scorer_that_changes.calls) == before
    monkeypatch.setattr(scorer_that_changes, "one", lambda conversations: 1 / 0)
    [row] = sweep(asked(texts, "python:scorer_that_changes.one")).rows
    assert "ZeroDivisionError" in (row["error"] or "")
    assert pd.read_parquet("results.scores.parquet").empty, "pairs of the function as it was"
