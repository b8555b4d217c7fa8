"""Attention under boolean masks as transformers and diffusers build them: accel, upstream, cuDNN's flex attention.

    python benchmarks/ops/attention_masks.py --out benchmarks/results/h200/attention.jsonl

`upstream` is what the library does today: transformers' own `sdpa_attention_forward`, which repeats k and v to all
heads where there is a mask, or torch's scaled_dot_product_attention as diffusers' native backend calls it; the masks
come out of transformers' `masking_utils`, or are put together as in diffusers' Qwen-Image. `torch_flash` is that call
under torch's flash backend, which takes no mask: it appears where a release of torch does. `cudnn` is cudnn-frontend's
`flex_attn_func`, with a plan made beforehand from the same mask.

A mask is shared by all layers of a model, so metric `time` is a call whose mask was seen before. `time_new_mask` is one
whose mask is new: accel looks at the mask in every call if it is an inference tensor, cuDNN makes its plan each time.
Both are device times, without host time where the device waits for none.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.kernels.attention import attention
from accel.source_hash import source_hash
from benchmarks.ops.attention import draw, runnable
from benchmarks.timing import Quantiles, Rows, clocks, device_times, rotations

PADS = (0, 600, 1800, 100)  #: tokens of left padding of each sequence
TEXT, USED_TEXT = 256, (256, 100)  #: text tokens in front of an image, and those of them that are no padding


@dataclass(frozen=True)
class Masked:
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    mask: Callable[[], torch.Tensor]
    bshd: bool = False  #: called by diffusers, with (batch, seqlen, heads, head_dim) tensors and no grouped heads

    @property
    def bytes(self) -> int:
        tokens = 2 * self.seqlen_q * self.heads_q + 2 * self.seqlen_k * self.heads_kv
        return 2 * self.batch * tokens * self.head_dim


# --- Masks ---------------------------------------------------------------------------------------------------------


def left_padded() -> torch.Tensor:
    keep = torch.ones(len(PADS), 4096, device="cuda", dtype=torch.long)
    for row, pads in enumerate(PADS):
        keep[row, :pads] = 0
    return transformers_mask("create_causal_mask", (len(PADS), 4096), keep)


def window() -> torch.Tensor:
    return transformers_mask("create_sliding_window_causal_mask", (1, 8192), sliding_window=1024)


def packed() -> torch.Tensor:
    positions = (torch.arange(8192, device="cuda") % 1024)[None]
    return transformers_mask("create_causal_mask", (1, 8192), position_ids=positions)


def chunked() -> torch.Tensor:
    """The last of 64 chunks: 64512 tokens are in the cache."""
    from transformers import DynamicCache

    cache = DynamicCache()
    cache.update(*(torch.empty(1, 1, 65536 - 1024, 1, device="cuda") for _ in range(2)), 0)
    return transformers_mask("create_causal_mask", (1, 1024), cache=cache)


def transformers_mask(
    name: str, size: tuple[int, int], keep: Any = None, *, cache: Any = None, position_ids: Any = None, **options: Any
) -> torch.Tensor:
    """What a function of transformers' masking_utils makes for a forward pass over (batch, seqlen) tokens."""
    from transformers import LlamaConfig, masking_utils

    config = LlamaConfig(**options)
    config._attn_implementation = "sdpa"
    embeds = torch.empty(*size, 0, device="cuda", dtype=torch.bfloat16)
    mask = getattr(masking_utils, name)(config, embeds, keep, cache, position_ids)
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        raise RuntimeError(f"{name} made {mask!r}, not a boolean mask of four dimensions")
    return mask


def joint() -> torch.Tensor:
    """Qwen-Image's: padded text in front of an image."""
    text = torch.arange(TEXT, device="cuda") < torch.tensor(USED_TEXT, device="cuda")[:, None]
    image = torch.ones(len(USED_TEXT), 4352 - TEXT, device="cuda", dtype=torch.bool)
    return torch.cat([text, image], dim=1)[:, None, None, :]


CASES = {
    "leftpad_b4_l4096_h32_8_d128": Masked(4, 4096, 4096, 32, 8, 128, left_padded),
    "window1024_l8192_h32_8_d128": Masked(1, 8192, 8192, 32, 8, 128, window),
    "packed8x1024_h32_8_d128": Masked(1, 8192, 8192, 32, 8, 128, packed),
    "joint_keymask_b2_l4352_h24_d128": Masked(2, 4352, 4352, 24, 24, 128, joint, bshd=True),
    "chunked_q1024_k65536_h32_8_d128": Masked(1, 1024, 65536, 32, 8, 128, chunked),
}


# --- Providers -----------------------------------------------------------------------------------------------------

Inputs = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def inputs(case: Masked, turns: int) -> Inputs:
    """q, k, v as (batch, heads, seqlen, head_dim) views of what lies in memory as (batch, seqlen, heads, head_dim)."""
    torch.manual_seed(0)
    q, k = (case.seqlen_q, case.heads_q), (case.seqlen_k, case.heads_kv)
    return [tuple(draw(case.batch, *size, case.head_dim) for size in (q, k, k)) for _ in range(turns)]  # type: ignore[misc]


