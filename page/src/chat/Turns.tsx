import { useEffect, useRef } from "preact/hooks";
import { baseName, info, models } from "../server";
import { memo } from "../ui/memo";
import { AnswerSheet } from "./AnswerSheet";
import { PlainText } from "./AnswerText";
import { edit, suggest } from "./Composer";
import { running } from "./run";
import type { Conversation, Turn } from "./types";

const NEAR = 80; // pixels from the end: who is there wants to stay there

/** All turns of a conversation. Who reads at its end is kept there while an answer grows. */
export function Turns({ conversation }: { conversation: Conversation }) {
  const scroller = useRef<HTMLDivElement>(null);
  const inner = useRef<HTMLDivElement>(null);
  const stays = useRef(true);
  const { turns } = conversation;
  useEffect(() => {
    const outer = scroller.current;
    if (!outer || !inner.current) return;
    const follow = () => {
      if (stays.current) outer.scrollTop = outer.scrollHeight;
    };
    const observer = new ResizeObserver(follow);
    observer.observe(inner.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    stays.current = true; // a new prompt is looked at
    if (scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  }, [turns.length]);
  return (
    <div
      ref={scroller}
      class="turns"
      tabIndex={0}
      role="region"
      aria-label="Turns"
      onScroll={({ currentTarget: outer }) => {
        stays.current = outer.scrollHeight - outer.scrollTop - outer.clientHeight < NEAR;
      }}
    >
      <div ref={inner} class="turns-inner">
        {turns.length === 0 && <Welcome />}
        {turns.map((turn, place) => (
          <OneTurn key={turn.id} conversation={conversation} turn={turn} last={place === turns.length - 1} busy={isBusy(turn)} />
        ))}
      </div>
    </div>
  );
}

const isBusy = (turn: Turn): boolean => [...running.value.keys()].some((place) => place.startsWith(`${turn.id}/`));

interface TurnProps {
  conversation: Conversation;
  turn: Turn;
  last: boolean;
  busy: boolean;
}

const OneTurn = memo(
  ({ conversation, turn, last, busy }: TurnProps) => {
    const results = Object.values(turn.results);
    const columns = results.length ? conversation.columns.filter((column) => turn.results[column.id]) : conversation.columns;
    return (
      <article class="turn">
        <div class="asked" data-test="asked">
          {turn.pictures.length > 0 && (
            <div class="pictures">
              {turn.pictures.map((picture, place) => (
                <img key={place} src={picture.url} alt={picture.name || "A picture"} />
              ))}
            </div>
          )}
          {results.map((calls, place) => (
            <p key={place} class="hint">Results of tools: {Object.values(calls).join("; ")}</p>
          ))}
          {turn.text && <PlainText text={turn.text} />}
          {results.length === 0 && (
            <button type="button" class="quiet small edit" disabled={busy} data-test="edit" onClick={() => edit(turn)}>
              Edit
            </button>
          )}
        </div>
        <div class="answers" style={{ "--columns": columns.length }}>
          {columns.map((column) => (
            <AnswerSheet key={column.id} conversation={conversation} turn={turn} column={column} last={last} />
          ))}
        </div>
      </article>
    );
  },
  (before, after) =>
    before.turn === after.turn && before.last === after.last && before.busy === after.busy &&
    before.conversation.columns === after.conversation.columns && before.conversation.id === after.conversation.id,
);

// The model that comes with quire is small: it knows of colours and shapes, and says so best when asked about them.
const BUNDLED = "quire-demo";
const EXAMPLES = ["There is a red star and a blue circle. What color is the star?", "Who are you?"];

function Welcome() {
  const adapters = models.value.filter((model) => model.parent !== null).map((model) => model.id);
  return (
    <div class="welcome">
      <p class="greeting">A blank sheet.</p>
      <p>
        Ask <b>{baseName.value || "the model"}</b> something
        {info.value?.images ? ", or drop a picture here and ask about it" : ""}.
        {adapters.length > 0 && " “+ compare” puts an adapter beside it: both get the same prompt, in one batch."}
      </p>
      {baseName.value === BUNDLED && (
        <div class="examples">
          {EXAMPLES.map((text) => (
            <button key={text} type="button" data-test="example" onClick={() => suggest(text)}>
              {text}
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
