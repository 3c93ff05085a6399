"""vLLM (`make vllm`) and llama-server behind `gpu serve` and OpenAI's client; skipped aloud where missing."""

import json
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.clock import until

from .serve import client, gpu_serve, openai, told

pytest.importorskip("transformers")

from gpu_runtime import samples  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# In the format of Hermes and Qwen, which both servers know.
TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{{ tools | tojson }}</tools><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROGRAMS = {
    "vllm": "there is no vllm here: `make vllm`",
    "llama-server": "there is no llama-server here: build it from the sources of llama-cpp-python",
}


def schema(name: str, *values: object) -> dict[str, object]:
    """The schema of an object that has only this property, which has one of the values."""
    properties = {name: {"enum": list(values)}}
    closed = {"required": [name], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


ADD = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": schema("x", 1, 2)},
}


def entry(engine: str, place: Path) -> dict[str, object]:
    """The catalogue's entry of a small model for this `engine`."""
    common = {"type": "llm", "context_length": 512, "backend": engine}
    if engine == "llama-server":
        file = samples.gguf_lm(place / "m.gguf", size="24 MiB")
        return {**common, "source": str(file), "sequences": 4, "chat_template": TOOL_TEMPLATE}
    model = samples.causal_lm(place / "m", size="16 MiB", max_position_embeddings=512, head_dim=64)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    arguments = ["--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return {**common, "source": str(model), "dtype": "float32", "runtime_args": arguments}


@pytest.fixture(scope="module", params=sorted(PROGRAMS))
def engine(request):
    beside = f"{ROOT}/.venv-vllm/bin{os.pathsep}{os.environ['PATH']}"
    if shutil.which(request.param, path=beside) is None:
        pytest.skip(PROGRAMS[request.param])
    return request.param


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    place = tmp_path_factory.mktemp("served")
    models = {"m": entry(engine, place)}
    if engine == "vllm":
        vectors = samples.embedder(place / "e", size="16 MiB")
        models["e"] = {**models["m"], "source": str(vectors), "type": "embedding"}
        models["e"]["context_length"] = 256
        models["e"]["runtime_args"] = ["--enforce-eager"]
    environment = {
        "PATH": f"{ROOT}/.venv-vllm/bin{os.pathsep}{os.environ['PATH']}",
        "GPU_DEVICES": "sim:4GiB,host:8GiB",
        # For vLLM's build for CPUs: it asks no model hub, and the memory of its KV cache is in GiB.
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with gpu_serve(place, models, **environment) as server:
        yield server


@pytest.fixture
def talk(served):
    return client(served)


def ask(talk, words: str = "hello fox", **more):
    given = {"model": "m", "max_tokens": 8, "temperature": 0, **more}
    return talk.chat.completions.create(messages=[{"role": "user", "content": words}], **given)


def evict(served, model: str) -> None:
    told(served, f"/memory/evict/{model}", "POST")


def test_a_chat_its_counts_and_its_stream(talk):
    whole = ask(talk)
    assert whole.model == "m" and whole.usage.completion_tokens == 8
    parts = list(ask(talk, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage.completion_tokens == 8
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == whole.choices[0].message.content
    assert talk.completions.create(model="m", prompt="hello", max_tokens=4).usage.completion_tokens


def test_an_equal_seed_gives_an_equal_text(talk):
    said = {ask(talk, temperature=1, seed=5).choices[0].message.content for _ in range(3)}
    assert len(said) == 1


def test_logprobs_bias_and_stop(talk):
    found = ask(talk, logprobs=True, top_logprobs=2, max_tokens=2).choices[0].logprobs.content
    assert len(found) == 2 and all(len(one.top_logprobs) == 2 for one in found)
    assert all(one.logprob <= 0 for one in found)
    whole = ask(talk, max_tokens=24).choices[0].message.content
    cut = whole[len(whole) // 2 :].strip()[:1]
    stopped = ask(talk, max_tokens=24, stop=[cut]).choices[0]
    assert stopped.finish_reason == "stop" and cut not in stopped.message.content


def test_a_schema_is_enforced(talk):
    yes_or_no = schema("answer", "yes", "no")
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": yes_or_no}}
    said = ask(talk, max_tokens=200, temperature=1, response_format=wanted).choices[0]
    assert json.loads(said.message.content)["answer"] in ("yes", "no")


def test_a_named_tool_is_called(engine, talk):
    if engine == "llama-server":
        pytest.skip("llama-server allows text before a call, and this model never ends its text")
    named = {"type": "function", "function": {"name": "add"}}
    said = ask(talk, max_tokens=200, temperature=1, tools=[ADD], tool_choice=named).choices[0]
    [call] = said.message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["x"] in (1, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
        ({"top_p": 7}, "top_p=7 cannot be used"),
        ({"extra_body": {"mirostat_mode": 1}}, "mirostat_mode"),
        ({"words": "fox " * 4000}, "m refused"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ],
)
def test_a_mistake_is_the_callers_and_opens_no_breaker(talk, wrong, said):
    """The engine ignores unknown fields, so the server refuses them."""
    for _ in range(6):
        with pytest.raises(openai.BadRequestError, match=said):
            ask(talk, **wrong)
    assert ask(talk).usage.completion_tokens == 8


def test_both_names_of_the_penalty_have_an_effect(talk):
    """llama.cpp calls it repeat_penalty, vLLM repetition_penalty."""
    plain = ask(talk, max_tokens=60).choices[0].message.content
    for name in ("repeat_penalty", "repetition_penalty"):
        said = ask(talk, max_tokens=60, extra_body={name: 1.9}).choices[0].message.content
        assert said != plain


def test_vectors_of_texts_and_of_tokens(engine, served, talk):
    if engine == "llama-server":
        pytest.skip("this llama-server has no embedding model")
    made = talk.embeddings.create(model="e", input=["hello", "fox"], encoding_format="float")
    again = talk.embeddings.create(model="e", input="hello")  # the client asks for base64
    assert again.data[0].embedding == pytest.approx(made.data[0].embedding, abs=1e-6)
    tokens = talk.embeddings.create(model="e", input=[5, 6, 7])
    assert {len(one.embedding) for one in (*made.data, *tokens.data)} == {512}
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        talk.embeddings.create(model="e", input="hello", dimensions=64)
    evict(served, "e")


def test_a_hang_up_frees_the_engine(talk):
    """The next call is answered long before the abandoned one would have ended."""
    began = time.monotonic()
    ask(talk, max_tokens=400)
    whole = time.monotonic() - began

    def seconds_after_a_hang_up() -> float:
        stream = ask(talk, stream=True, max_tokens=400)
        next(iter(stream))
        stream.close()
        began = time.monotonic()
        ask(talk, max_tokens=1)
        return time.monotonic() - began

    until(lambda: seconds_after_a_hang_up() < whole)


def test_calls_run_at_once(talk):
    stream = iter(ask(talk, stream=True, max_tokens=400))
    next(stream)
    assert ask(talk, max_tokens=1).usage.completion_tokens == 1
    assert any(part.choices[0].finish_reason is None for part in stream if part.choices)


def processes_of(program: str) -> list[psutil.Process]:
    """The processes of this `program`, the engine's children included. `make vllm` runs these tests, and is none."""
    found, above = [], psutil.Process().parents()
    for one in psutil.process_iter(["name", "cmdline"]):
        if one in above:
            continue
        names = [one.info["name"] or "", *(Path(word).name for word in one.info["cmdline"] or [])]
        if any(name.lower().startswith(program) for name in names[:4]):
            found.append(one)
    return found


def test_a_killed_engine_starts_again_and_the_last_one_leaves_no_process(engine, served, talk):
    ask(talk)
    workers = processes_of("vllm::enginecore" if engine == "vllm" else "llama-server")
    assert workers
    for worker in workers:
        worker.kill()

    def is_back() -> bool:
        try:
            return ask(talk).usage.completion_tokens == 8
        except openai.APIStatusError:
            return False

    until(is_back, "the engine starts again")
    evict(served, "m")
    until(lambda: not processes_of(engine), "the engine's processes end")
