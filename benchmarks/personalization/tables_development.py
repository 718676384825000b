"""Tables about what was tried on the development subjects, the judges, and where figures come from.

Imports results, plan, selection and formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.personalization.formats import cell, count, percents, ranged, table
from benchmarks.personalization.plan import RATE_FACTORS
from benchmarks.personalization.results import FIDELITY, OURS, NotMeasured, Results
from benchmarks.personalization.selection import selection_score
from benchmarks.personalization.statistics import Estimate, estimate

STAGE = "methods"
# Of one picture's figures, those that a table of development subjects shows.
SHOWN = {"effnet_best": "concept fidelity, EfficientNet", "lpips_best": "concept fidelity, SqueezeNet", "prompt": "prompt fidelity"}


def score_of(records: Iterable[Mapping[str, Any]]) -> Estimate:
    """The score by which settings are chosen, over subjects."""
    by_subject: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_subject.setdefault(record["subject"], []).append(record)
    return estimate({subject: selection_score(own) for subject, own in by_subject.items()})


def development(results: Results) -> str:
    """Every method at its best rate, one seed."""
    rows = []
    for label, method in results.methods(STAGE).items():
        records = results.records(STAGE, label)
        scores = [ranged(results.score(STAGE, label, score)) for score in SHOWN]
        pairs = cell(lambda label=label: percents(results.pairs(label, STAGE)))
        size = cell(lambda method=method: count(results.cost(method, "bytes")))
        rows.append([label, f"{records[0]['learning_rate']:g}", ranged(score_of(records)), *scores, pairs, size])
    return table(["method", "learning rate", "score", *SHOWN.values(), "two subjects, both right", "bytes"], rows)


def sweep(results: Results) -> str:
    """The score of every method at every rate; the chosen one is bold."""
    rates = results.rates
    labels = {record["method"]: record["label"] for record in results.stage("sweep")}
    rows, edges = [], []
    for method in [m for m in labels if m in rates]:
        found = rates[method]
        scores = sorted((float(rate), score) for rate, score in found["scores"].items())
        cells = [f"**{score:.3f}**" if rate == found["rate"] else f"{score:.3f}" for rate, score in scores]
        rows.append([labels[method], *cells, f"{found['rate']:g}"])
        edges += [labels[method]] if found["at_edge"] else []
    heads = [f"x {factor:g}" for factor in RATE_FACTORS]
    note = "None lies at an end of what was tried."
    if edges:
        note = f"At an end of what was tried, so that a better rate may lie outside: {'; '.join(edges)}."
    return table(["method", *heads, "chosen rate"], rows) + f"\n{note}\n"


def controls(results: Results) -> str:
    """Ours, spoilt in one way at a time, against ours on the same subjects and seed."""
    ours = results.label(OURS, STAGE)
    rows = [[f"**{ours}**", *(ranged(results.score(STAGE, ours, score)) for score in SHOWN), ""]]
    whole = score_of(results.records(STAGE, ours))
    for label in results.methods("controls"):
        apart = score_of(results.records("controls", label)) - whole
        rows.append([label, *(ranged(results.score("controls", label, score)) for score in SHOWN), ranged(apart, signed=True)])
    return table(["control", *SHOWN.values(), "score, less ours"], rows)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "as they are"


def levers(results: Results) -> str:
    """What was tried, best first, and what it changed in the score."""
    tried: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for record in results.stage("levers"):
        if record["step"] == results.main:
            tried.setdefault((record["label"], record["learning_rate"]), []).append(record)
    found = []
    for (label, rate), records in tried.items():
        plain = score_of(results.records(STAGE, results.label(records[0]["method"], STAGE)))
        found.append((score_of(records) - plain, label, rate, records[0]["options"]))
    found.sort(key=lambda each: -each[0].value)
    rows = [
        [label, _options(options), f"{rate:g}", ranged(apart, signed=True), "better" if apart.value > 0 else "no better"]
        for apart, label, rate, options in found
    ]
    return table(["variant", "options", "learning rate", "score, less the method's own", "verdict"], rows)


def assumptions(results: Results) -> str:
    """What the published rules leave open, and how it was taken."""
    from benchmarks.personalization.methods.published import ASSUMPTIONS

    methods = results.methods("final")
    parts = []
    for label, method in methods.items():
        if method in ASSUMPTIONS:
            parts.append(f"{label}:\n\n" + "".join(f"- {assumption}\n" for assumption in ASSUMPTIONS[method]))
    if not parts:
        raise NotMeasured("stage final has no records of a published rule")
    return "\n".join(parts)


def _grid(corner: str, columns: Mapping[str, Mapping[str, float]]) -> str:
    """{column: {line: figure}} as a table."""
    lines = dict.fromkeys(line for column in columns.values() for line in column)
    rows = [[line, *(f"{column[line]:.3f}" if line in column else "" for column in columns.values())] for line in lines]
    return table([corner, *columns], rows)


def judges(results: Results) -> str:
    """How right the judges are on real pictures, and what real pictures sent through the autoencoder reach."""
    right, most = results.data.get("judges"), results.data.get("ceilings")
    if not right or not most:
        raise NotMeasured("stage base has not been run")
    columns = {f"{split}, {kind}": found for split, kinds in right.items() for kind, found in kinds.items()}
    fields = {**FIDELITY, "identity": "identity, EfficientNet", "identity_lpips": "identity, SqueezeNet", "prompt": "prompt fidelity"}
    reached = {name: {context: found[field] for context, found in most.items() if field in found} for field, name in fields.items()}
    parts = [_grid("share of verdicts that are right", columns), "Ceilings, by context:\n", _grid("context", reached)]
    return "\n".join(parts)


def circumstances(results: Results) -> str:
    """Machine, versions, commit and settings."""
    data = results.data
    if not data.get("stages"):
        raise NotMeasured("no stage has been run")
    versions = ", ".join(f"{name} {version}" for name, version in data.get("versions", {}).items())
    settings = data["settings"]
    kept = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if not isinstance(value, list | Mapping | str))
    subjects = settings.get("subjects", {})
    lines = [
        f"- Measured on {data.get('machine', 'an unnamed machine')} ({versions}) at commit {data.get('commit', 'unknown')[:12]}.",
        f"- Settings: {kept}; checkpoints {', '.join(map(str, settings.get('checkpoints', [])))}.",
        *(f"- {split.capitalize()} subjects ({len(names)}): {', '.join(names)}." for split, names in subjects.items()),
        f"- The choice of learning rates: {settings.get('rule', 'not recorded')}.",
    ]
    return "\n".join(lines) + "\n"


TABLES = {
    "development": development,
    "sweep": sweep,
    "controls": controls,
    "levers": levers,
    "assumptions": assumptions,
    "judges": judges,
    "circumstances": circumstances,
}
