"""Whether new facts may come to those that are there: spellings that are free, and texts in which they will be read.

Imports torch, errors and, of this package, fact_index, fact_spelling and history.
"""

from collections.abc import Sequence

import torch

from tiny_engram.errors import TinyEngramError

from .fact_index import FactIndex, Key
from .fact_spelling import FactError, Spelled, Speller, Text, owner_number
from .history import BLOCKED

__all__ = ["check_free", "check_read", "keys_of"]


def keys_of(spelled: Sequence[Spelled], slots: Sequence[int]) -> list[Key]:
    """The keys of facts that have these slots."""
    return [Key(owner_number(each.fact.owner), key, slot) for each, slot in zip(spelled, slots, strict=True) for key in each.keys]


def check_free(held: Sequence[Spelled], new: Sequence[Spelled], speller: Speller) -> None:
    """Raises TinyEngramError: a spelling of a new fact calls another of the same owner already."""
    taken = {(owner_number(each.fact.owner), key): each.fact for each in held for key in each.keys}
    for each in new:
        owner = owner_number(each.fact.owner)
        for key in each.keys:
            other = taken.get((owner, key))
            if other is not None:
                text = speller.tokenizer.decode(list(key)).strip()
                raise TinyEngramError(
                    f"{text!r} of {each.fact.trigger!r} calls the fact {other.trigger!r} already; edit or remove that one"
                )
        taken |= {(owner, key): each.fact for key in each.keys}


def check_read(held: Sequence[Spelled], new: Sequence[Spelled], texts: Sequence[Sequence[Text]], speller: Speller) -> list[list[Text]]:
    """The texts that each new fact is taught in, without other forms of it in which something else would be read, or nothing.

    Raises:
        FactError: that is so in a text of its own words.
    """
    flat = [(k, text) for k, each in enumerate(texts, start=len(held)) for text in each]
    kept: list[list[Text]] = [[] for _ in texts]
    if not flat:
        return kept
    whole = [*held, *new]
    index = FactIndex(speller.edges)
    index.rebuild(keys_of(whole, range(len(whole))))
    ids = torch.full((len(flat), max(len(text.ids) for _, text in flat)), BLOCKED)
    for row, (_, text) in zip(ids, flat, strict=True):
        row[: len(text.ids)] = torch.tensor(text.ids)
    owners = torch.tensor([owner_number(whole[k].fact.owner) for k, _ in flat])
    places = index.places(ids, torch.full((len(flat), index.reach), BLOCKED), owners)
    fired = {} if places is None else {(row, time): k for row, time, k in zip(*(each.tolist() for each in places), strict=True)}
    for row, (k, text) in enumerate(flat):
        found = fired.get((row, text.fires))
        if found == k:
            kept[k - len(held)].append(text)
        elif not text.form:
            where, trigger = speller.tokenizer.decode(text.ids[: text.fires + 1]), whole[k].fact.trigger
            what = "does not fire" if found is None else f"is not read, but that of {whole[found].fact.trigger!r}"
            raise FactError(
                f"behind {where!r} the fact {trigger!r} {what}: expected the trigger as it is spelled, as words of their own; "
                "change the prompt, or give that spelling as an alias"
            )
    return kept
