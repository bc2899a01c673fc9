"""Stand-in for ``sgl_kernel.mamba``: the linear-attention layers import their ``*_cpu`` kernels from here."""

from sgl_kernel import __getattr__ as __getattr__
