import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.text_sizes import text_sizes

WORDS = st.none() | st.text("abc", max_size=4)


@given(
    st.lists(
        st.none()
        | st.lists(
            st.none() | st.fixed_dictionaries({"content": WORDS, "parts": st.none() | st.lists(WORDS), "n": st.integers(0, 9)})
        )
    ),
    st.integers(0, 3),
)
def test_sizes_of_nested_text_are_the_same_in_arrow_and_python(values, start):
    kind = pa.list_(pa.struct({"content": pa.string(), "parts": pa.large_list(pa.large_string()), "n": pa.int64()}))
    assert text_sizes(pa.array(values, kind)[start:]).tolist() == text_sizes(values[start:]).tolist()
