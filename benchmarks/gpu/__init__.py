"""All that waits for a GPU, in parts for a machine lent for minutes: `python -m benchmarks.gpu`, `make gpu`."""
