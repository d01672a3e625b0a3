"""Rules that are taken out of a copy of the source, one at a time, to see that a test fails without each."""
