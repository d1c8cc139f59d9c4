"""How far values may be apart that differ by rounding alone."""

import torch

# Terms that cancel are larger than the sum that is compared, and each is rounded when it is computed, and once more
# where it is scaled or cast.
SAFETY = 4


def tolerance(dtype: torch.dtype, terms: int, scale: float = 1.0, steps: float = 1) -> float:
    """Bound what two computations of a value may differ by, if they add up the same terms in another order.

    An addition rounds its result by at most eps / 2 of it. Adding up terms one after another rounds as often as there
    are terms, so that a sum is off by at most `terms * eps / 2 * scale`, and two orders of the same terms are apart by
    at most twice that. Where the sum goes through further sums, such as the layers of a model or the updates of an
    optimizer, each of them hands on the difference and adds one of its own: `steps` counts them. A constant factor,
    `SAFETY`, covers terms that cancel and the rounding of the terms themselves.

    The bound is for the worst case, in which all roundings add up, and grows with their number. In practice they cancel
    and the difference grows with its root, so the bound also holds on processors that split sums in other ways than
    this one, and yet stays far below what a wrong term would change.

    Args:
        dtype: The dtype that sums are rounded to; floating or complex.
        terms: How many terms a sum has.
        scale: The largest magnitude among the values.
        steps: How many sums one after another hand on the difference; times by how much, where one hands on more than
            it got, as a division by something small does.

    Returns:
        The largest absolute difference that rounding explains.

    >>> eps = torch.finfo(torch.float64).eps
    >>> tolerance(torch.float64, terms=100, scale=3.0, steps=2) == 4 * 100 * 3.0 * 2 * eps
    True
    >>> values = torch.linspace(-1.0, 2.0, 1001)
    >>> abs(float(values.sum() - values.flip(0).cumsum(0)[-1])) < tolerance(torch.float32, terms=1001, scale=500.0)
    True
    """
    eps = torch.finfo(dtype).eps
    return SAFETY * eps * terms * scale * steps


def half_the_digits(dtype: torch.dtype) -> float:
    """The relative difference that tells rounding from a difference in kind.

    Rounding changes the last digits of a value and another computation the first ones; this is in the middle.

    Args:
        dtype: The dtype of the values; floating or complex.

    Returns:
        The root of eps.

    >>> half_the_digits(torch.float64) == 2.0**-26
    True
    """
    return float(torch.finfo(dtype).eps ** 0.5)
