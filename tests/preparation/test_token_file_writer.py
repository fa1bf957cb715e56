from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from preparation.token_stream import TokenFileWriter, token_file_header


@settings(max_examples=100, deadline=None)
@given(source=st.text(max_size=400), num_tokens=st.integers(0, 2**40))
def test_the_header_of_any_source_has_the_reserved_size(source: str, num_tokens: int) -> None:
    header = token_file_header({"source": source, "tokenizer": "gpt2"}, num_tokens)
    assert len(header) == 4104 and int.from_bytes(header[:8], "little") == 4096
    read = json.loads(header[8:])
    assert read["__metadata__"]["source"] == source
    assert read["tokens"] == {"dtype": "U16", "shape": [num_tokens],
                              "data_offsets": [0, 2 * num_tokens]}


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(0, 50), max_size=8), kept=st.integers(0, 8))
def test_a_writer_continues_after_any_token(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], kept: int
) -> None:
    path = tmp_path_factory.mktemp("writer") / "t.safetensors"
    tokens = np.arange(sum(parts), dtype=np.uint16)
    ends = np.cumsum([0, *parts])
    writer = TokenFileWriter(path)
    for start, end in zip(ends, ends[1:], strict=False):
        writer.add(tokens[start:end])
    writer.close()
    with pytest.raises(Exception, match="Error|header"):
        load_file(path)  # not a token file without its header
    num_kept = int(ends[min(kept, len(parts))])
    writer = TokenFileWriter(path, num_tokens=num_kept)
    writer.add(tokens[num_kept:])
    writer.finish({"source": "a"})
    assert np.array_equal(load_file(path)["tokens"], tokens)
