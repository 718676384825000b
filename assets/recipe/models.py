"""The shapes of the embedded bases: real diffusers and transformers classes, small.

Sizes are bounded by the repository (a checkout must stay light): in fp16 the autoencoder, which both bases share, takes 6.6 MB;
CLIP text encoder 14.3 MB (most of it 49,408 token embeddings) and UNet 19.0 MB; T5 encoder 6.8 MB (of it 32,128 token embeddings
6.2) and diffusion transformer 7.1 MB.
"""

from __future__ import annotations

from diffusers import AutoencoderKL, DDIMScheduler, PixArtTransformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

LATENT_CHANNELS = 12
WIDTH = 128
T5_WIDTH = 96
HEADS, HEAD_WIDTH = 5, 32


def build_vae() -> AutoencoderKL:
    """128 x 128 RGB <-> 12 x 16 x 16 latents."""
    return AutoencoderKL(
        block_out_channels=(32, 64, 96, 128),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=16,
        mid_block_add_attention=False,
        sample_size=128,
        scaling_factor=1.0,
    )


def build_text_encoder() -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=77,
            hidden_act="quick_gelu",
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=49407,
        )
    )


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(96, 192),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        mid_block_type="UNetMidBlock2DCrossAttn",
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        # diffusers reads this as the number of heads: 32 channels each
        attention_head_dim=(3, 6),
        norm_num_groups=32,
        use_linear_projection=True,
    )


def build_t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=32128,
            d_model=T5_WIDTH,
            d_kv=T5_WIDTH // 4,
            d_ff=160,
            num_layers=4,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            # nothing is seen often enough to be learned by heart
            dropout_rate=0.0,
        )
    )


def build_transformer() -> PixArtTransformer2DModel:
    """256 tokens of one latent place each. As many channels out as in: no variance is learned."""
    return PixArtTransformer2DModel(
        sample_size=16,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=8,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        cross_attention_dim=HEADS * HEAD_WIDTH,
        caption_channels=T5_WIDTH,
    )


def build_scheduler() -> DDIMScheduler:
    """v-prediction with zero terminal SNR: a flat background cannot be drawn from noise that still holds a mean."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
        clip_sample=False,
    )
