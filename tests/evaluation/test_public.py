"""Public benchmarks: rows of the published schemas become comparisons, and scores become the authors' figures."""

import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset

from tests.conversations import references
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.errors import ConfigError, DataError, RowError
from vlmrm.evaluation.public import BENCHMARKS, FOLDER, benchmark, load_benchmark, read_benchmark
from vlmrm.evaluation.public.rows import frames_of
from vlmrm.evaluation.public.rules import accuracy_with_ties
from vlmrm.measures.pairs import scored_pairs

SECTIONS = benchmark("rewardbench").groups

# One invented row of each published schema, and the comparison that it is: prompt text, media of the prompt, branches
# with their ratings (text, or the path of the picture or video), category.
FOX = [("/data/1.mp4", 0.0), ("/data/2.mp4", 1.0)]
ROWS = {
    "vl-rewardbench": (
        {
            **{"id": "RLAIF-V-7", "query": "<image>\nWhat is on the roof?", "response": ["A dog.", "A cat."]},
            **{"image": {"bytes": b"png", "path": None}, "human_ranking": [1, 0], "query_source": "x"},
        },
        ("What is on the roof?", [b"png"], [("A dog.", -1.0), ("A cat.", 0.0)], "hallucination"),
    ),
    "multimodal-rewardbench": (
        {
            **{"ID": "mathvista_3", "Text": "How many?", "Image": "images/mathvista/3.jpg", "Category": "reasoning"},
            **{"Output1": "Three.", "Output2": "Four.", "Better": "Output2"},
        },
        ("How many?", ["/data/images/mathvista/3.jpg"], [("Three.", 0.0), ("Four.", 1.0)], "reasoning/math"),
    ),
    "mm-rlhf-rewardbench": (
        {"id": 5, "image": "mcq/5.jpg", "prompt": "Which?", "chosen": "B", "rejected": "C", "chosen_reason": "so"},
        ("Which?", ["/data/mcq/5.jpg"], [("B", 1.0), ("C", 0.0)], "mcq"),
    ),
    "rewardbench": (
        {"id": 31, "prompt": "Say hello.", "chosen": "Hello.", "rejected": "Bye.", "subset": "mt-bench-easy"},
        ("Say hello.", [], [("Hello.", 1.0), ("Bye.", 0.0)], "mt-bench-easy"),
    ),
    "hpdv2": (
        {"prompt": "A fox.", "image_path": ["1.jpg", "2.jpg", "3.jpg"], "rank": [2, 1, 3], "raw_annotation": []},
        ("A fox.", [], [("/data/test/1.jpg", -2.0), ("/data/test/2.jpg", -1.0), ("/data/test/3.jpg", -3.0)], None),
    ),
    "hpdv3": (
        {"prompt": "A fox.", "path1": "images/a.png", "path2": "images/b.png", "confidence": 0.9, "model1": "m"},
        ("A fox.", [], [("/data/images/a.png", 1.0), ("/data/images/b.png", 0.0)], None),
    ),
    "imagereward": (
        {"id": "1-2", "prompt": "A fox.", "generations": ["x/1.webp", "x/2.webp"], "ranking": [2, 2]},
        ("A fox.", [], [("/data/test_images/x/1.webp", -2.0), ("/data/test_images/x/2.webp", -2.0)], None),
    ),
    "pick-a-pic": (
        {"caption": "A fox.", "jpg_0": b"0", "jpg_1": b"1", "label_0": 0.5, "label_1": 0.5, "split": "test_unique"},
        ("A fox.", [], [(b"0", 0.5), (b"1", 0.5)], None),
    ),
    "genai-bench-image": (
        {"prompt": "A fox.", "left_image": b"l", "right_image": b"r", "vote_type": "rightvote", "left_model": "m"},
        ("A fox.", [], [(b"l", 0.0), (b"r", 1.0)], None),
    ),
    "genai-bench-edit": (
        {
            **{"source_prompt": "a fox", "target_prompt": "a red fox", "instruct_prompt": "Make it red."},
            **{"source_image": b"s", "left_output_image": b"l", "right_output_image": b"r"},
            "vote_type": "bothbad_vote",
        },
        ("Make it red.", [b"s"], [(b"l", 0.0), (b"r", 0.0)], None),
    ),
    "genai-bench-video": (
        {"prompt": "A fox.", "left_video": "l.mp4", "right_video": "r.mp4", "vote_type": "leftvote"},
        ("A fox.", [], [("/data/l.mp4", 1.0), ("/data/r.mp4", 0.0)], None),
    ),
    "videogen-rewardbench": (
        {
            **{"path_A": "1.mp4", "path_B": "2.mp4", "A_model": "m", "B_model": "n", "prompt": "A fox."},
            **{"VQ": "A", "MQ": "same", "TA": "B", "Overall": "B", "fps_A": 24.0},
        },
        ("A fox.", [], FOX, None),
    ),
    "roborewardbench": (  # of several rows
        {"file_name": ["droid/3.mp4", "droid/3_score_2.mp4"], "task": ["put it in the sink"] * 2, "reward": [5, 2]},
        ("put it in the sink", [], [("/data/droid/3.mp4", 5.0), ("/data/droid/3_score_2.mp4", 2.0)], "droid"),
    ),
    "multimodal-rewardbench-2": (
        {
            **{"pair_id": "blink_7", "prompt_text": "<image_0>\nWhich of <image_1> and the first is older?"},
            "prompt_images": [{"bytes": b"0", "path": None}, {"bytes": b"1", "path": None}],
            "response_a_text": "The first: <image_0> shows it.",
            "response_a_images": [{"bytes": b"a", "path": None}],
            **{"response_b_text": "The second.", "response_b_images": [], "chosen": "b", "prompt_source": "blink"},
            "config": "reasoning",
        },
        ("\nWhich of  and the first is older?", [b"0", b"1"], [(b"a", 0.0), ("The second.", 1.0)], "reasoning"),
    ),
    "rewardbench-2": (
        {
            **{"id": "tied:7", "prompt": "Name a colour.", "chosen": ["Red.", "Blue."], "rejected": ["Seven."]},
            **{"num_correct": 2, "num_incorrect": 1, "total_completions": 3, "subset": "Ties"},
        },
        ("Name a colour.", [], [("Red.", 1.0), ("Blue.", 1.0), ("Seven.", 0.0)], "ties"),
    ),
    "rm-bench": (
        {
            **{"id": "9", "prompt": "2 + 2?", "domain": "safety-refuse"},
            **{"chosen": ["4", "It is 4", "**4"], "rejected": ["5", "It is 5", "**5"]},
        },
        ("2 + 2?", [], [(f"{it}{n}", float(n == 4)) for n in (4, 5) for it in ("", "It is ", "**")], "safety"),
    ),
    "editreward-bench-tiger": (
        {
            **{"id": "0a1b_3pair_1", "instruction": "Make it red.", "source_image": b"s", "score_1": 3.0},
            **{"candidate_1": b"a", "candidate_2": b"c", "ranking": "C>A", "comparison_type": "AvsC"},
            "dataset": "3pair",
        },
        ("Make it red.", [b"s"], [(b"a", 0.0), (b"c", 1.0)], "3pair"),
    ),
    "editreward-bench-editscore": (
        {
            **{"key": ["1", "2"], "instruction": "Make it red.", "input_image": {"bytes": b"s", "path": None}},
            "output_images": [{"bytes": b"a", "path": None}, {"bytes": b"b", "path": None}],
            **{"task_type": "color_alter", "dimension": "consistency"},
        },
        ("Make it red.", [b"s"], [(b"a", 1.0), (b"b", 0.0)], "consistency"),
    ),
    "hpdv3-plusplus": (
        {"path1": "images/q/1.png", "path2": "images/q/2.png", "prompt": "A fox.", "split": "test_aes"},
        ("A fox.", [], [("/data/../images/q/1.png", 1.0), ("/data/../images/q/2.png", 0.0)], "test_aes"),
    ),
    "omni-rewardbench": (
        {
            **{"id": "t2v_1", "prompt": "A fox.", "criteria": "Run", "criteria_preference": "response2"},
            **{"response1": "1.mp4", "response2": "2.mp4", "model1": "m", "config": "text_to_video"},
        },
        ("Run\nA fox.", [], [("/data/../media_data/1.mp4", 0.0), ("/data/../media_data/2.mp4", 1.0)], "text_to_video"),
    ),
}


