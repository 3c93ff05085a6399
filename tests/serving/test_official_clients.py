"""The official clients, unchanged, against a real server: OpenAI and its agents, Anthropic, Ollama.

`docs/guides/serving.md` has the versions that were tried. `make clients` tries many more, in tests/clients.
"""

import asyncio
import json
import sys

import pytest

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
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
SAID = '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'


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


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_streamed(client):
    messages = [{"role": "developer", "content": "Be brief."}, *user("one two three")]
    whole = client.chat.completions.create(model="chat", messages=messages, n=2, seed=1)
    assert [choice.message.content for choice in whole.choices] == ["one two three"] * 2
    wanted = {"max_completion_tokens": 2, "stream_options": {"include_usage": True}}
    chat = client.chat.completions
    events = list(chat.create(model="chat", messages=messages, stream=True, **wanted))
    text = "".join(c.delta.content or "" for event in events for c in event.choices)
    assert (text, events[-2].choices[0].finish_reason) == ("one two", "length")
    assert events[-1].usage.completion_tokens == 2 and events[-1].choices == []


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


def test_models_and_completions(client):
    assert {model.id for model in client.models.list()} == {"chat", "sized", "bge", "rank"}
    assert client.models.retrieve("chat").id == "chat"
    answer = client.completions.create(model="chat", prompt="one two", echo=True)
    assert answer.choices[0].text == "one twoone two"


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


def test_anthropics_client(url):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key=OPERATORS, max_retries=0)
    options = {"model": "chat", "max_tokens": 64}
    whole = client.messages.create(messages=user("one two"), system="Be brief.", **options)
    assert [block.text for block in whole.content] == ["one two"]
    assert whole.stop_reason == "end_turn" and whole.usage.output_tokens == 2
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [{"name": "time", "input_schema": schema}]
    said = user(f"<think>The clock.</think>See: {SAID}")
    with client.messages.stream(messages=said, tools=tools, **options) as stream:
        assert "".join(stream.text_stream) == "See: "
        thought, text, call = stream.get_final_message().content
    assert (thought.thinking, text.text) == ("The clock.", "See: ")
    assert (call.name, call.input) == ("time", {"zone": "CET"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is noon."}
    history = [*said, {"role": "assistant", "content": [text, call]}, *user([result])]
    answer = client.messages.create(messages=history, tools=tools, **options)
    assert answer.content[0].text == "It is noon."
    with pytest.raises(anthropic.NotFoundError, match="Did you mean chat"):
        client.messages.create(model="cha", max_tokens=1, messages=user("a"))
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(messages=user("a"), extra_body={"top_k": -2}, **options)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(messages=user("a"), **options)


def test_ollamas_client(url):
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=url, headers={"Authorization": f"Bearer {OPERATORS}"})
    whole = client.chat(model="chat", messages=user("one two three"), options={"num_predict": 2})
    assert (whole.message.content, whole.done_reason) == ("one two", "length")
    parts = list(client.chat(model="chat", messages=user("one two"), stream=True))
    assert "".join(part.message.content for part in parts) == "one two" and parts[-1].done
    called = client.chat(model="chat", messages=user(SAID), tools=[TOOL]).message
    [call] = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("time", {"zone": "CET"})
    history = [*user(SAID), called, {"role": "tool", "tool_name": "time", "content": "It is noon."}]
    answer = client.chat(model="chat", messages=history, tools=[TOOL])
    assert answer.message.content == "It is noon."
    assert client.generate(model="chat", prompt="one two").response == "one two"
    assert client.embed(model="bge", input=["fox", "a dog"]).embeddings == [[3.0, 1.0], [5.0, 1.0]]
    assert {model.model for model in client.list().models} == {"chat", "sized", "bge", "rank"}
    assert client.show("chat") and client.ps()
    with pytest.raises(ollama.ResponseError, match="Did you mean chat") as unknown:
        client.chat(model="cha", messages=user("a"))
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="catalogue"):
        client.pull("llama3")


@pytest.mark.parametrize("format", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_agents_client_runs_a_tool(url, format, streamed):
    """OpenAI's agents run the tool that the model calls, and end with the answer to its result."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    zones = []

    @agents.function_tool(name_override="time")
    def clock(zone: str) -> str:
        """The time in a zone."""
        zones.append(zone)
        return "It is noon."

    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=OPERATORS) as client:
            model = kinds[format](model="chat", openai_client=client)
            agent = agents.Agent("a", instructions="Be brief.", tools=[clock], model=model)
            if not streamed:
                return (await agents.Runner.run(agent, SAID)).final_output
            running = agents.Runner.run_streamed(agent, SAID)
            async for _ in running.stream_events():
                pass
            return running.final_output

    assert (asyncio.run(run()), zones) == ("It is noon.", ["CET"])
