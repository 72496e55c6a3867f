// Upload an adapter: files, a folder or a .zip, chosen or dropped; its progress, and what the server says of it.
import { useRef, useState } from "preact/hooks";
import { isAbort, messageOf, postForm } from "../api";
import { bytes, plural } from "../format";
import { Field } from "../ui/Field";
import type { FormProps } from "./AddAdapter";
import { chosenFiles, droppedFiles } from "./dropped";
import { choose, type Chosen, last, type Parcel } from "./files";
import { changed, type LoadReport } from "./listing";

export function UploadForm({ list, replacing, loaded }: FormProps) {
  const [name, setName] = useState(replacing);
  const [parcel, setParcel] = useState<Parcel | null>(null);
  const [sent, setSent] = useState<number | null>(null);
  const [error, setError] = useState<string | null>(null);
  const abort = useRef<AbortController | null>(null);
  const taken = list.data.some((one) => one.name === name.trim());
  const most = list.uploads.max_bytes;
  const tooLarge = parcel !== null && parcel.bytes > most;
  const ready = parcel !== null && parcel.problem === null && !tooLarge && sent === null;

  const take = (chosen: Chosen[]) => {
    const next = choose(chosen);
    setParcel(next);
    setError(null);
    if (name === "" && next.name !== "") setName(next.name);
  };
  const submit = async (event: Event) => {
    event.preventDefault();
    if (!ready) return;
    abort.current = new AbortController();
    setSent(0);
    setError(null);
    try {
      const form = formOf(name.trim(), taken, parcel);
      const report = await postForm<LoadReport>("v1/adapters", form, abort.current.signal, setSent);
      loaded(report, taken ? "replaced" : "loaded");
      setParcel(null);
      setName(replacing);
      await changed();
    } catch (fault) {
      if (!isAbort(fault)) setError(messageOf(fault));
    }
    setSent(null);
  };
  return (
    <form class="upload" data-test="upload" onSubmit={submit}>
      <Drop take={take} failed={setError} busy={sent !== null} />
      {parcel && <Contents parcel={parcel} />}
      {tooLarge && (
        <p class="fault" role="alert">
          These are {bytes(parcel.bytes)}, and the server takes {bytes(most)} (--max-adapter-upload-bytes).
        </p>
      )}
      <Field label="Name, by which requests ask for it" required dir="auto" test="upload-name" value={name} set={setName} />
      {taken && <p class="hint">It replaces the adapter of this name: requests that run end with the one that they began with.</p>}
      {error !== null && (
        <p class="fault" role="alert" data-test="upload-error">
          {error}
        </p>
      )}
      {sent !== null && <Sending part={sent} />}
      <div class="row end">
        {sent !== null && (
          <button type="button" data-test="upload-stop" onClick={() => abort.current?.abort()}>
            Stop
          </button>
        )}
        <button type="submit" class="primary" data-test="upload-send" disabled={!ready}>
          {taken ? "Upload and replace" : "Upload"}
        </button>
      </div>
    </form>
  );
}

function formOf(name: string, replaces: boolean, parcel: Parcel): FormData {
  const form = new FormData();
  form.append("lora_name", name);
  if (replaces) form.append("load_inplace", "true");
  for (const { path, file } of parcel.files) form.append("files", file, last(path));
  return form;
}

function Sending({ part }: { part: number }) {
  const whole = part >= 1;
  return (
    <div class="sending">
      <progress aria-label="Upload" max={1} value={whole ? undefined : part} data-test="upload-progress" />
      <span role="status">{whole ? "All is there: being read and bound…" : `${Math.floor(part * 10) * 10} % sent`}</span>
    </div>
  );
}

function Contents({ parcel }: { parcel: Parcel }) {
  const { files, leftOut, problem } = parcel;
  return (
    <div class="contents" data-test="upload-contents">
      {problem !== null && (
        <p class="fault" role="alert">
          {problem}
        </p>
      )}
      {files.length > 0 && (
        <ul>
          {files.slice(0, 64).map(({ path, file }) => (
            <li key={path}>
              <bdi class="mono">{last(path)}</bdi> <span class="hint">{bytes(file.size)}</span>
            </li>
          ))}
        </ul>
      )}
      {leftOut.length > 0 && (
        <p class="hint" title={leftOut.slice(0, 64).join("\n")}>
          {plural(leftOut.length, "other file")} {leftOut.length === 1 ? "is" : "are"} not sent.
        </p>
      )}
    </div>
  );
}

interface DropProps {
  take(chosen: Chosen[]): void;
  failed(why: string): void;
  busy: boolean;
}

/** Where files are dropped; two buttons for who has no mouse. */
function Drop({ take, failed, busy }: DropProps) {
  const [over, setOver] = useState(false);
  const files = useRef<HTMLInputElement>(null);
  const folder = useRef<HTMLInputElement>(null);
  const taken = (event: Event) => {
    const input = event.currentTarget as HTMLInputElement;
    if (input.files && input.files.length > 0) take(chosenFiles(input.files));
    input.value = ""; // the same choice again is one
  };
  const drop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    if (event.dataTransfer && !busy) droppedFiles(event.dataTransfer).then(take, (error) => failed(messageOf(error)));
  };
  return (
    <div
      class={over ? "drop over" : "drop"}
      data-test="upload-drop"
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={drop}
    >
      <p>Drop a PEFT folder here, its two files, or a .zip of them.</p>
      <div class="row">
        <button type="button" disabled={busy} onClick={() => folder.current?.click()}>
          Choose a folder
        </button>
        <button type="button" disabled={busy} onClick={() => files.current?.click()}>
          Choose files
        </button>
      </div>
      <input ref={files} hidden type="file" multiple aria-label="Files" data-test="upload-files" onChange={taken} />
      <input ref={folder} hidden type="file" {...{ webkitdirectory: true }} aria-label="Folder" data-test="upload-folder" onChange={taken} />
    </div>
  );
}
