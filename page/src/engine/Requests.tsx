// Who runs and who waits. A row marks its blocks in the map while it is pointed at, and for good once it is chosen.
import { age, count, plural } from "../format";
import { shownTheme } from "../settings";
import { pigmentOf } from "../ui/pigment";
import { colourOf, type ColourBy } from "./owners";
import { inOrder, STATES, type EngineRequest } from "./state";

interface Props {
  requests: EngineRequest[];
  more: number;
  by: ColourBy;
  seats: number;
  chosen: number | null;
  point(number: number | null): void;
  choose(number: number | null): void;
}

export function Requests({ requests, more, by, seats, chosen, point, choose }: Props) {
  const running = requests.filter((request) => request.state === "running").length;
  return (
    <section class="requests" aria-labelledby="requests-title">
      <div class="map-head">
        <h2 id="requests-title">Requests</h2>
        <p class="hint">
          <b data-test="running">{count(running)}</b> of {count(seats)} seats run, <b data-test="waiting">{count(requests.length - running + more)}</b> wait
        </p>
      </div>
      {requests.length === 0 ? (
        <p class="empty">
          Nobody asks for anything. Send a prompt in the <a href="#chat">playground</a>, and see its blocks fill here.
        </p>
      ) : (
        <div class="table-scroll" role="region" aria-labelledby="requests-title" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th scope="col">Request</th>
                <th scope="col">State</th>
                <th scope="col">Adapter</th>
                <th scope="col">Prompt tokens</th>
                <th scope="col" class="number">Answer</th>
                <th scope="col" class="number">Blocks</th>
                <th scope="col" class="number age">Age</th>
              </tr>
            </thead>
            <tbody onPointerLeave={() => point(null)}>
              {inOrder(requests).map((request) => (
                <Row key={request.number} {...{ request, by, chosen, point, choose }} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {more > 0 && <p class="hint">and {plural(more, "request")} more</p>}
    </section>
  );
}

function Row({ request, by, chosen, point, choose }: Omit<Props, "requests" | "more" | "seats"> & { request: EngineRequest }) {
  const theme = shownTheme.value;
  const colour = colourOf(request, by, theme, (adapter) => `var(--${pigmentOf(adapter)})`);
  const { label, why } = STATES[request.state] ?? { label: request.state, why: "" };
  const { number } = request;
  return (
    <tr data-test="request-row" data-state={request.state} onPointerEnter={() => point(number)}>
      <th scope="row">
        <button
          type="button"
          class="quiet chip"
          aria-pressed={chosen === number}
          aria-label={`Request ${number}: mark its blocks`}
          onFocus={() => point(number)}
          onBlur={() => point(null)}
          onClick={() => choose(chosen === number ? null : number)}
        >
          <i class="swatch" style={{ background: colour }} />#{number}
        </button>
      </th>
      <td>
        <span class={`state ${request.state}`} title={why}>
          {label}
        </span>
      </td>
      <td class="name">{request.adapter === null ? <span class="hint">base</span> : <bdi>{request.adapter}</bdi>}</td>
      <td>
        <Progress request={request} />
      </td>
      <td class="number">
        {count(request.output_tokens)}
        {request.sequences > 1 && <span class="hint"> in {count(request.sequences)}</span>}
      </td>
      <td class="number">{count(request.blocks)}</td>
      <td class="number age">{age(request.seconds)}</td>
    </tr>
  );
}

/** How much of a prompt is there: found in the cache, computed, still to do. */
function Progress({ request }: { request: EngineRequest }) {
  const whole = Math.max(1, request.prompt_tokens);
  const cached = Math.min(request.cached_tokens, request.prompt_tokens);
  const computed = Math.max(0, Math.min(request.computed_tokens, request.prompt_tokens) - cached);
  const width = (part: number) => ({ width: `${(100 * part) / whole}%` });
  const done = cached + computed;
  const title = `${count(cached)} tokens from the cache, ${count(computed)} computed`;
  const text = done < request.prompt_tokens ? `${count(done)} of ${count(request.prompt_tokens)}` : count(request.prompt_tokens);
  return (
    <span class="progress" title={title}>
      <span class="gauge" aria-hidden="true">
        <span class="cached" style={width(cached)} />
        <span class="computed" style={width(computed)} />
      </span>
      {text}
      {cached > 0 && <span class="unseen">, {count(cached)} of them from the cache</span>}
    </span>
  );
}
