"""Parts of decoding: attention to a part of the keys, and decoding on a GPU in steps of fixed shape."""
