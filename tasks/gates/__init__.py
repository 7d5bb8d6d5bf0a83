"""Promotion gates: conditions on metrics, and people's approvals."""
