"""Latents of pictures as each pipeline decodes them, the other way round. Functions about the user's own objects; nothing of diffusers is
imported.

Each takes (pipe, pixels `[batch, 3, height, width]` from -1 to 1, in the VAE's type and on its device) and gives mean and deviation of
the latents, scaled for the denoiser, float32 `[batch, channels, h, w]` each.
"""

from typing import Any

__all__ = ["compressed", "normalized", "scaled", "scaled_by_channel", "shifted"]

Latents = tuple[Any, Any]


def _drawn(pipe: Any, pixels: Any) -> Latents:
    found = pipe.vae.encode(pixels).latent_dist
    return found.mean.float(), found.std.float()


def _of_channels(values: Any, like: Any) -> Any:
    """A number for each channel, against latents `[batch, channels, ...]`."""
    return like.new_tensor(values).view(1, -1, *[1] * (like.dim() - 2))


def scaled(pipe: Any, pixels: Any) -> Latents:
    """Times `scaling_factor`."""
    mean, std = _drawn(pipe, pixels)
    factor = pipe.vae.config.scaling_factor
    return mean * factor, std * factor


def shifted(pipe: Any, pixels: Any) -> Latents:
    """Less `shift_factor`, then times `scaling_factor`."""
    mean, std = _drawn(pipe, pixels)
    factor = pipe.vae.config.scaling_factor
    return (mean - pipe.vae.config.shift_factor) * factor, std * factor


def scaled_by_channel(pipe: Any, pixels: Any) -> Latents:
    """Stable Diffusion XL: some of its VAEs say mean and deviation of each channel beside the factor."""
    means, stds = (getattr(pipe.vae.config, name, None) for name in ("latents_mean", "latents_std"))
    if means is None or stds is None:
        return scaled(pipe, pixels)
    mean, std = _drawn(pipe, pixels)
    factor = pipe.vae.config.scaling_factor / _of_channels(stds, mean)
    return (mean - _of_channels(means, mean)) * factor, std * factor


def normalized(pipe: Any, pixels: Any) -> Latents:
    """Qwen-Image: a VAE of videos, of which a picture is one frame, and mean and deviation of each channel."""
    mean, std = (x[:, :, 0] for x in _drawn(pipe, pixels[:, :, None]))
    config = pipe.vae.config
    return (mean - _of_channels(config.latents_mean, mean)) / _of_channels(config.latents_std, mean), std / _of_channels(
        config.latents_std, mean
    )


def compressed(pipe: Any, pixels: Any) -> Latents:
    """Sana: an autoencoder that draws nothing."""
    latents = pipe.vae.encode(pixels).latent.float() * pipe.vae.config.scaling_factor
    return latents, latents.new_zeros(latents.shape)
