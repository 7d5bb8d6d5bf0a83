"""Parts of decoding: key-value caches, attention over part of the keys, and the attention of one decoding step."""
