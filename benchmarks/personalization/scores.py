"""What a generated picture is worth: how like its subject it is, whose picture it is, and whether it shows what was asked.

Likeness is the similarity of the subject, cut out, to its references (references.py) through two networks that were trained
on neither base nor subjects. Identity is whose nearest reference is the nearest of all. What else the prompt asks for is
read off: the background from the border's pixels, companion and style by classifiers trained on the real drawings, an
object's style set against its own views.
`accuracy` and `ceilings` turn the same judges on real pictures. Imports numpy, torch and parts of the bench.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

from benchmarks.personalization import real
from benchmarks.personalization.crops import Crops, border_colour, crop
from benchmarks.personalization.features import SqueezeNet, lpips_vectors, smooth
from benchmarks.personalization.prompts import CONTEXTS, TAUGHT_STYLE, Prompt
from benchmarks.personalization.references import ReferenceBank, References, named_colour, nearest_length
from benchmarks.personalization.subjects import Subject, drawn_names

from captions import COLOURS, STYLES  # isort: skip
from classifiers import CLASSIFIERS, VAE, Classifiers, autoencoded, load_classifiers, windows_of  # isort: skip

__all__ = ["Case", "Gallery", "Judges", "accuracy", "ceilings"]

OTHER = {"left": "right", "right": "left"}
POOLED = 1280  # the last of EfficientNet's features: its last layer, pooled
# Pictures in work at once: crops of all of them are held, vectors of a part.
BLOCK = {"cpu": 256, "cuda": 2048}
PART = {"cpu": 32, "cuda": 256}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What a picture should show. `views`: of real pictures, the view of each subject, which is then no reference of an object's."""

    prompt: Prompt
    subjects: tuple[Subject, ...]
    views: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gallery:
    """The subjects among which identity is judged."""

    subjects: tuple[Subject, ...]


class Window(NamedTuple):
    """A part of a picture that is looked at. `slot`: which subject of the case should be there, None for the companion's place."""

    picture: int
    side: str
    slot: int | None


@dataclass(frozen=True, slots=True)
class Seen:
    """Verdicts on windows, on the CPU.

    Attributes:
        best, mean: similarity to the nearest reference and over all references, float32 `[windows, subjects, 2]`; the last
            axis is EfficientNet, SqueezeNet.
        style: int64 `[windows]`. thing: int64 `[windows]`, an index of `drawn_names()`.
        looks: log-probabilities of the styles, `[windows, 3]`, seen in the crop; `real`: those of the references of the object that
            should be there, `[views, 3]`, or None.
        companion: log-probability `[windows]` that the picture's companion is in the window; 0 where there is none.
        colour: int64 `[pictures]`, an index of COLOURS.
    """

    best: np.ndarray
    mean: np.ndarray
    looks: np.ndarray
    real: list[np.ndarray | None]
    style: np.ndarray
    thing: np.ndarray
    companion: np.ndarray
    colour: np.ndarray