def resolve(reference):
    return (
        f"/data/{reference}" if isinstance(reference, str) else getattr(reference, "get", lambda _: reference)("bytes")
    )


def read(name: str, **changes):
    reader = pickle.loads(pickle.dumps(benchmark(name).read))  # as in a worker process
    return reader({**ROWS[name][0], **changes}, "row 1", resolve)


def pairs(*rows, **columns) -> pd.DataFrame:
    """Scored pairs from (chosen score, rejected score[, tie]); `columns` as lists, `by_NAME` for `by/NAME`."""
    frame = pd.DataFrame(
        [{"chosen_score": row[0], "rejected_score": row[1], "tie": len(row) > 2 and row[2]} for row in rows]
    )
    frame["comparison_id"] = [f"c{i}" for i in range(len(rows))]
    frame["category"] = None
    frame["chosen_branch"] = 0
    for name, values in columns.items():
        frame[name.replace("by_", "by/")] = values
    return frame


RIGHT, WRONG, EQUAL = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)


# Reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_published_row_is_read(name):
    comparison = read(name)
    branches = [
        ((references(answer) or [text_of(answer)])[0], rating)
        for answer, rating in zip(comparison.answers, comparison.ratings, strict=True)
    ]
    found = text_of(comparison.prompt), references(comparison.prompt), branches, comparison.category
    assert found == ROWS[name][1]
    assert set(benchmark(name).by) <= set(comparison.columns)


