"""The memory of a training process: what it needs, by the model's configuration alone, and what is free for it.

A forward and backward pass is traced without its numbers. The weights, and every float that is computed with them, are
fake: they have a shape and a type, and take no memory. Integers are real, so that whatever reads a length, a grid or a
place in a row goes as in a training. A dispatch mode sees each operation and counts the storages that live.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from vlmrm.errors import first_line
from vlmrm.libraries import relies_on
from vlmrm.modeling import batcher_for, lora_config, reward_model_class
from vlmrm.modeling.adapters import layers_to_quantize
from vlmrm.modeling.checkpoint import read_config
from vlmrm.modeling.parts import freeze
from vlmrm.training.arguments import RewardTrainingArguments, RunArguments
from vlmrm.training.build import build_collator, weight_dtype
from vlmrm.training.engines import ENGINES, LAYER_KEYS, engine_of
from vlmrm.training.optimizer import optimizer_bytes
from vlmrm.training.survey import Survey

logger = logging.getLogger("vlmrm")

relies_on(FakeTensorMode.__init__, "allow_non_fake_inputs")
relies_on(FakeTensorMode, "dispatch", overridden=["avoid_device_init"])

# Bytes of a weight in 4 bits, and its share of the scales: of 8 bits for each 64 weights, of 32 bits for each 256 of
# those (Dettmers et al. 2023, section 3).
QUANTIZED_BYTES = 0.5 + (1 + 4 / 256) / 64
FEW = 4  # layers that are traced, and twice as many
LIVE_WEIGHTS = SUB_GROUP = 1e9  # that ZeRO-3 keeps gathered, and updates at a time, by default
GRANULE = 512  # bytes; torch's allocator on CUDA rounds up to multiples of it


@dataclass(frozen=True)
class Memory:
    """Bytes of one process; `available` is what this machine has free for it."""

    weights: int
    gradients: int
    optimizer: int
    rest: int  # activations, and gathered weights
    available: int
    activations: int = 0  # traced

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.rest


def estimate_memory(
    run: RunArguments,
    ranks: int,
    processor: Any = None,
    dataset: Any = None,
    rows: Survey | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Memory:
    """Estimate the memory of a process at its peak, from the model's configuration: no weights are read.

    Weights, gradients and the optimizer are counted, as far as the engine leaves them to one rank. Activations are
    traced, for `inputs` or the longest of the surveyed `rows` as a batch; without a processor they are left out. Those
    that are offloaded to the host count too. Buffers inside kernels are not known.
    """
    args, keys = run.training, run.model
    # The shares of weights, gradients and optimizer that each rank keeps: ZeRO's stages, or FSDP2 as the third.
    stage = min(ENGINES.index(engine_of(args)), 3)
    of_weights, of_gradients, of_optimizer = (1 / ranks if stage >= first else 1.0 for first in (3, 2, 1))
    stored = weight_dtype(keys, args)
    # FSDP2 gathers float32 weights in half precision.
    computed = torch.bfloat16 if args.fsdp and args.bf16 else stored
    model, weights = planned_model(run, computed)
    wider = stored.itemsize / computed.itemsize
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    count, gradients = sum(weight.numel() for weight in trained), sum(weight.nbytes for weight in trained) * wider
    each = 12 if args.deepspeed else optimizer_bytes(args.optim, int(gradients / count))  # with a float32 copy
    needed = gradients * of_gradients
    # Of accumulated batches, or parts of a batch, those before have left theirs.
    several = args.gradient_accumulation_steps > 1 or keys.max_tokens_per_batch is not None
    share = 0.0 if several else wider * of_gradients
    rest = 0.0
    if processor is not None and rows is not None and rows.tokens:
        forward = inputs or heaviest_forward(run, model, processor, dataset, rows)

        def trace(lengths: Sequence[int]) -> float:
            part = prepared(planned_model(run, computed)[0], lengths, run, processor)
            half = (args.bf16 or args.fp16) and not args.deepspeed
            return trace_step(part, forward, share=share, half=half)

        rest = max(extrapolated(trace, model) - needed * (share > 0), 0)
    activations = int(rest)
    if args.deepspeed:  # its step reads gradients in float32, in ZeRO-3 by groups
        group = args.hf_deepspeed_config.get_value("zero_optimization.sub_group_size", SUB_GROUP)
        rest = max(rest, 4 * min(count * of_optimizer, group if of_weights < 1 else math.inf))
    if of_weights < 1 or args.fsdp:
        rest += gathered(model, args, weights)
    return Memory(
        weights=int(wider * weights * of_weights),
        gradients=int(needed),
        optimizer=int(each * count * of_optimizer),
        rest=int(rest),
        available=free_memory(run),
        activations=activations,
    )


def extrapolated(trace: Callable[[Sequence[int]], float], model: Any) -> float:
    """Return what `trace` returns for all layers of a model, by traces of a few: it grows alike with each.

    `trace` takes the lengths of `stacks`. Where it fails a warning says so, and the result is 0.
    """
    lengths = [len(stack) for stack in stacks(model)]
    start = FEW * period(model)
    few = [start if length > 2 * start else length for length in lengths]
    try:
        base = value = trace(few)
        for place, length in enumerate(lengths):
            if length > few[place]:
                more = trace([*few[:place], 2 * start, *few[place + 1 :]])
                value += (length - start) / start * (more - base)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # of unknown operations
        name = type(model).__name__
        logger.warning("activations are not in the memory: %s cannot be traced (%s)", name, first_line(error))
        return 0.0
    return value


def stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost lists of layers of a model."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.values())


def period(model: Any) -> int:
    """Return after how many layers the kinds of layers of the language model repeat."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [""]
    return next(
        size for size in range(1, len(kinds) + 1) if all(kind == kinds[i % size] for i, kind in enumerate(kinds))
    )


