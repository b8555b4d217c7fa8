"""Scaled dot product attention, softmax(scale * q @ k.T + mask) @ v: what a call asks for, and what would serve it.

`facts.py` says what there is to know about a call, `plan.py` decides from that alone. There is no kernel yet, so every
plan declines and says why.
"""

from __future__ import annotations

from .facts import AttentionFacts, read
from .plan import plan

__all__ = ["AttentionFacts", "plan", "read"]
