import { baseName, models } from "../server";

/** The class that colours whatever belongs to an adapter: the base model (null) is ink, others have pigments by the
 * order in which the server lists them. */
export function pigmentOf(adapter: string | null): string {
  if (adapter === null || adapter === baseName.value) return "pigment-0";
  const adapters = models.value.filter((model) => model.parent !== null);
  const place = adapters.findIndex((model) => model.id === adapter);
  return `pigment-${place < 0 ? 7 : 1 + (place % 7)}`;
}