def providers(case: Masked, made: Inputs, mask: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
    """Each returns (batch, seqlen_q, heads, head_dim)."""

    def accel(i: int) -> torch.Tensor:
        q, k, v = made[i]
        return attention(q, k, v, mask=mask).transpose(1, 2)  # type: ignore[union-attr]

    def diffusers(i: int) -> torch.Tensor:
        q, k, v = made[i]
        out = F.scaled_dot_product_attention(
            query=q, key=k, value=v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
        )
        return out.permute(0, 2, 1, 3)

    def transformers(i: int) -> torch.Tensor:
        return sdpa_attention_forward()(layer, *made[i], mask, dropout=0.0, scaling=case.head_dim**-0.5)[0]

    layer = types.SimpleNamespace(num_key_value_groups=case.heads_q // case.heads_kv, is_causal=True)
    upstream = diffusers if case.bshd else transformers

    def torch_flash(i: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return upstream(i)

    return {"accel": accel, "upstream": upstream, "torch_flash": torch_flash}


@functools.cache
def sdpa_attention_forward() -> Callable[..., Any]:
    """transformers' own; nothing is patched in this process."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as function

    return function


def cudnn(made: Inputs, mask: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
    """The call with a plan made beforehand, and with one of its own; nothing where cudnn-frontend is missing."""
    try:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func
    except Exception as error:
        print(f"cudnn is left out: {type(error).__name__}: {error}", flush=True)
        return {}
    stored = [tuple(t.transpose(1, 2) for t in tensors) for tensors in made]
    intervals = visible_intervals(mask, stored[0][0].shape[:2])

    @functools.cache
    def plan() -> Any:
        return create_mask_plan(intervals, *stored[0])

    def planned(i: int) -> torch.Tensor:
        return flex_attn_func(*stored[i], mask_plan=plan())

    def unplanned(i: int) -> torch.Tensor:
        return flex_attn_func(*stored[i], mask_plan=create_mask_plan(intervals, *stored[i]))

    return runnable({"cudnn": planned, "cudnn_new": unplanned})


def visible_intervals(mask: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """A mask of one head as cudnn-frontend wants it: per query, (f0, f1, f2) of the keys [0, f0) and [f1, f2)."""
    rows = mask.expand(size[0], 1, size[1], -1)
    found = []
    for batch in range(size[0]):  # one at a time: the work needs eight bytes a key
        seen = rows[batch, 0]
        keys = torch.arange(seen.shape[1], device=seen.device)
        first = torch.where(seen.all(1), seen.shape[1], (~seen).int().argmax(1))[:, None]
        rest = seen & (keys >= first)
        start = rest.int().argmax(1)
        end = torch.where(rest.any(1), seen.shape[1] - rest.flip(1).int().argmax(1), start)
        if not torch.equal(rest, (keys >= start[:, None]) & (keys < end[:, None])):
            raise ValueError("a query sees more than two runs of keys")
        found.append(torch.stack([first[:, 0], start, end]))
    return torch.cat(found, 1)[None].int().contiguous()


# --- Measuring -----------------------------------------------------------------------------------------------------


def measure(rows: Rows, name: str, rounds: int, peers: bool) -> None:
    case = CASES[name]
    turns = min(rotations(case.bytes), 4)
    made, mask = inputs(case, turns), case.mask()
    calls = runnable(providers(case, made, mask))
    if peers:
        calls |= cudnn(made, mask)
    fresh: dict[str, Callable[[int], Any]] = {"upstream": calls["upstream"]}
    if "cudnn_new" in calls:
        fresh["cudnn"] = calls.pop("cudnn_new")
    if "accel" in calls:
        with torch.inference_mode():  # a tensor without a version: its content may have changed
            unversioned = mask.clone(memory_format=torch.preserve_format)
        fresh["accel"] = lambda i: attention(*made[i], mask=unversioned)
    agree(name, calls)
    for metric, timed in (("time", calls), ("time_new_mask", fresh)):
        times = device_times(timed, turns, batch=max(2, turns), rounds=rounds)
        run = rows.run_id()
        for provider, q in times.items():
            rows.add(name, provider, "fwd", q, run, metric=metric)
        print(f"{name:34} {metric:14} {shown(times)}", flush=True)


def agree(name: str, calls: dict[str, Callable[[int], torch.Tensor]]) -> None:
    """Say so where somebody's output is not upstream's."""
    theirs = calls["upstream"](0).float()
    if theirs.isnan().any():
        print(f"{name}: upstream has NaN in {theirs.isnan().any(-1).sum().item()} rows", flush=True)
        theirs = theirs.nan_to_num()
    for provider, call in calls.items():
        ours = call(0).float()
        difference = ((ours - theirs).norm() / theirs.norm()).item()
        if not difference < 0.02:
            print(f"{name}: {provider} and upstream DIFFER by {difference:.2e}", flush=True)


def shown(times: dict[str, Quantiles]) -> str:
    theirs = times["upstream"].p50
    return "  ".join(f"{name} {q.p50:7.4f} ms {theirs / q.p50:5.2f}x" for name, q in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result rows are replaced in this file")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true", help="without cudnn, whose kernels take long to compile")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    import transformers

    upstream = f"torch {torch.__version__}, transformers {transformers.__version__}"
    rows = Rows("benchmarks/ops/attention_masks.py", source_hash("attention", "sm90_fwd"), upstream)
    print(f"{rows.gpu}, {rows.upstream}, {clocks()}", flush=True)
    for name in args.case or CASES:
        with torch.no_grad():
            measure(rows, name, args.rounds, not args.no_peers)
        torch.cuda.empty_cache()
    print(clocks())
    if args.out:
        rows.write(args.out)


if __name__ == "__main__":
    main()
