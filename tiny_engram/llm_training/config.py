"""Everything a run of train-lm is told, in one frozen object. Names follow diffusers' and transformers' scripts. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiny_engram.config import BLOCK
from tiny_engram.run_config import RunConfig, is_number

if TYPE_CHECKING:
    from tiny_engram.llm import EngramConfig

__all__ = ["LMTrainConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LMTrainConfig(RunConfig):
    """Engram layers that read all n-grams, taught from text in front of a frozen causal LM.

    Attributes:
        train_file: text files (.txt, .md, .jsonl with a "text" column), folders of them, or what the package datasets reads: a folder
            that save_to_disk wrote, .parquet or .arrow files and folders of those. A file is a document, a row of a table is one.
        validation_file: text of the same kinds that is measured only; without it `validation_split_percentage` of the windows are held out.
        output_dir: gets the adapter, README.md, logs/, cache/ and checkpoint-N/.
        overwrite_output_dir: a new run may begin where the adapter or checkpoints of another lie; deletes these checkpoints.
        layers, max_ngram, heads, head_dim, form: as in EngramConfig; `rows`, its `vocab`: rows of each n-gram size and head.
        block_size: tokens of a window; texts are laid behind one another with the tokenizer's end token between them.
        train_batch_size: windows of one pass, on each process.
        learning_rate: of projections, norms and convolution, by AdamW; its beta1 is 0.9.
        table_learning_rate: of the rows; None is five times `learning_rate` (Engram, arXiv 2601.07372). They never decay.
        adam_weight_decay: of the projections' matrices alone.
        gradient_checkpointing: compute the decoder's layers again in the backward pass rather than keep what they need for it.
        mixed_precision: of the passes that teach; masters are float32, and validation runs in the model's own type.
        validation_steps: loss and perplexity every so many steps; 0 measures at the beginning and the end alone.
        max_validation_samples: windows that are measured, spread evenly over all of them.
        checkpointing_steps: 0 writes one at the end only. checkpoints_total_limit: oldest are deleted beyond it; None keeps all.
        resume_from_checkpoint: a checkpoint folder, or "latest".
    """

    train_file: tuple[str, ...]
    validation_file: tuple[str, ...] = ()
    validation_split_percentage: float = 5.0
    output_dir: str = "engram-lm"
    overwrite_output_dir: bool = False
    layers: tuple[int, ...]
    max_ngram: int = 3
    heads: int = 8
    rows: int = 8192
    head_dim: int = 32
    form: str = "paper"
    block_size: int = 512
    train_batch_size: int = 8
    max_train_steps: int = 1000
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    table_learning_rate: float | None = None
    adam_beta2: float = 0.95
    adam_weight_decay: float = 0.0
    lr_scheduler: str = "cosine"
    lr_warmup_steps: int = 20
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"
    gradient_checkpointing: bool = False
    seed: int = 0
    validation_steps: int = 0
    max_validation_samples: int = 256
    checkpointing_steps: int = 0
    checkpoints_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    report_to: str = "tensorboard"

    def __post_init__(self) -> None:
        self._check_run()
        self._check_tuples(str, "train_file", "validation_file")
        self._check_tuples(int, "layers")
        check = self._check
        check(len(self.train_file) > 0, "train_file", "one or more text files or folders of them")
        distinct = len(set(self.layers)) == len(self.layers) > 0
        check(distinct and min(self.layers) >= 0, "layers", "one or more different layers, counted from 0")
        self._check_whole(1, "heads", "max_validation_samples")
        self._check_whole(2, "max_ngram", "rows", "block_size")
        whole = isinstance(self.head_dim, int) and self.head_dim >= 1
        check(whole and self.head_dim % BLOCK == 0, "head_dim", f"a multiple of {BLOCK}, the values of one scale")
        check(self.form in ("paper", "v41"), "form", "paper or v41")
        if self.table_learning_rate is not None:
            self._check_above_0("table_learning_rate")
        check(is_number(self.adam_weight_decay) and self.adam_weight_decay >= 0, "adam_weight_decay", "a number from 0")
        split = self.validation_split_percentage
        check(is_number(split) and 0 <= split <= 50, "validation_split_percentage", "a number from 0 to 50")
        for field in ("gradient_checkpointing", "overwrite_output_dir"):
            check(isinstance(getattr(self, field), bool), field, "True or False")

    @property
    def table_rate(self) -> float:
        """The rows' learning rate."""
        return 5 * self.learning_rate if self.table_learning_rate is None else self.table_learning_rate

    def engram_config(self, end_id: int) -> "EngramConfig":
        """What the layers are made with.

        Args:
            end_id: raw id of the token between texts. No n-gram reads it, nor anything in front of it: a text's first tokens have the
                rows that they have in a prompt of their own, which a window begins with or a conversation, and never rows of whatever
                text happened to be laid before them.
        """
        from tiny_engram.llm import EngramConfig

        return EngramConfig(
            layers=self.layers,
            max_ngram=self.max_ngram,
            heads=self.heads,
            vocab=self.rows,
            head_dim=self.head_dim,
            form=self.form,  # pyright: ignore[reportArgumentType]
            seed=self.seed,
            blocked_ids=(end_id,),
        )
