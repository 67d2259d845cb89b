// ollama for Node.js: chats whole and streamed, with a tool, a format and thinking; generate, show, list and ps.
//
//     node ollama_js.mjs LIBRARY URL MODEL
//
// Prints the turns of each conversation, as [prompt, cached, output] tokens.

import assert from 'node:assert/strict'

const [library, host, model] = process.argv.slice(2)
const { Ollama } = await import(library)
const client = new Ollama({ host })
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
const tools = [{ type: 'function', function: { name: 'get_weather', description: 'Weather.', parameters } }]
const conversations = []

async function turn(messages, stream, options = {}) {
  const answer = await client.chat({ model, messages, stream, ...options })
  let last = answer
  const message = { role: 'assistant', content: '' }
  for await (const part of stream ? answer : [answer]) {
    last = part
    message.content += part.message.content
    if (part.message.thinking) message.thinking = (message.thinking ?? '') + part.message.thinking
    if (part.message.tool_calls) message.tool_calls = [...(message.tool_calls ?? []), ...part.message.tool_calls]
  }
  messages.push(message)
  return [message, [last.prompt_eval_count, last.cached_prompt_count, last.eval_count]]
}

for (const stream of [false, true]) {
  const user = (content) => ({ role: 'user', content })
  let messages = [user(`Stream ${stream}. My name is Nora.`)]
  let [first, cost] = await turn(messages, stream)
  messages.push(user('What is my name?'))
  let [second, more] = await turn(messages, stream)
  assert.equal(second.content, 'Your name is Nora.')
  conversations.push([cost, more])

  messages = [user(`Stream ${stream}: the weather in Paris?`)]
  ;[first, cost] = await turn(messages, stream, { tools })
  assert.deepEqual(first.tool_calls[0].function, { name: 'get_weather', arguments: { city: 'Paris' } })
  messages.push({ role: 'tool', tool_name: 'get_weather', content: 'It is sunny' })
  ;[second, more] = await turn(messages, stream, { tools })
  assert.equal(second.content, 'Take a hat.')
  conversations.push([cost, more])

  messages = [user(`Stream ${stream}: think hard.`)]
  ;[first, cost] = await turn(messages, stream, { think: true })
  assert.deepEqual([first.thinking, first.content], ['Hm, so.', 'It is 42.'])
  messages.push(user('What is my name?'))
  conversations.push([cost, (await turn(messages, stream, { think: true }))[1]])
}
const [person, cost] = await turn([{ role: 'user', content: 'Who is 30?' }], false, { format: 'json' })
assert.deepEqual(JSON.parse(person.content), { name: 'Nora', age: 30 })
conversations.push([cost])
assert.equal((await client.generate({ model, prompt: '' })).done_reason, 'load')
const [shown, listed, running] = await Promise.all([client.show({ model }), client.list(), client.ps()])
assert.deepEqual(shown.capabilities, ['completion', 'tools'])
assert.equal(listed.models[0].name, running.models[0].name)
assert.ok((await client.version()).version)
console.log(JSON.stringify(conversations))
