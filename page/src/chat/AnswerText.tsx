import { computed } from "@preact/signals";
import { useRef, useState } from "preact/hooks";
import { current } from "../store";
import { memo } from "../ui/memo";
import { type Cut, Cuts, endOfBlock, endOfPart, endOfTokens, MOST, textGoesOn, tokensGoOn } from "./cuts";
import type { Token } from "./types";

/** Whether the tokens of the conversation that is shown are shaded. */
export const shading = computed(() => current.value?.options.logprobs ?? false);

const TOKENS = 100; // that are compared at once

/** A long text as blocks, so that a new token touches the last of them alone. Exactly as it came: nothing is markup. */
export function PlainText({ text }: { text: string }) {
  const starts = useStarts(text, endOfBlock);
  return (
    <div class="text">
      {starts.map((start, place) => (
        // The line break between two blocks is that of the blocks.
        <Block key={place} text={place + 1 < starts.length ? text.slice(start, starts[place + 1]! - 1) : text.slice(start)} />
      ))}
    </div>
  );
}

const Block = memo(({ text }: { text: string }) => (
  <div class="block" dir="auto">
    {text.length > MOST ? <Parts text={text} /> : text}
  </div>
));

/** Lines that are too long to be laid out as one. */
function Parts({ text }: { text: string }) {
  const starts = useStarts(text, endOfPart);
  return (
    <>
      {starts.map((start, place) => (
        <Part key={place} text={text.slice(start, starts[place + 1])} last={place + 1 === starts.length} />
      ))}
    </>
  );
}

const Part = memo(({ text, last }: { text: string; last: boolean }) => <span class={last ? "last-part" : "part"}>{text}</span>);

function useStarts(text: string, end: Cut<string>): number[] {
  const cuts = useRef<Cuts<string> | null>(null);
  cuts.current ??= new Cuts(end, textGoesOn);
  return cuts.current.of(text);
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
  const cuts = useRef<Cuts<Token[]> | null>(null);
  cuts.current ??= new Cuts(endOfTokens, tokensGoOn);
  const starts = cuts.current.of(tokens);
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
        {starts.map((start, place) => (
          <TokenPart key={start} {...{ tokens, start, ending }} end={starts[place + 1] ?? tokens.length} last={place + 1 === starts.length} />
        ))}
      </div>
      {at && token && <Alternatives token={token} left={at.left} top={at.top} />}
    </div>
  );
}

interface TokensProps {
  tokens: Token[];
  start: number;
  end: number;
  ending: Token | undefined;
}

const sameTokens = (before: TokensProps, after: TokensProps): boolean =>
  before.end === after.end && before.ending === after.ending && before.tokens[before.start] === after.tokens[after.start];

const TokenPart = memo(
  ({ tokens, start, end, ending, last }: TokensProps & { last: boolean }) => {
    const starts = Array.from({ length: Math.ceil((end - start) / TOKENS) }, (_, place) => start + place * TOKENS);
    return (
      <span class={last ? "last-part" : "part"}>
        {starts.map((from) => (
          <TokenBlock key={from} tokens={tokens} start={from} end={Math.min(from + TOKENS, end)} ending={ending} />
        ))}
      </span>
    );
  },
  (before, after) => before.last === after.last && sameTokens(before, after),
);

const TokenBlock = memo(
  ({ tokens, start, end, ending }: TokensProps) => (
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
  sameTokens,
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
