"""The adapter: what a pipeline carries. Concepts are loaded by name, switched, explained and taken out again.

May import everything below it; `adapter.py` makes it for a pipeline. Hooks on the encoder hold the adapter, the adapter holds pipeline
and encoders weakly: nothing is kept alive, nothing is added to the module tree.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch

from tiny_engram.adapter_reports import explain_prompts, registration_report, texts_of
from tiny_engram.concept import Concept
from tiny_engram.config import ConceptConfig, at_encoder
from tiny_engram.contexts import ContextMounts
from tiny_engram.errors import TinyEngramError
from tiny_engram.explanation import Explanation
from tiny_engram.fired import Plan
from tiny_engram.fitting import extend_concept, fit_concept
from tiny_engram.hooks import MountError
from tiny_engram.loaded import Loaded, LoadedConcepts
from tiny_engram.matching import TriggerIndex
from tiny_engram.mounts import EncoderMounts
from tiny_engram.open_libraries import Libraries, OpenLibraries
from tiny_engram.place_hooks import PlaceHooks
from tiny_engram.probe import probe
from tiny_engram.registration import RegistrationReport
from tiny_engram.residual import Spans
from tiny_engram.role_mounts import asked_of, mounts_at
from tiny_engram.schedule_run import ScheduleRun
from tiny_engram.scheduling import Scheduling
from tiny_engram.sources import Source, SourceOptions, load_source
from tiny_engram.store import checked_strength
from tiny_engram.triggers import CompiledTrigger, compile_trigger
from tiny_engram.watch import DenoiserWatch

__all__ = ["EngramAdapter"]

logger = logging.getLogger(__name__)


def _plain(module: Any) -> Any:
    """The module that torch.compile wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


