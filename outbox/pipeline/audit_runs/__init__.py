"""Audits that are remembered: run in a process of their own, signed, stored, acted upon."""
