// The map of blocks on a canvas. Shape says what a block is, colour only whose: a free one is a dot, a cached one a low
// bar, an owned one a full cell, and one that several sequences hold is a full cell with a line through it, like two
// leaves.
import { CACHED, FREE, spans, type BlockMap, type Grid } from "./runs";

export interface Palette {
  ground: string;
  free: string;
  cached: string;
  ink: string;
  owner(number: number): string;
}

export interface Window {
  top: number;
  width: number;
  height: number;
}

export interface Marks {
  /** Of this request alone the blocks are bright. */
  request: number | null;
  /** The block that is looked at. */
  block: number | null;
}

const DIMMED = 0.22;

/** Sizes of a cell's parts, in pixels of the device. */
export function cellOf(pitch: number): { side: number; dot: number; bar: number; line: number } {
  const side = pitch - Math.max(1, Math.round(pitch / 8));
  const dot = pitch < 8 ? 1 : Math.max(2, Math.round(side / 5));
  return { side, dot, bar: Math.max(1, Math.round(side * 0.4)), line: Math.max(1, Math.round(side / 6)) };
}

type Context = CanvasRenderingContext2D;

/** Draw the rows within a window of the picture. Everything is in pixels of the device. */
export function drawMap(context: Context, map: BlockMap, grid: Grid, window: Window, palette: Palette, marks: Marks): void {
  const { pitch } = grid;
  const { side, bar, line } = cellOf(pitch);
  const fromRow = Math.floor(window.top / pitch);
  const toRow = Math.min(grid.rows, Math.ceil((window.top + window.height) / pitch));
  context.globalAlpha = 1;
  context.fillStyle = palette.ground;
  context.fillRect(0, 0, window.width, window.height);
  const dots = dotPattern(context, pitch, palette.free, fromRow * pitch - window.top);
  const first = map.runOf(Math.min(fromRow * grid.columns, Math.max(0, map.total - 1)));
  for (let run = first; run < map.length; run++) {
    const start = map.starts[run]!;
    if (start >= toRow * grid.columns) break;
    const owner = map.owners[run]!;
    const dimmed = marks.request !== null && owner !== marks.request && owner > CACHED;
    context.globalAlpha = dimmed ? DIMMED : 1;
    context.fillStyle = owner === FREE ? dots : owner === CACHED ? palette.cached : palette.owner(owner);
    for (const span of spans(start, map.counts[run]!, grid.columns, fromRow, toRow)) {
      const x = span.first * pitch;
      const y = span.row * pitch - window.top;
      const width = span.count * pitch;
      if (owner === FREE) context.fillRect(x, y, width, pitch);
      else if (owner === CACHED) context.fillRect(x, y + side - bar, width, bar);
      else if (map.shared[run]! < 2) context.fillRect(x, y, width, side);
      else {
        const middle = (side - line) >> 1;
        context.fillRect(x, y, width, middle);
        context.fillRect(x, y + middle + line, width, side - middle - line);
      }
    }
  }
  context.globalAlpha = 1;
  cut(context, grid, side, window, palette.ground);
  if (marks.block !== null) ring(context, grid, marks.block, window, palette);
}

/** Runs were drawn as bars; the gaps between their cells are cut out of all rows at once. */
function cut(context: Context, grid: Grid, side: number, window: Window, ground: string): void {
  context.fillStyle = ground;
  for (let column = 1; column <= grid.columns; column++) {
    context.fillRect(column * grid.pitch - (grid.pitch - side), 0, grid.pitch - side, window.height);
  }
}

/** A frame around one block, and a line around that, so that it is seen on any ground. */
function ring(context: Context, grid: Grid, block: number, window: Window, palette: Palette): void {
  const { pitch } = grid;
  const { side } = cellOf(pitch);
  const x = (block % grid.columns) * pitch;
  const y = Math.floor(block / grid.columns) * pitch - window.top;
  const width = Math.max(2, Math.round(pitch / 5));
  context.lineWidth = width * 2;
  context.strokeStyle = palette.ground;
  context.strokeRect(x - width, y - width, side + width * 2, side + width * 2);
  context.lineWidth = width;
  context.strokeStyle = palette.ink;
  context.strokeRect(x - width, y - width, side + width * 2, side + width * 2);
}

/** One free cell, repeated: a fill for as many of them as there are. offset: where a row begins. */
function dotPattern(context: Context, pitch: number, colour: string, offset: number): CanvasPattern | string {
  const { side, dot } = cellOf(pitch);
  const tile = document.createElement("canvas");
  tile.width = pitch;
  tile.height = pitch;
  const inside = tile.getContext("2d");
  if (!inside) return "transparent";
  inside.fillStyle = colour;
  const middle = (side - dot) >> 1;
  inside.fillRect(middle, middle, dot, dot);
  const pattern = context.createPattern(tile, "repeat");
  pattern?.setTransform(new DOMMatrix([1, 0, 0, 1, 0, offset]));
  return pattern ?? "transparent";
}
