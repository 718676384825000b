"""Named endpoints, for `gradio_client` and every other program; the page itself uses none of them. May import handling."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from tiny_engram.studio.errors import StudioError
from tiny_engram.studio.highlighting import explain_rows
from tiny_engram.studio.job_folder import JobState
from tiny_engram.studio.jobs import Taught
from tiny_engram.studio.presets import DEFAULT_PRESET, PRESETS
from tiny_engram.studio.requests import GenerateRequest
from tiny_engram.studio.studio import Studio
from tiny_engram.studio.ui.handling import handled
from tiny_engram.studio.uploads import take_pictures

__all__ = ["ENDPOINTS", "build_api"]

ENDPOINTS = (
    "register",
    "suggest",
    "train",
    "train_status",
    "train_pause",
    "train_resume",
    "train_cancel",
    "generate",
    "explain",
    "concepts",
)


def _texts(what: str, given: Any) -> list[str]:
    """A list of texts from what a client sent; None is an empty one. Raises StudioError."""
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise StudioError(f"{what} is {str(given)[:40]!r}, expected a list of texts")
    return list(given)


def _told(state: JobState) -> dict[str, Any]:
    shown = ("state", "step", "steps", "loss", "seconds", "seconds_left", "message", "place")
    return {"job": state.id, **{name: getattr(state, name) for name in shown}, "concept": state.concept_id}


def strengths_of(studio: Studio, given: Any) -> dict[str, float]:
    """Strengths by id, from {id, trigger or name: strength}; None is the shelf at 1. Raises StudioError: no such concept, no mapping."""
    if given is None:
        return {each.id: 1.0 for each in studio.engine.loaded()}
    if not isinstance(given, Mapping):
        raise StudioError(f"concepts is {str(given)[:40]!r}, expected a strength by trigger, such as {{'zed-quack': 1}}")
    cards = [card for card in studio.library.cards() if not card.draft and card.error is None]
    found: dict[str, float] = {}
    for key, strength in given.items():
        fitting = [c.id for c in cards if key == c.id] or [
            c.id for c in cards if key.casefold() in (c.trigger.casefold(), c.name.casefold())
        ]
        if len(fitting) != 1:
            why = "no concept" if not fitting else f"{len(fitting)} concepts"
            raise StudioError(f"{why} {key[:80]!r} in the library; expected an id, a trigger or a name, as /concepts lists them")
        found[fitting[0]] = strength
    return found


class _Endpoints:
    """What each endpoint does. Its docstring is its description on the API page, its parameters' names are the client's."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio

    def register(self, trigger: str, aliases: list[str] | None = None) -> dict[str, Any]:
        """What a trigger is worth: its tokens at each encoder, where it fires and where not, collisions, warnings. Changes nothing."""
        report = self.studio.registrar.report(trigger, _texts("aliases", aliases))
        return {**dataclasses.asdict(report), "ready": report.ready}

    def suggest(self) -> str:
        """A free trigger: a made-up word of few tokens that nothing in the library and no word of the base has."""
        return self.studio.registrar.suggest()

    def concepts(self, search: str = "") -> list[dict[str, Any]]:
        """The library's concepts and drafts, newest first: id, name, trigger, aliases, bytes, base, created, steps, draft, loaded."""
        loaded = {each.id for each in self.studio.engine.loaded()}
        shown = ("id", "name", "trigger", "aliases", "bytes", "base", "created", "steps", "draft", "error")
        cards = self.studio.library.cards(search)
        return [{**{name: getattr(card, name) for name in shown}, "loaded": card.id in loaded} for card in cards]

    def explain(self, prompt: str, negative_prompt: str = "", concepts: dict[str, float] | None = None) -> list[dict[str, Any]]:
        """Per prompt and encoder, each trigger and why it fires or not. concepts: strengths by id, trigger or name; null: the loaded."""
        strengths = None if concepts is None else strengths_of(self.studio, concepts)
        rows = explain_rows(prompt, negative_prompt, self.studio.engine, strengths)
        return [{**dataclasses.asdict(each), "fired_tokens": sorted(each.fired_tokens)} for each in rows]

    def train_status(self, job: str) -> dict[str, Any]:
        """How far a job is: state (queued, running, pausing, paused, cancelling, cancelled, done, failed or interrupted), step, steps,
        loss, seconds, seconds_left, message, its place in the queue, and the id of its concept once it is done."""
        return _told(self.studio.jobs.state(job))

    def train_pause(self, job: str) -> dict[str, Any]:
        """Stop a job at a checkpoint; returns as train_status does."""
        return _told(self.studio.runner.pause(job))

    def train_resume(self, job: str) -> dict[str, Any]:
        """Queue a job that was stopped again, to go on from its last checkpoint."""
        return _told(self.studio.runner.resume(job))

    def train_cancel(self, job: str) -> dict[str, Any]:
        """Stop a job; it could be resumed."""
        return _told(self.studio.runner.cancel(job))

    def train(
        self,
        pictures: list[str] | None,
        trigger: str,
        captions: list[str] | None = None,
        aliases: list[str] | None = None,
        class_word: str = "",
        preset: str = DEFAULT_PRESET,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Queue a job that teaches a concept from pictures; returns as train_status does, with the files that were refused and why.

        captions: one a picture, {trigger} where the subject is named, "" for a built-in one. preset: quick, balanced or best. options:
        settings of training that differ from the preset's, such as {"max_train_steps": 50}.
        """
        report = self.studio.registrar.report(trigger, _texts("aliases", aliases))
        if report.problem is not None:
            raise StudioError(report.problem)
        blocking = next((each for each in report.collisions if each.blocks and not each.draft), None)
        if blocking is not None:
            raise StudioError(f"trigger {report.trigger!r} is taken: {blocking.name!r} {blocking.reason}; choose another one")
        if options is not None and not isinstance(options, Mapping):
            raise StudioError(f"options is {str(options)[:40]!r}, expected settings by name, such as {{'max_train_steps': 50}}")
        files, said = list(pictures or []), _texts("captions", captions)
        if said and len(said) != len(files):
            raise StudioError(f"{len(said)} captions for {len(files)} pictures, expected one each, or none at all")
        folder = self.studio.workspace.temporary()
        try:
            taught, refused = [], []
            for k, file in enumerate(files):
                taken = take_pictures([file], folder)
                taught += [Taught(path=each.file, caption=said[k] if said else "") for each in taken.pictures]
                refused += taken.refused
            if not taught and refused:
                raise StudioError(f"no picture could be taken; {refused[0][0]}: {refused[0][1]}")
            id = self.studio.runner.submit(
                taught,
                trigger,
                aliases=_texts("aliases", aliases),
                class_word=class_word or None,
                preset=preset,
                options=dict(options or {}),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {**_told(self.studio.jobs.state(id)), "refused": [{"file": name, "reason": why} for name, why in refused]}

    def generate(
        self,
        prompt: str,
        negative_prompt: str = "",
        seed: float = 0,
        steps: float = 25,
        guidance: float = 4.0,
        concepts: dict[str, float] | None = None,
        compare: bool = False,
    ) -> tuple[Any, ...]:
        """Draw a picture: (PNG with its settings inside, the base's from the same seed, their difference, settings).

        The second and third are null without compare. concepts: strengths by id, trigger or name, as /concepts lists them; null: what is
        loaded, at 1. Requests are drawn one by one, so each picture is what it would be alone. The picture is in the gallery too.
        """
        request = GenerateRequest(
            prompt=prompt,
            negative_prompt=negative_prompt,
            seed=int(seed) if isinstance(seed, float) and seed.is_integer() else seed,  # type: ignore[arg-type]
            steps=int(steps) if isinstance(steps, float) and steps.is_integer() else steps,  # type: ignore[arg-type]
            guidance=guidance,
            strengths=strengths_of(self.studio, concepts),
            compare=compare,
        )
        result = self.studio.engine.generate(request)
        id = self.studio.gallery.add(result.picture, result.settings)
        folder = self.studio.workspace.temporary()
        shown: list[Path | None] = [Path(shutil.copyfile(self.studio.gallery.get(id).file, folder / "picture.png"))]
        for name, picture in (("base", result.plain), ("difference", result.difference)):
            shown.append(None if picture is None else folder / f"{name}.png")
            if picture is not None:
                picture.save(folder / f"{name}.png")
        told = {**result.settings, "picture": id, "changed": result.changed, "seconds": round(result.seconds, 3)}
        return *shown, told


def build_api(studio: Studio) -> None:
    """Adds the endpoints to the Blocks that are being built. Those that take or give files have components, which nobody sees."""
    does = _Endpoints(studio)

    def add(fn: Callable[..., Any], **options: Any) -> None:
        gr.api(handled(fn), api_name=fn.__name__, **options)

    for fn in (does.register, does.suggest, does.concepts, does.explain, does.train_status):
        add(fn, queue=False)
    for fn in (does.train_pause, does.train_resume, does.train_cancel):
        add(fn, concurrency_id="api-jobs", concurrency_limit=4)
    with gr.Column(visible=False):
        _with_files(
            does.train,
            [
                gr.File(label="pictures", file_count="multiple", type="filepath"),
                gr.Textbox(label="trigger"),
                gr.JSON(label="captions"),
                gr.JSON(label="aliases"),
                gr.Textbox(label="class word", value=""),
                gr.Textbox(label=f"preset: {', '.join(PRESETS)}", value=DEFAULT_PRESET),
                gr.JSON(label="options"),
            ],
            [gr.JSON(label="job")],
            concurrency_id="api-jobs",
        )
        _with_files(
            does.generate,
            [
                gr.Textbox(label="prompt"),
                gr.Textbox(label="negative prompt", value=""),
                gr.Number(label="seed", value=0),
                gr.Number(label="steps", value=25),
                gr.Number(label="guidance", value=4.0),
                gr.JSON(label="concepts"),
                gr.Checkbox(label="compare", value=False),
            ],
            [gr.Image(label=what, format="png", type="filepath") for what in ("picture", "base", "difference")]
            + [gr.JSON(label="settings")],
            concurrency_id="api-generate",
            concurrency_limit=16,
        )


def _with_files(fn: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any], **options: Any) -> None:
    button = gr.Button(fn.__name__)
    button.click(handled(fn), list(inputs), list(outputs), api_name=fn.__name__, api_description=fn.__doc__, **options)
