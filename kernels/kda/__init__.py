"""Kimi delta attention."""

from __future__ import annotations

from .portable import kda, recurrent_kda

__all__ = ["kda", "recurrent_kda"]
