"""The recipe: its typed configuration, one flow per stage, the flows that chain them, and the command r1."""
