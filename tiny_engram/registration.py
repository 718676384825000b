"""What registering a trigger would mean: tokens, rows, collisions, near misses, warnings.

May import config, boundaries, triggers, matching, mount_names and store.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiny_engram.boundaries import REASONS, backend_of
from tiny_engram.config import BLOCK, DEEP, POOLED, SPAN, ConceptConfig
from tiny_engram.matching import TriggerIndex
from tiny_engram.mount_names import describe_maps, describe_mounts
from tiny_engram.store import ConceptStore
from tiny_engram.triggers import COMMON_WORDS, CompiledTrigger, text_window

__all__ = ["NearMiss", "RegistrationReport", "RoleReport", "cleaning_warnings", "mode_warnings", "report_role"]

MOST_WORDS = 8
SENTENCE = "a photo of {} on a table"
UNRELATED = "qqqq"  # a word that holds no trigger of ordinary words


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A spelling close to the trigger: does it fire, and if not, why."""

    text: str
    fires: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RoleReport:
    """The trigger at one encoder.

    `tokens` holds the tokens of each variant; `maps` (rank, channels) of each map by name; `rows` counts table rows over all positions
    and mounts, `nbytes` what they take with their gates and the maps; `collisions` how often the rows' address had to move, over all
    mounts; `window` how many tokens of a prompt the encoder reads (None: no limit).
    """

    role: str
    tokens: tuple[tuple[str, ...], ...]
    groups: int
    positions: int
    mounts: tuple[str, ...]
    maps: Mapping[str, tuple[int, int]]
    rows: int
    nbytes: int
    collisions: int
    window: int | None
    fused: tuple[str, ...]
    near_misses: tuple[NearMiss, ...]


@dataclass(frozen=True, slots=True)
class RegistrationReport:
    """Per encoder role, what registering a trigger would mean; `taken_by` lists loaded concepts with the same sequences, `in_libraries`
    (name, path) those of open libraries, which could not be called any more."""

    trigger: str
    aliases: tuple[str, ...]
    name: str
    roles: Mapping[str, RoleReport]
    absent: tuple[str, ...]
    taken_by: tuple[str, ...]
    warnings: tuple[str, ...]
    in_libraries: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "trigger": self.trigger,
            "aliases": list(self.aliases),
            "name": self.name,
            "roles": {role: _lists(asdict(report)) for role, report in self.roles.items()},
            "absent": list(self.absent),
            "taken_by": list(self.taken_by),
            "warnings": list(self.warnings),
            "in_libraries": [{"name": name, "library": path} for name, path in self.in_libraries],
        }

    def __str__(self) -> str:
        also = f" (also {', '.join(map(repr, self.aliases))})" if self.aliases else ""
        lines = [f"trigger {self.trigger!r}{also}"]
        for role, r in self.roles.items():
            window = "no limit" if r.window is None else f"{r.window} tokens"
            size = f"{r.positions} positions, {r.rows} rows, {r.nbytes:,} bytes, {r.collisions} collisions"
            lines.append(f"  {role}: {size}, text window {window}")
            lines += [f"    mounts: {describe_mounts(r.mounts)}"] if r.mounts != (SPAN,) else []
            lines += [f"    maps: {describe_maps(tuple(r.maps))}"] if r.maps else []
            lines += [f"    tokens: {' '.join(tokens)}" for tokens in r.tokens]
            lines += [f"    near miss {n.text!r}: {'fires, ' if n.fires else ''}{n.reason}" for n in r.near_misses]
        lines += [f"  absent by design: {', '.join(self.absent)}"] if self.absent else []
        lines += [f"  already registered by {name!r}" for name in self.taken_by]
        lines += [f"  would keep {name!r} of the open library {path} from being called" for name, path in self.in_libraries]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(v) for key, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, list | tuple) else value


def close_spellings(trigger: str) -> list[str]:
    """Spellings that differ a little: plural, another number, glued or spaced parts, other dashes, a letter in front."""
    bare = trigger.replace("-", "").replace("_", "").replace(" ", "")
    spellings = [trigger + tail for tail in ("s", "'s", "9", "-2", "ish")] + ["x" + trigger, "re-" + trigger, bare]
    for dash in "-_ ":
        if dash in trigger:
            spellings += [trigger.replace(dash, other) for other in (" ", "-", "_", "\u2013", "\u2011") if other != dash]
    return [s for s in dict.fromkeys(spellings) if s.lower() != trigger.lower()]


