import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.weights.gguf.header import StoredTensor, read_header


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(values=b"", value_count=0, tensors=b"", tensor_count=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensor_count, value_count) + values + tensors


def read(tmp_path, data):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return read_header(path)


def test_reads_every_kind_of_value(tmp_path):
    values = b"".join(
        [
            text("u8") + struct.pack("<IB", 0, 200),
            text("f") + struct.pack("<If", 6, 0.5),
            text("yes") + struct.pack("<I?", 7, True),
            text("i64") + struct.pack("<Iq", 11, -5),
            text("s") + struct.pack("<I", 8) + text("hallo"),
            text("numbers") + struct.pack("<IIQ", 9, 5, 3) + struct.pack("<3i", 1, -2, 3),
            text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
            text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 2) + b"\x01\x02",
        ]
    )
    tensors = text("w") + struct.pack("<IQQIQ", 2, 4, 3, 0, 32)
    result = read(tmp_path, header(values, 8, tensors, 1))
    assert result.problems == []
    assert result.metadata == {
        "u8": 200,
        "f": 0.5,
        "yes": True,
        "i64": -5,
        "s": "hallo",
        "numbers": [1, -2, 3],
        "words": ["a", "b"],
        "nested": [[1, 2]],
    }
    start = -(-len(header(values, 8, tensors, 1)) // 32) * 32
    assert result.tensors == {"w": StoredTensor((3, 4), 0, start + 32)}


HUGE = struct.pack("<Q", 1 << 62)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (header(magic=b"GGML"), "begins with b'GGML'"),
        (header(version=1), "version 1 is not one of"),
        (header(version=3 << 24), "little-endian"),
        (header(value_count=1 << 60), "are announced"),
        (header(tensor_count=1 << 60), "are announced"),
        (header(HUGE, 1), "4611686018427387904 bytes are announced"),
        (header(text("k") + struct.pack("<II", 9, 4) + HUGE, 1), "are announced"),
        (header(text("k") + struct.pack("<I", 99), 1), "unknown kind 99"),
        (header((text("k") + struct.pack("<IB", 0, 1)) * 2, 2), "'k' comes twice"),
        (header(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1), "corrupt"),
        (header(tensors=text("w") + struct.pack("<I", 99), tensor_count=1), "99 dimensions"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0), 1), "general.alignment is 0"),
    ],
)
def test_corrupt_files_are_explained(tmp_path, data, message):
    assert message in read(tmp_path, data).problems[0]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 40), st.integers(0, 40))
def test_no_content_makes_it_raise(tmp_path_factory, data, values, tensors):
    read(tmp_path_factory.getbasetemp(), header(data, values, tensor_count=tensors))
