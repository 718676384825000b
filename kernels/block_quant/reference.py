"""e4m3 payload and e8m0 block scales in plain torch. Imports torch only.

Source: OCP Microscaling Formats (MX) v1.0 for the two number formats; one scale per 32 values.
"""

import torch

BLOCK = 32
E4M3_MAX = 448.0
NAN_BYTE = 255
ONE_BYTE = 127


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """uint8 e8m0 exponents -> float32 powers of two: byte 0 is 2**-127 (a subnormal), byte 255 is NaN."""
    byte = scale.to(torch.int32)
    bits = byte << 23
    bits = torch.where(byte == 0, 1 << 22, bits)
    bits = torch.where(byte == NAN_BYTE, 0x7FC00000, bits)
    return bits.view(torch.float32)


def quantize_blocks_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise; arguments and result as in :func:`quantize_blocks`."""
    blocks = x.detach().to(torch.float32).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    finite = amax.isfinite()
    # ceil(log2(amax / 448)) without a logarithm, whose last bit differs between machines: 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(torch.where(finite, amax, 1.0))
    exponent = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)
    scale = (exponent + ONE_BYTE).clamp(0, 254)
    scale = torch.where(amax == 0, ONE_BYTE, scale)
    # 254 - byte is the byte of the reciprocal, so the product below is exact up to e4m3's own rounding.
    scaled = blocks * e8m0_to_float(254 - scale).unsqueeze(-1)
    payload = scaled.clamp(-E4M3_MAX, E4M3_MAX).flatten(-2).to(torch.float8_e4m3fn)
    return payload, torch.where(finite, scale, NAN_BYTE).to(torch.uint8)


def dequantize_blocks_reference(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise; arguments and result as in :func:`dequantize_blocks`."""
    values = payload.to(torch.float32).unflatten(-1, (-1, BLOCK))
    return (values * e8m0_to_float(scale).unsqueeze(-1)).flatten(-2)
