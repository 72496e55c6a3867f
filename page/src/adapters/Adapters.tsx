// The adapters: what is loaded and what of it was bound; load, upload, replace, unload.
import "./adapters.css";
import { useRef, useState } from "preact/hooks";
import { bytes, plural } from "../format";
import { info } from "../server";
import { AdapterRow, MixtureRow } from "./AdapterRow";
import { AddAdapter } from "./AddAdapter";
import { type Listing, listing, refused, useListing } from "./listing";

export function AdaptersView() {
  useListing();
  const [replacing, setReplacing] = useState("");
  const [said, setSaid] = useState("");
  const adding = useRef<HTMLElement>(null);
  const list = listing.value;
  const replace = (name: string) => {
    setReplacing(name);
    adding.current?.scrollIntoView({ block: "nearest" });
    adding.current?.querySelector<HTMLElement>("[data-test=upload-name]")?.focus();
  };
  return (
    <div class="adapters">
      <div class="adapters-head">
        <h1>Adapters</h1>
        {list && <p class="hint">{summary(list)}</p>}
      </div>
      <p class="happened" role="status" tabIndex={-1} data-test="happened">
        {said}
      </p>
      {refused.value !== null && <p class="notice">{refused.value}</p>}
      <div class="sides">
        <section aria-label="Loaded adapters">
          {list && <Loaded list={list} said={setSaid} replace={replace} />}
        </section>
        {list && (
          <aside ref={adding} aria-label="Add an adapter">
            <AddAdapter key={replacing} list={list} replacing={replacing} done={() => setReplacing("")} said={setSaid} />
          </aside>
        )}
      </div>
    </div>
  );
}

interface LoadedProps {
  list: Listing;
  said(text: string): void;
  replace(name: string): void;
}

function Loaded({ list, said, replace }: LoadedProps) {
  const { data, mixtures, runtime_changes: mayChange } = list;
  if (data.length + mixtures.length === 0) return <p class="sheet empty">{why(mayChange)}</p>;
  return (
    <ul class="rows">
      {data.map((adapter) => (
        <AdapterRow key={adapter.name} {...{ adapter, mayChange, said, replace }} />
      ))}
      {mixtures.map((mixture) => (
        <MixtureRow key={mixture.name} {...{ mixture, mayChange, said }} />
      ))}
    </ul>
  );
}

function why(mayChange: boolean): string {
  if (info.value && !info.value.adapters) return "This server serves no adapters: start it with --enable-lora.";
  return mayChange ? "No adapter is loaded. Drop one here beside, and it answers a second later." : "No adapter is loaded.";
}

function summary({ data, mixtures }: Listing): string {
  const parts = [plural(data.length, "adapter")];
  if (mixtures.length > 0) parts.push(plural(mixtures.length, "mixture"));
  const there = data.filter((one) => one.tier !== "disk").reduce((sum, one) => sum + one.bytes, 0);
  if (data.length > 0) parts.push(`${bytes(there)} in memory`);
  return parts.join(" · ");
}
