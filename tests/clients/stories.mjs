// One short story for each JavaScript library, as in stories.py. The test copies this file into the folder of the
// library, where `import` finds it: `node stories.mjs NAME URL TOKEN`.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";

const CALL = '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>';
const SCHEMA = { type: "object", properties: { zone: { type: "string" } }, required: ["zone"] };
const TOOL = { type: "function", function: { name: "time", description: "It.", parameters: SCHEMA } };
const messages = [{ role: "user", content: "one two" }];

async function joined(parts, text) {
  let whole = "";
  for await (const part of parts) whole += text(part) ?? "";
  return whole;
}

const stories = {
  async openai_js(url, token) {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: token, maxRetries: 0 });
    const parts = await client.chat.completions.create({ model: "chat", messages, stream: true });
    assert.equal(await joined(parts, (part) => part.choices[0]?.delta.content), "one two");
    const answer = await client.responses.create({ model: "chat", input: "one two" });
    assert.equal(answer.output_text, "one two");
    const run = client.chat.completions.runTools({
      model: "chat",
      messages: [{ role: "user", content: CALL }],
      tools: [{ ...TOOL, function: { ...TOOL.function, parse: JSON.parse, function: () => "It is noon." } }],
    });
    assert.equal(await run.finalContent(), "It is noon.");
    const vectors = await client.embeddings.create({ model: "bge", input: ["fox"] });
    assert.deepEqual(vectors.data[0].embedding, [3, 1]);
  },

  async anthropic_js(url, token) {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: token, maxRetries: 0 });
    const given = { model: "chat", max_tokens: 64 };
    assert.equal(await client.messages.stream({ ...given, messages }).finalText(), "one two");
    const tools = [{ name: "time", description: "It.", input_schema: SCHEMA }];
    const said = { ...given, tools, messages: [{ role: "user", content: CALL }] };
    assert.deepEqual((await client.messages.create(said)).content[0].input, { zone: "CET" });
  },

  async ollama_js(url, token) {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${token}` } });
    const parts = await client.chat({ model: "chat", messages, stream: true });
    assert.equal(await joined(parts, (part) => part.message.content), "one two");
    const called = await client.chat({ model: "chat", messages: [{ role: "user", content: CALL }], tools: [TOOL] });
    assert.deepEqual(called.message.tool_calls[0].function.arguments, { zone: "CET" });
    assert.deepEqual((await client.embed({ model: "bge", input: "fox" })).embeddings, [[3, 1]]);
  },

  async ai_sdk(url, token) {
    const { embed, generateObject, generateText, stepCountIs, streamText, tool } = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const { z } = await import("zod");
    const provider = createOpenAICompatible({
      name: "gpu",
      baseURL: `${url}/v1`,
      apiKey: token,
      includeUsage: true,
      supportsStructuredOutputs: true,
    });
    const model = provider("chat");
    const stream = streamText({ model, prompt: "one two" });
    assert.equal(await joined(stream.textStream, (part) => part), "one two");
    assert.ok((await stream.usage).outputTokens > 0);
    const clock = tool({ inputSchema: z.object({ zone: z.string() }), execute: async () => "It is noon." });
    const called = await generateText({ model, prompt: CALL, tools: { time: clock }, stopWhen: stepCountIs(3) });
    assert.equal(called.text, "It is noon.");
    const schema = z.object({ age: z.number().int().min(1) });
    const found = await generateObject({ model, prompt: '{"age": 3}', schema });
    assert.deepEqual(found.object, { age: 3 });
    const vector = await embed({ model: provider.textEmbeddingModel("bge"), value: "fox" });
    assert.deepEqual(vector.embedding, [3, 1]);
  },

  async langchain_js(url, token) {
    const { ChatOpenAI, OpenAIEmbeddings } = await import("@langchain/openai");
    const configuration = { baseURL: `${url}/v1` };
    const model = new ChatOpenAI({ model: "chat", apiKey: token, configuration });
    assert.equal(await joined(await model.stream("one two"), (part) => part.content), "one two");
    const called = await model.bindTools([TOOL]).invoke(CALL);
    assert.deepEqual(called.tool_calls[0].args, { zone: "CET" });
    const vectors = new OpenAIEmbeddings({ model: "bge", apiKey: token, configuration });
    assert.deepEqual(await vectors.embedQuery("fox"), [3, 1]);
  },

  async continue_js(url, token) {
    const { constructLlmApi } = await import("@continuedev/openai-adapters");
    const api = constructLlmApi({ provider: "openai", apiKey: token, apiBase: `${url}/v1/` });
    const { signal } = new AbortController();
    const parts = api.chatCompletionStream({ model: "chat", messages, stream: true }, signal);
    assert.equal(await joined(parts, (part) => part.choices[0]?.delta.content), "one two");
    const vectors = await api.embed({ model: "bge", input: ["fox"] });
    assert.deepEqual(vectors.data[0].embedding, [3, 1]);
  },

  // The command, with its model in a file of settings. It runs a command that the model calls for.
  async codex(url, token) {
    const settings = `
      model = "chat"
      model_provider = "gpu"
      web_search = "disabled"
      agents.enabled = false
      [model_providers.gpu]
      name = "gpu"
      base_url = "${url}/v1"
      env_key = "GPU_TOKEN"
      wire_api = "responses"`;
    mkdirSync(`${process.env.HOME}/.codex`);
    writeFileSync(`${process.env.HOME}/.codex/config.toml`, settings);
    const command = `${import.meta.dirname}/node_modules/.bin/codex`;
    const said = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "pwd"}}</tool_call>';
    const options = { env: { ...process.env, GPU_TOKEN: token }, cwd: process.env.HOME, stdio: ["ignore"], encoding: "utf8" };
    const told = execFileSync(command, ["exec", "--skip-git-repo-check", said], options);
    assert.match(told, /Process exited with code/);
  },
};

const [name, url, token] = process.argv.slice(2);
await stories[name](url, token);
console.log("ok");
