"""
Writes docs/reference/ from the code: `make docs`. A test holds the pages to it.

Each page says what the code says of itself: docstrings, comments behind fields, help of commands.
"""
