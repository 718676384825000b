"""The search for triggers, against a search one by one, and word boundaries against EdgeTables' own rule."""

import random

import numpy as np
import pytest
import torch

from tiny_engram.boundaries import FREE, EdgeTables
from tiny_engram.llm.fact_index import NOWHERE, FactIndex, Key
from tiny_engram.llm.history import BLOCKED


@pytest.fixture(scope="module")
def edges(tokenizer):
    return EdgeTables.of(tokenizer)


def one_by_one(edges: EdgeTables, keys: list[Key], ids: list[int], owner: int | None) -> list[int]:
    """The rule as it is written: at each token the longest key that ends there, one's own first, its first token beginning a word."""
    found = []
    for end in range(1, len(ids) + 1):
        fits = []
        for key in keys:
            start = end - len(key.ids)
            if start < 0 or tuple(ids[start:end]) != key.ids or key.owner not in (0, owner if owner is not None else 0):
                continue
            left = np.array([ids[start - 1] if start else -1])
            if edges.between(left, np.array([key.ids[0]]), trigger_on_left=False)[0] == FREE:
                fits.append((len(key.ids), key.owner != 0, key.slot))
        found.append(max(fits)[2] if fits else NOWHERE)
    return found


def test_as_a_search_one_by_one(edges):
    draw = random.Random(5)
    keys: dict[tuple[int, tuple[int, ...]], Key] = {}
    for slot in range(60):
        ids = tuple(draw.randrange(250, 262) for _ in range(draw.choice((1, 2, 2, 3, 5))))
        owner = draw.choice((0, 0, 7, 2**61 + 5))
        keys.setdefault((owner, ids), Key(owner, ids, slot))
    index = FactIndex(edges)
    index.rebuild([*keys.values()])
    assert index.reach == 5
    owners = [0, 7, 2**61 + 5, 12]
    texts = [[draw.randrange(248, 264) for _ in range(200)] for _ in owners]
    ids, before = torch.tensor(texts), torch.full((len(owners), 9), BLOCKED)
    for whose in (owners, None):
        wanted = [one_by_one(edges, [*keys.values()], text, whose[k] if whose else None) for k, text in enumerate(texts)]
        tensor = None if whose is None else torch.tensor(whose)
        assert sum(slot != NOWHERE for row in wanted for slot in row) > 50
        assert index.everywhere(ids, before, tensor).tolist() == wanted
        places = index.places(ids, before, tensor)
        assert places is not None
        sparse = torch.full(ids.shape, NOWHERE)
        sparse[places[0], places[1]] = places[2]
        assert sparse.tolist() == wanted
        # Token by token, with what came before beside it.
        whole = torch.cat((before, ids), dim=1)
        steps = [index.everywhere(ids[:, t : t + 1], whole[:, t : t + 9], tensor) for t in range(ids.shape[1])]
        assert torch.cat(steps, dim=1).tolist() == wanted


def test_the_left_boundary_is_that_of_edge_tables(edges, tokenizer):
    index = FactIndex(edges)
    everything = np.arange(len(tokenizer))
    for first in (tokenizer.convert_tokens_to_ids(token) for token in ("a", "Ġthe", "-", "4", "_", "Ċ")):
        index.rebuild([Key(0, (first, 300), 0)])
        ids = torch.tensor([[left, first, 300] for left in everything.tolist()])
        slots = index.everywhere(ids, torch.full((len(ids), 2), BLOCKED), None)[:, 2]
        free = edges.between(everything, np.full_like(everything, first), trigger_on_left=False) == FREE
        assert (slots == 0).tolist() == free.tolist()
        alone = torch.tensor([[first, 300]])
        assert index.everywhere(alone, torch.full((1, 2), BLOCKED), None)[0, 1] == 0


def test_blocked_tokens_are_in_no_trigger(edges):
    index = FactIndex(edges)
    index.rebuild([Key(0, (260, 261), 3)])
    before = torch.full((1, 4), BLOCKED)
    assert index.everywhere(torch.tensor([[260, 261, 260, BLOCKED, 261]]), before, None).tolist() == [[-1, 3, -1, -1, -1]]
    assert index.places(torch.tensor([[BLOCKED, 261, 5]]), before, None) is None


def test_keys_come_and_go(edges):
    index = FactIndex(edges)
    assert index.longest == 0
    index.rebuild([Key(0, (260, 261), 3)])
    index.rebuild([])
    assert index.longest == 0 and index.reach == 1


def test_ten_thousand_triggers_cost_hardly_more_than_ten(edges):
    """The number of operations must not grow with the number of triggers: counted, since times on a busy machine say little."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    draw = random.Random(1)
    ids, before = torch.tensor([[draw.randrange(300) for _ in range(64)]]), torch.full((1, 4), BLOCKED)
    counts = []
    for size in (10, 10_000):
        index = FactIndex(edges)
        keys = {tuple(draw.randrange(300) for _ in range(4)) for _ in range(size)}
        index.rebuild([Key(0, key, slot) for slot, key in enumerate(keys)])
        with Counted() as counted:
            index.everywhere(ids, before, None)
        counts.append(counted.calls)
    assert counts[0] == counts[1]
