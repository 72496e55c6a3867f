// What /v1/adapters says: every adapter, what of it was bound, the mixtures, and what an upload may be.
import { effect, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, getJson, isAbort, messageOf, session } from "../api";
import type { Tier } from "../engine/state";
import { refresh as refreshModels } from "../server";

/** What was loaded: layers that it changes, tensors that were bound, and how many of each kind of layer. */
export interface LoadReport {
  name: string;
  modules: number;
  ranks: number[];
  bytes: number;
  seconds: number;
  tensors: number;
  targets: Record<string, number>;
  alphas: number[];
  scalings: number[];
  base_model: string | null;
  /** Of an upload: files that an adapter does not need. */
  ignored_files?: string[];
}

export interface Adapter {
  name: string;
  source: string | null;
  parent: string | null;
  tier: Tier;
  bytes: number;
  requests: number;
  pinned: boolean;
  rank: number | null;
  alpha: number | null;
  scaling: number | null;
  base_model_name_or_path: string | null;
  report: LoadReport;
}

export interface Mixture {
  name: string;
  adapters: { name: string; weight: number }[];
}

export interface Listing {
  data: Adapter[];
  mixtures: Mixture[];
  /** Whether the server lets adapters come and go. */
  runtime_changes: boolean;
  uploads: { max_bytes: number; stored_bytes: number; store_bytes: number };
}

/** Of DELETE /v1/adapters/NAME. freed_bytes: null while a request still holds it. */
export interface Unloaded {
  name: string;
  freed_bytes: number | null;
  draining: boolean;
}

const OFTEN = 3000; // milliseconds

export const listing = signal<Listing | null>(null);
export const refused = signal<string | null>(null);

/** Ask for the list again. */
export async function look(): Promise<void> {
  try {
    listing.value = await getJson<Listing>("v1/adapters");
    refused.value = null;
  } catch (error) {
    if (isAbort(error) || (error instanceof ApiError && error.status === 0)) return;
    refused.value = messageOf(error);
  }
}

/** After a change: the list, and the models of the playground. */
export async function changed(): Promise<void> {
  await Promise.all([look(), refreshModels()]);
}

/** Keep the list new while a component is there and the page is visible. */
export function useListing(): void {
  useEffect(() => {
    const forget = effect(() => {
      session.value; // a new key, or the server came back
      void look();
    });
    const timer = window.setInterval(() => {
      if (!document.hidden && refused.value === null) void look();
    }, OFTEN);
    return () => {
      forget();
      window.clearInterval(timer);
    };
  }, []);
}
