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


def interned(made: Callable[P, T]) -> Callable[P, T]:
    """`made`, a frozen dataclass, as a function that returns the object it made before where there is an equal one.

    To make a frozen object of 16 fields takes 3.5 us, to find it 0.9 us, and to compare it with itself nothing: a plan
    is looked up by its facts in every call. Dynamo cannot trace the look-up, and gets a new object.
    """
    found = lru_cache(maxsize=REMEMBERED)(made)

    def find(*args: P.args, **kwargs: P.kwargs) -> T:
        return made(*args, **kwargs) if torch.compiler.is_compiling() else found(*args, **kwargs)

    return find
