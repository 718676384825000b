"""Packed e4m3 rows -> values of the asked rows, wherever the table lives. Imports torch only."""

import torch

from ..backend import implementation_for
from . import bounds as _bounds
from .bounds import Bounds
from .reference import row_gather_reference

__all__ = ["Bounds", "row_gather"]

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_gather(
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    *,
    first_row: int = 0,
    rows_total: int | None = None,
    bounds: Bounds = "fatal",
    violations: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read and dequantise table rows; there is no gradient.

    Args:
        payload: float8_e4m3fn ``[R, D]``, rows ``first_row ...`` of the table; D is a multiple of 32. It and ``scale`` may be
            strided views of one record array. With ids on a CUDA device: memory of that device, or pinned or registered host memory.
        scale: uint8 ``[R, D / 32]``, in the same memory.
        row_ids: int64 ``[...]``; -1 is no row and gives zeros. Its device is where the work is done.
        first_row: the table's row that ``payload[0]`` is; rows of the table that are not in this shard give zeros.
        rows_total: rows of the whole table; None means ``first_row + R``.
        bounds: what an id outside ``[0, rows_total)`` does. ``"fatal"`` raises (and so waits for the device); ``"warn"`` gives
            zeros and counts in ``violations``, or without it warns on the CPU and says nothing on a device; ``"ignore"`` gives zeros.
        violations: int64 ``[2]`` on the ids' device, (count, first bad id): ``"warn"`` adds to it; start it with zeros.
        dtype: float32, bfloat16 or float16, rounded once to nearest even.
        out: contiguous ``[..., D]`` on the ids' device to write into; its type then counts, not ``dtype``.

    Returns:
        ``[..., D]``, or ``out``. When an error is raised, what ``out`` holds is not defined.

    Raises:
        ValueError: types, shapes or devices do not belong together, or the device cannot read the table's memory.
        IndexError: an id is outside the table (``"fatal"``).
        RuntimeError: ``"fatal"`` while a CUDA stream is captured.
    """
    _check(payload, scale, row_ids)
    rows_total = _check_range(payload.shape[0], first_row, rows_total)
    _bounds.checked_mode(bounds)
    shape = (*row_ids.shape, payload.shape[1])
    if out is not None:
        if tuple(out.shape) != shape or not out.is_contiguous() or out.device != row_ids.device:
            raise ValueError(f"out {list(out.shape)} on {out.device}: expected contiguous {list(shape)} on {row_ids.device}")
        dtype = out.dtype
    if dtype not in OUT_DTYPES:
        raise ValueError(f"dtype {dtype}: expected float32, bfloat16 or float16")
    if violations is not None and (
        violations.dtype != torch.int64 or tuple(violations.shape) != (2,) or violations.device != row_ids.device
    ):
        raise ValueError(
            f"violations is {violations.dtype} {list(violations.shape)} on {violations.device}: expected int64 [2] on {row_ids.device}"
        )
    # In eager mode the op's own bookkeeping would cost as long as a gather of a thousand rows.
    direct = type(row_ids) is torch.Tensor and not row_ids.is_meta and not torch.compiler.is_compiling()
    if out is None and (violations is None or bounds != "warn"):
        return (_values if direct else _op)(payload, scale, row_ids, first_row, rows_total, bounds, dtype)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=row_ids.device)
    (_fill if direct else _op_out)(payload, scale, row_ids, first_row, rows_total, bounds, out, violations)
    return out


def _check(payload: torch.Tensor, scale: torch.Tensor, row_ids: torch.Tensor) -> None:
    if payload.dtype != torch.float8_e4m3fn or scale.dtype != torch.uint8 or row_ids.dtype != torch.int64:
        raise ValueError(f"payload {payload.dtype}, scale {scale.dtype}, row_ids {row_ids.dtype}: expected float8_e4m3fn, uint8, int64")
    if payload.ndim != 2 or tuple(scale.shape) != (payload.shape[0], payload.shape[1] // 32) or payload.shape[1] % 32:
        raise ValueError(f"payload {list(payload.shape)} and scale {list(scale.shape)}: expected [R, D] and [R, D / 32]")
    if payload.shape[1] and (payload.stride(1) != 1 or (scale.shape[1] > 1 and scale.stride(1) != 1)):
        raise ValueError(f"payload strides {payload.stride()}, scale strides {scale.stride()}: expected the values of a row side by side")
    if scale.device != payload.device or (payload.device != row_ids.device and not (row_ids.is_cuda and payload.device.type == "cpu")):
        raise ValueError(
            f"payload on {payload.device}, scale on {scale.device}, row_ids on {row_ids.device}: "
            "expected one device, or a table in pinned host memory and ids on a CUDA device"
        )


def _check_range(rows: int, first_row: int, rows_total: int | None) -> int:
    if rows_total is None:
        rows_total = first_row + rows
    if first_row < 0 or rows_total < first_row + rows:
        raise ValueError(f"first_row {first_row}, rows_total {rows_total}: {rows} rows do not fit into such a table")
    return rows_total


def _values(
    payload: torch.Tensor, scale: torch.Tensor, row_ids: torch.Tensor, first_row: int, rows_total: int, bounds: str, dtype: torch.dtype
) -> torch.Tensor:
    """A new tensor of the rows, by the implementation for these ids; ``payload`` may be bytes."""
    if implementation_for(row_ids) == "triton":
        out = torch.empty((*row_ids.shape, payload.shape[1]), dtype=dtype, device=row_ids.device)
        _launch(payload, scale, row_ids, first_row, rows_total, bounds, out, None)
        return out
    return _by_reference(payload, scale, row_ids, first_row, rows_total, bounds, dtype, None)


def _fill(
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    first_row: int,
    rows_total: int,
    bounds: str,
    out: torch.Tensor,
    violations: torch.Tensor | None,
) -> None:
    """The rows into ``out``, violations added, by the implementation for these ids."""
    if implementation_for(row_ids) == "triton":
        _launch(payload, scale, row_ids, first_row, rows_total, bounds, out, violations)
    else:
        out.copy_(_by_reference(payload, scale, row_ids, first_row, rows_total, bounds, out.dtype, violations))


def _by_reference(
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    first_row: int,
    rows_total: int,
    bounds: str,
    dtype: torch.dtype,
    violations: torch.Tensor | None,
) -> torch.Tensor:
    if payload.device != row_ids.device:
        raise ValueError(f"payload on {payload.device}, row_ids on {row_ids.device}: reading host memory from a device needs Triton")
    if bounds == "fatal":
        _refuse_capture(row_ids)
        _bounds.refuse(row_ids, rows_total)
    elif bounds == "warn":
        if violations is not None:
            _bounds.count(row_ids, rows_total, violations)
        elif not row_ids.is_cuda:
            _bounds.warn(row_ids, rows_total)
    return row_gather_reference(payload, scale, row_ids, first_row, dtype)


def _launch(
    payload: torch.Tensor,
    scale: torch.Tensor,
    row_ids: torch.Tensor,
    first_row: int,
    rows_total: int,
    bounds: str,
    out: torch.Tensor,
    violations: torch.Tensor | None,
) -> None:
    from .fused import launch

    counter = violations if bounds == "warn" else None
    if bounds == "fatal":
        _refuse_capture(row_ids)
        # The kernel checks while it reads; two numbers come back, and the ids are looked at again only when one is bad.
        counter = torch.zeros(2, dtype=torch.int64, device=row_ids.device)
    launch(payload, scale, row_ids, first_row, rows_total, out, counter)
    if bounds == "fatal" and counter is not None and counter[0].item():
        _bounds.refuse(row_ids, rows_total)
    elif bounds == "warn" and violations is None and not row_ids.is_cuda:
        _bounds.warn(row_ids, rows_total)


def _refuse_capture(row_ids: torch.Tensor) -> None:
    if row_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("bounds='fatal' waits for the device, which a captured stream cannot: use bounds='warn' with violations")


_op = torch.library.custom_op("tiny_engram::row_gather", _values, mutates_args=())
_op_out = torch.library.custom_op("tiny_engram::row_gather_out", _fill, mutates_args=("out", "violations"))


@_op.register_fake
def _(payload, scale, row_ids, first_row, rows_total, bounds, dtype):
    return row_ids.new_empty((*row_ids.shape, payload.shape[1]), dtype=dtype)


@_op_out.register_fake
def _(payload, scale, row_ids, first_row, rows_total, bounds, out, violations):
    return None
