"""`vlmrm`, `python -m vlmrm` and `torchrun -m vlmrm`: the command `vlmrm`."""

from __future__ import annotations

import sys


def main(*verb: str) -> None:
    """Run the command line, or one verb of it; Ctrl-C while the command is imported ends it as it does later."""
    try:
        from vlmrm.cli import main
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    main(*verb)


if __name__ == "__main__":
    main()
