"""One page that shows what a reward model learned, from scored pairs."""

from vlmrm.evaluation.report.build import build_report

__all__ = ["build_report"]
