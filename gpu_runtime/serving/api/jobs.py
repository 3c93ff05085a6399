"""Long work that outlives its caller's connection: started, asked after, ended."""

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
MOST = 256  # jobs that are not done; what is done and older goes first where there are as many
KEPT_SECONDS = 3600.0  # how long a result is kept


class Job:
    """One call. Its id cannot be guessed: who knows it may ask for its result."""

    def __init__(self, endpoint: str, wall: float) -> None:
        self.id = f"job-{uuid.uuid4().hex}"
        self.endpoint, self.created = endpoint, wall
        self.status = (
            "running"  # it may still wait in the queue; then succeeded, failed or cancelled
        )
        self.ended = 0.0
        self.result: Any = None
        self.error: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None

    def told(self) -> dict[str, Any]:
        """As JSON: times in epoch seconds, `result` what the endpoint would have answered."""
        told: dict[str, Any] = {
            "id": self.id,
            "object": "job",
            "endpoint": self.endpoint,
            "status": self.status,
            "created": round(self.created, 3),
        }
        if self.ended:
            told["ended"] = round(self.ended, 3)
        return (
            told
            | ({"error": self.error} if self.error else {})
            | ({"result": self.result} if self.result else {})
        )


class Jobs:
    """The jobs of one server, in its event loop."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._jobs: dict[str, Job] = {}

    def start(self, gateway: Any, wanted: Any, who: str) -> Job:
        """Makes the call that `wanted` names, in the background. Raises Refused: 400; 503 where there are too many."""
        if not isinstance(wanted, dict) or wanted.get("endpoint") not in ENDPOINTS:
            raise Refused(
                400,
                "bad_endpoint",
                f"endpoint must be one of {', '.join(ENDPOINTS)}",
                param="endpoint",
            )
        body = wanted.get("body")
        if not isinstance(body, dict):
            raise Refused(
                400,
                "bad_body",
                "body must be the JSON object that the endpoint takes",
                param="body",
            )
        if body.get("stream"):
            raise Refused(
                400, "no_stream", "a job's answer comes whole: leave stream out", param="body"
            )
        self._sweep()
        if len(self._jobs) >= MOST:
            raise Refused(503, "full", f"{MOST} jobs are running already", 5.0)
        job = Job(wanted["endpoint"], self._wall())
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._run(job, gateway, body, who))
        return job

    def find(self, id: str) -> Job:
        """Raises Refused, 404."""
        job = self._jobs.get(id)
        if job is None:
            raise Refused(
                404,
                "no_job",
                f"there is no job {id[:64]!r}; results are kept for an hour",
                param="id",
            )
        return job

    async def end(self, id: str) -> Job:
        """Cancels the job where it still runs, and forgets it. Raises Refused, 404."""
        job = self.find(id)
        if job.task and not job.task.done():
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        self._jobs.pop(id, None)
        return job

    async def close(self) -> None:
        """Ends them all."""
        await asyncio.gather(*(self.end(id) for id in list(self._jobs)))

    async def _run(self, job: Job, gateway: Any, body: dict[str, Any], who: str) -> None:
        try:
            reply = await gateway.answer(ENDPOINTS[job.endpoint], body, who)
            job.result, job.status = reply.json, "succeeded"
        except asyncio.CancelledError:
            job.status = "cancelled"
            raise
        except Refused as refused:
            job.status, job.error = "failed", refused.body()["error"]
        except Exception as error:
            job.status, job.error = (
                "failed",
                {"message": " ".join(str(error).split()), "code": type(error).__name__},
            )
        finally:
            job.ended = self._wall()

    def _sweep(self) -> None:
        """Forgets results that nobody came for; the oldest ones sooner where there are many jobs."""
        done = sorted((job for job in self._jobs.values() if job.ended), key=lambda job: job.ended)
        late = self._wall() - KEPT_SECONDS
        over = len(self._jobs) - MOST + 1
        for place, job in enumerate(done):
            if job.ended < late or place < over:
                del self._jobs[job.id]
