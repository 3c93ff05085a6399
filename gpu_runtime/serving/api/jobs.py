"""Jobs: calls that continue after their caller has disconnected. The caller fetches the result later."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from ..requests import Refused

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "images",
}
MAX_JOBS = 256  # with their results; the oldest results are dropped first
KEPT_SECONDS = 3600.0  # how long a result is kept


class Job:
    """A call that runs in the background. Its id cannot be guessed, and any visitor who has it may fetch the result."""

    def __init__(self, endpoint: str, wall: float, client: str = "") -> None:
        """A job for this `endpoint`, created at `wall` (epoch seconds) by the visitor `client`."""
        self.client = client
        self.id = f"job-{uuid.uuid4().hex}"
        self.endpoint = endpoint
        self.created = wall
        self.status = "running"  # or waiting in the queue; then succeeded, failed or cancelled
        self.ended = 0.0
        self.result: Any = None
        self.error: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        """The job as JSON. Times are in epoch seconds, and `result` is the answer of the endpoint."""
        fields: dict[str, Any] = {
            "id": self.id,
            "object": "job",
            "endpoint": self.endpoint,
            "status": self.status,
            "created": round(self.created, 3),
        }
        if self.ended:
            fields["ended"] = round(self.ended, 3)
        if self.error:
            fields["error"] = self.error
        if self.result:
            fields["result"] = self.result
        return fields


class Jobs:
    """The jobs of one server, in its event loop."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        """`wall` returns epoch seconds."""
        self._wall = wall
        self._jobs: dict[str, Job] = {}

    def start(self, gateway: Any, wanted: Any, client: str) -> Job:
        """Makes the call in `wanted` through `gateway`, in the background, for the visitor `client`.

        `wanted` has `endpoint` and `body`. Raises Refused with 400 if `wanted` is invalid, and with 503 if there are
        too many jobs.
        """
        body = _checked_body(wanted)
        self._drop_old_results()
        if len(self._jobs) >= MAX_JOBS:
            raise Refused(503, "full", f"{MAX_JOBS} jobs are running already", 5.0)
        job = Job(wanted["endpoint"], self._wall(), client)
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._run(job, gateway, body, client))
        return job

    def find(self, id: str) -> Job:
        """The job with this `id`. Raises Refused, 404."""
        job = self._jobs.get(id)
        if job is None:
            text = f"there is no job {id[:64]!r}; results are kept for an hour"
            raise Refused(404, "no_job", text, param="id")
        return job

    def of(self, client: str) -> list[dict[str, Any]]:
        """The jobs of the visitor `client` as JSON, without their results. The newest job is first."""
        rows = [job.as_json() for job in self._jobs.values() if job.client == client]
        return [{k: v for k, v in row.items() if k != "result"} for row in reversed(rows)]

    async def end(self, id: str) -> Job:
        """Cancels the job with this `id` if it still runs, and forgets it. Raises Refused, 404."""
        job = self.find(id)
        if job.task and not job.task.done():
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        self._jobs.pop(id, None)
        return job

    async def close(self) -> None:
        """Ends all jobs."""
        await asyncio.gather(*(self.end(id) for id in list(self._jobs)))

    async def _run(self, job: Job, gateway: Any, body: dict[str, Any], client: str) -> None:
        try:
            reply = await gateway.answer(ENDPOINTS[job.endpoint], body, client)
            job.result = reply.json
            job.status = "succeeded"
        except asyncio.CancelledError:
            job.status = "cancelled"
            raise
        except Refused as refused:
            job.status = "failed"
            job.error = refused.body()["error"]
        except Exception as error:
            job.status = "failed"
            job.error = {"message": " ".join(str(error).split()), "code": type(error).__name__}
        finally:
            job.ended = self._wall()

    def _drop_old_results(self) -> None:
        """Forgets results that are too old, and the oldest ones if there are too many jobs."""
        done = sorted((job for job in self._jobs.values() if job.ended), key=lambda job: job.ended)
        oldest_kept = self._wall() - KEPT_SECONDS
        excess = len(self._jobs) - MAX_JOBS + 1
        for at, job in enumerate(done):
            if job.ended < oldest_kept or at < excess:
                del self._jobs[job.id]


def _checked_body(wanted: Any) -> dict[str, Any]:
    """The body of the call that a job makes. Raises Refused, 400."""
    if not isinstance(wanted, dict) or wanted.get("endpoint") not in ENDPOINTS:
        text = f"endpoint must be one of {', '.join(ENDPOINTS)}"
        raise Refused(400, "bad_endpoint", text, param="endpoint")
    body = wanted.get("body")
    if not isinstance(body, dict):
        text = "body must be the JSON object that the endpoint takes"
        raise Refused(400, "bad_body", text, param="body")
    if body.get("stream"):
        text = "a job's answer is not streamed: leave stream out"
        raise Refused(400, "no_stream", text, param="body")
    return body
