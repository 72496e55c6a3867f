import { useState } from "preact/hooks";
import { key, messageOf } from "../api";
import { info } from "../server";
import { conversations } from "../store";
import { CodeDialog } from "../ui/CodeDialog";
import { pigmentOf } from "../ui/pigment";
import { PlainText, ShadedText, shading } from "./AnswerText";
import { asCurl, asPython } from "./code";
import { bodyOf } from "./request";
import { answer as answerAgain, giveResults, place, running } from "./run";
import type { Answer, Column, Conversation, ToolCall, Turn } from "./types";

interface Props {
  conversation: Conversation;
  turn: Turn;
  column: Column;
  last: boolean;
}

/** What one column says to one prompt. */
export function AnswerSheet({ conversation, turn, column, last }: Props) {
  const live = running.value.get(place(turn.id, column.id));
  const answer = live?.answer.value ?? turn.answers[column.id];
  const retry = () => void answerAgain(conversation.id, turn.id, column.id);
  if (!answer)
    return (
      <div class="answer sheet none">
        {last && (
          <button type="button" class="small" onClick={retry}>
            Ask here too
          </button>
        )}
      </div>
    );
  const shaded = shading.value && answer.tokens.length > 0 && answer.calls.length === 0;
  return (
    <div
      role="group"
      class={`answer sheet ${answer.model.startsWith("mix:") ? "pigment-7" : pigmentOf(answer.model)} ${live ? "live" : ""}`}
      aria-label={`Answer of ${answer.model}`}
      aria-busy={live !== undefined}
      data-test="answer"
    >
      <h2 class="who">{answer.model}</h2>
      {answer.reasoning && (
        <details class="reasoning">
          <summary>Reasoning</summary>
          <PlainText text={answer.reasoning} />
        </details>
      )}
      <div class="said" data-test="answer-text">
        {shaded ? <ShadedText tokens={answer.tokens} text={answer.text} /> : answer.text && <PlainText text={answer.text} />}
        {live && <span class="cursor" aria-hidden="true" />}
      </div>
      {answer.calls.length > 0 && (
        <Calls calls={answer.calls} give={last && !live ? (results) => giveResults(conversation.id, column.id, results) : null} />
      )}
      {answer.error && <p class="error hint" role="alert" data-test="answer-error">{answer.error}</p>}
      {!live && <Foot answer={answer} {...{ conversation, turn, column }} retry={last ? retry : null} />}
    </div>
  );
}

/** Functions that the model called, and a place for what they return. */
function Calls({ calls, give }: { calls: ToolCall[]; give: ((results: Record<string, string>) => void) | null }) {
  const [results, setResults] = useState<Record<string, string>>({});
  return (
    <form
      class="calls"
      onSubmit={(event) => {
        event.preventDefault();
        give?.(Object.fromEntries(calls.map((call) => [call.id, results[call.id] ?? ""])));
      }}
    >
      {calls.map((call) => (
        <div key={call.id} class="call" data-test="call">
          <div class="signature">
            <PlainText text={`${call.name}(${call.arguments})`} />
          </div>
          {give && (
            <input
              aria-label={`What ${call.name} returns`}
              placeholder="what it returns"
              value={results[call.id] ?? ""}
              onInput={(event) => setResults({ ...results, [call.id]: event.currentTarget.value })}
            />
          )}
        </div>
      ))}
      {give && (
        <button type="submit" class="small">
          Give the results
        </button>
      )}
    </form>
  );
}

const latest = (conversation: Conversation): Conversation =>
  conversations.value.find((one) => one.id === conversation.id) ?? conversation;

const SHORTEST = 30; // milliseconds in which tokens come: of fewer there is no rate to tell
const ENDS: Record<string, string> = { length: "cut off at the most tokens", stopped: "stopped", content_filter: "filtered" };

interface FootProps extends Omit<Props, "last"> {
  answer: Answer;
  retry: (() => void) | null;
}

/** Tokens and times, and what can be done with the answer. */
function Foot({ answer, conversation, turn, column, retry }: FootProps) {
  const [code, setCode] = useState<{ title: string; text: string } | null>(null);
  const show = (title: string, write: typeof asCurl) => {
    try {
      // As it was asked: the conversation's options may be others by now.
      const body = bodyOf({ ...latest(conversation), options: answer.options }, column, turn.id);
      setCode({ title, text: write({ ...body, model: answer.model }, key.value !== "", new URL("v1", location.href).href) });
    } catch (error) {
      setCode({ title, text: messageOf(error) });
    }
  };
  return (
    <footer class="foot">
      <span class="number" data-test="timings">
        {factsOf(answer).join(" · ")}
      </span>
      <span class="row tools">
        {retry && (
          <button type="button" class="quiet small" data-test="retry" onClick={retry}>
            Again
          </button>
        )}
        <button type="button" class="quiet small" data-test="as-curl" onClick={() => show("As curl", asCurl)}>
          curl
        </button>
        <button type="button" class="quiet small" data-test="as-python" onClick={() => show("As Python", asPython)}>
          Python
        </button>
      </span>
      {code && <CodeDialog {...code} close={() => setCode(null)} />}
    </footer>
  );
}

function factsOf({ usage, first, total, finish }: Answer): string[] {
  const facts: string[] = [];
  if (usage) {
    const cached = usage.cached ? ` (${usage.cached} cached)` : "";
    facts.push(`${usage.prompt}${cached} → ${usage.output} tokens`);
  }
  if (first !== null) facts.push(`first after ${time(first)}`);
  if (usage && first !== null && total !== null && usage.output > 1 && total - first > SHORTEST)
    facts.push(`${((1000 * (usage.output - 1)) / (total - first)).toFixed(1)} tokens/s`);
  const end = finish ? ENDS[finish] : undefined;
  if (end) facts.push(finish === "length" && usage && info.value && usage.prompt + usage.output >= info.value.max_model_len ? "cut off: the context is full" : end);
  return facts;
}

const time = (milliseconds: number): string =>
  milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
