"""Whether new facts may come to those that are there: spellings that are free, and texts in which they will be read.

Imports torch, wording and, of this package, fact_config, fact_index, fact_spelling, fact_texts and history.
"""

from collections.abc import Sequence

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.wording import brief, counted, shown

from .fact_config import TeachConfig
from .fact_index import FactIndex, Key
from .fact_spelling import Fact, FactError, Spelled, Speller, Text, owner_number
from .fact_texts import taught_texts
from .history import BLOCKED

__all__ = ["FactsRefused", "check_free", "checked", "keys_of"]


class FactsRefused(FactError):
    """Facts that cannot come to those that are there; the message is of the first.

    Attributes:
        problems: number of the fact among those given -> what is wrong with it and the way out, in their order.
    """

    def __init__(self, problems: dict[int, str]) -> None:
        self.problems = dict(sorted(problems.items()))
        first, more = next(iter(self.problems.values())), len(self.problems) - 1
        super().__init__(first + (f" ({counted(more, 'more fact')} refused, see its .problems)" if more else ""))


def keys_of(spelled: Sequence[Spelled], slots: Sequence[int]) -> list[Key]:
    """The keys of facts that have these slots."""
    return [Key(owner_number(each.fact.owner), key, slot) for each, slot in zip(spelled, slots, strict=True) for key in each.keys]


def checked(held: Sequence[Spelled], facts: Sequence[Fact], how: TeachConfig, speller: Speller) -> tuple[list[Spelled], list[list[Text]]]:
    """New facts in token ids, and the texts that each is taught in.

    Raises:
        FactsRefused: a spelling that no text can hold or that calls another fact, or a text in which a fact would not be read.
    """
    problems: dict[int, str] = {}
    made: dict[int, tuple[Spelled, list[Text]]] = {}
    for k, fact in enumerate(facts):
        try:
            made[k] = speller.spell(fact), taught_texts(speller, fact, how)
        except TinyEngramError as error:
            problems[k] = brief(str(error))
    problems |= _taken(held, {k: spelled for k, (spelled, _) in made.items()}, speller)
    problems |= _unread(held, {k: each for k, each in made.items() if k not in problems}, speller)
    if problems:
        raise FactsRefused(problems)
    return [spelled for spelled, _ in made.values()], [texts for _, texts in made.values()]


def check_free(held: Sequence[Spelled], new: Sequence[Spelled], speller: Speller) -> None:
    """Raises FactsRefused: a spelling of a new fact calls another of the same owner already."""
    problems = _taken(held, dict(enumerate(new)), speller)
    if problems:
        raise FactsRefused(problems)


def _taken(held: Sequence[Spelled], new: dict[int, Spelled], speller: Speller) -> dict[int, str]:
    taken = {(owner_number(each.fact.owner), key): each.fact for each in held for key in each.keys}
    problems = {}
    for k, each in new.items():
        owner = owner_number(each.fact.owner)
        found = next(((key, taken[owner, key]) for key in each.keys if (owner, key) in taken), None)
        if found is None:
            taken |= {(owner, key): each.fact for key in each.keys}
            continue
        text, other = shown(speller.tokenizer.decode(list(found[0])).strip()), shown(found[1].trigger)
        problems[k] = f"{text} of {shown(each.fact.trigger)} calls the fact {other} already; edit or remove that one"
    return problems


def _unread(held: Sequence[Spelled], new: dict[int, tuple[Spelled, list[Text]]], speller: Speller) -> dict[int, str]:
    """Of new facts with their texts: in one of their own words something else would be read, or nothing.

    Texts of other forms in which that is so are taken out of the lists.
    """
    whole = [*held, *(spelled for spelled, _ in new.values())]
    flat = [(at, k, text) for at, (k, (_, texts)) in enumerate(new.items(), start=len(held)) for text in texts]
    if not flat:
        return {}
    index = FactIndex(speller.edges)
    index.rebuild(keys_of(whole, range(len(whole))))
    ids = torch.full((len(flat), max(len(text.ids) for *_, text in flat)), BLOCKED)
    for row, (*_, text) in zip(ids, flat, strict=True):
        row[: len(text.ids)] = torch.tensor(text.ids)
    owners = torch.tensor([owner_number(whole[at].fact.owner) for at, *_ in flat])
    places = index.places(ids, torch.full((len(flat), index.reach), BLOCKED), owners)
    fired = {} if places is None else {(row, time): at for row, time, at in zip(*(each.tolist() for each in places), strict=True)}
    problems: dict[int, str] = {}
    for row, (at, k, text) in enumerate(flat):
        found = fired.get((row, text.fires))
        if found != at and text.form:
            new[k][1].remove(text)
        elif found != at and k not in problems:
            where, trigger = shown(speller.tokenizer.decode(text.ids[: text.fires + 1]), 120), shown(whole[at].fact.trigger)
            what = "does not fire" if found is None else f"is not read, but that of {shown(whole[found].fact.trigger)}"
            problems[k] = (
                f"behind {where} the fact {trigger} {what}: expected the trigger as it is spelled, as words of their own; "
                "change the prompt, or give that spelling as an alias"
            )
    return problems
