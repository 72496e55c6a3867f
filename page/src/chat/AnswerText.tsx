import { computed } from "@preact/signals";
import { useRef, useState } from "preact/hooks";
import { current } from "../store";
import { memo } from "../ui/memo";
import type { Token } from "./types";

/** Whether the tokens of the conversation that is shown are shaded. */
export const shading = computed(() => current.value?.options.logprobs ?? false);

const LEAST = 1200; // characters of a block of text; it ends with a line
const TOKENS = 100; // of a block of tokens

/** A long text as blocks, so that a new token touches the last of them alone. Exactly as it came: nothing is markup. */
export function PlainText({ text }: { text: string }) {
  return (
    <div class="text">
      {blocksOf(text).map((block, place) => (
        <Block key={place} text={block} />
      ))}
    </div>
  );
}

const Block = memo(({ text }: { text: string }) => (
  <div class="block" dir="auto">
    {text}
  </div>
));

function blocksOf(text: string): string[] {
  const blocks: string[] = [];
  let from = 0;
  while (text.length - from > LEAST) {
    const end = text.indexOf("\n", from + LEAST);
    if (end < 0) break;
    blocks.push(text.slice(from, end));
    from = end + 1;
  }
  blocks.push(text.slice(from));
  return blocks;
}

/** The tokens of an answer, darker where they were unlikely. One of them is in the order of the Tab key; arrows lead on. */
export function ShadedText({ tokens, text }: { tokens: Token[]; text: string }) {
  const [at, setAt] = useState<{ place: number; left: number; top: number } | null>(null);
  const frame = useRef<HTMLDivElement>(null);
  const show = (target: EventTarget | null) => {
    const span = target instanceof HTMLElement ? target.closest<HTMLElement>("[data-token]") : null;
    if (!span || !frame.current) return setAt(null);
    const outer = frame.current.getBoundingClientRect();
    const { left, bottom } = span.getClientRects()[0] ?? span.getBoundingClientRect();
    setAt({ place: Number(span.dataset["token"]), left: Math.max(0, Math.min(left - outer.left, outer.width - 224)), top: bottom - outer.top });
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") setAt(null);
    if (!step || !(event.target instanceof HTMLElement)) return;
    const next = Number(event.target.dataset["token"]) + step;
    frame.current?.querySelector<HTMLElement>(`[data-token="${next}"]`)?.focus();
    event.preventDefault();
  };
  const starts = Array.from({ length: Math.ceil(tokens.length / TOKENS) }, (_, place) => place * TOKENS);
  const token = at ? tokens[at.place] : undefined;
  // The token that ended the answer is drawn too, and no part of its text.
  const last = tokens[tokens.length - 1];
  const ending = last && !text.endsWith(last.shown) ? last : undefined;
  return (
    <div
      ref={frame}
      class="text shaded"
      role="group"
      aria-label="Tokens of the answer, with arrow keys"
      onPointerOver={(event) => show(event.target)}
      onPointerLeave={() => setAt(null)}
      onFocusIn={(event) => show(event.target)}
      onFocusOut={() => setAt(null)}
      onKeyDown={onKeyDown}
    >
      <div class="block" dir="auto">
        {starts.map((start) => (
          <TokenBlock key={start} tokens={tokens} start={start} end={Math.min(start + TOKENS, tokens.length)} ending={ending} />
        ))}
      </div>
      {at && token && <Alternatives token={token} left={at.left} top={at.top} />}
    </div>
  );
}

const TokenBlock = memo(
  ({ tokens, start, end, ending }: { tokens: Token[]; start: number; end: number; ending: Token | undefined }) => (
    <>
      {tokens.slice(start, end).map((token, place) => (
        <span
          key={place}
          data-token={start + place}
          data-test="token"
          class={token === ending ? "ending" : undefined}
          tabIndex={start + place === 0 ? 0 : -1}
          style={{ backgroundColor: `rgb(var(--shade) / ${(0.5 * (1 - Math.exp(token.logprob))).toFixed(2)})` }}
        >
          {token.shown}
        </span>
      ))}
    </>
  ),
  (before, after) => before.end === after.end && before.ending === after.ending && before.tokens[before.start] === after.tokens[after.start],
);

/** What stood in a token's place, likeliest first. */
function Alternatives({ token, left, top }: { token: Token; left: number; top: number }) {
  const all = token.top.some((one) => one.token === token.token) ? token.top : [...token.top, token];
  return (
    <div class="alternatives sheet" role="status" data-test="alternatives" style={{ left: `${left}px`, top: `${top + 4}px` }}>
      {all.map((one, place) => (
        <div key={place} class={one.token === token.token ? "alternative taken" : "alternative"}>
          <span class="bar-of" style={{ width: `${(100 * Math.exp(one.logprob)).toFixed(1)}%` }} />
          <code>{visible(one.token)}</code>
          <span class="number">{percent(one.logprob)}</span>
        </div>
      ))}
    </div>
  );
}

const visible = (token: string): string => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(nothing)";

function percent(logprob: number): string {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
}
