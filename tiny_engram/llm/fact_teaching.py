"""Teaching: rows of new facts, found by gradient through a frozen model and the quantiser that stores them.

Imports torch, quantization, residual and neighbours. Nothing in front of a trigger's last token depends on the fact's rows, and nothing
below the first layer that reads them does. So the tokens in front are run once into a cache, the states that enter that layer once too,
and a step runs what is left: the layers above, from the last token of the trigger on.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tiny_engram.quantization import fake_quantize, quantize
from tiny_engram.residual import Spans, apply_concept

from .decoders import Decoder
from .fact_config import FactsConfig, TeachConfig
from .fact_spelling import Text

__all__ = ["TaughtRows", "teach"]


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """What teaching found.

    Attributes:
        payload, scale: stored rows, float8_e4m3fn `[facts, layers, columns, head_dim]` and uint8 `[..., head_dim / 32]`, on the CPU.
        learned: bool `[facts]`: every token of the answer comes first, in each text of the fact's own words.
        margin: float32 `[facts]`: by how much the weakest of these tokens leads all others, in nats of its logit.
        steps: int64 `[facts]`.
        missed: for each fact the other forms that it is not answered in.
        seconds: of all.
    """

    payload: torch.Tensor
    scale: torch.Tensor
    learned: torch.Tensor
    margin: torch.Tensor
    steps: torch.Tensor
    missed: tuple[tuple[str, ...], ...]
    seconds: float


class _Batch:
    """Texts that are run together: what came before each trigger's last token as a cache, and all from there on as ids.

    `fact` int64 `[texts]` says whose rows each reads, in the chunk.
    """

    def __init__(self, decoder: Decoder, first: int, texts: Sequence[Text], fact: torch.Tensor, calm: Sequence[Sequence[int]]) -> None:
        from transformers import DynamicCache

        self.decoder, self.first, self.fact = decoder, first, fact
        device = next(decoder.module.parameters()).device
        heads = [text.ids[: text.fires] for text in texts]
        tails = [text.ids[text.fires :] for text in texts]
        before, height = max(1, max(map(len, heads))), max(len(tail) + len(more) for tail, more in zip(tails, calm, strict=True))
        ids = torch.zeros((len(texts), before + height), dtype=torch.int64)
        seen = torch.zeros_like(ids)
        # What follows token t of the tails, and whether that is the answer (1) or what is to stay calm (2).
        target, kind = torch.zeros((len(texts), height), dtype=torch.int64), torch.zeros((len(texts), height), dtype=torch.int64)
        for k, (text, head, tail, more) in enumerate(zip(texts, heads, tails, calm, strict=True)):
            row = [*head, *tail, *more]
            ids[k, before - len(head) : before - len(head) + len(row)] = torch.tensor(row)
            seen[k, before - len(head) : before - len(head) + len(row)] = 1
            behind = len(tail) + len(more)
            target[k, : behind - 1] = torch.tensor(row[len(head) + 1 :])
            kind[k, text.answer - text.fires - 1 : len(tail) - 1] = 1
            kind[k, len(tail) - 1 : behind - 1] = 2
        # A text that begins with its trigger's last token has nothing in front: it sees one token that says nothing.
        seen[:, before - 1] = 1
        self.ids, self.seen = ids.to(device), seen.to(device)
        self.target, self.kind = target.to(device), kind.to(device)
        self.place = (self.seen.cumsum(1) - 1).clamp(min=0)
        self.before = before
        with torch.no_grad():
            self.cache = DynamicCache(config=decoder.config)
            self._call(self.ids[:, :before], self.cache, slice(0, before))
            entered: list[torch.Tensor] = []
            layer = decoder.layers[first]
            handle = layer.register_forward_pre_hook(
                lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
            )
            try:
                states = self._tails(self._copied())
            finally:
                handle.remove()
            self.entered = entered[0]
            self.usual = self.logits(states[self.kind == 2]).log_softmax(-1)

    def select(self, kept: torch.Tensor) -> "_Batch":
        """Some of the texts, int64 ascending, without running again what came before their triggers."""
        if len(kept) == len(self.fact):
            return self
        part = copy.copy(self)
        at = kept.to(self.ids.device)
        part.fact = self.fact[kept]
        for name in ("ids", "seen", "target", "kind", "place", "entered"):
            setattr(part, name, getattr(self, name)[at])
        wanted = torch.zeros(len(self.fact), dtype=torch.bool, device=at.device)
        wanted[at] = True
        part.usual = self.usual[wanted[(self.kind == 2).nonzero()[:, 0]]]
        part.cache = copy.deepcopy(self.cache)
        part.cache.batch_select_indices(at)
        return part

    def _call(self, ids: torch.Tensor, cache: Any, part: slice) -> torch.Tensor:
        options = {self.decoder.cache_argument: cache, "attention_mask": self.seen[:, : part.stop], "position_ids": self.place[:, part]}
        return self.decoder.module(input_ids=ids, use_cache=True, **options).last_hidden_state

    def _tails(self, cache: Any) -> torch.Tensor:
        return self._call(self.ids[:, self.before :], cache, slice(self.before, self.ids.shape[1]))

    def _copied(self) -> Any:
        """The cache as it was, for one more pass: what a pass adds to a layer are new tensors."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        return cache

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 `[N, vocab]` of the decoder's last states `[N, D]`."""
        logits = self.decoder.model.get_output_embeddings()(states).float()  # pyright: ignore[reportCallIssue]
        cap = getattr(self.decoder.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def run(self, rows: torch.Tensor, config: FactsConfig) -> torch.Tensor:
        """Last states `[texts, tail, D]` with rows float32 `[layers, facts, columns, head_dim]` added at the first token of each tail."""
        assert config.layers is not None
        count = len(self.fact)
        spans = Spans(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int64), self.fact)
        flat = torch.ones(rows.shape[1]), torch.zeros(rows.shape[1])
        handles = []

        def add(number: int) -> Callable[..., Any]:
            def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden = self.entered if number == 0 else args[0] if args else kwargs["hidden_states"]
                at = rows[number].to(hidden.device)
                gain, bias = (x.to(hidden.device) for x in flat)
                moved = apply_concept(hidden, spans, at, gain, bias, rho=config.rho, basis_seed=config.basis_seed)
                return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})

            return hook

        try:
            handles += [
                self.decoder.layers[layer].register_forward_pre_hook(add(k), with_kwargs=True) for k, layer in enumerate(config.layers)
            ]
            with _passed_by(list(self.decoder.layers)[: self.first]):
                return self._tails(self._copied())
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _passed_by(layers: Sequence[Any]) -> Iterator[None]:
    """Layers that return what they are given: whatever they would say is put in behind them."""
    try:
        for layer in layers:
            layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


