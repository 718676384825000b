"""Everything a training run is told, in one frozen object. Names follow diffusers' training scripts. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from tiny_engram.config import ENCODER_MOUNTS, MOST_BANDS, SHARES, ConceptConfig, at_encoder
from tiny_engram.errors import ConfigError
from tiny_engram.mount_names import GROUPS
from tiny_engram.run_config import RunConfig, is_number

__all__ = ["COMPANIONS", "OPTIMIZERS", "SAMPLINGS", "TrainConfig"]

OPTIMIZERS = ("adam", "adamw", "adamw8bit", "prodigy")
# Which timesteps are taught how often; the two in the middle are those of Stable Diffusion 3 (arXiv 2403.03206).
SAMPLINGS = ("uniform", "logit_normal", "mode")
MOST_COLLAGES = 7
SUBJECT_TYPES = ("object", "style", "person", "animal", "scene")
# Things of everyday pictures, unlike one another, which the embedded base was trained on and no prompt of the demo asks for.
COMPANIONS = (
    "apple", "banana", "lemon", "carrot", "tree", "clock", "umbrella", "key", "candle", "chair", "bell", "airplane", "bus", "butterfly",
    "turtle", "frog", "elephant", "balloon", "star", "camera", "telephone", "house", "ladder", "trophy", "anchor", "cookie", "tractor",
    "helicopter",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(RunConfig):
    """One concept, taught from one folder of pictures.

    Attributes:
        train_data_dir: folder of pictures; captions from metadata.jsonl or metadata.csv, .txt or .caption files beside them, or
            `caption_template`. Or a saved dataset of Hugging Face. Where pictures are given from Python, it is only a name for them.
        trigger, aliases, name: the phrase that calls the concept, further spellings, the name it goes by (default: the trigger).
        output_dir: gets concept.safetensors, report.html, README.md, images/, metrics.jsonl, config.yaml, best/, logs/,
            validation/, checkpoint-N/.
        caption_template: one or more templates with `{trigger}`; used for pictures that have no caption.
        caption_dropout: share of samples whose caption is cut down to the trigger alone. It teaches the bare prompt, and the
            pictures' style and background with it: what the caption does not say, the rows must.
        skip_bad_pictures: go on without pictures that cannot be read (they are named) instead of stopping.
        resolution: side of the square pictures are cropped to; None takes the base's own.
        gradient_checkpointing: the denoiser's blocks are computed again in the backward pass rather than keep what that needs: less memory,
            slower steps.
        learning_rate: of the rows; gates take `gate_learning_rate`, maps `map_learning_rate`.
        optimizer: "adam"; "adamw", with weight decay beside the gradients; "adamw8bit", the same with its state in bytes (needs
            bitsandbytes); "prodigy", which finds its rate itself (needs prodigyopt): `learning_rate` is then a factor of that, 1 as a rule,
            and the one of gates and maps too.
        adam_beta1, adam_beta2, adam_epsilon: of all of them. adam_weight_decay: of the maps, row_weight_decay: of the rows.
        lr_scheduler: see `rate`; `lr_num_cycles` and `lr_power` are those of "cosine_with_restarts" and "polynomial", `lr_min_ratio` is the
            least share of the rates that the two "with_min_lr" come down to.
        mounts: where the concept is added: "input" (the encoder's token embeddings, read in their sentence, which does not read them),
            "deep" (what a layer inside the encoder reads), "span" (the encoder's output), "pooled" (its pooled vector, where that is all
            that is used of it), "context" (what every attention of the denoiser reads of the text), "key" or "value" (one side of that),
            or single mounts such as "context.0.key".
        share: "none" gives each cross-attention context rows of its own, "block" one set to all of a block; for the groups alone.
        bands: equal shares of the timesteps that have context rows of their own, 1 to 4; for the groups alone.
        attention_rank, feedforward_rank: of the maps, which add where the picture looks at the trigger; 0 for none.
        class_word: a word that the base knows, at whose states the rows of "input" and "span" start; None starts them at zero. Giving
            one helps: the nearest thing to the taught one that the base knows.
        collages: of every eight samples, those that show a taught picture at half size beside a thing that the base draws from the
            picture's own caption, before teaching; 0 for none. They keep a new thing from swallowing what a prompt puts beside it,
            and are meant for pictures of one thing on a plain background.
        companions: names of such things, which the base knows. Those that share a word with the trigger or the class word are passed over.
        collage_pictures: things drawn for each taught picture; each is laid on either side of it.
        rho: bound of the residual as a share of the span's mean norm; None keeps ConceptConfig's. `context_rho`: that of the context
            mounts; None takes `rho`.
        snr_gamma: min-SNR weight of the loss; None weighs all timesteps alike, and so does flow matching.
        noise_offset: how much noise that is one value for a whole channel is added to the noise.
        timestep_sampling: "uniform"; "logit_normal", by `logit_mean` and `logit_std`; "mode", by `mode_scale`.
        timestep_shift: s moves a share t of the timesteps to s t / (1 + (s - 1) t); None is the scheduler's own for flow matching, else 1.
        ema_decay: of the rows that are validated and saved; 0 saves the last ones.
        validation_prompts: with `{trigger}`; drawn every `validation_steps` steps from fixed seeds. 0 steps: never. The companions
            of collages are drawn with the same `validation_inference_steps` and `validation_guidance_scale`.
        validation_loss_steps: the loss is measured every so many steps, with the averaged values, on the same `validation_loss_samples`
            draws each time: of the pictures in `validation_data_dir`, or of those that are taught. 0: never. The concept with the lowest
            one is kept in best/.
        early_stop_patience: the run ends after so many measurements in a row that were no new best; None: never.
        checkpointing_steps: 0 writes one at the end only. checkpoints_total_limit: oldest are deleted beyond it; None keeps all.
        resume_from_checkpoint: a checkpoint folder, or "latest".
        recursive: the pictures of the folders in `train_data_dir` too.
        folder_repeats: pictures in a folder named as "10_words" are drawn ten times as often.
        subject_type: object, style, person, animal or scene: the built-in templates of pictures without a caption.
        caption_tag_dropout: share of a caption's tags, which have commas between them, that a sample goes without; never the trigger's.
        shuffle_tags: the other tags in any order.
        random_flip: half of the samples mirrored; not for what has a left and a right, such as writing.
        alpha_mask: a transparent picture's opacity is its mask. unmasked_weight: how much the loss counts outside of masks, 0 to 1.
        buckets: pictures keep their shape, in sizes of about `resolution` squared pixels; all of a step have one size. Without, they
            are cropped to squares. bucket_steps: sides are multiples of it, in pixels; None takes the least that the base can.
        bucket_no_upscale: smaller pictures stay small.
        cache_dir: a folder that keeps the pictures' latents for the next run; None keeps none.
    """

    train_data_dir: str
    trigger: str
    aliases: tuple[str, ...] = ()
    name: str | None = None
    output_dir: str = "concept"
    caption_template: tuple[str, ...] = ()
    caption_dropout: float = 0.0
    skip_bad_pictures: bool = False
    resolution: int | None = None
    train_batch_size: int = 8
    max_train_steps: int = 300
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    learning_rate: float = 1.4e-2
    gate_learning_rate: float = 1.4e-2
    map_learning_rate: float = 5.6e-3
    optimizer: str = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    adam_weight_decay: float = 0.0
    row_weight_decay: float = 0.0
    lr_scheduler: str = "constant"
    lr_warmup_steps: int = 0
    lr_num_cycles: int = 1
    lr_power: float = 1.0
    lr_min_ratio: float = 0.1
    max_grad_norm: float = 1.0
    mounts: tuple[str, ...] = ("input", "value")
    share: str = "block"
    bands: int = 2
    attention_rank: int = 1
    feedforward_rank: int = 1
    class_word: str | None = None
    collages: int = 2
    companions: tuple[str, ...] = COMPANIONS
    collage_pictures: int = 4
    rho: float | None = None
    context_rho: float | None = None
    snr_gamma: float | None = 5.0
    noise_offset: float = 0.0
    timestep_sampling: str = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    timestep_shift: float | None = None
    ema_decay: float = 0.98
    mixed_precision: str = "no"
    seed: int = 0
    validation_prompts: tuple[str, ...] = ()
    validation_steps: int = 0
    validation_seeds: tuple[int, ...] = (0,)
    validation_inference_steps: int = 25
    validation_guidance_scale: float = 4.0
    validation_loss_steps: int = 0
    validation_loss_samples: int = 32
    validation_data_dir: str | None = None
    early_stop_patience: int | None = None
    checkpointing_steps: int = 0
    checkpoints_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    report_to: str = "tensorboard"
    recursive: bool = False
    folder_repeats: bool = False
    subject_type: str = "object"
    caption_tag_dropout: float = 0.0
    shuffle_tags: bool = False
    random_flip: bool = False
    alpha_mask: bool = False
    unmasked_weight: float = 0.0
    buckets: bool = False
    bucket_steps: int | None = None
    bucket_no_upscale: bool = False
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        self._check_run()
        self._check_whole(1, "validation_inference_steps", "collage_pictures")
        self._check_whole(0, "attention_rank", "feedforward_rank")
        self._check_above_0("gate_learning_rate", "map_learning_rate")
        self._check_below_1("ema_decay")
        self._check_optimization()
        self._check_validation_loss()
        self._check_above_0(*(name for name in ("rho", "context_rho", "snr_gamma") if getattr(self, name) is not None))
        check = self._check
        check(is_number(self.caption_dropout) and 0 <= self.caption_dropout <= 1, "caption_dropout", "a share from 0 to 1")
        check(self.resolution is None or self.resolution >= 8, "resolution", "at least 8 pixels")
        check(self.share in SHARES, "share", f"one of {', '.join(SHARES)}")
        check(isinstance(self.bands, int) and 1 <= self.bands <= MOST_BANDS, "bands", f"a whole number from 1 to {MOST_BANDS}")
        self._check_tuples(str, "aliases", "caption_template", "mounts", "companions", "validation_prompts")
        self._check_tuples(int, "validation_seeds")
        check(len(self.mounts) > 0, "mounts", "one or more names such as 'span' or 'context'")
        alone = all(at_encoder(mount) for mount in self.mounts)
        check(self.context_rho is None or not alone, "context_rho", "None where mounts are at the encoder alone")
        word = self.class_word
        check(word is None or bool(word.strip()), "class_word", "a word that the base knows")
        begins = not set(self.mounts).isdisjoint(ENCODER_MOUNTS)
        check(word is None or begins, "class_word", "None where mounts are neither 'input' nor 'span'")
        count = self.collages
        check(
            isinstance(count, int) and 0 <= count <= MOST_COLLAGES,
            "collages",
            f"a whole number from 0 to {MOST_COLLAGES}, of eight samples",
        )
        if count:
            self._check_companions()
        self._check_data()
        for field in ("caption_template", "validation_prompts"):
            for text in getattr(self, field):
                if "{trigger}" not in text and self.trigger not in text:
                    raise ConfigError(f"{field} {text!r} does not hold the trigger; write {{trigger}} where it belongs")

    def _check_optimization(self) -> None:
        check = self._check
        check(self.optimizer in OPTIMIZERS, "optimizer", f"one of {', '.join(OPTIMIZERS)}")
        self._check_whole(1, "lr_num_cycles")
        self._check_below_1("adam_beta1")
        self._check_above_0("adam_epsilon", "lr_power", "logit_std", *(["timestep_shift"] if self.timestep_shift is not None else []))
        for field in ("adam_weight_decay", "row_weight_decay", "noise_offset"):
            check(is_number(getattr(self, field)) and getattr(self, field) >= 0, field, "a number from 0")
        for field in ("adam_weight_decay", "row_weight_decay"):
            check(self.optimizer != "adam" or getattr(self, field) == 0, field, "0 with the optimizer adam; pass --optimizer adamw")
        check(self.optimizer != "prodigy" or self.learning_rate >= 0.1, "learning_rate", "a factor of the rate that prodigy finds; pass 1")
        check(self.timestep_sampling in SAMPLINGS, "timestep_sampling", f"one of {', '.join(SAMPLINGS)}")
        check(is_number(self.logit_mean), "logit_mean", "a number")
        # beyond these the shares would not rise any more
        check(is_number(self.mode_scale) and -1 <= self.mode_scale <= 1.75, "mode_scale", "a number from -1 to 1.75")

    def _check_validation_loss(self) -> None:
        self._check_whole(0, "validation_loss_steps")
        self._check_whole(1, "validation_loss_samples", *(["early_stop_patience"] if self.early_stop_patience is not None else []))
        for field in ("early_stop_patience", "validation_data_dir"):
            given = getattr(self, field) is not None
            self._check(not given or self.validation_loss_steps > 0, field, "None without validation_loss_steps, which measures the loss")

    def _check_data(self) -> None:
        """What is drawn from the pictures."""
        check = self._check
        check(self.subject_type in SUBJECT_TYPES, "subject_type", f"one of {', '.join(SUBJECT_TYPES)}")
        self._check_below_1("caption_tag_dropout")
        check(is_number(self.unmasked_weight) and 0 <= self.unmasked_weight <= 1, "unmasked_weight", "a share from 0 to 1")
        if self.bucket_steps is not None:
            self._check_whole(1, "bucket_steps")
        check(self.bucket_steps is None or self.buckets, "bucket_steps", "None without buckets; pass --buckets")
        check(not self.bucket_no_upscale or self.buckets, "bucket_no_upscale", "False without buckets; pass --buckets")
        check(self.cache_dir is None or bool(self.cache_dir.strip()), "cache_dir", "a folder")

    def _check_companions(self) -> None:
        for name in self.companions if self.companions != COMPANIONS else ():
            if not name.strip():
                raise ConfigError(f"companions are {self.companions!r}, expected names of things that the base knows")
            for spelling in (self.trigger, *self.aliases):
                if f" {spelling.lower()} " in f" {name.lower()} ":
                    raise ConfigError(f"companion {name!r} holds the trigger {spelling!r}, expected a thing that the base knows")
        if not self.beside:
            raise ConfigError(
                f"collages is {self.collages}, but companions are {self.companions!r}, expected a thing of another name than trigger and "
                "class_word; name one that the base knows, or pass --collages 0"
            )

    @property
    def beside(self) -> tuple[str, ...]:
        """The companions that share no word with the trigger, its aliases or the class word."""
        taken = {word for text in (self.trigger, *self.aliases, self.class_word or "") for word in text.lower().split()}
        return tuple(name for name in self.companions if not taken & set(name.lower().split()))

    @property
    def concept_config(self) -> ConceptConfig:
        """What the concept is made with; `EngramAdapter.register` takes it too."""
        # of what has no group, share and bands say nothing, and its file shall not differ by them
        groups = bool(GROUPS.keys() & set(self.mounts))
        return ConceptConfig(
            rho=ConceptConfig().rho if self.rho is None else self.rho,
            context_rho=self.context_rho,
            mounts=self.mounts,
            share="block" if groups and self.share == "block" else "none",
            bands=self.bands if groups else 1,
            attention_rank=self.attention_rank,
            feedforward_rank=self.feedforward_rank,
        )

    @property
    def at_denoiser(self) -> bool:
        """Does the concept have rows or maps at the denoiser itself?"""
        return not all(at_encoder(mount) for mount in self.mounts) or self.attention_rank > 0 or self.feedforward_rank > 0

    @property
    def concept_path(self) -> Path:
        """Where the finished concept is written."""
        return Path(self.output_dir) / "concept.safetensors"

    def prompts_with(self, trigger: str) -> list[str]:
        """The validation prompts."""
        return [prompt.replace("{trigger}", trigger) for prompt in self.validation_prompts]
