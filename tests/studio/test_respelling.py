"""Aliases of a taught concept: which rows they read, and what makes no sense."""

import pytest
import torch

from tiny_engram.concept import Concept
from tiny_engram.errors import TinyEngramError

MOUNT = "span"


def fires(adapter, concept: Concept, word: str) -> bool:
    ids = adapter.pipe.tokenizer(f"a photo of {word} here", return_tensors="pt").input_ids
    return len(adapter.spans(concept, ids).start) > 0


def rows_of(concept: Concept, spelling: str) -> torch.Tensor:
    place = concept.roles["clip_l"]
    group = next(g for g in place.groups if g.text.lower() == spelling)
    return place.mounts[MOUNT].rows()[group.offset : group.offset + len(group.canonical)]


def test_aliases_come_and_go(library, attached, emptied, made):
    _, adapter = attached
    id = library.add(made)
    library.add_alias(id, "  fwop ", adapter)
    now = library.get(id)
    assert now.aliases == ("quib", "fwop") and now.untrained == ("fwop",) and fires(adapter, now, "fwop")
    library.remove_alias(id, "quib", adapter)
    now = library.get(id)
    assert now.aliases == ("fwop",) and not fires(adapter, now, "quib") and fires(adapter, now, "zorblax") and fires(adapter, now, "fwop")
    assert torch.equal(rows_of(now, "zorblax"), rows_of(made, "zorblax"))
    library.remove_alias(id, "fwop", adapter)
    now = library.get(id)
    assert now.aliases == () == now.untrained and now.thumbnail == made.thumbnail
    adapter.load_concept(now)  # still one that the pipeline takes


def test_a_renamed_alias_keeps_its_rows_where_they_fit(library, attached, emptied, made):
    _, adapter = attached
    tokens = {word: len(adapter.compile(word)["clip_l"].groups[0].canonical) for word in ("quib", "vorp", "zorblaxian-thing")}
    assert tokens["quib"] == tokens["vorp"] != tokens["zorblaxian-thing"]
    id = library.add(made)
    library.rename_alias(id, "quib", "vorp", adapter)
    now = library.get(id)
    assert now.aliases == ("vorp",) and now.untrained == ("vorp",)
    assert torch.equal(rows_of(now, "vorp"), rows_of(made, "quib")) and torch.equal(rows_of(now, "zorblax"), rows_of(made, "zorblax"))
    assert fires(adapter, now, "vorp") and not fires(adapter, now, "quib")
    library.rename_alias(id, "vorp", "zorblaxian-thing", adapter)
    now = library.get(id)
    long, trigger = rows_of(now, "zorblaxian-thing"), rows_of(made, "zorblax")
    assert torch.equal(long[0], trigger[0]) and torch.equal(long[-1], trigger[-1]) and now.untrained == ("zorblaxian-thing",)
    adapter.load_concept(now)


def test_aliases_that_make_no_sense_change_nothing(library, workspace, attached, made):
    _, adapter = attached
    id = library.add(made)
    before = (workspace.concepts / f"{id}.safetensors").read_bytes()
    for call, line in (
        (lambda: library.rename_alias(id, "none", "wumb", adapter), r"no alias 'none'; its aliases: 'quib'"),
        (lambda: library.rename_alias(id, "zorblax", "wumb", adapter), "no alias 'zorblax'"),
        (lambda: library.rename_alias(id, "quib", "zorblax", adapter), "has the spelling 'zorblax' already"),
        (lambda: library.rename_alias(id, "quib", "ZORBLAX", adapter), "token ids of a spelling|no alias is needed"),
        (lambda: library.rename_alias(id, "quib", "...", adapter), "all punctuation"),
        (lambda: library.rename_alias(id, "quib", "x" * 201, adapter), "201 characters"),
        (lambda: library.add_alias(id, "Quib", adapter), "no alias is needed"),
        (lambda: library.add_alias(id, "", adapter), "is empty"),
        (lambda: library.remove_alias(id, "none", adapter), "no alias 'none'"),
    ):
        with pytest.raises(TinyEngramError, match=line):
            call()
        assert (workspace.concepts / f"{id}.safetensors").read_bytes() == before
