"""Tables about the final subjects: quality, costs and time, each a function from results to Markdown. Imports results and formats."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.personalization.formats import about, cell, change, count, mebibytes, percents, ranged, ratio, table, verdict
from benchmarks.personalization.promises import LORA, promises, worked_out
from benchmarks.personalization.results import FIDELITY, IDENTITY, OURS, PROMPT, Results
from benchmarks.personalization.shapes import SHAPES, lora
from benchmarks.personalization.statistics import first_crossing

STAGE = "final"
# The level of the table about seconds: this share of what the best LoRA reaches at the main step.
LEVEL = 0.95
COSTS: dict[str, Callable[[Results, str], str]] = {
    "bytes": lambda results, method: count(results.cost(method, "bytes")),
    "trainable values": lambda results, method: count(results.cost(method, "values")),
    "step": lambda results, method: f"{1000 * results.step_seconds(method):.1f} ms",
    "step / bare step": lambda results, method: f"{results.cost(method, 'step_ratio'):.2f}",
    "peak memory": lambda results, method: mebibytes(results.cost(method, "peak_bytes")),
}


def summary(results: Results) -> str:
    """One line a method."""
    rows = []
    for label, method in results.methods(STAGE).items():
        rows.append(
            [
                label,
                ranged(results.score(STAGE, label, "effnet_best")),
                ranged(results.score(STAGE, label, "lpips_best")),
                ranged(results.score(STAGE, label, "prompt")),
                percents(results.score(STAGE, label, "identity")),
                cell(lambda label=label: percents(results.pairs(label))),
                cell(lambda method=method: count(results.cost(method, "bytes"))),
                cell(lambda method=method: change(max(results.change(method).values()))),
            ]
        )
    heads = ["concept fidelity, EfficientNet", "concept fidelity, SqueezeNet", "prompt fidelity", "identity", "two subjects, both right"]
    return table(["method", *heads, "bytes", "change without the trigger"], rows)


def kept(results: Results) -> str:
    """Every promise, computed."""
    results.stage(STAGE)
    rows = [[p.subject, p.target, p.measured, verdict(p.met)] for p in promises(results)]
    told = [row[3] for row in rows]
    open_ones = f"; {told.count('')} not measured" if "" in told else ""
    return f"{told.count('yes')} kept, {told.count('no')} not kept{open_ones}.\n\n" + table(["promise", "target", "measured", "met"], rows)


def fidelity(results: Results) -> str:
    """Concept fidelity by both networks, and identity."""
    rows = [
        [label, *(ranged(results.score(STAGE, label, s)) for s in FIDELITY), *(percents(results.score(STAGE, label, s)) for s in IDENTITY)]
        for label in results.methods(STAGE)
    ]
    return table(["method", *FIDELITY.values(), *(f"identity, {name}" for name in IDENTITY.values())], rows)


def prompt(results: Results) -> str:
    """Prompt fidelity and its parts."""
    rows = [
        [label, ranged(results.score(STAGE, label, "prompt")), *(percents(results.score(STAGE, label, s)) for s in PROMPT)]
        for label in results.methods(STAGE)
    ]
    return table(["method", "prompt fidelity", *(f"{name} right" for name in PROMPT.values())], rows)


def hard(results: Results) -> str:
    """Second position and the bare trigger relative to the taught context, and two subjects in one prompt."""
    rows = []
    for label in results.methods(STAGE):
        shares = [results.relative(STAGE, label, s, context) for context in ("right", "bare") for s in ("effnet_best", "lpips_best")]
        pairs = [cell(lambda label=label, s=s: percents(results.pairs(label, score=s))) for s in ("both", "both_lpips")]
        known = cell(lambda label=label: percents(results.pairs(label) / results.known_pairs()))
        rows.append([label, *(ranged(share) for share in shares), *pairs, known])
    known = cell(lambda: percents(results.known_pairs()))
    heads = [f"{place}, {network}" for place in ("right of another", "bare trigger") for network in ("EfficientNet", "SqueezeNet")]
    text = table(["method", *heads, "both right, EfficientNet", "both right, SqueezeNet", "of the base's own rate"], rows)
    return f"{text}\nThe base's own rate, for pairs of names that it was trained on: {known} (EfficientNet).\n"


def costs(results: Results) -> str:
    """Bytes, values, time, memory, and what prompts without the trigger feel."""
    rows = []
    for label, method in results.methods(STAGE).items():
        row = [cell(lambda m=method, f=figure: f(results, m)) for figure in COSTS.values()]
        moved = [cell(lambda m=method, k=kind: change(results.change(m)[k])) for kind in ("conditioning", "denoiser", "pictures")]
        rows.append([label, *row, *moved])
    return table(["method", *COSTS, "change of the states", "of the prediction", "of pictures (0..255)"], rows)


def differences(results: Results) -> str:
    """Ours less each other method, subject by subject."""
    ours = results.label(OURS)
    others = [label for label, method in results.methods(STAGE).items() if method != OURS]
    names = {**FIDELITY, "prompt": "prompt fidelity", "identity": "identity, EfficientNet", "identity_lpips": "identity, SqueezeNet"}
    rows = [
        [name, *(ranged(results.score(STAGE, ours, score) - results.score(STAGE, other, score), signed=True) for other in others)]
        for score, name in names.items()
    ]
    pairs = [cell(lambda other=other: ranged(results.pairs(ours) - results.pairs(other), signed=True)) for other in others]
    rows.append(["two subjects, both right", *pairs])
    return table(["ours less", *others], rows)


def contexts(results: Results) -> str:
    """Concept fidelity, then prompt fidelity, by context and method."""
    labels = list(results.methods(STAGE))
    named = list(dict.fromkeys(record["context"] for record in results.records(STAGE, labels[0])))
    parts = []
    for score, title in (("effnet_best", "Concept fidelity (EfficientNet, best reference)"), ("prompt", "Prompt fidelity")):
        asked = [c for c in named if score != "prompt" or c != "bare"]
        rows = [[c, *(cell(lambda c=c, m=m, s=score: about(results.score(STAGE, m, s, contexts=[c]))) for m in labels)] for c in asked]
        parts.append(f"{title}:\n\n" + table(["context", *labels], rows))
    return "\n".join(parts)


def wall_time(results: Results) -> str:
    """Scores after the time that ours takes for its main step."""
    budget = results.main * results.step_seconds(OURS)
    rows = []
    for label, method in results.methods(STAGE).items():
        last = results.checkpoints(STAGE, label)[-1]
        step = min(budget / results.step_seconds(method), last)
        scores = [ranged(results.at(STAGE, label, score, step)) for score in ("effnet_best", "lpips_best", "prompt")]
        rows.append([label, f"{step:.0f}" + (" (all that were trained)" if step == last else ""), *scores])
    heads = ["concept fidelity, EfficientNet", "concept fidelity, SqueezeNet", "prompt fidelity"]
    text = table(["method", "steps in that time", *heads], rows)
    return f"{text}\nThe time is that of {results.main} steps of ours, {budget:.0f} s with one concept alone on the machine.\n"


def seconds(results: Results) -> str:
    """Time to a fixed concept fidelity."""
    best = results.label(results.best_lora)
    level = LEVEL * results.score(STAGE, best, "effnet_best").value
    rows = []
    for label, method in results.methods(STAGE).items():
        steps, means = zip(*((step, mean.value) for step, mean in results.curve(STAGE, label, "effnet_best")), strict=True)
        step = first_crossing(steps, means, level)
        if step is None:
            rows.append([label, f"not in {steps[-1]}", "not reached"])
            continue
        early = "<= " if step == steps[0] else ""
        taken = cell(lambda m=method, s=step: f"{s * results.step_seconds(m):.1f} s")
        rows.append([label, f"{early}{step:.0f}", f"{early}{taken}"])
    text = table(["method", "steps", "seconds"], rows)
    return f"{text}\nThe level is {level:.3f} (EfficientNet, best reference): {LEVEL:.0%} of what {best} reaches at step {results.main}.\n"


def shapes(results: Results) -> str:
    """Payload on bigger models, worked out with the mounts that ours ran with."""
    rows = []
    for shape in SHAPES:
        theirs, (whole, shared) = lora(shape).nbytes, worked_out(results, shape)
        smaller = [ratio(theirs, whole), count(shared), ratio(theirs, shared)]
        rows.append([shape.name, str(shape.places), count(lora(shape).values), count(theirs), count(whole), *smaller, f"`{shape.source}`"])
    heads = ["model", "attentions that read text", "LoRA r8 values", "LoRA r8 bytes, fp16", "ours, bytes", "ours / LoRA"]
    text = table([*heads, "ours with shared rows, bytes", "shared / LoRA", "configuration"], rows)
    measured = cell(lambda: f"{results.cost(OURS, 'bytes'):,.0f} and {results.cost(LORA, 'bytes'):,.0f}")
    return f"{text}\nMeasured on the embedded base: {measured} bytes.\n"


TABLES = {
    "summary": summary,
    "promises": kept,
    "fidelity": fidelity,
    "prompt": prompt,
    "hard": hard,
    "costs": costs,
    "differences": differences,
    "contexts": contexts,
    "wall-time": wall_time,
    "seconds": seconds,
    "shapes": shapes,
}
