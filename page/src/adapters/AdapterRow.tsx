// A loaded adapter, or a mixture: what it is, what of it was bound, and the way out.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { messageOf, remove } from "../api";
import { begin, change, current } from "../store";
import { newColumn } from "../chat/types";
import { bytes, count, plural } from "../format";
import { pigmentOf } from "../ui/pigment";
import { changed, type Adapter, type Mixture, type Unloaded } from "./listing";
import { Report } from "./Report";

const TIERS = { device: "on the device", host: "in main memory", disk: "on disk, read when it is needed" };
const FILLED = { device: 3, host: 2, disk: 1 };

interface AdapterProps {
  adapter: Adapter;
  mayChange: boolean;
  said(text: string): void;
  replace(name: string): void;
}

export function AdapterRow({ adapter, mayChange, said, replace }: AdapterProps) {
  const { name, tier } = adapter;
  return (
    <li class={`sheet ${pigmentOf(name)}`} data-test="adapter-row" data-name={name}>
      <div class="row-head">
        <h2>
          <i class="swatch" />
          <bdi>{name}</bdi>
        </h2>
        <p class="where" data-test="tier">
          <span class={`tier filled-${FILLED[tier]}`} aria-hidden="true">
            <i />
            <i />
            <i />
          </span>
          {TIERS[tier]}
        </p>
        <b class="size">{bytes(adapter.bytes)}</b>
      </div>
      <p class="facts">{facts(adapter)}</p>
      <details>
        <summary>What was bound</summary>
        <Report report={adapter.report} />
      </details>
      <Actions name={name} requests={adapter.requests} mayChange={mayChange} said={said}>
        {mayChange && (
          <button type="button" class="small" data-test="replace" aria-label={`Replace ${name}`} onClick={() => replace(name)}>
            Replace…
          </button>
        )}
      </Actions>
    </li>
  );
}

interface MixtureProps {
  mixture: Mixture;
  mayChange: boolean;
  said(text: string): void;
}

export function MixtureRow({ mixture, mayChange, said }: MixtureProps) {
  return (
    <li class="sheet pigment-7" data-test="mixture-row" data-name={mixture.name}>
      <div class="row-head">
        <h2>
          <i class="swatch" />
          <bdi>{mixture.name}</bdi>
        </h2>
        <p class="where">a mixture</p>
      </div>
      <ul class="parts">
        {mixture.adapters.map(({ name, weight }) => (
          <li key={name} class={pigmentOf(name)}>
            <i class="swatch" />
            <bdi>{name}</bdi> × {weight}
          </li>
        ))}
      </ul>
      <Actions name={mixture.name} requests={0} mayChange={mayChange} said={said} />
    </li>
  );
}

function facts({ rank, alpha, scaling, report, requests, source, parent, base_model_name_or_path: trained, pinned }: Adapter): string {
  const parts: string[] = [];
  if (rank !== null) parts.push(`rank ${count(rank)}`);
  if (alpha !== null) parts.push(`alpha ${alpha}`);
  if (scaling !== null) parts.push(`scaling ${Number(scaling.toFixed(4))}`);
  parts.push(plural(report.modules, "layer"));
  if (source !== null) parts.push(source === "upload" ? "uploaded" : `from ${source}`);
  if (trained !== null && trained !== parent) parts.push(`trained on ${trained}`);
  if (pinned) parts.push("pinned");
  if (requests > 0) parts.push(`in use by ${plural(requests, "request")}`);
  return parts.join(" · ");
}

interface ActionsProps {
  name: string;
  requests: number;
  mayChange: boolean;
  said(text: string): void;
  children?: ComponentChildren;
}

function Actions({ name, requests, mayChange, said, children }: ActionsProps) {
  const [asking, setAsking] = useState(false);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const unload = async () => {
    setBusy(true);
    setError(null);
    try {
      const gone = await remove<Unloaded>(`v1/adapters/${encodeURIComponent(name)}`);
      said(farewell(gone));
      document.querySelector<HTMLElement>("[data-test=happened]")?.focus(); // the row with the button goes
      await changed();
    } catch (fault) {
      setError(messageOf(fault));
    }
    setBusy(false);
    setAsking(false);
  };
  return (
    <>
      {error !== null && (
        <p class="fault" role="alert" data-test="row-error">
          {error}
        </p>
      )}
      <div class="row">
        <button type="button" class="small" data-test="try" aria-label={`Talk to it: ${name}`} onClick={() => talkTo(name)}>
          Talk to it
        </button>
        {children}
        {mayChange && !asking && (
          <button type="button" class="small" data-test="unload" aria-label={`Unload ${name}`} onClick={() => setAsking(true)}>
            Unload…
          </button>
        )}
        {asking && (
          <span class="sure" role="group" aria-label={`Unload ${name}?`}>
            <span class="hint">{requests > 0 ? `It goes when ${plural(requests, "request")} with it ended.` : "It leaves memory."}</span>
            <button type="button" class="small primary" data-test="unload-sure" disabled={busy} ref={focus} onClick={unload}>
              {busy ? "Unloading…" : "Unload it"}
            </button>
            <button type="button" class="small" disabled={busy} onClick={() => setAsking(false)}>
              Keep it
            </button>
          </span>
        )}
      </div>
    </>
  );
}

function focus(button: HTMLButtonElement | null): void {
  button?.focus();
}

function farewell({ name, freed_bytes: freed, draining }: Unloaded): string {
  if (draining || freed === null) return `${name} is unloaded; its memory comes back when the last request with it has ended.`;
  return freed > 0 ? `${name} is unloaded: ${bytes(freed)} came back.` : `${name} is unloaded.`;
}

/** A conversation with the adapter alone. */
function talkTo(name: string): void {
  begin();
  const open = current.value;
  if (open) change(open.id, (one) => ({ ...one, columns: [newColumn(name)] }));
  location.hash = "#chat";
}
