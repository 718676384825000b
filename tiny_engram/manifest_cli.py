"""`tiny-engram train --manifest concepts.yaml`. Imports errors, the manifest and cli_fields, and what the verb needs in the verb."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tiny_engram.cli_fields import given_fields
from tiny_engram.errors import ConfigError, FaultsError, raise_faults
from tiny_engram.launched import device_for, dtype_for, local_rank
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.manifest import LOADING, OWN, Manifest, manifest_text, read_manifest

__all__ = ["add_manifest_options", "refuse_manifest_options", "run_manifest"]

OPTIONS = ("concepts_together", "library", "again")


def add_manifest_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train` for many concepts."""
    told = parser.add_argument_group("many concepts")
    told.add_argument("--manifest", type=Path, metavar="FILE.yaml", help="teach all concepts that the file lists; options given here win")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS}
    told.add_argument("--concepts_together", type=int, help="with --manifest: most concepts of one batch (default: 8)", **hidden)
    told.add_argument("--library", type=Path, help="with --manifest: a library that all of them are put into at the end", **hidden)
    told.add_argument("--again", action="store_true", help="with --manifest: teach anew what was taught with other settings", **hidden)


def refuse_manifest_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for options that say nothing without a manifest."""
    given = [f"--{name}" for name in OPTIONS if hasattr(args, name)]
    if given:
        raise ConfigError(f"{', '.join(given)} without --manifest, which lists the concepts; pass --manifest FILE.yaml")


def _told(args: argparse.Namespace) -> Manifest:
    given = given_fields(args, TrainConfig)
    own = [f"--{name}" for name in (*OWN, "resume_from_checkpoint") if name in given]
    own += [] if args.config is None else ["--config"]
    if own:
        raise ConfigError(f"{', '.join(own)} with --manifest, expected options that all concepts share; write it into {args.manifest}")
    manifest = read_manifest(args.manifest, given)
    loading = {name: getattr(args, name, manifest.loading[name]) for name in LOADING}
    loading["dtype"] = dtype_for(loading["dtype"])
    return Manifest(
        manifest.configs,
        loading,
        manifest.output_dir,
        getattr(args, "concepts_together", manifest.concepts_together),
        getattr(args, "library", manifest.library),
    )


def run_manifest(args: argparse.Namespace, load: Any) -> int:
    """Runs `train --manifest`; every process of `accelerate launch` does. Returns 1 where a concept failed.

    Args:
        load: what loads the pipeline, from (loading, device).
    """
    rank = local_rank()
    try:
        return _run(args, load, rank)
    except FaultsError as error:
        if rank == 0:
            for fault in error.faults:
                print(f"tiny-engram: {fault}", file=sys.stderr)
            print("tiny-engram: nothing was begun", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace, load: Any, rank: int) -> int:
    manifest = _told(args)
    if args.print_config:
        if rank == 0:
            print(manifest_text(manifest), end="")
        return 0
    # folders are looked at before anything heavy is imported or loaded: a wrong path should not cost a minute
    from tiny_engram.training.faults import faults_of, labels_of

    raise_faults(faults_of(manifest.configs, labels_of(manifest.configs)))
    import torch

    from tiny_engram.training.groups import TOGETHER
    from tiny_engram.training.many import add_to_library, train_concepts
    from tiny_engram.training.summary import summary_table, write_summary

    pipe = load(manifest.loading, device_for(manifest.loading["device"]))
    together = TOGETHER if manifest.concepts_together is None else manifest.concepts_together
    try:
        outcomes = train_concepts(
            pipe, manifest.configs, concepts_together=together, again=getattr(args, "again", False), loaded=manifest.loading
        )
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if rank == 0:
        print(summary_table(outcomes))
        print(f"{write_summary(manifest.output_dir, outcomes)}: all of them on one page")
        if manifest.library is not None:
            print(f"{manifest.library}: {add_to_library(manifest.library, outcomes)} concepts")
    return 1 if any(outcome.error is not None for outcome in outcomes) else 0
