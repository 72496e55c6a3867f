// Which view is shown: the part of the address behind the #.
import { signal } from "@preact/signals";

export const VIEWS = ["chat", "engine", "adapters"] as const;
export type View = (typeof VIEWS)[number];

function current(): View {
  const name = location.hash.replace(/^#\/?/, "").split(/[/?]/)[0];
  return VIEWS.find((view) => view === name) ?? "chat";
}

export const view = signal<View>(current());

window.addEventListener("hashchange", () => {
  view.value = current();
});
