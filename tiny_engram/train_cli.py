"""The command line of teaching: `tiny-engram train`, which `accelerate launch -m tiny_engram.training` is too.

Imports errors, config and cli_fields, and what the verb needs in the verb.
"""

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_engram.cli_fields import add_fields, given_fields
from tiny_engram.config import ConceptConfig
from tiny_engram.config_file import config_text, read_config_file
from tiny_engram.errors import ConfigError
from tiny_engram.files import check_writable
from tiny_engram.launched import DTYPES, device_for, dtype_for, local_rank
from tiny_engram.manifest_cli import add_manifest_options, refuse_manifest_options, run_manifest
from tiny_engram.preservation import refuse_preservation
from tiny_engram.run_config import SCHEDULES
from tiny_engram.scan_cli import DATA_HELP
from tiny_engram.training.config import OPTIMIZERS, SAMPLINGS, TrainConfig

__all__ = ["add_model", "add_train_options", "run_train"]

TRAIN_HELP = {
    "train_data_dir": "folder of pictures; captions from metadata.jsonl, .csv or .txt files, with {trigger} where the subject is named",
    "trigger": "the phrase that calls the concept",
    "aliases": "further spellings that call it too",
    "name": "the name it goes by (default: the trigger)",
    "output_dir": "gets concept.safetensors, report.html, metrics.jsonl, config.yaml, best/, logs/, validation/, checkpoint-N/",
    "caption_template": "for pictures without a caption, e.g. 'a photo of a {trigger}' (default: five like it)",
    "caption_dropout": "share of samples captioned by the trigger alone",
    "skip_bad_pictures": "go on without pictures that cannot be read",
    "resolution": "side in pixels of the squares that pictures are cropped to (default: the base's own)",
    "train_batch_size": "samples of one pass through the denoiser",
    "max_train_steps": "steps of teaching",
    "gradient_accumulation_steps": "passes that make one step",
    "gradient_checkpointing": "compute the denoiser's blocks again in the backward pass: less memory, slower steps",
    "learning_rate": "of the concept's rows",
    "gate_learning_rate": "of the gates that say how much of a row is added",
    "map_learning_rate": "of the maps, see --attention_rank",
    "optimizer": f"one of {', '.join(OPTIMIZERS)}; adamw8bit needs the package bitsandbytes, prodigy the package prodigyopt",
    "adam_beta1": "how slowly the optimiser forgets gradients",
    "adam_beta2": "how slowly the optimiser forgets the squares of gradients",
    "adam_epsilon": "what is added to the root of the squares",
    "adam_weight_decay": "of the maps, not with adam; rows and gates do not decay by it",
    "row_weight_decay": "of the rows, not with adam: pulls them to zero, where the concept adds nothing",
    "lr_scheduler": f"how the rates go on, all but the constant ones down to 0 or nearly: {', '.join(SCHEDULES)}",
    "lr_warmup_steps": "steps in which the rates rise to their full size",
    "lr_num_cycles": "rounds of cosine_with_restarts",
    "lr_power": "exponent of polynomial",
    "lr_min_ratio": "share of the rates that cosine_with_min_lr and cosine_warmup_with_min_lr come down to",
    "max_grad_norm": "length that gradients are cut to",
    "mounts": "where the concept is added: input, deep, span, pooled, context, key, value, or single mounts such as context.0.key",
    "share": "context rows: 'none', of its own for each cross-attention, or 'block', one set for all of a block of the denoiser",
    "bands": "equal shares of the timesteps that have context rows of their own, up to 4",
    "attention_rank": "rank of the maps at the cross-attentions, which add where the picture looks at the trigger; 0 for none",
    "feedforward_rank": "rank of the maps at the feed-forward layers behind them; 0 for none",
    "class_word": "a word that the base knows, at which rows of the mounts input and span start: giving one helps, the nearest thing known",
    "collages": "of every eight samples, those that show a picture at half size beside a thing that the base draws first; 0 for none",
    "companions": "names of the things in collages, known to the base",
    "collage_pictures": "things that are drawn for each picture's collages",
    "rho": f"bound of what is added, as a share of the mean length of the states it is added to (default: {ConceptConfig().rho})",
    "context_rho": "the same for the mounts at the denoiser (default: --rho)",
    "snr_gamma": "of the min-SNR weight of the loss; 'none' weighs all timesteps alike",
    "noise_offset": "how much of one value for a whole channel is added to the noise; helps very dark and very bright pictures",
    "timestep_sampling": f"which timesteps are taught how often: {', '.join(SAMPLINGS)}",
    "logit_mean": "of logit_normal; above 0 for more noise",
    "logit_std": "of logit_normal",
    "mode_scale": "of mode",
    "timestep_shift": "moves the timesteps towards noise if above 1 (default: the scheduler's own for flow matching, else 1)",
    "ema_decay": "of the running average that is validated and saved; 0 saves the last values",
    "mixed_precision": "no, fp16 or bf16",
    "seed": "of samples, noise and collages",
    "validation_prompts": "prompts with {trigger}, drawn every --validation_steps steps",
    "validation_steps": "steps from one drawing of the validation prompts to the next; 0 for never",
    "validation_loss_steps": "steps from one measurement of the loss on fixed draws to the next; 0 for never",
    "validation_loss_samples": "fixed draws that are measured",
    "validation_data_dir": "pictures that are measured and not taught (default: those of --train_data_dir)",
    "early_stop_patience": "end after so many measurements in a row that were no new best (default: never)",
    "validation_seeds": "seeds that each validation prompt is drawn from",
    "validation_inference_steps": "denoising steps of validation pictures, and of the things in collages",
    "validation_guidance_scale": "guidance of both",
    "checkpointing_steps": "steps from one checkpoint to the next; 0 for one at the end",
    "checkpoints_total_limit": "checkpoints that are kept, the newest ones (default: all)",
    "resume_from_checkpoint": "a checkpoint folder, or 'latest'",
    "report_to": "none, or trackers with commas between them: tensorboard, wandb",
}

