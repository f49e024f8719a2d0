"""Types of the native module."""

from __future__ import annotations

from torch import Tensor

def why_unusable() -> str: ...

class Batch:
    def __init__(
        self, starts: Tensor, lengths: Tensor, tables: Tensor, page_items: int, page_count: int
    ) -> None: ...
    def attend(
        self,
        dtype: str,
        output: int,
        query: int,
        keys: int,
        values: int,
        sinks: int,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        page_stride: int,
        unit_stride: int,
        query_row_stride: int,
        query_head_stride: int,
        window: int,
        scale: float,
        softcap: float,
    ) -> None: ...
