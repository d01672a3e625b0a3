"""A soak: steady work for half an hour with few faults, in which nothing may grow."""
