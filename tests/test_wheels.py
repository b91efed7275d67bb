"""Wheels for a machine without a network: from an index in a folder, to a description, in pieces, and installed."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import wheels
from benchmarks.wheels import Missing, cut, install, pack

LINUX = "manylinux_2_17_x86_64"


def wheel(
    folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any", requires=(), content: str = ""
) -> Path:
    """Write a wheel of one module, whose `VERSION` is its version."""
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {it}" for it in requires] + ["Provides-Extra: local", "Provides-Extra: train"]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n{content}")
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip finds wheels in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, setting in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", setting)
    return folder


def machine(**installed: str) -> dict:
    """A machine with Python 3.12 and these distributions, `vlm_torch` for `vlm-torch`."""
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
    names = {name.replace("_", "-"): version for name, version in installed.items()}
    return {"python": "3.12.3", "platforms": [LINUX], "environment": environment, "installed": names, "requires": {}}


def test_missing_wheels_are_packed_in_pieces_and_imported(index, tmp_path, monkeypatch):
    own = wheel(
        tmp_path, "vlmrm", requires=["aa>=2", "vlmrm[local]; extra == 'train'", "big>=1; extra == 'local'",
                                     "kept>=2; extra == 'local'", "unused; extra == 'docs'"],
    )  # fmt: skip
    monkeypatch.setattr(wheels, "own_wheel", lambda folder: own)
    monkeypatch.setattr(wheels, "_pins", lambda file: {"aa": "2.1"})
    for version in ("2.0", "2.1", "3.0"):
        wheel(index, "aa", version)
    wheel(index, "big", tag=f"cp312-cp312-{LINUX}", requires=["there>=1", "leaf"], content="# " + "x" * 5000)
    wheel(index, "big", "2.0", tag="cp311-cp311-win_amd64")
    wheel(index, "leaf", requires=["never; sys_platform == 'win32'"])
    target = machine(aa="1.0", there="1.5", kept="1.0")
    lines = pack(target, tmp_path / "wheels", extras=["train"], keep=["kept"], piece_mib=1600 / 2**20)
    assert any("kept 1.0 is kept, and kept>=2" in line for line in lines)
    pieces = sorted(path for path in (tmp_path / "wheels").iterdir())
    index_of = json.loads((pieces[0] / wheels.INDEX).read_text())
    assert {name.split("-")[0]: name.split("-")[1] for name in index_of} == {
        "vlmrm": "1.0", "aa": "2.1", "big": "1.0", "leaf": "1.0",
    }  # fmt: skip
    assert len(index_of[f"big-1.0-cp312-cp312-{LINUX}.whl"]["parts"]) > 1
    for piece in pieces:
        assert sum(path.stat().st_size for path in piece.iterdir() if path.name != wheels.INDEX) <= 1600

    stage, site = tmp_path / "stage", tmp_path / "site"
    installed = []
    monkeypatch.setattr(wheels, "_pip", lambda *words: installed.append(words))
    for piece in pieces[:-1]:
        assert f"{len(pieces)} are not here yet" in install([piece], site, stage)
    with pytest.raises(Missing, match="are not here yet"):
        install(pieces[1:], site)
    assert not installed
    assert install(pieces[-1:], site, stage) == f"4 wheels are installed in {site}"
    assert "already" in install([stage], site) and len(installed) == 1
    [words] = installed
    assert sorted(Path(word).name for word in words if word.endswith(".whl")) == sorted(index_of)


def test_pieces_become_the_original_files_or_show_damage(tmp_path):
    made = [wheel(tmp_path, "first", content="# " + "y" * 3000), wheel(tmp_path, "second", content="VALUE = 3")]
    assert cut(made, tmp_path / "wheels", 1200) > 1
    site = tmp_path / "site"
    assert install([tmp_path / "wheels"], site) == f"2 wheels are installed in {site}"
    shown = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(site)!r}); import first, second\n"
                                     "print(first.VERSION, second.VALUE)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split() == ["1.0", "3"]
    part = next((tmp_path / "wheels").rglob("first*.2"))
    part.write_bytes(b"?" + part.read_bytes()[1:])
    (site / wheels.INSTALLED).write_text("{}")
    with pytest.raises(Missing, match=r"first-1\.0-py3-none-any\.whl is damaged"):
        install([tmp_path / "wheels"], site)
