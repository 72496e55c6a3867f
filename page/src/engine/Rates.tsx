// What the engine gets done, as numbers and as their last minute.
import { percent, rate } from "../format";
import { sparkline } from "./sparkline";
import type { Rates as Numbers } from "./state";

const SHOWN: { name: keyof Numbers; label: string; unit: string; text(value: number | null): string }[] = [
  { name: "output_tokens_per_second", label: "Answers", unit: "tokens/s", text: rate },
  { name: "prompt_tokens_per_second", label: "Prompts", unit: "tokens/s", text: rate },
  { name: "requests_per_second", label: "Requests", unit: "per second", text: rate },
  { name: "cache_hit_rate", label: "Prefix cache", unit: "of prompt tokens", text: percent },
];
const WIDTH = 240;
const HEIGHT = 36;

export function Rates({ rates }: { rates: Numbers[] }) {
  const last = rates[rates.length - 1];
  return (
    <dl class="rates" data-test="rates">
      {SHOWN.map(({ name, label, unit, text }) => (
        <div key={name} class="tile">
          <dt>{label}</dt>
          <dd>
            <b data-test={`rate-${name}`}>{text(last?.[name] ?? null)}</b> <span>{unit}</span>
            <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
              <path class="area" d={sparkline(rates.map((one) => one[name]), WIDTH, HEIGHT, true)} />
              <path class="line" d={sparkline(rates.map((one) => one[name]), WIDTH, HEIGHT, false)} />
            </svg>
          </dd>
        </div>
      ))}
    </dl>
  );
}
