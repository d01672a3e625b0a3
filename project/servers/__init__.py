"""Servers of other people, downloaded and started for tests, benchmarks and the demo."""
