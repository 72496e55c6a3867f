import "./chat.css";
import { useEffect, useState } from "preact/hooks";
import { kept } from "../settings";
import { current, load, loaded, notKept } from "../store";
import { ColumnHeads } from "./Columns";
import { Composer } from "./Composer";
import { addPictures } from "./pictures";
import { OptionsPanel } from "./OptionsPanel";
import { spoken, stop } from "./run";
import { Sidebar } from "./Sidebar";
import { Turns } from "./Turns";

const wide = window.matchMedia("(min-width: 64rem)");
const showList = kept("list", wide.matches);
const showOptions = kept("options", wide.matches);
/** On a narrow screen they lie over the conversation. */
const makeRoom = () => {
  if (!wide.matches) showList.value = showOptions.value = false;
};
wide.addEventListener("change", makeRoom);
makeRoom();

void load();

/** The playground: conversations on the left, what is asked of the server on the right, the columns between them. */
export function Chat() {
  const [dropping, setDropping] = useState(false);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const shown = current.value;
      if (event.key === "Escape" && shown && !document.querySelector("dialog[open]")) stop(shown);
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const conversation = current.value;
  if (!loaded.value || !conversation) return <h1 class="unseen">Playground</h1>;

  const onDrop = (event: DragEvent) => {
    event.preventDefault();
    setDropping(false);
    void addPictures(event.dataTransfer?.files);
  };
  return (
    <div
      class={`chat ${showList.value ? "with-list" : ""} ${showOptions.value ? "with-options" : ""} ${dropping ? "dropping" : ""}`}
      onDragOver={(event) => {
        event.preventDefault();
        setDropping(true);
      }}
      onDragLeave={(event) => event.currentTarget === event.target && setDropping(false)}
      onDrop={onDrop}
    >
      <h1 class="unseen">Playground</h1>
      {showList.value && <Sidebar close={() => (showList.value = false)} />}
      <section class="desk" aria-label="Conversation">
        <div class="bar">
          <Toggle of={showList} name="Conversations" />
          <ColumnHeads conversation={conversation} />
          <Toggle of={showOptions} name="Options" />
        </div>
        {notKept.value && <p class="note">{notKept.value}</p>}
        <Turns key={conversation.id} conversation={conversation} />
        <Composer key={`composer-${conversation.id}`} conversation={conversation} />
      </section>
      {showOptions.value && <OptionsPanel key={conversation.id} conversation={conversation} close={() => (showOptions.value = false)} />}
      <p class="unseen" role="status" aria-live="polite">
        {spoken.value}
      </p>
    </div>
  );
}

function Toggle({ of, name }: { of: typeof showList; name: string }) {
  return (
    <button
      type="button"
      class="quiet small toggle"
      aria-expanded={of.value}
      data-test={`toggle-${name.toLowerCase()}`}
      onClick={() => (of.value = !of.value)}
    >
      {name}
    </button>
  );
}
