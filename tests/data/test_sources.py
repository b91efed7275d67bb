"""Sources of every kind become one data set of comparisons: mixed, sampled, split."""

import csv
import json
import multiprocessing.spawn
import os
from collections import Counter
from itertools import chain
from pathlib import Path

import datasets
import pytest
from torch.utils.data import DataLoader

from tests import preloaded
from tests.conversations import png, references
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons, load_train_and_eval, split_held_out
from vlmrm.data.media import open_image
from vlmrm.data.tables import load_sources
from vlmrm.errors import ConfigError, DataError, RowError

REAL = Path(os.environ.get("VLMRM_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))


def pairs(count: int, name: str = "q") -> list[dict]:
    return [{"prompt": f"{name}{i}", "chosen": "good", "rejected": "bad"} for i in range(count)]


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)
    return str(path)


def load(*paths, **options):
    arguments = options.pop("arguments", DataArguments())
    return load_comparisons(paths, arguments=arguments, **options)


def prompts(dataset) -> list[str]:
    return [text_of(row["comparison"].prompt) for row in dataset]


def test_saved_datasets_and_globs_and_folders_are_read(tmp_path):
    table = datasets.Dataset.from_list(pairs(2))
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "two")
    assert prompts(load(str(tmp_path / "one"))) == ["q0", "q1"]
    assert prompts(load(str(tmp_path / "two"), split="test")) == ["q1"]
    with pytest.raises(DataError, match="no split eval: it has test, train"):
        load(str(tmp_path / "two"), split="eval")

    write(tmp_path / "files" / "train_a.jsonl", pairs(1, "a"))
    write(tmp_path / "files" / "train_b.csv", pairs(1, "b"))
    write(tmp_path / "files" / "test.jsonl", pairs(1, "t"))
    assert prompts(load(str(tmp_path / "files"))) == ["a0", "b0"]
    assert prompts(load(str(tmp_path / "files"), split="test")) == ["t0"]
    assert prompts(load(str(tmp_path / "files" / "t*.jsonl"))) == ["t0", "a0"]


def test_embedded_pictures_stay_encoded_until_opened(tmp_path):
    features = datasets.Features(
        {
            **{name: datasets.Value("string") for name in ("prompt", "chosen", "rejected")},
            "images": datasets.List(datasets.Image()),
        }
    )
    row = {**pairs(1)[0], "images": [{"bytes": png(), "path": "red.png"}]}
    table = datasets.Dataset.from_list([row], features=features)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    for path in ("rows.parquet", "saved"):
        (row,) = load(str(tmp_path / path))
        (reference,) = references(row["comparison"].prompt)
        assert reference == png()
        assert open_image(reference).getpixel((0, 0)) == (255, 0, 0)


def test_messages_of_mixed_shapes_in_one_file(tmp_path):
    rows = [
        {"prompt": "q0", "chosen": "good", "rejected": "bad"},
        {"prompt": [{"role": "user", "content": "q1"}], "chosen": "good", "rejected": "bad"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q2"}]}], "chosen": "x", "rejected": "y"},
    ]
    dataset = load(write(tmp_path / "rows.jsonl", rows))
    assert sorted(prompts(dataset)) == ["q0", "q1", "q2"]


def test_relative_images_are_found_beside_file_or_root(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{**pairs(1)[0], "image": "images/a.png"}])

    def image(**keys):
        return references(load(path, arguments=DataArguments(**keys))[0]["comparison"].prompt)

    assert image() == [str(tmp_path / "images/a.png")]
    assert image(image_root="/data") == ["/data/images/a.png"]
    assert image(path_rewrites=["images/=/mnt/x/"]) == ["/mnt/x/a.png"]


def test_a_missing_path_or_split_suggests_another(tmp_path):
    write(tmp_path / "pairs.jsonl", pairs(1))
    write(tmp_path / "odd.jsonl", [{"question": "q", "answer": "a"}])
    (tmp_path / "void").mkdir()
    for name, said in {
        "pair.jsonl": r"did you mean .*pairs\.jsonl",
        "*.csv": "file matches",
        "void": "holds no",
        "odd.jsonl": r"odd\.jsonl: no known layout has the columns answer, question",
    }.items():
        with pytest.raises(DataError, match=said):
            load_sources([str(tmp_path / name)])


