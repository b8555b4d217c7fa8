"""FLA's cross-entropy losses in plain torch: from logits, and from hidden states with the output layer fused in.

Signatures and return structures are upstream's; CPU tensors only. Arithmetic is fp32 (fp64 for fp64 tensors, whose
loss stays fp64 where upstream's is fp32). Both keep upstream's promise on memory: the logits' loss saves the logits and
one number per row, the fused loss never holds the logits of more than one chunk of tokens. First derivatives only, as
upstream. What upstream rejects, and a vocabulary sharded over processes, is declined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from accel.outcome import Decline

from .cpu_norm import compute_dtype


def cross_entropy_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and z-loss per row: logits [N, V], target [N]. The loss includes the z-loss, which has no gradient.

    `inplace_backward` allows upstream to overwrite the logits with their gradient; here they stay as they are.
    """
    if process_group is not None:
        raise Decline("the vocabulary is sharded over a process group")
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise Decline(f"logits have shape {tuple(logits.shape)}, target {tuple(target.shape)}; not [N, V] and [N]")
    form = _Form(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    loss, z_loss = _CrossEntropy.apply(logits, target, form)  # type: ignore[no-untyped-call]
    return loss, z_loss


def fused_cross_entropy_loss_forward(
    self: Any, input: torch.Tensor, target: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`FusedCrossEntropyLoss.forward`, whose upstream form refuses CPU tensors by name. input [N, V], target [N]."""
    loss, z_loss = cross_entropy_loss(
        input,
        target,
        label_smoothing=self.label_smoothing,
        logit_scale=self.logit_scale,
        lse_square_scale=self.lse_square_scale,
        logit_softcapping=self.logit_softcapping,
        ignore_index=self.ignore_index,
        inplace_backward=self.inplace_backward,
        process_group=self.process_group,
    )
    if self.reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    if self.reduction == "mean":
        total = (target != self.ignore_index).sum()
        loss, z_loss = loss / total, z_loss / total
    return (loss, z_loss) if self.return_z_loss else loss


def fused_linear_cross_entropy_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> torch.Tensor:
    """Cross-entropy of x [N, H] through the output layer weight [V, H], bias [V]; target [N]. A scalar.

    reduction "mean" (over targets that are not ignored; 0 if all are) or "sum". `use_l2warp` adds the L2Warp gradient,
    which does not show in the loss. Gradients are computed in the forward, chunk by chunk, for inputs that need one.
    """
    if process_group is not None:
        raise Decline("the vocabulary is sharded over a process group")
    if x.dim() != 2 or target.shape != x.shape[:1] or weight is None or weight.shape[1:] != x.shape[1:]:
        shapes = f"x {tuple(x.shape)}, target {tuple(target.shape)}"
        raise Decline(f"{shapes}, weight {None if weight is None else tuple(weight.shape)}; not [N, H], [N], [V, H]")
    form = _Form(label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index)
    call = _FusedCall(form, num_chunks, reduction, l2_penalty_factor if use_l2warp else None, accumulate_grad_in_fp32)
    loss: torch.Tensor = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, target, weight, bias, call, torch.is_grad_enabled()
    )
    return loss


@dataclass(frozen=True, slots=True)
class _Form:
    """Which cross-entropy: softcap * tanh(scale * logits / softcap), smoothed, with a z-loss, some rows ignored."""

    label_smoothing: float
    logit_scale: float
    lse_square_scale: float
    logit_softcapping: float | None
    ignore_index: int

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that enter the softmax, in the dtype of the arithmetic; always a new tensor."""
        scaled = logits.to(compute_dtype(logits), copy=True).mul_(self.logit_scale)
        if self.logit_softcapping is not None:
            scaled.div_(self.logit_softcapping).tanh_().mul_(self.logit_softcapping)
        return scaled

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, z_loss, logsumexp), each [N]; ignored rows have no loss."""
        scaled = self.transform(logits)
        index, inside, kept = self._rows(target, logits.shape[1])
        picked = scaled.gather(1, index[:, None])[:, 0].where(inside, 0.0)
        lse = scaled.logsumexp(1)
        z_loss = self.lse_square_scale * lse.square()
        if self.label_smoothing > 0:
            picked = (1 - self.label_smoothing) * picked + self.label_smoothing * scaled.mean(1)
        return (lse - picked + z_loss).where(kept, 0.0), z_loss.where(kept, 0.0), lse

    def logits_gradient(
        self, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the logits [N, V] in their own dtype, from that of the loss [N]."""
        scaled = self.transform(logits)
        index, inside, kept = self._rows(target, logits.shape[1])
        slope = None
        if self.logit_softcapping is not None:
            slope = (scaled / self.logit_softcapping).square_().neg_().add_(1.0)
        gradient = scaled.sub_(lse[:, None]).exp_().mul_((1.0 + 2.0 * self.lse_square_scale * lse)[:, None])
        if self.label_smoothing > 0:
            gradient.sub_(self.label_smoothing / logits.shape[1])
        hit = torch.full_like(lse, self.label_smoothing - 1.0).where(inside, 0.0)
        gradient.scatter_add_(1, index[:, None], hit[:, None])
        if slope is not None:
            gradient.mul_(slope)
        gradient.mul_((dloss.to(gradient.dtype) * self.logit_scale)[:, None])
        return gradient.masked_fill_(~kept[:, None], 0.0).to(logits.dtype)

    def _rows(self, target: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A class to look up in each row, whether it is the target, and whether the row counts.

        A target outside the vocabulary contributes no logit, as upstream; its row still counts.
        """
        kept = target != self.ignore_index
        inside = kept & (target >= 0) & (target < classes)
        return target.long().where(inside, 0), inside, kept


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, form: _Form) -> tuple[torch.Tensor, torch.Tensor]:
        loss, z_loss, lse = form.loss(logits, target)
        ctx.save_for_backward(logits, target, lse)
        ctx.mark_non_differentiable(z_loss)
        ctx.form = form
        return loss, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target, lse = ctx.saved_tensors
        return ctx.form.logits_gradient(logits, target, lse, dloss), None, None


@dataclass(frozen=True, slots=True)
class _FusedCall:
    """The arguments of the fused loss that are not tensors."""

    form: _Form
    num_chunks: int
    reduction: str
    l2_penalty: float | None  #: None without L2Warp
    accumulate_in_fp32: bool

    def chunks(self, tokens: int, hidden: int, classes: int) -> list[slice]:
        """Parts of the tokens whose logits take about the memory of x, cut where upstream cuts."""
        parts = max(1, min(self.num_chunks, -(-classes // hidden)))
        size = 1 << max(0, -(-tokens // parts) - 1).bit_length()
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _FusedCall,
        grad_enabled: bool,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad if grad_enabled else (False,) * 4
        kept = target.ne(call.form.ignore_index).sum().clamp_min(1)
        dtype = compute_dtype(x, weight)
        dloss = (1.0 / kept.to(dtype) if call.reduction == "mean" else torch.ones((), dtype=dtype)).expand(len(x))
        gradients = _Gradients(x, weight, bias, needs, call.accumulate_in_fp32)
        losses = x.new_zeros(len(x), dtype=dtype)
        for rows in call.chunks(len(x), x.shape[1], weight.shape[0]):
            logits = F.linear(x[rows], weight, bias)
            losses[rows], _, lse = call.form.loss(logits, target[rows])
            if gradients.wanted:
                if call.l2_penalty is not None:
                    top, classes = logits.max(1)
                    gradients.add_single(rows, classes, top * (call.l2_penalty / len(x)))
                gradients.add(rows, call.form.logits_gradient(logits, target[rows], lse, dloss[rows]))
        loss = losses.sum() / kept if call.reduction == "mean" else losses.sum()
        ctx.save_for_backward(*gradients.finished())
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = (
            None if saved is None else (saved.to(compute_dtype(saved)) * dloss).to(saved.dtype)
            for saved in ctx.saved_tensors
        )
        return dx, None, dw, db, None, None


class _Gradients:
    """Gradients of x, weight and bias, those that are needed, accumulated over chunks of tokens."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, ...],
        in_fp32: bool,
    ) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.dtype = compute_dtype(x, weight) if in_fp32 else weight.dtype
        bias_dtype = None if bias is None else compute_dtype(x, weight) if in_fp32 else bias.dtype
        self.dx = torch.zeros_like(x) if needs[0] else None
        self.dw = torch.zeros_like(weight, dtype=self.dtype) if needs[2] else None
        self.db = torch.zeros_like(bias, dtype=bias_dtype) if bias is not None and needs[3] else None

    @property
    def wanted(self) -> bool:
        return any(gradient is not None for gradient in (self.dx, self.dw, self.db))

    def add(self, rows: slice, dlogits: torch.Tensor) -> None:
        """Add what the gradient of the logits of these tokens, [C, V], contributes."""
        if self.dx is not None:
            self.dx[rows] += torch.mm(dlogits, self.weight)
        if self.dw is not None:
            self.dw.addmm_(dlogits.t().to(self.dtype), self.x[rows].to(self.dtype))
        if self.db is not None:
            self.db += dlogits.sum(0, dtype=self.db.dtype)

    def add_single(self, rows: slice, classes: torch.Tensor, values: torch.Tensor) -> None:
        """The same for a gradient with one value per token, at `classes` [C]."""
        if self.dx is not None:
            self.dx[rows] += self.weight[classes] * values[:, None]
        if self.dw is not None:
            self.dw.index_add_(0, classes, values[:, None].to(self.dtype) * self.x[rows].to(self.dtype))
        if self.db is not None:
            self.db.index_add_(0, classes, values.to(self.db.dtype))

    def finished(self) -> tuple[torch.Tensor | None, ...]:
        """(dx, dw, db) in the dtypes of x, weight and bias."""
        dw = None if self.dw is None else self.dw.to(self.weight.dtype)
        db = None if self.db is None or self.bias is None else self.db.to(self.bias.dtype)
        return self.dx, dw, db
