import type { ComponentChildren } from "preact";

interface Props {
  label: ComponentChildren;
  value: string;
  set(value: string): void;
  /** For tests: the input's data-test. */
  test: string;
  /** Shown as dots. */
  secret?: boolean;
  dir?: "ltr" | "auto";
  required?: boolean;
}

/** One line to fill in, its label above. What is written there are names and keys: neither completed nor spelt. */
export function Field({ label, set, test, secret = false, ...others }: Props) {
  const given = {
    autocomplete: "off",
    spellcheck: false,
    "data-test": test,
    onInput: (event: { currentTarget: HTMLInputElement }) => set(event.currentTarget.value),
    ...others,
  };
  return (
    <label class="field">
      <span>{label}</span>
      {secret ? <input type="password" {...given} /> : <input {...given} />}
    </label>
  );
}
