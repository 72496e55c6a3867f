// Events are the same wherever their bytes are cut.
import assert from "node:assert/strict";
import { test } from "node:test";

import { readEvents, type ServerEvent } from "../src/sse";

const STREAM = ": hello\r\n\r\nevent: state\ndata: {\"é\": 1}\n\ndata:a\rdata: b\r\rretry: 5\nid\ndata: 😀\r\n\r\ndata: unfinished\n";
const EVENTS = [
  { event: "state", data: '{"é": 1}' },
  { event: "message", data: "a\nb" },
  { event: "message", data: "😀" },
];

async function eventsOf(parts: Uint8Array<ArrayBuffer>[]): Promise<ServerEvent[]> {
  const body = new ReadableStream<Uint8Array>({
    start(controller) {
      for (const part of parts) controller.enqueue(part);
      controller.close();
    },
  });
  const found: ServerEvent[] = [];
  for await (const event of readEvents(body)) found.push(event);
  return found;
}

test("cut anywhere", async () => {
  const bytes = new TextEncoder().encode(STREAM);
  for (let cut = 0; cut <= bytes.length; cut += 1)
    assert.deepEqual(await eventsOf([bytes.slice(0, cut), bytes.slice(cut)]), EVENTS, `cut at ${cut}`);
  assert.deepEqual(await eventsOf([...bytes].map((byte) => Uint8Array.of(byte))), EVENTS);
});

test("whoever stops reading ends the stream", async () => {
  let cancelled = false;
  const body = new ReadableStream<Uint8Array>({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: on and on\n\n")),
    cancel: () => void (cancelled = true),
  });
  for await (const { data } of readEvents(body)) {
    assert.equal(data, "on and on");
    break;
  }
  assert(cancelled);
});
