// The map of a pool's blocks: a canvas of what is in sight, read by pointer and keys, with its sentence beside it.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { fit, property, useSize } from "./canvas";
import { drawMap } from "./drawMap";
import { colours, describeBlock, describeMap, type ColourBy } from "./owners";
import { blockAt, BlockMap as Decoded, layOut, type Grid } from "./runs";
import type { EngineRequest, Pool } from "./state";
import { MapLegend, SwappedOut } from "./MapLegend";
import { count, plural } from "../format";
import { shownTheme } from "../settings";
import { pigmentOf } from "../ui/pigment";

const HEIGHT = 380; // CSS pixels at most, without scrolling
const LEAST_REACH = 1024; // blocks
const LEAST = 4; // CSS pixels of a cell that fits, and the most
const MOST = 15;
// All blocks in sight; the part that was in use so far; cells of so many CSS pixels.
const ZOOMS = ["all", "used", 12, 18] as const;

interface Props {
  pool: Pool;
  requests: EngineRequest[];
  by: ColourBy;
  marked: number | null;
}

export function BlockMap({ pool, requests, by, marked }: Props) {
  const [zoom, setZoom] = useState(1);
  const [block, setBlock] = useState<number | null>(null);
  const [place, size] = useSize<HTMLDivElement>();
  const map = useMemo(() => new Decoded(pool.map, pool.total), [pool]);
  const reach = useReach(map);
  const scope = ZOOMS[zoom]!;
  const grid = layOut(
    scope === "used" ? reach : pool.total,
    Math.floor(size.width * size.scale),
    HEIGHT * size.scale,
    typeof scope === "number" ? Math.round(scope * size.scale) : 0,
    Math.round(LEAST * size.scale),
    Math.round(MOST * size.scale),
  );
  grid.rows = Math.max(1, Math.ceil(pool.total / grid.columns));
  const tall = Math.ceil((grid.rows * grid.pitch) / size.scale);
  const height = Math.min(tall, HEIGHT);
  const name = pool.name === "kv" ? "KV cache" : pool.name === "states" ? "States" : pool.name;
  return (
    <figure class="map" data-test="block-map" aria-label={`Map of the blocks of the ${name}`}>
      <div class="map-head">
        <h2>{name}</h2>
        <p class="hint">
          {plural(pool.total, "block")}
          {pool.block_size !== null && ` of ${plural(pool.block_size, "token")}`}
          {pool.cell > 1 && `; so many pieces that ${count(pool.cell)} neighbours are shown as what most of them are`}
        </p>
        <div class="zoom" role="group" aria-label="Size of the cells">
          <button type="button" class="quiet" aria-label="Smaller cells" disabled={zoom === 0} onClick={() => setZoom(zoom - 1)}>
            −
          </button>
          <button
            type="button"
            class="quiet"
            aria-label="Larger cells"
            disabled={zoom === ZOOMS.length - 1}
            onClick={() => setZoom(zoom + 1)}
          >
            +
          </button>
        </div>
      </div>
      <Shares pool={pool} />
      <div class="map-scroll" ref={place} style={{ height: `${height}px` }}>
        <div style={{ height: `${tall}px` }}>
          <Canvas {...{ map, grid, size, requests, by, marked, block, setBlock, height }} cell={pool.cell} />
        </div>
      </div>
      <p class="looked-at" data-test="block-said">
        {block === null ? "Point at a block, or walk through them with the arrow keys." : describeBlock(map, block, requests, pool.cell)}
      </p>
      <SwappedOut pool={pool} requests={requests} by={by} />
      <MapLegend pool={pool} shared={map.sharedBlocks()} />
      <figcaption class="unseen">{describeMap(map, pool)}</figcaption>
    </figure>
  );
}

/** How far into the pool blocks were in use so far, as a power of two: the cells change their size rarely. */
function useReach(map: Decoded): number {
  const most = useRef(LEAST_REACH);
  while (most.current < Math.min(map.reach(), map.total)) most.current *= 2;
  return Math.min(most.current, map.total);
}

interface CanvasProps extends Omit<Props, "pool"> {
  map: Decoded;
  grid: Grid;
  size: { width: number; height: number; scale: number };
  height: number;
  cell: number;
  block: number | null;
  setBlock(block: number | null): void;
}

