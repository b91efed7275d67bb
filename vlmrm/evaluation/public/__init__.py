"""Public benchmarks: read in their published formats, scored by their authors' rules, beside published figures."""

from vlmrm.evaluation.public.definition import Benchmark, Published, Source
from vlmrm.evaluation.public.loading import load_benchmark
from vlmrm.evaluation.public.registry import BENCHMARKS, benchmark, table

__all__ = ["BENCHMARKS", "Benchmark", "Published", "Source", "benchmark", "load_benchmark", "table"]
