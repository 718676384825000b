"""Headers of table files that lie, attack the reader, or hold more than one table."""

import json
import struct

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.table import EngramTable
from tiny_engram.table.fill_rule import FillRule
from tiny_engram.table.table_file import KEY, TableFile


def rows_by_rule(rows, head_dim=32, seed=0):
    return FillRule(head_dim, seed).rows(torch.arange(rows))


def written(path, header, data=bytes(66)):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def headers(prefix="", metadata=None, **more):
    found = {
        f"{prefix}embed.weight": {"dtype": "F8_E4M3", "shape": [2, 32], "data_offsets": [0, 64]},
        f"{prefix}embed.scale": {"dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [64, 66]},
    }
    return {**found, **more, **({} if metadata is None else {"__metadata__": {KEY: metadata}})}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (headers("\ud800."), "its header is no sound JSON"),
        (headers(metadata="\ud800"), "its header is no sound JSON"),
        (headers("\x1b[31m."), "holds no table"),
        (headers(q="text"), "'q': 'text' describes none"),
        (headers(q={"dtype": ["U8"], "shape": [], "data_offsets": [0, 0]}), "is unknown"),
        (headers(q={"dtype": "x" * 10_000, "shape": [], "data_offsets": [0, 0]}), "type 'xxx"),
        (headers(**{"n" * 10_000: 3}), "tensor 'nnn"),
        (headers(metadata=json.dumps({"format": "x" * 10_000})), "table format 'xxx"),
    ],
)
def test_headers_that_attack_the_reader(tmp_path, header, words):
    with pytest.raises(TableError, match=words) as caught:
        TableFile(written(tmp_path / "t", header))
    assert len(str(caught.value)) < 800


def test_other_tensors_may_have_types_smaller_than_a_byte(tmp_path):
    other = {"dtype": "F4", "shape": [2, 4], "data_offsets": [66, 70]}
    with TableFile(written(tmp_path / "t", headers(q=other), bytes(70))) as file:
        assert file.rows == 2
    with pytest.raises(TableError, match="4 bytes for F4"):
        TableFile(written(tmp_path / "u", headers(q={**other, "shape": [2, 5]}), bytes(70)))


def test_one_of_several_tables_of_a_file(tmp_path):
    second = {name: {**about, "data_offsets": [66 + at for at in about["data_offsets"]]} for name, about in headers("b.").items()}
    data = [b"".join(part.view(torch.uint8).numpy().tobytes() for part in rows_by_rule(2, seed=seed)) for seed in (1, 2)]
    path = written(tmp_path / "t", headers("a.", **second), b"".join(data))
    for home in ("mapped", "pageable"):
        table = EngramTable.open(path, home, prefix="b.")
        assert torch.equal(table.lookup(torch.arange(2)), FillRule(32, 2).values(torch.arange(2)))
    with pytest.raises(TableError, match="holds 2 tables"):
        EngramTable.open(path)
