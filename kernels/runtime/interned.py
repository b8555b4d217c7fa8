"""Equal facts are one object: found instead of made."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch

#: Facts may carry lengths, so the memory is bounded.
REMEMBERED = 4096

P = ParamSpec("P")
T = TypeVar("T")


def interned(made: Callable[P, T]) -> Callable[[], Callable[P, T]]:
    """Used as `facts = _facts()(...)` with `_facts = interned(Facts)`, a frozen dataclass.

    What `_facts()` gives returns the object it made before where there is an equal one. To make a frozen object of 16
    fields takes 3.5 us, to find it 0.9 us, and to compare it with itself nothing: a plan is looked up by its facts in
    every call. Dynamo cannot trace the look-up, and is given the class.
    """
    found: Callable[P, T] = lru_cache(maxsize=REMEMBERED)(made)

    def maker() -> Callable[P, T]:
        return made if torch.compiler.is_compiling() else found

    return maker
