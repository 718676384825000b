"""Two networks that saw photographs and none of these drawings: what each makes of a picture, as vectors to compare.

EfficientNet-Lite0 says what is shown, wherever its parts are; SqueezeNet 1.1, compared place by place as LPIPS does, also
says where they are. Both are frozen, and both turn a picture into one vector of length 1, so that similarities of many
pictures with many references are one matrix product. Imports torch, safetensors and the judges of assets/recipe.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

SQUEEZENET = Path(__file__).with_name("squeezenet.safetensors")
MAKER = "benchmarks.personalization.make_squeezenet"
# Of blue, green and red, in bytes: how the network's authors prepared its pictures.
MEAN = (104.006, 116.669, 122.679)
# (squeezed, expanded) channels of fire 2 to 9; half of the expanded ones are 1 x 1, half 3 x 3.
FIRES = ((16, 128), (16, 128), (32, 256), (32, 256), (48, 384), (48, 384), (64, 512), (64, 512))
# Pixels. Both networks take the autoencoder's texture for more than it is: smoothed a little, they tell real subjects that
# went through it apart more often, and by a wider margin.
SMOOTHED = 2.0
CHANNELS = (64, 128, 256, 384, 384, 512, 512)


class Fire(nn.Module):
    """Squeeze to few channels, then expand by 1 x 1 and 3 x 3 side by side."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze1x1 = nn.Conv2d(channels, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded // 2, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded // 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.squeeze1x1(x))
        return F.relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], 1))


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1 without its classifier (Iandola et al. 2016), read at the seven places at which LPIPS reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, stride=2)
        channels = 64
        for number, (squeezed, expanded) in enumerate(FIRES, start=2):
            self.add_module(f"fire{number}", Fire(channels, squeezed, expanded))
            channels = expanded
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)

    @classmethod
    def load(cls, path: Path = SQUEEZENET) -> SqueezeNet:
        """Frozen, float32, on the CPU."""
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there: it belongs to the checkout, or python -m {MAKER} makes it")
        network = cls()
        network.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
        return network.requires_grad_(False).eval()

    def forward(self, pictures: torch.Tensor) -> list[torch.Tensor]:
        """float32 `[n, 3, H, W]` in 0..1 -> seven maps `[n, CHANNELS[i], h, w]`: 63, 31, 15, 7, 7, 7, 7 places a side at 128."""
        x = (pictures.flip(1) * 255 - self.mean).contiguous(memory_format=torch.channels_last)
        x = F.relu(self.conv1(x))
        maps = [x]
        for number in range(2, 10):
            if number in (2, 4, 6):
                x = F.max_pool2d(x, 3, stride=2, ceil_mode=True)
            x = self.get_submodule(f"fire{number}")(x)
            if number not in (2, 4):
                maps.append(x)
        return maps


def smooth(pictures: torch.Tensor, deviation: float = SMOOTHED) -> torch.Tensor:
    """Gaussian blur of `[n, 3, H, W]`, edges continued; `deviation` in pixels."""
    reach = int(3 * deviation) + 1
    places = torch.arange(-reach, reach + 1, device=pictures.device)
    kernel = torch.exp(-places.square() / (2 * deviation**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    across = F.conv2d(F.pad(pictures, (reach, reach, 0, 0), mode="replicate"), kernel[:, :, None], groups=3)
    return F.conv2d(F.pad(across, (0, 0, reach, reach), mode="replicate"), kernel[..., None], groups=3)


def lpips_vectors(maps: list[torch.Tensor]) -> torch.Tensor:
    """Maps of `SqueezeNet` -> `[n, D]` of length 1; the product of two is 1 - their LPIPS distance.

    The distance is LPIPS's (Zhang et al. 2018) without learned heads: channels scaled to length 1 at every place, squared
    differences summed over channels, averaged over places, and, halved, averaged over the seven maps: 0 to 1, since maps
    are not negative. The published heads belong to other weights of this network (torchvision's, trained anew), whose
    channels are not these: here they told real subjects apart about as well as the same heads in random order, or none.
    """
    vectors = []
    for x in maps:
        places = x.shape[2] * x.shape[3]
        # A place where no channel fires has no direction; two such places count as different ones.
        scaled = x * (x.square().sum(1, keepdim=True) + 1e-10).rsqrt()
        vectors.append(scaled.flatten(1) * (places * len(maps)) ** -0.5)
    return F.normalize(torch.cat(vectors, 1), dim=1)


def lpips(network: SqueezeNet, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The distance of each picture of `a` from its counterpart in `b`, `[n, 3, H, W]` in 0..1 both -> `[n]`."""
    return 1 - (lpips_vectors(network(a)) * lpips_vectors(network(b))).sum(1)
