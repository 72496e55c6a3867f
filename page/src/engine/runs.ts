// The map of KV blocks: runs decoded, blocks found, cells laid out. No canvas in here.

import type { Run } from "./state";

export const FREE = 0;
export const CACHED = 1;

/** Runs with where they begin, so that a block is found by bisection. */
export class BlockMap {
  readonly total: number;
  readonly starts: Uint32Array;
  readonly counts: Uint32Array;
  readonly owners: Uint32Array;
  readonly shared: Uint32Array;

  /** total: blocks of the pool. Runs past it are cut, and what no run covers is free: a picture never breaks. */
  constructor(runs: readonly Run[], total: number) {
    const starts: number[] = [];
    const kept: Run[] = [];
    let start = 0;
    for (const [count, owner, shared] of runs) {
      const room = Math.min(count, total - start);
      if (!(room > 0)) continue;
      starts.push(start);
      kept.push([room, owner, shared]);
      start += room;
    }
    if (start < total) {
      starts.push(start);
      kept.push([total - start, FREE, 0]);
    }
    this.total = total;
    this.starts = Uint32Array.from(starts);
    this.counts = Uint32Array.from(kept, (run) => run[0]);
    this.owners = Uint32Array.from(kept, (run) => run[1]);
    this.shared = Uint32Array.from(kept, (run) => run[2]);
  }

  get length(): number {
    return this.starts.length;
  }

  /** The index of the run that has a block. */
  runOf(block: number): number {
    let low = 0;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle]! <= block) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The first block of the next run, or of the one before; the same block at an end. */
  neighbour(block: number, forward: boolean): number {
    const run = this.runOf(block);
    if (forward) return run + 1 < this.length ? this.starts[run + 1]! : block;
    if (block > this.starts[run]!) return this.starts[run]!;
    return run > 0 ? this.starts[run - 1]! : block;
  }

  /** How many blocks there are up to the last one that is not free. */
  reach(): number {
    for (let run = this.length - 1; run >= 0; run--) {
      if (this.owners[run] !== FREE) return this.starts[run]! + this.counts[run]!;
    }
    return 0;
  }

  /** How many blocks more than one sequence holds. */
  sharedBlocks(): number {
    let blocks = 0;
    for (let run = 0; run < this.length; run++) if (this.shared[run]! > 1) blocks += this.counts[run]!;
    return blocks;
  }
}

/** A part of one row: cells first..first + count of row `row`. */
export interface Span {
  row: number;
  first: number;
  count: number;
}

/** The rows' parts that blocks start..start + count cover, of those rows that are to be seen. */
export function* spans(start: number, count: number, columns: number, fromRow: number, toRow: number): Generator<Span> {
  const end = Math.min(start + count, toRow * columns);
  let block = Math.max(start, fromRow * columns);
  while (block < end) {
    const row = Math.floor(block / columns);
    const rowEnd = Math.min((row + 1) * columns, end);
    yield { row, first: block - row * columns, count: rowEnd - block };
    block = rowEnd;
  }
}

export interface Grid {
  pitch: number;
  columns: number;
  rows: number;
}

/**
 * Cells for `total` blocks in a width, in pixels of the device.
 *
 * pitch: 0 takes the largest cells that fit into the height, between least and most.
 */
export function layOut(total: number, width: number, height: number, pitch: number, least: number, most: number): Grid {
  const grid = (side: number): Grid => {
    const columns = Math.max(1, Math.floor(width / side));
    return { pitch: side, columns, rows: Math.max(1, Math.ceil(total / columns)) };
  };
  if (pitch > 0) return grid(pitch);
  for (let side = most; side > least; side--) {
    const fitting = grid(side);
    if (fitting.rows * side <= height) return fitting;
  }
  return grid(least);
}

/** The block at a place of the picture, or null: between the last block and the end of its row. */
export function blockAt(grid: Grid, total: number, x: number, y: number): number | null {
  const column = Math.floor(x / grid.pitch);
  const row = Math.floor(y / grid.pitch);
  if (column < 0 || row < 0 || column >= grid.columns) return null;
  const block = row * grid.columns + column;
  return block < total ? block : null;
}
