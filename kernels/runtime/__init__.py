"""Kernel runtime: which target a device needs, compiling and loading kernels, small launch helpers."""
