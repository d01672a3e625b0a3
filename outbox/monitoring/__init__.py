"""Monitoring: status, health, metrics, the timeline of a message, and the doctor."""
