"""Named inputs of the gated delta rule, for certificates, tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..linear_attention import case as base
from ..linear_attention.case import Inputs, Outputs
from . import chunk_cases, gated_delta_rule, recurrent_cases, recurrent_gated_delta_rule
from .chunk_cases import CHUNK_CASES, ChunkCase
from .facts import GatedDeltaRuleFacts
from .recurrent_cases import RECURRENT_CASES, RecurrentCase
from .reference import gated_delta_rule_reference


@dataclass(frozen=True, slots=True)
class Case(base.Case):
    """One call of gated_delta_rule (mode "chunk") or recurrent_gated_delta_rule ("recurrent"), with all gradients."""

    family: ClassVar[str] = "gated_delta_rule"
    per_channel: ClassVar[bool] = False

    @property
    def call(self) -> str | None:
        return "chunk_gated_delta_rule" if self.mode == "chunk" else "fused_recurrent_gated_delta_rule"

    @property
    def facts(self) -> GatedDeltaRuleFacts:
        return GatedDeltaRuleFacts(**self.common_facts())

    def run(self, inputs: Inputs) -> Outputs:
        return self.call_with(gated_delta_rule if self.mode == "chunk" else recurrent_gated_delta_rule, inputs)

    def oracle(self, inputs: Inputs) -> Outputs:
        return self.call_with(gated_delta_rule_reference, base.upcast(inputs, torch.float64))


def portable(case: Case | RecurrentCase, inputs: Inputs) -> Outputs:
    """The yardstick where no upstream is at hand: the portable path on fp32 copies, rounded to the dtypes of `run`.

    That of the chunked kernels, whose products have 16-bit operands, rounds as `chunk_cases.published` says.
    """
    if isinstance(case, ChunkCase):
        return chunk_cases.portable(case, inputs)
    if isinstance(case, RecurrentCase):
        return recurrent_cases.portable(case, inputs)
    found = case.call_with(gated_delta_rule, base.upcast(inputs, torch.float32))
    return {name: x.to(base.result_dtype(name, inputs)) for name, x in found.items()}


FP32, BF16, FP16 = "float32", "bfloat16", "float16"

#: With all gradients: what the portable path serves.
TRAINING_CASES = (
    Case((100, 100), (2, 4), (64, 64), FP32),
    Case((128, 128), (2, 2), (60, 100), FP32, gate="zero", state_v_first=True),
    Case((75, 75), (3, 3), (100, 100), FP16, use_qk_l2norm=False, states=False),
    Case((130,), (1, 2), (64, 128), BF16, gate="softplus", use_beta_sigmoid=True, layout="split"),
    Case((130,), (1, 2), (32, 32), FP32, gate="softplus", use_beta_sigmoid=True, allow_neg_eigval=True),
    Case((97,), (2, 2), (128, 128), BF16, gate="strong", layout="time_last"),
    Case((97,), (2, 2), (32, 32), FP32, gate="strong"),
    Case((200,), (2, 2), (32, 32), FP32, gate="resets"),
    Case((1, 0, 63, 64, 65, 0, 1), (2, 4), (32, 48), FP32, packed=True),
    Case((15, 100, 1), (2, 2), (60, 60), BF16, packed=True, state_v_first=True, gate="softplus", use_beta_sigmoid=True),
    Case((0, 0), (2, 2), (16, 16), FP32),
    Case((1, 1, 1), (2, 4), (64, 64), BF16),
    Case((1, 1, 1), (2, 4), (64, 64), BF16, mode="recurrent", gate="softplus", use_beta_sigmoid=True),
    Case((33, 33), (2, 4), (60, 100), FP32, mode="recurrent", state_v_first=True),
    Case((5, 0, 1, 20), (2, 2), (32, 32), FP16, mode="recurrent", packed=True),
    Case((40,), (2, 2), (32, 32), FP32, mode="recurrent", gate="resets", layout="split"),
    Case((1024,), (1, 2), (64, 64), BF16, states=False, layout="split"),
)

CASES: tuple[Case | RecurrentCase, ...] = (*TRAINING_CASES, *RECURRENT_CASES, *CHUNK_CASES)
