"""What one process of a training finds out for all of them."""

from __future__ import annotations

import subprocess

import pytest

from tests import preloaded
from vlmrm.errors import DataError
from vlmrm.training.folder import from_first_rank

TWO_RANKS = """
import sys
from torch import distributed
from vlmrm.errors import DataError
from vlmrm.training.folder import from_first_rank

distributed.init_process_group("gloo")
rank = distributed.get_rank()

def fail():
    assert rank == 0
    raise DataError("it cannot be read")

assert from_first_rank(lambda: f"computed by {rank}") == "computed by 0"
try:
    from_first_rank(fail)
except DataError as error:
    sys.stdout.write(f"{error}\\n")
distributed.destroy_process_group()
"""


def test_a_process_alone_computes_for_itself():
    assert from_first_rank(lambda: 3) == 3
    with pytest.raises(DataError, match="it cannot be read"):
        from_first_rank(lambda: (_ for _ in ()).throw(DataError("it cannot be read")))


@pytest.mark.smoke
def test_the_first_rank_computes_and_shares_its_error(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    launch = [preloaded.python(), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, tmp_path / "two_ranks.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("it cannot be read") == 2
