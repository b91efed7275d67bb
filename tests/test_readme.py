"""README and guides: commands, configurations, rows, programs and quoted errors are real."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pydoc
import re
import runpy
import shlex
import shutil
import socket
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests import preloaded
from tests.runs import SHORT, write_rows
from tests.runs import words as as_words
from vlmrm import cli, load_scorer
from vlmrm.config import parse
from vlmrm.conversation import text_of
from vlmrm.data.arguments import DataArguments
from vlmrm.data.rows import read_row
from vlmrm.evaluation.arguments import EvaluationArguments
from vlmrm.evaluation.sweep import sweep
from vlmrm.measures.interventions import INTERVENTIONS
from vlmrm.measures.metrics import METRICS
from vlmrm.modeling.arguments import ModelArguments
from vlmrm.rewards import reward_arguments
from vlmrm.serving.settings import load_settings
from vlmrm.settings import validate
from vlmrm.training import train
from vlmrm.training.arguments import RewardTrainingArguments
from vlmrm.training.losses import PAIR_LOSSES
from vlmrm_robots.frames.settings import CollectSettings

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"

# Pages with programs that need what no test has: weights, a server, another framework, a simulator's frames. Of these
# the imports alone are tested here.
NOT_RUN = {
    *("docs/benchmarks.md", "docs/frames.md", "docs/report.md", "docs/rewards.md"),
    *("docs/serving.md", "docs/howto/serve.md"),
}
# `make neighbours` runs those of this page, each in its framework's own environment.
RUN_ELSEWHERE = {"docs/howto/rl.md"}
# Programs of others, whose words nothing here can read.
FOREIGN = {"cd", "docker", "git", "kubectl", "source", "uv"}
KEYS = {
    "train_rm.py": (ModelArguments, DataArguments, RewardTrainingArguments),
    "eval_rm.py": (EvaluationArguments, DataArguments),
}


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, also those inside lists; not those that show a file, tested where it is."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    texts = [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]
    return [text for text in texts if not text.startswith("--8<--")]


def commands(page: str) -> list[list[str]]:
    """Each command of the page's bash blocks, as words."""
    found, command = [], ""
    for line in "".join(blocks(page, "bash")).replace("\\\n", "").splitlines(keepends=True):
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # quotes that a later line closes
            continue
        found, command = [*found, *([words] if words else [])], ""
    assert not command, command
    return found


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def documented(page: str) -> set[str]:
    """The names in the first column of the page's tables."""
    cells = re.findall(r"^\| (`.*?) \|", (ROOT / page).read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(.*?)`", cell)}


def program_of(config: str) -> str:
    return "eval_rm.py" if "model_dirs" in config else "train_rm.py"


@pytest.fixture
def reader(tmp_path, tiny_checkpoint, tiny_reward_model, monkeypatch):
    """The folder of somebody who reads along: pairs about two images, trained models, `make`'s DeepSpeed files."""
    for name, colour in (("cat.jpg", "orange"), ("dog.jpg", "brown")):
        Image.new("RGB", (84, 56), colour).save(tmp_path / name)
    animals = itertools.cycle([("cat", "dog"), ("dog", "cat")])
    rows = [
        {"prompt": f"{i}. What is this?", "images": [f"{it}.jpg"], "chosen": f"A {it}.", "rejected": f"A {other}."}
        for i, (it, other) in zip(range(32), animals, strict=False)
    ]
    write_rows(tmp_path / "my_pairs.jsonl", rows)
    write_rows(tmp_path / "my_test.jsonl", rows[:4])
    columns = {"query": "What is this?", "photo": "cat.jpg", "chosen": "A cat.", "rejected": "A dog."}
    write_rows(tmp_path / "my_columns.jsonl", [columns])
    lists = [{"prompt": "What is this?", "images": ["cat.jpg"], "responses": ["A cat.", "A dog."], "scores": [1, 0]}]
    write_rows(tmp_path / "my_lists.jsonl", lists)
    write_rows(tmp_path / "candidates.jsonl", [{key: row[key] for key in row if key != "scores"} for row in lists])
    ratings = ["prompt,image,response,helpful,clear"]
    ratings += [f"What is this?,cat.jpg,{answer},{it},{it}" for answer in ("A cat.", "A dog.") for it in (5, 2)]
    (tmp_path / "my_ratings.csv").write_text("\n".join(ratings))
    for engine in ("zero2.json", "fsdp2.json"):
        shutil.copy(ROOT / engine, tmp_path)
    (tmp_path / "outputs/mine").mkdir(parents=True)
    for name in ("outputs/best", "outputs/mine/best"):
        shutil.copytree(tiny_reward_model, tmp_path / name)  # a sweep saves its scores' scale with the best
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_configs(page: str, model: Path) -> list[Path]:
    """The page's configurations as files: the first are those that its commands name."""
    names = {"train_rm.py": "my_config.yaml", "eval_rm.py": "my_eval.yaml"}
    written = []
    for number, text in enumerate(blocks(page, "yaml")):
        name = names.pop(program_of(text), f"{number}.yaml")
        written.append(Path(name))
        written[-1].write_text(text.replace(MODEL, str(model)))
    return written


# What the pages show -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages_with("bash"))
def test_every_command_is_accepted(page, reader, tiny_checkpoint):
    write_configs(page, tiny_checkpoint)
    for words in commands(page):
        check_command([word.replace(MODEL, str(tiny_checkpoint)) for word in words])


def check_command(words: list[str]) -> None:
    """Run what is quick; read the words of what would train, evaluate, listen or start processes."""
    for word in words:
        if word.startswith(("training_configs/", "examples/")):
            assert (ROOT / word).exists(), word
    match words:
        case ["make", verb, *settings]:
            makefile = (ROOT / "Makefile").read_text()
            assert f"\n{verb}:" in makefile
            assert all(re.search(rf"\$\({setting.partition('=')[0]}[:)]", makefile) for setting in settings), settings
        case ["python", "-m", module, *rest]:
            path = ROOT / module.replace(".", "/")
            files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
            known = set(re.findall(r"--[\w-]+", "\n".join(file.read_text() for file in files)))
            assert {word for word in rest if word.startswith("--")} <= known, module
        case ["python", "-c", program]:
            compile(program, "-c", "exec")
        case ["python", "train_rm.py" | "eval_rm.py" as program, *rest]:
            parse(KEYS[program], configured(rest), program)
        case ["vlmrm", "train" | "eval" as verb, *rest]:
            parse(KEYS[f"{verb}_rm.py"], configured(rest), verb)
        case ["python", program, *rest]:
            options = {word for word in rest if word.startswith("--")}
            assert options <= set(re.findall(r"--[\w-]+", (ROOT / program).read_text())), program
        case ["./run_distributed.sh" | "./run_eval.sh" as script, *rest]:
            check_launch(script, rest)
        case ["vlmrm", "check-data" | "leakage" as verb, *_]:
            with pytest.raises(SystemExit) as ended:
                cli.app(words[1:])
            assert ended.value.code == (3 if verb == "leakage" else 0)  # the reader tests on rows trained on
        case ["torchrun", *_, "vlmrm", "score", "--model", _, "--input", _, "--output", _]:
            cli.app.parse_args(words[words.index("score") :], exit_on_error=False, print_error=False)
        case ["vlmrm", "score" | "export" | "init-tiny" | "convert", *rest] if not {"--url", "--ray-workers"} & set(
            rest
        ):
            cli.app(words[1:], exit_on_error=False, result_action="return_value")
        case ["vlmrm", *rest]:
            cli.app.parse_args(rest, exit_on_error=False, print_error=False)
        case ["curl", *rest]:
            check_request(rest)
        case ["export", setting]:
            name = setting.partition("=")[0]
            assert not name.startswith("VLMRM_") or any(name in text for text in sources()), name
        case [name, *_]:
            assert name in FOREIGN or words[:2] == ["pip", "install"], f"no test knows {shlex.join(words)}"


def configured(words: list[str]) -> list[str]:
    """The words with the repository's configurations where they are."""
    return [str(ROOT / word) if word.startswith("training_configs/") else word for word in words]


def check_request(words: list[str]) -> None:
    """What a curl asks for is a route, and what it sends is a request."""
    from vlmrm.serving.protocols import routers
    from vlmrm.serving.protocols.native import RewardRequest

    [address] = [word for word in words if word.startswith("http")]
    route = "/" + address.split("/", 3)[3]
    known = {each.path for router in routers() for each in router.routes}
    assert route in known or any(f'"{route}"' in text for text in sources()), route
    if "-d" in words:
        RewardRequest.model_validate_json(words[words.index("-d") + 1])


def sources() -> list[str]:
    return [
        path.read_text() for name in ("vlmrm", "packages/robots/vlmrm_robots") for path in (ROOT / name).rglob("*.py")
    ]


def check_launch(script: str, words: list[str]) -> None:
    """The script takes the words, and so does the program that it would start."""
    folder = Path("stand-ins").resolve()
    folder.mkdir(exist_ok=True)
    for name in ("torchrun", "python3"):
        (folder / name).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
        (folder / name).chmod(0o755)
    with socket.socket() as bound:  # the script refuses a port where somebody listens: here nobody can
        bound.bind(("127.0.0.1", 0))
        free = str(bound.getsockname()[1])
        port = [] if script == "./run_eval.sh" or "--port" in words else ["--port", free]
        done = subprocess.run(
            [script, *port, *words],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    started = done.stdout.splitlines()
    [place] = [i for i, word in enumerate(started) if Path(word).name in KEYS]
    config, *keys = started[place + 1 :]
    parse(KEYS[Path(started[place]).name], [str(ROOT / config), *keys], script)


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_every_configuration_is_accepted(page, reader, tiny_checkpoint):
    for path in write_configs(page, tiny_checkpoint):
        content = yaml.safe_load(path.read_text())
        rewards = content if isinstance(content, list) else content.get("rewards")
        if rewards is not None:
            ours = [reward for reward in rewards if not reward["reward_model"].startswith("flow_factory.")]
            assert not ours or reward_arguments({"rewards": ours})
        elif "reward" in content:
            validate(CollectSettings, content, page)
        else:
            program = program_of(path.read_text())
            parse(KEYS[program], [str(path)], program)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_every_service_is_accepted(page, reader):
    for text in blocks(page, "toml"):
        if "use_remote_reward" in text:
            continue  # cosmos-rl's own
        if "[[reward_args]]" not in text:
            text += '[[reward_args]]\nreward_type = "ocr"\n'
        Path("service.toml").write_text(text)
        assert load_settings(Path("service.toml"), {}).reward_args


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page not in NOT_RUN | RUN_ELSEWHERE])
def test_every_program_runs(page, reader, tiny_checkpoint, monkeypatch):
    for table, name in ((METRICS, "sure"), (PAIR_LOSSES, "hinge")):  # CONTRIBUTING.md registers them
        monkeypatch.setitem(table, name, None)
        del table[name]
    namespace: dict = {}
    write_configs(page, tiny_checkpoint)
    for number, text in enumerate(blocks(page, "python")):
        exec(compile(text.replace(MODEL, str(tiny_checkpoint)), f"{page}, program {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in pages_with("python") if page in NOT_RUN])
def test_every_unrun_program_imports_existing_names(page):
    for text in blocks(page, "python"):
        lines = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec(compile(ast.Module(lines, []), page, "exec"), {})


def test_readme_s_row_is_read():
    [row] = [json.loads(text) for text in blocks("README.md", "json")]
    comparison = read_row(row, "readme", lambda reference: reference)
    assert [text_of(answer) for answer in comparison.answers] == ["A cat.", "A dog."]


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_way_leads_to_a_model_that_scores(page, reader, tiny_checkpoint, capsys):
    """Train with the configuration, sweep and score with the commands; only the model and the steps are smaller.

    What the log and the table then hold is what the guides explain.
    """
    shutil.rmtree("outputs")
    write_configs(page, tiny_checkpoint)
    result = train(["my_config.yaml", *as_words(**{**SHORT, "max_steps": 2, "eval_fraction": 0.2})])
    assert result.model_dir == Path("outputs/mine/best")

    [evaluation] = [words[2:] for words in commands(page) if words[1] in ("eval", "eval_rm.py")]
    swept = sweep(["0.2" if word == "0.05" else word for word in evaluation])  # 0.05 of so few rows is next to none
    assert [row["checkpoint"] for row in swept.rows] == ["checkpoint-2"] and swept.best is not None
    assert swept.csv == Path("results/mine.csv")

    history = json.loads(Path("outputs/mine/checkpoint-2/trainer_state.json").read_text())["log_history"]
    [held_out] = [line for line in history if "eval_pairs" in line]
    assert swept.best["sample_count"] == held_out["eval_pairs"] > 1, "the rows that the training held out"
    assert swept.best["preference_accuracy"] == held_out["eval_accuracy"]
    assert swept.best["average_margin"] == pytest.approx(held_out["eval_margin"], abs=1e-3)
    of_hf = re.compile(r"step|.*_(runtime|samples_per_second|steps_per_second)")
    logged = {name for line in history for name in line if not of_hf.fullmatch(name)}
    irrelevant = {"loss_irrelevant"} if page == "docs/quickstart.md" else set()
    assert {"loss", "eval_accuracy", *irrelevant} <= logged <= documented("docs/training.md")
    columns = swept.csv.read_text().splitlines()[0].split(",")
    of_interventions = {f"{name}_accuracy{end}" for name in INTERVENTIONS for end in ("", "/low", "/high", "/n")}
    assert "blank_image_accuracy" in columns
    assert {*columns} - of_interventions <= documented("docs/evaluation.md")

    [score] = [words[1:] for words in commands(page) if words[:3] == ["vlmrm", "score", "--model"]]
    capsys.readouterr()
    cli.app(score, exit_on_error=False, result_action="return_value")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1].removesuffix("  <- best") for line in printed] == ["A cat.", "A dog."]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_included_file_exists(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for target in re.findall(r'^--8<-- "(.*)"$', text, re.MULTILINE):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_module_that_is_named_exists(page):
    """Those in code quotes, `vlmrm/cli.py` or `vlmrm.scoring.transforms`, and those of the API page."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    folders = "|".join(("vlmrm", "tests", "docs", "examples", "benchmarks", "training_configs", r"\.ci"))
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text):
        assert (ROOT / name).exists() or "NAME" in name, name
    for name in re.findall(r"(?:`|^::: )(vlmrm(?:\.\w+)+)(?:`|$)", text, re.MULTILINE):
        assert pydoc.locate(name) is not None or entry_points(group=name), name


def test_every_name_in_contributing_exists_in_code():
    text = re.sub(r"```.*?```", "", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    files = [path for folder in ("vlmrm", "tests", "docs", "drives") for path in (ROOT / folder).rglob("*.py")]
    known = {word for path in files for word in re.findall(r"\w+", path.read_text())} | {path.name for path in files}
    for name in re.findall(r"`(\w+(?:\.\w+)?)`", text):
        parts = {name} if name.endswith(".py") else set(name.split("."))
        assert parts <= known or "NAME" in name or (ROOT / name).exists(), name


def test_the_tree_of_files_is_up_to_date():
    tree = runpy.run_path(str(ROOT / "docs/tree.py"))
    assert tree["page"]() == tree["PAGE"].read_text(), "run python docs/tree.py"


def test_every_quoted_error_is_in_the_program():
    source = re.sub(r'"\s*f?"', "", "\n".join(sources()))  # as Python joins the parts of a string
    table = (ROOT / "docs/troubleshooting.md").read_text().partition("| sentence |")[2]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert len(quoted) > 8
    for sentence in quoted:
        for part in filter(None, re.split(r"\s*…\s*", sentence)):
            assert part in source, part


# The examples --------------------------------------------------------------------------------------------------------


def example(name: str, *arguments: str) -> str:
    """What an example prints in the reader's folder."""
    command = [preloaded.python(), str(ROOT / "examples" / name), "--model", "outputs/best", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_score_example_prints_scores_of_the_scorer(reader):
    content = [{"type": "image", "image": "cat.jpg"}, {"type": "text", "text": "What is this?"}]
    [expected] = load_scorer("outputs/best").score_groups(
        [([{"role": "user", "content": content}], ["A cat.", "No."])]
    )
    lines = example("score.py", "--image", "cat.jpg", "What is this?", "A cat.", "No.").splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == ["A cat.", "No."]
    assert [float(line.split()[0]) for line in lines] == pytest.approx(expected, abs=1e-4)


def test_best_of_n_keeps_rows_and_names_highest(reader):
    rows = [
        {"id": 7, "prompt": "What is this?", "images": ["cat.jpg"], "responses": ["A cat.", "A dog.", "Nothing."]},
        {"prompt": "Two plus two?", "responses": ["4", "5"]},
    ]
    example("best_of_n.py", str(write_rows(reader / "candidates.jsonl", rows)), "best.jsonl")
    found = [json.loads(line) for line in (reader / "best.jsonl").read_text().splitlines()]
    for row, best in zip(rows, found, strict=True):
        assert row.items() <= best.items() and len(best["scores"]) == len(row["responses"])
        assert best["scores"][row["responses"].index(best["best"])] == max(best["scores"])


def test_disagreements_begin_with_the_lowest_margin(reader):
    lines = example("disagreements.py", "--data", "my_test.jsonl", "--most", "3").splitlines()
    margins = [float(line.split()[0]) for line in lines[::3]]
    assert len(margins) == 3 and margins == sorted(margins)
    assert re.fullmatch(r"\s+chosen +A (cat|dog)\.", lines[1])
