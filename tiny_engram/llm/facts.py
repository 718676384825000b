"""Facts: registered triggers that a frozen causal LM answers by rows of a table; written, edited and removed one by one.

Imports torch, the core, files and, of this package, decoders, host and the modules of facts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.files import check_writable

from . import host
from .decoders import Decoder, decoder_of
from .fact_checks import check_free, check_read, keys_of
from .fact_config import FactsConfig, TeachConfig
from .fact_file import Saved, read_facts, write_facts
from .fact_index import FactIndex
from .fact_reader import FactReader
from .fact_rows import Address, FactRows
from .fact_spelling import Fact, Spelled, Speller, owner_number
from .fact_teaching import teach
from .fact_texts import taught_texts
from .history import BLOCKED
from .memory import memory_for

__all__ = ["FactReport", "Facts", "FiredFact", "HeldFact"]


@dataclass(frozen=True, slots=True)
class HeldFact:
    """A fact that is there: `margin` by which the weakest token of its answer led when it was taught, in `steps`; its rows' slot."""

    spelled: Spelled
    margin: float
    steps: int
    slot: int

    @property
    def fact(self) -> Fact:
        return self.spelled.fact


@dataclass(frozen=True, slots=True)
class FactReport:
    """What adding did.

    Attributes:
        added: facts that are there now.
        unlearned: those that are not, since their answers did not come out on top.
        warnings: one line each, of triggers.
        moved: facts whose rows wanted an address that was taken.
        nbytes: of the rows added.
        seconds: of the teaching; 0 for facts from a file.
    """

    added: tuple[Fact, ...]
    unlearned: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()
    moved: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        total = len(self.added) + len(self.unlearned)
        each = self.seconds / max(total, 1)
        lines = [f"{len(self.added)} of {total} facts learned in {self.seconds:.1f} s ({each:.2f} s each), {self.nbytes:,} bytes"]
        lines += [f"  not learned: {fact.prompt or fact.trigger!r} -> {fact.answer!r}" for fact in self.unlearned]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class FiredFact:
    """Where a trigger ends in a text: the token's place, the fact, and why it does not fire, or None."""

    place: int
    fact: Fact
    reason: str | None