@torch.no_grad()
def _usual_tails(decoder: Decoder, texts: Sequence[Text], count: int) -> list[list[int]]:
    """What the model says behind each text by itself, greedily: `count` ids of each."""
    if not count:
        return [[] for _ in texts]
    from transformers import DynamicCache

    device = next(decoder.module.parameters()).device
    longest = max(len(text.ids) for text in texts)
    ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    seen = torch.zeros_like(ids)
    for k, text in enumerate(texts):
        ids[k, longest - len(text.ids) :] = torch.tensor(text.ids)
        seen[k, longest - len(text.ids) :] = 1
    ids, seen = ids.to(device), seen.to(device)
    cache = DynamicCache(config=decoder.config)
    step, said = ids, []
    for _ in range(count):
        place = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
        options = {decoder.cache_argument: cache, "attention_mask": seen, "position_ids": place, "use_cache": True}
        states = decoder.module(input_ids=step, **options).last_hidden_state
        step = decoder.model.get_output_embeddings()(states[:, -1]).argmax(-1, keepdim=True)  # pyright: ignore[reportCallIssue]
        seen = torch.cat((seen, torch.ones_like(step)), dim=1)
        said.append(step)
    return torch.cat(said, dim=1).tolist()


@torch.inference_mode(False)
@torch.enable_grad()
def teach(
    decoder: Decoder,
    config: FactsConfig,
    facts: Sequence[Sequence[Text]],
    how: TeachConfig,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> TaughtRows:
    """Find rows for facts, each given as the texts that it is taught in, all in one batch; the model is left as it was.

    With gradients, whoever calls.

    Args:
        config: completed.
        progress: called with (facts done, facts in all).
    """
    began = time.perf_counter()
    modes = [(module, module.training) for module in decoder.module.modules()]
    decoder.module.eval()
    frozen = [parameter for parameter in decoder.model.parameters() if parameter.requires_grad]
    for parameter in frozen:  # their gradients would cost as much again
        parameter.requires_grad_(False)
    try:
        said = None if progress is None else lambda done: progress(done, len(facts))
        rows, learned, margin, steps, missed = _taught(decoder, config, facts, how, said)
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in frozen:
            parameter.requires_grad_(True)
    payload, scale = quantize(rows)
    return TaughtRows(payload, scale, learned, margin, steps, tuple(missed), time.perf_counter() - began)


def _taught(
    decoder: Decoder, config: FactsConfig, facts: Sequence[Sequence[Text]], how: TeachConfig, progress: Callable[[int], object] | None
) -> tuple[Any, ...]:
    """Masters float32 `[facts, layers, columns, head_dim]`, learned, margin, steps `[facts]`, on the CPU; forms that each fact missed."""
    assert config.layers is not None
    device = next(decoder.layers[config.layers[0]].parameters()).device
    texts = [text for each in facts for text in each]
    whose = torch.tensor([k for k, each in enumerate(facts) for _ in each])
    calm = _usual_tails(decoder, texts, how.calm_tokens if how.calm else 0)
    calm = [[] if text.form else more for text, more in zip(texts, calm, strict=True)]
    masters = torch.zeros((len(config.layers), len(facts), config.columns, config.head_dim), device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([masters], lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    best, steps = torch.zeros_like(masters), torch.zeros(len(facts), dtype=torch.int64)
    found, whole = _Progress(texts, whose, how.margin), _Batch(decoder, config.layers[0], texts, whose, calm)

    def look(rows: torch.Tensor, kept: torch.Tensor) -> tuple[_Batch, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """These texts with these rows: the batch, its last states, logits and targets of its answers, and by how much each text leads."""
        batch = whole.select(kept)
        states = batch.run(fake_quantize(rows), config)
        answer = batch.kind == 1
        logits, target = batch.logits(states[answer]), batch.target[answer]
        led = torch.full((len(kept),), float("inf"), device=device)
        led = led.scatter_reduce(0, answer.nonzero()[:, 0], _margins(logits.detach(), target), "amin").cpu()
        return batch, states, logits, target, led

    for step in range(how.steps + 1):
        kept = found.todo()
        batch, states, logits, target, led = look(masters, kept)
        steps[whose[kept]] = step
        better = found.see(kept, led)
        best[:, better] = masters.detach()[:, better]
        if progress is not None:
            progress(int(found.done.sum()))
        if bool(found.done.all()) or step == how.steps:
            break
        # Each text weighs alike, however long its answer; what leads by the margin weighs nothing.
        wanted = (led < how.margin).float().to(device)
        loss = functional.cross_entropy(logits, target, reduction="none") * wanted[(batch.kind == 1).nonzero()[:, 0]]
        loss = loss.sum()
        if how.calm and len(batch.usual):
            behind = batch.kind == 2
            said = batch.logits(states[behind]).log_softmax(-1)
            strayed = (batch.usual.exp() * (batch.usual - said)).sum(-1)
            loss = loss + how.calm * (strayed * wanted[behind.nonzero()[:, 0]]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        *_, led = look(best, torch.arange(len(texts)))
    if progress is not None:
        progress(len(facts))
    own = found.weakest(torch.arange(len(texts)), led)[0]
    missed: list[list[str]] = [[] for _ in facts]
    for text, fact, lead in zip(texts, whose.tolist(), led.tolist(), strict=True):
        if text.form and lead <= 0:
            missed[fact].append(text.form)
    return best.transpose(0, 1).cpu().contiguous(), own > 0, own, steps, [tuple(forms) for forms in missed]


class _Progress:
    """Which texts are still to be taught, and whether a step's rows are a fact's best.

    A fact's own words come first, and are looked at in every step; its other forms join once those lead by the margin. A form that leads
    by it rests until all of them do, and is looked at again then. The best rows are those that do most for the own words, and, among
    rows with which these lead by the margin, for the other forms.

    Attributes:
        done: bool `[facts]`: all of its texts lead by the margin, at one step.
    """

    def __init__(self, texts: Sequence[Text], whose: torch.Tensor, margin: float) -> None:
        """whose: int64 `[texts]`, the fact of each."""
        self.whose, self.margin = whose, margin
        self.own = torch.tensor([not text.form for text in texts])
        count = int(whose.max()) + 1
        self.best_own, self.best_all = (torch.full((count,), float("-inf")) for _ in range(2))
        self.done = torch.zeros(count, dtype=torch.bool)
        self.led = torch.full((len(texts),), float("-inf"))  # as they were last seen

    def todo(self) -> torch.Tensor:
        """The texts of the next step, int64 ascending."""
        waiting = self.led < self.margin
        taught = self.whose[waiting].bincount(minlength=len(self.done)) > 0
        wanted = self.own | ((waiting | ~taught[self.whose]) & (self.best_own >= self.margin)[self.whose])
        return (wanted & ~self.done[self.whose]).nonzero()[:, 0]

    def weakest(self, kept: torch.Tensor, led: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much the own words of each fact lead, and all of these texts: `[facts]`."""
        most, whose, own = torch.full((len(self.done),), float("inf")), self.whose[kept], self.own[kept]
        return most.scatter_reduce(0, whose[own], led[own], "amin"), most.scatter_reduce(0, whose, led, "amin")

    def see(self, kept: torch.Tensor, led: torch.Tensor) -> torch.Tensor:
        """By how much the answers of these texts lead: bool `[facts]`, rows that are better than before."""
        self.led[kept] = led
        own, every = self.weakest(kept, led)
        whole = self.whose[kept].bincount(minlength=len(self.done)) == self.whose.bincount(minlength=len(self.done))
        # Of texts that rest, what was seen last.
        every = torch.minimum(every, self.weakest(torch.arange(len(self.led)), self.led)[1])
        better = torch.where(self.best_own < self.margin, own > self.best_own, (own >= self.margin) & (every > self.best_all))
        better &= own.isfinite() & ~self.done
        self.best_own, self.best_all = torch.where(better, own, self.best_own), torch.where(better, every, self.best_all)
        self.done |= whole & (every >= self.margin)
        return better


def _margins(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each target leads the best of the others: `[N, vocab]`, `[N]` -> `[N]`."""
    own = logits.gather(1, target.unsqueeze(1))[:, 0]
    return own - logits.scatter(1, target.unsqueeze(1), float("-inf")).amax(1)
