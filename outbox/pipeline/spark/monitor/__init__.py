"""The monitor: what is missing and what repeats, moment by moment, from micro-batches of the tables."""
