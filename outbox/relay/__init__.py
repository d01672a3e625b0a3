"""The relay: moves messages from their rows to a broker, batch by batch."""
