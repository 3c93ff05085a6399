"""The official clients, unchanged, against a real server: OpenAI and its agents, Anthropic, Ollama.

`docs/reference/serving.md` has the versions that were tried. `make clients` tries many more, in tests/clients.
"""

import asyncio
import json
import sys

import pytest

from tests.clients.stories import CALL as SAID
from tests.clients.stories import STORIES, TOOL, time, user
from tests.faces.served import OPERATORS, free_port, serving

openai = pytest.importorskip("openai")
# `chat` repeats the last message, in a template with thoughts and with tools in the format of Hermes.
SERVER = """
import sys
import gpu_runtime
from gpu_runtime.serving import server

rt = gpu_runtime.runtime()
template = "{# tools <tool_call> <think> #}{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
rt.register("chat", backend="fake", size="1GiB", model_type="llm", chat_template=template)
rt.register("sized", backend="fake", size="1GiB", model_type="llm", chat_template=template, context_length=4096)
rt.register("bge", backend="fake", size="1GiB", model_type="embedding")
rt.register("rank", backend="fake", size="1GiB", model_type="reranker")
try:
    server.run(rt, port=int(sys.argv[1]))
finally:
    rt.close()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("client"), free_port()
    environment = {"GPU_CONSOLE_TOKEN": OPERATORS, "GPU_CATALOG": str(folder / "none")}
    command = [sys.executable, "-c", SERVER, str(port)]
    with serving(command, folder, environment, port=port, path="/health"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=OPERATORS, max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    "name", ["openai", "openai_agents", "anthropic", "ollama", "langchain_openai"]
)
def test_the_story_of_a_client_library(url, name):
    """`make clients` runs these stories too, each with the newest version of its library."""
    pytest.importorskip({"openai_agents": "agents"}.get(name, name))
    STORIES[name](url, OPERATORS)


def test_a_conversation_with_a_tool(client):
    """The client builds the call from the parts of a stream, and sends it back with the tool's result."""
    options = {"model": "chat", "tools": [TOOL]}
    [choice] = client.chat.completions.create(messages=user(SAID), **options).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("time", {"zone": "CET"})
    with client.chat.completions.stream(messages=user(SAID), **options) as stream:
        built = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert built.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}
    messages = [*user(SAID), choice.message, result]
    [answer] = client.chat.completions.create(messages=messages, **options).choices
    assert (answer.message.content, answer.finish_reason) == ("It is noon.", "stop")


def test_a_response_with_thoughts_and_a_tool(client):
    """The client runs a conversation with a tool on the items of a response, whole and streamed."""
    tool = {"type": "function", **TOOL["function"], "strict": None}
    said = f"<think>The clock.</think>See: {SAID}"
    options = {"model": "chat", "tools": [tool], "instructions": "Be brief."}
    whole = client.responses.create(input=said, **options)
    thought, message, call = whole.output
    assert [part.text for part in thought.content] == ["The clock."]
    assert (whole.status, whole.output_text, message.role) == ("completed", "See: ", "assistant")
    assert (call.name, json.loads(call.arguments)) == ("time", {"zone": "CET"})
    with client.responses.stream(input=said, **options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events))), "no event is missing"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "See: " and final.output[2].arguments == call.arguments
    assert final.usage == whole.usage and whole.usage.output_tokens > 0
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "See: "
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is noon."}
    history = [{"role": "user", "content": said}, *whole.output, result]
    assert client.responses.create(input=history, **options).output_text == "It is noon."


def test_a_response_that_is_cut_or_refused(client):
    cut = client.responses.create(model="chat", input="one two three", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "one two")
    assert cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="answers are not stored") as refused:
        client.responses.create(model="chat", input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="Did you mean chat"):
        client.responses.create(model="cha", input="a")


def test_embeddings_of_texts_and_of_tokens(client):
    """The client requests base64 by itself. LangChain sends lists of tokens."""
    found = client.embeddings.create(model="bge", input=["fox", "a dog"])
    assert [row.embedding for row in found.data] == [[3.0, 1.0], [5.0, 1.0]]
    assert found.id, "Mistral's client reads no answer without it"
    plain = client.embeddings.create(model="bge", input=[[1, 2], [3]], encoding_format="float")
    assert [row.index for row in plain.data] == [0, 1]


def test_errors_are_the_clients_own(client):
    """Each client raises its own error, with a message that names the mistake, and the name of the request."""
    with pytest.raises(openai.NotFoundError, match="Did you mean chat") as unknown:
        client.chat.completions.create(model="cha", messages=user("a"))
    assert unknown.value.request_id.startswith("req-")
    with pytest.raises(openai.BadRequestError, match="top_k") as bad:
        client.chat.completions.create(model="chat", messages=user("a"), extra_body={"top_k": -2})
    assert bad.value.param == "top_k"
    with pytest.raises(openai.BadRequestError, match="of type embedding and writes no text"):
        client.chat.completions.create(model="bge", messages=user("a"))
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_errors_of_anthropic_and_ollama_are_their_clients_own(url):
    anthropic, ollama = pytest.importorskip("anthropic"), pytest.importorskip("ollama")
    client = anthropic.Anthropic(base_url=url, api_key=OPERATORS, max_retries=0)
    given = {"max_tokens": 1, "messages": user("a")}
    with pytest.raises(anthropic.NotFoundError, match="Did you mean chat"):
        client.messages.create(model="cha", **given)
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(model="chat", extra_body={"top_k": -2}, **given)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="chat", **given)
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {OPERATORS}"})
    with pytest.raises(ollama.ResponseError, match="Did you mean chat") as unknown:
        client.chat(model="cha", messages=user("a"))
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="catalogue"):
        client.pull("llama3")


def test_the_agents_client_streams_a_chat_with_a_tool(url):
    """OpenAI's agents run the tool that the model calls, and end with the answer to its result."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=OPERATORS) as client:
            model = agents.OpenAIChatCompletionsModel(model="chat", openai_client=client)
            agent = agents.Agent("a", tools=[agents.function_tool(time)], model=model)
            running = agents.Runner.run_streamed(agent, SAID)
            async for _ in running.stream_events():
                pass
            return running.final_output

    assert asyncio.run(run()) == "It is noon."
