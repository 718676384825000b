"""The fused gate and the short convolution: bytes moved over time against the device's own copy, torch eager and torch.compile.

    PYTHONPATH=. python3 benchmarks/gate.py             # benchmarks/results/kernels.json, section "gate"; under four minutes
    PYTHONPATH=. python3 benchmarks/gate.py --quick     # fewer sizes, no torch.compile, nothing written
    PYTHONPATH=. python3 benchmarks/gate.py --tune      # every launch of the table in kernels/engram_gate/launch.py, best first
    PYTHONPATH=. python3 benchmarks/gate.py --conv      # the short convolution alone: check, times, and launches, best first
    PYTHONPATH=. python3 benchmarks/gate.py --sanitize  # one small run of each kernel, for compute-sanitizer
    PYTHONPATH=. python3 benchmarks/gate.py --dry       # tiny sizes by the interpreter on a CPU: does the script work?

Bytes are those that must move once: forward x, key, value and the result; backward the gradient, x, key, value and three
gradients. Times are medians of calls inside a captured graph, so launch gaps are left out. Nothing is timed before outputs
and all five gradients were found within twice the error of plain torch, both against float64.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._functorch import config

DRY = not torch.cuda.is_available()
if DRY:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu import copy_rate, device_us, graph_us, need, record, row  # noqa: E402

from tiny_engram.kernels.backend import implementation  # noqa: E402
from tiny_engram.kernels.engram_gate import engram_gate, fused, fused_backward, launch  # noqa: E402
from tiny_engram.kernels.engram_gate.reference import engram_gate_reference  # noqa: E402
from tiny_engram.kernels.short_conv import fused as conv_fused  # noqa: E402
from tiny_engram.kernels.short_conv import short_conv  # noqa: E402

DEVICE = "cpu" if DRY else "cuda"
EPS = 1e-20
HEAVY = 256_000_000  # bytes from which on a kernel should be bound by memory
TARGETS = {"forward": 0.8, "backward": 0.7}
TYPE = torch.bfloat16
# On a CPU the script only has to run: sizes shrink, and what is "heavy" with them.
FULL = {(4, 5120): [1 << k for k in range(15)], **{(1, size): [16, 1024, 16384, 65536] for size in (768, 1024, 2048, 4096)}}
QUICK = {(4, 5120): [1, 32, 512, 2048, 16384], (1, 768): [65536], (1, 2048): [65536], (1, 4096): [65536]}
TINY = {(4, 96): [1, 3], (1, 33): [5]}


# -- inputs and checks ---------------------------------------------------------------------------------------------------------


def inputs(tokens: int, copies: int, size: int) -> list[torch.Tensor]:
    """x, key, value, both weights; key and value are parts of one projection, as a layer has them."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=TYPE)

    x, wkv = normal(tokens, copies, size), normal(tokens, copies + 1, size)
    # Dot products away from 0, where the root's slope turns the luck of one rounding into all of the error.
    wkv[:, :copies] += normal(tokens, copies, 1).sign() * x
    return [x, wkv[:, :copies], wkv[:, copies], 1 + 0.1 * normal(copies, size), 1 + 0.1 * normal(copies, size)]


