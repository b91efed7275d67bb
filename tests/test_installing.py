"""What each extra brings is enough for what needs it, and the core for the torch-free half of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vlmrm import libraries
from vlmrm.errors import ConfigError
from vlmrm.libraries import install_command, needs
from vlmrm.rewards import registry

ROOT = Path(__file__).resolve().parents[1]
ROBOTS = ROOT / "packages/robots"
PROJECT, ROBOTS_PROJECT = (
    tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"] for folder in (ROOT, ROBOTS)
)
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

# Of the storeys that the core has, what opens a model, a table or a data set.
HEAVY = r"vlmrm\.(scoring\.(scorer|offline)|rewards\.built_in\.\w+|commands\.(demo|init|plan))"
HEAVY += r"|vlmrm\.adapters\.verl_manager"  # imports verl
CORE = "adapters cli commands config conversation data errors files formats http keys libraries logs rewards scoring"
CORE += " settings"

# Imports modules in order, in an environment without every package that is not named; prints those that fail.
IMPORT = """
import importlib, json, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
allowed, modules, heavy = json.load(sys.stdin)

class Present:  # of what is installed, the packages that are named
    find_distributions = PathFinder.find_distributions

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in allowed or name.startswith("_sysconfigdata"):
            return PathFinder.find_spec(name, path, target)

allowed = {*allowed, *sys.stdlib_module_names, "vlmrm", "vlmrm_robots"}
sys.meta_path = [BuiltinImporter, FrozenImporter, Present]
failed = {}
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps([failed, [name for name in heavy if name in sys.modules]]))
"""


def modules_of(*storeys: str) -> list[str]:
    """Return the names of the modules in these folders and files of the package."""
    names = modules_in(ROOT, "vlmrm")
    return [name for name in names if any(f"{name}.".startswith(f"vlmrm.{storey}.") for storey in storeys)]


def modules_in(folder: Path, package: str) -> list[str]:
    """Return the names of all modules of a package in a folder."""
    paths = [path for path in sorted((folder / package).rglob("*.py")) if path.stem != "__main__"]
    return [".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def packages_of(requirements: list[str]) -> set[str]:
    """Return the names by which what these requirements install here is imported, with what they require."""
    names: set[str] = set()
    pending = [Requirement(line) for line in requirements]
    while pending:
        requirement = pending.pop()
        key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
        if key in names or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.add(key)
        if requirement.name == "vlmrm":
            pending += [Requirement(line) for extra in requirement.extras for line in EXTRAS[extra]]
            continue
        for line in metadata.requires(requirement.name) or ():
            nested = Requirement(line)
            markers = nested.marker
            if markers is None or any(markers.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                nested.marker = None
                pending.append(nested)
    installed = {key.partition("[")[0] for key in names}
    distributions = metadata.packages_distributions().items()
    return {name for name, owners in distributions if installed & {canonicalize_name(owner) for owner in owners}}


def imported(modules: list[str], allowed: set[str], heavy: tuple[str, ...] = ()) -> tuple[dict[str, str], list[str]]:
    """Return which of `modules` cannot be imported with the `allowed` packages alone, and which `heavy` ones were."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=json.dumps([sorted(allowed), modules, heavy]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROBOTS)},
    )
    assert done.returncode == 0, done.stderr
    failed, loaded = json.loads(done.stdout)
    return failed, loaded


# Each extra is enough ------------------------------------------------------------------------------------------------


def test_the_core_imports_with_its_own_packages_alone():
    light = [name for name in modules_of(*CORE.split()) if not re.fullmatch(HEAVY, name)]
    assert len(light) > 60
    assert imported(light, packages_of(PROJECT["dependencies"])) == ({}, [])


def test_the_core_leaves_installed_torch_alone():
    heavy = ("torch", "transformers", "trl", "accelerate", "datasets", "pandas", "torchvision", "scipy", "matplotlib")
    light = [name for name in modules_of(*CORE.split()) if not re.fullmatch(HEAVY, name)]
    everything = set(metadata.packages_distributions())
    assert imported(light, everything, heavy) == ({}, [])


