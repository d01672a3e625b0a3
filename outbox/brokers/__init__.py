"""Brokers: `base.py` says what each owes, then one file per broker."""
