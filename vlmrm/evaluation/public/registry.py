"""The public benchmarks by name, and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrm.errors import ConfigError
from vlmrm.evaluation.public.definition import Benchmark
from vlmrm.evaluation.public.genai_bench import GENAI_BENCH_EDIT, GENAI_BENCH_IMAGE, GENAI_BENCH_VIDEO
from vlmrm.evaluation.public.mm_rlhf import MM_RLHF_REWARDBENCH
from vlmrm.evaluation.public.multimodal_rewardbench import MULTIMODAL_REWARDBENCH
from vlmrm.evaluation.public.pick_a_pic import PICK_A_PIC
from vlmrm.evaluation.public.rewardbench import REWARDBENCH
from vlmrm.evaluation.public.text_to_image import HPDV2, HPDV3, IMAGE_REWARD
from vlmrm.evaluation.public.videogen import VIDEOGEN_REWARDBENCH
from vlmrm.evaluation.public.vl_rewardbench import VL_REWARDBENCH
from vlmrm.settings import did_you_mean

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        VL_REWARDBENCH,
        MULTIMODAL_REWARDBENCH,
        MM_RLHF_REWARDBENCH,
        REWARDBENCH,
        HPDV2,
        HPDV3,
        IMAGE_REWARD,
        PICK_A_PIC,
        GENAI_BENCH_IMAGE,
        GENAI_BENCH_EDIT,
        GENAI_BENCH_VIDEO,
        VIDEOGEN_REWARDBENCH,
    )
}
OURS = "this evaluation"


def benchmark(name: str) -> Benchmark:
    """The benchmark of that name.

    Raises:
        ConfigError: naming the nearest one and all there are.
    """
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS, "")
        raise ConfigError(f"there is no benchmark {name}{hint} (there are {', '.join(BENCHMARKS)})")
    return BENCHMARKS[name]


def table(name: str, ours: Mapping[str, float], model: str) -> list[dict[str, Any]]:
    """Our figures and the published ones, one row a model and source: `model`, `source`, then a column a metric.

    Metrics that somebody published come first; a figure that nobody reported for a model is None.
    """
    figures = benchmark(name).published
    metrics = list(dict.fromkeys([*(figure.metric for figure in figures), *ours]))
    rows = {(model, OURS): dict(ours)}
    for figure in figures:
        rows.setdefault((figure.model, figure.source), {})[figure.metric] = figure.value
    return [
        {"model": who, "source": source, **{metric: values.get(metric) for metric in metrics}}
        for (who, source), values in rows.items()
    ]
