"""The audit: which messages were lost, and at which stage."""
