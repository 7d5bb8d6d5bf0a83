"""Estimates the memory and devices that a recipe needs, before anything is trained."""
