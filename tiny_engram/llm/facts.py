"""Facts: registered triggers that a frozen causal LM answers by rows of a table; written, edited and removed one by one.

Imports torch, the core, files and, of this package, decoders, host and the modules of facts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from tiny_engram.errors import ConfigError, TinyEngramError
from tiny_engram.files import check_writable
from tiny_engram.wording import counted, shown

from . import host
from .decoders import Decoder, decoder_of
from .fact_checks import check_free, checked, keys_of
from .fact_config import FactsConfig, TeachConfig
from .fact_file import Saved, calls, check_made_alike, find_saved, merge_facts, read_facts, write_facts
from .fact_index import FactIndex
from .fact_lock import locked
from .fact_reader import FactReader
from .fact_reports import FactReport, FiredFact, HeldFact
from .fact_rows import Address, FactRows
from .fact_spelling import Fact, Spelled, Speller, Text, owner_number
from .fact_teaching import teach
from .history import BLOCKED
from .memory import memory_for

__all__ = ["FactReport", "Facts", "FiredFact", "HeldFact"]

_TEXTS, _TEXTS_ON_DEVICE = 48, 512  # taught at a time, where TeachConfig.batch is None


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

    def __iter__(self) -> Iterator[HeldFact]:
        return iter(self.list())

    def __contains__(self, what: object) -> bool:
        """Is a fact there, as it is, or does a text call one of everybody's?"""
        if isinstance(what, str):
            return calls([each.fact for each in self if each.fact.owner is None], what) != []
        fact = what.fact if isinstance(what, HeldFact) else what
        return any(each.fact == fact for each in self)

    def __repr__(self) -> str:
        base = self.config.base_model_name_or_path or type(self.model).__name__
        state = "" if self._host is not None else ", detached"
        return f"Facts({counted(len(self), 'fact')}, {self.nbytes:,} bytes, layers {self.config.layers}, {base}{state})"

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
        held = list(self._held.values())
        return held[find_saved([each.fact for each in held], trigger, owner)]

    # -- changes -------------------------------------------------------------------------------------------------------------

    def add(
        self,
        facts: Fact | Iterable[Fact],
        *,
        how: TeachConfig | None = None,
        progress: Callable[[int, int], object] | None = None,
        kept: Callable[[FactReport], object] | None = None,
    ) -> FactReport:
        """Teach new facts; the rows of those that are there stay as they are. Facts that cannot be learned are named, and not kept.

        They are taught in parts. What ends the teaching, Ctrl-C too, leaves the parts that are done.

        Args:
            progress: called with (facts done, facts in all).
            kept: called with the report of each part, whose facts are there by then.

        Raises:
            FactsRefused: facts that make no sense or would not be read in a text that they are taught in, or spellings that the same
                owner's facts have already. It names all of them, and nothing is changed.
            TinyEngramError: no facts; nothing is changed then, either.
        """
        given: Any = [facts] if isinstance(facts, Fact | str) or not isinstance(facts, Iterable) else [*facts]
        for fact in given:
            if not isinstance(fact, Fact):
                raise TinyEngramError(f"facts holds {shown(fact)}, expected facts; write Fact(trigger, answer)")
        how = how or TeachConfig()
        spelled, texts = checked([each.spelled for each in self], given, how, self._speller)
        _, moved = self._rows.find([self._address(each) for each in spelled])  # a full address space is told before anything is taught
        parts = []
        for part in _parts(texts, how.batch or (_TEXTS if self._decoder.model.device.type == "cpu" else _TEXTS_ON_DEVICE)):
            done = part.start
            said = (lambda n, _, done=done: progress(done + n, len(given))) if progress is not None else None
            parts.append(self._teach(spelled[part], texts[part], how, said))
            if kept is not None:
                kept(parts[-1])
        return replace(FactReport.of_parts(parts), moved=moved)

    def _teach(
        self, spelled: Sequence[Spelled], texts: Sequence[Sequence[Text]], how: TeachConfig, progress: Callable[[int, int], object] | None
    ) -> FactReport:
        with self.disabled(), memory_for("the texts that are taught at a time", "lower TeachConfig.batch (--batch)"):
            taught = teach(self._decoder, self.config, texts, how, progress=progress)
        learned = taught.learned.nonzero()[:, 0].tolist()
        saved = [(spelled[k], float(taught.margin[k]), int(taught.steps[k])) for k in learned]
        nbytes = self._put(saved, _taken(taught.payload, learned), taught.scale[learned])
        return FactReport(
            added=tuple(spelled[k].fact for k in learned),
            unlearned=tuple(each.fact for k, each in enumerate(spelled) if k not in set(learned)),
            warnings=(
                *(warning for each in spelled for warning in each.warnings),
                *(f"{shown(spelled[k].fact.trigger)} is not answered {form}" for k in learned for form in taught.missed[k]),
            ),
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
        with locked(path):
            return write_facts(path, self.config, *self._stored(self.list()))

    def save_beside(self, path: str | Path, facts: Iterable[Fact], *, instead_of: Fact | None = None) -> tuple[Sequence[Fact], int]:
        """Put some of the facts that are there into a file beside what it holds by now, so that what other processes write stays.

        Args:
            instead_of: a fact of the file that they come in place of.

        Returns:
            Those that the file did not take, since a spelling of theirs calls another fact of it; and how many facts it holds.

        Raises:
            TinyEngramError: the file was made for something else, cannot be written, or holds `instead_of` no more.
        """
        held = [self._held[owner_number(fact.owner), fact.trigger] for fact in facts]
        return merge_facts(Path(path), self.config, *self._stored(held), instead_of=instead_of)

    def _stored(self, held: Sequence[HeldFact]) -> tuple[Sequence[Saved], torch.Tensor, torch.Tensor]:
        return [(each.spelled, each.margin, each.steps) for each in held], *self._rows.stored([each.slot for each in held])

    def load(self, path: str | Path) -> FactReport:
        """Add the facts of a file to those that are there.

        Raises:
            TinyEngramError: no sound file, one for another model, tokenizer or shape of rows, or spellings that are taken.
        """
        config, saved, payload, scale = read_facts(path)
        check_made_alike(Path(path), config, self.config)
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

        Raises:
            TinyEngramError: no prompt.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise TinyEngramError(f"prompt is {shown(prompt)}, expected text, such as a trigger")
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


def _parts(texts: Sequence[Sequence[Text]], most: int) -> Iterator[slice]:
    """Facts that are taught at a time, given the texts of each: `most` of these, or one fact."""
    first, count = 0, 0
    for k, each in enumerate(texts):
        if k > first and count + len(each) > most:
            yield slice(first, k)
            first, count = k, 0
        count += len(each)
    if texts:
        yield slice(first, len(texts))


def _taken(payload: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """Some of the facts' rows; float8 has no indexing of its own."""
    return payload.view(torch.uint8)[list(which)].view(payload.dtype)
