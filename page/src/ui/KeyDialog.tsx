import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { key, keyWanted, setKey } from "../api";
import { Field } from "./Field";

/** Asks for the API key when the server has refused to go on without one. */
export function KeyDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const [value, setValue] = useState("");
  const [remember, setRemember] = useState(false);
  const why = keyWanted.value;
  const ours = useRef(false); // the event of a close comes later, and a key may be wanted again by then
  useLayoutEffect(() => {
    if (why !== null && !dialog.current?.open) {
      setValue(key.value);
      dialog.current?.showModal();
    } else if (why === null && dialog.current?.open) {
      ours.current = true;
      dialog.current.close();
    }
  }, [why]);

  const closed = () => {
    if (!ours.current) keyWanted.value = null;
    ours.current = false;
  };
  const submit = (event: Event) => {
    event.preventDefault();
    setKey(value, remember);
  };
  return (
    <dialog ref={dialog} class="sheet dialog" aria-labelledby="key-title" onClose={closed}>
      <form onSubmit={submit}>
        <h2 id="key-title">A key, please</h2>
        <p class="hint">{why}</p>
        <Field secret label="API key" test="key" value={value} set={setValue} />
        <label class="check">
          <input type="checkbox" checked={remember} onChange={(event) => setRemember(event.currentTarget.checked)} />
          <span>Remember it on this device (else for this tab)</span>
        </label>
        <div class="row end">
          <button type="button" class="quiet" onClick={() => (keyWanted.value = null)}>
            Not now
          </button>
          <button type="submit" class="primary" data-test="key-save">
            Go on
          </button>
        </div>
      </form>
    </dialog>
  );
}
