"""Consumers: each message's database effects once per group."""
