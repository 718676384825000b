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

_COMPACT = 0.8  # the batch is made anew once this share of its texts or less is still taught


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """What teaching found.

    Attributes:
        payload, scale: stored rows, float8_e4m3fn `[facts, layers, columns, head_dim]` and uint8 `[..., head_dim / 32]`, on the CPU.
        learned: bool `[facts]`: every token of the answer comes first, in each text that it was taught in.
        margin: float32 `[facts]`: by how much the weakest of these tokens leads all others, in nats of its logit.
        steps: int64 `[facts]`.
        seconds: of all.
    """

    payload: torch.Tensor
    scale: torch.Tensor
    learned: torch.Tensor
    margin: torch.Tensor
    steps: torch.Tensor
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
    """Find rows for facts, each given as the texts that it is taught in; the model is left as it was. With gradients, whoever calls.

    Args:
        config: completed.
        progress: called with (facts done, facts in all).
    """
    assert config.layers is not None
    began = time.perf_counter()
    device = next(decoder.module.parameters()).device
    batch = how.batch or (48 if device.type == "cpu" else 512)
    parts: list[tuple[torch.Tensor, ...]] = []
    modes = [(module, module.training) for module in decoder.module.modules()]
    decoder.module.eval()
    frozen = [parameter for parameter in decoder.model.parameters() if parameter.requires_grad]
    for parameter in frozen:  # their gradients would cost as much again
        parameter.requires_grad_(False)
    try:
        first, done = 0, 0
        while first < len(facts):
            last, texts = first + 1, len(facts[first])
            while last < len(facts) and texts + len(facts[last]) <= batch:
                texts += len(facts[last])
                last += 1
            chunk = facts[first:last]
            parts.append(
                _teach_chunk(decoder, config, chunk, how, (lambda n, done=done: progress(done + n, len(facts))) if progress else None)
            )
            first, done = last, done + len(chunk)
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter in frozen:
            parameter.requires_grad_(True)
    rows, learned, margin, steps = (torch.cat(part) for part in zip(*parts, strict=True))
    payload, scale = quantize(rows)
    return TaughtRows(payload, scale, learned, margin, steps, time.perf_counter() - began)


def _teach_chunk(
    decoder: Decoder, config: FactsConfig, facts: Sequence[Sequence[Text]], how: TeachConfig, progress: Callable[[int], object] | None
) -> tuple[torch.Tensor, ...]:
    """Masters float32 `[facts, layers, columns, head_dim]`, learned, margin and steps `[facts]`, on the CPU."""
    assert config.layers is not None
    device = next(decoder.layers[config.layers[0]].parameters()).device
    texts = [text for each in facts for text in each]
    whose = torch.tensor([k for k, each in enumerate(facts) for _ in each])
    calm = _usual_tails(decoder, texts, how.calm_tokens if how.calm else 0)
    masters = torch.zeros((len(config.layers), len(facts), config.columns, config.head_dim), device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([masters], lr=how.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    best, margin = torch.zeros_like(masters), torch.full((len(facts),), float("-inf"))
    steps, active = torch.zeros(len(facts), dtype=torch.int64), torch.ones(len(facts), dtype=torch.bool)
    batch: _Batch | None = None
    for step in range(how.steps + 1):
        if batch is None or int(active[batch.fact].sum()) <= _COMPACT * len(batch.fact):
            kept = active[whose].nonzero()[:, 0].tolist()
            batch = _Batch(decoder, config.layers[0], [texts[k] for k in kept], whose[kept], [calm[k] for k in kept])
        states = batch.run(fake_quantize(masters), config)
        answer, behind = (batch.kind == number for number in (1, 2))
        logits, target = batch.logits(states[answer]), batch.target[answer]
        whose_token = batch.fact.to(device)[answer.nonzero()[:, 0]]
        led = _margins(logits.detach(), target)
        now = torch.full((len(facts),), float("inf"), device=device).scatter_reduce(0, whose_token, led, "amin").cpu()
        better = active & (now > margin) & now.isfinite()
        best[:, better] = masters.detach()[:, better]
        margin[better] = now[better]
        steps[active] = step
        active = active & ~(now >= how.margin)
        if progress is not None:
            progress(int((~active).sum()))
        if not bool(active.any()) or step == how.steps:
            break
        # Each text weighs alike, however long its answer; a fact that is done weighs nothing.
        wanted = active[batch.fact].float().to(device)
        loss = (functional.cross_entropy(logits, target, reduction="none") * wanted[answer.nonzero()[:, 0]]).sum()
        if how.calm and len(batch.usual):
            said = batch.logits(states[behind]).log_softmax(-1)
            strayed = (batch.usual.exp() * (batch.usual - said)).sum(-1)
            loss = loss + how.calm * (strayed * wanted[behind.nonzero()[:, 0]]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if progress is not None:
        progress(len(facts))
    return best.detach().transpose(0, 1).cpu().contiguous(), margin > 0, margin, steps


def _margins(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far each target leads the best of the others: `[N, vocab]`, `[N]` -> `[N]`."""
    own = logits.gather(1, target.unsqueeze(1))[:, 0]
    return own - logits.scatter(1, target.unsqueeze(1), float("-inf")).amax(1)
