"""Offline scoring: every row once, in order, whatever breaks, stops or shares the work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from tests import preloaded
from tests.runs import colour_lists, colour_pairs, square, write_rows
from vlmrm import cli, load_scorer
from vlmrm.data.arguments import DataArguments
from vlmrm.data.comparisons import load_comparisons
from vlmrm.errors import ConfigError, DataError, VlmrmError
from vlmrm.modeling import write_complete
from vlmrm.scoring import offline
from vlmrm.scoring.offline import OfflineJob, ShardScoring, Summary, score_offline


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


def test_every_branch_has_the_score_of_the_scorer(job, scorer, tmp_path):
    pairs, lists = colour_pairs(tmp_path / "p", 6), colour_lists(tmp_path / "l", 5)
    work = job(pairs, lists)
    assert score_offline(work) == Summary(rows=11, errors=0)
    found = read(work)
    assert found["id"].tolist() == [*(f"pair-{i}" for i in range(6)), *(f"list-{i}" for i in range(5))]
    assert_scores(found, expected(scorer, pairs, lists))
    assert len(list(work.output.glob("*.parquet"))) == 3


def test_plain_tables_and_conversations_are_scored_as_written(job, scorer, tmp_path):
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


def test_a_broken_row_keeps_its_place_with_error(job, tmp_path):
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


def test_a_nonfinite_score_is_an_error(job, tmp_path, scorer):
    work = job(colour_pairs(tmp_path / "p", 2))
    overflowing = load_scorer(work.model, dtype="float32")
    overflowing.model.score.weight.data.fill_(float("inf"))
    ShardScoring(work, overflowing, work.open_rows()).run(0, 1)
    found = read(work)
    assert (
        found["scores"].isna().all()
        and found["error"].str.fullmatch("its score is (nan|inf|-inf): look for broken weights, or .*").all()
    )


def test_a_killed_job_resumes_only_the_absent_shards(job, tmp_path):
    work = job(colour_pairs(tmp_path / "p", 10))
    score_offline(work)
    whole = read(work)
    before = {path.name: path.stat().st_mtime_ns for path in work.output.glob("scores-*")}
    (work.output / "scores-000001.parquet").unlink()
    (work.output / ".scores-000001.parquet.123").write_bytes(b"half a shard")

    assert score_offline(work) == Summary(rows=10, errors=0)

    pd.testing.assert_frame_equal(read(work), whole)
    after = {path.name: path.stat().st_mtime_ns for path in work.output.glob("scores-*")}
    assert {name for name in after if after[name] != before[name]} == {"scores-000001.parquet"}


def test_a_full_disk_costs_only_the_current_shard(job, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("changed", "name"), [({"dtype": "bfloat16"}, "dtype"), ({"shard_rows": 2}, "shard_rows")])
def test_scores_of_other_settings_are_not_mixed(job, tmp_path, changed, name):
    data = colour_pairs(tmp_path / "p", 4)
    score_offline(job(data))
    with pytest.raises(ConfigError, match=rf"other settings \({name}\): name a new output folder"):
        score_offline(job(data, **changed))


def test_scores_of_other_rows_or_weights_never_mix(job, tmp_path, tiny_reward_model):
    work = job(colour_pairs(tmp_path / "p", 2))
    score_offline(work)
    moved = shutil.copytree(tiny_reward_model, tmp_path / "moved")
    assert score_offline(replace(work, model=str(moved))) == Summary(rows=2, errors=0)  # known by its content
    weights = moved / "model.safetensors"
    altered = bytearray(weights.read_bytes())
    altered[-3] ^= 1
    weights.write_bytes(altered)
    write_complete(moved, world_size=1, step=0)
    with pytest.raises(ConfigError, match="weights"):
        score_offline(replace(work, model=str(moved)))
    with pytest.raises(ConfigError, match=r"\(data\)"):
        score_offline(job(colour_pairs(tmp_path / "p", 5)))


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_ranks_share_all_rows_and_no_row_twice(job, tmp_path, options):
    data = [colour_pairs(tmp_path / "p", 9), colour_lists(tmp_path / "l", 5)]
    alone, shared = job(*data, output="alone"), job(*data, output="shared", **options)
    score_offline(alone)
    summaries = [score_offline(shared, rank=rank, ranks=5) for rank in (4, 3, 1, 0, 2)]  # the fifth has no shard
    assert summaries == [None] * 4 + [Summary(rows=14, errors=0)]
    assert_same_rows(read(shared), read(alone))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"question": "?", "reply": "!"}', "no known layout has the columns question, reply"),
        (None, "does not exist"),
        ('{"prompt": "?", "resp', "line 1 is not valid json"),
    ],
)
def test_input_without_answers_is_refused_at_once(job, tmp_path, content, said):
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=rf"rows\.jsonl.*{said}"):
        job(tmp_path / "rows.jsonl").open_rows()


# The command line ----------------------------------------------------------------------------------------------------


def command(*words: str) -> None:
    cli.app(list(words), exit_on_error=False, result_action="return_value")


def words(job: OfflineJob) -> list[str]:
    inputs = [word for path in job.input for word in ("--input", path)]
    sizes = ["--shard-rows", str(job.shard_rows), "--dtype", "float32"]
    return ["score", "--model", job.model, *inputs, "--output", str(job.output), *sizes]


TABLE, PROMPT = ("--input", "a.jsonl", "--output", "o"), ("--prompt", "?", "--response", "A")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(((*TABLE, *word), f"{word[0]} goes with --prompt") for word in (["--response", "A"], ["--image", "a.png"])),
        *(((*PROMPT, *word), f"{word[0]} goes with --input") for word in (["--output", "o"], ["--split", "test"])),
        ((), r"--prompt, .*or --input"),
        ((*TABLE, "--prompt", "?"), "--prompt and --input"),
        (("--input", "a.jsonl"), "--output"),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        command("score", "--model", "m", *words)


def test_the_command_says_what_it_did(job, tmp_path, capsys):
    work = job(colour_pairs(tmp_path / "p", 5))
    command(*words(work))
    assert f"scored 5 rows into {work.output}" in capsys.readouterr().out
    assert len(read(work)) == 5


def test_the_command_fails_for_broken_rows(job, tmp_path):
    with pytest.raises(DataError, match=r"5 of 10 rows could not be scored"):
        command(*words(job(broken_rows(tmp_path))))


def test_two_processes_under_torchrun_write_what_one_does(job, tmp_path):
    data = [broken_rows(tmp_path), colour_pairs(tmp_path / "p", 9)]
    alone, shared = job(*data, output="alone"), job(*data, output="shared")
    score_offline(alone)
    torchrun = [preloaded.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [*torchrun, "-m", "vlmrm", *words(shared)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "5 of 19 rows could not be scored" in done.stderr, done.stderr
    assert_same_rows(read(shared), read(alone))


@pytest.mark.alone
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_two_ray_workers_write_what_one_process_writes(job, tmp_path):
    import ray

    from vlmrm.scoring.offline import score_on_ray

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
