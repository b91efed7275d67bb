"""The tiny model of every family: shared batches here, against the family's own forward in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu.running import Run, Unequal
from benchmarks.harness import Row, row
from tests.families.cases import CASES
from tests.families.reference import processed, rounding_nowhere
from tests.families.table import FAMILIES
from tests.families.tiny import Tiny
from vlmrm.modeling import batcher_for
from vlmrm.rendering import Renderer

SHOWN = (
    "irrelevant branches",
    "image",
    "ranked list",
    "two images",
    "video",
)  # the first that a family has: gradients
QUICK = "gemma3"  # with windows, and images that are seen both ways
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3}  # FastVLM's tower rounds float64
ROUNDED = "aria"  # whose product of experts rounds float64 on CUDA
BESIDE_OWN = 1.5  # errors of gradients in bfloat16, over those of the family's own forward


def families(run: Run) -> None:
    """Compare each family in float64, float32 and bfloat16, and in bfloat16 its own forward too."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        backend.allow_tf32 = False
    for family in {family.model_type: family for family in FAMILIES}.values():
        lacking = family.refused is not None or (family.needs is not None and find_spec(family.needs) is None)
        if not lacking and (family.model_type == QUICK or not run.tiny):
            run.attempt(family.model_type, partial(errors, run.device, family))


def errors(device: str, family: Tiny) -> Iterator[Row]:
    """Yield the largest error of a family's scores and gradients in float32; the others beside it.

    Raises:
        Unequal: when one is more than rounding.
    """
    processor = family.make_processor()
    model, plain = (family.make_model(processor) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    batcher, renderer = batcher_for(model, processor, "shared"), Renderer(processor)
    shown = [name for name in SHOWN if name not in family.lacks and (name != "video" or family.video is not None)]
    rendered = {name: [renderer.render(it) for it in CASES[name]] for name in shown}

    def shared(name: str, inputs: Callable[[Any], Any]) -> torch.Tensor:
        return model(**inputs(batcher(rendered[name]))).logits[:, 0]

    def own(name: str, inputs: Callable[[Any], Any]) -> torch.Tensor:
        scores = []
        for conversation in CASES[name]:
            output = plain.model(**inputs(processed(family, processor, conversation)), use_cache=False)
            hidden = output.logits if plain.family.language_head else output.last_hidden_state
            scores.append(plain.head(hidden[:, -1])[0, 0])
        return torch.stack(scores)

    exact = results(plain, own, shown, "cpu", torch.float64)
    found = {dtype: apart(results(model, shared, shown, device, dtype), exact) for dtype in ROUNDING}
    half, beside = (
        apart(results(it, way, shown, device, torch.bfloat16), exact) for it, way in ((model, shared), (plain, own))
    )
    for dtype, most in ROUNDING.items():
        rounded = dtype == torch.float64 and family.model_type == ROUNDED
        if not (rounded or max(found[dtype].values()) <= most):
            raise Unequal(f"in {dtype} it is off by {max(found[dtype].values()):.2g} of its size")
    if not half["gradient"] <= BESIDE_OWN * beside["gradient"]:
        raise Unequal(f"in bfloat16 gradients are off by {half['gradient']:.2g}, its own by {beside['gradient']:.2g}")
    details = {"float64": max(found[torch.float64].values())}
    details |= {"bfloat16_gradient": half["gradient"], "own_bfloat16_gradient": beside["gradient"]}
    measured = max(found[torch.float32].values())
    yield row(family.model_type, measured, "of its size", at_most=ROUNDING[torch.float32]) | details


def results(
    model: Any, scored: Callable[..., torch.Tensor], shown: list[str], device: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the scores of each case, and under `gradient` those of all weights after the first, in float64."""
    placed(model, device, dtype)
    rounding: AbstractContextManager[None] = rounding_nowhere() if dtype == torch.float64 else nullcontext()
    inputs = partial(moved, device=device, dtype=dtype)
    with rounding:
        made = {name: scored(name, inputs) for name in shown}
        first = made[shown[0]]
        model.zero_grad()
        (-nn.functional.logsigmoid(first[:-1] - first[1:]).mean()).backward()
    gradients = [torch.zeros_like(it) if it.grad is None else it.grad for it in model.parameters()]
    flat = torch.cat([gradient.double().cpu().flatten() for gradient in gradients])
    return {name: scores.detach().double().cpu() for name, scores in made.items()} | {"gradient": flat}


def apart(made: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: ((made[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def placed(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Move a model to a device in a type, but for what loading keeps in another: complex rotations, some routers."""
    kept = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in (*(module._keep_in_fp32_modules or ()), *(module._keep_in_fp32_modules_strict or ()))
    }
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        half = dtype == torch.bfloat16 and any(part in name.split(".") for part in kept)
        kind = torch.float32 if half else dtype
        tensor.data = tensor.data.to(device, kind if tensor.is_floating_point() else tensor.dtype)
        tensor.grad = None


def moved(inputs: Any, device: str, dtype: torch.dtype) -> Any:
    """Return inputs on a device, with what is floating in a type."""
    if isinstance(inputs, dict):
        return {name: moved(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)
    return inputs
