// The page: a head with three views, a banner where the server is gone, a dialog where a key is needed.
import "./style.css";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { AdaptersView } from "./adapters/Adapters";
import { Chat } from "./chat/Chat";
import { EngineView } from "./engine/Engine";
import { VIEWS, view, type View } from "./route";
import { info } from "./server";
import { Banner } from "./ui/Banner";
import { KeyDialog } from "./ui/KeyDialog";
import { ThemeSwitch } from "./ui/ThemeSwitch";

const NAMES: Record<View, string> = { chat: "Playground", engine: "Engine", adapters: "Adapters" };
const SHOWN: Record<View, () => preact.JSX.Element> = { chat: Chat, engine: EngineView, adapters: AdaptersView };

function Page() {
  const Shown = SHOWN[view.value];
  useEffect(() => {
    document.title = `${NAMES[view.value]} · quire`;
  }, [view.value]);
  return (
    <>
      <a class="skip" href="#main" onClick={toMain}>
        To the content
      </a>
      <header class="head">
        <a class="wordmark" href="#chat" aria-label="quire, to the playground">
          quire
        </a>
        <nav aria-label="Views">
          {VIEWS.map((name) => (
            <a key={name} href={`#${name}`} aria-current={view.value === name ? "page" : undefined} data-test={`view-${name}`}>
              {NAMES[name]}
            </a>
          ))}
        </nav>
        <p class="served" title={info.value ? `quire ${info.value.version}` : undefined}>
          {info.value && `${info.value.model} · ${info.value.dtype} · ${info.value.device}`}
        </p>
        <ThemeSwitch />
      </header>
      <Banner />
      <main id="main" tabIndex={-1} class={`view view-${view.value}`}>
        <Shown />
      </main>
      <KeyDialog />
    </>
  );
}

/** The address' # is the view's, so that the link sets the focus itself. */
function toMain(event: Event): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

const root = document.getElementById("app");
if (root) render(<Page />, root);
