// An adapter of one's own: its files from this machine, or a folder that the server may read.
import { useState } from "preact/hooks";
import type { LoadReport, Listing } from "./listing";
import { LoadForm } from "./LoadForm";
import { Report } from "./Report";
import { UploadForm } from "./UploadForm";

interface Props {
  list: Listing;
  /** The name of the adapter that is to be replaced, or "". */
  replacing: string;
  done(): void;
  said(text: string): void;
}

export interface FormProps {
  list: Listing;
  replacing: string;
  loaded(report: LoadReport, how: string): void;
}

export function AddAdapter({ list, replacing, done, said }: Props) {
  const [report, setReport] = useState<LoadReport | null>(null);
  if (!list.runtime_changes) {
    return (
      <div class="sheet">
        <h2>Add an adapter</h2>
        <p class="hint">Adapters are not changed over HTTP here: start the server with --allow-runtime-lora.</p>
      </div>
    );
  }
  const loaded = (loadedReport: LoadReport, how: string) => {
    setReport(loadedReport);
    said(`${loadedReport.name} is ${how}: every tensor is bound.`);
  };
  return (
    <>
      {report && (
        <div class="sheet" data-test="loaded">
          <h2>
            <bdi>{report.name}</bdi> is there
          </h2>
          <Report report={report} />
        </div>
      )}
      <div class="sheet">
        <div class="row-head">
          <h2>{replacing ? "Replace" : "Add an adapter"}</h2>
          {replacing && (
            <button type="button" class="quiet small" onClick={done}>
              Add another instead
            </button>
          )}
        </div>
        {list.uploads.max_bytes > 0 ? (
          <UploadForm {...{ list, replacing, loaded }} />
        ) : (
          <p class="hint">This server takes no files: they lie where it can read them.</p>
        )}
      </div>
      <div class="sheet">
        <h2>From the server's folders</h2>
        <LoadForm {...{ list, replacing, loaded }} />
      </div>
    </>
  );
}
