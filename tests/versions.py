"""Runs the tests of encoders and pipelines with several releases of transformers and diffusers, and says which pass.

    python tests/versions.py            all cells, one after the other, and the table
    python tests/versions.py 5.5 0.36   those whose releases begin so
    python tests/versions.py --kept     what earlier runs said, whatever changed since; nothing is run

Each cell is a folder build/versions/CELL with the two libraries and what their metadata asks for instead of what .venv has; it goes in
front of .venv's packages. A folder that is complete is used again, and so is the result of a cell in which nothing changed since.
Imports the standard library, packaging and benchmarks.tables.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from benchmarks.tables import RESULTS, circumstances, keep, load, render  # noqa: E402

CELLS = ROOT / "build" / "versions"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
TRANSFORMERS = ("4.57.*", "5.5.*", "5.14.*", PINS["transformers"])
DIFFUSERS = ("0.36.*", PINS["diffusers"])
# Beside the two, these are asked whether they go with what a cell has.
BESIDE = ("accelerate", "peft")
# What slow tokenizers are read with, which pipelines have before transformers 5.
READS_SLOW = ("sentencepiece", f"=={PINS['sentencepiece']}")
FIXED = ("torch", "numpy")  # of .venv, in every cell
TESTS = (
    *("tests/test_adapter.py", "tests/test_mounts.py", "tests/test_served_input.py", "tests/test_promises.py", "tests/test_concept.py"),
    *("tests/test_triggers.py", "tests/test_tokenizer.py", "tests/test_role_mounts.py", "tests/test_slow_tokenizers.py"),
    *("tests/pipelines/test_attached.py", "tests/pipelines/test_sdxl.py", "tests/pipelines/test_families.py"),
    *("tests/pipelines/test_loaders.py", "tests/pipelines/test_engram_pipeline.py", "tests/pipelines/test_hub.py"),
    *("tests/pipelines/test_tiny_pipelines.py", "tests/pipelines/conformance"),
)
SOURCES = ("assets/recipe", "kernels", "pipelines", "tests", "tiny_engram", "pyproject.toml")
LOCATE = """
import json, diffusers, huggingface_hub, tokenizers, tiny_engram, transformers
found = (transformers, diffusers, huggingface_hub, tokenizers)
print(json.dumps({"files": [m.__file__ for m in (*found, tiny_engram)], "versions": {m.__name__: m.__version__ for m in found}}))
"""


COLUMNS = ("transformers", "diffusers", "huggingface_hub", "tokenizers", "passed", "failed", "left out", "result")


class CannotInstall(Exception):
    """There is no such set of packages; the message is one line that says why."""


@dataclass
class Result:
    """What the tests said in one cell; `impossible` says why there is none."""

    transformers: str
    diffusers: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    impossible: str = ""
    state: str = ""
    commit: str = ""

    def row(self) -> dict[str, Any]:
        """Its line of the table."""
        have = self.versions
        if not self.state:
            return {**dict.fromkeys(COLUMNS, ""), "transformers": self.transformers, "diffusers": self.diffusers, "result": "not run"}
        says = f"cannot be installed: {self.impossible}" if self.impossible else "passes" if not self.failed else f"fails: {failing(self)}"
        return {
            "transformers": have.get("transformers", self.transformers),
            "diffusers": have.get("diffusers", self.diffusers),
            "huggingface_hub": have.get("huggingface_hub", ""),
            "tokenizers": have.get("tokenizers", ""),
            "passed": "" if self.impossible else self.passed,
            "failed": "" if self.impossible else len(self.failed),
            "left out": "" if self.impossible else sum(self.skipped.values()),
            "result": says,
        }


def failing(result: Result) -> str:
    """Files whose tests fail, with how many of each."""
    files = Counter(test.partition("::")[0] for test in result.failed)
    return ", ".join(f"{name} ({count})" for name, count in files.most_common())


class Cell:
    """One folder of packages.

    Args:
        transformers, diffusers: a release, or one with `*` for its last number.
    """

    def __init__(self, transformers: str, diffusers: str) -> None:
        self.wanted = {"transformers": transformers, "diffusers": diffusers}
        self.folder = CELLS / f"transformers-{transformers}-diffusers-{diffusers}".replace(".*", "")
        self.packages = self.folder / "packages"

    def __str__(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.wanted.items())

    def environment(self) -> dict[str, str]:
        extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(self.packages), str(ROOT), *(path for path in extra if path)]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return {
            **os.environ,
            **threads,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    # -- packages --------------------------------------------------------------------------------------------------------------

    def make(self) -> dict[str, str]:
        """Install what is lacking; versions of what is imported, which are those of the folder or, where it has none, of .venv.

        Raises:
            CannotInstall
        """
        complete = self.folder / "complete.json"
        if not complete.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.packages.mkdir(parents=True)
            for name, version in self.wanted.items():
                if importlib.metadata.version(name) != version:
                    self._install(name, f"=={version}")
            if int(self.wanted["transformers"].partition(".")[0]) < 5:
                self._install(*READS_SLOW)
            while lacking := self._lacking():
                for name, (specifiers, asked) in lacking.items():
                    if name in FIXED:
                        raise CannotInstall(asked)
                    self._install(name, specifiers, asked)
        found = subprocess.run([sys.executable, "-c", LOCATE], cwd=ROOT, env=self.environment(), capture_output=True, text=True)
        if found.returncode:
            raise CannotInstall(f"cannot be imported: {found.stderr.strip().splitlines()[-1]}")
        said = json.loads(found.stdout.splitlines()[-1])
        assert Path(said["files"].pop()).is_relative_to(ROOT), "another checkout of tiny_engram is imported"
        for name, file in zip(said["versions"], said["files"], strict=True):
            ours = self._here().get(canonicalize_name(name)) is not None
            assert Path(file).is_relative_to(self.packages) == ours, f"{name} is imported from {file}, not from the cell's folder"
        complete.write_text(json.dumps(said["versions"], indent=1) + "\n")
        return said["versions"]

    def _here(self) -> dict[str, Any]:
        return {canonicalize_name(found.name): found for found in importlib.metadata.distributions(path=[str(self.packages)])}

    def _lacking(self) -> dict[str, tuple[str, str]]:
        """What the cell has in a release that something of it does not take: name -> what all take, and who asks for what."""
        here = self._here()

        def distribution(name: str) -> Any:
            return here.get(canonicalize_name(name)) or importlib.metadata.distribution(name)

        asked: dict[str, dict[str, SpecifierSet]] = {}
        for name in dict.fromkeys((*map(canonicalize_name, (*self.wanted, *BESIDE)), *here)):
            whose = distribution(name)
            for line in whose.requires or ():
                need = Requirement(line)
                if need.marker is None or need.marker.evaluate({"extra": ""}):
                    asked.setdefault(canonicalize_name(need.name), {})[f"{name} {whose.version}"] = need.specifier
        lacking = {}
        for name, who in asked.items():
            try:
                version = distribution(name).version
            except importlib.metadata.PackageNotFoundError:
                version = None
            together = SpecifierSet(",".join(str(one) for one in who.values() if str(one)))
            if version is None or not together.contains(version, prereleases=True):
                says = "; ".join(f"{owner} asks for {name}{one}" for owner, one in who.items() if str(one)) or f"nobody has {name}"
                lacking[name] = str(together), says
        return lacking

    def _install(self, name: str, specifiers: str, asked: str = "") -> None:
        for old in (found for key, found in self._here().items() if key == name):
            raise CannotInstall(f"{asked}, and {old.version} is what the others take")
        print(f"  installing {name}{specifiers}", flush=True)
        command = ["pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps", "--target", str(self.packages)]
        done = subprocess.run([sys.executable, "-m", *command, f"{name}{specifiers}"], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip says nothing"]
            conflict = any("No matching distribution" in line for line in lines)
            raise CannotInstall(asked if asked and conflict else lines[-1].removeprefix("ERROR: "))

    # -- tests -----------------------------------------------------------------------------------------------------------------

    def kept(self) -> Result:
        """The result of the last run; one without a state if there was none."""
        file = self.folder / "result.json"
        return Result(**json.loads(file.read_text())) if file.exists() else Result(**self.wanted)

    def test(self) -> Result:
        """Its result, a kept one where no source changed since."""
        state = state_of_sources()
        if (result := self.kept()).state == state:
            return result
        result = Result(**self.wanted, state=state, commit=str(circumstances(depends_on=SOURCES)["commit"]))
        begin = time.monotonic()
        try:
            result.versions = self.make()
        except CannotInstall as error:
            result.impossible = str(error)
        else:
            self._run_tests(result)
            result.seconds = round(time.monotonic() - begin)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        return result

    def _run_tests(self, result: Result) -> None:
        report, log = self.folder / "report.xml", self.folder / "pytest.log"
        report.unlink(missing_ok=True)
        there = [path for path in TESTS if (ROOT / path).exists()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not slow and not gpu and not families",
            "-q",
            "--tb=short",
            "--continue-on-collection-errors",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *there,
        ]
        with log.open("w") as out:
            running = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert running.stdout is not None
            for line in running.stdout:
                out.write(line)
                out.flush()
                if share := re.search(r"\[ *\d+%\]$", line.rstrip()):
                    print(f"  {share[0]}", end="\r", flush=True)
            code = running.wait()
        if not report.exists():
            result.failed = [f"the test run itself: exit status {code}, see {log.relative_to(ROOT)}"]
            return
        skipped: Counter[str] = Counter()
        for case in xml.parse(report).getroot().iter("testcase"):
            file = f"{(case.get('classname') or case.get('name', '')).replace('.', '/')}.py"
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                result.failed.append(f"{file}::{case.get('name')}")
            elif skip is not None:
                skipped[str(skip.get("message")).removeprefix("Skipped: ")] += 1
            else:
                result.passed += 1
        result.skipped = dict(skipped)


def state_of_sources() -> str:
    """A digest of all that the tests read of this checkout."""
    digest = hashlib.sha256()
    for source in SOURCES:
        paths = [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*.py"))
        for path in paths:
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def report_of(results: list[Result]) -> dict[str, Any]:
    """What benchmarks/results/versions.json holds."""
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result.skipped)
    note = "Every cell runs the same tests."
    if skipped:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in skipped.most_common())
        note += f" Left out, over all cells: {reasons}."
    cells = [{name: value for name, value in asdict(result).items() if name != "state"} for result in results]
    where = circumstances("torch", depends_on=SOURCES)
    commits = sorted({result.commit for result in results if result.commit})
    if len(commits) == 1:
        where["commit"] = commits[0]
    elif commits:
        note += f" Cells were run at commits {', '.join(commit[:12] for commit in commits)}."
    return {"table": [result.row() for result in results], "note": note, "cells": cells, **where}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("transformers", nargs="?", default="", help="only releases that begin so")
    parser.add_argument("diffusers", nargs="?", default="")
    parser.add_argument("--kept", action="store_true", help="report earlier runs, run nothing")
    asked = parser.parse_args()
    every = [Cell(transformers, diffusers) for transformers in TRANSFORMERS for diffusers in DIFFUSERS]
    chosen = [
        cell
        for cell in every
        if cell.wanted["transformers"].startswith(asked.transformers) and cell.wanted["diffusers"].startswith(asked.diffusers)
    ]
    if not chosen:
        parser.error(
            f"no cell of transformers {asked.transformers!r} and diffusers {asked.diffusers!r}: there are {TRANSFORMERS}, {DIFFUSERS}"
        )
    results = []
    for number, cell in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {cell}", flush=True)
        result = cell.kept() if asked.kept else cell.test()
        results.append(result)
        print(f"  {result.passed} passed, {len(result.failed)} failed, {sum(result.skipped.values())} left out in {result.seconds:.0f} s")
        for line in (*([result.impossible] if result.impossible else []), *result.failed):
            print(f"    {line}")
    report = report_of(results)
    print(render(report, "versions"))
    if len(chosen) == len(every):
        keep(report, RESULTS / "versions.json")
        load("versions")
        print("kept in benchmarks/results/versions.json; python benchmarks/tables.py docs/pipelines.md puts the table into the guide")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
