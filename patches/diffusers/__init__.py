"""Adapters for Hugging Face diffusers."""
