// The engine's view: what it makes of the events, without a browser.
import assert from "node:assert/strict";
import { test } from "node:test";
import { contrast, hueOfRequest, tone } from "../src/engine/colours";
import { colours, describeBlock, describeMap } from "../src/engine/owners";
import { blockAt, BlockMap, layOut, spans } from "../src/engine/runs";
import { sparkline } from "../src/engine/sparkline";
import { inOrder, remember, REMEMBERED_STEPS, type EngineRequest, type EngineState, type Step } from "../src/engine/state";
import { ceiling, describe, median, pauseBefore, prefillShare, shown } from "../src/engine/steps";

const step = (some: Partial<Step> = {}): Step => ({
  time: 1, milliseconds: 5, prefill_tokens: 0, decode_tokens: 1, sequences: 1, media: 0, adapters: 0, ...some,
});
const request = (some: Partial<EngineRequest> = {}): EngineRequest => ({
  number: 2, state: "running", adapter: null, prompt_tokens: 8, cached_tokens: 0, computed_tokens: 8,
  output_tokens: 0, sequences: 1, blocks: 1, seconds: 0, ...some,
});
const state = (some: Partial<EngineState> = {}): EngineState => ({
  time: 1, sleeping: false,
  engine: { model: "m", dtype: "float32", device: "cpu", version: "1", max_num_seqs: 4, max_batched_tokens: 64 },
  pools: [], requests: [], more_requests: 0, steps: [step()], adapters: [], more_adapters: 0,
  rates: { prompt_tokens_per_second: 1, output_tokens_per_second: 2, requests_per_second: null, cache_hit_rate: null },
  ...some,
});

test("every block is found in the run that has it", () => {
  const map = new BlockMap([[3, 1, 0], [2, 7, 2], [5, 0, 0]], 10);
  const owners = Array.from({ length: 10 }, (_, block) => map.owners[map.runOf(block)]);
  assert.deepEqual(owners, [1, 1, 1, 7, 7, 0, 0, 0, 0, 0]);
  assert.equal(map.sharedBlocks(), 2);
  assert.equal(map.reach(), 5);
});

test("runs that do not fit the pool are cut, and what is missing is free", () => {
  const long = new BlockMap([[3, 5, 1], [0, 6, 1], [9, 7, 1], [4, 8, 1]], 5);
  assert.deepEqual([...long.starts], [0, 3]);
  assert.deepEqual([...long.counts], [3, 2]);
  const short = new BlockMap([[2, 5, 1]], 6);
  assert.deepEqual([short.owners[short.runOf(1)], short.owners[short.runOf(2)], short.counts[1]], [5, 0, 4]);
  const empty = new BlockMap([], 0);
  assert.deepEqual([empty.length, empty.reach()], [0, 0]);
});

test("keys go from run to run, and stay at the ends", () => {
  const map = new BlockMap([[3, 1, 0], [2, 7, 2], [5, 0, 0]], 10);
  assert.deepEqual([0, 4, 9].map((block) => map.neighbour(block, true)), [3, 5, 9]);
  assert.deepEqual([0, 2, 3, 4, 9].map((block) => map.neighbour(block, false)), [0, 0, 0, 3, 5]);
});

test("a run's spans cover it, row by row, in the rows that are seen", () => {
  assert.deepEqual([...spans(3, 9, 5, 0, 10)], [
    { row: 0, first: 3, count: 2 },
    { row: 1, first: 0, count: 5 },
    { row: 2, first: 0, count: 2 },
  ]);
  assert.deepEqual([...spans(3, 9, 5, 1, 2)], [{ row: 1, first: 0, count: 5 }]);
  assert.deepEqual([...spans(3, 2, 5, 1, 9)], []);
});

test("spans of a large map cover each block once", () => {
  const map = new BlockMap(Array.from({ length: 1000 }, (_, i) => [1 + ((i * 37) % 200), i % 9, 1]), 100_000);
  const seen = new Uint8Array(100_000);
  for (let run = 0; run < map.length; run++) {
    for (const { row, first, count } of spans(map.starts[run]!, map.counts[run]!, 317, 0, 1e6)) {
      for (let cell = 0; cell < count; cell++) seen[row * 317 + first + cell]! += 1;
    }
  }
  assert.ok(seen.every((times) => times === 1));
});

test("cells are as large as fit, within bounds, and a place leads back to its block", () => {
  for (const total of [1, 10, 1000, 16_384, 100_000]) {
    const grid = layOut(total, 1100, 380, 0, 4, 15);
    assert.ok(grid.pitch >= 4 && grid.pitch <= 15);
    assert.ok(grid.rows * grid.columns >= total && (grid.rows - 1) * grid.columns < total);
    assert.ok(grid.pitch === 4 || grid.rows * grid.pitch <= 380);
    const last = total - 1;
    const x = (last % grid.columns) * grid.pitch + 1;
    assert.equal(blockAt(grid, total, x, Math.floor(last / grid.columns) * grid.pitch + 1), last);
  }
  const grid = layOut(7, 40, 100, 10, 4, 15);
  assert.deepEqual([blockAt(grid, 7, 39, 19), blockAt(grid, 7, -1, 0), blockAt(grid, 7, 41, 0)], [null, null, null]);
});

