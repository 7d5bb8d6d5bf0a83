"""Promotion gates: conditions on metrics, and the approvals that people gave."""
