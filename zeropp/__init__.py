"""ZeRO++ for native PyTorch: `zeropp.apply(model, zeropp.Config())` on any FSDP2 model.

Names are imported when they are first used, so that `zeropp --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._apply import apply
    from ._handle import ZeroPP
    from .comm import Ledger, StaleWeightsError, Traffic
    from .config import Config

__all__ = ["Config", "Ledger", "StaleWeightsError", "Traffic", "ZeroPP", "apply"]
__version__ = "0.1.0"

_HOMES = {
    "Config": ".config",
    "Ledger": ".comm",
    "StaleWeightsError": ".comm",
    "Traffic": ".comm",
    "ZeroPP": "._handle",
    "apply": "._apply",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