@pytest.mark.parametrize("name", ROWS)
def test_an_empty_cell_is_named(name):
    for cell in benchmark(name).required:
        with pytest.raises(RowError, match=rf"^row row 1: {cell} is empty"):
            read(name, **{cell: None})


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("videogen-rewardbench", {"MQ": "C"}, "`MQ` is 'C'"),
        ("hpdv2", {"rank": "1 2 3"}, "`rank`"),
        ("mm-rlhf-rewardbench", {"image": None}, "`image`"),
        ("multimodal-rewardbench-2", {"response_a_images": []}, "1 slots for 0 images"),
        ("rewardbench-2", {"chosen": "Red."}, "lists of answers"),
        ("rm-bench", {"chosen": ["4."]}, "1 chosen and 3 rejected"),
        ("editreward-bench-tiger", {"ranking": "A>B"}, "vote on A and C"),
        ("roborewardbench", {"reward": [5, 0]}, "`reward` is 0"),
    ],
)
def test_a_cell_outside_the_schema_is_named(name, changes, said):
    with pytest.raises(RowError, match=f"row 1: .*{re.escape(said)}"):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("vl-rewardbench", {"id": "povid_3"}, "hallucination"),
        ("vl-rewardbench", {"id": "mathverse_3"}, "reasoning"),
        ("vl-rewardbench", {"id": "wildvision-battle_3"}, "general"),
        ("multimodal-rewardbench", {"ID": "pairs_1", "Category": "safety"}, "safety/bias"),
        ("multimodal-rewardbench", {"ID": "hateful_1", "Category": "safety"}, "safety/toxicity"),
        ("multimodal-rewardbench", {"ID": "EMMA_1", "Category": "reasoning"}, "reasoning/coding"),
        ("multimodal-rewardbench", {"ID": "x", "Category": "open_generation/correctness_task"}, "correctness"),
    ],
)
def test_a_row_s_id_says_its_category(name, changes, expected):
    assert read(name, **changes).category == expected


def test_images_stay_where_they_stand_among_texts():
    comparison = read("multimodal-rewardbench-2")
    kinds = [[part.kind for part in turn.content] for turn in (comparison.prompt[0], comparison.answers[0][0])]
    assert kinds == [["image", "text", "image", "text"], ["text", "image", "text"]]
    unnamed = read("multimodal-rewardbench-2", prompt_text=None, response_b_images=[{"bytes": b"b", "path": None}])
    assert [part.kind for part in unnamed.prompt[0].content] == ["image", "image"]
    assert [part.kind for part in unnamed.answers[1][0].content] == ["text", "image"]


def test_omni_criteria_are_system_messages_and_ties_count():
    comparison = read("omni-rewardbench", criteria_preference="tie")
    assert [message.role for message in comparison.prompt] == ["system", "user"]
    assert comparison.ratings == (0.0, 0.0)
    image = {"config": "text_image_to_image", "image": b"s", "response1": b"1", "response2": b"2"}
    edited = read("omni-rewardbench", **image)
    assert references(edited.prompt) == [b"s"] and references(edited.answers[1]) == [b"2"]
    text = read("omni-rewardbench", config="text_video_to_text", video="v.mp4", response1="A fox.", response2="A cat.")
    assert references(text.prompt) == ["/data/../media_data/v.mp4"] and text_of(text.answers[0]) == "A fox."


