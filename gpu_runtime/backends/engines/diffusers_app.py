"""The HTTP server of one diffusers pipeline: OpenAI's images API, and `/generate` for other
parameters.

This module runs as a separate program, which the recipe `diffusers.py` starts. The server listens
on a socket that it inherits, bound to 127.0.0.1. It rejects requests without the key.
"""

# This module has no `from __future__ import annotations`: FastAPI evaluates the annotations, and
# they name classes that only `app` imports.
import argparse
import base64
import hmac
import inspect
import io
import os
import socket
import threading
import time
from typing import Annotated, Any

MOST_PIXELS, MOST_PICTURES, MOST_STEPS = 4096 * 4096, 10, 500


def app(pipeline: Any, name: str, key: str) -> Any:
    """The FastAPI application that serves `pipeline` as the model `name`. Requests need the `key`."""
    from fastapi import Body, FastAPI, Header, HTTPException, Request

    JsonBody, Key = Annotated[dict[str, Any], Body()], Annotated[str, Header(alias="Authorization")]
    server = FastAPI(title=name)
    painter = Painter(pipeline)

    def check_key(authorization: str) -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            raise HTTPException(401, "the key is missing or wrong")

    async def answer(parameters: dict[str, Any], request: Request) -> list[str]:
        try:
            return await painter.paint_while_connected(parameters, request)
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error

    @server.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @server.get("/v1/models")
    def models(authorization: Key = "") -> dict[str, Any]:
        check_key(authorization)
        model = {"id": name, "object": "model", "owned_by": "gpu-console"}
        return {"object": "list", "data": [model]}

    @server.post("/v1/images/generations")
    async def images(request: Request, body: JsonBody, authorization: Key = "") -> dict[str, Any]:
        check_key(authorization)
        try:
            parameters = image_parameters(body, painter.accepted)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        pictures = await answer(parameters, request)
        data = [{"b64_json": picture} for picture in pictures]
        return {"created": int(time.time()), "data": data}

    @server.post("/generate")
    async def generate(request: Request, body: JsonBody, authorization: Key = "") -> dict[str, Any]:
        """Makes pictures with the pipeline's own parameters."""
        check_key(authorization)
        unknown = [word for word in body if word not in painter.accepted and word != "seed"]
        if unknown:
            raise HTTPException(422, f"this pipeline has no parameter {', '.join(unknown)}")
        return {"images": await answer(dict(body), request)}

    return server


def image_parameters(body: dict[str, Any], accepted: Any) -> dict[str, Any]:
    """Turns the `body` of a request to OpenAI's images API into parameters of the pipeline.

    `accepted` are the names of the pipeline's own parameters. Raises ValueError for an invalid field.
    """
    prompt, size = body.get("prompt"), body.get("size") or ""
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt must be text")
    if body.get("response_format", "b64_json") not in (None, "b64_json"):
        raise ValueError("response_format must be b64_json: this server stores no files for a url")
    parameters: dict[str, Any] = {"prompt": prompt}
    if "num_images_per_prompt" in accepted:
        count = whole_number(body.get("n") or 1, "n", MOST_PICTURES)
        parameters["num_images_per_prompt"] = count
    if size and size != "auto":
        parameters |= parsed_size(size)
    for field in ("steps", "num_inference_steps"):  # the second is diffusers' name for the option
        if body.get(field) is not None:
            parameters["num_inference_steps"] = whole_number(body[field], field, MOST_STEPS)
    for field in ("seed", "negative_prompt", "guidance_scale"):
        if body.get(field) is not None and (field in accepted or field == "seed"):
            parameters[field] = body[field]
    return parameters


