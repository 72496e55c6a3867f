// The engine's last steps: how long each took, and what was in it.
import { useEffect, useRef, useState } from "preact/hooks";
import { milliseconds } from "../format";
import { shownTheme } from "../settings";
import { fit, property, useSize } from "./canvas";
import { drawSteps } from "./drawSteps";
import { BAR, ceiling, describe, median, pauseBefore, shown } from "./steps";
import type { Step } from "./state";

const HEIGHT = 132;

export function Timeline({ steps }: { steps: Step[] }) {
  const [place, size] = useSize<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [chosen, setChosen] = useState<number | null>(null); // how many steps before the newest
  const theme = shownTheme.value;
  const visible = shown(steps, size.width);
  const marked = chosen === null || chosen >= visible.length ? null : visible.length - 1 - chosen;
  const top = ceiling(visible);
  useEffect(() => {
    const drawn = canvas.current;
    if (!drawn || size.width === 0) return;
    const frame = requestAnimationFrame(() => {
      const pixels = { width: Math.floor(size.width * size.scale), height: Math.round(HEIGHT * size.scale), scale: size.scale };
      const context = fit(drawn, pixels.width, pixels.height);
      if (!context) return;
      drawSteps(context, pixels, visible, top, marked, {
        ground: property(drawn, "--map-ground"),
        rule: property(drawn, "--map-rule"),
        decode: property(drawn, "--step-decode"),
        prefill: property(drawn, "--step-prefill"),
        ink: property(drawn, "--map-ink"),
      });
    });
    return () => cancelAnimationFrame(frame);
  }, [steps, size, theme, marked]);

  const at = (event: PointerEvent) => {
    const frame = canvas.current?.getBoundingClientRect();
    if (frame) setChosen(fromRight(frame.right - event.clientX, size.width, visible.length));
  };
  const walk = (event: KeyboardEvent) => {
    const next = nextStep(event, chosen, visible.length);
    if (next === undefined) return;
    event.preventDefault();
    setChosen(next);
  };
  const step = marked === null ? undefined : visible[marked];
  const said = step ? inWords(step, marked === null ? undefined : visible[marked - 1]) : summary(visible);
  return (
    <figure class="timeline" data-test="step-timeline" aria-label="Timeline of the engine's steps">
      <div class="map-head">
        <h2>Steps</h2>
        <p class="hint">the newest at the right</p>
      </div>
      <div class="plot" ref={place}>
        <span class="top" aria-hidden="true">
          {milliseconds(top)}
        </span>
        <canvas
          ref={canvas}
          style={{ height: `${HEIGHT}px` }}
          role="slider"
          tabIndex={0}
          aria-label="Step"
          aria-valuemin={0}
          aria-valuemax={Math.max(0, visible.length - 1)}
          aria-valuenow={marked ?? Math.max(0, visible.length - 1)}
          aria-valuetext={said}
          onPointerMove={at}
          onPointerDown={at}
          onPointerLeave={(event) => event.pointerType === "mouse" && setChosen(null)}
          onBlur={() => setChosen(null)}
          onKeyDown={walk}
        />
      </div>
      <p class="looked-at" data-test="step-said">
        {said}
      </p>
      <ul class="keys">
        <li>
          <i class="key decode" /> answer tokens
        </li>
        <li>
          <i class="key prefill" /> prompt tokens
        </li>
        <li>
          <i class="key media" /> images encoded
        </li>
        <li>
          <i class="key lora" /> adapters
        </li>
        <li>
          <i class="key pause" /> nothing to do
        </li>
      </ul>
    </figure>
  );
}

function inWords(step: Step, before: Step | undefined): string {
  const pause = pauseBefore(before, step);
  return pause > 0 ? `${describe(step)} · after ${milliseconds(pause * 1000)} with nothing to do` : describe(step);
}

function summary(steps: Step[]): string {
  const middle = median(steps);
  return middle === null ? "No step yet." : `${milliseconds(middle)} is the median of the last ${steps.length}.`;
}

/** Which step stands so far from the right edge; null where none does. */
function fromRight(distance: number, width: number, steps: number): number | null {
  if (distance < 0 || distance > width) return null;
  const index = Math.floor(distance / BAR);
  return index < steps ? index : null;
}

/** Where a key leads: steps before the newest, null for none; undefined where the key means nothing here. */
function nextStep(event: KeyboardEvent, chosen: number | null, steps: number): number | null | undefined {
  const last = steps - 1;
  if (last < 0) return undefined;
  switch (event.key) {
    case "ArrowLeft":
    case "ArrowDown":
      return chosen === null ? 0 : Math.min(last, chosen + 1);
    case "ArrowRight":
    case "ArrowUp":
      return chosen === null ? 0 : Math.max(0, chosen - 1);
    case "Home":
      return last;
    case "End":
      return 0;
    case "Escape":
      return null;
    default:
      return undefined;
  }
}
