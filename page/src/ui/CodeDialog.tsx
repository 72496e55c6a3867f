import { useLayoutEffect, useRef, useState } from "preact/hooks";

/** Code to be taken elsewhere. */
export function CodeDialog({ title, text, close }: { title: string; text: string; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const field = useRef<HTMLTextAreaElement>(null);
  const [copied, setCopied] = useState(false);
  // At once: keys that come before the next frame are the dialog's, too.
  useLayoutEffect(() => dialog.current?.showModal(), []);
  const copy = async () => {
    field.current?.select();
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
    } catch {
      setCopied(false); // not on a secure origin: it is selected, and Ctrl-C copies it
    }
  };
  return (
    <dialog ref={dialog} class="sheet dialog code" aria-label={title} onClose={close} data-test="code">
      <h2>{title}</h2>
      <textarea ref={field} class="mono" readonly rows={18} spellcheck={false} aria-label={title} value={text} data-test="code-text" />
      <div class="row end">
        <span class="hint" role="status">{copied ? "Copied." : ""}</span>
        <button type="button" class="quiet" onClick={() => dialog.current?.close()}>
          Close
        </button>
        <button type="button" class="primary" data-test="copy" onClick={() => void copy()}>
          Copy
        </button>
      </div>
    </dialog>
  );
}
