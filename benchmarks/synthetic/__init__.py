"""Histories made up on purpose, with faults, and the truth about them beside: `python -m benchmarks.synthetic`."""