class EngramAdapter(Scheduling, Libraries):
    """Concepts on one pipeline; made by `attach(pipe)`.

    Attributes:
        mounts: role -> EncoderMounts, one for each text encoder.
        contexts: role -> ContextMounts, what the denoiser's attentions read of each encoder.
        absent: roles of the family that this pipeline has no encoder for, by design.
    """

    def __init__(self, pipe: Any, family: Any) -> None:
        self._pipe = weakref.ref(pipe)
        self.family = family
        self.mounts: dict[str, EncoderMounts] = {}
        self.contexts: dict[str, ContextMounts] = {}
        self.absent: tuple[str, ...] = tuple(s.role for s in family.encoders if getattr(pipe, s.encoder, None) is None)
        self._loaded = LoadedConcepts()
        self._denoisers = {name: weakref.ref(_plain(module)) for name, module in family.present(pipe).items()}
        hooks = PlaceHooks(denoisers=self._present_denoisers, owner=self)
        # Of these, concepts need not have rows: a pooled vector is not local.
        self._optional = {spec.role for spec in family.encoders if spec.pooled}
        for spec in family.encoders:
            if spec.role in self.absent:
                continue
            mount, contexts = mounts_at(pipe, family, spec, owner=self, hooks=hooks)
            mount.check_denoiser = self._check_denoiser
            self.mounts[spec.role], self.contexts[spec.role] = mount, contexts
        self._watch = DenoiserWatch(
            family, family.present(pipe), self.mounts, self.contexts, owner=self, active=self._watched, encoders=self._encoders
        )
        self._schedules = ScheduleRun(self._loaded, self.mounts, pipe=self._pipe, modules=self._readers, owner=self)
        self._libraries = OpenLibraries(self.mounts, self._optional, self._load_found)

    # -- the pipeline --------------------------------------------------------------------------------------------------------

    @property
    def pipe(self) -> Any:
        """The pipeline. Raises TinyEngramError once it is gone (the adapter does not keep it alive)."""
        pipe = self._pipe()
        if pipe is None:
            raise TinyEngramError("the pipeline of this adapter is gone; keep a reference to it, or attach to another")
        return pipe

    @property
    def seconds(self) -> float:
        """Seconds spent in our hooks, around the encoders, before the denoiser and inside it, since attach."""
        return self._watch.seconds + sum(mount.seconds for mount in (*self.mounts.values(), *self.contexts.values()))

    @property
    def base(self) -> str:
        """Short id of the base model: the last part of where the pipeline was loaded from."""
        config = getattr(self.pipe, "config", {})
        return Path(str(config.get("_name_or_path") or "")).name

    def attach(self) -> None:
        """Register the hooks and probe them; `tiny_engram.attach` calls this once. Raises MountError and takes them out if one is dead."""
        for mount in self.mounts.values():
            mount.attach()
        self._watch.attach()
        try:
            probe(self.pipe, self.family, self.mounts)
        except BaseException:
            self.detach()
            raise
        for mount in self.mounts.values():
            mount.on_fire = self._log

    def detach(self) -> None:
        """Take all hooks out and forget all concepts; the pipeline is as it was before `attach`."""
        self.close_library()
        for name in list(self._loaded):
            self.unload_concept(name)
        for mount in (*self.mounts.values(), *self.contexts.values()):
            mount.detach()
        self._watch.detach()
        self._schedules.detach()

    def _readers(self) -> list[Any]:
        """All modules of the pipeline that are given text states: its denoisers, and a ControlNet."""
        pipe = self._pipe()
        return [] if pipe is None else [*self.family.present(pipe).values(), getattr(pipe, "controlnet", None)]

    def _log(self, role: str, plan: Plan) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        places: dict[str, list[str]] = {}
        for name, b, s, n in plan.places:
            places.setdefault(name, []).append(f"prompt {b} tokens {s}..{s + n - 1}")
        for name, where in places.items():
            logger.info("concept %r fires at %s: %s (strength %g)", name, role, ", ".join(where), self._loaded.strength_now(name))

    def _encoders(self) -> dict[str, tuple[str, Any]]:
        """Role -> (attribute, the encoder that the pipeline has there now)."""
        pipe = self._pipe()
        specs = (spec for spec in self.family.encoders if spec.role in self.mounts)
        return {spec.role: (spec.encoder, None if pipe is None else getattr(pipe, spec.encoder)) for spec in specs}

    def _present_denoisers(self) -> list[Any]:
        """The pipeline's; once the pipeline is gone, and others use its parts, those that it had."""
        pipe = self._pipe()
        found = [known() if pipe is None else getattr(pipe, name) for name, known in self._denoisers.items()]
        return [denoiser for denoiser in found if denoiser is not None]

    def _check_denoiser(self) -> None:
        """Before a prompt is encoded for the denoiser: its watch, if another feature removed it, is put back, and brings the mounts back.

        Raises MountError if they are on a denoiser that the pipeline no longer has.
        """
        pipe = self._pipe()
        for name, denoiser in self._denoisers.items():
            now = None if pipe is None else getattr(pipe, name)
            if now is not None and _plain(now) is not denoiser():
                raise MountError(
                    f"{name} of the pipeline was replaced after attach, so the context mounts of its concepts are not in it; "
                    "put it back, or detach, attach to the pipeline again and load the concepts there"
                )
        self._watch.attach()

    def _watched(self) -> list[str]:
        """Active concepts with rows at an encoder's own states: embeddings hold them as they were when the prompt was encoded."""
        places = {name: self._loaded[name].concept.roles.values() for name in self.get_active_concepts()}
        return [name for name, roles in places.items() if any(at_encoder(mount) for place in roles for mount in place.mounts)]

    # -- concepts ------------------------------------------------------------------------------------------------------------

    def load_concept(
        self,
        source: Source,
        name: str | None = None,
        strength: float = 1.0,
        *,
        rename: bool = False,
        trigger: str | None = None,
        **options: Unpack[SourceOptions],
    ) -> str:
        """Load one concept and switch it on; returns the name it goes by.

        Args:
            source: a Concept; a concept file; a folder that holds one; or a Hub id "user/repo" (a path that exists comes first).
            name: the name here; None takes the file's.
            strength: factor of the residual; 0 is bit-identical to the base.
            rename: take "name-2" and so on if the name is taken, instead of raising.
            trigger: fire on this text instead of the file's; it must take as many tokens.
            options: weight_name, subfolder, revision, token, cache_dir, local_files_only, force_download: see SourceOptions.

        Raises:
            TinyEngramError: not there or not open to us; made for another tokenizer, width, set of encoders or denoiser; name or
                trigger taken; nothing is loaded then.
        """
        self._check_attached()
        concept = load_source(source, **options)
        strength = checked_strength(strength)
        name = self._loaded.free_name(name or concept.name, rename)
        layouts = {role: at.layout for role, at in self.contexts.items()}
        compiled = fit_concept(name, concept, self.mounts, layouts, trigger, optional=self._optional)
        if any(place.maps or not all(map(at_encoder, place.mounts)) for place in concept.roles.values()):
            self._check_denoiser()
        if concept.base and self.base and concept.base != self.base:
            text = "concept %r was made on base %r, this pipeline is %r: tokenizer and width agree, results may differ"
            logger.warning(text, name, concept.base, self.base)
        added: list[str] = []
        try:
            for role, place in concept.roles.items():
                mount = self.mounts[role]
                moved = mount.store.add(name, compiled[role], place.mounts, concept.config, strength, maps=place.maps)
                added.append(role)
                if moved:
                    logger.info("rows of concept %r collided at %s: moved %d times", name, role, moved)
                self.contexts[role].settle()
        except Exception:
            for role in added:
                self.mounts[role].store.remove(name)
                self.contexts[role].settle()
            raise
        self._loaded[name] = Loaded(concept, compiled, strength)
        self._refresh(name)
        return name

    def _refresh(self, *names: str) -> None:
        """Bring the mounts in line with what these concepts' switches say."""
        for name in names:
            for role in self._loaded[name].concept.roles:
                self.mounts[role].store.set_strength(name, self._loaded.strength_now(name))
        self._changed()

    def set_concepts(self, names: str | Sequence[str] | None, strengths: float | Sequence[float] | None = None) -> None:
        """Make exactly these concepts active; strengths None keeps each one's own. Unknown names raise and list the known ones.

        Those of open libraries may be among them; no others of a library fire then, and a prompt that calls one is warned about. None
        takes the choice back: all that are loaded are active, and every trigger of an open library fires.
        """
        chosen = list(self._loaded) if names is None else [names] if isinstance(names, str) else list(names)
        self._libraries.bring(name for name in dict.fromkeys(chosen) if name not in set(self._loaded))
        self._loaded.choose(chosen, strengths)
        self._libraries.quiet = names is not None
        self._refresh(*self._loaded)

    def set_strength(self, name: str, value: float) -> None:
        """Strength of one concept. 0 is bit-identical to the base.

        Takes effect at the next encode; at context mounts already at the denoiser's next call, also for embeddings that were kept.
        """
        self._loaded[name].strength = checked_strength(value)
        self._refresh(name)

    def enable_concepts(self) -> None:
        """Undo `disable_concepts`."""
        self._switch(True)

    def disable_concepts(self) -> None:
        """Switch all concepts off without unloading them: bit-identical to the base."""
        self._switch(False)

    def _switch(self, enabled: bool) -> None:
        self._loaded.enabled = enabled
        self._refresh(*self._loaded)

    def unload_concept(self, name: str | None = None) -> None:
        """Remove one concept, or all of them; the base is bit-identical again."""
        for each in list(self._loaded) if name is None else [name]:
            for role in self._loaded[each].concept.roles:
                self.mounts[role].store.remove(each)
                self.contexts[role].settle()
            del self._loaded[each]
        self._changed()
        self._schedules.settle()

    def delete_concept(self, names: str | Sequence[str]) -> None:
        """Remove the named concepts, all or none: an unknown name raises before anything is removed."""
        names = [names] if isinstance(names, str) else list(names)
        self._loaded.require(*names)
        for name in dict.fromkeys(names):
            self.unload_concept(name)

    def get_list_concepts(self) -> list[str]:
        """Names of all loaded concepts, in the order of loading."""
        return list(self._loaded)

    def get_active_concepts(self) -> list[str]:
        """Names of the concepts that can fire: enabled, active, strength not 0."""
        return self._loaded.active()

    def concept(self, name: str) -> Concept:
        """A loaded concept."""
        return self._loaded[name].concept

    def strength(self, name: str) -> float:
        """A loaded concept's own strength, whether it is active or not."""
        return self._loaded[name].strength

    # -- registering and training --------------------------------------------------------------------------------------------

    def compile(self, trigger: str, aliases: Sequence[str] = ()) -> dict[str, CompiledTrigger]:
        """The trigger as each encoder's tokenizer sees it. Raises TriggerError for one that cannot be registered."""
        return {
            role: compile_trigger(trigger, mount.tokenizer, aliases, compressed=mount.store.compressed, lower_case=mount.lower_case)
            for role, mount in self.mounts.items()
        }

    def register(
        self, trigger: str, aliases: Sequence[str] = (), name: str | None = None, config: ConceptConfig | None = None
    ) -> RegistrationReport:
        """What this trigger would mean on this pipeline: tokens, rows, collisions, near misses, warnings. Changes nothing."""
        about = self.pipe, self.family, self.mounts, (made := self.compile(trigger, aliases)), config or ConceptConfig()
        return registration_report(*about, name=name, absent=self.absent, in_libraries=self._libraries.owners(made))

    def new_concept(
        self, trigger: str, aliases: Sequence[str] = (), name: str | None = None, config: ConceptConfig | None = None
    ) -> Concept:
        """An untrained concept, which adds nothing, for this pipeline; not loaded.

        Raises TinyEngramError for mounts or maps that the pipeline does not have.
        """
        config = config or ConceptConfig()
        mounts, maps = asked_of(config, self.mounts, self.family.refuses)
        return Concept.new(
            {role: compiled for role, compiled in self.compile(trigger, aliases).items() if mounts[role] or maps[role]},
            widths={role: mount.store.width for role, mount in self.mounts.items()},
            fingerprints={role: mount.store.compressed.fingerprint for role, mount in self.mounts.items()},
            mounts=mounts,
            maps=maps,
            mount_widths={role: mount.store.widths for role, mount in self.mounts.items()},
            name=name,
            config=config,
            base=self.base,
        )

    def add_alias(self, concept: Concept, alias: str) -> Concept:
        """A copy of a (trained) concept that fires on one more spelling, whose rows start as a copy and are marked untrained."""
        return extend_concept(concept, alias, self.compile(concept.trigger, (*concept.aliases, alias)))

    def spans(self, concept: Concept, input_ids: torch.Tensor, role: str | None = None) -> Spans:
        """Where a concept (loaded or not) would fire alone: input_ids int64 `[batch, time]` -> Spans, for `apply_concept`."""
        role = role or next(iter(self.mounts))
        place = concept.roles[role]
        index = TriggerIndex(self.mounts[role].store.index.edges)
        index.add(concept.name, CompiledTrigger(concept.trigger, concept.aliases, place.variants, place.groups))
        found = index.match(input_ids.detach().cpu().numpy())
        offsets = [index.entries[e].group.offset for e in found.entry.tolist()]
        return Spans.of(zip(found.batch.tolist(), found.start.tolist(), found.length.tolist(), offsets, strict=True))

    # -- prompts -------------------------------------------------------------------------------------------------------------

    def encode(
        self, prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None = None, num_images_per_prompt: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Prompt embeds (and negative ones, if given) with the concepts in, as the denoiser takes them: `[batch, time, width]`.

        Of pipelines that take masks, pooled vectors or more beside them, `embeds` gives all.
        """
        embeds = self.embeds(prompt, negative_prompt, num_images_per_prompt)
        return embeds["prompt_embeds"], None if negative_prompt is None else embeds["negative_prompt_embeds"]

    def embeds(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        **options: Any,
    ) -> Mapping[str, Any]:
        """All that `pipe(...)` takes in the place of prompts, with the concepts in: `pipe(**adapter.embeds("a photo of sks"))`.

        options: of `pipe(...)`; those that `encode_prompt` has too are given to it.

        Raises TinyEngramError: no text, less than one picture, an option that neither of them has, or the adapter was detached.
        """
        self._check_attached()
        self.family.check_options(self.pipe, options)
        prompts, negative = texts_of(prompt), None if negative_prompt is None else texts_of(negative_prompt, "negative_prompt")
        if not prompts:
            raise TinyEngramError("prompt is an empty list, expected text or a list of texts")
        if num_images_per_prompt < 1:
            raise TinyEngramError(f"num_images_per_prompt is {num_images_per_prompt}, expected at least 1")
        if negative is not None and len(negative) == 1:
            negative = negative * len(prompts)
        with torch.no_grad():
            return self.family.embeds(self.pipe, prompts, negative, num_images_per_prompt, **options)

    def explain(self, prompt: str | Sequence[str], negative_prompt: str | Sequence[str] | None = None) -> Explanation:
        """Which spans fire in these prompts, which triggers were seen but do not fire, and why. Runs no encoder."""
        self._check_attached()
        negative = [] if negative_prompt is None else texts_of(negative_prompt, "negative_prompt")
        with self._schedules.awake():
            return explain_prompts(self.pipe, self.family, self.mounts, self._loaded, texts_of(prompt), negative)

    def _check_attached(self) -> None:
        if not any(hooks.attached for hooks in (self._watch, *self.mounts.values())):
            raise TinyEngramError(
                f"this adapter was detached, so its concepts would not reach the {type(self.pipe).__name__}; "
                "call tiny_engram.attach(pipe) and load them there"
            )
