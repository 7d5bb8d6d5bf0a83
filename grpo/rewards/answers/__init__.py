"""Extracts the value of an answer (one number, one option letter or one expression), in time linear in its length."""
