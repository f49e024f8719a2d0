"""Which weights a server computes with, as its processes tell each other."""

from __future__ import annotations

import msgspec

DEFAULT_VERSION = "default"
"""SGLang's name of the weights of a server that was not told another one."""
VERSION_LENGTH_MAX = 256


class ServedWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """model_path: of the checkpoint; "" for the one of the settings. load_format: as of the
    settings. version: what the operator calls them. load_id: of the update that brought them,
    random; "" for those of the start."""

    model_path: str = ""
    load_format: str = "auto"
    version: str = DEFAULT_VERSION
    load_id: str = ""
