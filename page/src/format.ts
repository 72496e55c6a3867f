// Numbers for people. One language, whatever the browser's: screenshots and tests read the same everywhere.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** 16384 -> "16,384". */
export function count(value: number): string {
  return WHOLE.format(value);
}

/** "1 block", "2 blocks"; of a word that takes an s. */
export function plural(value: number, word: string): string {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

/** 1536 -> "1.5 KiB", 278016 -> "272 KiB". */
export function bytes(value: number): string {
  let unit = 0;
  while (value >= 1024 && unit + 1 < UNITS.length) {
    value /= 1024;
    unit++;
  }
  if (unit === 0) return plural(value, "byte");
  return `${value < 100 ? trimmed(value, 1) : count(value)} ${UNITS[unit]}`;
}

/** 0 -> "0", 3.14 -> "3.1", 1234.5 -> "1,235"; null -> a dash. */
export function rate(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return "–";
  return value < 100 ? trimmed(value, 1) : count(value);
}

/** 0.256 -> "26 %"; null -> a dash. */
export function percent(value: number | null): string {
  return value === null || !Number.isFinite(value) ? "–" : `${count(value * 100)} %`;
}

/** 4.3 -> "4.3 ms", 1234 -> "1.23 s". */
export function milliseconds(value: number): string {
  if (value >= 1000) return `${trimmed(value / 1000, 2)} s`;
  return `${value < 100 ? trimmed(value, value < 10 ? 2 : 1) : count(value)} ms`;
}

/** 7.3 -> "7 s", 75 -> "1 min 15 s", 7300 -> "2 h 1 min". */
export function age(seconds: number): string {
  if (seconds < 10) return `${trimmed(Math.max(0, seconds), 1)} s`;
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

function trimmed(value: number, digits: number): string {
  return String(Number(value.toFixed(digits)));
}
