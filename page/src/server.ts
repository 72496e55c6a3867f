// What the server says of itself: its models, and what they take.
import { computed, effect, signal } from "@preact/signals";
import { ApiError, getJson, isAbort, messageOf, session } from "./api";

/** One of GET /v1/models: the base model, an adapter (it has a parent) or a mixture. */
export interface Model {
  id: string;
  parent: string | null;
  root: string | null;
  max_model_len?: number;
}

/** Of GET /server_info. */
export interface Info {
  version: string;
  model: string;
  served_model_names: string[];
  max_model_len: number;
  dtype: string;
  device: string;
  images: boolean;
  adapters: boolean;
  server: { max_n: number };
}

export const models = signal<Model[]>([]);
export const info = signal<Info | null>(null);
export const trouble = signal<string | null>(null);
export const baseName = computed(() => info.value?.model ?? models.value.find((one) => !one.parent)?.id ?? "");

/** Ask for models and facts again. */
export async function refresh(): Promise<void> {
  try {
    const [list, facts] = await Promise.all([getJson<{ data: Model[] }>("v1/models"), getJson<Info>("server_info")]);
    models.value = list.data;
    info.value = facts;
    trouble.value = null;
  } catch (error) {
    if (isAbort(error) || (error instanceof ApiError && (error.status === 0 || error.status === 401))) return;
    trouble.value = messageOf(error);
  }
}

effect(() => {
  session.value; // a new key, or the server came back
  void refresh();
});
