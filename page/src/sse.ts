// Server-sent events, read from a fetch: EventSource can send no key.

export interface ServerEvent {
  event: string;
  data: string;
}

/** The events of a stream, as they come. Comments, ids and retry times are passed over. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  let event = "message";
  let data: string[] = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      // A carriage return at the end may be the first half of a line break.
      const ready = rest.endsWith("\r") ? rest.slice(0, -1) : rest;
      const lines = ready.split(/\r\n|\n|\r/);
      rest = (lines.pop() ?? "") + rest.slice(ready.length);
      for (const line of lines) {
        if (line === "") {
          if (data.length > 0) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
          continue;
        }
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "data") data.push(text);
        else if (field === "event") event = text;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
