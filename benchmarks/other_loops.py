"""Steps of textual inversion and of DreamBooth with LoRA, set up as diffusers' training scripts are, on a copy of what they change.

Each step takes pictures from files, as those scripts' data sets do. `cached` leaves pictures and autoencoder out: latents were made before.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

__all__ = ["DreamBoothLora", "TextualInversion"]


class Loop(ABC):
    """One step of a loop at each call; returns its loss.

    Args:
        pipe: what is taught; its own parts stay as they are.
        pictures: files. captions: each with the word that is taught.
        side: of the square that pictures are cut to, in pixels.
    """

    unet: Any
    text_encoder: Any
    tokenizer: Any
    parameters: Sequence[torch.Tensor]

    def __init__(self, pipe: Any, pictures: Sequence[Path], captions: Sequence[str], *, batch: int, side: int, cached: bool) -> None:
        self.pipe, self.batch, self.side = pipe, batch, side
        self.unet, self.text_encoder, self.tokenizer = pipe.unet, pipe.text_encoder, pipe.tokenizer
        self._pictures, self._texts = pictures, captions
        self._latents = self._encoded(self._pixels(pictures)) if cached else None
        self.restart()
        self._prepare()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.rate, weight_decay=1e-2)

    rate = 1e-4

    def restart(self) -> None:
        """Begin again at the first picture and caption."""
        self._files, self._captions = cycle(self._pictures), cycle(self._texts)
        self._cached = None if self._latents is None else cycle(self._latents)

    @abstractmethod
    def _prepare(self) -> None:
        """Put what is taught in the place of the pipeline's own, and name its parameters."""

    def _after(self) -> None:  # noqa: B027 (most do nothing)
        """What the loop does behind the optimiser."""

    def _pixels(self, files: Sequence[Path]) -> torch.Tensor:
        shown = [Image.open(file).convert("RGB").resize((self.side, self.side), Image.Resampling.BICUBIC) for file in files]
        return torch.stack([torch.from_numpy(np.asarray(one).astype(np.float32) / 127.5 - 1).permute(2, 0, 1) for one in shown])

    @torch.no_grad()
    def _encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.pipe.vae.encode(pixels.to(self.pipe.device)).latent_dist.sample() * self.pipe.vae.config.scaling_factor

    def loss(self) -> torch.Tensor:
        """Mean squared error of a batch, at timesteps and noise drawn for it."""
        scheduler = self.pipe.scheduler
        if self._cached is not None:
            latents = torch.stack(list(islice(self._cached, self.batch)))
        else:
            latents = self._encoded(self._pixels(list(islice(self._files, self.batch))))
        texts = list(islice(self._captions, self.batch))
        ids = self.tokenizer(texts, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (self.batch,), device=latents.device)
        states = self.text_encoder(ids.to(latents.device))[0]
        said = self.unet(scheduler.add_noise(latents, noise, timesteps), timesteps, states).sample
        kind = scheduler.config.prediction_type
        wanted = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
        return functional.mse_loss(said.float(), wanted.float())

    def __call__(self) -> float:
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._after()
        return loss.item()


class TextualInversion(Loop):
    """One new token; the optimiser has the whole table of embeddings, and all others are put back after each step."""

    rate = 5e-4
    word = "<taught>"

    def _prepare(self) -> None:
        self.tokenizer, self.text_encoder = copy.deepcopy(self.pipe.tokenizer), copy.deepcopy(self.pipe.text_encoder)
        self.tokenizer.add_tokens([self.word])
        self.text_encoder.resize_token_embeddings(len(self.tokenizer))
        embeddings = self.text_encoder.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        self.text_encoder.requires_grad_(False)
        embeddings.weight.requires_grad_(True)
        self.table, self.taught = embeddings.weight, self.tokenizer.convert_tokens_to_ids(self.word)
        self.original, self.parameters = embeddings.weight.detach().clone(), [embeddings.weight]
        self.others = torch.ones(len(self.tokenizer), dtype=torch.bool, device=self.table.device)
        self.others[self.taught] = False

    @torch.no_grad()
    def _after(self) -> None:
        self.table[self.others] = self.original[self.others]


class DreamBoothLora(Loop):
    """LoRA of rank 4 on the UNet's attentions; the text goes through the frozen encoder at each step."""

    def _prepare(self) -> None:
        from peft import LoraConfig, get_peft_model

        unet: Any = copy.deepcopy(self.pipe.unet)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        self.unet = get_peft_model(unet, LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets))
        self.parameters = [p for p in self.unet.parameters() if p.requires_grad]
