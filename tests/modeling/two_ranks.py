"""Run by test_distributed under torchrun: the ranks take turns with a batch of texts and a batch of images."""

from __future__ import annotations

import sys

import torch
from samples import SAMPLES, batch_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from vlmrm.batching.media import blank_image
from vlmrm.modeling import load_for_training, load_processor

torch.set_num_threads(1)
distributed.init_process_group("gloo")
model = load_for_training(sys.argv[1])
processor = load_processor(sys.argv[1])
model.touch_vision = blank_image(processor, model.placeholders)
parallel = DistributedDataParallel(model)
batches = [batch_of(processor, SAMPLES[4:6]), batch_of(processor, SAMPLES[:2])]

for step in range(2):
    parallel.zero_grad()
    parallel(**batches[(distributed.get_rank() + step) % 2]).logits.sum().backward()

alone = load_for_training(sys.argv[1])
sum(alone(**batch).logits.sum() / 2 for batch in batches).backward()
for (name, weight), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(weight.grad, expected.grad, msg=name)
if distributed.get_rank() == 0:
    sys.stdout.write("equal\n")
distributed.destroy_process_group()
