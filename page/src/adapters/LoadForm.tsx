// Load an adapter from a folder that the server may read, or from the hub where it may.
import { useState } from "preact/hooks";
import { messageOf, postJson } from "../api";
import { Field } from "../ui/Field";
import type { FormProps } from "./AddAdapter";
import { changed, type LoadReport } from "./listing";

export function LoadForm({ list, replacing, loaded }: FormProps) {
  const [name, setName] = useState(replacing);
  const [path, setPath] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const taken = list.data.some((one) => one.name === name.trim());
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const body = { lora_name: name.trim(), lora_path: path.trim(), load_inplace: taken };
      const report = await postJson<LoadReport>("v1/load_lora_adapter", body);
      loaded(report, taken ? "replaced" : "loaded");
      setPath("");
      setName(replacing);
      await changed();
    } catch (fault) {
      setError(messageOf(fault));
    }
    setBusy(false);
  };
  return (
    <form class="load" onSubmit={submit}>
      <Field
        label={
          <>
            Folder, below one that <code>--lora-root</code> names; or a hub id, where <code>--lora-hub</code> allows it
          </>
        }
        required
        dir="ltr"
        test="load-path"
        value={path}
        set={setPath}
      />
      <Field label="Name" required dir="auto" test="load-name" value={name} set={setName} />
      {error !== null && (
        <p class="fault" role="alert" data-test="load-error">
          {error}
        </p>
      )}
      <div class="row end">
        <button type="submit" class="primary" disabled={busy} data-test="load">
          {busy ? "Loading…" : taken ? "Replace" : "Load"}
        </button>
      </div>
    </form>
  );
}
