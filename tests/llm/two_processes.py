"""What each of two processes does for test_train_lm_processes: run as a script, with RANK and WORLD_SIZE in the environment."""

import json
import math
import sys
from pathlib import Path

import torch
from torch import distributed, nn

from tiny_engram.errors import TinyEngramError
from tiny_engram.llm.loading import load_causal_lm
from tiny_engram.llm_training import LMTrainConfig, train_lm
from tiny_engram.llm_training.gradients import reduce_gradients


def reduced(rank: int) -> dict[str, list]:
    """Rows 1 and 3 of rank 0 and nothing of rank 1 in one table; rows of both in another; nothing of both in a third."""
    tables = [nn.Parameter(torch.zeros(6, 32)) for _ in range(3)]
    weight = nn.Parameter(torch.zeros(2))
    if rank == 0:
        nn.functional.embedding(torch.tensor([1, 3, 3]), tables[0], sparse=True).sum().backward()
        (3 * weight).sum().backward()
    rows = torch.tensor([[0, 5], [5, 2]][rank])
    (nn.functional.embedding(rows, tables[1], sparse=True).sum() * (rank + 1)).backward()
    loss = reduce_gradients([weight], tables, torch.tensor(1.5 + rank))
    assert weight.grad is not None
    grads = [table.grad for table in tables if table.grad is not None]
    return {
        "loss": [float(loss)],
        "weight": weight.grad.tolist(),
        "rows": [grad.indices()[0].tolist() for grad in grads],
        "values": [grad.to_dense()[:, 0].tolist() for grad in grads],
    }


def main(folder: Path, rank: int) -> None:
    model, tokenizer = load_causal_lm(folder / "model")
    config = LMTrainConfig.from_dict(json.loads((folder / "config.json").read_text()))
    result = train_lm(model, tokenizer, config, progress=False)
    told = {"losses": result.losses, "loss": result.measured[-1].loss, "reduced": reduced(rank)}

    # One window of text, which is less than the processes are; and an error of one that is everybody's.
    few = config.to_dict() | {"train_file": [str(folder / "few.txt")], "validation_split_percentage": 0, "output_dir": str(folder / "few")}
    told["few"] = train_lm(model, tokenizer, LMTrainConfig.from_dict(few), progress=False).losses

    def spoil(step: int, loss: float) -> None:
        if rank == 1:
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)

    errors, missing = [], {"train_file": [str(folder / "none.txt")], "output_dir": str(folder / "missing")}
    spoiled = {"output_dir": str(folder / "spoiled"), "checkpointing_steps": 1}
    for changes, on_step in ((spoiled, spoil), (missing, None)):
        try:
            train_lm(model, tokenizer, LMTrainConfig.from_dict(config.to_dict() | changes), progress=False, on_step=on_step)
        except TinyEngramError as error:
            errors.append(str(error))
    told["errors"] = errors
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
