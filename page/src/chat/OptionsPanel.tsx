import { baseName } from "../server";
import { change } from "../store";
import { parse } from "./request";
import type { Conversation, Options } from "./types";

type Numeric = { [N in keyof Options]: Options[N] extends number | null ? N : never }[keyof Options];

// [name, label, step, least, most, hint]
const NUMBERS: [Numeric, string, string, number | undefined, number | undefined, string][] = [
  ["temperature", "Temperature", "0.1", 0, 2, "0 takes the likeliest token"],
  ["max_tokens", "Most tokens", "1", 1, undefined, "as many as fit, if empty"],
  ["top_p", "top_p", "0.05", 0, 1, "the likeliest that make up this share"],
  ["top_k", "top_k", "1", 0, undefined, "so many of the likeliest; 0: all"],
  ["min_p", "min_p", "0.01", 0, 1, "at least this share of the likeliest's probability"],
  ["seed", "Seed", "1", undefined, undefined, "the same seed, the same answer"],
  ["presence_penalty", "Presence penalty", "0.1", -2, 2, "over tokens that the answer has"],
  ["frequency_penalty", "Frequency penalty", "0.1", -2, 2, "by how often it has them"],
  ["repetition_penalty", "Repetition penalty", "0.05", 0.05, undefined, "over the prompt's tokens too; 1: none"],
];

const SCHEMA = '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}';
const TOOLS =
  '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

/** What every request of this conversation asks for. */
export function OptionsPanel({ conversation, close }: { conversation: Conversation; close: () => void }) {
  const { id, options } = conversation;
  const set = (given: Partial<Options>) => change(id, (one) => ({ ...one, options: { ...one.options, ...given } }));
  return (
    <aside class="options" aria-label="Options">
      <div class="row">
        <h2>Options</h2>
        <button type="button" class="quiet drawer-close" aria-label="Close the options" onClick={close}>
          ×
        </button>
      </div>
      <label class="field">
        <span>System prompt</span>
        <textarea
          rows={3}
          dir="auto"
          data-test="system"
          value={options.system}
          placeholder={`What ${baseName.value || "the model"} is told first`}
          onInput={(event) => set({ system: event.currentTarget.value })}
        />
      </label>
      <label class="check">
        <input
          type="checkbox"
          data-test="shade"
          checked={options.logprobs}
          onChange={(event) => set({ logprobs: event.currentTarget.checked })}
        />
        <span>Shade tokens by how unlikely they were; point at one to see what else there was</span>
      </label>
      <details open>
        <summary>Sampling</summary>
        <div class="numbers">
          {NUMBERS.map(([name, label, step, least, most, hint]) => (
            <label key={name} class="field" title={hint}>
              <span>{label}</span>
              <input
                type="number"
                inputMode="decimal"
                step={step}
                min={least}
                max={most}
                placeholder="default"
                data-test={`option-${name}`}
                value={options[name] ?? ""}
                onInput={(event) => {
                  const value = event.currentTarget.valueAsNumber;
                  set({ [name]: Number.isFinite(value) ? value : null });
                }}
              />
            </label>
          ))}
        </div>
        <label class="field">
          <span>Stop at (one text a line)</span>
          <textarea rows={2} data-test="option-stop" value={options.stop} onInput={(event) => set({ stop: event.currentTarget.value })} />
        </label>
      </details>
      <details open={options.schema !== ""}>
        <summary>Shape: a JSON schema</summary>
        <JsonField label="JSON schema of the answer" name="schema" example={SCHEMA} value={options.schema} set={(schema) => set({ schema })} />
      </details>
      <details open={options.tools !== ""}>
        <summary>Tools</summary>
        <JsonField label="Tools, as OpenAI's API has them" name="tools" example={TOOLS} value={options.tools} set={(tools) => set({ tools })} />
        <label class="field">
          <span>Whether they are called</span>
          <select value={options.toolChoice} onChange={(event) => set({ toolChoice: event.currentTarget.value as Options["toolChoice"] })}>
            <option value="auto">as the model likes</option>
            <option value="required">always</option>
            <option value="none">never</option>
          </select>
        </label>
      </details>
    </aside>
  );
}

interface JsonProps {
  label: string;
  name: string;
  example: string;
  value: string;
  set: (value: string) => void;
}

function JsonField({ label, name, example, value, set }: JsonProps) {
  let problem = "";
  try {
    if (value.trim()) parse(value, "This");
  } catch (error) {
    problem = (error as Error).message;
  }
  return (
    <>
      <label class="field">
        <span>{label}</span>
        <textarea
          class="mono"
          rows={5}
          spellcheck={false}
          data-test={`option-${name}`}
          aria-invalid={problem !== ""}
          value={value}
          onInput={(event) => set(event.currentTarget.value)}
        />
      </label>
      {problem && <p class="error hint">{problem}</p>}
      {!value && (
        <button type="button" class="quiet small" onClick={() => set(JSON.stringify(JSON.parse(example), null, 2))}>
          Begin with an example
        </button>
      )}
    </>
  );
}