def prepared(model: Any, lengths: Sequence[int], run: RunArguments, processor: Any) -> Any:
    """Cut a model's layers, and set it to train as the trainer does."""
    for stack, length in zip(stacks(model), lengths, strict=True):
        del stack[length:]
    batcher_for(getattr(model, "get_base_model", lambda: model)(), processor, run.model.batching)
    if run.training.gradient_checkpointing:
        keys: Any = run.training.gradient_checkpointing_kwargs or {}
        layers = {key: keys[key] for key in LAYER_KEYS if key in keys and key != "offload"}
        kwargs = {key: value for key, value in keys.items() if key not in LAYER_KEYS}
        # The older name is deprecated where there is a newer one.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(kwargs or None, **layers)
    return model.train()


def gathered(model: nn.Module, args: RewardTrainingArguments, weights: float) -> float:
    """Return the bytes of weights that a rank gathers at a time, of `weights` in all.

    ZeRO-3 keeps up to `stage3_max_live_parameters`. FSDP2 keeps what is in no layer, the layer that is computed, the
    next, and the gradients of a layer until they are shared out.
    """
    if args.deepspeed:
        live = args.hf_deepspeed_config.get_value("zero_optimization.stage3_max_live_parameters", LIVE_WEIGHTS)
        return min(weights, weights * live / sum(weight.numel() for weight in model.parameters()))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [sum(weight.nbytes for weight in layer.parameters()) for module in lists for layer in module]
    inside = {weight for module in lists for weight in module.parameters()}
    return weights - sum(weight.nbytes for weight in inside) + 3 * max(layers, default=0)


@contextmanager
def without_engine(args: RewardTrainingArguments) -> Generator[None]:
    """Make models as without DeepSpeed: under ZeRO-3 transformers would start the process group for it."""
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if args.deepspeed:
            set_hf_deepspeed_config(args.hf_deepspeed_config)


