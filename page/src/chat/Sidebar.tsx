import { useRef, useState } from "preact/hooks";
import { messageOf } from "../api";
import { begin, change, conversations, current, currentId, drop, dropped, takeIn } from "../store";
import { revive } from "./revive";
import { stop } from "./run";
import type { Conversation } from "./types";

/** The conversations that this browser keeps. */
export function Sidebar({ close }: { close: () => void }) {
  const file = useRef<HTMLInputElement>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const onFile = async (event: Event & { currentTarget: HTMLInputElement }) => {
    const input = event.currentTarget;
    const chosen = input.files?.[0];
    if (!chosen) return;
    try {
      setProblem(null);
      takeIn(fromExport(await chosen.text()));
    } catch (error) {
      setProblem(messageOf(error));
    }
    input.value = "";
  };
  return (
    <aside class="list" aria-label="Conversations">
      <div class="row">
        <button type="button" class="new grow" data-test="new" onClick={begin}>
          New conversation
        </button>
        <button type="button" class="quiet drawer-close" aria-label="Close the list" onClick={close}>
          ×
        </button>
      </div>
      <ul>
        {conversations.value.map((one) => (
          <Entry key={one.id} conversation={one} open={one.id === current.value?.id} />
        ))}
      </ul>
      <div class="row">
        <button type="button" class="small" data-test="export" onClick={exportAll}>
          Export
        </button>
        <button type="button" class="small" onClick={() => file.current?.click()}>
          Import
        </button>
        <input ref={file} type="file" accept=".json,application/json" hidden data-test="import" onChange={onFile} />
      </div>
      {dropped.value && dropped.value.turns.length > 0 && (
        <button type="button" class="quiet small name" data-test="bring-back" dir="auto" onClick={bringBack}>
          Bring back “{dropped.value.title}”
        </button>
      )}
      {problem && <p class="error hint" role="alert">{problem}</p>}
      <p class="hint">They are kept in this browser alone.</p>
    </aside>
  );
}

function Entry({ conversation, open }: { conversation: Conversation; open: boolean }) {
  const [naming, setNaming] = useState(false);
  const { id, title } = conversation;
  const rename = (event: { currentTarget: HTMLInputElement }) => {
    const given = event.currentTarget.value.trim();
    if (given && given !== title) change(id, (one) => ({ ...one, title: given.slice(0, 200) }));
    setNaming(false);
  };
  if (naming)
    return (
      <li class="entry">
        <input
          aria-label="Name of the conversation"
          value={title}
          ref={(input) => input?.focus()}
          onBlur={rename}
          onKeyDown={(event) => {
            if (event.key === "Enter") rename(event);
            if (event.key === "Escape") setNaming(false);
          }}
        />
      </li>
    );
  return (
    <li class="entry" data-test="conversation">
      <button type="button" class="quiet name" aria-current={open ? "true" : undefined} dir="auto" onClick={() => (currentId.value = id)}>
        {title}
      </button>
      <button type="button" class="quiet small" aria-label={`Rename ${title}`} data-test="rename" onClick={() => setNaming(true)}>
        ✎
      </button>
      <button type="button" class="quiet small" aria-label={`Delete ${title}`} data-test="delete" onClick={() => throwAway(conversation)}>
        ×
      </button>
    </li>
  );
}

function throwAway(conversation: Conversation): void {
  stop(conversation); // nobody could later
  drop(conversation.id);
}

function bringBack(): void {
  if (dropped.value) takeIn([dropped.value]);
  dropped.value = null;
}

function exportAll(): void {
  const text = JSON.stringify({ format: "quire-conversations", version: 1, conversations: conversations.value }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `quire-conversations-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Raises Error for a file that has none. */
function fromExport(text: string): Conversation[] {
  const given = JSON.parse(text) as { format?: unknown; conversations?: unknown } | null;
  if (given?.format !== "quire-conversations" || !Array.isArray(given.conversations))
    throw new Error("That is no export of conversations.");
  return given.conversations.map(revive).filter((one) => one !== null);
}
