"""One process of a run of several.

    python rank.py MODEL CONFIG.json ANSWER.json [plain] [dies=N]

`plain` switches the quantiser off, through which rounding of one process' sum may become a step of another's. `dies=N` kills this process
in step N, inside the denoiser. A list of configs is taught as many concepts. The answer holds losses, or the error's line.
"""

import json
import os
import signal
import sys

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import rows
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.loop import train
from tiny_engram.training.many import train_concepts


def main() -> int:
    model, told, answer, *options = sys.argv[1:]
    if "plain" in options:
        rows.fake_quantize = lambda x: x
    dies = next((int(each.removeprefix("dies=")) for each in options if each.startswith("dies=")), None)
    pipe = load_pipeline(model, device="cpu")
    passes = 0

    def count(*_) -> None:
        nonlocal passes
        passes += 1
        if passes == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    pipe.unet.mid_block.register_forward_hook(count)
    with open(told) as file:
        told = json.load(file)
    try:
        if isinstance(told, list):
            outcomes = train_concepts(pipe, [TrainConfig.from_dict(each) for each in told], progress=False)
            said = {"concepts": [{"losses": each.result and each.result.losses, "error": each.error} for each in outcomes]}
        else:
            result = train(pipe, TrainConfig.from_dict(told), progress=False)
            said = {"losses": result.losses, "steps": result.steps}
    except TinyEngramError as error:
        said = {"error": str(error)}
    with open(answer, "w") as file:
        json.dump(said, file)
    if torch.distributed.is_initialized() and "error" not in said:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
