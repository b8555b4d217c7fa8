"""The part that adapters of ops with a portable implementation share: what stands in while Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.outcome import Choice, Decline

CPU = "cpu"


class PortableAdapter:
    """For upstreams that cannot run on a CPU, where the portable op serves; it is traceable itself."""

    in_place = False
    upstream_cannot_run_on: tuple[str, ...] = (CPU,)
    facts: Callable[..., Any]
    plan: Callable[..., Any]
    run: Callable[..., Any]

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The portable op for CPU tensors, upstream for the rest."""
        try:
            facts, device = self.facts(*args, **kwargs)
        except Decline:
            return original(*args, **kwargs)
        if device.type == CPU:
            choice = self.plan(facts, CPU)
            if isinstance(choice, Choice):
                return self.run(choice, *args, **kwargs)
        return original(*args, **kwargs)