class Facts:
    """The facts of one causal LM, attached by :meth:`attach` or :meth:`open`; a part of neither the model's modules nor its files.

    Change them between two calls of the model, from one thread.
    """

    def __init__(self, model: Any, config: FactsConfig, tokenizer: Any) -> None:
        """Use :meth:`attach`."""
        if not isinstance(config, FactsConfig):
            raise ConfigError(f"config is {type(config).__name__}: expected a FactsConfig")
        self.model, self.tokenizer = model, tokenizer
        self._decoder: Decoder = decoder_of(model)
        self._speller = Speller(tokenizer)
        self.config = config.completed(
            depth=len(self._decoder.layers),
            hidden=self._decoder.hidden,
            compressed_vocab=self._speller.compressed.size,
            pad_id=self._speller.compressed.pad_id,
            fingerprint=self._speller.compressed.fingerprint,
            base_model_name_or_path=getattr(self._decoder.model.config, "name_or_path", None) or None,
        )
        self._index = FactIndex(self._speller.edges)
        self._rows = FactRows(self.config)
        self._reader = FactReader(self.config, self._index, self._rows)
        self._held: dict[tuple[int, str], HeldFact] = {}
        self._host: host.DecoderHost | None = None

    @classmethod
    def attach(cls, model: Any, config: FactsConfig, tokenizer: Any) -> Self:
        """No facts yet, and a model that computes the same bits as before.

        Raises:
            UnsupportedModelError: the model has no place for them.
            TinyEngramError: a tokenizer without a fast backend, or a config made for another model or tokenizer.
        """
        made = cls(model, config, tokenizer)
        made._host = host.DecoderHost.of(model)
        made._host.add(made._reader)
        return made

    @classmethod
    def open(cls, model: Any, path: str | Path, tokenizer: Any) -> Self:
        """Attach the facts of a file. Raises as :meth:`attach` and :meth:`load` do."""
        config, *_ = read_facts(path)
        made = cls.attach(model, config, tokenizer)
        try:
            made.load(path)
        except BaseException:
            made.detach()
            raise
        return made

    def detach(self) -> None:
        """Take all hooks out of the model; nothing happens where there are none."""
        if self._host is not None:
            self._host.remove(self._reader)
        self._host = None

    # -- what is there -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._rows.table.nbytes

    @property
    def enabled(self) -> bool:
        """False leaves the model as it is, bit for bit."""
        return self._reader.on

    @enabled.setter
    def enabled(self, on: bool) -> None:
        self._reader.on = bool(on)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model by itself, within."""
        was, self._reader.on = self._reader.on, False
        try:
            yield
        finally:
            self._reader.on = was

    def list(self, *, owner: str | None = None) -> tuple[HeldFact, ...]:
        """Facts in the order in which they came; of one user alone where `owner` says so."""
        number = owner_number(owner)
        return tuple(each for (whose, _), each in self._held.items() if owner is None or whose == number)

    def get(self, trigger: str, *, owner: str | None = None) -> HeldFact:
        """The fact that a spelling of its trigger calls. Raises TinyEngramError where there is none."""
        number, wanted = owner_number(owner), " ".join(str(trigger).split()).lower()
        for (whose, _), each in self._held.items():
            if whose == number and wanted in (spelling.lower() for spelling in each.fact.spellings):
                return each
        whose = "" if owner is None else f" of {owner!r}"
        known = [repr(each.fact.trigger) for each in self.list(owner=owner)]
        shown = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
        raise TinyEngramError(f"no fact{whose} has the trigger {trigger!r}; known: {shown or 'none'}")

    # -- changes -------------------------------------------------------------------------------------------------------------

    def add(
        self, facts: Fact | Iterable[Fact], *, how: TeachConfig | None = None, progress: Callable[[int, int], object] | None = None
    ) -> FactReport:
        """Teach new facts; the rows of those that are there stay as they are. Facts that cannot be learned are named, and not kept.

        Args:
            progress: called with (facts done, facts in all).

        Raises:
            TinyEngramError: a fact that makes no sense or would not be read in a text that it is taught in, or a spelling that the same
                owner's facts have already. Nothing is changed then.
        """
        facts = [facts] if isinstance(facts, Fact) else [*facts]
        how = how or TeachConfig()
        spelled = [self._speller.spell(fact) for fact in facts]
        held = [each.spelled for each in self.list()]
        check_free(held, spelled, self._speller)
        texts = [taught_texts(self._speller, fact, how) for fact in facts]
        texts = check_read(held, spelled, texts, self._speller)
        _, moved = self._rows.find([self._address(each) for each in spelled])  # a full address space is told before anything is taught
        if not facts:
            return FactReport(())
        with self.disabled(), memory_for("the texts that are taught at a time", "lower TeachConfig.batch (--batch)"):
            taught = teach(self._decoder, self.config, texts, how, progress=progress)
        learned = taught.learned.nonzero()[:, 0].tolist()
        saved = [(spelled[k], float(taught.margin[k]), int(taught.steps[k])) for k in learned]
        nbytes = self._put(saved, _taken(taught.payload, learned), taught.scale[learned])
        return FactReport(
            added=tuple(facts[k] for k in learned),
            unlearned=tuple(fact for k, fact in enumerate(facts) if k not in set(learned)),
            warnings=(
                *(warning for each in spelled for warning in each.warnings),
                *(f"{facts[k].trigger!r} is not answered {form}" for k in learned for form in taught.missed[k]),
            ),
            moved=moved,
            nbytes=nbytes,
            seconds=taught.seconds,
        )

    def edit(
        self,
        trigger: str,
        *,
        owner: str | None = None,
        how: TeachConfig | None = None,
        **changes: Any,
    ) -> FactReport:
        """Teach a fact anew with other fields of :class:`Fact` (answer, prompt, aliases, trigger); it stays as it was if that fails.

        Raises:
            TinyEngramError: no such fact, or one that makes no sense.
        """
        old = self.get(trigger, owner=owner)
        try:
            new = replace(old.fact, **changes)
        except TypeError as error:
            raise TinyEngramError(f"{sorted(changes)}: expected answer, prompt, aliases or trigger of a fact") from error
        payload, scale = self._rows.stored([old.slot])
        self._drop([old])
        back = [(old.spelled, old.margin, old.steps)]
        try:
            report = self.add(new, how=how)
        except BaseException:
            self._put(back, payload, scale)
            raise
        if report.unlearned:
            self._put(back, payload, scale)
        return report

    def remove(self, trigger: str, *, owner: str | None = None) -> Fact:
        """Forget a fact; the model answers with its own bits again. Raises TinyEngramError where there is none."""
        held = self.get(trigger, owner=owner)
        self._drop([held])
        return held.fact

    @staticmethod
    def _address(spelled: Spelled) -> Address:
        return Address(spelled.canonical, owner_number(spelled.fact.owner))

    # Normal tensors: what was made in inference mode could not be written by a later call outside it.
    @torch.inference_mode(False)
    def _put(self, saved: Sequence[Saved], payload: torch.Tensor, scale: torch.Tensor) -> int:
        """Store rows and triggers of facts; bytes of the rows."""
        slots = self._rows.add([self._address(each) for each, _, _ in saved], payload, scale) if saved else []
        for (each, margin, steps), slot in zip(saved, slots, strict=True):
            self._held[owner_number(each.fact.owner), each.fact.trigger] = HeldFact(each, margin, steps, slot)
        self._reindex()
        return payload.numel() + scale.numel()

    @torch.inference_mode(False)
    def _drop(self, held: Sequence[HeldFact]) -> None:
        for each in held:
            del self._held[owner_number(each.fact.owner), each.fact.trigger]
        self._reindex()
        self._rows.remove([each.slot for each in held])

    def _reindex(self) -> None:
        held = self.list()
        self._index.rebuild(keys_of([each.spelled for each in held], [each.slot for each in held]))

    # -- files ---------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """All facts in one safetensors file, in the order of `list()`.

        Raises:
            TinyEngramError: it cannot be written.
        """
        path = Path(path)
        check_writable(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        held = self.list()
        payload, scale = self._rows.stored([each.slot for each in held])
        return write_facts(path, self.config, [(each.spelled, each.margin, each.steps) for each in held], payload, scale)

    def load(self, path: str | Path) -> FactReport:
        """Add the facts of a file to those that are there.

        Raises:
            TinyEngramError: no sound file, one for another model, tokenizer or shape of rows, or spellings that are taken.
        """
        config, saved, payload, scale = read_facts(path)
        for name in ("layers", "max_ngram", "head_dim", "vocab", "rho", "basis_seed", "hidden", "depth", "fingerprint"):
            theirs, ours = getattr(config, name), getattr(self.config, name)
            if theirs != ours:
                what = "tokenizer" if name == "fingerprint" else "model" if name in ("hidden", "depth") else "configuration"
                raise TinyEngramError(
                    f"{path}: its facts have {name} {theirs!r}, this {what} has {ours!r}; load them where they were taught"
                )
        for each, _, _ in saved[:256]:
            now = self._speller.spell(each.fact)
            if now.keys[0] not in each.keys:
                raise TinyEngramError(
                    f"{path}: {each.fact.trigger!r} is {list(each.keys[0])} there, this tokenizer says {list(now.keys[0])}; "
                    "load it with the tokenizer version it was taught with"
                )
        check_free([each.spelled for each in self.list()], [each for each, _, _ in saved], self._speller)
        nbytes = self._put(saved, payload, scale)
        return FactReport(added=tuple(each.fact for each, _, _ in saved), nbytes=nbytes)

    # -- reading -------------------------------------------------------------------------------------------------------------

    def reading_as(self, owners: Sequence[str | None]) -> AbstractContextManager[None]:
        """Calls and caches that begin within read these users' facts besides everybody's: one name, or None, for each row or prompt."""
        if isinstance(owners, str):
            raise TinyEngramError(f"owners is the text {owners!r}, expected a list of names, one for each row; write [{owners!r}]")
        return host.reading_as(torch.tensor([owner_number(owner) for owner in owners], dtype=torch.int64))

    def ask(self, prompt: str, *, owner: str | None = None, max_new_tokens: int = 16, without: bool = False) -> str:
        """What the model says behind a prompt, greedily, up to the end of the line.

        Args:
            without: as if there were no facts.
        """
        inputs = self.tokenizer(prompt, return_tensors="pt").to(self._decoder.model.device)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        with torch.no_grad(), self.reading_as([owner]):
            if without:
                with self.disabled():
                    said = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
            else:
                said = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad)
        text = self.tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return (text.strip().splitlines() or [""])[0].strip()

    def explain(self, text: str, *, owner: str | None = None) -> tuple[FiredFact, ...]:
        """Triggers in a text, in the order of their last tokens: those that fire for a user, and those that do not, and why."""
        ids = torch.tensor([self._speller.encode(text, special=True)])
        by_slot = {each.slot: each.fact for each in self._held.values()}
        number = owner_number(owner)
        found: list[FiredFact] = []
        if self._index.longest and ids.numel():
            before = torch.full((1, self._index.reach), BLOCKED)
            places = self._index.places(ids, before, torch.tensor([number]))
            if places is not None:
                found += [FiredFact(int(time), by_slot[int(slot)], None) for _, time, slot in zip(*places, strict=True)]
            found += [FiredFact(time, by_slot[slot], "cut by a word boundary") for time, slot in self._index.cut_at(ids[0])]
            for other in {owner_number(fact.owner) for fact in by_slot.values()} - {number, 0}:
                places = self._index.places(ids, before, torch.tensor([other]))
                if places is not None:
                    for _, time, slot in zip(*places, strict=True):
                        fact = by_slot[int(slot)]
                        if fact.owner is not None and owner_number(fact.owner) == other:
                            found.append(FiredFact(int(time), fact, "another user's"))
        return tuple(sorted(found, key=lambda each: (each.place, each.reason is not None)))


def _taken(payload: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """Some of the facts' rows; float8 has no indexing of its own."""
    return payload.view(torch.uint8)[list(which)].view(payload.dtype)
