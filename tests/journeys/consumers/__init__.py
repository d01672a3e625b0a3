"""A storm over consumers."""
