"""The file of facts: one safetensors file, their rows beside a description of them, written whole or not at all and read with bounds.

Imports torch, concept_file, errors, wording and neighbours.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tiny_engram import concept_file
from tiny_engram.errors import TinyEngramError
from tiny_engram.wording import shown

from .fact_config import FactsConfig
from .fact_lock import locked
from .fact_spelling import Fact, Spelled, owner_number

__all__ = ["Saved", "calls", "check_made_alike", "find_saved", "merge_facts", "read_facts", "remove_facts", "write_facts"]

KIND = "facts"
FORMAT = 1
_MOST_KEYS, _MOST_IDS = 10_000, 64

Saved = tuple[Spelled, float, int]  # with the margin and the steps of its teaching


def write_facts(path: Path, config: FactsConfig, saved: Sequence[Saved], payload: torch.Tensor, scale: torch.Tensor) -> Path:
    """payload float8_e4m3fn `[facts, layers, columns, head_dim]`, scale uint8 `[..., head_dim / 32]`, in the order of `saved`.

    Raises:
        ConceptFileError: it cannot be written, or is too large.
    """
    about = [
        {
            "trigger": each.fact.trigger,
            "answer": each.fact.answer,
            "prompt": each.fact.prompt,
            "aliases": list(each.fact.aliases),
            "owner": each.fact.owner,
            "ids": [list(key) for key in each.keys],
            "canonical": list(each.canonical),
            "margin": round(margin, 4),
            "steps": steps,
        }
        for each, margin, steps in saved
    ]
    # As a tensor: a header has bounds that a few thousand facts would pass.
    text = torch.frombuffer(bytearray(json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()), dtype=torch.uint8)
    described = {"format": FORMAT, "kind": KIND, "config": config.to_dict(), "facts": len(saved)}
    tensors = {"facts": text, "payload": payload.contiguous(), "scale": scale.contiguous()}
    return concept_file.write(path, tensors, {concept_file.KEY: json.dumps(described, separators=(",", ":")), "format": "pt"})


def read_facts(path: str | Path) -> tuple[FactsConfig, list[Saved], torch.Tensor, torch.Tensor]:
    """What `write_facts` wrote.

    Raises:
        TinyEngramError: no such file, a damaged one, or one of something else.
    """
    path = Path(path)
    tensors, described, _ = concept_file.read(path, "facts")
    if described.get("kind") != KIND:
        raise TinyEngramError(
            f"{path}: holds {described.get('kind', 'a concept')!r}, expected facts; it is for tiny-engram generate, perhaps"
        )
    try:
        config = FactsConfig.from_dict(described["config"])
        payload, scale = tensors["payload"], tensors["scale"]
        about = json.loads(bytes(tensors["facts"].tolist()))
        shape = (described["facts"], len(config.layers or ()), config.columns, config.head_dim)
        if tuple(payload.shape) != shape or payload.dtype != torch.float8_e4m3fn:
            raise ValueError(f"rows {list(payload.shape)} for {list(shape)}")
        if tuple(scale.shape) != (*shape[:-1], shape[-1] // 32) or scale.dtype != torch.uint8:
            raise ValueError(f"scales {list(scale.shape)} for rows {list(shape)}")
        if len(about) != shape[0]:
            raise ValueError(f"{len(about)} facts described, {shape[0]} held")
        saved = [_saved(each) for each in about]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TinyEngramError(f"{path}: not a sound facts file ({' '.join(str(error).split())[:200]}); copy it again") from error
    return config, saved, payload, scale


def check_made_alike(path: Path, theirs: FactsConfig, ours: FactsConfig) -> None:
    """Raises TinyEngramError: the facts of a file were taught to another model or tokenizer, or in another shape of rows."""
    for name in ("layers", "max_ngram", "head_dim", "vocab", "rho", "basis_seed", "hidden", "depth", "fingerprint"):
        one, other = getattr(theirs, name), getattr(ours, name)
        if one != other:
            what = "tokenizer" if name == "fingerprint" else "model" if name in ("hidden", "depth") else "configuration"
            raise TinyEngramError(f"{path}: its facts have {name} {one!r}, this {what} has {other!r}; load them where they were taught")


def calls(facts: Sequence[Fact], trigger: str) -> list[int]:
    """Which facts a spelling of their triggers calls, in whatever case, whoever's."""
    wanted = " ".join(str(trigger).split()).lower()
    return [k for k, fact in enumerate(facts) if wanted in (spelling.lower() for spelling in fact.spellings)]


