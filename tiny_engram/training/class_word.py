"""Rows that start at a word which the base knows, in closed form: at its mounts inside the text encoder a concept moves the trigger's
states to those that the word has in the same sentences, as far as bound and gate let it.

The basis has orthonormal rows, so that the rows of a value are its product with the transpose. The gate depends on the rows' direction
and on the state; a few rounds settle it. Averaged over carrier sentences by least squares. May import torch and the adapter's parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tiny_engram.adapter_reports import reading_of
from tiny_engram.concept import Concept, MountRows
from tiny_engram.config import ENCODER_MOUNTS, INPUT
from tiny_engram.errors import TinyEngramError
from tiny_engram.input_mount import encode_with_input
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.kernels.span_residual import span_residual
from tiny_engram.quantization import fake_quantize
from tiny_engram.residual import Spans, apply_concept, span_mean_norm
from tiny_engram.training.reading import Tokens, encoder_of, read_texts

__all__ = ["CARRIERS", "Start", "place_of_word", "start_at_word"]

CARRIERS = (
    "a {0}",
    "a 3d {0} on a white background",
    "flat {0}, blue background",
    "an outlined {0} on a gray background",
    "a picture of a {0}, 3d style, red background",
    "a 3d {0} next to a ball on a green background",
)
# For tokens that a trigger has at the start of a text, or behind a mark, alone.
ELSEWHERE = ("{0}", "{0} on a table", '"{0}"', "({0})")
ROUNDS = 12
REACH = 0.75  # of the bound, that the word takes: training has room beyond it
WIDEST = 0.95  # gate that a start may ask for: one that is open all the way learns no more


@dataclass(frozen=True, slots=True)
class Start:
    """Masters at one mount: rows float32 `[positions, columns, head_dim]`, gain and bias float32 `[positions]`."""

    rows: torch.Tensor
    gain: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The same sentences with the trigger and with the word.

    `spans` says where triggers stand, one a sentence, and `there` int64 `[N]` which
    of the word's tokens each of their N positions is moved to.
    """

    triggers: Tokens
    words: Tokens
    spans: Spans
    there: torch.Tensor


@torch.no_grad()
def start_at_word(adapter: Any, concept: Concept, role: str, word: str) -> dict[str, Start]:
    """Masters that make a concept stand for `word`, at those of its mounts that lie in the text encoder ("input", "span"), in the order
    in which a prompt meets them; each is fitted given those before it.

    Args:
        adapter: of the pipeline, with its other concepts silent.
        concept: untrained, not loaded.

    Raises:
        TinyEngramError: none of those mounts, or a word or a spelling that is not read as tokens of its own in any sentence.
    """
    place = concept.roles[role]
    names = [name for name in ENCODER_MOUNTS if name in place.mounts]
    if not names:
        raise TinyEngramError(
            f"class_word {word!r}: it starts the rows at the mounts input and span of {role}, and the concept has neither; add one to "
            "mounts, or leave class_word out"
        )
    pairs = _pairs(adapter, concept, role, word)
    reader, seed = encoder_of(adapter, role), concept.config.basis_seed
    encoder: Any = reader.module
    batch, time, at = pairs.spans.flat()

    def states_of(tokens: Tokens) -> torch.Tensor:
        return reader.read(encoder(tokens.ids, **tokens.options, **reader.options))[batch]

    found: dict[str, Start] = {}
    for name in names:
        if name == INPUT:
            embed = encoder.get_input_embeddings()
            here, there = (embed(tokens.ids)[batch] for tokens in (pairs.triggers, pairs.words))
        elif INPUT in found:
            start, rho = found[INPUT], place.mounts[INPUT].rho
            rows = fake_quantize(start.rows)

            def move(x: torch.Tensor, start: Start = start, rows: torch.Tensor = rows, rho: float = rho) -> torch.Tensor:
                return apply_concept(x, pairs.spans, rows, start.gain, start.bias, rho=rho, basis_seed=seed)

            triggers = pairs.triggers
            here = reader.read(encode_with_input(encoder, triggers.ids, move, **triggers.options, **reader.options))[batch]
            there = states_of(pairs.words)
        else:
            here, there = states_of(pairs.triggers), states_of(pairs.words)
        each = torch.arange(len(batch))
        h, target = (states[each, where].float().cpu() for states, where in ((here, time), (there, pairs.there)))
        found[name] = _solved(place.mounts[name], h, target - h, at, pairs.spans.length, seed)
    return found


