"""`check_data` finds what is wrong before training does."""

import json

from PIL import Image as Pillow

from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.check import check_data, format_report
from vlmrm.errors import RowError


def write(folder, rows) -> str:
    for name, size in (("a.png", (56, 112)), ("b.png", (300, 56)), ("narrow.png", (3, 900))):
        Pillow.new("RGB", size).save(folder / name)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(prompt, image="a.png", chosen="good", rejected="bad", **more):
    return {"prompt": prompt, "image": image, "chosen": chosen, "rejected": rejected, **more}


def test_a_clean_file_is_described(tmp_path):
    rows = [row("one", category="x", votes=[1, 2]), row("two", "b.png", tie=True), row("three", chosen="other")]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)))
    assert (report.rows, report.pairs, report.ties, report.images, report.wrong) == (3, 3, 1, 2, 0)
    assert sorted(report.image_sizes) == [(56, 112), (300, 56)] and report.exit_status == 0
    assert report.prompt_lengths == [3, 3, 5] and report.answer_lengths == [4, 3, 4, 3, 5, 3]
    text = format_report(report)
    assert "3 rows, read as chosen / rejected" in text and "not read: votes" in text
    assert f"  prompt\n    user: [image {tmp_path}/a.png] one\n  chosen\n    assistant: good\n  rejected" in text
    assert "median 206, 95 % up to 291, max 300" in text


def test_wrong_rows_are_counted_and_the_first_named(tmp_path):
    rows = [row("fine"), row("narrow", "narrow.png"), row("gone", "gone.png"), row("same", chosen="bad")]
    rows += [row(f"again {i}", "narrow.png") for i in range(30)]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)))
    assert (report.rows, report.wrong, len(report.wrong_rows), report.exit_status) == (34, 33, 20, 3)
    reasons = dict(report.wrong_rows)
    assert "3x900" in reasons["rows.jsonl:2"] and "does not exist" in reasons["rows.jsonl:3"]
    assert "the same" in reasons["rows.jsonl:4"] and "33 of 34 rows" in format_report(report)


def test_malformed_lines_are_among_the_wrong_rows(tmp_path):
    path = write(tmp_path, [row("one"), row("two")])
    with open(path, "a") as file:
        file.write('{"prompt": "three\n')
    report = check_data(DataArguments(dataset_path=path))
    assert (report.rows, report.wrong, report.exit_status) == (3, 1, 3)
    assert "rows.jsonl:3: line 3 is not valid json" in format_report(report)


def test_steps_are_no_pairs_and_idle_outputs_are_named(tmp_path):
    rows = [{"prompt": "one", "steps": ["a", "b"], "labels": [1, 0]}]
    outputs = {"right": "correctness", "clear": "rating 1-5"}
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows), outputs=outputs))
    assert report.pairs == report.ranked_lists == report.disputed == 0
    text = format_report(report)
    assert "answers judged: right 2, clear 0" in text and "no row judges clear" in text


def test_media_of_a_sample_only(tmp_path):
    rows = [row(f"q{i}", "gone.png") for i in range(50)]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)), media_sample=5)
    assert (report.wrong, report.rows_with_opened_media) == (5, 5)


def test_raters_who_differ_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "What?", "response_a": "A cat.", "response_b": "A dog."}
    rows = [{**row, "preference": ["a", "a", "b"]}, {**row, "prompt": "Which?", "preference": ["b", "b"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_data(DataArguments(dataset_path=str(file)))
    assert (report.pairs, report.ties, report.disputed) == (2, 0, 1)


def test_repeated_rows_and_opposite_judgements(tmp_path):
    rows = [row("q"), row("q"), row("q", chosen="bad", rejected="good"), row("q", "b.png")]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)))
    assert report.duplicate_rows == [("rows.jsonl:2", "rows.jsonl:1"), ("rows.jsonl:3", "rows.jsonl:1")]
    assert report.contradictions == 1


def test_tokens_are_counted_by_the_given_function(tmp_path):
    def words(conversation):
        count = len(text_of(conversation.messages).split())
        if count > 10:
            raise RowError("too long to render")
        return count

    rows = [row("one two"), row("a b c d e f g h i j k")]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows), max_seq_length=2), count_tokens=words)
    assert report.token_counts == [3, 3] and report.wrong_rows == [("rows.jsonl:2", "too long to render")]
    assert "2 conversations are over" in format_report(report)


def test_margins_are_described(tmp_path):
    rows = [row(f"q{i}", margin=margin) for i, margin in enumerate((0.5, 1, 3))] + [row("none")]
    rows += [row("tie", margin=9, tie=True), row("votes", margin=57)]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)))
    text = format_report(report)
    assert "3 margins from 0.5 to 3, median 1" in text and report.wrong == 1 and "`margin` is 57" in text


def test_ranked_lists_are_shown_with_their_scores(tmp_path):
    rows = [{"prompt": "q", "responses": ["x", "y", "z"], "scores": [2, 1, 1], "image": "a.png"}]
    report = check_data(DataArguments(dataset_path=write(tmp_path, rows)))
    assert (report.pairs, report.ties, report.ranked_lists) == (3, 1, 1)
