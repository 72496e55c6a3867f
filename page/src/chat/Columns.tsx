import { baseName, models } from "../server";
import { change } from "../store";
import { pigmentOf } from "../ui/pigment";
import { type Column, type Conversation, MOST_COLUMNS, newColumn, type Share } from "./types";

const MIXTURE = "\0mixture";

/** Who answers in each column. */
export function ColumnHeads({ conversation }: { conversation: Conversation }) {
  const { id, columns } = conversation;
  const put = (column: Column) =>
    change(id, (one) => ({ ...one, columns: one.columns.map((old) => (old.id === column.id ? column : old)) }));
  const add = () =>
    change(id, (one) => {
      const taken = new Set(one.columns.map((column) => column.model || baseName.value));
      const free = models.value.find((model) => !taken.has(model.id) && model.parent !== null);
      return { ...one, columns: [...one.columns, newColumn(free?.id ?? "")] };
    });
  const leave = (column: Column) => change(id, (one) => ({ ...one, columns: one.columns.filter((old) => old !== column) }));
  return (
    <div class="columns-heads" role="group" aria-label="Who answers">
      {columns.map((column, place) => (
        <Head key={column.id} column={column} place={place} put={put} leave={columns.length > 1 ? leave : null} />
      ))}
      {columns.length < MOST_COLUMNS && (
        <button type="button" class="quiet small add" data-test="add-column" title="Another column, for the same prompts" onClick={add}>
          + compare
        </button>
      )}
    </div>
  );
}

interface HeadProps {
  column: Column;
  place: number;
  put: (column: Column) => void;
  leave: ((column: Column) => void) | null;
}

function Head({ column, place, put, leave }: HeadProps) {
  const base = baseName.value;
  const value = column.mixture ? MIXTURE : column.model || base;
  const adapters = models.value.filter((model) => model.parent !== null && !model.id.startsWith("mix:"));
  const known = column.mixture !== null || models.value.some((model) => model.id === value);
  const choose = (chosen: string) => {
    if (chosen !== MIXTURE) return put({ ...column, model: chosen === base ? "" : chosen, mixture: null });
    const weight = adapters.length > 1 ? 0.5 : 1;
    put({ ...column, mixture: adapters.slice(0, 2).map(({ id }) => ({ name: id, weight })) });
  };
  return (
    <div class={`column-head ${column.mixture ? "pigment-7" : pigmentOf(column.model || null)}`} data-test="column">
      <div class="pick">
        <select
          aria-label={`Model of column ${place + 1}`}
          data-test="model-select"
          value={value}
          onChange={(event) => choose(event.currentTarget.value)}
        >
          {models.value.map((model) => (
            <option key={model.id} value={model.id}>
              {model.id}
            </option>
          ))}
          {!known && <option value={value}>{value} (not there)</option>}
          {adapters.length > 0 && <option value={MIXTURE}>a mixture …</option>}
        </select>
        {leave && (
          <button type="button" class="quiet small" aria-label={`Close column ${place + 1}`} data-test="close-column" onClick={() => leave(column)}>
            ×
          </button>
        )}
      </div>
      {column.mixture && (
        <Mixture shares={column.mixture} names={adapters.map((one) => one.id)} put={(mixture) => put({ ...column, mixture })} />
      )}
    </div>
  );
}

/** A slider for each adapter; 0 leaves it out. */
function Mixture({ shares, names, put }: { shares: Share[]; names: string[]; put: (shares: Share[]) => void }) {
  const weights = new Map(shares.map((share) => [share.name, share.weight]));
  const set = (name: string, weight: number) => {
    const all = new Map(weights).set(name, weight);
    put([...all].map(([one, value]) => ({ name: one, weight: value })));
  };
  return (
    <details class="mixture" open>
      <summary>Shares</summary>
      {names.map((name) => {
        const weight = weights.get(name) ?? 0;
        return (
          <label key={name} class={`share ${pigmentOf(name)}`}>
            <span class="share-name">{name}</span>
            <input
              type="range"
              min="-1"
              max="2"
              step="0.05"
              value={weight}
              data-test="share"
              onInput={(event) => set(name, Number(event.currentTarget.value))}
            />
            <output class="number">{weight.toFixed(2)}</output>
          </label>
        );
      })}
    </details>
  );
}
