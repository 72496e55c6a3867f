import { keyWanted, online, retryNow } from "../api";
import { trouble } from "../server";

/** What is wrong with the server, if anything is. */
export function Banner() {
  const gone = !online.value;
  const text = gone ? "The server does not answer. What is here stays here; the page goes on when it is back." : trouble.value;
  return (
    <div class="banner-place" role="status" aria-live="polite">
      {text && keyWanted.value === null && (
        <div class="banner" data-test="banner">
          <span>{text}</span>
          {gone && (
            <button type="button" class="quiet" onClick={retryNow}>
              Try now
            </button>
          )}
        </div>
      )}
    </div>
  );
}
