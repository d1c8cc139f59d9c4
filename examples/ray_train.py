"""Train the GPT of train_gpt.py under Ray Train, which starts the ranks, and restarts them after a failure.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --directory runs/ray
    python examples/ray_train.py --workers 4 --directory /shared/runs/ray -- --preset small --reduction-order tree

Ray makes the process group, and `fs.init_mesh` uses it. All hosts must see the directory, because each rank writes its
part of a checkpoint there. After a failure, all ranks continue from the last complete checkpoint. Options after `--`
are those of train_gpt.py. Only the first rank writes losses and plots them.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from installed import RAY, installed_by


def train(config: dict[str, Any]) -> None:
    """Run on each worker, in a process of its own."""
    # Workers import neither this file nor those beside it by themselves.
    sys.path.insert(0, config["examples"])
    import train_gpt

    train_gpt.main(["--directory", config["directory"], *config["options"]])


def main() -> None:
    args = parse_args()
    with installed_by(RAY):
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

    directory = args.directory.resolve()
    config = {"examples": str(Path(__file__).parent), "directory": str(directory), "options": args.options}
    TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=str(directory / "ray"), failure_config=FailureConfig(args.max_failures)),
    ).fit()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--directory", type=Path, default=Path("runs/ray"), help="checkpoints, losses and their plot")
    parser.add_argument("--max-failures", type=int, default=3, help="how often Ray restarts the ranks")
    parser.add_argument("options", nargs="*", help="options of train_gpt.py, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
