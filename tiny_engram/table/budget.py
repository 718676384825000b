"""The planner on paper: which tier hides behind which layers, before anything is bought or built. Imports errors and tiers.

A step runs L layers of equal time, one after the other. All row ids of the step are known when it begins, so the rows of every
Engram layer are asked for at once and arrive in layer order over one path. Layer k (counted from 0, as in V4.1's [1, 14]) needs
them when it begins: its window is k layers' time. What does not arrive in time is waited for, and shifts all later layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiny_engram.errors import TableError

from .tiers import DEFAULT_TIERS, DEVICE, LEAST, MOST, Tier

__all__ = ["HotTier", "Stack", "exposed_us", "harmonic", "hit_rate", "plan", "predict"]

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A model as it runs one step.

    Attributes:
        layers: of the model. layer_us: time of one, at this batch.
        engram_layers: those that read rows, from 0.
        batch: sequences in a step. tokens_per_sequence: of each (1 in decoding; drafts and prefill have more).
        columns: rows per token and Engram layer. row_bytes: of one row. rows: of each Engram layer's table.
        unique_share: of the rows that are left when duplicates are dropped, 0..1.
        start_us: from the step's begin until the fetch is under way (hashing, ids to the host).
    """

    layers: int
    layer_us: float
    engram_layers: tuple[int, ...]
    batch: int
    columns: int
    row_bytes: int
    rows: int
    tokens_per_sequence: float = 1.0
    unique_share: float = 1.0
    start_us: float = 0.0

    def __post_init__(self):
        for name in ("layers", "batch", "columns", "row_bytes", "rows"):
            if not 1 <= getattr(self, name) <= MOST:
                raise TableError(f"{name} is {str(getattr(self, name))[:40]}, expected at least 1, at most {MOST:.0e}")
        for name in ("layer_us", "tokens_per_sequence", "unique_share"):
            if not LEAST <= getattr(self, name) <= MOST:
                raise TableError(f"{name} is {getattr(self, name)}, expected a number above 0, {LEAST} to {MOST:.0e}")
        if self.unique_share > 1:
            raise TableError(f"unique_share is {self.unique_share}, expected at most 1")
        if not 0 <= self.start_us <= MOST:
            raise TableError(f"start_us is {self.start_us}, expected 0 to {MOST:.0e}")
        if not self.engram_layers or sorted(set(self.engram_layers)) != list(self.engram_layers):
            raise TableError(f"engram_layers is {str(list(self.engram_layers))[:60]}, expected some, ascending")
        if not 0 <= self.engram_layers[0] <= self.engram_layers[-1] < self.layers:
            raise TableError(f"engram_layers is {str(list(self.engram_layers))[:60]}, expected from 0 to {self.layers - 1}")

    @property
    def step_us(self) -> float:
        """A step in which no rows are waited for."""
        return self.layers * self.layer_us

    @property
    def tokens(self) -> float:
        """Of one step."""
        return self.batch * self.tokens_per_sequence

    @property
    def rows_per_layer(self) -> float:
        """Fetched for one Engram layer in one step."""
        return self.tokens * self.columns * self.unique_share

    @property
    def table_bytes(self) -> int:
        """Of one Engram layer."""
        return self.rows * self.row_bytes

    def window_us(self, layer: int) -> float:
        """From the step's begin until this layer begins."""
        return layer * self.layer_us


@dataclass(frozen=True, slots=True, kw_only=True)
class HotTier:
    """The most frequent rows of each table on the device, under traffic in which row k comes up in proportion to 1 / k^s."""

    s: float
    rows: int

    def __post_init__(self):
        if not 0 <= self.s <= 100:
            raise TableError(f"s is {self.s}, expected 0 to 100")


def harmonic(count: int, s: float) -> float:
    """The generalised harmonic number, the sum of k^-s for k in 1..count, to 12 digits for any count."""
    if not 0 <= count <= MOST or not 0 <= s <= 100:
        raise TableError(f"{str(count)[:40]} terms with exponent {s}: expected both from 0, up to {MOST:.0e} and 100")
    head = min(count, 1000)
    total = math.fsum(k**-s for k in range(1, head + 1))
    if count > head:  # Euler and Maclaurin from there on
        a, b = float(head), float(count)
        # The difference of two powers would lose its digits near s = 1.
        integral = math.log(b / a) if s == 1 else a ** (1 - s) * math.expm1((1 - s) * math.log(b / a)) / (1 - s)
        total += integral + (b**-s - a**-s) / 2 - s * (b ** (-s - 1) - a ** (-s - 1)) / 12
        total += s * (s + 1) * (s + 2) * (b ** (-s - 3) - a ** (-s - 3)) / 720
    return total