function Canvas({ map, grid, size, requests, by, marked, block, setBlock, height, cell }: CanvasProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const theme = shownTheme.value;
  const draw = () => {
    const drawn = canvas.current;
    if (!drawn || size.width === 0) return;
    const pixels = { width: Math.floor(size.width * size.scale), height: Math.round(height * size.scale) };
    const context = fit(drawn, pixels.width, pixels.height);
    if (!context) return;
    const top = Math.round((drawn.parentElement?.parentElement?.scrollTop ?? 0) * size.scale);
    const pigment = (adapter: string | null) => property(drawn, `--${pigmentOf(adapter)}`);
    const palette = {
      ground: property(drawn, "--map-ground"),
      free: property(drawn, "--map-free"),
      cached: property(drawn, "--map-cached"),
      ink: property(drawn, "--map-ink"),
      owner: colours(requests, by, theme, pigment),
    };
    drawMap(context, map, grid, { top, ...pixels }, palette, { request: marked, block });
  };
  useFrame(draw, [map, grid.pitch, grid.columns, size, theme, by, marked, block, height]);
  useScroll(canvas, draw);

  const at = (event: PointerEvent) => {
    const drawn = canvas.current;
    if (!drawn) return;
    const frame = drawn.getBoundingClientRect();
    const top = drawn.parentElement?.parentElement?.scrollTop ?? 0;
    const y = event.clientY - frame.top + top;
    setBlock(blockAt(grid, map.total, (event.clientX - frame.left) * size.scale, y * size.scale));
  };
  const walk = (event: KeyboardEvent) => {
    const next = nextBlock(event, block ?? -1, map, grid.columns);
    if (next === null) return;
    event.preventDefault();
    setBlock(next);
    reveal(canvas.current, grid, next, size.scale, height);
  };
  return (
    <canvas
      ref={canvas}
      style={{ height: `${height}px` }}
      role="slider"
      tabIndex={0}
      aria-label="Block"
      aria-valuemin={0}
      aria-valuemax={Math.max(0, map.total - 1)}
      aria-valuenow={block ?? 0}
      aria-valuetext={block === null ? describeRuns(map) : describeBlock(map, block, requests, cell)}
      onPointerMove={at}
      onPointerDown={at}
      onPointerLeave={(event) => event.pointerType === "mouse" && setBlock(null)}
      onBlur={() => setBlock(null)}
      onKeyDown={walk}
    />
  );
}

function describeRuns(map: Decoded): string {
  return `None chosen; arrows go block by block and row by row, page up and down to where something else begins. ${count(map.total)} blocks.`;
}

/** Where a key leads from a block, or null where it leads nowhere. block: -1 where none is chosen. */
export function nextBlock(event: { key: string }, block: number, map: Decoded, columns: number): number | null {
  const last = map.total - 1;
  const within = (to: number) => Math.min(last, Math.max(0, to));
  switch (event.key) {
    case "ArrowRight":
      return within(block + 1);
    case "ArrowLeft":
      return within(block - 1);
    case "ArrowDown":
      return block + columns <= last ? within(block + columns) : within(block);
    case "ArrowUp":
      return block - columns >= 0 ? block - columns : within(block);
    case "PageDown":
      return block < 0 ? 0 : map.neighbour(block, true);
    case "PageUp":
      return block < 0 ? 0 : map.neighbour(block, false);
    case "Home":
      return 0;
    case "End":
      return last;
    default:
      return null;
  }
}

/** Scroll so that a block is in sight. */
function reveal(canvas: HTMLCanvasElement | null, grid: Grid, block: number, scale: number, height: number): void {
  const box = canvas?.parentElement?.parentElement;
  if (!box) return;
  const y = (Math.floor(block / grid.columns) * grid.pitch) / scale;
  if (y < box.scrollTop) box.scrollTop = y;
  else if (y + grid.pitch / scale > box.scrollTop + height) box.scrollTop = y + grid.pitch / scale - height;
}

/** Draw in the frame that shows what changed beside it; several changes make one drawing. */
function useFrame(draw: () => void, changes: unknown[]): void {
  useLayoutEffect(() => {
    const frame = requestAnimationFrame(draw);
    return () => cancelAnimationFrame(frame);
  }, changes);
}

function useScroll(canvas: { current: HTMLCanvasElement | null }, draw: () => void): void {
  const latest = useRef(draw);
  latest.current = draw;
  useEffect(() => {
    const box = canvas.current?.parentElement?.parentElement;
    if (!box) return;
    const scrolled = () => latest.current();
    box.addEventListener("scroll", scrolled, { passive: true });
    return () => box.removeEventListener("scroll", scrolled);
  }, []);
}

/** How much of the pool is what, as one bar. */
function Shares({ pool }: { pool: Pool }) {
  const share = (part: number) => `${(100 * part) / Math.max(1, pool.total)}%`;
  return (
    <div class="shares" aria-hidden="true">
      <span class="owned" style={{ width: share(pool.owned) }} />
      <span class="cached" style={{ width: share(pool.cached) }} />
    </div>
  );
}
