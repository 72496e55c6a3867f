// The engine, live: what /v1/engine/events says, four times a second.
import "./engine.css";
import { useState } from "preact/hooks";
import { age } from "../format";
import { kept } from "../settings";
import { BlockMap } from "./BlockMap";
import { link, seen, useEngineFeed } from "./feed";
import type { ColourBy } from "./owners";
import { Rates } from "./Rates";
import { Requests } from "./Requests";
import type { EngineState, History } from "./state";
import { Tiers } from "./Tiers";
import { Timeline } from "./Timeline";

const colourBy = kept<ColourBy>("engine.colours", "request");

export function EngineView() {
  useEngineFeed();
  const [held, setHeld] = useState<History | null>(null);
  const shown = held ?? seen.value;
  return (
    <div class="engine">
      <div class="engine-head">
        <h1>Engine</h1>
        <LinkState held={held !== null} state={shown?.state} />
        {shown && (
          <button
            type="button"
            class="quiet"
            aria-pressed={held !== null}
            data-test="hold"
            onClick={() => setHeld(held ? null : seen.value)}
          >
            {held ? "Go on" : "Hold still"}
          </button>
        )}
      </div>
      {shown && link.value.kind === "refused" && <p class="notice">{link.value.why}</p>}
      {shown ? <Picture {...shown} /> : <Nothing />}
    </div>
  );
}

function Picture({ state, steps, rates }: History) {
  const [chosen, setChosen] = useState<number | null>(null);
  const [pointed, setPointed] = useState<number | null>(null);
  const known = (number: number | null) => (state.requests.some((one) => one.number === number) ? number : null);
  const marked = known(pointed) ?? known(chosen);
  const by = colourBy.value;
  return (
    <>
      {state.sleeping && (
        <p class="notice" role="status">
          The engine sleeps: its weights and blocks are given back to the system until it is woken up.
        </p>
      )}
      <Rates rates={rates} />
      <div class="sheet">
        <ColourSwitch />
        {state.pools.map((pool) => (
          <BlockMap key={pool.name} {...{ pool, requests: state.requests, by, marked }} />
        ))}
      </div>
      <div class="sheet">
        <Timeline steps={steps} />
      </div>
      <div class="pair">
        <div class="sheet">
          <Requests
            requests={state.requests}
            more={state.more_requests ?? 0}
            seats={state.engine.max_num_seqs}
            {...{ by, chosen }}
            point={setPointed}
            choose={setChosen}
          />
        </div>
        <div class="sheet">
          <Tiers adapters={state.adapters} more={state.more_adapters ?? 0} />
        </div>
      </div>
    </>
  );
}

function ColourSwitch() {
  return (
    <fieldset class="switch">
      <legend>Colours by</legend>
      {(["request", "adapter"] as const).map((by) => (
        <label key={by}>
          <input
            type="radio"
            name="colours"
            checked={colourBy.value === by}
            data-test={`colours-${by}`}
            onChange={() => (colourBy.value = by)}
          />
          <span>{by}</span>
        </label>
      ))}
    </fieldset>
  );
}

function LinkState({ held, state }: { held: boolean; state: EngineState | undefined }) {
  const { kind } = link.value;
  const up = state ? ` · up ${age(state.time)}` : "";
  const text = held ? "held still" : kind === "live" ? `live${up}` : kind === "connecting" ? "connecting" : "not connected";
  return (
    <p class={`link ${held ? "held" : kind}`} data-test="link">
      <i aria-hidden="true" /> {text}
    </p>
  );
}

function Nothing() {
  const now = link.value;
  return (
    <p class="empty" role="status">
      {now.kind === "refused" ? now.why : now.kind === "gone" ? "The server does not answer." : "Waiting for the engine's first word."}
    </p>
  );
}
