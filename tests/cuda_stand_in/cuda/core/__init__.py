"""Stands for `cuda.core` of the package cuda-core: its checkpoint calls, on processes of a file.

CUDA_STAND_IN names the file, which `tests/checkpoint_driver.py` describes. The names, the arguments and
the kinds of errors are those of cuda-core 1.2.2.
"""

from . import checkpoint as checkpoint
