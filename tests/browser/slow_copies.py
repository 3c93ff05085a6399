"""Makes the parking of a kernel slow, as it is for a large notebook. A kernel imports this module.

Parking and the return to the card then take SWAP_SECONDS together.
"""

import os
import time
from typing import Any

from gpu_runtime.backends.pytorch import kernel_memory

_EACH_WAY_SECONDS = float(os.environ.get("SWAP_SECONDS", "2")) / 2
_copied, _return = kernel_memory.st.copied, kernel_memory.KernelBackend._return


def _slowly_copied(*arguments: Any, **options: Any) -> Any:
    time.sleep(_EACH_WAY_SECONDS)  # the kernel may go on, as during a real copy
    return _copied(*arguments, **options)


def _slowly_returned(self: Any, model: Any) -> None:
    time.sleep(_EACH_WAY_SECONDS)
    _return(self, model)


kernel_memory.st.copied = _slowly_copied
kernel_memory.KernelBackend._return = _slowly_returned