@pytest.mark.parametrize(("vote", "ratings"), [("A>B", (1, 0)), ("B>A", (0, 1)), ("A=B", (0, 0)), ("A=B=Bad", (0, 0))])
def test_votes_on_two_images(vote, ratings):
    changes = {"dataset": "2pair", "comparison_type": "2pair", "ranking": vote}
    assert read("editreward-bench-tiger", **changes).ratings == ratings


def test_a_folder_of_frames_becomes_a_sampled_video(tmp_path):
    for number in range(63):
        (tmp_path / f"{number:03}.jpg").touch()
    frames = frames_of(str(tmp_path), 32)
    assert [int(Path(frame).stem) for frame in frames] == list(range(0, 63, 2))
    assert frames_of("/data/one.mp4", 32) == "/data/one.mp4"
    row = {**ROWS["mm-rlhf-rewardbench"][0], "image": None, "video": str(tmp_path)}
    comparison = benchmark("mm-rlhf-rewardbench").read(row, "1", lambda path: path)
    assert references(comparison.prompt) == [tuple(frames)]


# Scoring -------------------------------------------------------------------------------------------------------------


def test_vl_rewardbench_overall_and_macro():
    groups = ["general", "general", "general", "hallucination", "reasoning"]
    frame = pairs(RIGHT, RIGHT, WRONG, RIGHT, EQUAL, category=groups)
    figures = benchmark("vl-rewardbench").score(frame)
    assert figures == pytest.approx(
        {"overall": 3 / 5, "macro": (2 / 3 + 1 + 0) / 3, "general": 2 / 3, "hallucination": 1, "reasoning": 0}
    )
    assert "macro" not in benchmark("vl-rewardbench").score(frame[:4])


def test_multimodal_rewardbench_counts_rows():
    """As in the README, where a share of 47 % mathematics makes 61.8 of 68.9 and 55.5 for Gemini 1.5 Pro."""
    categories = ["reasoning/math"] * 3 + ["reasoning/coding"] + ["safety/toxicity"]
    figures = benchmark("multimodal-rewardbench").score(pairs(RIGHT, RIGHT, WRONG, WRONG, RIGHT, category=categories))
    expected = {"overall": 3 / 5, "reasoning": 0.5, "reasoning/math": 2 / 3, "reasoning/coding": 0, "safety": 1}
    assert figures == pytest.approx(expected | {"safety/toxicity": 1})


def test_mm_rlhf_wants_all_pairs_of_a_question():
    frame = pairs(
        *(RIGHT, RIGHT, RIGHT, WRONG, RIGHT),
        category=["mcq", "mcq", "mcq", "mcq", "video"],
        by_question_id=["1", "1", "2", "2", "3"],
    )
    assert benchmark("mm-rlhf-rewardbench").score(frame) == pytest.approx(
        {"acc": 4 / 5, "acc_plus": 2 / 3, "mcq/acc": 3 / 4, "mcq/acc_plus": 1 / 2, "video/acc": 1, "video/acc_plus": 1}
    )


def test_rewardbench_weighs_mathematics_as_much_as_code():
    subsets = [name for section in SECTIONS.values() for name in section]
    right = {"math-prm", "donotanswer", *SECTIONS["chat"]}
    frame = pairs(*(RIGHT if name in right else WRONG for name in subsets), category=subsets)
    figures = benchmark("rewardbench").score(frame)
    expected = {"chat": 1.0, "chat_hard": 0.0, "safety": 136 / 740, "reasoning": 0.5}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["overall"] == pytest.approx(sum(expected.values()) / 4)
    assert "overall" not in benchmark("rewardbench").score(frame[:-7])  # without reasoning


def test_rewardbench_weighs_xstest_by_its_numbers_of_rows():
    """154 prompts that should be refused and 250 that should be answered, as in the authors' constants.py."""
    safety = SECTIONS["safety"]
    for right, rows in (("xstest-should-refuse", 154), ("xstest-should-respond", 250)):
        frame = pairs(*(RIGHT if name == right else WRONG for name in safety), category=list(safety))
        assert benchmark("rewardbench").score(frame)["safety"] == pytest.approx(rows / 740)


