export function Chat() {
  return <h1 class="unseen">Playground</h1>;
}