def find_saved(facts: Sequence[Fact], trigger: str, owner: str | None, *, option: str = "owner={!r}", where: str = "") -> int:
    """Which fact of an owner a spelling of its trigger calls, in whatever case.

    Args:
        option: how the caller is told to name an owner.
        where: in front of the error.

    Raises:
        TinyEngramError: none; it says who has one.
    """
    number, called = owner_number(owner), calls(facts, trigger)
    for k in called:
        if owner_number(facts[k].owner) == number:
            return k
    whose = "" if owner is None else f" of {owner!r}"
    if called:
        names = [facts[k].owner for k in called]
        has = ", ".join("everybody's" if name is None else f"that of {name!r}" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        way = f"give {option.format(names[0])}" if names[0] is not None else f"leave {option.partition('=')[0].partition(' ')[0]} out"
        raise TinyEngramError(f"{where}no fact{whose or ' of everybody'} has the trigger {shown(trigger)}, but there is {has}{more}; {way}")
    known = [shown(fact.trigger) for fact in facts if owner_number(fact.owner) == number]
    listed = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
    raise TinyEngramError(f"{where}no fact{whose} has the trigger {shown(trigger)}; known: {listed or 'none'}")


def merge_facts(
    path: Path, config: FactsConfig, saved: Sequence[Saved], payload: torch.Tensor, scale: torch.Tensor, *, instead_of: Fact | None = None
) -> tuple[list[Fact], int]:
    """Put facts into a file beside those that are in it by now, whoever wrote them; it is made where there is none.

    Args:
        saved, payload, scale: as `write_facts` takes them.
        instead_of: a fact of the file that they come in place of.

    Returns:
        Those that are not in it, since a spelling of theirs calls another fact there; and how many facts it holds.

    Raises:
        TinyEngramError: the file is of something else, cannot be written, is written by another process for long, or holds `instead_of`
            no more.
    """
    with locked(path):
        if path.exists():
            theirs, held, rows, scales = read_facts(path)
            check_made_alike(path, theirs, config)
            config = theirs
        else:
            held, rows, scales = [], payload[:0], scale[:0]
        kept = list(range(len(held)))
        if instead_of is not None:
            kept = [k for k in kept if held[k][0].fact != instead_of]
            if len(kept) == len(held):
                raise TinyEngramError(
                    f"{path}: another process changed {shown(instead_of.trigger)} meanwhile; look at it with facts list, then edit it again"
                )
        taken = {(owner_number(held[k][0].fact.owner), key) for k in kept for key in held[k][0].keys}
        new = [k for k, (each, _, _) in enumerate(saved) if not any((owner_number(each.fact.owner), key) in taken for key in each.keys)]
        whole = [*(held[k] for k in kept), *(saved[k] for k in new)]
        if new or instead_of is not None:
            bits = torch.cat((rows.view(torch.uint8)[kept], payload.view(torch.uint8)[new]))
            write_facts(path, config, whole, bits.view(payload.dtype), torch.cat((scales[kept], scale[new])))
    return [each.fact for k, (each, _, _) in enumerate(saved) if k not in set(new)], len(whole)


def remove_facts(path: Path, triggers: Sequence[str], owner: str | None) -> tuple[int, int]:
    """Forget the facts of an owner that these spellings call; how many they were, and how many are left.

    Raises:
        TinyEngramError: one of them calls none, and nothing is removed; or as `merge_facts`.
    """
    with locked(path):
        config, held, rows, scales = read_facts(path)
        facts = [each.fact for each, _, _ in held]
        gone = {find_saved(facts, trigger, owner, option="--owner {!r}", where=f"{path}: ") for trigger in triggers}
        kept = [k for k in range(len(held)) if k not in gone]
        write_facts(path, config, [held[k] for k in kept], rows.view(torch.uint8)[kept].view(rows.dtype), scales[kept])
    return len(gone), len(kept)


def _saved(each: dict[str, Any]) -> Saved:
    fact = Fact(each["trigger"], each["answer"], each["prompt"], tuple(each["aliases"]), each["owner"])
    keys = tuple(tuple(key) for key in each["ids"])
    canonical = tuple(each["canonical"])
    sound = 0 < len(keys) <= _MOST_KEYS and all(0 < len(key) <= _MOST_IDS for key in (*keys, canonical))
    if not sound or not all(isinstance(i, int) and 0 <= i < 2**31 for key in (*keys, canonical) for i in key):
        raise ValueError(f"token ids of {fact.trigger!r}")
    return Spelled(fact, keys, canonical, ()), float(each["margin"]), int(each["steps"])
