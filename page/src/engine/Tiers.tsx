// Adapters by where their weights are.
import { bytes, count, plural } from "../format";
import { pigmentOf } from "../ui/pigment";
import type { AdapterState, Tier } from "./state";

const TIERS: { tier: Tier; label: string; why: string }[] = [
  { tier: "device", label: "Device", why: "steps can use it" },
  { tier: "host", label: "Main memory", why: "at hand" },
  { tier: "disk", label: "Disk", why: "read when it is needed" },
];

export function Tiers({ adapters, more }: { adapters: AdapterState[]; more: number }) {
  return (
    <section class="tiers" aria-labelledby="tiers-title">
      <div class="map-head">
        <h2 id="tiers-title">Adapters</h2>
        <p class="hint">
          <a href="#adapters">load, upload, unload</a>
        </p>
      </div>
      {TIERS.map(({ tier, label, why }) => (
        <TierList key={tier} adapters={adapters.filter((one) => one.tier === tier)} {...{ label, why }} />
      ))}
      {more > 0 && <p class="hint">and {plural(more, "adapter")} more</p>}
    </section>
  );
}

function TierList({ label, why, adapters }: { label: string; why: string; adapters: AdapterState[] }) {
  const total = adapters.reduce((sum, one) => sum + one.bytes, 0);
  return (
    <div class="tier">
      <h3>
        {label} <span class="hint">{why}</span> <b>{adapters.length > 0 ? bytes(total) : "none"}</b>
      </h3>
      {adapters.length > 0 && (
        <ul>
          {adapters.map((one) => (
            <li key={one.name} data-test="tier-row">
              <i class={`swatch ${pigmentOf(one.name)}`} />
              <bdi class="name">{one.name}</bdi>
              <span class="hint">
                {one.rank !== null && `rank ${count(one.rank)} · `}
                {bytes(one.bytes)}
                {one.pinned && " · pinned"}
              </span>
              {one.requests > 0 && <b>{plural(one.requests, "request")}</b>}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
