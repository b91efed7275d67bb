"""What was preferred: schemas, readers, media loading, mixing and splitting. Importing it loads no heavy library."""

from vlmrm.data.arguments import DataArguments
from vlmrm.data.schema import Branch, Comparison, Pair
from vlmrm.data.sources import load_comparisons, load_train_and_eval, split_held_out

__all__ = [
    "Branch",
    "Comparison",
    "DataArguments",
    "Pair",
    "load_comparisons",
    "load_train_and_eval",
    "split_held_out",
]
