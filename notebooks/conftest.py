"""The runbooks run in the tests' isolated state directory, also under a bare `pytest --nbval`.

Loading ahead and the line of a slow load depend on the time, so the recorded outputs are those
without them.
"""

import os

from tests import isolation  # noqa: F401 - importing it isolates

os.environ["GPU_PREFETCH"] = "never"
os.environ["GPU_PROGRESS_SECONDS"] = "1h"
