// The timeline of steps: which are shown, how high, and what is said of one. No canvas in here.
import { milliseconds, plural } from "../format";
import type { Step } from "./state";

export const BAR = 6; // CSS pixels of a step, its gap with it
const IDLE = 0.25; // seconds without a step that are shown as a pause

/** The newest steps that a width has room for. */
export function shown(steps: Step[], width: number): Step[] {
  return steps.slice(-Math.max(1, Math.floor(width / BAR)));
}

/**
 * The least of 1, 2, 5, 10, 20, ... that is no less than all milliseconds, but for a few steps that took far longer than
 * the others: they would make these invisible, and are cut.
 */
export function ceiling(steps: Step[]): number {
  const sorted = steps.map((step) => step.milliseconds).sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.95 * (sorted.length - 1))] ?? 1;
  const most = Math.max(1, Math.min(sorted[sorted.length - 1] ?? 1, 5 * usual));
  let unit = 1;
  while (unit * 10 < most) unit *= 10;
  return [1, 2, 5, 10].map((part) => part * unit).find((part) => part >= most) ?? most;
}

/** Seconds in which nothing ran before a step, 0 where it followed soon. time: when a step ended. */
export function pauseBefore(before: Step | undefined, step: Step): number {
  if (!before) return 0;
  const pause = step.time - step.milliseconds / 1000 - before.time;
  return pause >= IDLE ? pause : 0;
}

/** The share of a step's tokens that were prompts', 0..1. */
export function prefillShare(step: Step): number {
  const tokens = step.prefill_tokens + step.decode_tokens;
  return tokens > 0 ? step.prefill_tokens / tokens : 0;
}

/** The middle of all milliseconds; null of no steps. */
export function median(steps: Step[]): number | null {
  if (steps.length === 0) return null;
  const sorted = steps.map((step) => step.milliseconds).sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle]! : (sorted[middle - 1]! + sorted[middle]!) / 2;
}

/** A step in words. */
export function describe(step: Step): string {
  const parts = [milliseconds(step.milliseconds), plural(step.sequences, "sequence")];
  if (step.prefill_tokens > 0) parts.push(`${plural(step.prefill_tokens, "prompt token")}`);
  if (step.decode_tokens > 0) parts.push(`${plural(step.decode_tokens, "answer token")}`);
  if (step.media > 0) parts.push(`${plural(step.media, "image")} encoded`);
  if (step.adapters > 0) parts.push(plural(step.adapters, "adapter"));
  return parts.join(" · ");
}
