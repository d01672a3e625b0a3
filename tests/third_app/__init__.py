"""A small app that extends the outbox and changes no line of it: it copies messages to another place before they are pruned."""
