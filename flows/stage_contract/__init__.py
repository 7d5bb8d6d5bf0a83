"""The contract of stages: what a stage declares, the key of its artifact, and how it is run, reused and recorded."""
