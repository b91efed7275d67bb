"""The passes of a training step: one forward and backward for each forward of its parts.

One loss compares the scores of a part. Where they come from several forwards, all scores are computed first, without a
graph, then the gradient of the loss by each of them; with it each forward runs again, alone with its backward pass
(GradCache: Gao et al. 2021, https://huggingface.co/papers/2101.06983, §3.2). The gradient is that of the whole part,
the memory that of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypedDict

import torch

from vlmrm.batching import Part

Score = Callable[[Mapping[str, Any]], torch.Tensor]


class Loss(Protocol):
    """Returns the loss of the scores [N] of a part."""

    def __call__(self, scores: torch.Tensor, part: Part) -> torch.Tensor: ...


class Pass(TypedDict):
    """One forward and backward: the model's keywords, and what its scores [N] are differentiated through."""

    inputs: Mapping[str, Any]
    objective: Callable[[torch.Tensor], torch.Tensor]
    pair_weight: torch.Tensor  # its share of the weights of the part's pairs
    random_state: RandomState | None  # to draw the dropout of an earlier forward again


@dataclass(frozen=True)
class RandomState:
    """The state of torch's generators, of the CPU and of `device` if that is another."""

    device: torch.device
    on_cpu: torch.Tensor
    on_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), on_device)

    @contextmanager
    def again(self) -> Generator[None]:
        """Draw from this state inside, and afterwards go on as if nothing had been drawn."""
        devices = [] if self.on_device is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.set_rng_state(self.on_cpu)
            if self.on_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
            yield


def forwards_of(parts: Sequence[Part]) -> tuple[int, int]:
    """Return how many forwards a step of these parts runs without a graph, and how many with a backward pass."""
    counts = [len(part["inputs"]) for part in parts]
    return sum(count for count in counts if count > 1), sum(counts)


def passes_of(parts: Sequence[Part], loss: Loss, score: Score, device: torch.device) -> list[Pass]:
    """Return the passes whose gradients add up to that of `loss(scores, part)` over all parts, and so do their values.

    `score`, the forward on `device` without a graph, is called for each forward of the parts that have several.
    """
    passes: list[Pass] = []
    for part in parts:
        objective = partial(_in_order, part=part, loss=loss)
        weight = part["pairs"]["weight"].sum() / len(part["inputs"])
        if len(part["inputs"]) == 1:
            passes.append(Pass(inputs=part["inputs"][0], objective=objective, pair_weight=weight, random_state=None))
            continue
        states: list[RandomState] = []
        pieces: list[torch.Tensor] = []
        for inputs in part["inputs"]:
            states.append(RandomState.now(device))
            pieces.append(score(inputs))
        scores = torch.cat(pieces).requires_grad_()
        value = objective(scores)
        [gradient] = torch.autograd.grad(value, scores)
        value = value.detach() / len(pieces)
        for inputs, share, state in zip(part["inputs"], gradient.split([*map(len, pieces)]), states, strict=True):
            passes.append(
                Pass(inputs=inputs, objective=Surrogate(share, value), pair_weight=weight, random_state=state)
            )
    return passes


def _in_order(scores: torch.Tensor, part: Part, loss: Loss) -> torch.Tensor:
    return loss(scores[part["order"].to(scores.device)], part=part)


@dataclass(frozen=True)
class Surrogate:
    """A function of scores [N] with this gradient by each of them [N], and this value."""

    gradient: torch.Tensor
    value: torch.Tensor

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        product = (scores * self.gradient).sum()
        return product + (self.value - product).detach()
