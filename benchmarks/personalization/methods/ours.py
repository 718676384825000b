"""Our method: a few quantised rows for each position of the trigger, added where the denoiser reads it.

At every mount a position owns `columns` rows of 32 values. A fixed basis turns them into a key, which a gate compares with the
state that stands there, and a value, which is added, bounded by a share of the span's own norm: `tiny_engram.residual`, which
serving calls too. Whatever does not fire keeps its bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from benchmarks.personalization.methods.class_fit import fit_class
from benchmarks.personalization.methods.maps import Maps, ranks_of
from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.methods.ours_options import Options
from benchmarks.personalization.methods.product import attention_blocks, compiled_trigger
from benchmarks.personalization.methods.spans import BASES, CONFIG, Places, context_inputs, encoder_with, gathered, hooked, moved
from benchmarks.personalization.runs import Run, Shares
from tiny_engram.concept import Concept
from tiny_engram.config import BLOCK
from tiny_engram.kernels.fixed_basis import fixed_basis
from tiny_engram.mount_names import ContextName
from tiny_engram.quantization import fake_quantize, quantize
from tiny_engram.role_mounts import vocabulary_of

if TYPE_CHECKING:
    from benchmarks.personalization.base import Base

__all__ = ["Ours"]

# What the gate computes with: (gain, bias). The last is one to the last bit of a float32 sigmoid.
GATES: dict[str, tuple[float, float]] = {"learned": (1.0, 0.0), "start": (1.0, 0.0), "fixed": (0.0, 0.0), "removed": (0.0, 40.0)}


class Ours(Adapters):
    """Rows of many runs. `preset` holds a method's own options, which `Run.options` go over; see `ours_options.Options`.

    Attributes:
        strength: factor of every residual; 0 leaves the base as it is.
        positions: that each run's trigger takes; a stack holds room for the most.
        shipped: positions of each run that a concept file holds: other spellings, which are not taught, have some of their own.
    """

    preset: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, base: Base, runs: Sequence[Run]) -> None:
        super().__init__(base, runs)
        each = Options.of_stack(runs, self.preset)
        self.options = options = each[0]
        self.ema_decay, self.schedule, self.warmup, self.betas = options.ema, options.schedule, options.warmup, (0.9, options.beta2)
        self.shares = Shares(prior=options.prior, collage=options.collage)
        self.strength = 1.0
        # what `states` found and read, and what that holds for; with the batch, so that its id is not another's
        self._ahead: tuple[tuple[Any, ...], Rows, Places, Mapping[str, torch.Tensor]] | None = None
        self.positions = [len(base.word_ids(base.subject(run.subject).trigger)) for run in runs]
        self.shipped = [compiled_trigger(base, run).positions for run in runs]
        self.widths = {kind: base.context_width if kind in options.context else base.width for kind in options.kinds}
        for width in self.widths.values():
            if options.columns and options.columns > CONFIG.columns_at(width):
                raise ValueError(f"columns is {options.columns}; expected at most {CONFIG.columns_at(width)} at width {width}")
        layers = base.text_encoder.config.num_hidden_layers
        for kind in options.deep:
            if kind != "input" and int(kind.removeprefix("layer-")) >= layers:
                raise ValueError(f"mount {kind} of an encoder with {layers} layers; expected layer-0 to layer-{layers - 1}")
        self.blocks = attention_blocks(base)
        self.groups = _groups(base, self.blocks, options.share)
        self._timesteps: int = base.scheduler.config.num_train_timesteps

        self.rows, self.gain, self.bias = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        count, most = len(runs), max(self.positions)
        for kind in options.kinds:
            rows = torch.zeros(count, self.sets(kind), most, self.kept(kind), CONFIG.head_dim, device=base.device)
            self._hold("rows", kind, rows, frozen=kind == "key" and options.key_lock)
            rho = torch.tensor([o.rho_of(kind) for o in each], dtype=torch.float32, device=base.device)
            self.register_buffer(f"rho_{kind}", rho)
        for kind in ("shared",) if options.gate_shared else options.kinds:
            shape = (count, 1 if options.gate_shared else self.sets(kind), most)
            for name, value in zip(("gain", "bias"), GATES[options.gate], strict=True):
                self._hold(name, kind, torch.full(shape, value, device=base.device), frozen=options.gate != "learned")
        self.maps = Maps(base, count, ranks_of(options.maps), quantised=options.quantise)
        own = {f"rows.{kind}": options.deep_rate if kind in options.deep else 1.0 for kind in options.kinds}
        parts = {"maps": options.map_rate, "gain": options.gate_rate, "bias": options.gate_rate}
        self.rate_factors = {name: own[name] if name in own else parts[name.split(".")[0]] for name, _ in self.named_parameters()}
        self._start(base)

    def _start(self, base: Base) -> None:
        """Set the rows that do not start at zero."""
        if self.options.init != "zero" or self.options.key_lock:
            fit_class(self, base)

    def _hold(self, name: str, kind: str, tensor: torch.Tensor, *, frozen: bool) -> None:
        if frozen:
            self.register_buffer(f"{name}_{kind}", tensor)
        else:
            getattr(self, name)[kind] = nn.Parameter(tensor)

    def held(self, name: str, kind: str) -> torch.Tensor:
        """Of a mount kind, trained or not: "rows" `[runs, sets, positions, kept, 32]`, "gain" and "bias" `[runs, sets or 1, positions]`."""
        kind = "shared" if name != "rows" and self.options.gate_shared else kind
        return getattr(self, name)[kind] if kind in getattr(self, name) else getattr(self, f"{name}_{kind}")

    def kept(self, kind: str) -> int:
        """Rows that are held at each position of a mount kind, of those that the basis reads at its width; the others are zero."""
        return self.options.columns or CONFIG.columns_at(self.widths[kind])

    def sets(self, kind: str) -> int:
        """Sets of rows at a mount kind: one, or groups of cross-attentions times bands, group by group."""
        return (max(self.groups) + 1) * self.options.bands if kind in self.options.context else 1

    # -- the arithmetic ------------------------------------------------------------------------------------------------------

    def _read(self) -> Mapping[str, torch.Tensor]:
        """Rows by mount kind, as `held` has them, and the "maps", as they would be read from a file: all in one call of the quantiser."""
        held = {kind: self.held("rows", kind) for kind in self.options.kinds}
        if self.maps.ranks:
            held["maps"] = self.maps.values_of
        if not self.options.quantise:
            return held
        flat = [x.flatten(1) for x in held.values()]
        read = fake_quantize(torch.cat(flat, 1).unflatten(1, (-1, BLOCK))).flatten(1)
        parts = read.split([x.shape[1] for x in flat], 1)
        return {name: part.view(x.shape) for (name, x), part in zip(held.items(), parts, strict=True)}

    def _moment(self, rows: Rows) -> tuple[Any, ...]:
        """What values that were read for a batch hold for: that batch, gradients or none, and parameters that nothing has changed."""
        return id(rows), torch.is_grad_enabled(), *(x._version for x in (*self.parameters(), *self.buffers()))

    def _table(self, kinds: Sequence[str], read: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Rows, gains and biases of these mount kinds by (run, position, band), `[runs * positions * bands, values]`, and how many
        values each of the three takes."""
        bands = self.options.bands if kinds[0] in self.options.context else 1
        rows, gates = [], {"gain": [], "bias": []}
        for kind in kinds:
            held = read[kind].flatten(3).unflatten(1, (-1, bands))
            rows.append(held.permute(0, 3, 2, 1, 4).flatten(3))  # [runs, positions, bands, groups * kept * 32]
            for name, found in gates.items():
                gate = self.held(name, kind).expand(-1, self.sets(kind), -1).unflatten(1, (-1, bands))
                found.append(gate.permute(0, 3, 2, 1))
        parts = (rows, *gates.values())
        table = torch.cat([x for part in parts for x in part], -1).flatten(0, 2)
        return table, [sum(x.shape[-1] for x in part) for part in parts]

    def _moved(
        self,
        here: torch.Tensor,
        places: Places,
        kinds: Sequence[str],
        read: Mapping[str, torch.Tensor],
        band: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States `[N, width]` with what each group of these mount kinds adds, alone: `[groups of all kinds, N, width]`.

        `read` is what `_read` gives; `band` int64 `[N]` says whose rows are read where timesteps differ; kinds are all at the
        cross-attentions, or one alone.
        """
        table, sizes = self._table(kinds, read)
        index = places.run * max(self.positions) + places.position
        if band is not None:
            index = index * self.options.bands + band
        rows, gain, bias = gathered(table, index).split(sizes, -1)
        rows = rows.unflatten(1, (-1, self.kept(kinds[0]), CONFIG.head_dim)).transpose(0, 1)
        rhos = [self.get_buffer(f"rho_{kind}").expand(sizes[1] // len(kinds), -1) for kind in kinds]
        scale = (torch.cat(rhos) if len(rhos) > 1 else rhos[0])[:, places.run]
        if self.strength != 1.0:
            scale = self.strength * scale
        if self.options.norm == "plain":
            width = here.shape[-1]
            e = functional.pad(rows, (0, 0, 0, CONFIG.columns_at(width) - rows.shape[2])).flatten(2)
            value = fixed_basis(e, width=width, seed=BASES[1])
            scale = scale * value.square().sum(-1).clamp(min=1.0).sqrt()  # takes the bound out again
        return self.arithmetic(here, places, rows, gain.T, bias.T, scale)

    def arithmetic(
        self, here: torch.Tensor, places: Places, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """`spans.moved` with this method's basis; rows as they are read, `[mounts, N, kept, 32]`."""
        return moved(here, places, rows, gain, bias, scale, columns=CONFIG.columns_at(here.shape[-1]))

    def deep_changes(
        self, places: Places, kinds: Sequence[str], read: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        """What these mounts do inside an encoder that runs the fired rows of a batch alone; for `spans.encoder_with`."""
        values = self._read() if read is None else read

        def change(kind: str, states: torch.Tensor) -> torch.Tensor:
            new = self._moved(states[places.within, places.time], places, (kind,), values)[0]
            return states.index_put((places.within, places.time), new)

        return {kind: lambda states, kind=kind: change(kind, states) for kind in kinds}

    def places(self, rows: Rows) -> Places:
        return Places.of(rows, max(self.positions))

    def states(self, base: Base, rows: Rows) -> torch.Tensor:
        """The encoder's states, moved inside it and at the spans of the last one; rows without a span keep their bits."""
        states = rows.states
        moved_here = self.options.deep or "span" in self.options.kinds
        if not rows.spans or self.strength == 0 or not moved_here:
            return states
        places, read = self.places(rows), self._read()
        # for `attached`, which comes next in a step
        self._ahead = self._moment(rows), rows, places, read
        if self.options.deep:
            ids = rows.ids[places.rows]
            if self.options.deep_local and base.spec.causal and torch.is_grad_enabled():
                # nothing behind a trigger reaches it in an encoder that reads from left to right; few lengths, for graphs. What is
                # drawn keeps the bits of the shipped pipeline, which reads all.
                end = max(start + length for _, _, start, length in rows.spans)
                ids = ids[:, : -(-end // 8) * 8]
            new = encoder_with(base, ids, self.deep_changes(places, self.options.deep, read))
            if self.options.deep_local:
                states = states.index_put((places.batch, places.time), new[places.within, places.time].to(states.dtype))
            else:
                states = states.index_put((places.rows,), new.to(states.dtype))
        if "span" in self.options.kinds:
            new = self._moved(states[places.batch, places.time], places, ("span",), read)[0]
            states = states.index_put((places.batch, places.time), new)
        return states

    @contextmanager
    def attached(self, base: Base, rows: Rows, states: torch.Tensor) -> Iterator[None]:
        kinds = self.options.context
        mapped = bool(self.maps.ranks)
        ahead, self._ahead = self._ahead, None
        if not rows.spans or self.strength == 0 or not (kinds or mapped):
            yield
            return
        if ahead is not None and ahead[0] == self._moment(rows):
            places, values = ahead[2:]
        else:
            places, values = self.places(rows), self._read()
        extra = self.maps.hooks(base, rows, places, values["maps"], self.strength) if mapped else []
        if not kinds:
            with hooked(extra):
                yield
            return
        states = base.read(states)
        here = states[places.batch, places.time]
        sets = [(kind, group) for kind in kinds for group in range(max(self.groups) + 1)]
        which = torch.arange(len(sets), device=here.device)[:, None]
        now: dict[tuple[str, int], torch.Tensor] = {}

        def read(timestep: torch.Tensor | None) -> None:
            """Compute what all projections read; `timestep` of each row, or of all, where rows differ by it."""
            band = None
            if timestep is not None:
                share = timestep.to(here.device).expand(len(rows.ids)) * self.options.bands / self._timesteps
                band = share.long().clamp(max=self.options.bands - 1)[places.batch]
            new = self._moved(here, places, kinds, values, band)
            # all at once: a copy for each projection on its own would be as many kernels, forth and back
            whole = states.expand(len(sets), -1, -1, -1).index_put((which, places.batch, places.time), new.to(states.dtype))
            now.update(zip(sets, whole.unbind(), strict=True))

        def put(kind: str, group: int, x: torch.Tensor) -> torch.Tensor:
            if x.shape != states.shape:
                raise ValueError(f"the denoiser reads {list(x.shape)}, but the runs were attached for {list(states.shape)}")
            return now[kind, group].to(x.dtype)

        hooks = context_inputs(
            [
                (getattr(module, "to_k" if kind == "key" else "to_v"), lambda x, kind=kind, group=group: put(kind, group, x))
                for kind in kinds
                for group, (_, module) in zip(self.groups, base.cross_attentions, strict=True)
            ]
        )
        if self.options.bands > 1:
            hooks.append((base.denoiser, lambda _module, args, kwargs: read(torch.as_tensor(_timestep(args, kwargs))), True))
        else:
            read(None)
        with hooked(hooks + extra):
            yield

    # -- what is shipped -----------------------------------------------------------------------------------------------------

    def values(self, run: int) -> dict[str, torch.Tensor]:
        """Per mount kind, as a concept's file holds them: payload e4m3 `[sets, positions, kept, 32]`, scale uint8, gates float32."""
        own, found = self.positions[run], {}
        for kind in self.options.kinds:
            rows = self._as_shipped(self.held("rows", kind)[run, :, :own], run).cpu()
            if self.options.quantise:
                found[f"{kind}.payload"], found[f"{kind}.scale"] = quantize(rows)
            else:
                found[f"{kind}.rows"] = rows.half()
        for kind in ("shared",) if self.options.gate_shared else self.options.kinds:
            for name in ("gain", "bias"):
                found[f"{kind}.{name}"] = self._as_shipped(self.held(name, kind)[run, :, :own], run, GATES["start"][name == "bias"]).cpu()
        return found | self.maps.values(run)

    def _as_shipped(self, held: torch.Tensor, run: int, untaught: float = 0.0) -> torch.Tensor:
        """`[sets, positions, ...]` of a run with what a file holds for spellings that were not taught behind it."""
        more = self.shipped[run] - held.shape[1]
        return torch.cat([held.detach(), held.new_full((held.shape[0], more, *held.shape[2:]), untaught)], 1) if more else held.detach()

    def mounts(self) -> dict[str, tuple[str, int]]:
        """Mount name as the product spells it -> (kind, set). Raises ValueError for what no concept file can say."""
        options = self.options
        if not options.quantise:
            raise ValueError("quantise is False, but a concept file holds quantised rows; draw such a run by the bench")
        layers = [kind for kind in options.deep if kind != "input"]
        sentence = "input" in options.deep and not options.deep_local
        for name, bad in {"mounts": bool(layers), "deep_local": sentence, "norm": options.norm == "plain"}.items():
            if bad:
                raise ValueError(f"{name} is {getattr(options, name)!r}, which a concept file does not hold; draw such a run by the bench")
        found: dict[str, tuple[str, int]] = {kind: (kind, 0) for kind in options.kinds if kind in ("input", "span")}
        # the product shares rows within a block; any other sharing is written out, place by place
        where = dict.fromkeys(self.blocks) if options.share == "block" else range(len(self.groups))
        for kind in options.context:
            for place in where:
                group = self.groups[self.blocks.index(place) if isinstance(place, str) else place]
                for band in range(options.bands):
                    name = ContextName(str(place), kind, band, options.bands)
                    found[str(name)] = (kind, group * options.bands + band)
        return found

    def concept(self, base: Base, run: int) -> Concept:
        """One run as the product's concept, for `pipe.load_concept`."""
        subject, mounts, options, role = base.subject(self.runs[run].subject), self.mounts(), self.options, base.spec.role
        _, compressed = vocabulary_of(base.tokenizer)
        compiled = compiled_trigger(base, self.runs[run])
        if (taught := len(compiled.groups[0].canonical)) != self.positions[run]:
            raise ValueError(f"trigger {subject.trigger!r} has {taught} positions as it is written, expected {self.positions[run]}")
        ranks = self.maps.ranks
        config = dataclasses.replace(
            CONFIG,
            mounts=tuple(mounts),
            rho=options.rho,
            attention_rank=ranks.get("attention", 0),
            feedforward_rank=ranks.get("feedforward", 0),
        )
        pairs = {name.removesuffix("-in"): name for name in self.maps.factors if name.endswith("-in")}
        factors = {name.replace("-", "."): [self.maps.factors[f"{name}-{side}"][run].detach() for side in ("in", "out")] for name in pairs}
        made = Concept.new(
            {role: compiled},
            widths={role: base.width},
            fingerprints={role: compressed.fingerprint},
            mounts={role: tuple(mounts)},
            mount_widths={role: {mount: self.widths[kind] for mount, (kind, _) in mounts.items()}},
            maps={role: {name: (into.shape[0], into.shape[1]) for name, (into, _) in factors.items()}},
            name=subject.name,
            config=config,
            base=Path(base.pipe.config["_name_or_path"]).name,
        )
        taught = self.runs[run]
        recipe = {"method": taught.method, "learning_rate": taught.learning_rate, "seed": taught.seed, "options": dict(taught.options)}
        for mount, (kind, at) in mounts.items():
            own, gate = slice(self.positions[run]), 0 if options.gate_shared else at
            rows = self._as_shipped(self.held("rows", kind)[run, at : at + 1, own], run)[0]
            rows = functional.pad(rows, (0, 0, 0, CONFIG.columns_at(self.widths[kind]) - self.kept(kind)))
            gain, bias = (
                self._as_shipped(self.held(n, kind)[run, gate : gate + 1, own], run, start)[0]
                for n, start in zip(("gain", "bias"), GATES["start"], strict=True)
            )
            rho = float(self.get_buffer(f"rho_{kind}")[run])
            made = made.with_rows(role, rows, gain, bias, mount=mount, rho=rho)
        for name, (into, out) in factors.items():
            made = made.with_map(role, name, into, out)
        return made.with_details(recipe=recipe)


def _timestep(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The denoiser's timestep, however it was passed."""
    return args[1] if len(args) > 1 else kwargs["timestep"]


def _groups(base: Base, blocks: Sequence[str], share: str) -> list[int]:
    """The set of context rows that each cross-attention reads, in their order."""
    if share in ("none", "all"):
        return [0 if share == "all" else i for i in range(len(blocks))]
    attentions: list[Any] = [module for _, module in base.cross_attentions]
    widths = [str(attention.to_k.out_features) for attention in attentions]
    labels = {"block": blocks, "stage": [block.rstrip("0123456789") for block in blocks], "width": widths}[share]
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]
