"""Adapters for flash-linear-attention."""
