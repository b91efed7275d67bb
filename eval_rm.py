"""Evaluates checkpoints: python eval_rm.py CONFIG.yaml [--key value ...]"""

from vlmrm.cli import eval_script

if __name__ == "__main__":
    eval_script()
