"""A fit of three coefficients, compared with numpy's solution of the same equations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.picker.endpoints.least_squares import Three, ThreeTerms

NUMBER = st.integers(-50, 50).map(float)
SAMPLE = st.tuples(st.tuples(NUMBER, NUMBER, NUMBER), NUMBER, st.integers(1, 5).map(float))
Samples = list[tuple[Three, float, float]]


def fit_of(samples: Samples) -> ThreeTerms:
    fit = ThreeTerms()
    for terms, value, weight in samples:
        fit.add(terms, value, weight=weight)
    return fit


def test_without_samples_the_coefficients_are_those_of_the_prior() -> None:
    assert ThreeTerms().solve(prior=(1.0, -2.0, 0.5), trust=(1.0, 1.0, 1.0)) == (1.0, -2.0, 0.5)


@given(st.lists(SAMPLE, max_size=12))
def test_the_fit_solves_the_normal_equations_with_the_prior_as_further_samples(samples: Samples) -> None:
    prior, trust = (1.0, 2.0, 3.0), (10.0, 20.0, 30.0)
    matrix, right = np.diag(trust), np.multiply(trust, prior)
    for terms, value, weight in samples:
        matrix = matrix + weight * np.outer(terms, terms)
        right = right + weight * value * np.array(terms)
    expected = np.linalg.solve(matrix, right)
    assert fit_of(samples).solve(prior=prior, trust=trust) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_term_that_no_sample_has_keeps_its_prior_and_the_others_are_found() -> None:
    fit = fit_of([((1.0, 10.0, 0.0), 23.0, 1.0), ((1.0, 20.0, 0.0), 43.0, 1.0)])
    a, b, c = fit.solve(prior=(0.0, 0.0, 7.0), trust=(1e-9, 1e-9, 1e-9))
    assert (a, b) == pytest.approx((3.0, 2.0), rel=1e-3)
    assert c == pytest.approx(7.0)


def test_scaled_down_samples_count_less_than_new_ones() -> None:
    fit = fit_of([((1.0, 0.0, 0.0), 10.0, 1.0)] * 9)
    fit.scale(1 / 9)
    fit.add((1.0, 0.0, 0.0), 20.0, weight=1.0)
    assert fit.solve(prior=(0.0, 0.0, 0.0), trust=(1e-9, 1.0, 1.0))[0] == pytest.approx(15.0)


def test_the_prior_is_returned_if_rounding_leaves_no_solution() -> None:
    fit = fit_of([((1e9, 1e9, 1e9), 1.0, 1.0)])
    assert fit.solve(prior=(1.0, 2.0, 3.0), trust=(1e-30, 1e-30, 1e-30)) == (1.0, 2.0, 3.0)
