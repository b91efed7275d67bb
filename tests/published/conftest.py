from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from vlmrm.modeling.published_import import import_reward
from vlmrm.scoring.loading import load_scorer

from .cases import CASES, Case, Published

Made = tuple[Published, Path, Any]


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Callable[[Case], Made]:
    """What is published, the folder of its import, and a scorer of that, each made once."""

    @cache
    def make(case: Case) -> Made:
        shared = tmp_path_factory.getbasetemp() / f"published-{case.layout}"
        one_of_several = case.layout in ("editreward", "videoalign")
        folder = shared if one_of_several else shared / str(CASES.index(case))
        folder.mkdir(parents=True, exist_ok=True)
        published = case.write(folder)
        output = folder / f"imported-{CASES.index(case)}"
        import_reward(published.source, output, **published.options)
        return published, output, load_scorer(output, dtype="float32")

    return make


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers says of each enlarged vocabulary how its new rows are made."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(verbosity)
