"""The demonstration behind `make demo`: teach the embedded base one subject, and draw what changed and what did not.

May import everything. Needs a checkout, for its base and its example pictures.
"""

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tiny_engram.adapter import attach
from tiny_engram.errors import TinyEngramError
from tiny_engram.files import check_writable
from tiny_engram.pipelines.loaders import EMBEDDED_BASE, load_pipeline
from tiny_engram.sheet import Sheet
from tiny_engram.training import TrainConfig, train
from tiny_engram.training.costs import peak_memory
from tiny_engram.training.data import load_picture, scan_folder
from tiny_engram.training.validation import draw_pictures, save_picture

__all__ = ["CLASS_WORDS", "CONTEXTS", "run_demo"]

logger = logging.getLogger(__name__)

REPORT = "report.json"
EXAMPLES = EMBEDDED_BASE.parents[1] / "examples"
# What someone who may only use names that the base was trained on would call each example subject.
CLASS_WORDS = {
    "blue-mug": "beer mug",
    "droid": "postbox",
    "duck": "duck",
    "lobster": "crab",
    "octopus": "jellyfish",
    "snowman": "ghost",
    "teddy": "bear",
    "unicorn": "horse",
}
CONTEXTS = {
    "taught": "a 3d {trigger} on a blue background",
    "other background": "a 3d {trigger} on a red background",
    "other style": "a flat {trigger} on a cyan background",
    "left of another": "a 3d {trigger} left of a pizza on a white background",
    "right of another": "a 3d {trigger} right of a rocket on a black background",
    "bare": "a {trigger}",
}
WITHOUT = (
    "a 3d cat on a blue background",
    "a 3d rocket on a red background",
    "a flat guitar on a cyan background",
    "a 3d car left of a pizza on a white background",
    "a 3d crown right of a rocket on a black background",
    "a lion",
)
SEEDS = (1, 2)


def run_demo(
    out: Path, *, subject: str = "octopus", trigger: str = "tako-blip", steps: int | None = None, inference_steps: int = 25
) -> dict[str, Any]:
    """Teaches `subject`, writes concept.safetensors, sheet.png and report.json to `out`, returns the report.

    Raises TinyEngramError for a subject that has no example pictures, or if a picture without the trigger changed.
    """
    folder = EXAMPLES / subject
    if not folder.is_dir():
        known = ", ".join(sorted(p.name for p in EXAMPLES.glob("*") if p.is_dir())) or "none: the demo needs a checkout"
        raise TinyEngramError(f"no example subject {subject!r}; known: {known}")
    check_writable(out)
    if (out / REPORT).exists():  # the last demo's, whatever it taught
        (out / "concept.safetensors").unlink(missing_ok=True)
    began = time.perf_counter()
    pipe = load_pipeline(device="cpu")
    config = TrainConfig(
        train_data_dir=str(folder),
        trigger=trigger,
        class_word=CLASS_WORDS.get(subject),
        output_dir=str(out),
        validation_inference_steps=inference_steps,
        checkpoints_total_limit=1,
    )
    if steps is not None:
        config = dataclasses.replace(config, max_train_steps=steps)
    examples = scan_folder(folder, (trigger,)).examples
    adapter = attach(pipe)
    adapter.compile(trigger)  # a trigger that cannot be taught is told before anything is drawn
    adapter.detach()

    def draw(prompts: list[str], seed: int) -> np.ndarray:
        return draw_pictures(pipe, prompts, [seed] * len(prompts), steps=inference_steps, guidance=4.0)

    prompts = [text.replace("{trigger}", trigger) for text in CONTEXTS.values()]
    logger.info("drawing what the base makes of a word it does not know")
    base = {seed: draw(prompts, seed) for seed in SEEDS}
    silent = draw(list(WITHOUT), SEEDS[0])

    logger.info("teaching %r from the %d pictures in %s", trigger, len(examples), folder.name)
    taught = time.perf_counter()
    result = train(pipe, config)
    seconds = time.perf_counter() - taught

    adapter = attach(pipe)
    adapter.load_concept(result.path)
    logger.info("drawing with the concept loaded")
    concept = {seed: draw(prompts, seed) for seed in SEEDS}
    unchanged = draw(list(WITHOUT), SEEDS[0])
    difference = np.abs(unchanged.astype(int) - silent.astype(int))
    explanation = adapter.explain(prompts[0]).to_dict()
    adapter.detach()

    places = result.concept.roles.values()
    report = {
        "subject": subject,
        "trigger": trigger,
        "file": result.path.name,
        "file_bytes": result.path.stat().st_size,
        "table_bytes": result.concept.nbytes,
        "rows": sum(at.payload.shape[0] * at.payload.shape[1] for place in places for at in place.mounts.values()),
        "row_bytes": sum(at.payload.nbytes + at.scale.nbytes for place in places for at in place.mounts.values()),
        "maps": sum(len(place.maps) for place in places),
        "map_bytes": sum(at.nbytes for place in places for at in place.maps.values()),
        "class_word": config.class_word,
        "teaching_seconds": round(seconds, 1),
        "steps": result.steps,
        "total_seconds": round(time.perf_counter() - began, 1),
        "peak_memory_bytes": peak_memory(),
        "largest_difference_without_trigger": int(difference.max()),
        "explanation": explanation,
    }
    sheet = Sheet(f"Tiny-Engram: “{trigger}”, taught from {len(examples)} pictures")
    sheet.row("pictures it was taught from", [np.asarray(load_picture(e.path)) for e in examples])
    captions = [f"{name}: {prompt}" for name, prompt in zip(CONTEXTS, prompts, strict=True)]
    for seed in SEEDS:
        sheet.row(f"base alone, seed {seed}", list(base[seed]), captions if seed == SEEDS[0] else ())
        sheet.row(f"with the concept, seed {seed}", list(concept[seed]))
    sheet.note("Without the trigger nothing changes: the same prompts, base alone and with the concept loaded.")
    sheet.row("base alone", list(silent), list(WITHOUT))
    sheet.row("concept loaded, trigger absent", list(unchanged))
    sheet.row(f"difference (largest: {difference.max()})", [d.astype(np.uint8) for d in difference])
    sheet.note(
        f"{report['file_bytes']:,} bytes on disk with a thumbnail ({report['table_bytes']:,} of values: {report['rows']} rows with their "
        f"gates, and {report['maps']} maps)  ·  begun at “{config.class_word}”  ·  "
        f"{report['teaching_seconds']:.0f} s to teach ({result.steps} steps)  ·  peak memory {report['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    save_picture(sheet.render(), out / "sheet.png")
    save_picture(Image.fromarray(concept[SEEDS[0]][0]), out / "taught.png")
    (out / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    if difference.max() != 0:
        raise TinyEngramError(f"a picture without the trigger changed by {difference.max()} of 255; expected 0. See {out / 'sheet.png'}")
    return report
