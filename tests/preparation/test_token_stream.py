import json

from hypothesis import given, settings
from hypothesis import strategies as st

from preparation.token_stream import token_file_header


@settings(max_examples=100, deadline=None)
@given(source=st.text(max_size=400), num_tokens=st.integers(0, 2**40))
def test_the_header_of_any_source_has_the_reserved_size(source, num_tokens):
    header = token_file_header({"source": source, "tokenizer": "gpt2"}, num_tokens)
    assert len(header) == 4104 and int.from_bytes(header[:8], "little") == 4096
    read = json.loads(header[8:])
    assert read["__metadata__"]["source"] == source
    assert read["tokens"] == {"dtype": "U16", "shape": [num_tokens],
                              "data_offsets": [0, 2 * num_tokens]}
