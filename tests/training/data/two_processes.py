"""What each of two processes does for test_buckets: run as a script, with RANK and WORLD_SIZE in the environment."""

import json
import sys
from pathlib import Path

from torch import distributed

from tiny_engram.pipelines.loaders import load_pipeline
from tiny_engram.training import TrainConfig, loop, train


def main(folder: Path, model: str, rank: int) -> None:
    shown: list[int] = []
    picture = loop.TrainingData.picture

    def noted(self, drawn) -> int:
        shown.append(picture(self, drawn))
        return shown[-1]

    loop.TrainingData.picture = noted
    config = TrainConfig.from_dict(json.loads((folder / "config.json").read_text()))
    result = train(load_pipeline(model, device="cpu"), config, progress=False)
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": result.losses, "pictures": shown}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