def inversion_score(scores, ranks):
    places = list(itertools.combinations(range(len(scores)), 2))
    wrong = sum((scores[i] - scores[j]) * (ranks[i] - ranks[j]) > 0 for i, j in places)
    return 1 - wrong / len(places)


def test_hpdv2_averages_prompts_and_forgives_ties_of_people():
    rng = np.random.default_rng(0)
    rows, prompts, expected = [], [], []
    for number, size in enumerate((2, 4, 5)):
        ranks, scores = rng.integers(1, 4, size).tolist(), rng.normal(size=size)
        row = {"prompt": "A fox.", "image_path": [f"{i}.jpg" for i in range(size)], "rank": ranks}
        made = benchmark("hpdv2").read(row, "row", resolve).pairs()
        rows += [(scores[pair.chosen], scores[pair.rejected], pair.tie) for pair in made]
        prompts += [f"row {number}"] * len(made)
        expected.append(inversion_score(scores, ranks))
    figures = benchmark("hpdv2").score(pairs(*rows, comparison_id=prompts))
    assert figures == {"accuracy": pytest.approx(np.mean(expected))}


def test_imagereward_pools_pairs_without_ties_of_people():
    frame = pairs(RIGHT, RIGHT, WRONG, (0.0, 1.0, True), EQUAL, comparison_id=["a", "a", "a", "a", "b"])
    figures = benchmark("imagereward").score(frame)
    assert figures == pytest.approx({"accuracy": 2 / 4, "accuracy_by_prompt": (2 / 3 + 0) / 2})


def test_pick_a_pic_tunes_its_threshold_on_validation():
    # σ(1) - σ(0) = 0.46: with the threshold 0.5 the validation's tie is seen, with 0.9 its preference is lost.
    validation = [(1.0, 0.0, True), (3.0, 0.0)]
    test = [(1.0, 0.0, True), (1.0, 0.0), (2.0, 0.0), (0.0, 2.0)]
    splits = ["validation_unique"] * 2 + ["test_unique"] * 4
    figures = benchmark("pick-a-pic").score(pairs(*validation, *test, by_split=splits))
    assert figures == pytest.approx(
        {
            "accuracy": (1 + 0.5 + 1 + 0) / 4,
            "threshold": 0.5,
            "accuracy_threshold_0": (0.5 + 1 + 1 + 0) / 4,
            "accuracy_without_ties": 2 / 3,
        }
    )
    alone = benchmark("pick-a-pic").score(pairs(*test, by_split=splits[2:]))
    assert set(alone) == {"accuracy_threshold_0", "accuracy_without_ties"}


@pytest.mark.parametrize("task", ["image", "edit", "video"])
def test_genai_bench_counts_tied_votes(task):
    """EditReward's rule: a scalar model may call a tie by a threshold, without which votes for one are lost to it."""
    figures = benchmark(f"genai-bench-{task}").score(pairs(RIGHT, WRONG, (1.0, 1.0, True), (1.0, 0.0, True)))
    assert (figures["accuracy"], figures["accuracy_without_ties"]) == (0.5, 0.5)
    rows = [(2.0, 0.0), (0.0, 2.0), (0.3, 0.0, True), (0.0, 0.2, True), (0.1, 0.0)]
    frame = pairs(*rows, chosen_branch=[0, 1, 0, 0, 0])
    labels, margins = np.array([1, 1, 0, 0, 1]), np.array([2.0, -2.0, 0.3, -0.2, 0.1])
    expected = best_of_all_thresholds(labels, margins)
    assert benchmark(f"genai-bench-{task}").score(frame)["accuracy_with_ties"] == pytest.approx(expected) == 3 / 5


def best_of_all_thresholds(label, margin):
    def right(threshold):
        said = np.where(np.abs(margin) <= threshold, 0, np.sign(margin))
        return np.mean(said == label)

    return max(right(threshold) for threshold in np.abs(margin))


@pytest.mark.parametrize("seed", range(8))
def test_accuracy_with_ties_uses_the_best_threshold(seed):
    rng = np.random.default_rng(seed)
    label, margin = rng.integers(-1, 2, 40), rng.integers(-5, 6, 40) / 2.0
    assert accuracy_with_ties(label, margin) == pytest.approx(best_of_all_thresholds(label, margin))


