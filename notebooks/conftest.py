"""The runbooks run in the tests' isolated state directory, also under a bare `pytest --nbval`.

Loading ahead, the line of a slow load and the copies that stay in RAM depend on the time, so the
recorded outputs are those without them.
"""

import os

from tests import isolation  # noqa: F401 - importing it isolates

os.environ["GPU_PREFETCH"] = "never"
os.environ["GPU_PROGRESS_SECONDS"] = "1h"
os.environ["GPU_SHADOWS"] = "never"