def test_a_broken_json_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(pairs(1)[0]) + "\n" + json.dumps(pairs(1)[0])[:-5] + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl: line 2 is not valid json"):
        list(load(str(path)))
    (tmp_path / "rows.json").write_text('[\n{"prompt": "q"},\n{"prompt" "q"}]')
    with pytest.raises(DataError, match=r"rows\.json: line 3 is not valid json"):
        list(load(str(tmp_path / "rows.json")))


def test_a_broken_json_line_is_a_skippable_row(tmp_path):
    lines = [json.dumps(row) for row in pairs(3)]
    lines.insert(1, "")  # no row
    lines.insert(2, lines[0][:-5])
    lines.insert(4, "[1, 2]")
    lines.append(json.dumps({"prompt": [{"role": "user", "content": "q3"}], "chosen": "good", "rejected": "bad"}))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    rows = load(str(path), arguments=DataArguments(bad_rows="skip"))
    comparisons = [row["comparison"] for row in rows]
    bad = [row for row in comparisons if isinstance(row, RowError)]
    assert [text_of(row.prompt) for row in comparisons if row not in bad] == ["q0", "q1", "q2", "q3"]
    assert [row.row_id for row in bad] == ["rows.jsonl:2", "rows.jsonl:4"]
    assert bad[0].reason.startswith("line 3 is not valid json (") and "expected an object" in bad[1].reason
    path.write_text("no json\n" * 3)
    with pytest.raises(DataError, match=r"rows\.jsonl: line 1 is not valid json"):
        load(str(path), arguments=DataArguments(bad_rows="skip"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("rows.json", "[]"), ("rows.csv", "prompt,chosen,rejected\n")),
        *(("rows.jsonl", " \n\n\t\n"), ("rows.csv", "\n"), ("rows.json", "\ufeff")),
    ],
)
def test_a_file_without_rows_is_called_so(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is empty: it has no rows|there are no rows in {name}"):
        load(str(tmp_path / name))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_text_outside_utf_8_is_named_with_place(name, tmp_path):
    path = Path(write(tmp_path / name, [*pairs(1), {"prompt": "café", "chosen": "good", "rejected": "bad"}]))
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xe9").replace(b"\\u00e9", b"\xe9"))
    offset = path.read_bytes().index(b"\xe9")
    line = path.read_bytes()[:offset].count(b"\n") + 1
    with pytest.raises(DataError, match=rf"{name}.*line {line}, byte {offset} of the file is 0xe9"):
        for row in load(str(path)):
            if isinstance(row["comparison"], RowError):
                raise row["comparison"]


def test_weights_repeat_and_thin_out_their_source(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", pairs(10, name)) for name in "abc"]
    mixed = load(*paths, weights=[2, 0.5, 1])
    counts = Counter(prompts(mixed))
    by_source = {name: sorted(counts[f"{name}{i}"] for i in range(10)) for name in "abc"}
    assert by_source == {"a": [2] * 10, "b": [0] * 5 + [1] * 5, "c": [1] * 10}
    assert prompts(mixed) == prompts(load(*paths, weights=[2, 0.5, 1]))
    assert prompts(mixed) != prompts(load(*paths, weights=[2, 0.5, 1], arguments=DataArguments(split_seed=1)))
    with pytest.raises(ConfigError, match="0 or more"):
        load(*paths, weights=[-1, 1, 1])
    with pytest.raises(DataError, match="no rows are left"):
        load(*paths, weights=[0, 0, 0])


def test_limit_is_a_seeded_subset_in_order(tmp_path):
    path = write(tmp_path / "rows.jsonl", pairs(100))
    indices = [row["index"] for row in load(path, limit=20)]
    assert indices == sorted(set(indices)) and len(indices) == 20 and indices != list(range(20))
    assert indices == [row["index"] for row in load(path, limit=20)]
    assert len(load(path, limit=1000)) == 100


def test_batches_shuffles_and_selections_read_the_right_rows(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", pairs(20, name)) for name in "ab"]
    dataset = load(*paths)
    expected = [f"a{i}" for i in range(20)] + [f"b{i}" for i in range(20)]
    shuffled = dataset.shuffle(seed=3).select(range(5, 30))
    assert prompts(shuffled) == [expected[row["index"]] for row in shuffled]
    assert [text_of(row["comparison"].prompt) for row in dataset.__getitems__([39, 0, 25])] == ["b19", "a0", "b5"]


def collate(rows):
    return [text_of(row["comparison"].prompt) for row in rows]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rows_reach_loader_workers(start, tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(preloaded.python()))
    dataset = load(write(tmp_path / "rows.jsonl", pairs(40)))
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate, multiprocessing_context=start)
    assert list(chain(*loader)) == [f"q{i}" for i in range(40)]


def photo_rows(folder: Path, count: int) -> str:
    """Three answers about each of `count` photos, one constant prompt."""
    rows = [
        {"prompt": "Look.", "image": f"{i}.png", "chosen": f"good {k}", "rejected": "bad"}
        for i in range(count)
        for k in range(3)
    ]
    return write(folder / "rows.jsonl", rows)


def photos(dataset) -> set[str]:
    return {Path(references(row["comparison"].prompt)[0]).name for row in dataset}


def test_the_held_out_split_is_stable_by_prompt(tmp_path):
    dataset = load(photo_rows(tmp_path, 200))
    train, held_out = split_held_out(dataset, 0.2, seed=0)
    assert len(train) + len(held_out) == 600 and not photos(train) & photos(held_out)
    assert 0.1 < len(held_out) / 600 < 0.3
    _, shuffled = split_held_out(dataset.shuffle(seed=1), 0.2, seed=0)
    _, more = split_held_out(load(photo_rows(tmp_path / "moved", 300)), 0.2, seed=0)
    _, second = split_held_out(dataset, 0.2, seed=1)
    assert photos(shuffled) == photos(held_out) != photos(second)
    assert photos(held_out) == {name for name in photos(more) if int(name.removesuffix(".png")) < 200}


def test_text_to_image_prompts_are_split_by_text(tmp_path):
    rows = [
        {"prompt": f"a {i}", "chosen_image": f"{i}-{k}.png", "rejected_image": "x.png"}
        for i in range(50)
        for k in range(3)
    ]
    train, held_out = split_held_out(load(write(tmp_path / "rows.jsonl", rows)), 0.3, seed=0)
    assert held_out and not set(prompts(train)) & set(prompts(held_out))


def test_a_split_with_an_empty_side_is_refused(tmp_path):
    with pytest.raises(DataError, match="leaves no rows for evaluation"):
        split_held_out(load(photo_rows(tmp_path, 1)), 0.001, seed=0)


def test_train_and_eval_as_configured(tmp_path):
    path, second = photo_rows(tmp_path, 100), write(tmp_path / "other.jsonl", pairs(10))
    keys = {"dataset_path": [path], "dataset_weights": [2.0], "eval_fraction": 0.2}
    train, held_out = load_train_and_eval(DataArguments(**keys, max_train_samples=50, max_eval_samples=7))
    assert (len(train), len(held_out)) == (50, 7) and not photos(train) & photos(held_out)
    train, held_out = load_train_and_eval(DataArguments(**keys))
    assert len(train) / 2 + len(held_out) == 300 and set(Counter(row["index"] for row in train).values()) == {2}

    train, held_out = load_train_and_eval(DataArguments(dataset_path=[path], eval_dataset_path=[second]))
    assert (len(train), len(held_out)) == (300, 10)
    assert load_train_and_eval(DataArguments(dataset_path=path))[1] is None
    with pytest.raises(ConfigError, match="dataset_path is missing"):
        load_train_and_eval(DataArguments())
    with pytest.raises(ConfigError, match="remove one"):
        load_train_and_eval(DataArguments(dataset_path=path, eval_dataset_path=path, eval_fraction=0.1))


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data (VLMRM_TEST_DATA) is not here")
def test_real_preferences_are_read_whole():
    counts = {"flickr8k_pref/vl_expert_train": 4364, "flickr8k_pref/t2i_expert_val": 138}
    counts |= {"nyer_caption_pref/val": 720, "nlvr_pref/vl_true_false_train": 1200, "nlvr_pref/t2i_train": 600}
    for name, count in counts.items():
        comparisons = load(str(REAL / f"{name}.jsonl"))[:]["comparison"]
        assert not [row for row in comparisons if isinstance(row, RowError)]
        assert len(comparisons) == count
        pictures = [references(conversation.messages) for c in comparisons for conversation in c.conversations()]
        assert all(len(names) == 1 for names in pictures)
        open_image(pictures[0][0])
