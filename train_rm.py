"""Trains a reward model: python train_rm.py CONFIG.yaml [--key value ...]"""

from vlmrm.cli import train_script

if __name__ == "__main__":
    train_script()
