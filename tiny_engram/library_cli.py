"""The command line of libraries: `tiny-engram library create | add | remove | list | verify | export | compact`.

Imports errors and wording, and library in the verbs.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny_engram.errors import TinyEngramError
from tiny_engram.wording import counted, shown

__all__ = ["add_library_verbs", "run_library_verb"]


def add_library_verbs(parser: argparse.ArgumentParser) -> None:
    """Adds the seven verbs below `library`."""
    verbs = parser.add_subparsers(dest="library_verb", required=True, metavar="VERB")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("library", type=Path, help="the library's file")
        return verb

    add("create", "a new, empty library")

    adding = add("add", "add concepts, all or none")
    adding.add_argument("concept", nargs="+", help="a concept file, a folder of them, or a Hub id")
    adding.add_argument("--name", help="of one concept, its name here (default: the concept's own)")

    removing = add("remove", "remove concepts, all or none; compact gives their space back")
    removing.add_argument("name", nargs="+")

    add("list", "its concepts: name, trigger, bytes and base").add_argument("--json", action="store_true")

    verifying = add("verify", "compare concepts with their checksums")
    verifying.add_argument("name", nargs="*", help="those to compare (default: all, and the index)")

    exporting = add("export", "write a concept's file as it was added")
    exporting.add_argument("name")
    exporting.add_argument("target", type=Path, help="the file that is written")

    add("compact", "write the library anew without what was removed")


class _Progress:
    """One line on stderr, where somebody watches."""

    def __init__(self, what: str) -> None:
        self._what, self._said = what, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and (now - self._said > 0.5 or done == total):
            self._said = now
            of = "" if total is None else f" of {total:,}"
            print(f"\r{self._what} {done:,}{of} ", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _sources(given: list[str]) -> Iterator[str | Path]:
    """What is named, and all concept files of a folder, in the order of their names."""
    for each in given:
        if not Path(each).is_dir():
            yield each
            continue
        found = sorted(Path(each).glob("*.safetensors"))
        if not found:
            raise TinyEngramError(f"{each}: holds no .safetensors file, expected concepts")
        yield from found


def _create(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    ConceptLibrary.create(args.library)
    print(f"{args.library}: an empty library")


def _add(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    sources = list(_sources(args.concept))
    if args.name is not None and len(sources) != 1:
        raise TinyEngramError(f"--name {args.name!r} with {len(sources)} concepts, expected one; leave it out")
    with ConceptLibrary.open(args.library) as library:
        wanted = sources if args.name is None else [(sources[0], args.name)]
        names = library.add_many(wanted, _Progress("added"))
        added = ", ".join(map(shown, names[:4])) + (", ..." if len(names) > 4 else "")
        print(f"{args.library}: added {counted(len(names), 'concept')} ({added}), holds {len(library):,}")


def _remove(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    with ConceptLibrary.open(args.library) as library:
        library.remove(*args.name)
        print(f"{args.library}: removed {counted(len(args.name), 'concept')}, holds {len(library):,}")


def _list(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    with ConceptLibrary.open(args.library) as library:
        if args.json:
            print(json.dumps([_described(entry) for entry in library], indent=1))
            return
        for entry in library:
            print(f"{entry.name}  {entry.trigger!r}  {entry.nbytes:,} bytes  base {entry.base or 'unnamed'}")
        if not len(library):
            print(f"no concepts in {args.library}")


def _described(entry: Any) -> dict[str, Any]:
    return {
        "name": entry.name,
        "trigger": entry.trigger,
        "bytes": entry.nbytes,
        "base": entry.base,
        "roles": {role: {"width": width, "tokenizer": fingerprint} for role, width, fingerprint in entry.kind.roles},
        "sha256": entry.digest.hex(),
    }


def _verify(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    with ConceptLibrary.open(args.library) as library:
        count = sum(map(library.verify, args.name)) if args.name else library.verify(progress=_Progress("verified"))
        what = "" if args.name else " and the index"
        print(f"{args.library}: sound, {counted(count, 'concept')}{what} compared")


def _export(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    with ConceptLibrary.open(args.library) as library:
        library.export(args.name, args.target)
        print(f"{args.target}: concept {shown(args.name)}, {args.target.stat().st_size:,} bytes")


def _compact(args: argparse.Namespace) -> None:
    from tiny_engram.library import ConceptLibrary

    with ConceptLibrary.open(args.library) as library:
        saved = library.compact(_Progress("copied"))
        print(f"{args.library}: {counted(len(library), 'concept')}, {args.library.stat().st_size:,} bytes, {saved:,} less than before")


_VERBS = {
    "create": _create,
    "add": _add,
    "remove": _remove,
    "list": _list,
    "verify": _verify,
    "export": _export,
    "compact": _compact,
}


def run_library_verb(args: argparse.Namespace) -> int:
    """Runs one of them; returns the exit code. Raises TinyEngramError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    _VERBS[args.library_verb](args)
    return 0
