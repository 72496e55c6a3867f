// Colours of requests: one lightness for each theme, so that all of them stand out from its ground.
import type { Theme } from "../settings";

// Lightness and chroma (OKLCH) that keep 3 : 1 to the ground of either theme, whatever the hue; tested.
const TONES: Record<Theme, { lightness: number; chroma: number }> = {
  light: { lightness: 0.58, chroma: 0.125 },
  dark: { lightness: 0.76, chroma: 0.11 },
};
const GOLDEN_ANGLE = 137.508;
const FIRST_HUE = 255;

/** A request's hue: neighbours in number are far apart on the wheel. */
export function hueOfRequest(number: number): number {
  return (FIRST_HUE + number * GOLDEN_ANGLE) % 360;
}

/** "#rrggbb" of a hue in a theme's tone. */
export function tone(hue: number, theme: Theme): string {
  const { lightness, chroma } = TONES[theme];
  return hex(oklch(lightness, chroma, hue));
}

type Rgb = [number, number, number];

function hex(rgb: Rgb): string {
  return "#" + rgb.map((part) => Math.round(part * 255).toString(16).padStart(2, "0")).join("");
}

/** OKLCH to sRGB (0..1), less saturated where sRGB has no such colour. Source: Ottosson, "A perceptual color space". */
export function oklch(lightness: number, chroma: number, hue: number): Rgb {
  for (let part = chroma; part > 0; part -= 0.01) {
    const rgb = gamma(linear(lightness, part, hue));
    if (rgb.every((one) => one >= -1e-4 && one <= 1.0001)) return rgb.map((one) => clamp(one)) as Rgb;
  }
  return gamma(linear(lightness, 0, hue)).map((one) => clamp(one)) as Rgb;
}

function clamp(part: number): number {
  return Math.min(1, Math.max(0, part));
}

function linear(lightness: number, chroma: number, hue: number): Rgb {
  const angle = (hue * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

function gamma(rgb: Rgb): Rgb {
  return rgb.map((part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055)) as Rgb;
}

/** The contrast of two colours "#rrggbb", 1..21, as WCAG 2 has it. */
export function contrast(one: string, other: string): number {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a) as [number, number];
  return (high + 0.05) / (low + 0.05);
}

function luminance(colour: string): number {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = parseInt(colour.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as Rgb;
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
