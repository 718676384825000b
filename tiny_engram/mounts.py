"""What carries concepts into one encoder, and out again. Nothing of diffusers; may import deep_mounts, encoded, fast_tokenizers, hooks,
input_mount, pooled, second_pass, store, templates and what is below.
"""

import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiny_engram.config import INPUT, POOLED, SPAN
from tiny_engram.deep_mounts import DeepMounts, layer_of
from tiny_engram.encoded import EncodedPrompts
from tiny_engram.encoded_positions import EncodedPositions
from tiny_engram.fast_tokenizers import fast_tokenizer
from tiny_engram.fired import Fired, Plan
from tiny_engram.hooks import CallHook, HookSet, MountError
from tiny_engram.input_mount import encode_with_input, moved_embeddings, token_embeddings
from tiny_engram.pooled import apply_pooled, pooled_vector, with_pooled_vector
from tiny_engram.second_pass import (
    MovedRow,
    last_hidden_state,
    row_options,
    states_read,
    take_over,
    with_hidden_states,
    with_last_hidden_state,
)
from tiny_engram.store import ConceptStore
from tiny_engram.templates import PromptTemplates
from tiny_engram.triggers import CompiledTrigger

__all__ = ["EncoderMounts"]


MOST_PROOFS = 128  # more than the layers of any encoder


class _Call(threading.local):
    """What one thread's current encoder call carries from the pre-hook to the hooks after it.

    `ids` are the prompts' `[batch, time]`, templates masked; `skipped` is true while the pipeline may still apply the final norm to an
    earlier state; `again` during a second pass. `moved` holds what fires at the token embeddings, by row of the batch.
    """

    def __init__(self) -> None:
        self.inside = self.skipped = self.again = False
        self.raw: torch.Tensor | None = None
        self.ids: torch.Tensor | None = None
        self.plan: tuple[Fired, ...] = ()
        self.moved: dict[int, tuple[Fired, ...]] = {}


