"""Pipelines for the promises: each built once, with a twin that nothing was ever attached to, and a record of what held."""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_engram
from tests.pipelines.conformance.cases import TRIGGER, config_of, family_named
from tests.pipelines.tiny.base import TinyPipeline, picture
from tests.pipelines.tiny.every import EVERY
from tests.tiny_pipeline import concept
from tiny_engram.hooks import hooks_of

RECORDS = pytest.StashKey[list[dict[str, str]]]()


@dataclass(frozen=True)
class Subject:
    """A tiny pipeline with an adapter, and its twin: the same weights, to which nothing is ever attached."""

    tiny: TinyPipeline
    pipe: Any
    twin: Any
    adapter: Any

    @property
    def family(self) -> Any:
        return family_named(self.tiny)

    @property
    def everywhere(self) -> str:
        """A mode in which a concept has rows at every role."""
        return "pooled" if any(spec.pooled for spec in self.specs.values()) else "span"

    @property
    def specs(self) -> dict[str, Any]:
        """Role -> the family's EncoderSpec, of the encoders that are there."""
        return {spec.role: spec for spec in self.family.encoders if spec.role in self.adapter.mounts}

    def load(self, mode: str = "span", trigger: str = TRIGGER, *, roles: Any = None, **more: Any) -> str:
        """Load a concept with random rows: at these roles alone, or at all."""
        return self.adapter.load_concept(self.concept(mode, trigger, roles=roles, **more))

    def concept(self, mode: str = "span", trigger: str = TRIGGER, *, roles: Any = None, **more: Any) -> Any:
        made = concept(self.adapter, trigger, config=config_of(mode), **more)
        for role in set(made.roles) - set(made.roles if roles is None else roles):
            for mount, old in made.roles[role].mounts.items():
                made = made.with_rows(role, torch.zeros(old.payload.shape), old.gain, old.bias, mount=mount)
        return made

    def draw(self, prompt: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The twin's picture and the pipeline's. Each gets lists of its own: some pipelines write into them."""
        one, other = (picture(self.tiny, pipe, *copy.deepcopy((prompt,)), **copy.deepcopy(more)) for pipe in (self.twin, self.pipe))
        return one, other


@pytest.fixture
def tiny_case(request: pytest.FixtureRequest) -> TinyPipeline:
    return request.param


@pytest.fixture(scope="session")
def _last() -> dict[str, Subject]:
    """The pipeline of the last test, which the next one mostly wants too: see `pytest_collection_modifyitems`."""
    return {}


@pytest.fixture
def subject(tiny_case: TinyPipeline, _last: dict[str, Subject]) -> Iterator[Subject]:
    """An attached pipeline without concepts, which the test may load and leaves attached."""
    if tiny_case.name not in _last:
        _last.clear()
        pipe = tiny_case.build()
        _last[tiny_case.name] = Subject(tiny_case, pipe, tiny_case.build(), tiny_engram.attach(pipe))
    one = _last.pop(tiny_case.name)
    yield one
    one.adapter.enable_concepts()
    one.adapter.unload_concept()
    assert all(mount.attached and not len(mount.store) for mount in one.adapter.mounts.values())
    assert not any(hooks_of(part) for part in one.twin.components.values() if isinstance(part, torch.nn.Module))
    _last[tiny_case.name] = one  # not after a failure: the next test gets a new one


def _params(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one pipeline one behind the other, so that it is built once and only one is held."""
    mine = [k for k, item in enumerate(items) if "tiny_case" in _params(item)]
    order = {tiny.name: k for k, tiny in enumerate(EVERY)}
    ordered = sorted((items[k] for k in mine), key=lambda item: order[_params(item)["tiny_case"].name])
    for k, item in zip(mine, ordered, strict=True):
        items[k] = item


@pytest.fixture
def own(tiny_case: TinyPipeline) -> Any:
    """A pipeline that the test may change for good, without adapter."""
    return tiny_case.build()


# -- the record


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    report = yield
    params = _params(item)
    tiny = params.get("tiny_case")
    if tiny is not None and (report.when == "call" or not report.passed):
        result = "failed" if report.failed else getattr(report, "wasxfail", "") or "passed"
        others = [str(value) for name, value in sorted(params.items()) if name not in ("tiny_case", "mode")]
        check = " ".join([item.name.partition("[")[0].removeprefix("test_"), *others]).replace("_", " ")
        found = {"pipeline": tiny.name, "mode": params.get("mode", ""), "check": check, "result": result}
        item.config.stash.setdefault(RECORDS, []).append(found)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("families_json", None)
    if path is not None:
        record = _record(session.config.stash.get(RECORDS, []))
        Path(path).write_text(json.dumps(_merged(Path(path), record), indent=1) + "\n")


def _record(results: list[dict[str, str]]) -> dict[str, Any]:
    about = [
        {
            "pipeline": tiny.name,
            "family": family_named(tiny).name,
            "classes": list(family_named(tiny).pipelines),
            "roles": [spec.role + (" (pooled)" if spec.pooled else "") for spec in family_named(tiny).encoders],
            "refuses": dict(family_named(tiny).refuses),
            "real_tokenizer": tiny.real_tokenizer,
            "notes": tiny.notes,
        }
        for tiny in EVERY
    ]
    versions = {name: version(name) for name in ("diffusers", "transformers", "torch")}
    return {"versions": versions, "pipelines": about, "results": results}


def _merged(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """A record with what another run with the same libraries wrote: of the same check the newer result counts."""
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("versions") != record["versions"]:
        return record
    key = itemgetter("pipeline", "mode", "check")
    results = {key(found): found for found in (*before["results"], *record["results"])}
    return {**record, "results": sorted(results.values(), key=key)}
