"""Check architectures of transformers, drawn by a seed: python -m tests.ext.architectures --seed 0 --count 48."""

import argparse

import torch

from tests.ext.architectures.checks import CHECKS, check
from tests.ext.architectures.configs import architectures
from tests.ext.architectures.models import UnfitError, case_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=48, help="architectures that a small model can be made of")
    parser.add_argument("--only", nargs="*", help="names of architectures, instead of those drawn")
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    drawn = [one for one in architectures(options.seed) if one.name in (options.only or [one.name])]
    fit = 0
    for architecture in drawn:
        if fit == options.count:
            break
        try:
            case = case_of(architecture)
        except UnfitError as error:
            print(f"{architecture.name} ({architecture.model}): {error}", flush=True)
            continue
        fit += 1
        print(f"{architecture.name} ({architecture.task})", flush=True)
        for name in options.checks:
            status, text = check(case, name)
            print(f"    {name}: {status} {text[:1000]}", flush=True)


if __name__ == "__main__":
    main()
