"""Jobs: calls that continue after their caller has disconnected. The caller fetches the result later."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..queue.thread_stream import in_thread
from ..requests import Json, Refused
from ..store import Store

ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "images",
}
MAX_JOBS = 256  # running and ended
KEPT_SECONDS = 3600.0  # how long a result is kept
_STORED = ("id", "endpoint", "created", "client", "status", "ended", "result", "error")


class Job:
    """A call that runs in the background. Its id cannot be guessed; any visitor who knows it may fetch the result."""

    def __init__(self, endpoint: str, wall: float, client: str = "") -> None:
        """A job for this `endpoint`, created at `wall` (epoch seconds) by the visitor `client`."""
        self.client = client
        self.id = f"job-{uuid.uuid4().hex}"
        self.endpoint = endpoint
        self.created = wall
        self.status = "running"  # also in the queue; later: succeeded, failed or cancelled
        self.ended = 0.0
        self.result: Any = None
        self.error: Json | None = None
        self.task: asyncio.Task[None] | None = None
        self.was_fetched = False  # the ended job, since this server started

    @staticmethod
    def of(row: Json, wall: float) -> Job:
        """The job that an earlier server stored as `row`. If it had not ended, it counts as failed at `wall`."""
        job = Job(row["endpoint"], row["created"], row["client"])
        for name in _STORED:
            setattr(job, name, row[name])
        if not job.ended:
            job.fail(wall, "the server ended while this job ran", "ended")
        return job

    def fail(self, wall: float, message: str, code: str) -> None:
        """Ends the job with an error at `wall` (epoch seconds)."""
        self.status, self.ended = "failed", wall
        self.error = {"message": message, "code": code}

    def row(self) -> Json:
        """The job as it is kept in the store."""
        return {name: getattr(self, name) for name in _STORED}

    def as_json(self) -> Json:
        """The job as JSON. Times are in epoch seconds, and `result` is the answer of the endpoint."""
        fields = {"id": self.id, "object": "job", "endpoint": self.endpoint, "status": self.status}
        fields["created"] = round(self.created, 3)
        more = {"ended": round(self.ended, 3), "error": self.error, "result": self.result}
        return {**fields, **{name: value for name, value in more.items() if value}}


class Jobs:
    """The jobs of one server, in its event loop. With a store, the results survive a restart of the server."""

    def __init__(self, wall: Callable[[], float] = time.time, store: Store | None = None) -> None:
        """`wall` returns epoch seconds. `store` has the jobs of the earlier server."""
        self._wall = wall
        self._store = store
        known = (Job.of(row, wall()) for row in (store.jobs() if store is not None else ()))
        self._jobs = {job.id: job for job in sorted(known, key=lambda job: job.created)}

    def start(self, gateway: Any, wanted: Any, client: str) -> Job:
        """Starts a call in the background for the visitor `client`, and returns its job. `gateway` answers the call.

        `wanted` has its `endpoint` and its `body`. Raises Refused with 400 if it is invalid, and with 503 if there are
        MAX_JOBS jobs, and none of them may be forgotten.
        """
        body = _checked_body(wanted)
        self._make_room(client)
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

    def fetch(self, id: str) -> Json:
        """The job with this `id` as JSON. Once its result was fetched, it may make room. Raises Refused, 404."""
        job = self.find(id)
        job.was_fetched = bool(job.ended)
        return job.as_json()

    def of(self, client: str) -> list[Json]:
        """The jobs of the visitor `client` as JSON, without their results. The newest job is first."""
        rows = [job.as_json() for job in self._jobs.values() if job.client == client]
        return [{k: v for k, v in row.items() if k != "result"} for row in reversed(rows)]

    def all(self) -> list[Job]:
        """Every job that is kept."""
        return list(self._jobs.values())

    async def end(self, id: str) -> Job:
        """Cancels the job with this `id` if it still runs, forgets the job, and returns it. Raises Refused, 404."""
        job = self.find(id)
        if job.task and not job.task.done():
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)
        self._forget(id)
        return job

    async def close(self) -> None:
        """Cancels the jobs that run. After a restart, the server lists the cancelled jobs as failed."""
        tasks = [job.task for job in self._jobs.values() if job.task and not job.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._jobs.clear()

    def _forget(self, id: str) -> None:
        self._jobs.pop(id, None)
        if self._store is not None:
            self._store.drop_job(id)

    async def _keep(self, job: Job) -> None:
        row, store = job.row(), self._store
        if store is not None:
            await in_thread(lambda: store.put_job(job.id, row))

    async def _run(self, job: Job, gateway: Any, body: Json, client: str) -> None:
        await self._answer(job, gateway, body, client)
        await self._keep(job)

    async def _answer(self, job: Job, gateway: Any, body: Json, client: str) -> None:
        try:
            await self._keep(job)
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
            job.fail(self._wall(), " ".join(str(error).split()), type(error).__name__)
        finally:
            job.ended = self._wall()

    def _make_room(self, client: str) -> None:
        """Forgets the results that are too old, and makes room for one more job of `client`.

        1. The oldest result that was fetched is forgotten.
        2. Otherwise the client with the most jobs loses its oldest result, if that client is not `client`.
        3. Otherwise Refused (503) is raised. A client's own results are not lost by its next job.
        """
        oldest_kept = self._wall() - KEPT_SECONDS
        for job in self.all():
            if job.ended and job.ended < oldest_kept:
                self._forget(job.id)
        if len(self._jobs) < MAX_JOBS:
            return
        done = sorted((job for job in self.all() if job.ended), key=lambda job: job.ended)
        unneeded = [job for job in done if job.was_fetched]  # 1
        if not unneeded:
            jobs_of = Counter(job.client for job in self.all())
            most = max(jobs_of, key=jobs_of.__getitem__)
            if jobs_of[client] < jobs_of[most]:
                unneeded = [job for job in done if job.client == most]  # 2
        if not unneeded:  # 3
            text = f"{MAX_JOBS} jobs run, or have results that were not fetched. Fetch or delete results"
            raise Refused(503, "full", text, 5.0)
        self._forget(unneeded[0].id)


def _checked_body(wanted: Any) -> Json:
    """Checks `wanted`, the request for a job, and returns the body of the job's call. Raises Refused, 400."""
    endpoint = wanted.get("endpoint") if isinstance(wanted, dict) else None
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        text = f"endpoint must be one of {', '.join(ENDPOINTS)}"
        raise Refused(400, "bad_endpoint", text, param="endpoint")
    for name in wanted:
        if name not in ("endpoint", "body"):
            text = f"{name[:64]!r} is no field of a job; its call is in body"
            raise Refused(400, "bad_field", text, param=name[:64])
    body = wanted.get("body")
    if not isinstance(body, dict):
        text = "body must be the JSON object that the endpoint takes"
        raise Refused(400, "bad_body", text, param="body")
    if body.get("stream"):
        text = "a job's answer is not streamed: leave stream out"
        raise Refused(400, "no_stream", text, param="body")
    return body
