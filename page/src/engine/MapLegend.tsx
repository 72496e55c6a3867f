// What the shapes of the map mean, with how many there are of each; and the blocks that had to leave it.
import { colourOf, type ColourBy } from "./owners";
import type { EngineRequest, Pool } from "./state";
import { count, plural } from "../format";
import { shownTheme } from "../settings";
import { pigmentOf } from "../ui/pigment";

type Kind = "owned" | "shared" | "cached" | "free";

/** A cell as the map draws it, larger. */
function Cell({ kind }: { kind: Kind }) {
  return (
    <svg class={`cell ${kind}`} viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
      {kind === "owned" && <rect width="12" height="12" />}
      {kind === "shared" && <path d="M0 0h12v5H0zM0 7h12v5H0z" />}
      {kind === "cached" && <rect y="7" width="12" height="5" />}
      {kind === "free" && <rect x="5" y="5" width="2" height="2" />}
    </svg>
  );
}

const MEANINGS: Record<Kind, string> = {
  owned: "held by a request",
  shared: "held by several: the same beginning, stored once",
  cached: "held by nobody, found again by its prefix",
  free: "to be had at once",
};

export function MapLegend({ pool, shared }: { pool: Pool; shared: number }) {
  const numbers: Record<Kind, number> = { owned: pool.owned, shared, cached: pool.cached, free: pool.free };
  return (
    <dl class="legend" data-test="block-legend">
      {(["owned", "shared", "cached", "free"] as const).map((kind) => (
        <div key={kind}>
          <dt>
            <Cell kind={kind} /> {kind}
          </dt>
          <dd>
            <b data-test={`blocks-${kind}`}>{count(numbers[kind])}</b> <span>{MEANINGS[kind]}</span>
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Sequences whose blocks lie in main memory, so that others can run. */
export function SwappedOut({ pool, requests, by }: { pool: Pool; requests: EngineRequest[]; by: ColourBy }) {
  const theme = shownTheme.value;
  if (pool.swapped === 0) return null;
  const out = requests.filter((request) => request.state === "swapped");
  return (
    <div class="swapped" data-test="swapped">
      <p>
        <b>{plural(pool.swapped, "block")}</b> swapped out to main memory, of room for {count(pool.swap_total)}
      </p>
      <ul>
        {out.map((request) => (
          <li key={request.number} style={{ borderColor: colourOf(request, by, theme, (adapter) => `var(--${pigmentOf(adapter)})`) }}>
            #{request.number}
          </li>
        ))}
      </ul>
    </div>
  );
}
