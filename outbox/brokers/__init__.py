"""Brokers: `base.py` is what each must do, `capabilities.py` what it may offer besides; then one file or folder per broker."""
