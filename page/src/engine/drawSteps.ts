// The timeline of steps on a canvas: a bar's height is the step's time, its filled part answers, its striped one prompts.
import { BAR, pauseBefore, prefillShare } from "./steps";
import type { Step } from "./state";

export interface StepPalette {
  ground: string;
  rule: string;
  decode: string;
  prefill: string;
  ink: string;
}

const LANE = 9; // CSS pixels of each of the two rows of marks below the bars

/** Draw steps, the newest at the right edge. top: milliseconds of the full height. marked: index of the chosen one. */
export function drawSteps(
  context: CanvasRenderingContext2D,
  size: { width: number; height: number; scale: number },
  steps: Step[],
  top: number,
  marked: number | null,
  palette: StepPalette,
): void {
  const { width, height, scale } = size;
  const bar = BAR * scale;
  const filled = bar - Math.max(1, Math.round(scale));
  const lane = LANE * scale;
  const floor = Math.round(height - 2 * lane);
  context.fillStyle = palette.ground;
  context.fillRect(0, 0, width, height);
  context.fillStyle = palette.rule;
  for (const part of [0, 0.5]) context.fillRect(0, Math.round(floor * part), width, Math.max(1, scale));
  context.fillRect(0, floor, width, Math.max(1, scale));
  const stripes = stripePattern(context, palette.prefill, Math.round(4 * scale));
  steps.forEach((step, index) => {
    const x = Math.round(width - (steps.length - index) * bar);
    const tall = Math.max(scale, Math.min(1, step.milliseconds / top) * floor);
    const prefill = Math.round(tall * prefillShare(step));
    if (prefill > 0) {
      context.fillStyle = stripes;
      context.fillRect(x, floor - tall, filled, prefill);
      context.fillStyle = palette.prefill; // a lid, so that a striped part ends plainly
      context.fillRect(x, floor - tall, filled, Math.max(1, scale));
    }
    context.fillStyle = palette.decode;
    context.fillRect(x, floor - tall + prefill, filled, tall - prefill);
    if (step.milliseconds > top) {
      context.fillStyle = palette.ground; // longer than there is room: the bar is broken
      context.fillRect(x, Math.round(8 * scale), filled, Math.round(3 * scale));
    }
    if (pauseBefore(steps[index - 1], step) > 0) pause(context, x, floor, scale, palette.ink);
    if (step.media > 0) diamond(context, x + filled / 2, floor + lane / 2 + scale, lane / 3, palette.ink);
    if (step.adapters > 0) adapters(context, x, floor + lane + scale, filled, lane, step.adapters, palette.ink);
    if (index === marked) frame(context, x, filled, floor, scale, palette.ink);
  });
}

function pause(context: CanvasRenderingContext2D, x: number, floor: number, scale: number, ink: string): void {
  context.fillStyle = ink;
  const dash = 3 * scale;
  for (let y = 0; y < floor; y += 2 * dash) context.fillRect(Math.round(x - scale), y, Math.max(1, scale), dash);
}

function diamond(context: CanvasRenderingContext2D, x: number, y: number, radius: number, ink: string): void {
  context.fillStyle = ink;
  context.beginPath();
  context.moveTo(x, y - radius);
  context.lineTo(x + radius, y);
  context.lineTo(x, y + radius);
  context.lineTo(x - radius, y);
  context.fill();
}

/** A line for each adapter of a step, three at most. */
function adapters(context: CanvasRenderingContext2D, x: number, y: number, width: number, lane: number, number: number, ink: string): void {
  context.fillStyle = ink;
  const line = Math.max(1, Math.round(lane / 6));
  for (let one = 0; one < Math.min(3, number); one++) context.fillRect(x, Math.round(y + one * line * 2), width, line);
}

function frame(context: CanvasRenderingContext2D, x: number, width: number, floor: number, scale: number, ink: string): void {
  context.strokeStyle = ink;
  context.lineWidth = Math.max(1, scale);
  context.strokeRect(x - scale, scale, width + 2 * scale, floor - scale);
}

function stripePattern(context: CanvasRenderingContext2D, colour: string, side: number): CanvasPattern | string {
  const tile = document.createElement("canvas");
  tile.width = side;
  tile.height = side;
  const inside = tile.getContext("2d");
  if (!inside) return colour;
  inside.fillStyle = colour;
  inside.fillRect(0, 0, side, Math.max(1, Math.round(side / 2)));
  return context.createPattern(tile, "repeat") ?? colour;
}
