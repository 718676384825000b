"""One gather from two homes: rows that an index knows come from the device, all others from the table. Imports torch only."""

import torch

from ..backend import implementation_for
from ..row_gather import OUT_DTYPES, Bounds
from ..row_gather import bounds as _bounds
from .reference import EMPTY, bucket_of, hot_gather_reference, mix, slot_of
from .reference import probe_reference as probe

__all__ = ["EMPTY", "bucket_of", "hot_gather", "mix", "probe", "slot_of"]


def _fill(
    hot_payload: torch.Tensor,
    hot_scale: torch.Tensor,
    hot_keys: torch.Tensor,
    displacement: torch.Tensor,
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    out: torch.Tensor,
    hits: torch.Tensor | None,
    violations: torch.Tensor | None,
) -> None:
    """The rows into ``out``, by the implementation for these ids."""
    if implementation_for(row_ids) == "triton":
        from .fused import launch as fill
    else:
        fill = hot_gather_reference
    fill(hot_payload, hot_scale, hot_keys, displacement, payload, scale, row_ids, out, hits, violations)


_op = torch.library.custom_op("tiny_engram::hot_gather", _fill, mutates_args=("out", "hits", "violations"))


@_op.register_fake
def _(hot_payload, hot_scale, hot_keys, displacement, payload, scale, row_ids, out, hits, violations):
    return None


def hot_gather(
    hot_payload: torch.Tensor,
    hot_scale: torch.Tensor,
    hot_keys: torch.Tensor,
    displacement: torch.Tensor,
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    *,
    bounds: Bounds = "fatal",
    violations: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read and dequantise rows: from their hot copy where the index has one, else from the table.

    The result is row_gather's of the table, bit for bit, as long as every hot copy equals its row.

    Args:
        hot_payload: float8_e4m3fn ``[S, D]``, on the ids' device; a key's slot is its row here.
        hot_scale: uint8 ``[S, D / 32]``.
        hot_keys: int64 ``[S]``, the row id of each slot, -1 where it is empty.
        displacement: int32 ``[buckets]`` of the index.
        payload: float8_e4m3fn ``[R, D]``, contiguous along D; on the ids' device, or in host memory that it can read.
        scale: uint8 ``[R, D / 32]``.
        row_ids: int64 ``[...]``; -1 (no row) gives zeros.
        bounds: what an id outside ``[0, R)`` does. ``"fatal"`` raises (and so waits for the device); ``"warn"`` gives zeros and
            counts in ``violations``, or without it warns on the CPU and says nothing on a device; ``"ignore"`` gives zeros.
        violations: int64 ``[2]`` on the ids' device, (count, first bad id): ``"warn"`` adds to it; start it with zeros.
        hits: int64 ``[2]`` on the ids' device, to which (rows read from the hot copy, ids other than -1) are added.
        dtype: float32, bfloat16 or float16, rounded once to nearest even.
        out: contiguous ``[..., D]`` on the ids' device to write into; its type then counts, not ``dtype``.

    Returns:
        ``[..., D]``, or ``out``. When an error is raised, what ``out`` holds is not defined.

    Raises:
        ValueError: types, shapes or devices do not belong together, or the device cannot read the table's memory.
        IndexError: an id is outside the table (``"fatal"``).
        RuntimeError: ``"fatal"`` while a CUDA stream is captured.
    """
    _check(hot_payload, hot_scale, payload, scale)
    _check_index(hot_payload, hot_keys, displacement, row_ids)
    _bounds.checked_mode(bounds)
    for name, counter in (("violations", violations), ("hits", hits)):
        if counter is not None and (counter.dtype != torch.int64 or tuple(counter.shape) != (2,) or counter.device != row_ids.device):
            raise ValueError(f"{name} is {counter.dtype} {list(counter.shape)} on {counter.device}: expected int64 [2] on {row_ids.device}")
    shape = (*row_ids.shape, payload.shape[1])
    if out is None:
        if dtype not in OUT_DTYPES:
            raise ValueError(f"dtype {dtype}: expected float32, bfloat16 or float16")
        out = torch.empty(shape, dtype=dtype, device=row_ids.device)
    elif tuple(out.shape) != shape or not out.is_contiguous() or out.device != row_ids.device or out.dtype not in OUT_DTYPES:
        raise ValueError(f"out {out.dtype} {list(out.shape)} on {out.device}: expected contiguous {list(shape)} on {row_ids.device}")
    counter = violations if bounds == "warn" else None
    if bounds == "fatal":
        if row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("bounds='fatal' waits for the device, which a captured stream cannot: use bounds='warn' with violations")
        counter = torch.zeros(2, dtype=torch.int64, device=row_ids.device)
    # In eager mode the op's own bookkeeping would cost as long as a gather of a thousand rows.
    direct = type(row_ids) is torch.Tensor and not row_ids.is_meta and not torch.compiler.is_compiling()
    (_fill if direct else _op)(hot_payload, hot_scale, hot_keys, displacement, payload, scale, row_ids, out, hits, counter)
    if bounds == "fatal" and counter is not None and counter[0].item():
        _bounds.refuse(row_ids, payload.shape[0])
    elif bounds == "warn" and violations is None and not row_ids.is_cuda:
        _bounds.warn(row_ids, payload.shape[0])
    return out


def _check(hot_payload: torch.Tensor, hot_scale: torch.Tensor, payload: torch.Tensor, scale: torch.Tensor) -> None:
    for name, values, exponents in (("hot ", hot_payload, hot_scale), ("", payload, scale)):
        if values.dtype != torch.float8_e4m3fn or exponents.dtype != torch.uint8:
            raise ValueError(f"{name}payload {values.dtype}, {name}scale {exponents.dtype}: expected float8_e4m3fn, uint8")
        wanted = (values.shape[0], values.shape[-1] // 32)
        if values.ndim != 2 or tuple(exponents.shape) != wanted or values.shape[1] % 32 or values.shape[1] != payload.shape[1]:
            raise ValueError(
                f"{name}payload {list(values.shape)} and {name}scale {list(exponents.shape)}: expected [R, D] and [R, D / 32], "
                f"D a multiple of 32 and the same for hot rows and table"
            )
        if values.stride(1) != 1 or exponents.stride(1) != 1:
            raise ValueError(f"{name}rows have strides {values.stride()} and {exponents.stride()}: expected contiguous values in a row")


def _check_index(hot_payload: torch.Tensor, hot_keys: torch.Tensor, displacement: torch.Tensor, row_ids: torch.Tensor) -> None:
    if hot_keys.dtype != torch.int64 or displacement.dtype != torch.int32 or row_ids.dtype != torch.int64:
        raise ValueError(
            f"hot_keys {hot_keys.dtype}, displacement {displacement.dtype}, row_ids {row_ids.dtype}: expected int64, int32, int64"
        )
    if tuple(hot_keys.shape) != (hot_payload.shape[0],) or displacement.ndim != 1 or not displacement.numel() or not hot_keys.numel():
        raise ValueError(
            f"hot_keys {list(hot_keys.shape)}, displacement {list(displacement.shape)}: expected [{hot_payload.shape[0]}], a key for each "
            "hot row, and [buckets], neither empty"
        )
    places = {part.device for part in (hot_payload, hot_keys, displacement)}
    if places != {row_ids.device}:
        raise ValueError(f"hot rows and their index are on {sorted(map(str, places))}: expected {row_ids.device}, as the ids")
