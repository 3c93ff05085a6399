"""The version of gpu-console, and the versions of torch that it knows, as constants.

Each recorded decision contains the version of gpu-console. It is a constant, so that no package metadata has to be
read.
"""

VERSION = "0.3.0.dev0"

OLDEST_TORCH = "2.4"  # the oldest release of torch whose tensors can be moved
TORCH_WITH_EXCHANGE = "2.12"  # the first that can itself exchange the memory of two tensors
NEWER_TORCH = f"pip install 'torch>={TORCH_WITH_EXCHANGE}'"