class Judges:
    """The networks, and the references that they have seen."""

    def __init__(self, classifiers: Classifiers, squeezenet: SqueezeNet, vae: AutoencoderKL, device: torch.device) -> None:
        self.classifiers, self.squeezenet, self.vae, self.device = classifiers.to(device), squeezenet.to(device), vae, device
        self.references = ReferenceBank(self.vectors, self.autoencoded, device)
        self.palette = torch.tensor(list(COLOURS.values()), device=device).float() / 255

    @classmethod
    def load(cls, device: torch.device | str = "cpu", vae: AutoencoderKL | None = None) -> Judges:
        """`vae`: the autoencoder of the base that is judged, on `device` and float32; by default a copy of the embedded base's."""
        device = torch.device(device)
        used: Any = vae
        if used is None:
            used = AutoencoderKL.from_pretrained(VAE, dtype=torch.float32).requires_grad_(False).eval()
            used.to(device, memory_format=torch.channels_last)  # twice as fast on a CPU
        return cls(load_classifiers(CLASSIFIERS, len(drawn_names())), SqueezeNet.load(), used, device)

    def autoencoded(self, pictures: torch.Tensor) -> torch.Tensor:
        """`[n, 3, 128, 128]` in 0..1, through the autoencoder and back."""
        return ((autoencoded(self.vae, pictures * 2 - 1) + 1) / 2).clamp(0, 1)

    @torch.no_grad()
    def vectors(self, crops: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[n, 3, 128, 128]` in 0..1 -> rows of length 1, `[n, 1280]` of EfficientNet and `[n, D]` of SqueezeNet, and looks `[n, 3]`."""
        effnet, squeeze = [], []
        for part in smooth(crops).split(PART.get(self.device.type, PART["cpu"])):
            effnet.append(F.normalize(self.classifiers.features(part * 2 - 1)[:, -POOLED:], dim=1))
            squeeze.append(lpips_vectors(self.squeezenet(part)))
        return torch.cat(effnet), torch.cat(squeeze), self.classifiers(crops * 2 - 1)["style"]

    @torch.no_grad()
    def score(self, pictures: np.ndarray | torch.Tensor, cases: Sequence[Case], gallery: Gallery) -> list[dict[str, float]]:
        """One record for each picture (uint8 `[n, 128, 128, 3]`), higher is better in every field.

        Of one subject: `effnet_best`, `effnet_all`, `lpips_best`, `lpips_all` (cosine, and 1 - LPIPS, to the nearest and over all
        references), `identity` and `identity_lpips` (0 or 1); what the prompt names of `colour`, `style`, `companion` and
        `position` (0 or 1), and their mean, `prompt`. Of a pair: the same as means over its halves, and `left`, `right`, `both`,
        `left_lpips`, `right_lpips`, `both_lpips` (0 or 1), whether the right subject stands there.

        A subject stands on the asked side when its likeness is higher there than on the other half, and the companion
        likelier on that half than beside it.

        Raises ValueError for a picture without a case, a subject that is not in the gallery, or a companion without a name.
        """
        if len(pictures) != len(cases):
            raise ValueError(f"{len(pictures)} pictures and {len(cases)} cases, expected one case for each picture")
        place = {subject: i for i, subject in enumerate(gallery.subjects)}
        names = {name: i for i, name in enumerate(drawn_names())}
        for case in cases:
            for subject in case.subjects:
                if subject not in place:
                    known = ", ".join(one.name for one in gallery.subjects)
                    raise ValueError(f"subject {subject.name!r}: add it to the gallery, among which identity is judged ({known})")
            if (companion := case.prompt.companion) is not None and companion not in names:
                raise ValueError(f"companion {companion!r}: the judges know no thing of that name, expected one of drawn_names()")
        records = []
        block = BLOCK.get(self.device.type, BLOCK["cpu"])
        for first in range(0, len(cases), block):
            part = cases[first : first + block]
            shown = torch.as_tensor(pictures[first : first + block]).to(self.device).permute(0, 3, 1, 2).float() / 255
            windows = [window for i, case in enumerate(part) for window in _windows(i, case)]
            seen = self._look(shown, windows, part, gallery, names)
            of = defaultdict(list)
            for number, window in enumerate(windows):
                of[window.picture].append(number)
            records += [_record(case, i, of[i], seen, place, names) for i, case in enumerate(part)]
        return records

    def _look(
        self, shown: torch.Tensor, windows: Sequence[Window], cases: Sequence[Case], gallery: Gallery, names: Mapping[str, int]
    ) -> Seen:
        where = torch.tensor([window.picture for window in windows], device=self.device)
        sides = [window.side for window in windows]
        crops, background = crop(shown[where], sides)
        # the one wait for the device: sizes and colours decide which references are asked for
        longest, colours = crops.longest.tolist(), background.tolist()
        groups: dict[tuple, list[int]] = defaultdict(list)
        for i, window in enumerate(windows):
            groups[cases[window.picture].prompt.style, nearest_length(longest[i]), named_colour(colours[i])].append(i)
        best = torch.empty(len(windows), len(gallery.subjects), 2, device=self.device)
        mean = torch.empty_like(best)
        looks = torch.empty(len(windows), len(STYLES), device=self.device)
        real_looks: list[np.ndarray | None] = [None] * len(windows)
        for key, members in groups.items():
            references = self.references.of(gallery.subjects, *key)
            for start in range(0, len(members), part := PART.get(self.device.type, PART["cpu"])):
                chosen = members[start : start + part]
                dropped = [_own_view(cases[windows[i].picture], windows[i]) for i in chosen]
                best[chosen], mean[chosen], looks[chosen] = self._similarities(crops, chosen, references, gallery, dropped)
                for i, drop in zip(chosen, dropped, strict=True):
                    real_looks[i] = _real_looks(cases[windows[i].picture], windows[i], references, gallery, drop)
        style, thing, companion = [], [], []
        asked = torch.tensor([names.get(cases[window.picture].prompt.companion or "", 0) for window in windows], device=self.device)
        for side in dict.fromkeys(sides):
            chosen = torch.tensor([i for i, of in enumerate(sides) if of == side], device=self.device)
            found = self.classifiers(windows_of(shown[where[chosen]] * 2 - 1, side))
            style.append((chosen, found["style"].argmax(1)))
            thing.append((chosen, found["object"].argmax(1)))
            companion.append((chosen, found["object"].gather(1, asked[chosen, None])[:, 0]))
        colour = torch.cdist(border_colour(shown), self.palette).argmin(1)
        style, thing, companion = (_in_order(parts).cpu().numpy() for parts in (style, thing, companion))
        similar = best.cpu().numpy(), mean.cpu().numpy()
        return Seen(*similar, looks.cpu().numpy(), real_looks, style, thing, companion, colour.cpu().numpy())

    def _similarities(
        self, crops: Crops, chosen: Sequence[int], references: Sequence[References], gallery: Gallery,
        dropped: Sequence[tuple[Subject, int] | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Nearest and mean `[chosen, subjects, 2]`, and looks `[chosen, 3]`; `dropped`: a view that is no reference to this window."""
        effnet, squeeze, looks = self.vectors(crops.pictures[chosen])
        nearest, over_all = [], []
        for subject, found in zip(gallery.subjects, references, strict=True):
            likeness = torch.stack([effnet @ found.effnet.T, squeeze @ found.squeeze.float().T], 2)
            if any(drop is not None and drop[0] is subject for drop in dropped):
                kept = [[drop != (subject, view) for view in found.views] for drop in dropped]
                likeness[~torch.tensor(kept, device=self.device)] = torch.nan
            nearest.append(likeness.nan_to_num(-1).amax(1))
            over_all.append(likeness.nanmean(1))
        return torch.stack(nearest, 1), torch.stack(over_all, 1), looks


def _windows(picture: int, case: Case) -> list[Window]:
    """The places of a case's subjects, in their order, then the companion's."""
    if len(case.subjects) == 2:
        return [Window(picture, "left", 0), Window(picture, "right", 1)]
    own = [Window(picture, case.prompt.side, 0)]
    return own if case.prompt.side == "whole" else [*own, Window(picture, OTHER[case.prompt.side], None)]


def _own_view(case: Case, window: Window) -> tuple[Subject, int] | None:
    """The view that a real picture of an object was made of: it may not be found to be like itself."""
    if case.views is None or window.slot is None or case.subjects[window.slot].kind == "emoji":
        return None
    return case.subjects[window.slot], case.views[window.slot]


def _real_looks(
    case: Case, window: Window, references: Sequence[References], gallery: Gallery, dropped: tuple[Subject, int] | None
) -> np.ndarray | None:
    """Looks `[views, 3]` of the object that should be in the window; None for an emoji or a companion."""
    if window.slot is None or case.subjects[window.slot].kind == "emoji":
        return None
    found = references[gallery.subjects.index(case.subjects[window.slot])]
    return found.looks[[dropped is None or view != dropped[1] for view in found.views]]


def _in_style(asked: str, judged: int, looks: np.ndarray, real_looks: np.ndarray | None) -> bool:
    """Whether a subject is drawn in the style that is asked.

    The classifier knows every drawing of an emoji. It has seen no object, and takes a real mug for "flat" as often as for
    "3d": there the subject's own views are the measure. In their style it must look at least as much so as the one of
    them that does least; in another, more so than any of them.
    """
    style = STYLES.index(asked)
    if real_looks is None:
        return judged == style
    taken = STYLES.index(TAUGHT_STYLE)
    if style == taken:
        least = (real_looks[:, style] - np.delete(real_looks, style, 1).max(1)).min()
        return bool(looks[style] - np.delete(looks, style).max() >= least)
    return bool(looks[style] - looks[taken] > (real_looks[:, style] - real_looks[:, taken]).max())


def _in_order(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    index, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return torch.empty_like(values).index_copy(0, index, values)


def _record(case: Case, picture: int, found: Sequence[int], seen: Seen, place: Mapping[Subject, int], names: Mapping[str, int]) -> dict:
    """The fields of one picture; `found` are its windows."""
    prompt, own = case.prompt, found[: len(case.subjects)]
    subjects = [place[subject] for subject in case.subjects]
    record: dict[str, float] = {}
    for network, name in enumerate(("effnet", "lpips")):
        record[f"{name}_best"] = fmean(float(seen.best[i, s, network]) for i, s in zip(own, subjects, strict=True))
        record[f"{name}_all"] = fmean(float(seen.mean[i, s, network]) for i, s in zip(own, subjects, strict=True))
    for network, suffix in enumerate(("", "_lpips")):
        right = [float(seen.best[i, :, network].argmax() == s) for i, s in zip(own, subjects, strict=True)]
        record[f"identity{suffix}"] = fmean(right)
        if len(right) == 2:
            record |= {f"left{suffix}": right[0], f"right{suffix}": right[1], f"both{suffix}": min(right)}
    shown: dict[str, float] = {}
    if prompt.colour is not None:
        shown["colour"] = float(seen.colour[picture] == list(COLOURS).index(prompt.colour))
    if prompt.style is not None:
        shown["style"] = fmean(float(_in_style(prompt.style, seen.style[i], seen.looks[i], seen.real[i])) for i in own)
    if prompt.companion is not None:
        here, there = found
        shown["companion"] = float(seen.thing[there] == names[prompt.companion])
        nearer = seen.best[here, subjects[0], 0] > seen.best[there, subjects[0], 0]
        shown["position"] = float(nearer and seen.companion[there] > seen.companion[here])
    if shown:
        shown["prompt"] = fmean(shown.values())
    return record | shown


def _judge_real(vae: AutoencoderKL | None, shown: Sequence[real.Shown], judges: Judges, gallery: Gallery, seed: int) -> list[dict]:
    """Records of real pictures, as they are or sent through an autoencoder."""
    records = []
    for start in range(0, len(shown), block := BLOCK["cpu"]):
        part = shown[start : start + block]
        pictures = real.compose(part, judges.device, seed + start)
        if vae is not None:
            pictures = (autoencoded(vae, pictures * 2 - 1) + 1) / 2
        in_bytes = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
        records += judges.score(in_bytes, [Case(one.prompt, one.subjects, one.views) for one in part], gallery)
    return records


def _means(records: Sequence[tuple[str, Mapping[str, float]]], fields: Mapping[str, str]) -> dict[str, float]:
    """{"name, heading": mean}: for each field `name`, shown as its heading, over the records of each name that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for field, heading in fields.items():
        for name, record in records:
            if field in record:
                values[f"{heading}, {name}"].append(record[field])
    return {heading: round(fmean(found), 5) for heading, found in values.items()}


def accuracy(
    vae: AutoencoderKL,
    subjects: Sequence[Subject],
    *,
    judges: Judges,
    samples: int = 2,
    seed: int = 0,
    contexts: Collection[str] = CONTEXTS,
) -> dict[str, dict[str, dict[str, float]]]:
    """How often the judges are right about real pictures: {"final" or "known": {"real" or "autoencoded": {what: 0..1}}}.

    `samples` pictures of every subject's prompts in these contexts, and one of every pair. Objects are shown by views that are then no
    references of theirs; emoji have one drawing in each style, so theirs is among the references. "want of a style" is how often
    an object as it is is not taken for one in another style.
    """
    result: dict[str, dict[str, dict[str, float]]] = {}
    for split in ("final", "known"):
        own = tuple(subject for subject in subjects if subject.split == split)
        if not own:
            continue
        alone, pairs = real.singles(own, samples, seed, contexts), real.pairs(own, seed)
        objects = [one for one in alone if one.prompt.context == "taught" and one.subjects[0].kind == "object"]
        # nothing is drawn anew: what is asked of these pictures is not in them
        asked = [one._replace(prompt=replace(one.prompt, style=style)) for style in STYLES if style != TAUGHT_STYLE for one in objects]
        result[split] = {}
        for kind, through in (("real", None), ("autoencoded", vae)):
            single = _judge_real(through, alone, judges, Gallery(own), seed)
            double = _judge_real(through, pairs, judges, Gallery(own), seed)
            missing = [{"style": 1 - record["style"]} for record in _judge_real(through, asked, judges, Gallery(own), seed)]
            sides = ["whole picture" if one.prompt.side == "whole" else "half" for one in alone]
            kinds = [one.subjects[0].kind for one in alone]
            identity = {"identity": "identity", "identity_lpips": "identity by SqueezeNet"}
            both = {"both": "both identities", "both_lpips": "both by SqueezeNet"}
            result[split][kind] = (
                _means(list(zip(sides, single, strict=True)), identity)
                | _means([("pairs", record) for record in double], identity | both)
                | _means(list(zip(kinds, single, strict=True)), {"style": "style"})
                | _means([("object", record) for record in missing], {"style": "want of a style"})
                | _means([("pairs", record) for record in double], {"style": "style"})
                | _means([("beside a subject", record) for record in single], {"companion": "companion", "position": "position"})
                | _means([("all", record) for record in [*single, *double]], {"colour": "background"})
            )
    return result


def ceilings(
    vae: AutoencoderKL,
    subjects: Sequence[Subject],
    *,
    judges: Judges,
    samples: int = 2,
    seed: int = 1,
    contexts: Collection[str] = CONTEXTS,
) -> dict[str, dict[str, float]]:
    """What real pictures of the final subjects reach when sent through the autoencoder: {context: {field: mean}}.

    No generator of these latents can be expected to do better. New styles are those of emoji: objects have none.
    """
    own = tuple(subject for subject in subjects if subject.split == "final")
    shown = [*real.singles(own, samples, seed, contexts), *real.pairs(own, seed)]
    groups: dict[str, list[dict]] = defaultdict(list)
    for one, record in zip(shown, _judge_real(vae, shown, judges, Gallery(own), seed), strict=True):
        groups[one.prompt.context].append(record)
    fields = ("effnet_best", "effnet_all", "lpips_best", "lpips_all", "identity", "identity_lpips", "prompt")
    return {
        context: {field: round(fmean(r[field] for r in records), 5) for field in fields if field in records[0]}
        for context, records in groups.items()
    }