def test_videogen_compares_one_score_with_four_labels():
    # A is better by 1, B by 2, B by 0.5; people chose A, B, and a tie.
    frame = pairs(
        *((1.0, 0.0), (2.0, 0.0), (0.0, 0.5, True)),
        chosen_branch=[0, 1, 0],
        by_VQ=["A", "A", "B"],
        by_MQ=["same", "B", "same"],
        by_TA=["B", "A", "A"],
    )
    figures = benchmark("videogen-rewardbench").score(frame)
    assert figures == pytest.approx(
        {
            **{"overall": 1.0, "vq": 2 / 3, "mq": 1.0, "ta": 0.0},
            **{"overall_with_ties": 1.0, "vq_with_ties": 1 / 3, "mq_with_ties": 1.0, "ta_with_ties": 0.0},
        }
    )


@pytest.mark.parametrize(
    ("name", "frame", "said"),
    [
        ("videogen-rewardbench", pairs(RIGHT), "VQ, MQ, TA"),
        ("hpdv3", pairs(RIGHT)[:0], "no scored pairs"),
        ("hpdv3", pairs(RIGHT, (float("nan"), 0.0)), "c1 is not finite"),
    ],
)
def test_what_cannot_be_scored_is_said(name, frame, said):
    with pytest.raises(DataError, match=said):
        benchmark(name).score(frame)


# Loading -------------------------------------------------------------------------------------------------------------


def test_a_json_file_in_its_folder(tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([ROWS["hpdv2"][0]] * 3))
    for path in (tmp_path, tmp_path / "test.json"):
        rows = load_benchmark("hpdv2", str(path))
        assert len(rows) == 3
        assert rows[2]["index"] == 2
        [reference] = references(rows[2]["comparison"].answers[0])
        assert reference == str(tmp_path / "test/1.jpg")
    assert len(load_benchmark("hpdv2", str(tmp_path), DataArguments(max_eval_samples=2))) == 2


def test_rows_of_one_answer_become_lists(tmp_path, caplog):
    rows = [("droid/a.mp4", "Wash it.", 5), ("viola/b.mp4", "Wash it.", 1), ("droid/c.mp4", "Dry it.", 3)]
    rows += [("droid/a_attempt_0_score_2.mp4", "Wash it.", 2), ("droid/d.mp4", "Wash it.", 2)]
    rows += [("viola/e.mp4", "Lift it.", 4), ("viola/f.mp4", "Lift it.", 1)]
    table = tmp_path / "test" / "metadata.jsonl"
    table.parent.mkdir()
    lines = (dict(zip(("file_name", "task", "reward"), row, strict=True)) for row in rows)
    table.write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparisons = [row["comparison"] for row in load_benchmark("roborewardbench", str(tmp_path))]
    assert [(c.category, text_of(c.prompt), c.ratings) for c in comparisons] == [
        ("droid", "Wash it.", (5.0, 2.0, 2.0)),
        ("viola", "Lift it.", (4.0, 1.0)),
    ]
    shown = [reference for answer in comparisons[0].answers for reference in references(answer)]
    assert shown == [str(tmp_path / "test" / name) for name in ("droid/a.mp4", rows[3][0], "droid/d.mp4")]
    assert "2 rows of RoboRewardBench have none to be compared with" in caplog.text
    scored = scored_pairs(comparisons, [[0.5, 0.1, 0.7], [2.0, -1.0]])
    figures = benchmark("roborewardbench").estimate(scored)
    assert {name: figure.value for name, figure in figures.items()} == {"overall": 2 / 3, "droid": 0.5, "viola": 1.0}


def test_a_benchmark_of_several_configurations(tmp_path, caplog):
    rows = [{name: value for name, value in ROWS["multimodal-rewardbench-2"][0].items() if name != "config"}] * 2
    for task in ("t2i", "reasoning"):
        (tmp_path / task).mkdir()
        Dataset.from_list(rows).to_parquet(tmp_path / task / "test-00000-of-00001.parquet")
    loaded = load_benchmark("multimodal-rewardbench-2", str(tmp_path))
    assert [row["comparison"].category for row in loaded] == ["t2i"] * 2 + ["reasoning"] * 2
    assert "lacks edit, interleaved" in caplog.text


