"""The OpenAPI description is correct: valid calls are answered, and no request breaks the server."""

import pytest
from hypothesis import HealthCheck, given, settings

from gpu_runtime.serving.api.app import application

from .app_client import OPERATOR, Gateway, with_visitor

schemathesis = pytest.importorskip("schemathesis")
OURS = (503, 507)  # intended refusals, with a reason


def test_no_request_breaks_the_server(runtime):
    """Valid and invalid bodies are sent to every route. No answer is a server error, except intended refusals."""
    rt = runtime(monitor=False)
    rt.register("emb", backend="fake", size="1GiB", model_type="embedding")
    gateway = Gateway()
    # Hypothesis tries words of the source: it would wait for `slow` for ever, and the answers of `echo` are no chats.
    gateway.slow = gateway.known = ""
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", with_visitor(application(rt, lambda: gateway), OPERATOR)
    )
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(
            max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        def check(case):
            answer = case.call()
            assert answer.status_code < 500 or answer.status_code in OURS, (
                case.formatted_path,
                answer.text,
            )

        check()