@pytest.mark.parametrize(
    ("extra", "storeys"),
    [
        ("local", "scoring.scorer engine modeling batching rendering export"),
        ("report", "measures evaluation.report"),
        ("train", "training evaluation scoring.scorer scoring.offline commands"),
        ("serve", "serving"),
        ("rewards", "rewards"),
        ("ray", "scoring"),
    ],
)
def test_an_extra_is_enough_for_what_needs_it(extra, storeys):
    modules = modules_of(*storeys.split())
    assert modules
    assert imported(modules, packages_of([*PROJECT["dependencies"], f"vlmrm[{extra}]"]))[0] == {}


@pytest.mark.parametrize(
    ("extras", "storeys"),
    [((), "trajectories commands"), (("frames",), "frames"), (("frames", "vlm"), "rewards")],
)
def test_robots_import_with_their_own_packages(extras, storeys):
    lines = [
        *ROBOTS_PROJECT["dependencies"],
        *(line for it in extras for line in ROBOTS_PROJECT["optional-dependencies"][it]),
    ]
    heavy = r"trajectories\.(hdf5|pictures|reward_models)|frames\.(success|window)_reward"  # h5py, or the extra vlm
    modules = [
        name for name in modules_in(ROBOTS, "vlmrm_robots") if name.split(".")[1:2] and name.split(".")[1] in storeys
    ]
    modules = [name for name in modules if not re.fullmatch(rf"vlmrm_robots\.({heavy})", name)]
    assert len(modules) > 4
    assert imported(modules, packages_of([*PROJECT["dependencies"], *lines]))[0] == {}


# The wheel has what it needs -----------------------------------------------------------------------------------------

SHORT = {  # what the demo's configurations are where it is installed
    "demo.yaml": {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "warmup_steps": 1, "max_eval_samples": 20},
    "demo_eval.yaml": {"max_eval_samples": 20},
}
BUILD = "import setuptools.build_meta as backend; backend.build_wheel('wheels')"
FIND_FRAMES_DEMO = """
import sys
from pathlib import Path
import vlmrm, vlmrm_robots.frames.demo
for package in (vlmrm, vlmrm_robots):
    assert Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__
    assert (Path(package.__file__).parent / "py.typed").is_file()
"""


def test_the_wheel_has_all_that_a_demo_needs(tmp_path):
    source, environment, elsewhere = (tmp_path / name for name in ("source", "environment", "elsewhere"))
    for name in ("vlmrm", "training_configs", "packages"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    elsewhere.mkdir()
    wheels = []
    for folder, package in ((source, "vlmrm"), (source / "packages/robots", "vlmrm_robots")):
        (folder / "wheels").mkdir()
        run(sys.executable, "-c", BUILD, folder=folder)
        wheels += (folder / "wheels").glob("*.whl")
        packaged = {Path(name) for name in zipfile.ZipFile(wheels[-1]).namelist()}
        assert not {path.relative_to(folder) for path in (folder / package).rglob("*.*") if path.is_file()} - packaged

    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, *wheels, folder=elsewhere)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth are not read
    run(python, "-c", FIND_FRAMES_DEMO, environment, folder=elsewhere)
    assert "collect" in run(environment / "bin" / "vlmrm", "frames", "--help", folder=elsewhere)
    for name, keys in SHORT.items():
        config = packages / "vlmrm/demo_configs" / name
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | keys))
    assert "report" in run(environment / "bin" / "vlmrm", "demo", folder=elsewhere)
    assert json.loads((elsewhere / "outputs/demo/summary.json").read_text())["best_checkpoint"]


