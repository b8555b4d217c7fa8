"""FLA's other Triton ops that its GatedDeltaNet, KDA and GatedMLP models call, and their plain-torch stand-ins.

With these and the portable gated delta rule and KDA, whole models train and generate on a CPU, where every one of
FLA's kernels raises "0 active drivers". A replacement has its upstream's signature and return structure, and serves CPU
tensors only: the caller sends everything else to upstream. It raises Decline, before any work, for what upstream would
reject.

The module names are those that hold the op in 0.5.2 and in 0.6.0 (which keeps 0.5.2's module names as aliases). Only
what launches a kernel is listed: `rms_norm_linear` and `group_norm_linear` go through `layer_norm_linear`; the norm,
convolution and MLP modules look the functions up in their module at each call.

Not reached: `fla.modules.activations.ACT2FN` and the ungated activations in it, `RotaryEmbedding`, `TokenShift`,
`LayerNormGated`/`RMSNormGated` (Mamba2), quantised linear layers, KL-divergence and GRPO losses; context parallelism;
softmax attention layers, which need the flash-attn package and so a GPU; whoever calls an autograd Function such as
`LayerNormFunction.apply` directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from . import cpu_activation, cpu_conv, cpu_loss, cpu_norm


@dataclass(frozen=True, slots=True)
class CpuOp:
    """One upstream op and what replaces it for CPU tensors."""

    module: str  #: upstream module whose namespace holds the op, in every supported version that has it
    name: str  #: attribute of the module, or "Class.attribute" for a class attribute
    replacement: Callable[..., Any]
    #: How it is rebound: "function" by identity in every holder; "autograd_apply" the same way, the saved object being
    #: the bound `apply` of an autograd Function (its signature is (*args, **kwargs), and two look-ups of it are not
    #: identical); "class_attribute" on the class.
    kind: Literal["function", "autograd_apply", "class_attribute"] = "function"


CPU_OPS: tuple[CpuOp, ...] = (
    CpuOp("fla.modules.layernorm", "layer_norm", cpu_norm.layer_norm),
    CpuOp("fla.modules.layernorm", "rms_norm", cpu_norm.rms_norm),
    CpuOp("fla.modules.layernorm", "group_norm", cpu_norm.group_norm),
    CpuOp("fla.modules.layernorm", "layer_norm_linear", cpu_norm.layer_norm_linear),
    CpuOp("fla.modules.fused_norm_gate", "layer_norm_gated", cpu_norm.layer_norm_gated),
    CpuOp("fla.modules.fused_norm_gate", "rms_norm_gated", cpu_norm.rms_norm_gated),
    CpuOp("fla.modules.fused_norm_gate", "layer_norm_swish_gate_linear", cpu_norm.layer_norm_swish_gate_linear),
    CpuOp("fla.modules.fused_norm_gate", "rms_norm_swish_gate_linear", cpu_norm.rms_norm_swish_gate_linear),
    CpuOp("fla.modules.l2norm", "l2norm", cpu_norm.l2norm),
    CpuOp("fla.modules.convolution", "causal_conv1d", cpu_conv.causal_conv1d),
    CpuOp("fla.modules.convolution", "causal_conv1d_update", cpu_conv.causal_conv1d_update),
    CpuOp("fla.modules.activations", "swiglu", cpu_activation.swiglu, "autograd_apply"),
    CpuOp("fla.modules.activations", "swiglu_linear", cpu_activation.swiglu_linear),
    CpuOp("fla.modules.activations", "powglu", cpu_activation.powglu),
    CpuOp("fla.modules.activations", "powglu_linear", cpu_activation.powglu_linear),
    CpuOp("fla.modules.fused_cross_entropy", "cross_entropy_loss", cpu_loss.cross_entropy_loss),
    CpuOp(
        "fla.modules.fused_cross_entropy",
        "FusedCrossEntropyLoss.forward",
        cpu_loss.fused_cross_entropy_loss_forward,
        "class_attribute",
    ),
    CpuOp(
        "fla.modules.fused_linear_cross_entropy",
        "fused_linear_cross_entropy_loss",
        cpu_loss.fused_linear_cross_entropy_loss,
    ),
    CpuOp("fla.ops.attnres", "fused_attnres", cpu_norm.fused_attnres),
)
