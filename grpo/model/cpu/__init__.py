"""CPU kernels compiled by numba and linear layers with prepacked weights."""
