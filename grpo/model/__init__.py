"""Loading, saving and preparing policies; the fast paths are in the subpackages."""
