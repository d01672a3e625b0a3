"""A shop that changes a message type from one release to the next: what is named before the deployment comes true after it."""
