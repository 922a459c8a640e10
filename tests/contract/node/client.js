// The npm client before the gateway: node client.js URL CASE prints one JSON line for each thing seen.
import OpenAI from "openai";

const [url, which] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 20_000 });
const model = "sim-model";
const messages = [{ role: "user", content: "Say something." }];
const say = (value) => process.stdout.write(JSON.stringify(value) + "\n");

async function failure(work) {
  try {
    await work();
  } catch (error) {
    const { status, code, type, message } = error;
    return { name: error.constructor.name, status, code, type, message };
  }
  return { name: null };
}

async function streamed({ told, ...params }) {
  const pieces = [];
  let usage = null;
  const stream = await client.chat.completions.create({ model, messages, ...params, stream: true });
  for await (const chunk of stream) {
    pieces.push(chunk.choices[0]?.delta?.content ?? "");
    usage = chunk.usage ?? usage;
    if (pieces.length === 3 && told) say("begun");
  }
  return { text: pieces.join(""), pieces: pieces.length, usage };
}

const cases = {
  async chat() {
    const { data, response } = await client.chat.completions
      .create({ model, messages, max_tokens: 8 })
      .withResponse();
    const replica = response.headers.get("x-kvroute-replica");
    return { text: data.choices[0].message.content, usage: data.usage, replica };
  },
  async stream() {
    return streamed({ max_tokens: 8, stream_options: { include_usage: true } });
  },
  async completion() {
    const answer = await client.completions.create({ model, prompt: "Once", max_tokens: 4 });
    return { text: answer.choices[0].text };
  },
  async models() {
    const names = [];
    for await (const each of client.models.list()) names.push(each.id);
    return names;
  },
  async errors() {
    const ask = (fields) => client.chat.completions.create({ model, messages, ...fields });
    return {
      unknown: await failure(() => ask({ model: "nope" })),
      bad: await failure(() => ask({ max_tokens: 1e9 })),
      malformed: await failure(() => ask({ messages: 5 })),
      route: await failure(() => client.get("/nowhere/at/all")),
    };
  },
  async timeout() {
    return failure(() => client.chat.completions.create({ model, messages, max_tokens: 4000 }, { timeout: 500 }));
  },
  async leave() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 4000, stream: true });
    for await (const _ of stream) break; // ends the iteration, which aborts the request
    return { left: true };
  },
  async cut() {
    return failure(() => streamed({ max_tokens: 4000, told: true }));
  },
  async cut_whole() {
    say("begun");
    return failure(() => client.chat.completions.create({ model, messages, max_tokens: 4000 }));
  },
};

say(await cases[which]());
