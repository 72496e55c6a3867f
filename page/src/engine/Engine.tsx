import "./engine.css";

export function EngineView() {
  return <h1>Engine</h1>;
}
