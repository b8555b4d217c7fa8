"""Names of dtypes as configurations carry them; imports nothing, so that plans can read it too."""

from __future__ import annotations

WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}  #: bytes of an element
INDEX_DTYPES = ("int32", "int64")
