import "./adapters.css";

export function AdaptersView() {
  return <h1>Adapters</h1>;
}
