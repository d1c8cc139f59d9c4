"""Arguments of the optimizers of extensions that are out of range: each is refused by name."""

import pytest

import fshard as fs
from tests.test_bad_arguments import (
    NAN,
    RATE,
    check_hyperparameters_out_of_range_are_refused_by_name,
    check_the_ends_of_ranges_tensors_and_schedules_are_taken,
    label,
    out_of_range,
)

OUT_OF_RANGE = [
    *out_of_range(
        {
            fs.lamb: ("lr", "eps", "weight_decay"),
            fs.lars: ("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
            fs.adafactor: ("lr", "weight_decay"),
        },
        with_betas=(fs.lamb,),
    ),
    (fs.adafactor, {"beta2_decay": 0.5}, "adafactor: expected beta2_decay to be a number, 0 or less, got 0.5"),
    (fs.adafactor, {"d": 0.5}, "adafactor: expected d to be a finite number, 1 or more, got 0.5"),
    (fs.adafactor, {"eps": (-1, 1)}, f"adafactor: expected eps[0] to be {RATE}, got -1"),
    (fs.adafactor, {"eps": 1}, "adafactor: expected eps to be two numbers, got 1"),
    (fs.scale_by_trust_ratio, {"eps": NAN}, f"scale_by_trust_ratio: expected eps to be {RATE}, got nan"),
    (fs.scale_by_factored_rms, {"eps": -1}, f"scale_by_factored_rms: expected eps to be {RATE}, got -1"),
    (
        fs.scale_by_factored_rms,
        {"beta2_decay": 0.5},
        "scale_by_factored_rms: expected beta2_decay to be a number, 0 or less, got 0.5",
    ),
]


@pytest.mark.parametrize("row", OUT_OF_RANGE, ids=label)
def test_hyperparameters_out_of_range_are_refused_by_name(row):
    check_hyperparameters_out_of_range_are_refused_by_name(row)


def test_the_ends_of_ranges_tensors_and_schedules_are_taken():
    for make in (fs.lamb, fs.lars, fs.adafactor):
        check_the_ends_of_ranges_tensors_and_schedules_are_taken(make)
