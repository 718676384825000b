"""What the benchmarks of kernels and tables share: a check before every timing, timing on the device, and keeping figures.

A result file of theirs holds one section for each benchmark that fills it, so that they can run in separate commands:

    sections    name -> {commit, machine, versions, figures, rows}; `rows` are {measure, figure, target, met}
    table       the rows of all sections, as benchmarks/tables.py renders them

Imports torch and benchmarks/tables.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tables import RESULTS, circumstances, put_section, row

__all__ = ["captured", "copy_rate", "device_us", "graph_us", "need", "on_device", "record", "row"]


def need(ok: bool, what: str) -> None:
    """Stop before anything is timed."""
    if not ok:
        raise SystemExit(f"check red, nothing timed: {what}")


def device_us(action: Callable[[], object], *, repeats: int = 30, warmup: int = 5, flush: torch.Tensor | None = None) -> float:
    """Median microseconds that the device needs for `action`, by events.

    Args:
        action: enqueues work on the current stream.
        flush: a buffer larger than the L2 cache, overwritten before each repeat, where a cold cache is asked for.
    """
    for _ in range(warmup):
        action()
    pairs = []
    for _ in range(repeats):
        if flush is not None:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e3


def captured(action: Callable[[], object], *, calls: int = 1) -> Callable[[], None]:
    """So many of `action` as one CUDA graph, after three runs of it; without a CUDA device as they are."""

    def act() -> None:
        for _ in range(calls):
            action()

    if not torch.cuda.is_available():
        return act
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def graph_us(action: Callable[[], object], *, calls: int = 20, repeats: int = 15) -> float:
    """Median microseconds of one `action` among `calls` of them in a captured graph: launch gaps are left out."""
    return device_us(captured(action, calls=calls), repeats=repeats, warmup=2) / calls


def copy_rate(nbytes: int = 1 << 31) -> float:
    """Bytes per second, read plus written, of a device-to-device copy: the ceiling that memory-bound kernels are held against."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * nbytes / (device_us(lambda: target.copy_(source)) * 1e-6)


def record(name: str, section: str, *, figures: dict[str, Any], rows: Sequence[dict[str, Any]], packages: Sequence[str] = ()) -> None:
    """Put one section into benchmarks/results/NAME.json; the other sections stay."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = circumstances("torch", "triton", *packages, accelerator=accelerator)
    put_section(RESULTS / f"{name}.json", section, {**where, "figures": figures, "rows": list(rows)})


def on_device(rows: Sequence[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Rows of a benchmark that is measured on a CPU and on CUDA devices, so that one table can hold both."""
    where = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return [{**each, "measure": f"{where}: {each['measure']}"} for each in rows]
