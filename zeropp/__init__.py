"""ZeRO++ for native PyTorch: `zeropp.apply(model, zeropp.Config())` on any FSDP2 model."""

from .applying import apply
from .comm import Ledger, StaleWeightsError, Traffic
from .config import Config
from .handle import ZeroPP

__all__ = ["Config", "Ledger", "StaleWeightsError", "Traffic", "ZeroPP", "apply"]
__version__ = "0.1.0"
