"""The declared requirements are those with which the package works."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("library", "blind_or_broken"),
    [
        ("transformers", ["5.15.0", "5.16.0", "5.17.0"]),  # the backbones ignore features of images
        ("transformers", ["5.18.0"]),  # AutoModelForSequenceClassification forgets the classes registered with it
        ("torch", ["2.10.0", "2.11.0"]),  # attention of unequal lengths knows no grouped heads
        ("torchvision", ["0.25.0", "0.26.0"]),  # those of these versions of torch
    ],
)
def test_versions_that_cannot_work_are_not_allowed(library, blind_or_broken):
    requirements = map(Requirement, PROJECT["optional-dependencies"]["local"])
    [allowed] = [line.specifier for line in requirements if line.name == library]
    assert not [version for version in blind_or_broken if Version(version) in allowed]
    assert Version(re.sub(r"\+.*", "", metadata.version(library))) in allowed


def test_the_core_bounds_nothing_from_above():
    """It is installed beside trainers whose versions it does not choose."""
    operators = {each.operator for line in map(Requirement, PROJECT["dependencies"]) for each in line.specifier}
    assert operators == {">="}
