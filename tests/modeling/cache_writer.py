"""Run twice at once by test_vision_cache: scores pictures over and over through a cache too small for them."""

from __future__ import annotations

import sys
from itertools import pairwise

import torch
from samples import batch_of, conversation

from vlmrm.modeling import freeze, load_for_training, load_processor

checkpoint, folder = sys.argv[1:]
torch.set_num_threads(1)
model = load_for_training(checkpoint)
freeze(model, vit=True, merger=True)
processor = load_processor(checkpoint)
colours = [(10 * i, 0, 255 - 10 * i) for i in range(24)]
batches = [batch_of(processor, [conversation("What?", "It.", *pair)]) for pair in pairwise(colours)]
with torch.no_grad():
    expected = [model(**batch).logits for batch in batches]
    model.use_vision_cache(folder, gigabytes=30_000 / 1e9)
    for _ in range(5):
        for batch, scores in zip(batches, expected, strict=True):
            torch.testing.assert_close(model(**batch).logits, scores, atol=1e-6, rtol=0)
sys.stdout.write("equal\n")
