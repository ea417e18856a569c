import numpy as np
import pytest
from helpers import assert_equal, distinct_primes, seeds
from hypothesis import given
from hypothesis import strategies as st

from npdecoder import causal_mask, padding_mask, target_mask
from npdecoder.masks import as_mask, combine_masks


def test_causal_mask_values():
    np.testing.assert_array_equal(causal_mask(3), [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(causal_mask(2, 5), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(causal_mask(3, 2), [[0, 0], [1, 0], [1, 1]])
    np.testing.assert_array_equal(causal_mask(1, 5), [[1, 1, 1, 1, 1]])
    assert causal_mask(0).shape == (0, 0)
    assert causal_mask(2, 0).shape == (2, 0)
    assert causal_mask(0, 2).shape == (0, 2)


@given(T=st.integers(0, 9), S=st.integers(0, 9))
def test_causal_mask_is_aligned_at_the_last_key(T, S):
    mask = causal_mask(T, S)
    assert mask.dtype == bool
    for t in range(T):
        for s in range(S):
            assert mask[t, s] == (s <= t + S - T)


def test_padding_mask():
    mask = padding_mask([[5, 7, 0], [0, 0, 1]], 0)
    assert mask.shape == (2, 1, 1, 3)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], [[1, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(padding_mask([[5, 7]], 7)[:, 0, 0], [[1, 0]])
    assert padding_mask([[0, 1, 2]], None).all()
    assert padding_mask([[0, 1, 2]], None).shape == (1, 1, 1, 3)


@pytest.mark.parametrize("dtype", ["i1", "u1", ">i4", "u8"])
def test_ids_of_any_integer_dtype(dtype):
    ids = np.array([[3, 0], [0, 200 if dtype != "i1" else 100]], dtype)
    np.testing.assert_array_equal(padding_mask(ids, 0)[:, 0, 0], [[1, 0], [0, 1]])
    for pad_id in -1, 2**40:
        assert padding_mask(ids, pad_id).all()


@given(sizes=distinct_primes(2), seed=seeds)
def test_target_mask_is_both(sizes, seed):
    ids = np.random.default_rng(seed).integers(0, 3, sizes)
    mask = target_mask(ids, 0)
    B, T = sizes
    assert mask.shape == (B, 1, T, T)
    for b in range(B):
        for t in range(T):
            for s in range(T):
                assert mask[b, 0, t, s] == (s <= t and ids[b, s] != 0)
    assert_equal(target_mask(ids, None), np.broadcast_to(causal_mask(T), (B, 1, T, T)))


@pytest.mark.parametrize("make", [padding_mask, target_mask])
@pytest.mark.parametrize("pad_id", [0, None])
@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2], ValueError, r"ids has shape \(2,\), expected \(B, T\)"),
        ([[[1, 2]]], ValueError, r"ids has shape \(1, 1, 2\)"),
        (3, ValueError, r"ids has shape \(\)"),
        ([[0.0, 1.0]], TypeError, "ids has dtype float64"),
        ([[True, False]], TypeError, "ids has dtype bool"),
        ([[-1, 0]], IndexError, r"ids\[0, 0\] is -1"),
    ],
)
def test_bad_ids(make, pad_id, ids, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make(ids, pad_id)


def test_combination_of_boolean_masks_allows_what_both_allow():
    a, b = np.array([[True, True, False]]), np.array([[True, False, False]])
    assert_equal(combine_masks(a, b), a & b)
    assert combine_masks(a, None) is a
    assert combine_masks(None, b) is b
    assert combine_masks(None, None) is None


def test_combination_with_a_float_mask_adds_up():
    keep, bias = np.array([[True, False, True]]), np.array([[0.5, 0.5, -np.inf]])
    expected = np.array([[0.5, -np.inf, -np.inf]])
    assert_equal(combine_masks(keep, bias), expected)
    assert_equal(combine_masks(bias, keep), expected)
    assert_equal(combine_masks(bias, bias), 2 * bias)


def test_as_mask_of_scores_of_2_and_3_dimensions():
    for shape, scores in ((5, 7), (5, 7)), ((1, 7), (3, 5, 7)), ((3, 1, 7), (3, 5, 7)):
        assert as_mask("mask", np.ones(shape, bool), scores).shape == shape
    for shape, scores in ((1, 5, 7), (5, 7)), ((7,), (5, 7)), ((2, 5, 7), (3, 5, 7)):
        with pytest.raises(ValueError, match=r"^mask has shape"):
            as_mask("mask", np.ones(shape, bool), scores)
