"""Images in chats: what is read and refused, and a real small model that reads them."""

import base64
import io
from contextlib import asynccontextmanager
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

from gpu_runtime.serving.engines import transformers as images  # noqa: E402
from gpu_runtime.serving.requests import Refused  # noqa: E402
from tests import tiny_models  # noqa: E402
from tests.serving.harness import answer_text, harness, refusal, stream_text  # noqa: E402

pytestmark = pytest.mark.thorough


def url(color: str, form: str = "PNG", size: tuple[int, int] = (50, 40)) -> str:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, form)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def image(source: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source, **more}}


def asking(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]


@pytest.fixture(scope="module")
def seer(tmp_path_factory):
    return tiny_models.vision_lm(tmp_path_factory.mktemp("models") / "seer")


@asynccontextmanager
async def with_seer(seer: Any, **options: Any) -> Any:
    async with harness() as k:
        k.rt.register("seer", seer, backend="transformers", model_type="vision", **options)
        yield k


async def test_a_model_reads_images_and_texts(seer):
    """Another image gives other probabilities. A conversation may have no image, or several."""
    options = {"max_tokens": 6, "temperature": 0}

    async def told(*parts: dict[str, Any]) -> Any:
        wanted = {"messages": asking(*parts), "logprobs": True, **options}
        return (await k.chat("seer", **wanted)).json

    async with with_seer(seer) as k:
        red, again, blue = [await told(image(url(c))) for c in ("red", "red", "blue")]
        scores = [one["choices"][0]["logprobs"] for one in (red, again, blue)]
        assert scores[0] == scores[1] != scores[2]
        none, two = await told(), await told(image(url("red")), image(url("blue", "JPEG")))
        counts = [one["usage"]["prompt_tokens"] for one in (none, red, two)]
        assert counts[1] - counts[0] == counts[2] - counts[1] == 4, "an image is four tokens"
        whole = await k.chat("seer", messages=asking(image(url("red"))), **options)
        stream = await k.chat("seer", messages=asking(image(url("red"))), stream=True, **options)
        assert answer_text(whole) == await stream_text(stream) != ""
        plain = await k.chat("seer", "a text that is no list of parts", **options)
        assert answer_text(plain)


async def test_an_image_that_cannot_be_read_is_the_callers_mistake(seer):
    async with with_seer(seer) as k:
        for source, words in (
            ("https://example.org/a.png", "opens no other URLs"),
            ("data:image/png;base64,AAAA", "PNG, JPEG, WEBP, GIF"),
            ("data:image/png;base64,%%%", "PNG, JPEG, WEBP, GIF"),
        ):
            with refusal(400, match=words, param="messages[0].content[0].image_url.url"):
                await k.chat("seer", messages=asking(image(source)))
        with pytest.raises(Refused, match="processor does not take this conversation"):
            messages = asking(image(url("red")), {"type": "text", "text": "<image>"})
            await k.chat("seer", messages=messages)
        with pytest.raises(Refused, match="parts of type input_audio"):
            await k.chat("seer", messages=asking({"type": "input_audio"}))
        assert all(state.failures == 0 for state in k.gateway.state().breakers.values())
    template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"  # made for texts
    async with with_seer(seer, chat_template=template) as k:
        with pytest.raises(Refused, match="does not read parts of type image_url"):
            await k.chat("seer", messages=asking(image(url("red"))))
        assert answer_text(await k.chat("seer", "a text", max_tokens=2))


@pytest.mark.parametrize(("content", "words"), [
    ([image(url("red"))] * 17, "17 images; at most 16"),
    ([image(url("red"), detail="low")], "must be auto or high"),
    ([{"type": "image_url"}], "must be an object such as"),
    ([{"type": "image_url", "image_url": {"url": 7}}], "must be an object such as"),
    ([image(url("red", size=(8000, 5001)))], "at most 40,000,000 pixels"),
])  # fmt: skip
def test_images_that_are_refused(content, words):
    with refusal(400, match=words):
        images.images_of([{"role": "user", "content": content}])


@pytest.mark.parametrize("form", images.FORMATS)
def test_every_format_is_read_whatever_type_is_named(form):
    [found] = images.images_of(asking(image(url("blue", form))))
    red, green, blue = found.getpixel((0, 0))
    assert (found.size, found.mode) == ((50, 40), "RGB") and blue > 200 > red + green
