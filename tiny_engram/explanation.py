"""Which spans fire in a prompt, which triggers were seen but did not, and why. May import triggers, matching and boundaries."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiny_engram.boundaries import CUT, FUSED, REASONS, special_ids
from tiny_engram.config import SPAN
from tiny_engram.matching import Matches, TriggerIndex
from tiny_engram.mount_names import describe_maps, describe_mounts
from tiny_engram.triggers import CompiledTrigger, encode_with_offsets

__all__ = ["Explanation", "FiredSpan", "PromptExplanation", "Unfired", "explain_prompt"]


@dataclass(frozen=True, slots=True)
class FiredSpan:
    """A span that fires: token positions `[start, end)` as the encoder gets them, the mounts where the concept has rows, and its maps.

    `schedule` says in words how the strength goes on over the steps; "" for the same in all.
    """

    name: str
    start: int
    end: int
    text: str
    strength: float
    mounts: tuple[str, ...] = (SPAN,)
    maps: tuple[str, ...] = ()
    schedule: str = ""

    def __str__(self) -> str:
        words = [describe_mounts(self.mounts)] if self.maps or self.mounts != (SPAN,) else []
        words += [describe_maps(self.maps)] if self.maps else []
        where = f", at {', '.join(words)}" if words else ""
        times = f" ({self.schedule})" if self.schedule else ""
        return f"{self.name} at tokens {self.start}..{self.end - 1} ({self.text!r}), strength {self.strength:g}{times}{where}"


@dataclass(frozen=True, slots=True)
class Unfired:
    """A trigger that was seen but does not fire, its first token position, and why."""

    name: str
    text: str
    start: int
    reason: str


@dataclass(frozen=True, slots=True)
class PromptExplanation:
    """One prompt at one encoder. `tokens` are the tokens inside the text window, begin and end included, padding left out."""

    role: str
    prompt: str
    negative: bool
    tokens: tuple[str, ...]
    fired: tuple[FiredSpan, ...]
    unfired: tuple[Unfired, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found: one entry per prompt and encoder, prompts first, then negative prompts."""

    prompts: tuple[PromptExplanation, ...]

    @property
    def fired(self) -> tuple[FiredSpan, ...]:
        """All fired spans."""
        return tuple(span for prompt in self.prompts for span in prompt.fired)

    @property
    def unfired(self) -> tuple[Unfired, ...]:
        """All triggers seen that did not fire."""
        return tuple(seen for prompt in self.prompts for seen in prompt.unfired)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "prompts": [
                {
                    **asdict(p),
                    "tokens": list(p.tokens),
                    "fired": [asdict(f) | {"mounts": list(f.mounts), "maps": list(f.maps)} for f in p.fired],
                    "unfired": [asdict(u) for u in p.unfired],
                }
                for p in self.prompts
            ]
        }

    def __str__(self) -> str:
        lines: list[str] = []
        for p in self.prompts:
            lines.append(f"{'negative prompt' if p.negative else 'prompt'} {p.prompt!r} at {p.role} ({len(p.tokens)} tokens)")
            lines += [f"  fires: {f}" for f in p.fired]
            lines += [f"  does not fire: {u.name} at token {u.start} ({u.text!r}): {u.reason}" for u in p.unfired]
            if not p.fired and not p.unfired:
                lines.append("  no trigger")
        return "\n".join(lines)