def whole_number(value: Any, field: str, most: int) -> int:
    """The `value` of `field`. Raises ValueError unless it is a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ValueError(f"{field} must be a whole number from 1 to {most}, and is {value!r}")
    return value


def parsed_size(size: Any) -> dict[str, int]:
    """Width and height of a `size` such as 512x512. Raises ValueError."""
    width, _, height = str(size).partition("x")
    if width.isdigit() and height.isdigit():
        pixels = int(width) * int(height)
        if 0 < pixels <= MOST_PIXELS:
            return {"width": int(width), "height": int(height)}
    raise ValueError(f"size must be like 512x512, and is {size!r}")


class Painter:
    """Runs the pipeline for one request at a time."""

    def __init__(self, pipeline: Any) -> None:
        self.accepted = inspect.signature(pipeline.__call__).parameters
        self._pipeline = pipeline
        self._lock = threading.Lock()

    async def paint_while_connected(self, parameters: dict[str, Any], request: Any) -> list[str]:
        """As `paint`; cancelled if the client of `request` disconnects."""
        import asyncio

        from fastapi.concurrency import run_in_threadpool

        cancelled = threading.Event()
        painting = asyncio.ensure_future(run_in_threadpool(self.paint, parameters, cancelled))
        while not painting.done():
            if await request.is_disconnected():
                cancelled.set()
            await asyncio.wait([painting], timeout=0.2)
        return painting.result()

    def paint(self, parameters: dict[str, Any], cancelled: threading.Event) -> list[str]:
        """The pictures for `parameters` as base64 of PNG.

        If `cancelled` is set, the work ends and the result is empty. `cancelled` is checked before
        the start, and after each step if the pipeline has step callbacks.
        """
        import torch

        def check_step(pipe: Any, step: int, moment: Any, given: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = cancelled.is_set()
            if cancelled.is_set():
                raise InterruptedError
            return given

        with self._lock:
            if cancelled.is_set():
                return []
            seed = parameters.pop("seed", None)
            if seed is not None:
                parameters["generator"] = torch.Generator("cpu").manual_seed(int(seed))
            if "callback_on_step_end" in self.accepted:
                parameters["callback_on_step_end"] = check_step
            try:
                pictures = self._pipeline(**parameters).images
            except InterruptedError:  # `check_step` ended the work: the client has gone
                return []
        return [base64_png(picture) for picture in pictures]


def base64_png(picture: Any) -> str:
    """The `picture`, a PIL image, as base64 of PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def load(given: argparse.Namespace) -> Any:
    """The pipeline that the command line `given` describes, from its local safetensors files.

    Ends the program if the files of a part lack tensors, unless `given` allows that. They would
    have random values.
    """
    import torch
    from diffusers import DiffusionPipeline

    faults = watch_parts()
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    # It is always passed on: where it is left out, transformers asks on the terminal.
    options["trust_remote_code"] = given.trust_remote_code
    if given.dtype != "auto":
        options["torch_dtype"] = getattr(torch, given.dtype)
    elif given.device == "cuda":
        options["torch_dtype"] = torch.bfloat16
    if given.balanced:
        options["device_map"] = "balanced"
    elif given.allow_missing:  # else diffusers leaves what is missing without data
        options["low_cpu_mem_usage"] = False
    try:
        pipeline = DiffusionPipeline.from_pretrained(given.model, **options)
    finally:
        if faults and not given.allow_missing:  # one line, because the last line is reported
            advice = (
                "They would get random values; to load them so all the same: allow_missing=True"
            )
            raise SystemExit(" ".join([*faults, advice]))
    return pipeline if given.balanced else pipeline.to(given.device)


def watch_parts() -> list[str]:
    """Sentences about the parts of a pipeline whose files lack tensors, once they are loaded.

    A pipeline loads its parts itself, and shows no loading report. So the loaders of the parts are
    wrapped in this program.
    """
    import diffusers
    import transformers

    faults: list[str] = []

    def watched(original: Any) -> Any:
        def from_pretrained(kind: Any, source: Any, *args: Any, **options: Any) -> Any:
            wanted = options.pop("output_loading_info", False)
            part, info = original(kind, source, *args, output_loading_info=True, **options)
            names = sorted(info["missing_keys"])
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                faults.append(f"the files of {source} lack {', '.join(names[:5])}{more}.")
            return (part, info) if wanted else part

        return classmethod(from_pretrained)

    for kind in (diffusers.ModelMixin, transformers.PreTrainedModel):
        kind.from_pretrained = watched(kind.from_pretrained.__func__)
    return faults


def main() -> None:
    """Serves the pipeline that the command line names. The key is in the environment."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="diffusers_app")
    for option in ("--model", "--name", "--device", "--dtype"):
        parser.add_argument(option, required=True)
    parser.add_argument("--socket", type=int, required=True)  # the descriptor of a bound socket
    for switch in ("--balanced", "--trust-remote-code", "--allow-missing"):
        parser.add_argument(switch, action="store_true")
    given = parser.parse_args()
    pipeline = load(given)
    pipeline.set_progress_bar_config(disable=True)
    application = app(pipeline, given.name, os.environ["GPU_ENGINE_KEY"])
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
    server.run(sockets=[socket.socket(fileno=given.socket)])


if __name__ == "__main__":
    main()
