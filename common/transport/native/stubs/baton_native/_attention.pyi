"""Types of the native modules _attention_avx512 and _attention_avx2."""

from __future__ import annotations

from torch import Tensor

def why_unusable() -> str: ...

class Layer:
    def __init__(
        self,
        dtype: str,
        keys: int,
        values: int,
        sinks: int,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        page_stride: int,
        unit_stride: int,
        window: int,
        scale: float,
        softcap: float,
    ) -> None: ...

class Batch:
    def __init__(
        self, starts: Tensor, lengths: Tensor, tables: Tensor, page_items: int, page_count: int
    ) -> None: ...
    def attend(
        self,
        layer: Layer,
        output: int,
        query: int,
        query_row_stride: int,
        query_head_stride: int,
        new_keys: int,
        key_row_stride: int,
        key_head_stride: int,
        new_values: int,
        value_row_stride: int,
        value_head_stride: int,
    ) -> None: ...
