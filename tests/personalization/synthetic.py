"""Results as the bench writes them, with invented figures: every stage, method and score, so that pages and plots can be made of them."""

from math import exp, log10
from random import Random
from statistics import fmean

from benchmarks.personalization.methods import LABELS, METHODS, RATES
from benchmarks.personalization.plan import FINAL, FULL, RATE_FACTORS
from benchmarks.personalization.prompts import CONTEXTS
from benchmarks.personalization.selection import RULE, best_lora, choose

FINALS = tuple(f"thing {i:02d}" for i in range(15))
DEVELOPED = tuple(f"trial {i}" for i in range(5))
KNOWN = tuple(f"name {i:02d}" for i in range(15))
# How good the invented pictures are at the main step: concept fidelity, prompt fidelity, pairs.
LEVELS = {
    "inversion-t": (0.62, 0.88, 0.35),
    "lora-unet-r8": (0.80, 0.80, 0.30),
    "lora-both-r8": (0.81, 0.81, 0.32),
    "full": (0.84, 0.70, 0.1),
    "after-tiny-engram": (0.55, 0.90, 0.30),
    "after-v-engram": (0.66, 0.86, 0.40),
    "ours": (0.83, 0.92, 0.78),
}
# Bytes, values, step over the bare one, MiB at the peak.
COSTS = {
    "inversion-t": (1_024, 512, 1.02, 800),
    "lora-unet-r8": (265_216, 132_608, 1.55, 930),
    "lora-both-r8": (331_000, 165_000, 1.9, 1_100),
    "after-tiny-engram": (1_600, 900, 1.01, 700),
    "after-v-engram": (12_000, 6_100, 1.1, 720),
    "ours": (7_840, 7_280, 1.04, 760),
}


