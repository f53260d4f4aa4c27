"""Fits three coefficients by weighted least squares, from sums that forget old samples. Pure arithmetic for
the learners in this package.
"""

from __future__ import annotations

Three = tuple[float, float, float]


class ThreeTerms:
    """Fits value = a * x + b * y + c * z to samples. A prior makes the equations solvable."""

    __slots__ = ("_moments",)

    def __init__(self) -> None:
        self._moments = [0.0] * 9
        """Weighted sums of xx, xy, xz, yy, yz, zz, and of x, y, z times the value."""

    def add(self, terms: Three, value: float, *, weight: float) -> None:
        x, y, z = terms
        products = (x * x, x * y, x * z, y * y, y * z, z * z, x * value, y * value, z * value)
        self._moments = [m + weight * p for m, p in zip(self._moments, products, strict=True)]

    def scale(self, keep: float) -> None:
        """Reduce the weight of all samples so far."""
        self._moments = [keep * m for m in self._moments]

    def solve(self, *, prior: Three, trust: Three) -> Three:
        """Return the coefficients, each pulled to its prior with a weight above 0 in the unit of its
        squares.
        """
        xx, xy, xz, yy, yz, zz, xv, yv, zv = self._moments
        xx, yy, zz = xx + trust[0], yy + trust[1], zz + trust[2]
        xv, yv, zv = xv + trust[0] * prior[0], yv + trust[1] * prior[1], zv + trust[2] * prior[2]
        whole = _determinant((xx, xy, xz), (xy, yy, yz), (xz, yz, zz))
        # Only rounding can cause this, since the weights of the priors make the matrix positive definite.
        if whole <= 0:
            return prior
        return (
            _determinant((xv, xy, xz), (yv, yy, yz), (zv, yz, zz)) / whole,
            _determinant((xx, xv, xz), (xy, yv, yz), (xz, zv, zz)) / whole,
            _determinant((xx, xy, xv), (xy, yy, yv), (xz, yz, zv)) / whole,
        )


def _determinant(a: Three, b: Three, c: Three) -> float:
    return (
        a[0] * (b[1] * c[2] - b[2] * c[1])
        - a[1] * (b[0] * c[2] - b[2] * c[0])
        + a[2] * (b[0] * c[1] - b[1] * c[0])
    )
