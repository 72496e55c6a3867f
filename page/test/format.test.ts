import assert from "node:assert/strict";
import { test } from "node:test";
import { age, bytes, count, milliseconds, percent, plural, rate } from "../src/format";

test("numbers are written for people", () => {
  assert.deepEqual([0, 999, 16384].map(count), ["0", "999", "16,384"]);
  assert.deepEqual([1, 2].map((n) => plural(n, "block")), ["1 block", "2 blocks"]);
  assert.deepEqual([1, 1023, 278016, 5 * 2 ** 30].map(bytes), ["1 byte", "1,023 bytes", "272 KiB", "5 GiB"]);
  assert.deepEqual([null, NaN, 0, 3.14159, 1234.5].map((n) => rate(n)), ["–", "–", "0", "3.1", "1,235"]);
  assert.deepEqual([null, 0.256, 1].map((n) => percent(n)), ["–", "26 %", "100 %"]);
  assert.deepEqual([4.321, 43.21, 432.1, 1234].map(milliseconds), ["4.32 ms", "43.2 ms", "432 ms", "1.23 s"]);
  assert.deepEqual([-1, 7.31, 12.9, 75, 7300, 90000].map(age), ["0 s", "7.3 s", "12 s", "1 min 15 s", "2 h 1 min", "1 d 1 h"]);
});
