"""
Brokers: `base.py` is what each must do, `capabilities.py` what it may offer besides; then one file or folder per broker.

The embedded broker has tables and a page in the admin, so it is a Django app: `outbox/embedded/`.
"""
