"""What was promised, what was measured, and whether it was kept; computed from the results, never written by hand.

The targets are those that were set before anything was measured. Where a target speaks of concept fidelity, it must hold by
all four measures of it (two networks, best and all references). Imports results, shapes, formats and statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.personalization.formats import change, mebibytes, percent, ranged, ratio
from benchmarks.personalization.results import FIDELITY, IDENTITY, OURS, NotMeasured, Results
from benchmarks.personalization.shapes import SHAPES, Shape, concept, lora
from benchmarks.personalization.statistics import Estimate

MARGIN = -0.02  # the lower bound of a difference to the best LoRA must stay above this
RELATIVE = 0.9  # share of the taught context's fidelity
PAIRS = 0.8  # share of the base's own rate
SMALLER = 25  # times smaller than a LoRA of rank 8
RIVALS = ("inversion-t", "after-tiny-engram", "after-v-engram")
LORA = "lora-unet-r8"


@dataclass(frozen=True, slots=True)
class Promise:
    """One target. `met` is None where it has not been measured; `measured` then says what is missing."""

    subject: str
    target: str
    measured: str
    met: bool | None


def _worst(values: dict[str, Estimate]) -> tuple[str, Estimate]:
    name = min(values, key=lambda n: values[n].value)
    return FIDELITY[name], values[name]


def against_lora(results: Results) -> Iterator[Promise]:
    """Both fidelities at least those of the best LoRA, identity higher."""
    theirs, ours = results.label(results.best_lora), results.label(OURS)
    for score, name in {**{s: f"concept fidelity ({n})" for s, n in FIDELITY.items()}, "prompt": "prompt fidelity"}.items():
        apart = results.score("final", ours, score) - results.score("final", theirs, score)
        met = apart.value >= 0 and apart.low > MARGIN
        yield Promise(f"{name} against {theirs}", f"difference >= 0, lower bound > {MARGIN}", ranged(apart, signed=True), met)
    for score, network in IDENTITY.items():
        one, other = (results.score("final", label, score).value for label in (ours, theirs))
        met = one > other or one == other == 1
        yield Promise(f"identity ({network}) against {theirs}", "higher, or both 100 %", f"{percent(one)} against {percent(other)}", met)


def against_rivals(results: Results) -> Iterator[Promise]:
    """Both fidelities above textual inversion's and both published rules'."""
    ours = results.label(OURS)
    for rival in RIVALS:
        theirs = results.label(rival)
        gaps = {score: results.score("final", ours, score) - results.score("final", theirs, score) for score in (*FIDELITY, "prompt")}
        prompt = gaps.pop("prompt")
        name, least = _worst(gaps)
        measured = f"least {ranged(least, signed=True)} ({name})"
        yield Promise(f"concept fidelity against {theirs}", "better by all four", measured, least.value > 0)
        yield Promise(f"prompt fidelity against {theirs}", "better", ranged(prompt, signed=True), prompt.value > 0)


def hard_contexts(results: Results) -> Iterator[Promise]:
    """Right of another object, and the trigger alone, within 10 % of the taught context."""
    ours = results.label(OURS)
    for context, name in (("right", "right of another object"), ("bare", "the trigger alone")):
        network, least = _worst({score: results.relative("final", ours, score, context) for score in FIDELITY})
        target, measured = f">= {RELATIVE} of the taught context's", f"least {ranged(least)} ({network})"
        yield Promise(f"concept fidelity, {name}", target, measured, least.value >= RELATIVE)


def two_subjects(results: Results) -> Iterator[Promise]:
    """Pairs: a share of the base's own rate, and more often than LoRA."""
    ours = results.label(OURS)
    for score, network in (("both", "EfficientNet"), ("both_lpips", "SqueezeNet")):
        right, known = results.pairs(ours, score=score), results.known_pairs(score)
        share = right / known
        measured = f"{ranged(share)}: {percent(right.value)} of {percent(known.value)}"
        target = f">= {PAIRS} of the base's rate for names it knows"
        yield Promise(f"two subjects in one prompt ({network})", target, measured, share.value >= PAIRS)
        for method in dict.fromkeys((LORA, results.best_lora)):
            theirs = results.label(method)
            apart = right - results.pairs(theirs, score=score)
            yield Promise(f"two subjects ({network}) against {theirs}", "more often", ranged(apart, signed=True), apart.value > 0)


def worked_out(results: Results, shape: Shape) -> tuple[int, int]:
    """Bytes of ours as it was run, and with one set of rows a transformer stack where that is fewer."""
    layout = results.our_layout
    whole = concept(shape, **layout).nbytes
    return whole, min(whole, concept(shape, **{**layout, "share": "stack"}).nbytes)


def payload(results: Results) -> Iterator[Promise]:
    """Bytes against a LoRA of rank 8 in fp16, measured on the base and worked out for bigger models."""
    theirs, ours = lora(SHAPES[0]).nbytes, int(results.cost(OURS, "bytes"))
    measured = f"{ratio(theirs, ours)}: {ours:,} of {theirs:,} bytes"
    yield Promise("payload on the embedded base", f"<= 1/{SMALLER} of LoRA r8", measured, ours * SMALLER <= theirs)
    for shape in SHAPES[1:]:
        bigger, (whole, shared) = lora(shape).nbytes, worked_out(results, shape)
        measured = ratio(bigger, whole) + (f"; {ratio(bigger, shared)} with shared rows" if shared < whole else "")
        yield Promise(f"payload on {shape.name}, worked out", f"<= 1/{SMALLER} of LoRA r8", measured, whole * SMALLER <= bigger)


def costs(results: Results) -> Iterator[Promise]:
    """Nothing without the trigger; step time and memory against LoRA."""
    most = max(results.change(OURS).values())
    reason = results.data["costs"][OURS].get("not_shipped")
    measured = change(most) + (f" (by the bench alone; no concept file holds it: {reason})" if reason else "")
    yield Promise("largest change without the trigger", "exactly 0", measured, most == 0)
    for method in dict.fromkeys((LORA, results.best_lora)):
        theirs = results.label(method)
        one, other = results.cost(OURS, "step_ratio"), results.cost(method, "step_ratio")
        measured = f"{one / other:.3f} times: {one:.2f} against {other:.2f} of the bare denoiser's"
        yield Promise(f"step time against {theirs}", "no longer", measured, one <= other)
        one, other = results.cost(OURS, "peak_bytes"), results.cost(method, "peak_bytes")
        yield Promise(f"peak memory against {theirs}", "below", f"{mebibytes(one)} against {mebibytes(other)}", one < other)


SECTIONS: dict[str, Callable[[Results], Iterator[Promise]]] = {
    "concept and prompt fidelity against the best LoRA": against_lora,
    "fidelity against text-side methods": against_rivals,
    "second position and the bare trigger": hard_contexts,
    "two subjects in one prompt": two_subjects,
    "payload": payload,
    "nothing without the trigger, step time, memory": costs,
}


def promises(results: Results) -> list[Promise]:
    """All of them; a section that cannot be computed yet is one line that says which stage is missing."""
    found: list[Promise] = []
    for name, section in SECTIONS.items():
        try:
            found += list(section(results))
        except NotMeasured as missing:
            found.append(Promise(name, "", f"not measured: {missing}", None))
    return found
