"""What a client of a pool refuses before it connects: no pool and no engine are needed."""

import pytest
import torch

from tiny_engram.errors import TableError
from tiny_engram.quantization import quantize
from tiny_engram.table import EngramTable
from tiny_engram.table.pool import MooncakeRows, PoolConfig, publish
from tiny_engram.table.pool_link import _check_rdma


def test_rdma_needs_a_device(tmp_path):
    with pytest.raises(TableError, match=r"lacks any RDMA device, .*absent has \[\]; mend"):
        _check_rdma("", tmp_path / "absent")
    with pytest.raises(TableError, match="lacks any RDMA device"):
        _check_rdma("", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    for wanted in ("", "mlx5_0"):
        _check_rdma(wanted, tmp_path)
    with pytest.raises(TableError, match=r"lacks RDMA devices \['mlx5_1'\], .* has \['mlx5_0'\]"):
        _check_rdma("mlx5_0,mlx5_1", tmp_path)


def test_a_table_is_not_published_another_way_than_asked_for():
    config = PoolConfig(master="127.0.0.1:9", local_host="127.0.0.1", protocol="rdma", rdma_devices="no-such-device")
    source = EngramTable.dense(*quantize(torch.randn(3, 32))).storage
    for action in (lambda: publish(config, "t", source), lambda: MooncakeRows(config, "t")):
        with pytest.raises(TableError, match=r"lacks RDMA devices \['no-such-device'\]"):
            action()
