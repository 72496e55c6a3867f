// Where long texts are cut, so that what is drawn again when a letter comes is short. What was cut once stays as it is.
import type { Token } from "./types";

const LEAST = 1200; // characters of a block, which ends with a line
export const MOST = 4000; // of a part: the browser lays all of one out again for each change in it
const FEWEST_TOKENS = 500; // of a part that ends before a space
const MOST_TOKENS = 1000;
const NEAR = 64; // characters that are looked through for a better place

/** Where a piece that begins at a place ends, or null while it may go on. */
export type Cut<T> = (whole: T, from: number) => number | null;

/** A block: it ends behind a line. */
export const endOfBlock: Cut<string> = (text, from) => {
  if (text.length - from <= LEAST) return null;
  const end = text.indexOf("\n", from + LEAST);
  return end < 0 ? null : end + 1;
};

/** A part of a block that is too long for one: it ends behind a space if there is one, and within no letter. */
export const endOfPart: Cut<string> = (text, from) => {
  if (text.length - from <= MOST) return null;
  const most = from + MOST;
  for (let end = most; end > from + MOST / 2; end--) if (/\s/.test(text[end - 1]!)) return end;
  for (let end = most; end > most - NEAR; end--) if (begins(text, end)) return end;
  return begins(text, most) || !isLowSurrogate(text, most) ? most : most - 1; // a letter without an end
};

const isLowSurrogate = (text: string, place: number): boolean => (text.charCodeAt(place) & 0xfc00) === 0xdc00;

/** Whether a letter begins at a place: what stands there is no part of the one before it. */
function begins(text: string, place: number): boolean {
  if (isLowSurrogate(text, place) || text[place - 1] === "\u200d") return false;
  return !/^[\p{M}\u200d\p{Emoji_Modifier}]/u.test(text.slice(place, place + 2));
}

/** A part of the tokens: it ends with a line, or before a space, or where it has become too long. */
export const endOfTokens: Cut<Token[]> = (tokens, from) => {
  let characters = 0;
  for (let end = from + 1; end < tokens.length; end++) {
    const { shown } = tokens[end - 1]!;
    characters += shown.length;
    const long = end - from >= FEWEST_TOKENS || characters > MOST / 2;
    if (characters > LEAST && shown.endsWith("\n")) return end;
    if (long && /^\s/.test(tokens[end]!.shown)) return end;
    if (end - from >= MOST_TOKENS || characters > MOST) return end;
  }
  return null;
};

/** The places where pieces begin. Of something that grows: those that there were before, and what is new. */
export class Cuts<T extends string | Token[]> {
  private whole: T | null = null;
  private starts: number[] = [0];

  constructor(
    private readonly end: Cut<T>,
    private readonly goesOn: (before: T, now: T) => boolean,
  ) {}

  of(whole: T): number[] {
    if (this.whole === null || !this.goesOn(this.whole, whole)) this.starts = [0];
    this.whole = whole;
    for (;;) {
      const end = this.end(whole, this.starts[this.starts.length - 1]!);
      if (end === null) return this.starts;
      this.starts.push(end);
    }
  }
}

export const textGoesOn = (before: string, now: string): boolean => now.startsWith(before);
export const tokensGoOn = (before: Token[], now: Token[]): boolean => before[0] === now[0] && before.length <= now.length;
