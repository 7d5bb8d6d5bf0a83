"""The artifact store: keys, manifests, attempts, what differs between two artifacts, and which are stale."""
