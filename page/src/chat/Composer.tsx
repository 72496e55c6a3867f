import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { info } from "../server";
import { kept } from "../settings";
import { addPictures, pictures, pictureTrouble } from "./pictures";
import { ask, isBusy, stop } from "./run";
import type { Conversation, Turn } from "./types";

/** What stands in the field, kept through a reload; and the turn that it is to replace. */
const draft = kept("draft", "");
const editing = signal<string | null>(null);

export function edit(turn: Turn): void {
  editing.value = turn.id;
  draft.value = turn.text;
  pictures.value = turn.pictures;
  document.querySelector<HTMLTextAreaElement>("[data-test=prompt]")?.focus();
}

/** Write a prompt for somebody, who may send it or not. */
export function suggest(text: string): void {
  draft.value = text;
  document.querySelector<HTMLTextAreaElement>("[data-test=prompt]")?.focus();
}

export function Composer({ conversation }: { conversation: Conversation }) {
  const field = useRef<HTMLTextAreaElement>(null);
  const chooser = useRef<HTMLInputElement>(null);
  const busy = isBusy(conversation);
  const empty = !draft.value.trim() && pictures.value.length === 0;
  useEffect(() => () => void (editing.value = null), []);
  useEffect(() => {
    const text = field.current;
    if (!text) return;
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  }, [draft.value]);

  const send = () => {
    if (empty || busy) return;
    ask(conversation.id, draft.value, pictures.value, editing.value);
    draft.value = "";
    pictures.value = [];
    pictureTrouble.value = null;
    editing.value = null;
    field.current?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape" && editing.value !== null) editing.value = null;
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const onPaste = (event: ClipboardEvent) => {
    const files = event.clipboardData?.files;
    if (!files?.length) return;
    event.preventDefault();
    void addPictures(files);
  };
  return (
    <form
      class="composer sheet"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {editing.value !== null && (
        <p class="hint">
          This replaces an earlier prompt and what came after it.{" "}
          <button type="button" class="quiet small" onClick={() => (editing.value = null)}>
            Ask it as a new one
          </button>
        </p>
      )}
      {pictureTrouble.value && <p class="error hint" role="alert">{pictureTrouble.value}</p>}
      {pictures.value.length > 0 && (
        <ul class="pictures">
          {pictures.value.map((picture) => (
            <li key={picture.url}>
              <img src={picture.url} alt={picture.name} />
              <button
                type="button"
                class="small"
                aria-label={`Take ${picture.name} out`}
                onClick={() => (pictures.value = pictures.value.filter((one) => one !== picture))}
              >
                ×
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="compose-row">
        {info.value?.images && (
          <>
            <button type="button" class="quiet" aria-label="Add pictures" title="Add pictures (or drop or paste them)" onClick={() => chooser.current?.click()}>
              <svg viewBox="0 0 24 24" width="22" height="22" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.6">
                <rect x="3.5" y="5" width="17" height="14" rx="2" />
                <circle cx="9" cy="10" r="1.6" />
                <path d="M4 17l5-4 3.5 2.5L16 11l4.5 4.5" />
              </svg>
            </button>
            <input
              ref={chooser}
              type="file"
              accept="image/*"
              multiple
              hidden
              data-test="picture"
              onChange={(event) => {
                const input = event.currentTarget;
                void addPictures(input.files).then(() => (input.value = ""));
              }}
            />
          </>
        )}
        <textarea
          ref={field}
          rows={1}
          dir="auto"
          aria-label="Prompt"
          placeholder="Ask something"
          data-test="prompt"
          value={draft.value}
          onInput={(event) => (draft.value = event.currentTarget.value)}
          onKeyDown={onKeyDown}
          onPaste={onPaste}
        />
        {busy ? (
          <button type="button" class="primary" data-test="stop" title="Esc" onClick={() => stop(conversation)}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" data-test="send" disabled={empty}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}
