"""One short story for each client library, run in the environment of that library: `python stories.py NAME URL TOKEN`.

The model `chat` repeats the last message, and calls the tool that the message names. `bge` embeds. A story fails if the
client raises, or reads something else. This file imports nothing of gpu-console, which is not installed there.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

CALL = '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TOOL = {
    "type": "function",
    "function": {"name": "time", "description": "It.", "parameters": SCHEMA},
}
STORIES: dict[str, Callable[[str, str], None]] = {}


def story(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
    STORIES[function.__name__] = function
    return function


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def time(zone: str) -> str:
    """The time in a zone."""
    return "It is noon."


@story
def openai(url: str, token: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    sent: dict[str, Any] = {"store": False, "service_tier": "auto", "verbosity": "medium"}
    sent |= {"prediction": {"type": "content", "content": "one"}, "reasoning_effort": "medium"}
    whole = client.chat.completions.create(model="chat", messages=user("one two"), **sent)
    assert whole.choices[0].message.content == "one two"
    answer = client.responses.create(model="chat", input="one two", reasoning={"effort": "low"})
    assert answer.output_text == "one two"
    parts = client.chat.completions.create(model="chat", messages=user("one two"), stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two"
    assert client.completions.create(model="chat", prompt="one two").choices[0].text == "one two"
    vectors = client.embeddings.create(model="bge", input=["fox"]).data
    assert vectors[0].embedding == [3.0, 1.0]


@story
def openai_agents(url: str, token: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token)
    model = agents.OpenAIResponsesModel(model="chat", openai_client=client)
    agent = agents.Agent("a", tools=[agents.function_tool(time)], model=model)
    assert agents.Runner.run_sync(agent, CALL).final_output == "It is noon."


@story
def anthropic(url: str, token: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=token, max_retries=0)
    given: dict[str, Any] = {"model": "chat", "messages": user("one two")}
    assert client.messages.count_tokens(**given).input_tokens == 2
    with client.messages.stream(max_tokens=64, **given) as stream:
        assert stream.get_final_text() == "one two"
    tool: Any = {"name": "time", "description": "It.", "input_schema": SCHEMA}
    called = client.messages.create(
        model="chat", max_tokens=64, messages=user(CALL), tools=[tool], system="Be brief."
    )
    [call] = called.content
    assert call.input == {"zone": "CET"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is noon."}
    given["messages"] = [*user(CALL), {"role": "assistant", "content": [call]}]
    given["messages"] += [{"role": "user", "content": [result]}]
    answer = client.messages.create(max_tokens=64, tools=[tool], **given)
    assert answer.content[0].text == "It is noon."


@story
def ollama(url: str, token: str) -> None:
    from ollama import Client

    client = Client(host=url, headers={"Authorization": f"Bearer {token}"})
    [name] = [one.model for one in client.list().models if one.model == "chat"]
    shown = client.show(name)
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    answer = client.chat(
        f"{name}:latest", user("one two"), options={"num_ctx": 2048}, keep_alive="1h30m"
    )
    assert answer.message.content == "one two" and (answer.total_duration or 0) > 0
    [row] = [one for one in client.ps().models if one.model == "chat"]
    assert row.size_vram and row.expires_at
    assert client.embed("bge", "fox").embeddings == [[3.0, 1.0]]
    parts = client.chat(name, user("one two"), stream=True)
    assert "".join(part.message.content or "" for part in parts) == "one two"
    called = client.chat(name, user(CALL), tools=[TOOL]).message
    assert called.tool_calls[0].function.arguments == {"zone": "CET"}
    result = {"role": "tool", "tool_name": "time", "content": "It is noon."}
    answer = client.chat(name, [*user(CALL), called, result], tools=[TOOL])
    assert answer.message.content == "It is noon."
    assert client.generate(name, '{"zone": "CET"}', format=SCHEMA).response == '{"zone": "CET"}'


@story
def litellm(url: str, token: str) -> None:
    import litellm

    place = {"api_base": f"{url}/v1", "api_key": token, "num_retries": 0}
    whole = litellm.completion("openai/chat", user("one two"), reasoning_effort="low", **place)
    assert whole.choices[0].message.content == "one two"
    place = {"api_base": url, "api_key": token, "num_retries": 0}
    for model in ("ollama_chat/chat", "anthropic/chat"):
        answer = litellm.completion(model, user("one two"), max_tokens=64, **place)
        assert answer.choices[0].message.content == "one two", model
        parts = litellm.completion(model, user("one two"), max_tokens=64, stream=True, **place)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two", model
        called = litellm.completion(model, user(CALL), tools=[TOOL], max_tokens=64, **place)
        [call] = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"zone": "CET"}, model
    found = litellm.embedding("openai/bge", ["fox"], api_base=f"{url}/v1", api_key=token)
    assert found.data[0]["embedding"] == [3.0, 1.0]
    found = litellm.rerank("cohere/rank", "fox", ["a dog", "a fox"], top_n=1, **place)
    assert found.results[0]["index"] == 1


@story
def langchain_openai(url: str, token: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(model="chat", base_url=f"{url}/v1", api_key=token, reasoning_effort="low")
    assert "".join(part.content for part in model.stream("one two")) == "one two"
    assert model.bind_tools([TOOL]).invoke(CALL).tool_calls[0]["args"] == {"zone": "CET"}
    schema = {"title": "time", **SCHEMA}
    form = model.with_structured_output(schema, method="json_schema")
    assert form.invoke('{"zone": "CET"}') == {"zone": "CET"}
    given = {"base_url": f"{url}/v1", "api_key": token, "check_embedding_ctx_length": False}
    assert OpenAIEmbeddings(model="bge", **given).embed_query("fox") == [3.0, 1.0]


@story
def langchain_anthropic(url: str, token: str) -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage

    model = ChatAnthropic(model="chat", base_url=url, api_key=token, max_retries=0)
    assert model.invoke("one two").content == "one two"
    assert model.get_num_tokens_from_messages([HumanMessage("one two")]) == 2


@story
def langchain_ollama(url: str, token: str) -> None:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    place = {"base_url": url, "client_kwargs": {"headers": {"Authorization": f"Bearer {token}"}}}
    model = ChatOllama(model="chat", num_ctx=2048, validate_model_on_init=True, **place)
    assert model.invoke("one two").content == "one two"
    assert model.bind_tools([TOOL]).invoke(CALL).tool_calls[0]["args"] == {"zone": "CET"}
    assert OllamaEmbeddings(model="bge", **place).embed_query("fox") == [3.0, 1.0]


@story
def llama_index_openai(url: str, token: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    given = {"model": "chat", "api_base": f"{url}/v1", "api_key": token, "is_chat_model": True}
    model = OpenAILike(**given)
    assert model.chat([ChatMessage(role="user", content="one two")]).message.content == "one two"
    assert "".join(part.delta or "" for part in model.stream_complete("one two")) == "one two"
    clock = FunctionTool.from_defaults(lambda zone: "It is noon.", name="time", description="It.")
    model = OpenAILike(**given, is_function_calling_model=True)
    answer = model.chat_with_tools([clock], user_msg=CALL)
    [call] = model.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"zone": "CET"}


@story
def llama_index_ollama(url: str, token: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.ollama import OllamaEmbedding
    from llama_index.llms.ollama import Ollama
    from ollama import AsyncClient, Client

    headers = {"Authorization": f"Bearer {token}"}
    clients = {
        "client": Client(host=url, headers=headers),
        "async_client": AsyncClient(host=url, headers=headers),
    }
    model = Ollama(model="chat", base_url=url, **clients)
    assert model.chat([ChatMessage(role="user", content="one two")]).message.content == "one two"
    given = {"base_url": url, "client_kwargs": {"headers": headers}}
    assert OllamaEmbedding("bge", **given).get_query_embedding("fox") == [3.0, 1.0]


@story
def instructor(url: str, token: str) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    said = json.dumps({"name": "Ann"})
    for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=token), mode=mode)
        chat = client.chat.completions
        found = chat.create(model="chat", messages=user(said), response_model=Person)
        assert found.name == "Ann"


@story
def pydantic_ai(url: str, token: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=token)
    agent = Agent(OpenAIChatModel("chat", provider=provider))

    agent.tool_plain(time)
    assert agent.run_sync(CALL).output == "It is noon."

    async def streamed() -> str:
        async with agent.run_stream("one two") as result:
            return await result.get_output()

    assert asyncio.run(streamed()) == "one two"


@story
def dspy(url: str, token: str) -> None:
    import dspy

    model = dspy.LM("openai/chat", api_base=f"{url}/v1", api_key=token, cache=False, num_retries=0)
    assert model("one two")[0] == "one two"


@story
def haystack(url: str, token: str) -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    generator = OpenAIChatGenerator(
        model="chat", api_base_url=f"{url}/v1", api_key=Secret.from_token(token)
    )
    [reply] = generator.run([ChatMessage.from_user("one two")])["replies"]
    assert reply.text == "one two"
    parts: list[str] = []
    generator.run(
        [ChatMessage.from_user("one two")],
        streaming_callback=lambda part: parts.append(part.content),
    )
    assert "".join(parts) == "one two"
    clock = Tool("time", "It.", SCHEMA, lambda zone: "It is noon.")
    [reply] = generator.run([ChatMessage.from_user(CALL)], tools=[clock])["replies"]
    assert reply.tool_calls[0].arguments == {"zone": "CET"}


@story
def smolagents(url: str, token: str) -> None:
    from smolagents import OpenAIModel

    model = OpenAIModel(model_id="chat", api_base=f"{url}/v1", api_key=token)
    content = [{"type": "text", "text": "one two"}]
    assert model.generate([{"role": "user", "content": content}]).content == "one two"
    parts = model.generate_stream([{"role": "user", "content": content}])
    assert "".join(part.content or "" for part in parts) == "one two"


@story
def semantic_kernel(url: str, token: str) -> None:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import (
        OpenAIChatCompletion,
        OpenAIChatPromptExecutionSettings,
    )
    from semantic_kernel.contents import ChatHistory

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token)
    service = OpenAIChatCompletion(ai_model_id="chat", async_client=client)
    history = ChatHistory()
    history.add_user_message("one two")
    settings = OpenAIChatPromptExecutionSettings()

    async def said() -> None:
        assert str(await service.get_chat_message_content(history, settings)) == "one two"
        parts = service.get_streaming_chat_message_content(history, settings)
        assert "".join([str(part) async for part in parts]) == "one two"

    asyncio.run(said())


@story
def autogen(url: str, token: str) -> None:
    from autogen_core.models import UserMessage
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = dict.fromkeys(("function_calling", "json_output", "structured_output"), True)
    info |= {"vision": False, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model="chat", base_url=f"{url}/v1", api_key=token, model_info=info
    )
    clock = {"name": "time", "description": "It.", "parameters": SCHEMA}

    async def said() -> None:
        messages = [UserMessage(content="one two", source="user")]
        assert (await client.create(messages)).content == "one two"
        *parts, _ = [part async for part in client.create_stream(messages)]
        assert "".join(parts) == "one two"
        called = await client.create([UserMessage(content=CALL, source="user")], tools=[clock])
        assert json.loads(called.content[0].arguments) == {"zone": "CET"}

    asyncio.run(said())


@story
def huggingface_hub(url: str, token: str) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=f"{url}/v1", api_key=token)
    parts = client.chat.completions.create(model="chat", messages=user("one two"), stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two"
    said = client.chat.completions.create(model="chat", messages=user(CALL), tools=[TOOL])
    assert said.choices[0].message.tool_calls[0].function.name == "time"


@story
def mistralai(url: str, token: str) -> None:
    from mistralai.client import Mistral

    client = Mistral(server_url=url, api_key=token)
    whole = client.chat.complete(model="chat", messages=user("one two"))
    assert whole.choices[0].message.content == "one two"
    parts = client.chat.stream(model="chat", messages=user("one two"))
    assert "".join(part.data.choices[0].delta.content or "" for part in parts) == "one two"
    said = client.chat.complete(model="chat", messages=user(CALL), tools=[TOOL])
    assert said.choices[0].message.tool_calls[0].function.name == "time"
    assert client.embeddings.create(model="bge", inputs=["fox"]).data[0].embedding == [3.0, 1.0]


@story
def llm(url: str, token: str) -> None:
    """The command, with the model in its own file of settings."""
    import llm as library

    row = {"model_id": "chat", "model_name": "chat", "api_base": f"{url}/v1"}
    row |= {"supports_tools": True, "api_key_name": "none"}
    file = library.user_dir() / "extra-openai-models.yaml"
    file.write_text(json.dumps([row]))
    model = library.get_model("chat")
    assert model.prompt("one two", key=token).text() == "one two"

    assert model.chain(CALL, tools=[time], key=token).text().endswith("It is noon.")


@story
def chatlas(url: str, token: str) -> None:
    from chatlas import ChatOpenAICompletions

    chat = ChatOpenAICompletions(base_url=f"{url}/v1", model="chat", api_key=token)
    assert str(chat.chat("one two", echo="none")) == "one two"

    chat.register_tool(time)
    assert "It is noon." in str(chat.chat(CALL, echo="none"))


@story
def agno(url: str, token: str) -> None:
    from agno.agent import Agent
    from agno.models.openai.like import OpenAILike

    model = OpenAILike(id="chat", base_url=f"{url}/v1", api_key=token)
    answer = Agent(model=model, tools=[time], telemetry=False).run(CALL)
    assert answer.content == "It is noon."


@story
def cohere(url: str, token: str) -> None:
    import cohere

    found = cohere.ClientV2(token, base_url=url).rerank(
        model="rank", query="fox", documents=["a dog", "a fox"], top_n=1
    )
    assert [row.index for row in found.results] == [1]


@story
def magentic(url: str, token: str) -> None:
    from magentic import FunctionCall, OpenaiChatModel, UserMessage
    from magentic.streaming import StreamedStr

    model = OpenaiChatModel("chat", base_url=f"{url}/v1", api_key=token)
    said = model.complete([UserMessage("one two")], output_types=[StreamedStr])
    assert "".join(said.content) == "one two"
    called = model.complete([UserMessage(CALL)], [time], [FunctionCall, str])
    assert called.content() == "It is noon."


@story
def mirascope(url: str, token: str) -> None:
    from mirascope import llm as library

    library.register_provider(
        "openai:completions", scope="openai/", base_url=f"{url}/v1", api_key=token
    )

    @library.call("openai/chat:completions", tools=[library.tool(time)])
    def said(text: str) -> str:
        return text

    assert said("one two").text() == "one two"
    assert "".join(said.stream("one two").text_stream()).strip() == "one two"
    called = said(CALL)
    assert called.resume(called.execute_tools()).text() == "It is noon."


@story
def outlines(url: str, token: str) -> None:
    import outlines as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    model = library.from_openai(OpenAI(base_url=f"{url}/v1", api_key=token), "chat")
    assert json.loads(model(json.dumps({"name": "Ann"}), Person)) == {"name": "Ann"}
    assert "".join(model.stream("one two")) == "one two"


@story
def strands(url: str, token: str) -> None:
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    given = {"base_url": f"{url}/v1", "api_key": token}
    model = OpenAIModel(client_args=given, model_id="chat")
    agent = Agent(model, tools=[tool(time)], callback_handler=None)
    assert "It is noon." in str(agent(CALL))


@story
def guidance(url: str, token: str) -> None:
    import guidance as library

    model = library.models.OpenAI("chat", base_url=f"{url}/v1", api_key=token, echo=False)
    with library.user():
        model += "one two"
    with library.assistant():
        model += library.gen("said", max_tokens=8)
    assert model["said"] == "one two"


@story
def lm_eval(url: str, token: str) -> None:
    """An evaluation without a data set: what its tasks ask of a model."""
    import os

    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = token
    given = {"model": "chat", "tokenizer_backend": None, "tokenized_requests": False}
    until = {"until": ["\n"], "max_gen_toks": 8}
    completions = LocalCompletionsAPI(base_url=f"{url}/v1/completions", **given)
    asked = Instance("generate_until", {}, ("one two", until), 0)
    assert completions.generate_until([asked]) == ["one two"]
    chat = LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **given)
    asked = Instance("generate_until", {}, (chat.apply_chat_template(user("one two")), until), 0)
    assert chat.generate_until([asked]) == ["one two"]


@story
def notebook_intelligence(url: str, token: str) -> None:
    """JupyterLab's extension, through its provider of Ollama's models."""
    import os

    os.environ |= {"OLLAMA_HOST": url, "OLLAMA_API_KEY": token}
    from notebook_intelligence.llm_providers import ollama_llm_provider as provider

    made = provider.OllamaLLMProvider()
    [model] = made.chat_models  # the one whose context is known
    assert (model.id, model.context_window) == ("sized", 4096)
    answer = model.completions(user(CALL), tools=[TOOL])
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": {"zone": "CET"}}
    inline = provider.OllamaInlineCompletionModel(made, "chat", "chat", 4096, "{prefix} {suffix}")
    assert inline.inline_completions("one", "two", "python", "a.py", None, None) == "one two"


@story
def crewai(url: str, token: str) -> None:
    import os

    os.environ |= {"OTEL_SDK_DISABLED": "true", "CREWAI_DISABLE_TELEMETRY": "true"}
    from crewai import LLM

    model = LLM(model="openai/chat", base_url=f"{url}/v1", api_key=token)
    assert model.call("one two") == "one two"


@story
def aider(url: str, token: str) -> None:
    """The command. The model repeats the instructions of the last message, whose example is a file."""
    import os
    import subprocess

    place = ["--openai-api-base", f"{url}/v1", "--openai-api-key", token]
    quiet = "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable"
    words = ["--model", "openai/chat", *place, *quiet.split(), "--message", "one two"]
    home = os.environ["HOME"]
    command = [sys.executable, "-m", "aider", *words]
    told = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
    assert "Applied edit to" in told.stdout


if __name__ == "__main__":
    name, url, token = sys.argv[1:]
    STORIES[name](url, token)
    print("ok")
