"""The arithmetic on vectors of /v1/embeddings: length, cut, base64."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from server.api.embeddings.run import to_base64, unit_vector

FINITE = arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-(2.0**100), 2.0**100, width=32))


# rule: Fields: `dimensions`, `encoding_format` and `prompt_name` act
@given(FINITE)
def test_base64_gives_back_every_bit(vector):
    assert np.array_equal(np.frombuffer(base64.b64decode(to_base64(vector)), dtype="<f4"), vector)


@given(FINITE, st.integers(1, 50))
def test_a_unit_vector_points_the_same_way_and_has_the_length_1(vector, dimensions):
    found = unit_vector(vector.tobytes(), dimensions=dimensions)
    cut = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(cut)
    assert found.dtype == np.float32
    if length >= 1e-12:
        np.testing.assert_allclose(found, cut / length, atol=1e-6)
        assert np.linalg.norm(found.astype(np.float64)) == pytest.approx(1, abs=1e-5)
    assert json.loads(json.dumps(found.tolist())) == found.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_has_no_direction(value):
    assert unit_vector(np.array([1, value], dtype=np.float32).tobytes(), dimensions=2) is None
