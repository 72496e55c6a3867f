// What this browser remembers of how the page is to be: small things, each under a name of its own.
import { computed, effect, signal, type Signal } from "@preact/signals";

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

export type Theme = "light" | "dark";

/** What was chosen; "auto": as the system has it. */
export const theme = kept<Theme | "auto">("theme", "auto");

const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(darkSystem.matches);
darkSystem.addEventListener("change", () => (systemIsDark.value = darkSystem.matches));

/** The one that is shown. */
export const shownTheme = computed<Theme>(() => (theme.value === "auto" ? (systemIsDark.value ? "dark" : "light") : theme.value));

effect(() => {
  document.documentElement.dataset["theme"] = shownTheme.value;
});