def gate(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    return engram_gate(x, key, value, q_weight, k_weight, eps=EPS, form="v41")


def in_torch(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    return engram_gate_reference(x, key, value, q_weight, k_weight, EPS, "v41", None, True)


def plain(x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
    """Every step in the inputs' own type."""
    query = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * q_weight
    normed = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + EPS) * k_weight
    dot = (query * normed).sum(-1) / math.sqrt(x.shape[-1])
    root = dot.abs().clamp_min(1e-6).sqrt()
    return x + torch.sigmoid(torch.copysign(root, dot)).unsqueeze(-1) * value.unsqueeze(-2)


def gradients(function: Callable[..., torch.Tensor], args: list[torch.Tensor], above: torch.Tensor) -> list[torch.Tensor]:
    leaves = [a.detach().requires_grad_() for a in args]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, above.to(out.dtype))]


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def check(tokens: int, copies: int, size: int) -> None:
    args = inputs(tokens, copies, size)
    above = torch.randn_like(args[0])
    ours, rough = gradients(gate, args, above), gradients(plain, args, above)
    exact = gradients(plain, [a.double() for a in args], above)
    for name, a, b, e in zip(("out", "x", "key", "value", "q_weight", "k_weight"), ours, rough, exact, strict=True):
        # A quarter of a unit in the last place of slack, for what plain torch happens to have exact; the interpreter cuts off.
        slack = torch.finfo(TYPE).eps * (3**-0.5 if DRY else 0.25) * float(e.square().mean().sqrt())
        errors = rms(a, e), rms(b, e)
        need(errors[0] <= 2 * errors[1] + slack, f"{name} of the gate [{tokens}, {copies}, {size}]: errors {errors}, ours and torch's")


# -- timing --------------------------------------------------------------------------------------------------------------------


def in_graph(action: Callable[[], object], calls: int = 10) -> float:
    return wall_us(action) if DRY else graph_us(action, calls=calls, repeats=9)


def queued(action: Callable[[], object]) -> float:
    return wall_us(action) if DRY else device_us(action, repeats=8, warmup=2)


def wall_us(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e6


def moved(direction: str, tokens: int, copies: int, size: int) -> int:
    per_token = (3 * copies + 1) if direction == "forward" else (5 * copies + 2)
    return tokens * per_token * size * TYPE.itemsize


def actions(args: list[torch.Tensor], chosen: dict[str, launch.Launch] | None = None) -> dict[str, Callable[[], Any]]:
    """Forward as a caller without gradients has it; backward all that autograd calls, the weights' last product included."""
    x, key, value, q_weight, k_weight = args
    above = x.flip(0) + 1
    at = chosen or {}
    _, stats = fused.forward(x, key, value, q_weight, k_weight, EPS, "v41", None, True, True)

    def forward() -> torch.Tensor:
        if chosen:
            return fused.forward(x, key, value, q_weight, k_weight, EPS, "v41", None, True, False, at["forward"])[0]
        with torch.no_grad():
            return gate(x, key, value, q_weight, k_weight)

    def backward() -> tuple[torch.Tensor, ...]:
        found = fused_backward.backward(above, x, key, value, q_weight, k_weight, stats, "v41", None, True, [True] * 4, at.get("backward"))
        return *found[:3], (found[3] * k_weight).to(q_weight.dtype), (found[3] * q_weight).to(k_weight.dtype)

    return {"forward": forward, "backward": backward}


def sweep(sizes: dict[tuple[int, int], list[int]], rate: float, heavy_from: int) -> list[dict[str, Any]]:
    figures = []
    for (copies, size), lengths in sizes.items():
        for tokens in lengths:
            for direction, action in actions(inputs(tokens, copies, size)).items():
                us = in_graph(action)
                share = moved(direction, tokens, copies, size) / (us * 1e-6) / rate
                heavy = moved(direction, tokens, copies, size) >= heavy_from
                figures.append(
                    {"direction": direction, "tokens": tokens, "copies": copies, "D": size, "us": us, "share": share, "heavy": heavy}
                )
                print(f"gate {direction:8} [{tokens}, {copies}, {size}]: {us:10.2f} us, {share:6.1%} of the copy rate", flush=True)
            if not DRY:
                torch.cuda.empty_cache()
    return figures


def against_torch(tokens: int, copies: int, size: int, compiled: bool) -> dict[str, dict[str, float]]:
    """Microseconds of torch eager and of torch.compile on the reference, one shape."""
    args = inputs(tokens, copies, size)
    above = torch.randn_like(args[0])
    ways: dict[str, Callable[..., torch.Tensor]] = {"eager": in_torch}
    if compiled:
        ways["compile"] = torch.compile(in_torch, dynamic=False, fullgraph=True, backend="aot_eager" if DRY else "inductor")
    found: dict[str, dict[str, float]] = {}
    for name, function in ways.items():
        begin = time.perf_counter()
        with torch.no_grad():
            found[name] = {"forward": queued(lambda function=function: function(*args))}
        leaves = [a.detach().requires_grad_() for a in args]
        out = function(*leaves)
        # retain_graph: only the backward is timed, over and over.
        found[name]["backward"] = queued(lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, above, retain_graph=True))
        print(f"torch {name} [{tokens}, {copies}, {size}]: {found[name]} us ({time.perf_counter() - begin:.0f} s)", flush=True)
        del out, leaves
    return found