class EncoderMounts(HookSet):
    """Adds what fires in a prompt to an encoder's states: at the mount `input`, inside it (`deep.{i}`), and the residual at the mount
    `span` after it; or to its pooled vector (`pooled`), where that is all that pipelines use of it.

    Before the encoder runs: ids -> spans -> rows. After it: residual at the spans of `last_hidden_state`, in a copy of the output;
    pooled vectors and other states are passed on as they are. With clip_skip the pipeline applies the final norm itself to an earlier
    state; `final_norm` calls from outside the encoder's own forward get the residual too. Where pipelines read an entry of
    `hidden_states` (`reads`), that one and those before it, which clip_skip reads, get the residual instead; where several, these.

    A prompt in which a concept with `input` rows fires is encoded once more, alone, with the token embeddings at its spans moved. The
    states at those spans, of every layer, are taken from that pass, and the rest of the sentence keeps the bits of the plain one.

    Attributes:
        lower_case: does the pipeline write all prompts in lower case?
        templates: words that the pipeline puts around prompts, in which nothing fires.
        encoded: which prompt each row of states belongs to; learnt while concepts with context mounts or maps are loaded, or `notes_all`.
        calls: of the encoder. prompts: rows of ids that it encoded with any concept loaded, or a library open.
        proof: states that fired, while it is still to be seen that the denoiser gets them; None once it was, or the probe saw it.
        on_fire: told (role, plan) of each call in which a trigger fires. on_ids: told the ids of each call.
        notes_all: a concept that a later prompt calls may be active at the denoiser, which then reads this prompt's rows too.
        seek: told the ids of each call, templates masked, before they are matched: loads what they call and is not loaded yet; returns
            what they call and stays silent.
        check_denoiser: called before a prompt is encoded while a concept is active at the denoiser.
    """

    def __init__(
        self,
        module: nn.Module,
        store: ConceptStore,
        *,
        role: str,
        tokenizer: Any = None,
        owner: Any = None,
        final_norm: nn.Module | None = None,
        reads: int | tuple[int, ...] | None = None,
        pooled: bool = False,
        templates: PromptTemplates | None = None,
        lower_case: bool = False,
    ) -> None:
        self.role = role
        self.store = store
        self._tokenizer = tokenizer
        self.encoded: EncodedPrompts | EncodedPositions = EncodedPrompts()
        self.lower_case = lower_case
        self.templates = templates or PromptTemplates((), 0)
        self.unseen = 0
        self.proof: list[torch.Tensor] | None = None
        self.on_fire: Callable[[str, Plan], None] | None = None
        self.on_ids: Callable[[torch.Tensor], None] | None = None
        self.notes_all = False
        self.seek: Callable[[torch.Tensor], Mapping[str, CompiledTrigger]] | None = None
        self.check_denoiser: Callable[[], None] | None = None
        self.calls = self.prompts = 0
        self._seconds = 0.0
        self._reads, self._pooled = reads, pooled
        self._deep = DeepMounts(module, role=role, owner=owner)
        self._module = weakref.ref(module)
        self._state = _Call()
        self.hooks = [
            CallHook(module, self._before, owner, pre=True, strict=True),
            CallHook(module, self._after, owner, pre=False, strict=True, always=True),
        ]
        if final_norm is not None:
            self.hooks.append(CallHook(final_norm, self._norm, owner, pre=False, strict=False))
        self._embeddings: list[CallHook] = []
        self._owner = owner

    @property
    def seconds(self) -> float:
        """Seconds spent in the hooks."""
        return self._seconds + self._deep.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds, self._deep.seconds = value, 0.0

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; of a slow one the fast twin, with all tokens that it has now."""
        return None if self._tokenizer is None else fast_tokenizer(self._tokenizer)

    @property
    def module(self) -> nn.Module:
        """The encoder. Raises MountError once it is gone."""
        module = self._module()
        if module is None:
            raise MountError(f"the encoder of role {self.role!r} is gone; attach to the pipeline again")
        return module

    # -- hooks ---------------------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks in place: around the encoder, and at its token embeddings."""
        super().attach()
        if INPUT in self.store.mounts:
            self._follow_embeddings()  # from the start, so that an encoder compiled later has them in its graphs

    def detach(self) -> None:
        """Take all hooks out, those at the encoder's layers too."""
        super().detach()
        self._deep.detach()
        for hook in self._embeddings:
            hook.detach()

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self._state
        if state.again:
            return
        begin = time.perf_counter()
        state.inside, state.skipped, state.plan, state.moved, state.ids = True, False, (), {}, None
        self.calls += 1
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self.on_ids is not None and isinstance(ids, torch.Tensor):
            self.on_ids(ids)
        if len(self.store) or self.seek is not None:
            if not isinstance(ids, torch.Tensor):
                raise MountError(
                    f"the encoder of role {self.role!r} was called without input_ids; concepts need token ids: pass them, or detach"
                )
            state.raw = ids.reshape(-1, ids.shape[-1])
            state.ids = ids = self.templates.masked(state.raw)
            if self.seek is not None:
                self.seek(ids)
            if self.store.active_at_denoiser and self.check_denoiser is not None:
                self.check_denoiser()
            self.prompts += len(ids)
            plan = self.store.plan_at((POOLED if self._pooled else SPAN,), ids)
            state.plan = plan.fired
            self._deep.begin(self._fired_inside(ids, plan.held))
            # Row by row, as they are encoded.
            rows = sorted({row for _, row, *_ in plan.places}) if INPUT in plan.held else []
            found = {row: self.store.plan_at((INPUT,), ids[row : row + 1]).fired for row in rows}
            state.moved = {row: fired for row, fired in found.items() if fired}
            state.skipped = self._reads is None and not self._pooled and bool(kwargs.get("output_hidden_states"))
            if plan.places and self.on_fire is not None:
                self.on_fire(self.role, plan)
        self._seconds += time.perf_counter() - begin

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        state = self._state
        if state.again:
            return None
        begin = time.perf_counter()
        result = output
        try:
            if output is not None:  # None: the forward raised
                self._deep.finish()
                if state.moved:
                    result = self._taken_over(output, [self._second_pass(row, args, kwargs) for row in state.moved])
                result = self._with_residual(result)
        finally:
            state.inside = False
        if not state.skipped:
            state.plan, state.ids = (), None
        state.moved = {}
        self._seconds += time.perf_counter() - begin
        return None if result is output else result

    def _fired_inside(self, ids: torch.Tensor, held: Collection[str]) -> dict[int, tuple[Fired, ...]]:
        """What fires inside the encoder, by number of the layer; `held` are the mounts at which what fires has rows."""
        found = {layer_of(mount): self.store.plan_at((mount,), ids).fired for mount in self.store.loaded_deep if mount in held}
        return {layer: fired for layer, fired in found.items() if layer is not None and fired}

    def _taken_over(self, output: Any, moved: list[MovedRow]) -> Any:
        if not self._pooled:
            return take_over(output, moved)
        pooled = pooled_vector(output)
        own = torch.cat([pooled_vector(one.output) for one in moved])
        rows = torch.tensor([one.row for one in moved], device=pooled.device)
        return with_pooled_vector(output, pooled.index_put((rows,), own.to(pooled)))

    def _with_residual(self, output: Any) -> Any:
        """The output, in a copy where something is added to what pipelines read of it."""
        if self._pooled:
            return with_pooled_vector(output, apply_pooled(pooled_vector(output), self._state.plan)) if self._state.plan else output
        if self._reads is not None:
            result = with_hidden_states(output, self._reads, self._moved) if self._state.plan else output
            if self._noted:
                # clip_skip reads an earlier entry, in pipelines with CLIP alone.
                earlier = str(getattr(self.module.config, "model_type", "")).startswith("clip")
                found = states_read(result, self._reads, earlier=earlier)
                # Of several that stand side by side the first is enough to know a row by.
                for states in found if isinstance(self._reads, int) else found[:1]:
                    self._note(states)
            return result
        hidden = last_hidden_state(output)
        added = self._apply(hidden)
        return output if added is hidden else with_last_hidden_state(output, added)

    def _second_pass(self, row: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MovedRow:
        """One prompt of the batch alone, with what fires in it added to its token embeddings."""
        state, encoder = self._state, self.module
        assert state.ids is not None and state.raw is not None
        fired, own = state.moved[row], state.ids[row : row + 1]

        def move(embeddings: torch.Tensor) -> torch.Tensor:
            for one in fired:
                embeddings = one.apply(embeddings)
            return embeddings

        self._follow_embeddings()
        self._deep.begin(self._fired_inside(own, self.store.loaded_deep))
        options = row_options(encoder, args, kwargs, row, len(state.ids))
        state.again = True
        try:
            output = encode_with_input(encoder, state.raw[row : row + 1], move, hooked=True, **options)
            self._deep.finish()
        finally:
            state.again = False
        return MovedRow(row, torch.cat([one.spans.flat()[1] for one in fired]), output)

    def _follow_embeddings(self) -> None:
        """A hook on each module that looks tokens up now: resizing the vocabulary, as textual inversion does, puts another one there."""
        modules = token_embeddings(self.module)
        if modules != tuple(hook.module for hook in self._embeddings):
            for hook in self._embeddings:
                hook.detach()
            self._embeddings = [CallHook(m, self._embedded, self._owner, pre=False, strict=False) for m in modules]
        for hook in self._embeddings:
            hook.attach()

    def _embedded(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor | None:
        return moved_embeddings(output)

    def _norm(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor | None:
        """The final norm, called by the pipeline itself on an earlier state of the last encode (clip_skip)."""
        state = self._state
        if state.inside or not state.skipped or state.ids is None or output.shape[:2] != state.ids.shape:
            return None
        begin = time.perf_counter()
        result = self._apply(output)
        state.skipped, state.plan, state.ids = False, (), None
        self._seconds += time.perf_counter() - begin
        return result

    @property
    def _noted(self) -> bool:
        return self._state.ids is not None and (self.store.any_at_denoiser or self.notes_all)

    def _apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """The states with all residuals, known to the context mounts."""
        hidden = self._moved([hidden])[0] if self._state.plan or self._noted else hidden
        if self._noted:
            self._note(hidden)
        return hidden

    def _note(self, states: torch.Tensor) -> None:
        assert self._state.ids is not None
        self.encoded.note(self._state.ids, states)

    def _moved(self, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """States with all residuals, one pass per shape of concept; spans never overlap, so the order does not matter."""
        plan, ids = self._state.plan, self._state.ids
        if ids is None:
            return states
        expected = (*ids.shape, self.store.width)
        for hidden in states:
            if tuple(hidden.shape) != expected:
                raise MountError(f"the encoder of role {self.role!r} gave states of shape {list(hidden.shape)}, expected {list(expected)}")
        for fired in plan:
            states = fired.apply_each(states)
        if plan and self.proof is not None:
            row, time, _ = (int(index[0]) for index in plan[0].spans.flat())
            proofs = [*self.proof, *(hidden[row, time].detach().clone() for hidden in states)]
            self.proof = proofs[-MOST_PROOFS:]
        return states
