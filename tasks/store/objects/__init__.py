"""Artifacts in an S3-compatible object store, with copies on each machine. For users: docs/object_store.md."""
