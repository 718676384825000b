"""Whatever is done to a cache, in any order, what comes next is what one full pass over its rows gives."""

import copy
import pickle
import random

import pytest
import torch
from transformers import DynamicCache

pytestmark = pytest.mark.usefixtures("no_gradients")

LONGEST = 100


class Rows:
    """A cache, and beside it the ids and the mask of what is in it, to which the same is done."""

    def __init__(self, model, batch, padding):
        self.cache = DynamicCache(config=model.config)
        self.ids = torch.zeros((batch, 0), dtype=torch.int64)
        self.mask = torch.zeros_like(self.ids)
        self.padding = padding  # tokens on the left, of each row
        self.newest = 0  # tokens of the last call, which a cache with a window can be cropped by

    def take(self, change):
        """Apply `change`, of a batch, to all but the cache."""
        self.ids, self.mask, self.padding = change(self.ids), change(self.mask), change(self.padding)

    def crop(self, draw):
        count = draw.randint(0, min(self.newest, self.ids.shape[1] - 1))
        self.cache.crop(-count)
        stop = self.ids.shape[1] - count
        self.ids, self.mask = self.ids[:, :stop], self.mask[:, :stop]

    def reorder(self, draw):
        chosen = torch.tensor([draw.randrange(len(self.ids)) for _ in self.ids])
        self.cache.reorder_cache(chosen)
        self.take(lambda values: values[chosen])

    def select(self, draw):
        chosen = torch.tensor(draw.sample(range(len(self.ids)), draw.randint(1, len(self.ids))))
        self.cache.batch_select_indices(chosen)
        self.take(lambda values: values[chosen])

    def repeat(self, draw):
        self.cache.batch_repeat_interleave(2)
        self.take(lambda values: values.repeat_interleave(2, dim=0)[:4])
        self.cache.batch_select_indices(torch.arange(len(self.ids)))

    def duplicate(self, draw):
        self.cache = copy.deepcopy(self.cache) if draw.random() < 0.5 else pickle.loads(pickle.dumps(self.cache))


@pytest.mark.parametrize("kind", ("llama", "mistral", "gemma2"))
@pytest.mark.parametrize("seed", range(4))
def test_in_any_order(build, attach, tokenizer, kind, seed):
    model, draw = build(kind), random.Random(f"{kind} {seed}")
    attach(model, form="paper", branches=2, seed=3, blocked_ids=(5,))
    attach(model, form="v41", layers=(0, 3), seed=4, max_ngram=4)
    batch = draw.randint(1, 3)
    rows = Rows(model, batch, torch.tensor([draw.choice((0, 0, 2, 5)) for _ in range(batch)]))
    if kind != "llama":
        rows.cache.activate_past_recording()
    done = []
    for _ in range(14):
        size = draw.choice((1, 1, 2, 3, 7))
        if rows.ids.shape[1] + size > LONGEST:
            break
        place = rows.ids.shape[1] + torch.arange(size)
        new = torch.tensor([[draw.randrange(4, len(tokenizer)) for _ in range(size)] for _ in rows.ids])
        seen = (place >= rows.padding[:, None]).long()
        if rows.cache.get_seq_length() and kind != "llama":
            rows.cache.crop(0)  # what recording has kept of earlier calls
        rows.ids, rows.mask = torch.cat((rows.ids, new), dim=1), torch.cat((rows.mask, seen), dim=1)
        places = (rows.mask.cumsum(1) - 1).clamp(min=0)
        found = model(new, attention_mask=rows.mask, position_ids=places[:, -size:], cache=rows.cache).logits
        whole = model(rows.ids, attention_mask=rows.mask, position_ids=places, use_cache=False).logits
        apart = (found - whole[:, -size:])[seen == 1].abs()
        assert not apart.numel() or float(apart.max()) <= 2e-5 * float(whole.abs().max()), done
        rows.newest = size
        done.append((size, name := draw.choice(("crop", "reorder", "select", "repeat", "duplicate", ""))))
        if name:
            getattr(rows, name)(draw)
