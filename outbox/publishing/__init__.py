"""Publishing: message rows and tickets, written in the caller's transaction."""