test("colours of requests stand out from the ground of both themes", () => {
  for (let number = 2; number < 400; number++) {
    const hue = hueOfRequest(number);
    assert.ok(contrast(tone(hue, "light"), "#fdfaf3") >= 3, `light ${hue}`);
    assert.ok(contrast(tone(hue, "dark"), "#1e1b16") >= 3, `dark ${hue}`);
  }
  assert.equal(Math.round(contrast("#000000", "#ffffff")), 21);
  assert.notEqual(tone(hueOfRequest(2), "light"), tone(hueOfRequest(3), "light"));
});

test("blocks are coloured by request or by adapter", () => {
  const pigment = (adapter: string | null) => `of ${adapter ?? "base"}`;
  const requests = [request({ number: 2, adapter: "french" }), request({ number: 3 })];
  const byAdapter = colours(requests, "adapter", "light", pigment);
  assert.deepEqual([2, 3, 9].map(byAdapter), ["of french", "of base", "of base"]);
  assert.equal(colours(requests, "request", "dark", pigment)(9), tone(hueOfRequest(9), "dark"));
});

test("blocks and maps are said in words", () => {
  const map = new BlockMap([[2, 1, 0], [2, 7, 3], [1, 8, 1], [4, 0, 0]], 9);
  const requests = [request({ number: 7, adapter: "french" })];
  assert.match(describeBlock(map, 0, requests), /^Block 0: cached/);
  assert.equal(describeBlock(map, 2, requests), "Block 2: shared by 3 sequences, first of request 7, french");
  assert.equal(describeBlock(map, 4, requests), "Block 4: of request 8");
  assert.match(describeBlock(map, 8, requests, 4), /^Blocks 8 to 8, most of them: free$/);
  const pool = { total: 9, owned: 3, cached: 2, free: 4, swapped: 0 };
  assert.equal(describeMap(map, pool), "Of 9 blocks: 3 owned, 2 cached, 4 free, 2 shared by several sequences.");
});

test("the history goes on, is bounded, and begins anew with the server", () => {
  const began = 5000; // by this machine's clock
  let history = remember(null, state(), began + 1);
  for (let i = 2; i < 2 + REMEMBERED_STEPS; i++) history = remember(history, state({ time: i, steps: [step({ time: i }), step({ time: i })] }), began + i);
  assert.equal(history.steps.length, REMEMBERED_STEPS);
  assert.equal(history.steps.at(-1)?.time, 1 + REMEMBERED_STEPS);
  const { came } = history;
  assert.equal(remember(history, state({ time: 0.5 }), came + 10).steps.length, 1);
  // The same one after an hour without a connection; another, which has been there for longer than the first when that was seen last.
  assert.equal(remember(history, state({ time: came - began + 3600 }), came + 3600).steps.length, REMEMBERED_STEPS);
  assert.equal(remember(history, state({ time: came - began + 60 }), came + 3600).steps.length, 1);
});

test("requests stand in the order of what they do", () => {
  const listed = [request({ number: 9 }), request({ number: 4, state: "waiting" }), request({ number: 3 }), request({ number: 8, state: "swapped" })];
  assert.deepEqual(inOrder(listed).map((one) => one.number), [3, 9, 8, 4]);
});

test("steps have a scale, a median, shares and words", () => {
  assert.deepEqual([3, 5, 7, 180].map((ms) => ceiling([step({ milliseconds: ms })])), [5, 5, 10, 200]);
  assert.equal(ceiling([]), 1);
  const usual = Array.from({ length: 30 }, () => step({ milliseconds: 4 }));
  assert.equal(ceiling([...usual, step({ milliseconds: 90_000 })]), 20);
  assert.equal(ceiling([...usual, step({ milliseconds: 9 })]), 10);
  assert.equal(median([]), null);
  assert.equal(median([5, 1, 3].map((ms) => step({ milliseconds: ms }))), 3);
  assert.equal(median([4, 2].map((ms) => step({ milliseconds: ms }))), 3);
  assert.equal(prefillShare(step({ prefill_tokens: 3 })), 0.75);
  assert.equal(prefillShare(step({ decode_tokens: 0 })), 0);
  assert.equal(shown(Array(500).fill(step()), 600).length, 100);
  assert.equal(pauseBefore(step({ time: 1 }), step({ time: 1.2, milliseconds: 100 })), 0);
  assert.ok(Math.abs(pauseBefore(step({ time: 1 }), step({ time: 3, milliseconds: 500 })) - 1.5) < 1e-9);
  assert.equal(pauseBefore(undefined, step()), 0);
  const words = describe(step({ prefill_tokens: 1200, decode_tokens: 2, sequences: 3, media: 1, adapters: 2 }));
  assert.equal(words, "5 ms · 3 sequences · 1,200 prompt tokens · 2 answer tokens · 1 image encoded · 2 adapters");
});

test("a sparkline ends at the right edge, and an area goes down to the floor", () => {
  assert.equal(sparkline([1], 240, 36, false), "");
  const line = sparkline([0, null, 4], 239, 36, false);
  assert.match(line, /^M237\.0,35\.0L238\.0,35\.0L239\.0,2\.0$/);
  assert.ok(sparkline([0, 4], 239, 36, true).endsWith("L239.0,36L238.0,36Z"));
  assert.ok(!sparkline([0, 0], 239, 36, false).includes("NaN"));
});
