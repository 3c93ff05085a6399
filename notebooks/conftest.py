"""The runbooks run in the tests' isolated state directory, also under a bare `pytest --nbval`."""

from tests import isolation  # noqa: F401 - importing it isolates
