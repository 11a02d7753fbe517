"""The arms of the benchmark: how tokens are decoded, and how the KV cache is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import InvalidParameterError
from paceline.request import DRAFTERS, Speculation

CacheKind = Literal["paged", "contiguous", "own"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve the same turns.

    ``contiguous`` is what engines did before paging: one buffer of the maximum length per request, and every turn's
    prompt computed anew. It is this engine with blocks as long as the context and no prefix cache, so that nothing
    else differs. ``own`` is another engine's (``bench/peers``), of whose arms ``speculation`` says nothing.
    """

    name: str
    speculation: Speculation
    cache: CacheKind = "paged"


_DECODING = {
    "autoregressive": Speculation("off"),
    "static-2": Speculation("static", 2),
    "static-4": Speculation("static", 4),
    "static-8": Speculation("static", 8),
    "suffix": Speculation("dynamic", drafters=("suffix",)),
    "draft": Speculation("dynamic", drafters=("model",)),
    "lookups": Speculation("dynamic", drafters=tuple(name for name in DRAFTERS if name != "model")),
    "dynamic": Speculation("dynamic"),
    "dynamic-fast": Speculation("dynamic", min_acceptance=0.0),
    "dynamic-sure": Speculation("dynamic", min_acceptance=0.868),
}
ARMS = {name: Arm(name, speculation) for name, speculation in _DECODING.items()} | {
    f"{name}-contiguous": Arm(f"{name}-contiguous", speculation, "contiguous")
    for name, speculation in _DECODING.items()
}
DEFAULT_ARMS = ("autoregressive-contiguous", "autoregressive", "static-2", "static-4", "static-8", "suffix", "dynamic")
QUICK_ARMS = ("autoregressive-contiguous", "autoregressive", "dynamic")


def parse_arms(text: str) -> list[Arm]:
    """The arms named in a comma-separated list.

    Raises:
        InvalidParameterError: an unknown name, or none at all.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ARMS:
            raise InvalidParameterError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}")
    if not names:
        raise InvalidParameterError(f"no arm to run; choose from {', '.join(ARMS)}")
    return [ARMS[name] for name in dict.fromkeys(names)]
