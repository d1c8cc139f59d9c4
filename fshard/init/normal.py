"""The normal distribution, computed so that the bits of a number depend on nothing but its input."""

from collections.abc import Sequence

import torch

# Wichura's coefficients, highest power first: of the numerator and the denominator.
_CENTRE = (
    (
        2509.0809287301227,
        33430.57558358813,
        67265.7709270087,
        45921.95393154987,
        13731.69376550946,
        1971.5909503065513,
        133.14166789178438,
        3.3871328727963665,
    ),
    (
        5226.495278852854,
        28729.085735721943,
        39307.89580009271,
        21213.794301586597,
        5394.196021424751,
        687.1870074920579,
        42.31333070160091,
        1.0,
    ),
)
_MIDDLE = (
    (
        0.0007745450142783414,
        0.022723844989269184,
        0.2417807251774506,
        1.2704582524523684,
        3.6478483247632045,
        5.769497221460691,
        4.630337846156546,
        1.4234371107496835,
    ),
    (
        1.0507500716444169e-09,
        0.0005475938084995345,
        0.015198666563616457,
        0.14810397642748008,
        0.6897673349851,
        1.6763848301838038,
        2.053191626637759,
        1.0,
    ),
)
_FAR = (
    (
        2.0103343992922881e-07,
        2.7115555687434876e-05,
        0.0012426609473880784,
        0.026532189526576124,
        0.29656057182850487,
        1.7848265399172913,
        5.463784911164114,
        6.657904643501103,
    ),
    (
        2.0442631033899397e-15,
        1.421511758316446e-07,
        1.8463183175100548e-05,
        0.0007868691311456133,
        0.014875361290850615,
        0.1369298809227358,
        0.599832206555888,
        1.0,
    ),
)
# log((1 + s) / (1 - s)) is 2 s times this, in powers of s squared.
_LOG = tuple(1 / k for k in range(23, 0, -2))


def normal_quantile(p: torch.Tensor) -> torch.Tensor:
    """The number below which a standard normal one lies with a probability of (0, 1): Wichura's algorithm AS 241.

    It is made of operators that IEEE 754 rounds correctly, so that its bits do not depend on where in a tensor an
    element lies.
    """
    q = p - 0.5
    r = 0.180625 - q * q
    out = q * _polynomial(r, _CENTRE[0]) / _polynomial(r, _CENTRE[1])
    outside = q.abs() > 0.425
    if outside.any():
        below = q[outside]
        r = (-_log(torch.where(below < 0, p[outside], 1 - p[outside]))).sqrt()
        far = r > 5
        x = _polynomial(r - 1.6, _MIDDLE[0]) / _polynomial(r - 1.6, _MIDDLE[1])
        if far.any():
            x = torch.where(far, _polynomial(r - 5, _FAR[0]) / _polynomial(r - 5, _FAR[1]), x)
        out[outside] = torch.copysign(x, below)
    return out


def _log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm, to a few units in the last place."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = torch.where(low, mantissa * 2, mantissa), exponent.double() - low.double()
    s = (mantissa - 1) / (mantissa + 1)
    return exponent * 0.6931471805599453 + 2 * s * _polynomial(s * s, _LOG)


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Highest power first."""
    out = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        out.mul_(x).add_(coefficient)
    return out
