"""Trained reward models as functions."""

from vlmrm.scoring.scorer import Scorer, load_scorer

__all__ = ["Scorer", "load_scorer"]
