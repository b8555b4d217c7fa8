"""The gated delta rule."""

from __future__ import annotations

from .portable import gated_delta_rule, recurrent_gated_delta_rule

__all__ = ["gated_delta_rule", "recurrent_gated_delta_rule"]