def hit_rate(hot: HotTier, rows: int) -> float:
    """Expected share of reads that the hot rows serve, H_K(s) / H_N(s)."""
    if not 0 <= hot.rows <= rows:
        raise TableError(f"hot_rows is {str(hot.rows)[:40]}, expected 0 to the table's {rows}")
    return harmonic(hot.rows, hot.s) / harmonic(rows, hot.s)


def fetch_us(stack: Stack, tier: Tier, hot: HotTier | None = None, device: Tier = DEFAULT_TIERS[0]) -> float:
    """Microseconds to bring one Engram layer's rows: from the tier and, at the same time, from the device those that are hot."""
    if hot is None:
        return tier.fetch_us(stack.rows_per_layer, stack.row_bytes)
    share = hit_rate(hot, stack.rows)
    served = stack.rows_per_layer * share
    return max(tier.fetch_us(stack.rows_per_layer - served, stack.row_bytes), device.fetch_us(served, stack.row_bytes))


def exposed_us(stack: Stack, layer_fetch_us: float) -> list[float]:
    """Microseconds waited at each Engram layer, when bringing one layer's rows takes ``layer_fetch_us``."""
    waits, late = [], 0.0
    for number, layer in enumerate(stack.engram_layers, 1):
        ready = stack.start_us + number * layer_fetch_us
        waits.append(max(0.0, ready - stack.window_us(layer) - late))
        late += waits[-1]
    return waits


def predict(stack: Stack, tier: Tier, hot: HotTier | None = None) -> float:
    """Microseconds of a step in which rows from this tier are waited for; the slowdown is this over ``stack.step_us``."""
    return math.fsum(exposed_us(stack, fetch_us(stack, tier, hot)))


def plan(stack: Stack, tiers: Sequence[Tier] = DEFAULT_TIERS, hot: HotTier | None = None) -> dict[str, Any]:
    """Everything that can be said, as plain values; times in microseconds, rates in GB (10^9 bytes) per second.

    ``windows``: each Engram layer's. ``demand``: bytes of a step; ``gb_per_s`` averaged over the step, and ``gb_per_s_in_windows``,
    what the tightest window asks for. ``tiers``: for each, the fetch of one layer, which layers it hides behind, and what is left.
    ``hot``: what the hot tier would change.
    """
    layer_bytes = stack.rows_per_layer * stack.row_bytes
    count = len(stack.engram_layers)
    windows = {layer: stack.window_us(layer) for layer in stack.engram_layers}
    tightest = max(
        (number * layer_bytes / (window - stack.start_us) / 1e3 if window > stack.start_us else math.inf)
        for number, window in enumerate(windows.values(), 1)
    )
    device = next((tier for tier in tiers if tier.name == DEVICE), DEFAULT_TIERS[0])
    found: dict[str, Any] = {
        "step_us": stack.step_us,
        "tokens_per_s": stack.tokens / stack.step_us * 1e6,
        "windows": [{"layer": layer, "us": window} for layer, window in windows.items()],
        "demand": {
            "rows_per_layer": stack.rows_per_layer,
            "bytes_per_token": stack.columns * stack.row_bytes * count,
            "bytes_per_step": layer_bytes * count,
            "gb_per_s": layer_bytes * count / stack.step_us / 1e3,
            "gb_per_s_in_windows": tightest if math.isfinite(tightest) else None,
        },
        "table": {"bytes_per_layer": stack.table_bytes, "bytes": stack.table_bytes * count},
        "tiers": [_of_tier(stack, tier) for tier in tiers],
    }
    if hot is not None:
        share = hit_rate(hot, stack.rows)
        saved = []
        for tier in tiers:
            if tier.name != device.name:
                cost = fetch_us(stack, tier, hot, device)
                without, left = predict(stack, tier), math.fsum(exposed_us(stack, cost))
                saved.append({"tier": tier.name, "fetch_us": cost, "exposed_us": left, "saved_us": without - left})
        found["hot"] = {
            "s": hot.s,
            "rows": hot.rows,
            "hit_rate": share,
            "device_bytes": hot.rows * stack.row_bytes * count,
            "tiers": saved,
        }
    return found


def _of_tier(stack: Stack, tier: Tier) -> dict[str, Any]:
    cost = fetch_us(stack, tier)
    waits = exposed_us(stack, cost)
    total = math.fsum(waits)
    table = stack.table_bytes * len(stack.engram_layers)
    return {
        "tier": tier.name,
        "fetch_us": cost,
        "layers_needed": math.ceil((stack.start_us + cost) / stack.layer_us),
        "hides_behind": [layer for layer, wait in zip(stack.engram_layers, waits, strict=True) if not wait],
        "exposed_us": total,
        "slowdown": total / stack.step_us,
        "fits": None if tier.capacity_gib is None else table <= tier.capacity_gib * GIB,
        "source": tier.source,
    }