def _pairs(adapter: Any, concept: Concept, role: str, word: str) -> _Pairs:
    mount, groups = adapter.mounts[role], concept.roles[role].groups
    device = mount.module.get_input_embeddings().weight.device
    _, given, _ = reading_of(adapter.pipe, adapter.family, role)
    texts = (*CARRIERS, *ELSEWHERE)
    triggers = read_texts(adapter, role, [text.format(group.text) for group in groups for text in texts])
    words = read_texts(adapter, role, [text.format(word) for text in texts])
    fired: dict[int, list[tuple[int, int, int]]] = {}
    found = adapter.spans(concept, triggers.ids, role)
    for row, *span in zip(*(x.tolist() for x in (found.batch, found.start, found.length, found.offset)), strict=True):
        fired.setdefault(row, []).append((span[0], span[1], span[2]))
    places = [place_of_word(text, word, words.characters[row]) for row, text in enumerate(texts)]
    if not any(places[: len(CARRIERS)]):
        raise TinyEngramError(
            f"class_word {word!r} is not read as tokens of its own by the tokenizer of {role}; write a plain word that the base knows"
        )
    rows: list[int] = []
    spans: list[tuple[int, int, int, int]] = []
    there: list[int] = []
    for k, group in enumerate(groups):
        own = {row: fired.get(k * len(texts) + row, []) for row in range(len(texts))}
        before = len(spans)
        for row, place in enumerate(places):
            here = own[row]
            if place is None or len(here) != 1 or here[0][2] != group.offset or (row >= len(CARRIERS) and before < len(spans)):
                continue
            first, length = place
            start, size, offset = here[0]
            spans.append((len(rows), start, size, offset))
            rows.append(k * len(texts) + row)
            # The last token of a word is the one that has read it whole: last goes to last, and what is left over to the first.
            there += [first + max(0, step - size + length) for step in range(size)]
        # a spelling that the pipeline rewrites, as in lower case, fires as that one alone; other tokens of one text, at which it fires
        # nowhere here, begin at zero
        if not any(own.values()) and given(group.text) == group.text:
            raise TinyEngramError(
                f"class_word {word!r}: {group.text!r} fires in none of the sentences such as {CARRIERS[0]!r}; leave it out"
            )
    if not spans:
        raise TinyEngramError(
            f"class_word {word!r}: {concept.trigger!r} fires in none of the sentences such as {CARRIERS[0]!r}; leave it out"
        )
    carriers = [row % len(texts) for row in rows]
    return _Pairs(triggers.at(rows, device), words.at(carriers, device), Spans.of(spans), torch.tensor(there))


def place_of_word(text: str, word: str, characters: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(first token, tokens) of the word in a carrier; None where it is cut off, or shares a token with what stands beside it."""
    first = text.index("{0}")
    end = first + len(word)
    inside = [i for i, (a, b) in enumerate(characters) if b > a and a < end and b > first]
    # tokens of some vocabularies hold the space in front of a word
    if not inside or text[characters[inside[0]][0] : first].strip() or characters[inside[-1]][1] != end:
        return None
    return inside[0], len(inside)


def _solved(held: MountRows, h: torch.Tensor, delta: torch.Tensor, at: torch.Tensor, lengths: torch.Tensor, seed: int) -> Start:
    """Rows whose residual is nearest to `delta` `[N, width]`, over the sentences of each position.

    A gate that is too narrow for the way gets a bias that opens it.

    Args:
        held: the mount as it is, whose gate the start begins with.
        h: float32 `[N, width]`, what stands at the fired positions. at: int64 `[N]`, whose rows those read. lengths: of the spans.
    """
    positions, columns, head_dim = held.payload.shape
    one = torch.eye(columns * head_dim)
    key_basis, value_basis = (fixed_basis(one, width=h.shape[-1], seed=2 * seed + k) for k in (0, 1))
    norm, ones = span_mean_norm(h, lengths), torch.ones(len(h))

    def summed(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(positions, *x.shape[1:]).index_add_(0, at, x)

    count = summed(ones).clamp(min=1)
    gain, bias = held.gain.clone(), held.bias.clone()
    gate, best = torch.full((len(h),), 0.5), torch.zeros(positions, columns * head_dim)
    for _ in range(ROUNDS):
        step = held.rho * norm * gate
        value = summed(step[:, None] * delta) / summed(step * step).clamp(min=1e-12)[:, None]
        best = value @ value_basis.T
        reached = best @ value_basis
        length = reached.norm(dim=1)
        # beyond the bound, length says nothing and its gradient is gone
        best = best / length.clamp(min=1.0)[:, None]
        mean = summed(gate) / count
        wanted = (mean * length / REACH).clamp(1e-3, WIDEST)
        bias = torch.where(length > REACH, (bias + wanted.logit() - mean.logit(1e-6)).clamp(min=bias), bias)
        # The residual of a unit value with scale and norm one is the gate itself.
        unit = functional.normalize(reached)[at]
        gate = span_residual(h, (best @ key_basis)[at], unit, gain=gain[at], bias=bias[at], scale=ones, mean_norm=ones).norm(dim=1)
    return Start(best.view(positions, columns, head_dim), gain, bias)
