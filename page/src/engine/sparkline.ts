import { REMEMBERED_RATES } from "./state";

/**
 * An SVG path of values, the newest at the right edge, the highest at the upper one.
 *
 * Unknown values (null) count as none; an area goes down to the floor at both ends.
 */
export function sparkline(values: (number | null)[], width: number, height: number, area: boolean): string {
  if (values.length < 2) return "";
  const numbers = values.map((value) => value ?? 0);
  const most = Math.max(...numbers);
  const step = width / (REMEMBERED_RATES - 1);
  const left = width - (numbers.length - 1) * step;
  const points = numbers.map((value, index) => {
    const y = most > 0 ? height - 1 - (value / most) * (height - 3) : height - 1;
    return `${(left + index * step).toFixed(1)},${y.toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  return area ? `${line}L${width.toFixed(1)},${height}L${left.toFixed(1)},${height}Z` : line;
}
