"""Gates in a run: checked before it starts, evaluated after their stages, decided by a person if they ask."""
