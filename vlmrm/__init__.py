"""vlmrm trains vision-language reward models from preferences, measures them honestly, and puts them to work."""

__version__ = "0.1.0"
__all__ = ["load_scorer"]


def __getattr__(name: str):
    # Lazy: `import vlmrm` and the command line's help must not import torch.
    if name == "load_scorer":
        from vlmrm.scoring import load_scorer

        return load_scorer
    raise AttributeError(f"module 'vlmrm' has no attribute {name!r}")
