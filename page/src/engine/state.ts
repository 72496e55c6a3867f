// What /v1/engine/events says, as docs/server.md has it. Unknown numbers are null.

export interface EngineFacts {
  model: string;
  dtype: string;
  device: string;
  version: string;
  max_num_seqs: number;
  max_batched_tokens: number;
}

/** [how many blocks, owner (0 free, 1 cached, else a request's number), how many sequences hold each] */
export type Run = [number, number, number];

export interface Pool {
  name: string;
  /** In tokens; null of states, which are no runs of tokens. */
  block_size: number | null;
  total: number;
  free: number;
  cached: number;
  owned: number;
  /** Blocks in main memory, and how many it has room for. */
  swapped: number;
  swap_total: number;
  map: Run[];
  /** 1, or how many neighbours are shown as what most of them are. */
  cell: number;
}

export type RequestState = "running" | "waiting" | "swapped" | "images" | "adapter";

export interface EngineRequest {
  number: number;
  state: RequestState;
  adapter: string | null;
  prompt_tokens: number;
  cached_tokens: number;
  computed_tokens: number;
  output_tokens: number;
  sequences: number;
  blocks: number;
  seconds: number;
}

export interface Step {
  time: number;
  milliseconds: number;
  prefill_tokens: number;
  decode_tokens: number;
  sequences: number;
  media: number;
  adapters: number;
}

export type Tier = "device" | "host" | "disk";

export interface AdapterState {
  name: string;
  tier: Tier;
  bytes: number;
  rank: number | null;
  requests: number;
  pinned: boolean;
}

export interface Rates {
  prompt_tokens_per_second: number | null;
  output_tokens_per_second: number | null;
  requests_per_second: number | null;
  cache_hit_rate: number | null;
}

export interface EngineState {
  time: number;
  sleeping: boolean;
  engine: EngineFacts;
  pools: Pool[];
  requests: EngineRequest[];
  more_requests: number;
  steps: Step[];
  adapters: AdapterState[];
  more_adapters: number;
  rates: Rates;
}

/** How many seconds of rates and how many steps the page remembers. */
export const REMEMBERED_RATES = 240;
export const REMEMBERED_STEPS = 480;

/** What is shown: the newest state, when it came (seconds by this machine's clock), and the steps and rates of those before it. */
export interface History {
  state: EngineState;
  came: number;
  steps: Step[];
  rates: Rates[];
}

/**
 * The history with one state more, which comes now. A server that was started anew begins a new one: its engine began after
 * the last state had come.
 */
export function remember(before: History | null, state: EngineState, now: number): History {
  const goesOn = before !== null && now - state.time < before.came && state.time >= before.state.time &&
    before.state.engine.model === state.engine.model;
  const steps = goesOn ? [...before.steps, ...state.steps] : state.steps;
  const rates = goesOn ? [...before.rates, state.rates] : [state.rates];
  return { state, came: now, steps: steps.slice(-REMEMBERED_STEPS), rates: rates.slice(-REMEMBERED_RATES) };
}

const ORDER: RequestState[] = ["running", "swapped", "adapter", "images", "waiting"];

/** Those that run first, then those that wait, each in order of arrival. */
export function inOrder(requests: EngineRequest[]): EngineRequest[] {
  return [...requests].sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.number - b.number);
}

/** What a request's state means, for people. */
export const STATES: Record<RequestState, { label: string; why: string }> = {
  running: { label: "running", why: "has a part in the engine's steps" },
  waiting: { label: "waiting", why: "waits for its turn" },
  swapped: { label: "swapped", why: "made room: its blocks lie in main memory" },
  images: { label: "images", why: "its images are being fetched and prepared" },
  adapter: { label: "adapter", why: "waits for room for its adapter" },
};
