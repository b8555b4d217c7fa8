"""FLA's other Triton ops, in plain torch, for CPU tensors: `cpu_ops.py` lists them and says what is not reached.

On by default where there is no GPU; on a machine with one it has to be named, and then serves CPU tensors all the same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from accel import serve
from accel.imports import being_imported
from accel.outcome import Choice, Decline, Declined
from accel.rebind import Rebinding
from accel.state import TargetState

from .. import checks
from .cpu_ops import CPU_OPS, CpuOp

FAMILY = "fla_cpu"
#: Ops that write to an argument: the convolution's cache.
IN_PLACE = frozenset({"causal_conv1d_update"})


def patch(module: ModuleType, state: TargetState) -> Iterable[Rebinding]:
    """Every listed op whose module is loaded. FLA loads them together; 0.6.0 sets the older names as aliases."""
    for op in CPU_OPS:
        owner: Any = sys.modules.get(op.module)
        if owner is None or being_imported(owner):
            continue
        name = op.name
        if op.kind == "class_attribute":
            class_name, _, name = name.partition(".")
            owner = vars(owner).get(class_name)
            if owner is not None:
                yield from serve.attribute(owner, name, CpuAdapter(op), state)
        else:
            yield from serve.everywhere(owner, name, CpuAdapter(op), state)


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """One call of a listed op."""

    op: str
    device_type: str


class CpuAdapter:
    """One listed op. Its replacement does its own checks, and declines before any work."""

    family = FAMILY
    upstream_cannot_run_on = ("cpu",)

    def __init__(self, op: CpuOp) -> None:
        self.op = op
        self.in_place = op.name in IN_PLACE
        self._names = tuple(inspect.signature(op.replacement).parameters)
        self._fitting: dict[tuple[Any, ...], bool] = {}

    def facts(self, *args: Any, **kwargs: Any) -> tuple[CpuFacts, torch.device]:
        self._check_signature(args, kwargs)
        device = checks.plain(**dict(self._tensors(args, kwargs)))
        return CpuFacts(self.op.name, device.type), device

    def plan(self, facts: CpuFacts, arch: str) -> Choice | Declined:
        if facts.device_type != "cpu":
            return Declined(f"{facts.device_type} tensors: upstream's own kernels run")
        return Choice(FAMILY, "portable")

    def run(self, choice: Choice, *args: Any, **kwargs: Any) -> Any:
        return self.op.replacement(*args, **kwargs)

    def compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _, tensor in self._tensors(args, kwargs):
            if tensor.device.type != "cpu":
                return original(*args, **kwargs)
        try:
            return self.op.replacement(*args, **kwargs)
        except Decline:
            return original(*args, **kwargs)

    def _check_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decline arguments that the replacement has no place for; remembered by their form."""
        form = (len(args), *kwargs)
        fits = self._fitting.get(form)
        if fits is None:
            try:
                inspect.signature(self.op.replacement).bind(*args, **kwargs)
                fits = True
            except TypeError:
                fits = False
            if len(self._fitting) < 256:
                self._fitting[form] = fits
        if not fits:
            raise Decline(f"{len(args)} positional arguments and ({', '.join(kwargs)}) do not fit {self.op.name}")

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors among the arguments, and in lists and tuples of them, each with its name."""
        for name, value in (*zip(self._names, args, strict=False), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if isinstance(item, torch.Tensor):
                        yield f"{name}[{index}]", item