def words_around(trigger: str, tokenizer: Any) -> list[str]:
    """Words of the built-in list and of the tokenizer's vocabulary that hold the trigger."""
    lowered = trigger.lower()
    if len(lowered) < 2:
        return []
    vocab = (token.removesuffix("</w>").lstrip("\u2581\u0120") for token in backend_of(tokenizer).get_vocab())
    found = {word.lower() for word in vocab if lowered in word.lower() and word.isalpha() and word.isascii()}
    found |= {word for word in COMMON_WORDS if lowered in word}
    return sorted(found - {lowered, lowered + "s"}, key=lambda w: (len(w), w))[:MOST_WORDS]


def near_miss(word: str, ids: list[int], compiled: CompiledTrigger, index: TriggerIndex, around: int = 0) -> NearMiss:
    """Whether a word calls the trigger, and why: `ids` are those of a prompt with the word, `index` holds the trigger alone, and `around`
    counts how often the rest of the prompt calls it."""
    if len(index.match([ids])) > around:
        # "trigger's" and "re-trigger" hold the trigger as a word of its own.
        inside = re.search(rf"(?<!\w){re.escape(compiled.text)}(?!\w)", word, re.IGNORECASE)
        return NearMiss(word, True, "holds the trigger as a word of its own" if inside else "has the same token ids")
    blocked = index.near([ids])
    return NearMiss(word, False, REASONS[blocked[0].code] if blocked else "is read as other tokens")


def near_misses(compiled: CompiledTrigger, tokenizer: Any, store: ConceptStore, given: Callable[[str], str] = str) -> list[NearMiss]:
    """Close spellings and words that hold the trigger, each really matched in a prompt; `given` is what the tokenizer gets for one."""
    index = TriggerIndex(store.index.edges)
    index.add("trigger", compiled)
    known = {s.lower() for s in compiled.spellings}
    words = [w for w in [*close_spellings(compiled.text), *words_around(compiled.text, tokenizer)] if w.lower() not in known]

    def ids(word: str) -> list[int]:
        return tokenizer(given(SENTENCE.format(word)), add_special_tokens=True).input_ids

    around = len(index.match([ids(UNRELATED)]))  # "a" and "photo" stand in the sentence itself
    return [near_miss(word, ids(word), compiled, index, around) for word in words]


def mode_warnings(role: str, mounts: Collection[str]) -> list[str]:
    """One line for each mount that is not local."""
    inside = [mount for mount in mounts if mount.partition(".")[0] == DEEP]
    found = (
        [f"{role}: rows at {', '.join(inside)} move other positions too, all that attend to the trigger behind that layer"]
        if inside
        else []
    )
    if POOLED in mounts:
        found.append(f"{role}: a pooled vector has no positions, so what is added to it acts on the whole picture")
    return found


def cleaning_warnings(role: str, compiled: CompiledTrigger, tokenizer: Any, store: ConceptStore, given: Callable[[str], str]) -> list[str]:
    """One line for each spelling that does not survive what the pipeline does to a prompt."""
    index = TriggerIndex(store.index.edges)
    index.add("trigger", compiled)
    found: list[str] = []
    for spelling in compiled.spellings:
        text = SENTENCE.format(spelling)
        read = given(text)
        if read != text and not len(index.match([tokenizer(read).input_ids])):
            found.append(
                f"{role}: {spelling!r} does not survive the pipeline's text cleaning ({text!r} becomes {read!r}); use another trigger"
            )
    return found


def report_role(
    role: str,
    compiled: CompiledTrigger,
    tokenizer: Any,
    store: ConceptStore,
    config: ConceptConfig,
    mounts: tuple[str, ...],
    maps: Mapping[str, tuple[int, int]],
    *,
    given: Callable[[str], str] = str,
    most_tokens: int | None = None,
) -> RoleReport:
    """The report of one encoder, over these mounts and maps ((rank, channels) by name) of it; nothing is registered.

    given: what the tokenizer is given for a prompt. most_tokens: that the pipeline reads of it, special ones among them; None for the
    tokenizer's own.
    """
    free = [store.bank_for(config, mount).find_place(compiled.groups) for mount in mounts]
    rows = sum(place.row_ids.numel() for place in free)
    gate = 2 * 4  # gain and bias, float32
    factors = sum(2 * rank * (channels + channels // BLOCK) for rank, channels in maps.values())
    return RoleReport(
        role=role,
        tokens=tuple(tuple(tokenizer.convert_ids_to_tokens(list(v.ids))) for v in compiled.variants),
        groups=len(compiled.groups),
        positions=compiled.positions,
        mounts=mounts,
        maps=dict(maps),
        rows=rows,
        nbytes=rows * (config.head_dim + config.head_dim // BLOCK) + len(mounts) * compiled.positions * gate + factors,
        collisions=sum(place.counter for place in free),
        window=text_window(tokenizer) if most_tokens is None else most_tokens - tokenizer.num_special_tokens_to_add(pair=False),
        fused=compiled.fused,
        near_misses=tuple(near_misses(compiled, tokenizer, store, given)),
    )