def results(levels: dict[str, tuple[float, float, float]] | None = None, *, resample: int = 0) -> dict:
    """A whole results file. `levels` replaces some methods' own; `resample` seeds the noise."""
    rng = Random(resample)
    known = LEVELS | (levels or {})
    hard = {name: rng.gauss(0, 0.04) for name in (*FINALS, *DEVELOPED, *KNOWN)}

    def value(mean, spread):
        return round(min(1.0, max(0.0, mean + rng.gauss(0, spread))), 5)

    def record(method, label, subject, seed, step, context, level, **more):
        fidelity, prompt, _ = level
        grown = fidelity * (1 - 0.5 * exp(-step / 60)) * (0.95 if context in ("right", "bare") else 1) + hard[subject]
        made = {"effnet_best": value(grown, 0.01), "effnet_all": value(grown - 0.08, 0.01)}
        made |= {"lpips_best": value(grown - 0.05, 0.01), "lpips_all": value(grown - 0.12, 0.01)}
        made |= {"identity": float(rng.random() < grown + 0.15), "identity_lpips": float(rng.random() < grown + 0.1)}
        if context != "bare":
            made |= {"colour": value(prompt + 0.05, 0.02), "style": value(prompt - 0.03, 0.03)}
            if context in ("left", "right"):
                made |= {"companion": value(prompt - 0.05, 0.03), "position": value(prompt, 0.03)}
            made["prompt"] = round(fmean(made[k] for k in ("colour", "style", "companion", "position") if k in made), 5)
        common = {"method": method, "label": label, "seed": seed, "learning_rate": RATES.get(method, 0.01), "options": {}, "step": step}
        return common | {"subject": subject, "context": context, "pictures": 4} | made | more

    def pairs(method, label, stage, names, seed, step, rate):
        made = []
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                right = {score: float(rng.random() < rate) for score in ("both", "both_lpips")}
                named = {"stage": stage, "subjects": [one, other], "method": method, "label": label}
                made.append(named | {"seed": seed, "step": step} | right)
        return made

    def taught(stage, method, label, names, seeds, steps, level, **more):
        return [
            record(method, label, name, seed, step, context, level, **more)
            for step in steps
            for seed in (seeds if step == FULL.main else seeds[:1])
            for name in names
            for context in CONTEXTS
        ]

    stages: dict[str, list] = {"sweep": [], "methods": [], "controls": [], "levers": [], "final": []}
    stages["base"] = [record("base", "base, known names", name, 0, 0, c, (0.95, 0.97, 0)) for name in KNOWN for c in CONTEXTS]
    pair_records = pairs("base", "base, known names", "base", KNOWN, 0, 0, 0.85)
    trained = [m for m in METHODS if not m.startswith("ours-")]
    for method in trained:
        fidelity, prompt, both = known.get(method, (0.6, 0.8, 0.2))
        for factor in RATE_FACTORS:
            worse = 0.03 * abs(log10(factor))
            rate = float(f"{factor * RATES[method]:.6g}")
            level = (fidelity - worse, prompt - worse, both)
            stages["sweep"] += taught("sweep", method, LABELS[method], DEVELOPED, (0,), (FULL.main,), level, learning_rate=rate)
        stages["methods"] += taught("methods", method, LABELS[method], DEVELOPED, (0,), FULL.checkpoints, (fidelity, prompt, both))
        pair_records += pairs(method, LABELS[method], "methods", DEVELOPED, 0, FULL.main, both)
    for method in [m for m in LABELS if m.startswith("ours-")]:
        stages["controls"] += taught("controls", method, LABELS[method], DEVELOPED, (0,), (FULL.main,), (0.5, 0.8, 0.2))
    for label, level in (("rho 5", (0.85, 0.93, 0.8)), ("one band more", (0.78, 0.9, 0.7))):
        stages["levers"] += taught("levers", "ours", label, DEVELOPED, (0,), (FULL.main,), level, options={"rho": 5.0})
    rates = choose(stages["sweep"], DEVELOPED)
    best = best_lora(rates)
    for method in dict.fromkeys((*FINAL, best, "ours")):
        level = known[method]
        stages["final"] += taught("final", method, LABELS[method], FINALS, (0, 1, 2), FULL.checkpoints, level)
        for seed in (0, 1, 2):
            pair_records += pairs(method, LABELS[method], "final", FINALS, seed, FULL.main, level[2])
    changes = {name: {"max": 0.0, "mean": 0.0} for name in ("conditioning", "denoiser", "pictures", "near")}
    moved = {name: {"max": 1.7, "mean": 0.02} for name in changes}
    costs = {
        method: {
            "bytes": size, "values": values, "step_ratio": ratio, "step_seconds": 0.02 * ratio, "bare_seconds": 0.02, "steps_timed": 30,
            "peak_bytes": peak * 2**20, "bare_peak_bytes": 650 * 2**20, "batch": 8, "steps": 300,
            "trigger_free": moved if method.startswith("lora") else changes,
        }
        for method, (size, values, ratio, peak) in COSTS.items()
    }  # fmt: skip
    costs["ours"]["shipped"] = changes
    settings = {"steps": FULL.steps, "main": FULL.main, "checkpoints": list(FULL.checkpoints), "samples": 4, "rule": RULE}
    settings["subjects"] = {"development": list(DEVELOPED), "final": list(FINALS), "known": list(KNOWN)}
    judged = {"identity, whole picture": 0.99, "style, emoji": 0.965, "background, all": 1.0}
    ceilings = {context: {"effnet_best": 0.98, "lpips_best": 0.9, "identity": 0.99} for context in (*CONTEXTS, "pair")}
    ceilings["taught"]["prompt"] = 0.97
    return {
        "commit": "0123456789abcdef", "machine": "an imagined card", "versions": {"torch": "0.0"}, "pieces": {}, "losses": {},
        "judges": {split: {"real": judged, "autoencoded": judged} for split in ("final", "known")}, "ceilings": ceilings,
        "stages": stages, "pairs": pair_records, "costs": costs, "settings": settings, "rates": rates, "best_lora": best,
    }  # fmt: skip
