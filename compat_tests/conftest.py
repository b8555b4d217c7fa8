"""Fixtures every test shares: nothing stays accelerated after a test, and CUDA tensors without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import accel

# Tiny tensors gain nothing from more threads, and two test processes on two cores would fight over them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Each test starts and ends with nothing accelerated and with nothing on record."""
    from accel.state import STATES

    yield
    accel.restore()
    for state in STATES.values():
        state.reset_counters()
        state.left.clear()  # restore() keeps what somebody else patched over, for status()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> type:
    """Makes fake CUDA tensors, and lets adapters take them for plain ones, so that GPU reasons are reached anywhere.

    Used as `fake_cuda.empty(2, 3, dtype=torch.bfloat16)`; any torch factory or tensor method works inside
    `with fake_cuda.mode:`.
    """
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from accel.patches import checks

    monkeypatch.setattr(checks, "PLAIN", checks.PLAIN | {FakeTensor})

    class Factory:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        @classmethod
        def empty(cls, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0", **kwargs: object):
            with cls.mode:
                return torch.empty(*shape, dtype=dtype, device=device, **kwargs)

    return Factory
