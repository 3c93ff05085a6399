"""The runbooks run in the tests' isolated state directory, also under a bare `pytest --nbval`.

Loading ahead depends on the time, so the recorded outputs are those without it.
"""

import os

from tests import isolation  # noqa: F401 - importing it isolates

os.environ["GPU_PREFETCH"] = "never"
