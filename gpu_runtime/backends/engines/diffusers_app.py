"""The server of one diffusers pipeline: pictures by OpenAI's images API, and `/generate` with the pipeline's own words.

Run by itself, by the recipe beside it. It listens at 127.0.0.1 only, and lets in whoever shows the key.
"""

import argparse  # annotations are evaluated here: FastAPI reads them, and they name what a function imports
import base64
import hmac
import inspect
import io
import os
import threading
import time
from typing import Annotated, Any

MOST_PIXELS, MOST_PICTURES, MOST_STEPS = 4096 * 4096, 10, 500


def app(pipeline: Any, name: str, key: str) -> Any:
    """The FastAPI application that serves this pipeline."""
    import torch
    from fastapi import Body, FastAPI, Header, HTTPException, Request
    from fastapi.concurrency import run_in_threadpool

    Words, Key = Annotated[dict[str, Any], Body()], Annotated[str, Header(alias="Authorization")]
    made = FastAPI(title=name)
    turn = threading.Lock()  # one picture at a time: the card is one
    takes = inspect.signature(pipeline.__call__).parameters

    def let_in(authorization: str) -> None:
        if not hmac.compare_digest(authorization.encode(), f"Bearer {key}".encode()):
            raise HTTPException(401, "the key is missing or wrong")

    def checked(value: Any, what: str, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise HTTPException(
                422, f"{what} must be a whole number from 1 to {most}, and is {value!r}"
            )
        return value

    def drawn(words: dict[str, Any], gone: threading.Event) -> list[str]:
        """The pictures as base64 of PNG. It stops between two steps once nobody waits for them."""

        def look(pipe: Any, step: int, moment: Any, given: dict[str, Any]) -> dict[str, Any]:
            pipe._interrupt = gone.is_set()
            if gone.is_set():
                raise InterruptedError
            return given

        with turn:
            if gone.is_set():
                return []
            seed = words.pop("seed", None)
            if seed is not None:
                words["generator"] = torch.Generator("cpu").manual_seed(int(seed))
            if "callback_on_step_end" in takes:
                words["callback_on_step_end"] = look
            try:
                pictures = pipeline(**words).images
            except InterruptedError:
                return []
        encoded = []
        for picture in pictures:
            file = io.BytesIO()
            picture.save(file, "PNG")
            encoded.append(base64.b64encode(file.getvalue()).decode())
        return encoded

    async def answer(words: dict[str, Any], request: Request) -> list[str]:
        import asyncio

        gone = threading.Event()
        drawing = asyncio.ensure_future(run_in_threadpool(drawn, words, gone))
        while not drawing.done():
            if await request.is_disconnected():
                gone.set()
            await asyncio.wait([drawing], timeout=0.2)
        try:
            return drawing.result()
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from error

    @made.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @made.get("/v1/models")
    def models(authorization: Key = "") -> dict[str, Any]:
        let_in(authorization)
        return {
            "object": "list",
            "data": [{"id": name, "object": "model", "owned_by": "gpu-console"}],
        }

    @made.post("/v1/images/generations")
    async def images(request: Request, body: Words, authorization: Key = "") -> dict[str, Any]:
        let_in(authorization)
        prompt, size = body.get("prompt"), body.get("size") or ""
        if not isinstance(prompt, str) or not prompt:
            raise HTTPException(422, "prompt must be text")
        if body.get("response_format", "b64_json") not in (None, "b64_json"):
            raise HTTPException(
                422, "response_format must be b64_json: there is nowhere to put a file for a url"
            )
        words: dict[str, Any] = {"prompt": prompt}
        if "num_images_per_prompt" in takes:
            words["num_images_per_prompt"] = checked(body.get("n") or 1, "n", MOST_PICTURES)
        if size and size != "auto":
            width, _, height = str(size).partition("x")
            if (
                not (width.isdigit() and height.isdigit())
                or not 0 < int(width) * int(height) <= MOST_PIXELS
            ):
                raise HTTPException(422, f"size must be like 512x512, and is {size!r}")
            words |= {"width": int(width), "height": int(height)}
        for field in ("steps", "num_inference_steps"):  # the second is what diffusers calls it
            if body.get(field) is not None:
                words["num_inference_steps"] = checked(body[field], field, MOST_STEPS)
        for field in ("seed", "negative_prompt", "guidance_scale"):
            if body.get(field) is not None and (field in takes or field == "seed"):
                words[field] = body[field]
        pictures = await answer(words, request)
        return {
            "created": int(time.time()),
            "data": [{"b64_json": picture} for picture in pictures],
        }

    @made.post("/generate")
    async def generate(request: Request, body: Words, authorization: Key = "") -> dict[str, Any]:
        let_in(authorization)
        if unknown := [word for word in body if word not in takes and word != "seed"]:
            raise HTTPException(422, f"this pipeline knows no {', '.join(unknown)}")
        return {"images": await answer(dict(body), request)}

    return made


def load(model: str, device: str, dtype: str, balanced: bool) -> Any:
    """The pipeline, from files that lie here, safetensors only, on its device."""
    import torch
    from diffusers import DiffusionPipeline

    words: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if dtype != "auto":
        words["torch_dtype"] = getattr(torch, dtype)
    elif device == "cuda":
        words["torch_dtype"] = torch.bfloat16
    if balanced:
        return DiffusionPipeline.from_pretrained(model, device_map="balanced", **words)
    return DiffusionPipeline.from_pretrained(model, **words).to(device)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(prog="diffusers_app")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--balanced", action="store_true")
    given = parser.parse_args()
    pipeline = load(given.model, given.device, given.dtype, given.balanced)
    pipeline.set_progress_bar_config(disable=True)
    uvicorn.run(
        app(pipeline, given.name, os.environ["GPU_ENGINE_KEY"]),
        host="127.0.0.1",
        port=given.port,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
