"""The block formats on a CPU, compiled by numba."""
