"""Synthetic histories with injected faults, and the expected findings: `python -m benchmarks.synthetic`."""
