"""Checkpoints: `checkpoint-N` folders of safetensors and JSON, complete or absent. No pickle.

A folder is written under another name and renamed last, so that a killed run leaves no half checkpoint that "latest"
could find. May import torch, safetensors, errors and files.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tiny_engram.errors import TinyEngramError
from tiny_engram.files import sync_folder, write_atomically

__all__ = [
    "PREFIX",
    "CheckpointError",
    "delete_checkpoints",
    "find_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "refuse_another_run",
    "sweep",
    "tell_other_settings",
    "write_checkpoint",
]

logger = logging.getLogger(__name__)

PREFIX, STATE, TENSORS = "checkpoint-", "state.json", "state.safetensors"


class CheckpointError(TinyEngramError):
    """A checkpoint cannot be written, found or read."""


def list_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all complete checkpoints, oldest first; other folders are not looked at."""
    found = []
    for path in output_dir.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if step.isascii() and step.isdecimal() and (path / STATE).is_file():
            found.append((int(step), path))
    return sorted(found)


def write_checkpoint(
    output_dir: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    finished: Callable[[Path], object],
    *,
    limit: int | None,
) -> Path:
    """Write checkpoint-`step`; delete the oldest others beyond `limit`.

    Args:
        finished: writes into the folder it is given what the run would end with at this step.
    """
    target = output_dir / f"{PREFIX}{step}"
    temporary = output_dir / f".{PREFIX}{step}.{os.getpid()}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        blob = save({k: v.detach().cpu().contiguous() for k, v in tensors.items()})
        write_atomically(temporary / TENSORS, blob)
        finished(temporary)
        write_atomically(temporary / STATE, json.dumps(dict(state), indent=1).encode())
        _delete(target)
        temporary.rename(target)
        sync_folder(output_dir)
    except (OSError, TinyEngramError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{target}: cannot write the checkpoint ({reason}); free space or choose another --output_dir") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if limit is not None:
        others = [path for _, path in list_checkpoints(output_dir) if path != target]
        for old in others[: max(0, len(others) + 1 - limit)]:
            _delete(old)
    return target


def _delete(folder: Path) -> None:
    """Under a name that nothing looks for: a kill in the middle leaves no half checkpoint."""
    if folder.exists():
        passing = folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp")
        shutil.rmtree(passing, ignore_errors=True)
        try:
            folder.rename(passing)
        except OSError:  # another process was first, or it may not be deleted at all
            return
        shutil.rmtree(passing, ignore_errors=True)


def sweep(output_dir: Path, files: Iterable[str] = ()) -> None:
    """Delete what a killed run left half written: folders of checkpoints under their passing names, and those of these files."""
    for path in output_dir.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    for name in files:
        for path in output_dir.glob(f".{name}.*.tmp"):
            path.unlink(missing_ok=True)


def delete_checkpoints(output_dir: Path) -> None:
    """Delete all of another run, so that "latest" means this one's alone."""
    for _, path in list_checkpoints(output_dir):
        _delete(path)


def find_checkpoint(output_dir: Path, wanted: str) -> Path | None:
    """The folder that `--resume_from_checkpoint` means; None for "latest" where there is none yet, which is warned of."""
    if wanted == "latest":
        found = list_checkpoints(output_dir)
        if not found:
            logger.warning("no checkpoint in %s to resume from: a new run starts", output_dir)
        return found[-1][1] if found else None
    path = Path(wanted) if Path(wanted).is_dir() else output_dir / wanted
    if not (path / STATE).is_file():
        known = ", ".join(p.name for _, p in list_checkpoints(output_dir)) or "none"
        raise CheckpointError(f"{wanted!r} is no checkpoint; {output_dir} holds: {known}")
    return path


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, state) of a checkpoint folder; the state holds at least `step`, `losses` and `config`."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        kinds = {"step": int, "losses": list, "config": dict}
        wrong = [key for key, kind in kinds.items() if not isinstance(state, dict) or not isinstance(state.get(key), kind)]
        if wrong:
            raise ValueError(f"{STATE} lacks {', '.join(wrong)}")
        return load_file(path / TENSORS), state
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: cannot read the checkpoint ({reason}); resume from an older one, or start anew") from error


def refuse_another_run(folder: Path, steps_done: int, max_train_steps: int, same: Iterable[tuple[str, object, object]]) -> None:
    """Whether a run may go on from a checkpoint. Raises TinyEngramError if not.

    Args:
        same: (name, what the checkpoint's run had, what this one has) of all that they must have in common.
    """
    for name, before, now in same:
        if before != now:
            raise TinyEngramError(f"{folder}: its {name} is {before!r}, expected {now!r}; resume with what it was made for")
    if steps_done > max_train_steps:
        raise TinyEngramError(f"{folder}: it is at step {steps_done}, and max_train_steps is {max_train_steps}; raise that to go on")


def tell_other_settings(folder: Path, steps_done: int, before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> None:
    """Say in one line which of these settings a run goes on with that its checkpoint was not made with.

    Args:
        before, now: configs as JSON; what an older checkpoint lacks is not compared.

    Raises:
        TinyEngramError: no step is left in which they could be used.
    """
    whole = now["lr_scheduler"] in (
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    )  # else the rates of all steps depend on how many there are
    changed = [name for name in names if name in before and before[name] != now[name] and not (whole and name == "max_train_steps")]
    said = ", ".join(f"{name} {now[name]!r} (it had {before[name]!r})" for name in changed)
    if steps_done < now["max_train_steps"]:
        if said:
            logger.warning("from step %d on with other settings than %s: %s", steps_done, folder, said)
    elif set(changed) - {"max_train_steps"}:
        raise TinyEngramError(
            f"{folder}: step {steps_done} is the last, and none is left to use {said}; raise max_train_steps, or choose another output_dir "
            "for a new run"
        )
    else:
        logger.warning("%s: step %d is the last; raise max_train_steps to go on", folder, steps_done)
