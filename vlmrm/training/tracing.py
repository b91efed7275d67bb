"""The memory of a forward and backward pass, traced without its numbers.

The weights, and every float that is computed with them, are fake: they have a shape and a type, and take no memory.
Integers are real, so that whatever reads a length, a grid or a place in a row goes as in a training. A dispatch mode
sees each operation and counts the storages that live.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from vlmrm.libraries import relies_on

relies_on(FakeTensorMode.__init__, "allow_non_fake_inputs")
relies_on(FakeTensorMode, "dispatch", overridden=["avoid_device_init"])

GRANULE = 512  # bytes; torch's allocator on CUDA rounds up to multiples of it


class CPUFakes(FakeTensorMode):
    """Makes fake tensors of the CPU."""

    avoid_device_init = True  # else it looks for a GPU in each operation, which takes longer than the operation


class StorageTally(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as they live.

    `peak` is the most at one time, where gradients of weights count by `share`: one rank's, where ranks share them out
    as they come. Tensors that were there before are not counted.

    Args:
        fake: the mode in which operations on fake tensors run; without it all are real.
    """

    def __init__(self, share: float = 1.0, fake: FakeTensorMode | None = None):
        super().__init__()
        self.share = share
        self.fake = fake
        self.live = self.gradients = 0
        self.peak = 0.0
        self._counted: dict[int, int] = {}  # bytes by storage
        self._left_out: set[int] = set()

    def leave_out(self, tensors: Any) -> None:
        """Leave out the storages of tensors."""
        self._left_out |= {_key(tensor.untyped_storage()) for tensor in tree_iter(tensors) if torch.is_tensor(tensor)}

    def count(self, tensors: Any) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tree_iter(tensors):
            if torch.is_tensor(tensor):
                self._add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.fake is not None and any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs))):
            output: Any = self.fake.dispatch(func, types, args, kwargs)  # to enter the mode each time takes far longer
        else:
            output = func(*args, **kwargs)
        self.count(output)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key in self._counted or key in self._left_out:
            return
        self._counted[key] = size = -(-storage.nbytes() // GRANULE) * GRANULE
        self.live += size
        self.peak = max(self.peak, self.live - (1 - self.share) * self.gradients)
        finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._counted.pop(key)

    def note_gradient(self, weight: torch.Tensor) -> None:
        """Count the gradient of a weight by `share` from now on; a hook of the weight."""
        gradient: Any = weight.grad
        self.gradients += gradient.nbytes


def _key(storage: torch.UntypedStorage) -> int:
    """Return what tells a storage from every other that lives."""
    return StorageWeakRef(storage).cdata


def fake_model(model: nn.Module) -> FakeTensorMode:
    """Replace the weights and buffers of a model on the meta device by fake ones of the CPU; return their mode."""
    fake = CPUFakes(allow_non_fake_inputs=True)
    with fake:
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                empty = torch.empty(weight.shape, dtype=weight.dtype)
                setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return fake


@contextmanager
def tallying(model: nn.Module, tally: StorageTally) -> Generator[None]:
    """Tally what runs inside, and tell gradients of the model's weights from the rest."""
    tally.leave_out([*model.parameters(), *model.buffers()])
    hooks = [
        weight.register_post_accumulate_grad_hook(tally.note_gradient)
        for weight in model.parameters()
        if weight.requires_grad
    ]
    try:
        with tally:
            yield
    finally:
        for hook in hooks:
            hook.remove()


def trace_step(model: nn.Module, inputs: Mapping[str, Any], *, share: float = 1.0, half: bool = False) -> int:
    """Return the bytes of one forward and backward beside the weights, at its peak: of inputs, activations, gradients.

    Args:
        model: on the meta device, ready to train; its weights become fake.
        inputs: keywords of the model, real.
        share: of each gradient, that a rank keeps.
        half: run under autocast to bfloat16.
    """
    fake = fake_model(model)
    inputs = tree_map_only(torch.Tensor, lambda tensor: _as_fake(tensor, fake), dict(inputs))
    tally = StorageTally(share, fake)
    with tallying(model, tally):
        tally.count(inputs)
        run_step(model, inputs, half)
    return int(tally.peak)


def _as_fake(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    return fake.from_tensor(tensor) if tensor.is_floating_point() else tensor


def run_step(model: nn.Module, inputs: Mapping[str, Any], half: bool) -> None:
    """Run a forward and a backward, with a loss that takes no memory to speak of."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        scores = model(**inputs).logits
    scores.sum().backward()