def conv(v: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    return short_conv(v, weight, norm_weight, dilation=3, eps=EPS)


def convolution(shape: tuple[int, int, int, int], rate: float) -> dict[str, float]:
    """Forward and backward of the short convolution; bytes are v and out, and with the gradient v, grad and its result."""
    v = torch.randn(shape, device=DEVICE, dtype=TYPE)
    weight = torch.randn(*shape[2:], 4, device=DEVICE, dtype=TYPE)
    norm_weight = torch.ones(shape[2:], device=DEVICE, dtype=TYPE)
    part = [v[:1, :200].clone(), weight, norm_weight]
    above = torch.randn_like(part[0])
    ours, exact = (gradients(conv, args, above) for args in (part, [t.double() for t in part]))
    for name, a, e in zip(("out", "v", "weight", "norm_weight"), ours, exact, strict=True):
        need(rms(a, e) <= 0.01 * float(e.square().mean().sqrt()), f"{name} of the short convolution: error {rms(a, e)}")
    found = {}
    for name in ("triton", "reference"):
        with implementation(name), torch.no_grad():
            found[name] = queued(lambda: conv(v, weight, norm_weight))
        leaves = [t.detach().requires_grad_() for t in (v, weight, norm_weight)]
        with implementation(name):
            out = conv(*leaves)
            found[f"{name} backward"] = queued(lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, v, retain_graph=True))
    found["share"] = 2 * v.nbytes / (found["triton"] * 1e-6) / rate
    found["share backward"] = 3 * v.nbytes / (found["triton backward"] * 1e-6) / rate
    print(f"short convolution {list(shape)}: {found}", flush=True)
    return found


def rows_of(figures: list[dict[str, Any]], torch_us: dict[str, dict[str, float]], conv: dict[str, float]) -> list[dict[str, Any]]:
    table = []
    for direction, target in TARGETS.items():
        for copies, size in dict.fromkeys((f["copies"], f["D"]) for f in figures):
            here = [f for f in figures if f["direction"] == direction and (f["copies"], f["D"]) == (copies, size)]
            heavy = [f for f in here if f["heavy"]]
            if heavy:
                worst = min(heavy, key=lambda f: f["share"])
                least = min(f["tokens"] for f in heavy)
                what = f"gate {direction} [T, {copies}, {size}], T >= {least:,}: bytes over time, of the device copy"
                figure = f"{worst['share']:.0%} at T = {worst['tokens']:,} (the least)"
                table.append(row(what, figure, f">= {target:.0%}", worst["share"] >= target))
        big = max((f for f in figures if f["direction"] == direction and f["copies"] > 1), key=lambda f: f["tokens"])
        for name, theirs in torch_us.items():
            times = theirs[direction] / big["us"]
            what = f"gate {direction} [{big['tokens']:,}, {big['copies']}, {big['D']}] against torch {name}"
            asked = name == "eager"
            table.append(row(what, f"{times:.1f}x", ">= 5x" if asked else "", times >= 5 if asked else None))
        small = min((f for f in figures if f["direction"] == direction and f["copies"] > 1), key=lambda f: f["tokens"])
        table.append(row(f"gate {direction} [{small['tokens']}, {small['copies']}, {small['D']}]", f"{small['us']:.1f} us"))
    for name, key in (("forward", ""), ("backward", " backward")):
        times = conv[f"reference{key}"] / conv[f"triton{key}"]
        table.append(row(f"short convolution {name}: of the device copy; against torch eager", f"{conv[f'share{key}']:.0%}; {times:.1f}x"))
    return table


