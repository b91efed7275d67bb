"""The house stays small enough to see whole. The limits fall with time; who adds lines takes others away."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

from vlmrm.libraries import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
LINES = {"vlmrm": 46_000, "packages/robots/vlmrm_robots": 6_000, "tests": 35_000}
FILE = 500  # lines of a file
BEHIND_TRAINING = 60  # modules that `vlmrm.training.main` imports with it


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_packages_have_no_more_lines_than_allowed():
    for package, limit in LINES.items():
        sizes = {file: lines(file) for file in (ROOT / package).rglob("*.py")}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
        table = "\n".join(f"{sizes[file]:5} {file.relative_to(ROOT)}" for file in largest)
        assert sum(sizes.values()) <= limit, f"take lines out of {package}, such as from\n{table}"
        assert package == "tests" or sizes[largest[0]] <= FILE, f"a file is one noun of at most {FILE} lines:\n{table}"


def test_every_planted_fault_has_its_place():
    for it in run_path(str(ROOT / "drives/mutants.py"))["MUTANTS"]:
        assert (ROOT / it.file).read_text(encoding="utf-8").count(it.old) == 1, it


def test_few_modules_stand_behind_training():
    assert len(own := [name for name in behind("vlmrm.training.main") if is_own(name)]) <= BEHIND_TRAINING, own


def test_judges_need_no_package_of_the_report():
    folders = ("adapters", "rewards", "rewards/judges")
    files = [file for folder in folders for file in (ROOT / "vlmrm" / folder).glob("*.py")]
    modules = behind(*(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files))
    packages = {name.partition(".")[0] for name in modules}
    assert packages & {"PIL", "numpy"} and not packages & set(PACKAGES["report"])


def behind(*modules: str) -> set[str]:
    """Return what is imported when these modules are, not inside of functions."""
    seen, waiting = set[str](), list(modules)
    while waiting:
        module = waiting.pop()
        if module not in seen and is_own(module):
            file = ROOT / module.replace(".", "/")
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            waiting += imported(ast.parse(file.read_text(encoding="utf-8")).body)
        seen.add(module)
    return seen


def is_own(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return module.startswith("vlmrm") and (path.is_dir() or path.with_suffix(".py").is_file())


def imported(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from imported([*node.body, *node.orelse])
        elif isinstance(node, (ast.With, ast.Try)):
            yield from imported(node.body)