def planned_model(run: RunArguments, dtype: torch.dtype) -> tuple[Any, float]:
    """Return the model of a run on the meta device, frozen and with its adapters, and the bytes of its weights."""
    args, keys = run.training, run.model
    config = read_config(keys.model_name_or_path, keys.model_revision, args.trust_remote_code)
    config.reward_head = keys.head or getattr(config, "reward_head", "linear")
    if (described := run.data.named_outputs.described()) is not None:
        config.reward_outputs = described
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with without_engine(args), torch.device("meta"):
            model: Any = reward_model_class(config)(config)
    finally:
        torch.set_default_dtype(default)
    freeze(model, vit=keys.freeze_vit, merger=keys.freeze_merger, llm=keys.freeze_llm)
    quantized = [model.get_submodule(name).weight for name in layers_to_quantize(model) if keys.load_in_4bit]
    saved = sum(weight.nbytes - QUANTIZED_BYTES * weight.numel() for weight in quantized)
    if keys.use_peft:
        from peft import get_peft_model

        model = get_peft_model(model, lora_config(keys, model))
    return model, sum(weight.nbytes for weight in model.parameters()) - saved


def heaviest_forward(
    run: RunArguments, model: Any, processor: Any, dataset: Any, rows: Survey
) -> Mapping[str, torch.Tensor]:
    """Return the inputs of the largest forward in a batch of the longest surveyed rows."""
    positions = [rows.positions[i] for i in sorted(range(len(rows.tokens)), key=rows.tokens.__getitem__)]
    collator = build_collator(run, processor, model, dataset)
    batch = [dataset[i] for i in sorted(positions[-run.training.train_batch_size :])]
    forwards = [inputs for part in collator(batch)["parts"] for inputs in part["inputs"]]
    return max(forwards, key=lambda inputs: inputs["input_ids"].numel())


def free_memory(run: RunArguments) -> int:
    """Return the bytes that are free on the accelerator, or without one in the memory of this machine."""
    if not run.training.use_cpu and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return host_memory()


def host_memory() -> int:
    """Return the bytes that are free in the memory of this machine; all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Tracing -------------------------------------------------------------------------------------------------------------


class CPUFakes(FakeTensorMode):
    """Makes fake tensors of the CPU."""

    avoid_device_init = True  # else it looks for a GPU in each operation, which takes longer than the operation


class StorageTally(TorchDispatchMode):
    """Counts the bytes of storages that operations allocate, as long as they live.

    `peak` is the most at one time, where gradients of weights count by `share`: one rank's, where ranks share them out
    as they come. The storages of `weights` are not counted. Operations on fake tensors run in the mode `fake`.
    """

    def __init__(self, fake: FakeTensorMode, weights: Iterable[torch.Tensor], share: float):
        super().__init__()
        self.fake, self.share = fake, share
        self.live = self.gradients = 0
        self.peak = 0.0
        self._left_out = {StorageWeakRef(weight.untyped_storage()).cdata for weight in weights}
        self._counted: dict[int, int] = {}  # bytes by storage

    def count(self, tensors: Any) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tree_iter(tensors):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            key = StorageWeakRef(storage).cdata
            if key not in self._counted and key not in self._left_out:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs))):
            output: Any = self.fake.dispatch(func, types, args, kwargs)  # to enter the mode each time takes far longer
        else:
            output = func(*args, **kwargs)
        self.count(output)
        return output


def trace_step(model: nn.Module, inputs: Mapping[str, Any], *, share: float = 1.0, half: bool = False) -> int:
    """Return the bytes of one forward and backward beside the weights, at its peak: of inputs, activations, gradients.

    The model is on the meta device, ready to train, and its weights become fake; the `inputs` are real. A rank keeps a
    `share` of each gradient. With `half` it runs under autocast to bfloat16.
    """
    fake = CPUFakes(allow_non_fake_inputs=True)
    with fake:
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                empty = torch.empty(weight.shape, dtype=weight.dtype)
                setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    tally = StorageTally(fake, [*model.parameters(), *model.buffers()], share)
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        weight.register_post_accumulate_grad_hook(tally.note_gradient)
    inputs = tree_map_only(
        torch.Tensor, lambda it: fake.from_tensor(it) if it.is_floating_point() else it, dict(inputs)
    )
    with tally:
        tally.count(inputs)
        run_step(model, inputs, half)
    return int(tally.peak)


def run_step(model: nn.Module, inputs: Mapping[str, Any], half: bool) -> None:
    """Run a forward and a backward, with a loss that takes no memory to speak of."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        scores = model(**inputs).logits
    scores.sum().backward()
