// Run llama.cpp in a process of its own, through the package node-llama-cpp, for benchmarks/llama_cpp.py.
//
//     node peer.mjs FOLDER        FOLDER has node_modules/node-llama-cpp
//
// Each line of the input is a command as a JSON object, each line of the output its reply; `worker.py` lists them.
//
// A sequence of the context keeps the KV of its last prompt and reply. A prompt goes to the free sequence with the
// longest common prefix, and only the tokens after that prefix are evaluated: this is llama.cpp's prompt cache. Where
// several prompts of one command share a longer prefix than any sequence holds, it is evaluated once, and its KV is
// copied to the other sequences. `_copyStateFromOtherSequence` is internal to the package, which copies that way for
// its own parallel decisions; it calls llama_memory_seq_cp and is faster than saving and loading the state.

import {readFileSync} from "node:fs";
import path from "node:path";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const WORTH_COPYING = 32; // tokens of a shared prefix
const MILLION = 1e6;

let model = null;
let llama = null;
let sequences = [];
let evaluated = 0;

const commands = {
    async load({model: file, threads, streams, context, settings}) {
        const folder = path.join(process.argv[2], "node_modules", "node-llama-cpp");
        const {getLlama} = await import(pathToFileURL(path.join(folder, "dist", "index.js")).href);
        llama = await getLlama({gpu: false, build: "never", logLevel: "error", progressLogs: false, maxThreads: threads});
        model = await llama.loadModel({modelPath: file});
        const made = await model.createContext({
            sequences: streams,
            contextSize: context,
            threads: {ideal: threads, min: threads},
            flashAttention: settings.flash,
            experimentalKvCacheKeyType: settings.kv,
            experimentalKvCacheValueType: settings.kv,
            failedCreationRemedy: false
        });
        sequences = Array.from({length: streams}, () => made.getSequence());
        const {version} = JSON.parse(readFileSync(path.join(folder, "package.json"), "utf8"));
        return {versions: {"node-llama-cpp": version, "llama.cpp": llama.llamaCppRelease.release, node: process.versions.node}};
    },

    tokenize({texts}) {
        return {ids: texts.map((text) => Array.from(model.tokenize(text, true, "trimLeadingSpace")))};
    },

    async generate({prompts, tokens}) {
        const clock = clockFromNow();
        const before = evaluated;
        const chosen = choose(prompts);
        await share(prompts, chosen);
        const streams = await Promise.all(prompts.map((prompt, row) => stream(chosen[row], prompt, tokens, clock)));
        return {
            replies: streams.map(({reply}) => reply),
            first: streams.map(({first}) => first),
            total: clock(),
            computed: evaluated - before
        };
    },

    usage() {
        const {user, system} = process.cpuUsage();
        return {cpu_s: (user + system) / MILLION, peak_mb: peakBytes() / MILLION};
    }
};

// The free sequence with the longest common prefix for each prompt, in turn.
function choose(prompts) {
    const free = new Set(sequences);
    return prompts.map((prompt) => {
        let best = null;
        for (const each of free)
            if (best == null || held(each, prompt) > held(best, prompt))
                best = each;
        free.delete(best);
        return best;
    });
}

function held(sequence, prompt) {
    return Math.min(sequence.compareContextTokens(prompt).firstDifferentIndex, prompt.length - 1);
}

async function share(prompts, chosen) {
    const shared = prompts.length > 1 ? commonPrefix(prompts) : 0;
    const cached = Math.min(...prompts.map((prompt, row) => held(chosen[row], prompt)));
    if (shared < cached + WORTH_COPYING)
        return;
    const [source, ...others] = chosen;
    const prefix = prompts[0].slice(0, shared);
    const missing = await cut(source, [...prefix, -1]);
    await source.evaluateWithoutGeneratingNewTokens(missing.slice(0, -1));
    evaluated += missing.length - 1;
    for (const each of others)
        if (!await each._copyStateFromOtherSequence(source, shared))
            throw new Error("the KV of a sequence could not be copied");
}

function commonPrefix(prompts) {
    const shortest = Math.min(...prompts.map((prompt) => prompt.length)) - 1;
    let length = 0;
    while (length < shortest && prompts.every((prompt) => prompt[length] === prompts[0][length]))
        length++;
    return length;
}

// Erase the tokens of the sequence that differ from the prompt, and return the tokens of the prompt that it lacks.
async function cut(sequence, prompt) {
    const keep = held(sequence, prompt);
    if (keep < sequence.nextTokenIndex)
        await sequence.eraseContextTokenRanges([{start: keep, end: sequence.nextTokenIndex}]);
    return prompt.slice(sequence.nextTokenIndex);
}

async function stream(sequence, prompt, tokens, clock) {
    const missing = await cut(sequence, prompt);
    const reply = [];
    let first = null;
    for await (const token of sequence.evaluate(missing, {temperature: 0, yieldEogToken: true})) {
        first ??= clock();
        reply.push(token);
        if (reply.length === tokens)
            break;
    }
    evaluated += missing.length + tokens - 1;
    return {reply, first};
}

function clockFromNow() {
    const cpu = process.cpuUsage();
    const wall = process.hrtime.bigint();
    return () => {
        const {user, system} = process.cpuUsage(cpu);
        return {cpu_ms: (user + system) / 1e3, wall_ms: Number(process.hrtime.bigint() - wall) / MILLION};
    };
}

function peakBytes() {
    try {
        const status = readFileSync("/proc/self/status", "utf8");
        return Number(status.match(/^VmHWM:\s+(\d+) kB/m)[1]) * 1024;
    } catch {
        return process.resourceUsage().maxRSS * 1024;
    }
}

for await (const line of createInterface({input: process.stdin})) {
    let reply;
    try {
        const {command, ...options} = JSON.parse(line);
        reply = await commands[command](options);
    } catch (error) {
        reply = {error: String(error?.message ?? error)};
    }
    process.stdout.write(JSON.stringify(reply) + "\n");
}
process.exit(0);
