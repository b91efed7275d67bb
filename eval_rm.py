"""Evaluates checkpoints: python eval_rm.py CONFIG.yaml [--key value ...]"""

from vlmrm.__main__ import main

if __name__ == "__main__":
    main("eval")
