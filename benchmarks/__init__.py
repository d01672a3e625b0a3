"""Measurements of the hot path, each as a ratio to a bound taken in the same run. `make bench`."""
