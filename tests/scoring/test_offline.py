"""Offline scoring: every row once, in order, whatever breaks, stops or shares the work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from runs import colour_lists, colour_pairs, square, write_rows

from vlmrm import cli, load_scorer
from vlmrm.batching import ComparisonCollator
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.data.media import PathRules
from vlmrm.data.tables import Source
from vlmrm.errors import ConfigError, DataError, VlmrmError
from vlmrm.modeling import write_complete
from vlmrm.scoring import offline
from vlmrm.scoring.offline import OfflineJob, ShardScoring, StreamRows, Summary, open_rows, score_offline


@pytest.fixture
def job(tiny_reward_model, tmp_path):
    """`job(*inputs, **settings)` is one with small shards and batches, of float32."""

    def make(*inputs: Path, output: str = "scores", **settings) -> OfflineJob:
        small = {"shard_rows": 4, "batch_rows": 3, "dtype": "float32", **settings}
        return OfflineJob(str(tiny_reward_model), [str(path) for path in inputs], tmp_path / output, **small)

    return make


@pytest.fixture(scope="module")
def scorer(tiny_reward_model):
    return load_scorer(tiny_reward_model, dtype="float32")


def read(job: OfflineJob) -> pd.DataFrame:
    """All shards as a user reads them."""
    return pd.read_parquet(job.output)


def expected(scorer, *inputs: Path) -> list[list[float]]:
    rows = load_comparisons([str(path) for path in inputs], arguments=DataArguments())
    return [scorer.score(row["comparison"].conversations()) for row in rows]


def assert_same_rows(found: pd.DataFrame, reference: pd.DataFrame) -> None:
    """Compare two outputs of one data set: scores to rounding, as batches and threads differ; all else exactly."""
    pd.testing.assert_frame_equal(found.drop(columns="scores"), reference.drop(columns="scores"))
    for mine, theirs in zip(found["scores"], reference["scores"], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or list(mine) == pytest.approx(list(theirs), abs=1e-5)


def assert_scores(found: pd.DataFrame, scores: list[list[float]]) -> None:
    assert found["row"].tolist() == list(range(len(scores)))
    assert found["error"].isna().all()
    for mine, theirs in zip(found["scores"], scores, strict=True):
        assert list(mine) == pytest.approx(theirs, abs=1e-5)


def test_every_branch_of_every_row_has_the_scorer_s_score(job, scorer, tmp_path):
    pairs, lists = colour_pairs(tmp_path / "p", 6), colour_lists(tmp_path / "l", 5)
    work = job(pairs, lists)
    assert score_offline(work) == Summary(rows=11, errors=0)
    found = read(work)
    assert found["id"].tolist() == [*(f"pair-{i}" for i in range(6)), *(f"list-{i}" for i in range(5))]
    assert_scores(found, expected(scorer, pairs, lists))
    assert len(list(work.output.glob("*.parquet"))) == 3


def test_plain_tables_and_conversations_are_scored_as_they_say(job, scorer, tmp_path):
    image = square(tmp_path, 1)
    rows = [
        {"prompt": "Which colour?", "images": [image], "response": "green"},
        {"prompt": "Which colour?", "responses": ["green", "green", ""]},
        {"prompt": "Draw.", "response_images": [image]},
        {
            "messages": [{"role": "user", "content": "<image>Say."}, {"role": "assistant", "content": "no"}],
            "images": [image],
        },
    ]
    files = [write_rows(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate(rows)]
    score_offline(job(*files))
    found = read(job(*files))
    picture = {"type": "image", "image": str(tmp_path / image)}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "Which colour?"}]}
    drawn = {"role": "assistant", "content": [picture]}
    [first], plain, [second] = scorer.score_groups(
        [([asked], ["green"]), ("Which colour?", ["green", "green", ""]), ("Draw.", [drawn])]
    )
    said = {"role": "user", "content": [picture, {"type": "text", "text": "Say."}]}
    [third] = scorer.score([[said, {"role": "assistant", "content": "no"}]])
    assert_scores(found, [[first], plain, [second], [third]])
    assert found["id"].tolist() == [f"{i}.jsonl:1" for i in range(4)]


def broken_rows(folder: Path) -> Path:
    """Ten rows, of which the second lacks its image, the fifth its answer, and the last three everything."""
    rows = [{"prompt": f"{i}?", "response": "yes", "images": [square(folder, i)]} for i in range(7)]
    rows[1]["images"] = ["nowhere.png"]
    rows[4]["response"] = None
    rows += [{"prompt": None, "response": "alone"}] * 3
    return write_rows(folder / "broken.jsonl", rows)


def test_a_broken_row_is_a_row_with_its_error(job, tmp_path):
    work = job(broken_rows(tmp_path))
    assert score_offline(work) == Summary(rows=10, errors=5)
    found = read(work)
    assert found["row"].tolist() == list(range(10))
    broken = [1, 4, 7, 8, 9]
    assert found.index[found["error"].notna()].tolist() == broken
    assert found.index[found["scores"].isna()].tolist() == broken
    assert re.search(r"nowhere\.png does not exist", found["error"][1])
    assert "`response`" in found["error"][4]
    assert not found["error"][1].startswith("row 1"), "the reason alone: ids have a column"


def test_a_score_that_is_no_number_is_an_error(job, tmp_path, scorer):
    work = job(colour_pairs(tmp_path / "p", 2))
    overflowing = load_scorer(work.model, dtype="float32")
    overflowing.model.score.weight.data.fill_(float("inf"))
    ShardScoring(work, overflowing, work.open_rows()).run(0, 1)
    found = read(work)
    assert (
        found["scores"].isna().all()
        and found["error"].str.fullmatch("its score is (nan|inf|-inf): look for broken weights, or .*").all()
    )


def test_more_ranks_than_shards_leave_some_without_work(job, tmp_path):
    work = job(colour_pairs(tmp_path / "p", 5))
    assert [score_offline(work, rank=rank, ranks=4) for rank in (3, 2, 1)] == [None] * 3
    assert score_offline(work, rank=0, ranks=4) == Summary(rows=5, errors=0)


def test_a_killed_job_goes_on_with_the_absent_shards_alone(job, tmp_path, monkeypatch):
    work = job(colour_pairs(tmp_path / "p", 10))
    score_offline(work)
    whole = read(work)
    before = {path.name: path.stat().st_mtime_ns for path in work.output.glob("scores-*")}
    (work.output / "scores-000001.parquet").unlink()
    (work.output / ".scores-000001.parquet.123").write_bytes(b"half a shard")
    scored = []
    monkeypatch.setattr(ComparisonCollator, "__call__", spied(ComparisonCollator.__call__, scored))
    assert score_offline(work) == Summary(rows=10, errors=0)
    assert sorted(scored) == [4, 5, 6, 7]
    pd.testing.assert_frame_equal(read(work), whole)
    after = {path.name: path.stat().st_mtime_ns for path in work.output.glob("scores-*")}
    assert {name for name in after if after[name] != before[name]} == {"scores-000001.parquet"}


def spied(collate, seen: list[int]):
    def spy(self, rows):
        seen.extend(row["index"] for row in rows)
        return collate(self, rows)

    return spy


def test_an_interrupted_shard_leaves_nothing_that_could_be_read(job, tmp_path, monkeypatch):
    work = job(colour_pairs(tmp_path / "p", 8))
    seen: list[int] = []

    def stop(self, rows):
        seen.extend(row["index"] for row in rows)
        if 6 in seen:
            raise KeyboardInterrupt
        return collate(self, rows)

    collate = ComparisonCollator.__call__
    monkeypatch.setattr(ComparisonCollator, "__call__", stop)
    with pytest.raises(KeyboardInterrupt):
        score_offline(work)
    assert [path.name for path in work.output.glob("*.parquet")] == ["scores-000000.parquet"]


def test_a_full_disk_costs_the_shard_that_was_being_written(job, tmp_path, monkeypatch):
    work, write = job(colour_pairs(tmp_path / "p", 8)), offline.pq.write_table

    def fill(table, file):
        if table["row"][0].as_py() == 4:
            raise OSError(28, "No space left on device")
        write(table, file)

    monkeypatch.setattr(offline.pq, "write_table", fill)
    with pytest.raises(
        VlmrmError, match=r"000001.parquet cannot be written \(No space left on device\): free some space"
    ):
        score_offline(work)
    assert {path.name for path in work.output.iterdir()} == {"_settings.json", "scores-000000.parquet"}


def test_an_output_that_is_a_file_is_refused(job, tmp_path):
    data = colour_pairs(tmp_path / "p", 4)
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"taken cannot be written \(File exists\): .* is a file"):
        score_offline(job(data, output="taken"))


def test_scores_of_other_settings_are_not_mixed(job, tmp_path, tiny_reward_model):
    data = colour_pairs(tmp_path / "p", 4)
    score_offline(job(data))
    with pytest.raises(ConfigError, match=r"other settings \(dtype\): name a new output folder"):
        score_offline(job(data, dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"\(shard_rows\)"):
        score_offline(job(data, shard_rows=2))
    with pytest.raises(ConfigError, match=r"\(data\)"):
        score_offline(job(colour_pairs(tmp_path / "p", 5)))


def test_relative_and_absolute_paths_are_the_same_settings(job, tmp_path, monkeypatch):
    data = colour_pairs(tmp_path / "p", 2)
    score_offline(job(data, image_root=str(tmp_path / "p")))
    monkeypatch.chdir(tmp_path)
    assert score_offline(job(Path("p/pairs.jsonl"), image_root="p")) == Summary(rows=2, errors=0)


def test_ray_is_asked_for_by_name_where_it_is_absent(job, tmp_path, monkeypatch):
    from vlmrm.scoring.ray_data import score_on_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[ray\]'"):
        score_on_ray(job(colour_pairs(tmp_path / "p", 2)), workers=1)


def test_the_checkpoint_is_known_by_its_content_and_not_by_its_place(job, tmp_path, scorer, tiny_reward_model):
    moved = shutil.copytree(tiny_reward_model, tmp_path / "moved")
    assert load_scorer(moved).loaded.digest == scorer.loaded.digest
    weights = moved / "model.safetensors"
    altered = bytearray(weights.read_bytes())
    altered[-3] ^= 1
    weights.write_bytes(altered)
    write_complete(moved, world_size=1, step=0)
    work = job(colour_pairs(tmp_path / "p", 2))
    score_offline(work)
    with pytest.raises(ConfigError, match="weights"):
        score_offline(replace(work, model=str(moved)))


@pytest.mark.parametrize("streaming", [False, True])
def test_ranks_share_all_rows_and_no_row_twice(job, tmp_path, streaming):
    data = [colour_pairs(tmp_path / "p", 9), colour_lists(tmp_path / "l", 5)]
    alone = job(*data, output="alone", streaming=streaming)
    score_offline(alone)
    shared = job(*data, output="shared", streaming=streaming)
    assert score_offline(shared, rank=1, ranks=3) is None
    assert score_offline(shared, rank=0, ranks=3) is None
    assert score_offline(shared, rank=2, ranks=3) == Summary(rows=14, errors=0)
    assert_same_rows(read(shared), read(alone))


def test_a_stream_scores_as_its_table(job, tmp_path):
    data = colour_pairs(tmp_path / "p", 10)
    table, stream = job(data, output="table"), job(data, output="stream", streaming=True, num_workers=2)
    score_offline(table)
    assert score_offline(stream) == Summary(rows=10, errors=0)
    pd.testing.assert_frame_equal(read(stream), read(table))


def test_a_long_stream_is_never_held(job, scorer, tmp_path, monkeypatch):
    from datasets import IterableDataset

    ahead = 0

    def rows():
        nonlocal ahead
        for i in range(3000):
            ahead = max(ahead, i - 100 * len(list((tmp_path / "scores").glob("*.parquet"))))
            yield {"prompt": f"{i % 7}?", "response": "yes" if i % 2 else "no"}

    class Counting:
        """A model that answers how many conversations it sees."""

        device, dtype = scorer.model.device, scorer.model.dtype
        config, parameters = scorer.model.config, scorer.model.parameters

        def __call__(self, branch_ends, **inputs):
            import torch

            return type("Output", (), {"logits": torch.arange(len(branch_ends))[:, None]})

    work = job(shard_rows=100, batch_rows=25)
    stream = StreamRows([(Source("made", IterableDataset.from_generator(rows), str(tmp_path)), PathRules("."))])
    counting = load_scorer(work.model, dtype="float32")
    counting.engine.model = Counting()
    total = ShardScoring(work, counting, stream).run(0, 1)
    assert work.shards.summary(total) == Summary(rows=3000, errors=0)
    assert ahead < 100 + 2 * 25 + 64, "rows are read as they are scored"
    assert read(work)["row"].tolist() == list(range(3000))


def test_workers_that_read_ahead_change_nothing(job, tmp_path):
    data = broken_rows(tmp_path)
    here, ahead = job(data, output="here"), job(data, output="ahead", num_workers=2)
    score_offline(here)
    score_offline(ahead)
    pd.testing.assert_frame_equal(read(ahead), read(here))


def test_input_that_is_no_table_of_answers_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match=r"other\.jsonl: no known layout has the columns question, reply"):
        open_rows([str(write_rows(tmp_path / "other.jsonl", [{"question": "?", "reply": "!"}]))])
    with pytest.raises(DataError, match="does not exist"):
        open_rows([str(tmp_path / "absent.jsonl")])
    (tmp_path / "cut.jsonl").write_text('{"prompt": "?", "resp')
    with pytest.raises(DataError, match=r"cut\.jsonl: line 1 is not valid json"):
        open_rows([str(tmp_path / "cut.jsonl")], streaming=True)


# The command line ----------------------------------------------------------------------------------------------------


def command(*words: str) -> None:
    cli.app(list(words), exit_on_error=False, result_action="return_value")


def words(job: OfflineJob) -> list[str]:
    inputs = [word for path in job.input for word in ("--input", path)]
    sizes = ["--shard-rows", str(job.shard_rows), "--dtype", "float32"]
    return ["score", "--model", job.model, *inputs, "--output", str(job.output), *sizes]


@pytest.mark.parametrize("word", [["--response", "A"], ["--image", "a.png"], ["--response-image", "a"], ["--json"]])
def test_what_belongs_to_a_prompt_does_not_go_with_input(word):
    with pytest.raises(ConfigError, match=f"{word[0]} goes with --prompt, and --input says what to score"):
        command("score", "--model", "m", "--input", "a.jsonl", "--output", "o", *word)


@pytest.mark.parametrize(
    "word",
    [
        *(["--output", "o"], ["--image-root", "i"], ["--streaming"], ["--ray-workers", "2"]),
        *(["--split", "test"], ["--num-workers", "0"], ["--max-tokens-per-batch", "9"]),
    ],
)
def test_what_belongs_to_an_input_does_not_go_with_a_prompt(word):
    with pytest.raises(ConfigError, match=f"{word[0]} goes with --input, and --prompt says what to score"):
        command("score", "--model", "m", "--prompt", "?", "--response", "A", *word)


def test_the_command_says_what_it_did_and_fails_for_broken_rows(job, tmp_path, capsys):
    work = job(colour_pairs(tmp_path / "p", 5))
    cli.app(words(work), exit_on_error=False, result_action="return_value")
    assert f"scored 5 rows into {work.output}" in capsys.readouterr().out
    assert len(read(work)) == 5
    work = job(broken_rows(tmp_path), output="broken")
    with pytest.raises(DataError, match=r"5 of 10 rows could not be scored: see the column error of"):
        cli.app(words(work), exit_on_error=False, result_action="return_value")


def test_the_command_takes_a_table_or_a_prompt(job, tmp_path):
    def run(*more):
        cli.app(["score", "--model", "m", *map(str, more)], exit_on_error=False, result_action="return_value")

    with pytest.raises(ConfigError, match=r"--prompt, .*or --input"):
        run()
    with pytest.raises(ConfigError, match="--prompt and --input"):
        run("--prompt", "?", "--input", "a.jsonl", "--output", "o")
    with pytest.raises(ConfigError, match="--output"):
        run("--input", "a.jsonl")


def test_two_processes_under_torchrun_write_what_one_does(job, tmp_path):
    data = [broken_rows(tmp_path), colour_pairs(tmp_path / "p", 9)]
    alone, shared = job(*data, output="alone"), job(*data, output="shared")
    score_offline(alone)
    here = Path(sys.executable).parent
    launcher = [here / "torchrun", "--standalone", "--nproc-per-node=2", "--no-python", here / "vlmrm"]
    done = subprocess.run([*launcher, *words(shared)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "5 of 19 rows could not be scored" in done.stderr, done.stderr
    assert_same_rows(read(shared), read(alone))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_two_workers_of_ray_write_what_one_process_does(job, tmp_path):
    import ray

    from vlmrm.scoring.ray_data import score_on_ray

    data = [broken_rows(tmp_path), colour_pairs(tmp_path / "p", 9)]
    alone, shared = job(*data, output="alone"), job(*data, output="shared")
    score_offline(alone)
    score_offline(shared, rank=1, ranks=4)  # what is there already is kept
    kept = (shared.output / "scores-000001.parquet").stat().st_mtime_ns
    try:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # nobody else's cluster
        assert score_on_ray(shared, workers=2) == Summary(rows=19, errors=5)
        with pytest.raises(VlmrmError, match=r"a Ray worker failed \(.*CheckpointError: .*missing"):
            score_on_ray(replace(shared, model=str(tmp_path), output=tmp_path / "no"), workers=1)
    finally:
        ray.shutdown()
    assert_same_rows(read(shared), read(alone))
    assert (shared.output / "scores-000001.parquet").stat().st_mtime_ns == kept
