"""
Upgrades from one release to the next, as docs/versions.md promises them.

Databases of earlier releases with work in flight (`*.sql`, made by `dump.py`), and two releases side by side. As an app it is the
shop of each release: what differs between them is the package `outbox`.
"""
