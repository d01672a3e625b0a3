"""
The catalogue: the messages that this project publishes, their handlers, and the guarantees of their topics.

| question | file |
|---|---|
| Which types, topics and handlers do the code and the settings have? | `entries.py` |
| What does a body of a type look like? | `examples.py` |
| How do programs in other languages read the catalogue? | `asyncapi.py` |
| How many messages of each type were published and handled recently? | `traffic.py` |
"""