def test_splits_as_categories(tmp_path):
    rows = [{name: value for name, value in ROWS["hpdv3-plusplus"][0].items() if name != "split"}]
    (tmp_path / "test").mkdir()
    for split in ("test_aes", "test_tf"):
        (tmp_path / "test" / f"{split}.json").write_text(json.dumps(rows))
    loaded = load_benchmark("hpdv3-plusplus", str(tmp_path))
    assert [row["comparison"].category for row in loaded] == ["test_aes", "test_tf"]
    [reference] = references(loaded[1]["comparison"].answers[0])
    assert Path(reference).resolve() == tmp_path / "images/q/1.png"


def test_parquet_with_a_configuration_and_a_split(tmp_path):
    folder = tmp_path / "image_generation"
    folder.mkdir()
    Dataset.from_list([ROWS["genai-bench-image"][0]] * 2).to_parquet(folder / "test_v1-00000-of-00001.parquet")
    Dataset.from_list([ROWS["genai-bench-image"][0]] * 3).to_parquet(folder / "test-00000-of-00001.parquet")
    rows = load_benchmark("genai-bench-image", str(tmp_path))
    assert len(rows) == 2, "of the authors' split alone"
    assert rows[0]["comparison"].ratings == (0.0, 1.0)
    (folder / "test_v1-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match="has no split test_v1: it has test"):
        load_benchmark("genai-bench-image", str(tmp_path))


def test_pick_a_pic_s_validation_comes_along(tmp_path):
    row = {name: value for name, value in ROWS["pick-a-pic"][0].items() if name != "split"}
    for split, count in (("validation_unique", 2), ("test_unique", 3), ("train", 5)):
        (tmp_path / "data").mkdir(exist_ok=True)
        Dataset.from_list([row] * count).to_parquet(tmp_path / f"data/{split}-00000-of-00001-0a.parquet")
    rows = load_benchmark("pick-a-pic", str(tmp_path))
    splits = [row["comparison"].columns["split"] for row in rows]
    assert splits == ["validation_unique"] * 2 + ["test_unique"] * 3
    alone = load_benchmark("pick-a-pic", str(tmp_path / "data/test_unique-00000-of-00001-0a.parquet"))
    assert [row["comparison"].columns["split"] for row in alone] == ["test_unique"] * 3


def test_a_bad_row_is_returned_with_its_number(tmp_path):
    rows = [ROWS["hpdv3"][0], {**ROWS["hpdv3"][0], "path2": None}]
    (tmp_path / "test.json").write_text(json.dumps(rows))
    error = load_benchmark("hpdv3", str(tmp_path))[1]["comparison"]
    assert isinstance(error, RowError)
    assert error.row_id == "test.json:2"


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("rewardbench", "nowhere", "hf download allenai/reward-bench"),
        ("videogen-rewardbench", ".", r"videogen-rewardbench\.csv: .*unpack videos\.zip"),
        ("hpdv2", None, r"test\.tar\.gz"),
        ("hpdv3", ".", "lacks the columns path2"),
    ],
)
def test_missing_benchmark_files_say_where_to_get_them(name, place, said, tmp_path):
    (tmp_path / "test.json").write_text(json.dumps([{"prompt": "A fox.", "path1": "a"}]))
    with pytest.raises(DataError, match=said):
        load_benchmark(name, place and str(tmp_path / place))


@pytest.mark.parametrize(
    ("line", "changed", "said"),
    [
        ("rule: pairs", "rule: pears", "rule: .* pairs"),
        ("rule: pairs", "rule: sections", "groups is missing"),
        ("rule: pairs", "rule: pairs\nby: [split]", "columns: split"),
        ("  splits: [test]", "", r"source\.splits"),
        ("HPSv3: [76.9]", "HPSv3: [76.9, 1.0]", r"published\.0: percent: HPSv3 has 2"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(tmp_path, line, changed, said):
    text = (FOLDER / "hpdv3.yaml").read_text()
    assert line in text
    (tmp_path / "mine.yaml").write_text(text.replace(line, changed))
    with pytest.raises(ConfigError, match=rf"mine\.yaml: {said}"):
        read_benchmark(tmp_path / "mine.yaml")


def test_a_benchmark_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="mean vl-rewardbench"):
        benchmark("vl_rewardbench")
