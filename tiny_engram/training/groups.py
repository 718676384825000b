"""Which concepts can share the batches of a run. Imports config."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiny_engram.training.config import TrainConfig

__all__ = ["TOGETHER", "Group", "group_concepts", "reason_alone"]

# Concepts of one batch, unless told otherwise.
TOGETHER = 8

# One batch has one of each: the shapes of what is stacked, and what is computed from all samples at once. All else is each concept's own.
SHARED = ("train_batch_size", "gradient_accumulation_steps", "resolution", "mounts", "share", "bands", "attention_rank")
SHARED += ("feedforward_rank", "rho", "context_rho", "caption_dropout", "snr_gamma", "noise_offset", "timestep_sampling", "logit_mean")
SHARED += ("logit_std", "mode_scale", "timestep_shift", "mixed_precision")


@dataclass(frozen=True, slots=True)
class Group:
    """Concepts that are taught in one batch, by their numbers; `reason` says why one is taught alone, if anything but their count does."""

    numbers: tuple[int, ...]
    reason: str | None = None


def reason_alone(config: TrainConfig) -> str | None:
    """Why a concept must have batches of its own; None where it need not."""
    if config.buckets:
        return "buckets: its steps have sizes of their own"
    if config.mixed_precision == "fp16":
        return "mixed_precision fp16: gradients of each concept have a scale of their own"
    if "wandb" in config.trackers:
        return "report_to wandb: it takes one run at a time"
    return None


def group_concepts(configs: Sequence[TrainConfig], together: int) -> list[Group]:
    """Groups of at most `together`, in the order of their first concepts; what cannot be shared is alone."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, config in enumerate(configs):
        alone = reason_alone(config)
        key = ("alone", number) if alone else tuple(getattr(config, field) for field in SHARED)
        alike.setdefault(key, []).append(number)
    groups = []
    for numbers in alike.values():
        reason = reason_alone(configs[numbers[0]])
        if reason is None and len(numbers) == 1 and len(configs) > 1:
            reason = "no other concept has its settings"
        # of equal size, or nearly: a last group of one would take as many launches as one of eight
        parts = -(-len(numbers) // together)
        bounds = [round(k * len(numbers) / parts) for k in range(parts + 1)]
        groups += [Group(tuple(numbers[a:b]), reason) for a, b in zip(bounds, bounds[1:], strict=False)]
    return sorted(groups, key=lambda group: group.numbers[0])
