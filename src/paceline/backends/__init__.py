"""Backends for `torch.distributed` that PyTorch's wheels lack.

>>> import torch.distributed as dist
>>> from paceline.backends import register_mpi
>>> register_mpi()                          # doctest: +SKIP
>>> dist.init_process_group("mpi4py")       # doctest: +SKIP
"""

from __future__ import annotations

from paceline.backends.mpi import BACKEND_NAME, mpi_missing, register_mpi

__all__ = ["BACKEND_NAME", "mpi_missing", "register_mpi"]
