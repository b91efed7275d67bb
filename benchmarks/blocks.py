"""What compiling blocks spares a step, counted without a compiler: bytes that it moves, and kernels that it launches.

The graphs of the blocks are caught on their way to inductor. As they are, they are what eager blocks run, an operator
a kernel; lowered and scheduled by inductor, a group of operators that it fuses is one. Attention is outside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shapes import Pair, configuration, reward_model, training
from vlmrm.modeling.compiled import compile_blocks

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_dot_product")


@dataclass
class Cost:
    """Kernels, and the bytes that those of them read and write that are no matrix product and no attention."""

    kernels: int = 0
    moved: int = 0

    def add(self, kernels: int, moved: int) -> None:
        self.kernels, self.moved = self.kernels + kernels, self.moved + moved


def blocks(size: str, pairs: list[Pair]) -> dict[str, Cost]:
    """Return the costs of forward and backward: of the blocks `eager` and `compiled`, and of the eager `step`."""
    config = configuration(size)
    costs = {"step": Cost(), "eager": Cost(), "compiled": Cost()}
    for way, cost in costs.items():
        model, batcher = reward_model(config, dtype=torch.bfloat16)
        model.train()
        work = training(config, pairs, irrelevant=False)
        inputs = batcher(work.conversations)
        if way != "step":
            compile_blocks(model, {"eager": plain, "compiled": fused}[way](cost))
            work.loss(model(**inputs).logits.squeeze(-1)).backward()  # catches the graphs
            cost.kernels = cost.moved = 0
        with Operators(cost if way == "step" else Cost()) if way == "step" else torch.enable_grad():
            work.loss(model(**inputs).logits.squeeze(-1)).backward()
    return costs


class Operators(TorchDispatchMode):
    """Adds up the operators that run."""

    def __init__(self, cost: Cost):
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.cost.add(*of_operator(func, [args, kwargs, output]))
        return output


def of_operator(operator: Any, values: Any) -> tuple[int, int]:
    """Return the kernels, none or one, and the bytes of an operator with these arguments and results."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.is_view or "_unsafe_view" in str(operator):
        return 0, 0
    tensors = [it for it in tree_leaves(values) if isinstance(it, torch.Tensor)]
    if not tensors or str(operator).startswith(("aten.detach", "aten.empty", "aten.new_empty")):
        return 0, 0
    if str(operator).startswith(PRODUCTS):
        return 1, 0
    return 1, sum(map(size_of, tensors))


def size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; what is expanded is read once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * prod(optimization_hint(side) for side, stride in sides if optimization_hint(stride))


def plain(cost: Cost) -> Callable[..., Any]:
    """Return a backend that adds up what graphs cost operator by operator."""

    def compiler(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        total = Cost()
        for node in graph.graph.nodes:
            if node.op == "call_function":
                values = [it.meta.get("val") for it in (*node.all_input_nodes, node)]
                total.add(*of_operator(node.target, values))
        return counted(graph, cost, total)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=default_partition)


def fused(cost: Cost) -> Callable[..., Any]:
    """Return a backend that adds up what graphs cost as inductor fuses their operators."""

    def compiler(graph: GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        record_original_output_strides(graph)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=V.fake_mode.shape_env)
        with V.set_graph_handler(lowering), DebugContext():
            lowering.run(*inputs)
            lowering._update_scheduler()
            total = Cost()
            for node in lowering.scheduler.nodes:
                if not isinstance(node, NopKernelSchedulerNode):
                    product = isinstance(node, ExternKernelSchedulerNode)
                    total.add(1, 0 if product else node.get_read_write_buffers_sizes())
        return counted(graph, cost, total)

    return partial(compile_fx, inner_compile=compiler)


def counted(graph: GraphModule, cost: Cost, total: Cost) -> Callable[..., Any]:
    """Return the function of a graph, which adds its total to the cost when it runs."""

    def run(inputs: list[Any]) -> Any:
        cost.add(total.kernels, total.moved)
        return graph.forward(*inputs)

    run._boxed_call = True
    return run
