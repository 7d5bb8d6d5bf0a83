"""Fused layers and decoder blocks with backward passes of their own."""