def run(*command: str | Path, folder: Path) -> str:
    """Return what the command prints in `folder`, away from the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What an extra lacks is said ---------------------------------------------------------------------------------------


def test_a_missing_package_names_its_install_command(monkeypatch):
    monkeypatch.setattr(libraries, "install_command", lambda extra: f"install {extra}")
    with pytest.raises(ConfigError, match=r"^training needs torch: install train\.$"), needs("train", "training"):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    with pytest.raises(ModuleNotFoundError, match="mine"), needs("train", "training"):
        raise ModuleNotFoundError("No module named 'mine'", name="mine")  # no extra would bring it
    with pytest.raises(ConfigError, match="needs bitsandbytes"), needs("qlora", "QLoRA", "json", "bitsandbytes"):
        raise AssertionError("it is looked for at once")


@pytest.mark.parametrize(("name", "extra"), [("clip", "rewards"), ("frame_success", "vlm")])
def test_a_built_in_reward_asks_for_its_extra(name, extra, monkeypatch):
    def load(path: str = "") -> NoReturn:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(registry.importlib, "import_module", load)
    monkeypatch.setattr(registry, "entry_points", lambda group: [SimpleNamespace(name="frame_success", load=load)])
    with pytest.raises(ConfigError, match=rf"the reward {name} needs torch: .*\[{extra}\]"):
        registry.reward_model_class(name)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    with pytest.raises(ConfigError, match=r"frame_success needs vlmrm-robots: pip install .*packages/robots"):
        registry.reward_model_class("frame_success")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ("", r"vlmrm frames needs vlmrm-robots: pip install .*packages/robots.*"),
        ("metadata.EntryPoint('frames', 'gone:app', 'vlmrm.commands')", r"vlmrm frames cannot be used.* 'gone'\."),
    ],
)
def test_a_missing_or_broken_verb_is_one_sentence(entries, sentence):
    chosen = f"[{entries}][:group == 'vlmrm.commands']"
    program = f"from importlib import metadata; metadata.entry_points = lambda group: {chosen}\n"
    command = [sys.executable, "-c", f"{program}from vlmrm.cli import main; main()", "frames", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and re.fullmatch(rf"error: {sentence}\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["eval", "config.yaml"], "train"),
        (["check-data", "rows.jsonl"], "train"),
        (["score", "--model", "m", "--prompt", "p", "--response", "r"], "local"),
        (["report", "scores.parquet"], "report"),
        (["serve", "--model", "m"], "serve"),
        (["frames", "demo"], "frames"),
    ],
)
def test_each_verb_names_its_missing_extra(words, extra, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "vlmrm_core.py").write_text(BLOCKED % sorted(packages_of(PROJECT["dependencies"])))
    command = [sys.executable, "vlmrm_core.py", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROBOTS)))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"error: .* needs? \w+: pip install .*\[{extra}\].*\n", done.stderr)


BLOCKED = IMPORT.partition("failed = {}")[0].replace("json.load(sys.stdin)", "(%s, (), ())") + (
    "from vlmrm.cli import main\nmain()\n"
)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install -e '.[train]' in vlmrm's folder"),
        ({"url": "file:///v-1-py3-none-any.whl", "archive_info": {}}, "'vlmrm[train] @ file:///v-1-py3-none-any.whl'"),
        (
            {"url": "https://host/vlmrm", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'vlmrm[train] @ git+https://host/vlmrm@abc'",
        ),
    ],
)
def test_the_command_is_that_of_the_installation(origin, command, monkeypatch):
    class Installed:
        @staticmethod
        def read_text(name):
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(libraries.metadata, "distribution", lambda name: Installed)
    assert install_command("train").endswith(command)
    robots = install_command("vlmrm-robots[frames]")
    assert "vlmrm-robots[frames] @ " in robots or "-e 'packages/robots[frames]'" in robots
    assert ("vcs_info" in (origin or ())) == robots.endswith("@abc#subdirectory=packages/robots'")


# The development environment --------------------------------------------------------------------------------------


def test_pins_are_names_and_versions_within_bounds():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line)]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    elsewhere = ("docs", "tensorboard", "trackio", "flash", "qlora")  # not in the development environment
    for project in (PROJECT, ROBOTS_PROJECT):
        lines = [*project["dependencies"]]
        lines += [
            line for extra, more in project["optional-dependencies"].items() if extra not in elsewhere for line in more
        ]
        for requirement in map(Requirement, [line for line in lines if not line.startswith("vlmrm")]):
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
