"""Kernels in C, compiled on the user's machine and used where a compiler is found."""
