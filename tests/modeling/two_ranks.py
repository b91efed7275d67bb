"""Run by test_mixed_ranks under torchrun: the ranks take turns with a batch of texts and a batch of images."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[2]))

from tests.families.reference import rounding_nowhere, twins
from tests.families.table import FAMILIES

torch.set_num_threads(1)
distributed.init_process_group("gloo")
for family in FAMILIES:
    if family.model_type not in sys.argv[1:]:
        continue
    model, alone, batches = twins(family)
    parallel = DistributedDataParallel(model)  # waits for every gradient
    with rounding_nowhere():
        for step in range(2):
            parallel.zero_grad()
            parallel(**batches[(distributed.get_rank() + step) % 2]).logits.sum().backward()
        sum(alone(**batch).logits.sum() / 2 for batch in batches).backward()
    for (name, weight), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, msg=name)
    if distributed.get_rank() == 0:
        sys.stdout.write(
            f"{family.model_type} equal, {'searched' if not model.family.trains_all else 'all trained'}\n"
        )
distributed.destroy_process_group()