# -- tuning ------------------------------------------------------------------------------------------------------------------


def candidates(direction: str, size: int) -> tuple[launch.Launch, ...]:
    """What --tune tries; the first is the rule's own."""
    rule = launch.launch_for(direction, size)
    wider = replace(rule, warps=min(16, 2 * rule.warps), resident=max(1, rule.resident // 2))
    narrower = replace(rule, warps=max(1, rule.warps // 2), resident=2 * rule.resident)
    rows = (2, 8, 16) if direction == "forward" else (32, 64, 256)
    return (
        rule,
        narrower,
        wider,
        *(replace(rule, stages=n) for n in (1, 2, 3) if n != rule.stages),
        replace(narrower, stages=2),
        replace(wider, stages=1),
        replace(rule, resident=2 * rule.resident),
        *(replace(rule, rows=n) for n in rows),
    )


def tune(sizes: dict[tuple[int, int], list[int]], rate: float) -> None:
    """Every candidate at every size."""
    for (copies, size), lengths in sizes.items():
        for tokens in lengths:
            args = inputs(tokens, copies, size)
            for direction in TARGETS:
                rule = actions(args)[direction]()
                timed = []
                for k, chosen in enumerate(candidates(direction, size)):
                    both = {name: launch.launch_for(name, size) for name in TARGETS} | {direction: chosen}
                    action = actions(args, both)[direction]
                    try:
                        found = action()
                        pairs = zip(found, rule, strict=True) if direction == "backward" else [(found, rule)]
                        close = all(rms(a, b) <= 0.01 * float(b.double().square().mean().sqrt()) for a, b in pairs)
                        us = in_graph(action, calls=5)
                    except Exception as error:  # a launch that the device refuses must not end the sweep
                        print(f"  {direction} {chosen}: {type(error).__name__} {str(error)[:200]}", flush=True)
                        continue
                    share = moved(direction, tokens, copies, size) / (us * 1e-6) / rate
                    line = f"{us:10.2f} us {share:6.1%} {'rule' if k == 0 else '    '} {'' if close else 'WRONG'} {chosen}"
                    timed.append((k, us, line))
                print(f"{direction} [{tokens}, {copies}, {size}], the best five and the rule's:", flush=True)
                best = sorted(timed, key=lambda entry: entry[1])
                print(*(entry[2] for place, entry in enumerate(best) if entry[0] == 0 or place < 5), sep="\n", flush=True)


def tune_convolution(shape: tuple[int, int, int, int], rate: float) -> None:
    """Some launches of both directions beside the rule's, each checked against what the rule's gives."""
    v, above = torch.randn(2, *shape, device=DEVICE, dtype=TYPE)
    weight, norm_weight = torch.randn(*shape[2:], 4, device=DEVICE, dtype=TYPE), torch.ones(shape[2:], device=DEVICE, dtype=TYPE)
    inverse = conv_fused.forward(v, weight, norm_weight, 3, EPS)[1]
    ways: dict[str, Callable[[conv_fused.Walk | None], tuple[torch.Tensor, ...]]] = {
        "forward": lambda walk: conv_fused.forward(v, weight, norm_weight, 3, EPS, walk),
        "backward": lambda walk: conv_fused.backward(above, v, weight, norm_weight, inverse, 3, [True] * 3, walk),
    }
    # Warps, programs on an SM, stages.
    others = {"forward": [(4, 4, 1), (4, 4, 4), (4, 5, 3), (2, 4, 3)], "backward": [(4, 3, 1), (4, 3, 3), (4, 2, 3), (8, 2, 1)]}
    for direction, way in ways.items():
        rule, timed = way(None), []
        walks = [conv_fused.Walk(warps=w, resident=r, stages=s) for w, r, s in others[direction]]
        for walk in [conv_fused.walk_for(direction, shape[-1], 4), *walks]:
            try:
                close = all(rms(a, b) <= 0.01 * float(b.double().square().mean().sqrt()) for a, b in zip(way(walk), rule, strict=True))
                us = in_graph(lambda walk=walk, way=way: way(walk), calls=3)
            except Exception as error:  # a launch that the device refuses must not end the sweep
                print(f"  {direction} {walk}: {type(error).__name__} {str(error)[:200]}", flush=True)
                continue
            share = (2 if direction == "forward" else 3) * v.nbytes / (us * 1e-6) / rate
            timed.append((us, f"{us:10.2f} us {share:6.1%} {'' if close else 'WRONG'} {walk} of {walk.registers} registers"))
        print(f"short convolution {direction}, the rule's and others:", timed[0][1], *(t[1] for t in sorted(timed)), sep="\n", flush=True)


def sanitize() -> None:
    """Odd sizes, masked and not, both forms: each kernel's every path once."""
    for copies, size in ((4, 160), (1, 33), (2, 5120)):
        for mask in (None, torch.tensor([True, False, False], device=DEVICE)):
            leaves = [a.detach().requires_grad_() for a in inputs(3, copies, size)]
            out = engram_gate(*leaves, eps=1e-6, form="paper" if mask is None else "v41", mask=mask, residual=copies > 1)
            out.float().square().sum().backward()
            need(all(bool(a.grad.isfinite().all()) for a in leaves if a.grad is not None), "a gradient of the gate is not finite")
    leaves = [torch.randn(s, device=DEVICE, dtype=TYPE).requires_grad_() for s in ((2, 37, 2, 40), (2, 40, 4), (2, 40))]
    conv(*leaves).float().square().sum().backward()
    need(all(bool(a.grad.isfinite().all()) for a in leaves if a.grad is not None), "a gradient of the convolution is not finite")
    if not DRY:
        torch.cuda.synchronize()
    print("gate and short convolution ran")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("quick", "tune", "conv", "sanitize", "dry"):
        parser.add_argument(f"--{option}", action="store_true")
    args = parser.parse_args()
    need(args.dry == DRY, "--dry is for machines without a CUDA device, and all else needs one")
    # Without a device the interpreter has to be asked for.
    with implementation("triton") if DRY else nullcontext():
        if args.sanitize:
            return sanitize()
        conv_shape = (1, 20, 2, 40) if args.dry else (4, 4096, 4, 1280)
        if args.conv:
            rate = 1e10 if args.dry else copy_rate()
            convolution(conv_shape, rate)
            return tune_convolution(conv_shape, rate)
        sizes = TINY if args.dry else QUICK if args.quick or args.tune else FULL
        for copies, size in sizes:
            check(3 if args.dry else 333, copies, size)
        rate = 1e10 if args.dry else statistics.median(copy_rate() for _ in range(3))
        print(f"device copy {rate / 1e12:.2f} TB/s, read and written", flush=True)
        if args.tune:
            return tune(sizes, rate)
        figures = sweep(sizes, rate, heavy_from=0 if args.dry else HEAVY)
        conv_us = convolution(conv_shape, rate)
        (copies, size), lengths = next(iter(sizes.items()))
        # A compiled backward gives its saved tensors away, unless told that it will run again.
        with config.patch(donated_buffer=False):
            torch_us = against_torch(lengths[-1], copies, size, compiled=not args.quick)
    rows = rows_of(figures, torch_us, conv_us)
    print(*(f"{r['measure']}: {r['figure']} {r['target']} {'' if r['met'] is None else r['met']}" for r in rows), sep="\n")
    if not (args.dry or args.quick):
        record("kernels", "gate", figures={"copy_rate": rate, "gate": figures, "torch_us": torch_us, "short_conv": conv_us}, rows=rows)


if __name__ == "__main__":
    main()
