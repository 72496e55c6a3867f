// What this browser remembers of how the page is to be: small things, each under a name of its own.
import { effect, signal, type Signal } from "@preact/signals";

/** A signal that is kept in the browser under `quire.NAME`, as JSON. */
export function kept<T>(name: string, initial: T): Signal<T> {
  const place = `quire.${name}`;
  const value = signal<T>(read(place, initial));
  effect(() => {
    try {
      localStorage.setItem(place, JSON.stringify(value.value));
    } catch {
      // Storage that is full or forbidden: the page works without.
    }
  });
  return value;
}

function read<T>(place: string, initial: T): T {
  try {
    const text = localStorage.getItem(place);
    return text === null ? initial : (JSON.parse(text) as T);
  } catch {
    return initial;
  }
}

export type Theme = "auto" | "light" | "dark";

export const theme = kept<Theme>("theme", "auto");

effect(() => {
  document.documentElement.dataset["theme"] = theme.value;
});
