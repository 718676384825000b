"""The methods that are compared, by name. A method's module names `Base` in annotations only: base.py imports this package."""

from benchmarks.personalization.methods.controls import TRAINED
from benchmarks.personalization.methods.full import Full
from benchmarks.personalization.methods.inversion import InversionOne, InversionTrigger
from benchmarks.personalization.methods.lora import LoraBoth8, LoraCross8, LoraText4, LoraText8, LoraUnet4, LoraUnet8
from benchmarks.personalization.methods.method import Adapters, Rows
from benchmarks.personalization.methods.ours import Ours
from benchmarks.personalization.methods.published import AfterTinyEngram, AfterVEngram

__all__ = ["EXTRA", "LABELS", "METHODS", "RATES", "Adapters", "Rows", "method_of"]

METHODS: dict[str, type[Adapters]] = {
    "inversion-1": InversionOne,
    "inversion-t": InversionTrigger,
    "lora-unet-r4": LoraUnet4,
    "lora-unet-r8": LoraUnet8,
    "lora-text-r4": LoraText4,
    "lora-text-r8": LoraText8,
    "lora-both-r8": LoraBoth8,
    "full": Full,
    "after-tiny-engram": AfterTinyEngram,
    "after-v-engram": AfterVEngram,
    "ours": Ours,
    **TRAINED,
}
# Asked for by name alone, as a lever: they answer a question about the others.
EXTRA: dict[str, type[Adapters]] = {"lora-cross-r8": LoraCross8}
# Published default learning rates; the sweep takes 0.1, 0.32, 1, 3.2, 10 and 32 times each.
RATES: dict[str, float] = {
    "inversion-1": 5e-4,
    "inversion-t": 5e-4,
    "lora-unet-r4": 1e-4,
    "lora-unet-r8": 1e-4,
    "lora-text-r4": 1e-4,
    "lora-text-r8": 1e-4,
    "lora-both-r8": 1e-4,
    "lora-cross-r8": 1e-4,
    "full": 5e-6,
    "after-tiny-engram": 1e-3,
    "after-v-engram": 5e-4,
    "ours": 1.4e-2,
    **dict.fromkeys(TRAINED, 1.4e-2),
}
LABELS: dict[str, str] = {
    "inversion-1": "Textual inversion, 1 vector",
    "inversion-t": "Textual inversion, 1 vector a token",
    "lora-unet-r4": "LoRA r4, denoiser",
    "lora-unet-r8": "LoRA r8, denoiser",
    "lora-text-r4": "LoRA r4, text encoder",
    "lora-text-r8": "LoRA r8, text encoder",
    "lora-both-r8": "LoRA r8, denoiser and text encoder",
    "lora-cross-r8": "LoRA r8, keys and values of the cross-attentions",
    "full": "Full fine-tuning of the denoiser",
    "after-tiny-engram": "After Tiny-Engram",
    "after-v-engram": "After V-Engram",
    "ours": "Ours",
    "ours-gate-fixed": "Ours, gate fixed at 1/2",
    "ours-gate-removed": "Ours, no gate",
    "ours-no-fp8": "Ours, rows not quantised",
    "ours-trainable-basis": "Ours, projections trained too",
    "ours-gates-only": "Ours, rows frozen, gates trained",
    "ours-donor": "Ours, another concept's rows",
    "ours-shuffled": "Ours, rows shuffled",
    "ours-random": "Ours, random rows of equal norm",
    "ours-off": "Ours, table off",
}


def method_of(name: str) -> type[Adapters]:
    """The method of that name, of `METHODS` or `EXTRA`; KeyError for another."""
    return METHODS[name] if name in METHODS else EXTRA[name]
