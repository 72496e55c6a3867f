import assert from "node:assert/strict";
import { test } from "node:test";
import { Cuts, endOfBlock, endOfPart, endOfTokens, MOST, textGoesOn, tokensGoOn } from "../src/chat/cuts";
import { type Token, tokenName } from "../src/chat/types";

const partsOf = (text: string): string[] => {
  const starts = new Cuts(endOfPart, textGoesOn).of(text);
  return starts.map((start, place) => text.slice(start, starts[place + 1]));
};

const HOSTILE = {
  line: "w".repeat(100_000),
  words: "word ".repeat(20_000),
  lines: "\n".repeat(50_000),
  marks: "Z" + "\u0335".repeat(50_000),
  pairs: "x" + "😀".repeat(20_000),
  joined: "👩‍👩‍👧‍👦".repeat(5_000),
};

test("parts are the text, none is long, and no letter is cut", () => {
  for (const [name, text] of Object.entries(HOSTILE)) {
    const parts = partsOf(text);
    assert.equal(parts.join(""), text, name);
    assert.ok(parts.every((part) => part.length <= MOST), name);
    assert.ok(parts.every((part) => part.isWellFormed()), name);
    assert.ok(parts.length < (3 * text.length) / MOST, name);
  }
  assert.ok(partsOf(HOSTILE.words).every((part) => part.endsWith(" ")));
  assert.ok(partsOf(HOSTILE.joined).every((part) => part.startsWith("👩") && part.endsWith("👦")));
});

test("what was cut stays as a text grows, and is looked at once", () => {
  const text = "some words, then a line\n".repeat(3000) + HOSTILE.line;
  for (const end of [endOfBlock, endOfPart]) {
    const asked: number[] = [];
    const cuts = new Cuts<string>((whole, from) => {
      asked.push(from);
      return end(whole, from);
    }, textGoesOn);
    let steps = 0;
    for (let length = 0; length <= text.length; length += 997, steps++) cuts.of(text.slice(0, length));
    const grown = [...cuts.of(text)];
    assert.deepEqual(grown, new Cuts(end, textGoesOn).of(text));
    assert.ok(asked.length <= steps + 1 + grown.length);
    assert.deepEqual(cuts.of("another"), [0]);
  }
});

const token = (shown: string): Token => ({ token: shown, shown, logprob: -1, top: [] });

test("tokens are cut where lines or words end, or where there is no end", () => {
  const of = (tokens: Token[]) => new Cuts(endOfTokens, tokensGoOn).of(tokens);
  const letters = Array.from({ length: 5000 }, () => token("a"));
  assert.deepEqual(of(letters), [0, 1000, 2000, 3000, 4000]);
  const words = Array.from({ length: 5000 }, (_, place) => token(place % 7 ? "a" : " a"));
  assert.ok(of(words).slice(1).every((start) => words[start]?.shown === " a"));
  const long = Array.from({ length: 100 }, () => token("w".repeat(1000)));
  assert.ok(of(long).length >= 20);
  assert.deepEqual(of([]), [0]);
});

test("a token that is a part of a letter is named by its bytes", () => {
  assert.equal(tokenName({ token: "\ufffd", bytes: [0xe4, 0x0a] }), "<e4 0a>");
  assert.equal(tokenName({ token: " word", bytes: [32] }), " word");
  assert.equal(tokenName({ token: "\ufffd", bytes: null }), "\ufffd");
});
