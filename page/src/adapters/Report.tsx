// What was read and bound when an adapter was loaded.
import { bytes, count, milliseconds, plural } from "../format";
import { last, targetsInOrder } from "./files";
import type { LoadReport } from "./listing";

export function Report({ report }: { report: LoadReport }) {
  const ignored = report.ignored_files ?? [];
  return (
    <div class="report" data-test="load-report">
      <p>
        {plural(report.tensors, "tensor")}, all of them bound to {plural(report.modules, "layer")}; {bytes(report.bytes)} in{" "}
        {milliseconds(report.seconds * 1000)}.
      </p>
      <ul class="targets">
        {targetsInOrder(report.targets).map(([name, layers]) => (
          <li key={name}>
            <code>{name}</code> × {count(layers)}
          </li>
        ))}
      </ul>
      <p class="hint">
        {[
          several("rank", report.ranks),
          several("alpha", report.alphas),
          several("scaling", report.scalings),
          report.base_model === null ? "" : `trained on ${report.base_model}`,
        ]
          .filter((part) => part !== "")
          .join(" · ")}
      </p>
      {ignored.length > 0 && <p class="hint">Not needed, and not kept: {ignored.map(last).join(", ")}.</p>}
    </div>
  );
}

function several(word: string, values: number[]): string {
  if (values.length === 0) return "";
  return `${word} ${values.map((value) => Number(value.toFixed(4))).join(", ")}`;
}
