"""Launch configurations of the convolution kernels: frozen, checked, and all that a compiled kernel is keyed on."""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.dtypes import INDEX_DTYPES, WIDTH

WIDTHS = (2, 3, 4)  #: taps
ACTIVATIONS = (None, "silu")
RUN = 32  #: tokens of a thread of the forward kernel
MAX_STATE = 8  #: tokens that a state may hold


@dataclass(frozen=True, slots=True)
class ConvConfig:
    """The forward kernel: a thread has 16 bytes of channels and a run of tokens, whose window stays in registers."""

    dtype: str  #: of x, weight, bias and y
    width: int
    bias: bool
    activation: str | None
    initial: bool  #: there are tokens before the first
    final: bool  #: write the last tokens of every sequence
    packed: str | None  #: dtype of cu_seqlens
    overlap: bool  #: start while the kernel before it drains, sm_90 and newer
    threads: int = 128

    def __post_init__(self) -> None:
        _check(self.dtype, self.width, self.activation)
        if self.packed not in (None, *INDEX_DTYPES):
            raise ValueError(f"packed must be one of {INDEX_DTYPES} or None, got {self.packed!r}")
        if self.threads % 32 or not 32 <= self.threads <= 1024:
            raise ValueError(f"threads must be whole warps up to 1024, got {self.threads}")

    @property
    def channels(self) -> int:
        """Of a thread."""
        return 16 // WIDTH[self.dtype]

    @property
    def ahead(self) -> int:
        """Tokens whose loads are under way together."""
        return 8


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """The update kernel: a thread has one channel of one sequence, and its whole state."""

    dtype: str
    width: int
    bias: bool
    activation: str | None
    state_len: int  #: tokens that the state holds
    overlap: bool
    threads: int = 128

    def __post_init__(self) -> None:
        _check(self.dtype, self.width, self.activation)
        if not self.width - 1 <= self.state_len <= MAX_STATE:
            raise ValueError(f"state_len must be {self.width - 1} to {MAX_STATE}, got {self.state_len}")


def _check(dtype: str, width: int, activation: str | None) -> None:
    for name, value, known in (
        ("dtype", dtype, tuple(WIDTH)),
        ("width", width, WIDTHS),
        ("activation", activation, ACTIVATIONS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