def explain_prompt(
    text: str,
    *,
    role: str,
    negative: bool,
    tokenizer: Any,
    index: TriggerIndex,
    strengths: Mapping[str, float],
    mounts: Mapping[str, tuple[str, ...]],
    maps: Mapping[str, tuple[str, ...]],
    silent: Mapping[str, tuple[CompiledTrigger, str]],
    written: str | None = None,
    most_tokens: int | None = None,
    schedules: Mapping[str, str] | None = None,
) -> PromptExplanation:
    """Explain one prompt at one encoder.

    Args:
        text: the prompt as the tokenizer is given it.
        role, negative: copied into the result.
        tokenizer: the pipeline's tokenizer of that encoder.
        index: the encoder's trigger index.
        strengths: strength of each active concept.
        mounts: names of the mounts where each of them has rows.
        maps: names of the maps that each of them has.
        silent: concepts that are loaded but off -> (compiled trigger, why).
        written: the prompt as it was written, where the pipeline changes it; None where it does not.
        most_tokens: tokens that the pipeline reads of it, special ones among them; None for the tokenizer's own.
        schedules: of those concepts that have one, in words.
    """
    ((ids, offsets),) = encode_with_offsets(tokenizer, [text], special=True)
    most = most_tokens or tokenizer.model_max_length
    window = list(tokenizer([text], padding=False, truncation=True, max_length=most).input_ids[0])
    # Of many tokenizers the window's last token is the end token: the text's own tokens end before it.
    ended = bool(window) and window[-1] in special_ids(tokenizer)
    limit = len(ids) if len(window) == len(ids) else len(window) - ended

    def words(start: int, length: int) -> str:
        return text[offsets[start][0] : offsets[min(start + length, len(offsets)) - 1][1]]

    def spans(found: Matches, source: TriggerIndex) -> list[tuple[str, int, int]]:
        return [
            (source.entries[e].name, s, n)
            for s, n, e in zip(found.start.tolist(), found.length.tolist(), found.entry.tolist(), strict=True)
        ]

    fired = [
        FiredSpan(name, s, s + n, words(s, n), strengths[name], mounts[name], maps[name], (schedules or {}).get(name, ""))
        for name, s, n in spans(index.match([window]), index)
    ]
    seen: dict[tuple[str, int], Unfired] = {(f.name, f.start): Unfired(f.name, f.text, f.start, "") for f in fired}

    def note(name: str, start: int, length: int, reason: str) -> None:
        seen.setdefault((name, start), Unfired(name, words(start, length), start, reason))

    for name, s, n in spans(index.match([ids]), index):
        if s + n > limit:
            half = "cut in half by" if s < limit else "beyond"
            note(name, s, n, f"truncated: {half} the encoder's {most} tokens")
    for place in index.near([ids]):
        note(index.entries[place.entry].name, place.start, place.length, REASONS[place.code])
    if silent:
        off = TriggerIndex(index.edges)
        for name, (compiled, _) in silent.items():
            off.add(name, compiled)
        for name, s, n in spans(off.match([ids]), off):
            note(name, s, n, silent[name][1])
    compiled_by_name = {name: index.compiled(name) for name in strengths} | {name: c for name, (c, _) in silent.items()}
    for name, compiled in compiled_by_name.items():
        for low, high in _occurrences(text, compiled):
            start = next((k for k, (a, b) in enumerate(offsets) if a < b and b > low), None)
            if start is None or any(key[0] == name and key[1] == start for key in seen):
                continue
            other = next((f for f in fired if f.start <= start < f.end), None)
            edge_cut = _is_word(text[low - 1 : low]) and _is_word(text[low]) or _is_word(text[high - 1]) and _is_word(text[high : high + 1])
            if other is not None:
                reason = f"covered by the longer or earlier trigger of {other.name!r}"
            else:
                reason = REASONS[CUT] if edge_cut else REASONS[FUSED]
            # the word as it is written, which is not the trigger: that one may well fire elsewhere
            while low > 0 and _is_word(text[low]) and _is_word(text[low - 1]):
                low -= 1
            while high < len(text) and _is_word(text[high - 1]) and _is_word(text[high]):
                high += 1
            start = next(k for k, (a, b) in enumerate(offsets) if a < b and b > low)
            seen.setdefault((name, start), Unfired(name, text[low:high], start, reason))
        if written is not None and not _occurrences(text, compiled):
            for low, high in _occurrences(written, compiled)[:1]:
                reason = f"eaten by the pipeline's text cleaning: the tokenizer is given {text!r}"
                seen[name, -1] = Unfired(name, written[low:high], 0, reason)
    unfired = sorted((u for u in seen.values() if u.reason), key=lambda u: (u.start, u.name))
    tokens = tuple(tokenizer.convert_ids_to_tokens(window))
    return PromptExplanation(role, text if written is None else written, negative, tokens, tuple(fired), tuple(unfired))


def _occurrences(text: str, compiled: CompiledTrigger) -> list[tuple[int, int]]:
    """Character spans where the trigger's spellings stand in the text, in any case, inside words too."""
    found = {m.span() for s in compiled.spellings for m in re.finditer(r"\s+".join(map(re.escape, s.split())), text, re.IGNORECASE)}
    return sorted(found)


def _is_word(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")
