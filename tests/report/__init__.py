"""The report: runs with faults on each broker, the explorer, the mutants, and what they have counted."""
