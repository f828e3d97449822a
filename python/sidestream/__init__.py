"""Moves data between host memory and a GPU on a side stream while the GPU computes."""
from sidestream import _native

__all__ = ["__version__"]

__version__: str = _native.version()