# Options of a config file that are no fields of TrainConfig: what the pipeline is loaded with.
LOADING = ("model", "dtype", "device")


def add_model(parser: argparse.ArgumentParser, **unless_given: Any) -> None:
    """Adds the options that say which pipeline is loaded; `unless_given` is for options that a file may give too."""
    parser.add_argument(
        "--model",
        "--pretrained_model_name_or_path",
        dest="model",
        help="diffusers folder, hub id, or an embedded base: emoji-sd (default), emoji-pixart",
        **unless_given,
    )
    dtype = {"default": DTYPES[0], "choices": DTYPES, "help": f"of the model's weights (default: {DTYPES[0]})"}
    parser.add_argument("--dtype", **dtype | unless_given)
    parser.add_argument("--device", help="cuda, cpu, ... (default: CUDA if there is one)", **unless_given)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train`."""
    add_model(parser, default=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="options by name, such as a run's config.yaml; others given win")
    parser.add_argument("--print_config", action="store_true", help="print all options as they would be taken, as YAML, and end")
    add_manifest_options(parser)
    # a file may say what is required
    add_fields(parser, TrainConfig, TRAIN_HELP | DATA_HELP, required=False)
    refuse_preservation(parser)


def _load(loading: Mapping[str, Any], device: str) -> Any:
    from tiny_engram.pipelines.loaders import load_pipeline

    return load_pipeline(loading["model"], dtype=loading["dtype"], device=device)


def _told(args: argparse.Namespace) -> tuple[TrainConfig, dict[str, Any]]:
    """The config, and what the pipeline is loaded with: of the command line, else of the file."""
    told: dict[str, Any] = {} if args.config is None else read_config_file(args.config, TrainConfig, LOADING)
    loading = {name: getattr(args, name, told.pop(name, None)) for name in LOADING}
    fields = told | given_fields(args, TrainConfig)
    missing = [f"--{f.name}" for f in dataclasses.fields(TrainConfig) if f.default is dataclasses.MISSING and f.name not in fields]
    if missing:
        raise ConfigError(f"the following are required: {', '.join(missing)}; pass them, or write them into the file of --config")
    loading["dtype"] = dtype_for(loading["dtype"])
    return TrainConfig(**fields), loading


def run_train(args: argparse.Namespace) -> int:
    """Runs `train`; every process of `accelerate launch` does."""
    rank = local_rank()
    if rank:
        logging.getLogger("tiny_engram").setLevel(logging.ERROR)  # one process speaks
    if args.manifest is not None:
        return run_manifest(args, _load)
    refuse_manifest_options(args)
    config, loading = _told(args)
    if args.print_config:
        if rank == 0:
            print(config_text(config, loading), end="")
        return 0
    # folders are looked at before anything heavy is imported or loaded: a wrong path should not cost a minute
    from tiny_engram.training.data import scan_for

    scan_for(config)
    check_writable(Path(config.output_dir))
    import torch

    from tiny_engram.training.loop import train

    pipe = _load(loading, device_for(loading["device"]))
    try:
        result = train(pipe, config, loaded=loading)
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if rank == 0:
        print(f"{result.path}: {result.path.stat().st_size:,} bytes, {result.steps} steps in {result.seconds:.0f} s")
    return 0
