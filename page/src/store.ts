// The conversations: in memory as signals, kept in the browser's IndexedDB. Nothing of them leaves the browser but in
// requests to the server.
import { computed, signal } from "@preact/signals";
import { revive } from "./chat/revive";
import { type Answer, type Conversation, NO_OPTIONS, newColumn, newId, type Turn } from "./chat/types";
import { kept } from "./settings";

const PLACE = "conversations";
const DELAY = 400; // milliseconds after a change

/** The newest first. */
export const conversations = signal<Conversation[]>([]);
export const currentId = kept("conversation", "");
export const current = computed(() => conversations.value.find((one) => one.id === currentId.value) ?? conversations.value[0]);
/** Whether the database was read: before, nothing is to be shown or changed. */
export const loaded = signal(false);
/** Why conversations are not kept, where they are not. */
export const notKept = signal<string | null>(null);

let database: IDBDatabase | null = null;
const unsaved = new Set<string>();
let timer: number | undefined;

export async function load(): Promise<void> {
  try {
    database = await open();
    const found = await asked(database.transaction(PLACE).objectStore(PLACE).getAll());
    const revived = found.map(revive).filter((one) => one !== null);
    conversations.value = revived.sort((a, b) => b.changed - a.changed);
  } catch {
    notKept.value = "This browser keeps nothing for this page: export what you want to keep.";
  }
  if (conversations.value.length === 0) begin();
  loaded.value = true;
}

function open(): Promise<IDBDatabase> {
  const request = indexedDB.open("quire", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(PLACE, { keyPath: "id" });
  return asked(request);
}

function asked<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the database fails"));
  });
}

/** A new conversation with the columns and options of the one that was open; the open one, if it is empty. */
export function begin(): void {
  const before = current.value;
  if (before && before.turns.length === 0) return;
  const fresh: Conversation = {
    id: newId(),
    title: "New conversation",
    changed: Date.now(),
    columns: before ? before.columns.map((column) => ({ ...column, id: newId() })) : [newColumn()],
    options: before ? before.options : { ...NO_OPTIONS },
    turns: [],
  };
  conversations.value = [fresh, ...conversations.value];
  currentId.value = fresh.id;
}

/** Replace a conversation by what is made of it. One that was thrown away stays away, and is brought back as it is then. */
export function change(id: string, make: (conversation: Conversation) => Conversation): void {
  conversations.value = conversations.value.map((one) => (one.id === id ? make(one) : one));
  if (dropped.value?.id === id) dropped.value = make(dropped.value);
  unsaved.add(id);
  timer ??= window.setTimeout(save, DELAY);
}

export function changeTurn(id: string, turnId: string, make: (turn: Turn) => Turn): void {
  change(id, (one) => ({ ...one, turns: one.turns.map((turn) => (turn.id === turnId ? make(turn) : turn)) }));
}

export function putAnswer(id: string, turnId: string, columnId: string, answer: Answer): void {
  changeTurn(id, turnId, (turn) => ({ ...turn, answers: { ...turn.answers, [columnId]: answer } }));
  if (answer.finish !== null) save(); // at once: a page that goes keeps nothing for certain any more
}

/** What was thrown away last; it can be brought back until the page is closed. */
export const dropped = signal<Conversation | null>(null);

export function drop(id: string): void {
  dropped.value = conversations.value.find((one) => one.id === id) ?? null;
  conversations.value = conversations.value.filter((one) => one.id !== id);
  database?.transaction(PLACE, "readwrite").objectStore(PLACE).delete(id);
  if (conversations.value.length === 0) begin();
}

/** Take conversations in, beside those that are there; what has the same id is replaced. */
export function takeIn(given: Conversation[]): void {
  const ids = new Set(given.map((one) => one.id));
  const all = [...given, ...conversations.value.filter((one) => !ids.has(one.id))];
  conversations.value = all.sort((a, b) => b.changed - a.changed);
  for (const one of given) change(one.id, (same) => same);
  if (given[0]) currentId.value = given[0].id;
}

function save(): void {
  window.clearTimeout(timer);
  timer = undefined;
  if (!database || unsaved.size === 0) return;
  const whole = database.transaction(PLACE, "readwrite");
  whole.oncomplete = () => (notKept.value = null);
  whole.onabort = () => (notKept.value = `The browser does not keep this: ${whole.error?.message || "its storage is full"}. Export it.`);
  for (const one of conversations.value) if (unsaved.has(one.id)) whole.objectStore(PLACE).put(one);
  whole.commit(); // so that it is kept, though the page goes in this moment
  unsaved.clear();
}

window.addEventListener("pagehide", save);
