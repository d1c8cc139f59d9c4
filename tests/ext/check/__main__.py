"""Check all planted mistakes, and print the table: `python -m tests.ext.check`; to write the results: `--write`."""

import argparse

from tests.ext.check.results import check_table, run_effects, write_results, write_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/check-mistakes.*")
    options = parser.parse_args()
    outcomes, effects = check_table(), run_effects()
    print(write_table(outcomes, effects))
    if options.write:
        write_results(outcomes, effects)


if __name__ == "__main__":
    main()
