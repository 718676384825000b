"""One JSON file a run: what the measurements of a language model write, and what report.py makes the sections of llm.json from.

A piece says itself where it was measured (`here`). Of a run that was stopped, the pieces that are there are not done again, so several
processes may share a folder. Imports benchmarks/tables.py, and torch only to name the device.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import circumstances
from tiny_engram.files import write_atomically

BUCKETS = (0, 1, 4, 16, 64, 256)  # times that the trigram before a token stands in the training text
CODE = ("benchmarks/llm", "kernels", "tiny_engram")
WHERE = ("commit", "machine", "versions")
NEEDED = {
    "everywhere": ("kind", "share", "seed", "parameters", "curve", "seconds", "steps", "batch", "rate"),
    "retention": ("method", "rate", "seed", "parameters", "points", "seconds"),
    "facts": ("method", "facts", "recall"),
}
DIGITS = 5  # of a loss, behind the point


def here(*packages: str) -> dict[str, Any]:
    """What a piece says of where it was measured.

    Raises:
        SystemExit: there is neither a repository nor the environment's TINY_ENGRAM_COMMIT; before anything is measured.
    """
    import torch

    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    try:
        return circumstances("torch", "transformers", *packages, depends_on=CODE, accelerator=accelerator)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("no repository here that tells the commit: give it as TINY_ENGRAM_COMMIT") from None


def keep_piece(path: Path, piece: dict[str, Any]) -> None:
    """Whole or not at all, since a piece that is there is not measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(piece) + "\n").encode())


def _objects(path: Path) -> Iterable[Any]:
    """A `.json` file is one object; of other files, such as a command's output, each line that begins with a brace is."""
    texts = [path.read_text()] if path.suffix == ".json" else [line for line in path.read_text().splitlines() if line.startswith("{")]
    for text in texts:
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: no JSON ({error}); remove it, and that run is measured again") from None


def key_of(section: str, piece: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a run from others of its section."""
    if section == "everywhere":
        return piece["kind"], float(piece["share"]), piece["seed"]
    if section == "retention":
        return piece["method"], float(piece["rate"]), piece["seed"]
    return piece["facts"], piece["method"], piece.get("learning_rate")


def read(section: str, places: Sequence[Path], *, commit: str = "", machine: str = "") -> list[dict[str, Any]]:
    """All pieces of files and of folders (their `.json` and `.jsonl`), in a fixed order; of two of one run the later place's counts.

    Args:
        commit, machine: of pieces that do not say themselves.

    Raises:
        OSError, ValueError: a place is not there, holds none, or a piece lacks something; one line.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for place in places:
        paths = sorted([*place.glob("*.json"), *place.glob("*.jsonl")]) if place.is_dir() else [place]
        pieces = [(path, piece) for path in paths for piece in _objects(path)]
        if not pieces:
            raise ValueError(f"{place}: holds no pieces of {section}: expected a folder of JSON files, or a file of JSON lines")
        for path, piece in pieces:
            if lacking := [name for name in NEEDED[section] if not isinstance(piece, dict) or name not in piece]:
                raise ValueError(f"{path}: no piece of {section}: it has no {lacking[0]!r}; name a folder that holds such pieces alone")
            given = {"commit": commit, "machine": machine, "versions": {}}
            found[key_of(section, piece)] = given | piece
    return [found[key] for key in sorted(found, key=lambda key: [(each is not None, each) for each in key])]


def together(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Commit, machine and versions of a section: all that occur, in the order in which they do."""

    def joined(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "not recorded"

    packages = list(dict.fromkeys(name for piece in pieces for name in piece["versions"]))
    versions = {name: joined(piece["versions"].get(name, "") for piece in pieces) for name in packages}
    return {"commit": joined(p["commit"] for p in pieces), "machine": joined(p["machine"] for p in pieces), "versions": versions}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


def everywhere_figures(pieces: Sequence[dict[str, Any]], corpus: dict[str, Any] | None = None) -> dict[str, Any]:
    """The runs' curves, each quantity a list over the looks.

    Raises:
        ValueError: runs with other settings, or judged by other texts, than the first's: they cannot be compared.
    """
    settings = {name: pieces[0][name] for name in ("steps", "batch", "rate")}
    tokens = pieces[0]["curve"][-1]["tokens"]
    runs = []
    for piece in pieces:
        curve = piece["curve"]
        name = f"{piece['kind']}-{piece['share']:.2f}-{piece['seed']}"
        if (other := {key: piece[key] for key in settings}) != settings:
            raise ValueError(f"{name}: measured with {other}, the first run with {settings}: give runs of one setting")
        if curve[-1]["tokens"] != tokens:
            raise ValueError(f"{name}: judged by tokens {curve[-1]['tokens']}, the first run by {tokens}: give runs on one corpus")
        run = {key: piece[key] for key in ("kind", "share", "seed", "parameters", "seconds")}
        run |= {key: _rounded([look[key] for look in curve]) for key in ("step", "loss", "by_frequency")}
        gates = [key for key in curve[-1] if key.startswith("gate_")]
        runs.append(run | {"gates": {key.removeprefix("gate_"): _rounded([look[key] for look in curve]) for key in gates}})
    counted = {} if corpus is None else {key: corpus[key] for key in ("train", "validation", "characters")}
    if corpus is not None:
        counted["packages"] = len(corpus["packages"])
    return {"settings": settings, "corpus": counted, "buckets": list(BUCKETS), "tokens": tokens, "runs": runs}


def retention_figures(pieces: Sequence[dict[str, Any]], apart: float = 0.05) -> dict[str, Any]:
    """The runs' curves.

    Raises:
        ValueError: a run began more than `apart` away from the first one's losses: other texts, or another model.
    """
    runs = []
    for piece in pieces:
        run = {key: piece[key] for key in ("method", "rate", "seed", "parameters", "seconds")}
        run |= {key: _rounded([point[key] for point in piece["points"]]) for key in ("step", "narrow", "ordinary")}
        for what in ("narrow", "ordinary"):
            begun, first = run[what][0], (runs or [run])[0][what][0]
            if abs(begun - first) > apart:
                where = f"{run['method']}-{run['rate']:g}-{run['seed']}"
                raise ValueError(f"{where}: begins at {begun:.3f} on {what} text, the first run at {first:.3f}: give runs on one text")
        runs.append(run)
    return {"runs": runs}


def facts_figures(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs, and the settings that they share.

    Raises:
        ValueError: runs with different settings.
    """
    told = [(piece["method"], piece["settings"]) for piece in pieces if "settings" in piece]
    for method, settings in told:
        if settings != told[0][1]:
            raise ValueError(f"{method}: measured with {settings}, {told[0][0]} with {told[0][1]}: give runs of one setting")
    runs = [{key: value for key, value in piece.items() if key not in (*WHERE, "settings")} for piece in pieces]
    return {"settings": told[0][1] if told else {}, "runs": runs}
