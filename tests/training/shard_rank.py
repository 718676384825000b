"""One process of a run whose denoiser is in parts, if the environment says so.

    python shard_rank.py MODEL CONFIG.json ANSWER.json [interrupt=N]

The answer holds losses, the bytes of the denoiser that were held in a step and before it, and what is not as it was afterwards.
`interrupt=N` interrupts this process in step N, inside the denoiser.
"""

import json
import sys

import torch

from tiny_engram.errors import TinyEngramError
from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import rows
from tiny_engram.training.config import TrainConfig
from tiny_engram.training.loop import train
from tiny_engram.training.sharded import held_bytes


def traces(module: torch.nn.Module) -> dict:
    """What a run may leave at a module."""
    hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
    return {"class": type(module).__name__, "hooks": hooks, "keys": sorted({*map(str, vars(module))} - {"_gradient_checkpointing_func"})}


def main() -> int:
    model, told, answer, *options = sys.argv[1:]
    rows.fake_quantize = lambda x: x
    pipe = load_pipeline(model, device="cpu")
    stops = next((int(each.removeprefix("interrupt=")) for each in options), None)
    held: list[int] = []

    def count(*_) -> None:
        held.append(held_bytes(pipe.unet.up_blocks))
        if len(held) == stops:
            raise KeyboardInterrupt

    whole = held_bytes(pipe.unet.up_blocks)
    values = {name: (p, p.requires_grad, p.detach().clone()) for name, p in pipe.unet.named_parameters()}
    before = {name: traces(module) for name, module in pipe.unet.named_modules()}
    handle = pipe.unet.mid_block.register_forward_hook(count)
    said: dict = {}
    with open(told) as file:
        configs = [TrainConfig.from_dict(each) for each in json.load(file)]
    try:
        said["losses"] = [train(pipe, config, progress=False).losses for config in configs]
    except TinyEngramError as error:
        said["error"] = str(error)
    except KeyboardInterrupt:
        said["error"] = "interrupted"
    handle.remove()
    if "error" in said:
        try:
            pipe("a", num_inference_steps=1)
        except TinyEngramError as error:
            said["call"] = str(error)
    else:
        after = {name: traces(module) for name, module in pipe.unet.named_modules()}
        said["changed"] = [f"{name}: {before[name]} became {after[name]}" for name in before if before[name] != after[name]]
        for name, p in pipe.unet.named_parameters():
            old, flag, value = values[name]
            if p is not old or p.requires_grad != flag or not torch.equal(p, value):
                said["changed"].append(f"{name}: {p is old}, {p.requires_grad}, {torch.equal(p, value)}")
        drawn = pipe("a", num_inference_steps=1, output_type="np", generator=torch.Generator().manual_seed(1)).images
        said |= {"whole": whole, "held": max(held), "drawn": float(drawn.sum())}
    with open(answer, "w") as file:
        json.dump(said, file)
    if torch.distributed.is_initialized() and "error" not in said:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
