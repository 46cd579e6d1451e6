"""Tests and measurements for a machine with a CUDA device. `make gpu-test`, `make gpu-bench`."""
