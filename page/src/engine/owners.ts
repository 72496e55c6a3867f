// Whose a block is: its request, the request's adapter, and the colour of either.
import { count, plural } from "../format";
import type { Theme } from "../settings";
import { hueOfRequest, tone } from "./colours";
import { CACHED, FREE, type BlockMap } from "./runs";
import type { EngineRequest } from "./state";

export type ColourBy = "request" | "adapter";

/** The colour of an adapter, or of the base model (null): for a canvas a colour, else what CSS calls it. */
export type PigmentOf = (adapter: string | null) => string;

/** The colour of a request's blocks. */
export function colourOf(request: EngineRequest, by: ColourBy, theme: Theme, pigment: PigmentOf): string {
  return by === "request" ? tone(hueOfRequest(request.number), theme) : pigment(request.adapter);
}

/** The colour of an owner of blocks by its number, also of one that the list of requests has no room for. */
export function colours(requests: EngineRequest[], by: ColourBy, theme: Theme, pigment: PigmentOf): (owner: number) => string {
  const known = new Map(requests.map((request) => [request.number, colourOf(request, by, theme, pigment)]));
  return (owner) => known.get(owner) ?? (by === "request" ? tone(hueOfRequest(owner), theme) : pigment(null));
}

/** A block in words; of a map that shows `cell` neighbours as one, these. */
export function describeBlock(map: BlockMap, block: number, requests: EngineRequest[], cell = 1): string {
  const run = map.runOf(block);
  const owner = map.owners[run]!;
  const first = block - (block % cell);
  const last = Math.min(first + cell, map.total) - 1;
  const name = cell > 1 ? `Blocks ${count(first)} to ${count(last)}, most of them` : `Block ${count(block)}`;
  if (owner === FREE) return `${name}: free`;
  if (owner === CACHED) return `${name}: cached, found again by its prefix, taken when room is needed`;
  const request = requests.find((one) => one.number === owner);
  const whose = request ? `request ${owner}, ${request.adapter ?? "base model"}` : `request ${owner}`;
  const holders = map.shared[run]!;
  return holders > 1 ? `${name}: shared by ${plural(holders, "sequence")}, first of ${whose}` : `${name}: of ${whose}`;
}

/** What the whole map shows, in a sentence for those who do not see it. */
export function describeMap(map: BlockMap, pool: { total: number; owned: number; cached: number; free: number; swapped: number }): string {
  const parts = [`${count(pool.owned)} owned`, `${count(pool.cached)} cached`, `${count(pool.free)} free`];
  const shared = map.sharedBlocks();
  if (shared > 0) parts.push(`${count(shared)} shared by several sequences`);
  if (pool.swapped > 0) parts.push(`${count(pool.swapped)} swapped out to main memory`);
  return `Of ${plural(pool.total, "block")}: ${parts.join(", ")}.`;
}
