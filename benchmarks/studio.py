"""What the Studio makes its users wait for: the first paint of the page, answers while they type, and a picture against the bare base's.

    python benchmarks/studio.py                                 # benchmarks/results/studio.json, some minutes on two cores

The app runs in a process of its own and is looked at by a real Chromium, whose own clock times what a person would see: from the press of
a key, or of a button, to the frame that shows the answer. Nothing is timed before it was found right: what fires in the prompt is marked,
and a picture has the same pixels whichever way it was asked for.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gradio_client import Client
from lookup import made_up_words, need
from PIL import Image
from studio_app import browser, open_page, open_tab, running_app
from tables import RESULTS, circumstances, keep

import tiny_engram
from tiny_engram.concept import Concept
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.studio.engine import Engine
from tiny_engram.studio.library import Library
from tiny_engram.studio.requests import GenerateRequest
from tiny_engram.studio.workspace import Workspace, new_id
from tiny_engram.training.config import TrainConfig

CONCEPTS, ON_SHELF = 1000, 3
PACE = 100  # milliseconds between keys of somebody who types fast
PAINT_MS, ANSWER_MS, PICTURE_RATIO = 2000.0, 150.0, 1.05
ROLE = "clip_l"

# From the press of a key to the frame that shows what was typed; keys that an answer skips are answered by the next one.
PROBE = """([box, shown, reader]) => {
  const area = document.querySelector(box), element = document.querySelector(shown), reads = new Function('element', 'typed', reader);
  const waiting = [];
  const probe = window.teProbe = {took: []};
  // the driver empties a box by the key Delete
  area.addEventListener('keydown', (event) => { if (event.key !== 'Delete') waiting.push({at: event.timeStamp, value: null}); });
  area.addEventListener('input', () => { if (waiting.length) waiting[waiting.length - 1].value = area.value; });
  new MutationObserver(() => requestAnimationFrame(() => {
    let last = waiting.length - 1;
    while (last >= 0 && !(waiting[last].value !== null && reads(element, waiting[last].value))) last -= 1;
    const now = performance.now();
    for (const key of waiting.splice(0, last + 1)) probe.took.push(now - key.at);
  })).observe(element, {childList: true, subtree: true, characterData: true, attributes: true});
}"""
ECHOED = "const p = element.querySelector('%s'); return p !== null && p.textContent === typed;"
SHELF = "Array.from(document.querySelectorAll('#create-shelf button[data-text]')).map((button) => button.dataset.text)"
# From the press of Generate to the frame that shows another picture; its address holds the picture.
PRESSED = """() => {
  const stage = document.querySelector('#create-stage'), button = document.querySelector('#create-generate');
  const first = () => { const image = stage.querySelector('img'); return image ? image.src : ''; };
  const pressed = window.tePressed = {at: null, took: null, before: first(), src: null};
  button.addEventListener('click', (event) => { pressed.at = event.timeStamp; }, {once: true});
  const look = () => {
    const image = stage.querySelector('img');
    if (pressed.at !== null && image && image.src !== pressed.before && image.complete) {
      pressed.took = performance.now() - pressed.at;
      pressed.src = image.src;
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def random_concept(adapter: Any, trigger: str, seed: int) -> Concept:
    """Of the default recipe, random at every mount and map."""
    recipe = TrainConfig(train_data_dir=".", trigger=trigger).concept_config
    made = adapter.new_concept(trigger, config=recipe)
    generator = torch.Generator().manual_seed(seed)
    for role, place in made.roles.items():
        for mount, old in place.mounts.items():
            rows = torch.randn(old.payload.shape, generator=generator) * 0.3
            made = made.with_rows(role, rows, old.gain + 0.1, old.bias + 0.3, mount=mount)
        for what, old in place.maps.items():
            into, out = old.factors()
            made = made.with_map(role, what, into, torch.randn(out.shape, generator=generator) * 0.3)
    return made


def fill(folder: Path, count: int) -> list[str]:
    """A Studio's folder with so many concepts of two-part triggers in its library; the triggers."""
    words = made_up_words(2 * count)
    triggers = [f"{a[:4]}-{b[:4]}" for a, b in zip(words[:count], words[count:], strict=True)]
    triggers = list(dict.fromkeys(triggers))
    need(len(triggers) > 0.99 * count, "made-up triggers repeat themselves")
    pipe = load_pipeline(device="cpu")
    adapter = tiny_engram.attach(pipe)
    with Workspace.open(folder) as workspace:
        for number, trigger in enumerate(triggers):
            random_concept(adapter, trigger, number).save(workspace.concepts / f"{new_id()}.safetensors")
    adapter.detach()
    return triggers


# -- the page ------------------------------------------------------------------------------------------------------------------


def measure_paint(folder: Path, opened: Any, starts: int) -> dict[str, Any]:
    """Milliseconds from the line with the address to the first paint, to the tabs, to a page that listens; a fresh profile each time."""
    found: dict[str, list[float]] = {"start_seconds": [], "first_paint_ms": [], "tabs_ms": [], "ready_ms": []}
    for _ in range(starts):
        with running_app(folder) as app, opened.new_context() as context:
            page = context.new_page()
            page.add_init_script(
                "const look = () => { if (document.querySelector('[role=tab]')) window.teTabs = performance.now(); "
                "else requestAnimationFrame(look); }; requestAnimationFrame(look);"
                "const ready = () => { if (document.body && document.body.dataset.ready === 'true') window.teReady = performance.now(); "
                "else requestAnimationFrame(ready); }; requestAnimationFrame(ready);"
            )
            open_page(page, app.url)
            need(page.get_by_role("tab").count() == 4, "the page has no four tabs")
            told = page.evaluate(
                "({origin: performance.timeOrigin, tabs: window.teTabs, ready: window.teReady, "
                "paint: performance.getEntriesByName('first-contentful-paint')[0].startTime})"
            )
            late = told["origin"] - app.printed_at * 1000
            found["start_seconds"].append(app.start_seconds)
            for name, at in (("first_paint_ms", told["paint"]), ("tabs_ms", told["tabs"]), ("ready_ms", told["ready"])):
                found[name].append(late + at)
    return {name: {"median": statistics.median(values), "most": max(values)} for name, values in found.items()}


class Typing:
    """Types into a text box of the page and reads what the probe has timed."""

    def __init__(self, page: Any, box: str, shown: str, reader: str) -> None:
        self.page, self.box = page, box
        page.evaluate(PROBE, [box, shown, reader])

    def type(self, texts: Sequence[str], keys: int, pace: int | None = None) -> dict[str, float]:
        """The texts one after the other, each into an empty box, until so many keys were pressed.

        pace None: each key waits for the answer to the one before. Else milliseconds from key to key, whatever is answered.
        """
        letters = 0
        for text in texts:
            text = text[: keys - letters]
            if not text:
                break
            self.page.fill(self.box, "")
            self.page.wait_for_timeout(600)
            self.page.evaluate("window.teProbe.took.length = 0" if letters == 0 else "0")
            for letter in text:
                letters += 1
                began = time.perf_counter()
                self.page.locator(self.box).press("Space" if letter == " " else letter)
                if pace is None:
                    self.page.wait_for_function(f"window.teProbe.took.length >= {letters}", timeout=20_000)
                else:
                    self.page.wait_for_timeout(max(0.0, pace - 1000 * (time.perf_counter() - began)))
            self.page.wait_for_function(f"window.teProbe.took.length >= {letters}", timeout=20_000)
        took = self.page.evaluate("window.teProbe.took")
        need(len(took) == keys, f"{len(took)} answers to {keys} keys")
        return {"median": statistics.median(took), "p95": percentile(took, 0.95), "most": max(took)}


def measure_typing(page: Any, triggers: Sequence[str], keys: int) -> dict[str, dict[str, float]]:
    """Prompts with triggers of the shelf and of the library at the Create tab, and triggers at the Register tab."""
    used = page.evaluate(SHELF)
    other = next(trigger for trigger in triggers if trigger not in used)
    prompts = [f"a 3d {used[0]} beside two {other}", f"a flat {used[1]} on a red background", f"an outlined {used[2]}"]
    while sum(map(len, prompts)) < keys:
        prompts += prompts
    box = "#create-prompt textarea"
    page.fill(box, prompts[0])
    page.wait_for_function(f"document.querySelectorAll('#create-highlight mark').length === 2 && {json.dumps(prompts[0])}.length > 0")
    marked = page.evaluate("Array.from(document.querySelectorAll('#create-highlight mark')).map(m => [m.textContent, m.classList[0]])")
    need(marked == [[used[0], "tc-fires"], [other, "tc-silent"]], f"the marks are {marked}")
    typing = Typing(page, box, "#create-highlight", ECHOED % ".tc-prompt")
    found = {"prompt": typing.type(prompts, keys), "prompt_fast": typing.type(prompts, keys, PACE)}
    page.fill(box, "")
    open_tab(page, "Register")
    box = "#register-trigger textarea, #register-trigger input"
    page.fill(box, used[0])
    page.wait_for_function("document.querySelector('#register-report').innerText.includes('Taken')")
    reader = "return Array.from(element.querySelectorAll('mark')).some((m) => m.textContent === typed);"
    words = [word for word in made_up_words(4000)[-40:] if word not in triggers]
    typing = Typing(page, box, "#register-report", reader)
    found["trigger"] = typing.type(words, keys)
    page.fill(box, "")
    open_tab(page, "Create")
    return found


# -- pictures ------------------------------------------------------------------------------------------------------------------


class Ways:
    """One picture, asked for in four ways; each returns (seconds, RGB pixels)."""

    def __init__(self, client: Client, page: Any, stack: ExitStack, folder: Path, trigger: str) -> None:
        self.client, self.page, self.trigger = client, page, trigger
        self.bare, self.adapted, drawn = (load_pipeline(device="cpu") for _ in range(3))
        for pipe in (self.bare, self.adapted):
            pipe.set_progress_bar_config(disable=True)
        self.library = Library(stack.enter_context(Workspace.open(folder)))
        self.engine = stack.enter_context(Engine(drawn, self.library))
        self.id = ""

    def take(self, path: Path) -> None:
        """The concept of a file, in the engine's library and in the plain pipeline that has one."""
        self.id = self.library.import_file(path)
        tiny_engram.attach(self.adapted).load_concept(path)

    def _plain(self, pipe: Any, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        began = time.perf_counter()
        picture = pipe(prompt, num_inference_steps=25, guidance_scale=4.0, generator=torch.Generator("cpu").manual_seed(seed)).images[0]
        return time.perf_counter() - began, np.asarray(picture.convert("RGB"))

    def plain(self, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        """The pipeline as diffusers loads it, which knows no concepts."""
        return self._plain(self.bare, prompt, seed)

    def with_adapter(self, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        """The same call of a pipeline that the concept is loaded in."""
        return self._plain(self.adapted, prompt, seed)

    def through_engine(self, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        began = time.perf_counter()
        result = self.engine.generate(GenerateRequest(prompt=prompt, seed=seed, strengths={self.id: 1.0}))
        return time.perf_counter() - began, np.asarray(result.picture)

    def through_api(self, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        """From the client's call to the file on its disk; the app keeps the picture in its gallery too."""
        began = time.perf_counter()
        path, *_ = self.client.predict(prompt=prompt, seed=seed, concepts={self.trigger: 1.0}, api_name="/generate")
        return time.perf_counter() - began, np.asarray(Image.open(path).convert("RGB"))

    def through_page(self, prompt: str, seed: int) -> tuple[float, np.ndarray]:
        """From the press of Generate to the frame that shows the picture."""
        self.page.fill("#create-prompt textarea", prompt)
        self.page.get_by_label("Seed", exact=True).fill(str(seed))
        self.page.wait_for_timeout(400)
        self.page.evaluate(PRESSED)
        self.page.locator("#create-generate").click()
        self.page.wait_for_function("window.tePressed.took !== null", timeout=60_000)
        told = self.page.evaluate("window.tePressed")
        blob = base64.b64decode(told["src"].partition("base64,")[2])
        self.page.wait_for_function("document.querySelector('#create-generate').innerText.trim() === 'Generate'")
        return told["took"] / 1000, np.asarray(Image.open(io.BytesIO(blob)).convert("RGB"))


def measure_pictures(ways: Ways, rounds: int) -> dict[str, dict[str, float]]:
    """Medians, and the median over the rounds of each round's ratio: a machine that warms or slows does so for all ways of a round.

    The ways take turns, in another order each round, and every picture is compared.
    """
    prompts = {"no trigger": "a 3d cat on a blue background", "one trigger": f"a 3d {ways.trigger} on a blue background"}
    calls: dict[str, Callable[[str, int], tuple[float, np.ndarray]]] = {
        "plain": ways.plain,
        "adapter": ways.with_adapter,
        "engine": ways.through_engine,
        "api": ways.through_api,
        "page": ways.through_page,
    }
    took: dict[tuple[str, str], list[float]] = {(kind, name): [] for kind in prompts for name in calls}
    for number in range(-1, rounds):  # the first is a check alone, and warms what is slow once
        for kind, prompt in prompts.items():
            order = random.Random(number).sample(list(calls), len(calls))
            drawn = {name: calls[name](prompt, number + 1) for name in order}
            same = [name for name in calls if np.array_equal(drawn[name][1], drawn["adapter"][1])]
            alike = [name for name in calls if kind == "no trigger" or name != "plain"]
            need(same == alike, f"{kind}: the pictures of {sorted(set(alike) ^ set(same))} are not the plain call's")
            if number >= 0:
                for name in calls:
                    took[kind, name].append(drawn[name][0])
    found = {}
    for kind in prompts:

        def ratio(name: str, against: str, kind: str = kind) -> float:
            return statistics.median(mine / theirs for mine, theirs in zip(took[kind, name], took[kind, against], strict=True))

        # the plain call is of the same prompt with the same concepts
        against = "plain" if kind == "no trigger" else "adapter"
        found[kind] = {f"{name}_seconds": statistics.median(took[kind, name]) for name in calls}
        found[kind] |= {f"{name}_ratio": ratio(name, against) for name in ("engine", "api", "page")}
        found[kind]["adapter_over_plain"] = ratio("adapter", "plain")
    return found


# -- all of it -----------------------------------------------------------------------------------------------------------------


def measure(count: int, starts: int, keys: int, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="tiny-engram-") as made, browser() as opened, ExitStack() as stack:
        folder = Path(made)
        figures["empty"] = measure_paint(folder / "empty", opened, starts)
        triggers = fill(folder / "full", count)
        figures["concepts"] = len(triggers)
        figures["full"] = measure_paint(folder / "full", opened, max(1, starts // 2))
        app = stack.enter_context(running_app(folder / "full"))
        client = Client(app.url, verbose=False, download_files=str(folder))
        stack.callback(client.close)
        page = opened.new_page(viewport={"width": 1440, "height": 1000})
        open_page(page, app.url)
        open_tab(page, "Create")
        for number in range(1, ON_SHELF + 1):
            page.locator("#create-shelf button[data-act=use]").first.click()
            page.wait_for_function(f"document.querySelectorAll('#create-shelf button[data-text]').length === {number}")
        figures["typing"] = measure_typing(page, triggers, keys)
        [trigger, *others] = page.evaluate(SHELF)
        for other in others:
            page.locator("#create-shelf li", has_text=other).locator("button[data-act=away]").click()
        page.wait_for_function("document.querySelectorAll('#create-shelf button[data-text]').length === 1")
        for label in ("Draw the base beside it, from the same seed", "New seed for each picture"):
            page.get_by_label(label).uncheck()
        ways = Ways(client, page, stack, folder / "own", trigger)
        held = [path for path in (folder / "full" / "concepts").glob("*.safetensors") if Concept.load(path).trigger == trigger]
        ways.take(held[0])
        figures["pictures"] = measure_pictures(ways, rounds)
    figures["load_after"] = os.getloadavg()[0]
    return figures


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []

    def row(measure: str, figure: str, target: str = "", met: bool | None = None) -> None:
        rows.append({"measure": measure, "figure": figure, "target": target, "met": met})

    for part, name in (("empty", "empty library"), ("full", f"{figures['concepts']:,} concepts")):
        told = figures[part]
        paint = told["first_paint_ms"]
        line = f"{paint['median']:.0f} ms, at most {paint['most']:.0f} ms"
        row(f"from the printed address to the first paint, {name}", line, f"<= {PAINT_MS:,.0f} ms", paint["most"] <= PAINT_MS)
        row(f"to the four tabs, {name}", f"{told['tabs_ms']['median']:.0f} ms")
        row(f"to a page that listens, {name}", f"{told['ready_ms']['median']:.0f} ms")
        row(f"from the command to the printed address, {name}", f"{told['start_seconds']['median']:.1f} s")
    typing = (
        ("prompt", "key to the changed highlight in Create"),
        ("prompt_fast", f"the same, a key every {PACE} ms"),
        ("trigger", "key to the changed report in Register"),
    )
    for key, name in typing:
        told = figures["typing"][key]
        line = f"{told['median']:.0f} ms, 95 % within {told['p95']:.0f} ms"
        row(f"{name}, {figures['concepts']:,} concepts", line, f"<= {ANSWER_MS:.0f} ms", told["p95"] <= ANSWER_MS)
    for kind, told in figures["pictures"].items():
        against = told["plain_seconds" if kind == "no trigger" else "adapter_seconds"]
        row(f"picture, {kind}: the pipeline called plainly", f"{against:.3f} s")
        for name, words in (("engine", "through the engine"), ("api", "through the API, file included")):
            ratio = told[f"{name}_ratio"]
            line = f"{told[f'{name}_seconds']:.3f} s, {ratio:.3f} of that"
            row(f"picture, {kind}: {words}", line, f"<= {PICTURE_RATIO:.2f}", ratio <= PICTURE_RATIO)
        row(f"picture, {kind}: from the button to the shown picture", f"{told['page_seconds']:.3f} s, {told['page_ratio']:.3f} of that")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concepts", type=int, default=CONCEPTS, help="concepts in the library")
    parser.add_argument("--starts", type=int, default=5, help="starts of the app")
    parser.add_argument("--keys", type=int, default=50, help="keys pressed in each text box")
    parser.add_argument("--rounds", type=int, default=21, help="pictures of each kind, each way")
    parser.add_argument("--out", type=Path, default=RESULTS / "studio.json")
    args = parser.parse_args()
    figures = measure(args.concepts, args.starts, args.keys, args.rounds)
    report = {
        **circumstances("torch", "diffusers", "gradio", depends_on=("app.py", "kernels", "pipelines", "tiny_engram", "assets/bases")),
        "threads": torch.get_num_threads(),
        "note": f"App and Chromium on one machine. Concepts of the default recipe, {ON_SHELF} of them in use; {args.keys} keys, each timed "
        "by the browser up to the frame that shows the answer. Pictures of 25 steps with guidance 4 at 128x128 on the embedded base: the "
        "ways take turns, median of the rounds' ratios; the plain call with a trigger is of a pipeline with the concept loaded.",
        "table": rows_of(figures),
        "figures": figures,
    }
    keep(report, args.out)
    print(*(f"{r['measure']}: {r['figure']} {r['target']} {'' if r['met'] is None else r['met']}" for r in report["table"]), sep="\n")


if __name__ == "__main__":
    main()
