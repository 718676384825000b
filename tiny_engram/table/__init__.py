"""The table runtime: rows by id, wherever they live. Imports numpy, torch, kernels and tiny_engram.{errors,files}."""

from .engram_table import EngramTable
from .report import TableReport
from .storage import RowStorage

__all__ = ["EngramTable", "RowStorage", "TableReport"]
