import { theme, type Theme } from "../settings";

type Choice = Theme | "auto";

const NEXT: Record<Choice, Choice> = { auto: "light", light: "dark", dark: "auto" };
const NAMES: Record<Choice, string> = { auto: "as the system has it", light: "light", dark: "dark" };

export function ThemeSwitch() {
  const label = `Colours: ${NAMES[theme.value]}`;
  return (
    <button type="button" class="quiet theme" title={label} aria-label={label} onClick={() => (theme.value = NEXT[theme.value])}>
      <svg viewBox="0 0 20 20" width="18" height="18" aria-hidden="true">
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" stroke-width="1.5" />
        {theme.value !== "light" && (
          <path d={theme.value === "dark" ? "M10 3a7 7 0 1 0 0 14a7 7 0 1 0 0-14" : "M10 3a7 7 0 0 1 0 14z"} fill="currentColor" />
        )}
      </svg>
    </button>
  );
}
