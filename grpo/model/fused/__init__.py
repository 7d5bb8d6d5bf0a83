"""Fused layers and decoder blocks with custom backward passes."""
